"""The gated short convolution, against loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from tests.compare import assert_close
from tests.layers.common import context, drawn, normal
from tests.oracles import wide


def by_hand(layer, x, positions, segments):
    """Compute token by token, with the previous tokens of the document and without padding."""
    bias = 0.0 if layer.inputs_bias is None else wide(layer.inputs_bias)
    before, after, stream = np.moveaxis(np.einsum("bte,eic->btic", x, wide(layer.inputs)) + bias, 2, 0)
    out = np.zeros((*x.shape[:2], layer.out.shape[1]))
    taps = wide(layer.taps)
    for b, t in np.ndindex(x.shape[:2]):
        if positions[b, t] < 0:
            continue
        seen = [s for s in range(t + 1) if positions[b, s] >= 0 and segments[b, s] == segments[b, t]]
        mixed = np.zeros(taps.shape[0]) if layer.taps_bias is None else wide(layer.taps_bias)
        for tap, s in zip(reversed(range(taps.shape[1])), reversed(seen), strict=False):
            mixed = mixed + taps[:, tap] * before[b, s] * stream[b, s]
        out[b, t] = (after[b, t] * mixed) @ wide(layer.out)
    return out + (0.0 if layer.out_bias is None else wide(layer.out_bias))


@pytest.mark.slow(fast=("True",))
@pytest.mark.parametrize("bias", [False, True])
def test_layer_matches_a_loop(bias):
    """Packed rows with padding in between."""
    config = GatedConvolutionConfig(channels=5, taps=3, bias=bias)
    layer, x = drawn(lambda key: config.build(6, key=key)), normal(2, 9, 6)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 3, 0]])
    positions = np.array([[0, 1, -1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1, -1]])
    got, entries = layer(jnp.asarray(x), context(positions, segments))
    real = positions >= 0
    assert_close(np.asarray(got)[real], by_hand(layer, wide(x), positions, segments)[real], units=64)
    assert entries["stream"].inputs.shape == (2, 9, 5) and config.token_products(100) == 15
