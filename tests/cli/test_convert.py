"""Test the convert program with Hugging Face directories and GGUF files."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.cli.convert import Import, Verify
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.huggingface import verify
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.run.directory import RunDirectory, resume
from eqx_decoders.training.settings.files import load_settings, save_settings
from eqx_decoders.training.settings.run import TrainConfig
from tests.commands import ROOT, call
from tests.compare import assert_array_equal
from tests.errors import assert_names


FIXTURES = ROOT / "tests" / "fixtures"
CHAT = FIXTURES / "chat_llama"
PROMPT = ("--prompt", "What is the answer?", "--max-new-tokens", "8", "--temperature", "0")


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(verify, "has_transformers", lambda: False)


def copied(folder: Path, source: Path = CHAT, **config) -> Path:
    """Return a copy of a directory with changed keys in its config.json."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


@pytest.mark.slow
def test_import_and_export_round_trip_of_a_directory(tmp_path, without_transformers):
    run, directory = tmp_path / "run", tmp_path / "out"
    out, _ = call("convert", "import", CHAT, run)
    assert_names(out, "12,360 parameters", CHAT, run)
    assert Checkpoints(run / "checkpoints").steps == (0,)
    kept = {path.name for path in (run / "source").iterdir()}
    assert kept >= {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert not any(name.endswith(".safetensors") for name in kept)

    one, other = (call("generate", *of, *PROMPT)[0] for of in (("--run-dir", run), ("--model", CHAT)))
    assert one == other and len(one) > 3

    call("convert", "export", run, directory)
    files = {path.name for path in directory.iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    out, _ = call("convert", "verify", CHAT, "--against", directory)
    assert_names(out, "0 tensors")
    assert (directory / "tokenizer_config.json").read_bytes() == (CHAT / "tokenizer_config.json").read_bytes()

    assert_names(call("convert", "import", CHAT, run, code=4)[1], run)
    assert_names(call("convert", "export", run, directory, code=4)[1], directory)
    assert_names(call("convert", "export", run, tmp_path / "more", "--step", "7", code=4)[1], "step=7")

    narrow = tmp_path / "narrow"
    call("convert", "export", run, narrow, "--dtype", "bfloat16", "--shard-gb", "1e-5")
    assert len(list(narrow.glob("*.safetensors"))) > 1
    call("convert", "verify", narrow)
    out, _ = call("convert", "verify", CHAT, "--against", narrow, "--tolerance", "0", code=1)
    assert_names(out, "11 tensors", "model.embed_tokens.weight")


def test_run_after_a_killed_import_starts_with_the_same_model(tmp_path, monkeypatch):
    from eqx_decoders.cli.train import parse

    def killed(self, *_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", killed)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Import(source=str(CHAT), run_dir=str(run))()
    config = parse(["--run-dir", str(run)])
    assert config.init_from == str(CHAT) and not (run / "checkpoints").exists()
    assert resume(RunDirectory(TrainConfig(run_dir=str(run))))[0].settings.init_from == str(CHAT)


def test_import_keeps_unrelated_files(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    _, err = call("convert", "import", CHAT, tmp_path, code=2)
    assert_names(err, f"run_dir='{tmp_path}'", "tokenizer")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.slow
def test_sharded_conversions_equal_single_device(tmp_path, without_transformers):
    mesh = ("--mesh.fsdp", "4", "--mesh.data", "2")
    for command in (("import", CHAT, tmp_path / "run"), ("export", tmp_path / "run", tmp_path / "out")):
        call("convert", *command, *mesh, devices=8)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (CHAT / "model.safetensors").read_bytes()
    for words in ((), ("--against", CHAT)):
        call("convert", "verify", tmp_path / "out", *words, *mesh, devices=8)


@pytest.mark.slow
def test_exports_contain_weight_averages_unless_no_ema(tmp_path):
    run, model, name = tmp_path / "run", ed.load_hf(CHAT), "embedding.table"
    call("convert", "import", CHAT, run)
    settings = load_settings(run / "settings.json")
    settings = dataclasses.replace(settings, optimizer=OptimizerConfig(ema_decay=0.5), params_dtype="bfloat16")
    save_settings(settings, run / "settings.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        half, ema = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), model), {name: 2 * model.embedding.table}
        checkpoints.save(1, {"model": half, "ema": ema}, data_state={"row": 1}, config="")
    for words, factor in (((), 2), (("--no-ema",), 1)):
        directory = tmp_path / f"out{factor}"
        call("convert", "export", run, directory, *words)
        found = named_leaves(ed.load_hf(directory, dtype="float32"))
        for path, leaf in named_leaves(half).items():
            assert_array_equal(found[path], leaf.astype("float32") * (factor if path == name else 1))


@pytest.mark.slow(fast=("chat_llama-11",))
@pytest.mark.parametrize("name, count", [("chat_llama", 11), ("gpt2", 28), ("qwen3_f16", None), ("llama_bf16", None)])
def test_tensors_survive_a_round_trip_to_the_bit(without_transformers, name, count):
    out, _ = call("convert", "verify", FIXTURES / name)
    assert_names(out, "transformers", *([] if count is None else [f"{count} tensors"]))


def test_gguf_files_are_verified_like_directories(without_transformers, tmp_path):
    file = tmp_path / "model.gguf"
    call("convert", "gguf", CHAT, file, "--dtype", "q8_0")
    out, _ = call("convert", "verify", file)
    assert_names(out, "11 tensors")
    out, _ = call("convert", "verify", file, "--against", CHAT, code=1)
    assert_names(out, "8 tensors", "model.embed_tokens.weight")  # the matrices, in 8 bits
    _, err = call("convert", "verify", tmp_path / "other.gguf", code=4)
    assert_names(err, tmp_path / "other.gguf")


def test_changed_tensor_is_named(without_transformers, monkeypatch):
    load = verify.load_hf

    def broken(directory, **options):
        model = load(directory, **options)
        name = "scanned_layers.0.unit.0.mixer.key"
        return replaced(model, {name: -named_leaves(model)[name]})

    monkeypatch.setattr(verify, "load_hf", broken)
    out, _ = call("convert", "verify", CHAT, code=1)
    assert_names(out, "1 of 11 tensors", "model.layers.0.self_attn.k_proj.weight")


@pytest.mark.slow(fast=("equal",))
@pytest.mark.parametrize("shift, code", [(0.0, 0), (0.01, 1), (np.nan, 1)], ids=["equal", "different", "NaN"])
def test_logits_are_compared_with_those_of_transformers(monkeypatch, shift, code):
    expected = np.load(CHAT / "expected.npz")
    monkeypatch.setattr(verify, "has_transformers", lambda: True)
    monkeypatch.setattr(verify, "random_ids", lambda *_: expected["input_ids"])
    monkeypatch.setattr(verify, "transformers_logits", lambda *_: expected["logits"] + np.float32(shift))
    out, _ = call("convert", "verify", CHAT, code=code)
    assert_names(out, "transformers", "logits")


@pytest.mark.parametrize(
    "config, named",
    [
        ({"rms_norm_eps": 0.5}, ["pre_mixer_norm.eps", "1e-06", "0.5"]),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            ["'Rope'", "'LinearRope'"],
        ),
    ],
    ids=["eps", "rope"],
)
def test_different_configurations_are_reported(tmp_path, config, named):
    out, _ = call("convert", "verify", CHAT, "--against", copied(tmp_path / "other", **config), code=1)
    assert_names(out, *named)


MISSING, NO_RUN = FIXTURES / "nothing", FIXTURES / "settings.json"


@pytest.mark.parametrize(
    "arguments, code, named",
    [
        pytest.param(("verify", MISSING), 4, MISSING, id="verify nothing"),
        pytest.param(("verify", CHAT, "--tolerance", "-1"), 2, "tolerance=-1.0", id="tolerance"),
        pytest.param(("verify",), 2, "DIRECTORY", id="no directory"),
        pytest.param(("verfy",), 2, "verfy", id="typo"),
        pytest.param(("import", MISSING, "x"), 4, MISSING, id="import nothing"),
        pytest.param(("export", FIXTURES, "x"), 2, NO_RUN, id="no run"),
        pytest.param(("export", FIXTURES, "x", "--shard-gb", "0"), 2, "--shard-gb=0.0", id="shard size"),
        pytest.param(("export", FIXTURES, "x", "--mesh.fsdp", "0"), 2, NO_RUN, id="no run, and a mesh"),
        pytest.param(("verify", CHAT, "--mesh.tensor", "0"), 2, "--mesh.tensor=0", id="mesh"),
    ],
)
def test_invalid_arguments_are_refused(arguments, code, named):
    _, err = call("convert", *arguments, code=code)
    assert_names(err, named)


def test_verify_samples_ids_by_rows_length_and_seed():
    ids = Verify(directory=str(CHAT), rows=1, length=3, seed=5)._ids(CHAT)
    assert ids.shape == (1, 3)
    assert np.any(ids != Verify(directory=str(CHAT), rows=1, length=3, seed=6)._ids(CHAT))
