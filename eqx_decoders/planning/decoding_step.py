"""Planning of a decoding step of serving: compiled for a machine that is not here, counted, and estimated.

It is the engine's own program for all slots: a token of each row is fed, the next one sampled, the cache written.
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


_NOTED = 2**20  # bytes of a copy
_COPIES = "copy", "slice", "dynamic-slice"
_MAX_BIASES = 4  # of a request


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingPlan(PlannedStep):
    """Needs of a decoding step.

    In the estimate memory is read once: weights, of experts as many as the rows choose in the mean, and full caches;
    what is copied is written and read once more.

    **Arguments:**

    - `rows`, `length`: answers that go on together, and the tokens that the cache holds of each.
    - `kernels`: Pallas kernels of the program, by name, and how often each runs.
    - `copied`: bytes of weights and caches that are copied before they are read.
    """

    rows: int
    length: int
    kernels: dict[str, int]
    copied: int

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in a device's cache."""
        return self.memory.cache / (self.rows * self.length)

    @property
    def room(self) -> int:
        """Tokens of all rows for which a cache of all free memory would have room, those of this one included."""
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
    """Compile the step of `model` (of shapes, on a mesh of the machine's devices) and count.

    With a `page_size` the cache has pages of so many tokens, as many as all rows need. `until` as in `make_plan`.
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
    known = DeviceMemory(
        parameters=weights, optimizer=0, means=0, gradients=0, cache=cached, capacity=int(machine.memory)
    )
    begun = time.perf_counter()
    memory, program, message = compile_step(traced, known, dict(options or {}), until)
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
        seconds=time.perf_counter() - begun,
        compiler_message=message,
        rows=rows,
        length=length,
        kernels={} if program is None else pallas_kernels(program),
        copied=copied,
    )


def pallas_kernels(program: Program) -> dict[str, int]:
    """Count the runs of each Pallas kernel of a program."""
    counts: dict[str, int] = {}
    for run in program.runs():
        *_, name, last = ("", "", *run.op.cause.split("/"))
        if run.op.kind == "custom-call" and last.startswith("pallas_call"):
            counts[name] = counts.get(name, 0) + run.times
    return counts


def copied_bytes(program: Program) -> int:
    """Add up the large results of operations that only copy what they read, or a slice of it, in a device's memory.

    A TPU's copy to the memory of the chip itself, `S(1)`, is how it reads.
    """
    total = 0
    for run in program.runs():
        if run.caller is not None and run.caller.kind == "fusion":
            continue
        inside = called(run.op) if run.op.kind == "fusion" else []
        results = [run.op, *(op for name in inside for op in program.computations[name] if op.root)]
        copies = any(op.kind in _COPIES for op in results)
        size = shape_bytes(run.op.shape)
        total += run.times * size if copies and size >= _NOTED and "S(1)" not in run.op.shape else 0
    return total


def read_weights(model: Decoder, rows: int) -> float:
    """Return the bytes of the weights that a step reads on a device, of experts those that some row there chooses.

    Of E experts of which each of R tokens chooses k, `1 - (1 - k / E)^R` in the mean. Devices that have other experts
    get each other's tokens.
    """
    words, active, layout = axes(model), active_parameters(model), model.execution.layout
    split = names_of(layout.activation_spec("batch", (rows,))[0])
    total = 0.0
    for name, leaf in named_leaves(model).items():
        if name.startswith("embedding.") and not model.config.tied:
            continue  # a row for each token
        share = active[name] / leaf.size  # of a weight of experts those of one row
        if not 0 < share < 1:
            total += device_bytes(leaf)
            continue
        owners = names_of(layout.weight_spec(words[name], leaf.shape, name)[words[name].index("experts")])
        here = rows // math.prod(layout.sizes[axis] for axis in split if axis not in owners)
        total += device_bytes(leaf) * (1 - (1 - share) ** here)
    return total


def decoding_report(plan: DecodingPlan, *, rows: int = 12) -> str:
    """Format a plan for reading: memory, kernels, collectives, time; `rows` collectives at most."""

    def rate(seconds: float) -> str:
        return f"{plan.rows / seconds:,.0f} tokens/s"

    kernels = ", ".join(f"{name} ({count} times)" for name, count in plan.kernels.items()) or "none"
    parts = [
        "\n".join(memory_lines(plan)),
        f"kernels: {kernels}; copied before it is read: {size_text(plan.copied)}",
        f"the cache has {plan.rows * plan.length:,} tokens, of {size_text(plan.token_bytes)} each on a device; "
        f"with all free memory there would be room for {plan.room:,}",
        "" if plan.collectives is None else "\n".join(collective_lines(plan.collectives, rows)),
        "\n".join(time_lines(plan, "weights, full caches, copies", rate)),
    ]
    return "\n\n".join(filter(None, parts))


def decoding_data(plan: DecodingPlan) -> dict[str, Any]:
    """Return a plan as plain JSON values: bytes and seconds."""
    own = {"token_bytes": plan.token_bytes, "room": plan.room, "kernels": plan.kernels, "copied": plan.copied}
    return shared_data(plan) | own
