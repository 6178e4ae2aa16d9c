"""AltUp and Laurel against a computation in NumPy, token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.residual.base import BlockLayer
from eqx_decoders.families.gemma.altup import AltUp, Laurel
from eqx_decoders.layers.norm import RMSNormConfig
from tests.blocks.residual.common import run_residual
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import context, drawn, normal
from tests.oracles import norm_by_hand, wide


EMBED, STREAMS = 6, 3
CONFIG = AltUp(streams=STREAMS, inner=Laurel(rank=4, norm=RMSNormConfig(eps=0.1)), norm=RMSNormConfig(eps=0.2))
NORM = drawn(lambda key: RMSNormConfig().build(EMBED), 5)
MATRICES = [0.6 * normal(EMBED, EMBED, seed=seed) for seed in range(3)]
CTX = context(np.broadcast_to(np.arange(5), (2, 5)))


def branches(streams: bool = False) -> list[BlockLayer]:
    """Return a mixer with a norm, an MLP, and a later layer; with `streams`, first a layer that reads all streams."""
    functions = [lambda y, m=m: jnp.tanh(y @ m) for m in MATRICES]
    names = ("mixer", "mlp", "post_layers.0")
    norms = (NORM, None, None)
    found = [BlockLayer(name, f, stream_norm=norm) for f, norm, name in zip(functions, norms, names, strict=True)]
    return [BlockLayer("pre_layers.0", lambda y: 0.5 * y, reads_streams=True), *found] if streams else found


def router_output(residual, x, weight):
    return wide(weight) @ np.tanh(wide(residual.router) @ norm_by_hand(residual.norm, x) / EMBED)


def token_by_hand(residual, x):
    """Compute one token; `x` has shape [streams, embed]."""
    mixer, mlp, after = (lambda y, m=m: np.tanh(y @ wide(m)) for m in MATRICES)
    mix = router_output(residual, x[0], residual.predict).reshape(STREAMS, STREAMS)
    p = np.stack([x[k] + sum(mix[k, j] * x[j] for j in range(STREAMS)) for k in range(STREAMS)])
    inner, n = residual.inner, norm_by_hand(NORM, p[0])
    laurel = n + norm_by_hand(inner.norm, n @ wide(inner.left) @ wide(inner.right))
    z = (p[0] + mixer(n) + laurel) / 2**0.5
    z = z + mlp(z)
    gain = 1 + router_output(residual, z, residual.correct)
    x = np.stack([p[k] + gain[k] * (z - p[0]) for k in range(STREAMS)])
    x[1:] += after(x[0] * wide(residual.scale))
    return x


def test_streams_without_maps_start_as_copies_and_end_as_their_mean():
    """As in multi-token prediction."""
    x = jnp.asarray(normal(2, 5, EMBED))
    assert_array_equal(CONFIG.expand(x), np.stack([x] * STREAMS, axis=2))
    streams = jnp.asarray(normal(2, 5, STREAMS, EMBED))
    assert_close(CONFIG.reduce(streams), np.asarray(streams).mean(axis=2))


@pytest.mark.slow(fast=("True",))
@pytest.mark.parametrize("streams", [False, True])
def test_streams_are_predicted_and_corrected(streams):
    residual = drawn(lambda key: CONFIG.build(EMBED, branches=3, inner_dim=EMBED, key=key))
    x = normal(2, 5, STREAMS, EMBED)
    want = np.array([[token_by_hand(residual, token * 1.5 if streams else token) for token in row] for row in wide(x)])
    assert_close(run_residual(residual, jnp.asarray(x), branches(streams), ctx=CTX), want, units=64)


def test_layer_after_the_others_reads_the_corrected_streams():
    residual = drawn(lambda key: CONFIG.build(EMBED, branches=3, inner_dim=EMBED, key=key))
    x = jnp.asarray(normal(2, 5, STREAMS, EMBED))
    *first, last = branches()
    plain = run_residual(residual, x, first, ctx=CTX)
    reader = BlockLayer("post_layers.0", lambda y: -y, reads_streams=True)
    assert not np.any(run_residual(residual, x, [*first, reader], ctx=CTX))
    assert not np.allclose(run_residual(residual, x, [*first, last], ctx=CTX), plain)


def test_mapped_streams_have_the_norm_of_the_first_stream():
    maps = drawn(lambda key: CONFIG.build_maps(EMBED, key=key))
    x, streams = normal(2, 5, EMBED), normal(2, 5, STREAMS, EMBED)

    def sized(y, like):
        return y * np.sqrt(np.mean(like**2, axis=-1, keepdims=True) / np.mean(y**2, axis=-1, keepdims=True))

    want = [sized(wide(x) @ wide(each.kernel), wide(x)) for each in maps.first]
    assert_close(maps.expand(jnp.asarray(x), CTX), np.stack([wide(x), *want], axis=2))
    first = wide(streams)[:, :, 0]
    want = [sized(wide(streams)[:, :, k] @ wide(each.kernel), first) for k, each in enumerate(maps.last, 1)]
    assert_close(maps.reduce(jnp.asarray(streams), CTX), np.mean([first, *want], axis=0))
    tiny = np.asarray(maps.expand(jnp.asarray(1e-8 * x), CTX))
    assert np.all(np.isfinite(tiny)) and np.abs(tiny[:, :, 1:]).max() < 1e-12


def test_refuses_a_single_stream():
    with refused(ed.ConfigError, "AltUp.streams=1"):
        AltUp(streams=1)
