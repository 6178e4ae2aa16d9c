"""Tokenizer files of tekken, tiktoken and SentencePiece give the ids of the original libraries."""

import base64
import importlib.util
import io
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from eqx_decoders.errors import DataError, MissingPackage
from eqx_decoders.inference.stream_decoder import StreamDecoder
from eqx_decoders.io.text import tokenizer_formats
from eqx_decoders.io.text.tokenizer import END_OF_TEXT, JsonTokenizer, load_tokenizer, train_bpe
from eqx_decoders.io.text.tokenizer_formats import KNOWN, byte_characters
from tests.errors import refused


HARD = ["", " ", "  ", "a  b", " hello", "hello\n\n world \t x", "naïve é ÅΩ", "👩‍👩‍👧 é é", "1234567890 3.14"]
HARD += ["日本語のテキスト 한국어", "a" * 40, "    def f(x):\n\t\treturn x+1\r\n", "\ufeffa", "I'LL don't WE'RE"]
HARD += ["<s>hi</s> [INST]", "<0x0A>", "▁x ▁", "a ▁ b", "\u200b\u00a0x", "\x00\x7f", "====----", "ABCdefGHI_jkl"]
HARD += ["العربية हिन्दी", " " * 33, "\n" * 17, "ﬁ Ⅳ ①", "x\u0300\u0300"]
# training texts; models without `<` find `<s>` in texts
SOURCE = "\n".join([(Path(__file__).parents[3] / "LICENSE").read_text(), *HARD, *[string.punctuation] * 5])


def texts() -> list[str]:
    draw = random.Random(0)
    mixed = ["".join(draw.choice("ab \n'.1Aé日") for _ in range(40)) for _ in range(100)]
    return [*HARD, SOURCE, *mixed]


def ranks() -> dict[bytes, int]:
    """Return the ranks of all bytes and of the merges of a trained BPE."""
    letters = {letter: byte for byte, letter in enumerate(byte_characters())}
    names = sorted(json.loads(train_bpe([SOURCE] * 2, 700).to_json())["model"]["vocab"].items(), key=lambda one: one[1])
    pieces = [bytes(letters[letter] for letter in name) for name, _ in names if name != END_OF_TEXT]
    pieces = [bytes([byte]) for byte in range(256)] + [piece for piece in pieces if len(piece) > 1]
    return {piece: rank for rank, piece in enumerate(dict.fromkeys(pieces))}


RANKS = ranks()


def rows(found: dict[bytes, int]) -> str:
    return "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in found.items())


def same(tokenizer: JsonTokenizer, encode, decode) -> None:
    for text in texts():
        ids = tokenizer.encode(text).tolist()
        assert ids == encode(text) and tokenizer.decode(ids) == decode(ids), text
    stream = StreamDecoder(tokenizer)
    ids = tokenizer.encode(HARD[7]).tolist()
    assert "".join([stream.push(one) for one in ids] + [stream.flush()]) == decode(ids)


@pytest.mark.slow(fast=("gpt2", "cl100k_base", "o200k_base"))
@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base", "qwen", "TikTokenTokenizer"])
def test_ids_equal_those_of_tiktoken(name, tmp_path):
    import tiktoken

    path = tmp_path / f"{'own' if name == 'TikTokenTokenizer' else name}.tiktoken"
    path.write_text(rows(RANKS))
    settings = {"tokenizer_class": name, "added_tokens_decoder": {"800": {"content": "[EOS]"}}, "eos_token": "[EOS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    theirs = tiktoken.Encoding("x", pat_str=KNOWN[name].pattern, mergeable_ranks=RANKS, special_tokens={})
    same(tokenizer, lambda text: theirs.encode(text, disallowed_special=()), theirs.decode)
    assert {"[EOS]", *KNOWN[name].special} == set(tokenizer.special_names)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(SOURCE).tolist() == theirs.encode(SOURCE)


def test_reads_added_tokens_of_a_tiktoken_directory(tmp_path):
    (tmp_path / "qwen.tiktoken").write_text(rows(RANKS))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 151700, "<tool>": 151701}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|><|endoftext|>", special=True).tolist()
    assert ids == [151644, RANKS[b"a"], 151701, 151700, 151643] and tokenizer.eos_id == 151700
    (tmp_path / "added_tokens.json").unlink()
    assert load_tokenizer(tmp_path).eos_id == 151645  # the id of the published tokenizer


def test_special_tokens_have_the_published_ids():
    ids = {key: KNOWN[key].special for key in KNOWN}
    assert ids["cl100k_base"]["<|fim_suffix|>"] == 100260 and ids["o200k_base"]["<|endofprompt|>"] == 200018
    assert ids["qwen"]["<|im_end|>"] == 151645 and len(ids["qwen"]) == 208
    llama = ids[128000]
    assert len(llama) == 256 and llama["<|eot_id|>"] == 128009 and llama["<|python_tag|>"] == 128010
    assert llama["<|finetune_right_pad_id|>"] == 128004 and llama["<|reserved_special_token_246|>"] == 128255


@pytest.mark.parametrize("named", [False, True], ids=["default special tokens", "named special tokens"])
def test_ids_equal_those_of_tekken(named, tmp_path):
    import tiktoken

    config = {"pattern": KNOWN["o200k_base"].pattern, "default_vocab_size": 420, "default_num_special_tokens": 40}
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(piece).decode()} for piece, rank in RANKS.items()]
    content = {"config": config | {"version": "v11"}, "vocab": vocab}
    if named:
        content["special_tokens"] = [{"rank": 1, "token_str": "<s>"}, {"rank": 0, "token_str": "</s>"}]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    some = {piece: rank for piece, rank in RANKS.items() if rank < 380}
    theirs = tiktoken.Encoding("x", pat_str=config["pattern"], mergeable_ranks=some, special_tokens={})
    ids = lambda text: [one + 40 for one in theirs.encode(text, disallowed_special=())]  # noqa: E731
    same(tokenizer, ids, lambda ids: theirs.decode([one - 40 for one in ids]))
    assert tokenizer.vocab_size == 420 and tokenizer.bos_id == 1 and tokenizer.eos_id == (0 if named else 2)
    assert tokenizer.encode_prompt("a").tolist() == [1, *ids("a")]
    assert tokenizer.name_of(39) == "<SPECIAL_39>" and (named or tokenizer.name_of(3) == "[INST]")


@pytest.mark.parametrize(
    "kind, blanks, fallback, prefix",
    [("bpe", False, True, True), ("bpe", True, False, False), ("unigram", True, True, True), ("unigram", *[False] * 3)],
    ids=["bpe, bytes and prefix", "bpe, blanks", "unigram, all", "unigram"],
)  # fmt: skip
def test_ids_equal_those_of_sentencepiece(kind, blanks, fallback, prefix, tmp_path):
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE.splitlines()),
        model_writer=written,
        vocab_size=500,
        model_type=kind,
        normalization_rule_name="identity",
        remove_extra_whitespaces=blanks,
        byte_fallback=fallback,
        add_dummy_prefix=prefix,
        user_defined_symbols=[] if prefix else ["<sep>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    for text in texts():
        ids = tokenizer.encode(text).tolist()
        want = theirs.encode(text)
        # pieces of equal score: 1 11 and 11 1 are equivalent
        assert ids == want or (kind == "unigram" and sorted(ids) == sorted(want)), text
        if fallback and not blanks:  # otherwise unknown pieces and initial spaces are written in another way
            assert tokenizer.decode(ids) == theirs.decode(ids), text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, len(theirs))
    assert tokenizer.encode("<s>a</s>", special=True).tolist()[::2] == [1, 2] or prefix
    assert tokenizer.encode_prompt("a").tolist() == theirs.encode("a")


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("own.tiktoken", rows(RANKS), ["own.tiktoken'", "gpt2.tiktoken", "tokenizer.json"]),
        ("tokenizer.model", "no model", ["tokenizer.model'", "tekken.json", ".tiktoken", "SentencePiece"]),
        ("tekken.json", "{}", ["tekken.json'", "'config'"]),
        ("qwen.tiktoken", "!!!! 0\n", ["qwen.tiktoken'"]),
        ("notes.txt", "x", ["tokenizer.json", "tekken.json", "tokenizer.model"]),
    ],
    ids=["unknown ranks", "no model", "no config", "no ranks", "another file"],
)
def test_files_that_are_not_tokenizers_are_refused(name, content, named, tmp_path):
    (tmp_path / name).write_text(content)
    with refused(DataError, tmp_path, *named):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc_cf"])
def test_the_normalizer_in_a_sentencepiece_model_is_applied(kind, rule, tmp_path):
    import sentencepiece

    written = io.BytesIO()
    rules: dict[str, Any] = dict(
        vocab_size=300, model_type=kind, normalization_rule_name=rule, hard_vocab_limit=False, minloglevel=2
    )
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SOURCE.splitlines()), model_writer=written, **rules)
    (tmp_path / "spiece.model").write_bytes(written.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    for text in (
        *HARD,
        SOURCE,
        "ＡＢＣ１２３ ½ ™ ㍿",
        "ｶﾞ e\u0301 A\u030a\u0301 각 \u1100\u1161\u11a8",
        "x\r\ny",
        "①\u0301b",
        "İß～",
    ):
        ids, want = tokenizer.encode(text).tolist(), theirs.encode(text)
        assert ids == want or (kind == "unigram" and sorted(ids) == sorted(want)), text


@pytest.mark.parametrize("field", ["escape_whitespaces", "treat_whitespace_as_suffix"])
def test_sentencepiece_models_with_other_rules_are_refused(field, tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    formats: Any = sentencepiece_model_pb2
    model = formats.ModelProto()
    model.pieces.add(piece="<unk>", score=0, type=2)
    model.trainer_spec.model_type = 2
    model.normalizer_spec.escape_whitespaces = field != "escape_whitespaces"
    model.trainer_spec.treat_whitespace_as_suffix = field == "treat_whitespace_as_suffix"
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with refused(DataError, field, "tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05")
    with refused(MissingPackage, "'sentencepiece'", "[sentencepiece]"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_published_tokenizers_of_mistral():
    """The files are part of the package mistral-common (installed by `make test-slow`), which is also the reference."""
    import sentencepiece
    import tiktoken

    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None and spec.origin is not None, "make test-slow installs mistral-common, without what it needs"
    folder = Path(spec.origin).parent / "data"
    for name in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"):
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
        found = JsonTokenizer(tokenizer_formats.read_tokenizer_file(folder / name, {}))
        same(found, theirs.encode, theirs.decode)
        assert found.vocab_size == len(theirs)
    content = json.loads((folder / "tekken_240911.json").read_text())
    pieces = [base64.b64decode(row["token_bytes"]) for row in content["vocab"][: 131072 - 1000]]
    known = {piece: rank for rank, piece in enumerate(pieces)}
    enc = tiktoken.Encoding("x", pat_str=content["config"]["pattern"], mergeable_ranks=known, special_tokens={})
    found = JsonTokenizer(tokenizer_formats.read_tokenizer_file(folder / "tekken_240911.json", {}))
    ids = lambda text: [one + 1000 for one in enc.encode(text, disallowed_special=())]  # noqa: E731
    same(found, ids, lambda ids: enc.decode([one - 1000 for one in ids]))
    assert found.vocab_size == 131072 and found.encode_prompt("hi").tolist() == [1, *ids("hi")]
