"""What a tile of scores needs of the mask, and which tile each step of the interval kernel works on.

A tile is a block of queries against a block of keys. What it needs follows from the extremes of its queries' intervals
and of its keys' positions and segments: either no query sees a key of it, and it is skipped; or all see all, and no
mask is applied; or segments and positions are compared. This holds for any order of positions. Only the blocks from the
first to the last that a held block sees are read at all.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool


MOST = jnp.iinfo(jnp.int32).max
_POSITIONS, _SEGMENTS = 2**20, 2**11


def _code(segments: bool, position: Array, segment: Array) -> Array:
    """A number that keeps the order of positions within a segment, and of segments.

    Positions beyond 2^20 have one number, and segments 2^11 apart the same: then tiles may be visited in vain, no more.
    """
    if not segments:
        return position
    return (segment % _SEGMENTS) * _POSITIONS + jnp.minimum(position, _POSITIONS - 1)


class Schedule(NamedTuple):
    """What is known of whole blocks, [batch, blocks] each; with `MOST` and -1 where nothing of a block counts.

    - `reach`: of each block that is held the first block that it sees, and how many there are up to the last.
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
    """Of what queries see, `[batch, 3, length]` (first, last, segment), and of keys, `[batch, 2, kv_length]`
    (position, segment); `segments` says whether these count."""
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
    """Of what counts in each block the least and the largest of some numbers, and whether all of it does."""

    def blocks(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, block)

    counts = blocks(counts)
    fields = [jnp.where(counts, blocks(x), MOST).min(-1) for x in least]
    fields += [jnp.where(counts, blocks(x), -1).max(-1) for x in largest]
    return [*fields, counts.all(-1).astype(jnp.int32)]


def may_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Whether a query of a block may see a key of a block, from their extremes."""
    return (queries[0] <= keys[3]) & (keys[0] <= queries[3])


def all_see(queries: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Whether every query of a block sees every key of a block."""
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
    """Which tile a step of a grid works on, by the schedule as one row of numbers in scalar memory (where the last of
    several dimensions would be padded).

    The grid is (batch, heads, blocks of queries, steps), or (batch, key heads, blocks of keys, groups, steps).
    """

    batch: int
    groups: int
    query_block: int
    key_block: int
    rows: int  # blocks of queries
    columns: int  # blocks of keys
    keys_held: bool

    def entry(self, table: Any, field: int, batch: Any, block: Any) -> Any:
        """Fields 0 and 1 are the schedule's reach, then come 7 of the queries and 7 of the keys."""
        counts = [self.columns if self.keys_held else self.rows] * 2 + [self.rows] * 7 + [self.columns] * 7
        return table[self.batch * sum(counts[:field]) + batch * counts[field] + block]

    def streamed(self, table: Any, batch: Any, held: Any, step: Any) -> Any:
        """The block that is read. Where a row ends before others do its last block stays, and is not read again."""
        start, count = (self.entry(table, field, batch, held) for field in range(2))
        return start + jnp.minimum(step, jnp.maximum(count - 1, 0))

    def visit(self, table: Any, batch: Any, held: Any, step: Any, add: Callable[[bool], None]) -> None:
        """Run `add(masked)` if the step's tile has anything that is seen."""
        start, count = (self.entry(table, field, batch, held) for field in range(2))

        @pl.when(step < count)
        def _():
            i, j = (start + step, held) if self.keys_held else (held, start + step)
            queries = [self.entry(table, field, batch, i) for field in range(2, 9)]
            keys = [self.entry(table, field, batch, j) for field in range(9, 16)]
            some, everything = may_see(queries, keys), all_see(queries, keys)
            pl.when(some & everything)(lambda: add(False))
            pl.when(some & ~everything)(lambda: add(True))

    def spec(self, place: str, dims: tuple[int, ...]) -> pl.BlockSpec:
        """The block of an array that lies in a place."""
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
        """(batch, head, key head, block of queries, block of keys)"""
        *at, table = ids
        if self.keys_held:
            batch, kv_head, held, group, step = at
            return batch, kv_head * self.groups + group, kv_head, self.streamed(table, batch, held, step), held
        batch, head, held, step = at
        return batch, head, jax.lax.div(head, self.groups), held, self.streamed(table, batch, held, step)
