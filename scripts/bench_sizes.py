"""Plan all published sizes for slices of TPUs or GPUs, each in its own process; rows that are there are kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

from eqx_decoders.families.registry import list_models
from eqx_decoders.planning.size_sweep import (
    SLICES as SLICES,
    Chips,
    Slice,
    flags,
    rows_tried,
    sized,
    slice_of,
    spread,
    table,
)


def plan_sizes(file: Path, only: list[str] | None = None, chips: Chips = "tpu") -> None:
    """Plan the models of `only`, or all, of which `file` has no plan; then print the table of all rows."""
    sizes, rows = sized(only or list_models(), chips), read_rows(file)
    missing = [name for name in only or () if name not in sizes]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: too small or too large for the slices of {chips} chips.")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {row["model"] for row in rows if "plan" in row and row.get("chips", "tpu") == chips}
    wanted = [name for name in spread(sizes) if name not in known]
    for place, name in enumerate(wanted, 1):
        print(f"{place} of {len(wanted)}: {name}", file=sys.stderr, flush=True)
        row = {"model": name, "chips": chips, "parameters": sizes[name], **planned(name, slice_of(sizes[name], chips))}
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
    print(table([row for row in read_rows(file) if row.get("chips", "tpu") == chips]))


def read_rows(file: Path) -> list[dict]:
    """Read the last row of each model and kind of chips; a line that was cut off is left out."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return list({(row["model"], row.get("chips", "tpu")): row for row in rows}.values())


def planned(name: str, place: Slice) -> dict:
    """Return the plan with the most rows that fit, or the error: the last line of the output."""
    said = ""
    for rows in rows_tried(place):
        command = [sys.executable, str(Path(__file__).with_name("plan.py")), *flags(name, place, rows)]
        done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
        if done.returncode == 0:
            return {"plan": json.loads(done.stdout)}
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1][:500]
        if "fits" not in said:
            break
    return {"error": said}
