"""Replicated weights: their fraction, the tolerance, and the error that names them."""

import dataclasses

import jax
import pytest

import eqx_decoders as ed
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.layout import WEIGHTS, device_bytes
from eqx_decoders.sharding.replication import check_replicated, replicated_weights, splitting_axes
from eqx_decoders.training.settings.run import TrainConfig
from tests.errors import refused
from tests.models import rich_decoder


def test_only_norms_are_replicated():
    layout = ed.Layout.create(fsdp=4, tensor=2)
    model = ed.abstract(ed.get_config("llama3-8b"), layout=layout)
    found = replicated_weights(model, layout)
    assert found and all("norm" in name for name in found)
    weights = {name: leaf.size for name, leaf in named_leaves(model).items()}
    norms = sum(size for name, size in weights.items() if "norm" in name)
    assert ed.replicated_fraction(model, layout) == pytest.approx(norms / sum(weights.values()), rel=1e-9)
    minimum = sum(leaf.size for leaf in jax.tree.leaves(model)) * 4 / 8
    stored = sum(map(device_bytes, jax.tree.leaves(model)))
    assert stored - minimum == pytest.approx(norms * 4 * 7 / 8)  # bytes of the replicas


@pytest.mark.parametrize("sizes", [dict(data=8), dict(stage=2, data=4), dict()])
def test_meshes_that_split_no_weights_replicate_none(sizes):
    layout = ed.Layout.create(**sizes) if sizes else ed.Layout()
    model = ed.abstract(rich_decoder(2), layout=layout)
    assert splitting_axes(layout) == () and ed.replicated_fraction(model, layout) == 0
    check_replicated(model, layout, 0.0)


def test_sharding_rules_determine_which_axes_split_weights():
    table = WEIGHTS | {"embed": ("data",)}
    layout = ed.Layout.create(data=4, tensor=2, weights=table)
    assert splitting_axes(layout) == ("data", "tensor")
    table = {word: names for word, names in WEIGHTS.items() if word != "mlp"}
    layout = ed.Layout.create(fsdp=4, tensor=2, weights=table)
    model = ed.abstract(ed.get_config("llama3-8b"), layout=layout)
    assert ed.replicated_fraction(model, layout) > 0.5
    names = ("replicated_tolerance=0.02", "%", "Layout.fsdp=4", "Layout.tensor=2", "mlp.gate", "embed mlp")
    with refused(ed.ConfigError, *names):
        check_replicated(model, layout, 0.02)


@pytest.mark.parametrize("name", ["tiny", "gpt3-52k"])
@pytest.mark.parametrize("sizes", [dict(fsdp=4, data=2), dict(fsdp=2, tensor=2, data=2), dict(tensor=2, data=4)])
def test_small_models_are_not_checked(name, sizes):
    layout = ed.Layout.create(**sizes)
    check_replicated(ed.abstract(ed.get_config(name), layout=layout), layout, TrainConfig().replicated_tolerance)


def test_a_negative_tolerance_is_refused():
    with refused(ed.ConfigError, "replicated_tolerance=-1"):
        dataclasses.replace(TrainConfig(), replicated_tolerance=-1.0)
