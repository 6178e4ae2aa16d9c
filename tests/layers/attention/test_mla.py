"""Multi-head latent attention against NumPy in float64, and its two forms against each other."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.attention.kernels.registry import run_kernel
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.cache.kv_cache import CachedKV
from eqx_decoders.layers.mask import Bidirectional, Chunked, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.model.weight_table import describe
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights, pair_axes
from eqx_decoders.sharding.axes import axes, named_leaves, product_axes, replaced
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.training.flops import flops_per_token
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import apply
from tests.models import EMBED, VOCAB, filled, some_tokens
from tests.oracles import plain_frequencies, rotate_by_hand, sees, wide, yarn_by_hand
from tests.programs import tpu_devices


# all sizes are different
SIZES = dict(num_heads=2, q_rank=7, kv_rank=6, nope_dim=5, rope_dim=4, value_dim=3, rope=Rope(theta=10.0))
YARN = YarnRope(theta=100.0, factor=4.0, original_length=8, attention_factor=1.1)
RICH = dict(
    mask=SlidingWindow(3),
    rope=Rope(theta=10.0, pairing="interleaved"),
    query_scale=0.4,
    norm=RMSNormConfig(eps=0.1, offset=1.0),
    bias=True,
)
OPTIONS = [dict(), dict(q_rank=None), RICH, RICH | dict(q_rank=None, mask=Chunked(2)), dict(rope=YARN)]
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, -1]])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])
WIDTH = 8
X = np.random.default_rng(1).normal(size=(2, 7, WIDTH)).astype(np.float32)


def drawn(seed: int = 0, **options):
    """Return a layer with random arrays from NumPy: no zero bias, no scale of one."""
    config, generator = LatentAttentionConfig(**(SIZES | options)), np.random.default_rng(seed)
    tree = eqx.filter_eval_shape(lambda key: config.build(WIDTH, key=key), jax.random.key(0))
    arrays, static = eqx.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    arrays = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0.1, 0.5, leaf.shape), leaf.dtype), arrays)
    return eqx.combine(arrays, static)


def weights_of(layer):
    return {name: wide(leaf) for name, leaf in named_leaves(layer).items()}


def context(positions=POSITIONS, segments=SEGMENTS, **execution) -> ed.ForwardContext:
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)
    return ed.ForwardContext(jnp.asarray(positions, jnp.int32), segments, execution=ed.Execution(**execution))


# --- the formula ---


def rms_by_hand(config, vector, scale):
    return vector / math.sqrt(np.mean(vector * vector) + config.norm.eps) * (config.norm.offset + scale)


def rotated_by_hand(config, vector, position):
    rope, magnitude = config.rope, 1.0
    table = plain_frequencies(rope.theta, config.rope_dim)
    if isinstance(rope, YarnRope):
        table, magnitude = yarn_by_hand(rope, config.rope_dim), rope.attention_factor
    return rotate_by_hand(vector, max(position, 0), table, rope.pairing, magnitude)


def query_by_hand(config, w, x, position):
    """Return `heads qk_dim` of one token, unscaled."""
    if config.q_rank is None:
        query = np.einsum("e,ehd->hd", x, w["query"])
    else:
        low = rms_by_hand(config, x @ w["query_down"] + w.get("query_down_bias", 0), w["query_norm.scale"])
        query = np.einsum("r,rhd->hd", low, w["query_up"])
    for head in query:
        head[config.nope_dim :] = rotated_by_hand(config, head[config.nope_dim :], position)
    return query


def key_and_value_by_hand(config, w, x, position):
    """Return `heads qk_dim` and `heads value_dim` of one token."""
    low = x @ w["kv_down"] + w.get("kv_down_bias", 0)
    rope = rotated_by_hand(config, low[config.kv_rank :], position)
    both = np.einsum("r,rhd->hd", rms_by_hand(config, low[: config.kv_rank], w["kv_norm.scale"]), w["kv_up"])
    key = [np.concatenate([head[: config.nope_dim], rope]) for head in both]
    return np.stack(key), both[:, config.nope_dim :]


def latent_by_hand(config, w, x, positions=POSITIONS, segments=SEGMENTS):
    """Compute token by token and head by head, with explicit keys and values."""
    scale = config.query_scale or 1 / math.sqrt(config.nope_dim + config.rope_dim)
    out = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        query = scale * query_by_hand(config, w, x[b, t], positions[b, t])
        top, bottom = np.zeros((config.num_heads, config.value_dim)), 1e-300
        for s in range(x.shape[1]):
            if sees(config.mask, positions[b, t], positions[b, s], segments[b, t] == segments[b, s]):
                key, value = key_and_value_by_hand(config, w, x[b, s], positions[b, s])
                share = np.exp(np.sum(query * key, axis=1))[:, None]
                top, bottom = top + share * value, bottom + share
        out[b, t] = np.einsum("hd,hde->e", top / bottom, w["out"]) + w.get("out_bias", 0)
    return out


@pytest.mark.slow(fast=("q_rank",))
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_layer_matches_a_loop(options):
    layer = drawn(**options)
    kernel = "chunked" if options == RICH else "dot"
    out, entries = apply(layer, jnp.asarray(X), context(attention=kernel))
    assert_close(out, latent_by_hand(layer.config, weights_of(layer), wide(X)), units=128)
    assert entries.key.shape == (2, 7, 1, 6 + 4)
    assert entries.value is None


def test_cache_holds_the_latent_and_the_rotated_key():
    layer = drawn(**RICH)
    w, config = weights_of(layer), layer.config
    _, entries = apply(layer, jnp.asarray(X), context())
    low = wide(X[0, 6]) @ w["kv_down"] + w["kv_down_bias"]
    want = [rms_by_hand(config, low[:6], w["kv_norm.scale"]), rotated_by_hand(config, low[6:], POSITIONS[0, 6])]
    assert_close(entries.key[0, 6, 0], np.concatenate(want), units=128)


def test_cache_is_padded_to_full_lanes_with_zeros():
    layer = drawn(kv_rank=126)
    _, entries = apply(layer, jnp.asarray(X), context())
    assert entries.key.shape == (2, 7, 1, 256)
    assert np.all(entries.key[..., :130]) and not np.any(entries.key[..., 130:])
    for rank, rope, cached in ((512, 64, 640), (6, 4, 10), (123, 4, 127), (124, 4, 128), (125, 4, 256)):
        config = dataclasses.replace(layer.config, kv_rank=rank, rope_dim=rope)
        assert config.cached_dim == config.cache_shape(4).head_dim == cached


def test_gradients_equal_finite_differences_of_the_formula():
    """For every weight and for x, along random directions: central differences in float64."""
    layer = drawn(**RICH)
    w, x = weights_of(layer), wide(X)
    bars = np.random.default_rng(3).normal(size=X.shape)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(both):
        return jnp.sum(both[0](both[1], context())[0] * jnp.asarray(bars, jnp.float32))

    layer_bar, x_bar = gradient((layer, jnp.asarray(X)))
    gradients = {name: wide(leaf) for name, leaf in named_leaves(layer_bar).items()} | {"x": wide(x_bar)}
    for name, bar in gradients.items():
        way, step = np.random.default_rng(len(name)).normal(size=bar.shape), 1e-5
        moved = [w | {"x": x} for _ in range(2)]
        moved[0][name], moved[1][name] = moved[0][name] + step * way, moved[1][name] - step * way
        up, down = (np.sum(bars * latent_by_hand(layer.config, each, each["x"])) for each in moved)
        scale = np.linalg.norm(bar) * np.linalg.norm(way)
        assert np.sum(bar * way) == pytest.approx((up - down) / (2 * step), abs=1e-5 * scale), name


# --- the two forms ---


def in_parts(layer, seed: int = 7):
    """Return the layer with low-rank pairs and magnitudes on every matrix, and the layer with the merged weights."""
    generator, words, pairs = np.random.default_rng(seed), axes(layer), {}
    for name, base in named_leaves(layer).items():
        if name in WORDS:
            sizes = dict(zip(words[name], base.shape, strict=True)) | {"rank": 2}
            parts = pair_axes(words[name])
            shapes = [[sizes[word] for word in parts[field]] for field in ("lora_a", "lora_b")]
            shapes.append([sizes[word] for word in parts["lora_b"] if word != "rank"])
            first, second, lengths = (jnp.asarray(generator.normal(0, 0.5, shape), jnp.float32) for shape in shapes)
            pairs[name] = LowRank(base, first, second, 0.3, lengths)
    return replaced(layer, pairs), replaced(layer, {name: pair.array() for name, pair in pairs.items()})


def past_of(entries, count: int, extra: int) -> CachedKV:
    """Return the first tokens of a call as a cache with rotated slots, some of which are empty."""
    order = (np.arange(count + extra) + 1) % (count + extra)
    key = jnp.pad(entries.key[:, :count], ((0, 0), (0, extra), (0, 0), (0, 0)), constant_values=9.0)[:, order]
    positions = jnp.asarray(np.where(order < count, order, -1)[None].repeat(2, 0), jnp.int32)
    return CachedKV(key=key.transpose(0, 2, 1, 3), value=None, positions=positions)


@pytest.mark.parametrize(
    "pairs", [pytest.param(False, marks=pytest.mark.slow), True], ids=["weights", "weights-in-parts"]
)
def test_absorbed_form_matches_expanded_form(pairs):
    """In values and gradients: the last three of seven tokens attend to four cached tokens."""
    layer = drawn(mask=SlidingWindow(5), bias=True, kv_rank=6 if pairs else 126)
    layer, merged = in_parts(layer) if pairs else (layer, layer)
    bars = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, WIDTH)), jnp.float32)
    places = np.arange(7)[None].repeat(2, 0)

    def expanded(both):
        out = both[0](both[1], context(places, None))[0][:, 4:]
        return jnp.sum(bars * out), out

    def absorbed(both):
        layer, x = both
        _, entries = layer(x[:, :4], context(places[:, :4], None))
        out, _ = layer(x[:, 4:], context(places[:, 4:], None), past_of(entries, 4, 3))
        return jnp.sum(bars * out), out

    @eqx.filter_jit
    def run(both):
        return [eqx.filter_value_and_grad(loss, has_aux=True)(both) for loss in (expanded, absorbed)]

    ((_, want), want_bar), ((_, got), got_bar) = run((layer, jnp.asarray(X)))
    assert_close(got, np.asarray(want), units=128)
    assert_close(got_bar, want_bar, units=256)
    segments = np.ones_like(places)
    assert_close(want, latent_by_hand(merged.config, weights_of(merged), wide(X), places, segments)[:, 4:], units=128)
    for pair, bar in zip(low_rank_weights(layer).values(), low_rank_weights(got_bar[0]).values(), strict=True):
        assert np.any(pair.base) and not np.any(bar.base)
        assert np.any(bar.lora_a) and np.any(bar.lora_b) and np.any(bar.lora_magnitude)


def test_kernel_receives_platform_and_alignment(monkeypatch):
    """Kernel name, platform, and whether keys and queries are the same tokens. These do not change values."""
    calls = []

    def recording(inputs, options, kernel):
        calls.append((kernel, options.platform, options.aligned, options.mask))
        return run_kernel(inputs, options, kernel)

    monkeypatch.setattr("eqx_decoders.layers.attention.attend.run_kernel", recording)
    monkeypatch.setattr(ed.Layout, "platform", property(lambda self: "tpu"))
    layer = drawn(mask=Chunked(2))
    for past in (None, nothing()):
        eqx.filter_eval_shape(layer, jnp.asarray(X), context(attention="chunked"), past)
    assert calls == [("chunked", "tpu", aligned, Chunked(2)) for aligned in (True, True, False)]


def nothing() -> CachedKV:
    return CachedKV(key=jnp.ones((2, 1, 3, 6 + 4)), value=None, positions=jnp.full((2, 3), -1))


def test_documents_are_separate_in_a_call_with_a_cache():
    """Segments separate the tokens of a call in the absorbed form, too."""
    layer = drawn()
    out, _ = apply(layer, jnp.asarray(X), context(), nothing())
    assert_close(out, latent_by_hand(layer.config, weights_of(layer), wide(X)), units=128)


@pytest.mark.slow
@pytest.mark.parametrize("past", [None, nothing()], ids=["expanded", "absorbed"])
def test_bfloat16_stays_close_to_float32(past):
    layer = drawn(q_rank=None, mask=SlidingWindow(3))
    ctx = context(precision=ed.Precision(compute=jnp.bfloat16))
    out, entries = apply(layer, jnp.asarray(X, jnp.bfloat16), ctx, past)
    assert out.dtype == entries.key.dtype == jnp.bfloat16
    assert_close(
        out.astype(jnp.float32), latent_by_hand(layer.config, weights_of(layer), wide(X)), units=8, dtype="bfloat16"
    )


# --- in a decoder ---


def decoder(layers: int = 4) -> ed.DecoderConfig:
    """A window and a full layer, with and without a query latent, with sizes that meshes of eight devices divide."""
    sizes = dict(num_heads=4, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)
    local = LatentAttentionConfig(q_rank=None, mask=SlidingWindow(5), rope=Rope(pairing="interleaved"), **sizes)
    full = LatentAttentionConfig(q_rank=8, bias=True, query_scale=0.4, **sizes)
    norm = RMSNormConfig()
    blocks = tuple(ed.BlockConfig(mixer=mixer, mlp=None, pre_mixer_norm=norm) for mixer in (full, local))
    return ed.DecoderConfig(
        vocab_size=VOCAB, embed_dim=EMBED, blocks=(blocks * layers)[:layers], final_norm=norm, tied=True
    )


@pytest.mark.slow
def test_generation_with_both_forms_matches_a_single_call():
    model, prompt = filled(decoder(1)), some_tokens(2, 4)
    tokens = ed.generate(model, prompt, max_new_tokens=4)
    whole = jnp.concatenate([prompt, tokens], axis=1)
    best = jnp.argmax(eqx.filter_jit(model)(whole).logits, axis=-1)
    assert_array_equal(tokens, best[:, 3:-1])


def test_cache_has_one_vector_per_token():
    layout = ed.Layout.create(data=4, tensor=2)
    ((first, second),) = ed.abstract_cache(decoder(), 4, 16, layout=layout).layer_caches
    full, local = first["mixer"], second["mixer"]
    assert (local.key.shape, local.rolling) == ((2, 4, 1, 5, 12), True)
    assert (full.key.shape, full.rolling) == ((2, 4, 1, 16, 12), False)
    assert local.value is None and full.value is None
    assert full.key.sharding.spec == P(None, ("data",), None, None, None)
    with refused(ed.ConfigError, "bidirectional", "cache"):
        LatentAttentionConfig(**SIZES | dict(mask=Bidirectional())).cache_shape(4)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["latent", "indexed", "one-head-a-device"])
def test_a_decoding_step_on_tpu_does_not_copy_the_cache(mixer):
    """Compiled for a v5p: temporaries are much smaller than the cache."""
    layout = ed.Layout.create(data=2, tensor=2, devices=tpu_devices("v5p:2x2x1"))
    sizes = dict(num_heads=16, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    mixers = {
        "latent": LatentAttentionConfig(**sizes),
        "indexed": LatentAttentionConfig(**sizes | dict(q_rank=512, indexer=IndexerConfig())),
        "one-head-a-device": AttentionConfig(num_heads=16, num_kv_heads=2, head_dim=128),
    }
    block = ed.BlockConfig(mixer=mixers[mixer], mlp=None, pre_mixer_norm=RMSNormConfig())
    config = ed.DecoderConfig(vocab_size=VOCAB, embed_dim=1024, blocks=(block,) * 16, final_norm=None)
    precision = ed.Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
    model = ed.abstract(config, layout=layout, precision=precision)
    cache = ed.abstract_cache(config, 8, 8192, layout=layout)
    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32, sharding=layout.activation_sharding("batch length", (8, 1)))

    def step(model, cache, tokens):
        return model.run(tokens, cache=cache)[:2]

    memory = jax.jit(step, donate_argnums=1).lower(model, cache, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * sum(device_bytes(leaf) for leaf in jax.tree.leaves(cache))


# --- weights ---


WORDS = {
    "query": (("embed",), ("heads", "qk_dim")),
    "query_down": (("embed",), ("q_rank",)),
    "query_up": (("q_rank",), ("heads", "qk_dim")),
    "kv_down": (("embed",), ("latent",)),
    "kv_up": (("kv_rank",), ("heads", "kv_dim")),
    "out": (("heads", "value_dim"), ("embed",)),
}


def test_all_matrices_have_product_axes():
    words = axes(drawn(bias=True)) | axes(drawn(q_rank=None, bias=True))
    found = {name: product_axes(here) for name, here in words.items()}
    assert {name: split for name, split in found.items() if split} == WORDS
    assert {name for name, split in found.items() if split is None} == {
        "query_norm.scale", "kv_norm.scale", "query_down_bias", "kv_down_bias", "out_bias",
    }  # fmt: skip


def test_ranks_are_sharded_if_embed_is_not():
    """With low-rank pairs on all matrices, every weight is sharded."""
    model = ed.abstract(decoder(), layout=ed.Layout.create(fsdp=4, tensor=2))
    config = LoRAConfig(rank=2, targets=tuple(f"*.mixer.{name}" for name in WORDS))
    lines = [" ".join(line.split()) for line in describe(add_lora(model, config, key=jax.random.key(0))).splitlines()]
    found = {line.split()[0].partition(".unit.")[2]: line for line in lines if ".mixer." in line}
    assert "layers q_rank heads qk_dim -, fsdp, tensor, -" in found["0.mixer.query_up.base"]
    assert "layers kv_rank heads kv_dim -, fsdp, tensor, -" in found["0.mixer.kv_up.base"]
    assert "layers embed latent -, fsdp, -" in found["0.mixer.kv_down.base"]
    assert "layers rank heads kv_dim -, -, tensor, -" in found["0.mixer.kv_up.lora_b"]
    assert sum(name.endswith("lora_a") for name in found) == 4 + 5


@pytest.mark.slow
def test_new_weights_have_the_variance_of_their_fan_in():
    sizes = dict(num_heads=16, kv_rank=40, nope_dim=24, rope_dim=8, value_dim=20, bias=True)
    config = LatentAttentionConfig(q_rank=48, **sizes)
    layer = eqx.filter_jit(lambda key: config.build(64, key=key))(jax.random.key(0))
    fans = dict(query_down=64, query_up=48, kv_down=64, kv_up=40, out=16 * 20)
    for name, leaf in named_leaves(layer).items():
        x = np.asarray(leaf, np.float64)
        if name in fans:
            assert np.std(x) == pytest.approx(fans[name] ** -0.5, rel=5 * (2 * x.size) ** -0.5), name
        else:
            assert np.all(x == (1 if name.endswith("scale") else 0)), name


def test_operations_are_counted():
    """Queries, keys and values of each head and the matrices, counted by hand for one layer of both types."""
    full = 16 * 8 + 8 * 4 * 10 + 16 * 12 + 8 * 4 * 11 + 4 * 5 * 16
    local = 16 * 4 * 10 + 16 * 12 + 8 * 4 * 11 + 4 * 5 * 16
    mixing = 4 * (10 + 5) * (100 + 5)
    assert flops_per_token(decoder(2), 100) == 6 * (full + local + VOCAB * 16 + mixing)
