"""Compilation of traced steps, which may end when memory is assigned: machine code takes most of the time."""

import contextlib
import dataclasses
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from eqx_decoders.planning.device_memory import DeviceMemory, compiled_memory, needed_bytes
from eqx_decoders.planning.hlo import Program, parse


Until = Literal["code", "memory"]

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


def compile_step(
    traced: Any, known: DeviceMemory, options: dict[str, str], until: Until
) -> tuple[DeviceMemory, Program | None, str]:
    """Compile a traced step: its memory, its program where it can be printed, and the compiler's error."""
    try:
        with _own_names():
            if until == "memory":
                sizes, text = compile_until_assigned(traced.lower(), options)
                program = parse(text)
                return compiled_memory(known, sizes, program), program, ""
            compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        line = next(line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line)
        needed = needed_bytes(message)
        return dataclasses.replace(known, needed=known.capacity if needed is None else needed), None, line
    try:
        program, message = parse(compiled.as_text()), ""
    except jax.errors.JaxRuntimeError as error:
        program, message = None, str(error).splitlines()[0]
    return compiled_memory(known, compiled.memory_analysis(), program), program, message


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Take no program from JAX's cache on disk whose operations are named by other sources."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)
