"""`make_plan`: compiles a training step for a machine that need not be attached, and estimates its time."""

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from eqx_decoders.encoders.media import Media
from eqx_decoders.families.summary import active_parameters
from eqx_decoders.layers.attention.kernels.registry import KERNELS
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.low_precision import LowPrecision
from eqx_decoders.planning.collectives import collectives
from eqx_decoders.planning.compile import Until, compile_step
from eqx_decoders.planning.flop_count import products
from eqx_decoders.planning.hlo import Program
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import Operations, Plan
from eqx_decoders.planning.roofline import Roofline, network_seconds
from eqx_decoders.planning.traced_memory import abstract_batch, moved_bytes, state_memory
from eqx_decoders.sharding.axes import axes
from eqx_decoders.sharding.replication import replicated_fraction
from eqx_decoders.training.flops import flops_per_token, matmul_parameters
from eqx_decoders.training.step.step import Trainer


_RECOMPUTATION = 4 / 3  # factor of the FLOPs of experts if the forward pass is recomputed


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
    """Compile a training step, and return its memory, collectives, FLOPs and estimated time.

    **Arguments:**

    - `model`: model with shapes instead of arrays, on a mesh of the machine's devices.
    - `media`: images in addition to the tokens (see `abstract_media`). FLOPs are those of the decoder only.
    - `options`: XLA compiler options.
    - `until`: "memory": stop the compilation for a TPU after memory assignment, before machine code is generated, which
        takes a fraction of the time. Later errors, such as a kernel without enough memory, are not found.
    """
    layout = model.execution.layout
    state, batch = trainer.abstract(model, key=jax.random.key(0)), abstract_batch(layout, batch_size, seq_len)
    batch = dataclasses.replace(batch, media=media)
    traced = trainer.trace(state, batch)
    operation_counts = operations(model, trainer, traced.jaxpr, batch_size, seq_len)
    known_memory = state_memory(trainer, state, machine.memory)
    started = time.perf_counter()
    memory, program, message = compile_step(traced, known_memory, dict(options or {}), until)
    sent = None if program is None else tuple(collectives(program, layout.sizes))
    devices = len(machine.positions)
    roofline = Roofline(
        compute=_compute_seconds(operation_counts, machine, model.execution.low_precision),
        memory=moved_bytes(model, memory) / machine.memory_bandwidth,
        networks=network_seconds(sent or (), machine),
        model_flops_seconds=operation_counts.model / devices / machine.flops,
    )
    return Plan(
        machine=machine,
        memory=memory,
        operations=operation_counts,
        collectives=sent,
        roofline=roofline,
        seconds=time.perf_counter() - started,
        compiler_message=message,
        tokens=batch_size * seq_len,
        replicated=replicated_fraction(model, layout),
        attention=() if program is None else attention_kernels(program),
    )


def attention_kernels(program: Program) -> tuple[str, ...]:
    """Return the names of the attention kernels in a program."""
    scopes = {part for ops in program.computations.values() for op in ops for part in re.findall(r"\w+", op.cause)}
    return tuple(name for name, kernel in KERNELS.items() if kernel.scope in scopes)


def _compute_seconds(operation_counts: Operations, machine: Machine, rounding: LowPrecision | None) -> float:
    """Return the seconds of all products at peak FLOP/s. 8-bit products run at the chip's 8-bit rate, if it has one."""
    rate = machine.product_flops(None if rounding is None else rounding.format)
    return (
        (operation_counts.computed - operation_counts.eight_bit) / machine.flops + operation_counts.eight_bit / rate
    ) / len(machine.positions)


def operations(model: Decoder, trainer: Trainer, jaxpr: Any, batch_size: int, seq_len: int) -> Operations:
    """Count the FLOPs of a step: of the model by its parameters, and of the traced program by its products.

    The arrays of experts have room for the worst case. Their FLOPs are at most what the tokens of the batch need.
    """
    tokens = batch_size * seq_len
    model_flops = tokens * flops_per_token(model, seq_len, trainable=trainer.trainable)
    attention = model_flops - tokens * flops_per_token(model, 0, trainable=trainer.trainable)
    flops = products(jaxpr)
    needed = 6.0 * tokens * _expert_weights(model) * (1.0 if model.execution.remat is None else _RECOMPUTATION)
    experts = needed if flops.has_uncounted_grouped else min(flops.grouped, needed)
    eight_bit_experts = 0.0
    if flops.grouped > 0 and not flops.has_uncounted_grouped:
        eight_bit_experts = experts * flops.grouped_eight_bit / flops.grouped
    return Operations(
        model=model_flops,
        attention=attention,
        computed=flops.counted - flops.grouped + experts + (attention if flops.has_uncounted else 0.0),
        six_nd=6.0 * tokens * matmul_parameters(model.config),
        eight_bit=flops.eight_bit - flops.grouped_eight_bit + eight_bit_experts,
    )


def _expert_weights(model: Decoder) -> int:
    """Return the number of expert weights that a token uses."""
    axis_names = axes(model)
    return sum(
        size for name, size in active_parameters(model).items() if {"experts", "embed", "mlp"} <= set(axis_names[name])
    )
