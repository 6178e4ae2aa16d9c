"""Quantized caches: values are correct up to the error of the format, and everything else equals other caches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.kernels.quantized_kv import BOUNDS, dequantize, quantize
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import CachedKV, KVShape, NewKV
from eqx_decoders.layers.mask import Causal, SlidingWindow
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.cached_mixers import decoder
from tests.layers.common import attend_past, normal
from tests.models import extend, filled, rich_decoder, some_tokens


FORMATS = tuple(BOUNDS)
LOST = {"int8": 0.5 / 127, "int4": 0.5 / 7, "float8_e4m3fn": 1 / 16}  # relative to the largest value


# --- the format ---


@pytest.mark.slow(fast=("1-int8",))
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale_heads", [1, 3])
def test_values_round_trip_up_to_the_error_of_the_format(dtype, scale_heads):
    x = jnp.asarray(normal(50, 3, 16) * np.exp(4 * normal(50, 3, 1, seed=2)))
    stored, scale = quantize(x, dtype, scale_heads)
    assert stored.dtype == dtype and scale.shape == (50, scale_heads) and scale.dtype == jnp.bfloat16
    got = dequantize(stored, scale, jnp.float32)
    most = jnp.abs(x).max((1, 2) if scale_heads == 1 else 2, keepdims=True)
    assert jnp.all(jnp.abs(got - x) <= most * LOST[dtype] * (1 + 2**-7))
    if dtype.startswith("float"):
        assert jnp.all(jnp.abs(got - x) <= jnp.maximum(jnp.abs(x) / 16, most * 2**-18))
    again = quantize(got, dtype, scale_heads)
    assert_array_equal(again[0], stored)
    assert_array_equal(again[1], scale)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_tiny_values_and_nan(dtype):
    rows = jnp.asarray([[0.0, 0, 0], [1e-42, 0, -1e-42], [np.nan, 1, 2], [3e38, -3e38, 1]])[:, None]
    got = dequantize(*quantize(rows, dtype, 1), jnp.float32)[:, 0]
    assert not got[0].any() and not got[1].any() and jnp.isnan(got[2]).any() and jnp.isfinite(got[3]).all()
    assert_allclose(got[3, :2], [3e38, -3e38], rtol=0.01)


def test_formats_are_validated():
    for wrong in ("int16", "float8_e5m2", "uint8", "nonsense"):
        with refused(ConfigError, f"CacheFormat.dtype='{wrong}'", "'int8'", "'int4'", "'float8_e4m3fn'"):
            CacheFormat(dtype=wrong)
    with refused(Exception, "scale_over"):
        CacheFormat(scale_over="head")  # type: ignore
    assert CacheFormat.of(jnp.int8) == CacheFormat(dtype="int8") == CacheFormat.of(CacheFormat(dtype=np.int8))
    assert CacheFormat(dtype="int4").unscaled_dtype == jnp.float32 and CacheFormat().unscaled_dtype == jnp.bfloat16


def test_dtypes_and_shapes_of_values_and_scales():
    config = rich_decoder()
    one, blocks = dict(dtype="int4", scale_over="heads_and_head_dim"), dict(dtype="int8", scale_block=2)
    for given, scales in (("int8", 2), (ed.CacheFormat(**one), 1), (ed.CacheFormat(**blocks), 2 * 4)):
        cache = ed.abstract_cache(config, 3, 20, dtype=given)
        small = [x for x in jax.tree.leaves(cache) if x.ndim == 5]
        others = [x for x in jax.tree.leaves(cache) if x.ndim == 4]
        assert {x.dtype for x in small} == {jnp.dtype(CacheFormat.of(given).dtype)} and len(small) == len(others) == 4
        assert {(x.dtype.name, x.shape[2]) for x in others} == {("bfloat16", scales)}
        made = ed.init_cache(config, 3, 20, dtype=given)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


# --- reading ---


def stored_past(dtype, scale_heads, values=True, seed=0):
    """Return a past, and its dequantized float32 values."""
    key, value = (jnp.asarray(normal(2, 2, 11, 8, seed=seed + i)) for i in range(2))
    (key, key_scale), (value, value_scale) = (
        tuple(y.swapaxes(1, 2) for y in quantize(x.swapaxes(1, 2), dtype, scale_heads)) for x in (key, value)
    )
    places = jnp.where(jnp.arange(11)[None] < jnp.asarray([[11], [4]]), jnp.arange(11), -1)
    past = CachedKV(key, value if values else None, places, key_scale, value_scale if values else None)
    read = dequantize(value, value_scale, jnp.float32) if values else None
    return past, CachedKV(past.keys(jnp.float32), read, places)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale_heads, values", [(2, True), (1, False)])
def test_scaling_scores_and_weights_equals_dequantization(dtype, scale_heads, values):
    query = jnp.asarray(normal(2, 3, 4, 8, seed=5))
    options = dict(mask=SlidingWindow(9), soft_cap=3.0, query_positions=jnp.asarray([[11, 12, 13], [4, -1, -1]]))
    got, want = (
        attend_past(query, past, execution=ed.Execution(), **options)
        for past in stored_past(dtype, scale_heads, values)
    )
    assert_close(got, want)
    for kernel in ("dot", "chunked"):
        run = ed.Execution(attention=kernel)
        assert_close(attend_past(query, stored_past(dtype, scale_heads, values)[0], execution=run, **options), want)


def test_bfloat16_queries_lose_no_more_than_without_quantization():
    """The error of bfloat16 activations is as small as with keys and values that were not quantized."""
    query = jnp.asarray(normal(2, 3, 4, 8, seed=5), jnp.bfloat16)
    past, plain = stored_past("int8", 2)
    options = dict(mask=Causal(), query_positions=jnp.asarray([[11, 12, 13], [4, -1, -1]]), execution=ed.Execution())
    out, lse = attend_past(query, past, **options)
    want, want_lse = attend_past(query.astype(jnp.float32), plain, **options)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert_close(out.astype(jnp.float32), want, dtype=jnp.bfloat16, units=1)
    assert_close(lse, want_lse)


# --- rows ---


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_are_copied_bit_by_bit(dtype):
    tokens, kind = jnp.arange(7)[None], CacheFormat(dtype=dtype)
    entries = NewKV(*(jnp.asarray(normal(2, 1, 7, 2, 8, seed=seed)) for seed in (1, 2)))

    def empty(rows, slots, rolling=False, kind=kind):
        return KVShape(slots=slots, kv_heads=2, head_dim=8, rolling=rolling).build(2, rows, kind)

    source = empty(1, 9).commit(entries, tokens)
    same = empty(3, 9).with_row(2, source)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), same.row(2), source))
    longer = empty(3, 12).with_row(1, source)
    rolling = empty(3, 4, True).with_row(1, longer.row(1))
    for name in ("key", "value", "key_scale", "value_scale"):
        stored, there, turned = (getattr(x, name) for x in (source, longer, rolling))
        assert_array_equal(there[:, 1, :, :9], stored[:, 0])
        for position in range(3, 7):
            assert_array_equal(turned[:, 1, :, position % 4], stored[:, 0, :, position])
    # through another format and back
    wide = empty(2, 12, kind=CacheFormat(dtype="float32")).with_row(0, source)
    back = empty(2, 9).with_row(0, wide.row(0))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), back.row(0), source))
    gone = same.empty_rows(jnp.asarray([2]))
    assert not gone.key.any() and (gone.positions == -1).all()


# --- decoders ---


def share(got, want):
    return float(jnp.abs(got - want).max() / jnp.abs(want).max())


def check_pieces(model, cache, pieces, bound):
    """Compare chunked prefill and decoding, in which a row pauses, with one call."""
    tokens = some_tokens(2, 14)
    want, begin = model(tokens).logits, 0
    for piece in pieces:
        here = jnp.broadcast_to(jnp.arange(begin, begin + piece), (2, piece))
        here = here.at[1].set(jnp.where(here[1] < 9, here[1], -1))
        logits, cache = extend(model, tokens[:, begin : begin + piece], cache, here)
        real = here >= 0
        got, there = (np.where(real[..., None], x, 0) for x in (logits, want[:, begin : begin + piece]))
        assert share(got, there) < bound
        begin += piece
    return cache


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, given, bound",
    [
        ("keys", "int8", 0.03),
        ("indexed", "int8", 0.06),
        ("keys", "int4", 0.5),
        ("keys", "float8_e4m3fn", 0.2),
        ("keys", CacheFormat(dtype="int8", scale_over="heads_and_head_dim"), 0.03),
        ("chunks", "int8", 0.03),
        ("blocks", "int8", 0.03),
        ("latents", "int8", 0.05),
        ("latents", "float8_e4m3fn", 0.3),
    ],
)
def test_pieces_equal_one_call(kind, given, bound):
    """Rolling windows, a row that stops, chunked prefill and single tokens."""
    model = filled(decoder(kind))
    cache = ed.init_cache(model.config, 2, 16, dtype=given)
    cache = check_pieces(model, cache, (5, 5, 1, 1, 1, 1), bound)
    assert cache.length.tolist() == [14, 9]


@pytest.mark.slow
@pytest.mark.parametrize("given", ["int8", CacheFormat(dtype="float8_e4m3fn", scale_over="heads_and_head_dim")])
@pytest.mark.parametrize("kind", ["keys", "indexed", "latents"])
def test_sharded_cache_equals_one_device(kind, given):
    tokens, model = some_tokens(4, 13), filled(decoder(kind))
    for sizes in (dict(data=2, tensor=2, context=2), dict(context=8)):
        layout, results = ed.Layout.create(**sizes), []
        for here in (ed.Layout(), layout):
            placed, cache = model.place(here), ed.init_cache(model.config, 4, 16, dtype=given, layout=here)
            for begin, end in ((0, 8), (8, 12), (12, 13)):
                logits, cache = extend(placed, tokens[:, begin:end], cache)
            results.append((logits, cache))
        (want, kept), (got, split) = results
        # another rounding may change a value by one step
        assert share(jax.device_get(got), jax.device_get(want)) < 0.02, sizes
        changed = [
            np.mean(np.asarray(a) != np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (kept, split)), strict=True)
        ]
        assert max(changed) < 0.02, changed


@pytest.mark.slow
def test_generation_uses_the_quantized_values():
    model = filled(rich_decoder(2))
    prompt = some_tokens(2, 8)
    cache = ed.init_cache(model.config, 2, 16, dtype="int4")
    step = eqx.filter_jit(
        lambda model, tokens, cache: (lambda out: (out.logits[:, -1].argmax(-1), out.cache))(model(tokens, cache=cache))
    )
    want, tokens = [], prompt
    for _ in range(6):
        token, cache = step(model, tokens, cache)
        want.append(token)
        tokens = token[:, None].astype(jnp.int32)
    got = ed.generate(model, prompt, max_new_tokens=6, cache_dtype="int4")
    assert got.tolist() == jnp.stack(want, 1).tolist()
    with refused(ConfigError, "CacheFormat.dtype='int5'"):
        ed.generate(model, prompt, max_new_tokens=6, cache_dtype="int5")


@pytest.mark.slow
def test_streaming_and_drafts_accept_a_format():
    config = ed.with_mtp(rich_decoder(2), 1)
    model, prompt = filled(config), some_tokens(2, 8)
    want = ed.generate(model, prompt, max_new_tokens=6, cache_dtype="int8")
    found = list(ed.stream(model, prompt, max_new_tokens=6, cache_dtype="int8"))
    assert np.stack(found, 1).tolist() == want.tolist()
    plain = ed.generate(model, prompt, max_new_tokens=6, num_draft_tokens=1, cache_dtype="float32")
    assert plain.tolist() == ed.generate(model, prompt, max_new_tokens=6).tolist()
    assert ed.generate(model, prompt, max_new_tokens=6, num_draft_tokens=1, cache_dtype="int8").shape == want.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next-80b", "kimi-linear-48b-a3b"])
def test_states_are_not_quantized(name):
    config = ed.get_config(name)
    caches = [ed.abstract_cache(config, 2, 64, dtype=dtype) for dtype in ("int8", "float32")]
    from eqx_decoders.layers.cache.base import is_layer_cache
    from eqx_decoders.layers.cache.recurrent_state import ConvState, RecurrentState

    pairs = zip(*(jax.tree.leaves(cache.layer_caches, is_leaf=is_layer_cache) for cache in caches), strict=True)
    for one, other in pairs:
        if isinstance(one, RecurrentState | ConvState):
            assert jax.tree.leaves(one) == jax.tree.leaves(other)
