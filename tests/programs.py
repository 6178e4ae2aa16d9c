"""Compiled programs: how many are held, how many are made, for which devices they are. Disks that are like buckets."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax


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


def place_constants() -> None:
    """Let JAX place what it makes outside of programs of NumPy's arrays, or of one number, instead of compiling it.

    `jnp.asarray(x)`, `jnp.asarray(x, dtype)` and `jnp.zeros(shape)` are a program for each shape, which takes 30 ms:
    a fifth of all programs of the tests. `compilations` counts them nevertheless, since users compile them. Left to
    JAX: numbers of Python, whose dtype is weak, arrays with a sharding, and all where a mesh is set.
    """
    put, known = jax.device_put, set()

    def wrap(primitive: Any, make: Callable) -> None:
        compiled = primitive.impl

        def call(x, **options):
            made = make(x, **options) if jax.sharding.get_abstract_mesh().empty else None
            if made is None:
                return compiled(x, **options)
            if (kind := (primitive.name, made.shape, made.dtype)) not in known:
                known.add(kind)
                _compiled.append(f"jit({primitive.name})")
            return put(made)

        primitive.def_impl(call)

    def as_it_is(x):
        return x.copy() if isinstance(x, np.ndarray) else None  # JAX may share the memory of what it is given

    def converted(x, *, new_dtype, weak_type, sharding):
        if not isinstance(x, np.ndarray) or weak_type or sharding is not None:
            return None
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        if jnp.issubdtype(dtype, jnp.inexact) and not jnp.issubdtype(new_dtype, jnp.inexact):
            return None  # NumPy makes other whole numbers of NaN, and of what is too large
        with np.errstate(over="ignore"):
            return x.astype(dtype).astype(new_dtype)

    def repeated(x, *, shape, broadcast_dimensions, sharding):
        is_number = isinstance(x, jax.Array) and x.ndim == 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        plain = is_number and not x.weak_type and not x.committed and sharding is None
        return np.full(shape, x) if plain else None

    wrap(lax.stage_p, as_it_is)
    wrap(lax.convert_element_type_p, converted)
    wrap(lax.broadcast_in_dim_p, repeated)


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
