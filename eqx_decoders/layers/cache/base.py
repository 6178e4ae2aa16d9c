"""Base class of all layer caches (keys and values, recurrent states, convolution states).

A layer never writes to its cache. It reads its slice of the cache and returns new entries for its tokens: keys and
values, or state updates. `commit` then writes the entries of all equal layers at once, at the positions of the tokens.
Tokens at positions below 0 (padding, or rejected tokens) are not written. Therefore training, prefill and decoding are
one function, sequences of a batch may have different lengths, and rejecting tokens in speculative decoding is free.

The cache of a layer is a pytree of caches, such as `{"state": RecurrentState, "tail": ConvState}`. The values that the
layer reads and the entries that it returns have the same tree structure. Arrays are annotated with axis names, from
which a layout derives their sharding, as for activations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eqx_decoders.errors import ConfigError
from eqx_decoders.sharding.axes import axes, named_leaves, replaced


class LayerCache(eqx.Module):
    """Cache of equal layers. Each batch row holds one sequence.

    Subclasses implement `slices` (arrays that a scan over the layers slices), `past` (the values that one layer reads,
    computed from its slice), and `commit`. Fields without a `layers` axis are shared by all layers.
    """

    def slices(self) -> Any:
        """Return arrays with a leading `layers` axis."""
        raise TypeError(f"{type(self).__name__} must implement LayerCache.slices.")

    def past(self, slices: Any) -> Any:
        """Return the cached values that one layer reads; `slices` is this layer's slice of `self.slices()`."""
        return slices

    def commit(self, entries: Any, positions: Int[Array, "batch length"]) -> "LayerCache":
        """Write new entries (stacked over layers) at `positions`. Entries at positions below 0 are not written."""
        raise TypeError(f"{type(self).__name__} must implement LayerCache.commit.")

    def stacked(self, entries: Sequence[Any]) -> Any:
        """Stack the new entries of all layers, for `commit`."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries)

    def row(self, index: int | Int[Array, ""]) -> "LayerCache":
        """Return one batch row, as a cache of one sequence."""
        return self.rows(jnp.asarray(index)[None])

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "LayerCache":
        """Replace a batch row by `row`, a cache of one sequence."""
        return self._with_rows(jnp.asarray(index)[None], row)

    # The following methods work on a subset of the batch rows, for serving engines whose batch rows belong to different
    # requests. Row indices must be unique.

    def rows(self, rows: Int[Array, "rows"]) -> "LayerCache":
        """Return the batch rows with these indices, as a cache."""
        return _map_arrays(lambda leaf, axis: rows_of(leaf, rows, axis), self)

    def _with_rows(self, rows: Int[Array, "rows"], others: Any) -> "LayerCache":
        """Replace the batch rows with these indices by the rows of `others`."""

        def write(leaf: Array, axis: int, new: Array) -> Array:
            new = new.astype(leaf.dtype)
            if rows.shape[0] == 1:
                return jax.lax.dynamic_update_slice_in_dim(leaf, new, rows[0], axis)
            return leaf.at[(slice(None),) * axis + (rows,)].set(new, unique_indices=True)

        return _map_arrays(write, self, others)

    def slices_of_rows(self) -> Any:
        """Return arrays with a leading `layers` axis, for `past_of_rows`."""
        return self.slices()

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> Any:
        """Return the cached values of some batch rows for one layer; `slices` is its slice of `slices_of_rows()`."""
        return jax.tree.map(lambda leaf: rows_of(leaf, rows), self.past(slices))

    def commit_rows(self, rows: Int[Array, "rows"], entries: Any, positions: Int[Array, "rows length"]) -> "LayerCache":
        """Write new entries of the batch rows with these indices, as `commit` does."""
        return self._with_rows(rows, self.rows(rows).commit(entries, positions))

    def empty_rows(self, rows: Int[Array, "rows"]) -> "LayerCache":
        """Empty the batch rows with these indices. Out-of-range indices are ignored."""

        def empty_array(leaf: Array, axis: int) -> Array:
            return leaf.at[(slice(None),) * axis + (rows,)].set(empty_value(leaf.dtype), mode="drop")

        return _map_arrays(empty_array, self)

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[Any, Int[Array, "1 length"]] | None:
        """Return the cached entries of some tokens of a batch row, as `commit_rows` accepts them, and their positions.

        The returned position is -1 for tokens that are no longer in the cache. The result is None for a cache that
        does not store entries per token; only complete rows of such a cache can be copied.
        """
        return None

    # The following members are for paged caches.

    @property
    def page_pools(self) -> dict[int, tuple[int, int]]:
        """`{attention window: (pages, pages per sequence)}`; the key 0 means full attention. Empty without pages."""
        return {}

    def with_tables(
        self,
        tables: Int[Array, "batch row_pages"] | Mapping[int, Int[Array, "batch row_pages"]],
        lengths: Int[Array, "batch"] | None = None,
    ) -> "LayerCache":
        """Set the page tables of the batch rows, for all windows or by window; see `Cache.with_tables`."""
        return self


def empty_value(dtype: Any) -> Array:
    """Return the value of an empty slot: -1 for int32 (positions and token ids), otherwise 0."""
    return jnp.asarray(-1 if dtype == jnp.int32 else 0, dtype)


def rows_of(leaf: Array, rows: Int[Array, "rows"], axis: int = 0) -> Array:
    """Return some rows of an array. A single row is sliced, not gathered, because XLA reads slices in place."""
    if rows.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(leaf, rows[0], 1, axis)
    return jnp.take(leaf, rows, axis, unique_indices=True, mode="clip")


def _map_arrays(change: Any, cache: LayerCache, *others: LayerCache) -> Any:
    """Replace each array by `change(array, index of its batch axis, *arrays of others)`."""
    axis_names = axes(cache)
    other_leaves = [named_leaves(other) for other in others]
    new = {
        name: change(leaf, axis_names[name].index("batch"), *(leaves[name] for leaves in other_leaves))
        for name, leaf in named_leaves(cache).items()
    }
    return replaced(cache, new)


def is_layer_cache(node: Any) -> bool:
    """Return whether a node of a pytree is a `LayerCache`."""
    return isinstance(node, LayerCache)


def slices(caches: Any) -> Any:
    """Return `LayerCache.slices` of each cache in a pytree."""
    return jax.tree.map(lambda cache: cache.slices(), caches, is_leaf=is_layer_cache)


def pasts(caches: Any, layer_slices: Any) -> Any:
    """Return `LayerCache.past` of each cache in a pytree; `layer_slices` is one layer's slice of `slices(caches)`."""
    return jax.tree.map(
        lambda cache, layer_slice: cache.past(layer_slice), caches, layer_slices, is_leaf=is_layer_cache
    )


def stacked(caches: Any, entries: Sequence[Any]) -> Any:
    """Stack the new entries of all layers for each cache in a pytree, as `LayerCache.stacked` does."""
    return jax.tree.map(lambda cache, *new: cache.stacked(new), caches, *entries, is_leaf=is_layer_cache)


def commit(caches: Any, entries: Any, positions: Int[Array, "batch length"]) -> Any:
    """Write new entries to each cache in a pytree, as `LayerCache.commit` does."""
    return jax.tree.map(lambda cache, new: cache.commit(new, positions), caches, entries, is_leaf=is_layer_cache)


class LayerCacheRows(LayerCache):
    """View of some batch rows of a cache, which are read in place. It cannot be written: see `Cache.at_rows`."""

    cache: LayerCache
    row_indices: Int[Array, "rows"]

    def slices(self) -> Any:
        return self.cache.slices_of_rows()

    def past(self, slices: Any) -> Any:
        return self.cache.past_of_rows(slices, self.row_indices)

    def commit(self, entries: Any, positions: Int[Array, "rows length"]) -> LayerCache:
        raise ConfigError(
            "Cache.at_rows returns a view that cannot be written. Run Decoder.forward_uncommitted with the view, and "
            "write the proposed entries with Cache.commit_rows of the complete cache."
        )
