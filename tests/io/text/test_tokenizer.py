"""Tokenizers: every text round-trips, and names of special tokens in it are encoded as text."""

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.errors import ConfigError, ConversionError, DataError
from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, train_bpe
from tests.compare import assert_array_equal
from tests.errors import refused


TEXTS = [
    "def f(x):\n    return x + 1\n" * 5,
    "the cat, the hat; naïve café 東京 🙂🙂 the end\r\n\t" * 5,
    "1234 5678 " * 9,
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "bytes" else bpe


@pytest.mark.slow
@given(text=st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_random_texts_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and isinstance(tokenizer, Tokenizer)
    assert np.all((ids >= 0) & (ids < tokenizer.vocab_size))
    assert tokenizer.decode(ids) == text
    assert not np.isin(ids, [tokenizer.bos_id, tokenizer.eos_id]).any()


@pytest.mark.parametrize(
    "text",
    ["", "\x00", "\r\n", "\ufeffa", "a<|endoftext|>b", "\ufffd", "👩‍👩‍👧 é é", " " * 50, TEXTS[1]],
    ids=["empty", "NUL", "line break", "BOM", "special name", "replacement", "joined emoji", "spaces", "long"],
)
def test_unusual_texts_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (many,) = tokenizer.encode_many([text])
    assert_array_equal(many, tokenizer.encode(text))


def test_bpe_merges_and_fills_its_vocabulary(bpe):
    assert bpe.vocab_size == 300 and bpe.bos_id == bpe.eos_id == 0
    assert len(bpe.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])


def test_special_names_are_text_unless_asked_for(bpe):
    assert bpe.eos_id not in bpe.encode("a<|endoftext|>b")
    assert list(bpe.encode("a<|endoftext|>b", special=True)).count(bpe.eos_id) == 1
    assert bpe.eos_id not in bpe.encode("a<|endoftext|>b"), "the choice must not stick"


def test_special_names_are_text_for_a_fresh_tokenizer():
    fresh = train_bpe(TEXTS, 260)
    assert fresh.eos_id not in fresh.encode_many(["a<|endoftext|>b"])[0]


def test_special_and_broken_ids_decode():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([tokenizer.bos_id, 104, 105, tokenizer.eos_id, tokenizer.pad_id]) == "hi"
    assert tokenizer.decode([104, 0xFF, 105, 0xE6]) == "h\ufffdi\ufffd"


def test_lone_surrogates_are_refused(tokenizer):
    with refused(DataError, "surrogate", "2"):
        tokenizer.encode("ab\ud800")


def test_bpe_is_deterministic(bpe):
    assert train_bpe(TEXTS, 300).content_hash == bpe.content_hash != train_bpe(TEXTS[:2], 300).content_hash
    with refused(ConfigError, "vocab_size=256", "257"):
        train_bpe(TEXTS, 256)


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(tokenizer) and again.content_hash == tokenizer.content_hash
    assert (again.vocab_size, again.bos_id, again.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    assert_array_equal(again.encode(TEXTS[1]), tokenizer.encode(TEXTS[1]))
    assert not list(tmp_path.glob("*.partial"))


def inner_tokenizer(*special):
    from tokenizers import Tokenizer as Inner, models

    inner = Inner(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    inner.add_special_tokens(list(special))
    return inner


@pytest.mark.parametrize(
    "settings, bos, eos",
    [
        (None, "<s>", "</s>"),
        ({"bos_token": "<a>", "eos_token": {"content": "<b>"}}, "<a>", "<b>"),
        ({"bos_token": None}, None, "</s>"),
    ],
    ids=["no settings", "names", "no bos"],
)
def test_special_tokens_are_found(tmp_path, settings, bos, eos):
    inner = inner_tokenizer("<s>", "</s>", "<a>", "<b>")
    inner.save(str(tmp_path / "tokenizer.json"))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for spec in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        found = load_tokenizer(spec)
        assert found.bos_id == (None if bos is None else inner.token_to_id(bos))
        assert found.eos_id == inner.token_to_id(eos)
        assert found.vocab_size == 6


def test_stored_truncation_and_padding_are_ignored(bpe, tmp_path):
    bpe.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    from tokenizers import Tokenizer as Inner

    inner = Inner.from_file(str(file))
    inner.enable_truncation(4)
    inner.enable_padding(length=10)
    inner.save(str(file))
    again = load_tokenizer(file)
    assert again.decode(again.encode(TEXTS[0])) == TEXTS[0]
    assert len(again.encode("a")) == 1


def test_missing_and_malformed_files_are_refused(tmp_path):
    with refused(DataError, "'nowhere'", "'bytes'"):
        load_tokenizer("nowhere")
    with refused(DataError, tmp_path, "tokenizer.json"):
        load_tokenizer(tmp_path)
    file, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    file.write_text("{}")
    with refused(DataError, file):
        load_tokenizer(tmp_path)
    inner_tokenizer("<s>").save(str(file))
    config.write_text('{"eos_token": "<gone>"}')
    with refused(DataError, "eos_token='<gone>'", "added_tokens.json"):
        load_tokenizer(tmp_path)
    config.write_text("[1]")
    with refused(DataError, config, "JSON"):
        load_tokenizer(tmp_path)


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(ImportError, "'tokenizers'", "[train]"):
        train_bpe(TEXTS, 300)


# --- published directories --------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).parents[2] / "fixtures" / "chat_llama"


# names an unlisted token, which makes the package panic during encoding
UNLISTED_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def published(folder: Path, name: str = "tokenizer.json", **edit) -> Path:
    """A copy of a published tokenizer with changed keys in one of its files; Ellipsis removes one."""
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        content = json.loads((PUBLISHED / file).read_text()) | (edit if file == name else {})
        (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def test_a_published_tokenizer_encodes_as_in_transformers():
    tokenizer = load_tokenizer(PUBLISHED)
    assert isinstance(tokenizer, JsonTokenizer) and (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    texts = json.loads((PUBLISHED / "rendered.json").read_text())["texts"]
    assert len(texts) > 5
    for one in texts:
        assert tokenizer.encode(one["text"], special=True).tolist() == one["ids"]
        assert tokenizer.encode_prompt(one["text"]).tolist() == one["ids_with_special"]
        assert tokenizer.decode(one["ids_with_special"]) == one["decoded_without_special"]
    assert 258 not in tokenizer.encode("<|user|>"), "the choice must not stick"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_links_out_of_the_directory_are_refused(tmp_path, name):
    (tmp_path / "model").mkdir()
    folder = published(tmp_path / "model")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with refused(ConversionError, folder / name):
        load_tokenizer(folder)


def test_links_within_the_directory_are_read(tmp_path):
    folder = published(tmp_path)
    (folder / "tokenizer.json").rename(folder / "other.json")
    (folder / "tokenizer.json").symlink_to("other.json")
    assert load_tokenizer(folder).eos_id == 257


def test_the_links_of_a_downloaded_repository_are_read(tmp_path):
    repository = tmp_path / "models--org--name"
    for part in ("blobs", "snapshots/abc"):
        (repository / part).mkdir(parents=True)
    published(repository / "blobs")
    for file in (repository / "blobs").iterdir():
        (repository / "snapshots/abc" / file.name).symlink_to(f"../../blobs/{file.name}")
    assert load_tokenizer(repository / "snapshots/abc").eos_id == 257


@pytest.mark.parametrize(
    "edit, named",
    [
        ({"model": ...}, "tokenizer.json"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "`-1`"),
        ({"added_tokens": 3}, "`3`"),
        ({"version": "9"}, "'9'"),
        ({"post_processor": UNLISTED_TOKEN}, "tokenizer.json"),
    ],
    ids=["no model", "negative id", "added_tokens", "version", "unlisted token"],
)
def test_malformed_tokenizer_files_are_refused(tmp_path, edit, named):
    with refused(DataError, tmp_path / "tokenizer.json", named):
        load_tokenizer(published(tmp_path, **edit))


@pytest.mark.parametrize("token", [["<|end|>"], {"content": 3}], ids=["list", "number"])
def test_special_tokens_that_are_not_text_are_refused(tmp_path, token):
    with refused(ConversionError, f"eos_token={token}"):
        load_tokenizer(published(tmp_path, "tokenizer_config.json", eos_token=token))


@pytest.mark.parametrize(
    "content, named",
    [
        (b"", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"a": 1', "JSON"),
        (b"\xff", "0xff"),
        (b" " * 10_000_001, "10,000,001"),
    ],
    ids=["empty", "nested", "cut", "no UTF-8", "too long"],
)
def test_malformed_settings_are_refused(tmp_path, content, named):
    file = published(tmp_path) / "tokenizer_config.json"
    file.write_bytes(content)
    with refused(DataError, file, named):
        load_tokenizer(tmp_path)


def test_other_threads_run_while_a_text_is_encoded():
    tokenizer, text, seen = train_bpe(["hello world and more of it, "], 300), "hello world and more, " * 5_000, []
    turns, interval = 0, sys.getswitchinterval()

    def encode():
        sys.setswitchinterval(10.0)  # the switch interval is so long that the lock must be released explicitly
        seen.append(turns)
        tokenizer.encode(text)
        seen.append(turns)

    thread = threading.Thread(target=encode)
    try:
        thread.start()
        while thread.is_alive():
            time.sleep(0)  # releases the lock
            turns += 1
    finally:
        sys.setswitchinterval(interval)
    assert seen[1] - seen[0] > 100


def test_added_tokens_may_follow_the_pieces_of_text(bpe):
    """As in Gemma 3, whose model has no row for `<image_soft_token>`."""
    from tokenizers import AddedToken, Tokenizer as Inner

    inner = Inner.from_str(bpe.to_json())
    inner.add_special_tokens([AddedToken("<image_soft_token>", special=True)])
    tokenizer = JsonTokenizer(inner)
    assert (tokenizer.plain_size, tokenizer.vocab_size) == (bpe.vocab_size, bpe.vocab_size + 1)
