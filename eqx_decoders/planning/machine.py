"""`Machine`: chips of a planned step, and the bandwidth between groups of devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.errors import ConfigError
from eqx_decoders.sharding.chips import CHIPS, Chip, chip_of, slice_of
from eqx_decoders.sharding.links import busiest_link


_DIE_TO_DIE = 6  # links between the two dies of a v7x chip (Google's Ironwood pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """Links between the devices of a group.

    **Arguments:**

    - `bandwidth`: bytes/s that a device can send over all links of the fast network that the group uses, in both
        directions of a ring. 0: the group has one device per slice or node.
    - `hops`: length of the longest path: half of a ring, or all of a line.
    - `members`: number of devices per slice or node.
    - `parts`: number of slices or nodes.
    """

    bandwidth: float
    hops: float
    members: int
    parts: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of a mesh, in its order.

    **Arguments:**

    - `chip`: data sheet of the chips.
    - `positions`: slice or node, coordinates, and core on the chip of each device.
    - `extents`: number of chips along each coordinate.
    """

    chip: Chip
    positions: tuple[tuple[int, tuple[int, ...], int], ...]
    extents: tuple[int, ...]

    @classmethod
    def of_nodes(cls, chip: Chip, nodes: Sequence[int]) -> "Machine":
        """Return the machine for GPUs, given the node of each device. A switch connects the GPUs of a node."""
        counts = dict.fromkeys(nodes, 0)
        positions = []
        for node in nodes:
            positions.append((node, (counts[node],), 0))
            counts[node] += 1
        return cls(chip, tuple(positions), (max(counts.values()),))

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Machine":
        """Return the machine for the devices of a TPU or GPU topology, in the order of the mesh."""
        kind = devices[0].device_kind
        chip = chip_of(kind)
        if chip is None:
            known = ", ".join(chip.name for chip in CHIPS)
            raise ConfigError(f"topology: the chip {kind!r} is not in the table of chips. Known chips: {known}.")
        if chip.node:
            return cls.of_nodes(chip, [device.process_index for device in devices])
        positions = tuple((slice_of(device), tuple(device.coords), int(device.core_on_chip)) for device in devices)
        return cls(
            chip,
            positions,
            tuple(1 + max(column) for column in zip(*(position[1] for position in positions), strict=True)),
        )

    @property
    def flops(self) -> float:
        """Return the dense bf16 FLOP/s of one device."""
        return self.product_flops()

    def product_flops(self, format: str | None = None) -> float:
        """Return the dense FLOP/s of one device: for an 8-bit format if the chip has a rate for it, else for bf16."""
        return (self.chip.eight_bit if format in self.chip.formats else self.chip.bf16) / self.chip.devices

    @property
    def memory(self) -> float:
        """Return the memory of one device in bytes."""
        return self.chip.memory / self.chip.devices

    @property
    def memory_bandwidth(self) -> float:
        """Return the memory bandwidth of one device in bytes/s."""
        return self.chip.memory_bandwidth / self.chip.devices

    def busiest_link(self, pairs: Sequence[Sequence[int]]) -> int:
        """Return the maximum number of messages on one link, if each pair (source, target) sends one at the same time.

        0: no message leaves its device. 1: between GPUs, and within a chip.
        """
        ends = [tuple(self.positions[device] for device in pair) for pair in pairs if len(set(pair)) > 1]
        if not ends or self.chip.node:
            return min(1, len(ends))
        inside = [[end[1] for end in pair] for pair in ends if pair[0][0] == ends[0][0][0]]  # all slices are alike
        return max(1, busiest_link(self.chip, self.extents, *np.moveaxis(np.array(inside), 1, 0)))

    def route(self, group: Sequence[int]) -> Route:
        """Return the links between devices, given by their indices in the mesh."""
        positions = [self.positions[member] for member in group]
        parts = len({position[0] for position in positions})
        inside = [position for position in positions if position[0] == positions[0][0]]
        columns = zip(*(position[1] for position in inside), strict=True)
        spans = [len(set(column)) for column in columns]
        bandwidth, hops = 0.0, 0.0
        for span, extent, closed in zip(spans, self.extents, self.chip.closed(self.extents), strict=True):
            if span > 1:
                ring = closed and span == extent
                bandwidth += self.chip.link_bandwidth * (2 if ring else 1)
                hops = max(hops, 1.0 if self.chip.node else span / 2 if ring else span - 1.0)  # a switch is one hop
        if bandwidth == 0 and len(inside) > 1:  # on one chip
            bandwidth, hops = _DIE_TO_DIE * self.chip.link_bandwidth, 1.0
        return Route(
            bandwidth=bandwidth / (self.chip.devices if max(spans) > 1 else 1),
            hops=hops,
            members=len(inside),
            parts=parts,
        )
