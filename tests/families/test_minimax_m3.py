"""MiniMax M3: which layers choose blocks and which have experts, and how gates are joined."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.moe import sparse_layers
from tests.families.samples import decode, sample


KIND = "minimax_m3_vl_text"


def test_layers_are_as_they_are_listed():
    config = decode(sample(KIND))
    assert [block.mixer.block_indexer is not None for block in config.blocks] == [False, True]
    assert sparse_layers(config) == [1] and config.blocks[0].mlp.mlp_dim == 20
    plain = decode(sample(KIND, "layer_types", "mlp_layer_types", "index_block_size"))
    assert not any(block.mixer.block_indexer for block in plain.blocks) and sparse_layers(plain) == [0, 1]
    for each in (config, plain):
        assert decode(sample(KIND, "layer_types", "mlp_layer_types") | FAMILIES[KIND].encode(each)) == each
    assert not {"index_block_size", "dense_intermediate_size"} & FAMILIES[KIND].encode(plain).keys()


def test_all_gates_are_joined_alike():
    config = decode(sample(KIND, swiglu_alpha=1.25, swiglu_limit=3.0))
    experts = config.blocks[1].mlp
    for mlp in (config.blocks[0].mlp, experts, experts.shared):
        assert (mlp.activation, mlp.activation_scale, mlp.up_offset, mlp.limit) == ("silu", 1.25, 1.0, 3.0)


def test_settings_of_other_files_are_refused():
    for key in ("sparse_attention_config", "moe_layer_freq"):
        with pytest.raises(ed.ConversionError, match=key):
            decode(sample(KIND, **{key: [1, 1]}))
    with pytest.raises(ed.ConversionError, match="no layer has experts"):
        decode(sample(KIND, mlp_layer_types=["dense"] * 2))
