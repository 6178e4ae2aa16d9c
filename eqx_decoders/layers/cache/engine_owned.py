"""Caches owned by an external engine: layers pass keys and values, and get back the results of their queries.

For engines that have their own memory and their own attention, such as vLLM's TPU backend. The tokens of a call are
one row, whatever sequences they are of: the engine's metadata says which.
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


_UNKNOWN = "which engines with caches of their own don't know"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalCall:
    """Static options of one call of an engine's attention: softmax over the sequence's tokens up to the query's own.

    **Arguments:**

    - `layer`: its number in the list of caches.
    - `window`: number of tokens that a query sees, itself included; None for all.
    - `soft_cap`: scores become `cap * tanh(scores / cap)`; None for none.
    - `writes`: whether keys and values are to be stored; else an earlier layer has stored them already.
    """

    layer: int
    window: int | None = None
    soft_cap: float | None = None
    writes: bool = True


# (cache, query, key, value, metadata, sinks, call) -> (cache, out), with tokens in front: `tokens heads head_dim`.
# Queries are scaled. Values are None where they are the keys. Sinks: a logit for each head, or None.
ExternalAttention = Callable[..., tuple[Any, Array]]


class ExternalWrite(NamedTuple):
    """New content of one layer's external cache, and the keys and values written to it."""

    cache: Any
    key: Float[Array, "1 tokens kv_heads head_dim"]
    value: Float[Array, "1 tokens kv_heads value_dim"] | None


class ExternalKVCache(LayerCache, Past):
    """External caches of equal layers, each an array or a tree of the engine's, and its metadata of this call.

    That of a single layer is what this layer reads: the engine writes, and attends to what it has written.
    """

    caches: tuple[Any, ...]
    metadata: Any
    attention: ExternalAttention = eqx.field(static=True)
    first: int = eqx.field(static=True)
    step: int = eqx.field(static=True)

    def slices(self) -> Any:
        return np.arange(len(self.caches))

    def past(self, slices: Any) -> "ExternalKVCache":
        if not isinstance(slices, np.integer):
            raise ConfigError("external caches are a list, which no scan goes through: use model.replace(scan=False).")
        place = int(slices)
        return dataclasses.replace(self, caches=(self.caches[place],), first=self.first + place * self.step)

    def whole(self) -> CachedKV:
        raise ConfigError(f"layer {self.first} selects blocks, {_UNKNOWN}.")

    def attend_with(
        self,
        present: Callable[[], Result],
        entries: NewKV | ExternalWrite,
        queries: Queries,
        options: AttentionOptions,
        execution: Execution,
        sink: Float[Array, "heads"] | None = None,
    ) -> tuple[Float[Array, "1 tokens heads head_dim"], ExternalWrite]:
        """Attend by the engine, which first stores the keys and values that no earlier layer has written."""
        mask = options.mask
        check(queries.spans is None, f"layer {self.first} sees spans, {_UNKNOWN}.")
        check(options.alibi is None, f"layer {self.first} has linear biases, {_UNKNOWN}.")
        check(isinstance(mask, Causal | SlidingWindow), f"layer {self.first} has mask={mask}, {_UNKNOWN}.")
        window, written = mask.size if isinstance(mask, SlidingWindow) else None, isinstance(entries, ExternalWrite)
        call = ExternalCall(layer=self.first, window=window, soft_cap=options.soft_cap, writes=not written)
        widths = {x.shape[-1] for x in (entries.key, entries.value) if x is not None}
        check(len(widths) == 1, f"layer {self.first} has values of another width than keys, {_UNKNOWN}.")
        values = None if entries.value is None else entries.value[0]
        before = entries.cache if isinstance(entries, ExternalWrite) else self.caches[0]
        cache, out = self.attention(before, queries.query[0], entries.key[0], values, self.metadata, sink, call)
        return out[None].astype(queries.query.dtype), ExternalWrite(cache, entries.key, entries.value)

    def stacked(self, entries: Sequence[ExternalWrite]) -> tuple[ExternalWrite, ...]:
        return tuple(entries)

    def commit(self, entries: tuple[ExternalWrite, ...], positions: Int[Array, "1 tokens"]) -> "ExternalKVCache":
        return dataclasses.replace(self, caches=tuple(entry.cache for entry in entries))
