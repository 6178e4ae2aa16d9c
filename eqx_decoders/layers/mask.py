"""Which key a query sees, from absolute positions alone: training, prefill and decoding are one function.

Every mask is an interval: a query at position q sees the keys whose positions lie in [first(q), last(q)]. A position
below 0 means "no token here" (padding, an empty cache slot): it neither sees nor is seen.
"""

import dataclasses

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
    """Every token."""


Mask = Causal | SlidingWindow | Chunked | Bidirectional


def interval(mask: Mask, positions: Int[Array, "*shape"]) -> tuple[Int[Array, "*shape"], Int[Array, "*shape"]]:
    """The first and the last position that each query sees; last < first where there is no token."""
    first = jnp.zeros_like(positions)
    if isinstance(mask, Bidirectional):
        return first, jnp.where(positions < 0, -1, jnp.iinfo(positions.dtype).max)
    if isinstance(mask, SlidingWindow):
        first = jnp.maximum(positions - (mask.size - 1), 0)
    elif isinstance(mask, Chunked):
        first = jnp.maximum(positions // mask.size * mask.size, 0)
    return first, positions  # first >= 0 > position where there is no token


def lookback(mask: Mask) -> int | None:
    """How many positions back a causal mask can look, the query's own among them; None is without bound."""
    return mask.size if isinstance(mask, SlidingWindow | Chunked) else None


def contiguous(positions: Int[Array, "batch length"], segments: Int[Array, "batch length"] | None) -> Bool[Array, ""]:
    """Whether documents stand in rows without a gap: then a key `n` places back is at least `n` positions back.

    True if each token follows its predecessor's position in the same segment, or begins a segment not seen before.
    """
    segments = jnp.zeros_like(positions) if segments is None else segments
    known = jax.lax.cummax(jnp.where(positions < 0, -1, segments), axis=1)
    before = jnp.pad(known, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    shifted = [jnp.pad(x, ((0, 0), (1, 0)), constant_values=-2)[:, :-1] for x in (positions, segments)]
    follows = (positions == shifted[0] + 1) & (segments == shifted[1]) & (shifted[0] >= 0)
    return jnp.all((positions < 0) | follows | (segments > before))


def visible(
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
) -> Bool[Array, "batch length kv_length"]:
    """Whether each query sees each key. Segments, where given, must be equal (both are given, or neither)."""
    check_segments(query_segments, key_segments)
    first, last = interval(mask, query_positions)
    keys = key_positions[:, None, :]
    seen = (keys >= first[:, :, None]) & (keys <= last[:, :, None])
    if query_segments is not None and key_segments is not None:
        seen &= query_segments[:, :, None] == key_segments[:, None, :]
    return seen


def check_segments(query_segments: Array | None, key_segments: Array | None) -> None:
    """Segments of the queries alone, or of the keys alone, say nothing."""
    both = (query_segments is None) == (key_segments is None)
    given = "key_segments" if query_segments is None else "query_segments"
    check(both, f"{given} is given alone: give query_segments and key_segments, or neither.")
