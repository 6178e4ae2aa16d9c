"""Mesh search: lists all meshes of the devices, and estimates a step on each without compilation."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eqx_decoders.layers.moe.dispatch import sends_rows
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.planning.collectives import Collective
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.roofline import Roofline, collective_seconds
from eqx_decoders.planning.traced_memory import FEATURES, moved_bytes, state_memory
from eqx_decoders.sharding.axes import axes as axes_of_weights, named_leaves, names_of
from eqx_decoders.sharding.layout import Layout, device_bytes
from eqx_decoders.training.flops import flops_per_token
from eqx_decoders.training.step.balance import expert_configs
from eqx_decoders.training.step.step import Trainer


_REDUCTIONS = 4  # all-reduces of activations per layer with tensor parallelism: two forward, two backward
_RECOMPUTATION = 4 / 3  # factor of the FLOPs with remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate for a mesh: seconds of a step without overlap, and bytes of state and gradients per device."""

    seconds: float
    state: int


def meshes(devices: int, slices: int, axes: Sequence[str]) -> list[dict[str, int]]:
    """Return all meshes over `axes` for a number of devices. `data` is a multiple of the number of slices."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    products = [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(divisors, repeat=len(axes))]
    return [mesh for mesh in products if math.prod(mesh.values()) == devices and mesh.get("data", 1) % slices == 0]


def estimate(model: Decoder, trainer: Trainer, machine: Machine, *, batch_size: int, seq_len: int) -> Estimate:
    """Estimate a step without compilation.

    The estimate includes these collectives: weights are gathered twice and their gradients reduce-scattered once along
    axes that shard weights but not activations; activations are all-reduced with tensor parallelism; gradients are
    all-reduced along `data`; tokens are sent to experts and back. Smaller collectives are left out.
    """
    execution = model.execution
    layout, sizes, tokens = execution.layout, execution.layout.sizes, batch_size * seq_len
    devices = len(machine.positions)
    memory = state_memory(trainer, trainer.abstract(model, key=jax.random.key(0)), machine.memory)
    seconds: dict[str, float] = {}

    def send(kind: str, bytes: int, axes: tuple[str, ...], times: int = 1) -> None:
        group = _group(layout, axes)
        if len(group) > 1 and bytes > 0:
            collective = Collective(
                kind=kind, bytes=bytes, times=1, groups=(group,), axes=axes, shape="", phase="", cause="",
                unknown=False,
            )  # fmt: skip
            for name, time in collective_seconds(collective, machine).items():
                seconds[name] = seconds.get(name, 0.0) + times * time

    for axes, size in _gathered(model).items():
        send("all-gather", size, axes, times=3)
    parts = layout.activation_shards("batch length embed", (batch_size, seq_len, model.config.embed_dim))
    activations = tokens * model.config.embed_dim * jnp.dtype(execution.precision.compute).itemsize // parts
    heads = tuple(axis for axis in FEATURES if sizes[axis] > 1)
    send("all-reduce", activations, heads, times=_REDUCTIONS * len(model.config.blocks))
    for kind, size, times in _to_experts(model, activations):
        send(kind, size, ("expert",) if sizes["expert"] > 1 else (), times=times)
    send("all-reduce", memory.gradients, ("data",) if sizes["data"] > 1 else ())
    compute = tokens * flops_per_token(model, seq_len, trainable=trainer.trainable) / devices / machine.flops
    line = Roofline(
        compute=compute * (1.0 if execution.remat is None else _RECOMPUTATION),
        memory=moved_bytes(model, memory) / machine.memory_bandwidth,
        networks=seconds,
        model_flops_seconds=compute,
    )
    return Estimate(seconds=line.one_by_one, state=memory.state + memory.gradients)


def _to_experts(model: Decoder, activations: int) -> Iterator[tuple[str, int, int]]:
    """Yield kind, bytes and number of runs of the collectives of layers with experts.

    Tokens are sent to experts and back, or gathered and reduce-scattered, in the forward pass, in the recomputation and
    in the backward pass. `activations`: bytes of the activations of a device's tokens.
    """
    execution = model.execution
    parts = execution.layout.sizes["expert"]
    for config, times in Counter(expert_configs(model.config)).items():
        slots = config.num_experts_per_token
        passes = times * (2 if execution.remat is None else 3)
        if sends_rows(execution, slots, parts):
            yield "all-to-all", activations * slots, 2 * passes
        else:
            yield "all-gather", activations * parts, passes
            yield "reduce-scatter", activations * parts, passes


def _gathered(model: Decoder) -> dict[tuple[str, ...], int]:
    """Return the bytes of weights that a device gathers by mesh axes, in the compute dtype."""
    axis_names = axes_of_weights(model)
    layout, dtype = model.execution.layout, jnp.dtype(model.execution.precision.compute)
    gathered: dict[tuple[str, ...], int] = {}
    for name, leaf in named_leaves(model).items():
        stored, used = ([axis for group in spec for axis in names_of(group)]
                        for spec in (leaf.sharding.spec, layout.gathered_spec(axis_names[name])))  # fmt: skip
        along = tuple(axis for axis in layout.sizes if axis in stored and axis not in used)
        whole = device_bytes(leaf) // leaf.dtype.itemsize * math.prod(layout.sizes[axis] for axis in along)
        if along:
            gathered[along] = gathered.get(along, 0) + whole * dtype.itemsize
    return gathered


def _group(layout: Layout, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of the devices in the group of the first device along these axes."""
    sizes = layout.sizes
    devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    group = devices[tuple(slice(None) if name in axes else 0 for name in sizes)]
    return tuple(int(device) for device in group.reshape(-1))
