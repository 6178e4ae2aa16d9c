"""Tiles of scores of the flash kernels of all platforms: their equations, and what a platform's kernels are.

A tile is a block of queries against a block of keys; `pallas_flash_schedule` says which are read.

    forward:  S = Q K',  out = softmax(S) V,  lse = logsumexp S
    backward: P = exp(S - lse),  D = sum(out * dO) - dlse,  dS = P * (dO V' - D)
              dQ = dS K  (blocks of queries held),  dK = dS' Q,  dV = P' dO  (blocks of keys held)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from eqx_decoders.layers.attention.kernels.common import EMPTY, cap_gradient, cap_scores, tile_product
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

    @property
    def mask_places(self) -> tuple[str, ...]:
        """Return the places of the arrays of the mask."""
        bits = () if self.selected_heads == 0 else ("lanes",) if self.by_lanes else ("words",)
        return ("intervals", "positions", *bits)

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
        return weights, cap_gradient(slopes, scores, self.soft_cap)


class FlashKernels(NamedTuple):
    """Kernels of a platform. Their arrays are in whole blocks: queries, keys and values in the platform's order.

    **Arguments:**

    - `make_plan`: `(call: AttentionCall) -> FlashPlan`.
    - `run`: `(plan, part, operands, results) -> arrays`, the kernel of a part: "forward", or the gradients of "queries"
        or of "keys" and values. Operands are arrays, results shapes and dtypes, each with the place of its blocks;
        query, key and value come first.
    - `heads_first`: whether arrays are `[batch, heads, length, dim]`; else they are `[batch, length, heads, dim]`.
    """

    make_plan: Callable[..., FlashPlan]
    run: Callable[..., Sequence[Array]]
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
