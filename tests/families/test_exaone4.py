"""EXAONE 4: full layers have rotary embeddings only where no layer may have a window."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from tests.families.samples import WINDOW_KEYS, decode, mixers, sample, windows


def rotated(**keys) -> list[bool]:
    config = decode(sample("exaone4", *WINDOW_KEYS, num_hidden_layers=4, **keys))
    assert FAMILIES["exaone4"].decode(FAMILIES["exaone4"].encode(config))[0] == config
    return [mixer.rope is not None for mixer in mixers(config)]


def test_full_layers_have_no_rope_beside_windows():
    assert rotated() == [True, True, True, False]
    assert rotated(sliding_window=7, sliding_window_pattern=2) == [True, False, True, False]
    assert rotated(sliding_window=None) == [True] * 4
    assert {mixer.rope is None for mixer in mixers(ed.get_config("exaone4-1.2b"))} == {False}


def test_a_size_alone_takes_rope_from_full_layers():
    types = ["full_attention"] * 4
    config = decode(sample("exaone4", *WINDOW_KEYS, num_hidden_layers=4, sliding_window=7, layer_types=types))
    assert {mixer.rope for mixer in mixers(config)} == {None}


def test_a_pattern_in_letters_needs_the_types_of_the_layers():
    """As published, beside them; alone transformers doesn't read it."""
    types = ["sliding_attention"] * 3 + ["full_attention"]
    keys = dict(sliding_window=7, sliding_window_pattern="LLLG")
    assert windows("exaone4", 4, layer_types=types, **keys) == [7, 7, 7, None]
    with pytest.raises(ed.ConversionError, match="sliding_window_pattern=LLLG"):
        windows("exaone4", 4, **keys)
