"""GPUs, for which there is no compiler where there are none: what is counted instead, and from which stand-in.

The SPMD partitioner of XLA is one for all platforms: a step that is compiled for as many TPUs, in a mesh of the same
sizes, has the parts and the collectives that it has on GPUs, but for what later passes fuse or combine.
"""

import dataclasses
import re
from typing import NamedTuple

import jax

from eqx_decoders.core.chips import CHIPS, Chip
from eqx_decoders.errors import check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.planning.device_memory import DeviceMemory, state_memory
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.search import kept_by_device, predicted_bytes
from eqx_decoders.planning.step_plan import Plan
from eqx_decoders.training.step.step import Trainer


# no rings of small products, as on GPUs; and what a device of the stand-in may take
_OPTION, _ROOM = "xla_jf_spmd_threshold_for_windowed_einsum_mib", "xla_tpu_max_hbm_size_mib"


class GpuNodes(NamedTuple):
    """Nodes of GPUs: `h100:4x8` are four of eight."""

    chip: Chip
    nodes: int
    each: int

    @property
    def machine(self) -> Machine:
        """Node by node, in the order of the mesh."""
        places = tuple((node, (place,), 0) for node in range(self.nodes) for place in range(self.each))
        return Machine(self.chip, places, (self.each,))

    @property
    def stand_in(self) -> str:
        """The topology of as many TPUs."""
        count = self.nodes * self.each
        power = count.bit_length() - 1
        check(count == 2**power >= 4, f"topology: {count} GPUs have no stand-in: give a power of two, at least 4.")
        sides = sorted(2 ** ((power + more) // 3) for more in range(3))
        return "v5p:" + "x".join(map(str, sides if count > 4 else (2, 2, 1)))

    @property
    def options(self) -> dict[str, str]:
        """Of the compiler of the stand-in."""
        return {_OPTION: "1000000", _ROOM: str(int(self.chip.memory) // 2**20)}


def gpus_of(topology: str) -> GpuNodes | None:
    """What `h100:4x8` says; None where the name before the colon is of no GPU."""
    name, _, shape = topology.partition(":")
    chip = next((chip for chip in CHIPS if chip.name == name and chip.node), None)
    if chip is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", shape)
    rule = f"topology={topology!r} must be nodes x GPUs of a node, of which at most {chip.node}, such as {name}:4x8."
    check(found is not None, rule)
    nodes, each = (int(number) for number in shape.split("x"))
    check(nodes > 0 and 0 < each <= chip.node, rule)
    return GpuNodes(chip, nodes, each)


def counted_memory(
    model: Decoder, trainer: Trainer, machine: Machine, *, batch_size: int, seq_len: int
) -> DeviceMemory:
    """State and gradients by shardings, what is kept and what a layer makes by tracing: nothing is the compiler's."""
    shape = dict(batch_size=batch_size, seq_len=seq_len)
    known = state_memory(trainer, trainer.abstract(model, key=jax.random.key(0)), machine.memory)
    peak = predicted_bytes(model, trainer, machine, **shape)
    kept = kept_by_device(model, trainer, **shape)
    return dataclasses.replace(known, batch=0, kept=kept, temporaries=peak - known.state, outputs=0, peak=peak)


def on_gpus(plan: Plan, memory: DeviceMemory, gpus: GpuNodes) -> Plan:
    """The plan of the stand-in with the memory that was counted, and a note of what is from where."""
    note = (
        f"There is no compiler for {gpus.chip.name} here. Memory is counted: state and gradients by shardings, what is "
        f"kept by tracing, beside it twice what a layer makes; no compiler has confirmed it. Collectives are of "
        f"the step compiled for {gpus.nodes * gpus.each} TPUs ({gpus.stand_in}) in a mesh of the same sizes."
    )
    return dataclasses.replace(plan, memory=memory, note=note)
