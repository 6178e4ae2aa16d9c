"""Plans for GPUs, for which there is no compiler without GPUs: counted memory, and a stand-in of TPUs.

The SPMD partitioner of XLA is one for all platforms: a step that is compiled for as many TPUs, in a mesh of the same
sizes, has the parts and the collectives that it has on GPUs, but for later fusions and combinations.
"""

import dataclasses
import re
from typing import NamedTuple

from eqx_decoders.core.chips import CHIPS, Chip
from eqx_decoders.errors import check
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import Plan


# no rings of small products, as on GPUs; and what a device of the stand-in may take
_OPTION, _ROOM = "xla_jf_spmd_threshold_for_windowed_einsum_mib", "xla_tpu_max_hbm_size_mib"


class GpuNodes(NamedTuple):
    """Nodes of GPUs: `h100:4x8` is four nodes of eight GPUs."""

    chip: Chip
    nodes: int
    each: int

    @property
    def machine(self) -> Machine:
        """Return the machine, node by node in the order of the mesh."""
        positions = tuple((node, (gpu,), 0) for node in range(self.nodes) for gpu in range(self.each))
        return Machine(self.chip, positions, (self.each,))

    @property
    def stand_in(self) -> str:
        """Return the topology of as many TPUs."""
        count = self.nodes * self.each
        power = count.bit_length() - 1
        check(count == 2**power >= 4, f"topology: {count} GPUs have no stand-in: give a power of two, at least 4.")
        sides = sorted(2 ** ((power + more) // 3) for more in range(3))
        return "v5p:" + "x".join(map(str, sides if count > 4 else (2, 2, 1)))

    @property
    def options(self) -> dict[str, str]:
        """Return the options of the compiler of the stand-in."""
        return {_OPTION: "1000000", _ROOM: str(int(self.chip.memory) // 2**20)}


def gpus_of(topology: str) -> GpuNodes | None:
    """Parse a topology such as `h100:4x8`; None where the name before the colon is of no GPU."""
    name, _, shape = topology.partition(":")
    chip = next((chip for chip in CHIPS if chip.name == name and chip.node), None)
    if chip is None:
        return None
    rule = f"topology={topology!r} must be nodes x GPUs of a node, of which at most {chip.node}, such as {name}:4x8."
    check(re.fullmatch(r"\d+x\d+", shape) is not None, rule)
    nodes, each = (int(number) for number in shape.split("x"))
    check(nodes > 0 and 0 < each <= chip.node, rule)
    return GpuNodes(chip, nodes, each)


def on_gpus(plan: Plan, memory: DeviceMemory, gpus: GpuNodes) -> Plan:
    """Return the plan of the stand-in with the counted memory, and a note about the source of each figure."""
    note = (
        f"There is no compiler for {gpus.chip.name} here. Memory is counted: state and gradients by shardings, what is "
        f"kept by tracing, beside it twice what a layer makes; no compiler has confirmed it. Collectives are of "
        f"the step compiled for {gpus.nodes * gpus.each} TPUs ({gpus.stand_in}) in a mesh of the same sizes."
    )
    return dataclasses.replace(plan, memory=memory, note=note)
