"""Sizes, windows and biases, as `config.json` gives them to all families."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, sample, windows


def test_windows():
    assert windows("gemma2", 3) == [4096, None, 4096]
    assert windows("gemma3_text", 8, sliding_window=5) == [5, 5, 5, 5, 5, None, 5, 5]
    assert windows("gemma3_text", 4, sliding_window=5, sliding_window_pattern=2) == [5, None, 5, None]
    assert windows("olmo3", 5, sliding_window=5) == [5, 5, 5, None, 5]
    types = ["full_attention", "sliding_attention"]
    for kind in ("gemma2", "gemma3_text", "olmo3", "gpt_oss"):
        assert windows(kind, 2, layer_types=types, sliding_window=3) == [None, 3]
    with pytest.raises(ed.ConversionError, match="layer_types has 2 entries, but there are 3 layers"):
        windows("gemma2", 3, layer_types=types)
    with pytest.raises(ed.ConversionError, match="layer_types: chunked_attention is not known here"):
        windows("gemma2", 1, layer_types=["chunked_attention"])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo3", "qwen3_moe", "gpt_oss"])
def test_attention_bias_is_that_of_all_four(kind):
    for bias in (True, False):
        mixer = decode(sample(kind, attention_bias=bias)).blocks[0].mixer
        assert (mixer.qkv_bias, mixer.out_bias) == (bias, bias)


def test_sizes_that_have_defaults():
    def shape(kind, *missing, **keys):
        mixer = decode(sample(kind, *missing, **keys)).blocks[0].mixer
        return mixer.num_kv_heads, mixer.head_dim

    both = ("num_key_value_heads", "head_dim")
    sizes = dict(num_attention_heads=4, hidden_size=32)
    assert shape("llama", *both, **sizes) == (4, 8)
    assert shape("olmo3", *both, **sizes) == (4, 8)
    assert shape("mistral", *both, **sizes | dict(num_attention_heads=8)) == (8, 4)
    assert shape("qwen2", "head_dim", **sizes, num_key_value_heads=2) == (2, 8)
    assert shape("qwen3", "head_dim", **sizes, num_key_value_heads=2) == (2, 128)
    assert shape("gemma2", *both, **sizes) == (4, 256)
    assert shape("llama", **sizes, head_dim=None, num_key_value_heads=None) == (4, 8)
