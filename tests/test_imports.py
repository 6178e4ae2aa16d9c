"""Imports go one way, and nothing optional is imported with the package."""

import ast
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parent.parent / "eqx_decoders"

# Each part may import from itself and from those that stand before it.
ORDER = [
    "errors", "axes", "layout", "numerics", "remat", "context", "layers", "block", "stack", "mtp", "config_json",
    "decoder", "create",
    "families", "io", "inference", "describe", "training", "cli",
]  # fmt: skip


def part_of(module: str) -> str:
    return module.removeprefix("eqx_decoders.").split(".")[0]


def imported(file: pathlib.Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file):
    here = part_of(".".join(file.relative_to(ROOT.parent).with_suffix("").parts))
    if here == "__init__":
        return
    for module in imported(file):
        assert "_src" not in module, f"{file.name} imports private {module}"
        if module.startswith("eqx_decoders"):
            assert module != "eqx_decoders", f"{file.name}: import from the module that defines the name"
            assert ORDER.index(part_of(module)) <= ORDER.index(here), f"{here} must not import {module}"


def test_import_needs_the_core_only():
    """A fresh interpreter: no optional package, no network library, no other framework."""
    code = "import sys, eqx_decoders; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True)
    unwanted = "torch flax tensorflow grain tokenizers transformers rich tyro matplotlib tensorboardX pyarrow requests"
    assert not set(unwanted.split()) & set(modules.split())


def test_every_module_can_be_imported_on_windows():
    """A fresh interpreter without the modules that only Unix has. `chat_worker` is a script for Linux and macOS."""
    code = """
import pkgutil, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGKILL", "SIGXCPU", "SIGALRM"):
    delattr(signal, name)
import eqx_decoders
for module in pkgutil.walk_packages(eqx_decoders.__path__, "eqx_decoders."):
    if not module.name.endswith("chat_worker"):
        __import__(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_dangerous_is_called():
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), file
        assert "pickle" not in set(imported(file)), file
