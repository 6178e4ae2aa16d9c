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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.io.huggingface.directory import Directory, stored_tensors


FIXTURES = Path(__file__).parents[2] / "fixtures"
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


def case(name: str, breaks: Break, *says: str, fixture: str = "mistral_window") -> None:
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


case("config missing", remove("config.json"), "config.json", "does not exist")
case("config empty", text(""), "config.json", "JSON")
case("config no JSON", text("{'hidden_size': 24}"), "config.json", "JSON")
case("config cut off", text('{"model_type": "mistral", "hidden_si'), "config.json", "JSON")
case("config no UTF-8", text(b'{"model_type": "\xff\xfe"}'), "config.json", "JSON")
case("config a list", text("[1, 2]"), "config.json", "object")
case("config a number", text("7"), "config.json", "object")
case("config {}", text("{}"), "config.json")
case("config 11 MB", text('{"model_type": "' + "a" * 11 * MIB + '"}'), "config.json", "bytes")
case("config deep", text("[" * 200_000), "config.json", "JSON")
case("config deep key", text('{"model_type":' + '{"a":' * 100_000 + "1"), "config.json", "JSON")
case("config a number of 5000 digits", text('{"hidden_size": ' + "9" * 5000 + "}"), "config.json", "JSON")
case("config key twice", again("config.json", "hidden_size"), "config.json", "twice")
case("config link out", link_out("config.json"), "config.json", "leads out")
case("config a directory", folder_instead("config.json"), "config.json", "regular file")

case("sizes huge", config(hidden_size=2**31 - 1, vocab_size=2**31 - 1, head_dim=2**31 - 2), GATE, "has the shape")
case("no model_type", config(model_type=...), "model_type")
case("model_type a list", config(model_type=["mistral"]), "model_type")
case("model_type misspelled", config(model_type="mistrall"), "mistrall", "mistral")
case("model_type unknown", config(model_type="blt"), "blt", "Known")
case(
    "scores of a family without",
    config(architectures=["XForSequenceClassification"]),
    "transformers has no",
    fixture="granite",
)
case("another head", config(architectures=["LlamaForTokenClassification"]), "architectures", fixture="llama_bf16")

for name, value in {
    "zero": 0,
    "negative": -4,
    "float": 24.0,
    "bool": True,
    "string": "24",
    "list": [24],
    "huge": 10**12,
}.items():
    case(f"hidden_size {name}", config(hidden_size=value), "hidden_size", "integer")
for key in (
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
):
    case(f"{key} zero", config(**{key: 0}), key, "integer")
case("num_hidden_layers huge", config(num_hidden_layers=10**9), "num_hidden_layers")
case("hidden_size missing", config(hidden_size=...), "hidden_size", "missing")
case("head_dim odd", config(head_dim=13), "13", "even")
case("heads not dividing", config(num_key_value_heads=3), "3", "multiple")
case("window zero", config(sliding_window=0), "sliding_window", "integer")
case("eps NaN", config(rms_norm_eps=float("nan")), "rms_norm_eps", "number")
case("eps infinite", config(rms_norm_eps=float("inf")), "rms_norm_eps", "number")
case("eps negative", config(rms_norm_eps=-1e-5), "rms_norm_eps", "number")
case("eps a string", config(rms_norm_eps="1e-5"), "rms_norm_eps", "number")
case("flag a number", config(tie_word_embeddings=1), "tie_word_embeddings", "true or false")
case("activation unknown", config(hidden_act="silly"), "silly", "Known")
case("activation a path", config(hidden_act="os.system"), "os.system", "Known")
case("rope type unknown", rope(rope_type="spiral"), "spiral", "Known")
case("rope without factor", rope(rope_type="linear"), "factor", "missing")
case("rope with an unknown key", rope(rope_type="linear", factor=2.0, twist=3.0), "twist")
case("rope a list", config(rope_parameters=[1]), "rope_parameters")
case("rope theta negative", rope(rope_theta=-1.0), "rope_theta", "number")
case("rope partial", config(partial_rotary_factor=0.5), "partial_rotary_factor", "not supported")
case("two ropes", config(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling")
case("layer_types short", config(layer_types=["full_attention"]), "layer_types", "3 layers", fixture="qwen2_mixed")
case(
    "layer_types unknown",
    config(layer_types=["linear_attention"] * 3),
    "linear_attention",
    "Known",
    fixture="qwen2_mixed",
)
case("layer_types a string", config(layer_types="full_attention"), "layer_types", fixture="qwen2_mixed")
case("windows off, layers sliding", config(use_sliding_window=False), "sliding", fixture="qwen2_mixed")
case("query scale", config(query_pre_attn_scalar=0), "query_pre_attn_scalar", "integer", fixture="gemma2_odd")
case("soft cap", config(final_logit_softcapping=-30.0), "final_logit_softcapping", "number", fixture="gemma2_odd")
case("heads of gpt2", config(n_head=5), "n_head", "multiple", fixture="gpt2")

case("not causal", config(is_causal=False), "is_causal", "not supported")
case("unknown key", config(logits_scaling=2.0), "logits_scaling", "Unknown keys")
case("unknown key, misspelled", config(silding_window=2), "silding_window", "sliding_window")
case(
    "bidirectional",
    config(use_bidirectional_attention=True),
    "use_bidirectional_attention",
    "not supported",
    fixture="gemma2_odd",
)
case("per layer", config(per_layer_config={"0": {"sliding_window": 2}}), "per_layer_config", "Unknown keys")
case(
    "quantised",
    config(quantization_config={"quant_method": "hqq"}),
    "quantization_config",
    "hqq",
    fixture="llama_bf16",
)
case("remote code", remote_code, "auto_map", "Unknown keys", fixture="llama_bf16")
case(
    "remote kernel",
    config(_attn_implementation_internal="evil/kernel"),
    "_attn_implementation_internal",
    "Unknown keys",
    fixture="llama_bf16",
)
case("trust", config(trust_remote_code=True), "trust_remote_code", "Unknown keys", fixture="llama_bf16")
case(
    "other weights",
    config(transformers_weights="../weights.safetensors"),
    "transformers_weights",
    "Unknown keys",
    fixture="llama_bf16",
)
case(
    "other configuration",
    config(configuration_files=["config.4.0.0.json"]),
    "configuration_files",
    "Unknown keys",
    fixture="llama_bf16",
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


case("no weights", remove(WEIGHTS), WEIGHTS)
case("pickle", pickles, "pytorch_model.bin", "safetensors")
case("weights a directory", folder_instead(WEIGHTS), WEIGHTS, "regular file")
case("weights link out", link_out(WEIGHTS), WEIGHTS, "leads out")
UNSOUND: dict[str, Break] = {
    "weights empty": raw(lambda _: b""),
    "cut in the length": raw(lambda b: b[:5]),
    "cut in the header": raw(lambda b: b[:200]),
    "cut in the content": raw(lambda b: b[: len(b) // 2]),
    "cut by a byte": raw(lambda b: b[:-1]),
    "a byte too many": raw(lambda b: b + b"\0"),
    "a zip behind it": raw(lambda b: b + b"PK\x05\x06" + bytes(18)),
    "header huge": raw(lambda b: struct.pack("<Q", 2**62) + b[8:]),
    "header longer than the file": raw(lambda b: struct.pack("<Q", len(b)) + b[8:]),
    "header of no length": raw(lambda b: bytes(8) + b[8:]),
    "header no JSON": header_text(lambda h: h.replace(":", ";")),
    "header a list": header_text(lambda h: f"[{h}]"),
    "header deep": header_text(lambda _: "[" * 100_000),
    "header names a tensor twice": header_text(twice),
    "offsets overlap": header(lambda h: h[GATE].update(data_offsets=h[QUERY]["data_offsets"])),
    "offsets backwards": header(lambda h: h[GATE]["data_offsets"].reverse()),
    "offsets negative": header(lambda h: h[GATE].update(data_offsets=[-8, 8])),
    "offsets beyond": header(lambda h: h[GATE].update(data_offsets=[10**15, 10**15 + 3840])),
    "offsets missing": header(lambda h: h[GATE].pop("data_offsets")),
    "shape and size differ": tensors(reshape(GATE, lambda s: [s[0], s[1] + 1])),
    "shape overflows": tensors(reshape(GATE, lambda s: [2**62, 8])),
    "dtype unknown": header(lambda h: h[GATE].update(dtype="F33")),
}
for name, breaks in UNSOUND.items():
    case(name, breaks, WEIGHTS, "no sound safetensors")

case("tensor missing", tensors(lambda t: t.pop(QUERY)), QUERY, "missing")
case("layer missing", config(num_hidden_layers=3), "model.layers.2", "missing")
case("layer too many", config(num_hidden_layers=1), GATE, "belongs to no weight")
case("tensor too many", tensors(lambda t: t.update(extra=t[QUERY])), "extra", "belongs to no weight")
case(
    "bias too many",
    tensors(lambda t: t.update({QUERY.replace("weight", "bias"): t[QUERY]})),
    "q_proj.bias",
    "belongs to no weight",
)
case("no head", tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight", "missing")
case("other shape", config(intermediate_size=48), GATE, "has the shape")
case("transposed", tensors(reshape(GATE, lambda s: s[::-1])), GATE, "has the shape")
case("flattened", tensors(reshape(GATE, lambda s: [s[0] * s[1]])), GATE, "has the shape")
case("no elements", tensors(lambda t: t.update({GATE: ("F32", [0, 24], b"")})), GATE, "has the shape")
case("integers", tensors(cast(GATE, "I32", 4)), GATE, "I32")
case("bytes", tensors(cast(GATE, "U8", 1)), GATE, "U8")
case("float8", tensors(cast(GATE, "F8_E4M3", 1)), GATE, "F8_E4M3")
case("other prefix", tensors(lambda t: [t.update({f"module.{n}": t.pop(n)}) for n in list(t)]), QUERY, "missing")


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
    case(f"index path {number}", outside(file), TABLE, "safetensors", "beside the index", fixture="llama_rope")
case("index a pickle", sends("pytorch_model.bin"), "pytorch_model.bin", fixture="llama_rope")
for name, value in {"null": None, "number": 3, "list": [FIRST], "object": {}}.items():
    case(f"index file {name}", sends(value), "weight_map", "file name", fixture="llama_rope")
case(
    "index file missing",
    sends("model-00009-of-00003.safetensors"),
    "model-00009-of-00003.safetensors",
    "does not exist",
    fixture="llama_rope",
)
case("shard missing", remove(SECOND), SECOND, "does not exist", fixture="llama_rope")
case("shard link out", link_out(SECOND), SECOND, "leads out", fixture="llama_rope")
case(
    "shard cut",
    lambda d: void((d / SECOND).write_bytes((d / SECOND).read_bytes()[:-5])),
    SECOND,
    "no sound safetensors",
    fixture="llama_rope",
)
case("tensor in another shard", sends(SECOND), TABLE, "lacks", fixture="llama_rope")
case(
    "tensor in no shard",
    sends(FIRST, "model.layers.7.mlp.gate_proj.weight"),
    "model.layers.7",
    "lacks",
    fixture="llama_rope",
)
case(
    "tensor in two shards",
    tensors(lambda t: t.update({TABLE: t["model.layers.0.mlp.up_proj.weight"]}), SECOND),
    TABLE,
    SECOND,
    "also holds",
    fixture="llama_rope",
)
case(
    "shard holds more",
    tensors(lambda t: t.update(extra=t["model.layers.0.mlp.up_proj.weight"]), SECOND),
    "extra",
    "also holds",
    fixture="llama_rope",
)
case("index empty", index(lambda content: content["weight_map"].clear()), "weight_map", fixture="llama_rope")
case("index without map", index(lambda content: content.pop("weight_map")), "weight_map", fixture="llama_rope")
case("index map a list", index(lambda content: content.update(weight_map=[FIRST])), "weight_map", fixture="llama_rope")
case("index no JSON", text("{", INDEX), INDEX, "JSON", fixture="llama_rope")
case("index a list", text("[]", INDEX), INDEX, "object", fixture="llama_rope")
case("index a directory", folder_instead(INDEX), INDEX, "regular file", fixture="llama_rope")
case("index link out", link_out(INDEX), INDEX, "leads out", fixture="llama_rope")
case("index name twice", again(INDEX, TABLE), INDEX, "twice", fixture="llama_rope")


# --- the tests --------------------------------------------------------------------------------------------------------

# what every sentence has one of: the rule or the remedy
RULE = re.compile(
    r"\b(must|incomplete|more than|not implemented|supported|download|load|convert|remove|copy|replace|keep|give|add)\b"
    r"|known:",
    re.IGNORECASE,
)
LONGEST = 4000


@pytest.mark.slow(fast=("gemma2_odd", "gpt2", "granite"))
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


# the others are read by the same functions, or nearly
ODDLY_SET = ("llama_rope",)


@pytest.mark.parametrize(
    "fixture",
    [
        pytest.param(name, marks=() if name in ODDLY_SET else pytest.mark.slow)
        for name in sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
    ],
)
def test_odd_settings(fixture):
    """Whatever one setting is changed to, the result is a configuration or a ConversionError.

    In the old spelling of the same model only what it says in another way is changed.
    """
    tried: dict[tuple[str, ...], Any] = {}
    refused = 0
    for file in filter(Path.exists, (FIXTURES / fixture / name for name in ("config.json", "config_legacy.json"))):
        content = json.loads(file.read_text())
        family = FAMILIES[content["model_type"]]
        objects = [key for key, value in content.items() if isinstance(value, dict)]
        tables: list[tuple[str, ...]] = [(), *((key,) for key in objects)]
        tables += [(key, inner) for key in objects for inner, value in content[key].items() if isinstance(value, dict)]
        settings = {
            (*table, key): value for table in tables for key, value in {**reached(content, table), "odd": 0}.items()
        }
        changes = [path for path, value in settings.items() if path not in tried or tried[path] != value]
        assert len(changes) > 2
        for (*table, key), odd in itertools.product(changes, ODD):
            changed = copy.deepcopy(content)
            reached(changed, table)[key] = odd
            try:
                config, _ = family.decode(changed)
            except ed.ConversionError as error:
                assert len(str(error)) < LONGEST
                refused += 1
            else:
                hash(config)
        tried |= settings
    assert refused > 100


def reached(content: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    allowed = [*directory.glob("*.safetensors"), directory / INDEX, refused / "config.json"]
    allowed += [directory / "config.json", directory / "generation_config.json"]
    assert str(directory / "config.json") in opened
    assert opened <= set(map(str, allowed))
    others = {event for event, _ in events}
    assert "refused" in others
    assert not {event for event in others - LISTED if event.startswith(HARMFUL)}
    assert not marked.exists()
