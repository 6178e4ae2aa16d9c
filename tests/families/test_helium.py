"""Helium: a square output projection without a bias."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, mixers, sample


def test_biases_are_those_of_queries_keys_and_values():
    on, off = (mixers(decode(sample("helium", attention_bias=flag)))[0] for flag in (True, False))
    assert (on.qkv_bias, on.out_bias, off.qkv_bias, off.out_bias) == (True, False, False, False)


def test_heads_are_as_wide_as_the_stream():
    with pytest.raises(ed.ConversionError, match="num_attention_heads x head_dim must be hidden_size"):
        decode(sample("helium", head_dim=16))
