"""GPUs that are not here: devices to compile for; or, where their compiler is not installed, a stand-in of TPUs.

The SPMD partitioner of XLA is one for all platforms: a step that is compiled for as many TPUs, in a mesh of the same
sizes, has the parts and the collectives that it has on GPUs, but for later fusions and combinations.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax import sharding

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import Plan
from eqx_decoders.sharding.chips import CHIPS, Chip


# no rings of small products, as on GPUs; and what a device of the stand-in may take
_OPTION, _ROOM = "xla_jf_spmd_threshold_for_windowed_einsum_mib", "xla_tpu_max_hbm_size_mib"
# by itself XLA asks CUB on a GPU for the scratch space of a sort, and there is none
GPU_OPTIONS = {"xla_gpu_deviceless_cub_mode": "DEVICELESS_CUB_DISABLED"}


class _Target(NamedTuple):
    """Figures of a GPU that XLA's compiler asks for, by `xla/backends/gpu/target_config/specs` of openxla/xla."""

    cores: int
    clock_ghz: float
    cache: int
    memory: int
    memory_bandwidth: int
    capability: int


_TARGETS = {
    "h100": _Target(132, 1.98, 52_428_800, 84_942_979_072, 3_352_320_000_000, 9),
    "h200": _Target(132, 1.98, 52_428_800, 151_397_597_184, 4_800_000_000_000, 9),
    "b200": _Target(148, 1.965, 132_644_864, 191_514_411_008, 7_672_320_000_000, 10),
}
# what these have in common; versions are those of the packages of the compiler
_TEXT = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} clock_rate_ghz: {clock_ghz} l2_cache_size: {cache}
  device_memory_size: {memory} memory_bandwidth: {memory_bandwidth}
  cuda_compute_capability {{ major: {capability} feature_extension: ACCELERATED_FEATURES }}
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


class GpuNodes(NamedTuple):
    """Nodes of GPUs: `h100:4x8` is four nodes of eight GPUs."""

    chip: Chip
    nodes: int
    each: int

    @property
    def machine(self) -> Machine:
        """Return the machine, node by node in the order of the mesh."""
        return Machine.of_nodes(self.chip, [node for node in range(self.nodes) for _ in range(self.each)])

    @property
    def target(self) -> str:
        """Return the description of a GPU for XLA's compiler."""
        return _TEXT.format(**_TARGETS[self.chip.name]._asdict(), name=self.chip.kinds[0])

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


def gpu_devices(gpus: GpuNodes) -> list[Any] | None:
    """Return devices to compile for, node by node; None where the compiler of GPUs is not installed."""
    from jax.experimental import topologies

    # without libraries of CUDA, which it does without, the compiler would not be registered
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    shape = f"1x{gpus.nodes}x{gpus.each}"
    try:
        return topologies.get_topology_desc("any", "cuda", target_config=gpus.target, topology=shape).devices
    except NotImplementedError:
        return None


@contextlib.contextmanager
def tracing_for(devices: list[Any]) -> Iterator[None]:
    """Answer for these GPUs what JAX asks of the process's GPUs while programs are traced and lowered.

    Its cuDNN attention asks for the compute capability. Pallas asks for the kind of GPU, which a `shard_map` tells it
    by its mesh, and in a program of one device the context.
    """
    from jax._src.cudnn import fused_attention_stablehlo as module  # JAX has no public option for other GPUs

    def at_least(capability: str) -> bool:
        return tuple(map(int, devices[0].compute_capability.split("."))) >= tuple(map(int, capability.split(".")))

    if devices[0].platform != "gpu":
        yield
        return
    asked = {
        "check_compute_capability": at_least,
        "is_cuda_compute_capability_equal": lambda capability: devices[0].compute_capability == capability,
    }
    before = {name: getattr(module, name) for name in asked}
    module.__dict__.update(asked)
    here = sharding.AbstractDevice(devices[0].device_kind, None, platform="gpu")
    try:
        with sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=here)):
            yield
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        remedy = "pip install nvidia-cudnn-cu13, or plan with attention=chunked"
        raise ConfigError(f"Attention by cuDNN can't be compiled: {str(error).splitlines()[0]} {remedy}.") from error
    finally:
        module.__dict__.update(before)


def on_gpus(plan: Plan, memory: DeviceMemory, gpus: GpuNodes) -> Plan:
    """Return the plan of the stand-in with the counted memory, and a note about the source of each figure."""
    note = (
        f"There is no compiler for {gpus.chip.name} here: pip install 'eqx_decoders[aot-gpu]' brings it. Memory is "
        "counted: state and gradients by shardings, what is kept by tracing, beside it twice what a layer makes; no "
        "compiler has confirmed it. Collectives and attention are of the step compiled for "
        f"{gpus.nodes * gpus.each} TPUs ({gpus.stand_in}) in a mesh of the same sizes."
    )
    return dataclasses.replace(plan, memory=memory, note=note)
