"""`DeviceMemory`: memory of a device during a step, by parts."""

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
_LAYERS = re.compile(r"jvp\([^/]*\)+/(?:[^/]+/)?while$")  # an outermost loop of the forward pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of a device in bytes. None: not known.

    **Arguments:**

    - `parameters`, `optimizer`: parameters and optimizer state.
    - `means`: exponential moving averages of the parameters.
    - `cache`: cache of a decoding step.
    - `batch`: the batch, and padding of all arguments by the compiler's tiled layout.
    - `gradients`: all gradients. They are part of the temporaries at the end of the backward pass.
    - `saved_activations`: arrays that the loops of the forward pass save for the backward pass. Part of the
        temporaries.
    - `temporaries`: all buffers that exist only during a step.
    - `outputs`: results that do not reuse the memory of (donated) arguments.
    - `peak`: peak memory reported by the compiler, or else the sum of all parts.
    - `capacity`: memory of the device.
    - `host`: state offloaded to host memory, which the other numbers do not include.
    - `needed`: memory that the compiler asks for if the step does not fit.
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
        """Return the bytes that persist between steps."""
        return self.parameters + self.optimizer + self.means + self.cache

    @property
    def fits(self) -> bool:
        """Return whether the step was compiled and its peak is at most the capacity."""
        return self.needed is None and (self.peak or 0) <= self.capacity

    def rows(self) -> dict[str, int]:
        """Return the parts by name, which add up to `total`. Parts of size 0 are left out, except the parameters."""
        rows = {
            "parameters": self.parameters,
            "optimizer state": self.optimizer,
            "weight averages": self.means,
            "cache": self.cache,
            "batch, padding": self.batch or 0,
            "saved activations": self.saved_activations or 0,
            "other temporaries": (self.temporaries or 0) - (self.saved_activations or 0),
            "results": self.outputs or 0,
        }
        return {name: size for name, size in rows.items() if size or name == "parameters"}

    @property
    def total(self) -> int:
        """Return the sum of all parts in bytes."""
        return sum(self.rows().values())


def compiled_memory(known: DeviceMemory, sizes: Any, program: Program | None) -> DeviceMemory:
    """Return the memory with the sizes from `Compiled.memory_analysis()`, and from the program if it can be printed."""
    temporaries = sizes.temp_size_in_bytes
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    total = sizes.argument_size_in_bytes + temporaries + outputs
    peak = getattr(sizes, "peak_memory_in_bytes", 0) or total
    return dataclasses.replace(
        known,
        batch=sizes.argument_size_in_bytes - known.state,
        saved_activations=None if program is None else min(stacked_bytes(program), temporaries),
        temporaries=temporaries,
        outputs=outputs,
        peak=total if known.host else peak,  # XLA's peak includes host memory
    )


def stacked_bytes(program: Program) -> int:
    """Return the bytes of the arrays that the loops of the forward pass save for the backward pass, on one device."""
    total = 0
    for run in program.runs():
        if run.op.kind == "while" and _LAYERS.search(run.op.cause) and "transpose(" not in run.op.cause:
            total += sum(shape_bytes(shape) * count for shape, count in program.stacked(run.op).items())
    return total


def needed_bytes(message: str) -> int | None:
    """Return the bytes in XLA's out-of-memory message. None: the message has no number."""
    for pattern in _NEEDED:
        match = pattern.search(message)
        if match:
            return int(float(match[1]) * _UNITS[match[2]])
    return None
