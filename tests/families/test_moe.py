"""What the sparse families share: which layers have experts, and the rows of their tensors."""

import dataclasses

import numpy as np
import pytest
from einops import rearrange

import eqx_decoders as ed
from eqx_decoders.families import moe
from eqx_decoders.families.weight_rows import Part
from tests.families.samples import decode, sample


MIXED = decode(sample("qwen3_moe", "mlp_only_layers", decoder_sparse_step=2))
DENSE = dataclasses.replace(MIXED, blocks=MIXED.blocks[:1])


def test_layers_with_and_without_experts():
    assert moe.sparse_layers(MIXED) == [1, 3]
    assert moe.experts_of(MIXED) == MIXED.blocks[1].mlp
    assert (moe.dense_dim(MIXED, default=7), moe.dense_dim(ed.get_config("mixtral-8x7b"), default=7)) == (40, 7)
    assert moe.sparse_layers(DENSE) == []
    with pytest.raises(ed.ConversionError, match=r"DecoderConfig\.blocks: no layer has experts"):
        moe.experts_of(DENSE)


def test_their_sizes_have_names_that_differ():
    written = moe.write_experts(MIXED, count="n_routed_experts", width="moe_intermediate_size")
    sizes = dict(n_routed_experts=6, moe_intermediate_size=12, num_experts_per_tok=2, hidden_act="silu")
    assert written == sizes


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
        np.testing.assert_array_equal(rearrange(own, row.pattern), np.swapaxes(own, 1, 2))
    stored = np.arange(3 * 5 * 4).reshape(3, 5, 4)
    np.testing.assert_array_equal(rearrange(stored, down.pattern), np.swapaxes(stored, 1, 2))


def test_experts_with_tensors_of_their_own_are_matrices():
    stored = np.arange(20).reshape(4, 5)
    for row in moe.separate_experts("mlp."):
        np.testing.assert_array_equal(rearrange(stored, row.pattern), stored.T)
