"""Incremental detokenization: the pieces add up to the text, and incomplete characters are held back."""

import itertools
import random

import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from eqx_decoders.serving.frontend.detokenizer import UNKNOWN, Detokenizer, StopStrings, TokenTexts, byte_letters
from tests.serving.servers import CHAT


TEXTS = [
    "hello world",
    "naïve café — 12€",
    "你好，世界",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "a\n\tb  c",
    "ก็ नमस्ते e\u0301",
    " leading",
    "\u0000\u007f",
    "𝔘",
]


def sentencepiece_tokenizer() -> JsonTokenizer:
    """Return a tokenizer like that of Llama 2: `▁` for spaces, and byte tokens for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁w", "▁wo", "he", "ll", "ld"]
    merges = [("▁", "a"), ("▁", "w"), ("▁w", "o"), ("h", "e"), ("l", "l"), ("l", "d")]
    model = models.BPE({word: at for at, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    inner = Tokenizer(model)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens(["<s>", "</s>"])
    return JsonTokenizer(inner, bos="<s>", eos="</s>")


@pytest.fixture(scope="module", params=["bytes", "bpe", "fixture", "spaced"])
def tokenizer(request):
    makers = {
        "bytes": ByteTokenizer,
        "bpe": lambda: train_bpe(TEXTS * 3, 320),
        "fixture": lambda: load_tokenizer(CHAT),
        "spaced": sentencepiece_tokenizer,
    }
    return makers[request.param]()


def pieces(tokenizer, ids, before=(), **options) -> list[str]:
    decoder = Detokenizer(tokenizer, before, **options)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_equal_the_text_and_contain_complete_characters(tokenizer, text):
    ids = tokenizer.encode(text).tolist()
    found = pieces(tokenizer, ids)
    assert "".join(found) == tokenizer.decode(ids) and found[-1] == ""
    assert not any(UNKNOWN in piece for piece in found)


@pytest.mark.parametrize("text", TEXTS)
def test_answer_continues_any_prefix_of_a_text(tokenizer, text):
    """The prefix and the pieces equal the text, also if the prefix ends within a character or a word."""
    ids = tokenizer.encode(text).tolist()
    for size in range(1, len(ids)):
        before = Detokenizer(tokenizer)
        shown = "".join(before.push(token) for token in ids[:size])
        assert shown + "".join(pieces(tokenizer, ids[size:], ids[:size])) == tokenizer.decode(ids), size


def test_special_tokens_have_text_only_on_request():
    tokenizer = load_tokenizer(CHAT)
    ids = [256, *tokenizer.encode("né").tolist(), 257, *tokenizer.encode("é").tolist()]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "néé"
    assert "".join(pieces(tokenizer, ids, special=True)) == "<|begin|>né<|end|>é"


def test_word_after_a_special_token_keeps_its_space():
    tokenizer = sentencepiece_tokenizer()
    word = tokenizer.encode("world").tolist()
    ids = [*tokenizer.encode("hello").tolist(), 2, *word]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "hello world"
    assert "".join(pieces(tokenizer, word, before=ids[:3])) == " world"
    assert "".join(pieces(tokenizer, word)) == "world"


@settings(max_examples=60)
@given(st.binary(max_size=30))
def test_invalid_utf_8_is_shown_as_by_decode(content):
    ids = list(content)
    assert "".join(pieces(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids)


def test_long_invalid_utf_8_is_shown_and_not_stored():
    decoder = Detokenizer(ByteTokenizer())
    shown = sum(len(decoder.push(0xBF)) for _ in range(1000))
    assert shown > 960 and len(decoder._ids) <= 33


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_match_the_tokenizers_package(text):
    from tokenizers.decoders import DecodeStream

    tokenizer = load_tokenizer(CHAT)
    ids, stream = tokenizer.encode(text).tolist(), DecodeStream(skip_special_tokens=True)
    own, other = "", ""
    for piece, token in zip(pieces(tokenizer, ids), ids, strict=False):
        own, other = own + piece, other + (stream.step(tokenizer._inner, token) or "")
        assert own.startswith(other)  # the package holds back complete tokens that end with a part of a character
    assert own == other == text


# --- stop strings -----------------------------------------------------------------------------------------------------


def cut_at_stop_string(text: str, stops, include: bool = False) -> tuple[str, str | None]:
    """Return the text before the first stop string, found character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def shown(parts, stops, include: bool = False) -> tuple[list[str], str | None]:
    search = StopStrings(stops, include=include)
    return [*(search.push(part) for part in parts), search.flush()], search.found


STOPS = [["ab"], ["aab"], ["b", "ab"], ["abc", "bc"], ["aba", "b"], ["\n\n", "a\n"], ["aaaa"], ["ab", "cab", "bcab"]]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("include", [False, True])
def test_text_ends_at_the_first_stop_string_for_any_pieces(stops, include):
    random_ = random.Random(0)
    for _ in range(25):
        text = "".join(random_.choices("aabbc\n", k=random_.randrange(1, 9)))
        for at in itertools.product([0, 1], repeat=len(text) - 1):
            places = [0, *(number + 1 for number, one in enumerate(at) if one), len(text)]
            parts = [text[begin:end] for begin, end in itertools.pairwise(places)]
            found, stop = shown(parts, stops, include)
            assert ("".join(found), stop) == cut_at_stop_string(text, stops, include), (parts, stops)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_that_cannot_start_a_stop_string_is_shown_at_once(text, stops):
    search, sent, seen = StopStrings(stops), "", ""
    for letter in text:
        sent += search.push(letter)
        seen += letter
        if search.found is not None:
            break
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        longest = max(
            n
            for n in range(len(seen) + 1)
            for stop in stops
            if len(stop) > n and stop.startswith(seen[len(seen) - n :])
        )
        assert len(held) == longest


def test_shows_nothing_after_a_stop_string():
    search = StopStrings(["x"])
    assert [search.push(part) for part in ("ax", "b", "x")] == ["a", "", ""] and search.flush() == ""
    assert StopStrings([]).push("abc") == "abc"


# --- single tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_match_their_text(tokenizer, text):
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(text).tolist()
    whole = b"".join(texts.content(token) for token in ids)
    assert whole.lstrip(b" ") == text.encode().lstrip(b" ")  # some tokenizers prepend a space to a text
    for token in ids:
        assert UNKNOWN in texts.text(token) or texts.key(token) == texts.text(token)


def test_tokens_of_partial_characters_have_names():
    texts = TokenTexts(ByteTokenizer())
    assert [texts.key(byte) for byte in "é".encode()] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert texts.text(0xC3) == UNKNOWN and texts.content(257) == b""
    assert sorted(byte_letters().values()) == list(range(256))


def test_offsets_of_tokens_after_invalid_bytes():
    text, pieces, offsets = Detokenizer(ByteTokenizer()), "", []
    for token in b"a\x9fb\xc3\xa9c\xe2\x82d":
        piece, start = text.push_with_offset(token)
        offsets.append(len(pieces) + start)
        pieces += piece
    assert pieces + text.flush() == "a\ufffdb\xe9c\ufffdd"
    # the bytes of a character share its offset
    assert offsets == [0, 1, 2, 3, 3, 4, 5, 5, 6]
