"""`BlockManager`: pages of the slots and of the prefix cache, by attention window.

Layers of each window have a pool of pages of their own. Pages outside of a window are given back.
"""

from collections.abc import Sequence

import jax
import numpy as np

from eqx_decoders.errors import check
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.serving.engine.page_pool import OutOfPages, PagePool, PageTables


Pages = dict[int, list[int]]  # page numbers of some tokens in order, by window (0: none); -1 for one given back


def windows_of(cache: Cache) -> dict[int, tuple[int, int]]:
    """Return, by the window of paged layers, the number of pages and the entries of a row's page table."""
    layer_caches = jax.tree.leaves(cache.segments, is_leaf=is_layer_cache)
    return {window: counts for each in layer_caches for window, counts in each.page_pools.items()}


class BlockManager:
    """Allocator of the pages of an engine's slots.

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
