"""Llama: the blocks and rotary settings of each generation, and the two tiny models."""

import dataclasses

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.mask import Causal
from eqx_decoders.layers.rope import Llama3Rope, Rope


LLAMAS = ("tiny", *(name for name in ed.list_models() if name.startswith(("llama2-", "llama3"))))
SCALED = dict(theta=500_000.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
ROPES = {
    "tiny": Rope(theta=10_000.0),
    "llama2": Rope(theta=10_000.0),
    "llama3": Rope(theta=500_000.0),
    "llama3.1": Llama3Rope(factor=8.0, **SCALED),
    "llama3.2": Llama3Rope(factor=32.0, **SCALED),
    "llama3.3": Llama3Rope(factor=8.0, **SCALED),
}


def test_tiny_is_tiny():
    assert 4_500_000 < ed.count_parameters(ed.get_config("tiny")) < 5_500_000


def test_a_token_uses_as_much_of_tiny_moe_as_of_tiny():
    dense, sparse = ed.get_config("tiny"), ed.get_config("tiny-moe")
    experts = sparse.blocks[0].mlp
    assert experts.shared.mlp_dim + experts.num_experts_per_token * experts.mlp_dim == dense.blocks[0].mlp.mlp_dim
    blocks = tuple(dataclasses.replace(block, mlp=dense.blocks[0].mlp) for block in sparse.blocks)
    assert dataclasses.replace(sparse, blocks=blocks) == dense
    assert experts.router.selection_bias and experts.router.bias_update_rate > 0


@pytest.mark.parametrize("name", LLAMAS)
def test_blocks_are_one_run_of_llama_blocks(name):
    config = ed.get_config(name)
    block = config.blocks[0]
    assert ed.segments(config.blocks) == (((block,), len(config.blocks)),)
    assert block.mixer.rope == ROPES[name.split("-")[0]]
    assert type(block.mixer.rope) is type(ROPES[name.split("-")[0]])
    assert block.mixer.mask == Causal()
    assert block.mixer.num_heads * block.mixer.head_dim == config.embed_dim
    assert block.pre_mixer_norm == block.pre_mlp_norm == config.final_norm
    assert config.final_norm.eps == 1e-5
    assert config.tied == (name in ("llama3.2-1b", "llama3.2-3b", "tiny"))
