"""The programs as a test calls them: in this process, or in processes of their own."""

import contextlib
import functools
import importlib
import io
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax

from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.run.log import read_metrics


ROOT = Path(__file__).parents[1]
KEPT = (
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT",
    "XLA_FLAGS",
    "EQX_DECODERS_CACHE",
)  # one device, and no strictness
ENVIRONMENT = {
    **{name: os.environ[name] for name in os.environ if name.startswith(KEPT) or name[:3] not in ("JAX", "XLA", "EQX")},
    "COLUMNS": "120",
}
TEXT = "the quick brown fox jumps over a lazy dog while many small birds sing in old green trees"


def outcome(program: str, *args: object, stdin: str = "", devices: int = 1) -> tuple[int, str, str]:
    """Run a program of `eqx_decoders.cli` in this process: its exit code, standard output and standard error.

    It sees so many `devices`. The speed of the CPU is not measured, and the settings of malloc are left alone.
    """
    layout = functools.partial(Layout.create, devices=jax.devices()[:devices])
    main = importlib.import_module(f"eqx_decoders.cli.{program}").main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("eqx_decoders.training.flops.measured_flops", lambda dtype: 1e11))
        stack.enter_context(mock.patch("eqx_decoders.core.malloc.ctypes", None))
        stack.enter_context(mock.patch.object(Layout, "create", layout))
        stack.enter_context(mock.patch("sys.stdin", io.StringIO(stdin)))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            code = main([str(arg) for arg in args], prog=program)
        except SystemExit as left:  # of the parser of the command line
            code = left.code
    return code, out.getvalue(), err.getvalue()


def call(program: str, *args: object, code: int = 0, **options) -> tuple[str, str]:
    """Standard output and error of a program that must end with `code`; `options` are those of `outcome`."""
    found, out, err = outcome(program, *args, **options)
    assert found == code, f"{found}: {err[-3000:]}"
    return out, err


def start(script: str, *args: object, **streams) -> subprocess.Popen:
    """A script in a process of its own."""
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, args)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, text=True, **(pipes | streams))


def run(script: str, *args: object, stdin: str = "", code: int = 0) -> tuple[str, str]:
    """Standard output and error of a script that must end with `code`."""
    process = start(script, *args)
    out, err = process.communicate(stdin, timeout=300)
    assert process.returncode == code, f"{process.returncode}: {err[-3000:]}"
    assert "Traceback" not in err
    return out, err


def write_corpus(folder: Path, count: int = 12, words: int = 300) -> Path:
    """Files of random words."""
    generator = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.txt").write_text(" ".join(generator.choices(TEXT.split(), k=words)) + "\n")
    return folder


def flags(options: dict[str, object]) -> list[str]:
    """`{"--steps": 4}` as words of a command line."""
    return [str(word) for option in options.items() for word in option]


def steps_of(folder: Path) -> list[dict]:
    """The rows of a run's steps."""
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
