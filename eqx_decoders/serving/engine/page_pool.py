"""Pages of a paged cache, on the host: free list, reference counts, page tables of rows, and who has which pages.

A page may be in the tables of several rows while all of them only read it. Before a row writes into a shared page, it
gets a copy of its own (copy on write): `PageTables.reserve` returns the pages to copy on the device.
"""

import collections
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from eqx_decoders.errors import EqxDecodersError, check, check_integer
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.paged import PageConfig


Pages = dict[int, list[int]]  # page numbers of some tokens in order, by window (0: none); -1 for one given back


class OutOfPages(EqxDecodersError):
    """Error for an allocation that needs more pages than are free; nothing was allocated."""


class PagePool:
    """Pages of one cache, with their reference counts and a free list.

    **Arguments:**

    - `num_pages`: number of pages; they are numbered 0, 1, 2, …
    - `page_size`: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        check_integer("PagePool.num_pages", num_pages)
        check_integer("PagePool.page_size", page_size)
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = collections.deque(range(num_pages))  # the one that was given back first comes first

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
        """Return the reference count of a page; 0: it is free."""
        check(0 <= page < self.num_pages, f"PagePool: page={page} must be one of 0 to {self.num_pages - 1}.")
        return self._references[page]

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int = 1) -> list[int]:
        """Allocate pages, with one reference each. Raises OutOfPages if too few are free."""
        check_integer("PagePool.allocate: count", count, minimum=0)
        if count > self.num_free:
            raise OutOfPages(
                f"PagePool: {count} pages are asked for, and {self.num_free} of {self.num_pages} are free."
            )
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of these allocated pages."""
        pages = self._check_allocated(pages, "share")
        for page in pages:
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> list[int]:
        """Drop a reference to each of these pages; returns those that are free now."""
        pages, freed = self._check_allocated(pages, "free"), []
        counts = collections.Counter(pages)
        for page, count in counts.items():
            rule = f"page={page} has {self._references[page]} references, and {count} are given back"
            check(self._references[page] >= count, f"PagePool.free: {rule}.")
        for page, count in counts.items():
            self._references[page] -= count
            if self._references[page] == 0:
                self._free.append(page)
                freed.append(page)
        return freed

    def make_private(self, page: int) -> int:
        """Return a page with one reference in place of a shared one: the page itself if nobody else refers to it.

        Otherwise it is a new page, into which the caller copies the contents. Raises OutOfPages if none is free.
        """
        self._check_allocated([page], "make_private")
        if self._references[page] == 1:
            return page
        (new,) = self.allocate()
        self._references[page] -= 1
        return new

    def _check_allocated(self, pages: Iterable[int], call: str) -> list[int]:
        pages = list(pages)
        for page in pages:
            check(self.references(page) > 0, f"PagePool.{call}: page={page} is free: nobody has it.")
        return pages


class PageTables:
    """Page tables of a cache's rows, and the references of their entries.

    `table` is the array for `Cache.with_tables`. A row may write only into pages that `reserve` has allocated to it.

    **Arguments:**

    - `pool`: pool of the pages; others may hold references to its pages, too, such as a prefix cache.
    - `num_rows`: rows of the cache.
    - `row_pages`: entries of a row's table.
    """

    def __init__(self, pool: PagePool, num_rows: int, row_pages: int):
        check_integer("PageTables.num_rows", num_rows)
        check_integer("PageTables.row_pages", row_pages)
        self.pool = pool
        self.table = np.full((num_rows, row_pages), -1, np.int32)

    def pages(self, row: int) -> list[int]:
        """Return the pages of a row in order, without those that it has given back."""
        return [int(page) for page in self.table[row] if page >= 0]

    def needed(self, row: int, begin: int, end: int) -> int:
        """Return the number of free pages that `reserve` would take."""
        missing = sum(self.table[row, entry] < 0 for entry in self._entries(begin, end))
        return int(missing) + len(self._shared(row, begin, end))

    def reserve(self, row: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Allocate pages for a row to write its tokens from position `begin` up to `end`.

        Returns pairs of pages to copy, source and target, for shared pages. Raises OutOfPages, and changes nothing, if
        too few are free.
        """
        limit = self.table.shape[1] * self.pool.page_size
        check(0 <= begin <= end <= limit, f"PageTables.reserve: {begin} to {end} must be within 0 to {limit}.")
        shared, entries = self._shared(row, begin, end), self._entries(begin, end)
        fresh = iter(self.pool.allocate(self.needed(row, begin, end)))
        copies = []
        for entry in entries:
            page = int(self.table[row, entry])
            if page < 0:
                self.table[row, entry] = next(fresh)
            elif entry in shared:
                self.table[row, entry] = next(fresh)
                copies.append((page, int(self.table[row, entry])))
        self.pool.free(source for source, _ in copies)
        return copies

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Give an empty row shared pages that hold its first tokens; -1 for none."""
        rule = f"row={row} must be empty, and have room for {len(pages)} pages"
        check(not self.pages(row) and len(pages) <= self.table.shape[1], f"PageTables.adopt: {rule}.")
        self.pool.share(page for page in pages if page >= 0)
        self.table[row, : len(pages)] = pages

    def drop_before(self, row: int, position: int) -> list[int]:
        """Give back the pages of a row whose tokens are all before a position, such as those outside of a window.

        Returns those that are free now.
        """
        end = max(0, min(position // self.pool.page_size, self.table.shape[1]))
        return self._give_back(row, slice(0, end))

    def truncate(self, row: int, length: int) -> list[int]:
        """Give back the pages of a row after its first `length` tokens; returns those that are free now."""
        return self._give_back(row, slice(self.pool.pages_for(length), None))

    def release(self, row: int) -> list[int]:
        """Give back all pages of a row, the last first; returns those that are free now."""
        return self._give_back(row, slice(None))

    def _give_back(self, row: int, entries: slice) -> list[int]:
        pages = [int(page) for page in self.table[row, entries][::-1] if page >= 0]
        self.table[row, entries] = -1
        return self.pool.free(pages)

    def _entries(self, begin: int, end: int) -> range:
        """Return the entries of the table whose pages hold tokens from `begin` up to `end`."""
        return range(begin // self.pool.page_size, self.pool.pages_for(end)) if end > begin else range(0)

    def _shared(self, row: int, begin: int, end: int) -> set[int]:
        """Return those of these entries whose pages have other references."""
        pages = {entry: int(self.table[row, entry]) for entry in self._entries(begin, end)}
        return {entry for entry, page in pages.items() if page >= 0 and self.pool.references(page) > 1}


def windows_of(cache: Cache) -> dict[int, tuple[int, int]]:
    """Return, by the window of paged layers, the number of pages and the entries of a row's page table."""
    layer_caches = jax.tree.leaves(cache.layer_caches, is_leaf=is_layer_cache)
    return {window: counts for each in layer_caches for window, counts in each.page_pools.items()}


class BlockManager:
    """Allocator of the pages of an engine's slots and of its prefix cache, by attention window.

    Layers of each window have a pool of pages of their own. Pages outside of a window are given back.

    **Arguments:**

    - `config`: layout of the paged cache.
    - `windows`: pages by window, as `windows_of` returns them.
    - `num_slots`: rows of the cache.
    """

    def __init__(self, config: PageConfig, windows: dict[int, tuple[int, int]], num_slots: int):
        self.page_size = config.page_size
        self.tables = {
            window: PageTables(PagePool(count, config.page_size), num_slots, row_pages)
            for window, (count, row_pages) in windows.items()
        }

    @property
    def usage(self) -> float:
        """Share of the pages in use, from 0 to 1, of the fullest pool."""
        pools = [table.pool for table in self.tables.values()]
        return max((pool.num_used / pool.num_pages for pool in pools), default=0.0)

    @property
    def arrays(self) -> dict[int, np.ndarray]:
        """Page tables by window, for `Cache.with_tables`."""
        return {window: table.table for window, table in self.tables.items()}

    def check_fits(self, length: int, chunk: int) -> None:
        """Raise ConfigError for a request of so many tokens that needs more pages than a pool has."""
        for window, table in self.tables.items():
            # a window, one chunk, and a page that both begin in
            most = length if window == 0 else min(length, window + chunk + self.page_size)
            needed, available = table.pool.pages_for(most), table.pool.num_pages
            rule = f"which need {needed} pages, and there are {available}"
            check(
                needed <= available, f"prompt and max_new_tokens have {length} tokens together, {rule}: ask for fewer."
            )

    def has_room(self, length: int) -> bool:
        """Return whether enough pages are free for so many tokens of a new row, with windows at their widest."""
        for window, table in self.tables.items():
            most = length if window == 0 else min(length, window + self.page_size)
            if table.pool.pages_for(most) > table.pool.num_free:
                return False
        return True

    def reserve(self, slot: int, begin: int, end: int) -> None:
        """Allocate pages for the tokens of a slot from `begin` up to `end`, and give back those outside of windows.

        Raises OutOfPages, and allocates none, if there are not enough.
        """
        for window, table in self.tables.items():
            if window > 0:
                table.drop_before(slot, begin - window + 1)
        for table in self.tables.values():
            if table.needed(slot, begin, end) > table.pool.num_free:
                raise OutOfPages(f"slot {slot} needs pages for its tokens {begin} to {end}, and there are too few.")
        for table in self.tables.values():
            copies = table.reserve(slot, begin, end)
            assert not copies, "only whole pages are shared, and those are not written again"

    def reserve_visible(self, slot: int, length: int) -> None:
        """Allocate pages for those of the first `length` tokens of an empty slot that the next token sees."""
        for window, table in self.tables.items():
            table.reserve(slot, _first_visible(window, length), length)

    def share(self, slot: int, begin: int, end: int) -> Pages:
        """Return the pages of some tokens of a slot, with one reference more each."""
        entries = slice(begin // self.page_size, -(-end // self.page_size))
        pages: Pages = {}
        for window, table in self.tables.items():
            pages[window] = table.table[slot, entries].tolist()
            table.pool.share(page for page in pages[window] if page >= 0)
        return pages

    def adopt(self, slot: int, blocks: Sequence[Pages], length: int) -> None:
        """Give an empty slot the shared pages of its first `length` tokens that the next token sees."""
        for window, table in self.tables.items():
            pages = [page for block in blocks for page in block[window]]
            first = _first_visible(window, length) // self.page_size
            table.adopt(slot, [page if index >= first else -1 for index, page in enumerate(pages)])

    def has_visible_pages(self, blocks: Sequence[Pages], length: int) -> bool:
        """Return whether these blocks still have every page that the token after the first `length` sees."""
        for window in self.tables:
            pages = [page for block in blocks for page in block[window]]
            first = _first_visible(window, length) // self.page_size
            if any(page < 0 for page in pages[first:]):
                return False
        return True

    def free(self, pages: Pages) -> None:
        """Give back one reference to each of these pages."""
        for window, each in pages.items():
            self.tables[window].pool.free(page for page in each if page >= 0)

    def release(self, slot: int) -> None:
        """Give back all pages of a slot."""
        for table in self.tables.values():
            table.release(slot)


def _first_visible(window: int, length: int) -> int:
    """Return the first of `length` tokens that the next token sees; a window of 0 is unlimited."""
    return 0 if window == 0 else max(0, length - window + 1)
