"""Attention on a mesh, with context parallelism: each device attends with its queries and heads to all keys.

Queries are sharded over batch, length and heads. `Execution.context_form` selects how a device gets the keys and values
of other devices along the length:

- `"gather"`: all-gather of keys and values. A device computes the tiles that its queries may see according to their
  positions, so tokens may be in any order. The gradients of keys and values are reduce-scattered.
- `"all_to_all"`: queries, keys and values are exchanged by all-to-all, so that a device has complete sequences with
  fewer heads; the results are exchanged back (DeepSpeed-Ulysses; Jacobs et al., 2023).
- `"ring"`: ring attention, see `ring.py`.
- `"ring_all_to_all"`: all-to-all within groups of neighboring devices, and a ring across the groups (Fang & Zhao,
  2024).

The slots of a cache are not moved: each device attends to its slots with the queries of all devices, and results are
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
from eqx_decoders.layers.attention.kernels.common import Result, select_kv_heads
from eqx_decoders.layers.attention.kernels.registry import run_kernel
from eqx_decoders.layers.attention.kernels.selection import Selection, map_keys, map_queries_and_heads
from eqx_decoders.layers.attention.ring import Ring, attend_in_ring
from eqx_decoders.layers.mask import AttentionPositions, Mask, lookback
from eqx_decoders.sharding.axes import names_of
from eqx_decoders.sharding.layout import Layout


def attend_on_mesh(
    inputs: AttentionInputs,
    options: AttentionOptions,
    execution: Execution,
    *,
    key_axis: Literal["length", "slots"],
    contiguous: bool,
) -> Result:
    """Compute attention on a mesh of several devices; the arguments are those of `run_attention`."""
    layout = execution.layout
    kernel = execution.attention
    kv_length = inputs.key.shape[1]
    plan = _make_plan(execution, inputs.query.shape, inputs.key.shape, key_axis)
    if plan.merges and isinstance(inputs.selected, Selection) and inputs.selected.group is None:
        # packed bits are indexed by all slots, and cannot be sharded over slots
        inputs = inputs._replace(selected=inputs.selected.mask(kv_length))
    aligned_in_ring = options.aligned and plan.uses_ring and not plan.zigzag_order
    bounded = aligned_in_ring and contiguous and inputs.positions.query_spans is None
    has_full_sequences = plan.exchanges or not plan.key_axes
    ring_options = dataclasses.replace(options, aligned=aligned_in_ring, dense_positions=False, needs_lse=True)
    kernel_options = dataclasses.replace(
        options,
        aligned=options.aligned and has_full_sequences,
        dense_positions=options.dense_positions and has_full_sequences,
        needs_lse=options.needs_lse or plan.merges,
    )

    def attend_on_device(inputs: AttentionInputs) -> Result:
        inputs = plan.exchange_inputs(inputs)
        if plan.uses_ring:
            shards = _count_visible_shards(plan.num_shards, options.mask, kv_length // plan.num_shards, bounded)
            results = attend_in_ring(plan.ring(shards, kernel, ring_options), inputs)
        else:
            results = run_kernel(inputs, kernel_options, kernel)
        if plan.merges:
            return _merge_over(plan.key_axes, *results)
        return jax.tree.map(plan.exchange_results, results)

    query_spec = PartitionSpec(plan.batch_axes, plan.length_axes, plan.head_axes)
    inputs = inputs.with_slopes(options)
    return layout.shard_map(attend_on_device, (plan.specs(inputs),), (query_spec, query_spec))(inputs)


@dataclasses.dataclass(frozen=True)
class _ContextPlan:
    """Placement of attention on a mesh.

    **Arguments:**

    - `batch_axes`, `length_axes`, `head_axes`: mesh axes over which queries are sharded.
    - `kv_head_axes`: mesh axes over which key heads are sharded; a prefix of `head_axes`.
    - `key_axes`: mesh axes over which the length of keys (or the slots of a cache) is sharded.
    - `key_devices`: number of devices along `key_axes`.
    - `local_heads`: query heads per device.
    - `queries_per_kv`: query heads per key head.
    - `exchange_size`: number of neighboring devices in an all-to-all group; 1: no all-to-all.
    - `uses_ring`: whether keys travel in a ring; otherwise a device has all keys (unless `merges`).
    - `merges`: whether each device attends only to its own keys, and results are merged.
    - `zigzag_order`: whether tokens are in zigzag order.
    """

    batch_axes: tuple[str, ...]
    length_axes: tuple[str, ...]
    head_axes: tuple[str, ...]
    kv_head_axes: tuple[str, ...]
    key_axes: tuple[str, ...]
    key_devices: int
    local_heads: int
    queries_per_kv: int
    exchange_size: int
    uses_ring: bool
    merges: bool
    zigzag_order: bool

    @property
    def exchanges(self) -> bool:
        """Whether devices exchange heads for tokens by all-to-all."""
        return self.exchange_size > 1

    @property
    def num_shards(self) -> int:
        """Number of shards into which a sequence's keys are split after the all-to-all."""
        return self.key_devices // self.exchange_size if self.uses_ring else 1

    def ring(self, visible_shards: int, kernel: str, options: AttentionOptions) -> Ring:
        """Return the ring in which keys travel."""
        return Ring(
            axes=self.key_axes,
            num_devices=self.key_devices,
            group_size=self.exchange_size,
            visible_shards=visible_shards,
            kernel=kernel,
            options=options,
        )

    def specs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the `PartitionSpec` of each array, for `jax.shard_map`."""
        batch = self.batch_axes
        slots = self.key_axes if self.merges else ()
        query_spec: Any = PartitionSpec(batch, self.length_axes, self.head_axes)
        key_spec: Any = PartitionSpec(batch, self.key_axes, self.kv_head_axes)
        query_position_spec: Any = PartitionSpec(batch, () if self.exchanges else self.length_axes)
        key_position_spec: Any = PartitionSpec(batch, slots)
        selected = inputs.selected
        bits = selected.words if isinstance(selected, Selection) else selected
        selected_heads = self.head_axes if bits is not None and bits.shape[1] > 1 else ()
        selected_spec: Any = PartitionSpec(batch, selected_heads, self.length_axes, slots)
        if isinstance(selected, Selection):
            group_spec: Any = None if selected.group is None else key_position_spec
            words_spec: Any = PartitionSpec(batch, selected_heads, self.length_axes)
            selected_spec = selected._replace(words=words_spec, group=group_spec)
        scales = inputs.scales
        scales_per_head = scales is not None and scales.key.shape[2] == inputs.key.shape[2]
        scale_spec: Any = PartitionSpec(batch, self.key_axes, self.kv_head_axes if scales_per_head else ())
        replicated: Any = PartitionSpec()
        positions = AttentionPositions(
            query_positions=query_position_spec,
            key_positions=key_position_spec,
            query_segments=query_position_spec,
            key_segments=key_position_spec,
            query_spans=query_position_spec,
        )
        return AttentionInputs(query_spec, key_spec, key_spec, positions, selected_spec, scale_spec, replicated)

    # --- the following methods run on each device, inside `jax.shard_map` ---

    def exchange_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Gather or exchange a device's arrays; return the arrays with which the device attends."""
        query, key, value, positions, selected, scales, slopes = inputs
        kv_heads = key.shape[2]
        scales = jax.tree.map(lambda x: self.exchange_keys(x) if x.shape[2] == kv_heads else x, scales)
        query = self._all_to_all(query, 2, 1) if self.exchanges else query
        key = self.exchange_keys(key)
        value = self.exchange_keys(value)
        key, value = (self.undo_zigzag(x) for x in (key, value))
        if selected is not None:
            selected = map_queries_and_heads(self.exchange_selection, selected)
            if self.zigzag_order or self.uses_ring:
                size = positions.key_positions.shape[1]
                selected = map_keys(lambda x, axis: self.undo_zigzag(x, axis, self.num_shards), selected, size)
        key_positions, key_segments = jax.tree.map(
            lambda x: self.undo_zigzag(x, 1, self.num_shards), (positions.key_positions, positions.key_segments)
        )
        query_arrays: Any = positions.query_positions, positions.query_segments, positions.query_spans
        if self.uses_ring:
            query_arrays = jax.tree.map(self.slice_queries, query_arrays)
        query_positions, query_segments, query_spans = query_arrays
        positions = AttentionPositions(query_positions, key_positions, query_segments, key_segments, query_spans)
        slopes = None if slopes is None else self.slice_slopes(slopes)
        return AttentionInputs(query, key, value, positions, selected, scales, slopes)

    def slice_slopes(self, slopes: Array) -> Array:
        """Return the slopes of the heads that a device has after the exchange, out of those of all heads."""
        count = self.local_heads // self.exchange_size
        first = lax.axis_index(self.head_axes) * self.local_heads if self.head_axes else 0
        first += lax.axis_index(self.key_axes) % self.exchange_size * count if self.exchanges else 0
        return lax.dynamic_slice_in_dim(slopes, first, count)

    def exchange_results(self, result: Array) -> Array:
        """Undo the exchange of queries for a result: return the device's tokens with all its heads."""
        return self._all_to_all(result, 1, 2) if self.exchanges else result

    def exchange_keys(self, key: Array) -> Array:
        """Gather or exchange keys, values or scales, and keep the key heads that the device's query heads use."""
        replicating_axes = self.head_axes[len(self.kv_head_axes) :]  # devices along these have the same key heads
        if replicating_axes:
            key = select_kv_heads(key, replicating_axes, self.local_heads, self.queries_per_kv)
        if self.exchanges:
            return self._all_to_all(key, 2, 1)
        gathers = self.key_axes and not self.uses_ring and not self.merges
        return lax.all_gather(key, self.key_axes, axis=1, tiled=True) if gathers else key

    def exchange_selection(self, selected: Array) -> Array:
        """Return the selection for the queries and heads that a device has after the exchange."""
        if not self.exchanges:
            return selected
        if selected.shape[1] > 1:
            return self._all_to_all(selected, 1, 2)
        return lax.all_gather(selected, self.key_axes, axis=2, tiled=True, axis_index_groups=self._exchange_groups)

    def slice_queries(self, x: Array) -> Array:
        """Return the positions (or segments, spans) of a device's queries after the exchange, out of all positions."""
        if not self.exchanges:
            return x
        size = x.shape[1] // self.num_shards
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.key_axes) // self.exchange_size * size, size, 1)

    def undo_zigzag(self, x: Array, axis: int = 1, num_shards: int = 1) -> Array:
        """Reorder keys within each shard from zigzag to original order, so that visible tiles are adjacent.

        `num_shards`: number of shards along `axis` of `x`.
        """
        devices = self.key_devices // self.num_shards  # per shard
        if not self.zigzag_order or devices == 1:
            return x
        order = np.argsort(zigzag(2 * devices, devices)) + 2 * devices * np.arange(num_shards)[:, None]
        chunks = jnp.split(x, order.size, axis)
        return jnp.concatenate([chunks[index] for index in order.reshape(-1)], axis)

    def _all_to_all(self, x: Array, split_axis: int, concat_axis: int) -> Array:
        groups = self._exchange_groups
        return lax.all_to_all(x, self.key_axes, split_axis, concat_axis, tiled=True, axis_index_groups=groups)

    @property
    def _exchange_groups(self) -> list[list[int]] | None:
        """Device groups of the all-to-all; None: one group of all devices along `key_axes`."""
        if self.exchange_size == self.key_devices:
            return None
        return np.arange(self.key_devices).reshape(-1, self.exchange_size).tolist()


def _make_plan(
    execution: Execution, query_shape: tuple[int, ...], key_shape: tuple[int, ...], key_axis: str
) -> _ContextPlan:
    layout = execution.layout
    query_spec = layout.activation_spec("batch length heads head_dim", query_shape)
    batch_axes, length_axes, head_axes = map(names_of, query_spec[:3])
    kv_head_axes = head_axes
    while key_shape[2] % _count_devices(layout, kv_head_axes) != 0:
        kv_head_axes = kv_head_axes[:-1]
    key_axes = names_of(layout.activation_spec(f"batch {key_axis} kv_heads head_dim", key_shape)[1])
    key_axes = tuple(name for name in key_axes if name not in head_axes)
    key_devices = _count_devices(layout, key_axes)
    local_heads = query_shape[2] // _count_devices(layout, head_axes)
    queries_per_kv = query_shape[2] // key_shape[2]
    merges = key_axis == "slots" and bool(key_axes)
    if merges:
        length_axes = tuple(name for name in length_axes if name not in key_axes)
    sharded_alike = bool(key_axes) and key_axes == length_axes
    local_kv_heads = local_heads // math.gcd(local_heads, queries_per_kv)  # key heads that a device's query heads use
    form = execution.context_form
    exchange_size = math.gcd(local_kv_heads, key_devices) if sharded_alike and "all_to_all" in form else 1
    uses_ring = sharded_alike and "ring" in form and exchange_size < key_devices
    if form == "all_to_all" and exchange_size < key_devices:
        exchange_size = 1
    zigzag_order = execution.context_order == "zigzag" and bool(key_axes) and not merges
    return _ContextPlan(
        batch_axes=layout.with_unit_axes(batch_axes),
        length_axes=length_axes,
        head_axes=head_axes,
        kv_head_axes=kv_head_axes,
        key_axes=key_axes,
        key_devices=key_devices,
        local_heads=local_heads,
        queries_per_kv=queries_per_kv,
        exchange_size=exchange_size,
        uses_ring=uses_ring,
        merges=merges,
        zigzag_order=zigzag_order and key_shape[1] % (2 * key_devices) == 0,
    )


def _count_visible_shards(num_shards: int, mask: Mask, shard_length: int, bounded: bool) -> int:
    """Count the shards that a query may see: its own and the shards before it within the window of the mask.

    `bounded`: whether index distances equal position distances within a document, so that the window bounds the number
    of shards. Padding within a document would break this.
    """
    window = lookback(mask)
    return num_shards if window is None or not bounded else min(num_shards, 1 + -(-(window - 1) // shard_length))


def _merge_over(axes: tuple[str, ...], out: Array, lse: Array) -> Result:
    """Merge the results of the devices along mesh axes for the same queries and different keys, as `registry.merge`."""
    top = lax.pmax(lax.stop_gradient(lse), axes)
    weight = jnp.exp(lse - top)
    total, sums = lax.psum((weight, out.astype(jnp.float32) * weight[..., None]), axes)
    return (sums / total[..., None]).astype(out.dtype), top + jnp.log(total)


def _count_devices(layout: Layout, axes: tuple[str, ...]) -> int:
    return math.prod(layout.sizes[name] for name in axes)


# --- order of tokens ---


def context_parts(layout: Layout) -> int:
    """Return the degree of context parallelism: the number of devices over which a sequence is sharded in attention."""
    return _count_devices(layout, names_of(layout.activation_spec("batch length heads")[1]))


def zigzag(length: int, parts: int) -> np.ndarray:
    """Return the permutation of token indices that balances causal attention over `parts` devices.

    A sequence is split into `2 * parts` chunks, and device i has the chunks i and `2 * parts - 1 - i`. With a causal
    mask the queries of each device then see the same number of keys. Raises ConfigError unless the length is a multiple
    of `2 * parts`.
    """
    check(
        length % (2 * parts) == 0,
        f"context_order='zigzag': a length of {length} must be a multiple of {2 * parts}, twice the number of devices "
        "over which a sequence is sharded.",
    )
    pairs = np.stack([np.arange(parts), 2 * parts - 1 - np.arange(parts)], axis=1)
    return np.arange(length).reshape(2 * parts, -1)[pairs.reshape(-1)].reshape(-1)
