"""ERNIE 4.5 with experts: which layers have them, and which biases."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES, moe
from tests.families.samples import decode, sample


INDICES = ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index")


def sparse(**keys) -> list[int]:
    config = decode(sample("ernie4_5_moe", *INDICES, num_hidden_layers=7, **keys))
    written = FAMILIES["ernie4_5_moe"].encode(config)
    assert decode(written) == config
    return moe.sparse_layers(config)


def test_layers_with_experts_are_those_of_an_interval_between_two():
    assert sparse() == [1, 2, 3, 4, 5, 6]
    assert sparse(moe_layer_start_index=3, moe_layer_end_index=4) == [3, 4]
    assert sparse(moe_layer_interval=3, moe_layer_start_index=0) == [2, 5]
    assert sparse(moe_layer_interval=2, moe_layer_start_index=2, moe_layer_end_index=-1) == [3, 5]
    with pytest.raises(ed.ConversionError, match="no layer has experts"):
        sparse(moe_layer_start_index=7)


def test_there_may_be_no_shared_experts():
    config = decode(sample("ernie4_5_moe", moe_num_shared_experts=0))
    assert config.blocks[1].mlp.shared is None
    assert FAMILIES["ernie4_5_moe"].encode(config)["moe_num_shared_experts"] == 0


def test_one_switch_for_biases_of_all_but_the_experts():
    for bias in (False, True):
        config = decode(sample("ernie4_5_moe", use_bias=bias))
        mixer, (dense, sparse) = config.blocks[1].mixer, (config.blocks[index].mlp for index in (0, 1))
        assert {config.head_bias, mixer.qkv_bias, mixer.out_bias, dense.bias, sparse.shared.bias} == {bias}
        assert not sparse.bias
        assert FAMILIES["ernie4_5_moe"].encode(config)["use_bias"] == bias
