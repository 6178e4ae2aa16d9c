"""Protocol of all caches of layers.

A layer never writes. It reads its slice of a cache and proposes entries for its tokens; `commit` writes the entries
of all equal layers at once, at the positions of the tokens. A token at a position below 0 (padding, or rejected)
leaves no trace. So training, prefill and decoding are one function, rows may have different lengths, and speculation
costs nothing but what it proposes.

A layer's cache is a tree of caches, such as `{"state": RecurrentState, "tail": ConvState}`; what it reads and what it
proposes have the same tree. Arrays are annotated with the names of axes, so a layout splits them like activations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eqx_decoders.sharding.axes import axes, named_leaves, replaced


class LayerCache(eqx.Module):
    """Cache of equal layers, with a row for each sequence.

    A subclass has `slices`, arrays that a scan over the layers cuts; `past`, what a layer reads, from its slices; and
    `commit`. Fields without an axis `layers` are shared by all layers.
    """

    def slices(self) -> Any:
        """Return arrays with a leading `layers` axis."""
        raise TypeError(f"{type(self).__name__} is no kind of cache.")

    def past(self, slices: Any) -> Any:
        """Return what one layer reads, given its part of `slices`."""
        return slices

    def commit(self, entries: Any, positions: Int[Array, "batch length"]) -> "LayerCache":
        """Write entries (stacked over layers) at `positions`; positions below 0 are left out."""
        raise TypeError(f"{type(self).__name__} is no kind of cache.")

    def stacked(self, entries: Sequence[Any]) -> Any:
        """Stack the entries that each layer proposes, for `commit`."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries)

    def reset(self, rows: Bool[Array, "batch"]) -> "LayerCache":
        """Empty these rows."""

        def emptied(leaf: Array, axis: int) -> Array:
            wanted = rows.reshape((1,) * axis + (-1,) + (1,) * (leaf.ndim - axis - 1))
            return jnp.where(wanted, empty_value(leaf.dtype), leaf)

        return _over_rows(emptied, self)

    def row(self, index: int | Int[Array, ""]) -> "LayerCache":
        """Return one row, as a cache of one sequence."""
        return self.rows(jnp.asarray(index)[None])

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "LayerCache":
        """Replace a row by `row`, a cache of one sequence."""
        return self._with_rows(jnp.asarray(index)[None], row)

    # for engines, whose rows are of different requests: some rows of many, in place; none of them twice

    def rows(self, rows: Int[Array, "rows"]) -> "LayerCache":
        """Return some rows, as a cache."""
        return _over_rows(lambda leaf, axis: rows_of(leaf, rows, axis), self)

    def _with_rows(self, rows: Int[Array, "rows"], others: Any) -> "LayerCache":
        """Replace some rows."""

        def write(leaf: Array, axis: int, new: Array) -> Array:
            new = new.astype(leaf.dtype)
            if rows.shape[0] == 1:
                return jax.lax.dynamic_update_slice_in_dim(leaf, new, rows[0], axis)
            return leaf.at[(slice(None),) * axis + (rows,)].set(new, unique_indices=True)

        return _over_rows(write, self, others)

    def slices_of_rows(self) -> Any:
        """Return `slices`, for `past_of_rows`."""
        return self.slices()

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> Any:
        """Return what one layer reads of some rows, given its part of `slices_of_rows`."""
        return jax.tree.map(lambda leaf: rows_of(leaf, rows), self.past(slices))

    def commit_rows(self, rows: Int[Array, "rows"], entries: Any, positions: Int[Array, "rows length"]) -> "LayerCache":
        """Write entries of some rows, as `commit` does."""
        return self._with_rows(rows, self.rows(rows).commit(entries, positions))

    def empty_rows(self, rows: Int[Array, "rows"]) -> "LayerCache":
        """Empty some rows; numbers beyond the last one are none."""

        def emptied(leaf: Array, axis: int) -> Array:
            return leaf.at[(slice(None),) * axis + (rows,)].set(empty_value(leaf.dtype), mode="drop")

        return _over_rows(emptied, self)

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[Any, Int[Array, "1 length"]] | None:
        """Return the cached entries of single tokens of a row, as `commit_rows` takes them, and their positions.

        The position is -1 where a token is forgotten. None for a cache that has no entries by token: then only the
        whole row can be copied.
        """
        return None

    # for caches in pages

    @property
    def page_pools(self) -> dict[int, tuple[int, int]]:
        """Number of pages, and entries of a row's page table, by attention window (0: none); empty without pages."""
        return {}

    def with_tables(
        self,
        tables: Int[Array, "batch row_pages"] | Mapping[int, Int[Array, "batch row_pages"]],
        lengths: Int[Array, "batch"] | None = None,
    ) -> "LayerCache":
        """Set the page tables of the rows, for all windows or for each; see `Cache.with_tables`."""
        return self


def empty_value(dtype: Any) -> Array:
    """Return the value of an empty slot: no position, no token, or zero."""
    return jnp.asarray(-1 if dtype == jnp.int32 else 0, dtype)


def rows_of(leaf: Array, rows: Int[Array, "rows"], axis: int = 0) -> Array:
    """Return some rows of an array; a single one as a slice, which is read in place."""
    if rows.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(leaf, rows[0], 1, axis)
    return jnp.take(leaf, rows, axis, unique_indices=True, mode="clip")


def _over_rows(change: Any, cache: LayerCache, *others: LayerCache) -> Any:
    """Apply `change(leaf, axis of rows, ...)` to every array."""
    words, other_leaves = axes(cache), [named_leaves(other) for other in others]
    new = {
        name: change(leaf, words[name].index("batch"), *(leaves[name] for leaves in other_leaves))
        for name, leaf in named_leaves(cache).items()
    }
    return replaced(cache, new)


def is_layer_cache(node: Any) -> bool:
    """Return whether a node of a tree is a layer's cache."""
    return isinstance(node, LayerCache)


def slices(caches: Any) -> Any:
    """Return `LayerCache.slices` of each cache in a tree."""
    return jax.tree.map(lambda cache: cache.slices(), caches, is_leaf=is_layer_cache)


def pasts(caches: Any, cut: Any) -> Any:
    """Return `LayerCache.past` of each cache in a tree, from one layer's part of `slices(caches)`."""
    return jax.tree.map(lambda cache, part: cache.past(part), caches, cut, is_leaf=is_layer_cache)


def stacked(caches: Any, entries: Sequence[Any]) -> Any:
    """Stack the entries that each layer proposes for a tree of caches, as `LayerCache.stacked` does."""
    return jax.tree.map(lambda cache, *new: cache.stacked(new), caches, *entries, is_leaf=is_layer_cache)


def commit(caches: Any, entries: Any, positions: Int[Array, "batch length"]) -> Any:
    """Write entries into each cache in a tree, as `LayerCache.commit` does."""
    return jax.tree.map(lambda cache, new: cache.commit(new, positions), caches, entries, is_leaf=is_layer_cache)


class LayerCacheRows(LayerCache):
    """Some rows of a cache, to be read where they stand."""

    whole: LayerCache
    which: Int[Array, "rows"]

    def slices(self) -> Any:
        return self.whole.slices_of_rows()

    def past(self, slices: Any) -> Any:
        return self.whole.past_of_rows(slices, self.which)
