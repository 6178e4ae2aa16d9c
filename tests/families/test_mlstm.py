"""The mLSTM against its recurrence, token by token, stabilized as in the paper: values and gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.families.xlstm import MLSTMConfig
from tests.compare import assert_close
from tests.layers.common import context, drawn, normal


def one_by_one(layer, x, real, starts):
    """Compute the recurrence for one head: S and n are divided by e^m."""
    config, cap = layer.config, layer.config.gate_cap

    def token(carry, inputs):
        x, real, start = inputs

        def into(weight, bias=None):
            made = jnp.einsum("be,eh...->bh...", x, weight)
            return made if bias is None else made + bias[None]

        before = jax.tree.map(lambda old: jnp.where(start.reshape(-1, *[1] * (old.ndim - 1)), 0.0, old), carry)
        state, size, level = before
        gates = into(layer.input_gate, layer.input_gate_bias), into(layer.forget_gate, layer.forget_gate_bias)
        written, kept = (cap * jnp.tanh(gate / cap) for gate in gates)
        kept = jax.nn.log_sigmoid(kept)
        most = jnp.maximum(kept + level, written)
        fade, share = jnp.exp(kept + level - most)[..., None], jnp.exp(written - most)[..., None]
        key, query = into(layer.key), into(layer.query) / config.key_dim**0.5
        state = fade[..., None] * state + share[..., None] * key[..., None] * into(layer.value)[:, :, None]
        size = fade * size + share * key
        bound = jnp.maximum(jnp.abs((size * query).sum(-1)), jnp.exp(-most)) + config.eps
        answer = jnp.einsum("bhk,bhkv->bhv", query, state) / bound[..., None]
        answer -= answer.mean(-1, keepdims=True)
        answer /= jnp.sqrt(jnp.mean(answer**2, -1, keepdims=True) + config.norm_eps)
        gated = jax.nn.sigmoid(into(layer.gate)) * answer * layer.norm_scale[None]
        after = (state, size, most)
        after = jax.tree.map(
            lambda new, old: jnp.where(real.reshape(-1, *[1] * (new.ndim - 1)), new, old), after, before
        )
        return after, jnp.einsum("bhv,hve->be", gated, layer.out)

    heads, keys, values = config.num_heads, config.key_dim, config.value_dim
    start = jnp.zeros((len(x), heads, keys, values)), jnp.zeros((len(x), heads, keys)), jnp.zeros((len(x), heads))
    inputs = (jnp.swapaxes(each, 0, 1) for each in (x, real, starts))
    return jnp.swapaxes(jax.lax.scan(token, start, tuple(inputs))[1], 0, 1)


@pytest.mark.slow(fast=("40.0",))
@pytest.mark.parametrize("gate_cap", [3.0, 40.0])
def test_matches_definition(gate_cap):
    """Packed rows with padding, gates of very different size, and an `eps` that changes the result."""
    config = MLSTMConfig(num_heads=2, key_dim=3, value_dim=4, gate_cap=gate_cap, eps=0.1, norm_eps=0.1)
    layer, x = drawn(lambda key: config.build(5, key=key)), jnp.asarray(normal(2, 70, 5))
    layer = eqx.tree_at(lambda layer: layer.input_gate, layer, 3 * layer.input_gate)
    segments = 1 + (np.arange(70) >= [[30], [66]]) + (np.arange(70) >= [[31], [80]])
    positions = np.where((np.arange(70) % 7 == 3) & [[False], [True]], -1, 0 * segments)
    positions = np.where(positions < 0, -1, np.arange(70))
    real = positions >= 0
    starts = np.concatenate([np.zeros((2, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    weights = jnp.asarray(np.where(real[..., None], normal(2, 70, 5, seed=3), 0.0))
    ctx = context(positions, segments)

    @eqx.filter_jit
    def results(run):
        def loss(inputs):
            out = run(*inputs)
            return (jnp.where(weights == 0, 0.0, out) * weights).sum(), out

        gradients, out = eqx.filter_grad(loss, has_aux=True)((layer, x))
        return jnp.where(weights == 0, 0.0, out), gradients

    found = results(lambda layer, x: layer(x, ctx)[0])
    want = results(lambda layer, x: one_by_one(layer, x, jnp.asarray(real), jnp.asarray(starts)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_close(one, other, units=2048)
    assert config.token_products(100) == 2 * 2 * 3 * 5
