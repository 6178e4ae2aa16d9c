"""Caches owned by an external engine: layers pass queries, keys and values to the engine, which computes attention.

For engines with separate cache memory and attention kernels, such as vLLM's TPU backend. The tokens of a call are one
batch row, even if they belong to several sequences; the engine's metadata describes the sequences.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int

from eqx_decoders.context import Execution
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.layers.attention.kernels.call import AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.cache.base import LayerCache
from eqx_decoders.layers.cache.kv_cache import CachedKV, NewKV, Past, Queries
from eqx_decoders.layers.mask import Causal, SlidingWindow


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalCall:
    """Static options of one call of an engine's causal attention.

    **Arguments:**

    - `layer`: index of the layer in the engine's list of caches.
    - `window`: number of tokens that a query attends to, including its own token; None for all tokens.
    - `soft_cap`: scores become `cap * tanh(scores / cap)`; None for no cap.
    - `writes`: whether the engine must store the keys and values; otherwise an earlier layer has stored them.
    """

    layer: int
    window: int | None = None
    soft_cap: float | None = None
    writes: bool = True


# (cache, query, key, value, metadata, sinks, call) -> (new cache, out)
# Query, key, value and out have the axes `tokens heads head_dim`. Queries are already scaled. Value is None if the keys
# are also the values. Sinks are one logit for each head, or None.
ExternalAttention = Callable[..., tuple[Any, Array]]


class ExternalWrite(NamedTuple):
    """New content of one layer's external cache, and the keys and values that were written to it."""

    cache: Any
    key: Float[Array, "1 tokens kv_heads head_dim"]
    value: Float[Array, "1 tokens kv_heads value_dim"] | None


class ExternalKVCache(LayerCache, Past):
    """External caches of equal layers.

    `past` returns an `ExternalKVCache` of a single layer, which calls the engine. The engine writes the new keys and
    values, and attends to all keys and values of the sequence.

    **Arguments:**

    - `caches`: the engine's cache of each layer, an array or a pytree.
    - `metadata`: the engine's metadata of this call.
    - `attention`: the engine's attention function.
    - `first`: index of the first of these layers in the engine's list of caches.
    - `layer_stride`: distance of the indices of these layers.
    """

    caches: tuple[Any, ...]
    metadata: Any
    attention: ExternalAttention = eqx.field(static=True)
    first: int = eqx.field(static=True)
    layer_stride: int = eqx.field(static=True)

    def slices(self) -> Any:
        return np.arange(len(self.caches))

    def past(self, slices: Any) -> "ExternalKVCache":
        if not isinstance(slices, np.integer):
            raise ConfigError("External caches cannot be scanned over layers: use model.replace(scan=False).")
        index = int(slices)
        return dataclasses.replace(self, caches=(self.caches[index],), first=self.first + index * self.layer_stride)

    def whole(self) -> CachedKV:
        raise ConfigError(
            f"layer {self.first} selects keys by reading all cached keys, which external caches do not support: use "
            "the library's caches."
        )

    def attend_with(
        self,
        present: Callable[[], Result],
        entries: NewKV | ExternalWrite,
        queries: Queries,
        options: AttentionOptions,
        execution: Execution,
        sink: Float[Array, "heads"] | None = None,
    ) -> tuple[Float[Array, "1 tokens heads head_dim"], ExternalWrite]:
        """Call the engine's attention. It first stores the keys and values, unless an earlier layer has stored them."""
        mask = options.mask
        check(
            queries.spans is None,
            f"layer {self.first} uses spans (bidirectional attention), which external caches do not support.",
        )
        check(
            options.alibi is None,
            f"layer {self.first} uses linear biases (ALiBi), which external caches do not support.",
        )
        check(
            isinstance(mask, Causal | SlidingWindow),
            f"layer {self.first} has mask={mask}, but external caches support only Causal and SlidingWindow.",
        )
        feature_counts = {x.shape[-1] for x in (entries.key, entries.value) if x is not None}
        check(
            len(feature_counts) == 1,
            f"layer {self.first} has values with another number of features than keys, which external caches do not "
            "support.",
        )
        call = ExternalCall(
            layer=self.first,
            window=mask.size if isinstance(mask, SlidingWindow) else None,
            soft_cap=options.soft_cap,
            writes=not isinstance(entries, ExternalWrite),
        )
        values = None if entries.value is None else entries.value[0]
        old_cache = entries.cache if isinstance(entries, ExternalWrite) else self.caches[0]
        cache, out = self.attention(old_cache, queries.query[0], entries.key[0], values, self.metadata, sink, call)
        return out[None].astype(queries.query.dtype), ExternalWrite(cache, entries.key, entries.value)

    def stacked(self, entries: Sequence[ExternalWrite]) -> tuple[ExternalWrite, ...]:
        return tuple(entries)

    def commit(self, entries: tuple[ExternalWrite, ...], positions: Int[Array, "1 tokens"]) -> "ExternalKVCache":
        return dataclasses.replace(self, caches=tuple(entry.cache for entry in entries))
