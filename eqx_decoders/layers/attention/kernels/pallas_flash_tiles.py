"""Tiles of scores of the flash kernel: the mask that each needs, and the tile of each step.

A tile is a block of queries against a block of keys. The extremes of its queries' intervals and of its keys' positions
and segments decide: either no query sees a key of it, and it is skipped; or all see all, and no mask is applied; or
segments and positions are compared. This holds for any order of positions. Only the blocks from the first to the last
that a held block sees are read at all.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_decoders.core.lazy_imports import LazyModule


pl = LazyModule("jax.experimental.pallas")  # slow to import
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

    - `reach`: for each held block the first block that it sees, and the number of blocks up to the last.
    - `queries`: the least code of a first position, last position and segment; the largest code of a last position,
        first position and segment; whether all queries see anything.
    - `keys`: the least code, position and segment; the largest; whether all are tokens.
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
    seen = may_see([x[:, :, None] for x in queries], [x[:, None, :] for x in keys])
    return Schedule(_reach(seen.swapaxes(1, 2) if keys_held else seen), queries, keys)


def _extremes(
    least: Sequence[Array], largest: Sequence[Array], counts: Bool[Array, "batch length"], block: int
) -> list[Array]:
    """Return the least and the largest numbers among those that count in each block, and whether all of it counts."""

    def blocks(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, block)

    counts = blocks(counts)
    fields = [jnp.where(counts, blocks(x), MOST).min(-1) for x in least]
    fields += [jnp.where(counts, blocks(x), -1).max(-1) for x in largest]
    return [*fields, counts.all(-1).astype(jnp.int32)]


def may_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Return whether a query of a block may see a key of a block, from their extremes."""
    return (queries[0] <= keys[3]) & (keys[0] <= queries[3])


def all_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Return whether every query of a block sees every key of a block."""
    _, last, segment, _, first, last_segment, all_queries = queries
    _, position, key_segment, _, last_position, last_key_segment, all_keys = keys
    inside = (first <= position) & (last_position <= last) & (all_queries + all_keys == 2)
    return inside & (segment == last_key_segment) & (key_segment == last_segment) & (segment == last_segment)


def _reach(seen: Bool[Array, "batch held streamed"]) -> list[Array]:
    index = jnp.arange(seen.shape[2], dtype=jnp.int32)[None, None]
    start, end = jnp.where(seen, index, seen.shape[2]).min(2), jnp.where(seen, index + 1, 0).max(2)
    return [jnp.where(end > 0, start, 0), jnp.maximum(end - start, 0)]


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

    def entry(self, table: Any, field: int, batch: Any, block: Any) -> Any:
        """Read an entry: fields 0 and 1 are the schedule's reach, then come 7 of the queries and 7 of the keys."""
        counts = [self.columns if self.keys_held else self.rows] * 2 + [self.rows] * 7 + [self.columns] * 7
        return table[self.batch * sum(counts[:field]) + batch * counts[field] + block]

    def streamed(self, table: Any, batch: Any, held: Any, step: Any) -> Any:
        """Return the block to read. Where a row ends before others do its last block stays, and is not read again."""
        start, count = (self.entry(table, field, batch, held) for field in range(2))
        return start + jnp.minimum(step, jnp.maximum(count - 1, 0))

    def visit(self, table: Any, batch: Any, held: Any, step: Any, add: Callable[[bool], None]) -> None:
        """Run `add(masked)` if anything in the step's tile is visible."""
        start, count = (self.entry(table, field, batch, held) for field in range(2))

        @pl.when(step < count)
        def _():
            i, j = (start + step, held) if self.keys_held else (held, start + step)
            queries = [self.entry(table, field, batch, i) for field in range(2, 9)]
            keys = [self.entry(table, field, batch, j) for field in range(9, 16)]
            some, everything = may_see(queries, keys), all_see(queries, keys)
            pl.when(some & everything)(lambda: add(False))
            pl.when(some & ~everything)(lambda: add(True))

    def spec(self, place: str, dims: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of an array that lies in a place."""
        shape = {
            "queries": (1, 1, self.query_block, dims[-1]),
            "keys": (1, 1, self.key_block, dims[-1]),
            "intervals": (1, dims[-2], self.query_block),
            "positions": (1, dims[-2], self.key_block),
            "rows": (1, 1, dims[-2], self.query_block),
        }[place]

        def index(*ids: Any) -> tuple:
            batch, head, kv_head, i, j = self._at(*ids)
            return {
                "queries": (batch, head, i, 0),
                "keys": (batch, kv_head, j, 0),
                "intervals": (batch, 0, i),
                "positions": (batch, 0, j),
                "rows": (batch, head, 0, i),
            }[place]

        return pl.BlockSpec(shape, index)

    def _at(self, *ids: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return (batch, head, key head, block of queries, block of keys)."""
        *at, table = ids
        if self.keys_held:
            batch, kv_head, held, group, step = at
            return batch, kv_head * self.groups + group, kv_head, self.streamed(table, batch, held, step), held
        batch, head, held, step = at
        return batch, head, jax.lax.div(head, self.groups), held, self.streamed(table, batch, held, step)
