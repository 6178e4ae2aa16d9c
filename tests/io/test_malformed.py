"""A broken or hostile Hugging Face directory gives one sentence: what is wrong, and the rule or the remedy.

A directory is data. Whatever stands in it, only its own JSON and safetensors files are opened, and nothing is run.
"""

import copy
import functools
import itertools
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.io.directory import Directory, stored_tensors


FIXTURES = Path(__file__).parent.parent / "fixtures"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
MIB = 1_000_000

Break = Callable[[Path], None]
Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, content

# name of the case -> (fixture, what breaks it, what the sentence says: the thing, then the rule or the remedy)
CASES: dict[str, tuple[str, Break, tuple[str, ...]]] = {}


def copy_of(fixture: str, directory: Path) -> Path:
    """The files of a fixture that a published model has, in a directory of their own."""
    unpublished = shutil.ignore_patterns("expected.npz", "config_legacy.json", "rendered.json")
    return Path(shutil.copytree(FIXTURES / fixture, directory / "model", ignore=unpublished))


def case(name: str, fixture: str, breaks: Break, *says: str) -> None:
    assert name not in CASES
    CASES[name] = (fixture, breaks, says)


# --- config.json ------------------------------------------------------------------------------------------------------


def config(**edit: Any) -> Break:
    """Changed keys of `config.json`; Ellipsis removes one."""

    def breaks(directory: Path) -> None:
        path = directory / "config.json"
        content = json.loads(path.read_text()) | edit
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return breaks


def text(content: str | bytes, name: str = "config.json") -> Break:
    """Another content of a file."""
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda directory: void((directory / name).write_bytes(raw))


def void(_: Any) -> None: ...


def again(name: str, key: str) -> Break:
    """A key of a JSON file stands twice, with the same value."""

    def breaks(directory: Path) -> None:
        path = directory / name
        path.write_text(re.sub(rf'("{key}": *[^,}}\s]+)', r"\1, \1", path.read_text()))

    return breaks


def remove(name: str) -> Break:
    return lambda directory: (directory / name).unlink()


def folder_instead(name: str) -> Break:
    def breaks(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return breaks


def link_out(name: str) -> Break:
    """The file stands outside, and a link in the directory leads there."""

    def breaks(directory: Path) -> None:
        outside = directory.parent / f"outside-{name}"
        (directory / name).rename(outside)
        (directory / name).symlink_to(outside)

    return breaks


def rope(**table: Any) -> Break:
    return config(rope_parameters={"rope_theta": 1000.0, **table})


def remote_code(directory: Path) -> None:
    (directory / "modeling_evil.py").write_text("raise SystemExit('this ran')")
    config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})(directory)


case("config missing", "mistral_window", remove("config.json"), "config.json", "does not exist")
case("config empty", "mistral_window", text(""), "config.json", "JSON")
case("config no JSON", "mistral_window", text("{'hidden_size': 24}"), "config.json", "JSON")
case("config cut off", "mistral_window", text('{"model_type": "mistral", "hidden_si'), "config.json", "JSON")
case("config no UTF-8", "mistral_window", text(b'{"model_type": "\xff\xfe"}'), "config.json", "JSON")
case("config a list", "mistral_window", text("[1, 2]"), "config.json", "object")
case("config a number", "mistral_window", text("7"), "config.json", "object")
case("config {}", "mistral_window", text("{}"), "config.json")
case("config 11 MB", "mistral_window", text('{"model_type": "' + "a" * 11 * MIB + '"}'), "config.json", "bytes")
case("config deep", "mistral_window", text("[" * 200_000), "config.json", "JSON")
case("config deep key", "mistral_window", text('{"model_type":' + '{"a":' * 100_000 + "1"), "config.json", "JSON")
case(
    "config a number of 5000 digits",
    "mistral_window",
    text('{"hidden_size": ' + "9" * 5000 + "}"),
    "config.json",
    "JSON",
)
case("config key twice", "mistral_window", again("config.json", "hidden_size"), "config.json", "twice")
case("config link out", "mistral_window", link_out("config.json"), "config.json", "leads out")
case("config a directory", "mistral_window", folder_instead("config.json"), "config.json", "regular file")

case(
    "sizes huge",
    "mistral_window",
    config(hidden_size=2**31 - 1, vocab_size=2**31 - 1, head_dim=2**31 - 2),
    GATE,
    "has the shape",
)
case("no model_type", "mistral_window", config(model_type=...), "model_type")
case("model_type a list", "mistral_window", config(model_type=["mistral"]), "model_type")
case("model_type misspelled", "mistral_window", config(model_type="mistrall"), "mistrall", "mistral")
case("model_type unknown", "mistral_window", config(model_type="bloom"), "bloom", "Known")
case("another head", "llama_bf16", config(architectures=["LlamaForSequenceClassification"]), "architectures")

for name, value in {
    "zero": 0,
    "negative": -4,
    "float": 24.0,
    "bool": True,
    "string": "24",
    "list": [24],
    "huge": 10**12,
}.items():
    case(f"hidden_size {name}", "mistral_window", config(hidden_size=value), "hidden_size", "integer")
for key in (
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
):
    case(f"{key} zero", "mistral_window", config(**{key: 0}), key, "integer")
case("num_hidden_layers huge", "mistral_window", config(num_hidden_layers=10**9), "num_hidden_layers")
case("hidden_size missing", "mistral_window", config(hidden_size=...), "hidden_size", "missing")
case("head_dim odd", "mistral_window", config(head_dim=13), "13", "even")
case("heads not dividing", "mistral_window", config(num_key_value_heads=3), "3", "multiple")
case("window zero", "mistral_window", config(sliding_window=0), "sliding_window", "integer")
case("eps NaN", "mistral_window", config(rms_norm_eps=float("nan")), "rms_norm_eps", "number")
case("eps infinite", "mistral_window", config(rms_norm_eps=float("inf")), "rms_norm_eps", "number")
case("eps negative", "mistral_window", config(rms_norm_eps=-1e-5), "rms_norm_eps", "number")
case("eps a string", "mistral_window", config(rms_norm_eps="1e-5"), "rms_norm_eps", "number")
case("flag a number", "mistral_window", config(tie_word_embeddings=1), "tie_word_embeddings", "true or false")
case("activation unknown", "mistral_window", config(hidden_act="silly"), "silly", "Known")
case("activation a path", "mistral_window", config(hidden_act="os.system"), "os.system", "Known")
case("rope type unknown", "mistral_window", rope(rope_type="spiral"), "spiral", "Known")
case("rope without factor", "mistral_window", rope(rope_type="linear"), "factor", "missing")
case("rope with an unknown key", "mistral_window", rope(rope_type="linear", factor=2.0, twist=3.0), "twist")
case("rope a list", "mistral_window", config(rope_parameters=[1]), "rope_parameters")
case("rope theta negative", "mistral_window", rope(rope_theta=-1.0), "rope_theta", "number")
case("rope partial", "mistral_window", config(partial_rotary_factor=0.5), "partial_rotary_factor", "not implemented")
case("two ropes", "mistral_window", config(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling")
case("layer_types short", "qwen2_mixed", config(layer_types=["full_attention"]), "layer_types", "3 layers")
case("layer_types unknown", "qwen2_mixed", config(layer_types=["linear_attention"] * 3), "linear_attention", "Known")
case("layer_types a string", "qwen2_mixed", config(layer_types="full_attention"), "layer_types")
case("windows off, layers sliding", "qwen2_mixed", config(use_sliding_window=False), "sliding")
case("query scale", "gemma2_odd", config(query_pre_attn_scalar=0), "query_pre_attn_scalar", "integer")
case("soft cap", "gemma2_odd", config(final_logit_softcapping=-30.0), "final_logit_softcapping", "number")
case("heads of gpt2", "gpt2", config(n_head=5), "n_head", "multiple")

case("not causal", "mistral_window", config(is_causal=False), "is_causal", "not implemented")
case("unknown key", "mistral_window", config(logits_scaling=2.0), "logits_scaling", "not known")
case("unknown key, misspelled", "mistral_window", config(silding_window=2), "silding_window", "sliding_window")
case(
    "bidirectional",
    "gemma2_odd",
    config(use_bidirectional_attention=True),
    "use_bidirectional_attention",
    "not implemented",
)
case(
    "per layer",
    "mistral_window",
    config(per_layer_config={"0": {"sliding_window": 2}}),
    "per_layer_config",
    "not known",
)
case("quantised", "llama_bf16", config(quantization_config={"quant_method": "gptq"}), "quantization_config", "gptq")
case("remote code", "llama_bf16", remote_code, "auto_map", "not known")
case(
    "remote kernel",
    "llama_bf16",
    config(_attn_implementation_internal="evil/kernel"),
    "_attn_implementation_internal",
    "not known",
)
case("trust", "llama_bf16", config(trust_remote_code=True), "trust_remote_code", "not known")
case(
    "other weights",
    "llama_bf16",
    config(transformers_weights="../weights.safetensors"),
    "transformers_weights",
    "not known",
)
case(
    "other configuration",
    "llama_bf16",
    config(configuration_files=["config.4.0.0.json"]),
    "configuration_files",
    "not known",
)


# --- safetensors ------------------------------------------------------------------------------------------------------


def read(path: Path) -> Tensors:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    return {name: (row["dtype"], row["shape"], body[slice(*row["data_offsets"])]) for name, row in header.items()}


def header_of(tensors: Tensors) -> dict[str, Any]:
    header, offset = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(content)]}
        offset += len(content)
    return header


def write(path: Path, tensors: Tensors, header: str | None = None) -> None:
    raw = (header or json.dumps(header_of(tensors))).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(content for _, _, content in tensors.values()))


def tensors(edit: Callable[[Tensors], Any], name: str = WEIGHTS) -> Break:
    """Changed tensors of a sound file."""

    def breaks(directory: Path) -> None:
        found = read(directory / name)
        edit(found)
        write(directory / name, found)

    return breaks


def header(edit: Callable[[dict[str, Any]], Any]) -> Break:
    """A changed header before the same content."""

    def breaks(directory: Path) -> None:
        found = read(directory / WEIGHTS)
        changed = header_of(found)
        edit(changed)
        write(directory / WEIGHTS, found, json.dumps(changed))

    return breaks


def header_text(edit: Callable[[str], str]) -> Break:
    def breaks(directory: Path) -> None:
        found = read(directory / WEIGHTS)
        write(directory / WEIGHTS, found, edit(json.dumps(header_of(found))))

    return breaks


def raw(edit: Callable[[bytes], bytes]) -> Break:
    """Changed bytes of the file."""

    def breaks(directory: Path) -> None:
        path = directory / WEIGHTS
        path.write_bytes(edit(path.read_bytes()))

    return breaks


def cast(name: str, dtype: str, size: int) -> Callable[[Tensors], Any]:
    """A tensor of another dtype, of `size` bytes a number."""

    def edit(found: Tensors) -> None:
        shape = found[name][1]
        found[name] = (dtype, shape, bytes(int(np.prod(shape)) * size))

    return edit


def reshape(name: str, shape: Callable[[list[int]], list[int]]) -> Callable[[Tensors], Any]:
    return lambda found: found.update({name: (found[name][0], shape(found[name][1]), found[name][2])})


def pickles(directory: Path) -> None:
    """As an old model: the weights in a pickle only, and this one would run a command."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {directory / 'ran'}",)

    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


def twice(found: str) -> str:
    """The first name stands twice in the header, the second time at another place."""
    rows = json.loads(found)
    row = json.dumps(rows[GATE])
    return found[:-1] + f', "{GATE}": {row.replace(str(rows[GATE]["data_offsets"][0]), "0")}}}'


case("no weights", "mistral_window", remove(WEIGHTS), WEIGHTS)
case("pickle", "mistral_window", pickles, "pytorch_model.bin", "safetensors")
case("weights a directory", "mistral_window", folder_instead(WEIGHTS), WEIGHTS, "regular file")
case("weights link out", "mistral_window", link_out(WEIGHTS), WEIGHTS, "leads out")
case("weights empty", "mistral_window", raw(lambda _: b""), WEIGHTS, "no sound safetensors")
case("cut in the length", "mistral_window", raw(lambda b: b[:5]), WEIGHTS, "no sound safetensors")
case("cut in the header", "mistral_window", raw(lambda b: b[:200]), WEIGHTS, "no sound safetensors")
case("cut in the content", "mistral_window", raw(lambda b: b[: len(b) // 2]), WEIGHTS, "no sound safetensors")
case("cut by a byte", "mistral_window", raw(lambda b: b[:-1]), WEIGHTS, "no sound safetensors")
case("a byte too many", "mistral_window", raw(lambda b: b + b"\0"), WEIGHTS, "no sound safetensors")
case("a zip behind it", "mistral_window", raw(lambda b: b + b"PK\x05\x06" + bytes(18)), WEIGHTS, "no sound safetensors")
case("header huge", "mistral_window", raw(lambda b: struct.pack("<Q", 2**62) + b[8:]), WEIGHTS, "no sound safetensors")
case(
    "header longer than the file",
    "mistral_window",
    raw(lambda b: struct.pack("<Q", len(b)) + b[8:]),
    WEIGHTS,
    "no sound safetensors",
)
case("header of no length", "mistral_window", raw(lambda b: bytes(8) + b[8:]), WEIGHTS, "no sound safetensors")
case("header no JSON", "mistral_window", header_text(lambda h: h.replace(":", ";")), WEIGHTS, "no sound safetensors")
case("header a list", "mistral_window", header_text(lambda h: f"[{h}]"), WEIGHTS, "no sound safetensors")
case("header deep", "mistral_window", header_text(lambda _: "[" * 100_000), WEIGHTS, "no sound safetensors")
case("header names a tensor twice", "mistral_window", header_text(twice), WEIGHTS, "no sound safetensors")
case(
    "offsets overlap",
    "mistral_window",
    header(lambda h: h[GATE].update(data_offsets=h[QUERY]["data_offsets"])),
    WEIGHTS,
    "no sound safetensors",
)
case(
    "offsets backwards",
    "mistral_window",
    header(lambda h: h[GATE]["data_offsets"].reverse()),
    WEIGHTS,
    "no sound safetensors",
)
case(
    "offsets negative",
    "mistral_window",
    header(lambda h: h[GATE].update(data_offsets=[-8, 8])),
    WEIGHTS,
    "no sound safetensors",
)
case(
    "offsets beyond",
    "mistral_window",
    header(lambda h: h[GATE].update(data_offsets=[10**15, 10**15 + 3840])),
    WEIGHTS,
    "no sound safetensors",
)
case(
    "offsets missing", "mistral_window", header(lambda h: h[GATE].pop("data_offsets")), WEIGHTS, "no sound safetensors"
)
case(
    "shape and size differ",
    "mistral_window",
    tensors(reshape(GATE, lambda s: [s[0], s[1] + 1])),
    WEIGHTS,
    "no sound safetensors",
)
case("shape overflows", "mistral_window", tensors(reshape(GATE, lambda s: [2**62, 8])), WEIGHTS, "no sound safetensors")
case("dtype unknown", "mistral_window", header(lambda h: h[GATE].update(dtype="F33")), WEIGHTS, "no sound safetensors")

case("tensor missing", "mistral_window", tensors(lambda t: t.pop(QUERY)), QUERY, "missing")
case("layer missing", "mistral_window", config(num_hidden_layers=3), "model.layers.2", "missing")
case("layer too many", "mistral_window", config(num_hidden_layers=1), GATE, "belongs to no weight")
case("tensor too many", "mistral_window", tensors(lambda t: t.update(extra=t[QUERY])), "extra", "belongs to no weight")
case(
    "bias too many",
    "mistral_window",
    tensors(lambda t: t.update({QUERY.replace("weight", "bias"): t[QUERY]})),
    "q_proj.bias",
    "belongs to no weight",
)
case("no head", "mistral_window", tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight", "missing")
case("other shape", "mistral_window", config(intermediate_size=48), GATE, "has the shape")
case("transposed", "mistral_window", tensors(reshape(GATE, lambda s: s[::-1])), GATE, "has the shape")
case("flattened", "mistral_window", tensors(reshape(GATE, lambda s: [s[0] * s[1]])), GATE, "has the shape")
case("no elements", "mistral_window", tensors(lambda t: t.update({GATE: ("F32", [0, 24], b"")})), GATE, "has the shape")
case("integers", "mistral_window", tensors(cast(GATE, "I32", 4)), GATE, "I32")
case("bytes", "mistral_window", tensors(cast(GATE, "U8", 1)), GATE, "U8")
case("float8", "mistral_window", tensors(cast(GATE, "F8_E4M3", 1)), GATE, "F8_E4M3")
case(
    "other prefix",
    "mistral_window",
    tensors(lambda t: [t.update({f"module.{n}": t.pop(n)}) for n in list(t)]),
    QUERY,
    "missing",
)


# --- the index of several files ---------------------------------------------------------------------------------------

FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
TABLE = "model.embed_tokens.weight"


def index(edit: Callable[[dict[str, Any]], Any]) -> Break:
    def breaks(directory: Path) -> None:
        path = directory / INDEX
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))

    return breaks


def sends(file: Any, name: str = TABLE) -> Break:
    """The index says that a tensor stands in `file`."""
    return index(lambda content: content["weight_map"].update({name: file}))


def outside(file: str) -> Break:
    """Like `sends`, and there is a sound file at that place."""

    def breaks(directory: Path) -> None:
        shutil.copy(directory / FIRST, directory.parent / "x.safetensors")
        (directory / "a").mkdir()
        shutil.copy(directory / FIRST, directory / "a" / "x.safetensors")
        index(
            lambda content: [
                content["weight_map"].update({n: file}) for n, f in content["weight_map"].items() if f == FIRST
            ]
        )(directory)

    return breaks


PATHS = (
    "../x.safetensors", "a/x.safetensors", "a/../../x.safetensors", "./" + FIRST, "..\\x.safetensors", "/etc/passwd",
    "/etc/x.safetensors", "x\0.safetensors", "x.safetensors\n", "~/x.safetensors", "file:///x.safetensors",
    ".safetensors/..", "",
)  # fmt: skip
for number, file in enumerate(PATHS):
    case(f"index path {number}", "llama_rope", outside(file), TABLE, "safetensors", "beside the index")
case("index a pickle", "llama_rope", sends("pytorch_model.bin"), "pytorch_model.bin")
for name, value in {"null": None, "number": 3, "list": [FIRST], "object": {}}.items():
    case(f"index file {name}", "llama_rope", sends(value), "weight_map", "file name")
case(
    "index file missing",
    "llama_rope",
    sends("model-00009-of-00003.safetensors"),
    "model-00009-of-00003.safetensors",
    "does not exist",
)
case("shard missing", "llama_rope", remove(SECOND), SECOND, "does not exist")
case("shard link out", "llama_rope", link_out(SECOND), SECOND, "leads out")
case(
    "shard cut",
    "llama_rope",
    lambda d: void((d / SECOND).write_bytes((d / SECOND).read_bytes()[:-5])),
    SECOND,
    "no sound safetensors",
)
case("tensor in another shard", "llama_rope", sends(SECOND), TABLE, "lacks")
case("tensor in no shard", "llama_rope", sends(FIRST, "model.layers.7.mlp.gate_proj.weight"), "model.layers.7", "lacks")
case(
    "tensor in two shards",
    "llama_rope",
    tensors(lambda t: t.update({TABLE: t["model.layers.0.mlp.up_proj.weight"]}), SECOND),
    TABLE,
    SECOND,
    "also holds",
)
case(
    "shard holds more",
    "llama_rope",
    tensors(lambda t: t.update(extra=t["model.layers.0.mlp.up_proj.weight"]), SECOND),
    "extra",
    "also holds",
)
case("index empty", "llama_rope", index(lambda content: content["weight_map"].clear()), "weight_map")
case("index without map", "llama_rope", index(lambda content: content.pop("weight_map")), "weight_map")
case("index map a list", "llama_rope", index(lambda content: content.update(weight_map=[FIRST])), "weight_map")
case("index no JSON", "llama_rope", text("{", INDEX), INDEX, "JSON")
case("index a list", "llama_rope", text("[]", INDEX), INDEX, "object")
case("index a directory", "llama_rope", folder_instead(INDEX), INDEX, "regular file")
case("index link out", "llama_rope", link_out(INDEX), INDEX, "leads out")
case("index name twice", "llama_rope", again(INDEX, TABLE), INDEX, "twice")


# --- the tests --------------------------------------------------------------------------------------------------------

# what every sentence has one of: the rule or the remedy
RULE = re.compile(
    r"\b(must|incomplete|more than|not implemented|download|load|convert|remove|copy|replace|keep|give|add)\b|known:",
    re.IGNORECASE,
)
LONGEST = 4000


@pytest.mark.parametrize("fixture", sorted({fixture for fixture, _, _ in CASES.values()}))
def test_unbroken(fixture, tmp_path):
    """Each copy loads as long as nothing is broken, so that a refusal is about what is broken."""
    assert isinstance(ed.load_hf(copy_of(fixture, tmp_path)), ed.Decoder)


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name, tmp_path):
    fixture, breaks, says = CASES[name]
    directory = copy_of(fixture, tmp_path)
    breaks(directory)
    with pytest.raises(ed.ConversionError) as caught:
        ed.load_hf(directory)
    sentence = str(caught.value).replace(str(tmp_path), "")  # which has the name of the case
    assert all(word in sentence for word in says), sentence
    assert RULE.search(sentence), sentence
    assert len(sentence) < LONGEST
    assert not (directory / "ran").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("{}"), "no directory"),
        (lambda path: path.mkdir(), "config.json does not exist"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "does not exist"),
    ],
)
def test_no_directory(make, says, tmp_path):
    make(tmp_path / "model")
    with pytest.raises(ed.ConversionError, match=says):
        ed.load_hf(tmp_path / "model")


ODD = (None, 0, -1, 3, 2.5, True, "x", [[]], {"a": [1]}, float("nan"), 10**30, "\0")


@pytest.mark.parametrize("fixture", sorted(path.parent.name for path in FIXTURES.glob("*/config.json")))
@pytest.mark.parametrize("file", ["config.json", "config_legacy.json"])
def test_odd_settings(fixture, file):
    """Whatever one setting is changed to, the result is a configuration or a ConversionError."""
    content = json.loads((FIXTURES / fixture / file).read_text())
    family = FAMILIES[content["model_type"]]
    objects = [key for key, value in content.items() if isinstance(value, dict)]
    tables: list[tuple[str, ...]] = [(), *((key,) for key in objects)]
    tables += [(key, inner) for key in objects for inner, value in content[key].items() if isinstance(value, dict)]
    refused = 0
    for table in tables:
        for key, odd in itertools.product([*reached(content, table), "odd"], ODD):
            changed = copy.deepcopy(content)
            reached(changed, table)[key] = odd
            try:
                config, _ = family.decode(changed)
            except ed.ConversionError as error:
                assert len(str(error)) < LONGEST
                refused += 1
            else:
                hash(config)
    assert refused > 100


def reached(content: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    return functools.reduce(lambda inner, key: inner[key], path, content)


def test_cut_anywhere(tmp_path):
    """A file that ends too early is refused wherever it ends."""
    directory = copy_of("mistral_window", tmp_path)
    whole = (directory / WEIGHTS).read_bytes()
    ends = [*range(0, 400, 7), *np.random.default_rng(0).integers(400, len(whole), 100)]
    for end in ends:
        (directory / WEIGHTS).write_bytes(whole[:end])
        with pytest.raises(ed.ConversionError):
            stored_tensors(Directory(directory))


def test_a_changed_byte_of_the_header(tmp_path):
    """It is refused, or it changes nothing that counts; never another exception."""
    directory = copy_of("mistral_window", tmp_path)
    whole = (directory / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    random = np.random.default_rng(0)
    refused = 0
    for place, byte in zip(random.integers(0, 8 + length, 100), random.integers(0, 256, 100), strict=True):
        changed = bytearray(whole)
        changed[place] = byte
        (directory / WEIGHTS).write_bytes(bytes(changed))
        try:
            ed.abstract_hf(directory)
        except ed.ConversionError:
            refused += 1
    assert refused > 75


def test_download_cache(tmp_path):
    """huggingface_hub keeps the files as `blobs` of a repository, and directories of links that lead to them."""
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(copy_of("llama_rope", tmp_path).iterdir()):
        path.rename(repository / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    model = ed.load_hf(snapshot)
    direct = ed.load_hf(FIXTURES / "llama_rope")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(direct), strict=True))

    # other links of such a directory lead nowhere
    (tmp_path / "secret").write_bytes((snapshot / FIRST).read_bytes())
    (snapshot / FIRST).unlink()
    (snapshot / FIRST).symlink_to("../../../secret")
    with pytest.raises(ed.ConversionError, match=FIRST):
        ed.load_hf(snapshot)


def test_a_directory_of_links(tmp_path):
    """A link to the directory itself is followed: it is what the user named."""
    (tmp_path / "link").symlink_to(copy_of("mistral_window", tmp_path))
    assert isinstance(ed.load_hf(tmp_path / "link"), ed.Decoder)


LISTENER = """
    import sys
    import eqx_decoders as ed

    clean, directory, refused = sys.argv[1:]
    ed.load_hf(clean)  # imports and first uses happen here, unwatched
    events = []
    sys.addaudithook(lambda event, args: events.append((event, str(args[0]) if args else "")))
    ed.load_hf(directory)
    try:
        ed.load_hf(refused)
    except ed.ConversionError:
        events.append(("refused", ""))
    for event, what in list(events):
        print(event, what.replace("\\n", " "))
"""
# files besides those that the weights are read from, and anything that could run what it finds
HARMFUL = ("exec", "compile", "import", "subprocess.", "os.", "socket.", "pickle.", "shutil.", "tempfile.", "urllib.")
LISTED = {"os.listdir", "os.scandir"}


def test_nothing_else_is_opened_or_run(tmp_path):
    """Beside the weights lie pickles and programs: loading opens only config.json and safetensors files."""
    clean = copy_of("llama_rope", tmp_path / "clean")
    directory = copy_of("llama_rope", tmp_path / "full")
    marked = directory / "ran"
    for name in ("modeling_llama.py", "configuration_llama.py", "__init__.py", "sitecustomize.py", "conftest.py"):
        (directory / name).write_text(f"open({str(marked)!r}, 'w')")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth", "tf_model.h5"):
        (directory / name).write_bytes(pickle.dumps(marked))
    refused = copy_of("llama_rope", tmp_path / "refused")
    remote_code(refused)

    command = [sys.executable, "-c", textwrap.dedent(LISTENER), *map(str, (clean, directory, refused))]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True
    )
    events = [line.split(" ", 1) for line in done.stdout.splitlines()]
    opened = {what for event, what in events if event == "open" and what.startswith(str(tmp_path))}
    allowed = [*directory.glob("*.safetensors"), directory / INDEX, directory / "config.json", refused / "config.json"]
    assert str(directory / "config.json") in opened
    assert opened <= set(map(str, allowed))
    others = {event for event, _ in events}
    assert "refused" in others
    assert not {event for event in others - LISTED if event.startswith(HARMFUL)}
    assert not marked.exists()
