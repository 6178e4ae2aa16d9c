"""Tiled attention in XLA with an online softmax (Rabe & Staats, 2021; Dao et al., 2022).

Tiles of queries are processed against tiles of keys. Forward and backward pass store one tile of scores, and arrays of
the size of the arguments. Loops over tiles are compiled as loops, so the program does not grow with the length; only
short float32 inputs (`Backend.max_unrolled_attention`) use an unrolled loop over query tiles, each with all its keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float32

from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.common import (
    EMPTY,
    Cotangents,
    Gradients,
    Result,
    cap_gradient,
    cap_scores,
    make_cotangents,
)
from eqx_decoders.layers.attention.kernels.selection import Selection, unpack_bits
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Mask, interval
from eqx_decoders.sharding.backend import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TilePlan:
    """Static description of one call, and its loops over tiles.

    Functions of a tile take the offset and the number of its queries (`query_start`, `query_tile`), and the offset and
    the number of its keys (`key_start`, `key_tile`).
    """

    mask: Mask
    soft_cap: float | None
    alibi: Alibi | None
    aligned: bool
    spans: bool
    materializes_masks: bool  # whether to keep XLA from recomputing masks for each head
    query_tile: int
    key_tile: int | None  # None: query tiles are unrolled, and each takes all its keys at once

    @property
    def looks_ahead(self) -> bool:
        """Whether a query may see keys with a higher index, as far as is known at compile time."""
        return not self.aligned or self.spans or isinstance(self.mask, Bidirectional)

    def pad_queries(self, x: Array, axis: int = 1, value: int = 0) -> Array:
        """Pad an axis of queries to a multiple of the query tile, unless the loop is unrolled."""
        return x if self.key_tile is None else _pad(x, axis, self.query_tile, value)

    def pad_keys(self, x: Array, axis: int = 1, value: int = 0) -> Array:
        """Pad an axis of keys to a multiple of the key tile, unless the loop is unrolled."""
        return x if self.key_tile is None else _pad(x, axis, self.key_tile, value)

    def fold_keys(self, step: Callable, carry: Any, query_start: Any, query_tile: int, visible: "_VisibleKeys") -> Any:
        """Fold `step(carry, key_start, key_tile)` over the key tiles that the queries of a tile may see."""
        if self.key_tile is None or visible.key_tiles is None:
            kv_length = visible.key_positions.shape[1]
            return step(carry, 0, kv_length if self.looks_ahead else min(query_start + query_tile, kv_length))
        size = self.key_tile
        start, end = (bound[query_start // self.query_tile] for bound in visible.key_tiles)
        return jax.lax.fori_loop(start, end, lambda i, carry: step(carry, i * size, size), carry)

    def fold_queries(self, step: Callable, carry: Any, length: int) -> tuple[Any, Any]:
        """Fold `step(carry, query_start, query_tile) -> (carry, results)` over query tiles; join results on axis 3."""
        if self.key_tile is not None:
            starts = jnp.arange(0, length, self.query_tile)
            carry, results = jax.lax.scan(lambda carry, start: step(carry, start, self.query_tile), carry, starts)
            return carry, jax.tree.map(_join_tiles, results)
        tiles = []
        for start in range(0, length, self.query_tile):
            carry, results = step(carry, start, min(self.query_tile, length - start))
            tiles.append(results)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, 3), *tiles)

    def compute_once(self, mask: Array) -> Array:
        """Keep XLA from recomputing a mask, which is equal for all heads, for each head."""
        return jax.lax.optimization_barrier(mask) if self.materializes_masks else mask

    def scores(self, left: Array, right: Array, shape: tuple[int, ...], bias: Array | None) -> Array:
        scores = _product(left, right).reshape(shape)
        return cap_scores(scores if bias is None else scores + bias, self.soft_cap)

    def bias(
        self, visible: "_VisibleKeys", query_start: Any, query_tile: int, key_start: Any, key_tile: int
    ) -> Array | None:
        """Return the ALiBi biases of a tile: [batch, kv_heads, queries_per_kv, queries, keys]."""
        if self.alibi is None or visible.slopes is None or visible.query_positions is None:
            return None
        query_positions = _slice(visible.query_positions, query_start, query_tile, 1)[:, None, None, :, None]
        key_positions = _slice(visible.key_positions, key_start, key_tile, 1)[:, None, None, None]
        return self.alibi.bias(visible.slopes[None, :, :, None, None], query_positions, key_positions)


class _VisibleKeys(NamedTuple):
    """Description of the keys that each query sees.

    These are selected keys of the query's segment, at positions from `first` to `last`, both included.

    - `selected`: a mask, or packed bits; `bit_indices` then holds the index of each key's bit.
    - `key_tiles`: for each query tile the range (start, end) of key tiles that its queries may see.
    - `slopes`, `query_positions`: for ALiBi; slopes are [kv_heads, queries_per_kv].
    """

    first: Array
    last: Array
    key_positions: Array
    query_segments: Array | None
    key_segments: Array | None
    selected: Array | None = None
    bit_indices: Array | None = None
    key_tiles: tuple[Array, Array] | None = None
    slopes: Array | None = None
    query_positions: Array | None = None

    def mask(self, query_start: Any, query_tile: int, key_start: Any, key_tile: int) -> Array:
        """Return the mask of a tile: [batch, kv_heads or 1, queries_per_kv or 1, queries, keys]."""

        def per_query(x: Array) -> Array:
            return _slice(x, query_start, query_tile, 1)[:, None, None, :, None]

        def per_key(x: Array) -> Array:
            return _slice(x, key_start, key_tile, 1)[:, None, None, None, :]

        position = per_key(self.key_positions)
        mask = (position >= per_query(self.first)) & (position <= per_query(self.last))
        if self.query_segments is not None and self.key_segments is not None:
            mask &= per_query(self.query_segments) == per_key(self.key_segments)
        if self.selected is not None:
            selected = _slice(self.selected, query_start, query_tile, 3)
            if self.bit_indices is None:
                mask &= _slice(selected, key_start, key_tile, 4)
            else:
                mask &= unpack_bits(selected, _slice(self.bit_indices, key_start, key_tile, 1))
        return mask


def _pad(x: Array, axis: int, multiple: int, value: int) -> Array:
    """Pad an axis to a multiple of `multiple`, and at least to `multiple`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, max(multiple - x.shape[axis], -x.shape[axis] % multiple))
    return jnp.pad(x, widths, constant_values=value)


def _slice(x: Array, start: Any, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(x: Array, part: Array, start: Any) -> Array:
    """Return `x` with `part` added to `x[:, :, start : start + part.shape[2]]`."""
    return jax.lax.dynamic_update_slice_in_dim(x, _slice(x, start, part.shape[2], 2) + part, start, 2)


def _product(left: Array, right: Array) -> Array:
    """Multiply [b, n, i, j] x [b, n, j, k] -> [b, n, i, k], accumulated in float32."""
    return jnp.einsum("bnij,bnjk->bnik", left, right, preferred_element_type=jnp.float32)


def _split_heads(x: Array, queries_per_kv: int) -> Array:
    """Transpose [batch, length, heads, d] -> [batch, kv_heads, queries_per_kv, length, d]."""
    batch, length, heads, dim = x.shape
    return x.reshape(batch, length, heads // queries_per_kv, queries_per_kv, dim).transpose(0, 2, 3, 1, 4)


def _join_heads(x: Array) -> Array:
    """Transpose [batch, kv_heads, queries_per_kv, length, d] -> [batch, length, heads, d]."""
    batch, kv_heads, queries_per_kv, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * queries_per_kv, dim)


def _join_tiles(x: Array) -> Array:
    """Join tiles of queries: [tiles, batch, kv_heads, queries_per_kv, tile, d] -> [..., length, d]."""
    return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, x.shape[5])


def _forward(plan: _TilePlan, query: Array, key: Array, value: Array, visible: _VisibleKeys) -> tuple[Array, Array]:
    length, dim = query.shape[1], value.shape[3]
    query = _split_heads(query, query.shape[2] // key.shape[2])
    key_t, value = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)

    def process_queries(_, query_start, query_tile):
        shape = (*query.shape[:3], query_tile)
        tile_query = _slice(query, query_start, query_tile, 3).reshape(*shape[:2], -1, query.shape[4])

        def process_keys(state, key_start, key_tile):
            max_score, total, acc = state
            tile = query_start, query_tile, key_start, key_tile
            bias = plan.bias(visible, *tile)
            scores = plan.scores(tile_query, _slice(key_t, key_start, key_tile, 3), (*shape, key_tile), bias)
            scores = jnp.where(plan.compute_once(visible.mask(*tile)), scores, -jnp.inf)
            new_max = jnp.maximum(max_score, scores.max(-1, keepdims=True, initial=EMPTY))
            rescale, weights = jnp.exp(max_score - new_max), jnp.exp(scores - new_max)
            flat = weights.astype(value.dtype).reshape(*tile_query.shape[:3], key_tile)
            part = _product(flat, _slice(value, key_start, key_tile, 2)).reshape(*shape, dim)
            return new_max, total * rescale + weights.sum(-1, keepdims=True), acc * rescale + part

        zero = jnp.zeros((*shape, 1), jnp.float32)
        start = (zero + EMPTY, zero, jnp.zeros((*shape, dim), jnp.float32))
        max_score, total, acc = plan.fold_keys(process_keys, start, query_start, query_tile, visible)
        safe_total = jnp.where(total > 0, total, 1.0)
        out = (acc / safe_total).astype(query.dtype)
        return None, (out, jnp.where(total > 0, max_score + jnp.log(safe_total), EMPTY))

    out, lse = plan.fold_queries(process_queries, None, length)[1]
    return _join_heads(out), _join_heads(lse)[..., 0]


def _backward(
    plan: _TilePlan, query: Array, key: Array, value: Array, visible: _VisibleKeys, cotangents: Cotangents
) -> Gradients:
    """Compute gradients, recomputing the attention weights P of each tile from lse.

    With D = delta:  dV = P dO,  dS = P * (V dO' - D),  dK = dS Q,  dQ' = K' dS. Tiles are [keys, queries], so that no
    product has to transpose a tile.
    """
    length = query.shape[1]
    queries_per_kv = query.shape[2] // key.shape[2]
    query = _split_heads(query, queries_per_kv)
    out_bar = _split_heads(cotangents.out_bar.astype(value.dtype), queries_per_kv)
    lse, delta = (
        _split_heads(x[..., None], queries_per_kv).transpose(0, 1, 4, 2, 3) for x in (cotangents.lse, cotangents.delta)
    )
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    key_t = key.swapaxes(2, 3)

    def process_queries(carry, query_start, query_tile):
        batch, kv_heads, _, _, dim = query.shape
        slices = [_slice(x, query_start, query_tile, 3) for x in (query, out_bar)]
        tile_query, tile_out_bar = (x.reshape(batch, kv_heads, -1, x.shape[4]) for x in slices)
        query_t, out_bar_t = tile_query.swapaxes(2, 3), tile_out_bar.swapaxes(2, 3)
        tile_lse, tile_delta = (_slice(x, query_start, query_tile, 4) for x in (lse, delta))

        def process_keys(state, key_start, key_tile):
            query_bar, key_bar, value_bar = state
            shape = (batch, kv_heads, key_tile, queries_per_kv, query_tile)
            flat_shape = (batch, kv_heads, key_tile, queries_per_kv * query_tile)
            tile = query_start, query_tile, key_start, key_tile
            bias = plan.bias(visible, *tile)
            bias = None if bias is None else bias.transpose(0, 1, 4, 2, 3)
            scores = plan.scores(_slice(key, key_start, key_tile, 2), query_t, shape, bias)
            mask = plan.compute_once(visible.mask(*tile).transpose(0, 1, 4, 2, 3))
            weights = jnp.exp(jnp.where(mask, scores, -jnp.inf) - tile_lse)
            weight_bar = _product(_slice(value, key_start, key_tile, 2), out_bar_t).reshape(shape)
            score_bar = cap_gradient(weights * (weight_bar - tile_delta), scores, plan.soft_cap)
            weights = weights.astype(value.dtype).reshape(flat_shape)
            score_bar = score_bar.astype(key.dtype).reshape(flat_shape)
            query_bar += _product(_slice(key_t, key_start, key_tile, 3), score_bar)
            return (
                query_bar,
                _add(key_bar, _product(score_bar, tile_query), key_start),
                _add(value_bar, _product(weights, tile_out_bar), key_start),
            )

        start = jnp.zeros((batch, kv_heads, dim, queries_per_kv * query_tile), jnp.float32)
        query_bar, *carry = plan.fold_keys(process_keys, (start, *carry), query_start, query_tile, visible)
        query_bar = query_bar.reshape(batch, kv_heads, dim, queries_per_kv, query_tile)
        return tuple(carry), query_bar.transpose(0, 1, 3, 4, 2)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    (key_bar, value_bar), query_bar = plan.fold_queries(process_queries, zeros, length)
    return _join_heads(query_bar), key_bar.swapaxes(1, 2), value_bar.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _TilePlan, query: Array, key: Array, value: Array, visible: _VisibleKeys) -> tuple[Array, Array]:
    return _forward(plan, query, key, value, visible)


def _attend_fwd(plan: _TilePlan, query: Array, key: Array, value: Array, visible: _VisibleKeys):
    out, lse = (checkpoint_name(x, "context") for x in _forward(plan, query, key, value, visible))
    return (out, lse), (query, key, value, visible, out, lse)


def _attend_bwd(plan: _TilePlan, residuals: tuple, bars: tuple):
    query, key, value, visible, out, lse = residuals
    grads = _backward(plan, query, key, value, visible, make_cotangents((out, lse), bars))
    query_bar, key_bar, value_bar = (grad.astype(x.dtype) for grad, x in zip(grads, residuals[:3], strict=True))
    return query_bar, key_bar, value_bar, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _tile_sizes(backend: Backend, dtype: Any, length: int, kv_length: int) -> tuple[int, int | None]:
    """Return the query tile and the key tile; a key tile of None unrolls the loop over query tiles."""
    max_query_tile, max_key_tile = backend.attention_tiles
    unrolled = dtype == jnp.float32 and max(length, kv_length) <= backend.max_unrolled_attention
    return _even_tile(length, max_query_tile), None if unrolled else _even_tile(kv_length, max_key_tile)


def _even_tile(length: int, max_tile: int) -> int:
    """Return the size of equal tiles, as few as `max_tile` allows, rounded up to a multiple of 16."""
    size = -(-length // max(1, -(-length // max_tile)))
    return max(1, min(length, -(-size // 16) * 16))


def blockwise(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Compute `attend`. Remat policies that save "context" (out and lse) avoid recomputing the forward pass."""
    query, key, value, *_ = inputs
    length = query.shape[1]
    plan = _plan(call)
    visible = _visible_keys(plan, inputs)
    query, key, value = plan.pad_queries(query), plan.pad_keys(key), plan.pad_keys(value)
    results: Any = _attend(plan, query, key, value, visible)
    out, lse = results
    return out[:, :length], lse[:, :length]


def blockwise_gradients(inputs: AttentionInputs, call: AttentionCall, cotangents: Cotangents) -> Gradients:
    """Compute `attend_gradients`."""
    query, key, value, *_ = inputs
    length, kv_length = query.shape[1], key.shape[1]
    plan = _plan(call)
    visible = _visible_keys(plan, inputs)
    query, key, value = plan.pad_queries(query), plan.pad_keys(key), plan.pad_keys(value)
    cotangents = Cotangents(*map(plan.pad_queries, cotangents))
    query_bar, key_bar, value_bar = _backward(plan, query, key, value, visible, cotangents)
    return query_bar[:, :length], key_bar[:, :kv_length], value_bar[:, :kv_length]


def may_see(mask: Mask, positions: AttentionPositions) -> Bool[Array, ""]:
    """Return whether any query may see any key; False is certain, True is an upper bound.

    The bound compares the range of visible positions of all queries with the range of key positions.
    """
    first, last = interval(mask, positions.query_positions, positions.query_spans)
    visible = _VisibleKeys(first, last, positions.key_positions, positions.query_segments, positions.key_segments)
    starts, ends = _key_tile_ranges(visible, positions.query_positions.shape[1], positions.key_positions.shape[1])
    return jnp.any(starts < ends)


def blockwise_max(inputs: AttentionInputs, call: AttentionCall) -> Float32[Array, "batch heads"]:
    """Return the largest score of each sequence and head; EMPTY if there is none."""
    query, key, *_ = inputs
    plan = _plan(call)
    visible = _visible_keys(plan, inputs)
    query, key = plan.pad_queries(query), plan.pad_keys(key)
    query = _split_heads(query, query.shape[2] // key.shape[2])
    key_t = key.transpose(0, 2, 3, 1)

    def process_queries(max_score, query_start, query_tile):
        shape = (*query.shape[:3], query_tile)
        tile_query = _slice(query, query_start, query_tile, 3).reshape(*shape[:2], -1, query.shape[4])

        def process_keys(max_score, key_start, key_tile):
            tile = query_start, query_tile, key_start, key_tile
            bias = plan.bias(visible, *tile)
            scores = plan.scores(tile_query, _slice(key_t, key_start, key_tile, 3), (*shape, key_tile), bias)
            scores = jnp.where(visible.mask(*tile), scores, EMPTY)
            return jnp.maximum(max_score, scores.max((-2, -1), initial=EMPTY))

        return plan.fold_keys(process_keys, max_score, query_start, query_tile, visible), ()

    start = jnp.full(query.shape[:3], EMPTY, jnp.float32)
    max_score, _ = plan.fold_queries(process_queries, start, query.shape[3])
    return max_score.reshape(max_score.shape[0], -1)


def _plan(call: AttentionCall) -> _TilePlan:
    query_tile, key_tile = _tile_sizes(call.backend, call.dtypes[0], call.length, call.kv_length)
    return _TilePlan(
        mask=call.mask,
        soft_cap=call.soft_cap,
        alibi=call.alibi,
        aligned=call.aligned,
        spans=call.spans,
        materializes_masks=call.backend.materializes_masks,
        query_tile=query_tile,
        key_tile=key_tile,
    )


def _visible_keys(plan: _TilePlan, inputs: AttentionInputs) -> _VisibleKeys:
    """Return the visible keys of each query, padded like queries and keys."""
    positions, selected, slopes = inputs.positions, inputs.selected, inputs.slopes
    query_segments, key_segments = positions.query_segments, positions.key_segments
    bit_indices = None
    first, last = interval(plan.mask, positions.query_positions, positions.query_spans)
    if selected is not None:
        heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
        if isinstance(selected, Selection):
            bit_indices = plan.pad_keys(selected.bit_indices(inputs.key.shape[1]), value=-1)
            selected = selected.words
        split = (1, 1) if selected.shape[1] == 1 else (kv_heads, heads // kv_heads)
        selected = plan.pad_queries(selected.reshape(selected.shape[0], *split, *selected.shape[2:]), axis=3)
        selected = plan.pad_keys(selected, axis=4) if bit_indices is None else selected
    visible = _VisibleKeys(
        first=plan.pad_queries(first),
        last=plan.pad_queries(last, value=-1),
        key_positions=plan.pad_keys(positions.key_positions, value=-1),
        query_segments=None if query_segments is None else plan.pad_queries(query_segments),
        key_segments=None if key_segments is None else plan.pad_keys(key_segments),
        selected=selected,
        bit_indices=bit_indices,
        slopes=None if slopes is None else slopes.reshape(inputs.key.shape[2], -1),
        query_positions=None if slopes is None else plan.pad_queries(positions.query_positions),
    )
    if plan.key_tile is None:
        return visible
    return visible._replace(key_tiles=_key_tile_ranges(visible, plan.query_tile, plan.key_tile))


def _key_tile_ranges(visible: _VisibleKeys, query_tile: int, key_tile: int) -> tuple[Array, Array]:
    """Return, for each query tile, the range (start, end) of key tiles that its queries may see.

    Pairs (segment, position) are compared in lexicographic order. A query of one tile can see a key of another only if
    the smallest first visible pair of the queries is at most the largest pair of the keys, and the largest last visible
    pair is at least the smallest pair of the keys. Queries and keys may be in any order; the closer they are to the
    order of pairs, the smaller the ranges.
    """
    sees_any, is_token = visible.first <= visible.last, visible.key_positions >= 0
    low, _ = _extreme_pairs(sees_any, visible.query_segments, visible.first, query_tile)
    _, high = _extreme_pairs(sees_any, visible.query_segments, visible.last, query_tile)
    smallest_key, largest_key = _extreme_pairs(is_token, visible.key_segments, visible.key_positions, key_tile)
    # [batch, query tiles, key tiles]
    may_see = _less_or_equal(low, largest_key) & _less_or_equal(smallest_key, high).swapaxes(1, 2)
    may_see, count = jnp.any(may_see, axis=0), may_see.shape[2]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    starts = jnp.min(jnp.where(may_see, index, count), axis=1, initial=count)
    return starts, jnp.max(jnp.where(may_see, index + 1, 0), axis=1, initial=0)


_Pair = tuple[Array, Array]  # (segment, position), each [batch, tiles]


def _extreme_pairs(valid: Array, segments: Array | None, positions: Array, tile: int) -> tuple[_Pair, _Pair]:
    """Return the smallest and the largest pair (segment, position) among the valid tokens of each tile.

    For a tile without valid tokens, the smallest pair is larger than all pairs, and the largest is smaller than all.
    """
    segments = jnp.zeros_like(positions) if segments is None else segments
    valid, segments, positions = (x.reshape(x.shape[0], -1, tile) for x in (valid, segments, positions))

    def smallest(segments: Array, positions: Array) -> _Pair:
        max_int = jnp.iinfo(positions.dtype).max
        segment = jnp.min(jnp.where(valid, segments, max_int), axis=2)
        return segment, jnp.min(jnp.where(valid & (segments == segment[..., None]), positions, max_int), axis=2)

    segment, position = smallest(-segments, -positions)
    return smallest(segments, positions), (-segment, -position)


def _less_or_equal(left: _Pair, right: _Pair) -> Array:
    """Return whether left <= right in lexicographic order: [batch, left tiles, right tiles]."""
    segment, position = (x[:, :, None] for x in left)
    other_segment, other_position = (x[:, None] for x in right)
    return (segment < other_segment) | ((segment == other_segment) & (position <= other_position))
