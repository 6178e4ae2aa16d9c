"""Allocation of the pages of a paged cache, on the host: free list, reference counts and page tables.

A page can be in the page tables of several rows and in the prefix cache. Shared pages are complete and are never
written again, so there is no copy on write.
"""

import collections
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from eqx_decoders.errors import EqxDecodersError, check, check_integer
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.paged import PageConfig


Pages = dict[int, list[int]]  # page ids of consecutive tokens by window (0: no window). -1: a page that was freed


class OutOfPages(EqxDecodersError):
    """An allocation needs more pages than are free. Nothing was allocated."""


class PagePool:
    """Pool of pages with reference counts and a free list.

    **Arguments:**

    - `num_pages`: number of pages. Page ids are 0 to `num_pages - 1`.
    - `page_size`: number of tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int):
        check_integer("PagePool.num_pages", num_pages)
        check_integer("PagePool.page_size", page_size)
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = collections.deque(range(num_pages))  # the page that was freed first is reused first

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of allocated pages."""
        return self.num_pages - self.num_free

    def references(self, page: int) -> int:
        """Return the reference count of a page. 0: the page is free."""
        check(0 <= page < self.num_pages, f"PagePool: page={page} must be from 0 to {self.num_pages - 1}.")
        return self._references[page]

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int = 1) -> list[int]:
        """Allocate pages with one reference each. Raises OutOfPages if not enough pages are free."""
        check_integer("PagePool.allocate: count", count, minimum=0)
        if count > self.num_free:
            raise OutOfPages(
                f"PagePool.allocate: {count} pages are requested, but only {self.num_free} of {self.num_pages} are "
                f"free."
            )
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page. Raises ConfigError for a free page."""
        pages = self._check_allocated(pages, "share")
        for page in pages:
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> list[int]:
        """Remove a reference to each page. Returns the pages that are free now."""
        counts = collections.Counter(self._check_allocated(pages, "free"))
        for page, count in counts.items():
            check(
                self._references[page] >= count,
                f"PagePool.free: {count} references to page={page} are to be removed, but it has "
                f"{self._references[page]}.",
            )
        freed = []
        for page, count in counts.items():
            self._references[page] -= count
            if self._references[page] == 0:
                self._free.append(page)
                freed.append(page)
        return freed

    def _check_allocated(self, pages: Iterable[int], method: str) -> list[int]:
        pages = list(pages)
        for page in pages:
            check(self.references(page) > 0, f"PagePool.{method}: page={page} is not allocated.")
        return pages


class PageTables:
    """Page tables of the rows of a cache. Each entry holds a reference to its page.

    `table` is the array for `Cache.with_tables`. A row writes only into pages that `reserve` has allocated for it.

    **Arguments:**

    - `pool`: page pool, which the prefix cache shares.
    - `num_rows`: number of rows of the cache.
    - `row_pages`: number of entries per row.
    """

    def __init__(self, pool: PagePool, num_rows: int, row_pages: int):
        check_integer("PageTables.num_rows", num_rows)
        check_integer("PageTables.row_pages", row_pages)
        self.pool = pool
        self.table = np.full((num_rows, row_pages), -1, np.int32)

    def pages(self, row: int) -> list[int]:
        """Return the allocated pages of a row in order."""
        return [int(page) for page in self.table[row] if page >= 0]

    def needed(self, row: int, begin: int, end: int) -> int:
        """Return the number of pages that `reserve` would allocate."""
        return int(sum(self.table[row, entry] < 0 for entry in self._entries(begin, end)))

    def reserve(self, row: int, begin: int, end: int) -> None:
        """Allocate the missing pages for the tokens `begin:end` of a row, which the row will write.

        Raises OutOfPages, and changes nothing, if not enough pages are free.
        """
        limit = self.table.shape[1] * self.pool.page_size
        check(
            0 <= begin <= end <= limit,
            f"PageTables.reserve: begin={begin} and end={end} must be from 0 to {limit}, the length of a row.",
        )
        new_pages = iter(self.pool.allocate(self.needed(row, begin, end)))
        for entry in self._entries(begin, end):
            if self.table[row, entry] < 0:
                self.table[row, entry] = next(new_pages)
            else:
                assert self.pool.references(int(self.table[row, entry])) == 1, "a shared page must not be written"

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Share pages with an empty row, as the pages of its first tokens. -1: no page."""
        check(
            not self.pages(row) and len(pages) <= self.table.shape[1],
            f"PageTables.adopt: row={row} must be empty and have at least {len(pages)} entries for {len(pages)} pages; "
            f"it has {len(self.pages(row))} pages and {self.table.shape[1]} entries.",
        )
        self.pool.share(page for page in pages if page >= 0)
        self.table[row, : len(pages)] = pages

    def free_before(self, row: int, position: int) -> None:
        """Free the pages of a row whose tokens are all before `position`, such as pages outside of a window."""
        end = max(0, min(position // self.pool.page_size, self.table.shape[1]))
        self._free(row, slice(0, end))

    def release(self, row: int) -> None:
        """Free all pages of a row, the last page first."""
        self._free(row, slice(None))

    def _free(self, row: int, entries: slice) -> None:
        pages = [int(page) for page in self.table[row, entries][::-1] if page >= 0]
        self.table[row, entries] = -1
        self.pool.free(pages)

    def _entries(self, begin: int, end: int) -> range:
        """Return the table entries of the tokens `begin:end`."""
        return range(begin // self.pool.page_size, self.pool.pages_for(end)) if end > begin else range(0)


def windows_of(cache: Cache) -> dict[int, tuple[int, int]]:
    """Return `{attention window: (number of pages, page table entries per row)}` of the paged layers of a cache."""
    layer_caches = jax.tree.leaves(cache.layer_caches, is_leaf=is_layer_cache)
    return {window: sizes for layer_cache in layer_caches for window, sizes in layer_cache.page_pools.items()}


class BlockManager:
    """Page allocator of the slots and the prefix cache.

    Layers with the same attention window share one page pool. Pages outside of a window are freed.

    **Arguments:**

    - `config`: configuration of the paged cache.
    - `windows`: result of `windows_of`.
    - `num_slots`: number of rows of the cache.
    """

    def __init__(self, config: PageConfig, windows: dict[int, tuple[int, int]], num_slots: int):
        self.page_size = config.page_size
        self.tables = {
            window: PageTables(PagePool(count, config.page_size), num_slots, row_pages)
            for window, (count, row_pages) in windows.items()
        }

    @property
    def usage(self) -> float:
        """Fraction of the pages in use in the fullest pool, from 0 to 1."""
        pools = [table.pool for table in self.tables.values()]
        return max((pool.num_used / pool.num_pages for pool in pools), default=0.0)

    @property
    def arrays(self) -> dict[int, np.ndarray]:
        """Page tables by window, for `Cache.with_tables`."""
        return {window: table.table for window, table in self.tables.items()}

    def check_fits(self, length: int, chunk: int) -> None:
        """Raise ConfigError if a request of `length` tokens, prefilled in chunks, needs more pages than a pool has."""
        for window, table in self.tables.items():
            # with a window: the window, one chunk, and one page, since neither starts at a page boundary
            max_tokens = length if window == 0 else min(length, window + chunk + self.page_size)
            needed, available = table.pool.pages_for(max_tokens), table.pool.num_pages
            check(
                needed <= available,
                f"prompt and max_new_tokens have {length} tokens together, which need {needed} pages, but the cache "
                f"has "
                f"{available}: reduce max_new_tokens or shorten the prompt.",
            )

    def has_room(self, length: int) -> bool:
        """Return whether there are enough free pages for `length` tokens of a new row."""
        for window, table in self.tables.items():
            max_tokens = length if window == 0 else min(length, window + self.page_size)
            if table.pool.pages_for(max_tokens) > table.pool.num_free:
                return False
        return True

    def reserve(self, slot: int, begin: int, end: int) -> None:
        """Allocate pages for the tokens `begin:end` of a slot, and free pages outside of windows.

        Raises OutOfPages, and allocates nothing, if not enough pages are free.
        """
        for window, table in self.tables.items():
            if window > 0:
                table.free_before(slot, begin - window + 1)
        for table in self.tables.values():
            if table.needed(slot, begin, end) > table.pool.num_free:
                raise OutOfPages(f"not enough free pages for tokens {begin} to {end} of slot {slot}.")
        for table in self.tables.values():
            table.reserve(slot, begin, end)

    def reserve_visible(self, slot: int, length: int) -> None:
        """Allocate the pages of an empty slot's first `length` tokens that the next token can attend to."""
        for window, table in self.tables.items():
            table.reserve(slot, _first_visible(window, length), length)

    def share(self, slot: int, begin: int, end: int) -> Pages:
        """Return the pages of the tokens `begin:end` of a slot, and add a reference to each."""
        entries = slice(begin // self.page_size, -(-end // self.page_size))
        pages: Pages = {}
        for window, table in self.tables.items():
            pages[window] = table.table[slot, entries].tolist()
            table.pool.share(page for page in pages[window] if page >= 0)
        return pages

    def adopt(self, slot: int, blocks: Sequence[Pages], length: int) -> None:
        """Share the pages of cached blocks of `length` tokens with an empty slot, without pages outside of windows."""
        for window, table in self.tables.items():
            pages = [page for block in blocks for page in block[window]]
            first = _first_visible(window, length) // self.page_size
            table.adopt(slot, [page if index >= first else -1 for index, page in enumerate(pages)])

    def has_visible_pages(self, blocks: Sequence[Pages], length: int) -> bool:
        """Return whether cached blocks still have all pages that the token after the first `length` can attend to."""
        for window in self.tables:
            pages = [page for block in blocks for page in block[window]]
            first = _first_visible(window, length) // self.page_size
            if any(page < 0 for page in pages[first:]):
                return False
        return True

    def free(self, pages: Pages) -> None:
        """Remove one reference to each page."""
        for window, window_pages in pages.items():
            self.tables[window].pool.free(page for page in window_pages if page >= 0)

    def release(self, slot: int) -> None:
        """Free all pages of a slot."""
        for table in self.tables.values():
            table.release(slot)


def _first_visible(window: int, length: int) -> int:
    """Return the first of `length` tokens that the next token can attend to. Window 0: no window."""
    return 0 if window == 0 else max(0, length - window + 1)
