"""Paged key/value cache: rows take only the pages that they need, and may share pages of a common prefix.

Position p of a row is the token `p mod page_size` of the page that stands in place `p // page_size` of the row's table.
Whoever fills the tables assigns the pages; a page is written by one row alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from eqx_decoders.errors import CheckedFields, PositiveInt
from eqx_decoders.layers.cache.base import LayerCache, rows_of
from eqx_decoders.layers.cache.format import SCALE, CacheFormat, decode
from eqx_decoders.layers.cache.kv_cache import CachedKV, KVShape, NewKV, in_format


LANE = 128  # features that a TPU keeps together


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


# --- what is stored ---


class _Stored(NamedTuple):
    """Stored arrays of keys and values, with any axes."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any

    def map(self, change: Callable[[Array], Array]) -> "_Stored":
        """Apply a function to each array that there is."""
        return _Stored(*(None if x is None else change(x) for x in self))


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """Arrangement of a token's key and value in lanes.

    **Arguments:**

    - `head_dim`: features of a key.
    - `joined`: whether the value stands behind the key, as both fit into one lane: then no lane is half empty.
    """

    head_dim: int
    joined: bool

    @property
    def width(self) -> int:
        """Number of stored features; from half a lane on whole lanes."""
        width = self.head_dim * (1 + self.joined)
        return width if width < LANE // 2 else -(-width // LANE) * LANE

    def join(self, stored: _Stored) -> _Stored:
        """Arrange keys and values as in pages."""
        if self.joined:
            stored = stored._replace(key=jnp.concatenate([stored.key, stored.value], axis=-1), value=None)

        def filled(x: Any) -> Any:
            return None if x is None else jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, self.width - x.shape[-1]),))

        return stored._replace(key=filled(stored.key), value=filled(stored.value))

    def split(self, stored: _Stored) -> _Stored:
        """Undo `join`."""
        dim, value = self.head_dim, stored.value
        if self.joined:
            value = stored.key[..., dim : 2 * dim]
        return stored._replace(key=stored.key[..., :dim], value=None if value is None else value[..., :dim])


class _InPages(eqx.Module):
    """Common base of classes that hold pages and the rows' tables."""

    key: eqx.AbstractVar[Any]
    value: eqx.AbstractVar[Any]
    key_scale: eqx.AbstractVar[Any]
    value_scale: eqx.AbstractVar[Any]
    table: eqx.AbstractVar[Any]
    lengths: eqx.AbstractVar[Any]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key.shape[3]

    @property
    def positions(self) -> Int[Array, "batch slots"]:
        """Position of each slot of the rows' pages, one after the other; -1 where there is no token."""
        return slot_positions(self.table, self.lengths, self.page_size)

    @property
    def _stored(self) -> _Stored:
        return _Stored(self.key, self.value, self.key_scale, self.value_scale)


# --- what a layer reads ---


class PagedCachedKV(_InPages):
    """Paged cache as one attention layer reads it: the pages of all layers, the layer's number, and the rows' tables.

    Pages are gathered, or read where they are by a kernel; a layer's slice of them would be a copy.
    """

    key: Num[Array, "layers pages kv_heads page_slots stored_dim"]
    value: Num[Array, "layers pages kv_heads page_slots stored_dim"] | None
    key_scale: Float[Array, "layers pages scale_heads scale_slots"] | None
    value_scale: Float[Array, "layers pages scale_heads scale_slots"] | None
    layer: Int[Array, ""]
    table: Int[Array, "batch row_pages"]
    lengths: Int[Array, "batch"]
    lanes: _Lanes = eqx.field(static=True)

    def whole(self) -> CachedKV:
        """Gather all tokens of the rows."""
        pages, positions = jnp.maximum(self.table, 0), self.positions
        rows = self._stored.map(lambda x: _joined_pages(x[self.layer, pages][:, :, :, : self.page_size]))
        stored = self.lanes.split(rows)
        # what another row left has weight 0, and 0 times NaN would be NaN
        clean = stored.map(lambda x: jnp.where(_like(positions >= 0, x), x, jnp.zeros((), x.dtype)))
        return CachedKV(positions=positions, **clean._asdict())

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        """Return keys times their scales and positions of some slots; position -1 for a slot without a token."""
        size, rows = self.page_size, jnp.arange(slots.shape[0])[:, None]
        page = self.table.at[rows, slots // size].get(mode="fill", fill_value=-1)
        exists = (page >= 0) & (slots < self.lengths[:, None])
        taken = self._stored.map(lambda x: x[self.layer, jnp.maximum(page, 0), :, slots % size])
        stored = self.lanes.split(taken)
        keys = jnp.where(exists[..., None, None], decode(stored.key, stored.key_scale, dtype), 0)
        return keys, jnp.where(exists, slots, -1)


def _joined_pages(x: Array) -> Array:
    """Reshape [batch, row_pages, heads, page_slots, ...] -> [batch, heads, slots, ...]."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _like(rows: Bool[Array, "batch slots"], x: Array) -> Array:
    """Reshape to compare with [batch, heads, slots, ...]."""
    return rows.reshape(rows.shape[0], 1, rows.shape[1], *(1,) * (x.ndim - 3))


def slot_positions(
    table: Int[Array, "batch row_pages"], lengths: Int[Array, "batch"], page_size: int
) -> Int[Array, "batch slots"]:
    """Return the position of each slot of the rows' pages, one after the other; -1 where there is no token."""
    index = jnp.arange(table.shape[1] * page_size, dtype=jnp.int32)[None]
    exists = jnp.repeat(table >= 0, page_size, axis=1) & (index < lengths[:, None])
    return jnp.where(exists, index, -1)


# --- the cache ---


class PagedKVCache(_InPages, LayerCache):
    """Paged key/value cache of equal layers.

    **Arguments:**

    - `key`, `value`: pages, of all rows, in lanes as a TPU stores them without gaps. No values where keys stand for
        both, or where values stand behind the keys.
    - `table`: pages of each row, in the order of its tokens; -1 for none: what belongs there is dropped, and nothing
        is read.
    - `lengths`: number of tokens of each row; their positions follow one another.
    - `key_scale`, `value_scale`: multiply stored numbers; None where these are as they are.
    - `lanes`: arrangement of a token's key and value in lanes.
    - `window`: number of positions that layers look back; 0 for all.
    """

    key: Num[Array, "layers pages kv_heads page_slots stored_dim"]
    value: Num[Array, "layers pages kv_heads page_slots stored_dim"] | None
    key_scale: Float[Array, "layers pages scale_heads scale_slots"] | None
    value_scale: Float[Array, "layers pages scale_heads scale_slots"] | None
    table: Int[Array, "batch row_pages"]
    lengths: Int[Array, "batch"]
    lanes: _Lanes = eqx.field(static=True)
    window: int = eqx.field(static=True)

    # --- reading ---

    def slices(self) -> Any:
        return jnp.arange(self.key.shape[0])

    def past(self, slices: Any) -> PagedCachedKV:
        rows = dict(table=self.table, lengths=self.lengths)
        return PagedCachedKV(**self._stored._asdict(), **rows, layer=slices, lanes=self.lanes)

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> PagedCachedKV:
        return self.rows(rows).past(slices)

    def rows(self, rows: Int[Array, "rows"]) -> "PagedKVCache":
        """Return some rows, with all pages."""
        return dataclasses.replace(self, table=rows_of(self.table, rows), lengths=rows_of(self.lengths, rows))

    def entries(self) -> NewKV:
        """Return all slots of the rows' pages in the form of proposed entries."""
        pages = jnp.maximum(self.table, 0)

        def rows(x: Array) -> Array:  # layers batch row_pages heads page_slots ...
            return jnp.swapaxes(jax.vmap(_joined_pages)(x[:, pages][:, :, :, :, : self.page_size]), 2, 3)

        return NewKV(**self.lanes.split(self._stored.map(rows))._asdict())

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[NewKV, Int[Array, "1 length"]]:
        page, exists = self._pages_of(index[None, None], positions)
        exists &= positions < self.lengths[index]
        layers = jnp.arange(self.key.shape[0])[:, None, None]
        page, slot = jnp.maximum(page, 0), jnp.maximum(positions, 0) % self.page_size
        taken = self._stored.map(lambda x: x[layers, page, :, slot])
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
        new = self.lanes.join(_Stored(new.key, new.value, new.key_scale, new.value_scale))
        page, exists = self._pages_of(rows, positions)
        page, slot = jnp.where(exists, page, self.key.shape[1]), jnp.where(exists, positions, 0) % self.page_size
        layers = jnp.arange(self.key.shape[0])[:, None, None]

        def write(old: Any, new: Any) -> Any:
            if old is None:
                return None
            heads = jnp.arange(old.shape[2])  # an index, too, as in `KVCache`
            where = layers[..., None], page[..., None], heads, slot[..., None]
            return old.at[where].set(new.astype(old.dtype), mode="drop")

        stored = _Stored(*map(write, self._stored, new))
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

    def empty_row(self, index: Int[Array, ""]) -> "PagedKVCache":
        return dataclasses.replace(self, lengths=self.lengths.at[index].set(0))

    def with_table(
        self, table: Int[Array, "batch row_pages"], lengths: Int[Array, "batch"] | None = None
    ) -> "PagedKVCache":
        """Set the pages of the rows, and the numbers of tokens in them (None: as before)."""
        return dataclasses.replace(self, table=table, lengths=self.lengths if lengths is None else lengths)

    def copied(self, sources: Int[Array, "count"], targets: Int[Array, "count"]) -> "PagedKVCache":
        """Copy the contents of some pages to others; a target below 0 is none."""
        into = jnp.where(targets < 0, self.key.shape[1], targets)
        stored = self._stored.map(lambda x: x.at[:, into].set(x[:, sources], mode="drop"))
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
    lanes = _Lanes(shape.head_dim, joined=shape.values and 2 * shape.head_dim <= LANE)
    key = jnp.zeros((layers, count, shape.kv_heads, size, lanes.width), kind.dtype)
    page_slots = -(-size // LANE) * LANE if lanes.width >= LANE else size  # a TPU keeps others in an order of its own
    scale = jnp.zeros((layers, count, kind.scale_heads(shape.kv_heads), page_slots), SCALE) if kind.bound else None
    own_tables = jnp.arange(count, dtype=jnp.int32).reshape(batch_size, row_pages) if num_pages is None else None
    return PagedKVCache(
        key=key,
        value=jnp.zeros_like(key) if shape.values and not lanes.joined else None,
        key_scale=scale,
        value_scale=None if scale is None or not shape.values else jnp.zeros_like(scale),
        table=jnp.full((batch_size, row_pages), -1, jnp.int32) if own_tables is None else own_tables,
        lengths=jnp.zeros((batch_size,), jnp.int32),
        lanes=lanes,
        window=window,
    )
