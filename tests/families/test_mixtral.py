"""Mixtral: experts in every layer, and where a checkpoint has their matrices."""

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.layers.moe.router import RouterConfig
from tests.families.samples import decode, sample, windows


def test_published_models_use_two_of_eight_experts():
    for name in ("mixtral-8x7b", "mixtral-8x22b"):
        (block,) = set(ed.get_config(name).blocks)
        assert (block.mlp.num_experts, block.mlp.num_experts_per_token, block.mlp.shared) == (8, 2, None)
        assert block.mlp.router == RouterConfig(order="select_first", score="softmax")
        assert block.mixer.rope.theta == 1e6


def test_there_is_no_window_unless_it_is_given():
    assert windows("mixtral", 2) == [None, None]
    assert windows("mixtral", 2, sliding_window=7) == [7, 7]


def test_the_matrices_of_experts_have_numbers():
    """`w2(silu(w1 x) * w3 x)`, one tensor for each expert; newer files have one for all."""
    model = ed.abstract(decode(sample("mixtral")))
    own = FAMILIES["mixtral"].bind(model)
    for path, tensor in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        mapping = own[f"segments.0.unit.0.mlp.{path}"]
        assert mapping.name((1, 4)) == f"model.layers.1.block_sparse_moe.experts.4.{tensor}.weight"
        assert mapping.shape == ((24, 12) if path == "down" else (12, 24))
    fused = FAMILIES["mixtral"].stored_as(["model.layers.0.mlp.experts.gate_up_proj"]).bind(model)
    for path, part in (("gate", 0), ("up", 1)):
        mapping = fused[f"segments.0.unit.0.mlp.{path}"]
        assert (mapping.name((1,)), mapping.section.index) == ("model.layers.1.mlp.experts.gate_up_proj", part)
        assert mapping.shape == (5, 24, 24)
    assert FAMILIES["mixtral"].stored_as(["lm_head.weight"]) == FAMILIES["mixtral"]
