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

from eqx_decoders.inference.unstack import cut_cache, unstack_in_place
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.caches import abstract_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.planning.collectives import Collective, collectives
from eqx_decoders.planning.device_memory import DeviceMemory, compiled_memory
from eqx_decoders.planning.hlo import Program, parse, shape_bytes
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.report import collective_lines, memory_lines, size_text
from eqx_decoders.planning.roofline import Roofline, network_seconds
from eqx_decoders.serving.engine.model_runner import Models, decode
from eqx_decoders.serving.engine.sampler import SamplingBatch
from eqx_decoders.serving.engine.slot_state import EngineState
from eqx_decoders.sharding.axes import axes, named_leaves, names_of
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.training.flops import flops_per_token
from eqx_decoders.training.step.balance import expert_configs


_NOTED = 2**20  # bytes of a copy
_COPIES = "copy", "slice", "dynamic-slice"
_MAX_BIASES = 4  # of a request


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingPlan:
    """Needs of a decoding step.

    **Arguments:**

    - `machine`: the machine that it is planned for.
    - `memory`: of a device.
    - `rows`, `length`: answers that go on together, and the tokens that the cache holds of each.
    - `token_bytes`: bytes of a token in a device's cache.
    - `kernels`: Pallas kernels of the program, by name, and how often each runs.
    - `copied`: bytes of weights and caches that are copied before they are read.
    - `collectives`: of a device.
    - `roofline`: the estimate; memory is read once: weights, of experts as many as the rows choose in the mean, and
        full caches; what is copied is written and read once more.
    - `seconds`: time of the compilation.
    """

    machine: Machine
    memory: DeviceMemory
    rows: int
    length: int
    token_bytes: float
    kernels: dict[str, int]
    copied: int
    collectives: tuple[Collective, ...]
    roofline: Roofline
    seconds: float

    @property
    def room(self) -> int:
        """Tokens of all rows for which a cache of all free memory would have room, those of this one included."""
        free = self.memory.capacity - (self.memory.peak or 0)
        return max(0, int((free + self.memory.cache) / self.token_bytes)) if self.token_bytes else 0


def plan_decoding(
    model: Decoder,
    machine: Machine,
    *,
    rows: int,
    length: int,
    page_size: int | None = None,
    options: Mapping[str, str] | None = None,
) -> DecodingPlan:
    """Compile the step of `model` (of shapes, on a mesh of the machine's devices) and count.

    With a `page_size` the cache has pages of so many tokens, as many as all rows need.
    """
    layout, model = model.execution.layout, unstack_in_place(model.without_mtp())
    pages = None if page_size is None else PageConfig(page_size=page_size, num_pages=rows * -(-length // page_size))
    dtype = jnp.dtype(model.execution.precision.compute)
    cache = cut_cache(model, abstract_cache(model.config, rows, length, dtype=dtype, layout=layout, pages=pages))

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.replicated())

    batch = SamplingBatch.greedy(rows, -(-model.config.vocab_size // 32), _MAX_BIASES)
    arrays, static = eqx.partition(Models(model, None), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def step(arrays: Any, cache: Any, tokens: Array, *inputs: Any) -> Any:
        return decode(eqx.combine(arrays, static), EngineState(cache=cache, tokens=tokens), *inputs, num_top=0)

    inputs = like(rows), like(rows, 1), like(rows, 1), batch
    begun = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(1, 2)).lower(arrays, cache, like(rows, length), *inputs)
    compiled: Any = lowered.compile(compiler_options=dict(options or {}))
    program, sizes = parse(compiled.as_text()), compiled.memory_analysis()
    weights, cached = (sum(map(device_bytes, jax.tree.leaves(tree))) for tree in (arrays, cache))
    known = DeviceMemory(
        parameters=weights, optimizer=0, means=0, gradients=0, cache=cached, capacity=int(machine.memory)
    )
    sent, copied = tuple(collectives(program, layout.sizes)), copied_bytes(program)
    moved = read_weights(model, rows) + cached + 2 * copied
    flops = rows * flops_per_token(model.config, length, backward=False) / len(machine.positions) / machine.flops
    return DecodingPlan(
        machine=machine,
        memory=compiled_memory(known, sizes, program),
        rows=rows,
        length=length,
        token_bytes=cached / (rows * length),
        kernels=pallas_kernels(program),
        copied=copied,
        collectives=sent,
        roofline=Roofline(
            compute=flops,
            memory=moved / machine.memory_bandwidth,
            networks=network_seconds(sent, machine),
            model_flops_seconds=flops,
        ),
        seconds=time.perf_counter() - begun,
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
    roots = {name: next((op.kind for op in ops if op.root), "") for name, ops in program.computations.items()}
    total = 0
    for run in program.runs():
        if run.caller is not None and run.caller.kind == "fusion":
            continue
        called = [name for name in roots if f"calls=%{name}," in run.op.rest] if run.op.kind == "fusion" else []
        copies = run.op.kind in _COPIES or any(roots[name] in _COPIES for name in called)
        size = shape_bytes(run.op.shape)
        total += run.times * size if copies and size >= _NOTED and "S(1)" not in run.op.shape else 0
    return total


def read_weights(model: Decoder, rows: int) -> float:
    """Return the bytes of the weights that a step reads on a device, of experts those that some row there chooses.

    Of E experts of which each of R tokens chooses k, `1 - (1 - k / E)^R` in the mean. Devices that have other experts
    get each other's tokens.
    """
    words, leaves, layout = axes(model), named_leaves(model), model.execution.layout
    split = names_of(layout.activation_spec("batch", (rows,))[0])
    shares = {each.num_experts: each.num_experts_per_token / each.num_experts for each in expert_configs(model.config)}
    total = 0.0
    for name, leaf in leaves.items():
        if name.startswith("embedding.") and not model.config.tied:
            continue  # a row for each token
        at = words[name].index("experts") if "experts" in words[name] and "router" not in name else None
        if at is None:
            total += device_bytes(leaf)
            continue
        owners = names_of(layout.weight_spec(words[name], leaf.shape, name)[at])
        here = rows // math.prod(layout.sizes[axis] for axis in split if axis not in owners)
        total += device_bytes(leaf) * (1 - (1 - shares.get(leaf.shape[at], 1.0)) ** here)
    return total


def decoding_report(plan: DecodingPlan, *, rows: int = 12) -> str:
    """Format a plan for reading: memory, kernels, collectives, time; `rows` collectives at most."""
    memory, line, chip = plan.memory, plan.roofline, plan.machine.chip
    kernels = ", ".join(f"{name} ({count} times)" for name, count in plan.kernels.items()) or "none"
    parts = [
        "\n".join(memory_lines(memory)),
        f"kernels: {kernels}; copied before it is read: {size_text(plan.copied)}",
        f"the cache has {plan.rows * plan.length:,} tokens, of {size_text(plan.token_bytes)} each on a device; "
        f"with all free memory there would be room for {plan.room:,}",
        "\n".join(collective_lines(plan.collectives, rows)),
    ]
    lines = [f"time of a step, estimated by published figures of {chip.name} ({chip.source})"]
    for name, seconds in line.parts.items():
        mark = "  <- the bound" if name == line.bound else ""
        lines.append(f"  {name:22}{seconds:10.3g} s{mark}")
    for case, seconds in (("all overlaps", line.overlapped), ("nothing does", line.one_by_one)):
        lines.append(f"  a step takes {seconds:.3g} s if {case}: {plan.rows / seconds:,.0f} tokens/s")
    return "\n\n".join([*parts, "\n".join(lines)])


def decoding_data(plan: DecodingPlan) -> dict[str, Any]:
    """Return a plan as plain JSON values: bytes and seconds."""
    memory, line = plan.memory, plan.roofline
    return {
        "chip": dataclasses.asdict(plan.machine.chip),
        "devices": len(plan.machine.positions),
        "memory": dataclasses.asdict(memory) | {"rows": memory.rows(), "total": memory.total, "fits": memory.fits},
        "token_bytes": plan.token_bytes,
        "room": plan.room,
        "kernels": plan.kernels,
        "copied": plan.copied,
        "collectives": [
            {"kind": one.kind, "axes": one.axes, "times": one.times, "total": one.total} for one in plan.collectives
        ],
        "seconds": {
            "parts": line.parts,
            "bound": line.bound,
            "overlapped": line.overlapped,
            "one_by_one": line.one_by_one,
        },
        "compile_seconds": plan.seconds,
    }
