"""The library's sources as syntax trees, each of them read once by a process."""

import ast
import functools
import pathlib


LIBRARY = pathlib.Path(__file__).parents[1] / "eqx_decoders"
FILES = sorted(LIBRARY.rglob("*.py"))


@functools.cache
def parsed(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(file: pathlib.Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(file)))
