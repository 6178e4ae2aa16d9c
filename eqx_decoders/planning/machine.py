"""The machine that a step is planned for: its chips, and how fast those of a group reach each other."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from eqx_decoders.core.chips import CHIPS, Chip, chip_of
from eqx_decoders.errors import ConfigError


_DIE_TO_DIE = 6  # links between the two dies of a v7x chip (Google's Ironwood pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """How the members of a group reach each other.

    **Arguments:**

    - `bandwidth`: bytes a second that leave a device on all links of the fast network that the group uses, both ways of
        a ring added up; 0 where the group has a single member there.
    - `hops`: half of the longest ring, or the whole of the longest line.
    - `members`: how many of the group are joined by the fast network.
    - `parts`: over how many slices or nodes the group reaches.
    """

    bandwidth: float
    hops: float
    members: int
    parts: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices in the order of the mesh.

    **Arguments:**

    - `chip`: their data sheet.
    - `places`: of each device its slice or node, its coordinates there, and its number on the chip.
    - `extents`: chips along each coordinate.
    """

    chip: Chip
    places: tuple[tuple[int, tuple[int, ...], int], ...]
    extents: tuple[int, ...]

    @classmethod
    def of_tpus(cls, devices: Sequence[Any]) -> "Machine":
        """Of the devices of a TPU topology, in the order of the mesh."""
        kind = devices[0].device_kind
        chip = chip_of(kind)
        if chip is None:
            known = ", ".join(chip.name for chip in CHIPS)
            raise ConfigError(f"topology: there are no figures of {kind!r}. Known: {known}.")
        places = tuple(
            (getattr(device, "slice_index", None) or 0, tuple(device.coords), int(device.core_on_chip))
            for device in devices
        )
        return cls(chip, places, tuple(1 + max(column) for column in zip(*(place[1] for place in places), strict=True)))

    @property
    def flops(self) -> float:
        """Dense bf16 products of one device a second."""
        return self.product_flops()

    def product_flops(self, format: str | None = None) -> float:
        """Dense products of one device a second, of numbers of 8 bits in a format, or of bf16."""
        return (self.chip.eight_bit if format in self.chip.formats else self.chip.bf16) / self.chip.devices

    @property
    def memory(self) -> float:
        """Bytes of one device."""
        return self.chip.memory / self.chip.devices

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second between one device and its memory."""
        return self.chip.memory_bandwidth / self.chip.devices

    def route(self, group: Sequence[int]) -> Route:
        """How these devices, by their places in the mesh, reach each other."""
        here = [self.places[member] for member in group]
        parts = len({place[0] for place in here})
        inside = [place for place in here if place[0] == here[0][0]]
        columns = zip(*(place[1] for place in inside), strict=True)
        spans = [len(set(column)) for column in columns]
        bandwidth, hops = 0.0, 0.0
        for span, extent in zip(spans, self.extents, strict=True):
            if span > 1:
                ring = self.chip.ring > 0 and span == extent and span % self.chip.ring == 0
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
