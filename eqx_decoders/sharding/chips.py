"""Accelerators in published figures: products, memory, and the links of each network."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax


LANES = 128  # width of a TPU's vector registers, of which blocks of its kernels are multiples
# Major compute capabilities that Pallas kernels for NVIDIA's GPUs are compiled for, Hopper and the Blackwell of data
# centers: others have less shared memory.
KERNEL_GENERATIONS = 9, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip by its data sheet; a JAX device is a chip, or its part where a chip has several.

    **Arguments:**

    - `name`: first word of topologies, such as `v5p` in `v5p:4x4x4`.
    - `kinds`: values of `jax.Device.device_kind`.
    - `devices`: JAX devices on a chip.
    - `bf16`, `eight_bit`: dense operations a second, without sparsity.
    - `formats`: 8-bit dtypes of `eight_bit`: `int8`, `fp8`. Others are no faster than bf16.
    - `memory`, `memory_bandwidth`: bytes, and bytes a second.
    - `links`, `link_bandwidth`: connections to neighbors, and the bytes a second that each carries in one direction.
    - `ring`: along which multiples of chips a torus is closed, so that an axis sends both ways (see `closed`); 0: a
        switch, no torus.
    - `block`: chips of a box around which a ring of gradients goes, in slices that are open in some direction: as many
        as a matrix with 4096 rows has terms, see `numerics.gradient_ring`. (): chips stay in their order.
    - `node`: chips that the fast network joins; 0: all of a slice.
    - `network_bandwidth`: bytes a second of a chip, in one direction, between slices or nodes.
    - `source`: where the figures are from.
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
    ring: int = 0
    block: tuple[int, ...] = ()
    node: int = 0
    network_bandwidth: float
    source: str

    def closed(self, extents: Sequence[int]) -> tuple[bool, ...]:
        """Return along which coordinates of a slice with so many chips the last chip is joined to the first.

        Cubes of optical switches close all three axes of a torus or none of them.
        """
        rings = tuple(self.ring > 0 and extent % self.ring == 0 for extent in extents)
        return rings if self.links < 6 or all(rings) else (False,) * len(rings)


_CLOUD = "cloud.google.com/tpu/docs"
_NVIDIA = "data sheet of NVIDIA"
_NIC = 400e9 / 8  # a network card for each GPU

# Formats of TPUs: `jax.experimental.pallas.tpu.TpuInfo` of jax 0.12, which has no rate of int8 for v4 and v7x, and only
# for v7x one of fp8 above that of bf16; of GPUs: their data sheets.
# Links of v4 and the multiples in which a torus closes: "How to Scale Your Model" (jax-ml.github.io/scaling-book).
# The network between slices is given in Gb/s for a chip; that of v4 isn't: 25 Gb/s as v5e's.
CHIPS: tuple[Chip, ...] = (
    Chip(name="v4", kinds=("TPU v4",), bf16=275e12, eight_bit=275e12, memory=32e9, memory_bandwidth=1.2e12,
         links=6, link_bandwidth=45e9, ring=4, block=(2, 2, 4), network_bandwidth=25e9 / 8,
         source=f"{_CLOUD}/v4, scaling book"),
    Chip(name="v5e", kinds=("TPU v5 lite", "TPU v5e"), bf16=197e12, eight_bit=393e12, formats=("int8",),
         memory=16e9, memory_bandwidth=819e9,
         links=4, link_bandwidth=50e9, ring=16, block=(4, 4, 1), network_bandwidth=25e9 / 8, source=f"{_CLOUD}/v5e"),
    Chip(name="v5p", kinds=("TPU v5", "TPU v5p"), bf16=459e12, eight_bit=918e12, formats=("int8",),
         memory=95e9, memory_bandwidth=2.765e12,
         links=6, link_bandwidth=100e9, ring=4, block=(2, 2, 4), network_bandwidth=50e9 / 8, source=f"{_CLOUD}/v5p"),
    Chip(name="v6e", kinds=("TPU v6 lite", "TPU v6e"), bf16=918e12, eight_bit=1836e12, formats=("int8",),
         memory=32e9, memory_bandwidth=1.638e12,
         links=4, link_bandwidth=100e9, ring=16, block=(2, 4, 1), network_bandwidth=100e9 / 8, source=f"{_CLOUD}/v6e"),
    Chip(name="v7x", kinds=("TPU7x",), devices=2, bf16=2307e12, eight_bit=4614e12, formats=("fp8",),
         memory=192e9, memory_bandwidth=7.38e12,
         links=6, link_bandwidth=100e9, ring=4, network_bandwidth=100e9 / 8, source=f"{_CLOUD}/tpu7x"),
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
    """Return the chip with devices of this kind; None for one without figures here."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)


def slice_of(device: Any) -> int:
    """Return the number of a device's TPU slice; 0 for one that has none."""
    return getattr(device, "slice_index", None) or 0


def has_kernels(capability: tuple[int, int] | None) -> bool:
    """Return whether GPUs of a compute capability run our Pallas kernels."""
    return capability is not None and capability[0] in KERNEL_GENERATIONS


def compute_capability(device: Any) -> tuple[int, int] | None:
    """Return major and minor number of a GPU's compute capability; None for devices that are not NVIDIA's."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def device_kind() -> str:
    """Return the kind of the devices of the mesh in whose `shard_map` this is traced, else of the first device."""
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind
