"""Attention on a mesh: each device attends with its own queries, by its own heads, to the keys of all.

Queries stay split over batch, length and heads. Of keys and values a device gathers the length, and computes blocks
that its queries may see: positions say which, so rows may stand in any order. Gradients of keys and values are added
and scattered over the devices among which they were gathered. Or queries, keys and values are exchanged, so that a
device has all of a row and fewer heads (DeepSpeed-Ulysses; Jacobs et al., 2023), and results are exchanged back. Or
keys and values go round (`ring_attention`). Or both: devices side by side exchange heads, and keys go round among such
groups (Fang & Zhao, 2024).

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
from jaxtyping import Array, Bool, Float, Int, Num

from eqx_decoders.context import Execution
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.kernels.common import Result, Scales
from eqx_decoders.layers.attention.kernels.registry import attend
from eqx_decoders.layers.attention.ring import Ring, attend_in_ring
from eqx_decoders.layers.mask import AttentionPositions, Mask, Spans, lookback
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.rules import names_of


def attend_on_mesh(
    query: Float[Array, "batch length heads head_dim"],
    key: Num[Array, "batch kv_length kv_heads head_dim"],
    value: Num[Array, "batch kv_length kv_heads value_dim"],
    *,
    execution: Execution,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
    query_spans: Spans | None = None,
    selected: Bool[Array, "batch selected_heads length kv_length"] | None = None,
    soft_cap: float | None = None,
    aligned: bool = False,
    dense_positions: bool = False,
    contiguous: bool = False,
    needs_lse: bool = True,
    key_axis: Literal["length", "slots"] = "length",
    scales: Scales | None = None,
) -> Result:
    """`attend`, by the kernel and on the mesh that `execution` says.

    `key_axis` says how keys are split: like tokens of a call, or like the slots of a cache, which are not gathered;
    only these have `scales`. `contiguous` promises what `Context.contiguous` says: else keys go round whole rings,
    however small the window.
    """
    layout = execution.layout
    options: dict[str, Any] = dict(mask=mask, soft_cap=soft_cap, kernel=execution.attention, platform=layout.platform)
    promises: dict[str, Any] = dict(aligned=aligned, dense_positions=dense_positions, needs_lse=needs_lse, local=True)
    of_queries = dict(query_positions=query_positions, query_segments=query_segments, query_spans=query_spans)
    of_keys = dict(key_positions=key_positions, key_segments=key_segments)
    if layout.single:
        places = of_queries | of_keys
        return attend(query, key, value, selected=selected, scales=scales, **places, **options, **promises)
    plan = _make_plan(execution, query.shape, key.shape, key_axis)
    whole = plan.exchanges or not plan.shared
    promises |= dict(
        aligned=aligned and whole, dense_positions=dense_positions and whole, needs_lse=needs_lse or plan.merges
    )
    in_order = aligned and plan.goes_round and not plan.turned
    bounded = in_order and contiguous and query_spans is None
    pieces = _pieces_seen(plan.pieces, mask, key.shape[1] // plan.pieces, bounded)

    def run(query, key, value, selected, scales, of_queries, of_keys):
        scales = jax.tree.map(lambda x: plan.needed_keys(x) if x.shape[2] == key.shape[2] else x, scales)
        query, key, value = plan.needed_queries(query), plan.needed_keys(key), plan.needed_keys(value)
        key, value = (plan.in_order(x) for x in (key, value))
        selected = None if selected is None else plan.in_order(plan.needed_selection(selected), 3, plan.pieces)
        of_keys = jax.tree.map(lambda x: plan.in_order(x, 1, plan.pieces), of_keys)
        if plan.goes_round:
            places = AttentionPositions(**jax.tree.map(plan.own_places, of_queries), **of_keys)
            ring = plan.ring(pieces=pieces, aligned=in_order, **options)
            results = attend_in_ring(ring, query, key, value, places, selected)
        else:
            places = of_queries | of_keys
            results = attend(query, key, value, selected=selected, scales=scales, **places, **options, **promises)
        if plan.merges:
            return _merge_over(plan.shared, *results)
        return jax.tree.map(plan.own_results, results)

    rows, length, heads = plan.rows, plan.length, plan.heads
    own, keys = PartitionSpec(rows, length, heads), PartitionSpec(rows, plan.shared, plan.kv_heads)
    slots = plan.shared if plan.merges else ()
    chosen = PartitionSpec(rows, () if selected is None or selected.shape[1] == 1 else heads, length, slots)
    of_query = PartitionSpec(rows, () if plan.exchanges else length)
    each = scales is not None and scales.key.shape[2] == key.shape[2]
    of_scales = PartitionSpec(rows, plan.shared, plan.kv_heads if each else ())
    specs = (own, keys, keys, chosen, of_scales, of_query, PartitionSpec(rows, slots))
    mapped = layout.shard_map(run, specs, (own, own))
    return mapped(query, key, value, selected, scales, of_queries, of_keys)


@dataclasses.dataclass(frozen=True)
class _ContextPlan:
    """How attention runs on a mesh; names are those of mesh axes.

    **Arguments:**

    - `rows`, `length`, `heads`: what splits queries.
    - `kv_heads`: what splits the heads of keys and values: the first ones of `heads`.
    - `shared`: what splits their length, which a device needs whole unless results are merged.
    - `parts`: over how many devices it is split.
    - `own_heads`, `groups`: how many query heads a device has, and how many of them share a head of keys.
    - `exchanging`: how many devices side by side exchange tokens for heads; 1: none.
    - `goes_round`: whether keys travel in a ring, else a device has all of the row.
    - `merges`: whether each device attends to its own keys alone, and results are merged.
    - `turned`: whether tokens stand in zig-zag.
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
    goes_round: bool
    merges: bool
    turned: bool

    @property
    def exchanges(self) -> bool:
        """Whether a device gets more tokens of fewer heads."""
        return self.exchanging > 1

    @property
    def pieces(self) -> int:
        """In how many pieces a row's keys are, of which a device has one at a time."""
        return self.parts // self.exchanging if self.goes_round else 1

    def ring(self, **options: Any) -> Ring:
        """The ring in which keys travel."""
        return Ring(axes=self.shared, devices=self.parts, group=self.exchanging, **options)

    def needed_queries(self, query: Array) -> Array:
        return self._exchange(query, 2, 1) if self.exchanges else query

    def own_results(self, result: Array) -> Array:
        return self._exchange(result, 1, 2) if self.exchanges else result

    def needed_keys(self, key: Array) -> Array:
        """Keys or values of all tokens, and of the heads that a device's query heads use."""
        others = self.heads[len(self.kv_heads) :]  # over these every device has the same heads
        if others:
            key = used_heads(key, others, self.own_heads, self.groups)
        if self.exchanges:
            return self._exchange(key, 2, 1)
        gathers = self.shared and not self.goes_round and not self.merges
        return lax.all_gather(key, self.shared, axis=1, tiled=True) if gathers else key

    def needed_selection(self, selected: Array) -> Array:
        """What is selected for the queries that a device has then, of all keys."""
        if not self.exchanges:
            return selected
        if selected.shape[1] > 1:
            return self._exchange(selected, 1, 2)
        return lax.all_gather(selected, self.shared, axis=2, tiled=True, axis_index_groups=self._exchanging)

    def own_places(self, x: Array) -> Array:
        """Where the queries of a device stand, which has those of several."""
        if not self.exchanges:
            return x
        size = x.shape[1] // self.pieces
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.shared) // self.exchanging * size, size, 1)

    def in_order(self, x: Array, axis: int = 1, pieces: int = 1) -> Array:
        """Keys, each where it belongs in its piece: the blocks that a query sees then follow one another."""
        parts = self.parts // self.pieces
        if not self.turned or parts == 1:
            return x
        order = np.argsort(zigzag(2 * parts, parts)) + 2 * parts * np.arange(pieces)[:, None]
        chunks = jnp.split(x, order.size, axis)
        return jnp.concatenate([chunks[index] for index in order.reshape(-1)], axis)

    def _exchange(self, x: Array, split: int, joined: int) -> Array:
        """All of one axis for a part of another: each device gets its part from all, and gives them theirs."""
        groups = self._exchanging
        return lax.all_to_all(x, self.shared, split, joined, tiled=True, axis_index_groups=groups)

    @property
    def _exchanging(self) -> list[list[int]] | None:
        """Which devices exchange with one another; None: all."""
        if self.exchanging == self.parts:
            return None
        return np.arange(self.parts).reshape(-1, self.exchanging).tolist()


def used_heads(key: Array, axes: tuple[str, ...], own_heads: int, groups: int) -> Array:
    """Of the heads of keys that all devices of some mesh axes have, those that a device's `own_heads` use.

    `groups` heads that follow one another share a head of keys.
    """
    size = math.gcd(own_heads, groups)  # so many of them surely share one
    first = lax.axis_index(axes) * own_heads
    return jnp.take(key, (first + size * jnp.arange(own_heads // size)) // groups, axis=2)


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
    goes_round = alike and "ring" in execution.context_form and exchanging < parts
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
        goes_round=goes_round,
        merges=merges,
        turned=execution.context_order == "zigzag" and bool(shared) and not merges and keys[1] % (2 * parts) == 0,
    )


def _pieces_seen(pieces: int, mask: Mask, size: int, bounded: bool) -> int:
    """How many of a row's pieces of `size` tokens a query may see: its own and some before it.

    Where it is `bounded`, a token that stands n places before another of its document is n positions before it: with
    padding in between it would be fewer.
    """
    back = lookback(mask)
    return pieces if back is None or not bounded else min(pieces, 1 + -(-(back - 1) // size))


def _merge_over(names: tuple[str, ...], out: Array, lse: Array) -> Result:
    """`kernel.merge` of the results that these mesh axes' devices have of the same queries."""
    top = lax.pmax(lax.stop_gradient(lse), names)
    weight = jnp.exp(lse - top)
    total, sums = lax.psum((weight, out.astype(jnp.float32) * weight[..., None]), names)
    return (sums / total[..., None]).astype(out.dtype), top + jnp.log(total)


def _size(layout: Layout, names: tuple[str, ...]) -> int:
    """How many devices some mesh axes have."""
    return math.prod(layout.sizes[name] for name in names)


# --- the order of tokens ---


def context_parts(layout: Layout) -> int:
    """How many devices have different tokens of a row, in attention."""
    return _size(layout, names_of(layout.activation_spec("batch length heads")[1]))


def zigzag(length: int, parts: int) -> np.ndarray:
    """Which token stands where in a row of which each of `parts` devices has an equal part, if their work is balanced.

    Device i has chunks i and 2 parts - 1 - i of 2 parts: under a causal mask all have as many keys to look at.
    """
    rule = f"a length of {length} must be a multiple of {2 * parts}, twice the devices that split it"
    check(length % (2 * parts) == 0, f"context_order='zigzag': {rule}.")
    pairs = np.stack([np.arange(parts), 2 * parts - 1 - np.arange(parts)], axis=1)
    return np.arange(length).reshape(2 * parts, -1)[pairs.reshape(-1)].reshape(-1)
