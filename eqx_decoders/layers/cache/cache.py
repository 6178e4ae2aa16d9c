"""Cache of a decoder, and the cache update that a forward pass proposes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.layers.cache.base import LayerCacheRows, commit, is_layer_cache, rows_of
from eqx_decoders.sharding.explicit import keeping_types


class Cache(eqx.Module):
    """Cache of a decoder: the layer caches of all layers, for a batch of sequences.

    **Arguments:**

    - `layer_caches`: for each `ScannedLayers` of the model, and each block of its unit, the layer caches by layer name.
    - `length`: number of tokens of each sequence, which is the position of its next token.
    - `rope_offset`: difference between the next rotary position and `length`, for models with multi-dimensional rotary
        positions (images advance these by other steps than their number of tokens); None for other models.
    """

    layer_caches: tuple[tuple[dict[str, Any], ...], ...]
    length: Int[Array, "batch"]
    rope_offset: Float[Array, "batch"] | None = None

    @keeping_types
    def commit(
        self, entries: Any, positions: Int[Array, "batch length"], rope_offset: Float[Array, "batch"] | None = None
    ) -> "Cache":
        """Write the proposed entries of all layers at `positions`. Entries at position -1 are not written.

        `rope_offset` is the new value of `Cache.rope_offset`; None keeps the old value.
        """
        return Cache(
            layer_caches=commit(self.layer_caches, entries, positions),
            length=jnp.maximum(self.length, jnp.max(positions, axis=1) + 1),
            rope_offset=self.rope_offset if rope_offset is None else rope_offset,
        )

    @keeping_types
    def reset(self, rows: Bool[Array, "batch"]) -> "Cache":
        """Empty the batch rows where `rows` is True, see `empty_rows`."""
        count = rows.shape[0]
        return self.empty_rows(jnp.where(rows, jnp.arange(count), count))

    @keeping_types
    def with_row(self, row: int | Int[Array, ""], source: "Cache", source_row: int | Int[Array, ""] = 0) -> "Cache":
        """Copy the batch row `source_row` of another cache of the same decoder to the batch row `row`.

        The caches may have different maximum lengths and formats.
        """

        def copy_row(cache: Any, source_cache: Any) -> Any:
            return cache.with_row(row, source_cache.row(source_row))

        offset = self.rope_offset
        if offset is not None:
            offset = offset.at[row].set(0 if source.rope_offset is None else source.rope_offset[source_row])
        return Cache(
            layer_caches=jax.tree.map(copy_row, self.layer_caches, source.layer_caches, is_leaf=is_layer_cache),
            length=self.length.at[row].set(source.length[source_row]),
            rope_offset=offset,
        )

    def at_rows(self, rows: Int[Array, "rows"]) -> "Cache":
        """Return a view of the batch rows with these (unique) indices, for `Decoder.forward_uncommitted`.

        The rows are read in place. The view cannot be written: write the proposed entries with `commit_rows` of this
        cache. `commit` of the view raises ConfigError.
        """

        def view(cache: Any) -> LayerCacheRows:
            return LayerCacheRows(cache=cache, row_indices=rows)

        offset = self.rope_offset
        return Cache(
            layer_caches=jax.tree.map(view, self.layer_caches, is_leaf=is_layer_cache),
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
        """Write the entries proposed for the batch rows with these indices, as `commit` does."""

        def write(cache: Any, new: Any) -> Any:
            return cache.commit_rows(rows, new, positions)

        offset = self.rope_offset
        return Cache(
            layer_caches=jax.tree.map(write, self.layer_caches, entries, is_leaf=is_layer_cache),
            length=self.length.at[rows].max(jnp.max(positions, axis=1) + 1),
            rope_offset=offset if offset is None or rope_offset is None else offset.at[rows].set(rope_offset),
        )

    @keeping_types
    def empty_rows(self, rows: Int[Array, "rows"]) -> "Cache":
        """Empty batch rows. Values of an earlier sequence, including NaN, do not affect the next sequence in a row.

        Used slots of contiguous caches are overwritten with zeros. Pages keep their contents, because layers replace
        values beyond a row's length with zeros. Row indices beyond the last row are ignored.
        """
        emptied = jax.tree.map(lambda cache: cache.empty_rows(rows), self.layer_caches, is_leaf=is_layer_cache)
        offset = None if self.rope_offset is None else self.rope_offset.at[rows].set(0.0, mode="drop")
        return Cache(layer_caches=emptied, length=self.length.at[rows].set(0, mode="drop"), rope_offset=offset)

    @keeping_types
    def with_tables(
        self,
        tables: Int[Array, "batch row_pages"] | dict[int, Int[Array, "batch row_pages"]],
        lengths: Int[Array, "batch"] | None = None,
    ) -> "Cache":
        """Set the page tables of a paged cache, and the number of tokens of each sequence (None: unchanged).

        `tables` is one table for all layers; or one table for each attention window, with the key 0 for layers with
        full attention: then the page numbers of each window refer to a separate pool of pages.
        """

        layer_caches = jax.tree.map(
            lambda cache: cache.with_tables(tables, lengths), self.layer_caches, is_leaf=is_layer_cache
        )
        return Cache(layer_caches, self.length if lengths is None else lengths, self.rope_offset)


class Proposal(eqx.Module):
    """Cache update that a forward pass proposes; `Cache.commit` writes it.

    **Arguments:**

    - `entries`: new entries for the caches of all layers, with the tree structure of `Cache.layer_caches`.
    - `positions`: positions of the tokens of the call.
    - `rope_offset`: new value of `Cache.rope_offset`; None: unchanged.
    """

    entries: Any
    positions: Int[Array, "batch length"]
    rope_offset: Float[Array, "batch"] | None = None
