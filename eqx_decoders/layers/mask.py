"""Attention masks from absolute positions alone: training, prefill and decoding are one function.

Every mask is an interval: a query at position q sees the keys whose positions lie in [first(q), last(q)]. A span, whose
tokens see each other's future, only moves its end. A position below 0 means "no token here" (padding, an empty cache
slot): it neither sees nor is seen.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eqx_decoders.errors import CheckedFields, PositiveInt, check


@dataclasses.dataclass(frozen=True)
class Causal:
    """Mask of the query itself and everything before it: k <= q."""


@dataclasses.dataclass(frozen=True)
class SlidingWindow(CheckedFields):
    """Mask of the last `size` positions, the query's own among them: 0 <= q - k < size."""

    size: PositiveInt


@dataclasses.dataclass(frozen=True)
class Chunked(CheckedFields):
    """Mask of what came before in the query's own chunk of `size` positions: k <= q and k // size == q // size."""

    size: PositiveInt


@dataclasses.dataclass(frozen=True)
class Bidirectional(CheckedFields):
    """Mask of every token, or of the query's own block of `size` positions: k // size == q // size."""

    size: PositiveInt | None = None


Mask = Causal | SlidingWindow | Chunked | Bidirectional


class Spans(NamedTuple):
    """Spans of tokens that see each other: `last` is the last position of each query's span, -1 for a query in none.

    The tokens of a span (an image, say) also see its later tokens; how far back they see is up to the mask, as in
    transformers. They must be in one call: a query cannot see what is neither in its call nor in its cache.
    """

    last: Int[Array, "batch length"]


def spans_of(span_ids: Int[Array, "batch length"], positions: Int[Array, "batch length"]) -> Spans:
    """Find the spans: tokens that follow one another and have the same id; id 0 is no span.

    Tokens follow one another if their positions do: a new document begins a new span, padding in between none.
    """
    inside = (positions >= 0) & (span_ids > 0)
    last = jnp.flip(_run_ends(jnp.flip(span_ids, 1), jnp.flip(positions, 1)), 1)
    return Spans(jnp.where(inside, last, -1))


def _run_ends(ids: Array, positions: Array) -> Int[Array, "batch length"]:
    """Return, for each token of rows written backwards, the position at which its run of equal ids ends."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    latest = jax.lax.cummax(jnp.where(positions >= 0, index, -1), axis=1)
    before = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    id_before, place_before = (jnp.take_along_axis(x, jnp.maximum(before, 0), axis=1) for x in (ids, positions))
    goes_on = (before >= 0) & (ids == id_before) & (positions == place_before - 1)
    start = jax.lax.cummax(jnp.where((positions >= 0) & ~goes_on, index, 0), axis=1)
    return jnp.take_along_axis(positions, start, axis=1)


def interval(
    mask: Mask, positions: Int[Array, "*shape"], spans: Spans | None = None
) -> tuple[Int[Array, "*shape"], Int[Array, "*shape"]]:
    """Return the first and the last position that each query sees; last < first where there is no token."""
    first, last = _mask_interval(mask, positions)
    if spans is None:
        return first, last
    inside = (positions >= 0) & (spans.last >= 0)
    return first, jnp.where(inside, jnp.maximum(last, spans.last), last)


def _mask_interval(mask: Mask, positions: Array) -> tuple[Array, Array]:
    first = jnp.zeros_like(positions)
    if isinstance(mask, Bidirectional):
        if mask.size is not None:
            first = jnp.maximum(positions // mask.size * mask.size, 0)
        last = jnp.iinfo(positions.dtype).max if mask.size is None else first + (mask.size - 1)
        return first, jnp.where(positions < 0, -1, last)
    if isinstance(mask, SlidingWindow):
        first = jnp.maximum(positions - (mask.size - 1), 0)
    elif isinstance(mask, Chunked):
        first = jnp.maximum(positions // mask.size * mask.size, 0)
    return first, positions  # first >= 0 > position where there is no token


def lookback(mask: Mask) -> int | None:
    """Return how many positions back a causal mask looks, the query's own among them; None: without bound."""
    return mask.size if isinstance(mask, SlidingWindow | Chunked) else None


def seen_keys(mask: Mask, length: int) -> int:
    """Count the keys that a query of a long document sees: its window or block, else all `length` of them."""
    block = mask.size if isinstance(mask, Bidirectional) else None
    return min(lookback(mask) or block or length, length)


def visible(
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
    spans: Spans | None = None,
) -> Bool[Array, "batch length kv_length"]:
    """Return whether each query sees each key. Segments, where given, must be equal (give both, or neither)."""
    check_segments(query_segments, key_segments)
    first, last = interval(mask, query_positions, spans)
    keys = key_positions[:, None, :]
    seen = (keys >= first[:, :, None]) & (keys <= last[:, :, None])
    if query_segments is not None and key_segments is not None:
        seen &= query_segments[:, :, None] == key_segments[:, None, :]
    return seen


class AttentionPositions(NamedTuple):
    """Positions, segments and spans of queries and keys."""

    query_positions: Int[Array, "batch length"]
    key_positions: Int[Array, "batch kv_length"]
    query_segments: Int[Array, "batch length"] | None = None
    key_segments: Int[Array, "batch kv_length"] | None = None
    query_spans: Spans | None = None


def check_segments(query_segments: Array | None, key_segments: Array | None) -> None:
    """Check that segments are given for both queries and keys, or for neither."""
    both = (query_segments is None) == (key_segments is None)
    name = "key_segments" if query_segments is None else "query_segments"
    check(both, f"{name} is given alone: give query_segments and key_segments, or neither.")
