"""Compilation for TPUs that ends when memory is assigned: machine code takes most of the time and changes no byte."""

import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


_PROGRAM = "after_optimizations_after_buffer_assignment.txt"
_SIZES = "after_optimizations-buffer-assignment.txt"
_LAST = "debug_options"  # written behind the others
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), page \d+, (.*)$", re.MULTILINE)  # others name another memory

abandoned: list[threading.Thread] = []  # compilations that go on


class AssignedSizes(NamedTuple):
    """Sizes in the names of `Compiled.memory_analysis()`, without a peak."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


def assigned_sizes(text: str) -> AssignedSizes:
    """Add up XLA's list of allocations of a device; results in the place of arguments count as arguments."""
    arguments, temporaries, outputs = 0, 0, 0
    for size, kind in _ALLOCATION.findall(text):
        if kind.startswith("parameter"):
            arguments += int(size)
        elif kind.startswith("preallocated-temp"):
            temporaries += int(size)
        elif "maybe-live-out" in kind:
            outputs += int(size)
    return AssignedSizes(arguments, temporaries, outputs, 0)


def _written(folder: Path) -> bool:
    """Return whether the program and the file that is written behind it exist."""
    times = [[file.stat().st_mtime_ns for file in folder.glob(f"*.{name}")] for name in (_PROGRAM, _LAST)]
    return all(times) and max(times[1]) >= max(times[0])


def compile_until_assigned(lowered: Any, options: Mapping[str, str]) -> tuple[AssignedSizes, str]:
    """Compile; return the sizes and the text of the scheduled program when memory is assigned.

    Raises the compiler's errors until then. A compilation cannot be ended: it goes on in a thread of its own, which is
    noted in `abandoned`; the program should leave by `os._exit`.
    """
    folder = Path(tempfile.mkdtemp(prefix="plan-"))
    raised: list[BaseException] = []

    def compile() -> None:
        try:
            lowered.compile(
                compiler_options={**options, "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True},
            )
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=compile, daemon=True)
    thread.start()
    while thread.is_alive() and not _written(folder):
        time.sleep(0.1)
    if raised:
        shutil.rmtree(folder, ignore_errors=True)
        raise raised[0]
    abandoned.append(thread)
    program, sizes = (next(folder.glob(f"*.{name}")).read_text() for name in (_PROGRAM, _SIZES))
    shutil.rmtree(folder, ignore_errors=True)
    return assigned_sizes(sizes), program
