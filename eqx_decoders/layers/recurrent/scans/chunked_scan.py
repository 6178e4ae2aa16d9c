"""Chunkwise delta rule and linear recurrence, as matrix products.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

For a chunk with the initial state S and the cumulative sum G of g within the chunk, this is

    O = (exp(G) Q) S + P U,    P_ij = sum_d q_id k_jd exp(G_id - G_jd)  for j <= i,
    S' = exp(G_last) S + (exp(G_last - G) K)^T U.

U is an input of the linear recurrence. The delta rule solves U = B (V - (exp(G) K) S) - A U, where B = Diag(beta) and
A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd) for j < i (the WY form of Yang et al., 2024 and 2025). The inverse
(I + A)^-1 does not depend on the state, so it is computed for all chunks first; a scan then carries the state.

All exponents are at most 0, so no decay overflows. All computations are in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from eqx_decoders.layers.recurrent.kernels.pallas_carry import CarryTerms, product


MIN_CHUNK = 16  # tokens of the smallest chunk; triangular matrices up to this size are inverted row by row
# Chunks whose state-independent terms are computed together. Decays per channel between pairs of tokens take far more
# memory than keys, so these terms are not computed for all chunks at once.
CHUNKS_PER_STEP = 4
TOKENS_PER_STEP = 2048  # with a carry kernel, unless CHUNKS_PER_STEP chunks have more tokens
MIN_LOG_DECAY = -100.0  # exp(-100) is 0 in float32; clipping here keeps cumulative sums precise
_EXACT = jax.lax.Precision.HIGHEST  # for sums in exponents and for inverses: no 16-bit passes of the matrix unit


class Tokens(NamedTuple):
    """Inputs of the tokens of one chunk, or, with a leading axis `chunks`, of all chunks.

    The axis `groups` contains the value heads that share a key head: value head h uses key head h // groups.
    """

    query: Float32[Array, "*chunks batch key_heads chunk key_dim"]
    key: Float32[Array, "*chunks batch key_heads chunk key_dim"]
    value: Float32[Array, "*chunks batch key_heads chunk groups value_dim"]
    log_decay: Float32[Array, "*chunks batch key_heads groups chunk decay_dim"]
    beta: Float32[Array, "*chunks batch key_heads groups chunk"] | None
    document: Int[Array, "*chunks batch chunk"] | None  # index within the chunk, from 0; None: one document


class _Decays(NamedTuple):
    """Decay factors between the tokens of a chunk and the states before and after the chunk.

    A factor is 0 if a document starts in between. Decays per head multiply values: their shape is `chunk groups 1`.
    Decays per channel multiply keys: their shape is `chunk key_dim`.
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

    With `carry` (`pallas_carry.carry`), only that kernel runs sequentially over chunks, and everything else is computed
    for all chunks in parallel. Without it, a scan over chunks computes outputs and states.
    """
    batch, length, heads, value_dim = value.shape
    by_channel = log_decay.shape[3] > 1
    if by_channel and key.shape[2] < heads:  # value heads that share a key head have different decays of its channels
        query, key = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (query, key))
    while chunk > MIN_CHUNK and chunk >= 2 * length:
        chunk //= 2
    if by_channel and length > chunk and chunk.bit_length() % 2 == 0:
        chunk //= 2  # to a power of four: see `_subchunk_sizes`
    key_heads, key_dim = key.shape[2:]
    tokens = _split_chunks(query, key, value, log_decay, beta, resets, chunk)
    start = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) if state is None else state
    start = start.reshape(batch, key_heads, -1, key_dim, value_dim).transpose(0, 1, 3, 2, 4)
    if carry is None:
        terms = _terms_of_chunks(tokens, CHUNKS_PER_STEP)
        end, (out, written) = jax.lax.scan(jax.checkpoint(_advance), start, (tokens, *terms))
    else:
        terms = _terms_of_chunks(tokens, max(CHUNKS_PER_STEP, TOKENS_PER_STEP // (batch * chunk)))
        end, (out, written) = _advance_all(start, tokens, *terms, carry=carry)
    end = end.transpose(0, 1, 3, 2, 4).reshape(batch, heads, key_dim, value_dim)
    return _join_chunks(out, length), _join_chunks(written, length), end


# --- splitting into chunks and joining ---


def _split_chunks(query, key, value, log_decay, beta, resets, chunk: int) -> Tokens:
    """Split tokens into chunks. Padding of the last chunk leaves the state unchanged."""
    groups = value.shape[2] // key.shape[2]
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), MIN_LOG_DECAY)
    document = None
    if resets is not None:
        # at a reset the previous state does not count, so any decay is right; 0 keeps the sums small
        log_decay = jnp.where(resets[:, :, None, None], 0.0, log_decay)
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


def _join_chunks(x: Array, length: int) -> Array:
    """Reshape [chunks, batch, key_heads, chunk, groups, d] -> [batch, length, heads, d]."""
    x = x.transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, x.shape[5])[:, :length]


# --- terms that do not depend on the state ---


class _DecaySum(NamedTuple):
    """Cumulative sum of log decays, from the start of a token's document: coarse + fine.

    The coarse part sums multiples of 2^-10, which is exact in float32, and the fine part sums the small remainders.
    Differences of two large sums are therefore precise.
    """

    coarse: Array
    fine: Array

    def since(self, other: "_DecaySum") -> Array:
        """Subtract another sum."""
        return (self.coarse - other.coarse) + (self.fine - other.fine)

    def map(self, function: Callable[[Array], Array]) -> "_DecaySum":
        """Apply a function to both parts."""
        return _DecaySum(function(self.coarse), function(self.fine))


def _cumulative_decay(tokens: Tokens) -> _DecaySum:
    """Compute cumulative sums as a product with a 0/1 mask, so that other documents do not affect the rounding."""
    decay = tokens.log_decay
    coarse = jax.lax.stop_gradient(jnp.round(decay * 1024) / 1024)
    shape = (*decay.shape[:3], decay.shape[3], decay.shape[3])
    mask = jnp.broadcast_to(_causal_mask(tokens).astype(jnp.float32), shape)
    return _DecaySum(*(jnp.matmul(mask, x, precision=_EXACT) for x in (coarse, decay - coarse)))


def _causal_mask(tokens: Tokens) -> Array:
    """Return whether j <= i and token j is in the document of token i: [batch, 1, 1, i, j]."""
    chunk = tokens.key.shape[2]
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None, None]
    if tokens.document is None:
        return lower
    return lower & (tokens.document[:, None, None, :, None] == tokens.document[:, None, None, None, :])


def _terms_of_chunks(tokens: Tokens, chunks_per_step: int) -> Any:
    """Compute `_chunk_terms` of all chunks, `chunks_per_step` at a time.

    A single chunk is computed without a map, because XLA for CPU crashed in that map (jax 0.10).
    """
    chunk_terms = jax.checkpoint(_chunk_terms)
    if tokens.key.shape[0] == 1:
        return jax.tree.map(lambda x: x[None], chunk_terms(jax.tree.map(lambda x: x[0], tokens)))
    return jax.lax.map(chunk_terms, tokens, batch_size=chunks_per_step)


def _chunk_terms(tokens: Tokens) -> tuple[_Decays, Array, tuple[Array, Array] | None]:
    """Return decays, P, and for the delta rule (A, (I + A)^-1), else None.

    The shape of P, A and the inverse is [batch, key_heads, groups, chunk, chunk].
    """
    sums = _cumulative_decay(tokens)
    if tokens.log_decay.shape[4] > 1:
        document = jnp.zeros(tokens.key.shape[:-1], jnp.int32)
        document = (document if tokens.document is None else document + tokens.document[:, None])[..., None]
        pairs = _decayed_pairs(tokens.query, tokens.key, sums.map(lambda x: x[:, :, 0]), document)
        pairs = [x[:, :, None] for x in pairs]
    else:
        log_decay = sums.since(sums.map(lambda x: x.swapaxes(-1, -2)))
        decay = jnp.exp(jnp.where(_causal_mask(tokens), log_decay, -jnp.inf))
        pairs = [product(x, tokens.key, "ik,jk->ij")[:, :, None] * decay for x in (tokens.query, tokens.key)]
    decays = _decays(tokens, sums)
    if tokens.beta is None:
        return decays, pairs[0], None
    system = jnp.tril(pairs[1], -1) * tokens.beta[..., None]
    return decays, pairs[0], (system, jax.lax.stop_gradient(_inverse(system)))


def _decays(tokens: Tokens, sums: _DecaySum) -> _Decays:
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
def _decayed_pairs(query: Array, key: Array, sums: _DecaySum, document: Array) -> tuple[Array, Array]:
    """Compute sum_d q_id k_jd exp(G_id - G_jd) for j <= i, and the same sum with keys as queries for j < i.

    Forming the exponents of all pairs would take memory for [chunk, chunk, key_dim]. Instead, chunks are split into
    nested sub-chunks. For each sub-chunk, its queries decay from its first token on, and earlier keys of the enclosing
    sub-chunk decay up to that token, so that the sum is a matrix product. Pairs within a sub-chunk are computed in the
    same way at the next smaller size.
    """
    chunk = key.shape[-2]
    arrays = _add_subchunk_axis((query, key, sums, document))
    pairs = jnp.zeros((2, *key.shape[:-1], chunk), jnp.float32)
    for size in _subchunk_sizes(chunk):
        rows, columns, _ = _factors(arrays, size)
        part = product(rows, columns, "id,jd->ij")
        part = jnp.moveaxis(part.reshape(*part.shape[:-2], 2, size, -1), -3, 0)
        pairs = pairs + _place_on_diagonal(part.reshape(*part.shape[:-3], -1, part.shape[-1]), chunk)
        arrays = _split_subchunks(arrays, size)
    diagonal = (query * key).sum(-1)[..., None, None]
    return pairs[0] + _place_on_diagonal(diagonal, chunk), pairs[1]


def _subchunk_sizes(chunk: int) -> list[int]:
    """Return the sizes of nested sub-chunks, powers of 4: 16, 4, 1 for chunks of 64.

    Powers of 2 are not used: XLA for CPU (jax 0.10) crashes in the sum over two sub-chunks, and also with several
    chunks of 32 or 128 tokens, which `run_chunks` therefore avoids.
    """
    return [4**power for power in reversed(range(chunk.bit_length())) if 4**power < chunk]


def _add_subchunk_axis(arrays: Any) -> Any:
    """Reshape [..., chunk, d] -> [..., 1, chunk, d]."""
    return jax.tree.map(lambda x: x[..., None, :, :], arrays)


def _split_subchunks(arrays: Any, size: int) -> Any:
    """Reshape [..., n, k * size, d] -> [..., n * k, size, d]."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:-3], -1, size, x.shape[-1]), arrays)


def _place_on_diagonal(squares: Array, chunk: int) -> Array:
    """Place square matrices on the diagonal of a zero matrix: [..., n, size, size] -> [..., chunk, chunk]."""
    count = squares.shape[-3]
    return (squares[..., None, :] * _eye(count, squares.ndim + 1)).reshape(*squares.shape[:-3], chunk, chunk)


def _take_from_diagonal(pairs: Array, size: int) -> Array:
    """Undo `_place_on_diagonal`: [..., chunk, chunk] -> [..., n, size, size]."""
    count = pairs.shape[-1] // size
    split = pairs.reshape(-1, count, size, count, size)  # with more dimensions XLA for CPU crashes (jax 0.10)
    return (split * _eye(count, split.ndim)).sum(-2).reshape(*pairs.shape[:-2], count, size, size)


def _eye(count: int, ndim: int) -> Array:
    """Return the identity matrix in the shape [..., count, 1, count, 1]."""
    return jnp.eye(count, dtype=jnp.float32).reshape((1,) * (ndim - 4) + (count, 1, count, 1))


def _factors(arrays: tuple[Array, Array, _DecaySum, Array], size: int):
    """Return the factors of the matrix products for sub-chunks of `size` tokens.

    These are the decayed queries and keys of each sub-chunk, concatenated (rows), the decayed earlier keys of the
    enclosing sub-chunk (columns), and the decay factors of rows and columns.
    """
    query, key, sums, document = arrays

    def rows(x):
        return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])

    def columns(x):
        return x[..., None, :, :]

    first = sums.map(lambda x: rows(x)[..., :1, :])
    first_document = rows(document)[..., :1, :]
    enclosing = key.shape[-2]
    count = enclosing // size
    earlier = jnp.arange(enclosing)[None, :, None] < size * jnp.arange(count)[:, None, None]
    after = jnp.exp(jnp.where(rows(document) == first_document, sums.map(rows).since(first), -jnp.inf))
    visible = (columns(document) == first_document) & earlier.reshape((1,) * (key.ndim - 2) + earlier.shape)
    before = jnp.exp(jnp.where(visible, first.since(sums.map(columns)), -jnp.inf))
    return jnp.concatenate([rows(query) * after, rows(key) * after], -2), columns(key) * before, (after, before)


def _decayed_pairs_forward(query: Array, key: Array, sums: _DecaySum, document: Array):
    return _decayed_pairs(query, key, sums, document), (query, key, sums, document)


def _decayed_pairs_backward(residuals: tuple, bars: tuple[Array, Array]):
    """Compute gradients with respect to query, key and sums.

    Rows contain exp(G) and columns exp(-G) as a factor, so the gradient of G is `q * dq + k * (dk_row - dk_column)`,
    where dk_row and dk_column are the gradients of keys as rows and as columns.
    """
    query, key, sums, document = residuals
    query_bar = row_bar = column_bar = jnp.zeros_like(key)
    arrays = _add_subchunk_axis((query, key, sums, document))
    pair_bar = jnp.stack(bars)
    enclosing = key.shape[-2]
    for size in _subchunk_sizes(key.shape[-2]):
        rows, columns, (after, before) = _factors(arrays, size)
        part = _take_from_diagonal(pair_bar, enclosing)
        part = jnp.moveaxis(part.reshape(*part.shape[:-2], -1, size, enclosing), 0, -3)
        part = part.reshape(*part.shape[:-3], 2 * size, enclosing)
        to_query, to_key = jnp.split(product(part, columns, "ij,jd->id"), 2, axis=-2)
        query_bar += (to_query * after).reshape(key.shape)
        row_bar += (to_key * after).reshape(key.shape)
        to_columns = product(part, rows, "ij,id->jd") * before
        # added in a Python loop: XLA for CPUs without AVX-512 (jax 0.10) crashes in `.sum` over this dimension
        column_sum: Any = sum(to_columns[..., index, :, :] for index in range(before.shape[-3]))
        column_bar += column_sum.reshape(key.shape)
        arrays = _split_subchunks(arrays, size)
        enclosing = size
    fine = query * query_bar + key * (row_bar - column_bar)
    diagonal = _take_from_diagonal(bars[0], 1)[..., 0]
    return (
        query_bar + diagonal * key,
        row_bar + column_bar + diagonal * query,
        _DecaySum(jnp.zeros_like(fine), fine),
        None,
    )


_decayed_pairs.defvjp(_decayed_pairs_forward, _decayed_pairs_backward)


def _join_triangles(triangles: Array, corner: Array) -> Array:
    """Join pairs of lower triangular matrices: [..., 2 n, s, s] -> [..., n, 2 s, 2 s].

    `corner` [..., n, s, s] is the lower left quarter of each result.
    """
    top, bottom = triangles[..., 0::2, :, :], triangles[..., 1::2, :, :]
    upper = jnp.concatenate([top, jnp.zeros_like(top)], -1)
    return jnp.concatenate([upper, jnp.concatenate([corner, bottom], -1)], -2)


def _inverse(system: Array) -> Array:
    """Compute (I + A)^-1 for a strictly lower triangular A.

    Diagonal squares of MIN_CHUNK rows are inverted row by row, and then joined in pairs.
    """
    chunk, size = system.shape[-1], MIN_CHUNK
    squares = jnp.stack([system[..., i : i + size, i : i + size] for i in range(0, chunk, size)], -3)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), squares.shape)
    for row in range(size - 1):
        inverse = inverse - squares[..., :, row, None] * inverse[..., row, None, :]
    while size < chunk:
        starts = range(0, chunk, 2 * size)
        corner = jnp.stack([system[..., i + size : i + 2 * size, i : i + size] for i in starts], -3)
        corner = jnp.matmul(inverse[..., 1::2, :, :], corner, precision=_EXACT)
        inverse = _join_triangles(inverse, -jnp.matmul(corner, inverse[..., 0::2, :, :], precision=_EXACT))
        size *= 2
    return inverse[..., 0, :, :]


@jax.custom_vjp
def _solve(system: Array, inverse: Array, right: Array) -> Array:
    """Solve (I + A) U = R, given (I + A)^-1. Gradients are computed for A and R, not for the inverse."""
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


# --- the state from chunk to chunk ---


def _advance(
    state: Array, chunk: tuple[Tokens, _Decays, Array, tuple[Array, Array] | None]
) -> tuple[Array, tuple[Array, Array]]:
    """Process one chunk: return the state after it, its outputs, and the values that it wrote."""
    tokens, decays, pairs, system = chunk
    by_channel = tokens.log_decay.shape[-1] > 1

    def read(x: Array) -> Array:
        if by_channel:
            return product(x * decays.enter, state, "ik,krv->irv")
        return product(x, state, "ik,krv->irv") * decays.enter

    written = tokens.value
    if system is not None and tokens.beta is not None:
        right = (tokens.value - read(tokens.key)) * tokens.beta.swapaxes(2, 3)[..., None]
        written = _solve(*system, right)
    out = read(tokens.query) + product(pairs, written, "rij,jrv->irv")
    key, value = (tokens.key * decays.leave, written) if by_channel else (tokens.key, written * decays.leave)
    return state * decays.keep + product(key, value, "ik,irv->krv"), (out, written)


def _advance_all(
    start: Array,
    tokens: Tokens,
    decays: _Decays,
    pairs: Array,
    system: tuple[Array, Array] | None,
    *,
    carry: Callable[..., Any],
) -> tuple[Array, tuple[Array, Array]]:
    """Compute what a scan of `_advance` computes, with everything but the states in parallel over chunks.

    For this, U is split into U = (I + A)^-1 B V - ((I + A)^-1 B exp(G) K) S.
    """
    by_channel = tokens.log_decay.shape[-1] > 1
    value_dim = tokens.value.shape[-1]
    added, left = tokens.value, None
    if system is not None and tokens.beta is not None:
        read = (tokens.key * decays.enter)[..., None, :] if by_channel else tokens.key[..., None, :] * decays.enter
        right = jnp.concatenate([tokens.value, -read], -1) * tokens.beta.swapaxes(3, 4)[..., None]
        solved = _solve(*system, right)
        added, left = solved[..., :value_dim], solved[..., value_dim:]
    scale = None if by_channel else jnp.broadcast_to(decays.leave, (*tokens.value.shape[:-1], 1))[..., 0]
    keep = jnp.broadcast_to(decays.keep, (*decays.keep.shape[:3], start.shape[2], *decays.keep.shape[4:]))[..., 0]
    key = tokens.key * decays.leave if by_channel else tokens.key
    states, written, end = carry(CarryTerms(added, left, key, scale, keep), start)
    query = tokens.query * decays.enter if by_channel else tokens.query
    out = product(query, states, "ik,krv->irv") * (1.0 if by_channel else decays.enter)
    return end, (out + product(pairs, written, "rij,jrv->irv"), written)
