"""Caches with a scale per block of head features: a large value only affects the precision of its block."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.kernels import pallas_paged, pallas_paged_gpu
from eqx_decoders.layers.attention.kernels.quantized_kv import BOUNDS, dequantize, quantize
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import CachedKV, KVShape
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from eqx_decoders.layers.mask import Causal
from eqx_decoders.serving.engine.request import Request
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.cache.test_paged import check_paged
from tests.layers.cache.test_quantized_cache import LOST, check_pieces, share
from tests.layers.cached_mixers import decoder
from tests.layers.common import attend_past, normal
from tests.models import extend, filled, some_tokens
from tests.serving.engines import SMALL, engine_for


BLOCKS = CacheFormat(dtype="float8_e4m3fn", scale_block=2)


@pytest.mark.slow(fast=("float8_e4m3fn",))
@pytest.mark.parametrize("dtype", BOUNDS)
def test_error_of_each_block_is_relative_to_its_largest_value(dtype):
    x = np.array(normal(50, 3, 16))
    x[:, 1, 5] = 1e4  # in the second block of the second head
    stored, scale = quantize(jnp.asarray(x), dtype, 12)
    assert stored.dtype == dtype and stored.shape == x.shape and scale.shape == (50, 12)
    got, most = np.asarray(dequantize(stored, scale, jnp.float32)), np.abs(x.reshape(50, 3, 4, 4)).max(-1)
    assert (np.abs(got - x).reshape(50, 3, 4, 4) <= most[..., None] * LOST[dtype] * (1 + 2**-7)).all()
    for before, again in zip((stored, scale), quantize(jnp.asarray(got), dtype, 12), strict=True):
        assert_array_equal(before, again)
    turned = dequantize(stored.swapaxes(0, 1)[None], scale.swapaxes(0, 1)[None], jnp.float32)  # heads before slots
    assert_array_equal(turned[0].swapaxes(0, 1), got)


def test_formats_define_which_values_share_a_scale():
    assert [BLOCKS.scale_heads(2, size) for size in (1, 2, 4, 64)] == [2, 2, 4, 64]
    with refused(ConfigError, "CacheFormat.scale_block=0"):
        CacheFormat(dtype="int8", scale_block=0)
    for options in (dict(scale_over="heads_and_head_dim", dtype="int8"), dict(dtype="bfloat16")):
        with refused(ConfigError, "CacheFormat.scale_block=4", "scale_over='head_dim'"):
            CacheFormat(scale_block=4, **options)
    with refused(ConfigError, "CacheFormat.scale_block=3"):
        ed.abstract_cache(decoder("keys"), 1, 8, dtype=CacheFormat(dtype="int8", scale_block=3))


@pytest.mark.slow
def test_attention_uses_the_dequantized_values():
    key, value, query = (
        jnp.asarray(normal(2, *shape, seed=i)) for i, shape in enumerate([(11, 2, 8)] * 2 + [(3, 4, 8)])
    )
    (key, key_scale), (value, value_scale) = quantize(key, "int8", 4), quantize(value, "int8", 4)
    read = (dequantize(*each, jnp.float32).swapaxes(1, 2) for each in ((key, key_scale), (value, value_scale)))
    stored = (x.swapaxes(1, 2) for x in (key, value))
    places = jnp.broadcast_to(jnp.arange(11), (2, 11))
    past = CachedKV(*stored, places, key_scale.swapaxes(1, 2), value_scale.swapaxes(1, 2))
    options = dict(mask=Causal(), query_positions=places[:, :3] + 11, execution=ed.Execution())
    assert_close(attend_past(query, past, **options), attend_past(query, CachedKV(*read, places), **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bound"),
    [("keys", 0.2), *((kind, 0.3) for kind in ("indexed", "latents", "chunks", "blocks"))],
)
def test_pieces_equal_one_call(kind, bound):
    model = filled(decoder(kind))
    check_pieces(model, ed.init_cache(model.config, 2, 16, dtype=BLOCKS), (5, 5, 1, 1, 1, 1), bound)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keys", "indexed", "latents", "blocks"])
def test_paged_decoding_with_scale_blocks(kind):
    check_paged(kind, BLOCKS, bound=0.3)


def test_paged_kernel_does_not_support_scale_blocks():
    shape = KVShape(slots=64, kv_heads=2, head_dim=128, rolling=False)
    for block, fits in ((None, True), (128, True), (64, False)):
        pages = build_pages(shape, 1, 1, 64, CacheFormat(dtype="int8", scale_block=block), PageConfig(page_size=32))
        assert pallas_paged.fits(pages, jnp.bfloat16, 4, None) == fits
        for capability, known in (("9.0", True), ("10.0", True), ("8.0", False), ("gfx942", False)):
            device = types.SimpleNamespace(compute_capability=capability)
            assert pallas_paged_gpu.fits(pages, jnp.bfloat16, 4, device) == (fits and known)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block", "sizes"),
    [("latents", 6, dict(tensor=2, data=4)), ("keys", 4, dict(tensor=2, context=4))],
)
def test_sharded_cache_equals_one_device(kind, block, sizes):
    """Also if devices share a latent head, each with the scales of some blocks."""
    tokens, model, results = some_tokens(4, 13), filled(decoder(kind)), []
    form = CacheFormat(dtype="float8_e4m3fn", scale_block=block)
    for layout in (ed.Layout(), ed.Layout.create(**sizes)):
        placed, cache = model.place(layout), ed.init_cache(model.config, 4, 16, dtype=form, layout=layout)
        for begin, end in ((0, 6), (6, 12), (12, 13)):
            logits, cache = extend(placed, tokens[:, begin:end], cache)
        results.append(jax.device_get((logits, cache)))
    (want, alone), (got, split) = results
    assert share(got, want) < 0.05  # another rounding may change a value by one step
    pairs = zip(*map(jax.tree.leaves, (alone, split)), strict=True)
    assert max(np.mean(np.asarray(a) != np.asarray(b)) for a, b in pairs) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("pages", [pytest.param(None, id="slots"), pytest.param(PageConfig(page_size=8), id="pages")])
def test_engine_equals_generate(pages):
    engine = engine_for("llama_rope", cache_dtype=BLOCKS, pages=pages)
    prompt = tuple(range(5, 5 + SMALL["prefill_chunk"]))
    want = ed.generate(engine.model, np.asarray([prompt], np.int32), max_new_tokens=12, cache_dtype=BLOCKS)
    for _ in range(2):  # the second time with cached prefixes
        assert engine.run([Request(prompt=prompt, max_new_tokens=12)])[0] == tuple(want[0].tolist())
