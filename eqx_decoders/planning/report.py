"""Plans formatted as text and as JSON."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eqx_decoders.planning.collectives import Collective, overlapped_fraction
from eqx_decoders.planning.planned_step import Plan, PlannedStep


_BAR_WIDTH = 40
_MIN_FRACTION = 1e-3  # kinds of collectives with a smaller fraction of the bytes are left out


def report(plan: Plan, advised: Iterable[str], *, rows: int = 12) -> str:
    """Format a plan as text: memory, at most `rows` collectives, FLOPs, time, advice."""
    sent = "" if plan.collectives is None else "\n".join(collective_lines(plan.collectives, rows))
    parts = [plan.note, "\n".join(memory_lines(plan, _memory_notes(plan))), sent, _time(plan)]
    said = "\n".join(f"- {sentence}" for sentence in advised)
    return "\n\n".join([*filter(None, parts), *([f"advice\n{said}"] if said else [])])


def as_data(plan: Plan, advised: Iterable[str]) -> dict[str, Any]:
    """Return a plan as plain JSON values: bytes, FLOPs and seconds."""
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
    """Return the fields of all plans as plain JSON values: bytes and seconds."""
    memory, line, machine = plan.memory, plan.roofline, plan.machine
    return {
        "chip": dataclasses.asdict(machine.chip),
        "devices": len(machine.positions),
        "memory": dataclasses.asdict(memory) | {"rows": memory.rows(), "total": memory.total, "fits": memory.fits},
        "collectives": None if plan.collectives is None else [_row(collective) for collective in plan.collectives],
        "overlapped": None if plan.collectives is None else overlapped_fraction(plan.collectives),
        "seconds": {
            "parts": line.parts,
            "bound": line.bound,
            "overlapped": line.overlapped,
            "one_by_one": line.one_by_one,
        },
        "compile_seconds": plan.seconds,
        "compiler_message": plan.compiler_message,
    }


def by_kind(collectives: Iterable[Collective]) -> dict[tuple[str, str], int]:
    """Return the bytes of a step by kind and mesh axes, in decreasing order."""
    total: dict[tuple[str, str], int] = {}
    for collective in collectives:
        name = collective.kind, " x ".join(collective.axes)
        total[name] = total.get(name, 0) + collective.total
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _row(collective: Collective) -> dict[str, Any]:
    row = dataclasses.asdict(collective)
    del row["groups"]
    return row | {"devices": collective.size, "total": collective.total}


def _memory_notes(plan: Plan) -> list[str]:
    notes = []
    if plan.memory.host:
        notes.append(f"  (offloaded to host memory: {size_text(plan.memory.host)} of the state per device)")
    if plan.attention:
        notes.append(f"  (attention kernels: {', '.join(plan.attention)})")
    if plan.replicated:
        notes.append(f"  (replicated along an axis that shards other weights: {plan.replicated:.2%} of the weights)")
    return notes


def memory_lines(plan: PlannedStep, notes: Iterable[str] = ()) -> list[str]:
    """Format the memory of a device by parts. `notes`: lines before the peak."""
    memory = plan.memory
    lines = [f"memory per device (capacity {memory.capacity / 1e9:,.0f} GB)"]
    rows = memory.rows()
    if memory.temporaries is None:
        rows = {name: rows[name] for name in ("parameters", "optimizer state", "weight averages") if name in rows}
        rows["gradients"] = memory.gradients
    lines += [_bar(name, size, memory.capacity) for name, size in rows.items()]
    lines += [_bar("total", sum(rows.values()), memory.capacity), *notes]
    if memory.peak is None:
        lines.append(f"  does not fit: {plan.compiler_message}")
    else:
        lines.append(_bar("peak", memory.peak, memory.capacity))
    if memory.peak is not None and memory.gradients:
        lines.append(f"  (temporaries include gradients, up to {size_text(memory.gradients)})")
    return lines


def _bar(name: str, size: int, capacity: int) -> str:
    filled = size / capacity * _BAR_WIDTH
    bar = ("█" * round(min(filled, _BAR_WIDTH)) or ("▏" if size else "")) + ("▶" if filled > _BAR_WIDTH else "")
    return f"  {name:18}{size_text(size):>12} {size / capacity:6.1%}  {bar}"


def collective_lines(collectives: Sequence[Collective], rows: int) -> list[str]:
    """Format the collectives of a step: bytes by kind and axes, and the `rows` largest collectives."""
    total = sum(collective.total for collective in collectives)
    share = f", {overlapped_fraction(collectives):.0%} overlapped with products" if total else ""
    lines = [f"collectives per device and step: {size_text(total)}{share}"]
    kinds = (
        f"{kind} along {axes} {size_text(size)}"
        for (kind, axes), size in by_kind(collectives).items()
        if size > _MIN_FRACTION * total
    )
    lines.append("  " + ", ".join(kinds)) if total else None
    for collective in collectives[:rows]:
        lines.append(
            f"  {size_text(collective.total):>11} {collective.times:5} x {collective.kind:18} "
            f"{' x '.join(collective.axes):16} {collective.shape:24} "
            f"{collective.phase:10} {'overlapped' if collective.overlapped else 'exposed':10} {collective.cause}"
        )
    others = collectives[rows:]
    if others:
        lines.append(f"  {size_text(sum(collective.total for collective in others)):>11} in {len(others)} others")
    return lines


def _time(plan: Plan) -> str:
    done = plan.operations
    model, computed, share = done.model / done.six_nd, done.computed / done.six_nd, done.attention / done.model
    eight_bit = f", {done.eight_bit / done.computed:.0%} in 8 bits" if done.eight_bit else ""
    lines = [
        f"FLOPs per step: model {done.model / 1e12:,.1f} T ({model:.2f} x 6ND, {share:.0%} attention), "
        f"computed {done.computed / 1e12:,.1f} T ({computed:.2f} x 6ND{eight_bit})",
        "",
    ]
    device_tokens = plan.tokens / len(plan.machine.positions)

    def rate(seconds: float) -> str:
        mfu = plan.roofline.model_flops_seconds / seconds
        return f"MFU {mfu:.0%}, {device_tokens / seconds:,.0f} tokens/s per device"

    note = "lower bound: state, gradients, saved activations, weights"
    return "\n".join([*lines, *time_lines(plan, note, rate)])


def time_lines(plan: PlannedStep, memory: str, rate: Callable[[float], str]) -> list[str]:
    """Format the estimate by parts.

    **Arguments:**

    - `memory`: description of the memory traffic.
    - `rate`: function from the seconds of a step to a description of the speed.
    """
    line, chip = plan.roofline, plan.machine.chip
    notes = {"compute": "products at peak FLOP/s", "memory": memory}
    lines = [f"time per step (roofline), from published rates of {chip.name} ({chip.source})"]
    for name, seconds in line.parts.items():
        mark = "  <- bound" if name == line.bound else ""
        lines.append(f"  {name:22}{seconds:10.3g} s  {notes.get(name, 'ring formulas')}{mark}")
    if plan.collectives is None:
        lines.append("  networks              unknown: the compiled program cannot be printed")
    for case, seconds in (("with full overlap", line.overlapped), ("without overlap", line.one_by_one)):
        lines.append(f"  {seconds:.3g} s per step {case}: {rate(seconds)}")
    return lines


def size_text(size: int | float) -> str:
    """Format bytes as gigabytes, or megabytes."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"
