"""A weighted residual connection against its sum written out in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.residual.residual import Weighted
from eqx_decoders.layers.mlp import LinearConfig
from eqx_decoders.layers.norm import LayerNormConfig
from tests.compare import assert_close
from tests.layers.common import context, drawn
from tests.oracles import norm_by_hand, wide


NORM = LayerNormConfig(bias=False)


@pytest.mark.parametrize("normed", [True, False])
def test_each_branch_is_added_to_what_is_kept(normed):
    config = Weighted(keeps_normed=normed, keep=(0.5, 1.5), add=(2.0, 3.0), gains=True)
    layers = dict(post_layers=(ed.ExtraLayerConfig(layer=LinearConfig(), pre_norm=NORM),))
    block = ed.BlockConfig(mixer=None, mlp=LinearConfig(), pre_mlp_norm=NORM, residual=config, **layers)
    block = drawn(lambda key, config=block: config.build(6, key=key))
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    want = wide(x)
    gains = block.residual.gains
    parts = ((block.pre_mlp_norm, block.mlp), (block.post_layers[0].pre_norm, block.post_layers[0].layer))
    for (norm, layer), gain, keep, add in zip(parts, gains, config.keep, config.add, strict=True):
        read = np.apply_along_axis(lambda vector, norm=norm: norm_by_hand(norm, vector), -1, want)
        want = keep * wide(gain.scale) * (read if normed else want) + add * (read @ wide(layer.kernel))
    got, _, _ = eqx.filter_jit(block)(jnp.asarray(x), context(np.zeros((2, 3))))
    assert_close(got, want)


def test_a_number_for_each_branch():
    with pytest.raises(ed.ConfigError, match=r"Weighted.keep=\(0.5,\) must have a number for each of the block's 2"):
        Weighted(keep=(0.5,)).build(4, branches=2, inner_dim=4, key=jax.random.key(0))
