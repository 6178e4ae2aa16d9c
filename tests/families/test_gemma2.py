"""Gemma 2: windows, scales and soft caps."""

import eqx_decoders as ed
from eqx_decoders.layers.mask import Causal, SlidingWindow
from tests.families.samples import decode, mixers, sample


def test_every_other_layer_has_a_window_and_scores_their_own_scale():
    assert [mixer.mask for mixer in mixers(ed.get_config("gemma2-2b"))] == [SlidingWindow(4096), Causal()] * 13
    assert {mixer.query_scale for mixer in mixers(ed.get_config("gemma2-27b"))} == {144**-0.5}


def test_soft_caps_are_on_unless_null():
    keys = ("final_logit_softcapping", "attn_logit_softcapping")
    config = decode(sample("gemma2", *keys))
    assert (config.logit_soft_cap, config.blocks[0].mixer.soft_cap) == (30.0, 50.0)
    config = decode(sample("gemma2", **dict.fromkeys(keys)))
    assert (config.logit_soft_cap, config.blocks[0].mixer.soft_cap) == (None, None)
