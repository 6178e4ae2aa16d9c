"""Differential attention against loops in NumPy and float64: two softmax attentions, as in DiffLlama's code."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.diffllama import DifferentialAttentionConfig
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.init import computed_buffers
from eqx_decoders.sharding.axes import computed, frozen, named_leaves
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import BF16, apply, context, drawn, normal
from tests.oracles import norm_by_hand, ready_by_hand, sees, wide


POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, -1]])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])


def differential(**options) -> DifferentialAttentionConfig:
    sizes = dict(num_heads=8, num_kv_heads=4, head_dim=4, rope=Rope(theta=10.0))
    return DifferentialAttentionConfig(attention=AttentionConfig(**(sizes | options)))


def halves_first(x, weight, bias):
    """Reorder projections like a checkpoint: all first halves, then all second halves."""
    y = np.einsum("bte,ehsd->bthsd", x, wide(weight)) + (0 if bias is None else wide(bias))
    return y.swapaxes(2, 3).reshape(*x.shape[:2], -1, y.shape[-1])


def differential_by_hand(layer, x, positions, segments):
    c = layer.config
    query, key, value = (
        halves_first(x, getattr(layer, name), getattr(layer, f"{name}_bias")) for name in ("query", "key", "value")
    )
    query = ready_by_hand(layer, query, layer.query_norm, None, positions)
    key = ready_by_hand(layer, key, layer.key_norm, None, positions)
    pairs, kv_pairs = c.num_heads // 2, c.num_kv_heads // 2
    mixed = np.zeros((*x.shape[:2], c.num_heads, 2 * c.head_dim))
    for b, t, h in np.ndindex(*x.shape[:2], c.num_heads):
        kv = h // (c.num_heads // c.num_kv_heads)
        seen = [
            j
            for j in range(x.shape[1])
            if sees(c.mask, positions[b, t], positions[b, j], segments[b, t] == segments[b, j])
        ]
        shares = [math.exp(query[b, t, h] @ key[b, j, kv] * c.head_dim**-0.5) for j in seen]
        both = [np.concatenate([value[b, j, kv % kv_pairs], value[b, j, kv % kv_pairs + kv_pairs]]) for j in seen]
        if seen:
            mixed[b, t, h] = sum(s * v for s, v in zip(shares, both, strict=True)) / sum(shares)
    first = 0.8 - 0.6 * math.exp(-0.3 * float(layer.layer_number[0]))
    factor = math.exp(wide(layer.first_query) @ wide(layer.first_key))
    factor += first - math.exp(wide(layer.second_query) @ wide(layer.second_key))
    difference = mixed[:, :, :pairs] - factor * mixed[:, :, pairs:]
    normed = np.apply_along_axis(lambda vector: norm_by_hand(layer.norm, vector), -1, difference)
    out = np.einsum("bthd,hde->bte", (1 - first) * normed, wide(layer.out))
    return out if layer.out_bias is None else out + wide(layer.out_bias)


@pytest.mark.parametrize(
    "options",
    [
        dict(qkv_bias=True, out_bias=True),
        dict(mask=SlidingWindow(3), qk_norm=QKNorm(norm=RMSNormConfig(eps=0.1)), num_heads=4),
    ],
)
@pytest.mark.parametrize("kernel", ["dot", pytest.param("chunked", marks=pytest.mark.slow)])
def test_layer_matches_a_loop(options, kernel):
    layer = drawn(lambda key: differential(**options).build(6, key=key))
    x = normal(2, 7, 6)
    out, entries = apply(layer, jnp.asarray(x), context(POSITIONS, SEGMENTS, attention=kernel))
    assert_close(out, differential_by_hand(layer, wide(x), POSITIONS, SEGMENTS), units=128)
    # the cache has the same size as in ordinary attention
    assert entries.key.shape == entries.value.shape == (2, 7, 2, 8)


def test_bfloat16_subtracts_in_float32():
    layer = drawn(lambda key: differential().build(6, key=key))
    x = jnp.asarray(normal(2, 7, 6), jnp.bfloat16)
    out, _ = apply(layer, x, context(POSITIONS, SEGMENTS, precision=BF16))
    assert out.dtype == jnp.bfloat16
    assert_close(out, differential_by_hand(layer, wide(x), POSITIONS, SEGMENTS), units=24, dtype="bfloat16")


@pytest.mark.slow
def test_layer_number_counts_all_layers():
    """In cycles of two layers and remaining layers, for new models and as they are computed for loaded models."""
    plain = ed.BlockConfig(mixer=differential().attention, mlp=None)
    block = ed.BlockConfig(mixer=differential(), mlp=None)
    config = ed.DecoderConfig(
        vocab_size=16, embed_dim=8, blocks=(block, block, plain) * 2 + (block,), final_norm=RMSNormConfig()
    )
    model = ed.init(config, key=jax.random.key(0), precision=ed.Precision(params=jnp.bfloat16))
    numbers = computed_buffers(ed.abstract(config))
    assert computed(model) == frozen(model) == numbers.keys()
    leaves = named_leaves(model)
    for path, number in numbers.items():
        assert_array_equal(leaves[path], number)
    assert sorted(np.concatenate([*numbers.values()]).ravel().tolist()) == [0, 1, 3, 4, 6]
    assert ed.count_parameters(config) == sum(x.size for x in leaves.values()) - 5


@pytest.mark.parametrize("field, value", [("sinks", True), ("fused_qkv", True), ("value_dim", 3)])
def test_unsupported_attention_options_are_refused(field, value):
    with refused(ed.ConfigError, f"attention has {field}="):
        differential(**{field: value})


def test_odd_heads_and_norms_over_all_heads_are_refused():
    with refused(ed.ConfigError, "num_kv_heads=1"):
        differential(num_kv_heads=1)
    with refused(ed.ConfigError, "qk_norm.over='heads'", "'head'"):
        differential(qk_norm=QKNorm(over="heads"))
