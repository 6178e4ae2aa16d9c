"""Olmo 3: windows in three of four layers, and YaRN in the others alone."""

import eqx_decoders as ed
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import Rope, YarnRope
from tests.families.samples import mixers


def test_the_full_layers_alone_are_stretched():
    for index, mixer in enumerate(mixers(ed.get_config("olmo3-7b"))):
        full = (index + 1) % 4 == 0
        assert mixer.rope == (YarnRope(theta=5e5, factor=8.0, original_length=8192) if full else Rope(theta=5e5))
        assert mixer.mask == (Causal() if full else SlidingWindow(4096))
