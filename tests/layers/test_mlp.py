"""Feed-forward layers and activations against NumPy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.mlp import ACTIVATIONS, MLPConfig, cut_gate
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.xielu import XIELU
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import context, drawn, normal
from tests.oracles import BY_HAND, mlp_by_hand, wide, xielu_by_hand


@pytest.mark.slow(fast=("gelu",))
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name):
    x = np.linspace(-6, 6, 49)
    want = np.array([BY_HAND[name](float(v)) for v in x])
    assert_allclose(ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(gated=False),
        dict(bias=True),
        dict(gated=False, bias=True),
        dict(fused=True),
        dict(fused=True, bias=True),
        dict(inner_norm=RMSNormConfig(eps=0.1)),
        dict(bias=True, gate_scale=2.0, out_scale=0.5),
        dict(activation_scale=1.7, up_offset=1.0, limit=0.3),
        dict(activation_scale=1.7, gated=False),
        dict(gate_sparsity=0.8, fused=True, bias=True, gate_scale=2.0),
    ],
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "xielu"])
def test_mlp(options, activation):
    config = MLPConfig(mlp_dim=9, activation=activation, **options)
    layer = drawn(lambda key: config.build(5, key=key))
    x, ctx = normal(2, 3, 5), context(np.zeros((2, 3)))
    assert_close(layer(jnp.asarray(x), ctx), mlp_by_hand(layer, wide(x)), units=32)


@pytest.mark.slow
def test_sparse_gate_has_few_features_and_a_finite_gradient():
    gate = jnp.asarray(normal(2, 3, 1000))
    assert np.mean(cut_gate(gate, 0.95) > 0) == pytest.approx(0.05, abs=0.02)
    slopes = jax.grad(lambda x: cut_gate(x, 0.95).sum())(jnp.zeros((1, 1, 4)))  # whose standard deviation is 0
    assert np.all(np.isfinite(slopes))
    with refused(ed.ConfigError, "gate_sparsity=0.5", "gated=True"):
        MLPConfig(mlp_dim=4, gated=False, gate_sparsity=0.5)


@pytest.mark.slow
def test_xielu_is_exact_and_its_gradient_finite():
    """Far from zero on both sides, where the unused branch overflows, and in 16 bits."""
    layer, x = XIELU.build(), np.array([-3e4, -200.0, -6.0, -1e-3, -1e-7, 0.0, 1e-7, 1e-3, 6.0, 200.0, 3e4])
    want = np.array([xielu_by_hand(layer, float(v)) for v in x])
    assert_allclose(layer(jnp.asarray(x, jnp.float32)), want, rtol=2e-6, atol=1e-12)
    low = jnp.asarray(x, jnp.bfloat16)
    want = [xielu_by_hand(layer, float(v)) for v in low]
    assert_allclose(layer(low).astype(np.float32), want, rtol=2**-8)
    far = jnp.asarray([-1e30, -1e3, 1e3, 1e19], jnp.float32)
    of_x, of_layer = jax.grad(lambda x, layer: jnp.sum(layer(x)), argnums=(0, 1))(far, layer)
    assert np.all(np.isfinite(of_x)) and np.all(np.isfinite(jax.tree.leaves(of_layer)))


@pytest.mark.slow
def test_fused_mlp_equals_unfused():
    config = MLPConfig(mlp_dim=9, bias=True)
    fused = dataclasses.replace(config, fused=True)
    x, ctx = jnp.asarray(normal(2, 3, 5)), context(np.zeros((2, 3)))
    one = drawn(lambda key: config.build(5, key=key))
    both = jnp.stack([one.gate, one.up], axis=1)
    other = dataclasses.replace(one, gate=None, up=None, gate_up=both, config=fused)
    assert_close(other(x, ctx), np.asarray(one(x, ctx)), units=32)
    key = jax.random.key(3)  # initialization is equal, too
    assert_array_equal(fused.build(5, key=key).gate_up[:, 1], config.build(5, key=key).up)


def test_mlp_dropout_acts_on_the_hidden_features():
    config = MLPConfig(mlp_dim=9, gated=False, activation="identity", dropout=0.5)
    layer = drawn(lambda key: config.build(5, key=key))
    x, ctx, key = jnp.asarray(normal(2, 3, 5)), context(np.zeros((2, 3))), jax.random.key(0)
    want = wide(dropout(jnp.asarray(wide(x) @ wide(layer.up), jnp.float32), 0.5, key)) @ wide(layer.down)
    assert_close(layer(x, ctx, key=key), want, units=32)
    assert_close(layer(x, ctx), mlp_by_hand(layer, wide(x)), units=32)
