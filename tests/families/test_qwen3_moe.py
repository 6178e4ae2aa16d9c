"""Qwen3 with experts: which layers have them, and the keys that it has two names for."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.moe import sparse_layers
from eqx_decoders.layers.moe.router import RouterConfig
from tests.families.samples import decode, sample, windows


def experts(**keys):
    """The layers with experts."""
    return sparse_layers(decode(sample("qwen3_moe", "mlp_only_layers", "decoder_sparse_step", **keys)))


def test_every_layer_has_experts_but_for_steps_and_exceptions():
    assert experts() == [0, 1, 2, 3]
    assert experts(decoder_sparse_step=2) == [1, 3]
    assert experts(decoder_sparse_step=2, mlp_only_layers=[3]) == [1]
    assert experts(mlp_only_layers=[0, 2, 7]) == [1, 3]
    for keys in (dict(decoder_sparse_step=5), dict(mlp_only_layers=[0, 1, 2, 3])):
        with pytest.raises(ed.ConversionError, match="no layer has experts"):
            experts(**keys)


def test_experts_and_dense_layers_have_widths_of_their_own():
    dense, sparse = decode(sample("qwen3_moe", decoder_sparse_step=2)).blocks[:2]
    assert (dense.mlp.mlp_dim, sparse.mlp.mlp_dim) == (40, 12)
    assert decode(sample("qwen3_moe", "intermediate_size")).blocks[0].mlp.mlp_dim == 6144
    written = FAMILIES["qwen3_moe"].encode(ed.get_config("qwen3-30b-a3b"))
    assert (written["moe_intermediate_size"], written["mlp_only_layers"]) == (768, [])


def test_weights_are_those_of_all_experts_unless_divided():
    for renormalize in (True, False):
        router = decode(sample("qwen3_moe", norm_topk_prob=renormalize)).blocks[1].mlp.router
        assert router == RouterConfig(order="score_first", renormalize=renormalize)
    assert ed.get_config("qwen3-30b-a3b").blocks[0].mlp.router.renormalize


def test_all_layers_have_the_window():
    assert windows("qwen3_moe", 4, sliding_window=7) == [None] * 4
    assert windows("qwen3_moe", 4, sliding_window=7, use_sliding_window=True, max_window_layers=2) == [7] * 4


def test_both_names_of_the_number_of_experts_must_agree():
    content = sample("qwen3_moe", "num_local_experts")
    assert decode(content | dict(num_experts=6)) == decode(content | dict(num_local_experts=6))
    with pytest.raises(ed.ConversionError, match=r"num_local_experts=4.*num_experts=6"):
        decode(content | dict(num_experts=6, num_local_experts=4))
