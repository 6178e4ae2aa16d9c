"""Decoders with recurrences, with attention among them or not: what their sizes must be, and what is refused."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.settings_table import first_layer
from tests.families.samples import decode, mixers, sample


def test_heads_may_follow_from_the_width():
    content = sample("bamba")
    assert decode(content | {"mamba_d_head": "auto"}) == decode(content)
    assert mixers(decode(content))[0].value_dim == content["mamba_d_head"]


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_channels_are_the_width_that_is_given(kind):
    """Whatever `expand` says; without one they follow from that. The rank follows from the width of the stream."""
    content = sample(kind, "time_step_rank", "intermediate_size")
    (mixer, _) = mixers(decode(content | {"expand": 16, "intermediate_size": 40}))
    assert (mixer.channels, mixer.step_rank) == (40, 2)
    (mixer, _) = mixers(decode(content | {"expand": 3, "hidden_size": 36, "time_step_rank": "auto"}))
    assert (mixer.channels, mixer.step_rank) == (108, 3)


@pytest.mark.parametrize("count, period, offset, layers", [(6, 3, 1, [1, 4]), (5, 5, 2, [2])])
def test_layers_with_attention_and_experts_are_found_again(count, period, offset, layers):
    keys = dict(attn_layer_period=period, attn_layer_offset=offset)
    keys |= dict(expert_layer_period=period, expert_layer_offset=offset)
    config = decode(sample("jamba", num_hidden_layers=count, **keys))
    assert [i for i, block in enumerate(config.blocks) if not hasattr(block.mixer, "channels")] == layers
    assert [i for i, block in enumerate(config.blocks) if hasattr(block.mlp, "router")] == layers
    assert FAMILIES["jamba"].encode(config).items() >= keys.items()


def test_one_expert_is_an_mlp():
    config = decode(sample("jamba", num_experts=1))
    assert not any(hasattr(block.mlp, "router") for block in config.blocks)
    assert decode(FAMILIES["jamba"].encode(config)) == config


@pytest.mark.parametrize(
    "embed, factor, multiple, wanted", [(64, 2.667, 64, 192), (64, 2.667, 1, 170), (96, 2.0, 64, 192), (48, 0.1, 8, 8)]
)
def test_features_of_an_mlp_are_rounded_up(embed, factor, multiple, wanted):
    """xLSTM's, in whole multiples; a share that is no whole number of features is rounded down."""
    keys = dict(hidden_size=embed, embedding_dim=embed, ffn_proj_factor=factor, ffn_round_up_to_multiple_of=multiple)
    config = decode(sample("xlstm", **keys))
    assert config.blocks[0].mlp.mlp_dim == wanted
    assert decode(FAMILIES["xlstm"].encode(config)) == config


def test_sizes_that_follow_from_the_stream():
    """RWKV's, where nothing is said; the last norm has an `eps` of its own."""
    config = decode(sample("rwkv", attention_hidden_size=None, intermediate_size=None, layer_norm_epsilon=0.1))
    block = config.blocks[0]
    assert (block.mixer.channels, block.mlp.mlp_dim) == (config.embed_dim, 4 * config.embed_dim)
    assert (config.embedding_norm.eps, block.pre_mlp_norm.eps, config.final_norm.eps) == (0.1, 0.1, 1e-5)


@pytest.mark.parametrize("kinds, written", [("raara", "raa"), ("ra", "ra"), ("aaaaa", "a"), ("rra", "rra")])
def test_a_cycle_of_layers_is_cut_off(kinds, written):
    """RecurrentGemma's; `intermediate_size` counts gate and up, and an odd one is rounded down."""
    kinds, written = ([dict(r="recurrent", a="attention")[kind] for kind in word] for word in (kinds, written))
    config = decode(sample("recurrent_gemma", block_types=kinds, num_hidden_layers=5, intermediate_size=37))
    assert ["attention" if hasattr(x, "mask") else "recurrent" for x in mixers(config)] == (kinds * 5)[:5]
    keys = FAMILIES["recurrent_gemma"].encode(config)
    assert (keys["block_types"], keys["intermediate_size"], config.blocks[0].mlp.mlp_dim) == (written, 36, 18)


BIASED = {
    "mamba2": "use_bias",
    "bamba": "mamba_proj_bias",
    "granitemoehybrid": "mamba_proj_bias",
    "nemotron_h": "use_bias",
}


@pytest.mark.parametrize("kind", BIASED)
def test_both_projections_of_mamba2_have_a_bias_or_none(kind):
    config = decode(sample(kind, **{BIASED[kind]: True}))
    assert first_layer(config, "mamba").in_bias and first_layer(config, "mamba").out_bias
    assert decode(FAMILIES[kind].encode(config)) == config
    assert not first_layer(decode(sample(kind)), "mamba").out_bias


def test_multipliers_of_falcon_h1():
    """Those that are missing are 1."""
    keys = [key for key in sample("falcon_h1") if key.endswith(("_multiplier", "_multipliers"))]
    assert len(keys) == 9
    config, mlp = decode(plain := sample("falcon_h1", *keys)), dict(mlp_multipliers=[1.0, 1.0])
    assert config == decode(plain | dict.fromkeys(keys) | mlp)
    assert first_layer(config, "attention").key_scale == 1.0
    assert {*(each.input_scale for each in config.blocks[0].mixer.mixers), config.logit_divisor} == {1.0}
    norms = [(False, False, None), (True, False, "after_gate"), (True, True, "before_gate")]
    for flag, before, norm in norms:
        some = decode(sample("falcon_h1", mamba_rms_norm=flag, mamba_norm_before_gate=before))
        assert first_layer(some, "mamba").norm == norm and decode(FAMILIES["falcon_h1"].encode(some)) == some


@pytest.mark.parametrize(
    "kind, keys, sentence",
    [
        ("mamba2", dict(head_dim=9), "num_heads=6 x head_dim=9 must be expand x hidden_size=48"),
        ("mamba2", dict(hidden_act="gelu"), "hidden_act=gelu is not supported"),
        ("bamba", dict(mamba_d_head=9), "mamba_n_heads=6 x mamba_d_head=9 must be mamba_expand x hidden_size=48"),
        ("falcon_h1", dict(mamba_d_ssm=49), "mamba_n_heads=6 x mamba_d_head=8 must be mamba_d_ssm=49"),
        ("falcon_h1", dict(mamba_d_ssm=None, mamba_expand=3), "must be mamba_d_ssm=72"),
        ("falcon_h1", dict(ssm_multipliers=[1.0, 2.0]), "ssm_multipliers must be a list of 5 numbers"),
        ("falcon_h1", dict(mlp_multipliers=[1.0, 0.0]), r"mlp_multipliers\[1\]=0.0 must be a finite number above 0"),
        ("bamba", dict(attn_layer_indices=[]), "no layer has attention: check attn_layer_indices"),
        ("bamba", dict(rope_parameters=None, partial_rotary_factor=1.0), "always rotates half of a head"),
        ("bamba", dict(attn_rotary_emb=8), "attn_rotary_emb=8"),
        ("mamba", dict(hidden_act="gelu"), "hidden_act=gelu is not supported"),
        ("mamba", dict(mixer_rms_eps=1e-6), "mixer_rms_eps"),
        ("falcon_mamba", dict(time_step_rank="half"), "time_step_rank"),
        ("jamba", dict(attn_layer_offset=3), "attn_layer_offset=3 must be below attn_layer_period=3"),
        ("jamba", dict(attn_layer_period=9, attn_layer_offset=8), "no layer has attention: check attn_layer_offset"),
        ("jamba", dict(sliding_window=5), "sliding_window=5 is not supported"),
        ("recurrent_gemma", dict(block_types=["recurrent"]), "no layer has attention: check block_types"),
        ("recurrent_gemma", dict(block_types=["attention", "mamba"]), "block_types: mamba is not known here"),
        ("xlstm", dict(use_bias=True), "use_bias=true is not supported"),
        ("xlstm", dict(weight_mode="fused"), "weight_mode=fused is not supported"),
        ("xlstm", dict(gate_soft_cap=50.0), "gate_cap=50.0 must be a finite number above 0 and of at most 40"),
        ("xlstm", dict(v_dim_factor=0.1), "hidden_size x v_dim_factor=6 must be a multiple of num_heads=4"),
        ("xlstm", dict(num_blocks=3), "num_blocks=3 and num_hidden_layers=1 are the same setting"),
        ("rwkv", dict(time_mix_extra_dim=32), "time_mix_extra_dim"),
        ("recurrent_gemma", dict(lru_width=23), "lru_width=23 must be a multiple of num_attention_heads=2"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(kind, keys, sentence):
    with pytest.raises(ed.ConversionError, match=sentence):
        decode(sample(kind, **keys))
