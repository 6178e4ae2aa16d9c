"""Attention on a mesh: each device attends with its own queries and heads to the keys of all devices.

Queries stay split over batch, length and heads. A device gathers keys and values along the length, and computes the
blocks that its queries may see: positions say which, so rows may stand in any order. Gradients of keys and values are
added and scattered over the devices among which they were gathered. Or queries, keys and values are exchanged, so
that a device has all of a row and fewer heads (DeepSpeed-Ulysses; Jacobs et al., 2023), and results are exchanged
back. Or keys and values travel in a ring (`ring`). Or both: neighboring devices exchange heads, and keys travel
among such groups (Fang & Zhao, 2024).

The slots of a cache stay where they are: each device attends to its own, with the queries of all, and results are
merged by their log-sum-exp (flash decoding across devices; Dao et al., 2023).
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from eqx_decoders.context import Execution
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result, used_heads
from eqx_decoders.layers.attention.kernels.registry import run_kernel
from eqx_decoders.layers.attention.kernels.selection import Selection, map_keys, map_queries_and_heads
from eqx_decoders.layers.attention.ring import Ring, attend_in_ring
from eqx_decoders.layers.mask import AttentionPositions, Mask, lookback
from eqx_decoders.sharding.axes import names_of
from eqx_decoders.sharding.chips import compute_capability
from eqx_decoders.sharding.layout import Layout


def attend_on_mesh(
    inputs: AttentionInputs,
    options: AttentionOptions,
    execution: Execution,
    *,
    key_axis: Literal["length", "slots"] = "length",
    contiguous: bool = False,
) -> Result:
    """Attend by the kernel and on the mesh of `execution`, which also says in the options what computes it.

    `key_axis` says how keys are split: like tokens of a call, or like the slots of a cache, which are not gathered;
    only these have scales. `contiguous` promises what `ForwardContext.contiguous` says: else keys go round whole rings,
    however small the window.
    """
    layout, kernel = execution.layout, execution.attention
    device = dict(platform=layout.platform, compute_capability=compute_capability(layout.device))
    options = dataclasses.replace(options, **device, local=True)
    if layout.single:
        return run_kernel(inputs, options, kernel)
    plan, kv_length = _make_plan(execution, inputs.query.shape, inputs.key.shape, key_axis), inputs.key.shape[1]
    if plan.merges and isinstance(inputs.selected, Selection) and inputs.selected.group is None:
        inputs = inputs._replace(selected=inputs.selected.mask(kv_length))  # bits of keys by their number in all slots
    in_order = options.aligned and plan.uses_ring and not plan.zigzag_order
    bounded = in_order and contiguous and inputs.positions.query_spans is None
    whole = plan.exchanges or not plan.shared
    of_pieces = dataclasses.replace(options, aligned=in_order, dense_positions=False, needs_lse=True)
    of_rows = dataclasses.replace(
        options,
        aligned=options.aligned and whole,
        dense_positions=options.dense_positions and whole,
        needs_lse=options.needs_lse or plan.merges,
    )

    def run(inputs: AttentionInputs) -> Result:
        inputs = plan.exchanged_inputs(inputs)
        if plan.uses_ring:
            pieces = _pieces_seen(plan.pieces, options.mask, kv_length // plan.pieces, bounded)
            results = attend_in_ring(plan.ring(pieces, kernel, of_pieces), inputs)
        else:
            results = run_kernel(inputs, of_rows, kernel)
        if plan.merges:
            return _merge_over(plan.shared, *results)
        return jax.tree.map(plan.own_results, results)

    query_spec, inputs = PartitionSpec(plan.rows, plan.length, plan.heads), inputs.with_slopes(options)
    return layout.shard_map(run, (plan.specs(inputs),), (query_spec, query_spec))(inputs)


@dataclasses.dataclass(frozen=True)
class _ContextPlan:
    """Placement of attention on a mesh; names are mesh axes.

    **Arguments:**

    - `rows`, `length`, `heads`: axes that split queries.
    - `kv_heads`: axes that split the heads of keys and values: the first ones of `heads`.
    - `shared`: axes that split the length of keys, which a device needs whole unless results are merged.
    - `parts`: number of devices along `shared`.
    - `own_heads`, `groups`: query heads of a device, and query heads that share a key head.
    - `exchanging`: number of neighboring devices that exchange tokens for heads; 1: none.
    - `uses_ring`: whether keys travel in a ring; else a device has all of the row.
    - `merges`: whether each device attends to its own keys alone, and results are merged.
    - `zigzag_order`: whether tokens stand in zigzag order.
    """

    rows: tuple[str, ...]
    length: tuple[str, ...]
    heads: tuple[str, ...]
    kv_heads: tuple[str, ...]
    shared: tuple[str, ...]
    parts: int
    own_heads: int
    groups: int
    exchanging: int
    uses_ring: bool
    merges: bool
    zigzag_order: bool

    @property
    def exchanges(self) -> bool:
        """True if a device gets more tokens of fewer heads."""
        return self.exchanging > 1

    @property
    def pieces(self) -> int:
        """Number of pieces of a row's keys, of which a device has one at a time."""
        return self.parts // self.exchanging if self.uses_ring else 1

    def ring(self, pieces: int, kernel: str, options: AttentionOptions) -> Ring:
        """Return the ring in which keys travel."""
        sizes = dict(devices=self.parts, group=self.exchanging, pieces=pieces)
        return Ring(axes=self.shared, kernel=kernel, options=options, **sizes)

    def specs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the `PartitionSpec` of each array, in `jax.shard_map`."""
        rows, length, heads = self.rows, self.length, self.heads
        slots = self.shared if self.merges else ()
        queries: Any = PartitionSpec(rows, length, heads)
        keys: Any = PartitionSpec(rows, self.shared, self.kv_heads)
        of_query: Any = PartitionSpec(rows, () if self.exchanges else length)
        of_key: Any = PartitionSpec(rows, slots)
        selected, scales = inputs.selected, inputs.scales
        bits = selected.words if isinstance(selected, Selection) else selected
        chosen: Any = PartitionSpec(rows, heads if bits is not None and bits.shape[1] > 1 else (), length, slots)
        if isinstance(selected, Selection):
            of_group: Any = None if selected.group is None else of_key
            chosen = selected._replace(words=PartitionSpec(rows, *chosen[1:3]), group=of_group)
        by_head = scales is not None and scales.key.shape[2] == inputs.key.shape[2]
        whole: Any = PartitionSpec()
        of_scales: Any = PartitionSpec(rows, self.shared, self.kv_heads if by_head else ())
        positions = AttentionPositions(of_query, of_key, of_query, of_key, of_query)
        return AttentionInputs(queries, keys, keys, positions, chosen, of_scales, whole)

    def exchanged_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Gather or exchange a device's arrays: return all that it attends with."""
        query, key, value, positions, selected, scales, slopes = inputs
        heads = key.shape[2]
        scales = jax.tree.map(lambda x: self.needed_keys(x) if x.shape[2] == heads else x, scales)
        query, key, value = self.needed_queries(query), self.needed_keys(key), self.needed_keys(value)
        key, value = (self.in_order(x) for x in (key, value))
        if selected is not None:
            selected = map_queries_and_heads(self.needed_selection, selected)
            if self.zigzag_order or self.uses_ring:
                size = positions.key_positions.shape[1]
                selected = map_keys(lambda x, axis: self.in_order(x, axis, self.pieces), selected, size)
        of_keys = positions.key_positions, positions.key_segments
        key_positions, key_segments = jax.tree.map(lambda x: self.in_order(x, 1, self.pieces), of_keys)
        of_queries: Any = positions.query_positions, positions.query_segments, positions.query_spans
        if self.uses_ring:
            of_queries = jax.tree.map(self.own_positions, of_queries)
        query_positions, segments, spans = of_queries
        positions = AttentionPositions(query_positions, key_positions, segments, key_segments, spans)
        slopes = None if slopes is None else self.own_slopes(slopes)
        return AttentionInputs(query, key, value, positions, selected, scales, slopes)

    def own_slopes(self, slopes: Array) -> Array:
        """Return the slopes of the heads that a device has after the exchange, of those of all heads."""
        count = self.own_heads // self.exchanging
        first = lax.axis_index(self.heads) * self.own_heads if self.heads else 0
        first += lax.axis_index(self.shared) % self.exchanging * count if self.exchanges else 0
        return lax.dynamic_slice_in_dim(slopes, first, count)

    def needed_queries(self, query: Array) -> Array:
        return self._exchange(query, 2, 1) if self.exchanges else query

    def own_results(self, result: Array) -> Array:
        return self._exchange(result, 1, 2) if self.exchanges else result

    def needed_keys(self, key: Array) -> Array:
        """Return keys or values of all tokens that a device needs, for the heads that its query heads use."""
        others = self.heads[len(self.kv_heads) :]  # over these every device has the same heads
        if others:
            key = used_heads(key, others, self.own_heads, self.groups)
        if self.exchanges:
            return self._exchange(key, 2, 1)
        gathers = self.shared and not self.uses_ring and not self.merges
        return lax.all_gather(key, self.shared, axis=1, tiled=True) if gathers else key

    def needed_selection(self, selected: Array) -> Array:
        """Return the selection of all keys for the queries that a device has after the exchange."""
        if not self.exchanges:
            return selected
        if selected.shape[1] > 1:
            return self._exchange(selected, 1, 2)
        return lax.all_gather(selected, self.shared, axis=2, tiled=True, axis_index_groups=self._exchanging)

    def own_positions(self, x: Array) -> Array:
        """Return the positions of a device's queries, given the positions of its whole group."""
        if not self.exchanges:
            return x
        size = x.shape[1] // self.pieces
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.shared) // self.exchanging * size, size, 1)

    def in_order(self, x: Array, axis: int = 1, pieces: int = 1) -> Array:
        """Reorder keys from zigzag to their order in the piece: the blocks that a query sees are then neighbors."""
        parts = self.parts // self.pieces
        if not self.zigzag_order or parts == 1:
            return x
        order = np.argsort(zigzag(2 * parts, parts)) + 2 * parts * np.arange(pieces)[:, None]
        chunks = jnp.split(x, order.size, axis)
        return jnp.concatenate([chunks[index] for index in order.reshape(-1)], axis)

    def _exchange(self, x: Array, split: int, joined: int) -> Array:
        """Exchange all of one axis for a part of another among the devices of a group (all-to-all)."""
        groups = self._exchanging
        return lax.all_to_all(x, self.shared, split, joined, tiled=True, axis_index_groups=groups)

    @property
    def _exchanging(self) -> list[list[int]] | None:
        """Groups of devices that exchange with one another; None: all."""
        if self.exchanging == self.parts:
            return None
        return np.arange(self.parts).reshape(-1, self.exchanging).tolist()


def _make_plan(execution: Execution, queries: tuple[int, ...], keys: tuple[int, ...], key_axis: str) -> _ContextPlan:
    layout = execution.layout
    rows, length, heads = map(names_of, layout.activation_spec("batch length heads head_dim", queries)[:3])
    kv_heads = heads
    while keys[2] % _size(layout, kv_heads) != 0:
        kv_heads = kv_heads[:-1]
    shared = names_of(layout.activation_spec(f"batch {key_axis} kv_heads head_dim", keys)[1])
    shared = tuple(name for name in shared if name not in heads)
    parts, own_heads, groups = _size(layout, shared), queries[2] // _size(layout, heads), queries[2] // keys[2]
    merges = key_axis == "slots" and bool(shared)
    if merges:
        length = tuple(name for name in length if name not in shared)
    alike = bool(shared) and shared == length
    needed = own_heads // math.gcd(own_heads, groups)  # heads of keys that a device's query heads use
    exchanging = math.gcd(needed, parts) if alike and "all_to_all" in execution.context_form else 1
    uses_ring = alike and "ring" in execution.context_form and exchanging < parts
    if execution.context_form == "all_to_all" and exchanging < parts:
        exchanging = 1
    return _ContextPlan(
        # named, too, are mesh axes of one device: over what no name splits gradients are summed
        rows=(*rows, *(name for name, size in layout.mesh.shape.items() if size == 1)),
        length=length,
        heads=heads,
        kv_heads=kv_heads,
        shared=shared,
        parts=parts,
        own_heads=own_heads,
        groups=groups,
        exchanging=exchanging,
        uses_ring=uses_ring,
        merges=merges,
        zigzag_order=execution.context_order == "zigzag" and bool(shared) and not merges and keys[1] % (2 * parts) == 0,
    )


def _pieces_seen(pieces: int, mask: Mask, size: int, bounded: bool) -> int:
    """Count the pieces of `size` tokens that a query may see: its own and some before it.

    With `bounded`, a token that stands n places before another of its document is n positions before it: padding in
    between would make it fewer.
    """
    back = lookback(mask)
    return pieces if back is None or not bounded else min(pieces, 1 + -(-(back - 1) // size))


def _merge_over(names: tuple[str, ...], out: Array, lse: Array) -> Result:
    """Merge, as `registry.merge` does, the results that devices along some mesh axes have for the same queries."""
    top = lax.pmax(lax.stop_gradient(lse), names)
    weight = jnp.exp(lse - top)
    total, sums = lax.psum((weight, out.astype(jnp.float32) * weight[..., None]), names)
    return (sums / total[..., None]).astype(out.dtype), top + jnp.log(total)


def _size(layout: Layout, names: tuple[str, ...]) -> int:
    """Count the devices along some mesh axes."""
    return math.prod(layout.sizes[name] for name in names)


# --- the order of tokens ---


def context_parts(layout: Layout) -> int:
    """Count the devices that have different tokens of a row, in attention."""
    return _size(layout, names_of(layout.activation_spec("batch length heads")[1]))


def zigzag(length: int, parts: int) -> np.ndarray:
    """Return the token at each place of a row, in the order that balances the work of `parts` devices.

    Device i has chunks i and 2 parts - 1 - i of 2 parts: under a causal mask all have as many keys to look at.
    """
    rule = f"a length of {length} must be a multiple of {2 * parts}, twice the devices that split it"
    check(length % (2 * parts) == 0, f"context_order='zigzag': {rule}.")
    pairs = np.stack([np.arange(parts), 2 * parts - 1 - np.arange(parts)], axis=1)
    return np.arange(length).reshape(2 * parts, -1)[pairs.reshape(-1)].reshape(-1)
