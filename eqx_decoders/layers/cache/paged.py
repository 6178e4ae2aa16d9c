"""Paged key/value cache: a sequence uses only the pages that it needs, and may share the pages of a common prefix.

The token at position p of a sequence is in slot `p mod page_size` of the page `table[p // page_size]`. The caller
assigns pages by setting the page tables. Only one sequence may write to a page.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.context import Execution
from eqx_decoders.errors import CheckedFields, PositiveInt
from eqx_decoders.layers.attention.kernels import pallas_paged, pallas_paged_gpu
from eqx_decoders.layers.attention.kernels.call import AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.page_layout import LaneLayout, Pages, StoredKV
from eqx_decoders.layers.attention.kernels.quantized_kv import SCALE, dequantize
from eqx_decoders.layers.cache.base import LayerCache, rows_of
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import CachedKV, KVShape, NewKV, Past, Queries, in_format
from eqx_decoders.layers.mask import interval
from eqx_decoders.sharding.axes import names_of
from eqx_decoders.sharding.chips import LANES


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageConfig(CheckedFields):
    """Configuration of the pages of a cache.

    **Arguments:**

    - `page_size`: tokens per page. The TPU kernel needs a multiple of 16 (of 32 for 8-bit caches); larger pages need
        fewer copies.
    - `num_pages`: number of pages of each layer with full attention. Sequences have no pages until `Cache.with_tables`
        assigns them. None: enough pages for all sequences at maximum length, which are assigned in advance.
    - `window_pages`: number of pages of each layer with an attention window, whose sequences release pages outside of
        the window; None: `num_pages`.
    """

    page_size: PositiveInt = 64
    num_pages: PositiveInt | None = None
    window_pages: PositiveInt | None = None

    def row_pages(self, max_length: int) -> int:
        """Return the number of entries of a sequence's page table."""
        return -(-max_length // self.page_size)


# --- view of one layer ---


class PagedKVCacheView(Past):
    """View of one layer of a paged cache: pages are gathered, or read in place by a kernel."""

    cache: "PagedKVCache"
    layer: Int[Array, ""]

    def whole(self) -> CachedKV:
        """Gather the keys and values of all sequences."""
        cache = self.cache
        pages = jnp.maximum(cache.table, 0)
        positions = cache.positions
        gathered = cache.stored.map(lambda x: _joined_pages(x[self.layer, pages][:, :, :, : cache.page_size]))
        stored = cache.lanes.split(gathered)
        # zero the slots that are not in use: their attention weight is 0, but 0 * NaN is NaN
        cleared = stored.map(lambda x: jnp.where(_like(positions >= 0, x), x, jnp.zeros((), x.dtype)))
        return CachedKV(positions=positions, **cleared._asdict())

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        cache = self.cache
        size = cache.page_size
        rows = jnp.arange(slots.shape[0])[:, None]
        page = cache.table.at[rows, slots // size].get(mode="fill", fill_value=-1)
        exists = (page >= 0) & (slots < cache.lengths[:, None])
        gathered = cache.stored.map(lambda x: x[self.layer, jnp.maximum(page, 0), :, slots % size])
        stored = cache.lanes.split(gathered)
        keys = jnp.where(exists[..., None, None], dequantize(stored.key, stored.key_scale, dtype), 0)
        return keys, jnp.where(exists, slots, -1)

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend with a kernel that reads pages in place, sharded over the mesh; gather the pages if no kernel fits."""
        query, positions, spans, selected, _ = queries
        plan = _plan(query, self.cache, execution) if selected is None and options.alibi is None else None
        if plan is None:
            return super().attend(queries, options, execution)
        visible = interval(options.mask, positions, spans)  # first and last visible position of each query
        layout = execution.layout
        kernel: Any = functools.partial(
            plan.kernel.paged_attention,
            kv_heads=plan.used_kv_heads,
            soft_cap=options.soft_cap,
            platform=layout.platform,
        )
        if layout.single:
            return kernel(query, self.cache, self.layer, visible)
        leaves, tree = jax.tree.flatten(self.cache)

        def run(query: Array, leaves: Any, layer: Array, visible: tuple[Array, Array]) -> Result:
            return kernel(query, jax.tree.unflatten(tree, leaves), layer, visible, plan.first_head())

        query_spec = PartitionSpec(plan.batch, plan.length, plan.heads)
        visible_spec = PartitionSpec(plan.batch, plan.length)
        in_specs = query_spec, [plan.spec(leaf) for leaf in leaves], PartitionSpec(), visible_spec
        return layout.shard_map(run, in_specs, (query_spec, query_spec))(query, leaves, self.layer, visible)


def _joined_pages(x: Array) -> Array:
    """Reshape [batch, row_pages, heads, page_slots, ...] -> [batch, heads, slots, ...]."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _like(mask: Bool[Array, "batch slots"], x: Array) -> Array:
    """Reshape a mask so that it broadcasts with [batch, heads, slots, ...]."""
    return mask.reshape(mask.shape[0], 1, mask.shape[1], *(1,) * (x.ndim - 3))


_KERNELS: dict[str | None, Any] = {"interval": pallas_paged, "triton": pallas_paged_gpu}


@dataclasses.dataclass(frozen=True)
class _PagedPlacement:
    """Sharding of paged attention on a mesh.

    **Arguments:**

    - `batch`, `length`, `heads`: mesh axes that split the queries.
    - `kv_heads`: mesh axes that split the heads of pages: a prefix of `heads`.
    - `page_heads`: total number of key/value heads.
    - `used_kv_heads`: number of key/value heads that the queries of one device use.
    - `local_heads`: number of query heads per device.
    - `queries_per_kv`: number of query heads per key/value head.
    - `kernel`: module of the kernel.
    """

    batch: tuple[str, ...]
    length: tuple[str, ...]
    heads: tuple[str, ...]
    kv_heads: tuple[str, ...]
    page_heads: int
    used_kv_heads: int
    local_heads: int
    queries_per_kv: int
    kernel: Any

    def first_head(self) -> Any:
        """Return the index of the first key/value head that the device uses, among the heads that it stores."""
        replicated = self.heads[len(self.kv_heads) :]  # along these mesh axes all devices store the same heads
        return lax.axis_index(replicated) * self.local_heads // self.queries_per_kv if replicated else 0

    def spec(self, leaf: Array) -> PartitionSpec:
        """Return the `PartitionSpec` of an array of a paged cache, in `jax.shard_map`."""
        if leaf.ndim < 4:  # tables and lengths
            return PartitionSpec(self.batch)
        return PartitionSpec(None, None, self.kv_heads if leaf.shape[2] == self.page_heads else ())


def _plan(query: Array, pages: Pages, execution: Execution) -> _PagedPlacement | None:
    """Return the sharding of the paged kernel; None if no kernel supports the arguments or `Execution.attention`."""
    layout = execution.layout
    heads = query.shape[2]
    kv_heads = pages.key.shape[2]
    name = layout.backend.paged_kernel
    kernel = _KERNELS.get(name if execution.attention in ("auto", name) else None)
    if kernel is None or not kernel.fits(pages, query.dtype, heads, layout.device):
        return None
    query_spec = layout.activation_spec("batch length heads head_dim", query.shape)
    batch_axes, length_axes, head_axes = map(names_of, query_spec[:3])
    key_spec = layout.activation_spec("layers pages kv_heads page_slots stored_dim", pages.key.shape)
    kv_head_axes = names_of(key_spec[2])
    local_heads = heads // math.prod(layout.sizes[name] for name in head_axes)
    queries_per_kv = heads // kv_heads
    if head_axes[: len(kv_head_axes)] != kv_head_axes:
        return None
    if local_heads % queries_per_kv and queries_per_kv % local_heads:
        return None
    return _PagedPlacement(
        batch=batch_axes,
        length=length_axes,
        heads=head_axes,
        kv_heads=kv_head_axes,
        page_heads=kv_heads,
        used_kv_heads=max(1, local_heads // queries_per_kv),
        local_heads=local_heads,
        queries_per_kv=queries_per_kv,
        kernel=kernel,
    )


# --- the cache ---


class PagedKVCache(Pages, LayerCache):
    """Paged key/value cache of equal layers. `window` is the attention window of the layers; 0 means full attention."""

    window: int = eqx.field(static=True)

    # --- reading ---

    def slices(self) -> Any:
        return jnp.arange(self.key.shape[0])

    def past(self, slices: Any) -> PagedKVCacheView:
        return PagedKVCacheView(self, slices)

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> PagedKVCacheView:
        return self.rows(rows).past(slices)

    def rows(self, rows: Int[Array, "rows"]) -> "PagedKVCache":
        """Return a cache with these batch rows of the page tables, and with all pages."""
        return dataclasses.replace(self, table=rows_of(self.table, rows), lengths=rows_of(self.lengths, rows))

    def entries(self) -> NewKV:
        """Return the keys and values of all slots in the form that `commit` accepts."""
        pages = jnp.maximum(self.table, 0)

        def gather(x: Array) -> Array:
            gathered = x[:, pages][:, :, :, :, : self.page_size]  # [layers, batch, row_pages, heads, page_size, ...]
            return jnp.swapaxes(jax.vmap(_joined_pages)(gathered), 2, 3)

        return NewKV(**self.lanes.split(self.stored.map(gather))._asdict())

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[NewKV, Int[Array, "1 length"]]:
        page, exists = self._pages_of(index[None, None], positions)
        exists &= positions < self.lengths[index]
        layers = jnp.arange(self.key.shape[0])[:, None, None]
        page = jnp.maximum(page, 0)
        slot = jnp.maximum(positions, 0) % self.page_size
        tokens = self.stored.map(lambda x: x[layers, page, :, slot])
        return NewKV(**self.lanes.split(tokens)._asdict()), jnp.where(exists, positions, -1)

    # --- writing ---

    def commit(self, entries: NewKV, positions: Int[Array, "batch length"]) -> "PagedKVCache":
        return self._write(jnp.arange(self.lengths.shape[0])[:, None], entries, positions)

    def commit_rows(
        self, rows: Int[Array, "rows"], entries: NewKV, positions: Int[Array, "rows length"]
    ) -> "PagedKVCache":
        return self._write(rows[:, None], entries, positions)

    def _write(
        self, rows: Int[Array, "rows 1"], entries: NewKV, positions: Int[Array, "rows length"]
    ) -> "PagedKVCache":
        """Write new keys and values to the batch rows with these indices."""
        new = in_format(entries, self.key.dtype, self.key_scale)
        new = self.lanes.join(StoredKV(new.key, new.value, new.key_scale, new.value_scale))
        page, exists = self._pages_of(rows, positions)
        page = jnp.where(exists, page, self.key.shape[1])  # writes to an out-of-range page are dropped
        slot = jnp.where(exists, positions, 0) % self.page_size
        layers = jnp.arange(self.key.shape[0])[:, None, None]

        def write(old: Any, new: Any) -> Any:
            if old is None:
                return None
            heads = jnp.arange(old.shape[2])  # an index, not a slice: see `KVCache._write`
            index = layers[..., None], page[..., None], heads, slot[..., None]
            return old.at[index].set(new.astype(old.dtype), mode="drop")

        stored = StoredKV(*map(write, self.stored, new))
        ends = jnp.max(jnp.where(exists, positions + 1, 0), axis=1)
        return dataclasses.replace(self, **stored._asdict(), lengths=self.lengths.at[rows[:, 0]].max(ends))

    def _pages_of(
        self, rows: Int[Array, "rows 1"], positions: Int[Array, "rows length"]
    ) -> tuple[Int[Array, "rows length"], Bool[Array, "rows length"]]:
        """Return the page of each position, and whether the position has a page."""
        table_index = jnp.where(positions >= 0, positions // self.page_size, self.table.shape[1])
        page = self.table.at[rows, table_index].get(mode="fill", fill_value=-1)
        return page, page >= 0

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "PagedKVCache":
        """Write the tokens of `row`, a paged or contiguous cache of one sequence, to the pages of a batch row."""
        index = jnp.asarray(index)
        emptied = dataclasses.replace(self, lengths=self.lengths.at[index].set(0))
        return emptied.commit_rows(index[None], row.entries(), row.positions)

    # --- assignment of pages ---

    def empty_rows(self, rows: Int[Array, "rows"]) -> "PagedKVCache":
        """Empty the batch rows with these indices. They keep their pages."""
        return dataclasses.replace(self, lengths=self.lengths.at[rows].set(0, mode="drop"))

    @property
    def page_pools(self) -> dict[int, tuple[int, int]]:
        return {self.window: (self.key.shape[1], self.table.shape[1])}

    def with_tables(
        self,
        tables: Int[Array, "batch row_pages"] | Mapping[int, Int[Array, "batch row_pages"]],
        lengths: Int[Array, "batch"] | None = None,
    ) -> "PagedKVCache":
        table = tables.get(self.window, tables.get(0)) if isinstance(tables, Mapping) else tables
        if table is None:
            return self
        return dataclasses.replace(self, table=table, lengths=self.lengths if lengths is None else lengths)


def build_pages(
    shape: KVShape,
    layers: int,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | CacheFormat,
    pages: PageConfig,
) -> PagedKVCache:
    """Return an empty paged cache for `layers` equal layers."""
    cache_format = CacheFormat.of(dtype)
    size = pages.page_size
    row_pages = pages.row_pages(max_length)
    window = shape.slots if shape.rolling else 0
    num_pages = pages.window_pages if window and pages.window_pages is not None else pages.num_pages
    shape.check_format(cache_format)
    if num_pages is None:  # assign each sequence the pages for its maximum length
        count = batch_size * row_pages
        table = jnp.arange(count, dtype=jnp.int32).reshape(batch_size, row_pages)
    else:
        count = num_pages
        table = jnp.full((batch_size, row_pages), -1, jnp.int32)
    joined = shape.values and shape.head_dim + (shape.value_dim or shape.head_dim) <= LANES
    lanes = LaneLayout(shape.head_dim, joined, shape.value_dim)
    key = jnp.zeros((layers, count, shape.kv_heads, size, lanes.width), cache_format.dtype)
    # pad scales to full tiles: a TPU stores smaller arrays in another layout
    scale_slots = -(-size // LANES) * LANES if lanes.width >= LANES else size
    scale = None
    if cache_format.bound:
        scale_heads = cache_format.scale_heads(shape.kv_heads, shape.head_dim)
        scale = jnp.zeros((layers, count, scale_heads, scale_slots), SCALE)
    return PagedKVCache(
        key=key,
        value=jnp.zeros((*key.shape[:-1], lanes.value_width), key.dtype) if shape.values and not joined else None,
        key_scale=scale,
        value_scale=None if scale is None or not shape.values else jnp.zeros_like(scale),
        table=table,
        lengths=jnp.zeros((batch_size,), jnp.int32),
        lanes=lanes,
        window=window,
    )
