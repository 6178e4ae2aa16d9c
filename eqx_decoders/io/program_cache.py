"""JAX's persistent compilation cache (`jax_compilation_cache_dir`) in a folder of the user.

This module chooses a folder that only the user can write, because its programs are executed. It deletes the least
recently used programs when a process starts.
"""

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.atomic_files import cache_directory


MAX_BYTES, MAX_FILES = 1_000_000_000, 4096
OFF = "JAX_ENABLE_COMPILATION_CACHE=0"


def keep_programs(cache_dir: str | None = None, say: Callable[[str], None] | None = None) -> Path | None:
    """Set JAX's compilation cache to a folder in `cache_directory(cache_dir)`; return the folder, or None.

    Call it before anything is compiled. `say` is called with one line: the folder, or why programs are not cached.
    If JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE=0 is set, nothing is changed. When a process starts,
    the least recently used programs are deleted until the folder has at most 1 GB. With
    JAX_COMPILATION_CACHE_MAX_SIZE, JAX limits the size itself, and reads the sizes of all files whenever it adds one.
    In a run of several processes, JAX writes only the programs of the first process. On CPUs a program depends on the
    process, so all other processes compile their programs.
    """
    config: Any = jax.config
    max_size = config.jax_compilation_cache_max_size
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache or max_size == 0:
        return None
    say = say or _print_line
    if jax.process_count() > 1 and jax.default_backend() == "gpu":
        # processes without the cached program would autotune it together with process 0, which has it
        say("compiled programs are not cached: on GPUs, all processes need one shared JAX_COMPILATION_CACHE_DIR")
        return None
    try:
        folder = _open_folder(cache_directory(cache_dir))
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        say(f"compiled programs are not cached: {str(error).rstrip('.')}")
        return None
    if max_size < 0 and jax.process_index() == 0:
        delete_oldest(folder)
    config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start compiles many small programs
    say(f"compiled programs are cached in {folder} ({OFF} disables the cache)")
    return folder


def delete_oldest(folder: Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Delete the least recently used files until the remaining files are within both limits.

    A file was last used at its access time, or at its modification time if that is later, as on file systems that do
    not record access times.
    """
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has deleted it
                status = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False):
                    files.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, entry.path))
    files.sort(reverse=True)
    size = 0
    for index, (_, file_size, path) in enumerate(files):
        size += file_size
        if size > max_bytes or index >= max_files:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _open_folder(cache: Path) -> Path:
    """Create the folder for this kind of machine. Raises OSError unless only this user can write it."""
    folder = cache / f"programs-{processor()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder.stat(), folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is read-only")
    return folder


def _check_owner(status: os.stat_result, path: Path) -> None:
    """Raise PermissionError unless only this user can write a folder, because its programs are executed."""
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        raise PermissionError(
            f"other users may write {path}, whose programs are executed. Set EQX_DECODERS_CACHE, or "
            "--cache-dir of train, to a folder that only you can write"
        )


def processor() -> str:
    """Return a name for the kind and number of this machine's processors, for which programs are compiled."""
    info, flags = Path("/proc/cpuinfo"), platform.node()  # without this file, each machine is a separate kind
    with contextlib.suppress(OSError):
        lines = info.read_text().splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), flags)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{flags} {cores} {os.environ.get('NPROC')}"
    return f"{platform.machine()}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _print_line(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)
