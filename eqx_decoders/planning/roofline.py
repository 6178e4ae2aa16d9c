"""Estimate of a step's time: the needs of products, memory and networks at their published rates."""

import dataclasses
from collections.abc import Iterable

from eqx_decoders.planning.collectives import Collective
from eqx_decoders.planning.machine import Machine


_HOP = 1e-6  # seconds from one chip to the next, at least

ACROSS = "between slices, nodes"  # the slower network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Estimated seconds of a step.

    **Arguments:**

    - `compute`: all products at the peak of bf16, or of 8 bits where they are such and the chip has one.
    - `memory`: certain reads and writes, at the memory's bandwidth: a lower bound.
    - `networks`: collectives by the axes of the mesh that they go along; those between slices by themselves.
    - `model_flops_seconds`: the model's own operations at the peak, without recomputation, as MFU counts them.
    """

    compute: float
    memory: float
    networks: dict[str, float]
    model_flops_seconds: float

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part by its name."""
        return {"compute": self.compute, "memory": self.memory} | self.networks

    @property
    def bound(self) -> str:
        """Return the part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def overlapped(self) -> float:
        """Return the seconds if all parts went on at the same time."""
        return max(self.parts.values())

    @property
    def one_by_one(self) -> float:
        """Return the seconds if nothing were computed while anything is sent."""
        return max(self.compute, self.memory) + sum(self.networks.values())

    @property
    def mfu(self) -> tuple[float, float]:
        """Return the model's share of the peak: one by one, and overlapped."""
        return self.model_flops_seconds / self.one_by_one, self.model_flops_seconds / self.overlapped


def network_seconds(collectives: Iterable[Collective], machine: Machine) -> dict[str, float]:
    """Add up the seconds of the collectives of a step on each network."""
    seconds: dict[str, float] = {}
    for one in collectives:
        for name, time in collective_seconds(one, machine).items():
            seconds[name] = seconds.get(name, 0.0) + one.times * time
    return seconds


def collective_seconds(one: Collective, machine: Machine) -> dict[str, float]:
    """Estimate the seconds of one collective by ring formulas, on the fast network and between slices.

    Of `V` bytes in all over N devices with links of `W` bytes a second, both ways and all axes together: gather and
    reduce-scatter `V (N - 1) / (N W)`, all-reduce twice that, all-to-all `V / (4 W)`, permutation by one link, times
    the messages that share the busiest one. Between slices goes what is left when the fast network has had its turn: a
    part of `V` for each of its members.
    """
    route = machine.route(max(one.groups, key=len))
    if one.kind == "collective-permute":
        if any(machine.route(pair).parts > 1 for pair in one.groups):
            return {ACROSS: one.bytes / machine.chip.network_bandwidth}
        messages = machine.busiest_link(one.groups)
        return {_along(one): _HOP + one.bytes * messages / machine.chip.link_bandwidth} if messages else {}
    whole = one.bytes * one.size if "all-to-all" in one.kind else one.bytes
    passes = 2 if one.kind == "all-reduce" else 1
    seconds = {}
    if route.members > 1:
        if "all-to-all" in one.kind:
            sent = whole / route.parts / 4
        else:
            sent = passes * whole * (route.members - 1) / route.members
        seconds[_along(one)] = max(_HOP * route.hops, sent / route.bandwidth)
    if route.parts > 1:
        share = whole / one.size if "all-to-all" in one.kind else whole / route.members
        seconds[ACROSS] = (
            passes * share * (route.parts - 1) / route.parts / (machine.chip.network_bandwidth / machine.chip.devices)
        )
    return seconds


def _along(one: Collective) -> str:
    return " x ".join(one.axes) or "one device"
