"""Structure of the library: no import cycles, a README for each package, and no README that names missing files."""

import ast
import functools
import graphlib
import pathlib
import re

import pytest

from tests.sources import FILES, LIBRARY, parsed


ROOT = LIBRARY.parent
PACKAGES = sorted(file.parent for file in LIBRARY.glob("*/__init__.py"))
FOLDERS = [LIBRARY, ROOT / "scripts", ROOT / "tests"]
READMES = [ROOT / "README.md", *sorted(LIBRARY.rglob("*.md")), *sorted((ROOT / "scripts").glob("README.md"))]


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(file: pathlib.Path) -> str:
    """The file as messages name it: its path from the root of the project."""
    return str(file.relative_to(ROOT))


def top_level(tree: ast.AST):
    """Yield the nodes of a module that are run when it is imported, those under TYPE_CHECKING included."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (*FUNCTION, ast.Lambda)):
            yield node
            yield from top_level(node)


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the modules that each module of the library imports; packages import nothing here, they only collect."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    graph = {}
    for module, file in modules.items():
        targets = set()
        for node in () if file.name == "__init__.py" else top_level(parsed(file)):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {name if name in modules else node.module for name in names}
        graph[module] = targets & set(modules) - {module, "eqx_decoders"}
    return graph


def test_imports_make_no_circle():
    try:
        graphlib.TopologicalSorter(imports()).prepare()
    except graphlib.CycleError as error:
        pytest.fail("files import each other in a circle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_packages_have_a_readme(package):
    assert (package / "README.md").exists(), f"{name_of(package)} has no README.md"


@pytest.mark.slow(fast=("README.md", "eqx_decoders/blocks/README.md"))
@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_readmes_name_files_that_are_there(readme):
    """In backticks, by their path or its end; links go from the folder of the README."""
    text = re.sub(r"^```.*?^```", "", readme.read_text(), flags=re.M | re.S)
    there = "\n".join(f"/{name_of(file)}" for folder in FOLDERS for file in folder.rglob("*") if file.is_file()) + "\n"
    gone = [path for path in re.findall(r"`([\w/]+\.(?:py|md))`", text) if f"/{path}\n" not in there]
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    gone += [link for link in links if link and not (readme.parent / link).exists()]
    assert not gone, f"{name_of(readme)} names {', '.join(gone)}, which is not there"
