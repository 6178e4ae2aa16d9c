"""Pallas TPU kernels of the linear recurrence and the delta rule, which keep the state in VMEM from chunk to chunk.

The equations are those of `chunked_scan`; `pallas_chunk` implements them for one chunk. Matrices over pairs of tokens
of a chunk, including the inverse of the triangular system, are never written to HBM. The forward pass writes the state
before each chunk to HBM only if gradients are needed. The backward kernel processes chunks from the last to the first,
and differentiates `pallas_chunk.run_chunk` inside the kernel.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.recurrent.kernels.pallas_chunk import ScanPlan, run_chunk
from eqx_decoders.layers.recurrent.scans.chunked_scan import MIN_LOG_DECAY
from eqx_decoders.sharding.chips import LANES


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import
CHUNK = 128  # tokens per chunk: stores half as many states as 64, and fills the matrix unit
_MAX_HEADS = 8  # value heads per program; the kernel is unrolled over them
_MAX_VALUE_COLUMNS = 512  # value features per program, over all its value heads
_MAX_COLUMNS_OF_FEWEST_HEADS = 1024  # the same limit where fewer heads would not fill whole lanes
_VMEM_LIMIT_BYTES = 32 * 2**20


def fits(
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads decay_dim"],
) -> bool:
    """Return whether the kernels support these shapes: at least one full chunk, and keys and values of full lanes."""
    values_per_key = 1 if log_decay.shape[3] > 1 else value.shape[2] // key.shape[2]
    fills_lanes = key.shape[3] % LANES == 0 and _heads_per_program(values_per_key, value.shape[3]) is not None
    return fills_lanes and value.shape[1] >= CHUNK


def _heads_per_program(values_per_key: int, value_dim: int) -> int | None:
    """Return the number of value heads of a program, out of the `values_per_key` heads that share a key head.

    Their values fill whole lanes. Return None if no number within the limits does.
    """
    counts = [n for n in range(1, values_per_key + 1) if values_per_key % n == 0 and n * value_dim % LANES == 0]
    counts = [n for n in counts if n <= _MAX_HEADS and n * value_dim <= _MAX_COLUMNS_OF_FEWEST_HEADS]
    return max((n for n in counts if n == counts[0] or n * value_dim <= _MAX_VALUE_COLUMNS), default=None)


# --- kernels: one grid step processes one chunk ---


def _forward_kernel(plan: ScanPlan, *refs: Any) -> None:
    inputs, (out, end, *optional), state = _split_refs(refs, len(plan.input_layouts))
    document, start, *tokens = inputs

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = start[...]

    if len(optional) > plan.delta:  # the states before chunks are wanted
        optional[-1][...] = state[...]
    after, chunk_out, written = run_chunk(plan, document[...], state[...], *_read(tokens))
    state[...] = after
    out[...] = chunk_out.astype(out.dtype)
    if plan.delta:
        optional[0][...] = written

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        end[...] = after


def _backward_kernel(plan: ScanPlan, *refs: Any) -> None:
    inputs, (start_bar, *bars), state_bar = _split_refs(refs, len(plan.input_layouts) + 2 + plan.delta)
    document, *tokens = inputs[: len(plan.input_layouts) - 1]
    states, end_bar, out_bar, *written_bar = inputs[len(plan.input_layouts) - 1 :]

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_bar[...] = end_bar[...]

    vjp = jax.vjp(functools.partial(run_chunk, plan, document[...]), states[...], *_read(tokens))[1]
    (out_bar,) = _read([out_bar])
    written_gradient = written_bar[0][...] if plan.delta else jnp.zeros_like(out_bar)
    before, *gradients = vjp((state_bar[...], out_bar, written_gradient))
    state_bar[...] = before
    for ref, bar in zip(bars, gradients, strict=True):
        ref[...] = bar

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        start_bar[...] = before


def _split_refs(refs: tuple[Any, ...], num_inputs: int) -> tuple[Any, Any, Any]:
    """Split references into inputs, results, and the scratch buffer, which persists from chunk to chunk."""
    return refs[:num_inputs], refs[num_inputs:-1], refs[-1]


def _read(refs: Sequence[Any]) -> list[Array]:
    return [x[...].astype(jnp.float32) for x in refs]


# --- calls of the kernels: lengths are multiples of the chunk, and the features of all heads are one dimension ---


def _call(
    plan: ScanPlan, kernel: Any, operands: list[tuple[str, Array]], results: list[tuple[str, tuple[int, ...], Any]]
) -> Sequence[Array]:
    """Run one `pallas_call`.

    Operands are pairs (layout, array), and results are triples (layout, shape, dtype). A layout is a name in `spec`,
    which defines the tile that a grid step (sequence, program, chunk) accesses.
    """
    by_layout = dict(operands)
    batch, chunks = by_layout["documents"].shape[:2]
    programs = by_layout["state"].shape[1]
    backward = kernel is _backward_kernel
    size = plan.chunk

    def spec(layout: str) -> Any:
        def at(chunk):
            return chunks - 1 - chunk if backward else chunk

        tile, index = {
            "documents": ((1, size), lambda b, n, c: (b, at(c), 0, 0)),
            "keys": ((size, plan.key_dim), lambda b, n, c: (b, at(c), jax.lax.div(n, plan.programs_per_key))),
            "programs": ((size, plan.key_dim), lambda b, n, c: (b, at(c), n)),
            "values": ((size, plan.columns), lambda b, n, c: (b, at(c), n)),
            "heads": ((plan.heads, size), lambda b, n, c: (b, n, at(c), 0, 0)),
            "state": ((plan.key_dim, plan.columns), lambda b, n, c: (b, n, 0, 0)),
            "states": ((plan.key_dim, plan.columns), lambda b, n, c: (b, n, at(c), 0, 0)),
        }[layout]
        return pl.BlockSpec((*(None,) * (len(index(0, 0, 0)) - 2), *tile), index)

    shapes = [jax.ShapeDtypeStruct(*result[1:]) for result in results]
    arrays = [array for _, array in operands]
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=(batch, programs, chunks),
        in_specs=[spec(layout) for layout, _ in operands],
        out_specs=[spec(layout) for layout, *_ in results],
        out_shape=shapes,
        scratch_shapes=[pltpu.VMEM((plan.key_dim, plan.columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=batch * programs * chunks * plan.operations * (3 if backward else 1),
            transcendentals=batch * programs * chunks * plan.heads * size * size,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *shapes)),
        ),
        interpret=plan.interpret,
        name=f"recurrence{kernel.__name__}",
    )(*arrays)


def _run_forward(plan: ScanPlan, arrays: tuple[Array, ...], save_states: bool) -> Sequence[Array]:
    """Return outputs, the last state, with the delta rule the written values, and optionally the state per chunk."""
    document, start, _, _, value, *_ = arrays
    results = [("values", value.shape, value.dtype), ("state", start.shape, jnp.float32)]
    if plan.delta:
        results.append(("values", value.shape, jnp.float32))
    if save_states:
        results.append(("states", (*start.shape[:2], document.shape[1], *start.shape[2:]), jnp.float32))
    return _call(plan, _forward_kernel, list(zip(plan.input_layouts, arrays, strict=True)), results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(plan: ScanPlan, *arrays: Array) -> tuple[Array, ...]:
    return tuple(_run_forward(plan, arrays, save_states=False))


def _recurrence_forward(plan: ScanPlan, *arrays: Array) -> tuple[tuple[Array, ...], tuple]:
    *results, states = _run_forward(plan, arrays, save_states=True)
    return tuple(results), (arrays, states)


def _recurrence_backward(plan: ScanPlan, residuals: tuple, bars: tuple[Array, ...]) -> tuple[Array | None, ...]:
    arrays, states = residuals
    out_bar, end_bar, *written_bar = bars
    _, start, query, _, value, *decay_and_beta = arrays
    operands = [(layout, array) for layout, array in zip(plan.input_layouts, arrays, strict=True) if layout != "state"]
    operands += [("states", states), ("state", end_bar), ("values", out_bar)]
    operands += [("values", x) for x in written_bar]
    per_program = (*query.shape[:2], start.shape[1] * plan.key_dim)  # gradients of queries and keys, per program
    shapes = start.shape, per_program, per_program, value.shape, *(x.shape for x in decay_and_beta)
    layouts = "state", "programs", "programs", *plan.input_layouts[4:]
    results = [(layout, shape, jnp.float32) for layout, shape in zip(layouts, shapes, strict=True)]
    start_bar, query_bar, key_bar, *other_bars = _call(plan, _backward_kernel, operands, results)
    query_bar, key_bar = (  # sum over the programs that share a key head
        x.reshape(*x.shape[:2], -1, plan.programs_per_key, plan.key_dim).sum(3).reshape(query.shape)
        for x in (query_bar, key_bar)
    )
    bars = start_bar, query_bar, key_bar, *other_bars
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
    """Return outputs, written values and the last state, as `run_chunks` does; on TPUs `fits` must be true.

    `chunk` is a power of two, at least 8. With `interpret=True` any shape is supported; if no number of heads fills
    whole lanes, a program processes all value heads that share a key head.
    """
    by_channel = log_decay.shape[3] > 1
    heads = value.shape[2]
    if by_channel and key.shape[2] < heads:  # value heads that share a key head have different decays of its channels
        query, key = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (query, key))
    batch, length, _, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    program_heads = _heads_per_program(heads // key_heads, value_dim) or heads // key_heads
    programs = heads // program_heads
    plan = ScanPlan(
        heads=program_heads,
        programs_per_key=programs // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk=chunk,
        delta=beta is not None,
        by_channel=by_channel,
        interpret=interpret,
    )
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), MIN_LOG_DECAY)
    if resets is None:
        resets = jnp.zeros((batch, length), bool)
    # at a reset the previous state does not count, so any decay is right; 0 keeps the sums small
    log_decay = jnp.where(resets[:, :, None, None], 0.0, log_decay)

    def pad(x: Array) -> Array:
        """Pad to a multiple of the chunk; zero tokens leave the state unchanged."""
        return jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))

    def heads_first(x: Array) -> Array:
        """Reshape [batch, length, heads] -> [batch, programs, chunks, program_heads, chunk]."""
        x = pad(x.astype(jnp.float32)).reshape(batch, -1, chunk, programs, program_heads)
        return x.transpose(0, 3, 1, 4, 2)

    document = jnp.cumsum(pad(resets).reshape(batch, -1, 1, chunk).astype(jnp.float32), 3)
    start = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) if state is None else state
    start = start.reshape(batch, programs, program_heads, key_dim, value_dim).swapaxes(2, 3)
    query, key, flat_value, flat_decay = (pad(x.reshape(batch, length, -1)) for x in (query, key, value, log_decay))
    decay_and_beta = [flat_decay if by_channel else heads_first(log_decay[..., 0])]
    if beta is not None:
        decay_and_beta.append(heads_first(beta))
    results: Any = _recurrence(
        plan, document, start.reshape(*start.shape[:3], -1), query, key, flat_value, *decay_and_beta
    )
    out, end, *written = results
    end = end.reshape(start.shape).swapaxes(2, 3).reshape(batch, heads, key_dim, value_dim)
    out, *written = (x[:, :length].reshape(value.shape) for x in (out, *written))
    return out, written[0] if written else value.astype(jnp.float32), end
