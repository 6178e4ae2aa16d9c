"""Which page of a cache is whose: free lists, counts of references, tables of rows. All on the host.

A page may stand in several rows' tables while all only read it. Before a row writes into a page that others have, it
gets one of its own with the same contents (copy on write); which pages are to be copied on the device, the caller is
told.
"""

import collections
from collections.abc import Iterable, Sequence

import numpy as np

from eqx_decoders.errors import EqxDecodersError, check, check_integer


class OutOfPages(EqxDecodersError):
    """There are fewer free pages than asked for. Nothing has changed: give some back and ask again."""


class PagePool:
    """The pages of one cache: how often each is referred to, and which are free.

    **Arguments:**

    - `num_pages`: pages that there are; their numbers are 0, 1, 2, …
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
        """Pages that there are."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody has."""
        return self.num_pages - self.num_free

    def references(self, page: int) -> int:
        """How often a page is referred to; 0: it is free."""
        check(0 <= page < self.num_pages, f"PagePool: page={page} must be one of 0 to {self.num_pages - 1}.")
        return self._references[page]

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int = 1) -> list[int]:
        """Free pages, each with one reference. Raises OutOfPages if there are not as many."""
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
        """One reference more to each of these pages, which somebody has."""
        pages = self._used(pages, "share")
        for page in pages:
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> list[int]:
        """One reference less to each of these pages; those that are free then."""
        pages, freed = self._used(pages, "free"), []
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

    def own(self, page: int) -> int:
        """A page that only the caller has, in place of one of its references: this one, if nobody else has it.

        Else it is a new one, into which the caller copies the contents. Raises OutOfPages if none is free.
        """
        self._used([page], "own")
        if self._references[page] == 1:
            return page
        (new,) = self.allocate()
        self._references[page] -= 1
        return new

    def _used(self, pages: Iterable[int], call: str) -> list[int]:
        pages = list(pages)
        for page in pages:
            check(self.references(page) > 0, f"PagePool.{call}: page={page} is free: nobody has it.")
        return pages


class PageTables:
    """The tables of a cache's rows, and the references of their entries.

    `table` is what `Cache.with_tables` takes. A row may write into a page only if `reserve` has said so.

    **Arguments:**

    - `pool`: where pages come from; other things may refer to its pages, too, such as a cache of prefixes.
    - `num_rows`: rows of the cache.
    - `row_pages`: places of a row's table.
    """

    def __init__(self, pool: PagePool, num_rows: int, row_pages: int):
        check_integer("PageTables.num_rows", num_rows)
        check_integer("PageTables.row_pages", row_pages)
        self.pool = pool
        self.table = np.full((num_rows, row_pages), -1, np.int32)

    def pages(self, row: int) -> list[int]:
        """The pages of a row, in the order of its tokens, without those that it has given back."""
        return [int(page) for page in self.table[row] if page >= 0]

    def needed(self, row: int, begin: int, end: int) -> int:
        """How many free pages `reserve` would take."""
        missing = sum(self.table[row, place] < 0 for place in self._places(begin, end))
        return int(missing) + len(self._shared(row, begin, end))

    def reserve(self, row: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Pages for a row to write its tokens from position `begin` up to `end`.

        Returns which pages are to be copied into which before: those that others have, too. Raises OutOfPages, and
        changes nothing, if there are not enough.
        """
        limit = self.table.shape[1] * self.pool.page_size
        check(0 <= begin <= end <= limit, f"PageTables.reserve: {begin} to {end} must be within 0 to {limit}.")
        shared, places = self._shared(row, begin, end), self._places(begin, end)
        fresh = iter(self.pool.allocate(self.needed(row, begin, end)))
        copies = []
        for place in places:
            page = int(self.table[row, place])
            if page < 0:
                self.table[row, place] = next(fresh)
            elif place in shared:
                self.table[row, place] = next(fresh)
                copies.append((page, int(self.table[row, place])))
        self.pool.free(source for source, _ in copies)
        return copies

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Give an empty row pages that others have, with the first of its tokens; -1 for none. They are shared."""
        rule = f"row={row} must be empty, and have room for {len(pages)} pages"
        check(not self.pages(row) and len(pages) <= self.table.shape[1], f"PageTables.adopt: {rule}.")
        self.pool.share(page for page in pages if page >= 0)
        self.table[row, : len(pages)] = pages

    def fork(self, source: int, row: int) -> None:
        """Give an empty row all that another has."""
        check(not self.pages(row), f"PageTables.fork: row={row} must be empty.")
        self.adopt(row, self.table[source].tolist())

    def drop_before(self, row: int, position: int) -> list[int]:
        """Give back the pages of a row whose tokens all stand before a position: what is behind a window.

        Returns those that are free then.
        """
        end = max(0, min(position // self.pool.page_size, self.table.shape[1]))
        return self._give_back(row, slice(0, end))

    def truncate(self, row: int, length: int) -> list[int]:
        """Give back the pages of a row behind its first `length` tokens; those that are free then."""
        return self._give_back(row, slice(self.pool.pages_for(length), None))

    def release(self, row: int) -> list[int]:
        """Give back all pages of a row, the last first; those that are free then."""
        return self._give_back(row, slice(None))

    def _give_back(self, row: int, places: slice) -> list[int]:
        pages = [int(page) for page in self.table[row, places][::-1] if page >= 0]
        self.table[row, places] = -1
        return self.pool.free(pages)

    def _places(self, begin: int, end: int) -> range:
        """Places of the table whose pages hold tokens from `begin` up to `end`."""
        return range(begin // self.pool.page_size, self.pool.pages_for(end)) if end > begin else range(0)

    def _shared(self, row: int, begin: int, end: int) -> set[int]:
        """Those of these places whose pages others have, too."""
        pages = {place: int(self.table[row, place]) for place in self._places(begin, end)}
        return {place for place, page in pages.items() if page >= 0 and self.pool.references(page) > 1}
