"""Every layer against NumPy in float64, written from the formula."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.embedding import LearnedPositions, SinusoidalPositions, TokenEmbedding
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.mlp import ACTIVATIONS, MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import LinearRope, Llama3Rope, Rope, YarnRope, rotate
from tests.oracles import (
    BY_HAND,
    attention_by_hand,
    llama3_by_hand,
    mlp_by_hand,
    norm_by_hand,
    plain_frequencies,
    rotate_by_hand,
    wide,
    yarn_by_hand,
)


BF16 = ed.Precision(compute=jnp.bfloat16)


def drawn(build, seed: int = 0):
    """What `build(key)` makes, with every array drawn by NumPy: no zero bias, no scale of one."""
    generator = np.random.default_rng(seed)
    tree = eqx.filter_eval_shape(build, jax.random.key(0))
    arrays, static = eqx.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(
        jax.tree.map(lambda a: jnp.asarray(generator.normal(0.1, 0.5, a.shape), a.dtype), arrays), static
    )


def normal(*shape, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def context(positions, segments=None, **execution) -> ed.Context:
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)
    return ed.Context(jnp.asarray(positions, jnp.int32), segments, execution=ed.Execution(**execution))


def close(got, want, tolerance: float = 2e-6):
    """Equal up to float32's rounding, relative to the largest value."""
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max()))


# --- norms ---


@pytest.mark.parametrize(
    "config",
    [
        RMSNormConfig(),
        RMSNormConfig(offset=1.0, eps=0.3),
        RMSNormConfig(scale=False),
        LayerNormConfig(),
        LayerNormConfig(offset=1.0, bias=False, eps=0.3),
        LayerNormConfig(offset=1.0),
    ],
    ids=str,
)
def test_norms(config):
    layer = drawn(lambda key: config.build(7))
    x = 3 * normal(2, 3, 7) + 1
    want = np.apply_along_axis(lambda row: norm_by_hand(layer, row), -1, wide(x))
    close(layer(jnp.asarray(x)), want)
    half = layer(jnp.asarray(x, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    close(half.astype(jnp.float32), want, 0.02)
    fresh = config.build(7)  # a new scale and offset multiply by one
    assert fresh.scale is None or np.all(np.asarray(fresh.scale) + config.offset == 1)
    assert getattr(fresh, "bias", None) is None or not np.any(fresh.bias)


def test_bfloat16_norms_are_computed_in_float32():
    """The mean square of 4096 equal values is exact; summed in bfloat16 it would stop at 256."""
    layer = RMSNormConfig(eps=1e-12).build(4096)
    assert np.all(np.asarray(layer(jnp.full((1, 4096), 3.0, jnp.bfloat16)), np.float32) == 1.0)
    assert np.all(np.isfinite(layer(jnp.zeros((1, 4096)))))


# --- rotary embedding ---


ROPES = [
    (Rope(theta=100.0), plain_frequencies(100.0, 8), 1.0),
    (Rope(pairing="interleaved"), plain_frequencies(1e4, 8), 1.0),
    (Rope(fraction=0.5), plain_frequencies(1e4, 4), 1.0),
    (Rope(fraction=0.25, pairing="interleaved"), [1.0], 1.0),
    (LinearRope(factor=4.0), [f / 4 for f in plain_frequencies(1e4, 8)], 1.0),
]
LLAMA3 = [
    Llama3Rope(theta=500_000.0),
    Llama3Rope(theta=500_000.0, factor=32.0),
    Llama3Rope(theta=100.0, original_length=64, low_frequency_factor=2.0, high_frequency_factor=3.0),
]
YARN = [
    YarnRope(theta=10_000.0, factor=40.0, original_length=4096),
    YarnRope(theta=150_000.0, factor=32.0, original_length=4096, truncate=False),
    YarnRope(theta=100.0, factor=4.0, original_length=8, attention_factor=1.3),
    YarnRope(theta=100.0, factor=1.0, original_length=8, beta_fast=3.0, beta_slow=3.0),
]


@pytest.mark.parametrize("rope, frequencies, magnitude", ROPES, ids=lambda x: str(x)[:40])
def test_rotation_is_the_loop(rope, frequencies, magnitude):
    check_rotation(rope, frequencies, magnitude)


def check_rotation(rope, frequencies, magnitude):
    x, positions = normal(2, 3, 2, 8), np.array([[0, 1, 7], [-1, 30, 5]])
    want = np.array(x, np.float64)
    for b, t, h in np.ndindex(2, 3, 2):
        place = max(positions[b, t], 0)
        want[b, t, h] = rotate_by_hand(x[b, t, h], place, frequencies, rope.pairing, magnitude)
    close(rotate(jnp.asarray(x), jnp.asarray(positions), rope), want, 1e-5)
    half = rotate(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), rope)
    assert half.dtype == jnp.bfloat16
    close(half.astype(jnp.float32), want, 0.02)


@pytest.mark.parametrize("rope", LLAMA3, ids=str)
def test_llama3_is_the_loop_over_wavelengths(rope):
    for dim in (8, 128):
        np.testing.assert_allclose(rope.frequencies(dim), llama3_by_hand(rope, dim), rtol=1e-12)
    ratio = np.array(plain_frequencies(rope.theta, 128)) / rope.frequencies(128)
    assert ratio[0] == 1  # all three branches are met
    assert ratio[-1] == pytest.approx(rope.factor)
    assert np.any((ratio > 1.001) & (ratio < rope.factor - 0.001))
    check_rotation(rope, llama3_by_hand(rope, 8), 1.0)


@pytest.mark.parametrize("rope", YARN, ids=str)
def test_yarn_is_the_formula(rope):
    for dim in (8, 64):
        np.testing.assert_allclose(rope.frequencies(dim), yarn_by_hand(rope, dim), rtol=1e-12)
    default = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    check_rotation(rope, yarn_by_hand(rope, 8), rope.attention_factor or default)


def test_yarn_truncation_matters():
    rounded, exact = (dataclasses.replace(YARN[0], truncate=flag).frequencies(64) for flag in (True, False))
    assert not np.allclose(rounded, exact, rtol=1e-3)


@pytest.mark.parametrize("rope", [Rope(), Rope(pairing="interleaved"), Rope(fraction=0.5), LLAMA3[0]], ids=str)
def test_rotation_keeps_norms_and_only_differences_count(rope):
    query, key = jnp.asarray(normal(1, 6, 2, 8)), jnp.asarray(normal(1, 6, 2, 8, seed=2))
    places = jnp.arange(6)[None]

    def scores(shift):
        return jnp.einsum("bqhd,bkhd->bhqk", rotate(query, places + shift, rope), rotate(key, places + shift, rope))

    close(jnp.linalg.norm(rotate(query, places, rope), axis=-1), np.linalg.norm(query, axis=-1))
    close(scores(37), np.asarray(scores(0)), 1e-5)
    unturned = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    assert not np.allclose(scores(0), unturned, atol=0.1)


# --- feed-forward ---


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name):
    x = np.linspace(-6, 6, 49)
    want = np.array([BY_HAND[name](float(v)) for v in x])
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(gated=False),
        dict(bias=True),
        dict(gated=False, bias=True),
        dict(fused=True),
        dict(fused=True, bias=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_mlp(options, activation):
    config = MLPConfig(mlp_dim=9, activation=activation, **options)
    layer = drawn(lambda key: config.build(5, key=key))
    x, ctx = normal(2, 3, 5), context(np.zeros((2, 3)))
    close(layer(jnp.asarray(x), ctx), mlp_by_hand(layer, wide(x)))


def test_fused_mlp_equals_unfused():
    config = MLPConfig(mlp_dim=9, bias=True)
    fused = dataclasses.replace(config, fused=True)
    x, ctx = jnp.asarray(normal(2, 3, 5)), context(np.zeros((2, 3)))
    one = drawn(lambda key: config.build(5, key=key))
    both = jnp.stack([one.gate, one.up], axis=1)
    other = dataclasses.replace(one, gate=None, up=None, gate_up=both, config=fused)
    close(other(x, ctx), np.asarray(one(x, ctx)))
    key = jax.random.key(3)  # born the same, too
    np.testing.assert_array_equal(fused.build(5, key=key).gate_up[:, 1], config.build(5, key=key).up)


def test_mlp_dropout_acts_on_the_hidden_features():
    config = MLPConfig(mlp_dim=9, gated=False, activation="identity", dropout=0.5)
    layer = drawn(lambda key: config.build(5, key=key))
    x, ctx, key = jnp.asarray(normal(2, 3, 5)), context(np.zeros((2, 3))), jax.random.key(0)
    want = wide(dropout(jnp.asarray(wide(x) @ wide(layer.up), jnp.float32), 0.5, key)) @ wide(layer.down)
    close(layer(x, ctx, key=key), want)
    close(layer(x, ctx), mlp_by_hand(layer, wide(x)))


# --- dropout ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout(dtype):
    x = jnp.asarray(1 + np.arange(4 * 3 * 500).reshape(4, 3, 500) % 7, dtype)
    out = dropout(x, 0.25, jax.random.key(1))
    assert out.dtype == dtype
    kept = np.asarray(out != 0)
    assert np.all(kept == kept[:, :1])  # one mask for all positions of a row
    assert not np.all(kept[0] == kept[1])  # another for each row
    expected = np.where(kept, np.asarray(x / 0.75, np.float32), 0)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)
    assert kept[:, 0].mean() == pytest.approx(0.75, abs=0.04)
    assert np.asarray(out, np.float32).mean() == pytest.approx(np.asarray(x, np.float32).mean(), rel=0.06)
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, jax.random.key(1)) is x


# --- embeddings ---


@pytest.mark.parametrize("precision", [ed.Precision(), BF16])
def test_token_embedding(precision):
    table = normal(6, 5)
    tokens, ctx = jnp.asarray([[0, 5, 6, 99, -1, 3]]), context(np.zeros((1, 6)), precision=precision)
    out = TokenEmbedding(table=jnp.asarray(table), scale=2.5)(tokens, ctx)
    assert out.dtype == precision.compute
    want = 2.5 * table[[[0, 5, 5, 5, 0, 3]]]  # ids out of the vocabulary are clipped into it
    close(out.astype(jnp.float32), want, 1e-6 if precision.compute == np.float32 else 0.01)


def test_learned_positions():
    layer = drawn(lambda key: LearnedPositions(max_positions=4).build(5, key=key))
    x = normal(1, 5, 5)
    out = layer(jnp.asarray(x), context([[-1, 0, 3, 4, 100]]))
    close(out, x + np.asarray(layer.table)[[[0, 0, 3, 3, 3]]])
    assert layer(jnp.asarray(x, jnp.bfloat16), context([[0] * 5])).dtype == jnp.bfloat16


@pytest.mark.parametrize("embed", [1, 2, 3, 8, 9])
def test_sinusoids(embed):
    x, positions, count = normal(1, 4, embed), [0, 1, 50, -1], embed // 2
    want = np.array(x, np.float64)
    for t, position in enumerate(positions):
        for k in range(count):
            angle = max(position, 0) * 100.0 ** (-k / max(count - 1, 1))
            want[0, t, k] += math.sin(angle)
            want[0, t, count + k] += math.cos(angle)
    layer = SinusoidalPositions(max_timescale=100.0).build(embed, key=jax.random.key(0))
    close(layer(jnp.asarray(x), context([positions])), want, 1e-5)


# --- attention ---


RMS, LAYER = RMSNormConfig(eps=0.1), LayerNormConfig(offset=1.0)
ATTENTIONS = [
    dict(),
    dict(rope=None, num_kv_heads=1, mask=Bidirectional()),
    dict(
        mask=SlidingWindow(3), soft_cap=0.7, sinks=True, qk_norm=QKNorm(norm=RMS), qkv_bias=True, out_bias=True,
        output_gate=True, query_scale=0.3, rope=Rope(pairing="interleaved"),
    ),
    dict(mask=Chunked(2), qk_norm=QKNorm(norm=RMS, over="heads", when="after_rope"), shared_kv=True, qkv_bias=True),
    dict(qk_norm=QKNorm(norm=LAYER, over="heads"), fused_qkv=True, qkv_bias=True, sinks=True, num_kv_heads=4),
    dict(qk_norm=QKNorm(norm=LAYER, when="after_rope"), fused_qkv=True, soft_cap=2.0, output_gate=True),
    dict(shared_kv=True, sinks=True, output_gate=True, qk_norm=QKNorm(norm=RMS)),
]  # fmt: skip
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, -1]])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])


def attention(**options) -> AttentionConfig:
    return AttentionConfig(**(dict(num_heads=4, num_kv_heads=2, head_dim=4, rope=Rope(theta=10.0)) | options))


@eqx.filter_jit
def apply(layer, x, ctx):
    return layer(x, ctx)


@pytest.mark.parametrize("options", ATTENTIONS, ids=lambda options: "-".join(options) or "plain")
def test_attention_is_the_loop(options):
    layer = drawn(lambda key: attention(**options).build(6, key=key))
    x = normal(2, 7, 6)
    want = attention_by_hand(layer, wide(x), POSITIONS, SEGMENTS)
    out, entries = apply(layer, jnp.asarray(x), context(POSITIONS, SEGMENTS, attention="dot"))
    close(out, want, 1e-5)
    assert entries.key.shape == entries.value.shape == (2, 7, layer.config.num_kv_heads, 4)


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
    close(apply(fused, x, ctx)[0], np.asarray(apply(one, x, ctx)[0]))


def test_bfloat16_stays_bfloat16():
    layer = drawn(lambda key: attention(**ATTENTIONS[2]).build(6, key=key))
    x, mlp = normal(2, 7, 6), drawn(lambda key: MLPConfig(mlp_dim=9, bias=True).build(6, key=key))
    ctx = context(POSITIONS, SEGMENTS, precision=BF16)
    out, entries = apply(layer, jnp.asarray(x, jnp.bfloat16), ctx)
    assert out.dtype == entries.key.dtype == entries.value.dtype == jnp.bfloat16
    close(out.astype(jnp.float32), attention_by_hand(layer, wide(x), POSITIONS, SEGMENTS), 0.04)
    out = mlp(jnp.asarray(x, jnp.bfloat16), ctx)
    assert out.dtype == jnp.bfloat16
    close(out.astype(jnp.float32), mlp_by_hand(mlp, wide(x)), 0.04)


@pytest.mark.parametrize(
    "mask, max_length, slots, ring",
    [
        (Causal(), 9, 9, False),
        (SlidingWindow(4), 9, 4, True),
        (SlidingWindow(9), 9, 9, False),
        (Chunked(5), 3, 3, False),
    ],
)
def test_cache_shapes(mask, max_length, slots, ring):
    shape = attention(mask=mask).cache_shape(max_length)
    assert (shape.slots, shape.ring, shape.kv_heads, shape.head_dim) == (slots, ring, 2, 4)
