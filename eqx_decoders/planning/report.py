"""A plan as text, and as JSON."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from eqx_decoders.planning.collectives import Collective, overlapped_fraction
from eqx_decoders.planning.planned_step import Plan


_WIDTH = 40  # of a bar
_LITTLE = 1e-3  # of all: not worth a word


def report(plan: Plan, advised: Iterable[str], *, rows: int = 12) -> str:
    """Format a plan for reading: memory, collectives, operations, time; `rows` collectives at most."""
    parts = [plan.note, _memory(plan), _collectives(plan, rows), _time(plan)]
    said = "\n".join(f"- {sentence}" for sentence in advised)
    return "\n\n".join([*filter(None, parts), *([f"advice\n{said}"] if said else [])])


def as_data(plan: Plan, advised: Iterable[str]) -> dict[str, Any]:
    """Return a plan as plain JSON values: bytes, operations and seconds."""
    memory, line, done, machine = plan.memory, plan.roofline, plan.operations, plan.machine
    low, high = line.mfu
    sent = None if plan.collectives is None else [_row(one) for one in plan.collectives]
    names = {"saved_activations": "kept"}
    sizes = {names.get(name, name): size for name, size in dataclasses.asdict(memory).items()}
    return {
        "chip": dataclasses.asdict(machine.chip),
        "devices": len(machine.positions),
        "tokens": plan.tokens,
        "replicated": plan.replicated,
        "memory": sizes | {"rows": memory.rows(), "total": memory.total, "fits": memory.fits},
        "operations": dataclasses.asdict(done),
        "collectives": sent,
        "overlapped": None if plan.collectives is None else overlapped_fraction(plan.collectives),
        "seconds": {
            "parts": line.parts,
            "bound": line.bound,
            "overlapped": line.overlapped,
            "one_by_one": line.one_by_one,
        },
        "mfu": {"one_by_one": low, "overlapped": high},
        "compile_seconds": plan.seconds,
        "told": plan.compiler_message,
        "attention": list(plan.attention),
        "note": plan.note,
        "advice": list(advised),
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


def _memory(plan: Plan) -> str:
    memory = plan.memory
    lines = [f"memory of a device ({memory.capacity / 1e9:,.0f} GB)"]
    rows = memory.rows()
    if memory.temporaries is None:
        rows = {name: rows[name] for name in ("parameters", "optimizer state", "running means") if name in rows}
        rows["gradients"] = memory.gradients
    lines += [_bar(name, size, memory.capacity) for name, size in rows.items()]
    lines.append(_bar("together", sum(rows.values()), memory.capacity))
    if memory.host:
        lines.append(f"  (the host keeps {_size(memory.host)} of the state for each device)")
    if plan.attention:
        lines.append(f"  (attention by the kernel {' and '.join(plan.attention)})")
    if plan.replicated:
        lines.append(f"  ({plan.replicated:.2%} of the weights are whole along an axis that splits others)")
    if memory.peak is not None:
        lines.append(_bar("peak", memory.peak, memory.capacity))
        lines.append(f"  (among the temporaries are gradients, {_size(memory.gradients)} when all are there)")
    else:
        lines.append(f"  it does not fit: {plan.compiler_message}")
    return "\n".join(lines)


def _bar(name: str, size: int, capacity: int) -> str:
    filled = size / capacity * _WIDTH
    bar = ("█" * round(min(filled, _WIDTH)) or ("▏" if size else "")) + ("▶" if filled > _WIDTH else "")
    return f"  {name:18}{_size(size):>12} {size / capacity:6.1%}  {bar}"


def _collectives(plan: Plan, rows: int) -> str:
    if plan.collectives is None:
        return ""
    total = sum(one.total for one in plan.collectives)
    share = f", {overlapped_fraction(plan.collectives):.0%} of it beside products" if total else ""
    lines = [f"collectives of a device in a step: {_size(total)}{share}"]
    kinds = (
        f"{kind} along {axes} {_size(size)}"
        for (kind, axes), size in by_kind(plan.collectives).items()
        if size > _LITTLE * total
    )
    lines.append("  " + ", ".join(kinds)) if total else None
    for one in plan.collectives[:rows]:
        lines.append(
            f"  {_size(one.total):>11} {one.times:5} x {one.kind:18} {' x '.join(one.axes):16} {one.shape:24} "
            f"{one.phase:10} {'beside' if one.overlapped else 'alone':7} {one.cause}"
        )
    rest = plan.collectives[rows:]
    if rest:
        lines.append(f"  {_size(sum(one.total for one in rest)):>11} in {len(rest)} others")
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    line, done, chip = plan.roofline, plan.operations, plan.machine.chip
    low, high = line.mfu
    model, computed, share = done.model / done.six_nd, done.computed / done.six_nd, done.attention / done.model
    eight = f", {done.eight_bit / done.computed:.0%} in 8 bits" if done.eight_bit else ""
    lines = [
        f"operations of a step: the model's {done.model / 1e12:,.1f} TFLOP ({model:.2f} x 6ND, {share:.0%} attention), "
        f"computed {done.computed / 1e12:,.1f} ({computed:.2f} x 6ND{eight})",
        "",
        f"time of a step, estimated by published figures of {chip.name} ({chip.source})",
    ]
    notes = {
        "compute": "products at the peak",
        "memory": "at least: state, gradients, what is kept, weights",
    }
    for name, seconds in line.parts.items():
        mark = "  <- the bound" if name == line.bound else ""
        lines.append(f"  {name:22}{seconds:10.3g} s  {notes.get(name, 'ring formulas')}{mark}")
    if plan.collectives is None:
        lines.append("  networks              unknown: the compiled program cannot be read")
    each = plan.tokens / len(plan.machine.positions)
    for case, seconds, mfu in (("all overlaps", line.overlapped, high), ("nothing does", line.one_by_one, low)):
        rate = f"MFU {mfu:.0%}, {each / seconds:,.0f} tokens/s a device"
        lines.append(f"  a step takes {seconds:.3g} s if {case}: {rate}")
    return "\n".join(lines)


def _size(size: int | float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"
