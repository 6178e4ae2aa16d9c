"""What the sparse families share: which layers have experts, and the rows of their tensors."""

import dataclasses

import numpy as np
import pytest
from einops import rearrange

import eqx_decoders as ed
from eqx_decoders.families import moe
from eqx_decoders.families.settings_table import value_at
from eqx_decoders.families.weight_rows import Part
from tests.compare import assert_array_equal
from tests.families.samples import decode, sample


MIXED = decode(sample("qwen3_moe", "mlp_only_layers", decoder_sparse_step=2))
DENSE = dataclasses.replace(MIXED, blocks=MIXED.blocks[:1])


def test_layers_with_and_without_experts():
    assert moe.sparse_layers(MIXED) == [1, 3]
    assert value_at(MIXED, "experts") == MIXED.blocks[1].mlp
    assert (value_at(MIXED, "mlp.mlp_dim"), value_at(ed.get_config("mixtral-8x7b"), "mlp.mlp_dim")) == (40, 14_336)
    assert moe.sparse_layers(DENSE) == []
    with pytest.raises(ed.ConversionError, match=r"DecoderConfig\.blocks: no layer has ExpertsConfig"):
        value_at(DENSE, "experts")
    with pytest.raises(ed.ConfigError, match="no layer has experts: check the settings"):
        moe.need_experts(DENSE)


def test_experts_that_share_a_tensor_have_their_gates_in_its_first_half():
    """transformers: `gate, up = linear(x, gate_up[expert]).chunk(2)`, and `linear(h, down[expert])`."""
    router, gate, up, down = moe.fused_experts("mlp.")
    assert (router.name, gate.name, down.name) == (
        "mlp.gate.weight",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    )
    stored = np.arange(3 * 8 * 5).reshape(3, 8, 5)
    for half, row in enumerate((gate, up)):
        assert row.part == Part(index=half, count=2, axis=1) and row.name == gate.name
        own = stored[:, 4 * half : 4 * half + 4]
        assert_array_equal(rearrange(own, row.pattern), np.swapaxes(own, 1, 2))
    stored = np.arange(3 * 5 * 4).reshape(3, 5, 4)
    assert_array_equal(rearrange(stored, down.pattern), np.swapaxes(stored, 1, 2))


def test_experts_with_tensors_of_their_own_are_matrices():
    stored = np.arange(20).reshape(4, 5)
    for row in moe.separate_experts("mlp."):
        assert_array_equal(rearrange(stored, row.pattern), stored.T)
