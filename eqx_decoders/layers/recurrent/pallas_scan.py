"""Recurrences in Pallas kernels for TPUs: chunks follow one another while the state stays in vector memory.

The equations are those of `chunked_scan`, for one decay a head. Pairs of a chunk's tokens, the inverse of the triangle
too, are never written to memory; the state between chunks is, once, if gradients are wanted. The backward pass goes
through the chunks from the last to the first, and differentiates one chunk where it is.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.core.chips import LANES
from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.recurrent.chunked_scan import FORGOTTEN


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import
CHUNK = 128  # tokens: half as many states are stored as with 64, and products fill the units
_WIDEST = 512  # columns of the values of a program: value heads that share a key head
_MOST = 8, 1024  # heads of a program, each of which is code of its own, and columns where no fewer heads fill lanes
_SMALLEST = 8  # rows of the blocks that are inverted as a short sum of powers
_VMEM = 32 * 2**20
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ScanPlan:
    """Static description of a call. A program has a key head, and `heads` of the value heads that share it."""

    heads: int
    parts: int  # programs that share a key head
    key_dim: int
    value_dim: int
    chunk: int
    delta: bool
    interpret: bool

    @property
    def places(self) -> tuple[str, ...]:
        """Places of the blocks of inputs: document, state, query, key, value, log decay; for the delta rule beta."""
        return ("documents", "state", "keys", "keys", "values", "heads", *("heads",) * self.delta)

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
        return 2 * (products + self.delta * (products - states + inverse))


def fits(
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads decay_dim"],
) -> bool:
    """Return whether the kernel can run this recurrence: one decay a head, a whole chunk, and blocks of whole lanes."""
    whole = key.shape[3] % LANES == 0 and _heads_at_once(value.shape[2] // key.shape[2], value.shape[3]) is not None
    return whole and log_decay.shape[3] == 1 and value.shape[1] >= CHUNK


def _heads_at_once(groups: int, value_dim: int) -> int | None:
    """Return how many heads of a group a program takes: their values fill whole lanes; None if they are too many."""
    fitting = [n for n in range(1, groups + 1) if groups % n == 0 and n * value_dim % LANES == 0]
    fitting = [n for n in fitting if n <= _MOST[0] and n * value_dim <= _MOST[1]]
    return max((n for n in fitting if n == fitting[0] or n * value_dim <= _WIDEST), default=None)


# --- one chunk: arrays of two dimensions, tokens as rows; numbers of a token and a head stand as rows of heads ---


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


def _chunk(
    plan: _ScanPlan,
    document: Float32[Array, "1 chunk"],
    state: Float32[Array, "key_dim columns"],
    query: Float32[Array, "chunk key_dim"],
    key: Float32[Array, "chunk key_dim"],
    value: Float32[Array, "chunk columns"],
    log_decay: Float32[Array, "heads chunk"],
    beta: Float32[Array, "heads chunk"] | None = None,
) -> tuple[Array, Array, Array]:
    """Return the state after a chunk, its outputs, and the values that it wrote."""
    row, column = _rows_and_columns(plan.chunk)

    def upright(x: Array) -> Array:
        return jnp.where(row == column, x, 0.0).sum(1, keepdims=True)

    def side_by_side(columns: list[Array]) -> Array:
        return jnp.concatenate([jnp.broadcast_to(x, (x.shape[0], plan.value_dim)) for x in columns], 1)

    standing = upright(document)
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
            fade += since - jnp.where(beyond, upright(part), 0.0).sum(0, keepdims=True)
            total += since
        fade = jnp.exp(jnp.where(before, fade, -jnp.inf))
        enter = jnp.exp(jnp.where(standing == 0, total, -jnp.inf))
        written = value[:, features]
        if between_keys is not None and beta is not None:
            rate = upright(beta[head : head + 1])
            right = (written - readout[plan.chunk :, features] * enter) * rate
            written = _solve(between_keys * fade * rate, right)
        outs.append(readout[: plan.chunk, features] * enter + _product(between * fade, written))
        writtens.append(written)
        leaves.append(upright(fade[-1:]))
        keeps.append(enter[-1:])
    out, written = (jnp.concatenate(x, 1) for x in (outs, writtens))
    state = state * side_by_side(keeps) + _product(key, written * side_by_side(leaves), (0, 0))
    return state, out, written


# --- the kernels: a chunk of a program ---


def _forward_kernel(plan: _ScanPlan, *refs: Any) -> None:
    inputs, (out, end, *others), state = _cut(refs, len(plan.places))
    document, start, *tokens = inputs

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = start[...]

    if len(others) > plan.delta:
        others[-1][...] = state[...]
    after, outs, written = _chunk(plan, document[...], state[...], *_read(tokens))
    state[...] = after
    out[...] = outs.astype(out.dtype)
    if plan.delta:
        others[0][...] = written

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        end[...] = after


def _backward_kernel(plan: _ScanPlan, *refs: Any) -> None:
    inputs, (start_bar, *bars), state_bar = _cut(refs, len(plan.places) + 2 + plan.delta)
    document, *tokens = inputs[: len(plan.places) - 1]
    states, end_bar, out_bar, *written_bar = inputs[len(plan.places) - 1 :]

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_bar[...] = end_bar[...]

    pull = jax.vjp(functools.partial(_chunk, plan, document[...]), states[...], *_read(tokens))[1]
    (out_bar,) = _read([out_bar])
    written_gradient = written_bar[0][...] if plan.delta else jnp.zeros_like(out_bar)
    before, *gradients = pull((state_bar[...], out_bar, written_gradient))
    state_bar[...] = before
    for ref, bar in zip(bars, gradients, strict=True):
        ref[...] = bar

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        start_bar[...] = before


def _cut(refs: tuple[Any, ...], inputs: int) -> tuple[Any, Any, Any]:
    """Split references into inputs, results, and what persists from chunk to chunk."""
    return refs[:inputs], refs[inputs:-1], refs[-1]


def _read(refs: Sequence[Any]) -> list[Array]:
    return [x[...].astype(jnp.float32) for x in refs]


# --- their calls: arrays in whole chunks, features of all heads as one dimension ---


def _call(
    plan: _ScanPlan, kernel: Any, operands: list[tuple[str, Array]], results: list[tuple[str, tuple[int, ...], Any]]
) -> Sequence[Array]:
    """Run one `pallas_call`; operands and results come with the places of their blocks."""
    batch, programs, chunks = dict(operands)["heads"].shape[:3]
    backward, size = kernel is _backward_kernel, plan.chunk

    def spec(place: str) -> Any:
        def at(chunk):
            return chunks - 1 - chunk if backward else chunk

        block, index = {
            "documents": ((1, size), lambda b, n, c: (b, at(c), 0, 0)),
            "keys": ((size, plan.key_dim), lambda b, n, c: (b, at(c), jax.lax.div(n, plan.parts))),
            "programs": ((size, plan.key_dim), lambda b, n, c: (b, at(c), n)),
            "values": ((size, plan.columns), lambda b, n, c: (b, at(c), n)),
            "heads": ((plan.heads, size), lambda b, n, c: (b, n, at(c), 0, 0)),
            "state": ((plan.key_dim, plan.columns), lambda b, n, c: (b, n, 0, 0)),
            "states": ((plan.key_dim, plan.columns), lambda b, n, c: (b, n, at(c), 0, 0)),
        }[place]
        return pl.BlockSpec((*(None,) * (len(index(0, 0, 0)) - 2), *block), index)

    shapes = [jax.ShapeDtypeStruct(*result[1:]) for result in results]
    arrays = [array for _, array in operands]
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=(batch, programs, chunks),
        in_specs=[spec(place) for place, _ in operands],
        out_specs=[spec(place) for place, *_ in results],
        out_shape=shapes,
        scratch_shapes=[pltpu.VMEM((plan.key_dim, plan.columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=batch * programs * chunks * plan.operations * (3 if backward else 1),
            transcendentals=batch * programs * chunks * plan.heads * size * size,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *shapes)),
        ),
        interpret=plan.interpret,
        name=f"recurrence{kernel.__name__}",
    )(*arrays)


def _run(plan: _ScanPlan, arrays: tuple[Array, ...], keep: bool) -> Sequence[Array]:
    """Return outputs, the last state, written values of the delta rule, and, to `keep`, the state before each chunk."""
    state, values, rows = arrays[1].shape, arrays[4].shape, arrays[5].shape[:3]
    results = [("values", values, arrays[4].dtype), ("state", state, jnp.float32)]
    results += [("values", values, jnp.float32)] * plan.delta
    results += [("states", (*rows, *state[2:]), jnp.float32)] * keep
    return _call(plan, _forward_kernel, list(zip(plan.places, arrays, strict=True)), results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(plan: _ScanPlan, *arrays: Array) -> tuple[Array, ...]:
    return tuple(_run(plan, arrays, keep=False))


def _recurrence_forward(plan: _ScanPlan, *arrays: Array) -> tuple[tuple[Array, ...], tuple]:
    *results, states = _run(plan, arrays, keep=True)
    return tuple(results), (arrays, states)


def _recurrence_backward(plan: _ScanPlan, residuals: tuple, bars: tuple[Array, ...]) -> tuple[Array | None, ...]:
    arrays, states = residuals
    out_bar, end_bar, *written_bar = bars
    _, start, query, _, value, *rows = arrays
    operands = [each for each in zip(plan.places, arrays, strict=True) if each[0] != "state"]
    operands += [("states", states), ("state", end_bar), ("values", out_bar)]
    operands += [("values", x) for x in written_bar]
    programs = (*query.shape[:2], start.shape[1] * plan.key_dim)
    shapes = start.shape, programs, programs, value.shape, *(x.shape for x in rows)
    kinds = "state", "programs", "programs", *plan.places[4:]
    results = [(place, shape, jnp.float32) for place, shape in zip(kinds, shapes, strict=True)]
    start_bar, query_bar, key_bar, *others = _call(plan, _backward_kernel, operands, results)
    query_bar, key_bar = (
        x.reshape(*x.shape[:2], -1, plan.parts, plan.key_dim).sum(3).reshape(query.shape) for x in (query_bar, key_bar)
    )
    bars = start_bar, query_bar, key_bar, *others
    return None, *(bar.astype(x.dtype) for bar, x in zip(bars, arrays[1:], strict=True))


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


def run_kernel(
    query: Float[Array, "batch length key_heads key_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads 1"],
    beta: Float[Array, "batch length heads"] | None,
    state: Float32[Array, "batch heads key_dim value_dim"] | None = None,
    resets: Bool[Array, "batch length"] | None = None,
    chunk: int = CHUNK,
    interpret: bool = False,
) -> tuple[
    Float[Array, "batch length heads value_dim"],
    Float32[Array, "batch length heads value_dim"],
    Float32[Array, "batch heads key_dim value_dim"],
]:
    """Return outputs, written values and the last state, as `run_chunks` does, where `fits` allows.

    `chunk` is a power of two, at least 8. Interpreted, a kernel has any shape: all heads of a group at once.
    """
    (batch, length, heads, value_dim), (key_heads, key_dim) = value.shape, key.shape[2:]
    at_once = _heads_at_once(heads // key_heads, value_dim) or heads // key_heads
    programs = heads // at_once
    plan = _ScanPlan(
        heads=at_once,
        parts=programs // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk=chunk,
        delta=beta is not None,
        interpret=interpret,
    )
    log_decay = jnp.maximum(log_decay[..., 0].astype(jnp.float32), FORGOTTEN)
    if resets is None:
        resets = jnp.zeros((batch, length), bool)
    log_decay = jnp.where(resets[:, :, None], 0.0, log_decay)  # what it would fade is forgotten anyway

    def whole(x: Array) -> Array:
        """Pad to whole chunks by tokens that change nothing."""
        return jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))

    def rows(x: Array) -> Array:
        return whole(x.astype(jnp.float32)).reshape(batch, -1, chunk, programs, at_once).transpose(0, 3, 1, 4, 2)

    document = jnp.cumsum(whole(resets).reshape(batch, -1, 1, chunk).astype(jnp.float32), 3)
    start = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) if state is None else state
    start = start.reshape(batch, programs, at_once, key_dim, value_dim).swapaxes(2, 3)
    flat = (whole(x.reshape(batch, length, -1)) for x in (query, key, value))
    numbers = [rows(x) for x in (log_decay, beta) if x is not None]
    results: Any = _recurrence(plan, document, start.reshape(*start.shape[:3], -1), *flat, *numbers)
    out, end, *written = results
    end = end.reshape(start.shape).swapaxes(2, 3).reshape(batch, heads, key_dim, value_dim)
    out, *written = (x[:, :length].reshape(value.shape) for x in (out, *written))
    return out, written[0] if written else value.astype(jnp.float32), end
