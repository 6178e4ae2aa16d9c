"""Plans for models of all sizes: the slice for each model, the order of compilation, and the table of results.

A row of results is plain JSON: the model, its slice, and the output of `scripts/plan.py --json`, or an error.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from eqx_decoders.families.registry import get_config
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.init import count_parameters


MIN_PARAMETERS = 0.95e9
MAX_PARAMETERS = 1.2e12
Chips = Literal["tpu", "h100"]


class Slice(NamedTuple):
    """Slice of chips for models with up to `max_parameters` parameters. `rows`: maximum sequences per device."""

    max_parameters: float
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
        Slice(MAX_PARAMETERS, "v5p:8x8x16", 1024, 2),
    ),
    "h100": (
        Slice(10e9, "h100:1x8", 8, 4),
        Slice(24e9, "h100:2x8", 16, 4),
        Slice(40e9, "h100:4x8", 32, 4),
        Slice(75e9, "h100:16x8", 128, 4),
    ),
}


def sized(names: Iterable[str], chips: Chips = "tpu") -> dict[str, int]:
    """Return the number of parameters of each model that fits on a slice of these chips, in increasing order."""
    parameters = {name: count_parameters(get_config(name)) for name in names}
    maximum = SLICES[chips][-1].max_parameters
    fitting = [(name, size) for name, size in parameters.items() if MIN_PARAMETERS <= size <= maximum]
    return dict(sorted(fitting, key=lambda item: item[1]))


def family(name: str) -> str:
    """Return the name of a model without its size."""
    return re.split(r"-|(?<=\D)\d+b", name)[0]


def spread(names: Iterable[str]) -> list[str]:
    """Order names round-robin over families."""
    groups = [list(slice_) for _, slice_ in itertools.groupby(sorted(names, key=family), key=family)]
    return [name for turn in itertools.zip_longest(*groups) for name in turn if name is not None]


def slice_of(parameters: int, chips: Chips = "tpu") -> Slice:
    """Return the smallest slice for a model with this number of parameters."""
    return next(slice_ for slice_ in SLICES[chips] if parameters <= slice_.max_parameters)


def rows_tried(slice_: Slice) -> list[int]:
    """Return the numbers of sequences per device to try, in decreasing order."""
    return [rows for rows in (4, 2, 1) if rows <= slice_.rows]


def flags(name: str, slice_: Slice, rows: int) -> list[str]:
    """Return the arguments of `scripts/plan.py` for a model on a slice with `rows` sequences per device."""
    positions = get_config(name).positions
    max_length = positions.max_positions if isinstance(positions, LearnedPositions) else SEQ_LEN
    seq_len = min(SEQ_LEN, max_length)
    batch_size = rows * slice_.devices * (SEQ_LEN // seq_len)
    return [
        *(name, "--topology", slice_.topology, "--batch-size", str(batch_size)),
        *("--seq-len", str(seq_len), "--search", "1", "--until", "memory", "--json"),
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows of results as a Markdown table, the smallest model first, followed by a line for each error."""
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
    sent = "" if plan["collectives"] is None else f"{sum(entry['total'] for entry in plan['collectives']) / 1e9:,.0f}"
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
