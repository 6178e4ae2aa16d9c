"""Gated residual streams against their formula in NumPy, and in multi-token prediction."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import eqx_decoders as ed
from eqx_decoders.blocks.residual.base import BlockLayer
from eqx_decoders.families.qwen.gated_streams import GatedStreams
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.init import with_mtp
from tests.blocks.residual.common import run_residual
from tests.compare import assert_close
from tests.errors import refused
from tests.models import rich_decoder
from tests.oracles import sigmoid, wide


EMBED, STREAMS = 6, 3
CONFIG = GatedStreams(streams=STREAMS, rank=4, norm=RMSNormConfig(eps=0.01, offset=1.0))
CTX = ed.ForwardContext(positions=jnp.broadcast_to(jnp.arange(5), (2, 5)))
X = np.random.default_rng(1).normal(size=(2, 5, STREAMS, EMBED)).astype(np.float32)
MATRICES = np.random.default_rng(2).normal(size=(2, EMBED, EMBED)).astype(np.float32)


def randomized(module):
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0.2, 0.7, leaf.shape), leaf.dtype), module)


def mean_by_hand(mean, x):
    """Return the input of a layer, and the concatenated normalized streams."""
    n = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 0.01) * (1 + wide(mean.scale))
    flat = n.reshape(2, 5, -1)
    inner = flat @ wide(mean.down) / STREAMS
    gate = sigmoid((inner * sigmoid(inner)) @ wide(mean.up)).reshape(n.shape)
    return np.mean(gate * n, axis=2), flat


def test_residual_matches_the_formula():
    residual = randomized(CONFIG.build(EMBED, branches=2, inner_dim=EMBED, key=jax.random.key(0)))
    branches = [BlockLayer("", lambda y, m=m: jnp.tanh(y @ m)) for m in MATRICES]
    x = wide(X)
    for connection, matrix in zip(residual.connections, wide(MATRICES), strict=True):
        y, flat = mean_by_hand(connection.mean, x)
        gate = 2 * sigmoid(flat @ wide(connection.write) / STREAMS)
        x = x + gate[..., None] * np.tanh(y @ matrix)[:, :, None]
    assert_close(run_residual(residual, jnp.asarray(X), branches, ctx=CTX), x, units=64)
    every = BlockLayer("", lambda y: 2 * y, reads_streams=True)
    assert_close(run_residual(residual, jnp.asarray(X), [every], ctx=CTX), 3 * X)


def test_output_is_the_gated_mean_of_the_streams():
    maps = randomized(CONFIG.build_maps(EMBED, key=jax.random.key(0)))
    assert_close(maps.reduce(jnp.asarray(X), CTX), mean_by_hand(maps, wide(X))[0], units=32)
    assert_close(maps.expand(jnp.asarray(X[:, :, 0]), CTX), np.repeat(X[:, :, :1], STREAMS, axis=2))


def test_mtp_depths_read_all_streams():
    config = rich_decoder(2)
    blocks = tuple(dataclasses.replace(block, residual=CONFIG) for block in config.blocks)
    config = with_mtp(dataclasses.replace(config, blocks=blocks), 1)
    assert config.mtp is not None and config.mtp.all_streams
    with refused(ed.ConfigError, "all_streams=True", "GatedStreams.weighted_sum"):
        dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, all_streams=False))
    with refused(ed.ConfigError, "GatedStreams.streams=1"):
        GatedStreams(streams=1)
