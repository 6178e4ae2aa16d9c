"""Dynamic mask attention against loops in NumPy and float64; selection with a cache equals selection without."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.doge import DynamicMaskConfig
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.rope import Rope
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.common import apply, context, drawn, normal
from tests.oracles import ready_by_hand, sees, wide


POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, -1]])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])
CONTEXT = context(POSITIONS, SEGMENTS)


def attention_config(top_k=2, **options) -> DynamicMaskConfig:
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=4, rope=Rope(theta=10.0), qk_norm=QKNorm())
    return DynamicMaskConfig(attention=AttentionConfig(**(sizes | options)), top_k=top_k)


def masked_by_hand(layer, x, positions, segments):
    """For each query, attend to the visible keys with the largest biases; of equal biases, the later keys are taken."""
    c, groups = layer.config, layer.config.num_heads // layer.config.num_kv_heads
    query, key, value = (np.einsum("bte,ehd->bthd", x, wide(w)) for w in (layer.query, layer.key, layer.value))
    value = value + (wide(layer.value_bias) if c.qkv_bias else 0.0)
    query = query + (wide(layer.query_bias) if c.qkv_bias else 0.0)
    key = key + (wide(layer.key_bias) if c.qkv_bias else 0.0)
    query, key = (
        ready_by_hand(layer, query, layer.query_norm, None, positions),
        ready_by_hand(layer, key, layer.key_norm, None, positions),
    )
    step = np.einsum("bthd,hdm->btm", value, wide(layer.step)) + (wide(layer.step_bias) if c.qkv_bias else 0.0)
    bias = np.exp(wide(layer.rate) * np.log1p(np.exp(step)))
    mixed = np.zeros(query.shape)
    for b, t, h in np.ndindex(query.shape[:3]):
        kv = h // groups
        seen = [
            j
            for j in range(x.shape[1])
            if sees(c.mask, positions[b, t], positions[b, j], segments[b, t] == segments[b, j])
        ]
        kept = sorted(seen, key=lambda j: (bias[b, j, kv], j))[-layer.top_k :]
        shares = [math.exp(query[b, t, h] @ key[b, j, kv] * c.head_dim**-0.5 + bias[b, j, kv]) for j in kept]
        if kept:
            mixed[b, t, h] = sum(s * value[b, j, kv] for s, j in zip(shares, kept, strict=True)) / sum(shares)
    return np.einsum("bthd,hde->bte", mixed, wide(layer.out))


@pytest.mark.slow(fast=("top_k=9-chunked",))
@pytest.mark.parametrize(("options", "kernel"), [(dict(qkv_bias=True), "dot"), (dict(top_k=9), "chunked")])
def test_layer_matches_a_loop(options, kernel):
    layer = drawn(lambda key: attention_config(**options).build(6, key=key))
    x = normal(2, 7, 6)
    out, entries = apply(layer, jnp.asarray(x), context(POSITIONS, SEGMENTS, attention=kernel))
    assert_close(out, masked_by_hand(layer, wide(x), POSITIONS, SEGMENTS), units=128)
    assert entries.key.shape == (2, 7, 2, 5) and entries.value.shape == (2, 7, 2, 4)


@pytest.mark.slow
def test_new_layer_equals_a_sliding_window():
    """All biases of a new layer are one, and of equal biases the later keys are taken."""
    layer, x = attention_config(top_k=3).build(6, key=jax.random.key(0)), jnp.asarray(normal(2, 7, 6))
    windowed = dataclasses.replace(attention_config().attention, mask=SlidingWindow(3))
    windowed = windowed.build(6, key=jax.random.split(jax.random.key(0))[0])
    assert_close(apply(layer, x, CONTEXT)[0], apply(windowed, x, CONTEXT)[0])


def test_biases_have_gradients():
    layer = drawn(lambda key: attention_config().build(6, key=key))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda layer, x: jnp.sum(jnp.sin(layer(x, CONTEXT)[0]))))
    gradient = gradient(layer, jnp.asarray(normal(2, 7, 6)))
    assert all(jnp.all(jnp.abs(leaf) > 0) for leaf in (gradient.rate, gradient.step))


@pytest.mark.parametrize("field, value", [("value_dim", 3), ("spans", True), ("kv_shared_from", "it")])
def test_unsupported_attention_options_are_refused(field, value):
    with refused(ed.ConfigError, f"attention has {field}="):
        attention_config(**{field: value})


def test_windows_are_refused():
    with refused(ed.ConfigError, "mask=SlidingWindow(size=3)"):
        attention_config(mask=SlidingWindow(3))
