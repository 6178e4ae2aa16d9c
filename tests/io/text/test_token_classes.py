"""Normalization of tokens into classes."""

import pytest

from eqx_decoders.io.text.tokenizer import JsonTokenizer


tokenizers = pytest.importorskip("tokenizers")

from eqx_decoders.io.text.token_classes import token_classes  # noqa: E402


@pytest.fixture(scope="module")
def classes():
    """Return the classes of words. Words that are bytes are spelled in the alphabet of byte-level BPE."""
    words = ["<pad>", "Ġcat", "Cat", "CAT", "Ġ", "ĠĠ", "ĊĊ", "cÃ¡t", "Ã", "Ä", "dog", "ï¬ģ", "fi", "!"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<pad>"])
    table = token_classes(JsonTokenizer(inner))
    assert len(table.ids) == len(words)
    return dict(zip(words, table.ids.tolist(), strict=True)), table.count


def test_case_accents_and_spaces_are_ignored(classes):
    found, _ = classes
    assert found["Ġcat"] == found["Cat"] == found["CAT"] == found["cÃ¡t"]
    assert found["Ġ"] == found["ĠĠ"] == found["ĊĊ"]
    assert found["ï¬ģ"] == found["fi"]  # a ligature


def test_different_words_have_different_classes(classes):
    found, count = classes
    different = ["<pad>", "Cat", "Ġ", "Ã", "Ä", "dog", "fi", "!"]
    assert len({found[word] for word in different}) == len(different) == count


def test_classes_are_numbered_by_first_occurrence(classes):
    found, _ = classes
    firsts = list(dict.fromkeys(found.values()))
    assert firsts == list(range(len(firsts)))
