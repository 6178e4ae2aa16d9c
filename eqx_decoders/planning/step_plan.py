"""A plan of a training step: compiled for a machine that is not there, counted, and estimated."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from eqx_decoders.data.batches import Batch
from eqx_decoders.encoders.media import Media
from eqx_decoders.families.summary import active_parameters
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.int8_matmul import LowPrecision
from eqx_decoders.planning.collectives import Collective, collectives
from eqx_decoders.planning.compile import compile_until_assigned
from eqx_decoders.planning.device_memory import DeviceMemory, compiled_memory, needed_bytes, state_memory
from eqx_decoders.planning.flop_count import products
from eqx_decoders.planning.hlo import Program, parse
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.roofline import Roofline, network_seconds
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.replication import replicated_fraction
from eqx_decoders.sharding.rules import names_of
from eqx_decoders.training.flops import flops_per_token, matmul_parameters
from eqx_decoders.training.step.step import Trainer


Until = Literal["code", "memory"]
_AGAIN = 4 / 3  # products of experts, where the forward pass is computed again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations of a step on all devices together.

    **Arguments:**

    - `model`: of the model, forward and backward, as MFU counts them.
    - `attention`: the share of them that is not of weights.
    - `computed`: all products that the program has, recomputation included. Of attention whose loops data decide, as
        many as the model has; of experts in such loops, or on rows that have room for the worst case, as many as the
        tokens need.
    - `six_nd`: 6 * weights that multiply * tokens.
    - `eight_bit`: how many of those computed are of numbers of 8 bits.
    """

    model: float
    attention: float
    computed: float
    six_nd: float
    eight_bit: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a step needs.

    **Arguments:**

    - `machine`: where it runs.
    - `memory`: of a device.
    - `operations`: of all devices.
    - `collectives`: of a device; None where the compiled program can't be read.
    - `roofline`: the estimate.
    - `seconds`: how long compiling took.
    - `told`: what the compiler said where it did not compile the step, or print it.
    - `tokens`: of a step.
    - `replicated`: the share of the weights that is whole along an axis of the mesh that splits others.
    - `note`: what is from where, if not from the compiler of these devices.
    """

    machine: Machine
    memory: DeviceMemory
    operations: Operations
    collectives: tuple[Collective, ...] | None
    roofline: Roofline
    seconds: float
    told: str
    tokens: int
    replicated: float = 0.0
    note: str = ""


def make_plan(
    model: Decoder,
    trainer: Trainer,
    machine: Machine,
    *,
    batch_size: int,
    seq_len: int,
    media: Media | None = None,
    options: Mapping[str, str] | None = None,
    until: Until = "code",
) -> Plan:
    """Compile the step of `model` (of shapes, on a mesh of the machine's devices) and count.

    **Arguments:**

    - `media`: images beside the tokens (see `abstract_media`); operations are those of the decoder alone.
    - `options`: of XLA's compiler.
    - `until`: "memory" ends the compilation for a TPU when memory is assigned, before there is machine code: a fraction
        of the time. What only shows then (a kernel that finds no room) is not found.
    """
    layout = model.execution.layout
    state, batch = trainer.abstract(model, key=jax.random.key(0)), abstract_batch(layout, batch_size, seq_len)
    batch = dataclasses.replace(batch, media=media)
    traced = trainer.trace(state, batch)
    done = operations(model, trainer, traced.jaxpr, batch_size, seq_len)
    known = state_memory(trainer, state, machine.memory)
    begun = time.perf_counter()
    memory, program, told = _compiled(traced, known, dict(options or {}), until)
    found = None if program is None else tuple(collectives(program, layout.sizes))
    devices = len(machine.places)
    line = Roofline(
        compute=_compute_seconds(done, machine, model.execution.low_precision),
        memory=moved_bytes(model, memory) / machine.memory_bandwidth,
        networks=network_seconds(found or (), machine),
        model_flops_seconds=done.model / devices / machine.flops,
    )
    return Plan(
        machine=machine,
        memory=memory,
        operations=done,
        collectives=found,
        roofline=line,
        seconds=time.perf_counter() - begun,
        told=told,
        tokens=batch_size * seq_len,
        replicated=replicated_fraction(model, layout),
    )


def _compute_seconds(done: Operations, machine: Machine, rounding: LowPrecision | None) -> float:
    """All products at their peaks, that of 8 bits where the chip has it for these numbers."""
    rate = machine.product_flops(None if rounding is None else rounding.format)
    return ((done.computed - done.eight_bit) / machine.flops + done.eight_bit / rate) / len(machine.places)


def _compiled(
    traced: Any, known: DeviceMemory, options: dict[str, str], until: Until
) -> tuple[DeviceMemory, Program | None, str]:
    """The memory of the compiled step, its program where it can be printed, and what the compiler said else."""
    try:
        if until == "memory":
            sizes, text = compile_until_assigned(traced.lower(), options)
            program = parse(text)
            return compiled_memory(known, sizes, program), program, ""
        compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
        if "RESOURCE_EXHAUSTED" not in told:
            raise
        line = next(line for line in told.splitlines() if "RESOURCE_EXHAUSTED" in line)
        needed = needed_bytes(told)
        return dataclasses.replace(known, needed=known.capacity if needed is None else needed), None, line
    try:
        program, told = parse(compiled.as_text()), ""
    except jax.errors.JaxRuntimeError as error:
        program, told = None, str(error).splitlines()[0]
    return compiled_memory(known, compiled.memory_analysis(), program), program, told


def abstract_batch(layout: Layout, batch_size: int, seq_len: int) -> Batch:
    """A batch of a run as shapes, split over the mesh as a run splits it."""
    shape = (batch_size, seq_len)
    split = layout.activation_sharding("batch length", shape)

    def like(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    ids = dict.fromkeys(("tokens", "segment_ids", "positions"), like(jnp.int32))
    return Batch(**ids, loss_mask=like(bool), contiguous=True)


def operations(model: Decoder, trainer: Trainer, jaxpr: Any, batch_size: int, seq_len: int) -> Operations:
    """Of the model by counting its weights, and of the traced step by its products."""
    tokens = batch_size * seq_len
    whole = tokens * flops_per_token(model, seq_len, trainable=trainer.trainable)
    attention = whole - tokens * flops_per_token(model, 0, trainable=trainer.trainable)
    found = products(jaxpr)
    needed = 6.0 * tokens * _expert_weights(model) * (1.0 if model.execution.remat is None else _AGAIN)
    experts = needed if found.loose else min(found.ragged, needed)
    return Operations(
        model=whole,
        attention=attention,
        computed=found.counted - found.ragged + experts + (attention if found.uncounted else 0.0),
        six_nd=6.0 * tokens * matmul_parameters(model.config),
        eight_bit=found.eight_bit,
    )


def _expert_weights(model: Decoder) -> int:
    """Weights of experts that a token uses."""
    words = axes(model)
    return sum(
        size for name, size in active_parameters(model).items() if {"experts", "embed", "mlp"} <= set(words[name])
    )


def moved_bytes(model: Decoder, memory: DeviceMemory) -> int:
    """What a device surely reads or writes in a step; a lower bound of what goes through its memory.

    The state is read and written, gradients and what is kept are written and read, and each product's weights, in the
    dtype of products, are read in the forward pass, for the gradient of its input, and once more if recomputed.
    """
    layout, dtype, words = model.execution.layout, jnp.dtype(model.execution.precision.compute), axes(model)
    weights = 0
    for name, leaf in named_leaves(model).items():
        axes_left = [axis for group in layout.used_spec(words[name]) for axis in names_of(group)]
        weights += leaf.size * dtype.itemsize // math.prod(layout.sizes[axis] for axis in axes_left)
    passes = 2 if model.execution.remat is None else 3
    return 2 * memory.state + 2 * memory.gradients + 2 * (memory.kept or 0) + passes * weights
