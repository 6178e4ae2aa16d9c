"""Attention kernels: one signature, a registry, and two of them in plain JAX.

For each query with scaled scores s_j = q . k_j over the keys that it sees,

    out = sum_j exp(s_j - lse) v_j,    lse = log sum_j exp(s_j).

Both come back, so that partial results over different keys (a cached past and the present) can be merged, and sinks
added, outside. Scores, soft cap and softmax are in f32. A query that sees nothing has out = 0 and lse = EMPTY.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.errors import ConfigError, check, check_integer, check_number, check_word
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, Mask, SlidingWindow, check_segments, interval, reach, visible


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
    out = sum(weight * out.astype(jnp.float32) for weight, (out, _) in zip(weights, parts, strict=True))
    return jnp.asarray(out).astype(parts[0][0].dtype), jax.nn.logsumexp(logs, axis=0)


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
    masks: tuple[type, ...] = typing.get_args(Mask)
    soft_cap: bool = True
    segments: bool = True
    unequal_value_dim: bool = True
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")

    def lacks(self, mask: Mask, soft_cap: bool, segments: bool, unequal_value_dim: bool, platform: str) -> str | None:
        """The first of these things that this kernel cannot do, in words, or None."""
        if not isinstance(mask, self.masks):
            return f"the mask {mask}"
        wanted = {"a soft cap": soft_cap, "segments": segments, "value_dim unlike head_dim": unequal_value_dim}
        able = {"a soft cap": self.soft_cap, "segments": self.segments, "value_dim unlike head_dim": self.unequal_value_dim}
        missing = [what for what, want in wanted.items() if want and not able[what]]
        return missing[0] if missing else None if platform in self.platforms else f"the platform {platform!r}"


class Places(typing.NamedTuple):
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
    places = Places(query_positions, key_positions, query_segments, key_segments)
    options = {"mask": mask, "soft_cap": soft_cap, "aligned": aligned, "platform": platform}
    return KERNELS[chosen].function(query, key, value, places, **options)


def _choose(platform: str, length: int, kv_length: int) -> str:
    """Blocks pay once the scores of a head are too many to keep."""
    return "chunked" if min(length, kv_length) >= 128 else "dot"


# --- dot: the plain one ---


def _dot(query, key, value, places: Places, *, mask: Mask, soft_cap: float | None, aligned: bool, platform: str):
    """All scores at once: the definition, and the fastest for a few queries. Memory grows with length x kv_length."""
    seen = visible(mask, *places)[:, None, None]
    groups = query.shape[2] // key.shape[2]
    batch, length, heads, head_dim = query.shape
    split = query.reshape(batch, length, heads // groups, groups, head_dim)
    scores = jnp.einsum("btngd,bsnd->bngts", split, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, _cap(scores, soft_cap), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), EMPTY))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bngts,bsnv->btngv", (weights / safe).astype(value.dtype), value)
    lse = jnp.where(total > 0, top + jnp.log(safe), EMPTY)
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(batch, length, heads)
    return out.reshape(batch, length, heads, -1).astype(query.dtype), lse


def _cap(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


# --- chunked: blocks, memory linear in length ---


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static about one call of the chunked kernel."""

    mask: Mask
    soft_cap: float | None
    tiles: tuple[tuple[int, int, int, int], ...]  # (first query, queries, first key, keys)
    unroll: bool
    platform: str

    def over_tiles(self, step: Callable[..., typing.Any], carry: typing.Any) -> typing.Any:
        """Fold `step(carry, tile)` over the tiles: as a Python loop while they are few, else as a scan."""
        if self.unroll:
            return functools.reduce(step, self.tiles, carry)
        starts = jnp.asarray([(tile[0], tile[2]) for tile in self.tiles], jnp.int32)
        _, queries, _, keys = self.tiles[0]
        body = lambda carry, start: (step(carry, (start[0], queries, start[1], keys)), None)
        return jax.lax.scan(body, carry, starts)[0]

    def rows(self, x: Array) -> Array:
        """Write `x` out row by row. Products of bf16 on the CPU's matrix units take operands in no other layout."""
        if self.platform != "cpu":
            return x
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _split(x: Array, groups: int) -> Array:
    """[batch, length, heads, d] -> [batch, kv_heads, groups, length, d]."""
    batch, length, heads, dim = x.shape
    return x.reshape(batch, length, heads // groups, groups, dim).transpose(0, 2, 3, 1, 4)


def _join(x: Array) -> Array:
    """[batch, kv_heads, groups, length, d] -> [batch, length, heads, d]."""
    batch, kv_heads, groups, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, dim)


def _cut(x: Array, start: int | Array, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Array, part: Array, start: int | Array, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _scores(plan: _Plan, key: Array, query: Array, spans, tile) -> Array:
    """Capped and masked scores of one tile, keys first: [batch, kv_heads, keys, groups * queries]."""
    at_query, queries, at_key, keys = tile
    first, last, places, query_segments, key_segments = spans
    scores = _cap(_product(key, query), plan.soft_cap)
    low, high = (_cut(x, at_query, queries, 1)[:, None, :] for x in (first, last))
    where = _cut(places, at_key, keys, 1)[:, :, None]
    seen = (where >= low) & (where <= high)
    if query_segments is not None:
        seen &= _cut(query_segments, at_query, queries, 1)[:, None, :] == _cut(key_segments, at_key, keys, 1)[:, :, None]
    shape = scores.shape
    grouped = scores.reshape(*shape[:3], shape[3] // queries, queries)
    return jnp.where(seen[:, None, :, None, :], grouped, -jnp.inf).reshape(shape)


def _product(left: Array, right: Array) -> Array:
    """[b, n, i, j] x [b, n, j, k] -> [b, n, i, k] in f32."""
    return jnp.einsum("bnij,bnjk->bnik", left, right, preferred_element_type=jnp.float32)


def _flat(x: Array) -> Array:
    """[b, n, d, g, w] -> [b, n, d, g * w]."""
    return x.reshape(*x.shape[:3], -1)


def _forward(plan: _Plan, query: Array, key: Array, value: Array, spans):
    groups = query.shape[2] // key.shape[2]
    query_t = plan.rows(_split(query, groups).transpose(0, 1, 4, 2, 3))  # [b, n, d, g, t]
    key, value_t = plan.rows(key.transpose(0, 2, 1, 3)), plan.rows(value.transpose(0, 2, 3, 1))
    batch, kv_heads, _, _, length = query_t.shape
    dim = value.shape[3]

    def step(carry, tile):
        at_query, queries, at_key, keys = tile
        old = tuple(_flat(_cut(x, at_query, queries, 4)) for x in carry)
        top, total, sums = old
        scores = _scores(plan, _cut(key, at_key, keys, 2), _flat(_cut(query_t, at_query, queries, 4)), spans, tile)
        new_top = jnp.maximum(top, scores.max(2, keepdims=True))
        fade, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
        new_total = total * fade + weights.sum(2, keepdims=True)
        new_sums = sums * fade + _product(_cut(value_t, at_key, keys, 3), weights.astype(value.dtype))
        new = (new_top, new_total, new_sums)
        return tuple(
            _put(x, y.reshape(*y.shape[:3], groups, queries), at_query, 4) for x, y in zip(carry, new, strict=True)
        )

    top, total, sums = (jnp.zeros((batch, kv_heads, size, groups, length), jnp.float32) for size in (1, 1, dim))
    top, total, sums = plan.over_tiles(step, (top + EMPTY, total, sums))
    safe = jnp.where(total > 0, total, 1.0)
    out = (sums / safe).transpose(0, 1, 3, 4, 2)
    lse = jnp.where(total > 0, top + jnp.log(safe), EMPTY).transpose(0, 1, 3, 4, 2)
    return _join(out).astype(query.dtype), _join(lse)[..., 0]


def _backward(plan: _Plan, query, key, value, spans, out, lse, out_bar, lse_bar):
    groups = query.shape[2] // key.shape[2]
    delta = (out.astype(jnp.float32) * out_bar.astype(jnp.float32)).sum(-1) - lse_bar
    rows = [_split(x, groups) for x in (query, out_bar.astype(value.dtype), lse[..., None], delta[..., None])]
    query, out_bar = (plan.rows(x) for x in rows[:2])  # [b, n, g, t, d]
    query_t, out_bar_t, lse, delta = (plan.rows(x.transpose(0, 1, 4, 2, 3)) for x in (query, out_bar, *rows[2:]))
    key, value = (plan.rows(x.transpose(0, 2, 1, 3)) for x in (key, value))
    key_t = plan.rows(key.swapaxes(2, 3))

    def step(carry, tile):
        at_query, queries, at_key, keys = tile
        query_bar, key_bar, value_bar = carry
        flip = [_flat(_cut(x, at_query, queries, 4)) for x in (query_t, out_bar_t, lse, delta)]
        wide = [_cut(x, at_query, queries, 3) for x in (query, out_bar)]
        wide = [x.reshape(*x.shape[:2], -1, x.shape[4]) for x in wide]
        scores = _scores(plan, _cut(key, at_key, keys, 2), flip[0], spans, tile)
        weights = jnp.exp(scores - flip[2])
        slope = weights * (_product(_cut(value, at_key, keys, 2), flip[1]) - flip[3])
        if plan.soft_cap is not None:
            ratio = jnp.where(weights > 0, scores / plan.soft_cap, 0.0)
            slope *= 1 - ratio * ratio
        slope = slope.astype(key.dtype)
        parts = (
            _product(_cut(key_t, at_key, keys, 3), slope).reshape(*key_t.shape[:3], groups, queries),
            _product(slope, wide[0]),
            _product(weights.astype(value.dtype), wide[1]),
        )
        where = ((at_query, queries, 4), (at_key, keys, 2), (at_key, keys, 2))
        return tuple(
            _put(x, _cut(x, at, size, axis) + part, at, axis)
            for x, part, (at, size, axis) in zip(carry, parts, where, strict=True)
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query_t, key, value))
    query_bar, key_bar, value_bar = plan.over_tiles(step, zeros)
    return _join(query_bar.transpose(0, 1, 3, 4, 2)), key_bar.swapaxes(1, 2), value_bar.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(plan: _Plan, query: Array, key: Array, value: Array, spans):
    return _forward(plan, query, key, value, spans)


def _blockwise_fwd(plan: _Plan, query: Array, key: Array, value: Array, spans):
    out, lse = (checkpoint_name(x, "context") for x in _forward(plan, query, key, value, spans))
    return (out, lse), (query, key, value, spans, out, lse)


def _blockwise_bwd(plan: _Plan, kept, bars):
    grads = _backward(plan, *kept, *bars)
    return *(grad.astype(x.dtype) for grad, x in zip(grads, kept[:3], strict=True)), None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def _tiles(mask: Mask, length: int, kv_length: int, block: int, kv_block: int, aligned: bool):
    """The (first query, queries, first key, keys) in which something can be seen."""
    back = reach(mask)
    for at, start in itertools.product(range(0, length, block), range(0, kv_length, kv_block)):
        queries, keys = min(block, length - at), min(kv_block, kv_length - start)
        ahead = start > at + queries - 1
        behind = back is not None and at - (start + keys - 1) >= back
        if not (aligned and not isinstance(mask, Bidirectional) and (ahead or behind)):
            yield at, queries, start, keys


def _chunked(query, key, value, places: Places, *, mask: Mask, soft_cap: float | None, aligned: bool, platform: str,
             block: int = 128, kv_block: int = 128, most: int = 64):
    first, last = interval(mask, places.query_positions)
    spans = (first, last, places.key_positions, places.query_segments, places.key_segments)
    tiles = tuple(_tiles(mask, query.shape[1], key.shape[1], block, kv_block, aligned))
    plan = _Plan(mask, soft_cap, tiles, len(tiles) <= most, platform)
    return _blockwise(plan, query, key, value, spans)


KERNELS: dict[str, Kernel] = {
    "dot": Kernel(name="dot", function=_dot),
    "chunked": Kernel(name="chunked", function=_chunked),
}
