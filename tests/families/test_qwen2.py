"""Qwen2: biases on queries, keys and values, and windows in the last layers."""

import eqx_decoders as ed
from eqx_decoders.families.qwen2 import MODELS
from eqx_decoders.layers.mask import Causal
from tests.families.samples import decode, mixers, sample, windows


def test_queries_keys_and_values_alone_have_biases():
    for config in (ed.get_config("qwen2.5-7b"), decode(sample("qwen2")), decode(sample("qwen2", attention_bias=False))):
        assert {(mixer.qkv_bias, mixer.out_bias, mixer.qk_norm) for mixer in mixers(config)} == {(True, False, None)}


def test_windows_begin_at_a_layer_and_have_to_be_switched_on():
    assert windows("qwen2", 3, sliding_window=7, max_window_layers=1) == [None] * 3
    assert windows("qwen2", 3, sliding_window=7, max_window_layers=1, use_sliding_window=True) == [None, 7, 7]
    assert windows("qwen2", 3, sliding_window=7, max_window_layers=0, use_sliding_window=True) == [7, 7, 7]
    assert windows("qwen2", 30, use_sliding_window=True) == [None] * 28 + [4096] * 2


def test_published_models_have_no_window_and_small_ones_tie_their_tables():
    for name in MODELS:
        config = ed.get_config(name)
        assert {(mixer.mask, mixer.rope.theta) for mixer in mixers(config)} == {(Causal(), 1e6)}
        assert config.tied == (name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"))
