"""Qwen3: normalised queries and keys, and Qwen2's windows."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families.qwen3 import MODELS
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import RMSNormConfig
from tests.families.samples import decode, mixers, sample, windows


def test_the_thinking_one_has_its_own_theta():
    for name in MODELS:
        theta = 5e6 if name == "qwen3-4b-thinking-2507" else 1e6
        assert {mixer.rope.theta for mixer in mixers(ed.get_config(name))} == {theta}


def test_each_head_is_normalised_before_the_rotation():
    config = decode(sample("qwen3", rms_norm_eps=1e-3))
    assert {mixer.qk_norm for mixer in mixers(config)} == {
        QKNorm(norm=RMSNormConfig(eps=1e-3), over="head", when="before_rope")
    }
    assert {(mixer.qkv_bias, mixer.out_bias) for mixer in mixers(config)} == {(False, False)}


def test_windows_must_be_switched_on():
    types = ["full_attention", "sliding_attention"]
    assert windows("qwen3", 2, layer_types=types, sliding_window=3, use_sliding_window=True) == [None, 3]
    assert windows("qwen3", 2, sliding_window=3, use_sliding_window=True, max_window_layers=1) == [None, 3]
    for keys in (dict(), dict(use_sliding_window=True)):
        with pytest.raises(ed.ConversionError, match="sliding_window is null or off"):
            windows("qwen3", 2, layer_types=types, sliding_window=None, **keys)
