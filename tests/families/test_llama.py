"""Published sizes: parameters counted to the last one, and the rotary settings of each generation."""

import dataclasses

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.mask import Causal
from eqx_decoders.layers.rope import Llama3Rope, Rope


PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
}
LLAMAS = (*PARAMETERS, "tiny")
SCALED = dict(theta=500_000.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
ROPES = {
    "tiny": Rope(theta=10_000.0),
    "llama2": Rope(theta=10_000.0),
    "llama3": Rope(theta=500_000.0),
    "llama3.1": Llama3Rope(factor=8.0, **SCALED),
    "llama3.2": Llama3Rope(factor=32.0, **SCALED),
    "llama3.3": Llama3Rope(factor=8.0, **SCALED),
}


@pytest.mark.parametrize("name", ed.list_models())
def test_every_listed_model_is_a_value(name):
    config = ed.get_config(name)
    assert config == ed.get_config(name)
    assert hash(config) == hash(ed.get_config(name))
    assert dataclasses.replace(config, vocab_size=config.vocab_size + 1) != config
    assert f"vocab_size={config.vocab_size}" in repr(config)
    assert ed.count_parameters(config) > 0


def test_names_are_sorted_and_complete():
    assert list(ed.list_models()) == sorted(set(ed.list_models()))
    assert set(LLAMAS) <= set(ed.list_models())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    assert ed.count_parameters(ed.get_config(name)) == PARAMETERS[name]


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


@pytest.mark.parametrize(
    "name, near",
    [("llama3-8B", "llama3-8b"), ("llama-3.1-70b", "llama3.1-70b"), ("llama2_13b", "llama2-13b"), ("Tiny", "tiny")],
)
def test_unknown_names_are_refused_with_the_nearest(name, near):
    with pytest.raises(ed.ConfigError, match=f"name='{name}' is not known. Did you mean '{near}'"):
        ed.get_config(name)
    with pytest.raises(ed.ConfigError, match=r"name='' is not known. Known: .*tiny"):
        ed.get_config("")
