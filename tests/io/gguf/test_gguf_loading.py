"""GGUF files are read as llama.cpp means them, in few bits or expanded, and broken ones are refused by a sentence.

The files in `tests/fixtures/gguf` are from llama.cpp's converter, and their logits from llama.cpp (float32).
"""

import itertools
import json
import struct
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

import eqx_decoders as ed
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.gguf_table import PATTERN, Found, read_masks
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.gguf.gguf_header import read_gguf
from eqx_decoders.io.gguf.gguf_tensors import BLOCKS, decoded, raw
from eqx_decoders.io.gguf.gguf_tokenizer import KEYS, PRE_TOKENIZERS, make_tokenizer
from eqx_decoders.io.huggingface import export
from eqx_decoders.io.huggingface.quantized.unpack import ScaledTensor
from eqx_decoders.io.text.tokenizer import load_tokenizer, train_bpe
from eqx_decoders.io.text.tokenizer_formats import byte_letters
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import named_leaves
from tests.compare import assert_allclose, assert_array_equal
from tests.io.gguf.files import FIXTURES, VOCAB, matrix, tiny, tiny_tensors, write


EXPECTED = np.load(FIXTURES / "expected.npz")
# llama.cpp reads GELU from a table of float16
TOLERANCE = {"llama": 2e-4, "gemma3": 2e-3, "qwen2_moe": 4e-4}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in TOLERANCE if n != "llama")]
)
def test_logits_are_those_of_llama_cpp(name):
    model = ed.load_hf(FIXTURES / f"{name}.gguf")
    logits = model(EXPECTED["input_ids"][None]).logits[0]
    assert_allclose(logits, EXPECTED[name], atol=TOLERANCE[name])


@pytest.mark.parametrize("kind", [*BLOCKS, "Q2_K", "IQ4_NL"])
def test_blocks_hold_what_the_package_reads(kind, tmp_path):
    """Parts are cut at any place; the numbers of a weight in few bits are the same, but for one rounding of zeros."""
    rows = matrix(np.random.default_rng(1), 5, kind)[1]
    file = write(tmp_path / "x.gguf", "llama", {}, {"x": (kind, rows)})
    tensor = decoded(raw(read_gguf(file).tensors["x"]))
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    cut = (slice(1, 4), slice(7, 250))
    assert_array_equal(tensor.read(cut), want[cut])
    assert isinstance(tensor, ScaledTensor) == (kind in BLOCKS)
    if isinstance(tensor, ScaledTensor):
        exact = tensor.zeros is None
        assert_allclose(ScaledTensor.read(tensor, cut), want[cut], rtol=0, atol=0 if exact else 1e-6)


def test_a_group_without_a_scale_is_its_least_number(tmp_path):
    rows = np.zeros((2, 20), np.uint8)
    rows[:, 2:4] = np.array([0.75], np.float16).view(np.uint8)
    rows[:, 4:] = 0x5A
    file = write(tmp_path / "x.gguf", "llama", {}, {"x": ("Q4_1", rows)})
    tensor = decoded(raw(read_gguf(file).tensors["x"]))
    assert isinstance(tensor, ScaledTensor)
    for values in (tensor.read_all(), ScaledTensor.read(tensor, (slice(0, 2), slice(0, 32)))):
        assert_array_equal(values, 0.75)


@pytest.mark.slow(fast=("Q4_1",))
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_weights_stay_in_few_bits(kind, tmp_path):
    """Queries and keys, whose rows are in another order, too."""
    file = tiny(tmp_path / "x.gguf", kind)
    wide, narrow = (ed.load_hf(file, quantized=form) for form in ("expand", "keep"))
    kept = quantized_weights(narrow)
    assert len(kept) == 7 and {weight.block[0] for weight in kept.values()} == {BLOCKS[kind].group}
    ids = np.arange(VOCAB)[None]
    assert_allclose(narrow(ids).logits, wide(ids).logits, rtol=1e-6, atol=1e-4)
    if kind == "Q4_1":  # no format of Hugging Face has zero points between whole numbers
        with pytest.raises(ed.ConversionError, match="zero points"):
            ed.save_hf(narrow, tmp_path / "out")


@pytest.mark.parametrize("quantized", ["expand", "keep"])
def test_experts_in_mxfp4_are_those_of_the_directory(quantized):
    """llama.cpp's converter made the file of that directory: two tensors hold what is one there."""
    file, folder = FIXTURES / "gpt_oss.gguf", FIXTURES.parent / "gpt_oss_mxfp4"
    one, two = (ed.load_hf(source, quantized=quantized) for source in (file, folder))
    assert one.config == two.config
    assert {path: each.format for path, each in quantized_weights(one).items()} == {
        path: each.format for path, each in quantized_weights(two).items()
    }
    for path, leaf in named_leaves(one).items():
        assert_array_equal(np.asarray(leaf), np.asarray(named_leaves(two)[path]), err_msg=path)
    with pytest.raises(ed.ConversionError, match=r"none of llama.cpp's|dequantize"):
        ed.save_gguf(one, FIXTURES / "never.gguf")


@pytest.mark.slow
def test_a_model_of_a_file_is_saved_as_a_directory(tmp_path):
    """With its tokenizer and chat template, and llama.cpp's rotary factors as the settings that they are from."""
    source = train_bpe(["a tale of two cities, twice told"] * 3, 300)
    tokens = [source.name_of(index) for index in range(source.vocab_size)]
    merges = [" ".join(pair) for pair in json.loads(source.to_json())["model"]["merges"]]
    words = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, "eos_token_id": 0}
    words |= {"token_type": [3] + [1] * (len(tokens) - 1), "bos_token_id": 0, "add_bos_token": True}
    metadata = {KEYS + key: value for key, value in words.items()} | {"tokenizer.chat_template": "{{ bos_token }}x"}
    table = np.random.default_rng(0).normal(size=(len(tokens), 256)).astype(np.float32)
    text = "told of twelve cities <|endoftext|>"
    file = tiny(tmp_path / "x.gguf", metadata=metadata, **{"token_embd.weight": table})
    read = load_text_model(file, "float32")
    ed.save_hf(read.model, tmp_path / "out")
    again = load_text_model(tmp_path / "out", "float32")
    for model in (read, again):
        assert model.tokenizer.encode(text).tolist() == source.encode(text).tolist()
        assert model.encode(text).tolist() == [0, *source.encode(text, special=True)]
        assert model.chat is not None and model.chat.render([{"role": "user", "content": "a"}]) == "<|endoftext|>x"
        assert model.stop_ids == (0,)
    same = jax.tree.map(np.array_equal, jax.tree.leaves(read.model), jax.tree.leaves(again.model))
    assert all(same) and len(same) > 8


def test_a_tokenizer_that_cannot_be_made_costs_no_weights(tmp_path, monkeypatch):
    words = {"model": "gpt2", "pre": "unheard", "tokens": list("abcdefgh"), "merges": ["a b"]}
    file = tiny(tmp_path / "x.gguf", metadata={KEYS + key: value for key, value in words.items()})
    monkeypatch.setattr(export, "_write_tensors", lambda *_: pytest.fail("weights were written"))
    with pytest.raises(ed.DataError, match="pre='unheard'"):
        ed.save_hf(ed.load_hf(file), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_pieces_of_sentencepiece_are_those_of_its_own_file(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    texts, prefix = tmp_path / "texts", tmp_path / "tokenizer"
    texts.write_text("the quick brown fox jumps over the lazy dog\nwhose naps are deep\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(texts), model_prefix=str(prefix), vocab_size=300, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", user_defined_symbols=["<sep>"], hard_vocab_limit=False,
        remove_extra_whitespaces=False,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(str(prefix) + ".model")
    count = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)
    ]
    kinds[model.piece_to_id("<sep>")] = 4
    words = {
        "model": "llama", "tokens": [model.id_to_piece(i) for i in range(count)], "token_type": kinds,
        "scores": [model.get_score(i) for i in range(count)], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    file = tiny(tmp_path / "x.gguf", metadata={KEYS + key: value for key, value in words.items()})
    ours = load_tokenizer(file)
    for text in ("the lazy fox<sep>naps", " two  blanks é\n", "<s>the dog"):
        assert ours.encode(text).tolist() == load_tokenizer(prefix.with_suffix(".model")).encode(text).tolist()
        assert ours.encode(text).tolist() == model.encode(text) or "<s" in text
    assert ours.encode_prompt("the dog").tolist() == [1, *model.encode("the dog")]


def test_a_model_may_be_split_over_files(tmp_path):
    tensors = list(tiny_tensors().items())
    whole = tiny(tmp_path / "x.gguf")
    names = [tmp_path / f"y-{number:05d}-of-00002.gguf" for number in (1, 2)]
    tiny(names[0], metadata={"split.count": 2, "split.no": 0})
    first = gguf.GGUFReader(whole)
    keys = {key: field.contents() for key, field in first.fields.items() if key.startswith("llama.")}
    write(names[0], "llama", keys | {"split.count": 2, "split.no": 0}, dict(tensors[:5]))
    with pytest.raises(ed.ConversionError, match=r"y-00002-of-00002.gguf"):
        read_gguf(names[0])
    write(names[1], "llama", {"split.count": 2, "split.no": 1}, dict(tensors[5:]))
    one, two = (ed.load_hf(path) for path in (whole, names[0]))
    assert all(jax.tree.map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(two)))
    with pytest.raises(ed.ConversionError, match="give the first one"):
        read_gguf(names[1])


# --- what is refused --------------------------------------------------------------------------------------------------


def header(*parts: bytes | int | str, count: int = 0, keys: int = 0, version: int = 3) -> bytes:
    """Return the begin of a file: texts with their lengths, bytes as they are, whole numbers in four bytes."""
    content = b"GGUF" + struct.pack("<IQQ", version, count, keys)
    for part in parts:
        text = part.encode() if isinstance(part, str) else b""
        content += struct.pack("<Q", len(text)) + text if isinstance(part, str) else b""
        content += part if isinstance(part, bytes) else struct.pack("<I", part) if isinstance(part, int) else b""
    return content.ljust(64, b"\0")


LONG = struct.pack("<Q", 2**62)


def place(offset: int, *sizes: int, kind: int = 0) -> bytes:
    """Return the description of a tensor behind its name."""
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return shape + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF", "has 4 bytes"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (header(version=1), "its version is 1"),
        (header(version=3 << 24), "little-endian files"),
        (header(count=2**40), "claims 1,099,511,627,776 tensors"),
        (header(keys=2**40), "keys of metadata"),
        (header(LONG, keys=1), "claims a text of"),
        (header("a", 9, 4, LONG, keys=1), "its arrays claim"),
        (header("a", 9, 8, LONG, keys=1), "its arrays claim"),
        (header("a", 9, 8, struct.pack("<QQ", 2, 2**50), keys=1), "longer than the file"),
        (header("a", 9, 9, struct.pack("<Q", 1), keys=1), "arrays of type 9"),
        (header("a", 77, keys=1), "values of type 77"),
        (header("a", 4, 1, "a", 4, 1, keys=2), "'a' stands twice"),
        (header(struct.pack("<Q", 1) + b"\xff", 4, 1, keys=1), "no UTF-8"),
        (header("general.alignment", 4, 3, keys=1), "power of two"),
        (header("t", place(0, 2**40), count=1), "ends at"),
        (header("t", place(0, 2**30, 2**31), count=1), "must have some numbers"),
        (header("t", place(0, 0), count=1), "must have some numbers"),
        (header("t", place(7, 1), count=1), "begins at 7"),
        (header("t", place(0, 5, kind=8), count=1), "Q8_0 has blocks of 32"),
        (header("t", place(0, 1, kind=999), count=1), "type 999"),
        (header("t", struct.pack("<I", 9), count=1), "9 dimensions"),
        (header("t", place(0, 1), "t", place(32, 1), count=2).ljust(256, b"\0"), "'t' stands twice"),
        (header("a" * 80, keys=3)[:70], "ends within its header"),
    ],
)
def test_a_broken_header_is_refused(content, says, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ed.ConversionError, match=says):
        ed.load_hf(file)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole, file = (FIXTURES / "llama.gguf").read_bytes(), tmp_path / "x.gguf"
    for length in itertools.chain(range(0, 4000, 97), (len(whole) // 2, len(whole) - 1)):
        file.write_bytes(whole[:length])
        with pytest.raises(ed.ConversionError):
            ed.load_hf(file)


DIVIDED = {"rope_freqs.weight": np.full(32, 2.0, np.float32)}
SCALED = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_attn_factor": 2.0}


@pytest.mark.parametrize(
    ("metadata", "tensors", "says"),
    [
        ({"llama.attention.head_count": 0}, {}, "num_attention_heads"),
        ({"llama.attention.key_length": 48}, {}, "attn_q.weight has 256 rows|shape"),
        ({"llama.attention.value_length": 32}, {}, "value_length"),
        ({"llama.block_count": 2**30}, {}, "block_count=1073741824 must be at most"),
        ({"llama.block_count": "all"}, {}, "block_count"),
        ({"llama.context_length": "all"}, {}, "context_length"),
        ({"llama.rope.freq_base": "all"}, {}, "freq_base"),
        ({"llama.feed_forward_length": [256, 128]}, {}, "the same in all layers"),
        ({"llama.attention.sliding_window": 128}, {}, "sliding_window"),
        ({"llama.rope.dimension_count": 32}, {}, "the size of a head"),
        (SCALED, {}, "yarn_attn_factor"),
        (SCALED, DIVIDED, "rope_freqs.weight beside"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, DIVIDED, "rope_freqs.weight beside"),
        ({"llama.rope.scaling.factor": 2.0}, DIVIDED, "rope_freqs.weight beside"),
        ({"llama.new.trick": 1}, {}, "new.trick"),
        ({}, {"blk.0.attn_x.weight": np.ones(4, np.float32)}, "blk.0.attn_x.weight belongs to no weight"),
        ({}, {"output_norm.weight": np.ones(4, np.float32)}, "has the shape"),
        ({}, {"rope_freqs.weight": np.array([1, np.nan], np.float32)}, "above 0"),
        ({}, {"token_embd.weight": np.ones(4, np.float32)}, "token_embd.weight is missing"),
    ],
)
def test_what_a_file_says_is_understood_or_refused(metadata, tensors, says, tmp_path):
    keys = {"llama.attention.layer_norm_rms_epsilon": 1e-5} | metadata
    with pytest.raises(ed.ConversionError, match=says):
        ed.load_hf(tiny(tmp_path / "x.gguf", metadata=keys, **tensors))


@pytest.mark.parametrize("pattern", ["abc", float("nan"), 0])
def test_a_pattern_of_masks_is_a_whole_number(pattern):
    found = Found(Fields({PATTERN: pattern}, "x"), (), {})
    with pytest.raises(ed.ConversionError, match="sliding_window_pattern="):
        read_masks(found, {"num_hidden_layers": 2}, 2)


SPLITS = {
    "deepseek-llm": (
        "Größe 12345 一二, a\n\nb  ",
        ["Gr", "öß", "e", " ", "12345", " ", "一二", ",", " a", "\n", "\n", "b", "  "],
    ),
    "deepseek-coder": ("x12 (y)\n", ["x", "1", "2", " (", "y", ")", "\n"]),
    "falcon": ("a1234 don't", ["a", "123", "4", " don", "'", "t"]),
    "bloom": ("don't a, b  d", ["don't", " a", ",", " b", " ", " d"]),
    "qwen35": ("नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
    "seed-coder": ("a;\n\nb", ["a", ";", "\n\n", "b"]),
    "afmoe": ("1234567 ab", ["1", "234", "567", " ab"]),
    "tiny_aya": ("1234567", ["1", "234", "567"]),
    "superbpe": ("a bc 1234567 d", ["a bc ", "1", "234", "567", " d"]),
    "youtu": ("HelloWorld 12한국어", ["Hello", "World", " ", "1", "2", "한국어"]),
    "exaone-moe": ("ab cd\n", ["ab cd", "\n"]),
    "minimax-m2": ("HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    "kimi-k2": ("ab一二c 1234", ["ab", "一二", "c", " ", "123", "4"]),
    "default": ("a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    "gemma4": ("a b\n\nc", ["a b", "\n\n", "c"]),
}


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_pre_tokenizers_of_llama_cpp(name):
    tokens = [*byte_letters(), "<unk>"]
    metadata = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": [], "token_type": [1] * 256 + [2]}
    inner, _ = make_tokenizer({KEYS + key: value for key, value in metadata.items()})
    steps = json.loads(inner.pre_tokenizer.__getstate__())["pretokenizers"]
    if steps[-1]["type"] == "ByteLevel":
        steps.pop()
    cutter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), "isolated") for step in steps]
    )
    for text in ("", " a  b\n\n🚀 ١٢٣ x", *(text for text, _ in SPLITS.values())):
        assert "".join(word for word, _ in cutter.pre_tokenize_str(text)) == text
    if name in SPLITS:
        text, words = SPLITS[name]
        assert [word for word, _ in cutter.pre_tokenize_str(text)] == words


def test_a_bpe_without_a_named_pre_tokenizer_has_the_default_pre_tokenizer():
    metadata = {KEYS + "model": "gpt2", KEYS + "tokens": byte_letters(), KEYS + "merges": []}
    assert make_tokenizer(metadata)[0].to_str() == make_tokenizer(metadata | {KEYS + "pre": "default"})[0].to_str()


def test_a_bpe_of_characters_falls_back_to_bytes():
    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "\n", "\n\n"]
    metadata = {"model": "gemma4", "tokens": tokens, "merges": ["▁ a", "\n \n"], "bos_token_id": 1}
    metadata |= {"token_type": [2, 3, *[6] * 256, *[1] * 6]}
    inner, _ = make_tokenizer({KEYS + key: value for key, value in metadata.items()})
    ids = inner.encode(" ab\n\né").ids
    assert [tokens[index] for index in ids] == ["<bos>", "▁a", "b", "\n\n", "<0xC3>", "<0xA9>"]
    assert inner.decode(ids) == " ab\n\né"


def test_other_architectures_and_tokenizers_are_refused(tmp_path):
    other = write(tmp_path / "x.gguf", "rwkv7", {}, {"token_embd.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(ed.ConversionError, match=r"general.architecture='rwkv7'"):
        ed.load_hf(other)
    words = {"model": "gpt2", "pre": "unheard", "tokens": ["a", "b"], "merges": ["a b"]}
    for change, says in (
        ({}, "pre='unheard'"),
        ({"model": "t5"}, "model='t5'"),
        ({"pre": "gpt-2", "merges": ["ab"]}, "pairs with a blank"),
        ({"pre": "gpt-2", "tokens": ["a", "a"]}, "the same piece twice"),
        ({"pre": "gpt-2", "token_type": [1]}, "a list of 2 numbers"),
    ):
        metadata = {KEYS + key: value for key, value in (words | change).items()}
        with pytest.raises(ed.DataError, match=says):
            load_tokenizer(tiny(tmp_path / "y.gguf", metadata=metadata))


def test_an_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ed.EqxDecodersError, match=r"eqx_decoders\[gguf\]"):
        ed.load_hf(FIXTURES / "llama.gguf")


def test_a_directory_may_have_the_ending(tmp_path):
    folder = Path(tmp_path, "x.gguf")
    folder.mkdir()
    with pytest.raises(ed.ConversionError, match=r"config.json"):
        ed.load_hf(folder)
