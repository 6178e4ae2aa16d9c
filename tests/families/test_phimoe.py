"""Phi-3.5-MoE: published files name a class of their own, and magnitudes of LongRoPE."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, mixers, sample


def test_features_of_a_head_are_read():
    """As of Phi-mini-MoE, whose heads are narrower than the stream divided by their number."""
    assert {mixer.head_dim for mixer in mixers(decode(sample("phimoe", head_dim=6)))} == {6}


def test_magnitudes_of_long_rope():
    content = sample("phimoe")
    table = content["rope_parameters"]
    (rope,) = {mixer.rope for mixer in mixers(decode(content))}
    assert (rope.attention_factor, rope.long_attention_factor, rope.keeps_short) == (1.1, 1.4, True)
    short = {key: value for key, value in table.items() if key != "long_mscale"}
    with pytest.raises(ed.ConversionError, match="long_mscale is missing"):
        decode(content | dict(rope_parameters=short))
    with pytest.raises(ed.ConversionError, match="say different things of short_mscale or long_mscale"):
        decode(content | dict(rope_scaling=table | dict(short_mscale=1.2)))
    with pytest.raises(ed.ConversionError, match="rope_type must be default or longrope"):
        decode(content | dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)))
