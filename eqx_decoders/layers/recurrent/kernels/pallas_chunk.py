"""One chunk of a recurrence in a Pallas kernel: the equations of `chunked_scan`, with two-dimensional arrays.

Tokens are rows. Scalars per token and head are stored as [heads, chunk]. Decays per channel would need an exponent for
each pair of tokens and each channel. Instead, sub-chunks of 1, 2, 4, … tokens are joined in pairs. Between a token i of
the second sub-chunk and a token j of the first, the decay is split at the first token r of the second sub-chunk,

    P_ij = sum_d (q_id exp(sum of g after r up to i)) (k_jd exp(sum of g after j up to r)),

so that one matrix product computes all pairs of one sub-chunk size. All exponents are at most 0, and none is computed
as a difference of sums.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


_SERIES_ROWS = 8  # rows of the diagonal squares that are inverted by a finite power series
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanPlan:
    """Static description of a call. A program processes one key head, and `heads` value heads that share it."""

    heads: int
    programs_per_key: int  # programs that share a key head
    key_dim: int
    value_dim: int
    chunk: int  # tokens per chunk
    delta: bool  # delta rule; False: linear recurrence
    by_channel: bool  # decays per key channel; False: per head
    interpret: bool

    @property
    def input_layouts(self) -> tuple[str, ...]:
        """Layouts (see `pallas_scan._call`) of document, state, query, key, value, log decay and, if delta, beta."""
        decay = "keys" if self.by_channel else "heads"
        layouts = ("documents", "state", "keys", "keys", "values", decay)
        return (*layouts, "heads") if self.delta else layouts

    @property
    def columns(self) -> int:
        """Columns of a program's states and values: the features of its value heads, concatenated."""
        return self.heads * self.value_dim

    @property
    def operations(self) -> int:
        """Floating point operations of a program for one chunk."""
        square = self.chunk**2
        states = self.chunk * self.key_dim * self.columns
        inverse = self.heads * self.chunk**3 * (2 * (self.chunk // _SERIES_ROWS).bit_length() + 2)
        products = square * (self.key_dim + self.columns) + 2 * states
        decays = square * self.key_dim * (3 * self.chunk.bit_length() + 2) if self.by_channel else 0
        return 2 * (products + decays + self.delta * (products - states + inverse))


def _product(left: Array, right: Array, axes: tuple[int, int] = (1, 0), precision: Any = None) -> Array:
    contracted = (axes[0],), (axes[1],)
    return jax.lax.dot_general(
        left, right, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _rows_and_columns(size: int) -> tuple[Array, Array]:
    """Return the row index and the column index of each element of a square matrix."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column


def _inverse(system: Array) -> Array:
    """Compute (I + A)^-1 for a strictly lower triangular A.

    Squares on the diagonal are inverted first, and then joined in pairs. For a square of eight rows A^8 = 0, so its
    inverse is the power series (I - A)(I + A^2)(I + A^4).
    """
    row, column = _rows_and_columns(system.shape[0])

    def multiply(left: Array, right: Array) -> Array:
        return _product(left, right, precision=_EXACT)

    def on_diagonal(size: int) -> Array:
        """Return the mask of the diagonal squares of `size` rows."""
        shift = size.bit_length() - 1
        return (row >> shift) == (column >> shift)

    power = jnp.where(on_diagonal(_SERIES_ROWS), -system, 0.0)
    inverse = jnp.where(row == column, 1.0, power)
    for _ in range(_SERIES_ROWS.bit_length() - 2):
        power = multiply(power, power)
        inverse = inverse + multiply(inverse, power)
    size = _SERIES_ROWS
    while size < system.shape[0]:
        corner = jnp.where(on_diagonal(2 * size) & ~on_diagonal(size), system, 0.0)
        inverse = inverse - multiply(multiply(inverse, corner), inverse)
        size *= 2
    return inverse


@jax.custom_vjp
def _solve(system: Array, right: Array) -> Array:
    """Solve (I + A) U = R."""
    return _solve_forward(system, right)[0]


def _solve_forward(system: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = _inverse(system)
    solution = _product(inverse, right)
    return solution, (inverse, solution)


def _solve_backward(residuals: tuple[Array, Array], solution_bar: Array) -> tuple[Array, Array]:
    """Compute R' = (I + A)^-T U',  A' = -R' U^T."""
    inverse, solution = residuals
    right_bar = _product(inverse, solution_bar, (0, 0))
    return -_product(right_bar, solution, (1, 1)), right_bar


_solve.defvjp(_solve_forward, _solve_backward)


def run_chunk(
    plan: ScanPlan,
    document: Float32[Array, "1 chunk"],
    state: Float32[Array, "key_dim columns"],
    query: Float32[Array, "chunk key_dim"],
    key: Float32[Array, "chunk key_dim"],
    value: Float32[Array, "chunk columns"],
    log_decay: Float32[Array, "_ _"],
    beta: Float32[Array, "heads chunk"] | None = None,
) -> tuple[Array, Array, Array]:
    """Return the state after a chunk, its outputs, and the values that it wrote.

    `document` is the index of each token's document within the chunk. The shape of `log_decay` is `heads chunk`, or,
    with decays per channel, `chunk key_dim`; a program then has one value head.
    """
    run = _run_by_channel if plan.by_channel else _run_by_head
    return run(plan, document, state, query, key, value, log_decay, beta)


def _to_column(x: Array) -> Array:
    """Transpose a row vector to a column vector."""
    row, column = _rows_and_columns(x.shape[1])
    return jnp.where(row == column, x, 0.0).sum(1, keepdims=True)


def _run_by_head(plan, document, state, query, key, value, log_decay, beta) -> tuple[Array, Array, Array]:
    row, column = _rows_and_columns(plan.chunk)

    def broadcast_to_features(columns: list[Array]) -> Array:
        """Repeat the column of each head over the head's value features."""
        return jnp.concatenate([jnp.broadcast_to(x, (x.shape[0], plan.value_dim)) for x in columns], 1)

    row_document = _to_column(document)
    same = row_document == document
    lower, upper = same & (row >= column), same & (row <= column)
    query_key = _product(query, key, (1, 1))
    # rows: the chunk's queries, then, with the delta rule, its keys
    readout = _product(query if beta is None else jnp.concatenate([query, key]), state)
    key_key = None if beta is None else jnp.where(row > column, _product(key, key, (1, 1)), 0.0)
    outs, writtens, leaves, keeps = [], [], [], []
    for head in range(plan.heads):
        decay = log_decay[head : head + 1]
        features = slice(head * plan.value_dim, (head + 1) * plan.value_dim)
        # sums of multiples of 2^-10 are exact, so that differences of two sums are precise
        coarse = jax.lax.stop_gradient(jnp.floor(decay * 1024 + 0.5) * 2.0**-10)
        pair_decay = total = jnp.zeros((), jnp.float32)
        for part in (coarse, decay - coarse):
            row_sum = jnp.where(lower, part, 0.0).sum(1, keepdims=True)
            pair_decay += row_sum - jnp.where(upper, _to_column(part), 0.0).sum(0, keepdims=True)
            total += row_sum
        pair_decay = jnp.exp(jnp.where(lower, pair_decay, -jnp.inf))
        enter = jnp.exp(jnp.where(row_document == 0, total, -jnp.inf))  # decay from the state before to each token
        written = value[:, features]
        if key_key is not None and beta is not None:
            head_beta = _to_column(beta[head : head + 1])
            right = (written - readout[plan.chunk :, features] * enter) * head_beta
            written = _solve(key_key * pair_decay * head_beta, right)
        outs.append(readout[: plan.chunk, features] * enter + _product(query_key * pair_decay, written))
        writtens.append(written)
        leaves.append(_to_column(pair_decay[-1:]))
        keeps.append(enter[-1:])
    out, written = (jnp.concatenate(x, 1) for x in (outs, writtens))
    state = state * broadcast_to_features(keeps) + _product(key, written * broadcast_to_features(leaves), (0, 0))
    return state, out, written


def _run_by_channel(plan, document, state, query, key, value, log_decay, beta) -> tuple[Array, Array, Array]:
    row, column = _rows_and_columns(plan.chunk)
    row_document = _to_column(document)
    powers = range(plan.chunk.bit_length() - 1)
    masks = [row >= column, row < column, *(_decays_to_split(row, column, power) for power in powers)]
    stacked = jnp.concatenate([jnp.where(mask, 1.0, 0.0) for mask in masks])
    sums = _product(stacked, log_decay, precision=_EXACT).reshape(len(masks), *log_decay.shape)
    enter = jnp.exp(jnp.where(row_document == 0, sums[0], -jnp.inf))  # from the state before to each token
    leave = jnp.exp(jnp.where(row_document == row_document[-1:], sums[1], -jnp.inf))  # from each token to the end
    readers = query if beta is None else jnp.concatenate([query, key])

    def decayed_readers(decay: Array) -> Array:
        return readers * (decay if beta is None else jnp.concatenate([decay, decay]))

    pairs = jnp.where(row == column, (query * key).sum(1, keepdims=True), 0.0)
    pairs = pairs if beta is None else jnp.concatenate([pairs, jnp.zeros_like(pairs)])
    for power in powers:
        decay = jnp.exp(sums[2 + power])
        row_subchunk, column_subchunk = row >> power, column >> power
        joined = (row_subchunk >> 1 == column_subchunk >> 1) & (row_subchunk > column_subchunk)
        joined &= row_document == document
        joined = joined if beta is None else jnp.concatenate([joined, joined])
        pairs += jnp.where(joined, _product(decayed_readers(decay), key * decay, (1, 1)), 0.0)
    readout = _product(decayed_readers(enter), state)
    written = value
    if beta is not None:
        column_beta = _to_column(beta)
        written = _solve(pairs[plan.chunk :] * column_beta, (value - readout[plan.chunk :]) * column_beta)
    out = readout[: plan.chunk] + _product(pairs[: plan.chunk], written)
    return state * _to_column(enter[-1:]) + _product(key * leave, written, (0, 0)), out, written


def _decays_to_split(row: Array, column: Array, power: int) -> Bool[Array, "chunk chunk"]:
    """Return which log decays (columns) lie between each token (row) and the split of its pair of sub-chunks.

    Sub-chunks have `2^power` tokens. The split is the first token of the second sub-chunk of the pair.
    """
    subchunk = row >> power
    same = subchunk == (column >> power)
    after_split = same & (column <= row) & (column != subchunk << power)
    before_split = (same & (column > row)) | (column == (subchunk + 1) << power)
    in_second = (subchunk & 1) == 1
    return (in_second & after_split) | (~in_second & before_split)
