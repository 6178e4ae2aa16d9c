"""One chunk of a recurrence in a Pallas kernel: the equations of `chunked_scan`, in arrays of two dimensions.

Tokens are rows; numbers of a token and a head stand as rows of heads. Decays by channel have an exponent for each pair
of tokens and channel. None is above 0, and none is a difference of sums: blocks of 1, 2, 4, … tokens are joined in
pairs, and between a token of the second and one of the first decays go by way of the second's first token,

    P_ij = sum_d (q_id exp(sum of g after r up to i)) (k_jd exp(sum of g after j up to r)),

so that each size of blocks is one product.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


_SMALLEST = 8  # rows of the blocks that are inverted as a short sum of powers
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanPlan:
    """Static description of a call. A program has a key head, and `heads` of the value heads that share it."""

    heads: int
    parts: int  # programs that share a key head
    key_dim: int
    value_dim: int
    chunk: int
    delta: bool
    by_channel: bool
    interpret: bool

    @property
    def places(self) -> tuple[str, ...]:
        """Places of the blocks of inputs: document, state, query, key, value, log decay; for the delta rule beta."""
        decays = "keys" if self.by_channel else "heads"
        return ("documents", "state", "keys", "keys", "values", decays, *("heads",) * self.delta)

    @property
    def columns(self) -> int:
        """Columns of the states and the values of a program."""
        return self.heads * self.value_dim

    @property
    def operations(self) -> int:
        """Operations of a program for one chunk."""
        square, states = self.chunk**2, self.chunk * self.key_dim * self.columns
        inverse = self.heads * self.chunk**3 * (2 * (self.chunk // _SMALLEST).bit_length() + 2)
        products = square * (self.key_dim + self.columns) + 2 * states
        decays = square * self.key_dim * (3 * self.chunk.bit_length() + 2) if self.by_channel else 0
        return 2 * (products + decays + self.delta * (products - states + inverse))


def _product(left: Array, right: Array, axes: tuple[int, int] = (1, 0), precision: Any = None) -> Array:
    contracted = (axes[0],), (axes[1],)
    return jax.lax.dot_general(
        left, right, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _rows_and_columns(size: int) -> tuple[Array, Array]:
    """Return the row and the column of each element of a square."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column


def _inverse(system: Array) -> Array:
    """Compute (I + A)^-1 of a strictly lower triangle: small blocks on the diagonal, then joined in pairs.

    The eighth power of a block of eight is zero, and (I - A)(I + A^2)(I + A^4) is the sum of all before.
    """
    row, column = _rows_and_columns(system.shape[0])

    def multiply(left: Array, right: Array) -> Array:
        return _product(left, right, precision=_EXACT)

    def together(size: int) -> Array:
        shift = size.bit_length() - 1
        return (row >> shift) == (column >> shift)

    power = jnp.where(together(_SMALLEST), -system, 0.0)
    inverse = jnp.where(row == column, 1.0, power)
    for _ in range(_SMALLEST.bit_length() - 2):
        power = multiply(power, power)
        inverse = inverse + multiply(inverse, power)
    size = _SMALLEST
    while size < system.shape[0]:
        corner = jnp.where(together(2 * size) & ~together(size), system, 0.0)
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

    Decays are `heads chunk`, or `chunk key_dim` where each channel has its own; then a program has one head.
    """
    run = _by_channel if plan.by_channel else _by_head
    return run(plan, document, state, query, key, value, log_decay, beta)


def _upright(x: Array) -> Array:
    """Turn a row into a column."""
    row, column = _rows_and_columns(x.shape[1])
    return jnp.where(row == column, x, 0.0).sum(1, keepdims=True)


def _by_head(plan, document, state, query, key, value, log_decay, beta) -> tuple[Array, Array, Array]:
    row, column = _rows_and_columns(plan.chunk)

    def side_by_side(columns: list[Array]) -> Array:
        return jnp.concatenate([jnp.broadcast_to(x, (x.shape[0], plan.value_dim)) for x in columns], 1)

    standing = _upright(document)
    same = standing == document
    before, beyond = same & (row >= column), same & (row <= column)
    between = _product(query, key, (1, 1))
    readout = _product(query if beta is None else jnp.concatenate([query, key]), state)
    between_keys = None if beta is None else jnp.where(row > column, _product(key, key, (1, 1)), 0.0)
    outs, writtens, leaves, keeps = [], [], [], []
    for head in range(plan.heads):
        decay, features = log_decay[head : head + 1], slice(head * plan.value_dim, (head + 1) * plan.value_dim)
        # multiples of 2^-10 add up without rounding, so that differences of two sums have all their digits
        coarse = jax.lax.stop_gradient(jnp.floor(decay * 1024 + 0.5) * 2.0**-10)
        fade = total = jnp.zeros((), jnp.float32)
        for part in (coarse, decay - coarse):
            since = jnp.where(before, part, 0.0).sum(1, keepdims=True)
            fade += since - jnp.where(beyond, _upright(part), 0.0).sum(0, keepdims=True)
            total += since
        fade = jnp.exp(jnp.where(before, fade, -jnp.inf))
        enter = jnp.exp(jnp.where(standing == 0, total, -jnp.inf))
        written = value[:, features]
        if between_keys is not None and beta is not None:
            rate = _upright(beta[head : head + 1])
            right = (written - readout[plan.chunk :, features] * enter) * rate
            written = _solve(between_keys * fade * rate, right)
        outs.append(readout[: plan.chunk, features] * enter + _product(between * fade, written))
        writtens.append(written)
        leaves.append(_upright(fade[-1:]))
        keeps.append(enter[-1:])
    out, written = (jnp.concatenate(x, 1) for x in (outs, writtens))
    state = state * side_by_side(keeps) + _product(key, written * side_by_side(leaves), (0, 0))
    return state, out, written


def _by_channel(plan, document, state, query, key, value, log_decay, beta) -> tuple[Array, Array, Array]:
    row, column = _rows_and_columns(plan.chunk)
    standing = _upright(document)
    powers = range(plan.chunk.bit_length() - 1)
    masks = [row >= column, row < column, *(_way(row, column, power) for power in powers)]
    stacked = jnp.concatenate([jnp.where(mask, 1.0, 0.0) for mask in masks])
    sums = _product(stacked, log_decay, precision=_EXACT).reshape(len(masks), *log_decay.shape)
    enter = jnp.exp(jnp.where(standing == 0, sums[0], -jnp.inf))
    leave = jnp.exp(jnp.where(standing == standing[-1:], sums[1], -jnp.inf))
    questions = query if beta is None else jnp.concatenate([query, key])

    def decayed(fade: Array) -> Array:
        return questions * (fade if beta is None else jnp.concatenate([fade, fade]))

    pairs = jnp.where(row == column, (query * key).sum(1, keepdims=True), 0.0)
    pairs = pairs if beta is None else jnp.concatenate([pairs, jnp.zeros_like(pairs)])
    for power in powers:
        fade, (one, other) = jnp.exp(sums[2 + power]), (row >> power, column >> power)
        met = (one >> 1 == other >> 1) & (one > other) & (standing == document)
        met = met if beta is None else jnp.concatenate([met, met])
        pairs += jnp.where(met, _product(decayed(fade), key * fade, (1, 1)), 0.0)
    readout, written = _product(decayed(enter), state), value
    if beta is not None:
        rate = _upright(beta)
        written = _solve(pairs[plan.chunk :] * rate, (value - readout[plan.chunk :]) * rate)
    out = readout[: plan.chunk] + _product(pairs[: plan.chunk], written)
    return state * _upright(enter[-1:]) + _product(key * leave, written, (0, 0)), out, written


def _way(row: Array, column: Array, power: int) -> Bool[Array, "chunk chunk"]:
    """Return which log decays lie between each token and the first one of the second block of its pair of blocks.

    Blocks have `2^power` tokens.
    """
    block, together = row >> power, (row >> power) == (column >> power)
    second = together & (column <= row) & (column != block << power)
    first = (together & (column > row)) | (column == (block + 1) << power)
    in_second = (block & 1) == 1
    return (in_second & second) | (~in_second & first)
