"""`plan_decoding`: compiles a decoding step for a machine that need not be attached, and estimates its time.

The step is the serving engine's program for all slots: it feeds one token per slot, writes the cache, and samples.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_decoders.families.summary import active_parameters
from eqx_decoders.inference.unstack import unstack_cache, unstack_in_place
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.caches import abstract_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.planning.collectives import collectives
from eqx_decoders.planning.compile import Until, compile_step
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.hlo import Program, called, shape_bytes
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import PlannedStep
from eqx_decoders.planning.report import collective_lines, memory_lines, shared_data, size_text, time_lines
from eqx_decoders.planning.roofline import Roofline, network_seconds
from eqx_decoders.serving.engine.engine_weights import Models
from eqx_decoders.serving.engine.programs import EngineState, decode
from eqx_decoders.serving.engine.sampler import SamplingBatch
from eqx_decoders.sharding.axes import axes, named_leaves, names_of
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.training.flops import flops_per_token


_MIN_COPY = 2**20  # smaller copies are ignored, in bytes
_COPIES = "copy", "slice", "dynamic-slice"
_MAX_BIASES = 4  # logit biases per request


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingPlan(PlannedStep):
    """Plan of a decoding step.

    The memory traffic of the estimate: weights are read once (of experts, the expected number that the rows select),
    full caches are read once, and copied arrays are written and read once more.

    **Arguments:**

    - `rows`, `length`: number of sequences, and number of cached tokens per sequence.
    - `kernels`: number of runs of each Pallas kernel.
    - `copied`: bytes of weights and caches that are copied before they are read.
    """

    rows: int
    length: int
    kernels: dict[str, int]
    copied: int

    @property
    def token_bytes(self) -> float:
        """Bytes per token in the cache of a device."""
        return self.memory.cache / (self.rows * self.length)

    @property
    def room(self) -> int:
        """Number of tokens of a cache that uses all free memory."""
        if self.memory.peak is None or not self.token_bytes:
            return 0
        return max(0, int((self.memory.capacity - self.memory.peak + self.memory.cache) / self.token_bytes))


def plan_decoding(
    model: Decoder,
    machine: Machine,
    *,
    rows: int,
    length: int,
    page_size: int | None = None,
    options: Mapping[str, str] | None = None,
    until: Until = "code",
) -> DecodingPlan:
    """Compile a decoding step, and return its memory, collectives and estimated time.

    **Arguments:**

    - `model`: model with shapes instead of arrays, on a mesh of the machine's devices.
    - `page_size`: page size of the cache. None: the cache is not paged.
    - `options`, `until`: as in `make_plan`.
    """
    layout, whole = model.execution.layout, model.without_mtp()
    model = unstack_in_place(whole)
    pages = None if page_size is None else PageConfig(page_size=page_size, num_pages=rows * -(-length // page_size))
    dtype = jnp.dtype(model.execution.precision.compute)
    cache = unstack_cache(model, abstract_cache(model.config, rows, length, dtype=dtype, layout=layout, pages=pages))

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.replicated())

    batch = SamplingBatch.greedy(rows, -(-model.config.vocab_size // 32), _MAX_BIASES)
    arrays, static = eqx.partition(Models(model, None), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def step(arrays: Any, cache: Any, tokens: Array, *inputs: Any) -> Any:
        return decode(eqx.combine(arrays, static), EngineState(cache=cache, tokens=tokens), *inputs, num_top=0)

    inputs = like(rows), like(rows, 1), like(rows, 1), batch
    traced = jax.jit(step, donate_argnums=(1, 2)).trace(arrays, cache, like(rows, length), *inputs)
    weights, cached = (sum(map(device_bytes, jax.tree.leaves(tree))) for tree in (arrays, cache))
    known_memory = DeviceMemory(
        parameters=weights, optimizer=0, means=0, gradients=0, cache=cached, capacity=int(machine.memory)
    )
    started = time.perf_counter()
    memory, program, message = compile_step(traced, known_memory, dict(options or {}), until)
    sent = None if program is None else tuple(collectives(program, layout.sizes))
    copied = 0 if program is None else copied_bytes(program)
    flops = rows * flops_per_token(whole, length, backward=False) / len(machine.positions) / machine.flops
    return DecodingPlan(
        machine=machine,
        memory=memory,
        collectives=sent,
        roofline=Roofline(
            compute=flops,
            memory=(read_weights(whole, rows) + cached + 2 * copied) / machine.memory_bandwidth,
            networks=network_seconds(sent or (), machine),
            model_flops_seconds=flops,
        ),
        seconds=time.perf_counter() - started,
        compiler_message=message,
        rows=rows,
        length=length,
        kernels={} if program is None else pallas_kernels(program),
        copied=copied,
    )


def pallas_kernels(program: Program) -> dict[str, int]:
    """Return the number of runs of each Pallas kernel in a program."""
    counts: dict[str, int] = {}
    for run in program.runs():
        *_, name, last = ("", "", *run.op.cause.split("/"))
        if run.op.kind == "custom-call" and last.startswith("pallas_call"):
            counts[name] = counts.get(name, 0) + run.times
    return counts


def copied_bytes(program: Program) -> int:
    """Return the bytes of large arrays that are copied within device memory, entirely or in slices.

    Copies to a TPU's on-chip memory, `S(1)`, are ordinary reads and are left out.
    """
    total = 0
    for run in program.runs():
        if run.caller is not None and run.caller.kind == "fusion":
            continue
        inside = called(run.op) if run.op.kind == "fusion" else []
        results = [run.op, *(op for name in inside for op in program.computations[name] if op.root)]
        copies = any(op.kind in _COPIES for op in results)
        size = shape_bytes(run.op.shape)
        total += run.times * size if copies and size >= _MIN_COPY and "S(1)" not in run.op.shape else 0
    return total


def read_weights(model: Decoder, rows: int) -> float:
    """Return the bytes of the weights that a device reads in a step. Experts count if a row selects them.

    If each of R tokens selects k of E experts, a fraction of `1 - (1 - k / E)^R` is read on average. With expert
    parallelism, a device computes the tokens of all devices with other experts.
    """
    axis_names, active, layout = axes(model), active_parameters(model), model.execution.layout
    batch_axes = names_of(layout.activation_spec("batch", (rows,))[0])
    total = 0.0
    for name, leaf in named_leaves(model).items():
        if name.startswith("embedding.") and not model.config.tied:
            continue  # only one table row per token is read
        fraction = active[name] / leaf.size  # fraction of the experts that one token selects
        if not 0 < fraction < 1:
            total += device_bytes(leaf)
            continue
        spec = layout.weight_spec(axis_names[name], leaf.shape, name)
        expert_axes = names_of(spec[axis_names[name].index("experts")])
        device_rows = rows // math.prod(layout.sizes[axis] for axis in batch_axes if axis not in expert_axes)
        total += device_bytes(leaf) * (1 - (1 - fraction) ** device_rows)
    return total


def decoding_report(plan: DecodingPlan, *, rows: int = 12) -> str:
    """Format a plan as text: memory, kernels, at most `rows` collectives, time."""

    def rate(seconds: float) -> str:
        return f"{plan.rows / seconds:,.0f} tokens/s"

    kernels = ", ".join(f"{name} ({count} times)" for name, count in plan.kernels.items()) or "none"
    parts = [
        "\n".join(memory_lines(plan)),
        f"kernels: {kernels}; weights and caches copied before reading: {size_text(plan.copied)}",
        f"cache: {plan.rows * plan.length:,} tokens, {size_text(plan.token_bytes)} per token and device; "
        f"all free memory would hold {plan.room:,} tokens",
        "" if plan.collectives is None else "\n".join(collective_lines(plan.collectives, rows)),
        "\n".join(time_lines(plan, "reads of weights, full caches and copies", rate)),
    ]
    return "\n\n".join(filter(None, parts))


def decoding_data(plan: DecodingPlan) -> dict[str, Any]:
    """Return a plan as plain JSON values: bytes and seconds."""
    own = {"token_bytes": plan.token_bytes, "room": plan.room, "kernels": plan.kernels, "copied": plan.copied}
    return shared_data(plan) | own
