"""Cache of compressed keys: one key for each complete window of a sequence's tokens."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from eqx_decoders.layers.cache.base import LayerCache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import CachedKV, KVCache, KVShape, NewKV, Past


class NewWindows(eqx.Module):
    """Compressed keys of the windows that end in a call.

    The axis `places` has the maximum number of such windows. `last` is the index of each window's last token in the
    call; an out-of-range index marks an unused place.
    """

    key: Float[Array, "*layers batch places 1 head_dim"]
    last: Int[Array, "*layers batch places"]


class CompressedKeys(LayerCache):
    """Cache of compressed keys for layers of equal configuration (stacked).

    Window `w` is in slot `w`; its position is `w`. The key of a window is written when the last token of the window is
    accepted.
    """

    kv: KVCache
    size: int = eqx.field(static=True)

    def slices(self) -> Any:
        return self.kv.slices()

    def past(self, slices: Any) -> Past:
        return self.kv.past(slices)

    def commit(self, entries: NewWindows, positions: Int[Array, "batch length"]) -> "CompressedKeys":
        ends = jnp.take_along_axis(positions, entries.last[0], axis=1, mode="fill", fill_value=-1)
        windows = jnp.where(ends >= 0, ends // self.size, -1)
        return dataclasses.replace(self, kv=self.kv.commit(NewKV(entries.key, None), windows))

    def with_row(self, index: int | Int[Array, ""], row: "CompressedKeys") -> "CompressedKeys":
        return dataclasses.replace(self, kv=self.kv.with_row(index, row.kv))

    def empty_rows(self, rows: Int[Array, "rows"]) -> "CompressedKeys":
        return dataclasses.replace(self, kv=self.kv.empty_rows(rows))

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> Any:
        return self.kv.past_of_rows(slices, rows)

    def slices_of_rows(self) -> Any:
        return self.kv.slices_of_rows()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedShape:
    """Shape of one layer's compressed keys: `windows` windows of `size` tokens, and `head_dim` features per key."""

    by_token: ClassVar[bool] = False
    windows: int
    size: int
    head_dim: int

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> CompressedKeys:
        """Return an empty cache for `layers` layers of equal configuration."""
        shape = KVShape(slots=self.windows, kv_heads=1, head_dim=self.head_dim, rolling=False, values=False)
        return CompressedKeys(kv=shape.build(layers, batch_size, dtype), size=self.size)


def at_ends(past: Past, size: int, dtype: DTypeLike) -> CachedKV:
    """Return cached keys with the positions of the last tokens of their windows. `size`: tokens per window."""
    cached = past.whole().dequantize_scale_blocks(dtype)
    ends = jnp.where(cached.positions >= 0, cached.positions * size + size - 1, -1)
    return CachedKV(cached.key, None, ends, cached.key_scale)
