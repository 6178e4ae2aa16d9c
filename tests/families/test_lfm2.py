"""LFM2: the features of an MLP are those that the file says, or two thirds of it in whole multiples."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, sample


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (dict(), 8192),
        (dict(block_multiple_of=1000), 9000),
        (dict(block_ffn_dim_multiplier=1.5), 12_288),
        (dict(block_ffn_dim_multiplier=None), 8192),
        (dict(block_auto_adjust_ff_dim=False), 12_288),
        (dict(block_ff_dim=6000), 4096),
    ],
    ids=str,
)
def test_features_of_an_mlp(keys, wanted):
    own = {} if "block_ff_dim" in keys else dict(intermediate_size=12_288)
    missing = ("block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier", "intermediate_size")
    config = decode(sample("lfm2", *missing, **own, **keys))
    assert {block.mlp.mlp_dim for block in config.blocks} == {wanted}


def test_there_is_attention_somewhere():
    with pytest.raises(ed.ConversionError, match="no layer has attention"):
        decode(sample("lfm2", layer_types=["conv", "conv"], num_hidden_layers=2))
    old = decode(sample("lfm2", "layer_types", full_attn_idxs=[1], num_hidden_layers=2))
    assert [type(block.mixer).__name__ for block in old.blocks] == ["GatedConvolutionConfig", "AttentionConfig"]
