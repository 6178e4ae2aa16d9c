"""GPUs that need not be attached: devices to compile for, or a TPU topology as a proxy without the GPU compiler.

XLA's SPMD partitioner is the same on all platforms. A step compiled for the same number of TPUs, with the same mesh,
has the same shards and collectives as on GPUs, except for later fusions and combined collectives.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax import sharding

from eqx_decoders.errors import ConfigError, check, install_command
from eqx_decoders.planning.device_memory import DeviceMemory
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.planned_step import Plan
from eqx_decoders.sharding.chips import CHIPS, Chip


_NO_WINDOWED_EINSUM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"  # GPUs do not use windowed einsums
_DEVICE_MEMORY = "xla_tpu_max_hbm_size_mib"
# without this option XLA runs CUB on an attached GPU to get the scratch size of a sort
GPU_OPTIONS = {"xla_gpu_deviceless_cub_mode": "DEVICELESS_CUB_DISABLED"}


class _Target(NamedTuple):
    """Properties of a GPU for XLA's compiler, from `xla/backends/gpu/target_config/specs` in openxla/xla."""

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
# target description; the versions are those of the compiler packages
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
    """GPU nodes. `h100:4x8`: four nodes with eight GPUs each."""

    chip: Chip
    nodes: int
    gpus_per_node: int

    @property
    def machine(self) -> Machine:
        """Return the machine, with the devices ordered by node."""
        return Machine.of_nodes(self.chip, [node for node in range(self.nodes) for _ in range(self.gpus_per_node)])

    @property
    def target(self) -> str:
        """Return the target description for XLA's compiler."""
        return _TEXT.format(**_TARGETS[self.chip.name]._asdict(), name=self.chip.kinds[0])

    @property
    def proxy_topology(self) -> str:
        """Return a topology with the same number of TPUs."""
        count = self.nodes * self.gpus_per_node
        power = count.bit_length() - 1
        check(
            count == 2**power >= 4,
            f"topology: without the GPU compiler, {count} GPUs are not supported: their number must be a power of two "
            f"and at least 4. Install the compiler: {install_command('aot-gpu')}.",
        )
        sides = sorted(2 ** ((power + offset) // 3) for offset in range(3))
        return "v5p:" + "x".join(map(str, sides if count > 4 else (2, 2, 1)))

    @property
    def options(self) -> dict[str, str]:
        """Return the compiler options for the proxy topology."""
        return {_NO_WINDOWED_EINSUM: "1000000", _DEVICE_MEMORY: str(int(self.chip.memory) // 2**20)}


def gpus_of(topology: str) -> GpuNodes | None:
    """Parse a topology such as `h100:4x8`. Returns None if the name before the colon is not a GPU."""
    name, _, shape = topology.partition(":")
    chip = next((chip for chip in CHIPS if chip.name == name and chip.node), None)
    if chip is None:
        return None
    match = re.fullmatch(r"(\d+)x(\d+)", shape)
    nodes, per_node = (int(match[1]), int(match[2])) if match else (0, 0)
    check(
        nodes > 0 and 0 < per_node <= chip.node,
        f"topology={topology!r} must be NODESxGPUS with at most {chip.node} GPUs per node, such as {name}:4x8.",
    )
    return GpuNodes(chip, nodes, per_node)


def gpu_devices(gpus: GpuNodes) -> list[Any] | None:
    """Return devices to compile for, ordered by node. None: the GPU compiler is not installed."""
    from jax.experimental import topologies

    # the compiler does not need the CUDA libraries, but without this variable JAX does not register it
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    shape = f"1x{gpus.nodes}x{gpus.gpus_per_node}"
    try:
        return topologies.get_topology_desc("any", "cuda", target_config=gpus.target, topology=shape).devices
    except NotImplementedError:
        return None


@contextlib.contextmanager
def tracing_for(devices: list[Any]) -> Iterator[None]:
    """Trace and lower programs for these GPUs, which need not be attached.

    Two parts of JAX ask for properties of a GPU while tracing. Pallas reads the kind of GPU from the abstract mesh. The
    cuDNN attention always reads the compute capability of the local GPU, for which JAX has no option, so its two
    functions that do this are replaced.
    """
    from jax._src.cudnn import fused_attention_stablehlo as module

    def at_least(capability: str) -> bool:
        return tuple(map(int, devices[0].compute_capability.split("."))) >= tuple(map(int, capability.split(".")))

    if devices[0].platform != "gpu":
        yield
        return
    replacements = {
        "check_compute_capability": at_least,
        "is_cuda_compute_capability_equal": lambda capability: devices[0].compute_capability == capability,
    }
    originals = {name: getattr(module, name) for name in replacements}
    module.__dict__.update(replacements)
    device = sharding.AbstractDevice(devices[0].device_kind, None, platform="gpu")
    try:
        with sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device)):
            yield
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise ConfigError(
            f"cuDNN attention cannot be compiled: {str(error).splitlines()[0]} Run pip install nvidia-cudnn-cu13, "
            f"or plan "
            f"with attention=chunked."
        ) from error
    finally:
        module.__dict__.update(originals)


def on_gpus(plan: Plan, memory: DeviceMemory, gpus: GpuNodes) -> Plan:
    """Return the plan for the proxy topology with the memory of GPUs, and a note about the sources of the numbers."""
    note = (
        f"The compiler for {gpus.chip.name} is not installed: {install_command('aot-gpu')}. Memory is "
        "predicted, not compiled: state and gradients from shardings, saved activations from tracing, and twice the "
        "activations of "
        f"one layer. Collectives and attention are those of a step compiled for {gpus.nodes * gpus.gpus_per_node} TPUs "
        f"({gpus.proxy_topology}) with the same mesh."
    )
    return dataclasses.replace(plan, memory=memory, note=note)
