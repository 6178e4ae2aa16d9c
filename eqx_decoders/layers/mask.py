"""Which key a query sees, from absolute positions alone: training, prefill and decoding are one function.

Every mask is an interval: a query at position q sees the keys whose positions lie in [first(q), last(q)]. A span, whose
tokens see each other's future, only moves its end. A position below 0 means "no token here" (padding, an empty cache
slot): it neither sees nor is seen.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eqx_decoders.errors import check, check_integer


@dataclasses.dataclass(frozen=True)
class Causal:
    """The query itself and everything before it: k <= q."""


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """The last `size` positions, the query's own among them: 0 <= q - k < size."""

    size: int

    def __post_init__(self):
        check_integer("SlidingWindow.size", self.size)


@dataclasses.dataclass(frozen=True)
class Chunked:
    """What came before in the query's own chunk of `size` positions: k <= q and k // size == q // size."""

    size: int

    def __post_init__(self):
        check_integer("Chunked.size", self.size)


@dataclasses.dataclass(frozen=True)
class Bidirectional:
    """Every token, or every one of the query's own block of `size` positions: k // size == q // size."""

    size: int | None = None

    def __post_init__(self):
        if self.size is not None:
            check_integer("Bidirectional.size", self.size)


Mask = Causal | SlidingWindow | Chunked | Bidirectional


class Spans(NamedTuple):
    """The last position of the span that holds each query; -1 for a query in none.

    The tokens of a span (an image, say) also see those of its tokens that come later; how far back they see says the
    mask, as in transformers. They must be in one call: what a query has not got beside it, and not in its cache, it
    cannot see.
    """

    last: Int[Array, "batch length"]


def spans_of(span_ids: Int[Array, "batch length"], positions: Int[Array, "batch length"]) -> Spans:
    """The spans of tokens that follow one another and have the same id; id 0 is no span.

    Tokens follow one another if their positions do: a new document begins a new span, padding in between none.
    """
    inside = (positions >= 0) & (span_ids > 0)
    last = jnp.flip(_run_ends(jnp.flip(span_ids, 1), jnp.flip(positions, 1)), 1)
    return Spans(jnp.where(inside, last, -1))


def _run_ends(ids: Array, positions: Array) -> Int[Array, "batch length"]:
    """For each token the position at which its run of equal ids ends, of rows written backwards."""
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
    """The first and the last position that each query sees; last < first where there is no token."""
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
    """How many positions back a causal mask can look, the query's own among them; None is without bound."""
    return mask.size if isinstance(mask, SlidingWindow | Chunked) else None


def seen_keys(mask: Mask, length: int) -> int:
    """How many keys a query of a long document sees: those of its window or block, else all `length` of them."""
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
    """Whether each query sees each key. Segments, where given, must be equal (both are given, or neither)."""
    check_segments(query_segments, key_segments)
    first, last = interval(mask, query_positions, spans)
    keys = key_positions[:, None, :]
    seen = (keys >= first[:, :, None]) & (keys <= last[:, :, None])
    if query_segments is not None and key_segments is not None:
        seen &= query_segments[:, :, None] == key_segments[:, None, :]
    return seen


class AttentionPositions(NamedTuple):
    """Where queries and keys stand."""

    query_positions: Int[Array, "batch length"]
    key_positions: Int[Array, "batch kv_length"]
    query_segments: Int[Array, "batch length"] | None = None
    key_segments: Int[Array, "batch kv_length"] | None = None
    query_spans: Spans | None = None


def check_segments(query_segments: Array | None, key_segments: Array | None) -> None:
    """Segments of the queries alone, or of the keys alone, say nothing."""
    both = (query_segments is None) == (key_segments is None)
    given = "key_segments" if query_segments is None else "query_segments"
    check(both, f"{given} is given alone: give query_segments and key_segments, or neither.")
