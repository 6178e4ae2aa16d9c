"""Attention with all its options against loops in NumPy and float64."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm, QueryTemperature
from eqx_decoders.layers.attention.kernels.registry import run_kernel
from eqx_decoders.layers.cache.kv_cache import CachedKV
from eqx_decoders.layers.mask import Bidirectional, Chunked, SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope
from tests.compare import assert_allclose, assert_close
from tests.errors import refused
from tests.layers.common import BF16, apply, context, drawn, normal
from tests.oracles import attention_by_hand, mlp_by_hand, wide


RMS, LAYER = RMSNormConfig(eps=0.1), LayerNormConfig(offset=1.0)
ATTENTIONS = [
    dict(),
    dict(rope=None, num_kv_heads=1, mask=Bidirectional()),
    dict(
        mask=SlidingWindow(3), soft_cap=0.7, sinks=True, qk_norm=QKNorm(norm=RMS), qkv_bias=True, out_bias=True,
        output_gate=True, query_scale=0.3, key_scale=2.0, rope=Rope(pairing="interleaved"),
    ),
    dict(mask=Chunked(2), qk_norm=QKNorm(norm=RMS, over="heads", when="after_rope"), shared_kv=True, qkv_bias=True),
    dict(qk_norm=QKNorm(norm=LAYER, over="heads"), fused_qkv=True, qkv_bias=True, sinks=True, num_kv_heads=4),
    dict(qk_norm=QKNorm(norm=LAYER, when="after_rope"), fused_qkv=True, soft_cap=2.0, output_gate=True),
    dict(shared_kv=True, sinks=True, output_gate=True, qk_norm=QKNorm(norm=RMS)),
    dict(qk_norm=QKNorm(norm=LayerNormConfig(bias=False), over="each_head"), qkv_clip=0.5, inner_norm=RMS),
    dict(qk_norm=QKNorm(norm=RMS, over="each_head", when="after_rope"), qkv_clip=0.5, output_gate=True),
    dict(num_kv_heads=1, head_dim=6, out_dim=5, out_bias=True, sinks=True),
    dict(alibi=Alibi(scale=0.5), num_heads=6, num_kv_heads=3, rope=None, sinks=True),
    dict(value_dim=3, value_scale=0.5, qkv_bias=True, output_gate=True, value_norm=RMS, inner_norm=RMS),
    dict(alibi=Alibi(max_exponent=3.0), mask=Bidirectional(), soft_cap=0.7),
    dict(shared_kv=True, qk_norm=QKNorm(norm=RMS), value_norm=RMSNormConfig(eps=0.1, scale=False), query_scale=1.0),
]  # fmt: skip
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, -1]])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])


def attention(**options) -> AttentionConfig:
    return AttentionConfig(**(dict(num_heads=4, num_kv_heads=2, head_dim=4, rope=Rope(theta=10.0)) | options))


@pytest.mark.parametrize("options", ATTENTIONS, ids=lambda options: "-".join(options) or "plain")
def test_attention_matches_a_loop(options):
    layer = drawn(lambda key: attention(**options).build(6, key=key))
    x = normal(2, 7, 6)
    want = attention_by_hand(layer, wide(x), POSITIONS, SEGMENTS)
    out, entries = apply(layer, jnp.asarray(x), context(POSITIONS, SEGMENTS, attention="dot"))
    assert_close(out, want, units=128)
    c = layer.config
    assert entries.key.shape == (2, 7, c.num_kv_heads, c.head_dim)
    assert entries.value.shape == (2, 7, c.num_kv_heads, c.value_dim or c.head_dim)


def test_shared_keys_and_values_match_the_other_layer():
    """With equal queries and output weights, the result is equal, and nothing is cached."""
    giver = drawn(lambda key: attention(qk_norm=QKNorm(norm=RMS), qkv_bias=True).build(6, key=key))
    taker = attention(qk_norm=QKNorm(norm=RMS), qkv_bias=True, kv_shared_from="giver")
    layer = drawn(lambda key: taker.build(6, key=key))
    own = [layer.query, layer.query_bias, layer.query_norm.scale, layer.out]
    assert len(jax.tree.leaves(layer)) == len(own) and taker.cache_shape(8) is None
    layer = eqx.tree_at(
        lambda each: (each.query, each.query_bias, each.query_norm, each.out),
        layer,
        (giver.query, giver.query_bias, giver.query_norm, giver.out),
    )
    ctx, x = context(POSITIONS, SEGMENTS), jnp.asarray(normal(2, 7, 6))
    want, entries = apply(giver, x, ctx)
    out, proposed = apply(layer, x, dataclasses.replace(ctx, shared={"giver": (None, {"mixer": entries})}))
    assert_close(out, want)
    assert proposed is None
    with refused(ed.ConfigError, "AttentionConfig.kv_shared_from='giver'"):
        layer(x, ctx)


def test_query_temperature_grows_with_positions():
    """A query at position p is multiplied by `1 + 0.5 ln(1 + floor((p + 1) / 2))`."""
    options = dict(head_dim=6, num_kv_heads=1, query_scale=0.3)
    layer = drawn(lambda key: attention(temperature=QueryTemperature(scale=0.5, length=2), **options).build(6, key=key))
    x = normal(2, 7, 6)
    want = np.zeros((2, 7, 6))
    factors = 1 + 0.5 * np.log1p(np.maximum((POSITIONS + 1) // 2, 0))
    for factor in np.unique(factors):
        plain = dataclasses.replace(layer, config=attention(**(options | dict(query_scale=0.3 * float(factor)))))
        here = factors == factor
        want[here] = attention_by_hand(plain, wide(x), POSITIONS, SEGMENTS)[here]
    out, _ = apply(layer, jnp.asarray(x), context(POSITIONS, SEGMENTS, attention="dot"))
    assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    half = QueryTemperature(scale=0.5, length=2)(jnp.ones((2, 7, 1, 1), jnp.bfloat16), jnp.asarray(POSITIONS))
    assert half.dtype == jnp.bfloat16
    assert_allclose(np.asarray(half, np.float32)[..., 0, 0], factors, rtol=2**-8)


def test_kernel_receives_platform_and_alignment(monkeypatch):
    """Kernel name, platform, and whether keys and queries are the same tokens. These do not change values."""
    calls = []

    def recording(inputs, options, kernel):
        calls.append((kernel, options.platform, options.aligned, options.mask))
        return run_kernel(inputs, options, kernel)

    monkeypatch.setattr("eqx_decoders.layers.attention.attend.run_kernel", recording)
    monkeypatch.setattr(ed.Layout, "platform", property(lambda self: "tpu"))
    layer = drawn(lambda key: attention(mask=SlidingWindow(3)).build(6, key=key))
    past = CachedKV(jnp.ones((2, 2, 3, 4)), jnp.ones((2, 2, 3, 4)), positions=jnp.zeros((2, 3), jnp.int32))
    eqx.filter_eval_shape(layer, jnp.ones((2, 7, 6)), context(POSITIONS, attention="chunked"), past)
    assert calls == [("chunked", "tpu", aligned, SlidingWindow(3)) for aligned in (True, False)]


def test_fused_attention_equals_unfused():
    one = drawn(lambda key: attention(qkv_bias=True).build(6, key=key))
    fused = dataclasses.replace(
        one,
        qkv=jnp.concatenate([one.query, one.key, one.value], axis=1),
        qkv_bias=jnp.concatenate([one.query_bias, one.key_bias, one.value_bias], axis=0),
        config=attention(qkv_bias=True, fused_qkv=True),
        **dict.fromkeys(("query", "key", "value", "query_bias", "key_bias", "value_bias")),
    )
    x, ctx = jnp.asarray(normal(2, 7, 6)), context(POSITIONS, SEGMENTS)
    assert_close(apply(fused, x, ctx)[0], np.asarray(apply(one, x, ctx)[0]), units=32)


@pytest.mark.slow
def test_bfloat16_stays_bfloat16():
    layer = drawn(lambda key: attention(**ATTENTIONS[2]).build(6, key=key))
    x, mlp = normal(2, 7, 6), drawn(lambda key: MLPConfig(mlp_dim=9, bias=True).build(6, key=key))
    ctx = context(POSITIONS, SEGMENTS, precision=BF16)
    out, entries = apply(layer, jnp.asarray(x, jnp.bfloat16), ctx)
    assert out.dtype == entries.key.dtype == entries.value.dtype == jnp.bfloat16
    assert_close(
        out.astype(jnp.float32), attention_by_hand(layer, wide(x), POSITIONS, SEGMENTS), units=8, dtype="bfloat16"
    )
    out = mlp(jnp.asarray(x, jnp.bfloat16), ctx)
    assert out.dtype == jnp.bfloat16
    assert_close(out.astype(jnp.float32), mlp_by_hand(mlp, wide(x)), units=8, dtype="bfloat16")
