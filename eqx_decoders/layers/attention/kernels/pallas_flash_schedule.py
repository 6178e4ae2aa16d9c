"""Which tiles of scores the flash kernels read, and the mask that each needs; the grids of those for TPU.

A tile is a block of queries against a block of keys. The extremes of its queries' intervals and of its keys' positions
and segments decide: either no query sees a key of it, and it is skipped; or all see all, and no mask is applied; or
segments and positions are compared. This holds for any order of positions. Only the blocks from the first to the last
that a held block sees are read at all; under a selection, only those of which one of its queries chose a key, or one of
whose queries chose one of its keys.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.selection import KEYS_PER_ROW, WORD
from eqx_decoders.sharding.chips import LANES


pl = LazyModule("jax.experimental.pallas")  # slow to import
SCALAR_BYTES = 2**20 - 2**16  # of a table: TPUs v5p and v6e have 1 MiB of scalar memory


MOST = jnp.iinfo(jnp.int32).max
_POSITIONS, _SEGMENTS = 2**20, 2**11


def _code(segments: bool, position: Array, segment: Array) -> Array:
    """Encode segment and position in a number that keeps their order.

    Positions beyond 2^20 have one number, and segments 2^11 apart the same: then tiles may be visited in vain, no more.
    """
    if not segments:
        return position
    return (segment % _SEGMENTS) * _POSITIONS + jnp.minimum(position, _POSITIONS - 1)


class Schedule(NamedTuple):
    """Extremes of whole blocks, [batch, blocks] each; with `MOST` and -1 where nothing of a block counts.

    - `reach`: for each held block the first block that it sees, and the number of blocks up to the last; under a
        selection see `list_tiles`.
    - `queries`: the least code of a first position and the largest of a last one; the least last position and the
        largest first one; the least and the largest segment; whether all queries see anything.
    - `keys`: the least and the largest code, position and segment; whether all are tokens.
    """

    reach: list[Array]
    queries: list[Array]
    keys: list[Array]


def make_schedule(
    segments: bool, intervals: Array, positions: Array, query_block: int, key_block: int, keys_held: bool
) -> Schedule:
    """Compute the schedule from visible intervals, `[batch, 3, length]` (first, last, segment), and from keys.

    Keys are `[batch, 2, kv_length]` (position, segment); `segments` says whether segments count.
    """
    first, last, segment = (intervals[:, i] for i in range(3))
    least, largest = (_code(segments, first, segment), last, segment), (_code(segments, last, segment), first, segment)
    queries = _extremes(least, largest, first <= last, query_block)
    position, segment = positions[:, 0], positions[:, 1]
    row = (_code(segments, position, segment), position, segment)
    keys = _extremes(row, row, position >= 0, key_block)
    return Schedule(_reach(_of_tiles(may_see, queries, keys, keys_held)), queries, keys)


def whole_run(schedule: Schedule, keys_held: bool) -> list[Array]:
    """Return, for each held block, the first block that it sees whole, and the end of those that follow it so.

    Both are the end of its reach where there is none.
    """
    start, count = schedule.reach
    whole, end = _of_tiles(all_see, schedule.queries, schedule.keys, keys_held), start + count
    index = jnp.arange(whole.shape[2], dtype=jnp.int32)[None, None]
    first = jnp.where(whole, index, end[:, :, None]).min(2, initial=MOST)
    stop = jnp.where(~whole & (index >= first[:, :, None]), index, end[:, :, None]).min(2, initial=MOST)
    return [first, stop]


def _of_tiles(
    relation: Callable, queries: Sequence[Array], keys: Sequence[Array], keys_held: bool
) -> Bool[Array, "batch held streamed"]:
    """Compute a relation of all blocks of queries to all blocks of keys."""
    tiles = relation([x[:, :, None] for x in queries], [x[:, None, :] for x in keys])
    return tiles.swapaxes(1, 2) if keys_held else tiles


def _extremes(
    least: Sequence[Array], largest: Sequence[Array], counts: Bool[Array, "batch length"], block: int
) -> list[Array]:
    """Return the least and the largest numbers, in pairs, among those that count in each block; whether all count."""

    def blocks(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, block)

    counts = blocks(counts)
    fields: list[Array] = []
    for low, high in zip(least, largest, strict=True):
        fields += [jnp.where(counts, blocks(low), MOST).min(-1), jnp.where(counts, blocks(high), -1).max(-1)]
    return [*fields, counts.all(-1).astype(jnp.int32)]


def may_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Return whether a query of a block may see a key of a block, from their codes, which come first."""
    return (queries[0] <= keys[1]) & (keys[0] <= queries[1])


def all_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Return whether every query of a block sees every key of a block."""
    _, _, last, first, segment, last_segment, all_queries = queries
    _, _, position, last_position, key_segment, last_key_segment, all_keys = keys
    inside = (first <= position) & (last_position <= last) & (all_queries + all_keys == 2)
    return inside & (segment == last_key_segment) & (key_segment == last_segment) & (segment == last_segment)


def _reach(seen: Bool[Array, "batch held streamed"]) -> list[Array]:
    index = jnp.arange(seen.shape[2], dtype=jnp.int32)[None, None]
    start, end = jnp.where(seen, index, seen.shape[2]).min(2), jnp.where(seen, index + 1, 0).max(2)
    return [jnp.where(end > 0, start, 0), jnp.maximum(end - start, 0)]


# --- tiles of a selection ---


def chosen_tiles(
    by_lanes: bool, bits: Int32[Array, "batch selected_heads _ _"], groups: Array, query_block: int, key_block: int
) -> Bool[Array, "batch selected_heads query_blocks key_blocks"]:
    """Return whether any query of a block chose any key of a block.

    Bits are `length words` by lanes, else `words length`; `groups` are those of keys, which lanes don't need.
    """
    batch, heads, *_ = bits.shape
    if by_lanes:  # all lanes of a bit are one group of keys
        chosen = _any_bit(bits.reshape(batch, heads, -1, query_block, bits.shape[3]), (3,))
        chosen = _any_bit(chosen.reshape(*chosen.shape[:3], -1, LANES), (4,))
        groups = jnp.arange(groups.shape[1] // LANES, dtype=jnp.int32)[None]
        key_block //= LANES
    else:
        chosen = _any_bit(bits.reshape(batch, heads, bits.shape[2], -1, query_block), (4,)).swapaxes(2, 3)
    word, bit = groups[:, :, None] >> 5, jnp.left_shift(1, groups & 31)[:, :, None]
    there = jnp.where(word == jnp.arange(chosen.shape[3], dtype=jnp.int32).reshape(1, 1, -1), bit, 0)
    there = _any_bit(there.reshape(groups.shape[0], -1, key_block, chosen.shape[3]), (2,))
    return ((chosen[:, :, :, None] & there[:, None, None]) != 0).any(-1)


def _any_bit(words: Int32[Array, "..."], axes: tuple[int, ...]) -> Array:
    return jax.lax.reduce(words, jnp.int32(0), jax.lax.bitwise_or, axes)


def list_tiles(schedule: Schedule, chosen: Bool[Array, "batch heads queries keys"], keys_held: bool) -> list[Array]:
    """List, for each selected head and held block, the blocks that it sees and that were chosen; and count them.

    They are numbers of 16 bits, two of which are a word: `[batch, heads, held, words]` and `[batch, heads, held]`. A
    list ends in zeros: a held block without any reads the first.
    """
    chosen = chosen.swapaxes(2, 3) if keys_held else chosen
    chosen &= _of_tiles(may_see, schedule.queries, schedule.keys, keys_held)[:, None]
    index = jnp.arange(chosen.shape[3], dtype=jnp.int32).reshape(1, 1, 1, -1)
    blocks = jnp.sort(jnp.where(chosen, index, MOST), axis=3)
    blocks = jnp.pad(jnp.where(blocks == MOST, 0, blocks), [(0, 0)] * 3 + [(0, blocks.shape[3] % 2)])
    return [blocks[..., 0::2] | (blocks[..., 1::2] << 16), chosen.sum(3, dtype=jnp.int32)]


def word_range(groups: Int32[Array, "batch kv_length"], key_block: int) -> list[Array]:
    """Return the first word of each block of keys that has a bit of one of them, and the end of the last."""
    words = (groups >> 5).reshape(groups.shape[0], -1, key_block)
    low = jnp.where(words < 0, MOST, words).min(2)
    return [jnp.where(low == MOST, 0, low), words.max(2, initial=-1) + 1]


def spread_lanes(words: Int32[Array, "..."], first: Any, keys: int, axis: int) -> Int32[Array, "..."]:
    """Return the bits of so many keys of a tile, whose lanes lie along an axis; `first` is the first of their bits."""
    parts = [jax.lax.shift_right_logical(words, first + i) & 1 for i in range(keys // LANES)]
    return jnp.concatenate(parts, axis)


def spread_groups(word: Callable[[Any], Array], groups: Array, low: Any, high: Any, shape: tuple[int, int]) -> Array:
    """Return the bits of the keys of a tile, whose groups have bits in the words from `low` to `high`.

    `word(n)` is the n-th word of each query, on the other axis than the keys.
    """

    def add(n: Any, found: Array) -> Array:
        bits = jax.lax.shift_right_logical(*jnp.broadcast_arrays(word(n), groups & 31)) & 1
        return found | jnp.where((groups >> 5) == n, bits, 0)

    return jax.lax.fori_loop(low, high, add, jnp.zeros(shape, jnp.int32))


# --- grids of the kernels for TPU ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of a grid: each step's tile, by the schedule as one row of numbers in scalar memory.

    Several dimensions would be padded there. The grid is (batch, heads, blocks of queries, steps), or (batch, key
    heads, blocks of keys, groups, steps).
    """

    batch: int
    groups: int
    query_block: int
    key_block: int
    rows: int  # blocks of queries
    columns: int  # blocks of keys
    keys_held: bool
    selected_heads: int = 0
    group_words: int = 0

    @property
    def sizes(self) -> list[int]:
        """Entries of the table's fields for a row of the batch.

        The first two are the schedule's reach, then come 7 of the queries and 7 of the keys; under a selection `reach`
        are lists, and then come only the words in which a block of keys has bits.
        """
        held, streamed = (self.columns, self.rows) if self.keys_held else (self.rows, self.columns)
        if self.selected_heads == 0:
            return [held] * 2 + [self.rows] * 7 + [self.columns] * 7
        lists = self.selected_heads * held
        return [lists * -(-streamed // 2), lists] + [self.columns] * 2 * (self.group_words > 0)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table."""
        return 4 * self.batch * sum(self.sizes)

    def entry(self, table: Any, field: int, batch: Any, index: Any) -> Any:
        """Read an entry of a field."""
        return table[self.batch * sum(self.sizes[:field]) + batch * self.sizes[field] + index]

    def streamed(self, table: Any, batch: Any, head: Any, held: Any, step: Any) -> tuple[Any, Any]:
        """Return the block to read, and the number of steps.

        Where a row ends before others do its last block stays, and is not read again.
        """
        lists, numbers, *_ = self.sizes
        row = head * (numbers // self.selected_heads) + held if self.selected_heads > 1 else held
        count = self.entry(table, 1, batch, row)
        step = jnp.minimum(step, jnp.maximum(count - 1, 0))
        if self.selected_heads == 0:
            return self.entry(table, 0, batch, row) + step, count
        pair = self.entry(table, 0, batch, row * (lists // numbers) + jax.lax.div(step, 2))
        return jax.lax.shift_right_logical(pair, 16 * jax.lax.rem(step, 2)) & 0xFFFF, count

    def visit(self, table: Any, batch: Any, head: Any, held: Any, step: Any, add: Callable[[bool, Any], None]) -> None:
        """Run `add(masked, block of keys)` if anything in the step's tile is visible."""
        block, count = self.streamed(table, batch, head, held, step)

        @pl.when(step < count)
        def _():
            i, j = (block, held) if self.keys_held else (held, block)
            if self.selected_heads > 0:
                return add(True, j)
            queries = [self.entry(table, field, batch, i) for field in range(2, 9)]
            keys = [self.entry(table, field, batch, j) for field in range(9, 16)]
            some, everything = may_see(queries, keys), all_see(queries, keys)
            pl.when(some & everything)(lambda: add(False, j))
            pl.when(some & ~everything)(lambda: add(True, j))

    def chosen(self, table: Any, batch: Any, j: Any, bits: Any, groups: Sequence[Array]) -> Bool[Array, "rows columns"]:
        """Return the mask of a selection: keys as rows where these are held, else queries."""
        if self.group_words == 0:
            first = jax.lax.rem(j * (self.key_block // LANES), WORD)
            words, axis = (bits[0, 0].T, 0) if self.keys_held else (bits[0, 0], 1)
            return spread_lanes(words, first, self.key_block, axis) == 1
        low, high = (self.entry(table, field, batch, j) for field in (2, 3))

        def word(n: Any) -> Array:
            row = bits[0, 0, pl.ds(n, 1), :]
            return row if self.keys_held else row.T

        shape = (self.key_block, self.query_block) if self.keys_held else (self.query_block, self.key_block)
        return spread_groups(word, groups[0], low, high, shape) == 1

    def spec(self, place: str, dims: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of an array that lies in a place."""
        shape = {
            "queries": (1, 1, self.query_block, dims[-1]),
            "keys": (1, 1, self.key_block, dims[-1]),
            "intervals": (1, dims[-2], self.query_block),
            "positions": (1, dims[-2], self.key_block),
            "rows": (1, 1, dims[-2], self.query_block),
            "lanes": (1, 1, self.query_block, LANES),
        }["rows" if place == "words" else place]

        def index(*ids: Any) -> tuple:
            batch, head, kv_head, i, j = self._at(*ids)
            selected = head if self.selected_heads > 1 else 0
            return {
                "queries": (batch, head, i, 0),
                "keys": (batch, kv_head, j, 0),
                "intervals": (batch, 0, i),
                "positions": (batch, 0, j),
                "rows": (batch, head, 0, i),
                "words": (batch, selected, 0, i),
                "lanes": (batch, selected, i, jax.lax.div(j * self.key_block, KEYS_PER_ROW)),
            }[place]

        return pl.BlockSpec(shape, index)

    def _at(self, *ids: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return (batch, head, key head, block of queries, block of keys)."""
        *at, table = ids
        if self.keys_held:
            batch, kv_head, held, group, step = at
            head = kv_head * self.groups + group
            return batch, head, kv_head, self.streamed(table, batch, head, held, step)[0], held
        batch, head, held, step = at
        return batch, head, jax.lax.div(head, self.groups), held, self.streamed(table, batch, head, held, step)[0]
