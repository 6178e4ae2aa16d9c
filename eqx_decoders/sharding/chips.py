"""Data sheet values of accelerators: operations per second, memory and network links."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax


LANES = 128  # width of a TPU's vector registers; tile sizes of TPU kernels are multiples of it
# Major compute capabilities that the Pallas kernels for NVIDIA GPUs support: Hopper and data-center Blackwell. Other
# GPUs have less shared memory.
KERNEL_GENERATIONS = 9, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Data sheet values of a chip. A JAX device is a chip, or a part of a chip (see `devices`).

    **Arguments:**

    - `name`: prefix of topologies, such as `v5p` in `v5p:4x4x4`.
    - `kinds`: values of `jax.Device.device_kind`.
    - `devices`: JAX devices per chip.
    - `bf16`, `eight_bit`: dense operations per second (FLOP/s) in bfloat16 and in 8-bit formats, without sparsity.
    - `formats`: 8-bit formats with the rate `eight_bit`: `int8`, `fp8`. Other 8-bit formats have the bf16 rate.
    - `memory`, `memory_bandwidth`: bytes, and bytes per second.
    - `links`: number of links to neighbors.
    - `link_bandwidth`: bytes per second of a link, in one direction.
    - `wraparound_multiple`: a torus axis has wraparound links if its number of chips is a multiple of this number (see
        `closed`). 0: the chips are connected by a switch.
    - `ring_box`: extents of the boxes of chips around which gradient rings run, in slices that lack wraparound links
        along some axis. The number of chips in a box equals the number of terms in the gradient ring of a matrix with
        4096 rows, see `numerics.rings.levels`. (): keep the order of the chips.
    - `node`: number of chips that the fast network connects. 0: all chips of a slice.
    - `network_bandwidth`: bytes per second per chip between slices or nodes, in one direction.
    - `source`: source of the values.
    """

    name: str
    kinds: tuple[str, ...]
    devices: int = 1
    bf16: float
    eight_bit: float
    formats: tuple[str, ...] = ()
    memory: float
    memory_bandwidth: float
    links: int
    link_bandwidth: float
    wraparound_multiple: int = 0
    ring_box: tuple[int, ...] = ()
    node: int = 0
    network_bandwidth: float
    source: str

    def closed(self, extents: Sequence[int]) -> tuple[bool, ...]:
        """Return, for each axis of a slice, whether it has wraparound links from the last chip to the first.

        A 3D torus is connected by optical switches, which have wraparound links along all axes or along no axis.

        **Arguments:**

        - `extents`: number of chips along each axis.
        """
        multiple = self.wraparound_multiple
        wraparound = tuple(multiple > 0 and extent % multiple == 0 for extent in extents)
        return wraparound if self.links < 6 or all(wraparound) else (False,) * len(wraparound)


_CLOUD = "cloud.google.com/tpu/docs"
_NVIDIA = "data sheet of NVIDIA"
_NIC = 400e9 / 8  # a 400 Gb/s network card per GPU

# Sources. 8-bit formats: of TPUs, `jax.experimental.pallas.tpu.TpuInfo` of jax 0.12, which has no int8 rate for v4 and
# v7x, and an fp8 rate above the bf16 rate only for v7x; of GPUs, their data sheets.
# Links of v4 and `wraparound_multiple`: "How to Scale Your Model" (jax-ml.github.io/scaling-book).
# Network between slices: data sheets, in Gb/s per chip. v4 has no published value; 25 Gb/s is the value of v5e.
CHIPS: tuple[Chip, ...] = (
    Chip(name="v4", kinds=("TPU v4",), bf16=275e12, eight_bit=275e12, memory=32e9, memory_bandwidth=1.2e12,
         links=6, link_bandwidth=45e9, wraparound_multiple=4, ring_box=(2, 2, 4), network_bandwidth=25e9 / 8,
         source=f"{_CLOUD}/v4, scaling book"),
    Chip(name="v5e", kinds=("TPU v5 lite", "TPU v5e"), bf16=197e12, eight_bit=393e12, formats=("int8",),
         memory=16e9, memory_bandwidth=819e9,
         links=4, link_bandwidth=50e9, wraparound_multiple=16, ring_box=(4, 4, 1), network_bandwidth=25e9 / 8,
         source=f"{_CLOUD}/v5e"),
    Chip(name="v5p", kinds=("TPU v5", "TPU v5p"), bf16=459e12, eight_bit=918e12, formats=("int8",),
         memory=95e9, memory_bandwidth=2.765e12,
         links=6, link_bandwidth=100e9, wraparound_multiple=4, ring_box=(2, 2, 4), network_bandwidth=50e9 / 8,
         source=f"{_CLOUD}/v5p"),
    Chip(name="v6e", kinds=("TPU v6 lite", "TPU v6e"), bf16=918e12, eight_bit=1836e12, formats=("int8",),
         memory=32e9, memory_bandwidth=1.638e12,
         links=4, link_bandwidth=100e9, wraparound_multiple=16, ring_box=(2, 4, 1), network_bandwidth=100e9 / 8,
         source=f"{_CLOUD}/v6e"),
    Chip(name="v7x", kinds=("TPU7x",), devices=2, bf16=2307e12, eight_bit=4614e12, formats=("fp8",),
         memory=192e9, memory_bandwidth=7.38e12,
         links=6, link_bandwidth=100e9, wraparound_multiple=4, network_bandwidth=100e9 / 8, source=f"{_CLOUD}/tpu7x"),
    Chip(name="h100", kinds=("NVIDIA H100 80GB HBM3",), bf16=989e12, eight_bit=1979e12, formats=("int8", "fp8"),
         memory=80e9, memory_bandwidth=3.35e12,
         links=1, link_bandwidth=450e9, node=8, network_bandwidth=_NIC, source=f"{_NVIDIA} (SXM)"),
    Chip(name="h200", kinds=("NVIDIA H200",), bf16=989e12, eight_bit=1979e12, formats=("int8", "fp8"),
         memory=141e9, memory_bandwidth=4.8e12,
         links=1, link_bandwidth=450e9, node=8, network_bandwidth=_NIC, source=f"{_NVIDIA} (SXM)"),
    Chip(name="b200", kinds=("NVIDIA B200",), bf16=2250e12, eight_bit=4500e12, formats=("int8", "fp8"),
         memory=192e9, memory_bandwidth=8e12,
         links=1, link_bandwidth=900e9, node=8, network_bandwidth=_NIC, source=f"{_NVIDIA} (HGX)"),
)  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of a `jax.Device.device_kind`. None: unknown."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)


def slice_of(device: Any) -> int:
    """Return the index of a device's TPU slice; 0 for other devices."""
    return getattr(device, "slice_index", None) or 0


def has_kernels(capability: tuple[int, int] | None) -> bool:
    """Return whether the Pallas kernels for GPUs support a compute capability."""
    return capability is not None and capability[0] in KERNEL_GENERATIONS


def compute_capability(device: Any) -> tuple[int, int] | None:
    """Return the major and minor compute capability of an NVIDIA GPU. None: other devices."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return None if match is None else (int(match[1]), int(match[2]))


def device_kind() -> str:
    """Return the device kind of the mesh inside a `shard_map`; outside, the device kind of the first device."""
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind
