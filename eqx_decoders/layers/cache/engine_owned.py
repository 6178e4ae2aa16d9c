"""Caches owned by an external engine: layers pass keys and values, and get back the results of their queries.

For engines that have their own memory and their own attention, such as vLLM's TPU backend. The tokens of a call are
one row, whatever sequences they are of: the engine's metadata says which.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.layers.cache.base import LayerCache
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow


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
    value: Float[Array, "1 tokens kv_heads head_dim"] | None


class ExternalCachedKV(eqx.Module):
    """External cache as one layer reads and writes it."""

    cache: Any
    metadata: Any
    attention: ExternalAttention = eqx.field(static=True)
    layer: int = eqx.field(static=True)

    def attend(
        self,
        query: Float[Array, "1 tokens heads head_dim"],
        key: Float[Array, "1 tokens kv_heads head_dim"],
        value: Float[Array, "1 tokens kv_heads head_dim"] | None,
        *,
        mask: Mask,
        soft_cap: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
        written: Any = None,
    ) -> tuple[Float[Array, "1 tokens heads head_dim"], ExternalWrite]:
        """Attend by the engine. `written` is the cache to which an earlier layer has written these keys and values."""
        known = isinstance(mask, Causal | SlidingWindow)
        check(known, f"layer {self.layer} has mask={mask}, which engines with caches of their own don't know.")
        window = mask.size if isinstance(mask, SlidingWindow) else None
        call = ExternalCall(layer=self.layer, window=window, soft_cap=soft_cap, writes=written is None)
        before, values = self.cache if written is None else written, None if value is None else value[0]
        cache, out = self.attention(before, query[0], key[0], values, self.metadata, sinks, call)
        return out[None].astype(query.dtype), ExternalWrite(cache, key, value)


class ExternalKVCache(LayerCache):
    """External caches of equal layers, each an array or a tree of the engine's, and its metadata of this call."""

    caches: tuple[Any, ...]
    metadata: Any
    attention: ExternalAttention = eqx.field(static=True)
    first: int = eqx.field(static=True)
    step: int = eqx.field(static=True)

    def slices(self) -> Any:
        return np.arange(len(self.caches))

    def past(self, slices: Any) -> ExternalCachedKV:
        if not isinstance(slices, np.integer):
            raise ConfigError("external caches are a list, which no scan goes through: use model.replace(scan=False).")
        place = int(slices)
        layer = self.first + place * self.step
        return ExternalCachedKV(self.caches[place], self.metadata, attention=self.attention, layer=layer)

    def commit(self, entries: tuple[ExternalWrite, ...], positions: Int[Array, "1 tokens"]) -> "ExternalKVCache":
        return dataclasses.replace(self, caches=tuple(entry.cache for entry in entries))


def stacked_or_listed(*results: Any) -> Any:
    """Stack the arrays that equal layers returned; list external caches."""
    return results if isinstance(results[0], ExternalWrite) else jnp.stack(results)
