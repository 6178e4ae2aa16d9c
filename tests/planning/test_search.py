"""Which meshes are compiled first: those that are, and an estimate by hand."""

import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.search import _gathered, _to_experts, estimate, meshes
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.chips import CHIPS
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer


V5P = {chip.name: chip for chip in CHIPS}["v5p"]
MACHINE = Machine(V5P, tuple((0, (i,), 0) for i in range(8)), (8,))


def test_all_meshes_of_the_devices_are_listed():
    found = meshes(4, 1, ("data", "fsdp"))
    assert found == [{"data": 1, "fsdp": 4}, {"data": 2, "fsdp": 2}, {"data": 4, "fsdp": 1}]
    assert meshes(4, 2, ("data", "fsdp")) == found[1:]
    assert len(meshes(16, 1, ("data", "fsdp", "tensor"))) == 15


def model(name: str = "tiny", **sizes: int):
    precision = ed.Precision(compute=jnp.bfloat16)
    return ed.abstract(ed.get_config(name), layout=ed.Layout.create(**sizes), precision=precision)


def test_weights_are_gathered_along_fsdp_only():
    """Of `tiny` (4.75 M weights) all matrices are split by fsdp; half of them, two bytes each, with tensor=2."""
    matrices = sum(leaf.size for leaf in _leaves(model(fsdp=8)) if leaf.sharding.spec and any(leaf.sharding.spec))
    assert _gathered(model(fsdp=8)) == {("fsdp",): 2 * matrices}
    assert _gathered(model(fsdp=4, tensor=2))[("fsdp",)] == pytest.approx(matrices, rel=0.02)
    assert _gathered(model(data=8)) == {}
    moe = model("tiny-moe", expert=4, data=2)
    shared = sum(leaf.size for name, leaf in named_leaves(moe).items() if ".mlp." not in name or ".shared." in name)
    assert _gathered(moe)[("expert",)] == pytest.approx(2 * shared, rel=0.02)  # experts stay where they are


def test_tokens_travel_to_experts_and_back():
    """On a CPU they are gathered, and results scattered, in all five layers: forward and backward, and once again."""
    moe = model("tiny-moe", expert=4, data=2)
    assert list(_to_experts(moe, 100)) == [("all-gather", 400, 10), ("reduce-scatter", 400, 10)]
    again = moe.replace(remat="full")
    assert list(_to_experts(again, 100)) == [("all-gather", 400, 15), ("reduce-scatter", 400, 15)]
    rows = moe.replace(expert_exchange="all_to_all")
    slots = moe.config.blocks[-1].mlp.num_experts_per_token
    assert list(_to_experts(rows, 100)) == [("all-to-all", 100 * slots, 20)]
    assert list(_to_experts(model(fsdp=8), 100)) == []


def _leaves(model):
    return list(named_leaves(model).values())


def guess(batch_size: int, **sizes: int):
    one = model(**sizes)
    return estimate(one, Trainer.create(OptimizerConfig(), one, steps=10), MACHINE, batch_size=batch_size, seq_len=256)


def test_estimates_rank_meshes_by_their_traffic():
    """Few tokens: gathers cost most; many: sums of activations do. State and gradients are 16 bytes a weight."""
    count = ed.count_parameters(ed.get_config("tiny"))
    assert guess(8, fsdp=8).state == pytest.approx(16 * count / 8, rel=0.02)
    assert guess(8, data=8).state == pytest.approx(16 * count, rel=0.02)
    few = guess(8, fsdp=8).seconds / guess(8, fsdp=4, tensor=2).seconds
    many = guess(512, fsdp=8).seconds / guess(512, fsdp=4, tensor=2).seconds
    assert many < few and many < 1
