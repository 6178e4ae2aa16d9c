"""Collectives of a compiled program: arrays, number of runs, mesh axes, and the source function."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from eqx_decoders.planning.hlo import KINDS, ComputationRun, Op, Program, members, shape_bytes


_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')  # XLA:TPU's transfers between slices
_REDUCE_SCATTER = "all-reduce-scatter"  # prefix of XLA:TPU's computations that all-reduce and keep one shard

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program, on one device.

    **Arguments:**

    - `kind`: one of `hlo.KINDS`.
    - `bytes`: bytes of its largest buffer on a device: the result of an all-gather, the operand of a reduction. For a
        ragged all-to-all the smaller of operand and result, because the other one has room for the worst case.
    - `times`: number of runs in a step.
    - `groups`: groups of device indices in the mesh; for a collective-permute pairs of source and target.
    - `axes`: mesh axes along which the devices of a group differ.
    - `shape`: the largest array, without its layout.
    - `phase`: "forward", "recomputed", "backward" or "update".
    - `cause`: function of this library that created it, or the end of the path of the traced operation.
    - `unknown`: whether a loop around it has an unknown trip count.
    - `overlapped`: whether it is asynchronous, with a product between its start and its end in the schedule.
    """

    kind: str
    bytes: int
    times: int
    groups: Groups
    axes: tuple[str, ...]
    shape: str
    phase: str
    cause: str
    unknown: bool
    overlapped: bool = False

    @property
    def total(self) -> int:
        """Return the bytes per step."""
        return self.bytes * self.times

    @property
    def size(self) -> int:
        """Return the number of devices in a group."""
        return max(map(len, self.groups), default=1)


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Return all collectives of a step, in decreasing order of bytes. `mesh`: sizes by axis name, in mesh order.

    Collectives with the same shape and source are merged, and their runs are added.
    """
    times: dict[Collective, int] = {}
    for run in program.runs():
        between = _BETWEEN_SLICES.search(run.op.rest) if run.op.kind == "send" else None
        if between or (run.op.base in KINDS and not run.op.kind.endswith(("-done", "-update"))):
            collective = (
                _collective(program, run, mesh) if between is None else _between_slices(program, run, mesh, between[1])
            )
            if collective.size > 1:
                once = dataclasses.replace(collective, times=1)
                times[once] = times.get(once, 0) + collective.times
    merged = [dataclasses.replace(collective, times=count) for collective, count in times.items()]
    return sorted(merged, key=lambda collective: collective.total, reverse=True)


def overlapped_fraction(sent: Iterable[Collective]) -> float:
    """Return the fraction of the bytes of collectives that overlap with products; 1 if there are no collectives."""
    sizes = [(collective.total, collective.overlapped) for collective in sent]
    total = sum(size for size, _ in sizes)
    return sum(size for size, overlapped in sizes if overlapped) / total if total else 1.0


def _collective(program: Program, run: ComputationRun, mesh: Mapping[str, int]) -> Collective:
    op, caller = run.op, run.caller
    scatters = op.base == "all-reduce" and run.computation.startswith(_REDUCE_SCATTER)
    kind, groups = "reduce-scatter" if scatters else op.base, groups_of(op.rest, math.prod(mesh.values()))
    arrays = _arrays(op)
    if op.base == "ragged-all-to-all":  # the larger buffer has room for the worst case
        arrays = min(arrays, _operand(program, run), key=lambda shapes: sum(map(shape_bytes, shapes)))
    size = sum(map(shape_bytes, arrays))
    if op.base == "reduce-scatter":
        size *= max(map(len, groups), default=1)  # the result is one shard
    source = caller if not op.cause and caller is not None and caller.base == "fusion" else op
    return Collective(
        kind=kind,
        bytes=size,
        times=run.times,
        groups=groups,
        axes=axes_of(groups, tuple(mesh.items())),
        shape=max(arrays, key=shape_bytes, default="").split("{")[0],
        phase=phase_of(source.cause),
        cause=program.function(source) or shortened(source.cause),
        unknown=run.unknown,
        overlapped=run.overlapped,
    )


def _between_slices(program: Program, run: ComputationRun, mesh: Mapping[str, int], name: str) -> Collective:
    """Return the collective between slices. It runs after a collective within each slice.

    Slices are consecutive along the first sufficiently large mesh axis, as arranged by `Layout.create`.
    """
    op, devices = run.op, math.prod(mesh.values())
    target = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', op.rest)
    slices = max(2, sum(_count(part) for part in target[1].split(",")) if target else 2)
    step = devices // slices
    groups = tuple(tuple(range(first, devices, step)) for first in range(step))
    shape = members(op.shape)[0]
    kind = name.lower().replace("_", "-")
    return Collective(
        kind=kind,
        bytes=shape_bytes(shape) * (slices if kind in ("all-gather", "reduce-scatter") else 1),
        times=run.times,
        groups=groups,
        axes=axes_of(groups, tuple(mesh.items())),
        shape=shape.split("{")[0],
        phase=phase_of(op.cause),
        cause=program.function(op) or shortened(op.cause),
        unknown=run.unknown,
        overlapped=run.overlapped,
    )


def _count(part: str) -> int:
    """Return the number of integers in a range such as `3` or `0:3`."""
    bounds = _numbers(part)
    return bounds[-1] - bounds[0] + 1


def _arrays(op: Op) -> list[str]:
    """Return the shapes of the results. Asynchronous starts can return `(operands, results)`.

    XLA:GPU returns `((operands), results)` for all kinds. XLA:TPU does so for some kinds; its reductions return only
    results.
    """
    parts = members(op.shape)
    if not op.kind.endswith("-start") or len(parts) < 2:
        return parts
    both = op.base in ("all-gather", "collective-permute") or parts[0].startswith("(")
    return members(parts[1]) if both else parts


def _operand(program: Program, run: ComputationRun) -> list[str]:
    """Return the shape of the first operand, or of the result if the operand is not found."""
    ops = program.computations.get(run.computation, [])
    return [op.shape for op in ops if op.name == run.op.operands[0]] or _arrays(run.op)


@functools.lru_cache(maxsize=1024)
def axes_of(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ."""
    positions = np.unravel_index([member for group in groups for member in group], [size for _, size in mesh] or [1])
    bounds = np.cumsum([0, *map(len, groups)])
    pairs = list(itertools.pairwise(bounds))
    return tuple(
        name
        for (name, _), position in zip(mesh, positions, strict=True)
        if any(len(set(position[begin:end].tolist())) > 1 for begin, end in pairs)
    )


def groups_of(attributes: str, devices: int) -> Groups:
    """Parse the device groups in the attributes of a collective. Without groups, all devices form one group.

    Supported formats: `replica_groups={{0,1},{2,3}}`, `[2,2]<=[2,2]T(1,0)`, `mesh['a'=2,'b'=2] {'b'}`, and
    `source_target_pairs={{0,1},{1,0}}`.
    """
    start = re.search(r"\b(?:replica_groups|source_target_pairs)=", attributes)
    everyone = (tuple(range(devices)),)
    return (
        _groups(attributes[start.end() : start.end() + 100_000].split("metadata=")[0]) or everyone
        if start
        else everyone
    )


@functools.lru_cache(maxsize=1024)
def _groups(text: str) -> Groups:
    if text.startswith("mesh["):
        return _named_groups(text)
    if text.startswith("["):
        iota = re.match(r"\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)", text)
        return () if iota is None else _rows(_order(iota[2]).reshape(_numbers(iota[1])))
    listed = re.match(r"\{(\{[\d,{} ]*\})\}", text)
    return tuple(tuple(_numbers(text)) for text in re.findall(r"\{([\d, ]+)\}", listed[1])) if listed else ()


def _named_groups(text: str) -> Groups:
    """Parse `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b':(2)2}`: groups along axes or factors of axes."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text[: text.index("]")])}
    ids = re.search(r"\]\s*,\s*device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\)", text)
    along = re.search(r"\{('[^}]*)\}", text)
    if along is None:
        return ()
    count = math.prod(sizes.values())
    order = np.arange(count) if ids is None else _order("<=" + ids[1])
    shape, grouped, axis = [], [], 0
    grouped_axes = dict(re.findall(r"'([^']+)'((?::\(\d+\)\d+)?)", along[1]))
    for name, size in sizes.items():
        if grouped_axes.get(name):  # the axis is split into (before, taken, rest), and groups go along `taken`
            before, taken = map(int, re.findall(r"\d+", grouped_axes[name]))
            parts = [before, taken, size // (before * taken)]
        else:
            parts = [size]
        shape += parts
        if name in grouped_axes:
            grouped.append(axis + (1 if len(parts) == 3 else 0))
        axis += len(parts)
    grid = order.reshape(shape)
    others = [place for place in range(len(shape)) if place not in grouped]
    members = math.prod(shape[place] for place in grouped)
    return _rows(grid.transpose([*others, *grouped]).reshape(-1, members))


def _order(text: str) -> np.ndarray:
    """Parse `<=[2,4]T(1,0)`: the numbers 0 to 7 in shape (2, 4), transposed and flattened."""
    shape, _, permutation = text.removeprefix("<=").partition("T")
    grid = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (grid.transpose(_numbers(permutation)) if permutation else grid).reshape(-1)


def _rows(grid: np.ndarray) -> Groups:
    return tuple(tuple(int(text) for text in row) for row in grid.reshape(grid.shape[0], -1))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def phase_of(cause: str) -> str:
    """Return the phase of a step, given the path of an operation."""
    if "transpose(" in cause:
        return "recomputed" if "rematted_computation" in cause else "backward"
    return "forward" if "jvp(" in cause else "update"


def shortened(cause: str) -> str:
    """Return the end of the path of an operation, without parts that do not identify it."""
    generic = ("while", "body", "eval_jaxpr", "closed_call", "checkpoint", "rematted_computation", "shard_map")
    parts = [part for part in cause.split("/") if part not in generic and "jvp(" not in part]
    return "/".join(parts[1:][-2:])
