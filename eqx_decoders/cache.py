"""What a decoder remembers, and what a call proposes to it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.explicit import keeping_types
from eqx_decoders.layers import memory
from eqx_decoders.layers.memory import is_memory


class Cache(eqx.Module):
    """What a decoder remembers of the tokens it has seen.

    **Arguments:**

    - `segments`: for each segment, and each block of its unit, the memories of its layers by the names of its branches.
    - `length`: the next position of each row.
    - `rope_offset`: what is to be added to it for the next rotary position, where pictures move these on by other steps
        than their tokens; None for models without such positions.
    """

    segments: tuple[tuple[dict[str, Any], ...], ...]
    length: Int[Array, "batch"]
    rope_offset: Float[Array, "batch"] | None = None

    @keeping_types
    def commit(
        self, entries: Any, positions: Int[Array, "batch length"], rope_offset: Float[Array, "batch"] | None = None
    ) -> "Cache":
        """Write the entries proposed by all layers at `positions`; where these are -1 nothing is written.

        `rope_offset` is the new one; None leaves it.
        """
        return Cache(
            segments=memory.commit(self.segments, entries, positions),
            length=jnp.maximum(self.length, jnp.max(positions, axis=1) + 1),
            rope_offset=self.rope_offset if rope_offset is None else rope_offset,
        )

    @keeping_types
    def reset(self, rows: Bool[Array, "batch"]) -> "Cache":
        """The cache with these rows empty."""
        emptied = jax.tree.map(lambda each: each.reset(rows), self.segments, is_leaf=is_memory)
        offset = None if self.rope_offset is None else jnp.where(rows, 0.0, self.rope_offset)
        return Cache(segments=emptied, length=jnp.where(rows, 0, self.length), rope_offset=offset)

    @keeping_types
    def with_row(self, row: int | Int[Array, ""], source: "Cache", source_row: int | Int[Array, ""] = 0) -> "Cache":
        """The cache with a row of another cache of the same decoder, perhaps of another length, in place of `row`."""

        def copied(mine: Any, other: Any) -> Any:
            return mine.with_row(row, other.row(source_row))

        offset, other = self.rope_offset, source.rope_offset
        return Cache(
            segments=jax.tree.map(copied, self.segments, source.segments, is_leaf=is_memory),
            length=self.length.at[row].set(source.length[source_row]),
            rope_offset=None if offset is None or other is None else offset.at[row].set(other[source_row]),
        )


class Proposal(eqx.Module):
    """What a call proposes to a cache: the entries of every block's layers, the positions of its tokens, and its
    `rope_offset` behind them (None: as it was).
    """

    entries: Any
    positions: Int[Array, "batch length"]
    rope_offset: Float[Array, "batch"] | None = None
