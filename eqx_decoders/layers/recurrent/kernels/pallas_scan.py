"""Recurrences in Pallas kernels for TPUs: chunks follow one another while the state stays in vector memory.

The equations are those of `chunked_scan`, `pallas_chunk` has them for one chunk. Pairs of a chunk's tokens, the inverse
of the triangle too, are never written to memory; the state between chunks is, once, if gradients are wanted. The
backward pass goes through the chunks from the last to the first, and differentiates one chunk where it is.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.recurrent.kernels.pallas_chunk import ScanPlan, run_chunk
from eqx_decoders.layers.recurrent.scans.chunked_scan import FORGOTTEN
from eqx_decoders.sharding.chips import LANES


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import
CHUNK = 128  # tokens: half as many states are stored as with 64, and products fill the units
_WIDEST = 512  # columns of the values of a program: value heads that share a key head
_MOST = 8, 1024  # heads of a program, each of which is code of its own, and columns where no fewer heads fill lanes
_VMEM = 32 * 2**20


def fits(
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads decay_dim"],
) -> bool:
    """Return whether the kernel can run this recurrence: a whole chunk, and blocks of whole lanes."""
    groups = 1 if log_decay.shape[3] > 1 else value.shape[2] // key.shape[2]
    whole = key.shape[3] % LANES == 0 and _heads_at_once(groups, value.shape[3]) is not None
    return whole and value.shape[1] >= CHUNK


def _heads_at_once(groups: int, value_dim: int) -> int | None:
    """Return how many heads of a group a program takes: their values fill whole lanes; None if they are too many."""
    fitting = [n for n in range(1, groups + 1) if groups % n == 0 and n * value_dim % LANES == 0]
    fitting = [n for n in fitting if n <= _MOST[0] and n * value_dim <= _MOST[1]]
    return max((n for n in fitting if n == fitting[0] or n * value_dim <= _WIDEST), default=None)


# --- the kernels: a chunk of a program ---


def _forward_kernel(plan: ScanPlan, *refs: Any) -> None:
    inputs, (out, end, *others), state = _cut(refs, len(plan.places))
    document, start, *tokens = inputs

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = start[...]

    if len(others) > plan.delta:
        others[-1][...] = state[...]
    after, outs, written = run_chunk(plan, document[...], state[...], *_read(tokens))
    state[...] = after
    out[...] = outs.astype(out.dtype)
    if plan.delta:
        others[0][...] = written

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        end[...] = after


def _backward_kernel(plan: ScanPlan, *refs: Any) -> None:
    inputs, (start_bar, *bars), state_bar = _cut(refs, len(plan.places) + 2 + plan.delta)
    document, *tokens = inputs[: len(plan.places) - 1]
    states, end_bar, out_bar, *written_bar = inputs[len(plan.places) - 1 :]

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_bar[...] = end_bar[...]

    pull = jax.vjp(functools.partial(run_chunk, plan, document[...]), states[...], *_read(tokens))[1]
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
    plan: ScanPlan, kernel: Any, operands: list[tuple[str, Array]], results: list[tuple[str, tuple[int, ...], Any]]
) -> Sequence[Array]:
    """Run one `pallas_call`; operands and results come with the places of their blocks."""
    named = dict(operands)
    (batch, chunks), programs = named["documents"].shape[:2], named["state"].shape[1]
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


def _run(plan: ScanPlan, arrays: tuple[Array, ...], keep: bool) -> Sequence[Array]:
    """Return outputs, the last state, written values of the delta rule, and, to `keep`, the state before each chunk."""
    chunks, state, values = arrays[0].shape[1], arrays[1].shape, arrays[4].shape
    results = [("values", values, arrays[4].dtype), ("state", state, jnp.float32)]
    results += [("values", values, jnp.float32)] * plan.delta
    results += [("states", (*state[:2], chunks, *state[2:]), jnp.float32)] * keep
    return _call(plan, _forward_kernel, list(zip(plan.places, arrays, strict=True)), results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(plan: ScanPlan, *arrays: Array) -> tuple[Array, ...]:
    return tuple(_run(plan, arrays, keep=False))


def _recurrence_forward(plan: ScanPlan, *arrays: Array) -> tuple[tuple[Array, ...], tuple]:
    *results, states = _run(plan, arrays, keep=True)
    return tuple(results), (arrays, states)


def _recurrence_backward(plan: ScanPlan, residuals: tuple, bars: tuple[Array, ...]) -> tuple[Array | None, ...]:
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
    log_decay: Float[Array, "batch length heads decay_dim"],
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
    by_channel, heads = log_decay.shape[3] > 1, value.shape[2]
    if by_channel and key.shape[2] < heads:  # each channel of each value head decays by itself
        query, key = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (query, key))
    (batch, length, _, value_dim), (key_heads, key_dim) = value.shape, key.shape[2:]
    at_once = _heads_at_once(heads // key_heads, value_dim) or heads // key_heads
    programs = heads // at_once
    plan = ScanPlan(
        heads=at_once,
        parts=programs // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk=chunk,
        delta=beta is not None,
        by_channel=by_channel,
        interpret=interpret,
    )
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), FORGOTTEN)
    if resets is None:
        resets = jnp.zeros((batch, length), bool)
    log_decay = jnp.where(resets[:, :, None, None], 0.0, log_decay)  # what it would fade is forgotten anyway

    def whole(x: Array) -> Array:
        """Pad to whole chunks by tokens that change nothing."""
        return jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))

    def rows(x: Array) -> Array:
        return whole(x.astype(jnp.float32)).reshape(batch, -1, chunk, programs, at_once).transpose(0, 3, 1, 4, 2)

    document = jnp.cumsum(whole(resets).reshape(batch, -1, 1, chunk).astype(jnp.float32), 3)
    start = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) if state is None else state
    start = start.reshape(batch, programs, at_once, key_dim, value_dim).swapaxes(2, 3)
    query, key, flat_value, decays = (whole(x.reshape(batch, length, -1)) for x in (query, key, value, log_decay))
    numbers = [decays if by_channel else rows(log_decay[..., 0]), *(rows(x) for x in (beta,) if x is not None)]
    results: Any = _recurrence(plan, document, start.reshape(*start.shape[:3], -1), query, key, flat_value, *numbers)
    out, end, *written = results
    end = end.reshape(start.shape).swapaxes(2, 3).reshape(batch, heads, key_dim, value_dim)
    out, *written = (x[:, :length].reshape(value.shape) for x in (out, *written))
    return out, written[0] if written else value.astype(jnp.float32), end
