"""Plans of models of many sizes: the slice of each, the order in which they are compiled, and a table of results.

A row is plain JSON: the model, its slice, and what `scripts/plan.py --json` says, or the error.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from eqx_decoders.families.registry import get_config
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.init import count_parameters


LEAST, MOST = 0.95e9, 1.2e12  # weights of those that are planned: 1b to 1t
Chips = Literal["tpu", "h100"]


class Slice(NamedTuple):
    """A slice of chips for models of up to `weights` weights, and the rows of a batch for each of its devices."""

    weights: float
    topology: str
    devices: int
    rows: int


SEQ_LEN = 4096
SLICES: dict[Chips, tuple[Slice, ...]] = {
    "tpu": (
        Slice(10e9, "v6e:4x4", 16, 4),
        Slice(40e9, "v5p:4x4x4", 64, 4),
        Slice(130e9, "v5p:4x4x8", 128, 2),
        Slice(700e9, "v5p:8x8x8", 512, 2),
        Slice(MOST, "v5p:8x8x16", 1024, 2),
    ),
    "h100": (
        Slice(10e9, "h100:1x8", 8, 4),
        Slice(24e9, "h100:2x8", 16, 4),
        Slice(40e9, "h100:4x8", 32, 4),
        Slice(75e9, "h100:16x8", 128, 4),
    ),
}


def sized(names: Iterable[str], chips: Chips = "tpu") -> dict[str, int]:
    """Return the weights of each of these models that has a slice of such chips, smallest first."""
    weights, most = {name: count_parameters(get_config(name)) for name in names}, SLICES[chips][-1].weights
    return dict(
        sorted(((name, size) for name, size in weights.items() if LEAST <= size <= most), key=lambda one: one[1])
    )


def family(name: str) -> str:
    """Return the name of a model without its size."""
    return re.split(r"-|(?<=\D)\d+b", name)[0]


def spread(names: Iterable[str]) -> list[str]:
    """Order names so that one of each family comes first, then a second one of each, and so on."""
    groups = [list(each) for _, each in itertools.groupby(sorted(names, key=family), key=family)]
    return [name for turn in itertools.zip_longest(*groups) for name in turn if name is not None]


def slice_of(weights: int, chips: Chips = "tpu") -> Slice:
    """Return the smallest slice for a model of this number of weights."""
    return next(each for each in SLICES[chips] if weights <= each.weights)


def rows_tried(place: Slice) -> list[int]:
    """Return the rows of a batch for each device to be tried, from those of the slice to one, by halves."""
    return [rows for rows in (4, 2, 1) if rows <= place.rows]


def flags(name: str, place: Slice, rows: int) -> list[str]:
    """Return the arguments with which `scripts/plan.py` plans a model on a slice with these rows for each device."""
    positions = get_config(name).positions
    longest = positions.max_positions if isinstance(positions, LearnedPositions) else SEQ_LEN
    seq_len = min(SEQ_LEN, longest)
    batch_size = rows * place.devices * (SEQ_LEN // seq_len)
    return [
        *(name, "--topology", place.topology, "--batch-size", str(batch_size)),
        *("--seq-len", str(seq_len), "--search", "1", "--until", "memory", "--json"),
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format the planned rows as a table in Markdown, smallest model first, and a line for each that failed."""
    rows = sorted(rows, key=lambda row: row["parameters"])
    lines = [
        "| model | weights | chips | mesh | remat | tokens | peak (of) GB | sent GB | step s | MFU |",
        "|---|---:|---|---|---|---|---:|---:|---:|---:|",
        *(_line(row) for row in rows if "error" not in row),
    ]
    failed = [f"{row['model']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*lines, *failed])


def _line(row: Mapping[str, Any]) -> str:
    plan = row["plan"]
    settings, memory = plan["settings"], plan["memory"]
    sent = "" if plan["collectives"] is None else f"{sum(one['total'] for one in plan['collectives']) / 1e9:,.0f}"
    cells: Sequence[str] = (
        f"`{row['model']}`",
        f"{row['parameters'] / 1e9:,.1f} b",
        f"{settings['topology']} ({plan['devices']})",
        ", ".join(f"{name} {size}" for name, size in settings["mesh"].items()),
        f"`{settings['remat']}`",
        f"{settings['batch_size']:,} x {settings['seq_len']:,}",
        f"{memory['peak'] / 1e9:.1f} ({memory['capacity'] / 1e9:.0f})",
        sent,
        f"{plan['seconds']['one_by_one']:.2f}",
        f"{plan['mfu']['one_by_one']:.0%}",
    )
    return "| " + " | ".join(cells) + " |"
