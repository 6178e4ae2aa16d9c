"""Which pages the slots and the prefix cache have, by kinds of layers: those that see everything, and those of windows.

Layers of each window have page numbers of their own. Pages behind a window are given back.
"""

from collections.abc import Sequence

import jax
import numpy as np

from eqx_decoders.errors import check
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.kv_cache import is_memory
from eqx_decoders.layers.cache.paged import PageConfig, PagedKVCache
from eqx_decoders.serving.engine.page_pool import OutOfPages, PagePool, PageTables


Pages = dict[int, list[int]]  # by window, 0 for none: those of some tokens, in their order; -1 for one given back


def windows_of(cache: Cache) -> dict[int, tuple[int, int]]:
    """Of each window of the layers in pages: how many pages there are, and places of a row's table."""
    memories = jax.tree.leaves(cache.segments, is_leaf=is_memory)
    paged = [each for each in memories if isinstance(each, PagedKVCache)]
    return {each.window: (each.key.shape[1], each.table.shape[1]) for each in paged}


class BlockManager:
    """The pages of an engine's slots.

    **Arguments:**

    - `config`: how the cache is divided.
    - `windows`: as `windows_of` gives them.
    - `slots`: rows of the cache.
    """

    def __init__(self, config: PageConfig, windows: dict[int, tuple[int, int]], slots: int):
        self.page_size = config.page_size
        self.tables = {
            window: PageTables(PagePool(count, config.page_size), slots, places)
            for window, (count, places) in windows.items()
        }

    @property
    def usage(self) -> float:
        """Share of the pages that are in use: of those of which the most are."""
        pools = [table.pool for table in self.tables.values()]
        return max((pool.num_used / pool.num_pages for pool in pools), default=0.0)

    @property
    def arrays(self) -> dict[int, np.ndarray]:
        """As `Cache.with_tables` takes them."""
        return {window: table.table for window, table in self.tables.items()}

    def check_fits(self, length: int, chunk: int) -> None:
        """Raise ConfigError where a request of so many tokens would not find room in all pages."""
        for window, table in self.tables.items():
            # a window, what comes in at once, and a page that both begin in
            most = length if window == 0 else min(length, window + chunk + self.page_size)
            need, there = table.pool.pages_for(most), table.pool.num_pages
            rule = f"which need {need} pages, and there are {there}"
            check(need <= there, f"prompt and max_new_tokens have {length} tokens together, {rule}: ask for fewer.")

    def has_room(self, length: int) -> bool:
        """Whether as many pages are free as so many tokens of a new row need; of windows what they need at most."""
        for window, table in self.tables.items():
            most = length if window == 0 else min(length, window + self.page_size)
            if table.pool.pages_for(most) > table.pool.num_free:
                return False
        return True

    def reserve(self, slot: int, begin: int, end: int) -> None:
        """Pages for a slot to write its tokens from `begin` up to `end`; gives back what is behind windows before.

        Raises OutOfPages, and takes none, if there are not enough.
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

    def reserve_seen(self, slot: int, length: int) -> None:
        """Pages for the first `length` tokens of an empty slot, as far as windows still see them."""
        for window, table in self.tables.items():
            table.reserve(slot, _first_seen(window, length), length)

    def pages(self, slot: int, begin: int, end: int) -> Pages:
        """The pages of some tokens of a slot, with one reference more each."""
        places = slice(begin // self.page_size, -(-end // self.page_size))
        found: Pages = {}
        for window, table in self.tables.items():
            found[window] = table.table[slot, places].tolist()
            table.pool.share(page for page in found[window] if page >= 0)
        return found

    def adopt(self, slot: int, blocks: Sequence[Pages], length: int) -> None:
        """Give an empty slot the pages of its first `length` tokens, as far as windows still see them."""
        for window, table in self.tables.items():
            pages = [page for block in blocks for page in block[window]]
            first = _first_seen(window, length) // self.page_size
            table.adopt(slot, [page if place >= first else -1 for place, page in enumerate(pages)])

    def sees_all(self, blocks: Sequence[Pages], length: int) -> bool:
        """Whether no page has been given back that a slot would see behind the first `length` tokens."""
        for window in self.tables:
            pages = [page for block in blocks for page in block[window]]
            first = _first_seen(window, length) // self.page_size
            if any(page < 0 for page in pages[first:]):
                return False
        return True

    def free(self, pages: Pages) -> None:
        """Give back the references of `pages`."""
        for window, each in pages.items():
            self.tables[window].pool.free(page for page in each if page >= 0)

    def release(self, slot: int) -> None:
        """Give back all pages of a slot."""
        for table in self.tables.values():
            table.release(slot)


def _first_seen(window: int, length: int) -> int:
    """The first of so many tokens that the next one sees; a window of 0 is none."""
    return 0 if window == 0 else max(0, length - window + 1)
