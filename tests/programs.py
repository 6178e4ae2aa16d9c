"""Compiled programs: how many are held, how many are made, for which devices they are. Disks that are like buckets."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest


MAPS = Path("/proc/self/maps")
MOST = 25_000
COMPILED = "/jax/core/compile/backend_compile_duration"
_compiled: list[str] = []


def drop_compiled_programs() -> None:
    """Drop JAX's caches where they have become large: XLA crashes where it gets no further map of memory.

    Each program takes some of the 65,530 maps that Linux lets a process have.
    """
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST:
        jax.clear_caches()


def tpu_devices(topology: str, slices: int = 1) -> list:
    """The devices of a TPU topology, or of several of it, to compile for: needs libtpu (extra "aot"), no TPU."""
    pytest.importorskip("libtpu")
    from eqx_decoders.cli import plan  # not before the tests' type hook is there

    return plan.tpu_devices(topology, slices)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs that are compiled in this block (or read from the cache on disk), by name."""
    begin, found = len(_compiled), []
    try:
        yield found
    finally:
        found += _compiled[begin:]


@contextlib.contextmanager
def no_renames() -> Iterator[None]:
    """Checkpoints are written in place, as in a bucket, and who renames a step nevertheless hears of it."""

    def files_only(call: Callable) -> Callable:
        def rename(source: Any, target: Any, **options: Any) -> None:
            if os.path.isdir(source) and os.path.basename(source)[0].isdecimal():
                raise OSError(f"{source} is a directory, and cannot be renamed here")
            call(source, target, **options)

        return rename

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("eqx_decoders.io.checkpoint.steps.can_rename", lambda directory: False))
        for name in ("rename", "replace"):
            stack.enter_context(mock.patch(f"os.{name}", files_only(getattr(os, name))))
        yield


def _listen(name: str, _: float, **details: object) -> None:
    if name == COMPILED:
        _compiled.append(str(details.get("fun_name", "?")))


jax.monitoring.register_event_duration_secs_listener(_listen)
