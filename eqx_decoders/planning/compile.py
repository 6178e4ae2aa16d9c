"""Compilation of traced steps, optionally only until memory assignment: code generation takes most of the time."""

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
_LAST = "debug_options"  # the last file that XLA writes
# allocations in HBM; lines about other memories have more fields
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), page \d+, (.*)$", re.MULTILINE)

abandoned: list[threading.Thread] = []  # threads with compilations that are still running


class AssignedSizes(NamedTuple):
    """Sizes with the field names of `Compiled.memory_analysis()`, without a peak."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


def assigned_sizes(text: str) -> AssignedSizes:
    """Return the total sizes in XLA's list of allocations. Results that reuse arguments count as arguments."""
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
    """Return whether the program and the last file exist."""
    times = [[file.stat().st_mtime_ns for file in folder.glob(f"*.{name}")] for name in (_PROGRAM, _LAST)]
    return all(times) and max(times[1]) >= max(times[0])


def compile_until_assigned(lowered: Any, options: Mapping[str, str]) -> tuple[AssignedSizes, str]:
    """Compile until memory is assigned, and return the sizes and the text of the scheduled program.

    Raises compiler errors up to that stage. A compilation cannot be stopped: it continues in a thread that is added to
    `abandoned`, and the process should exit with `os._exit`.
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
    """Compile a traced step, and return its memory, its program (if it can be printed), and the compiler's error."""
    try:
        with _names_in_cache_key():
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
def _names_in_cache_key() -> Iterator[None]:
    """Ignore programs in JAX's compilation cache that differ in the names of source functions, which plans report."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)
