"""Paged caches equal contiguous caches, for any order of pages and any earlier content."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from tests.compare import assert_array_equal, assert_close
from tests.layers.cache.test_quantized_cache import share
from tests.layers.cached_mixers import decoder
from tests.layers.common import normal
from tests.models import extend, filled, rich_decoder, some_tokens


SHAPE = KVShape(slots=12, kv_heads=2, head_dim=8, rolling=False)


def random_entries(layers, rows, length, values=True, seed=0):
    key, value = (jnp.asarray(normal(layers, rows, length, 2, 8, seed=seed + i)) for i in range(2))
    return NewKV(key, value if values else None)


def poisoned(cache):
    """Fill unwritten slots with NaN."""

    def poison(x):
        numbers = jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 3
        return jnp.full_like(x, jnp.nan) if numbers else x

    return jax.tree.map(poison, cache)


# --- one layer cache ---


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, values, head_dim",
    [
        ("int8", True, 8),
        ("float32", True, 8),
        ("float32", False, 8),
        ("int8", False, 8),
        ("float32", True, 80),
        ("int8", True, 80),
    ],
)
def test_pages_contain_the_same_as_slots(dtype, values, head_dim):
    """With any order of pages, skipped tokens, missing pages, and rows without pages."""
    commit = eqx.filter_jit(lambda cache, entries, positions: cache.commit(entries, positions))
    shape = dataclasses.replace(SHAPE, values=values, head_dim=head_dim)
    key, value = (jnp.asarray(normal(2, 3, 12, 2, head_dim, seed=i)) for i in range(2))
    entries = NewKV(key, value if values else None)
    positions = np.where(np.arange(12)[None] < np.asarray([[12], [5], [0]]), np.arange(12), -1)
    slots = shape.build(2, 3, CacheFormat.of(dtype))
    paged = poisoned(build_pages(shape, 2, 3, 12, dtype, PageConfig(page_size=4, num_pages=7)))
    assert paged.table.shape == (3, 3) and (paged.table == -1).all() and paged.key.shape[3] == 4
    assert paged.key.shape[4] == {8: 16 if values else 8, 80: 128}[head_dim]
    paged = paged.with_tables(jnp.asarray([[5, 0, 3], [6, 2, -1], [-1, -1, -1]], jnp.int32))
    for begin in (0, 5, 6):
        end = {0: 5, 5: 6, 6: 12}[begin]
        cut = jax.tree.map(lambda x: x[:, :, begin:end], entries)  # noqa: B023
        here = jnp.asarray(positions[:, begin:end], jnp.int32)
        slots, paged = commit(slots, cut, here), commit(paged, cut, here)
    assert paged.lengths.tolist() == [12, 5, 0]
    assert_array_equal(paged.positions, slots.positions)
    past = paged.past(jnp.int32(1)).whole()
    want = slots.past(tuple(None if x is None else x[1] for x in slots.slices()))
    for name in ("key", "value", "key_scale", "value_scale"):
        got, there = getattr(past, name), getattr(want, name)
        assert (got is None) == (there is None)
        if got is not None:
            seen = (slots.positions >= 0).reshape(3, 1, 12, *(1,) * (got.ndim - 3))
            assert_array_equal(np.where(seen, got, 0), np.where(seen, there, 0))
            assert jnp.isfinite(got.astype(jnp.float32)).all()
    picks = jnp.asarray([[11, 3, 40], [4, 5, 0], [0, 1, 2]])
    found, places = paged.past(jnp.int32(1)).at(picks, jnp.float32)
    assert places.tolist() == [[11, 3, -1], [4, -1, 0], [-1, -1, -1]]
    assert_array_equal(found[0, 1], want.keys(jnp.float32)[0, :, 3])
    kept, where = paged.row_tokens(jnp.int32(1), jnp.asarray([[2, 4, 7, -1]]))
    assert where.tolist() == [[2, 4, -1, -1]]
    assert_array_equal(kept.key[1, 0, :2], slots.key[1, 1, :, jnp.asarray([2, 4])])


def test_writes_outside_of_pages_are_dropped():
    paged = build_pages(SHAPE, 2, 2, 12, "float32", PageConfig(page_size=4, num_pages=3))
    paged = paged.with_tables(jnp.asarray([[2, -1, -1], [-1, 1, 0]], jnp.int32))
    entries, places = random_entries(2, 2, 14), jnp.broadcast_to(jnp.arange(14), (2, 14))
    paged = paged.commit(entries, places)
    assert paged.positions.tolist() == [[0, 1, 2, 3, *[-1] * 8], [*[-1] * 4, *range(4, 12)]]
    assert_array_equal(paged.lanes.split(paged.stored).key[:, 0].swapaxes(1, 2), entries.key[:, 1, 8:12])


@pytest.mark.slow
def test_rows_are_copied_between_paged_and_other_caches():
    entries, places = random_entries(2, 1, 7), jnp.arange(7)[None]
    source = dataclasses.replace(SHAPE, slots=9).build(2, 1, "int8").commit(entries, places)
    paged = build_pages(SHAPE, 2, 3, 12, "int8", PageConfig(page_size=4)).with_row(2, source)
    assert paged.lengths.tolist() == [0, 0, 7]
    back = dataclasses.replace(SHAPE, slots=9).build(2, 2, "int8").with_row(1, paged.row(2)).row(1)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), back, source))
    other = build_pages(SHAPE, 2, 2, 12, "float32", PageConfig(page_size=3)).with_row(0, paged.row(2))
    assert_array_equal(other.entries().key[:, 0, :7], source.entries().plain().key[:, 0, :7])
    assert (paged.empty_rows(jnp.array([2, 3])).positions == -1).all()


# --- decoders ---


def check_paged(kind, dtype=jnp.float32, layout=None, bound=None, size=4):
    """Check chunked prefill and decoding of two rows, one of which stops early.

    Pages are in any order, pages before windows are null pages, and unwritten slots are NaN.
    """
    layout, model, tokens = layout or ed.Layout(), filled(decoder(kind)), some_tokens(2, 14)
    want, model = model(tokens).logits, model.place(layout)
    pages = PageConfig(page_size=size, num_pages=2 * -(-16 // size))
    cache = poisoned(ed.init_cache(model.config, 2, 16, dtype=dtype, layout=layout, pages=pages))
    order, begin = np.random.default_rng(0).permutation(pages.num_pages), 0
    for piece in (5, 5, 1, 1, 1, 1):
        row_pages = pages.row_pages(16)
        table = np.asarray(order.reshape(2, row_pages), np.int32)
        behind = (np.arange(row_pages) + 1) * size <= np.asarray(cache.length)[:, None] - 4 + 1
        cache = cache.with_tables({0: jnp.asarray(table), 4: jnp.asarray(np.where(behind, -1, table))})
        here = jnp.broadcast_to(jnp.arange(begin, begin + piece), (2, piece))
        here = here.at[1].set(jnp.where(here[1] < 9, here[1], -1))
        logits, cache = extend(model, tokens[:, begin : begin + piece], cache, here)
        got, there = (np.where((here >= 0)[..., None], x, 0) for x in (logits, want[:, begin : begin + piece]))
        if bound is None:
            assert_close(got, there, units=256)
        else:
            assert share(got, there) < bound
        begin += piece
    assert cache.length.tolist() == [14, 9]


@pytest.mark.parametrize(
    "kind", ["keys", *(pytest.param(kind, marks=SLOW) for kind in ("indexed", "chunks", "blocks", "latents"))]
)
def test_paged_decoding_equals_one_call(kind):
    check_paged(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keys", "indexed", "latents", "blocks"])
def test_quantized_pages_and_other_page_sizes(kind):
    check_paged(kind, "int8", bound=0.06)
    check_paged(kind, size=3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(data=2, tensor=2, context=2), dict(data=4, tensor=2)])
@pytest.mark.parametrize("kind", ["keys", "indexed", "latents"])
def test_sharded_pages(kind, sizes):
    layout = ed.Layout.create(**sizes)
    check_paged(kind, layout=layout)
    check_paged(kind, "int8", layout, bound=0.06)


@pytest.mark.parametrize("name", ["qwen3-next-80b", "deepseek32-671b", "gemma3-12b"])
def test_only_keys_and_values_are_paged(name):
    """States are stored per row, and windows have a separate number of pages."""
    from eqx_decoders.layers.cache.base import is_layer_cache
    from eqx_decoders.layers.cache.kv_cache import KVCache
    from eqx_decoders.layers.cache.paged import PagedKVCache
    from eqx_decoders.layers.cache.recurrent_state import ConvState, RecurrentState

    config = ed.get_config(name)
    slots = ed.abstract_cache(config, 2, 4096)
    paged = ed.abstract_cache(config, 2, 4096, pages=PageConfig(page_size=32, num_pages=200, window_pages=70))
    pairs = zip(*(jax.tree.leaves(cache.layer_caches, is_leaf=is_layer_cache) for cache in (slots, paged)), strict=True)
    for one, other in pairs:
        if isinstance(one, KVCache):
            assert isinstance(other, PagedKVCache) and other.window == (1024 if one.rolling else 0)
            assert other.key.shape[1] == (70 if one.rolling else 200)
        else:
            assert isinstance(one, RecurrentState | ConvState) and jax.tree.leaves(one) == jax.tree.leaves(other)


@pytest.mark.slow
def test_rows_move_between_caches_of_a_decoder():
    model, tokens = filled(rich_decoder()), some_tokens(2, 12)
    alone = ed.init_cache(model.config, 1, 8, dtype=jnp.float32)
    _, alone = extend(model, tokens[:1, :7], alone)
    many = ed.init_cache(model.config, 2, 12, dtype=jnp.float32, pages=PageConfig(page_size=4))
    _, many = extend(model, tokens[:, :3], many)
    many = many.reset(jnp.asarray([True, False])).with_row(0, alone)
    assert many.length.tolist() == [7, 3]
    here, want = many.length, model(tokens).logits
    logits, _ = extend(model, jnp.take_along_axis(tokens, here[:, None], axis=1), many)
    assert_close(logits[:, 0], jnp.take_along_axis(want, here[:, None, None], axis=1)[:, 0])
