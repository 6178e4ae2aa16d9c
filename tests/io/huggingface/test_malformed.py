"""Malformed and hostile Hugging Face directories are refused by an error that names the file, the key or the tensor.

Only the JSON and safetensors files of a directory are opened, and nothing in it is run.
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
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface.directory import Directory, stored_tensors
from tests.errors import assert_names, refused


FIXTURES = Path(__file__).parents[2] / "fixtures"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
MIB = 1_000_000

Break = Callable[[Path], None]
Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, content

# name of the case -> (fixture, the change that breaks it, words of the error message)
CASES: dict[str, tuple[str, Break, tuple[str, ...]]] = {}


def copy_of(fixture: str, directory: Path) -> Path:
    """Copy the files of a fixture that a published model has."""
    unpublished = shutil.ignore_patterns("expected.npz", "config_legacy.json", "rendered.json")
    return Path(shutil.copytree(FIXTURES / fixture, directory / "model", ignore=unpublished))


def case(name: str, breaks: Break, *named: str, fixture: str = "mistral_window") -> None:
    assert name not in CASES
    CASES[name] = (fixture, breaks, named)


# --- config.json ------------------------------------------------------------------------------------------------------


def config(**edit: Any) -> Break:
    """Change keys of `config.json`; Ellipsis removes one."""

    def breaks(directory: Path) -> None:
        path = directory / "config.json"
        content = json.loads(path.read_text()) | edit
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return breaks


def text(content: str | bytes, name: str = "config.json") -> Break:
    """Replace the content of a file."""
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda directory: void((directory / name).write_bytes(raw))


def void(_: Any) -> None: ...


def repeat_key(name: str, key: str) -> Break:
    """Repeat a key of a JSON file, with the same value."""

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
    """Replace the file by a link to a file outside of the directory."""

    def breaks(directory: Path) -> None:
        move_tensor_outside = directory.parent / f"outside-{name}"
        (directory / name).rename(move_tensor_outside)
        (directory / name).symlink_to(move_tensor_outside)

    return breaks


def rope(**table: Any) -> Break:
    return config(rope_parameters={"rope_theta": 1000.0, **table})


def remote_code(directory: Path) -> None:
    (directory / "modeling_evil.py").write_text("raise SystemExit('this ran')")
    config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})(directory)


case("config missing", remove("config.json"), "config.json")
case("config empty", text(""), "config.json", "JSON")
case("config no JSON", text("{'hidden_size': 24}"), "config.json", "JSON")
case("config cut off", text('{"model_type": "mistral", "hidden_si'), "config.json", "JSON")
case("config no UTF-8", text(b'{"model_type": "\xff\xfe"}'), "config.json", "JSON")
case("config a list", text("[1, 2]"), "config.json", "JSON", "list")
case("config a number", text("7"), "config.json", "JSON", "int")
case("config {}", text("{}"), "config.json", "model_type=None")
case("config 11 MB", text('{"model_type": "' + "a" * 11 * MIB + '"}'), "config.json", "11,000,018")
case("config deep", text("[" * 200_000), "config.json", "JSON")
case("config deep key", text('{"model_type":' + '{"a":' * 100_000 + "1"), "config.json", "JSON")
case("config a number of 5000 digits", text('{"hidden_size": ' + "9" * 5000 + "}"), "config.json", "JSON")
case("config key twice", repeat_key("config.json", "hidden_size"), "config.json", "'hidden_size'")
case("config link out", link_out("config.json"), "config.json")
case("config a directory", folder_instead("config.json"), "config.json")

case(
    "sizes huge",
    config(hidden_size=2**31 - 1, vocab_size=2**31 - 1, head_dim=2**31 - 2),
    GATE,
    "(40, 24)",
    "(40, 2147483647)",
)
case("no model_type", config(model_type=...), "model_type=None")
case("model_type a list", config(model_type=["mistral"]), "model_type=['mistral']")
case("model_type misspelled", config(model_type="mistrall"), "model_type='mistrall'", "'mistral'")
case("model_type unknown", config(model_type="blt"), "model_type='blt'", "llama")
case(
    "scores of a family without",
    config(architectures=["XForSequenceClassification"]),
    "ForSequenceClassification",
    "model_type='granite'",
    fixture="granite",
)
case(
    "another head",
    config(architectures=["LlamaForTokenClassification"]),
    'architectures=["LlamaForTokenClassification"]',
    "LlamaForCausalLM",
    fixture="llama_bf16",
)

for name, value in {
    "zero": 0,
    "negative": -4,
    "float": 24.0,
    "bool": True,
    "string": "24",
    "list": [24],
    "huge": 10**12,
}.items():
    case(f"hidden_size {name}", config(hidden_size=value), f"hidden_size={json.dumps(value)}")
for key in (
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
):
    case(f"{key} zero", config(**{key: 0}), f"{key}=0")
case("num_hidden_layers huge", config(num_hidden_layers=10**9), "num_hidden_layers=1000000000")
case("hidden_size missing", config(hidden_size=...), "hidden_size")
case("head_dim odd", config(head_dim=13), "head_dim=13")
case("heads not dividing", config(num_key_value_heads=3), "num_heads=4", "num_kv_heads=3")
case("window zero", config(sliding_window=0), "sliding_window=0")
case("eps NaN", config(rms_norm_eps=float("nan")), "rms_norm_eps=NaN")
case("eps infinite", config(rms_norm_eps=float("inf")), "rms_norm_eps=Infinity")
case("eps negative", config(rms_norm_eps=-1e-5), "rms_norm_eps=-1e-05")
case("eps a string", config(rms_norm_eps="1e-5"), 'rms_norm_eps="1e-5"')
case("flag a number", config(tie_word_embeddings=1), "tie_word_embeddings=1")
case("activation unknown", config(hidden_act="silly"), "hidden_act=silly", "silu")
case("activation a path", config(hidden_act="os.system"), "hidden_act=", "os.system", "silu")
case("rope type unknown", rope(rope_type="spiral"), "rope_type=spiral", "linear")
case("rope without factor", rope(rope_type="linear"), "rope_parameters", "factor")
case("rope with an unknown key", rope(rope_type="linear", factor=2.0, twist=3.0), "rope_parameters", "twist")
case("rope a list", config(rope_parameters=[1]), "rope_parameters=[1]")
case("rope theta negative", rope(rope_theta=-1.0), "rope_theta=-1.0")
case("rope partial", config(partial_rotary_factor=0.5), "partial_rotary_factor=0.5")
case("two ropes", config(rope_scaling={"type": "linear", "factor": 2.0}), "rope_parameters", "rope_scaling")
case("layer_types short", config(layer_types=["full_attention"]), "layer_types", "3 layers", fixture="qwen2_mixed")
case(
    "layer_types unknown",
    config(layer_types=["linear_attention"] * 3),
    "layer_types",
    "linear_attention",
    "full_attention",
    fixture="qwen2_mixed",
)
case("layer_types a string", config(layer_types="full_attention"), "layer_types=full_attention", fixture="qwen2_mixed")
case(
    "windows off, layers sliding",
    config(use_sliding_window=False),
    "layer_types",
    "sliding_window",
    fixture="qwen2_mixed",
)
case("query scale", config(query_pre_attn_scalar=0), "query_pre_attn_scalar=0", fixture="gemma2_odd")
case("soft cap", config(final_logit_softcapping=-30.0), "final_logit_softcapping=-30.0", fixture="gemma2_odd")
case("heads of gpt2", config(n_head=5), "n_embd=24", "n_head=5", fixture="gpt2")

case("not causal", config(is_causal=False), "is_causal=false")
case("unknown key", config(logits_scaling=2.0), "logits_scaling")
case("unknown key, misspelled", config(silding_window=2), "silding_window", "sliding_window")
case(
    "bidirectional", config(use_bidirectional_attention=True), "use_bidirectional_attention=true", fixture="gemma2_odd"
)
case("per layer", config(per_layer_config={"0": {"sliding_window": 2}}), "per_layer_config")
case(
    "quantised",
    config(quantization_config={"quant_method": "hqq"}),
    "quantization_config",
    "quant_method=hqq",
    fixture="llama_bf16",
)
case("remote code", remote_code, "auto_map", fixture="llama_bf16")
case(
    "remote kernel",
    config(_attn_implementation_internal="evil/kernel"),
    "_attn_implementation_internal",
    fixture="llama_bf16",
)
case("trust", config(trust_remote_code=True), "trust_remote_code", fixture="llama_bf16")
case(
    "other weights", config(transformers_weights="../weights.safetensors"), "transformers_weights", fixture="llama_bf16"
)
case(
    "other configuration",
    config(configuration_files=["config.4.0.0.json"]),
    "configuration_files",
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
    """Change tensors of a valid file."""

    def breaks(directory: Path) -> None:
        found = read(directory / name)
        edit(found)
        write(directory / name, found)

    return breaks


def header(edit: Callable[[dict[str, Any]], Any]) -> Break:
    """Change the header and keep the content."""

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
    """Change bytes of the file."""

    def breaks(directory: Path) -> None:
        path = directory / WEIGHTS
        path.write_bytes(edit(path.read_bytes()))

    return breaks


def cast(name: str, dtype: str, size: int) -> Callable[[Tensors], Any]:
    """Give a tensor another dtype, of `size` bytes per number."""

    def edit(found: Tensors) -> None:
        shape = found[name][1]
        found[name] = (dtype, shape, bytes(int(np.prod(shape)) * size))

    return edit


def reshape(name: str, shape: Callable[[list[int]], list[int]]) -> Callable[[Tensors], Any]:
    return lambda found: found.update({name: (found[name][0], shape(found[name][1]), found[name][2])})


def pickles(directory: Path) -> None:
    """Store the weights in a pickle only, which would run a command."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {directory / 'ran'}",)

    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


def repeat_tensor(found: str) -> str:
    """Repeat a tensor in the header with different offsets."""
    rows = json.loads(found)
    row = json.dumps(rows[GATE])
    return found[:-1] + f', "{GATE}": {row.replace(str(rows[GATE]["data_offsets"][0]), "0")}}}'


case("no weights", remove(WEIGHTS), WEIGHTS)
case("pickle", pickles, "pytorch_model.bin", "safetensors")
case("weights a directory", folder_instead(WEIGHTS), WEIGHTS)
case("weights link out", link_out(WEIGHTS), WEIGHTS)
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
    "header names a tensor twice": header_text(repeat_tensor),
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
    case(name, breaks, WEIGHTS)

case("tensor missing", tensors(lambda t: t.pop(QUERY)), "1 tensors", QUERY)
case("layer missing", config(num_hidden_layers=3), "9 tensors", "model.layers.2")
case("layer too many", config(num_hidden_layers=1), "9 tensors", GATE)
case("tensor too many", tensors(lambda t: t.update(extra=t[QUERY])), "1 tensors", "extra")
case(
    "bias too many",
    tensors(lambda t: t.update({QUERY.replace("weight", "bias"): t[QUERY]})),
    "1 tensors",
    "q_proj.bias",
)
case("no head", tensors(lambda t: t.pop("lm_head.weight")), "1 tensors", "lm_head.weight")
case("other shape", config(intermediate_size=48), GATE, "(40, 24)", "(48, 24)")
case("transposed", tensors(reshape(GATE, lambda s: s[::-1])), GATE, "(24, 40)", "(40, 24)")
case("flattened", tensors(reshape(GATE, lambda s: [s[0] * s[1]])), GATE, "(960,)", "(40, 24)")
case("no elements", tensors(lambda t: t.update({GATE: ("F32", [0, 24], b"")})), GATE, "(0, 24)", "(40, 24)")
case("integers", tensors(cast(GATE, "I32", 4)), GATE, "I32")
case("bytes", tensors(cast(GATE, "U8", 1)), GATE, "U8")
case("float8", tensors(cast(GATE, "F8_E4M3", 1)), GATE, "F8_E4M3")
case("other prefix", tensors(lambda t: [t.update({f"module.{n}": t.pop(n)}) for n in list(t)]), QUERY, "'module.'")


# --- the index of several files ---------------------------------------------------------------------------------------

FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
TABLE = "model.embed_tokens.weight"
index_case = functools.partial(case, fixture="llama_rope")


def index(edit: Callable[[dict[str, Any]], Any]) -> Break:
    def breaks(directory: Path) -> None:
        path = directory / INDEX
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))

    return breaks


def move_tensor(file: Any, name: str = TABLE) -> Break:
    """Change the file of a tensor in the index."""
    return index(lambda content: content["weight_map"].update({name: file}))


def move_tensor_outside(file: str) -> Break:
    """Like `move_tensor`, with a valid file at the new path."""

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
    index_case(f"index path {number}", move_tensor_outside(file), INDEX, "weight_map", TABLE)
index_case("index a pickle", move_tensor("pytorch_model.bin"), "pytorch_model.bin")
for name, value in {"null": None, "number": 3, "list": [FIRST], "object": {}}.items():
    index_case(f"index file {name}", move_tensor(value), INDEX, "weight_map", TABLE)
index_case("index file missing", move_tensor("model-00009-of-00003.safetensors"), "model-00009-of-00003.safetensors")
index_case("shard missing", remove(SECOND), SECOND)
index_case("shard link out", link_out(SECOND), SECOND)
index_case("shard cut", lambda d: void((d / SECOND).write_bytes((d / SECOND).read_bytes()[:-5])), SECOND)
index_case("tensor in another shard", move_tensor(SECOND), SECOND, TABLE)
index_case("tensor in no shard", move_tensor(FIRST, "model.layers.7.mlp.gate_proj.weight"), FIRST, "model.layers.7")
index_case(
    "tensor in two shards",
    tensors(lambda t: t.update({TABLE: t["model.layers.0.mlp.up_proj.weight"]}), SECOND),
    TABLE,
    SECOND,
)
index_case(
    "shard holds more",
    tensors(lambda t: t.update(extra=t["model.layers.0.mlp.up_proj.weight"]), SECOND),
    SECOND,
    "extra",
)
index_case("index empty", index(lambda content: content["weight_map"].clear()), "weight_map")
index_case("index without map", index(lambda content: content.pop("weight_map")), "weight_map")
index_case("index map a list", index(lambda content: content.update(weight_map=[FIRST])), "weight_map")
index_case("index no JSON", text("{", INDEX), INDEX, "JSON")
index_case("index a list", text("[]", INDEX), INDEX, "JSON", "list")
index_case("index a directory", folder_instead(INDEX), INDEX)
index_case("index link out", link_out(INDEX), INDEX)
index_case("index name twice", repeat_key(INDEX, TABLE), INDEX, "key")


# --- tests -----------------------------------------------------------------------------------------------------------

MAX_LENGTH = 4000  # maximum length of a message


@pytest.mark.slow(fast=("gpt2", "granite"))
@pytest.mark.parametrize("fixture", sorted({fixture for fixture, _, _ in CASES.values()}))
def test_unchanged_copies_load(fixture, tmp_path):
    assert isinstance(ed.load_hf(copy_of(fixture, tmp_path)), ed.Decoder)


@pytest.mark.parametrize("name", CASES)
def test_malformed_directories_are_refused(name, tmp_path):
    fixture, breaks, named = CASES[name]
    directory = copy_of(fixture, tmp_path)
    breaks(directory)
    with pytest.raises(ed.ConversionError) as caught:
        ed.load_hf(directory)
    message = str(caught.value).replace(str(tmp_path), "")  # the directory name contains the name of the case
    assert_names(message, *named)
    assert len(message) < MAX_LENGTH
    assert not (directory / "ran").exists()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        pytest.param(lambda path: None, "model", id="missing"),
        pytest.param(lambda path: path.write_text("{}"), "model", id="file"),
        pytest.param(lambda path: path.mkdir(), "model/config.json", id="empty"),
        pytest.param(lambda path: path.symlink_to(path.parent / "nowhere"), "model", id="link to nowhere"),
    ],
)
def test_paths_without_a_model_are_refused(make, named, tmp_path):
    make(tmp_path / "model")
    with refused(ed.ConversionError, tmp_path / named):
        ed.load_hf(tmp_path / "model")


ODD = (None, 0, -1, 3, 2.5, True, "x", [[]], {"a": [1]}, float("nan"), 10**30, "\0")


@pytest.mark.slow
@pytest.mark.parametrize("fixture", sorted(path.parent.name for path in FIXTURES.glob("*/config.json")))
def test_unusual_settings_give_a_configuration_or_an_error(fixture):
    """Also with the legacy keys of the same model, where only settings that differ are changed."""
    tried: dict[tuple[str, ...], Any] = {}
    errors = 0
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
        assert len(changes) > 1
        for (*table, key), odd in itertools.product(changes, ODD):
            changed = copy.deepcopy(content)
            reached(changed, table)[key] = odd
            try:
                config, _ = family.decode(changed)
            except ed.ConversionError as error:
                assert len(str(error)) < MAX_LENGTH
                errors += 1
            else:
                hash(config)
        tried |= settings
    assert errors > 100


def reached(content: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    return functools.reduce(lambda inner, key: inner[key], path, content)


def test_truncated_weights_are_refused(tmp_path):
    directory = copy_of("mistral_window", tmp_path)
    whole = (directory / WEIGHTS).read_bytes()
    ends = [*range(0, 400, 7), *np.random.default_rng(0).integers(400, len(whole), 100)]
    for end in ends:
        (directory / WEIGHTS).write_bytes(whole[:end])
        with refused(ed.ConversionError, WEIGHTS):
            stored_tensors(Directory(directory))


@pytest.mark.slow
def test_a_changed_byte_of_the_header_is_refused_or_harmless(tmp_path):
    directory = copy_of("mistral_window", tmp_path)
    whole = (directory / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    random = np.random.default_rng(0)
    errors = 0
    for place, byte in zip(random.integers(0, 8 + length, 100), random.integers(0, 256, 100), strict=True):
        changed = bytearray(whole)
        changed[place] = byte
        (directory / WEIGHTS).write_bytes(bytes(changed))
        try:
            ed.abstract_hf(directory)
        except ed.ConversionError:
            errors += 1
    assert errors > 75


def test_links_to_blobs_of_the_download_cache_are_followed(tmp_path):
    """As huggingface_hub stores them."""
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

    # links to other files are refused
    (tmp_path / "secret").write_bytes((snapshot / FIRST).read_bytes())
    (snapshot / FIRST).unlink()
    (snapshot / FIRST).symlink_to("../../../secret")
    with refused(ed.ConversionError, snapshot / FIRST):
        ed.load_hf(snapshot)


def test_a_link_to_the_directory_itself_is_followed(tmp_path):
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
# files other than the weights and their index, and anything that could execute code
HARMFUL = ("exec", "compile", "import", "subprocess.", "os.", "socket.", "pickle.", "shutil.", "tempfile.", "urllib.")
LISTED = {"os.listdir", "os.scandir"}


@pytest.mark.slow
def test_pickles_and_programs_in_the_directory_are_not_opened_or_run(tmp_path):
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
