"""Schedule of the flash kernels: which tiles of scores are computed, which need a mask, and the grids of TPU kernels.

A tile contains the scores of a tile of queries and a tile of keys. It is classified by the minimum and maximum of its
queries' visible intervals, and of its keys' positions and segments. If no query sees a key, the tile is skipped; if
every query sees every key, no mask is applied; otherwise segments and positions are compared. This is correct for any
order of positions. For each resident tile, only the streamed tiles from the first to the last visible one are read.
With a selection, only streamed tiles with a selected pair of query and key are read.
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
SCALAR_BYTES = 2**20 - 2**16  # bound of the tables: TPUs v5p and v6e have 1 MiB of scalar memory


MAX_INT32 = jnp.iinfo(jnp.int32).max
_POSITIONS, _SEGMENTS = 2**20, 2**11


def _code(segments: bool, position: Array, segment: Array) -> Array:
    """Encode segment and position in one integer that preserves the order of (segment, position).

    Positions from 2^20 - 1 on get the same code, and segments are encoded modulo 2^11. Collisions only cause tiles to
    be computed without need; the mask of a tile uses exact positions and segments.
    """
    if not segments:
        return position
    return (segment % _SEGMENTS) * _POSITIONS + jnp.minimum(position, _POSITIONS - 1)


class Schedule(NamedTuple):
    """Extreme values of tiles, each array [batch, tiles].

    Minima are `MAX_INT32` and maxima are -1 if a tile contains no query that sees a key, or no key that is a token.

    - `reach`: for each resident tile the first streamed tile that it sees, and the number of tiles up to the last one.
        With a selection, see `list_tiles`.
    - `queries`: minimum code of first visible positions, and maximum code of last visible positions; minimum last
        position, and maximum first position; minimum and maximum segment; whether all queries see a key.
    - `keys`: minimum and maximum code; minimum and maximum position; minimum and maximum segment; whether all keys are
        tokens.
    """

    reach: list[Array]
    queries: list[Array]
    keys: list[Array]


def make_schedule(
    segments: bool, intervals: Array, positions: Array, query_tile: int, key_tile: int, keys_resident: bool
) -> Schedule:
    """Compute the schedule.

    **Arguments:**

    - `segments`: whether queries see only keys of their own segment.
    - `intervals`: first visible position, last visible position and segment of queries, [batch, 3, length].
    - `positions`: position and segment of keys, [batch, 2, kv_length].
    - `query_tile`, `key_tile`: tile sizes.
    - `keys_resident`: whether tiles of keys are resident and tiles of queries are streamed; otherwise the reverse.
    """
    first, last, segment = (intervals[:, i] for i in range(3))
    minima = (_code(segments, first, segment), last, segment)
    maxima = (_code(segments, last, segment), first, segment)
    queries = _extremes(minima, maxima, first <= last, query_tile)
    position, segment = positions[:, 0], positions[:, 1]
    key_values = (_code(segments, position, segment), position, segment)
    keys = _extremes(key_values, key_values, position >= 0, key_tile)
    return Schedule(_reach(_compare_tiles(may_see, queries, keys, keys_resident)), queries, keys)


def unmasked_run(schedule: Schedule, keys_resident: bool) -> list[Array]:
    """Return, for each resident tile, the range (start, end) of the first run of streamed tiles that need no mask.

    Both are the end of the tile's reach if there is no such run.
    """
    start, count = schedule.reach
    unmasked, end = _compare_tiles(all_see, schedule.queries, schedule.keys, keys_resident), start + count
    index = jnp.arange(unmasked.shape[2], dtype=jnp.int32)[None, None]
    run_start = jnp.where(unmasked, index, end[:, :, None]).min(2, initial=MAX_INT32)
    after_run = ~unmasked & (index >= run_start[:, :, None])
    run_end = jnp.where(after_run, index, end[:, :, None]).min(2, initial=MAX_INT32)
    return [run_start, run_end]


def _compare_tiles(
    relation: Callable, queries: Sequence[Array], keys: Sequence[Array], keys_resident: bool
) -> Bool[Array, "batch held streamed"]:
    """Evaluate a relation between all tiles of queries and all tiles of keys."""
    tiles = relation([x[:, :, None] for x in queries], [x[:, None, :] for x in keys])
    return tiles.swapaxes(1, 2) if keys_resident else tiles


def _extremes(
    minima: Sequence[Array], maxima: Sequence[Array], valid: Bool[Array, "batch length"], tile: int
) -> list[Array]:
    """Return [minimum, maximum, minimum, maximum, …, whether all are valid] over the valid elements of each tile."""

    def tiles(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, tile)

    valid = tiles(valid)
    fields: list[Array] = []
    for low, high in zip(minima, maxima, strict=True):
        fields += [jnp.where(valid, tiles(low), MAX_INT32).min(-1), jnp.where(valid, tiles(high), -1).max(-1)]
    return [*fields, valid.all(-1).astype(jnp.int32)]


def may_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Return whether a query of one tile may see a key of another, by their codes (the first two fields)."""
    return (queries[0] <= keys[1]) & (keys[0] <= queries[1])


def all_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Return whether every query of one tile sees every key of another; arguments are fields of a `Schedule`."""
    _, _, min_last, max_first, min_segment, max_segment, all_queries = queries
    _, _, min_position, max_position, min_key_segment, max_key_segment, all_keys = keys
    inside = (max_first <= min_position) & (max_position <= min_last) & (all_queries + all_keys == 2)
    same_segment = (min_segment == max_key_segment) & (min_key_segment == max_segment) & (min_segment == max_segment)
    return inside & same_segment


def _reach(visible: Bool[Array, "batch held streamed"]) -> list[Array]:
    """Return the index of the first visible tile, and the number of tiles up to the last visible one."""
    count = visible.shape[2]
    index = jnp.arange(count, dtype=jnp.int32)[None, None]
    start, end = jnp.where(visible, index, count).min(2), jnp.where(visible, index + 1, 0).max(2)
    return [jnp.where(end > 0, start, 0), jnp.maximum(end - start, 0)]


# --- tiles with a selection of keys ---


def selected_tiles(
    by_lanes: bool, bits: Int32[Array, "batch selected_heads _ _"], key_groups: Array, query_tile: int, key_tile: int
) -> Bool[Array, "batch selected_heads query_tiles key_tiles"]:
    """Return, for each tile of scores, whether any of its queries selected any of its keys.

    The last axes of `bits` are [length, words] if bits are packed by lanes, otherwise [words, length]. `key_groups` is
    the group of each key, [batch, kv_length]; with bits packed by lanes only its shape is used.
    """
    batch, heads, *_ = bits.shape
    if by_lanes:  # a run of LANES keys has the same bit in all lanes, and is treated as one key group
        selected = _bitwise_or(bits.reshape(batch, heads, -1, query_tile, bits.shape[3]), (3,))
        selected = _bitwise_or(selected.reshape(*selected.shape[:3], -1, LANES), (4,))
        key_groups = jnp.arange(key_groups.shape[1] // LANES, dtype=jnp.int32)[None]
        key_tile //= LANES
    else:
        selected = _bitwise_or(bits.reshape(batch, heads, bits.shape[2], -1, query_tile), (4,)).swapaxes(2, 3)
    word, bit = key_groups[:, :, None] >> 5, jnp.left_shift(1, key_groups & 31)[:, :, None]
    present = jnp.where(word == jnp.arange(selected.shape[3], dtype=jnp.int32).reshape(1, 1, -1), bit, 0)
    present = _bitwise_or(present.reshape(key_groups.shape[0], -1, key_tile, selected.shape[3]), (2,))
    return ((selected[:, :, :, None] & present[:, None, None]) != 0).any(-1)


def _bitwise_or(words: Int32[Array, "..."], axes: tuple[int, ...]) -> Array:
    return jax.lax.reduce(words, jnp.int32(0), jax.lax.bitwise_or, axes)


def list_tiles(
    schedule: Schedule, selected: Bool[Array, "batch heads queries keys"], keys_resident: bool
) -> list[Array]:
    """Return, for each head and resident tile, the list of streamed tiles that the kernel reads, and its length.

    A kernel reads a streamed tile if the mask and the selection allow any pair of a query and a key in the two tiles.

    **Arguments:**

    - `selected`: whether any key of a key tile is selected by any query of a query tile.
    - `keys_resident`: whether the resident tiles are keys and the streamed tiles queries; otherwise the reverse.

    **Returns:**

    - The lists, `[batch, heads, resident tiles, words]`. A uint32 word contains two 16-bit tile indices. Lists are
        padded with zeros, so that an empty list reads the first tile.
    - Their lengths, `[batch, heads, resident tiles]`.
    """
    selected = selected.swapaxes(2, 3) if keys_resident else selected
    selected &= _compare_tiles(may_see, schedule.queries, schedule.keys, keys_resident)[:, None]
    index = jnp.arange(selected.shape[3], dtype=jnp.int32).reshape(1, 1, 1, -1)
    tiles = jnp.sort(jnp.where(selected, index, MAX_INT32), axis=3)
    tiles = jnp.pad(jnp.where(tiles == MAX_INT32, 0, tiles), [(0, 0)] * 3 + [(0, tiles.shape[3] % 2)])
    return [tiles[..., 0::2] | (tiles[..., 1::2] << 16), selected.sum(3, dtype=jnp.int32)]


def word_range(key_groups: Int32[Array, "batch kv_length"], key_tile: int) -> list[Array]:
    """Return, for each tile of keys, the range (start, end) of the words that contain the bits of its key groups."""
    words = (key_groups >> 5).reshape(key_groups.shape[0], -1, key_tile)
    low = jnp.where(words < 0, MAX_INT32, words).min(2)
    return [jnp.where(low == MAX_INT32, 0, low), words.max(2, initial=-1) + 1]


def unpack_lanes(words: Int32[Array, "..."], first_bit: Any, keys: int, axis: int) -> Int32[Array, "..."]:
    """Unpack the bits of a tile's keys, which are packed by lanes along an axis, from bit `first_bit` on."""
    parts = [jax.lax.shift_right_logical(words, first_bit + i) & 1 for i in range(keys // LANES)]
    return jnp.concatenate(parts, axis)


def unpack_groups(
    read_word: Callable[[Any], Array], key_groups: Array, low: Any, high: Any, shape: tuple[int, int]
) -> Array:
    """Return the selection bits of a tile: for a key of group g, bit `g % 32` of a query's word `g // 32`.

    Only the words `low` to `high - 1` are read. `read_word(n)` returns the n-th word of each query, as a vector along
    the axis of queries.
    """

    def add_word(n: Any, unpacked: Array) -> Array:
        bits = jax.lax.shift_right_logical(*jnp.broadcast_arrays(read_word(n), key_groups & 31)) & 1
        return unpacked | jnp.where((key_groups >> 5) == n, bits, 0)

    return jax.lax.fori_loop(low, high, add_word, jnp.zeros(shape, jnp.int32))


# --- grids of the TPU kernels ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Grid of a TPU kernel, and the table in scalar memory that assigns tiles to its steps.

    The grid is (batch, heads, query tiles, steps) if queries are resident, or (batch, kv heads, key tiles,
    queries_per_kv, steps) if keys are resident. The table is one flat array of the fields of the schedule, because
    scalar memory would pad arrays of several dimensions.
    """

    batch: int
    queries_per_kv: int
    query_tile: int  # queries of a tile
    key_tile: int  # keys of a tile
    num_query_tiles: int
    num_key_tiles: int
    keys_resident: bool
    selected_heads: int = 0
    group_words: int = 0

    @property
    def field_sizes(self) -> list[int]:
        """Number of integers in each field of the table, for one sequence.

        Without a selection, fields are the schedule's 2 arrays of `reach`, 7 of `queries` and 7 of `keys`. With a
        selection, they are the lists of `list_tiles`, their lengths, and, with key groups, the ranges of `word_range`.
        """
        if self.keys_resident:
            resident, streamed = self.num_key_tiles, self.num_query_tiles
        else:
            resident, streamed = self.num_query_tiles, self.num_key_tiles
        if self.selected_heads == 0:
            return [resident] * 2 + [self.num_query_tiles] * 7 + [self.num_key_tiles] * 7
        lists = self.selected_heads * resident
        word_ranges = [self.num_key_tiles] * 2 if self.group_words > 0 else []
        return [lists * -(-streamed // 2), lists, *word_ranges]

    @property
    def table_bytes(self) -> int:
        """Bytes of the table."""
        return 4 * self.batch * sum(self.field_sizes)

    def read_table(self, table: Any, field: int, batch: Any, index: Any) -> Any:
        """Read an element of a field of the table."""
        return table[self.batch * sum(self.field_sizes[:field]) + batch * self.field_sizes[field] + index]

    def streamed(self, table: Any, batch: Any, head: Any, resident: Any, step: Any) -> tuple[Any, Any]:
        """Return the streamed tile of a step, and the number of steps of the resident tile.

        Later steps get the tile of the last step, which is then not loaded again.
        """
        list_words, lists, *_ = self.field_sizes
        index = head * (lists // self.selected_heads) + resident if self.selected_heads > 1 else resident
        count = self.read_table(table, 1, batch, index)
        step = jnp.minimum(step, jnp.maximum(count - 1, 0))
        if self.selected_heads == 0:
            return self.read_table(table, 0, batch, index) + step, count
        word = self.read_table(table, 0, batch, index * (list_words // lists) + jax.lax.div(step, 2))
        return jax.lax.shift_right_logical(word, 16 * jax.lax.rem(step, 2)) & 0xFFFF, count

    def visit(
        self, table: Any, batch: Any, head: Any, resident: Any, step: Any, add: Callable[[bool, Any], None]
    ) -> None:
        """Run `add(masked, key_tile)` for the tile of a step, unless no query of the tile sees a key."""
        streamed, count = self.streamed(table, batch, head, resident, step)

        @pl.when(step < count)
        def _():
            i, j = (streamed, resident) if self.keys_resident else (resident, streamed)
            if self.selected_heads > 0:
                return add(True, j)
            queries = [self.read_table(table, field, batch, i) for field in range(2, 9)]
            keys = [self.read_table(table, field, batch, j) for field in range(9, 16)]
            any_visible, all_visible = may_see(queries, keys), all_see(queries, keys)
            pl.when(any_visible & all_visible)(lambda: add(False, j))
            pl.when(any_visible & ~all_visible)(lambda: add(True, j))

    def selection_mask(
        self, table: Any, batch: Any, j: Any, bits: Any, key_groups: Sequence[Array]
    ) -> Bool[Array, "rows columns"]:
        """Return the selected pairs of the tile of keys `j`; rows are keys if keys are resident, otherwise queries."""
        if self.group_words == 0:
            first_bit = jax.lax.rem(j * (self.key_tile // LANES), WORD)
            words, axis = (bits[0, 0].T, 0) if self.keys_resident else (bits[0, 0], 1)
            return unpack_lanes(words, first_bit, self.key_tile, axis) == 1
        low, high = (self.read_table(table, field, batch, j) for field in (2, 3))

        def read_word(n: Any) -> Array:
            row = bits[0, 0, pl.ds(n, 1), :]
            return row if self.keys_resident else row.T

        shape = (self.key_tile, self.query_tile) if self.keys_resident else (self.query_tile, self.key_tile)
        return unpack_groups(read_word, key_groups[0], low, high, shape) == 1

    def spec(self, layout: str, dims: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of an array of shape `dims` with a layout."""
        shape = {
            "queries": (1, 1, self.query_tile, dims[-1]),
            "keys": (1, 1, self.key_tile, dims[-1]),
            "intervals": (1, dims[-2], self.query_tile),
            "positions": (1, dims[-2], self.key_tile),
            "rows": (1, 1, dims[-2], self.query_tile),
            "lanes": (1, 1, self.query_tile, LANES),
        }["rows" if layout == "words" else layout]

        def index(*ids: Any) -> tuple:
            batch, head, kv_head, i, j = self._tile_indices(*ids)
            selected = head if self.selected_heads > 1 else 0
            return {
                "queries": (batch, head, i, 0),
                "keys": (batch, kv_head, j, 0),
                "intervals": (batch, 0, i),
                "positions": (batch, 0, j),
                "rows": (batch, head, 0, i),
                "words": (batch, selected, 0, i),
                "lanes": (batch, selected, i, jax.lax.div(j * self.key_tile, KEYS_PER_ROW)),
            }[layout]

        return pl.BlockSpec(shape, index)

    def _tile_indices(self, *ids: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return (batch, head, kv head, query tile, key tile) of a grid step."""
        *step_ids, table = ids
        if self.keys_resident:
            batch, kv_head, resident, query_head, step = step_ids
            head = kv_head * self.queries_per_kv + query_head
            return batch, head, kv_head, self.streamed(table, batch, head, resident, step)[0], resident
        batch, head, resident, step = step_ids
        kv_head = jax.lax.div(head, self.queries_per_kv)
        return batch, head, kv_head, resident, self.streamed(table, batch, head, resident, step)[0]
