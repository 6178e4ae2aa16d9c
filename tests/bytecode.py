"""Bytecode of the tests and of the library, made once for all processes of a run."""

import functools
import sys
from pathlib import Path
from unittest import mock

import pytest
from _pytest.assertion import rewrite
from jaxtyping import _import_hook as hook


def write_share(config: pytest.Config, root: Path, package: str) -> None:
    """Write a worker's share of the bytecode that is missing, while the other workers write theirs.

    All workers read the same files in the same order: in a new clone each of them compiled everything, which took more
    time than to collect the tests. A file that is needed before its bytecode is there is compiled by who needs it.
    """
    number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    if sys.dont_write_bytecode:
        return
    for path in sorted((root / "tests").rglob("test_*.py"))[number::count]:
        _write_rewritten(config, path)
    finder = next((finder for finder in sys.meta_path if isinstance(finder, hook._JaxtypingFinder)), None)
    for path in sorted((root / package).rglob("*.py"))[number::count] if finder else ():
        _write_checked(finder, path, root)


def _write_rewritten(config: pytest.Config, path: Path) -> None:
    """Write the bytecode of a file of tests, whose assertions pytest rewrites."""
    folder, state = rewrite.get_cache_dir(path), config.stash[rewrite.assertstate_key]
    target = folder / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite.try_makedirs(folder) and rewrite._read_pyc(path, target) is None:
        source_hash, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(state, code, source_hash, target)


def _write_checked(finder: hook._JaxtypingFinder, path: Path, root: Path) -> None:
    """Write the bytecode of a file of the library, whose signatures jaxtyping checks."""
    module = path.parent if path.stem == "__init__" else path.with_suffix("")
    name = ".".join(module.relative_to(root).parts)
    loader = finder.find_spec(name, [str(module.parent)]).loader
    tagged = functools.partial(hook._optimized_cache_from_source, loader._typechecker.get_hash())
    with mock.patch("importlib._bootstrap_external.cache_from_source", tagged):
        loader.get_code(name)
