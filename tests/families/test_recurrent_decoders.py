"""Mamba-2 and Bamba: what their sizes must be, and what is refused."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, mixers, sample


def test_heads_may_follow_from_the_width():
    content = sample("bamba")
    assert decode(content | {"mamba_d_head": "auto"}) == decode(content)
    assert mixers(decode(content))[0].value_dim == content["mamba_d_head"]


@pytest.mark.parametrize(
    "kind, keys, sentence",
    [
        ("mamba2", dict(head_dim=9), "num_heads=6 x head_dim=9 must be expand x hidden_size=48"),
        ("mamba2", dict(use_bias=True), "use_bias=true changes what the model computes"),
        ("mamba2", dict(hidden_act="gelu"), "hidden_act=gelu changes what the model computes"),
        ("bamba", dict(mamba_d_head=9), "mamba_n_heads=6 x mamba_d_head=9 must be mamba_expand x hidden_size=48"),
        ("bamba", dict(mamba_proj_bias=True), "mamba_proj_bias=true changes what the model computes"),
        ("bamba", dict(attn_layer_indices=[]), "no layer has attention: check attn_layer_indices"),
        ("bamba", dict(rope_parameters=None, partial_rotary_factor=1.0), "always rotates half of a head"),
        ("bamba", dict(attn_rotary_emb=8), "attn_rotary_emb=8"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(kind, keys, sentence):
    with pytest.raises(ed.ConversionError, match=sentence):
        decode(sample(kind, **keys))
