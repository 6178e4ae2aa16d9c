"""Attention block by block: blocks of queries against blocks of keys with a running softmax.

Rabe & Staats (2021); Dao et al. (2022). Neither values nor gradients hold more than a tile of scores and arrays of
the arguments' size. Past 512 positions the blocks are loops, so the program does not grow either.
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
    cap_scores,
    cap_slopes,
    make_cotangents,
)
from eqx_decoders.layers.attention.kernels.selection import Selection, spread
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Mask, interval
from eqx_decoders.sharding.backend import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ChunkPlan:
    """Static description of one call."""

    mask: Mask
    soft_cap: float | None
    alibi: Alibi | None
    aligned: bool
    spans: bool
    keeps_masks: bool
    block: int
    kv_block: int | None  # None: each block of queries takes all its keys at once, and the blocks are written out

    @property
    def looks_ahead(self) -> bool:
        """True if a query may see keys that stand behind it in the row, as far as the compiled program can know."""
        return not self.aligned or self.spans or isinstance(self.mask, Bidirectional)

    def fill_queries(self, x: Array, axis: int = 1, value: int = 0) -> Array:
        """Pad to whole blocks of queries where these are a loop."""
        return x if self.kv_block is None else _fill(x, axis, self.block, value)

    def fill_keys(self, x: Array, axis: int = 1, value: int = 0) -> Array:
        """Pad to whole blocks of keys where these are a loop."""
        return x if self.kv_block is None else _fill(x, axis, self.kv_block, value)

    def over_keys(self, step: Callable, carry: Any, at: Any, queries: int, seen: "_Seen") -> Any:
        """Fold `step(carry, at_key, keys)` over the blocks of keys that the queries [at, at + queries) may see."""
        if self.kv_block is None or seen.reach is None:
            kv_length = seen.key_positions.shape[1]
            return step(carry, 0, kv_length if self.looks_ahead else min(at + queries, kv_length))
        size, (start, end) = self.kv_block, (bound[at // self.block] for bound in seen.reach)
        return jax.lax.fori_loop(start, end, lambda i, carry: step(carry, i * size, size), carry)

    def over_queries(self, row: Callable, carry: Any, length: int) -> tuple[Any, Any]:
        """Fold `row(carry, at, queries) -> (carry, results)` over the blocks of queries; join the results on axis 3."""
        if self.kv_block is not None:
            starts = jnp.arange(0, length, self.block)
            carry, results = jax.lax.scan(lambda carry, at: row(carry, at, self.block), carry, starts)
            return carry, jax.tree.map(_join_blocks, results)
        blocks = []
        for at in range(0, length, self.block):
            carry, results = row(carry, at, min(self.block, length - at))
            blocks.append(results)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, 3), *blocks)

    def once(self, x: Array) -> Array:
        """Keep a compiler that would from computing `x`, a mask for all heads, again for each head."""
        return jax.lax.optimization_barrier(x) if self.keeps_masks else x

    def scores(self, left: Array, right: Array, shape: tuple[int, ...], bias: Array | None) -> Array:
        scores = _product(left, right).reshape(shape)
        return cap_scores(scores if bias is None else scores + bias, self.soft_cap)

    def bias(self, seen: "_Seen", at: Any, queries: int, at_key: Any, keys: int) -> Array | None:
        """Return the linear biases of a tile: [batch, kv_heads, groups, queries, keys]."""
        if self.alibi is None or seen.slopes is None or seen.query_positions is None:
            return None
        of_query = _cut(seen.query_positions, at, queries, 1)[:, None, None, :, None]
        of_key = _cut(seen.key_positions, at_key, keys, 1)[:, None, None, None]
        return self.alibi.bias(seen.slopes[None, :, :, None, None], of_query, of_key)


class _Seen(NamedTuple):
    """Visible keys of each query: at positions in [first, last], of its own segment, and selected.

    - `selected`: a mask, or words that have bits at the `places` of keys.
    - `reach`: for each block of queries the first block of keys that one of them may see, and the end of the last.
    - `slopes`, `query_positions`: of linear biases; slopes are [kv_heads, groups].
    """

    first: Array
    last: Array
    key_positions: Array
    query_segments: Array | None
    key_segments: Array | None
    selected: Array | None = None
    places: Array | None = None
    reach: tuple[Array, Array] | None = None
    slopes: Array | None = None
    query_positions: Array | None = None

    def tile(self, at: Any, queries: int, at_key: Any, keys: int) -> Array:
        """Return the mask of a tile: [batch, kv_heads or 1, groups or 1, queries, keys]."""

        def of_query(x: Array) -> Array:
            return _cut(x, at, queries, 1)[:, None, None, :, None]

        def of_key(x: Array) -> Array:
            return _cut(x, at_key, keys, 1)[:, None, None, None, :]

        place = of_key(self.key_positions)
        seen = (place >= of_query(self.first)) & (place <= of_query(self.last))
        if self.query_segments is not None and self.key_segments is not None:
            seen &= of_query(self.query_segments) == of_key(self.key_segments)
        if self.selected is not None:
            chosen = _cut(self.selected, at, queries, 3)
            if self.places is None:
                seen &= _cut(chosen, at_key, keys, 4)
            else:
                seen &= spread(chosen, _cut(self.places, at_key, keys, 1))
        return seen


def _fill(x: Array, axis: int, block: int, value: int) -> Array:
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, more, constant_values=value)


def _cut(x: Array, start: Any, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(x: Array, part: Array, start: Any) -> Array:
    """Compute x[:, :, start:...] += part."""
    return jax.lax.dynamic_update_slice_in_dim(x, _cut(x, start, part.shape[2], 2) + part, start, 2)


def _product(left: Array, right: Array) -> Array:
    """Multiply [b, n, i, j] x [b, n, j, k] -> [b, n, i, k] in f32."""
    return jnp.einsum("bnij,bnjk->bnik", left, right, preferred_element_type=jnp.float32)


def _split_heads(x: Array, groups: int) -> Array:
    """Transpose [batch, length, heads, d] -> [batch, kv_heads, groups, length, d]."""
    batch, length, heads, dim = x.shape
    return x.reshape(batch, length, heads // groups, groups, dim).transpose(0, 2, 3, 1, 4)


def _join_heads(x: Array) -> Array:
    """Transpose [batch, kv_heads, groups, length, d] -> [batch, length, heads, d]."""
    batch, kv_heads, groups, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, dim)


def _join_blocks(x: Array) -> Array:
    """Transpose [blocks, batch, kv_heads, groups, queries, d] -> [batch, kv_heads, groups, length, d]."""
    return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, x.shape[5])


def _forward(plan: _ChunkPlan, query: Array, key: Array, value: Array, seen: _Seen) -> tuple[Array, Array]:
    length, dim = query.shape[1], value.shape[3]
    query = _split_heads(query, query.shape[2] // key.shape[2])
    key_t, value = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)

    def row(_, at, queries):
        shape = (*query.shape[:3], queries)
        block = _cut(query, at, queries, 3).reshape(*shape[:2], -1, query.shape[4])

        def step(state, at_key, keys):
            top, total, sums = state
            bias = plan.bias(seen, at, queries, at_key, keys)
            scores = plan.scores(block, _cut(key_t, at_key, keys, 3), (*shape, keys), bias)
            scores = jnp.where(plan.once(seen.tile(at, queries, at_key, keys)), scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1, keepdims=True, initial=EMPTY))
            fade, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
            flat = weights.astype(value.dtype).reshape(*block.shape[:3], keys)
            part = _product(flat, _cut(value, at_key, keys, 2)).reshape(*shape, dim)
            return new_top, total * fade + weights.sum(-1, keepdims=True), sums * fade + part

        zero = jnp.zeros((*shape, 1), jnp.float32)
        start = (zero + EMPTY, zero, jnp.zeros((*shape, dim), jnp.float32))
        top, total, sums = plan.over_keys(step, start, at, queries, seen)
        safe = jnp.where(total > 0, total, 1.0)
        return None, ((sums / safe).astype(query.dtype), jnp.where(total > 0, top + jnp.log(safe), EMPTY))

    out, lse = plan.over_queries(row, None, length)[1]
    return _join_heads(out), _join_heads(lse)[..., 0]


def _backward(
    plan: _ChunkPlan, query: Array, key: Array, value: Array, seen: _Seen, cotangents: Cotangents
) -> Gradients:
    """Recompute each tile's weights P from lse, keys first: no product then has to transpose a tile.

    With D = delta:  dV = P dO,  dS = P * (V dO' - D),  dK = dS Q,  dQ' = K' dS.
    """
    length, groups = query.shape[1], query.shape[2] // key.shape[2]
    query, out_bar = _split_heads(query, groups), _split_heads(cotangents.out_bar.astype(value.dtype), groups)
    lse, delta = (
        _split_heads(x[..., None], groups).transpose(0, 1, 4, 2, 3) for x in (cotangents.lse, cotangents.delta)
    )
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    key_t = key.swapaxes(2, 3)

    def row(carry, at, queries):
        batch, kv_heads, _, _, dim = query.shape
        blocks = [_cut(x, at, queries, 3) for x in (query, out_bar)]
        query_b, out_b = (x.reshape(batch, kv_heads, -1, x.shape[4]) for x in blocks)
        query_t, out_t = query_b.swapaxes(2, 3), out_b.swapaxes(2, 3)
        lse_b, delta_b = (_cut(x, at, queries, 4) for x in (lse, delta))

        def step(state, at_key, keys):
            query_bar, key_bar, value_bar = state
            shape, flat = (batch, kv_heads, keys, groups, queries), (batch, kv_heads, keys, groups * queries)
            bias = plan.bias(seen, at, queries, at_key, keys)
            bias = None if bias is None else bias.transpose(0, 1, 4, 2, 3)
            scores = plan.scores(_cut(key, at_key, keys, 2), query_t, shape, bias)
            tile = plan.once(seen.tile(at, queries, at_key, keys).transpose(0, 1, 4, 2, 3))
            weights = jnp.exp(jnp.where(tile, scores, -jnp.inf) - lse_b)
            slope = weights * (_product(_cut(value, at_key, keys, 2), out_t).reshape(shape) - delta_b)
            slope = cap_slopes(slope, scores, plan.soft_cap)
            weights, slope = weights.astype(value.dtype).reshape(flat), slope.astype(key.dtype).reshape(flat)
            query_bar += _product(_cut(key_t, at_key, keys, 3), slope)
            return (
                query_bar,
                _add(key_bar, _product(slope, query_b), at_key),
                _add(value_bar, _product(weights, out_b), at_key),
            )

        start = jnp.zeros((batch, kv_heads, dim, groups * queries), jnp.float32)
        query_bar, *carry = plan.over_keys(step, (start, *carry), at, queries, seen)
        return tuple(carry), query_bar.reshape(batch, kv_heads, dim, groups, queries).transpose(0, 1, 3, 4, 2)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    (key_bar, value_bar), query_bar = plan.over_queries(row, zeros, length)
    return _join_heads(query_bar), key_bar.swapaxes(1, 2), value_bar.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(plan: _ChunkPlan, query: Array, key: Array, value: Array, seen: _Seen) -> tuple[Array, Array]:
    return _forward(plan, query, key, value, seen)


def _softmax_fwd(plan: _ChunkPlan, query: Array, key: Array, value: Array, seen: _Seen):
    out, lse = (checkpoint_name(x, "context") for x in _forward(plan, query, key, value, seen))
    return (out, lse), (query, key, value, seen, out, lse)


def _softmax_bwd(plan: _ChunkPlan, residuals: tuple, bars: tuple):
    query, key, value, seen, out, lse = residuals
    grads = _backward(plan, query, key, value, seen, make_cotangents((out, lse), bars))
    query_bar, key_bar, value_bar = (grad.astype(x.dtype) for grad, x in zip(grads, residuals[:3], strict=True))
    return query_bar, key_bar, value_bar, None


_softmax.defvjp(_softmax_fwd, _softmax_bwd)


def _blocks(backend: Backend, dtype: Any, length: int, kv_length: int) -> tuple[int, int | None]:
    """Return the sizes of blocks of queries and keys."""
    most, kv_most = backend.attention_blocks
    short = dtype == jnp.float32 and max(length, kv_length) <= backend.unrolled_attention
    return _even(length, most), None if short else _even(kv_length, kv_most)


def _even(length: int, most: int) -> int:
    """Return the size of the fewest equal blocks of at most `most`, in steps of 16, that hold `length`."""
    size = -(-length // max(1, -(-length // most)))
    return max(1, min(length, -(-size // 16) * 16))


def blockwise(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Attend as `attend` defines it. Under remat, saving "context" (out and lse) saves the whole forward pass."""
    query, key, value, *_ = inputs
    length = query.shape[1]
    plan = _plan(call)
    seen = _seen(plan, inputs)
    query, key, value = plan.fill_queries(query), plan.fill_keys(key), plan.fill_keys(value)
    results: Any = _softmax(plan, query, key, value, seen)
    out, lse = results
    return out[:, :length], lse[:, :length]


def blockwise_gradients(inputs: AttentionInputs, call: AttentionCall, cotangents: Cotangents) -> Gradients:
    """Compute gradients as `attend_gradients` defines them."""
    query, key, value, *_ = inputs
    length, kv_length = query.shape[1], key.shape[1]
    plan = _plan(call)
    seen = _seen(plan, inputs)
    query, key, value = plan.fill_queries(query), plan.fill_keys(key), plan.fill_keys(value)
    cotangents = Cotangents(*map(plan.fill_queries, cotangents))
    query_bar, key_bar, value_bar = _backward(plan, query, key, value, seen, cotangents)
    return query_bar[:, :length], key_bar[:, :kv_length], value_bar[:, :kv_length]


def may_see(mask: Mask, positions: AttentionPositions) -> Bool[Array, ""]:
    """Return whether a query may see a key, from the extremes of visible intervals and of key positions."""
    first, last = interval(mask, positions.query_positions, positions.query_spans)
    seen = _Seen(first, last, positions.key_positions, positions.query_segments, positions.key_segments)
    starts, ends = _reach(seen, positions.query_positions.shape[1], positions.key_positions.shape[1])
    return jnp.any(starts < ends)


def blockwise_max(inputs: AttentionInputs, call: AttentionCall) -> Float32[Array, "batch heads"]:
    """Return the largest score of each row and head, EMPTY where there is none."""
    query, key, *_ = inputs
    plan = _plan(call)
    seen = _seen(plan, inputs)
    query, key = plan.fill_queries(query), plan.fill_keys(key)
    query = _split_heads(query, query.shape[2] // key.shape[2])
    key_t = key.transpose(0, 2, 3, 1)

    def row(top, at, queries):
        shape = (*query.shape[:3], queries)
        block = _cut(query, at, queries, 3).reshape(*shape[:2], -1, query.shape[4])

        def step(top, at_key, keys):
            bias = plan.bias(seen, at, queries, at_key, keys)
            scores = plan.scores(block, _cut(key_t, at_key, keys, 3), (*shape, keys), bias)
            scores = jnp.where(seen.tile(at, queries, at_key, keys), scores, EMPTY)
            return jnp.maximum(top, scores.max((-2, -1), initial=EMPTY))

        return plan.over_keys(step, top, at, queries, seen), ()

    top, _ = plan.over_queries(row, jnp.full(query.shape[:3], EMPTY, jnp.float32), query.shape[3])
    return top.reshape(top.shape[0], -1)


def _plan(call: AttentionCall) -> _ChunkPlan:
    block, kv_block = _blocks(call.backend, call.dtypes[0], call.length, call.kv_length)
    return _ChunkPlan(
        mask=call.mask,
        soft_cap=call.soft_cap,
        alibi=call.alibi,
        aligned=call.aligned,
        spans=call.spans,
        keeps_masks=call.backend.keeps_masks,
        block=block,
        kv_block=kv_block,
    )


def _seen(plan: _ChunkPlan, inputs: AttentionInputs) -> _Seen:
    """Return the visible keys of each query, padded like queries and keys."""
    positions, selected, places = inputs.positions, inputs.selected, None
    first, last = interval(plan.mask, positions.query_positions, positions.query_spans)
    if selected is not None:
        heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
        if isinstance(selected, Selection):
            selected, places = selected.words, plan.fill_keys(selected.places(inputs.key.shape[1]), value=-1)
        split = (1, 1) if selected.shape[1] == 1 else (kv_heads, heads // kv_heads)
        selected = plan.fill_queries(selected.reshape(selected.shape[0], *split, *selected.shape[2:]), axis=3)
        selected = plan.fill_keys(selected, axis=4) if places is None else selected
    segments, slopes = (positions.query_segments, positions.key_segments), inputs.slopes
    seen = _Seen(
        first=plan.fill_queries(first),
        last=plan.fill_queries(last, value=-1),
        key_positions=plan.fill_keys(positions.key_positions, value=-1),
        query_segments=None if segments[0] is None else plan.fill_queries(segments[0]),
        key_segments=None if segments[1] is None else plan.fill_keys(segments[1]),
        selected=selected,
        places=places,
        slopes=None if slopes is None else slopes.reshape(inputs.key.shape[2], -1),
        query_positions=None if slopes is None else plan.fill_queries(positions.query_positions),
    )
    return seen if plan.kv_block is None else seen._replace(reach=_reach(seen, plan.block, plan.kv_block))


def _reach(seen: _Seen, block: int, kv_block: int) -> tuple[Array, Array]:
    """Return, for each block of queries, the first block of keys that one of them may see, and the end of the last.

    Pairs (segment, position) are compared: some query of a block may see a key of another only if it looks no farther
    back than the block's last pair, and no less far ahead than its first. So queries and keys may stand in any order;
    the closer to the order of pairs, the fewer blocks.
    """
    queries, keys = seen.first <= seen.last, seen.key_positions >= 0
    low, _ = _ends(queries, seen.query_segments, seen.first, block)
    _, high = _ends(queries, seen.query_segments, seen.last, block)
    first, last = _ends(keys, seen.key_segments, seen.key_positions, kv_block)
    meets = _not_after(low, last) & _not_after(first, high).swapaxes(1, 2)  # [batch, blocks, kv_blocks]
    meets, count = jnp.any(meets, axis=0), meets.shape[2]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    starts = jnp.min(jnp.where(meets, index, count), axis=1, initial=count)
    return starts, jnp.max(jnp.where(meets, index + 1, 0), axis=1, initial=0)


_Pair = tuple[Array, Array]  # [batch, blocks]: segment and position


def _ends(real: Array, segments: Array | None, positions: Array, size: int) -> tuple[_Pair, _Pair]:
    """Return the least and the greatest pair (segment, position) among the real tokens of each block.

    In a block without any, the first is above the second, and above all others.
    """
    segments = jnp.zeros_like(positions) if segments is None else segments
    real, segments, positions = (x.reshape(x.shape[0], -1, size) for x in (real, segments, positions))

    def least(segments: Array, positions: Array) -> _Pair:
        most = jnp.iinfo(positions.dtype).max
        segment = jnp.min(jnp.where(real, segments, most), axis=2)
        return segment, jnp.min(jnp.where(real & (segments == segment[..., None]), positions, most), axis=2)

    segment, position = least(-segments, -positions)
    return least(segments, positions), (-segment, -position)


def _not_after(one: _Pair, other: _Pair) -> Array:
    """Return whether one block's pair comes before another's, or equals it: [batch, blocks, other blocks]."""
    (segment, position), (other_segment, other_position) = ([x[:, :, None] for x in one], [x[:, None] for x in other])
    return (segment < other_segment) | ((segment == other_segment) & (position <= other_position))
