"""Page allocation: no page is lost or allocated twice, and shared pages are never written."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from eqx_decoders.serving.engine.page_pool import OutOfPages, PagePool, PageTables
from tests.errors import refused


def test_pages_are_allocated_shared_and_freed():
    pool = PagePool(4, 16)
    first, second = pool.allocate(1), pool.allocate(2)
    assert first + second == [0, 1, 2] and (pool.num_free, pool.num_used) == (1, 3)
    with refused(OutOfPages, "2 pages", "1 of 4"):
        pool.allocate(2)
    assert pool.num_free == 1 and pool.pages_for(0) == 0 and pool.pages_for(16) == 1 and pool.pages_for(17) == 2
    pool.share(second)
    assert pool.free(second) == [] and pool.references(1) == 1
    pool.share([2])
    assert pool.references(2) == 2 and pool.allocate(1) == [3] and pool.num_free == 0
    assert pool.free([2, 2, 0]) == [2, 0] and pool.allocate(1) == [2]


@pytest.mark.parametrize("method", ["free", "share"])
def test_unallocated_pages_are_refused(method):
    pool = PagePool(2, 4)
    pool.allocate()
    with refused(ConfigError, f"PagePool.{method}", "page=1"):
        getattr(pool, method)([0, 1])
    assert pool.references(0) == 1
    with refused(ConfigError, "page=2"):
        pool.references(2)
    with refused(ConfigError, "page=0", "1", "2"):
        pool.free([0, 0])


class History:
    """Rows of numbered tokens in pages, which are lists: a model of a paged cache."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.size, self.rows = int(self.random.integers(1, 6)), 4
        self.pool = PagePool(int(self.random.integers(6, 20)), self.size)
        self.tables = PageTables(self.pool, self.rows, 6)
        self.memory = np.full((self.pool.num_pages, self.size), -1)
        self.texts: list[list[int]] = [[] for _ in range(self.rows)]
        self.dropped = [0] * self.rows
        self.kept: list[int] = []  # references of other owners, such as a prefix cache
        self.next = 0

    def write(self, row: int) -> None:
        begin = len(self.texts[row])
        end = min(begin + int(self.random.integers(1, 2 * self.size + 2)), 6 * self.size)
        needed, before = self.tables.needed(row, begin, end), (self.tables.table.copy(), self.pool.num_free)
        try:
            self.tables.reserve(row, begin, end)
        except OutOfPages:
            assert needed > self.pool.num_free == before[1] and (self.tables.table == before[0]).all()
            return
        assert before[1] - self.pool.num_free == needed
        for position in range(begin, end):
            page = int(self.tables.table[row, position // self.size])
            assert self.pool.references(page) == 1, "one writer a page"
            self.memory[page, position % self.size] = self.next
            self.texts[row].append(self.next)
            self.next += 1

    def adopt(self, row: int) -> None:
        source = int(self.random.integers(self.rows))
        count = min(int(self.random.integers(1, 7)), len(self.texts[source]) // self.size)  # complete pages
        if source != row:
            self.release(row)
            self.tables.adopt(row, self.tables.table[source, :count].tolist())
            self.texts[row] = self.texts[source][: count * self.size]
            self.dropped[row] = min(self.dropped[source], count * self.size)

    def release(self, row: int) -> None:
        self.tables.release(row)
        self.texts[row], self.dropped[row] = [], 0

    def drop(self, row: int) -> None:
        position = int(self.random.integers(0, len(self.texts[row]) + 1))
        self.tables.free_before(row, position)
        self.dropped[row] = max(self.dropped[row], position // self.size * self.size)

    def keep(self, row: int) -> None:
        complete = self.tables.table[row, : len(self.texts[row]) // self.size]
        pages = [int(page) for page in complete if page >= 0][:1]
        self.pool.share(pages)
        self.kept += pages

    def lose(self, row: int) -> None:
        self.pool.free(self.kept[:1])
        self.kept = self.kept[1:]

    def check(self) -> None:
        entries = collections.Counter(self.kept)
        for row in range(self.rows):
            entries.update(self.tables.pages(row))
        counted = {page: self.pool.references(page) for page in range(self.pool.num_pages)}
        assert {page: count for page, count in counted.items() if count} == entries
        assert self.pool.num_used == len(entries) and self.pool.num_used + self.pool.num_free == self.pool.num_pages
        for row, text in enumerate(self.texts):
            for position in range(self.dropped[row], len(text)):
                page = int(self.tables.table[row, position // self.size])
                assert page >= 0 and self.memory[page, position % self.size] == text[position]


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_keep_all_pages_and_tokens(seed):
    """A page is free or used, reference counts equal table entries, a page has one writer, and tokens never change."""
    history = History(seed)
    calls = [history.write] * 4 + [history.adopt] * 2 + [history.release, history.drop, history.keep, history.lose]
    for _ in range(150):
        calls[int(history.random.integers(len(calls)))](int(history.random.integers(history.rows)))
        history.check()
    for row in range(history.rows):
        history.release(row)
    history.pool.free(history.kept)
    assert history.pool.num_free == history.pool.num_pages and (history.tables.table == -1).all()


@pytest.mark.slow
def test_rows_with_a_shared_prefix_do_not_affect_each_other():
    """Two rows share a page, and continue separately."""
    pool, config = PagePool(6, 4), PageConfig(page_size=4, num_pages=6)
    tables = PageTables(pool, 2, 3)
    shape = KVShape(slots=12, kv_heads=1, head_dim=2, rolling=False)
    cache = build_pages(shape, 1, 2, 12, jnp.float32, config)
    text = np.arange(20.0, dtype=np.float32)

    def write(cache, row, begin, values):
        tables.reserve(row, begin, begin + len(values))
        key = jnp.broadcast_to(jnp.asarray(values)[None, None, :, None, None], (1, 1, len(values), 1, 2))
        places = jnp.arange(begin, begin + len(values))[None]
        return cache.with_tables(jnp.asarray(tables.table)).commit_rows(jnp.asarray([row]), NewKV(key, key), places)

    cache = write(cache, 0, 0, text[:6])
    tables.adopt(1, tables.table[0, :1].tolist())
    cache = cache.with_tables(jnp.asarray(tables.table), jnp.asarray([6, 4], jnp.int32))
    cache = write(cache, 1, 4, text[4:9] + 100)
    cache = write(cache, 0, 6, text[6:12])
    rows = jax.device_get(cache.entries().key[0, :, :, 0, 0])
    assert rows[0].tolist() == text[:12].tolist() and rows[1][:9].tolist() == [*text[:4], *text[4:9] + 100]
    assert pool.num_used == 5 and cache.lengths.tolist() == [12, 9]


def test_a_shared_page_cannot_be_reserved_for_writing():
    tables = PageTables(PagePool(4, 4), 2, 2)
    tables.reserve(0, 0, 2)
    tables.adopt(1, tables.table[0, :1].tolist())
    with pytest.raises(AssertionError, match="shared page"):
        tables.reserve(1, 2, 3)


def test_refuses_rows_that_are_not_empty_or_too_short():
    tables = PageTables(PagePool(8, 4), 2, 3)
    tables.reserve(0, 0, 5)
    with refused(ConfigError, "row=0", "3 pages"):
        tables.adopt(0, tables.table[1].tolist())
    with refused(ConfigError, "row=1", "4 pages"):
        tables.adopt(1, [0, 1, 0, 1])
    with refused(ConfigError, "PageTables.reserve", "5", "13", "12"):
        tables.reserve(0, 5, 13)
