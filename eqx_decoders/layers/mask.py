"""Attention masks, computed only from absolute positions, so that training, prefill and decoding share the code.

Every mask is an interval: a query at position q sees the keys at positions in [first(q), last(q)]. A span of tokens
with bidirectional attention only extends `last`. A negative position means that there is no token (padding, or an empty
cache slot): it sees no keys and is not seen by any query.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.layers.documents import previous_tokens


@dataclasses.dataclass(frozen=True)
class Causal:
    """Causal mask: k <= q."""


@dataclasses.dataclass(frozen=True)
class SlidingWindow(CheckedFields):
    """Sliding window of the last `size` positions, including the query's own: 0 <= q - k < size."""

    size: PositiveInt


@dataclasses.dataclass(frozen=True)
class Chunked(CheckedFields):
    """Chunked causal mask: k <= q and k // size == q // size."""

    size: PositiveInt


@dataclasses.dataclass(frozen=True)
class Bidirectional(CheckedFields):
    """Bidirectional attention to all tokens, or with `size` within chunks: k // size == q // size."""

    size: PositiveInt | None = None


Mask = Causal | SlidingWindow | Chunked | Bidirectional


class Spans(NamedTuple):
    """Spans of tokens with bidirectional attention, for example the tokens of an image.

    Tokens of a span also see the later tokens of the span. The mask decides which earlier tokens they see, as in
    transformers. All tokens of a span must be in the same call, as a query only sees its call and its cache.

    **Arguments:**

    - `last`: last position of each query's span; -1 for a query without a span.
    """

    last: Int[Array, "batch length"]


def spans_of(span_ids: Int[Array, "batch length"], positions: Int[Array, "batch length"]) -> Spans:
    """Return the spans: runs of tokens with consecutive positions and the same positive id. Id 0 means no span.

    Padding within a run does not end it; a new document starts a new span.
    """
    in_span = (positions >= 0) & (span_ids > 0)
    last = jnp.flip(_run_ends(jnp.flip(span_ids, 1), jnp.flip(positions, 1)), 1)
    return Spans(jnp.where(in_span, last, -1))


def _run_ends(ids: Array, positions: Array) -> Int[Array, "batch length"]:
    """Return the last position of each token's run of equal ids; `ids` and `positions` are in reversed order."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    previous = previous_tokens(positions >= 0)
    previous_id, previous_position = (
        jnp.take_along_axis(x, jnp.maximum(previous, 0), axis=1) for x in (ids, positions)
    )
    continues = (previous >= 0) & (ids == previous_id) & (positions == previous_position - 1)
    start = jax.lax.cummax(jnp.where((positions >= 0) & ~continues, index, 0), axis=1)
    return jnp.take_along_axis(positions, start, axis=1)


def interval(
    mask: Mask, positions: Int[Array, "*shape"], spans: Spans | None = None
) -> tuple[Int[Array, "*shape"], Int[Array, "*shape"]]:
    """Return the first and the last position that each query sees; last < first for padding."""
    first, last = _mask_interval(mask, positions)
    if spans is None:
        return first, last
    in_span = (positions >= 0) & (spans.last >= 0)
    return first, jnp.where(in_span, jnp.maximum(last, spans.last), last)


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
    return first, positions  # first >= 0 > position for padding


def lookback(mask: Mask) -> int | None:
    """Return the number of positions that a causal mask sees at most, including the query's own; None: no limit."""
    return mask.size if isinstance(mask, SlidingWindow | Chunked) else None


def seen_keys(mask: Mask, length: int) -> int:
    """Return the largest number of keys that a query sees in a document of `length` tokens."""
    chunk = mask.size if isinstance(mask, Bidirectional) else None
    return min(lookback(mask) or chunk or length, length)


def visible(
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
    spans: Spans | None = None,
) -> Bool[Array, "batch length kv_length"]:
    """Return whether each query sees each key. A query only sees keys of its segment.

    Segments must be passed for both queries and keys, or for neither; otherwise ConfigError is raised.
    """
    check_segments(query_segments, key_segments)
    first, last = interval(mask, query_positions, spans)
    keys = key_positions[:, None, :]
    seen = (keys >= first[:, :, None]) & (keys <= last[:, :, None])
    if query_segments is not None and key_segments is not None:
        seen &= query_segments[:, :, None] == key_segments[:, None, :]
    return seen


class AttentionPositions(NamedTuple):
    """Positions, segments and spans of queries and keys; see `ForwardContext` and `Spans`."""

    query_positions: Int[Array, "batch length"]
    key_positions: Int[Array, "batch kv_length"]
    query_segments: Int[Array, "batch length"] | None = None
    key_segments: Int[Array, "batch kv_length"] | None = None
    query_spans: Spans | None = None


def check_segments(query_segments: Array | None, key_segments: Array | None) -> None:
    """Raise ConfigError unless segments are passed for both queries and keys, or for neither."""
    name = "key_segments" if query_segments is None else "query_segments"
    check(
        (query_segments is None) == (key_segments is None),
        f"Only {name} was passed: pass both query_segments and key_segments, or neither.",
    )
