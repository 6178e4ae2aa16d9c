"""The real-gated linear recurrent unit (RG-LRU) against loops."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_decoders.families.gemma.rg_lru import RGLRUConfig, _sqrt
from tests.compare import assert_allclose, assert_close
from tests.layers.common import context, drawn, normal
from tests.oracles import sigmoid, wide


def part(leaf) -> Any:
    return wide(leaf)


def by_hand(layer, x, positions, segments):
    """Compute token by token, with one state per document and without padding."""
    into = ((layer.value, layer.value_bias), (layer.gate, layer.gate_bias))
    stream, gate = (np.einsum("bte,ehv->bthv", x, part(matrix)) + part(bias) for matrix, bias in into)
    taps, config, out = part(layer.taps), layer.config, np.zeros((*x.shape[:2], layer.out.shape[2]))
    for b in range(len(x)):
        state, seen, document = np.zeros(taps.shape[:2]), [], None
        for t in np.flatnonzero(positions[b] >= 0):
            if segments[b, t] != document:
                state, seen, document = np.zeros_like(state), [], segments[b, t]
            seen.append(stream[b, t])
            value = part(layer.taps_bias)
            for tap, inputs in zip(reversed(range(config.taps)), reversed(seen), strict=False):
                value = value + taps[:, :, tap] * inputs
            chosen, kept = (
                sigmoid(np.einsum("hi,hiv->hv", value, part(weight)) + part(bias))
                for weight, bias in (
                    (layer.input_gate, layer.input_gate_bias),
                    (layer.decay_gate, layer.decay_gate_bias),
                )
            )
            decay = np.exp(-8 * kept * np.log1p(np.exp(part(layer.decay))))
            if positions[b, t] == 0:
                decay = np.zeros_like(decay)
            state = decay * state + np.sqrt(1 - decay**2) * chosen * value
            out[b, t] = np.einsum("hv,hve->e", state * np.maximum(gate[b, t], 0), part(layer.out))
    return out + part(layer.out_bias)


def test_layer_matches_a_loop():
    """Packed rows with padding, documents that start after position 0, and a second position 0 in a document."""
    config = RGLRUConfig(num_heads=2, value_dim=3, taps=3, activation="relu")
    layer, x = drawn(lambda key: config.build(5, key=key)), normal(3, 9, 5)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 3, 0], [1] * 9])
    positions = np.array([[0, 1, -1, 2, 0, 1, 2, 3, 4], [3, 4, 0, 1, 2, 3, 7, 8, -1], [0, 1, 2, 3, 0, 1, 2, 3, 4]])
    got, entries = eqx.filter_jit(layer)(jnp.asarray(x), context(positions, segments))
    real = positions >= 0
    assert_close(np.asarray(got)[real], by_hand(layer, wide(x), positions, segments)[real], units=64)
    assert entries["state"].steps.shape == (3, 9, 6) and config.token_products(100) == 12


def test_gradient_is_finite_without_decay():
    values, slopes = jax.vmap(jax.value_and_grad(_sqrt))(jnp.asarray([0.0, 1e-12, 0.25]))
    assert_allclose(values, [0.0, 1e-6, 0.5])
    assert_allclose(slopes, [1000.0, 1000.0, 1.0])
