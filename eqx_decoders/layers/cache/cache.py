"""Cache of a decoder, and the entries that a call proposes for it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.layers.cache.base import LayerCacheRows, commit, is_layer_cache, rows_of
from eqx_decoders.sharding.explicit import keeping_types


class Cache(eqx.Module):
    """Cache of a decoder, for the tokens that it has seen.

    **Arguments:**

    - `layer_caches`: for each `ScannedLayers` of the model, and each block of its unit, the caches of the layers by
        name.
    - `length`: the next position of each row.
    - `rope_offset`: added to the length for the next rotary position, where images advance it by other steps than
        their tokens; None for models without such positions.
    """

    layer_caches: tuple[tuple[dict[str, Any], ...], ...]
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
            layer_caches=commit(self.layer_caches, entries, positions),
            length=jnp.maximum(self.length, jnp.max(positions, axis=1) + 1),
            rope_offset=self.rope_offset if rope_offset is None else rope_offset,
        )

    @keeping_types
    def reset(self, rows: Bool[Array, "batch"]) -> "Cache":
        """Empty these rows."""
        emptied = jax.tree.map(lambda each: each.reset(rows), self.layer_caches, is_leaf=is_layer_cache)
        offset = None if self.rope_offset is None else jnp.where(rows, 0.0, self.rope_offset)
        return Cache(layer_caches=emptied, length=jnp.where(rows, 0, self.length), rope_offset=offset)

    @keeping_types
    def with_row(self, row: int | Int[Array, ""], source: "Cache", source_row: int | Int[Array, ""] = 0) -> "Cache":
        """Replace `row` by a row of another cache of the same decoder, perhaps of another length."""

        def copied(mine: Any, other: Any) -> Any:
            return mine.with_row(row, other.row(source_row))

        offset, other = self.rope_offset, source.rope_offset
        return Cache(
            layer_caches=jax.tree.map(copied, self.layer_caches, source.layer_caches, is_leaf=is_layer_cache),
            length=self.length.at[row].set(source.length[source_row]),
            rope_offset=None if offset is None or other is None else offset.at[row].set(other[source_row]),
        )

    def at_rows(self, rows: Int[Array, "rows"]) -> "Cache":
        """Select some rows, none of them twice, for `Decoder.forward_uncommitted` to read where they stand.

        The resulting entries go to `commit_rows`.
        """

        def some(each: Any) -> LayerCacheRows:
            return LayerCacheRows(whole=each, which=rows)

        offset = self.rope_offset
        return Cache(
            layer_caches=jax.tree.map(some, self.layer_caches, is_leaf=is_layer_cache),
            length=rows_of(self.length, rows),
            rope_offset=None if offset is None else rows_of(offset, rows),
        )

    @keeping_types
    def commit_rows(
        self,
        rows: Int[Array, "rows"],
        entries: Any,
        positions: Int[Array, "rows length"],
        rope_offset: Float[Array, "rows"] | None = None,
    ) -> "Cache":
        """Write entries proposed for some rows, as `commit` does."""

        def written(each: Any, new: Any) -> Any:
            return each.commit_rows(rows, new, positions)

        offset = self.rope_offset
        return Cache(
            layer_caches=jax.tree.map(written, self.layer_caches, entries, is_leaf=is_layer_cache),
            length=self.length.at[rows].max(jnp.max(positions, axis=1) + 1),
            rope_offset=offset if offset is None or rope_offset is None else offset.at[rows].set(rope_offset),
        )

    @keeping_types
    def empty_rows(self, rows: Int[Array, "rows"]) -> "Cache":
        """Mark rows as empty. Values of an earlier sequence, NaN included, do not affect the next sequence in a row.

        Used slots of contiguous caches are overwritten with zeros. Pages keep their contents, because layers replace
        values beyond a row's length with zeros. Row indices beyond the last row are ignored.
        """
        emptied = jax.tree.map(lambda each: each.empty_rows(rows), self.layer_caches, is_leaf=is_layer_cache)
        offset = None if self.rope_offset is None else self.rope_offset.at[rows].set(0.0, mode="drop")
        return Cache(layer_caches=emptied, length=self.length.at[rows].set(0, mode="drop"), rope_offset=offset)

    # of caches in pages

    @keeping_types
    def with_tables(
        self,
        tables: Int[Array, "batch row_pages"] | dict[int, Int[Array, "batch row_pages"]],
        lengths: Int[Array, "batch"] | None = None,
    ) -> "Cache":
        """Set the page tables of the rows, and the numbers of tokens in them (None: as before).

        Give one table for all layers; or one for the layers of each window, and 0 for layers without: then they have
        page numbers of their own.
        """

        layer_caches = jax.tree.map(
            lambda each: each.with_tables(tables, lengths), self.layer_caches, is_leaf=is_layer_cache
        )
        return Cache(layer_caches, self.length if lengths is None else lengths, self.rope_offset)


class Proposal(eqx.Module):
    """Entries that a call proposes for a cache: of every block's layers, with the positions of its tokens.

    `rope_offset` is the cache's next one (None: as it was).
    """

    entries: Any
    positions: Int[Array, "batch length"]
    rope_offset: Float[Array, "batch"] | None = None
