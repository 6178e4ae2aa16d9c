"""Equations of one tile of scores in the flash kernels, and the interface of a platform's kernels.

A tile contains the scores of a tile of queries and a tile of keys. `pallas_flash_schedule` determines which tiles are
computed. One side is resident: its sums stay on chip, while the tiles of the other side are streamed.

    forward:  S = Q K',  out = softmax(S) V,  lse = logsumexp S
    backward: P = exp(S - lse),  D = sum(out * dO) - dlse,  dS = P * (dO V' - D)
              dQ = dS K  (queries resident),  dK = dS' Q,  dV = P' dO  (keys resident)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from eqx_decoders.layers.attention.kernels.common import EMPTY, cap_gradient, cap_scores, tile_product
from eqx_decoders.layers.attention.kernels.tile_sizes import TileSizes
from eqx_decoders.layers.mask import Mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashPlan:
    """Static description of one call, and the equations of its tiles.

    **Arguments:**

    - `mask`, `soft_cap`: as in `AttentionOptions`.
    - `segments`: whether queries see only keys of their own segment.
    - `interpret`: whether the kernels are interpreted.
    - `query_tiles`, `key_tiles`: tile sizes when the side is resident (`held`) and when it is streamed.
    - `selected_heads`, `group_words`: as in `AttentionCall`.
    """

    mask: Mask
    soft_cap: float | None
    segments: bool
    interpret: bool
    query_tiles: TileSizes
    key_tiles: TileSizes
    selected_heads: int = 0
    group_words: int = 0

    @property
    def by_lanes(self) -> bool:
        """Whether the selection has one bit per key, packed by lanes."""
        return self.selected_heads > 0 and self.group_words == 0

    @property
    def mask_layouts(self) -> tuple[str, ...]:
        """Layouts of the mask arrays."""
        if self.selected_heads == 0:
            return ("intervals", "positions")
        return ("intervals", "positions", "lanes" if self.by_lanes else "words")

    def scores(self, left: Array, right: Array) -> Float32[Array, "rows columns"]:
        """Compute the capped scores of a tile: Q K' with queries as rows, or K Q' with keys as rows."""
        return cap_scores(tile_product(left, right, 1, 1), self.soft_cap)

    def visible(self, intervals: Sequence[Array], positions: Sequence[Array]) -> Bool[Array, "rows columns"]:
        """Return the mask of a tile; one argument holds column vectors and the other row vectors."""
        first, last, query_segment = intervals
        position, key_segment = positions
        mask = (position >= first) & (position <= last)
        return mask & (query_segment == key_segment) if self.segments else mask

    def weights_and_score_bar(
        self,
        left: Array,
        right: Array,
        out_bar_and_value: tuple[Array, Array],
        lse_delta: Sequence[Array],
        mask: Array | None,
    ) -> tuple[Float32[Array, "rows columns"], Float32[Array, "rows columns"]]:
        """Compute P and dS of a tile.

        With queries as rows, `left, right` are Q, K, and `out_bar_and_value` are dO, V. With keys as rows, each pair is
        swapped.
        """
        lse, delta = lse_delta
        scores = self.scores(left, right)
        weights = jnp.exp((scores if mask is None else jnp.where(mask, scores, -jnp.inf)) - lse)
        score_bar = weights * (tile_product(*out_bar_and_value, 1, 1) - delta)
        return weights, cap_gradient(score_bar, scores, self.soft_cap)


class FlashKernels(NamedTuple):
    """The kernels of a platform.

    Their arrays are padded to multiples of the tiles, in the platform's order of axes.

    **Arguments:**

    - `make_plan`: `(call: AttentionCall) -> FlashPlan`.
    - `run`: `(plan, part, operands, results) -> arrays`, runs the kernel for a part: "forward", "queries" (gradient of
        queries) or "keys" (gradients of keys and values). Operands are pairs (layout, array), with query, key and value
        first; results are triples (layout, shape, dtype). A layout names the tile that a program accesses.
    - `heads_first`: whether arrays are [batch, heads, length, dim]; otherwise they are [batch, length, heads, dim].
    """

    make_plan: Callable[..., FlashPlan]
    run: Callable[..., Sequence[Array]]
    heads_first: bool

    def arrange(self, x: Array, tiles: TileSizes) -> Array:
        """Transpose [batch, length, heads, …] to the platform's order, and pad the length."""
        x = pad_to_tile(x, tiles, 1)
        return x.swapaxes(1, 2) if self.heads_first else x

    def restore(self, x: Array, length: int) -> Array:
        """Undo `arrange`."""
        return (x.swapaxes(1, 2) if self.heads_first else x)[:, :length]

    def to_row_vectors(self, x: Array) -> Array:
        """Reshape scalars per token and head, in the platform's order, to row vectors [batch, heads, 1, length]."""
        return (x if self.heads_first else x.swapaxes(1, 2))[:, :, None]

    def from_row_vectors(self, rows: Array) -> Array:
        """Undo `to_row_vectors`."""
        return rows[:, :, 0] if self.heads_first else rows[:, :, 0].swapaxes(1, 2)


def padded_length(tiles: TileSizes, length: int) -> int:
    """Round a length up to a multiple of the resident tile, at least one tile."""
    return tiles.held * max(1, -(-length // tiles.held))


def pad_to_tile(x: Array, tiles: TileSizes, axis: int, value: int = 0) -> Array:
    """Pad an axis to `padded_length`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padded_length(tiles, x.shape[axis]) - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


# --- the equations of a tile ---


class OnlineSoftmax(NamedTuple):
    """State of the online softmax of a tile of queries.

    **Arguments:**

    - `max_score`: largest score so far.
    - `total`: sum of exp(score - max_score).
    - `acc`: sum of exp(score - max_score) * value.
    """

    max_score: Float32[Array, "queries 1"]
    total: Float32[Array, "queries 1"]
    acc: Float32[Array, "queries value_dim"]

    def add(self, scores: Float32[Array, "queries keys"], value: Array, scale: Array | None = None) -> "OnlineSoftmax":
        """Add the keys of a tile; masked scores are -inf. `scale` multiplies the values of quantized caches."""
        max_score = jnp.maximum(self.max_score, scores.max(1, keepdims=True))
        rescale, weights = jnp.exp(self.max_score - max_score), jnp.exp(scores - max_score)
        total = self.total * rescale + weights.sum(1, keepdims=True)
        weights = weights if scale is None else weights * scale
        acc = self.acc * rescale + tile_product(weights.astype(value.dtype), value, 1, 0)
        return OnlineSoftmax(max_score, total, acc)

    def results(self) -> tuple[Float32[Array, "queries value_dim"], Float32[Array, "queries 1"]]:
        """Return out and lse."""
        safe_total = jnp.where(self.total > 0, self.total, 1.0)
        return self.acc / safe_total, jnp.where(self.total > 0, self.max_score + jnp.log(safe_total), EMPTY)
