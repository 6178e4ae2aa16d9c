"""GGUF files equal those of llama.cpp's converter, and are read as the same model.

`tests/fixtures/gguf/converted.json` has a hash of all tensors, and the metadata, of the files that the converter
(llama.cpp of llama-cpp-python 0.3.36) writes for the models of `models.py`, saved by `save_hf`.
"""

import hashlib
import json

import equinox as eqx
import gguf
import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

import eqx_decoders as ed
from eqx_decoders.cli import convert
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io import processes
from eqx_decoders.io.gguf.gguf_architectures import ARCHITECTURES
from eqx_decoders.io.gguf.gguf_table import FACTORS
from eqx_decoders.io.gguf.gguf_tokenizer import KEYS, make_tokenizer, stop_ids
from eqx_decoders.io.gguf.gguf_vocabulary import tokenizer_metadata
from eqx_decoders.io.text.tokenizer import JsonTokenizer, load_tokenizer, train_bpe
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.axes import named_leaves
from tests.errors import assert_names, refused
from tests.io.gguf.files import FIXTURES
from tests.io.gguf.models import CASES, build, settings


CONVERTED = json.loads((FIXTURES / "converted.json").read_text())
KEY = jax.random.key(0)
# Maximum relative error of a matrix. In 8 bits: half a quantization step of its largest value, and float16 rounding of
# the scale.
ERROR = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11}


def digest(path) -> str:
    """Return a hash of names, types, shapes and bits of tensors, except RoPE factors, which are float64 results."""
    whole = hashlib.blake2b(digest_size=16)
    for tensor in sorted(gguf.GGUFReader(path).tensors, key=lambda each: each.name):
        if tensor.name in FACTORS:
            continue
        shape = [size for size in tensor.shape.tolist() if size > 1]
        whole.update(f"{tensor.name} {tensor.tensor_type.name} {shape} ".encode())
        whole.update(np.ascontiguousarray(tensor.data).tobytes())
    return whole.hexdigest()


def metadata(path) -> dict:
    """Return the metadata of the architecture."""
    fields = gguf.GGUFReader(path).fields
    name = fields["general.architecture"].contents()
    return {key: fields[key].contents() for key in fields if key.startswith(f"{name}.")}


def test_every_architecture_has_a_test_model():
    assert {family for _, family, _ in CASES.values()} == {
        row.family for row in ARCHITECTURES if not row.interleaved_tensors
    }
    assert set(CONVERTED) == set(CASES)


@pytest.mark.slow(fast=("gpt2", "llama"))
@pytest.mark.parametrize("name", CASES)
def test_files_equal_those_of_llama_cpp(name, tmp_path):
    kind, family, _ = CASES[name]
    model, file = build(name), tmp_path / "model.gguf"
    length = {key: value for key, value in settings(name).items() if key == "max_position_embeddings"}
    ed.save_gguf(model, file, dtype=kind, family=family, settings=length)
    assert digest(file) == CONVERTED[name]["tensors"]
    ours, theirs = metadata(file), CONVERTED[name]["metadata"]
    for key in ours.keys() & theirs.keys():
        same = ours[key] == (pytest.approx(theirs[key], rel=1e-6) if isinstance(ours[key], float) else theirs[key])
        assert same, (key, ours[key], theirs[key])
    # llama.cpp also writes derived values and default values
    follow = (
        "_length",
        "dimension_count",
        "file_type",
        "nemotron.attention.layer_norm_rms_epsilon",
        "parallel_residual",
        "window_pattern",
        "scaling.type",
    )
    assert all(key.endswith(follow) for key in theirs.keys() - ours.keys()), theirs.keys() - ours.keys()
    read = ed.load_hf(file)
    assert name == "phi3_long" or read.config == model.config  # factors are rounded to float32
    for path, leaf in named_leaves(read).items():
        want = np.asarray(named_leaves(model)[path])
        within = ERROR[kind] * (np.abs(want) if kind != "q8_0" else np.abs(want).max())
        assert (np.abs(np.asarray(leaf) - want) <= within + 1e-7).all(), path


@pytest.mark.slow
def test_tokenizer_and_template_round_trip(tmp_path):
    """Also for a model that was loaded from a GGUF file."""
    tokenizer = train_bpe(["a tale of two cities, twice told"] * 3, 300)
    model = ed.init(_small(tokenizer.vocab_size), key=KEY)
    folder = tmp_path / "folder"
    ed.save_hf(model, folder, family="llama", settings={"bos_token_id": 0, "eos_token_id": [0, 5]})
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    for source, name in ((folder, "a.gguf"), (tmp_path / "a.gguf", "b.gguf")):
        ed.save_gguf(ed.load_hf(source), tmp_path / name, dtype="f32")
        text = load_text_model(tmp_path / name, "float32")
        assert text.tokenizer.encode("twice two!").tolist() == tokenizer.encode("twice two!").tolist()
        assert text.encode([{"role": "user", "content": "a"}]).tolist() == [0, *tokenizer.encode("a")]
        assert text.stop_ids == (0, 5)
    words = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert words["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert words["tokenizer.ggml.token_type"].contents()[:2] == [3, 1]


def _small(vocab_size: int = 64, **blocks):
    sizes = dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=vocab_size
    )
    return FAMILIES["llama"].decode({"model_type": "llama", **sizes, **blocks})[0]


def test_the_command_writes_a_file(tmp_path, capsys):
    source, file = FIXTURES.parent / "qwen3_f16", tmp_path / "x.gguf"
    assert convert.main(["gguf", str(source), str(file), "--dtype", "bf16"]) == 0
    assert_names(capsys.readouterr().out, source, file)
    assert ed.load_hf(file).config == ed.load_hf(source).config


@pytest.mark.slow
def test_sentencepiece_pieces_are_written(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    texts, folder = tmp_path / "texts", tmp_path / "folder"
    texts.write_text("the quick brown fox jumps over the lazy dog\nwhose naps are deep\n" * 20)
    ed.save_hf(ed.init(_small(320), key=KEY), folder, family="llama")
    sentencepiece.SentencePieceTrainer.train(
        input=str(texts), model_prefix=str(folder / "tokenizer"), vocab_size=300, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", hard_vocab_limit=False, remove_extra_whitespaces=False,
    )  # fmt: skip
    ed.save_gguf(ed.load_hf(folder), tmp_path / "x.gguf")
    one, two = load_tokenizer(folder), load_tokenizer(tmp_path / "x.gguf")
    for text in ("the lazy fox naps", " two  blanks é\n", "deepdeep dog"):
        assert one.encode_prompt(text).tolist() == two.encode_prompt(text).tolist()


@pytest.mark.slow
def test_unsupported_models_and_paths_are_refused(tmp_path):
    plain = ed.init(_small(), key=KEY)
    big = eqx.tree_at(lambda model: model.embedding.table, plain, plain.embedding.table + 1e6)
    existing, missing = tmp_path / "y.gguf", tmp_path / "none" / "y.gguf"
    existing.write_text("")
    for model, file, named in (
        (ed.quantize(plain, "int8"), tmp_path / "x.gguf", ["save_gguf", "dequantize"]),
        (big, tmp_path / "x.gguf", ["token_embd.weight", "float16", "bf16"]),
        (plain, existing, [existing]),
        (plain, missing, [missing]),
    ):
        with refused(ed.ConversionError, *named):
            ed.save_gguf(model, file)
        assert not list(tmp_path.glob("*x.gguf*"))


def test_settings_that_the_architecture_lacks_are_refused(tmp_path):
    """llama.cpp derives these settings from the architecture. Each model here differs in one of them."""
    for name, change, named in (
        ("qwen3", {"attention_bias": True}, "mixer.qkv_bias=True"),
        ("gemma2", {"query_pre_attn_scalar": 11}, "mixer.query_scale=0.3015"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "mixer.rope=None"),
    ):
        family = CASES[name][1]
        config, _ = FAMILIES[family].decode(settings(name) | change)
        with refused(ed.ConversionError, "save_gguf", name, named):
            ed.save_gguf(abstract(config), tmp_path / "x.gguf", family=family)
    with refused(ed.ConversionError, "save_gguf", "glm4_moe", "qwen3_moe"):
        ed.save_gguf(abstract(ed.get_config("tiny-moe")), tmp_path / "x.gguf")


LLAMA3 = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
HARMONY = ("<|return|>", "<|end|>", "<|call|>", "<|endoftext|>")


def _special(folder, names, stripping=()):
    """Write a tokenizer's directory with special tokens; return the id of the first one."""
    inner = Tokenizer.from_str(train_bpe(["a tale of two cities, twice told"] * 3, 300).to_json())
    first = inner.get_vocab_size()
    inner.add_special_tokens([AddedToken(name, special=True, rstrip=name in stripping) for name in names])
    JsonTokenizer(inner).save(folder)
    return first


@pytest.mark.parametrize(
    ("names", "ends", "ids"),
    [
        (LLAMA3, (0, 1, 2), {"eos": 0, "eot": 2, "eom": 1}),  # Llama 3.1's order
        (LLAMA3, (2, 0, 1), {"eos": 2, "eot": 0, "eom": 1}),
        (HARMONY, (0, 3, 2), {"eos": 0, "eot": 3, "eom": 2}),  # GPT-OSS
    ],
    ids=["llama 3.1", "llama 3.1, eot first", "gpt-oss"],
)
def test_all_ids_of_eos_are_written(names, ends, ids, tmp_path):
    first = _special(tmp_path, names)
    ends = [first + index for index in ends]
    words = tokenizer_metadata(tmp_path, {"eos_token_id": ends}, first + 8)
    assert {name: words[f"{KEYS}{name}_token_id"] - first for name in ids} == ids
    assert stop_ids(words) == sorted(ends)
    with refused(ed.ConversionError, f"eos_token_id={[*ends, 7, 8]}", "[7, 8]"):
        tokenizer_metadata(tmp_path, {"eos_token_id": [*ends, 7, 8]}, first + 8)


def test_end_of_a_harmony_message_is_not_an_eos_id():
    """As in llama.cpp. Without the tokens of Harmony, the end-of-turn token stops."""
    words = {KEYS + "tokens": ["a", *HARMONY], KEYS + "token_type": [1, 3, 3, 3, 3], KEYS + "eos_token_id": 1}
    assert stop_ids(words) == [1, 3] == stop_ids(words | {KEYS + "eot_token_id": 2})
    words[KEYS + "tokens"] = ["a", "<|im_start|>", "<|end|>", "<|im_end|>", "b"]
    assert stop_ids(words) == [1, 2, 3] and stop_ids(words | {KEYS + "eot_token_id": 4}) == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_second_process_keeps_the_file_and_gets_errors_of_the_first(tmp_path, monkeypatch):
    model, file, said = ed.init(_small(), key=KEY), tmp_path / "x.gguf", [None, None, "OSError: disk full"]
    partial = tmp_path / ".x.gguf.partial"
    partial.write_text("of the first process")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(processes, "all_gather_json", lambda name, value=None, **_: [said.pop(0), value])
    with refused(ed.EqxDecodersError, "save_gguf", "OSError: disk full"):
        ed.save_gguf(model, file)
    assert partial.exists() and not said


def test_an_error_of_the_first_process_reaches_all(monkeypatch):
    sent = []
    monkeypatch.setattr(processes, "all_gather_json", lambda name, value=None, **_: sent.append(value) or [value])
    assert processes.run_in_process_0("x", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        processes.run_in_process_0("x", lambda: 1 // 0)
    assert sent[0] is None and "ZeroDivisionError" in sent[1]


@pytest.mark.slow
def test_an_explicit_tokenizer_is_written_or_refused(tmp_path):
    train_bpe(["a tale of two cities, twice told"] * 3, 300).save(tmp_path / "folder")
    with refused(ed.ConversionError, "tokenizer='no/such/dir'"):
        ed.save_gguf(ed.init(_small(), key=KEY), tmp_path / "x.gguf", tokenizer="no/such/dir")
    (tmp_path / "folder" / "chat_template.jinja").write_text("x")
    words = tokenizer_metadata(tmp_path / "folder" / "tokenizer.json", {}, 300)
    assert words == tokenizer_metadata(tmp_path / "folder", {}, 300) and words["tokenizer.chat_template"] == "x"
    (tmp_path / "none").mkdir()
    assert tokenizer_metadata(tmp_path / "none", {}, 300) == {KEYS + "model": "none", "general.name": ""}
    (tmp_path / "none" / "tekken.json").write_text("{}")
    with refused(ed.DataError, tmp_path / "none" / "tekken.json"):
        tokenizer_metadata(tmp_path / "none", {}, 300)


@pytest.mark.slow
def test_only_names_with_phi_3_have_special_tokens_that_strip_blanks(tmp_path):
    """As in llama.cpp; a tokenizer that strips is written with such a name."""
    names, text = ("<unk>", "</s>", "<|end|>", "<|user|>"), "<|user|>\n twice<|end|> \n<unk> \ntwo"
    for number, (stripping, stem, name) in enumerate(
        [(names[2:], "x", "phi-3 x"), (names[1:], "a-Phi3", "a-Phi3"), ((), "Phi-3", "Phi 3"), ((), "y", "y")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        _special(folder, names, stripping)
        ours, file = load_tokenizer(folder), folder / f"{stem}.gguf"
        ed.save_gguf(ed.init(_small(ours.vocab_size), key=KEY), file, tokenizer=folder)
        assert gguf.GGUFReader(file).fields["general.name"].contents() == name
        assert load_tokenizer(file).encode(text, special=True).tolist() == ours.encode(text, special=True).tolist()
        again = tokenizer_metadata(file, {}, ours.vocab_size, "z")
        assert again["general.name"] == ("phi-3 z" if stripping else "z")


def test_special_tokens_of_sentencepiece_strip_blanks_with_phi_3():
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "▁", "a", "<0x0A>"]
    words = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 3, 3, 1, 1, 6], "add_space_prefix": False}
    words = {KEYS + key: value for key, value in words.items()}
    for name, ids in (("My Phi-3", [3, 5, 2, 5, 1, 4, 5]), ("Phi 4", [3, 4, 6, 5, 2, 4, 5, 1, 4, 5])):
        inner, _ = make_tokenizer(words | {"general.name": name})
        assert inner.encode("<|end|> \na</s> a<s> a", add_special_tokens=False).ids == ids


@pytest.mark.slow
def test_tokenizer_without_merges_is_written(tmp_path):
    """GGUF has no type for an empty list, so the merges are omitted."""
    inner = Tokenizer.from_str(train_bpe(["ab"], 257).to_json())
    content = json.loads(inner.to_str())
    content["model"]["merges"] = []
    JsonTokenizer(Tokenizer.from_str(json.dumps(content))).save(tmp_path)
    ed.save_gguf(ed.init(_small(257), key=KEY), tmp_path / "x.gguf", tokenizer=tmp_path)
    assert "tokenizer.ggml.merges" not in gguf.GGUFReader(tmp_path / "x.gguf").fields
    assert load_tokenizer(tmp_path / "x.gguf").encode("ab").tolist() == load_tokenizer(tmp_path).encode("ab").tolist()
