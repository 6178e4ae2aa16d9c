"""Phi-3: old files call LongRoPE by other names, and its length stands beside the table."""

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.rope import LongRope
from tests.families.samples import decode, mixers, sample


@pytest.mark.parametrize("word", ["longrope", "su", "yarn"])
def test_old_names_of_long_rope(word):
    new = decode(sample("phi3"))
    table = dict(sample("phi3")["rope_parameters"])
    scaling = dict(type=word, short_factor=table["short_factor"], long_factor=table["long_factor"])
    old = dict(rope_theta=table["rope_theta"], partial_rotary_factor=0.75, rope_scaling=scaling)
    assert decode(sample("phi3", "rope_parameters", **old)) == new
    assert all(isinstance(mixer.rope, LongRope) and mixer.rope.original_length == 5 for mixer in mixers(new))


@pytest.mark.parametrize("factors", ["short_factor", "long_factor"])
@pytest.mark.parametrize("bad", [[1.0, -1.0, 2.0], "many", [1.0, "2", 3.0]], ids=str)
def test_divisors_are_numbers_above_zero(factors, bad):
    table = sample("phi3")["rope_parameters"] | {factors: bad}
    with pytest.raises(ed.ConversionError, match=f"{factors} must be a list of numbers above 0"):
        decode(sample("phi3", rope_parameters=table))
