"""A plan as text, and as JSON."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eqx_decoders.planning.collectives import Collective, overlapped_fraction
from eqx_decoders.planning.planned_step import Plan, PlannedStep


_WIDTH = 40  # of a bar
_LITTLE = 1e-3  # of all: not worth a word


def report(plan: Plan, advised: Iterable[str], *, rows: int = 12) -> str:
    """Format a plan for reading: memory, collectives, operations, time; `rows` collectives at most."""
    sent = "" if plan.collectives is None else "\n".join(collective_lines(plan.collectives, rows))
    parts = [plan.note, "\n".join(memory_lines(plan, _memory_notes(plan))), sent, _time(plan)]
    said = "\n".join(f"- {sentence}" for sentence in advised)
    return "\n\n".join([*filter(None, parts), *([f"advice\n{said}"] if said else [])])


def as_data(plan: Plan, advised: Iterable[str]) -> dict[str, Any]:
    """Return a plan as plain JSON values: bytes, operations and seconds."""
    low, high = plan.roofline.mfu
    return shared_data(plan) | {
        "tokens": plan.tokens,
        "replicated": plan.replicated,
        "operations": dataclasses.asdict(plan.operations),
        "mfu": {"one_by_one": low, "overlapped": high},
        "attention": list(plan.attention),
        "note": plan.note,
        "advice": list(advised),
    }


def shared_data(plan: PlannedStep) -> dict[str, Any]:
    """Return what plans of all kinds have as plain JSON values: bytes and seconds."""
    memory, line, machine = plan.memory, plan.roofline, plan.machine
    names = {"saved_activations": "kept"}
    sizes = {names.get(name, name): size for name, size in dataclasses.asdict(memory).items()}
    return {
        "chip": dataclasses.asdict(machine.chip),
        "devices": len(machine.positions),
        "memory": sizes | {"rows": memory.rows(), "total": memory.total, "fits": memory.fits},
        "collectives": None if plan.collectives is None else [_row(one) for one in plan.collectives],
        "overlapped": None if plan.collectives is None else overlapped_fraction(plan.collectives),
        "seconds": {
            "parts": line.parts,
            "bound": line.bound,
            "overlapped": line.overlapped,
            "one_by_one": line.one_by_one,
        },
        "compile_seconds": plan.seconds,
        "told": plan.compiler_message,
    }


def by_kind(collectives: Iterable[Collective]) -> dict[tuple[str, str], int]:
    """Add up the bytes of a step by kind and axes, the most first."""
    total: dict[tuple[str, str], int] = {}
    for one in collectives:
        name = one.kind, " x ".join(one.axes)
        total[name] = total.get(name, 0) + one.total
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _row(one: Collective) -> dict[str, Any]:
    row = dataclasses.asdict(one)
    del row["groups"]
    return row | {"devices": one.size, "total": one.total}


def _memory_notes(plan: Plan) -> list[str]:
    notes = []
    if plan.memory.host:
        notes.append(f"  (the host keeps {size_text(plan.memory.host)} of the state for each device)")
    if plan.attention:
        notes.append(f"  (attention by the kernel {' and '.join(plan.attention)})")
    if plan.replicated:
        notes.append(f"  ({plan.replicated:.2%} of the weights are whole along an axis that splits others)")
    return notes


def memory_lines(plan: PlannedStep, notes: Iterable[str] = ()) -> list[str]:
    """Format the memory of a device, part by part; notes stand between the parts and the peak."""
    memory = plan.memory
    lines = [f"memory of a device ({memory.capacity / 1e9:,.0f} GB)"]
    rows = memory.rows()
    if memory.temporaries is None:
        rows = {name: rows[name] for name in ("parameters", "optimizer state", "running means") if name in rows}
        rows["gradients"] = memory.gradients
    lines += [_bar(name, size, memory.capacity) for name, size in rows.items()]
    lines += [_bar("together", sum(rows.values()), memory.capacity), *notes]
    if memory.peak is None:
        lines.append(f"  it does not fit: {plan.compiler_message}")
    else:
        lines.append(_bar("peak", memory.peak, memory.capacity))
    if memory.peak is not None and memory.gradients:
        lines.append(f"  (among the temporaries are gradients, {size_text(memory.gradients)} when all are there)")
    return lines


def _bar(name: str, size: int, capacity: int) -> str:
    filled = size / capacity * _WIDTH
    bar = ("█" * round(min(filled, _WIDTH)) or ("▏" if size else "")) + ("▶" if filled > _WIDTH else "")
    return f"  {name:18}{size_text(size):>12} {size / capacity:6.1%}  {bar}"


def collective_lines(collectives: Sequence[Collective], rows: int) -> list[str]:
    """Format the collectives of a step: by kind and axes, and `rows` of them one by one."""
    total = sum(one.total for one in collectives)
    share = f", {overlapped_fraction(collectives):.0%} of it beside products" if total else ""
    lines = [f"collectives of a device in a step: {size_text(total)}{share}"]
    kinds = (
        f"{kind} along {axes} {size_text(size)}"
        for (kind, axes), size in by_kind(collectives).items()
        if size > _LITTLE * total
    )
    lines.append("  " + ", ".join(kinds)) if total else None
    for one in collectives[:rows]:
        lines.append(
            f"  {size_text(one.total):>11} {one.times:5} x {one.kind:18} {' x '.join(one.axes):16} {one.shape:24} "
            f"{one.phase:10} {'beside' if one.overlapped else 'alone':7} {one.cause}"
        )
    rest = collectives[rows:]
    if rest:
        lines.append(f"  {size_text(sum(one.total for one in rest)):>11} in {len(rest)} others")
    return lines


def _time(plan: Plan) -> str:
    done = plan.operations
    model, computed, share = done.model / done.six_nd, done.computed / done.six_nd, done.attention / done.model
    eight = f", {done.eight_bit / done.computed:.0%} in 8 bits" if done.eight_bit else ""
    lines = [
        f"operations of a step: the model's {done.model / 1e12:,.1f} TFLOP ({model:.2f} x 6ND, {share:.0%} attention), "
        f"computed {done.computed / 1e12:,.1f} ({computed:.2f} x 6ND{eight})",
        "",
    ]
    each = plan.tokens / len(plan.machine.positions)

    def rate(seconds: float) -> str:
        mfu = plan.roofline.model_flops_seconds / seconds
        return f"MFU {mfu:.0%}, {each / seconds:,.0f} tokens/s a device"

    return "\n".join([*lines, *time_lines(plan, "at least: state, gradients, what is kept, weights", rate)])


def time_lines(plan: PlannedStep, memory: str, rate: Callable[[float], str]) -> list[str]:
    """Format the estimate, part by part; `memory` is what is read and written, `rate(seconds)` the speed of a step."""
    line, chip = plan.roofline, plan.machine.chip
    notes = {"compute": "products at the peak", "memory": memory}
    lines = [f"time of a step, estimated by published figures of {chip.name} ({chip.source})"]
    for name, seconds in line.parts.items():
        mark = "  <- the bound" if name == line.bound else ""
        lines.append(f"  {name:22}{seconds:10.3g} s  {notes.get(name, 'ring formulas')}{mark}")
    if plan.collectives is None:
        lines.append("  networks              unknown: the compiled program cannot be read")
    for case, seconds in (("all overlaps", line.overlapped), ("nothing does", line.one_by_one)):
        lines.append(f"  a step takes {seconds:.3g} s if {case}: {rate(seconds)}")
    return lines


def size_text(size: int | float) -> str:
    """Format bytes as gigabytes, or megabytes."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"
