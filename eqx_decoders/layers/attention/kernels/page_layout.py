"""Memory layout of keys and values in pages, as used by paged caches and attention kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from eqx_decoders.sharding.chips import LANES


class StoredKV(NamedTuple):
    """Stored keys, values and their scales; absent arrays are None."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any

    def map(self, change: Callable[[Array], Any]) -> "StoredKV":
        """Apply a function to each array that is not None."""
        return StoredKV(*(None if x is None else change(x) for x in self))


@dataclasses.dataclass(frozen=True)
class LaneLayout:
    """Layout of a token's key and value, padded to TPU tiles of LANES features.

    **Arguments:**

    - `head_dim`: features of a key.
    - `joined`: whether key and value are concatenated in one array, because they fit into one tile together: this
        avoids padding each of them to a tile.
    - `value_dim`: features of a value; None: `head_dim`.
    """

    head_dim: int
    joined: bool
    value_dim: int | None = None

    @property
    def width(self) -> int:
        """Number of stored features of a key (and a joined value); a multiple of LANES from LANES / 2 features on."""
        return _padded_width(self.head_dim + self.joined * (self.value_dim or self.head_dim))

    @property
    def value_width(self) -> int:
        """Number of stored features of a separate value."""
        return _padded_width(self.value_dim or self.head_dim)

    def join(self, stored: StoredKV) -> StoredKV:
        """Convert separate keys and values to the layout of pages."""
        if self.joined:
            stored = stored._replace(key=jnp.concatenate([stored.key, stored.value], axis=-1), value=None)

        def pad(x: Any, width: int) -> Any:
            return None if x is None else jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))

        return stored._replace(key=pad(stored.key, self.width), value=pad(stored.value, self.value_width))

    def split(self, stored: StoredKV) -> StoredKV:
        """Convert from the layout of pages to separate keys and values; the inverse of `join`."""
        values = stored.key if self.joined else stored.value
        key = stored.key[..., : self.head_dim]
        return stored._replace(key=key, value=None if values is None else self.values(values))

    def values(self, stored: Array) -> Array:
        """Return the features that belong to values, from stored features or from weighted sums of stored features."""
        start = self.head_dim if self.joined else 0
        return stored[..., start : start + (self.value_dim or self.head_dim)]


def _padded_width(width: int) -> int:
    return width if width < LANES // 2 else -(-width // LANES) * LANES


class Pages(eqx.Module):
    """Pages of equal layers, and the page tables of the sequences.

    **Arguments:**

    - `key`, `value`: pages of all sequences, in the layout `lanes`. `value` is None if the keys are also the values, or
        if keys and values are joined in `key`.
    - `table`: page indices of each sequence, in the order of its tokens. -1 marks a missing page: nothing is written to
        it or read from it.
    - `lengths`: number of tokens of each sequence, at positions 0, 1, 2, ….
    - `key_scale`, `value_scale`: scales of quantized keys and values; None for unquantized keys and values.
    - `lanes`: layout of a token's key and value.
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
        """Number of tokens per page."""
        return self.key.shape[3]

    def supports_kernels(self, heads: int) -> bool:
        """Return whether the Pallas kernels support this format for `heads` query heads.

        They need an unquantized or 8-bit dtype, at most one scale per head, and keys and values of equal size.
        """
        supported_dtype = self.key.dtype.itemsize > 1 or self.key.dtype in (jnp.int8, jnp.float8_e4m3fn)
        scale_per_head = self.key_scale is None or self.key_scale.shape[2] <= self.key.shape[2]
        same_features = self.lanes.value_dim in (None, self.lanes.head_dim)
        return supported_dtype and scale_per_head and same_features and heads % self.key.shape[2] == 0

    @property
    def positions(self) -> Int[Array, "batch slots"]:
        """Position of each slot in the concatenated pages of a sequence; -1 for an empty slot."""
        index = jnp.arange(self.table.shape[1] * self.page_size, dtype=jnp.int32)[None]
        exists = jnp.repeat(self.table >= 0, self.page_size, axis=1) & (index < self.lengths[:, None])
        return jnp.where(exists, index, -1)

    @property
    def stored(self) -> StoredKV:
        """Stored keys, values and scales."""
        return StoredKV(self.key, self.value, self.key_scale, self.value_scale)
