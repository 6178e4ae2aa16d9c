"""What a device holds during a step, in rows that add up."""

import dataclasses
import re
from typing import Any

import jax

from eqx_decoders.planning.hlo import Program, shape_bytes
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.sharding.offload import HOST
from eqx_decoders.training.step.step import Trainer, TrainState


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_NEEDED = (
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"required for [\w ]+ \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
)
_LAYERS = re.compile(r"jvp\([^/]*\)+/(?:[^/]+/)?while$")  # a loop of the forward pass that is in no other one of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device; None where nothing tells.

    **Arguments:**

    - `parameters`, `optimizer`, `means`: of the state, which lasts from step to step; means are those of the weights.
    - `batch`: the batch, and what the compiler adds to all arguments by laying them out in tiles.
    - `gradients`: one number for each trained weight. They exist at the end of the backward pass, among temporaries.
    - `kept`: what the loops of the forward pass keep of each layer for the backward pass, among temporaries.
    - `temporaries`: all that is not there before and after a step.
    - `outputs`: results that do not take the place of arguments.
    - `peak`: as the compiler says; else what all needs together.
    - `capacity`: of a device.
    - `host`: of the state, what the host keeps for the device; it is in none of the others.
    - `needed`: what the compiler said it would need where the step does not fit.
    """

    parameters: int
    optimizer: int
    means: int
    gradients: int
    capacity: int
    host: int = 0
    batch: int | None = None
    kept: int | None = None
    temporaries: int | None = None
    outputs: int | None = None
    peak: int | None = None
    needed: int | None = None

    @property
    def state(self) -> int:
        """What lasts from step to step."""
        return self.parameters + self.optimizer + self.means

    @property
    def fits(self) -> bool:
        """Whether the step was compiled, and needs no more than there is."""
        return self.needed is None and (self.peak or 0) <= self.capacity

    def rows(self) -> dict[str, int]:
        """The parts that add up to `total`: of temporaries what is kept and the rest."""
        rows = {"parameters": self.parameters, "optimizer state": self.optimizer, "running means": self.means}
        rows["batch, padding"] = self.batch or 0
        rows["activations kept"] = self.kept or 0
        rows["other temporaries"] = (self.temporaries or 0) - (self.kept or 0)
        rows["results"] = self.outputs or 0
        return {name: size for name, size in rows.items() if size or name in ("parameters", "optimizer state")}

    @property
    def total(self) -> int:
        """All of a step's buffers together."""
        return sum(self.rows().values())


def state_memory(trainer: Trainer, state: TrainState, capacity: int | float) -> DeviceMemory:
    """What is known without compiling: the shares of the state that a device holds."""
    weights, places = named_leaves(state.model), trainer.state_shardings(state.model)
    return DeviceMemory(
        parameters=_bytes(state.model),
        optimizer=_bytes(state.optimizer),
        means=_bytes(state.ema),
        gradients=_bytes([_like_gradient(weights[name], place) for name, place in places.items()]),
        host=_host_bytes(state),
        capacity=int(capacity),
    )


def compiled_memory(known: DeviceMemory, sizes: Any, program: Program | None) -> DeviceMemory:
    """What the compiler says: `sizes` of `Compiled.memory_analysis()`, and the program where it can be read."""
    temporaries, outputs = sizes.temp_size_in_bytes, sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    kept = None if program is None else min(kept_bytes(program), temporaries)
    held = sizes.argument_size_in_bytes + temporaries + outputs
    return dataclasses.replace(
        known,
        batch=sizes.argument_size_in_bytes - known.state,
        kept=kept,
        temporaries=temporaries,
        outputs=outputs,
        peak=held if known.host else getattr(sizes, "peak_memory_in_bytes", 0) or held,  # XLA adds the host's to it
    )


def kept_bytes(program: Program) -> int:
    """What the loops of the forward pass write piece by piece: arrays kept for the backward pass, on one device."""
    total = 0
    for run in program.runs():
        if run.op.kind == "while" and _LAYERS.search(run.op.cause) and "transpose(" not in run.op.cause:
            total += sum(shape_bytes(shape) * count for shape, count in program.stacked(run.op).items())
    return total


def needed_bytes(message: str) -> int | None:
    """What a program would have needed, by XLA's words when there was too little; None where they don't say."""
    for pattern in _NEEDED:
        found = pattern.search(message)
        if found:
            return int(float(found[1]) * _UNITS[found[2]])
    return None


def _like_gradient(weight: Any, place: Any) -> Any:
    """That of a weight on the host goes there; no other does, wherever the optimizer's state is."""
    return weight.update(sharding=place.with_memory_kind(weight.sharding.memory_kind))


def _bytes(tree: Any) -> int:
    return sum(device_bytes(leaf) for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST)


def _host_bytes(tree: Any) -> int:
    return sum(device_bytes(leaf) for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == HOST)
