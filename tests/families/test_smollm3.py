"""SmolLM3: which layers have rotary embeddings, and which have windows."""

import pytest

import eqx_decoders as ed
from tests.families.samples import decode, mixers, sample, windows


def rotated(*missing, **keys) -> list[bool]:
    return [mixer.rope is not None for mixer in mixers(decode(sample("smollm3", *missing, **keys)))]


def test_a_one_in_no_rope_layers_is_a_layer_with_rope():
    assert rotated() == [True, False, True, False]
    assert rotated("no_rope_layers") == [True, True, True, False]
    assert rotated("no_rope_layers", no_rope_layer_interval=2) == [True, False, True, False]
    published = mixers(ed.get_config("smollm3-3b"))
    assert [index for index, mixer in enumerate(published) if mixer.rope is None] == list(range(3, 36, 4))


def test_layers_without_rope_have_the_window():
    assert windows("smollm3", 4, use_sliding_window=True, sliding_window=7) == [None, 7, None, 7]
    assert windows("smollm3", 4, use_sliding_window=False, sliding_window=7) == [None] * 4
    assert windows("smollm3", 4, use_sliding_window=True) == [None] * 4
    with pytest.raises(ed.ConversionError, match="sliding_window is null or off"):
        windows("smollm3", 4, sliding_window=7, layer_types=["sliding_attention"] * 4)
