"""Checkpoints of transformers: equal logits and tokens, and bit-equal export."""

import dataclasses
import fnmatch
import itertools
import json
import pathlib
import re
import shutil
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface import export, hub
from eqx_decoders.io.huggingface.directory import Directory, stored_tensors
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.io.huggingface.verify import compare_tensors
from eqx_decoders.sharding.axes import named_leaves
from tests.errors import refused


FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz") if (path.parent / "config.json").exists())
TOLERANCE = 1e-4  # both in float32; logits are between 1 and 30
ROUGH = {"qwen3_next": 4e-4}  # larger rounding errors: 8.8e-5 on processors with AVX-512, 1.6e-4 on others


def tensors_of(directory) -> dict[str, np.ndarray]:
    return {name: x for file in sorted(directory.glob("*.safetensors")) for name, x in load_file(file).items()}


def same_tensors(first, second) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].tobytes() == second[name].tobytes() for name in first
    )


def copy_of(name, folder) -> pathlib.Path:
    shutil.copytree(FIXTURES / name, folder / name)
    return folder / name


def rewritten(directory, change) -> pathlib.Path:
    """Change the tensors of a directory by `change(tensors)` and write them into one file."""
    found = tensors_of(directory)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file({name: np.ascontiguousarray(x) for name, x in change(found).items()}, directory / "model.safetensors")
    return directory


# Checkpoints of the fast tests: attention with windows, experts, latents, recurrences, learned positions, fused tensors
FAST = (
    "chat_llama", "deepseek3_fp8", "gemma3_pattern", "gpt2", "gpt_oss_yarn", "kimi_linear", "llama4_mixed", "mamba",
    "phi3_long",
)  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def loaded(request):
    directory = FIXTURES / request.param
    return directory, ed.load_hf(directory), np.load(directory / "expected.npz")


def test_every_family_has_a_checkpoint():
    found = {json.loads((FIXTURES / name / "config.json").read_text())["model_type"] for name in NAMES}
    without = {"mimo"}  # transformers has no MiMo: see tests/families/test_mtp_checkpoints.py
    assert found | without >= {kind for kind, family in FAMILIES.items() if family.text is None}


@eqx.filter_jit
def logits_of(model, ids):
    return model(ids).logits


@pytest.mark.slow(fast=FAST)
def test_logits_match_transformers(loaded):
    directory, model, expected = loaded
    logits = logits_of(dataclasses.replace(model, origin=None), expected["input_ids"])
    assert np.max(np.abs(np.asarray(logits) - expected["logits"])) <= ROUGH.get(directory.name, TOLERANCE)


def test_a_missing_tokenizer_is_refused_before_anything_is_written(tmp_path):
    model, file = ed.load_hf(FIXTURES / "chat_llama"), tmp_path / "tokenizer.json"
    file.write_text("{}")
    for wrong in ("no/such/dir", file, tmp_path / "no.gguf"):
        with refused(ed.ConversionError, f"tokenizer={str(wrong)!r}"):
            ed.save_hf(model, tmp_path / "new" / "export", tokenizer=wrong)
    assert not (tmp_path / "new").exists()
    ed.save_hf(model, tmp_path / "export", tokenizer=FIXTURES / "chat_llama")
    assert (tmp_path / "export" / "tokenizer.json").exists()


@pytest.mark.slow(fast=("gpt2",))
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_match_transformers(name):
    model, expected = ed.load_hf(FIXTURES / name), np.load(FIXTURES / name / "expected.npz")
    wanted = expected["generated_ids"]
    options = dict(max_new_tokens=wanted.shape[1], sampler=ed.Greedy(), stop_ids=())  # continues after stop tokens
    ids = ed.generate(model, expected["prompt_ids"], **options)
    assert np.array_equal(ids, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_legacy_config_gives_the_same_configuration(name, tmp_path):
    directory = FIXTURES / name
    shutil.copy(directory / "config_legacy.json", tmp_path / "config.json")
    # the tensors show whether the file has layers of multi-token prediction
    for file in directory.glob("*.safetensors"):
        shutil.copy(file, tmp_path)
    assert read_config(tmp_path)[0] == read_config(directory)[0]


@pytest.mark.slow(fast=FAST)
def test_export_equals_the_imported_files(loaded, tmp_path):
    directory, model, _ = loaded
    if "quantization_config" in json.loads((directory / "config.json").read_text()):
        pytest.skip("exports are not quantised: tests/io/huggingface/quantized/test_directories.py")
    original = tensors_of(directory)
    if {x.dtype.name for x in original.values()} != {"float32"}:
        model = ed.load_hf(directory, dtype=None)
    ed.save_hf(model, tmp_path / "new", shard_bytes=20_000)
    assert same_tensors(tensors_of(tmp_path / "new"), original)
    files = [load_file(file) for file in sorted((tmp_path / "new").glob("*.safetensors"))]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    # the minimum number of files
    assert len(sizes) > 1 and all(one + two > 20_000 for one, two in itertools.pairwise(sizes))
    assert stored_tensors(Directory(tmp_path / "new")).keys() == original.keys()
    assert read_config(tmp_path / "new")[0] == model.config
    before, after = (json.loads((path / "config.json").read_text()) for path in (directory, tmp_path / "new"))
    # keys with several equivalent values; transformers does not count MTP layers, which it does not load
    spelled = {"rope_parameters", "decoder_sparse_step", "mlp_only_layers", "num_nextn_predict_layers", "expand"}
    spelled |= {"attn_config", "ffn_config"}  # nested objects that repeat keys of the top level
    both = [key for key in before if key in after and key not in spelled]
    assert {key: after[key] for key in both} == {key: before[key] for key in both}
    off = {"use_bidirectional_attention", "add_cross_attention", "is_decoder", "full_attn_idxs"}
    # widths of MLPs that no layer has, and keys from which other keys were derived
    derived = {"intermediate_size", "head_dim", "qk_head_dim", "num_local_experts"}
    derived |= {"block_multiple_of", "block_ffn_dim_multiplier", "_sliding_window_pattern", "sliding_window_pattern"}
    assert set(before) - set(after) <= off | derived
    assert before["dtype"] == after["dtype"]


LAYOUTS = (dict(fsdp=8), dict(fsdp=2, tensor=2, data=2), dict(tensor=2, fsdp=4))


@pytest.mark.slow(fast=("fsdp=8",))
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_weights_are_loaded_sharded(sizes):
    """fsdp splits a dimension, tensor splits heads, data replicates."""
    single = named_leaves(ed.load_hf(FIXTURES / "qwen2_mixed"))
    layout = ed.Layout.create(**sizes)
    model = ed.load_hf(FIXTURES / "qwen2_mixed", layout=layout)
    for name, leaf in named_leaves(model).items():
        assert np.array_equal(leaf, single[name]), name
    assert jax.tree.map(lambda leaf: leaf.sharding, model) == layout.shardings(model)


def test_head_dimension_can_be_sharded(tmp_path):
    """A layout may shard `head_dim` instead of the number of heads."""
    layout = ed.Layout.create(fsdp=2, weights={"head_dim": "fsdp"}, devices=jax.devices()[:2])
    single, model = (named_leaves(ed.load_hf(FIXTURES / "llama_rope", layout=where)) for where in (None, layout))
    assert any("fsdp" in leaf.sharding.spec for leaf in model.values())
    assert all(np.array_equal(model[name], single[name]) for name in single)


@pytest.mark.slow(fast=("llama_bf16-float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama_bf16", "qwen3_f16", "gemma_mqa"])
def test_dtypes(name, dtype):
    stored = tensors_of(FIXTURES / name)
    model = ed.load_hf(FIXTURES / name, dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model)} == {dtype}
    table = next(x for key, x in stored.items() if key.endswith("embed_tokens.weight"))
    assert np.array_equal(np.asarray(model.embedding.table), table.astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_with_another_dtype(dtype, tmp_path):
    model = ed.load_hf(FIXTURES / "gemma_mqa", dtype=dtype)
    ed.save_hf(model, tmp_path / "new", dtype="float32")
    again, wanted = tensors_of(tmp_path / "new"), tensors_of(FIXTURES / "gemma_mqa")
    assert same_tensors(again, {name: x.astype(dtype).astype(np.float32) for name, x in wanted.items()})
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert ed.abstract_hf(tmp_path / "new", dtype=None).embedding.table.dtype == jnp.float32


@pytest.mark.slow
def test_bfloat16_runs_in_bfloat16():
    expected = np.load(FIXTURES / "gemma2_odd" / "expected.npz")
    model = ed.load_hf(FIXTURES / "gemma2_odd", dtype=jnp.bfloat16)
    logits = logits_of(dataclasses.replace(model, origin=None), expected["input_ids"])
    error = np.sqrt(np.mean((np.asarray(logits) - expected["logits"]) ** 2) / np.var(expected["logits"]))
    assert 1e-4 < error < 0.05


def test_precision_argument_sets_params_and_compute_dtype():
    precision = ed.Precision(params=jnp.float32, compute=jnp.bfloat16)
    model = ed.load_hf(FIXTURES / "llama_bf16", precision=precision, remat="full")
    assert model.embedding.table.dtype == jnp.float32
    assert model.execution.precision == precision


@pytest.mark.parametrize("name", ["llama_rope", "gpt2"])
def test_files_of_a_base_model(name, tmp_path):
    """Without an output head: names lack the prefix, and old GPT-2 files contain the causal mask."""
    family = FAMILIES[json.loads((FIXTURES / name / "config.json").read_text())["model_type"]]

    def strip(tensors):
        found = {key.removeprefix(family.prefix): x for key, x in tensors.items()}
        mask = {"h.0.attn.bias": np.tril(np.ones((1, 1, 4, 4), np.uint8))} if name == "gpt2" else {}
        frequencies = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)} if name != "gpt2" else {}
        return found | mask | frequencies

    directory = rewritten(copy_of(name, tmp_path), strip)
    here, there = named_leaves(ed.load_hf(directory)), named_leaves(ed.load_hf(FIXTURES / name))
    assert all(np.array_equal(here[path], there[path]) for path in there)


@pytest.mark.slow(fast=("mixtral_window",))
@pytest.mark.parametrize(
    "name", ["mixtral_window", "minimax_m2", "qwen3_moe_mixed", "deepseek2_groups", "deepseek3_groups"]
)
def test_experts_in_one_tensor(name, tmp_path):
    """As in the memory of transformers, which can also save experts in this form."""
    parts = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}

    def fuse(tensors):
        found, experts = {}, {}
        for key, x in tensors.items():
            if match := re.fullmatch(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight", key):
                experts.setdefault((match[1], parts[match[3]]), {})[int(match[2])] = x
            else:
                found[key.replace("block_sparse_moe", "mlp")] = x
        whole = {key: np.stack([x for _, x in sorted(each.items())]) for key, each in experts.items()}
        for layer in {layer for layer, _ in whole}:
            both = np.concatenate([whole[layer, "gate"], whole[layer, "up"]], axis=1)
            found |= {f"{layer}.mlp.experts.gate_up_proj": both}
            found |= {f"{layer}.mlp.experts.down_proj": whole[layer, "down"]}
        return found

    directory = rewritten(copy_of(name, tmp_path), fuse)
    assert not any(".experts.0." in key for key in tensors_of(directory))
    here, there = ed.load_hf(directory), named_leaves(ed.load_hf(FIXTURES / name))
    assert all(np.array_equal(leaf, there[path]) for path, leaf in named_leaves(here).items())
    ed.save_hf(here, tmp_path / "new")
    assert same_tensors(tensors_of(tmp_path / "new"), tensors_of(FIXTURES / name))
    assert compare_tensors(directory) == (len(tensors_of(directory)), [])


@pytest.fixture
def tied(tmp_path):
    directory = copy_of("qwen2_mixed", tmp_path)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    return directory


def test_a_head_equal_to_the_embedding_stays_tied(tied):
    rewritten(tied, lambda x: x | {"lm_head.weight": x["model.embed_tokens.weight"]})
    assert ed.load_hf(tied).head is None


def test_a_different_head_unties_the_model(tied, tmp_path):
    """As in transformers: a tied configuration with two different matrices in the file is not tied."""
    rewritten(tied, lambda x: x | {"lm_head.weight": x["model.embed_tokens.weight"] * 2})
    model = ed.load_hf(tied)
    assert not model.config.tied
    assert np.array_equal(model.head.kernel, 2 * model.embedding.table.T)
    ed.save_hf(model, tmp_path / "new")
    assert not json.loads((tmp_path / "new" / "config.json").read_text())["tie_word_embeddings"]
    assert same_tensors(tensors_of(tmp_path / "new"), tensors_of(tied))


@pytest.mark.parametrize("row", [0, 7, -1])
def test_a_head_that_differs_in_one_row_unties_the_model(tied, row):
    def change(tensors):
        head = tensors["model.embed_tokens.weight"].copy()
        head[row] += 1
        return tensors | {"lm_head.weight": head}

    assert not ed.abstract_hf(rewritten(tied, change)).config.tied


@pytest.mark.parametrize(
    "version, tie, is_tied", [("4.57.6", None, True), ("4.57.6", False, False), ("5.0.0", None, False)]
)
def test_a_missing_head_is_tied_if_transformers_4_left_out_tie_word_embeddings(tmp_path, version, tie, is_tied):
    """transformers 4 leaves out the key if its value is the default of PretrainedConfig."""
    directory = copy_of("llama_rope", tmp_path)
    content = json.loads((directory / "config.json").read_text()) | {"transformers_version": version}
    content.pop("tie_word_embeddings", None)
    if tie is not None:
        content["tie_word_embeddings"] = tie
    (directory / "config.json").write_text(json.dumps(content))
    rewritten(directory, lambda x: {name: value for name, value in x.items() if name != "lm_head.weight"})
    if is_tied:
        assert ed.load_hf(directory).config.tied
    else:
        with refused(ed.ConversionError, "1 tensors", "lm_head.weight"):
            ed.load_hf(directory)


def test_head_without_an_embedding_table(tied):
    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        return tensors

    table = tensors_of(tied)["model.embed_tokens.weight"]
    model = ed.load_hf(rewritten(tied, rename))
    assert model.head is None
    assert np.array_equal(model.embedding.table, table)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base.model."])
def test_error_names_an_unexpected_prefix_of_all_tensors(tmp_path, prefix):
    directory = copy_of("llama_rope", tmp_path)
    rewritten(directory, lambda x: {prefix + name: value for name, value in x.items()})
    with refused(ed.ConversionError, f"'{prefix}'"):
        ed.load_hf(directory)


def test_error_names_a_missing_index(tmp_path):
    directory = copy_of("llama_rope", tmp_path)
    (directory / "model.safetensors.index.json").unlink()
    with refused(ed.ConversionError, "model.safetensors.index.json", "model-00001-of-"):
        ed.load_hf(directory)


def test_error_about_a_missing_tensor_does_not_mention_prefixes(tmp_path):
    """Names without the prefix of the decoder are accepted, so they are not the reason."""
    directory = copy_of("mistral_window", tmp_path)
    rewritten(directory, lambda x: {n.removeprefix("model."): v for n, v in x.items() if n != "lm_head.weight"})
    with refused(ed.ConversionError, "1 tensors", "lm_head.weight") as caught:
        ed.load_hf(directory)
    assert "'model.'" not in str(caught.value)


def test_all_wrong_tensors_are_listed(tmp_path):
    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
        del tensors["model.norm.weight"]
        return tensors | {"model.layers.7.mlp.up_proj.weight": np.zeros(3, np.float32)}

    directory = rewritten(copy_of("llama_rope", tmp_path), spoil)
    names = ("model.norm.weight", "model.layers.7.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight")
    with refused(ed.ConversionError, "3 tensors", *names):
        ed.load_hf(directory)


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_is_complete(tmp_path):
    ed.save_hf(ed.load_hf(FIXTURES / "chat_llama"), tmp_path / "new")
    copied = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    for name in copied:
        assert (tmp_path / "new" / name).read_bytes() == (FIXTURES / "chat_llama" / name).read_bytes(), name
    assert "LlamaForCausalLM" in (tmp_path / "new" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_failed_export_leaves_no_files(tmp_path, monkeypatch):
    def fail(tensors, path):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(export, "save_tensors", fail)
    with refused(OSError, "no space left"):
        ed.save_hf(ed.load_hf(FIXTURES / "llama_bf16"), tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_nonempty_directory_is_not_overwritten(tmp_path):
    (tmp_path / "note").write_text("mine")
    with refused(ed.ConversionError, tmp_path):
        ed.save_hf(ed.abstract_hf(FIXTURES / "chat_llama"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def small(**changes):
    config = ed.abstract_hf(FIXTURES / "llama_rope").config
    return dataclasses.replace(config, **changes)


def test_error_for_a_model_of_no_family_shows_the_difference():
    config = small(logit_soft_cap=3.0)
    with refused(ed.ConversionError, "LlamaForCausalLM", "DecoderConfig.logit_soft_cap=3.0"):
        ed.save_hf(ed.abstract(config), "nowhere")
    with refused(ed.ConversionError, "family='lama'", "'llama'"):
        ed.save_hf(ed.abstract(config), "nowhere", family="lama")


def test_save_hf_finds_the_family_of_a_new_model(tmp_path):
    config = dataclasses.replace(ed.get_config("tiny"), vocab_size=64, dropout=0.1)
    model = ed.init(config, key=jax.random.key(0))
    ed.save_hf(model, tmp_path / "new", settings={"eos_token_id": 7, "max_position_embeddings": 512})
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["model_type"] == "llama"
    assert (written["eos_token_id"], written["bos_token_id"], written["max_position_embeddings"]) == (7, None, 512)
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text()) == {"eos_token_id": 7}
    again = ed.load_hf(tmp_path / "new")
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True))


def test_a_sharded_model_is_exported_completely(tmp_path):
    model = ed.load_hf(FIXTURES / "gpt2", layout=ed.Layout.create(fsdp=2, tensor=2, data=2))
    ed.save_hf(model, tmp_path / "new")
    assert same_tensors(tensors_of(tmp_path / "new"), tensors_of(FIXTURES / "gpt2"))


def test_bfloat16_is_written_as_bfloat16(tmp_path):
    ed.save_hf(ed.load_hf(FIXTURES / "llama_bf16", dtype="bfloat16"), tmp_path / "new")
    assert {x.dtype for x in tensors_of(tmp_path / "new").values()} == {np.dtype(ml_dtypes.bfloat16)}


# --- downloads -------------------------------------------------------------------------------------------------------


def test_repository_is_refused_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(ed.ConversionError, "'nobody/nothing'"):
        ed.load_hf("nobody/nothing")


def test_repository_is_downloaded(monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(FIXTURES / "gemma_mqa")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = ed.abstract_hf("org/name", revision="v2")
    assert model.config == read_config(FIXTURES / "gemma_mqa")[0]
    assert (asked["name"], asked["revision"]) == ("org/name", "v2")
    assert not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])


def test_a_missing_directory_is_refused():
    with refused(ed.ConversionError, "runs/nothing/here"):
        ed.load_hf("runs/nothing/here")


def test_downloads_additional_chat_templates_but_no_other_subfolders(tmp_path, monkeypatch):
    patterns = {}
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = lambda name, **options: patterns.update(options) or str(tmp_path)  # ty: ignore
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    hub.resolve("org/name-that-is-no-directory")

    def is_downloaded(name: str) -> bool:
        allowed, ignored = (
            any(fnmatch.fnmatch(name, pattern) for pattern in patterns[key])
            for key in ("allow_patterns", "ignore_patterns")
        )
        return allowed and not ignored

    assert all(map(is_downloaded, ("config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja")))
    others = ("onnx/config.json", "original/tokenizer.model", "a/b/c.json", "x/chat_template.jinja")
    assert not any(map(is_downloaded, others))


def test_names_the_remedy_for_a_run_directory(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"run_dir": str(tmp_path), "model": "tiny", "steps": 2}))
    for load in (ed.load_hf, ed.load_text_model):
        with refused(ed.ConversionError, "--run-dir", "scripts/convert.py"):
            load(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # exports into the same directory
    assert hub.resolve(tmp_path).path == tmp_path
