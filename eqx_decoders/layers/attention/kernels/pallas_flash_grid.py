"""Grids of the flash kernels for TPU: which tile a step has, by a table in scalar memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_decoders.core.chips import LANES
from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import (
    FlashPlan,
    all_see,
    chosen_tiles,
    list_tiles,
    make_schedule,
    may_see,
    spread_groups,
    spread_lanes,
    word_range,
)
from eqx_decoders.layers.attention.kernels.selection import PACKED, WORD


pl = LazyModule("jax.experimental.pallas")  # slow to import
SCALAR_BYTES = 2**20 - 2**16  # of a table: TPUs v5p and v6e have 1 MiB of scalar memory


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
                "lanes": (batch, selected, i, jax.lax.div(j * self.key_block, PACKED)),
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


def tiles_of(plan: FlashPlan, query: tuple[int, ...], key: tuple[int, ...], keys_held: bool) -> Tiles:
    """Return the tiles for arrays of these shapes."""
    if keys_held:
        query_block, key_block = plan.query_blocks.streamed, plan.key_blocks.held
    else:
        query_block, key_block = plan.query_blocks.held, plan.key_blocks.streamed
    return Tiles(
        batch=query[0],
        groups=query[1] // key[1],
        query_block=query_block,
        key_block=key_block,
        rows=query[2] // query_block,
        columns=key[2] // key_block,
        keys_held=keys_held,
        selected_heads=plan.selected_heads,
        group_words=plan.group_words,
    )


def mask_places(plan: FlashPlan) -> tuple[str, ...]:
    """Return the places of the arrays of the mask."""
    bits = () if plan.selected_heads == 0 else ("lanes",) if plan.by_lanes else ("words",)
    return ("intervals", "positions", *bits)


def make_table(
    plan: FlashPlan, named: dict[str, Array], query_block: int, key_block: int, keys_held: bool
) -> list[Array]:
    """Compute the fields of the table."""
    blocks, positions = (query_block, key_block), named["positions"]
    schedule = make_schedule(plan.segments, named["intervals"], positions, *blocks, keys_held)
    if plan.selected_heads == 0:
        return jax.tree.leaves(schedule)
    chosen = chosen_tiles(plan, named[mask_places(plan)[-1]], positions[:, -1], *blocks)
    words = word_range(positions[:, -1], key_block) if plan.group_words > 0 else []
    return [*list_tiles(schedule, chosen, keys_held), *words]
