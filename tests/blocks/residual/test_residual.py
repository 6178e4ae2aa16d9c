"""Residual connections of one stream: weighted sums and norms of sums, written out in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.residual.base import BlockLayer
from eqx_decoders.blocks.residual.residual import PostNorm, Weighted
from eqx_decoders.layers.mlp import LinearConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from tests.blocks.residual.common import run_residual
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.common import context, drawn
from tests.oracles import norm_by_hand, wide


NORM = LayerNormConfig(bias=False)


@pytest.mark.parametrize("normed", [True, False])
def test_each_branch_is_added_to_what_is_kept(normed):
    config = Weighted(keeps_normed=normed, stream_scales=(0.5, 1.5), layer_scales=(2.0, 3.0), gains=True)
    layers = dict(post_layers=(ed.ExtraLayerConfig(layer=LinearConfig(), pre_norm=NORM),))
    block = ed.BlockConfig(mixer=None, mlp=LinearConfig(), pre_mlp_norm=NORM, residual=config, **layers)
    block = drawn(lambda key, config=block: config.build(6, key=key))
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    want = wide(x)
    gains = block.residual.gains
    parts = ((block.pre_mlp_norm, block.mlp), (block.post_layers[0].pre_norm, block.post_layers[0].layer))
    for (norm, layer), gain, keep, add in zip(parts, gains, config.stream_scales, config.layer_scales, strict=True):
        read = np.apply_along_axis(lambda vector, norm=norm: norm_by_hand(norm, vector), -1, want)
        want = keep * wide(gain.scale) * (read if normed else want) + add * (read @ wide(layer.kernel))
    got, _, _ = eqx.filter_jit(block)(jnp.asarray(x), context(np.zeros((2, 3))))
    assert_close(got, want)


def test_a_number_for_each_branch():
    with refused(ed.ConfigError, "Weighted.stream_scales=(0.5,)"):
        Weighted(stream_scales=(0.5,)).build(4, branches=2, inner_dim=4, key=jax.random.key(0))


def test_each_sum_has_a_norm_but_those_of_branches_that_write_themselves():
    generator = np.random.default_rng(0)
    x, *matrices = (generator.normal(size=(2, 5, 6)) for _ in range(4))
    residual = PostNorm(norm=RMSNormConfig(eps=0.1)).build(6, branches=2, inner_dim=6, key=jax.random.key(0))
    residual = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), leaf.dtype), residual)
    branches = [
        BlockLayer("", lambda y, m=m: y * m.astype(np.float32), reads_streams=m is matrices[1]) for m in matrices
    ]
    got = run_residual(residual, jnp.asarray(x, jnp.float32), branches, lambda y: 2 * y, context(np.zeros((2, 5))))

    def normed(y, norm):
        return y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 0.1) * wide(norm.scale)

    x = normed(x + x * matrices[0], residual.norms[0])
    x = x + x * matrices[1]
    assert_close(got, 2 * normed(x + x * matrices[2], residual.norms[1]))
    assert PostNorm().norm == LayerNormConfig()
