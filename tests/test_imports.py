"""Imports go one way, and nothing optional is imported with the package."""

import ast
import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

import eqx_decoders
from eqx_decoders.families import registry
from tests.errors import refused
from tests.sources import FILES, LIBRARY, nodes


# Each package may import from itself and from the packages before it.
ORDER = [
    "errors", "remat", "sharding", "core", "numerics", "context", "layers", "blocks", "encoders", "media_files",
    "model", "families", "io", "data", "inference", "serving", "evaluation", "training", "rl", "planning", "cli",
]  # fmt: skip


# Packages that import their public names late.
LAZY = ("layers", "blocks.residual", "encoders", "training", "serving", "evaluation")
PACKAGES = ["eqx_decoders", *(f"eqx_decoders.{name}" for name in LAZY)]

# JAX has no public way to what its processes tell each other, to where it finds them, and to what its cuDNN attention
# asks of the GPUs that a step is traced for; nor Orbax to its counter.
PRIVATE = {
    ("processes.py", "distributed"),
    ("processes.py", "clusters"),
    ("gpus.py", "cudnn"),
    ("checkpoints.py", "futures.synchronization"),
}


def package_of(module: str) -> str:
    return module.removeprefix("eqx_decoders.").split(".")[0]


def imported(file: pathlib.Path):
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package):
    files = [file for file in FILES if file.relative_to(LIBRARY).with_suffix("").parts[0] == package]
    assert files
    for file in files:
        for module in imported(file):
            private = module.partition("_src.")[2]
            assert not private or (file.name, private) in PRIVATE, f"{file.name} imports private {module}"
            if module.startswith("eqx_decoders"):
                assert module != "eqx_decoders", f"{file.name}: import from the module that defines the name"
                if file.name == "__init__.py" and package in ("layers", "blocks", "encoders"):
                    continue  # exports of layers, on first use; a layer that one family has is defined there
                if file == LIBRARY / "training" / "__init__.py" and module == "eqx_decoders.rl.methods":
                    continue  # export of `train`, on first use; the table of all methods is defined there
                assert ORDER.index(package_of(module)) <= ORDER.index(package), f"{file} must not import {module}"


def test_every_package_has_its_place_in_the_order():
    assert {file.relative_to(LIBRARY).with_suffix("").parts[0] for file in FILES} == {*ORDER, "__init__"}


def test_import_needs_what_is_used():
    """A fresh interpreter: the package alone imports nothing of others, and a model neither what it doesn't need."""
    show = "print(*sys.modules)"
    code = f"import sys; {show}; import eqx_decoders; {show}; eqx_decoders.init; {show}"
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    before, package, model = (set(line.split()) for line in lines)
    foreign = {name.partition(".")[0] for name in package - before} - sys.stdlib_module_names
    assert foreign == {"eqx_decoders"}
    unwanted = "torch flax tensorflow tokenizers transformers rich tyro matplotlib tensorboardX pyarrow requests"
    unwanted += " optax orbax.checkpoint eqx_decoders.io eqx_decoders.families eqx_decoders.training"
    unwanted += " jax.experimental.pallas jax.experimental.mosaic"  # kernels of accelerators
    assert not set(unwanted.split()) & model and {"jax", "equinox", "eqx_decoders.model.decoder"} <= model


def test_a_checkpoint_imports_only_the_layers_and_the_family_of_its_model():
    """A fresh interpreter that reads a Llama."""
    code = """
import sys, eqx_decoders
eqx_decoders.get_config("llama3-8b")
eqx_decoders.load_hf("tests/fixtures/llama_bf16")
print(*(name.removeprefix("eqx_decoders.") for name in sys.modules))
"""
    modules = set(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=LIBRARY.parent).split())
    mixers = {name.rpartition(".")[2] for name in modules if name.startswith(("layers.recurrent", "layers.attention"))}
    assert not mixers & {"gated_conv", "gated_delta_net", "kimi_delta", "mamba1", "mamba2", "scans", "pallas_scan"}
    assert not {"layers.embedding.engram", "layers.parallel_mixers", "io.gguf.gguf_directory"} & modules
    lineages = {module.partition(".")[0] for module in registry.MODULES}
    assert {name.split(".")[1] for name in modules if name.startswith("families.")} & lineages == {"llama"}


def test_saved_configurations_name_layers_that_were_not_imported():
    """A fresh interpreter, in which a user's class cannot have the name of such a layer, either."""
    models = ("mamba2-130m", "gemma3n-e2b-vision")
    texts = [eqx_decoders.get_config(name).to_json() for name in models]
    code = """
import json, sys
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.base import MixerConfig
assert not {"eqx_decoders.layers.recurrent.mamba2", "eqx_decoders.families.xlstm"} & set(sys.modules)
try:
    class MLSTMConfig(MixerConfig): ...
except ConfigError:
    print(json.dumps([DecoderConfig.from_json(text).to_json() for text in json.load(sys.stdin)]))
"""
    out = subprocess.check_output([sys.executable, "-c", code], text=True, input=json.dumps(texts))
    assert json.loads(out) == texts


def test_users_classes_do_not_replace_the_librarys():
    """Also if the library's class is imported later."""
    code = """
import eqx_decoders
from eqx_decoders.blocks.residual.base import Residual
class Laurel(Residual): ...
try:
    from eqx_decoders.blocks.residual import Laurel
except eqx_decoders.ConfigError as error:
    print(error)
"""
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "class Laurel of __main__" in out and "eqx_decoders.families.gemma.altup" in out


@pytest.mark.slow(fast=("io.processors.processor",))
@pytest.mark.parametrize("module", ["io.processors.processor", "data.store.tokenize"])
def test_processes_that_read_files_import_no_model(module):
    """A fresh interpreter: a server has one for each core, and JAX would take most of the time of a start."""
    code = f"import sys, eqx_decoders.{module}; print(*sys.modules)"
    modules = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    unwanted = {"jax", "equinox", *(f"eqx_decoders.{name}" for name in ("layers", "model", "families.registry"))}
    assert not unwanted & modules and f"eqx_decoders.{module}" in modules


@pytest.mark.slow
def test_every_module_can_be_imported_on_windows():
    """A fresh interpreter without the modules that only Unix has."""
    code = """
import pkgutil, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGKILL", "SIGXCPU", "SIGALRM"):
    delattr(signal, name)
import eqx_decoders
for module in pkgutil.walk_packages(eqx_decoders.__path__, "eqx_decoders."):
    __import__(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_dangerous_is_called():
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), file
        assert "pickle" not in set(imported(file)), file


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_late_is_what_type_checkers_see(package):
    """The names under TYPE_CHECKING and those of `__getattr__` are the same, and each is there."""
    module = importlib.import_module(package)
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    checked = {alias.name for node in block.body for alias in node.names}
    late = {name for name in module.__all__ if getattr(module, name) is not None}
    assert checked == late <= set(dir(module))
    for name in late:
        assert callable(getattr(module, name)) or name.isupper()
    with refused(AttributeError, f"'{package}'", "'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize(
    "package", ["eqx_decoders", "eqx_decoders.training", "eqx_decoders.serving", "eqx_decoders.evaluation"]
)
def test_the_doc_of_a_package_names_all_that_it_offers(package):
    """Each public name stands in backticks in the text that `help` shows, and each of these names is there."""
    module = importlib.import_module(package)
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    offered = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    named = set(re.findall(r"`(\w+)`", module.__doc__))
    assert named == offered - {None}
