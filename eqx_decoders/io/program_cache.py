"""Compiled programs in a folder, which later processes read instead of compiling them again."""

import contextlib
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax._src.compilation_cache as jax_cache

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.atomic_files import cache_directory, write_atomically


MOST_BYTES, MOST_FILES = 1_000_000_000, 4096
OFF = "JAX_ENABLE_COMPILATION_CACHE=0"
_DIGEST = 16  # bytes, in front of each program
_WRITING = 3600  # seconds that a file may take


class ProgramCache:
    """Cache of compiled programs, as JAX calls one: a file each, of which the least recently used are deleted.

    JAX's own cache writes a file in place: a killed process or a full disk leaves a part of it, which every later
    process fails to read and none replaces. Here a file is whole or absent, and one that is damaged is compiled anew.
    No error of the file system ends a process: `say` is told about the first one.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], most_bytes: int = MOST_BYTES):
        self._path, self._say, self._most_bytes, self._failed = folder, say, most_bytes, False
        self._make_room()

    def get(self, key: str) -> bytes | None:
        """Return the program of a key, or None if it must be compiled."""
        file = self._path / key
        try:
            with file.open("rb") as stream:
                _check_owner(os.fstat(stream.fileno()), file)  # the folder may have been replaced since it was opened
                content = stream.read()
            os.utime(file)  # it was used now
        except OSError:
            return None
        digest, program = content[:_DIGEST], content[_DIGEST:]
        if digest == _digest(program):
            return program
        with contextlib.suppress(OSError):
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep the program of a key, as far as it fits."""
        if len(value) > self._most_bytes:
            return
        try:
            write_atomically(self._path / key, _digest(value) + value)
        except OSError as error:
            if not self._failed:
                self._say(f"programs cannot be kept in {self._path}, the run goes on: {error.strerror or error}")
            self._failed = True
        self._make_room()

    def _make_room(self) -> None:
        """Delete the programs that were not used for longest until the others fit."""
        files = []
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.endswith(".partial") and time.time() - entry.stat().st_mtime < _WRITING:
                    continue  # another process writes it
                with contextlib.suppress(OSError):  # another process has deleted it
                    status = entry.stat()
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        files.sort(reverse=True)
        size = 0
        for number, (_, bytes_of_file, path) in enumerate(files):
            size += bytes_of_file
            if size > self._most_bytes or number >= MOST_FILES:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def keep_programs(cache_dir: str | None = None, say: Callable[[str], None] | None = None) -> Path | None:
    """Keep the programs that JAX compiles in a folder of `cache_directory(cache_dir)`; return it, or None.

    Call it before anything is compiled; `say` is told in one line where they are, or why they are not kept.
    JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=0 come before it, and JAX_COMPILATION_CACHE_MAX_SIZE
    replaces its bound of 1 GB. Of several processes only the first one writes (JAX's rule): on CPUs, where a program
    belongs to its process, the others compile.
    """
    config: Any = jax.config
    most = config.jax_compilation_cache_max_size
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache or most == 0:
        return None
    say = say or _print_line
    if jax.process_count() > 1 and jax.default_backend() == "gpu":
        # processes without the program would tune it, and wait for the first one, which has it
        say(
            "compiled programs are not kept: processes on GPUs need one JAX_COMPILATION_CACHE_DIR that all of them read"
        )
        return None
    try:
        folder = _open_folder(cache_directory(cache_dir))
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: of a user without a home
        say(f"compiled programs are not kept: {str(error).rstrip('.')}")
        return None
    cache = ProgramCache(folder, say, MOST_BYTES if most < 0 else most)
    jaxs_own = jax_cache.get_file_cache

    def open_cache(path: str) -> Any:
        return (cache, path) if path == str(folder) else jaxs_own(path)

    jax_cache.get_file_cache = open_cache
    config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start compiles many small programs
    say(f"compiled programs are kept in {folder} ({OFF}: nowhere)")
    return folder


def _open_folder(cache: Path) -> Path:
    """Make the folder of this kind of machine in a cache; OSError unless this user can write it, and nobody else."""
    folder = cache / f"programs-{processor()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder.stat(), folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is read-only")
    return folder


def _check_owner(status: os.stat_result, path: Path) -> None:
    """Raise PermissionError unless a file or folder is this user's alone, since its code would be run."""
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        remedy = "give a folder of your own: EQX_DECODERS_CACHE, or --cache-dir of train"
        raise PermissionError(f"others may write {path}, whose code would be run; {remedy}")


def processor() -> str:
    """Return a name for the kind of this machine's processors and their number: compiled code may run nowhere else."""
    info, flags = Path("/proc/cpuinfo"), platform.node()  # without that file every machine is a kind of its own
    with contextlib.suppress(OSError):
        lines = info.read_text().splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), flags)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{flags} {cores} {os.environ.get('NPROC')}"
    return f"{platform.machine()}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _digest(program: bytes) -> bytes:
    return hashlib.blake2b(program, digest_size=_DIGEST).digest()


def _print_line(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)
