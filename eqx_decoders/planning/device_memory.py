"""Memory of a device during a step, in rows that add up."""

import dataclasses
import re
from typing import Any

from eqx_decoders.planning.hlo import Program, shape_bytes


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_NEEDED = (
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"required for [\w ]+ \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
)
_LAYERS = re.compile(r"jvp\([^/]*\)+/(?:[^/]+/)?while$")  # a loop of the forward pass that is in no other one of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device; None where they are not known.

    **Arguments:**

    - `parameters`, `optimizer`, `means`: of the state, which lasts from step to step; means are those of the weights.
    - `cache`: of the state of a step of decoding.
    - `batch`: the batch, and padding of all arguments by the compiler's layout in tiles.
    - `gradients`: one number for each trained weight. They exist at the end of the backward pass, among temporaries.
    - `saved_activations`: arrays that the loops of the forward pass save for the backward pass, among temporaries.
    - `temporaries`: all buffers that do not exist before and after a step.
    - `outputs`: results that do not take the place of arguments.
    - `peak`: the compiler's figure; else the sum of all parts.
    - `capacity`: memory of a device.
    - `host`: part of the state that is in the host's memory; it is in none of the others.
    - `needed`: the compiler's figure for a step that does not fit.
    """

    parameters: int
    optimizer: int
    means: int
    gradients: int
    capacity: int
    cache: int = 0
    host: int = 0
    batch: int | None = None
    saved_activations: int | None = None
    temporaries: int | None = None
    outputs: int | None = None
    peak: int | None = None
    needed: int | None = None

    @property
    def state(self) -> int:
        """Return the bytes that last from step to step."""
        return self.parameters + self.optimizer + self.means + self.cache

    @property
    def fits(self) -> bool:
        """Return whether the step was compiled, and needs no more than the capacity."""
        return self.needed is None and (self.peak or 0) <= self.capacity

    def rows(self) -> dict[str, int]:
        """Return the parts that add up to `total`; temporaries are saved activations and others."""
        rows = {"parameters": self.parameters, "optimizer state": self.optimizer, "running means": self.means}
        rows["cache"] = self.cache
        rows["batch, padding"] = self.batch or 0
        rows["activations kept"] = self.saved_activations or 0
        rows["other temporaries"] = (self.temporaries or 0) - (self.saved_activations or 0)
        rows["results"] = self.outputs or 0
        return {name: size for name, size in rows.items() if size or name == "parameters"}

    @property
    def total(self) -> int:
        """Return the bytes of all of a step's buffers together."""
        return sum(self.rows().values())


def compiled_memory(known: DeviceMemory, sizes: Any, program: Program | None) -> DeviceMemory:
    """Add the compiler's `sizes` of `Compiled.memory_analysis()`, and those in the program if it can be read."""
    temporaries, outputs = sizes.temp_size_in_bytes, sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    saved = None if program is None else min(stacked_bytes(program), temporaries)
    together = sizes.argument_size_in_bytes + temporaries + outputs
    return dataclasses.replace(
        known,
        batch=sizes.argument_size_in_bytes - known.state,
        saved_activations=saved,
        temporaries=temporaries,
        outputs=outputs,
        peak=together
        if known.host
        else getattr(sizes, "peak_memory_in_bytes", 0) or together,  # XLA adds the host's to it
    )


def stacked_bytes(program: Program) -> int:
    """Add up the arrays that the loops of the forward pass save for the backward pass, on one device."""
    total = 0
    for run in program.runs():
        if run.op.kind == "while" and _LAYERS.search(run.op.cause) and "transpose(" not in run.op.cause:
            total += sum(shape_bytes(shape) * count for shape, count in program.stacked(run.op).items())
    return total


def needed_bytes(message: str) -> int | None:
    """Return the bytes that XLA's message about too little memory names; None if it names none."""
    for pattern in _NEEDED:
        match = pattern.search(message)
        if match:
            return int(float(match[1]) * _UNITS[match[2]])
    return None
