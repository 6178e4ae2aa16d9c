"""Mamba-2 against loops."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from tests.compare import assert_close
from tests.layers.common import context, drawn, normal
from tests.oracles import silu, wide


def by_hand(layer, x, positions, segments):
    """Compute token by token, with one state per document and without padding."""
    config, part = layer.config, (lambda leaf: 0.0 if leaf is None else wide(leaf))
    names = ("gate", "value", "key", "query", "dt")
    biases = (part(getattr(layer, f"{name}_in_bias" if name == "dt" else f"{name}_bias")) for name in names)
    gate, *streams, dt = (
        scale * (np.tensordot(x, wide(getattr(layer, name)), 1) + bias)
        for name, bias, scale in zip(names, biases, config.in_scales, strict=True)
    )
    steps = np.clip(np.log1p(np.exp(dt + wide(layer.dt_bias))), config.dt_min, config.dt_max)
    taps = [wide(getattr(layer, f"{name}_taps")) for name in names[1:4]]
    taps_biases = [part(getattr(layer, f"{name}_taps_bias")) for name in names[1:4]]

    def normed(y):
        if config.norm is None:
            return y
        groups = y.reshape(config.num_groups, -1)
        groups = groups / np.sqrt(np.mean(groups**2, axis=1, keepdims=True) + config.eps)
        return groups.reshape(y.shape) * wide(layer.norm_scale)

    out = np.zeros((*x.shape[:2], layer.out.shape[2]))
    for b in range(len(x)):
        seen, document, state = [], None, 0.0
        for t in np.flatnonzero(positions[b] >= 0):
            if segments[b, t] != document:
                seen, document, state = [], segments[b, t], 0.0
            seen.append(t)
            mixed = []
            for stream, weights, bias in zip(streams, taps, taps_biases, strict=True):
                each = bias + np.zeros(weights.shape[:2])
                for tap, token in zip(reversed(range(config.taps)), reversed(seen), strict=False):
                    each = each + weights[..., tap] * stream[b, token]
                mixed.append(silu(each))
            value, key, query = mixed[0], *(np.repeat(y, config.num_heads // len(y), axis=0) for y in mixed[1:])
            fade = np.exp(-np.exp(wide(layer.a_log)) * steps[b, t])[:, None, None]
            state = fade * state + key[:, :, None] * (steps[b, t][:, None] * value)[:, None]
            answer = np.einsum("hk,hkv->hv", query, state) + wide(layer.skip)[:, None] * value
            opening = silu(gate[b, t])
            answer = normed(answer) * opening if config.norm == "before_gate" else normed(answer * opening)
            out[b, t] = np.einsum("hv,hve->e", answer, wide(layer.out))
    return out + part(layer.out_bias)


SCALES = (2.0, 0.5, 3.0, 0.25, 1.5)


@pytest.mark.slow(fast=("norm=None dt_max=0.6",))
@pytest.mark.parametrize(
    "options",
    [dict(in_bias=True, out_bias=True, in_scales=SCALES, norm="before_gate"), dict(norm=None, dt_max=0.6)],
)
def test_layer_matches_a_loop(options):
    """Packed rows with padding in between."""
    config = Mamba2Config(num_heads=4, value_dim=3, num_groups=2, key_dim=2, taps=3, eps=0.1, **options)
    layer, x = drawn(lambda key: config.build(5, key=key)), normal(2, 9, 5)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 3, 0]])
    positions = np.array([[0, 1, -1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1, -1]])
    got, _ = eqx.filter_jit(layer)(jnp.asarray(x), context(positions, segments))
    real = positions >= 0
    assert_close(np.asarray(got)[real], by_hand(layer, wide(x), positions, segments)[real], units=64)
