"""Arrangement of keys and values in pages, as caches store them and kernels read them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


LANE = 128  # features that a TPU keeps together


class StoredKV(NamedTuple):
    """Stored arrays of keys and values, with any axes."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any

    def map(self, change: Callable[[Array], Any]) -> "StoredKV":
        """Apply a function to each array that there is."""
        return StoredKV(*(None if x is None else change(x) for x in self))


@dataclasses.dataclass(frozen=True)
class LaneLayout:
    """Arrangement of a token's key and value in lanes.

    **Arguments:**

    - `head_dim`: features of a key.
    - `joined`: whether the value stands behind the key, as both fit into one lane: then no lane is half empty.
    - `value_dim`: features of a value; None for those of a key.
    """

    head_dim: int
    joined: bool
    value_dim: int | None = None

    @property
    def width(self) -> int:
        """Number of stored features of a key; from half a lane on whole lanes."""
        return _in_lanes(self.head_dim + self.joined * (self.value_dim or self.head_dim))

    @property
    def value_width(self) -> int:
        """Number of stored features of a value by itself."""
        return _in_lanes(self.value_dim or self.head_dim)

    def join(self, stored: StoredKV) -> StoredKV:
        """Arrange keys and values as in pages."""
        if self.joined:
            stored = stored._replace(key=jnp.concatenate([stored.key, stored.value], axis=-1), value=None)

        def filled(x: Any, width: int) -> Any:
            return None if x is None else jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))

        return stored._replace(key=filled(stored.key, self.width), value=filled(stored.value, self.value_width))

    def split(self, stored: StoredKV) -> StoredKV:
        """Undo `join`."""
        values = stored.key if self.joined else stored.value
        key = stored.key[..., : self.head_dim]
        return stored._replace(key=key, value=None if values is None else self.values(values))

    def values(self, stored: Array) -> Array:
        """Return the values among the features in which they are stored, or among sums of these."""
        begin = self.head_dim if self.joined else 0
        return stored[..., begin : begin + (self.value_dim or self.head_dim)]


def _in_lanes(width: int) -> int:
    return width if width < LANE // 2 else -(-width // LANE) * LANE


class Pages(eqx.Module):
    """Pages of equal layers, and the rows' tables.

    **Arguments:**

    - `key`, `value`: pages, of all rows, in lanes as a TPU stores them without gaps. No values where keys stand for
        both, or where values stand behind the keys.
    - `table`: pages of each row, in the order of its tokens; -1 for none: what belongs there is dropped, and nothing
        is read.
    - `lengths`: number of tokens of each row; their positions follow one another.
    - `key_scale`, `value_scale`: multiply stored numbers; None where these are as they are.
    - `lanes`: arrangement of a token's key and value in lanes.
    """

    key: Num[Array, "layers pages kv_heads page_slots stored_dim"]
    value: Num[Array, "layers pages kv_heads page_slots stored_value_dim"] | None
    key_scale: Float[Array, "layers pages scale_heads scale_slots"] | None
    value_scale: Float[Array, "layers pages scale_heads scale_slots"] | None
    table: Int[Array, "batch row_pages"]
    lengths: Int[Array, "batch"]
    lanes: LaneLayout = eqx.field(static=True)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key.shape[3]

    def suits_kernels(self, heads: int) -> bool:
        """Return whether Pallas kernels can widen these numbers and scale them by head, for so many query heads."""
        wide = self.key.dtype.itemsize > 1 or self.key.dtype in (jnp.int8, jnp.float8_e4m3fn)
        by_head = self.key_scale is None or self.key_scale.shape[2] <= self.key.shape[2]  # not by blocks of a head
        alike = self.lanes.value_dim in (None, self.lanes.head_dim)
        return wide and by_head and alike and heads % self.key.shape[2] == 0

    @property
    def positions(self) -> Int[Array, "batch slots"]:
        """Position of each slot of the rows' pages, one after the other; -1 where there is no token."""
        index = jnp.arange(self.table.shape[1] * self.page_size, dtype=jnp.int32)[None]
        exists = jnp.repeat(self.table >= 0, self.page_size, axis=1) & (index < self.lengths[:, None])
        return jnp.where(exists, index, -1)

    @property
    def stored(self) -> StoredKV:
        """The arrays of keys and values."""
        return StoredKV(self.key, self.value, self.key_scale, self.value_scale)
