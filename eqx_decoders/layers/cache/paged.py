"""Paged key/value cache: rows take only the pages that they need, and may share pages of a common prefix.

Position p of a row is the token `p mod page_size` of the page that stands in place `p // page_size` of the row's table.
Whoever fills the tables assigns the pages; a page is written by one row alone.
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
from eqx_decoders.layers.cache.base import LayerCache, rows_of
from eqx_decoders.layers.cache.format import SCALE, CacheFormat, decode
from eqx_decoders.layers.cache.kv_cache import CachedKV, KVShape, NewKV, Past, Queries, in_format
from eqx_decoders.layers.cache.page_layout import LANE, LaneLayout, Pages, StoredKV
from eqx_decoders.layers.mask import interval
from eqx_decoders.sharding.axes import names_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageConfig(CheckedFields):
    """Division of a cache into pages.

    **Arguments:**

    - `page_size`: tokens of a page. For a TPU's kernel a multiple of 16, in 8 bits of 32; the larger, the fewer copies.
    - `num_pages`: pages of each layer that sees everything. None: as many as all rows may need, and each row has its
        own; else rows have none until `Cache.with_tables` gives them some.
    - `window_pages`: pages of each layer with a window, whose rows give back what is behind it; None: `num_pages`.
    """

    page_size: PositiveInt = 64
    num_pages: PositiveInt | None = None
    window_pages: PositiveInt | None = None

    def row_pages(self, max_length: int) -> int:
        """Return the number of entries of a row's table."""
        return -(-max_length // self.page_size)


# --- what a layer reads ---


class PagedKVCacheView(Past):
    """Paged cache as one attention layer reads it: pages are gathered, or read where they are by a kernel."""

    cache: "PagedKVCache"
    layer: Int[Array, ""]

    def whole(self) -> CachedKV:
        """Gather all tokens of the rows."""
        cache = self.cache
        pages, positions = jnp.maximum(cache.table, 0), cache.positions
        rows = cache.stored.map(lambda x: _joined_pages(x[self.layer, pages][:, :, :, : cache.page_size]))
        stored = cache.lanes.split(rows)
        # what another row left has weight 0, and 0 times NaN would be NaN
        clean = stored.map(lambda x: jnp.where(_like(positions >= 0, x), x, jnp.zeros((), x.dtype)))
        return CachedKV(positions=positions, **clean._asdict())

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        cache, size, rows = self.cache, self.cache.page_size, jnp.arange(slots.shape[0])[:, None]
        page = cache.table.at[rows, slots // size].get(mode="fill", fill_value=-1)
        exists = (page >= 0) & (slots < cache.lengths[:, None])
        taken = cache.stored.map(lambda x: x[self.layer, jnp.maximum(page, 0), :, slots % size])
        stored = cache.lanes.split(taken)
        keys = jnp.where(exists[..., None, None], decode(stored.key, stored.key_scale, dtype), 0)
        return keys, jnp.where(exists, slots, -1)

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend by the kernel that reads pages, on each device with its own queries and heads, if it can."""
        query, positions, spans, selected, _ = queries
        plan = _plan(query, self.cache, execution) if selected is None and options.alibi is None else None
        if plan is None:
            return super().attend(queries, options, execution)
        seen, layout = interval(options.mask, positions, spans), execution.layout
        kernel: Any = functools.partial(
            plan.kernel.paged_attention, kv_heads=plan.used, soft_cap=options.soft_cap, platform=layout.platform
        )
        if layout.single:
            return kernel(query, self.cache, self.layer, seen)
        leaves, form = jax.tree.flatten(self.cache)

        def run(query: Array, leaves: Any, layer: Array, seen: tuple[Array, Array]) -> Result:
            return kernel(query, jax.tree.unflatten(form, leaves), layer, seen, plan.first_head())

        of_query, of_rows = PartitionSpec(plan.rows, plan.length, plan.heads), PartitionSpec(plan.rows, plan.length)
        specs = of_query, [plan.spec(leaf) for leaf in leaves], PartitionSpec(), of_rows
        return layout.shard_map(run, specs, (of_query, of_query))(query, leaves, self.layer, seen)


def _joined_pages(x: Array) -> Array:
    """Reshape [batch, row_pages, heads, page_slots, ...] -> [batch, heads, slots, ...]."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _like(rows: Bool[Array, "batch slots"], x: Array) -> Array:
    """Reshape to compare with [batch, heads, slots, ...]."""
    return rows.reshape(rows.shape[0], 1, rows.shape[1], *(1,) * (x.ndim - 3))


_KERNELS: dict[str | None, Any] = {"interval": pallas_paged, "triton": pallas_paged_gpu}


@dataclasses.dataclass(frozen=True)
class _PagedPlacement:
    """Placement of paged attention on a mesh; names are mesh axes.

    **Arguments:**

    - `rows`, `length`, `heads`: axes that split queries.
    - `kv_heads`: axes that split the heads of pages: the first ones of `heads`.
    - `page_heads`: number of heads of pages.
    - `used`: number of a device's key heads that its queries use.
    - `own_heads`, `groups`: query heads of a device, and query heads that share a key head.
    - `kernel`: module of the kernel.
    """

    rows: tuple[str, ...]
    length: tuple[str, ...]
    heads: tuple[str, ...]
    kv_heads: tuple[str, ...]
    page_heads: int
    used: int
    own_heads: int
    groups: int
    kernel: Any

    def first_head(self) -> Any:
        """Return the index of the first key head that a device uses."""
        others = self.heads[len(self.kv_heads) :]  # over these every device has the same heads
        return lax.axis_index(others) * self.own_heads // self.groups if others else 0

    def spec(self, leaf: Array) -> PartitionSpec:
        """Return the `PartitionSpec` of an array of a paged cache, in `jax.shard_map`."""
        if leaf.ndim < 4:  # tables and lengths
            return PartitionSpec(self.rows)
        return PartitionSpec(None, None, self.kv_heads if leaf.shape[2] == self.page_heads else ())


def _plan(query: Array, pages: Pages, execution: Execution) -> _PagedPlacement | None:
    """Plan the call of the paged kernel; None where it cannot do it, or is not wanted: pages are gathered then."""
    layout, heads, kv_heads = execution.layout, query.shape[2], pages.key.shape[2]
    name = layout.backend.paged_kernel
    kernel = _KERNELS.get(name if execution.attention in ("auto", name) else None)
    if kernel is None or not kernel.fits(pages, query.dtype, heads, layout.device):
        return None
    rows, length, split = map(names_of, layout.activation_spec("batch length heads head_dim", query.shape)[:3])
    words = "layers pages kv_heads page_slots stored_dim"
    of_keys = names_of(layout.activation_spec(words, pages.key.shape)[2])
    own_heads, groups = heads // math.prod(layout.sizes[name] for name in split), heads // kv_heads
    if split[: len(of_keys)] != of_keys or (own_heads % groups and groups % own_heads):
        return None
    used = max(1, own_heads // groups)
    return _PagedPlacement(rows, length, split, of_keys, kv_heads, used, own_heads, groups, kernel)


# --- the cache ---


class PagedKVCache(Pages, LayerCache):
    """Paged key/value cache of equal layers.

    Layers look back `window` positions; 0: all.
    """

    window: int = eqx.field(static=True)

    # --- reading ---

    def slices(self) -> Any:
        return jnp.arange(self.key.shape[0])

    def past(self, slices: Any) -> PagedKVCacheView:
        return PagedKVCacheView(self, slices)

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> PagedKVCacheView:
        return self.rows(rows).past(slices)

    def rows(self, rows: Int[Array, "rows"]) -> "PagedKVCache":
        """Return some rows, with all pages."""
        return dataclasses.replace(self, table=rows_of(self.table, rows), lengths=rows_of(self.lengths, rows))

    def entries(self) -> NewKV:
        """Return all slots of the rows' pages in the form of proposed entries."""
        pages = jnp.maximum(self.table, 0)

        def rows(x: Array) -> Array:  # layers batch row_pages heads page_slots ...
            return jnp.swapaxes(jax.vmap(_joined_pages)(x[:, pages][:, :, :, :, : self.page_size]), 2, 3)

        return NewKV(**self.lanes.split(self.stored.map(rows))._asdict())

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[NewKV, Int[Array, "1 length"]]:
        page, exists = self._pages_of(index[None, None], positions)
        exists &= positions < self.lengths[index]
        layers = jnp.arange(self.key.shape[0])[:, None, None]
        page, slot = jnp.maximum(page, 0), jnp.maximum(positions, 0) % self.page_size
        taken = self.stored.map(lambda x: x[layers, page, :, slot])
        return NewKV(**self.lanes.split(taken)._asdict()), jnp.where(exists, positions, -1)

    # --- writing ---

    def commit(self, entries: NewKV, positions: Int[Array, "batch length"]) -> "PagedKVCache":
        return self._written(jnp.arange(self.lengths.shape[0])[:, None], entries, positions)

    def commit_rows(
        self, rows: Int[Array, "rows"], entries: NewKV, positions: Int[Array, "rows length"]
    ) -> "PagedKVCache":
        return self._written(rows[:, None], entries, positions)

    def _written(
        self, rows: Int[Array, "rows 1"], entries: NewKV, positions: Int[Array, "rows length"]
    ) -> "PagedKVCache":
        """Write entries into some rows."""
        new = in_format(entries, self.key.dtype, self.key_scale)
        new = self.lanes.join(StoredKV(new.key, new.value, new.key_scale, new.value_scale))
        page, exists = self._pages_of(rows, positions)
        page, slot = jnp.where(exists, page, self.key.shape[1]), jnp.where(exists, positions, 0) % self.page_size
        layers = jnp.arange(self.key.shape[0])[:, None, None]

        def write(old: Any, new: Any) -> Any:
            if old is None:
                return None
            heads = jnp.arange(old.shape[2])  # an index, too, as in `KVCache`
            where = layers[..., None], page[..., None], heads, slot[..., None]
            return old.at[where].set(new.astype(old.dtype), mode="drop")

        stored = StoredKV(*map(write, self.stored, new))
        ends = jnp.max(jnp.where(exists, positions + 1, 0), axis=1)
        return dataclasses.replace(self, **stored._asdict(), lengths=self.lengths.at[rows[:, 0]].max(ends))

    def _pages_of(
        self, rows: Int[Array, "rows 1"], positions: Int[Array, "rows length"]
    ) -> tuple[Int[Array, "rows length"], Bool[Array, "rows length"]]:
        """Return the page of each position, and whether there is one."""
        place = jnp.where(positions >= 0, positions // self.page_size, self.table.shape[1])
        page = self.table.at[rows, place].get(mode="fill", fill_value=-1)
        return page, page >= 0

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "PagedKVCache":
        """Write the tokens of `row`, a cache of one sequence in pages or not, to the pages of a row."""
        index = jnp.asarray(index)
        alone = dataclasses.replace(self, lengths=self.lengths.at[index].set(0))
        return alone.commit_rows(index[None], row.entries(), row.positions)

    # --- who has which pages ---

    def reset(self, rows: Bool[Array, "batch"]) -> "PagedKVCache":
        """Empty these rows, which keep their pages."""
        return dataclasses.replace(self, lengths=jnp.where(rows, 0, self.lengths))

    def empty_rows(self, rows: Int[Array, "rows"]) -> "PagedKVCache":
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

    def copied(self, sources: Int[Array, "count"], targets: Int[Array, "count"]) -> "PagedKVCache":
        """Copy the contents of some pages to others; a target below 0 is none."""
        into = jnp.where(targets < 0, self.key.shape[1], targets)
        stored = self.stored.map(lambda x: x.at[:, into].set(x[:, sources], mode="drop"))
        return dataclasses.replace(self, **stored._asdict())


def build_pages(
    shape: KVShape,
    layers: int,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | CacheFormat,
    pages: PageConfig,
) -> PagedKVCache:
    """Return an empty paged cache for `layers` equal layers."""
    kind, size, row_pages = CacheFormat.of(dtype), pages.page_size, pages.row_pages(max_length)
    window = shape.slots if shape.ring else 0
    num_pages = pages.window_pages if window and pages.window_pages is not None else pages.num_pages
    count = batch_size * row_pages if num_pages is None else num_pages
    shape.check_format(kind)
    joined = shape.values and shape.head_dim + (shape.value_dim or shape.head_dim) <= LANE
    lanes = LaneLayout(shape.head_dim, joined, shape.value_dim)
    key = jnp.zeros((layers, count, shape.kv_heads, size, lanes.width), kind.dtype)
    page_slots = -(-size // LANE) * LANE if lanes.width >= LANE else size  # a TPU keeps others in an order of its own
    scale = (
        jnp.zeros((layers, count, kind.scale_heads(shape.kv_heads, shape.head_dim), page_slots), SCALE)
        if kind.bound
        else None
    )
    own_tables = jnp.arange(count, dtype=jnp.int32).reshape(batch_size, row_pages) if num_pages is None else None
    return PagedKVCache(
        key=key,
        value=jnp.zeros((*key.shape[:-1], lanes.value_width), key.dtype) if shape.values and not joined else None,
        key_scale=scale,
        value_scale=None if scale is None or not shape.values else jnp.zeros_like(scale),
        table=jnp.full((batch_size, row_pages), -1, jnp.int32) if own_tables is None else own_tables,
        lengths=jnp.zeros((batch_size,), jnp.int32),
        lanes=lanes,
        window=window,
    )
