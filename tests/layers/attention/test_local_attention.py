"""Local attention and light convolutions match their definitions, for all chunk and document boundaries."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.local_attention import LocalAttentionConfig
from eqx_decoders.layers.attention.relative_attention import DISTANCE_BIAS, RelativeAttentionConfig
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.norm import RMSNormConfig
from tests.compare import assert_allclose, assert_close
from tests.errors import refused
from tests.layers.common import BF16, context, drawn, normal


EMBED = 6
SHAPE = dict(num_heads=2, head_dim=3)
CONFIGS = {
    "published": LocalAttentionConfig(**SHAPE),
    "both sides": LocalAttentionConfig(**SHAPE, chunk=4, left=6, right=3, soft_cap=1.5),
    # the largest distance has no embedding
    "far": LocalAttentionConfig(**SHAPE, chunk=2, left=9, right=2, soft_cap=3.0),
    "alone": LocalAttentionConfig(**SHAPE, chunk=3, left=2),
    "chunks of one": LocalAttentionConfig(**SHAPE, chunk=1, left=4, right=5),
}
CONVOLUTION = LightConvolutionConfig(taps=3, norm=RMSNormConfig(eps=0.1, clip=0.4))
POINTWISE = LightConvolutionConfig(taps=3, gate="silu", norm=None, pointwise=True, bias=True)


def near(layer, x, document):
    """Compute attention pair by pair; `document` is the document id of each token, negative for padding."""
    config, w = layer.config, {name: np.asarray(getattr(layer, name), np.float64) for name in
                               ("query", "key", "value", "relative_key", "scale", "out")}  # fmt: skip
    q, k, v = (np.einsum("te,ehd->thd", x, w[name]) for name in ("query", "key", "value"))
    q = q * np.log1p(np.exp(w["scale"])) / (np.log(2) * config.head_dim**0.5)
    k = k * np.log(1 + np.e) / np.log(2)
    count, y = x.shape[1] // 2, np.zeros_like(v)
    rates = 10_000.0 ** -(np.arange(count) / max(count - 1, 1))
    shift = (config.chunk + config.left - 1 + config.right) // 2 - (config.left - 1)
    for i in range(len(x)):
        scores = {}
        for j in range(len(x)):
            before, after = j <= i and i - j < config.left - 1, i < j and j - i < config.right
            if document[i] < 0 or document[i] != document[j] or not (before or after):
                continue
            place = i - j + shift
            signal = np.concatenate([np.sin(place * rates), np.cos(place * rates)])
            far = np.einsum("s,shd->hd", signal, w["relative_key"]) * (place >= 0)
            scores[j] = config.soft_cap * np.tanh(np.sum(q[i] * (k[j] + far), axis=1) / config.soft_cap)
        if scores:
            weights = np.exp(np.stack(list(scores.values())))
            y[i] = np.einsum("jh,jhd->hd", weights / weights.sum(0), v[list(scores)])
    return np.einsum("thd,hde->te", y, w["out"])


def convolved(layer, x, document):
    """Compute the convolution token by token."""
    names = ("into", "taps", "out", "point", *(f"{part}_bias" for part in ("into", "taps", "point", "out")))
    names += ("value_shift", "gate_shift")
    found = {name: getattr(layer, name) for name in names}
    w = {name: np.asarray(0.0 if value is None else value, np.float64) for name, value in found.items()}
    a, b = np.einsum("te,eic->itc", x, w["into"])
    a, b = (a, b) if found["into_bias"] is None else (a + w["into_bias"][0], b + w["into_bias"][1])
    a, b = a + w["value_shift"], b + w["gate_shift"]
    gated, y = a / (1 + np.exp(-b)) * (b if layer.config.gate == "silu" else 1.0), np.zeros_like(a)
    for i in range(len(x)):
        for lag in range(layer.config.taps):
            if i >= lag and document[i] == document[i - lag]:
                y[i] += w["taps"][:, -1 - lag] * gated[i - lag]
    norm, y = layer.config.norm, y + w["taps_bias"]
    if norm is None:
        y = y @ w["point"] + w["point_bias"]
        return np.einsum("tc,ce->te", y / (1 + np.exp(-y)), w["out"]) + w["out_bias"]
    y = np.clip(y, -norm.clip, norm.clip)
    y = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + norm.eps) * np.asarray(layer.norm.scale)
    return np.einsum("tc,ce->te", y / (1 + np.exp(-y)), w["out"])


def rows(length):
    """Return positions, segments and number of documents of a row with one document and of a row with several."""
    whole, cuts = np.arange(length), np.minimum(np.arange(length) // max(1, length // 3), 2)
    parts = np.where(np.arange(length) < length - length // 5, cuts, -1)
    begins = np.asarray([np.flatnonzero(parts == number)[0] if number >= 0 else 0 for number in parts])
    positions = np.stack([whole, np.where(parts >= 0, whole - begins, -1)])
    return positions, np.stack([np.ones(length, int), parts + 1]), np.stack([np.zeros(length, int), parts])


LAYERS = {**CONFIGS, "convolution": CONVOLUTION, "pointwise": POINTWISE}


CASES = [
    *((name, 13) for name in LAYERS),
    *((name, length) for name in ("both sides", "convolution") for length in (1, 4, 5)),
]


@eqx.filter_jit
def run(layer, x, given):
    return layer(x, given)


@pytest.mark.slow(fast=("published-13",))
@pytest.mark.parametrize(("name", "length"), CASES)
def test_layer_matches_its_definition(name, length):
    layer = drawn(lambda key: LAYERS[name].build(EMBED, key=key))
    x, (positions, segments, documents) = normal(2, length, EMBED), rows(length)
    given = context(positions, segments)
    found = np.asarray(run(layer, jnp.asarray(x), given))
    define = near if name in CONFIGS else convolved
    for row in range(2):
        real = documents[row] >= 0
        assert_allclose(found[row][real], define(layer, x[row], documents[row])[real], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both sides", "convolution"])
def test_sequence_without_segments_is_one_document(name):
    layer = drawn(lambda key: LAYERS[name].build(EMBED, key=key))
    x, (positions, segments, _) = normal(1, 13, EMBED), rows(13)
    numbered = run(layer, jnp.asarray(x), context(positions[:1], segments[:1]))
    assert_allclose(run(layer, jnp.asarray(x), context(positions[:1])), numbered, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["far", "convolution"])
def test_gradients_equal_finite_differences(name):
    layer = drawn(lambda key: LAYERS[name].build(EMBED, key=key))
    x, (positions, segments, documents) = normal(2, 11, EMBED), rows(11)
    weights = normal(2, 11, EMBED, seed=3) * (documents >= 0)[..., None]
    given = context(positions, segments)

    @jax.jit
    def loss(arrays, x):
        return jnp.sum(eqx.combine(arrays, layer)(x, given) * weights)

    arrays = eqx.filter(layer, eqx.is_array)
    gradients = jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays, jnp.asarray(x)))
    leaves, tree = jax.tree.flatten((arrays, jnp.asarray(x)))
    for index, gradient in enumerate(gradients):
        way = normal(*gradient.shape, seed=index)
        sides = [[*leaves[:index], leaves[index] + step * way, *leaves[index + 1 :]] for step in (3e-3, -3e-3)]
        one, other = (float(loss(*jax.tree.unflatten(tree, side))) for side in sides)
        assert float(jnp.sum(gradient * way)) == pytest.approx((one - other) / 6e-3, rel=2e-2, abs=2e-2)


def test_padding_has_no_gradient_and_causes_no_nan():
    """Also in rows of padding only."""
    layer = drawn(lambda key: CONFIGS["both sides"].build(EMBED, key=key))
    positions = np.stack([np.full(7, -1), np.where(np.arange(7) < 3, np.arange(7), -1)])
    x = jnp.asarray(normal(2, 7, EMBED))

    @jax.jit
    def loss(x):
        found = layer(x, context(positions, (positions >= 0).astype(int)))
        return jnp.sum(jnp.where((positions >= 0)[..., None], jnp.square(found), 0.0)), found

    gradient, found = jax.grad(loss, has_aux=True)(x)
    assert np.isfinite(np.asarray(found)).all()
    assert np.array_equal(np.abs(np.asarray(gradient)).max(axis=2) > 0, positions >= 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both sides", "convolution"])
def test_bfloat16_stays_close_to_float32(name):
    layer = drawn(lambda key: LAYERS[name].build(EMBED, key=key))
    x, (positions, segments, documents) = normal(2, 9, EMBED), rows(9)
    plain = np.asarray(run(layer, jnp.asarray(x), context(positions, segments)))
    short = run(layer, jnp.asarray(x, jnp.bfloat16), context(positions, segments, precision=BF16))
    assert short.dtype == jnp.bfloat16
    real = documents >= 0
    scale = np.abs(plain).max()
    assert np.abs(np.asarray(short, np.float32) - plain)[real].max() < 0.05 * scale


def test_operations_are_counted():
    assert CONFIGS["published"].token_products(100) == 2 * 3 * 3 * 12
    assert CONFIGS["both sides"].token_products(100) == 2 * 3 * 3 * (5 + 2)
    assert CONFIGS["published"].token_products(5) == 2 * 3 * 3 * 5


@pytest.mark.parametrize(
    ("field", "value"), [("num_heads", 0), ("head_dim", 0), ("chunk", 0), ("left", 1), ("right", -1), ("soft_cap", 0.0)]
)
def test_error_messages_name_the_field(field, value):
    with refused(ed.ConfigError, f"LocalAttentionConfig.{field}={value}"):
        dataclasses.replace(CONFIGS["published"], **{field: value})
    with refused(ed.ConfigError, "LightConvolutionConfig.taps=0"):
        LightConvolutionConfig(taps=0)


@pytest.mark.parametrize(
    "mixer",
    [CONFIGS["both sides"], RelativeAttentionConfig(**SHAPE, distances=3, reach=4)],
    ids=["local", "relative"],
)
def test_a_block_adds_attention_and_a_convolution(mixer):
    further = ed.ExtraLayerConfig(layer=CONVOLUTION, pre_norm=None)
    config = ed.BlockConfig(mixer=mixer, mlp=None, pre_mixer_norm=None, post_layers=(further,))
    block, x = drawn(lambda key: config.build(EMBED, key=key)), jnp.asarray(normal(2, 5, EMBED))
    ctx = context(np.tile(np.arange(5), (2, 1)))
    ctx = dataclasses.replace(ctx, shared={DISTANCE_BIAS: jnp.asarray(normal(6, 2))})

    @eqx.filter_jit
    def both(block):
        attended = x + block.mixer(x, ctx)
        return block(x, ctx)[0], attended + block.post_layers[0].layer(attended, ctx)

    got, want = both(block)
    assert_close(got, np.asarray(want), units=64)


def test_decoders_refuse_layers_of_encoders():
    """These layers have no cache."""
    for name, layers in {
        "LocalAttentionConfig": dict(mixer=CONFIGS["published"], mlp=None),
        "LightConvolutionConfig": dict(mixer=None, mlp=None, post_layers=(ed.ExtraLayerConfig(layer=CONVOLUTION),)),
    }.items():
        with refused(ed.ConfigError, "DecoderConfig.blocks", name):
            ed.DecoderConfig(vocab_size=4, embed_dim=EMBED, blocks=(ed.BlockConfig(**layers),), final_norm=None)
