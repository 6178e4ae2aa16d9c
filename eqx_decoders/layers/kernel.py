"""Attention kernels: one signature, a registry, and two of them in plain JAX.

For each query with scaled scores s_j = q . k_j over the keys that it sees,

    out = sum_j exp(s_j - lse) v_j,    lse = log sum_j exp(s_j).

Both come back, so that partial results over different keys (a cached past and the present) can be merged, and sinks
added, outside. Scores, soft cap and softmax are in f32. A query that sees nothing has out = 0 and lse = EMPTY.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.errors import check, check_number, check_word
from eqx_decoders.layers.mask import Bidirectional, Mask, check_segments, contiguous, interval, lookback, visible


EMPTY = -1e30  # lse of a query that sees nothing: finite, so that differences and gradients stay finite

Result = tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]


# --- results over different keys ---


def merge(parts: Sequence[Result]) -> Result:
    """Join results of the same queries over disjoint keys: out = sum_i out_i exp(lse_i - lse), lse = logsumexp_i lse_i.

    Flash decoding's rule (Dao et al., 2023). Parts in which a query sees nothing count for nothing; f32 inside.
    """
    check(len(parts) > 0, "parts=[] must hold at least one (out, lse).")
    logs = jnp.stack([lse for _, lse in parts])
    weights = jax.nn.softmax(logs, axis=0)[..., None]
    outs = jnp.stack([out.astype(jnp.float32) for out, _ in parts])
    return (weights * outs).sum(0).astype(parts[0][0].dtype), jax.nn.logsumexp(logs, axis=0)


def with_sink(
    out: Float[Array, "batch length heads value_dim"],
    lse: Float32[Array, "batch length heads"],
    sink: Float[Array, "heads"],
) -> Float[Array, "batch length heads value_dim"]:
    """A learned logit per head that takes part in the softmax and has no value: out * sigmoid(lse - sink)."""
    share = jax.nn.sigmoid(lse - sink.astype(jnp.float32)[None, None, :])
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


# --- the registry ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute attention, and what it can do.

    `function(query, key, value, places, *, mask, soft_cap, aligned, platform) -> (out, lse)` with `attend`'s meaning;
    `places` are the positions and segments.
    """

    name: str
    function: Callable[..., Result]
    masks: tuple[type, ...] = get_args(Mask)
    soft_cap: bool = True
    segments: bool = True
    unequal_value_dim: bool = True
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")

    def lacks(self, mask: Mask, soft_cap: bool, segments: bool, unequal_value_dim: bool, platform: str) -> str | None:
        """The first of these things that this kernel cannot do, in words, or None."""
        if not isinstance(mask, self.masks):
            return f"the mask {mask}"
        wanted = {
            "a soft cap": soft_cap and not self.soft_cap,
            "segments": segments and not self.segments,
            "value_dim unlike head_dim": unequal_value_dim and not self.unequal_value_dim,
            f"the platform {platform!r}": platform not in self.platforms,
        }
        return next((what for what, missing in wanted.items() if missing), None)


class AttentionPositions(NamedTuple):
    """Where queries and keys stand."""

    query_positions: Int[Array, "batch length"]
    key_positions: Int[Array, "batch kv_length"]
    query_segments: Int[Array, "batch length"] | None = None
    key_segments: Int[Array, "batch kv_length"] | None = None


def attend(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    *,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
    soft_cap: float | None = None,
    aligned: bool = False,
    kernel: str = "auto",
    platform: str = "cpu",
) -> tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]:
    """Softmax attention of scaled queries: (out in the query's dtype, log-sum-exp of the scores in f32).

    Query head h uses key head h // (heads // kv_heads). Positions below 0 are no tokens; a query that sees nothing has
    out = 0 and lse = EMPTY. `aligned` is the caller's promise that queries and keys are the same tokens in the same
    order, with positions that increase strictly within a segment: kernels may then skip blocks. `kernel` is a name in
    KERNELS or "auto", which goes by `platform` and the shapes. Raises ConfigError where the kernel cannot do it.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    check(heads % kv_heads == 0, f"heads={heads} must be a multiple of kv_heads={kv_heads}.")
    same = not aligned or query.shape[1] == key.shape[1]
    check(same, f"aligned=True needs as many queries as keys, not {query.shape[1]} and {key.shape[1]}: leave it out.")
    check_segments(query_segments, key_segments)
    if soft_cap is not None:
        check_number("soft_cap", soft_cap, above=0.0)
    needs = (mask, soft_cap is not None, query_segments is not None, key.shape[3] != value.shape[3], platform)
    chosen = _choose(platform, query.shape[1], key.shape[1]) if kernel == "auto" else kernel
    check_word("kernel", chosen, (*KERNELS, "auto"))
    lacking = KERNELS[chosen].lacks(*needs)
    able = ", ".join(name for name, other in KERNELS.items() if other.lacks(*needs) is None)
    check(lacking is None, f"kernel={chosen!r} cannot do {lacking} (mask={mask}). These can: {able}.")
    places = AttentionPositions(query_positions, key_positions, query_segments, key_segments)
    options = {"mask": mask, "soft_cap": soft_cap, "aligned": aligned, "platform": platform}
    return KERNELS[chosen].function(query, key, value, places, **options)


def _choose(platform: str, length: int, kv_length: int) -> str:
    """Blocks pay once the scores of a head are too many to keep."""
    return "chunked" if min(length, kv_length) >= (32 if platform == "cpu" else 512) else "dot"


# --- dot: the plain one ---


def _dot(query, key, value, places, *, mask: Mask, soft_cap: float | None, aligned: bool, platform: str):
    """All scores at once: the definition, and the fastest for a few queries. Memory grows with length x kv_length."""
    seen = visible(mask, *places)[:, None, None]
    groups = query.shape[2] // key.shape[2]
    batch, length, heads, head_dim = query.shape
    split = query.reshape(batch, length, heads // groups, groups, head_dim)
    scores = jnp.einsum("btngd,bsnd->bngts", split, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, _cap(scores, soft_cap), -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=EMPTY))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bngts,bsnv->btngv", (weights / safe).astype(value.dtype), value)
    lse = jnp.where(total > 0, top + jnp.log(safe), EMPTY)
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(batch, length, heads)
    out = out.reshape(batch, length, heads, -1).astype(query.dtype)
    return checkpoint_name(out, "context"), checkpoint_name(lse, "context")


def _cap(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


# --- chunked: blocks, memory linear in length ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is static about one call of the chunked kernel."""

    mask: Mask
    soft_cap: float | None
    aligned: bool
    platform: str
    block: int
    kv_block: int | None  # None: each block of queries takes all its keys at once, and the blocks are written out

    def over_keys(self, step: Callable, carry: Any, at: Any, queries: int, kv_length: int, contiguous: Array) -> Any:
        """Fold `step(carry, at_key, keys)` over the blocks of keys that the queries [at, at + queries) may see.

        None of them stands behind the last query. Before the first one's window stands none either, unless there is
        padding between the tokens of a document: that is known only when the program runs, as a loop's first block.
        """
        bounded = self.aligned and not isinstance(self.mask, Bidirectional)
        if self.kv_block is None:
            return step(carry, 0, min(at + queries, kv_length) if bounded else kv_length)
        size, start, end, back = self.kv_block, 0, kv_length, lookback(self.mask)
        if bounded:
            end = jnp.minimum(at + queries, kv_length)
            start = 0 if back is None else jnp.where(contiguous, jnp.maximum(0, at - back + 1), 0)
        return jax.lax.fori_loop(start // size, -(-end // size), lambda i, carry: step(carry, i * size, size), carry)

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
        """Keep the CPU compiler from computing `x`, a mask for all heads, again for each head."""
        return jax.lax.optimization_barrier(x) if self.platform == "cpu" else x

    def capped(self, left: Array, right: Array, shape: tuple[int, ...]) -> Array:
        return _cap(_product(left, right).reshape(shape), self.soft_cap)


class _Spans(NamedTuple):
    """What each query sees: keys at positions in [first, last] and of its own segment."""

    first: Array
    last: Array
    places: Array
    query_segments: Array | None
    key_segments: Array | None
    contiguous: Array

    def seen(self, at: Any, queries: int, at_key: Any, keys: int, query_axis: int) -> Array:
        """[batch, queries, keys], or [batch, keys, queries] for query_axis = 2."""

        def of_query(x: Array) -> Array:
            return jnp.expand_dims(_cut(x, at, queries, 1), 3 - query_axis)

        def of_key(x: Array) -> Array:
            return jnp.expand_dims(_cut(x, at_key, keys, 1), query_axis)

        place = of_key(self.places)
        seen = (place >= of_query(self.first)) & (place <= of_query(self.last))
        if self.query_segments is not None and self.key_segments is not None:
            seen &= of_query(self.query_segments) == of_key(self.key_segments)
        return seen


def _cut(x: Array, start: Any, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(x: Array, part: Array, start: Any) -> Array:
    """x[:, :, start:...] += part"""
    return jax.lax.dynamic_update_slice_in_dim(x, _cut(x, start, part.shape[2], 2) + part, start, 2)


def _product(left: Array, right: Array) -> Array:
    """[b, n, i, j] x [b, n, j, k] -> [b, n, i, k] in f32."""
    return jnp.einsum("bnij,bnjk->bnik", left, right, preferred_element_type=jnp.float32)


def _split_heads(x: Array, groups: int) -> Array:
    """[batch, length, heads, d] -> [batch, kv_heads, groups, length, d]."""
    batch, length, heads, dim = x.shape
    return x.reshape(batch, length, heads // groups, groups, dim).transpose(0, 2, 3, 1, 4)


def _join_heads(x: Array) -> Array:
    """[batch, kv_heads, groups, length, d] -> [batch, length, heads, d]."""
    batch, kv_heads, groups, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, dim)


def _join_blocks(x: Array) -> Array:
    """[blocks, batch, kv_heads, groups, queries, d] -> [batch, kv_heads, groups, length, d]."""
    return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, x.shape[5])


def _forward(plan: _Plan, query: Array, key: Array, value: Array, spans: _Spans) -> tuple[Array, Array]:
    length, kv_length, dim = query.shape[1], key.shape[1], value.shape[3]
    query = _split_heads(query, query.shape[2] // key.shape[2])
    key_t, value = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)

    def row(_, at, queries):
        shape = (*query.shape[:3], queries)
        block = _cut(query, at, queries, 3).reshape(*shape[:2], -1, query.shape[4])

        def step(state, at_key, keys):
            top, total, sums = state
            seen = plan.once(spans.seen(at, queries, at_key, keys, 1))[:, None, None]
            scores = plan.capped(block, _cut(key_t, at_key, keys, 3), (*shape, keys))
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1, keepdims=True, initial=EMPTY))
            fade, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
            flat = weights.astype(value.dtype).reshape(*block.shape[:3], keys)
            part = _product(flat, _cut(value, at_key, keys, 2)).reshape(*shape, dim)
            return new_top, total * fade + weights.sum(-1, keepdims=True), sums * fade + part

        zero = jnp.zeros((*shape, 1), jnp.float32)
        start = (zero + EMPTY, zero, jnp.zeros((*shape, dim), jnp.float32))
        top, total, sums = plan.over_keys(step, start, at, queries, kv_length, spans.contiguous)
        safe = jnp.where(total > 0, total, 1.0)
        return None, ((sums / safe).astype(query.dtype), jnp.where(total > 0, top + jnp.log(safe), EMPTY))

    out, lse = plan.over_queries(row, None, length)[1]
    return _join_heads(out), _join_heads(lse)[..., 0]


def _backward(plan: _Plan, kept: tuple, out_bar: Array, lse_bar: Array) -> tuple[Array, Array, Array]:
    """Recompute each tile's weights P from lse, keys first: no product then has to transpose a tile.

    With D = sum(out * out_bar) - lse_bar:  dV = P dO,  dS = P * (V dO' - D),  dK = dS Q,  dQ' = K' dS.
    """
    query, key, value, spans, out, lse = kept
    length, kv_length, groups = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    delta = (out.astype(jnp.float32) * out_bar.astype(jnp.float32)).sum(-1) - lse_bar
    query, out_bar = _split_heads(query, groups), _split_heads(out_bar.astype(value.dtype), groups)
    lse, delta = (_split_heads(x[..., None], groups).transpose(0, 1, 4, 2, 3) for x in (lse, delta))
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
            seen = plan.once(spans.seen(at, queries, at_key, keys, 2))[:, None, :, None]
            scores = plan.capped(_cut(key, at_key, keys, 2), query_t, shape)
            weights = jnp.exp(jnp.where(seen, scores, -jnp.inf) - lse_b)
            slope = weights * (_product(_cut(value, at_key, keys, 2), out_t).reshape(shape) - delta_b)
            if plan.soft_cap is not None:
                slope *= 1 - jnp.square(scores / plan.soft_cap)
            weights, slope = weights.astype(value.dtype).reshape(flat), slope.astype(key.dtype).reshape(flat)
            query_bar += _product(_cut(key_t, at_key, keys, 3), slope)
            return (
                query_bar,
                _add(key_bar, _product(slope, query_b), at_key),
                _add(value_bar, _product(weights, out_b), at_key),
            )

        start = jnp.zeros((batch, kv_heads, dim, groups * queries), jnp.float32)
        query_bar, *carry = plan.over_keys(step, (start, *carry), at, queries, kv_length, spans.contiguous)
        return tuple(carry), query_bar.reshape(batch, kv_heads, dim, groups, queries).transpose(0, 1, 3, 4, 2)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    (key_bar, value_bar), query_bar = plan.over_queries(row, zeros, length)
    return _join_heads(query_bar), key_bar.swapaxes(1, 2), value_bar.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(plan: _Plan, query: Array, key: Array, value: Array, spans: _Spans) -> tuple[Array, Array]:
    return _forward(plan, query, key, value, spans)


def _blockwise_fwd(plan: _Plan, query: Array, key: Array, value: Array, spans: _Spans):
    out, lse = (checkpoint_name(x, "context") for x in _forward(plan, query, key, value, spans))
    return (out, lse), (query, key, value, spans, out, lse)


def _blockwise_bwd(plan: _Plan, kept: tuple, bars: tuple):
    grads = _backward(plan, kept, *bars)
    query_bar, key_bar, value_bar = (grad.astype(x.dtype) for grad, x in zip(grads, kept[:3], strict=True))
    return query_bar, key_bar, value_bar, None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def _blocks(platform: str, dtype: Any, length: int, kv_length: int) -> tuple[int, int | None]:
    """Sizes of the blocks of queries and keys. On CPUs a tile of all heads has to fit the cache (measured)."""
    most, kv_most = (128, 256) if platform == "cpu" else (512, 512)
    short = platform == "cpu" and dtype == jnp.float32 and max(length, kv_length) <= 512
    return _even(length, most), None if short else _even(kv_length, kv_most)


def _even(length: int, most: int) -> int:
    """The size of the fewest equal blocks of at most `most`, in steps of 16, that hold `length`."""
    size = -(-length // max(1, -(-length // most)))
    return max(1, min(length, -(-size // 16) * 16))


def _chunked(query, key, value, places, *, mask: Mask, soft_cap: float | None, aligned: bool, platform: str):
    """Blocks of queries against blocks of keys with a running softmax (Rabe & Staats, 2021; Dao et al., 2022).

    Neither values nor gradients keep more than a tile of scores and arrays of the arguments' size. Past 512 positions
    the blocks are loops, so the program does not grow either. Under remat, saving "context" (out and lse) saves the
    whole forward pass of the kernel.
    """
    length, kv_length = query.shape[1], key.shape[1]
    block, kv_block = _blocks(platform, query.dtype, length, kv_length)
    plan = _Plan(mask=mask, soft_cap=soft_cap, aligned=aligned, platform=platform, block=block, kv_block=kv_block)
    if kv_block is not None:
        query, places = _pad_queries(query, places, -length % block)
        key, value, places = _pad_keys(key, value, places, -kv_length % kv_block)
    first, last = interval(mask, places.query_positions)
    whole = contiguous(places.key_positions, places.key_segments)
    spans = _Spans(first, last, places.key_positions, places.query_segments, places.key_segments, whole)
    results: Any = _blockwise(plan, query, key, value, spans)
    out, lse = results
    return out[:, :length], lse[:, :length]


def _pad(x: Array, more: int, fill: int = 0) -> Array:
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def _pad_queries(query: Array, places: AttentionPositions, more: int) -> tuple[Array, AttentionPositions]:
    segments = None if places.query_segments is None else _pad(places.query_segments, more)
    return _pad(query, more), places._replace(
        query_positions=_pad(places.query_positions, more, -1), query_segments=segments
    )


def _pad_keys(
    key: Array, value: Array, places: AttentionPositions, more: int
) -> tuple[Array, Array, AttentionPositions]:
    segments = None if places.key_segments is None else _pad(places.key_segments, more)
    places = places._replace(key_positions=_pad(places.key_positions, more, -1), key_segments=segments)
    return _pad(key, more), _pad(value, more), places


KERNELS: dict[str, Kernel] = {
    "dot": Kernel(name="dot", function=_dot),
    "chunked": Kernel(name="chunked", function=_chunked),
}
