"""Attention to cached keys and values, in whatever form a cache holds them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.context import Execution
from eqx_decoders.layers.attention.context_parallel import attend_on_mesh
from eqx_decoders.layers.attention.kernels import pallas_paged
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result, Scales
from eqx_decoders.layers.cache.kv_cache import CachedKV, CachedKVRows
from eqx_decoders.layers.cache.paged import PagedCachedKV
from eqx_decoders.layers.mask import AttentionPositions, Mask, Spans, interval
from eqx_decoders.sharding.axes import names_of


LEAST_REACH, MOST_REACHES = 128, 6  # how far rows are read: the fewest slots, and how many choices there are


def attend_past(
    query: Float[Array, "batch length heads head_dim"],
    past: CachedKV | CachedKVRows | PagedCachedKV,
    *,
    execution: Execution,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    query_spans: Spans | None = None,
    selected: Bool[Array, "batch selected_heads length slots"] | None = None,
    soft_cap: float | None = None,
    needs_lse: bool = True,
) -> Result:
    """Attend to cached keys and values; where there are no values, keys stand for them.

    A row of a cache is one document: there are no segments.
    """
    if isinstance(past, PagedCachedKV):
        plan = _plan(query, past, execution) if selected is None else None
        if plan is not None:
            seen = interval(mask, query_positions, query_spans)
            return _attend_pages(query, past, seen, plan, execution, soft_cap)
        past = past.whole()
    if isinstance(past, CachedKVRows):
        if by_rows(execution):
            of_queries = dict(query_positions=query_positions, query_spans=query_spans, selected=selected)
            return _attend_rows(query, past, of_queries, execution=execution, mask=mask, soft_cap=soft_cap)
        past = past.whole()
    options = AttentionOptions(mask=mask, soft_cap=soft_cap, needs_lse=needs_lse)
    positions = AttentionPositions(query_positions, past.positions, query_spans=query_spans)
    if past.key_scale is None:
        dtype = past.key.dtype if _reads_wide(query, past, execution) else query.dtype
        keys = past.key.astype(dtype).transpose(0, 2, 1, 3)
        values = keys if past.value is None else past.value.astype(dtype).transpose(0, 2, 1, 3)
        inputs = AttentionInputs(query.astype(dtype), keys, values, positions, selected)
        out, lse = attend_on_mesh(inputs, options, execution, key_axis="slots")
        return out.astype(query.dtype), lse
    keys, key_scale = past.key.transpose(0, 2, 1, 3), jnp.swapaxes(past.key_scale, 1, 2)
    if past.value is None or past.value_scale is None:
        values, scales = keys, Scales(key_scale, key_scale)
    else:
        values = past.value.transpose(0, 2, 1, 3)
        scales = Scales(key_scale, jnp.swapaxes(past.value_scale, 1, 2))
    inputs = AttentionInputs(query, keys, values, positions, selected, scales)
    return attend_on_mesh(inputs, options, execution, key_axis="slots")


def by_rows(execution: Execution) -> bool:
    """Return whether the rows of a shared cache are read one after another, each only as far as it is filled."""
    return execution.layout.backend.few_rows


def _attend_rows(query: Array, past: CachedKVRows, of_queries: dict[str, Any], **options: Any) -> Result:
    """Attend row by row: the products of a few queries with a row's keys are no faster for several rows at once."""
    reaches = [past.cache.positions.shape[1]]
    while len(reaches) < MOST_REACHES and reaches[0] >= 2 * LEAST_REACH:
        reaches.insert(0, -(-reaches[0] // 2))

    def attend_row(index: Array, query: Array, of_queries: dict[str, Any]) -> Result:
        """Attend to the keys of one row."""

        def within(reach: int) -> Any:
            def attend() -> Result:
                chosen = None if of_queries["selected"] is None else of_queries["selected"][..., :reach]
                return attend_past(query, past.row(index, reach), **(of_queries | dict(selected=chosen)), **options)

            return attend

        # what is stored is before the queries: slots from their last position on are empty (rings that are full are
        # read whole, since that position is beyond them)
        branch = sum((jnp.max(of_queries["query_positions"]) > reach).astype(jnp.int32) for reach in reaches[:-1])
        return jax.lax.switch(branch, [within(reach) for reach in reaches])

    if past.count == 1:
        return attend_row(jnp.int32(0), query, of_queries)

    def one(row: Any) -> Any:
        index, query, of_queries = jax.tree.map(lambda leaf: leaf[None], row)
        return jax.tree.map(lambda leaf: leaf[0], attend_row(index[0], query, of_queries))

    return jax.lax.map(one, (jnp.arange(past.count, dtype=jnp.int32), query, of_queries))


def _reads_wide(query: Array, past: CachedKV, execution: Execution) -> bool:
    """Return whether a few 16-bit queries are cast to float32, like the cache: otherwise all of it would be cast."""
    cast = past.key.dtype == jnp.float32 and query.dtype.itemsize == 2
    return cast and execution.layout.backend.widens_half and query.shape[1] < 32


# --- pages ---


@dataclasses.dataclass(frozen=True)
class _CachedPlan:
    """Placement of paged attention on a mesh; names are mesh axes.

    **Arguments:**

    - `rows`, `length`, `heads`: axes that split queries.
    - `kv_heads`: axes that split the heads of pages: the first ones of `heads`.
    - `used`: number of a device's key heads that its queries use.
    - `own_heads`, `groups`: query heads of a device, and query heads that share a key head.
    """

    rows: tuple[str, ...]
    length: tuple[str, ...]
    heads: tuple[str, ...]
    kv_heads: tuple[str, ...]
    used: int
    own_heads: int
    groups: int

    def first_head(self) -> Any:
        """Return the index of the first key head that a device uses."""
        others = self.heads[len(self.kv_heads) :]  # over these every device has the same heads
        return lax.axis_index(others) * self.own_heads // self.groups if others else 0


def _plan(query: Array, past: PagedCachedKV, execution: Execution) -> _CachedPlan | None:
    """Plan the call of the paged kernel; None where it cannot do it, or is not wanted: pages are gathered then."""
    layout, heads, kv_heads = execution.layout, query.shape[2], past.key.shape[2]
    wanted = layout.backend.paged_kernel and execution.attention in ("auto", "interval")
    if not wanted or not pallas_paged.fits(past, query.dtype, heads):
        return None
    rows, length, split = map(names_of, layout.activation_spec("batch length heads head_dim", query.shape)[:3])
    words = "layers pages kv_heads page_slots stored_dim"
    of_keys = names_of(layout.activation_spec(words, past.key.shape)[2])
    own_heads, groups = heads // math.prod(layout.sizes[name] for name in split), heads // kv_heads
    if split[: len(of_keys)] != of_keys or (own_heads % groups and groups % own_heads):
        return None
    return _CachedPlan(rows, length, split, of_keys, max(1, own_heads // groups), own_heads, groups)


def _attend_pages(
    query: Array,
    past: PagedCachedKV,
    seen: tuple[Array, Array],
    plan: _CachedPlan,
    execution: Execution,
    soft_cap: float | None,
) -> Result:
    """Call the paged kernel, on each device with its own queries and heads."""
    layout = execution.layout
    options: dict[str, Any] = dict(kv_heads=plan.used, soft_cap=soft_cap, platform=layout.platform)
    if layout.single:
        return pallas_paged.paged_attention(query, past, seen, **options)
    leaves, form = jax.tree.flatten(past)

    def run(query: Array, leaves: Any, seen: tuple[Array, Array]) -> Result:
        local_past = jax.tree.unflatten(form, leaves)
        return pallas_paged.paged_attention(query, local_past, seen, plan.first_head(), **options)

    def spec(name: str) -> PartitionSpec:
        if name in ("table", "lengths", "layer"):
            return PartitionSpec(plan.rows) if name != "layer" else PartitionSpec()
        each = getattr(past, name).shape[2] == past.key.shape[2]
        return PartitionSpec(None, None, plan.kv_heads if each else ())

    arrays = [field.name for field in dataclasses.fields(past) if getattr(past, field.name, None) is not None]
    specs = [spec(name) for name in arrays if name != "lanes"]
    query_spec = PartitionSpec(plan.rows, plan.length, plan.heads)
    position_spec = PartitionSpec(plan.rows, plan.length)
    return layout.shard_map(run, (query_spec, specs, position_spec), (query_spec, query_spec))(query, leaves, seen)
