"""Roofline estimate of the time of a step from published peak rates of chips, memory and networks."""

import dataclasses
from collections.abc import Iterable

from eqx_decoders.planning.collectives import Collective
from eqx_decoders.planning.machine import Machine


_HOP = 1e-6  # minimum latency in seconds between neighboring chips

ACROSS = "between slices, nodes"  # name of the data-center network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Estimated seconds of a step.

    **Arguments:**

    - `compute`: all products at peak FLOP/s (the 8-bit peak for 8-bit products, if the chip has one).
    - `memory`: required reads and writes at the memory bandwidth, which is a lower bound.
    - `networks`: collectives by mesh axes, and separately those between slices or nodes.
    - `model_flops_seconds`: FLOPs of the model without recomputation at peak FLOP/s, for MFU.
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
        """Return the name of the longest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def overlapped(self) -> float:
        """Return the seconds of a step if all parts overlap."""
        return max(self.parts.values())

    @property
    def one_by_one(self) -> float:
        """Return the seconds of a step if communication does not overlap with computation."""
        return max(self.compute, self.memory) + sum(self.networks.values())

    @property
    def mfu(self) -> tuple[float, float]:
        """Return the model FLOPs utilization without and with overlap."""
        return self.model_flops_seconds / self.one_by_one, self.model_flops_seconds / self.overlapped


def network_seconds(collectives: Iterable[Collective], machine: Machine) -> dict[str, float]:
    """Return the seconds of the collectives of a step by network."""
    seconds: dict[str, float] = {}
    for collective in collectives:
        for name, time in collective_seconds(collective, machine).items():
            seconds[name] = seconds.get(name, 0.0) + collective.times * time
    return seconds


def collective_seconds(collective: Collective, machine: Machine) -> dict[str, float]:
    """Estimate the seconds of one collective with ring formulas, on the fast network and between slices or nodes.

    For `V` bytes in total over N devices whose links have `W` bytes/s together: all-gather and reduce-scatter
    `V (N - 1) / (N W)`, all-reduce twice that, all-to-all `V / (4 W)`, and collective-permute one message per link,
    times the number of messages that share the busiest link. A collective between slices is preceded by one within each
    slice, so each of the M devices of a slice sends `V / M` between slices.
    """
    route = machine.route(max(collective.groups, key=len))
    if collective.kind == "collective-permute":
        if any(machine.route(pair).parts > 1 for pair in collective.groups):
            return {ACROSS: collective.bytes / machine.chip.network_bandwidth}
        messages = machine.busiest_link(collective.groups)
        if messages == 0:
            return {}
        return {_along(collective): _HOP + collective.bytes * messages / machine.chip.link_bandwidth}
    whole = collective.bytes * collective.size if "all-to-all" in collective.kind else collective.bytes
    passes = 2 if collective.kind == "all-reduce" else 1
    seconds = {}
    if route.members > 1:
        if "all-to-all" in collective.kind:
            sent = whole / route.parts / 4
        else:
            sent = passes * whole * (route.members - 1) / route.members
        seconds[_along(collective)] = max(_HOP * route.hops, sent / route.bandwidth)
    if route.parts > 1:
        share = whole / collective.size if "all-to-all" in collective.kind else whole / route.members
        seconds[ACROSS] = (
            passes * share * (route.parts - 1) / route.parts / (machine.chip.network_bandwidth / machine.chip.devices)
        )
    return seconds


def _along(collective: Collective) -> str:
    return " x ".join(collective.axes) or "one device"
