"""Planning of a training step: compiled for a machine that is not here, counted, and estimated."""

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


_RECOMPUTED = 4 / 3  # products of experts, where the forward pass is computed again


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

    - `media`: images besides the tokens (see `abstract_media`); operations are those of the decoder alone.
    - `options`: options of XLA's compiler.
    - `until`: "memory" ends the compilation for a TPU when memory is assigned, before there is machine code: a fraction
        of the time. Later errors (a kernel that finds no room) are not found.
    """
    layout = model.execution.layout
    state, batch = trainer.abstract(model, key=jax.random.key(0)), abstract_batch(layout, batch_size, seq_len)
    batch = dataclasses.replace(batch, media=media)
    traced = trainer.trace(state, batch)
    done = operations(model, trainer, traced.jaxpr, batch_size, seq_len)
    known = state_memory(trainer, state, machine.memory)
    started = time.perf_counter()
    memory, program, message = compile_step(traced, known, dict(options or {}), until)
    sent = None if program is None else tuple(collectives(program, layout.sizes))
    devices = len(machine.positions)
    line = Roofline(
        compute=_compute_seconds(done, machine, model.execution.low_precision),
        memory=moved_bytes(model, memory) / machine.memory_bandwidth,
        networks=network_seconds(sent or (), machine),
        model_flops_seconds=done.model / devices / machine.flops,
    )
    return Plan(
        machine=machine,
        memory=memory,
        operations=done,
        collectives=sent,
        roofline=line,
        seconds=time.perf_counter() - started,
        compiler_message=message,
        tokens=batch_size * seq_len,
        replicated=replicated_fraction(model, layout),
        attention=() if program is None else attention_kernels(program),
    )


def attention_kernels(program: Program) -> tuple[str, ...]:
    """Return the names of the attention kernels of which a program has operations."""
    scopes = {part for ops in program.computations.values() for op in ops for part in re.findall(r"\w+", op.cause)}
    return tuple(name for name, kernel in KERNELS.items() if kernel.scope in scopes)


def _compute_seconds(done: Operations, machine: Machine, rounding: LowPrecision | None) -> float:
    """Return the seconds of all products at their peaks, that of 8 bits where the chip has it for them."""
    rate = machine.product_flops(None if rounding is None else rounding.format)
    return ((done.computed - done.eight_bit) / machine.flops + done.eight_bit / rate) / len(machine.positions)


def operations(model: Decoder, trainer: Trainer, jaxpr: Any, batch_size: int, seq_len: int) -> Operations:
    """Count the operations of the model by its weights, and of the traced step by its products."""
    tokens = batch_size * seq_len
    whole = tokens * flops_per_token(model, seq_len, trainable=trainer.trainable)
    attention = whole - tokens * flops_per_token(model, 0, trainable=trainer.trainable)
    flops = products(jaxpr)
    needed = 6.0 * tokens * _expert_weights(model) * (1.0 if model.execution.remat is None else _RECOMPUTED)
    experts = needed if flops.loose else min(flops.ragged, needed)
    return Operations(
        model=whole,
        attention=attention,
        computed=flops.counted - flops.ragged + experts + (attention if flops.uncounted else 0.0),
        six_nd=6.0 * tokens * matmul_parameters(model.config),
        eight_bit=flops.eight_bit,
    )


def _expert_weights(model: Decoder) -> int:
    """Count the weights of experts that a token uses."""
    words = axes(model)
    return sum(
        size for name, size in active_parameters(model).items() if {"experts", "embed", "mlp"} <= set(words[name])
    )
