"""The plan of a step: memory, operations, collectives and time, as `step_plan` and `decoding_step` make it."""

import dataclasses

from eqx_decoders.planning.collectives import Collective
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.roofline import Roofline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations of a step on all devices together.

    **Arguments:**

    - `model`: of the model, forward and backward, as MFU counts them.
    - `attention`: those of the model that are not of weights.
    - `computed`: all products of the program, recomputation included. For attention in loops whose trips depend on
        data, as many as the model has; for experts in such loops, or with room for the worst case, as many as the
        tokens need.
    - `six_nd`: 6 * weights that multiply * tokens.
    - `eight_bit`: those of `computed` that are of 8-bit numbers.
    """

    model: float
    attention: float
    computed: float
    six_nd: float
    eight_bit: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Needs of a step of any kind.

    **Arguments:**

    - `machine`: the machine that it is planned for.
    - `memory`: of a device.
    - `collectives`: of a device; None where the compiled program can't be read.
    - `roofline`: the estimate.
    - `seconds`: time of the compilation.
    - `compiler_message`: the compiler's error where it did not compile the step, or print it.
    """

    machine: Machine
    memory: DeviceMemory
    collectives: tuple[Collective, ...] | None
    roofline: Roofline
    seconds: float
    compiler_message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(PlannedStep):
    """Needs of a training step.

    **Arguments:**

    - `operations`: of all devices.
    - `tokens`: of a step.
    - `replicated`: the share of the weights that is whole along an axis of the mesh that splits others.
    - `attention`: the kernels of attention in the compiled program, by their names in the registry.
    - `note`: the source of each figure, if not the compiler of these devices.
    """

    operations: Operations
    tokens: int
    replicated: float = 0.0
    attention: tuple[str, ...] = ()
    note: str = ""
