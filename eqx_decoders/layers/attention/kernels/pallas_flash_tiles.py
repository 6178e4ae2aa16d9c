"""Tiles of scores of the flash kernels of all platforms: their equations, and the mask that each needs.

A tile is a block of queries against a block of keys. The extremes of its queries' intervals and of its keys' positions
and segments decide: either no query sees a key of it, and it is skipped; or all see all, and no mask is applied; or
segments and positions are compared. This holds for any order of positions. Only the blocks from the first to the last
that a held block sees are read at all; under a selection, only those of which one of its queries chose a key, or one of
whose queries chose one of its keys.

    forward:  S = Q K',  out = softmax(S) V,  lse = logsumexp S
    backward: P = exp(S - lse),  D = sum(out * dO) - dlse,  dS = P * (dO V' - D)
              dQ = dS K  (blocks of queries held),  dK = dS' Q,  dV = P' dO  (blocks of keys held)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from eqx_decoders.core.chips import LANES
from eqx_decoders.layers.attention.kernels.common import EMPTY, cap_scores, cap_slopes
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.tpu import BlockSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashPlan:
    """Static description of one call, and the equations of its tiles."""

    mask: Mask
    soft_cap: float | None
    segments: bool
    interpret: bool
    query_blocks: BlockSizes
    key_blocks: BlockSizes
    selected_heads: int = 0
    group_words: int = 0

    @property
    def by_lanes(self) -> bool:
        """True if the bits of a selection are those of single keys, packed by lanes."""
        return self.selected_heads > 0 and self.group_words == 0

    def scores(self, left: Array, right: Array) -> Float32[Array, "rows columns"]:
        return cap_scores(tile_product(left, right, 1, 1), self.soft_cap)

    def seen(self, intervals: Sequence[Array], positions: Sequence[Array]) -> Bool[Array, "rows columns"]:
        """Return the mask of a tile, with one side as rows and the other as columns."""
        (first, last, segment), (position, key_segment) = intervals, positions
        seen = (position >= first) & (position <= last)
        return seen & (segment == key_segment) if self.segments else seen

    def slopes(
        self, left: Array, right: Array, bars: tuple[Array, Array], lse_delta: Sequence[Array], seen: Array | None
    ) -> tuple[Float32[Array, "rows columns"], Float32[Array, "rows columns"]]:
        """Compute P and dS of a tile, queries or keys on the left; `bars` are dO and V in the same order."""
        lse, delta = lse_delta
        scores = self.scores(left, right)
        weights = jnp.exp((scores if seen is None else jnp.where(seen, scores, -jnp.inf)) - lse)
        slopes = weights * (tile_product(*bars, 1, 1) - delta)
        return weights, cap_slopes(slopes, scores, self.soft_cap)


class FlashKernels(NamedTuple):
    """Kernels of a platform. Their arrays are in whole blocks: queries, keys and values in the platform's order.

    **Arguments:**

    - `make_plan`: `(call: AttentionCall) -> FlashPlan`.
    - `forward`: `(plan, query, key, value, places) -> (out, lse)`, lse being a row of each head:
        `[batch, heads, 1, length]`. Places are arrays of the mask: intervals, positions, and the bits of a selection.
    - `backward`: `(plan, query, key, value, places, out_bar, lse_delta, dtype)`, with the rows lse and delta of
        `Cotangents`, `[batch, heads, 2, length]`: the gradients of query, key and value, in a dtype or, for None, in
        theirs.
    - `heads_first`: whether arrays are `[batch, heads, length, dim]`; else they are `[batch, length, heads, dim]`.
    """

    make_plan: Callable[..., FlashPlan]
    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    heads_first: bool

    def arrange(self, x: Array, blocks: BlockSizes) -> Array:
        """Bring `[batch, length, heads, …]` into the platform's order, in whole blocks."""
        x = fill(x, blocks, 1)
        return x.swapaxes(1, 2) if self.heads_first else x

    def restore(self, x: Array, length: int) -> Array:
        """Undo `arrange`."""
        return (x.swapaxes(1, 2) if self.heads_first else x)[:, :length]

    def rows(self, x: Array) -> Array:
        """Make rows of heads, `[batch, heads, 1, length]`, of numbers in the platform's order."""
        return (x if self.heads_first else x.swapaxes(1, 2))[:, :, None]

    def from_rows(self, rows: Array) -> Array:
        """Undo `rows`."""
        return rows[:, :, 0] if self.heads_first else rows[:, :, 0].swapaxes(1, 2)


def fill_length(blocks: BlockSizes, length: int) -> int:
    """Return a length in whole blocks, at least one."""
    return blocks.held * max(1, -(-length // blocks.held))


def fill(x: Array, blocks: BlockSizes, axis: int, value: int = 0) -> Array:
    """Pad to whole blocks, at least one."""
    more = [(0, 0)] * x.ndim
    more[axis] = (0, fill_length(blocks, x.shape[axis]) - x.shape[axis])
    return jnp.pad(x, more, constant_values=value)


# --- the equations of a tile ---


class Softmax(NamedTuple):
    """Running softmax of a block of queries: largest scores, sums of weights, and sums of weighted values."""

    top: Float32[Array, "queries 1"]
    total: Float32[Array, "queries 1"]
    sums: Float32[Array, "queries value_dim"]

    def add(self, scores: Float32[Array, "queries keys"], value: Array, scale: Array | None = None) -> "Softmax":
        """Add the keys of a tile, whose values a scale may multiply; a score of -inf counts for nothing."""
        top = jnp.maximum(self.top, scores.max(1, keepdims=True))
        fade, weights = jnp.exp(self.top - top), jnp.exp(scores - top)
        total = self.total * fade + weights.sum(1, keepdims=True)
        weights = weights if scale is None else weights * scale
        return Softmax(top, total, self.sums * fade + tile_product(weights.astype(value.dtype), value, 1, 0))

    def results(self) -> tuple[Float32[Array, "queries value_dim"], Float32[Array, "queries 1"]]:
        """Return out and lse."""
        safe = jnp.where(self.total > 0, self.total, 1.0)
        return self.sums / safe, jnp.where(self.total > 0, self.top + jnp.log(safe), EMPTY)


def tile_product(left: Array, right: Array, left_axis: int, right_axis: int) -> Float32[Array, "rows columns"]:
    """Multiply two tiles in f32. Products of bfloat16 are exact, whatever precision is the default."""
    return jax.lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.DEFAULT if left.dtype == jnp.bfloat16 else None,
        preferred_element_type=jnp.float32,
    )


# --- which tiles are read, and which need a mask ---

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
    plan: FlashPlan, bits: Int32[Array, "batch selected_heads _ _"], groups: Array, query_block: int, key_block: int
) -> Bool[Array, "batch selected_heads query_blocks key_blocks"]:
    """Return whether any query of a block chose any key of a block.

    Bits are `length words` by lanes, else `words length`; `groups` are those of keys, which lanes don't need.
    """
    batch, heads, *_ = bits.shape
    if plan.by_lanes:  # all lanes of a bit are one group of keys
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
