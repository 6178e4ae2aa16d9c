"""Pages of a cache on the host: nothing is lost, nothing is given twice, and only one row writes into a page."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from eqx_decoders.serving.engine.page_pool import OutOfPages, PagePool, PageTables
from tests.errors import refused


def test_pages_are_given_and_given_back():
    pool = PagePool(4, 16)
    first, second = pool.allocate(1), pool.allocate(2)
    assert first + second == [0, 1, 2] and (pool.num_free, pool.num_used) == (1, 3)
    with refused(OutOfPages, "2 pages", "1 of 4"):
        pool.allocate(2)
    assert pool.num_free == 1 and pool.pages_for(0) == 0 and pool.pages_for(16) == 1 and pool.pages_for(17) == 2
    pool.share(second)
    assert pool.free(second) == [] and pool.references(1) == 1
    assert pool.make_private(1) == 1
    pool.share([1])
    assert pool.make_private(1) == 3 and pool.references(1) == 1 and pool.num_free == 0
    pool.share([2])
    with pytest.raises(OutOfPages):
        pool.make_private(2)
    assert pool.references(2) == 2
    assert pool.free([2, 2, 0]) == [2, 0] and pool.allocate(1) == [2]


@pytest.mark.parametrize("call", ["free", "share", "make_private"])
def test_unreferenced_pages_are_refused(call):
    pool = PagePool(2, 4)
    pool.allocate()
    with refused(ConfigError, f"PagePool.{call}", "page=1"):
        getattr(pool, call)(1 if call == "make_private" else [0, 1])
    assert pool.references(0) == 1
    with refused(ConfigError, "page=2"):
        pool.references(2)
    with refused(ConfigError, "page=0", "1 reference", "2"):
        pool.free([0, 0])


class History:
    """Rows whose tokens are numbers, in pages of lists: what a cache would do."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.size, self.rows = int(self.random.integers(1, 6)), 4
        self.pool = PagePool(int(self.random.integers(6, 20)), self.size)
        self.tables = PageTables(self.pool, self.rows, 6)
        self.memory = np.full((self.pool.num_pages, self.size), -1)
        self.texts: list[list[int]] = [[] for _ in range(self.rows)]
        self.dropped = [0] * self.rows
        self.kept: list[int] = []  # references of something else, such as a cache of prefixes
        self.next = 0

    def write(self, row: int) -> None:
        begin = len(self.texts[row])
        end = min(begin + int(self.random.integers(1, 2 * self.size + 2)), 6 * self.size)
        needed, before = self.tables.needed(row, begin, end), (self.tables.table.copy(), self.pool.num_free)
        try:
            copies = self.tables.reserve(row, begin, end)
        except OutOfPages:
            assert needed > self.pool.num_free == before[1] and (self.tables.table == before[0]).all()
            return
        assert before[1] - self.pool.num_free == needed
        for source, target in copies:
            self.memory[target] = self.memory[source]
        for position in range(begin, end):
            page = int(self.tables.table[row, position // self.size])
            assert self.pool.references(page) == 1, "one writer a page"
            self.memory[page, position % self.size] = self.next
            self.texts[row].append(self.next)
            self.next += 1

    def fork(self, row: int) -> None:
        other = int(self.random.integers(self.rows))
        if other != row:
            self.release(row)
            self.tables.adopt(row, self.tables.table[other].tolist())
            self.texts[row], self.dropped[row] = list(self.texts[other]), self.dropped[other]

    def adopt(self, row: int) -> None:
        source = int(self.random.integers(self.rows))
        pages = self.tables.pages(source)[: int(self.random.integers(1, 4))]
        if source != row and self.dropped[source] == 0:
            self.release(row)
            self.tables.adopt(row, pages)
            self.texts[row] = self.texts[source][: len(pages) * self.size]

    def release(self, row: int) -> None:
        self.tables.release(row)
        self.texts[row], self.dropped[row] = [], 0

    def drop(self, row: int) -> None:
        position = int(self.random.integers(0, len(self.texts[row]) + 1))
        self.tables.drop_before(row, position)
        self.dropped[row] = max(self.dropped[row], position // self.size * self.size)

    def truncate(self, row: int) -> None:
        length = int(self.random.integers(self.dropped[row], len(self.texts[row]) + 1))
        self.tables.truncate(row, length)
        self.texts[row] = self.texts[row][:length]

    def keep(self, row: int) -> None:
        pages = self.tables.pages(row)[:1]
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
def test_any_history_keeps_every_page_and_every_token(seed):
    """Free and used pages are all; references are entries of tables; a page has one writer; no row's text changes."""
    history = History(seed)
    calls = [history.write] * 4 + [history.fork, history.adopt, history.release, history.drop, history.truncate]
    calls += [history.keep, history.lose]
    for _ in range(150):
        calls[int(history.random.integers(len(calls)))](int(history.random.integers(history.rows)))
        history.check()
    for row in range(history.rows):
        history.release(row)
    history.pool.free(history.kept)
    assert history.pool.num_free == history.pool.num_pages and (history.tables.table == -1).all()


@pytest.mark.slow
def test_a_cache_with_these_tables_keeps_rows_apart():
    """Two rows share a prefix that ends within a page, and go on each for itself."""
    pool, config = PagePool(6, 4), PageConfig(page_size=4, num_pages=6)
    tables = PageTables(pool, 2, 3)
    shape = KVShape(slots=12, kv_heads=1, head_dim=2, rolling=False)
    cache = build_pages(shape, 1, 2, 12, jnp.float32, config)
    text = np.arange(20.0, dtype=np.float32)

    def write(cache, row, begin, values):
        copies = tables.reserve(row, begin, begin + len(values))
        if copies:
            sources, targets = map(jnp.asarray, zip(*copies, strict=True))
            stored = cache.stored.map(lambda x: x.at[:, targets].set(x[:, sources]))
            cache = dataclasses.replace(cache, **stored._asdict())
        key = jnp.broadcast_to(jnp.asarray(values)[None, None, :, None, None], (1, 1, len(values), 1, 2))
        places = jnp.arange(begin, begin + len(values))[None]
        return cache.with_tables(jnp.asarray(tables.table)).commit_rows(jnp.asarray([row]), NewKV(key, key), places)

    cache = write(cache, 0, 0, text[:6])
    tables.adopt(1, tables.table[0].tolist())
    cache = cache.with_tables(jnp.asarray(tables.table), jnp.asarray([6, 6], jnp.int32))
    cache = write(cache, 1, 6, text[6:9] + 100)
    cache = write(cache, 0, 6, text[6:12])
    rows = jax.device_get(cache.entries().key[0, :, :, 0, 0])
    assert rows[0].tolist() == text[:12].tolist() and rows[1][:9].tolist() == [*text[:6], *text[6:9] + 100]
    assert pool.num_used == 5 and cache.lengths.tolist() == [12, 9]


def test_rows_that_are_not_empty_or_too_short_are_refused():
    tables = PageTables(PagePool(8, 4), 2, 3)
    tables.reserve(0, 0, 5)
    with refused(ConfigError, "row=0", "3 pages"):
        tables.adopt(0, tables.table[1].tolist())
    with refused(ConfigError, "row=1", "4 pages"):
        tables.adopt(1, [0, 1, 0, 1])
    with refused(ConfigError, "PageTables.reserve", "5", "13", "12"):
        tables.reserve(0, 5, 13)
