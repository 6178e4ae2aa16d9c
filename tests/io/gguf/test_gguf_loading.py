"""GGUF files are read as in llama.cpp, quantized or dequantized, and malformed files are refused.

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
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.gguf.gguf_header import read_gguf
from eqx_decoders.io.gguf.gguf_table import PATTERN, FileMetadata, read_masks
from eqx_decoders.io.gguf.gguf_tensors import BLOCKS, dequantized, stored_view
from eqx_decoders.io.gguf.gguf_tokenizer import KEYS, PRE_TOKENIZERS, make_tokenizer
from eqx_decoders.io.huggingface import export
from eqx_decoders.io.huggingface.quantized.unpack import ScaledTensor
from eqx_decoders.io.text.tokenizer import load_tokenizer, train_bpe
from eqx_decoders.io.text.tokenizer_formats import byte_characters
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import named_leaves
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.io.gguf.files import FIXTURES, VOCAB, matrix, tiny, tiny_tensors, write


EXPECTED = np.load(FIXTURES / "expected.npz")
# llama.cpp reads GELU from a table of float16
TOLERANCE = {"llama": 2e-4, "gemma3": 2e-3, "qwen2_moe": 4e-4}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in TOLERANCE if n != "llama")]
)
def test_logits_equal_those_of_llama_cpp(name):
    model = ed.load_hf(FIXTURES / f"{name}.gguf")
    logits = model(EXPECTED["input_ids"][None]).logits[0]
    assert_allclose(logits, EXPECTED[name], atol=TOLERANCE[name])


@pytest.mark.parametrize("kind", [*BLOCKS, "Q2_K", "IQ4_NL"])
def test_blocks_equal_those_of_the_package_gguf(kind, tmp_path):
    """Slices may start anywhere; quantized weights are equal up to one rounding of their zero points."""
    rows = matrix(np.random.default_rng(1), 5, kind)[1]
    file = write(tmp_path / "x.gguf", "llama", {}, {"x": (kind, rows)})
    tensor = dequantized(stored_view(read_gguf(file).tensors["x"]))
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    cut = (slice(1, 4), slice(7, 250))
    assert_array_equal(tensor.read(cut), want[cut])
    assert isinstance(tensor, ScaledTensor) == (kind in BLOCKS)
    if isinstance(tensor, ScaledTensor):
        exact = tensor.zeros is None
        assert_allclose(ScaledTensor.read(tensor, cut), want[cut], rtol=0, atol=0 if exact else 1e-6)


def test_quantization_group_with_scale_zero_equals_its_minimum(tmp_path):
    rows = np.zeros((2, 20), np.uint8)
    rows[:, 2:4] = np.array([0.75], np.float16).view(np.uint8)
    rows[:, 4:] = 0x5A
    file = write(tmp_path / "x.gguf", "llama", {}, {"x": ("Q4_1", rows)})
    tensor = dequantized(stored_view(read_gguf(file).tensors["x"]))
    assert isinstance(tensor, ScaledTensor)
    for values in (tensor.read_all(), ScaledTensor.read(tensor, (slice(0, 2), slice(0, 32)))):
        assert_array_equal(values, 0.75)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_weights_stay_quantized(kind, tmp_path):
    """Also queries and keys, whose rows are permuted."""
    file = tiny(tmp_path / "x.gguf", kind)
    wide, narrow = (ed.load_hf(file, quantized=form) for form in ("expand", "keep"))
    kept = quantized_weights(narrow)
    assert len(kept) == 7 and {weight.block[0] for weight in kept.values()} == {BLOCKS[kind].group}
    ids = np.arange(VOCAB)[None]
    assert_allclose(narrow(ids).logits, wide(ids).logits, rtol=1e-6, atol=1e-4)
    if kind == "Q4_1":  # formats of Hugging Face have no fractional zero points
        with refused(ed.ConversionError, "mixer.query", "compressed-tensors", "zero points", "dequantize"):
            ed.save_hf(narrow, tmp_path / "out")


@pytest.mark.parametrize("quantized", ["expand", "keep"])
def test_experts_in_mxfp4_equal_those_of_the_directory(quantized):
    """llama.cpp's converter made the file from that directory and split one tensor into two."""
    file, folder = FIXTURES / "gpt_oss.gguf", FIXTURES.parent / "gpt_oss_mxfp4"
    one, two = (ed.load_hf(source, quantized=quantized) for source in (file, folder))
    assert one.config == two.config
    assert {path: each.format for path, each in quantized_weights(one).items()} == {
        path: each.format for path, each in quantized_weights(two).items()
    }
    for path, leaf in named_leaves(one).items():
        assert_array_equal(np.asarray(leaf), np.asarray(named_leaves(two)[path]), err_msg=path)
    with refused(ed.ConversionError, "save_gguf", "dequantize" if quantized == "keep" else "gpt_oss"):
        ed.save_gguf(one, FIXTURES / "never.gguf")


@pytest.mark.slow
def test_a_model_of_a_file_is_saved_as_a_directory_with_tokenizer_and_template(tmp_path):
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


def test_unsupported_tokenizers_are_refused_before_weights_are_written(tmp_path, monkeypatch):
    words = {"model": "gpt2", "pre": "unheard", "tokens": list("abcdefgh"), "merges": ["a b"]}
    file = tiny(tmp_path / "x.gguf", metadata={KEYS + key: value for key, value in words.items()})
    monkeypatch.setattr(export, "_write_tensors", lambda *_: pytest.fail("weights were written"))
    with refused(ed.DataError, "pre='unheard'"):
        ed.save_hf(ed.load_hf(file), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_sentencepiece_ids_equal_those_of_the_original_file(tmp_path):
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


def test_model_of_several_files(tmp_path):
    tensors = list(tiny_tensors().items())
    whole = tiny(tmp_path / "x.gguf")
    names = [tmp_path / f"y-{number:05d}-of-00002.gguf" for number in (1, 2)]
    tiny(names[0], metadata={"split.count": 2, "split.no": 0})
    first = gguf.GGUFReader(whole)
    keys = {key: field.contents() for key, field in first.fields.items() if key.startswith("llama.")}
    write(names[0], "llama", keys | {"split.count": 2, "split.no": 0}, dict(tensors[:5]))
    with refused(ed.ConversionError, names[1]):
        read_gguf(names[0])
    write(names[1], "llama", {"split.count": 2, "split.no": 1}, dict(tensors[5:]))
    one, two = (ed.load_hf(path) for path in (whole, names[0]))
    assert all(jax.tree.map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(two)))
    with refused(ed.ConversionError, names[1], "00001-of-00002.gguf"):
        read_gguf(names[1])


# --- refused files ---------------------------------------------------------------------------------------------------


def header(*parts: bytes | int | str, count: int = 0, keys: int = 0, version: int = 3) -> bytes:
    """Return the start of a file: texts with their lengths, bytes as they are, integers in four bytes."""
    content = b"GGUF" + struct.pack("<IQQ", version, count, keys)
    for part in parts:
        text = part.encode() if isinstance(part, str) else b""
        content += struct.pack("<Q", len(text)) + text if isinstance(part, str) else b""
        content += part if isinstance(part, bytes) else struct.pack("<I", part) if isinstance(part, int) else b""
    return content.ljust(64, b"\0")


LONG = struct.pack("<Q", 2**62)


def tensor_info(offset: int, *sizes: int, kind: int = 0) -> bytes:
    """Return the description of a tensor, which follows its name."""
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return shape + struct.pack("<IQ", kind, offset)


HUGE = f"{2**62:,}"
TWICE = header("odd", tensor_info(0, 1), "odd", tensor_info(32, 1), count=2).ljust(256, b"\0")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param(b"GGUF", ["4 bytes"], id="cut"),
        pytest.param(b"GGML" + bytes(60), ["GGUF"], id="magic"),
        pytest.param(header(version=1), ["version", "1"], id="version"),
        pytest.param(header(version=3 << 24), ["50331648", "little-endian"], id="big-endian"),
        pytest.param(header(count=2**40), ["1,099,511,627,776 tensors", "300,000"], id="tensors"),
        pytest.param(header(keys=2**40), ["1,099,511,627,776", "10,000"], id="keys"),
        pytest.param(header(LONG, keys=1), [HUGE, "10,000,000"], id="text"),
        pytest.param(header("a", 9, 4, LONG, keys=1), [HUGE, "5,000,000"], id="array of integers"),
        pytest.param(header("a", 9, 8, LONG, keys=1), [HUGE, "5,000,000"], id="array of texts"),
        pytest.param(
            header("a", 9, 8, struct.pack("<QQ", 2, 2**50), keys=1), ["'a'", "metadata"], id="text in an array"
        ),
        pytest.param(header("a", 9, 9, struct.pack("<Q", 1), keys=1), ["type 9"], id="array of arrays"),
        pytest.param(header("a", 77, keys=1), ["type 77"], id="type of a value"),
        pytest.param(header("a", 4, 1, "a", 4, 1, keys=2), ["'a'"], id="equal keys"),
        pytest.param(header(struct.pack("<Q", 1) + b"\xff", 4, 1, keys=1), ["UTF-8", "0xff"], id="no UTF-8"),
        pytest.param(header("general.alignment", 4, 3, keys=1), ["general.alignment=3"], id="alignment"),
        pytest.param(header("odd", tensor_info(0, 2**40), count=1), ["odd", "4,398,046,511,168"], id="end"),
        pytest.param(
            header("odd", tensor_info(0, 2**30, 2**31), count=1),
            ["odd", f"({2**31}, {2**30})"],
            id="huge tensor",
        ),
        pytest.param(header("odd", tensor_info(0, 0), count=1), ["odd", "(0,)"], id="empty tensor"),
        pytest.param(header("odd", tensor_info(7, 1), count=1), ["odd", "7", "0"], id="offset"),
        pytest.param(
            header("odd", tensor_info(0, 5, kind=8), count=1), ["odd", "5", "Q8_0", "32"], id="part of a block"
        ),
        pytest.param(
            header("odd", tensor_info(0, 1, kind=999), count=1),
            ["x.gguf", "'odd'", "type 999"],
            id="type of a tensor",
        ),
        pytest.param(header("odd", struct.pack("<I", 9), count=1), ["odd", "9 dimensions"], id="dimensions"),
        pytest.param(TWICE, ["'odd'"], id="equal tensors"),
        pytest.param(header("a" * 80, keys=3)[:70], ["70 bytes"], id="cut in the header"),
    ],
)
def test_malformed_headers_are_refused(content, named, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with refused(ed.ConversionError, *named):
        ed.load_hf(file)


def test_truncated_files_are_refused(tmp_path):
    whole, file = (FIXTURES / "llama.gguf").read_bytes(), tmp_path / "x.gguf"
    for length in itertools.chain(range(0, 4000, 97), (len(whole) // 2, len(whole) - 1)):
        file.write_bytes(whole[:length])
        with refused(ed.ConversionError, file):
            ed.load_hf(file)


SCALED = {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 2.0}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.head_count": 0}, ["num_attention_heads=0"]),
        ({"attention.key_length": 48}, ["q_proj.weight", "(256, 256)", "(192, 256)"]),
        ({"attention.value_length": 32}, ["attention.value_length=32", "64"]),
        ({"block_count": 2**30}, ["block_count=1073741824", "1024"]),
        ({"block_count": "all"}, ["block_count=all"]),
        ({"context_length": "all"}, ["context_length=all"]),
        ({"rope.freq_base": "all"}, ["rope.freq_base=all"]),
        ({"feed_forward_length": [256, 128]}, ["feed_forward_length=[256, 128]"]),
        ({"attention.sliding_window": 128}, ["attention.sliding_window=128"]),
        ({"rope.dimension_count": 32}, ["rope.dimension_count=32", "64"]),
        (SCALED, ["rope.scaling.yarn_attn_factor=2.0"]),
        ({"new.trick": 1}, ["new.trick"]),
    ],
    ids=["head_count", "key_length", "value_length", "block_count", "block_count text", "context_length", "freq_base",
         "feed_forward_length", "sliding_window", "dimension_count", "yarn", "unknown"],
)  # fmt: skip
def test_unsupported_metadata_is_refused(metadata, named, tmp_path):
    keys = {f"llama.{key}": value for key, value in metadata.items()}
    with refused(ed.ConversionError, *named):
        ed.load_hf(tiny(tmp_path / "x.gguf", metadata=keys))


@pytest.mark.parametrize(
    "scaling",
    [SCALED, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope.scaling.factor": 2.0}],
    ids=["yarn", "linear", "default"],
)
def test_rotary_factors_with_rope_scaling_are_refused(scaling, tmp_path):
    keys = {f"llama.{key}": value for key, value in scaling.items()}
    factors = {"rope_freqs.weight": np.full(32, 2.0, np.float32)}
    kind = scaling.get("rope.scaling.type", "default")
    with refused(ed.ConversionError, "rope_freqs.weight", f"rope.scaling.type={kind}"):
        ed.load_hf(tiny(tmp_path / "x.gguf", metadata=keys, **factors))


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("blk.0.attn_x.weight", [1, 1], ["blk.0.attn_x.weight"]),
        ("output_norm.weight", [1, 1], ["model.norm.weight", "(2,)", "(256,)"]),
        ("rope_freqs.weight", [1, np.nan], ["rope_freqs.weight"]),
        ("token_embd.weight", [1, 1], ["token_embd.weight"]),
    ],
    ids=["unknown", "shape", "NaN", "one dimension"],
)
def test_unexpected_tensors_are_refused(name, tensor, named, tmp_path):
    file = tiny(tmp_path / "x.gguf", **{name: np.array(tensor, np.float32)})
    with refused(ed.ConversionError, *named):
        ed.load_hf(file)


@pytest.mark.parametrize(("pattern", "written"), [("abc", "abc"), (float("nan"), "NaN"), (0, "0")])
def test_sliding_window_pattern_must_be_a_positive_integer(pattern, written):
    found = FileMetadata(Fields({PATTERN: pattern}, "x"), (), {})
    with refused(ed.ConversionError, f"sliding_window_pattern={written}"):
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
def test_pre_tokenizers_split_as_in_llama_cpp(name):
    tokens = [*byte_characters(), "<unk>"]
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


def test_a_bpe_without_a_pre_tokenizer_uses_the_default():
    metadata = {KEYS + "model": "gpt2", KEYS + "tokens": byte_characters(), KEYS + "merges": []}
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
    with refused(ed.ConversionError, "general.architecture='rwkv7'"):
        ed.load_hf(other)
    words = {"model": "gpt2", "pre": "unheard", "tokens": ["a", "b"], "merges": ["a b"]}
    for change, named in (
        ({}, "tokenizer.ggml.pre='unheard'"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5'"),
        ({"pre": "gpt-2", "merges": ["ab"]}, "tokenizer.ggml.merges"),
        ({"pre": "gpt-2", "tokens": ["a", "a"]}, "tokenizer.ggml.tokens"),
        ({"pre": "gpt-2", "token_type": [1]}, "tokenizer.ggml.token_type"),
    ):
        metadata = {KEYS + key: value for key, value in (words | change).items()}
        with refused(ed.DataError, named):
            load_tokenizer(tiny(tmp_path / "y.gguf", metadata=metadata))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused(ed.EqxDecodersError, "'gguf'", "[gguf]"):
        ed.load_hf(FIXTURES / "llama.gguf")


def test_directory_name_may_end_with_gguf(tmp_path):
    folder = Path(tmp_path, "x.gguf")
    folder.mkdir()
    with refused(ed.ConversionError, folder / "config.json"):
        ed.load_hf(folder)
