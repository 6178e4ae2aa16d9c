"""Plans of steps: memory, FLOPs, collectives and estimated time. Created by `step_plan` and `decoding_step`."""

import dataclasses

from eqx_decoders.planning.collectives import Collective
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.roofline import Roofline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations:
    """FLOPs of a step, summed over all devices.

    **Arguments:**

    - `model`: FLOPs of the model, forward and backward, as used for MFU.
    - `attention`: the part of `model` that belongs to attention (products without weights).
    - `computed`: FLOPs of all products of the program, including recomputation. Attention whose loops depend on data
        counts as in `model`. Experts count with what the tokens need, without padding for the worst case.
    - `six_nd`: 6 x parameters in matrix products x tokens.
    - `eight_bit`: the part of `computed` with 8-bit operands.
    """

    model: float
    attention: float
    computed: float
    six_nd: float
    eight_bit: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Plan of a training or decoding step.

    **Arguments:**

    - `machine`: the machine.
    - `memory`: memory of one device.
    - `collectives`: collectives of one device. None: the compiled program cannot be printed.
    - `roofline`: time estimate.
    - `seconds`: compilation time.
    - `compiler_message`: compiler error, if the step was not compiled or cannot be printed.
    """

    machine: Machine
    memory: DeviceMemory
    collectives: tuple[Collective, ...] | None
    roofline: Roofline
    seconds: float
    compiler_message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(PlannedStep):
    """Plan of a training step.

    **Arguments:**

    - `operations`: FLOPs.
    - `tokens`: number of tokens per step.
    - `replicated`: fraction of the weights that is replicated along a mesh axis that shards other weights.
    - `attention`: names of the attention kernels in the compiled program.
    - `note`: sources of the numbers, if they are not from a compiler for these devices.
    """

    operations: Operations
    tokens: int
    replicated: float = 0.0
    attention: tuple[str, ...] = ()
    note: str = ""
