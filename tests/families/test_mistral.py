"""Mistral: a window in every layer or in none."""

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.mask import Causal, SlidingWindow
from tests.families.samples import decode, mixers, sample, windows


def test_the_first_version_alone_has_a_window():
    def of(name):
        return {(mixer.rope.theta, mixer.mask) for mixer in mixers(ed.get_config(name))}

    assert of("mistral-7b") == {(1e6, Causal())}
    assert of("mistral-7b-v0.1") == {(1e4, SlidingWindow(4096))}


def test_all_layers_have_the_window_unless_it_is_null():
    assert windows("mistral", 2) == [4096, 4096]
    assert windows("mistral", 2, sliding_window=None) == [None, None]
    assert windows("mistral", 2, sliding_window=7) == [7, 7]
    assert windows("mistral", 2, sliding_window=7, layer_types=["sliding_attention"] * 2) == [7, 7]
    for types in (["full_attention", "sliding_attention"], ["full_attention"] * 2):
        with pytest.raises(ed.ConversionError, match="the same for all layers of a Mistral"):
            windows("mistral", 2, layer_types=types)


def test_keys_that_transformers_does_not_have_are_ignored():
    keys = dict(attention_bias=True, mlp_bias=True, use_sliding_window=False, max_window_layers=1)
    assert decode(sample("mistral", **keys)) == decode(sample("mistral"))
