"""The house stays in order: files, functions, names, imports and READMEs are counted, and each count has a limit."""

import ast
import collections
import functools
import graphlib
import pathlib
import re

import pytest

from tests.sources import FILES, LIBRARY, nodes, parsed


ROOT = LIBRARY.parent
PACKAGES = sorted(file.parent for file in LIBRARY.glob("*/__init__.py"))
FOLDERS = [LIBRARY, ROOT / "scripts", ROOT / "tests"]
READMES = [ROOT / "README.md", *sorted(LIBRARY.rglob("README.md")), *sorted((ROOT / "scripts").glob("README.md"))]

MOST_LINES = {"a file": 450, "a function": 60, "the README": 350}
MOST_PARAMETERS = 10
MOST_FILES = 16
LONGEST_CHAIN = 20

# Folders of many files of one kind, one for each family.
MANY = {"families", "processors"}
# Files that hold the same idea in every package.
SAME_IDEA = {"__init__.py", "config.py", "metrics.py", "base.py", "registry.py", "common.py"}

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(file: pathlib.Path) -> str:
    """The file as messages name it: its path from the root of the project."""
    return str(file.relative_to(ROOT))


def definitions(*kinds: type[ast.AST]):
    """Yield the file and the node of every definition of these kinds in the library."""
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, kinds):
                yield file, node


def assert_at_most(limit: int, counts: dict[str, int], unit: str) -> None:
    """Fail with one line for each name whose count is over the limit, the largest first."""
    over = sorted((item for item in counts.items() if item[1] > limit), key=lambda item: -item[1])
    assert not over, "\n".join([f"at most {limit} {unit}:", *(f"  {name}: {count}" for name, count in over)])


def assert_once(where: dict[str, set[str]], what: str) -> None:
    """Fail with one line for each name that stands in two files."""
    twice = {name: files for name, files in sorted(where.items()) if len(files) > 1}
    lines = [f"  {name}: {', '.join(sorted(files))}" for name, files in twice.items()]
    assert not twice, "\n".join([f"one meaning for each {what}:", *lines])


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


def test_functions_have_few_parameters():
    """Those of a method are counted without `self` and `cls`, and `*args` and `**kwargs` are not counted."""
    counts = {}
    for file, node in definitions(*FUNCTION):
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        counts[f"{name_of(file)}:{node.lineno} {node.name}"] = len(
            [name for name in names if name not in ("self", "cls")]
        )
    assert_at_most(MOST_PARAMETERS, counts, "parameters of a function")


def test_class_names_have_one_meaning():
    where = collections.defaultdict(set)
    for file, node in definitions(ast.ClassDef):
        where[node.name].add(name_of(file))
    assert_once(where, "name of a class")


def test_file_names_have_one_meaning():
    where = collections.defaultdict(set)
    for file in FILES:
        if file.name not in SAME_IDEA and file.parent.name not in MANY:
            where[file.name].add(name_of(file))
    assert_once(where, "name of a file")


def test_imports_make_no_circle():
    try:
        graphlib.TopologicalSorter(imports()).prepare()
    except graphlib.CycleError as error:
        pytest.fail("files import each other in a circle: " + " <- ".join(error.args[1]))


def test_import_chains_are_short():
    """A chain is a file, one that it imports, one that this one imports, and so on. Circles fail here, too."""
    chains: dict[str, list[str]] = {}
    for module in graphlib.TopologicalSorter(imports()).static_order():
        chains[module] = [module, *max((chains[target] for target in imports()[module]), key=len, default=[])]
    longest = max(chains.values(), key=len)
    text = "\n  imports ".join(longest)
    assert len(longest) <= LONGEST_CHAIN, f"a chain of {len(longest)} files, at most {LONGEST_CHAIN}:\n  {text}"


def test_the_readme_is_short():
    assert_at_most(MOST_LINES["the README"], {"README.md": len((ROOT / "README.md").read_text().splitlines())}, "lines")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_packages_have_a_readme_that_names_each_file(package):
    """Files stand there by their path in the package, in backticks: `attention/mla.py`."""
    readme = package / "README.md"
    assert readme.exists(), f"{name_of(package)} has no README.md"
    files = {str(file.relative_to(package)) for file in package.rglob("*.py") if file.name != "__init__.py"}
    missing = sorted(files - set(re.findall(r"`([\w/]+\.py)`", readme.read_text())))
    assert not missing, f"{name_of(readme)} does not name {', '.join(missing)}"


@pytest.mark.medium(fast=2)
@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_readmes_name_files_that_are_there(readme):
    """In backticks, by their path or its end; links go from the folder of the README."""
    text = re.sub(r"^```.*?^```", "", readme.read_text(), flags=re.M | re.S)
    there = "\n".join(f"/{name_of(file)}" for folder in FOLDERS for file in folder.rglob("*") if file.is_file()) + "\n"
    gone = [path for path in re.findall(r"`([\w/]+\.(?:py|md))`", text) if f"/{path}\n" not in there]
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    gone += [link for link in links if link and not (readme.parent / link).exists()]
    assert not gone, f"{name_of(readme)} names {', '.join(gone)}, which is not there"
