"""Gemma 3: windows in five of six layers, and a rotary embedding for each kind."""

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import LinearRope, Rope
from tests.families.samples import mixers


@pytest.mark.parametrize(
    "name, window, rope",
    [("gemma3-1b", 512, Rope(theta=1e6)), ("gemma3-4b", 1024, LinearRope(theta=1e6, factor=8.0))],
)
def test_layers_with_a_window_have_their_own_rope(name, window, rope):
    for index, mixer in enumerate(mixers(ed.get_config(name))):
        local = (index + 1) % 6 != 0
        assert mixer.mask == (SlidingWindow(window) if local else Causal())
        assert mixer.rope == (Rope(theta=10_000.0) if local else rope)


def test_scales_and_segments():
    assert {mixer.query_scale for mixer in mixers(ed.get_config("gemma3-27b"))} == {168**-0.5}
    config = ed.get_config("gemma3-4b")
    assert len(ed.segments(config.blocks)) == 2  # 34 layers: five times six, and four that are left
    assert config.embedding_scale == 2560**0.5
