"""Delta rule and linear recurrence, chunk by chunk, as products of matrices.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

With G the running sum of g within a chunk that begins in the state S, this is

    O = (exp(G) Q) S + P U,    P_ij = sum_d q_id k_jd exp(G_id - G_jd)  for j <= i,
    S' = exp(G_last) S + (exp(G_last - G) K)^T U.

U is an input of the linear recurrence; the delta rule solves U = B (V - (exp(G) K) S) - A U, where B = Diag(beta) and
A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd) for j < i (the WY form of Yang et al., 2024 and 2025). The inverse
(I + A)^-1 does not depend on the state: all chunks compute theirs at once, and a scan then carries the state.

No exponent here is above 0, so no decay overflows. All is in f32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from eqx_decoders.layers.recurrent.kernels.pallas_carry import CarryTerms, product


LEAST = 16  # tokens of the smallest chunk, and of the blocks in which a triangle is inverted row by row
AT_ONCE, TOKENS_AT_ONCE = (
    4,
    2048,
)  # chunks whose decays between tokens are looked at together: by channel they take far more room than keys
FORGOTTEN = -100.0  # exp of it is 0 in f32: nothing smaller is needed, and a sum of such keeps its digits
_EXACT = jax.lax.Precision.HIGHEST  # sums in exponents, and inverses: not on units of 16 bits


class Tokens(NamedTuple):
    """Inputs of the tokens of a chunk; `chunks` stands in front of all chunks.

    Value head h belongs to the key head h // groups.
    """

    query: Float32[Array, "*chunks batch key_heads chunk key_dim"]
    key: Float32[Array, "*chunks batch key_heads chunk key_dim"]
    value: Float32[Array, "*chunks batch key_heads chunk groups value_dim"]
    log_decay: Float32[Array, "*chunks batch key_heads groups chunk decay_dim"]
    beta: Float32[Array, "*chunks batch key_heads groups chunk"] | None
    document: Int[Array, "*chunks batch chunk"] | None  # counted from the chunk's start; None: one


class _Decays(NamedTuple):
    """Decay factors between the tokens of a chunk and the states before and after it; 0 across the start of a document.

    One number a head stands at the values' side, as `chunk groups 1`; one a channel at the keys', as `chunk key_dim`.
    """

    enter: Array  # from the state before to each token
    leave: Array  # from each token to the state after
    keep: Array  # from the state before to the state after: [..., key_dim or 1, groups, 1]


def run_chunks(
    query: Float[Array, "batch length key_heads key_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads decay_dim"],
    beta: Float[Array, "batch length heads"] | None,
    state: Float32[Array, "batch heads key_dim value_dim"] | None,
    resets: Bool[Array, "batch length"] | None,
    chunk: int,
    carry: Callable[..., Any] | None = None,
) -> tuple[
    Float32[Array, "batch length heads value_dim"],
    Float32[Array, "batch length heads value_dim"],
    Float32[Array, "batch heads key_dim value_dim"],
]:
    """Run the delta rule, or without `beta` the linear recurrence: return outputs, written values and last state.

    With `carry` (`pallas_carry`) that alone goes from chunk to chunk, and all else is done for all chunks at once.
    """
    batch, length, heads, value_dim = value.shape
    if log_decay.shape[3] > 1 and key.shape[2] < heads:  # each channel of each value head decays by itself
        query, key = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (query, key))
    while chunk > LEAST and chunk >= 2 * length:
        chunk //= 2
    if log_decay.shape[3] > 1 and length > chunk and chunk.bit_length() % 2 == 0:
        chunk //= 2  # to a power of four: see `_sizes`
    key_heads, key_dim = key.shape[2:]
    tokens = _split(query, key, value, log_decay, beta, resets, chunk)
    start = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) if state is None else state
    start = start.reshape(batch, key_heads, -1, key_dim, value_dim).transpose(0, 1, 3, 2, 4)
    if carry is None:
        end, (out, written) = jax.lax.scan(jax.checkpoint(_advance), start, (tokens, *_within_each(tokens, AT_ONCE)))
    else:
        at_once = max(AT_ONCE, TOKENS_AT_ONCE // (batch * chunk))
        end, (out, written) = _advance_all(start, tokens, *_within_each(tokens, at_once), carry=carry)
    end = end.transpose(0, 1, 3, 2, 4).reshape(batch, heads, key_dim, value_dim)
    return _joined(out, length), _joined(written, length), end


# --- into chunks and back ---


def _split(query, key, value, log_decay, beta, resets, chunk: int) -> Tokens:
    """Split into chunks; the padding of the last one is the identity."""
    groups = value.shape[2] // key.shape[2]
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), FORGOTTEN)
    document = None
    if resets is not None:
        log_decay = jnp.where(resets[:, :, None, None], 0.0, log_decay)  # what it would fade is forgotten anyway
        document = jnp.cumsum(_chunks(resets.astype(jnp.int32), chunk), axis=2)
    query, key = (_chunks(x.astype(jnp.float32), chunk).swapaxes(2, 3) for x in (query, key))
    decay = _chunks(log_decay, chunk)
    decay = decay.reshape(*decay.shape[:3], -1, groups, decay.shape[4]).transpose(0, 1, 3, 4, 2, 5)
    value = _chunks(value.astype(jnp.float32), chunk)
    value = value.reshape(*value.shape[:3], -1, groups, value.shape[4]).transpose(0, 1, 3, 2, 4, 5)
    if beta is not None:
        beta = _chunks(beta.astype(jnp.float32), chunk)
        beta = beta.reshape(*beta.shape[:3], -1, groups).transpose(0, 1, 3, 4, 2)
    return Tokens(query, key, value, decay, beta, document)


def _chunks(x: Array, chunk: int) -> Array:
    """Reshape [batch, length, ...] -> [chunks, batch, chunk, ...]."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _joined(x: Array, length: int) -> Array:
    """Reshape [chunks, batch, key_heads, chunk, groups, d] -> [batch, length, heads, d]."""
    x = x.transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, x.shape[5])[:, :length]


# --- what does not depend on the state ---


class _Sums(NamedTuple):
    """Running sum of log decays, from the start of a token's document on: coarse + fine.

    Multiples of 2^-10 add up without rounding, and their rest is small: a difference of two sums, which may be far
    below 0, then has all its digits.
    """

    coarse: Array
    fine: Array

    def since(self, other: "_Sums") -> Array:
        """Subtract another sum."""
        return (self.coarse - other.coarse) + (self.fine - other.fine)

    def map(self, function: Callable[[Array], Array]) -> "_Sums":
        """Apply a function to both parts."""
        return _Sums(function(self.coarse), function(self.fine))


def _running(tokens: Tokens) -> _Sums:
    """Compute running sums as products with zeros, so that other documents do not even change the rounding."""
    decay = tokens.log_decay
    coarse = jax.lax.stop_gradient(jnp.round(decay * 1024) / 1024)
    same = jnp.broadcast_to(_same(tokens).astype(jnp.float32), (*decay.shape[:3], decay.shape[3], decay.shape[3]))
    return _Sums(*(jnp.matmul(same, x, precision=_EXACT) for x in (coarse, decay - coarse)))


def _same(tokens: Tokens) -> Array:
    """Return whether token j stands in the document of token i, and not behind it: [batch, 1, 1, i, j]."""
    chunk = tokens.key.shape[2]
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None, None]
    if tokens.document is None:
        return lower
    return lower & (tokens.document[:, None, None, :, None] == tokens.document[:, None, None, None, :])


def _within_each(tokens: Tokens, at_once: int) -> Any:
    """Map `_within` over some chunks at once; a single one without a map, in which XLA for CPU crashed (jax 0.10)."""
    within = jax.checkpoint(_within)
    if tokens.key.shape[0] == 1:
        return jax.tree.map(lambda x: x[None], within(jax.tree.map(lambda x: x[0], tokens)))
    return jax.lax.map(within, tokens, batch_size=at_once)


def _within(tokens: Tokens) -> tuple[_Decays, Array, tuple[Array, Array] | None]:
    """Return decays; P; for the delta rule A and (I + A)^-1, too: each [batch, key_heads, groups, chunk, chunk]."""
    sums = _running(tokens)
    if tokens.log_decay.shape[4] > 1:
        document = jnp.zeros(tokens.key.shape[:-1], jnp.int32)
        document = (document if tokens.document is None else document + tokens.document[:, None])[..., None]
        pairs = _decayed_pairs(tokens.query, tokens.key, sums.map(lambda x: x[:, :, 0]), document)
        pairs = [x[:, :, None] for x in pairs]
    else:
        fade = sums.since(sums.map(lambda x: x.swapaxes(-1, -2)))
        fade = jnp.exp(jnp.where(_same(tokens), fade, -jnp.inf))
        pairs = [product(x, tokens.key, "ik,jk->ij")[:, :, None] * fade for x in (tokens.query, tokens.key)]
    decays = _decays(tokens, sums)
    if tokens.beta is None:
        return decays, pairs[0], None
    system = jnp.tril(pairs[1], -1) * tokens.beta[..., None]
    return decays, pairs[0], (system, jax.lax.stop_gradient(_inverse(system)))


def _decays(tokens: Tokens, sums: _Sums) -> _Decays:
    last = sums.map(lambda x: x[..., -1:, :])
    enter, leave, keep = sums.coarse + sums.fine, last.since(sums), last.coarse + last.fine
    if tokens.document is not None:
        document = tokens.document[:, None, None, :, None]
        end = document[..., -1:, :]
        enter = jnp.where(document == 0, enter, -jnp.inf)
        leave = jnp.where(document == end, leave, -jnp.inf)
        keep = jnp.where(end == 0, keep, -jnp.inf)
    enter, leave, keep = (jnp.exp(x) for x in (enter, leave, keep))
    keep = keep.transpose(0, 1, 4, 2, 3)  # batch key_heads key_dim groups 1
    if enter.shape[-1] > 1:
        return _Decays(enter[:, :, 0], leave[:, :, 0], keep)
    return _Decays(enter.swapaxes(2, 3), leave.swapaxes(2, 3), keep)


@jax.custom_vjp
def _decayed_pairs(query: Array, key: Array, sums: _Sums, document: Array) -> tuple[Array, Array]:
    """Compute sum_d q_id k_jd exp(G_id - G_jd) for j <= i, and the same of keys with keys for j < i.

    Rows of a block have decayed since its first token, and columns before it decay up to it; pairs within the block are
    computed in the same way in smaller blocks. So a channel has no exponent for each pair.
    """
    chunk = key.shape[-2]
    arrays, pairs = _blocks((query, key, sums, document)), jnp.zeros((2, *key.shape[:-1], chunk), jnp.float32)
    for size in _sizes(key):
        rows, columns, _ = _factors(arrays, size)
        part = product(rows, columns, "id,jd->ij")
        part = jnp.moveaxis(part.reshape(*part.shape[:-2], 2, size, -1), -3, 0)
        pairs = pairs + _spread(part.reshape(*part.shape[:-3], -1, part.shape[-1]), key.shape[-2])
        arrays = _blocks(arrays, size)
    diagonal = (query * key).sum(-1)[..., None, None]
    return pairs[0] + _spread(diagonal, key.shape[-2]), pairs[1]


def _sizes(key: Array) -> list[int]:
    """Return the sizes of nested blocks: 16, 4, 1 for chunks of 64.

    Not 8, 2, 1: XLA for CPU (jax 0.10) crashes in the sum over two blocks of each of several. So do several chunks of
    32 or of 128 tokens: `run_chunks` has none.
    """
    return [4**power for power in reversed(range(key.shape[-2].bit_length())) if 4**power < key.shape[-2]]


def _blocks(arrays: Any, size: int | None = None) -> Any:
    """Split blocks, [..., n, block, d] -> [..., more n, size, d]; to begin with, n is 1."""
    if size is None:
        return jax.tree.map(lambda x: x[..., None, :, :], arrays)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:-3], -1, size, x.shape[-1]), arrays)


def _spread(blocks: Array, chunk: int) -> Array:
    """Place blocks on the diagonal of whole chunks: [..., n, size, size] -> [..., chunk, chunk]."""
    count = blocks.shape[-3]
    return (blocks[..., None, :] * _eye(count, blocks.ndim + 1)).reshape(*blocks.shape[:-3], chunk, chunk)


def _gathered(pairs: Array, size: int) -> Array:
    """Take the blocks that `_spread` placed."""
    count = pairs.shape[-1] // size
    blocks = pairs.reshape(-1, count, size, count, size)  # in more dimensions XLA for CPU crashes (jax 0.10)
    return (blocks * _eye(count, blocks.ndim)).sum(-2).reshape(*pairs.shape[:-2], count, size, size)


def _eye(count: int, ndim: int) -> Array:
    """Return the identity as [..., count, 1, count, 1]."""
    return jnp.eye(count, dtype=jnp.float32).reshape((1,) * (ndim - 4) + (count, 1, count, 1))


def _factors(arrays: tuple[Array, Array, _Sums, Array], size: int):
    """Return decayed queries and keys as rows, earlier keys as columns, and both decays, for blocks of `size`."""
    query, key, sums, document = arrays

    def rows(x):
        return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])

    def columns(x):
        return x[..., None, :, :]

    first, place = sums.map(lambda x: rows(x)[..., :1, :]), rows(document)[..., :1, :]
    block, count = key.shape[-2], key.shape[-2] // size
    earlier = jnp.arange(block)[None, :, None] < size * jnp.arange(count)[:, None, None]
    after = jnp.exp(jnp.where(rows(document) == place, sums.map(rows).since(first), -jnp.inf))
    before = (columns(document) == place) & earlier.reshape((1,) * (key.ndim - 2) + earlier.shape)
    before = jnp.exp(jnp.where(before, first.since(sums.map(columns)), -jnp.inf))
    return jnp.concatenate([rows(query) * after, rows(key) * after], -2), columns(key) * before, (after, before)


def _decayed_pairs_forward(query: Array, key: Array, sums: _Sums, document: Array):
    return _decayed_pairs(query, key, sums, document), (query, key, sums, document)


def _decayed_pairs_backward(residuals: tuple, bars: tuple[Array, Array]):
    """Compute gradients: G' is q q' + k k' of keys as rows - k k' of keys as columns, since each has a decay factor."""
    query, key, sums, document = residuals
    query_bar = row_bar = column_bar = jnp.zeros_like(key)
    arrays, pair_bar = _blocks((query, key, sums, document)), jnp.stack(bars)
    block = key.shape[-2]
    for size in _sizes(key):
        rows, columns, (after, before) = _factors(arrays, size)
        part = _gathered(pair_bar, block)
        part = jnp.moveaxis(part.reshape(*part.shape[:-2], -1, size, block), 0, -3)
        part = part.reshape(*part.shape[:-3], 2 * size, block)
        to_query, to_key = jnp.split(product(part, columns, "ij,jd->id"), 2, axis=-2)
        query_bar += (to_query * after).reshape(key.shape)
        row_bar += (to_key * after).reshape(key.shape)
        to_columns = product(part, rows, "ij,id->jd") * before
        # one by one: XLA for CPUs without AVX-512 (jax 0.10) crashes in a sum over this dimension
        column_sum: Any = sum(to_columns[..., place, :, :] for place in range(before.shape[-3]))
        column_bar += column_sum.reshape(key.shape)
        arrays, block = _blocks(arrays, size), size
    fine = query * query_bar + key * (row_bar - column_bar)
    diagonal = _gathered(bars[0], 1)[..., 0]
    return query_bar + diagonal * key, row_bar + column_bar + diagonal * query, _Sums(jnp.zeros_like(fine), fine), None


_decayed_pairs.defvjp(_decayed_pairs_forward, _decayed_pairs_backward)


def _with_corner(blocks: Array, corner: Array) -> Array:
    """Join pairs of triangles [..., 2 n, s, s] and the corner below the first of each: triangles [..., n, 2s, 2s]."""
    top, bottom = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    upper = jnp.concatenate([top, jnp.zeros_like(top)], -1)
    return jnp.concatenate([upper, jnp.concatenate([corner, bottom], -1)], -2)


def _inverse(system: Array) -> Array:
    """Compute (I + A)^-1 of strictly lower triangles: row by row in small blocks, which are then joined in pairs."""
    chunk, size = system.shape[-1], LEAST
    blocks = jnp.stack([system[..., at : at + size, at : at + size] for at in range(0, chunk, size)], -3)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), blocks.shape)
    for at in range(size - 1):
        inverse = inverse - blocks[..., :, at, None] * inverse[..., at, None, :]
    while size < chunk:
        starts = range(0, chunk, 2 * size)
        corner = jnp.stack([system[..., at + size : at + 2 * size, at : at + size] for at in starts], -3)
        corner = jnp.matmul(inverse[..., 1::2, :, :], corner, precision=_EXACT)
        inverse = _with_corner(inverse, -jnp.matmul(corner, inverse[..., 0::2, :, :], precision=_EXACT))
        size *= 2
    return inverse[..., 0, :, :]


@jax.custom_vjp
def _solve(system: Array, inverse: Array, right: Array) -> Array:
    """Solve (I + A) U = R, given (I + A)^-1; the gradient goes to A."""
    return product(inverse, right, "rij,jrv->irv")


def _solve_forward(system: Array, inverse: Array, right: Array):
    solution = _solve(system, inverse, right)
    return solution, (inverse, solution)


def _solve_backward(residuals: tuple[Array, Array], solution_bar: Array):
    """Compute R' = (I + A)^-T U',  A' = -R' U^T."""
    inverse, solution = residuals
    right_bar = product(inverse, solution_bar, "rji,jrv->irv")
    return -product(right_bar, solution, "irv,jrv->rij"), None, right_bar


_solve.defvjp(_solve_forward, _solve_backward)


# --- from chunk to chunk ---


def _advance(
    state: Array, each: tuple[Tokens, _Decays, Array, tuple[Array, Array] | None]
) -> tuple[Array, tuple[Array, Array]]:
    """Advance a chunk: return the state after it, its outputs and the values it wrote."""
    tokens, decays, products, inverse = each
    by_channel = tokens.log_decay.shape[-1] > 1

    def read(x: Array) -> Array:
        if by_channel:
            return product(x * decays.enter, state, "ik,krv->irv")
        return product(x, state, "ik,krv->irv") * decays.enter

    written = tokens.value
    if inverse is not None and tokens.beta is not None:
        right = (tokens.value - read(tokens.key)) * tokens.beta.swapaxes(2, 3)[..., None]
        written = _solve(*inverse, right)
    out = read(tokens.query) + product(products, written, "rij,jrv->irv")
    key, value = (tokens.key * decays.leave, written) if by_channel else (tokens.key, written * decays.leave)
    return state * decays.keep + product(key, value, "ik,irv->krv"), (out, written)


def _advance_all(
    start: Array,
    tokens: Tokens,
    decays: _Decays,
    products: Array,
    inverse: tuple[Array, Array] | None,
    *,
    carry: Callable[..., Any],
) -> tuple[Array, tuple[Array, Array]]:
    """Do what a scan of `_advance` does, with U = (I + A)^-1 B V - (I + A)^-1 B exp(G) K S for all chunks at once."""
    by_channel, value_dim = tokens.log_decay.shape[-1] > 1, tokens.value.shape[-1]
    added, left = tokens.value, None
    if inverse is not None and tokens.beta is not None:
        read = (tokens.key * decays.enter)[..., None, :] if by_channel else tokens.key[..., None, :] * decays.enter
        right = jnp.concatenate([tokens.value, -read], -1) * tokens.beta.swapaxes(3, 4)[..., None]
        solved = _solve(*inverse, right)
        added, left = solved[..., :value_dim], solved[..., value_dim:]
    scale = None if by_channel else jnp.broadcast_to(decays.leave, (*tokens.value.shape[:-1], 1))[..., 0]
    keep = jnp.broadcast_to(decays.keep, (*decays.keep.shape[:3], start.shape[2], *decays.keep.shape[4:]))[..., 0]
    key = tokens.key * decays.leave if by_channel else tokens.key
    states, written, end = carry(CarryTerms(added, left, key, scale, keep), start)
    query = tokens.query * decays.enter if by_channel else tokens.query
    out = product(query, states, "ik,krv->irv") * (1.0 if by_channel else decays.enter)
    return end, (out + product(products, written, "rij,jrv->irv"), written)
