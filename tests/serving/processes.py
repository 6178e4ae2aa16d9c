"""Run `scripts/serve.py` in a separate process, and measure the memory and time of this process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.commands import ENVIRONMENT, ROOT
from tests.serving.servers import Running


LENGTH = 192
# The same program. On SIGUSR2 it writes the number and the bytes of JAX's live arrays into a file.
WATCHED = """
import os, signal, sys
from pathlib import Path

import jax

from eqx_decoders.cli.serve import main

file = Path(sys.argv.pop(1))


def tell(*_):
    arrays = jax.live_arrays()
    new = file.with_suffix(".new")
    new.write_text(f"{len(arrays)} {sum(array.nbytes for array in arrays)}")
    os.replace(new, file)


signal.signal(signal.SIGUSR2, tell)
sys.exit(main())
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def served(
    folder: Path, *flags: object, length: int = LENGTH, watched: Path | None = None
) -> Iterator[tuple[subprocess.Popen, Running]]:
    """Start the script and wait until it is ready; kill it at the end. `watched`: file for `arrays_of`."""
    port = free_port()
    options = ("--model", folder, "--served-name", "m", "--port", port, "--max-length", length, "--max-batch-size", 4)
    script = [ROOT / "scripts" / "serve.py"] if watched is None else ["-c", WATCHED, watched]
    pipes: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT)
    process = subprocess.Popen([str(word) for word in (sys.executable, *script, *options, *flags)], **pipes)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line == f"serving m at http://127.0.0.1:{port}\n", (
            line,
            process.stderr.read()[-3000:] if not line else "",
        )
        inside: Any = None  # the engine is in the other process
        yield process, Running(port, inside, inside)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def memory_of(process: subprocess.Popen) -> float:
    """Return the resident memory of a process in MB."""
    rows = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) / 1e3 for row in rows if row.startswith("VmRSS"))


def seconds_of(process: subprocess.Popen) -> float:
    """Return the processor time of a process and of its ended children in seconds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def arrays_of(process: subprocess.Popen, watched: Path) -> tuple[int, int]:
    """Return the number of live JAX arrays in a process, and their bytes."""
    watched.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR2)
    until(watched.exists)
    count, size = watched.read_text().split()
    return int(count), int(size)


def until_idle(server: Running) -> None:
    """Wait until no request is open."""

    def idle() -> bool:
        told = server.call("/metrics")[2].decode()
        return all(f'vllm:num_requests_{name}{{model_name="m"}} 0.0' in told for name in ("running", "waiting"))

    until(idle)


def until(so: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
