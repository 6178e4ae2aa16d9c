"""Sizes, windows and biases, as `config.json` gives them to all families."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, mixers, sample


def windows(content) -> list[int | None]:
    return [getattr(mixer.mask, "size", None) for mixer in mixers(decode(content))]


def test_windows():
    plain = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")

    def of(kind, layers, **keys):
        content = sample(kind, *plain, num_hidden_layers=layers, **keys)
        return windows(content | dict(head_dim=12) if kind == "qwen2" else content)

    assert of("mistral", 2) == [4096, 4096]
    assert of("mistral", 2, sliding_window=None) == [None, None]
    assert of("mistral", 2, sliding_window=7) == [7, 7]
    assert of("qwen2", 3, sliding_window=7, max_window_layers=1) == [None] * 3
    assert of("qwen2", 3, sliding_window=7, max_window_layers=1, use_sliding_window=True) == [None, 7, 7]
    assert of("qwen2", 2, use_sliding_window=True) == [None, None]  # from layer 28 on
    assert of("gemma2", 3) == [4096, None, 4096]
    assert of("gemma3_text", 8, sliding_window=5) == [5, 5, 5, 5, 5, None, 5, 5]
    assert of("gemma3_text", 4, sliding_window=5, sliding_window_pattern=2) == [5, None, 5, None]
    assert of("olmo3", 5, sliding_window=5) == [5, 5, 5, None, 5]
    types = ["full_attention", "sliding_attention"]
    for kind in ("gemma2", "gemma3_text", "olmo3"):
        assert of(kind, 2, layer_types=types, sliding_window=3) == [None, 3]
    assert of("qwen3", 2, layer_types=types, sliding_window=3, use_sliding_window=True) == [None, 3]
    for keys in (dict(), dict(use_sliding_window=True)):
        with pytest.raises(ed.ConversionError, match="sliding_window is null or off"):
            of("qwen3", 2, layer_types=types, sliding_window=None, **keys)
    with pytest.raises(ed.ConversionError, match="layer_types has 2 entries, but there are 3 layers"):
        of("gemma2", 3, layer_types=types)
    with pytest.raises(ed.ConversionError, match="layer_types: chunked_attention is not known here"):
        of("gemma2", 1, layer_types=["chunked_attention"])
    with pytest.raises(ed.ConversionError, match="the same for all layers of a Mistral"):
        of("mistral", 2, layer_types=types)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo3"])
def test_attention_bias_is_that_of_all_four(kind):
    mixer = decode(sample(kind, attention_bias=True)).blocks[0].mixer
    assert (mixer.qkv_bias, mixer.out_bias) == (True, True)


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
