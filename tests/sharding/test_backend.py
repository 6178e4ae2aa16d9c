"""Implementation choices per platform, what a mesh changes, and that the library reads every choice."""

import ast
import dataclasses
import pathlib

import jax
import pytest

import eqx_decoders as ed
from eqx_decoders.model.weight_table import describe
from eqx_decoders.sharding import backend as module
from eqx_decoders.sharding.backend import BACKENDS, Backend, backend_of


SOURCES = sorted(pathlib.Path(ed.__path__[0]).rglob("*.py"))
ON_A_MESH = {"flat_products", "separate_layers", "active_rows_only", "parallel_programs"}


def differing(backend: Backend, other: Backend) -> set[str]:
    return {name for name, value in vars(backend).items() if value != getattr(other, name)}


@pytest.mark.slow
def test_every_choice_is_read():
    """`describe` reads all choices and does not count."""
    trees = [ast.parse(file.read_text()) for file in SOURCES if file != pathlib.Path(str(module.__file__))]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {field.name for field in dataclasses.fields(Backend)} - read == set()


def test_every_choice_differs_between_platforms():
    default = Backend(platform="any")
    changed = set.union(*(differing(backend, default) for backend in BACKENDS.values()))
    assert changed == vars(default).keys() - {"parallel_programs"}  # changes on a mesh


def test_a_mesh_disables_choices_for_a_single_device():
    cpu = backend_of("cpu")
    assert differing(cpu, backend_of("cpu", single=False)) == ON_A_MESH
    for platform in ("gpu", "tpu"):
        assert backend_of(platform) == backend_of(platform, single=False)


def test_an_unknown_platform_has_the_default_choices():
    assert differing(backend_of("new"), Backend(platform="new")) == set()
    assert backend_of("new").describe() == "new: default choices"
    choices = "duplicates_single_row=True, loss_tile_bytes=1073741824, pallas_gpu=True"
    choices += ", attention_kernels=('cudnn', 'triton'), paged_kernel=triton"
    choices += ", unrolled_layers=True, reads_before_writes=True, branches_block_host=True"
    assert backend_of("gpu").describe() == f"gpu: {choices}"


@pytest.mark.slow
@pytest.mark.parametrize("sizes, single", [({}, True), ({"fsdp": 1}, True), ({"fsdp": 2}, False)])
def test_a_layout_has_the_choices_of_its_devices(sizes, single):
    devices = jax.devices()[: sizes.get("fsdp", 1)]
    layout = ed.Layout.create(**sizes, devices=devices) if sizes else ed.Layout()
    assert layout.backend == backend_of("cpu", single=single)
    assert f"on {layout.backend.describe()}" in describe(ed.abstract(ed.get_config("tiny"), layout=layout))
