"""The convert program on Hugging Face directories."""

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
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.run.resume_run import resume
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.settings_file import load_settings, save_settings
from tests.commands import ROOT, outcome
from tests.compare import assert_array_equal


FIXTURES = ROOT / "tests" / "fixtures"
CHAT = FIXTURES / "chat_llama"
PROMPT = ("--prompt", "What is the answer?", "--max-new-tokens", "8", "--temperature", "0")


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(verify, "has_transformers", lambda: False)


def copied(folder: Path, source: Path = CHAT, **config) -> Path:
    """A copy of a directory with other keys in its config.json."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


@pytest.mark.slow
def test_import_then_generate_then_export_is_the_directory_again(tmp_path, without_transformers):
    run, directory = tmp_path / "run", tmp_path / "out"
    code, out, _ = outcome("convert", "import", CHAT, run)
    assert code == 0 and f"12,360 weights of {CHAT} are step 0 of {run}" in out
    assert Checkpoints(run / "checkpoints").steps == (0,)
    kept = {path.name for path in (run / "source").iterdir()}
    assert kept >= {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert not any(name.endswith(".safetensors") for name in kept)

    one, other = (outcome("generate", *of, *PROMPT) for of in (("--run-dir", run), ("--model", CHAT)))
    assert one == other and one[0] == 0 and len(one[1]) > 3

    assert outcome("convert", "export", run, directory)[0] == 0
    files = {path.name for path in directory.iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    code, out, _ = outcome("convert", "verify", CHAT, "--against", directory)
    assert code == 0 and "values: 0 tensors differ\n" in out and "the same: 0 " in out
    assert (directory / "tokenizer_config.json").read_bytes() == (CHAT / "tokenizer_config.json").read_bytes()

    code, _, err = outcome("convert", "import", CHAT, run)
    assert code == 4 and "is a run directory already" in err
    code, _, err = outcome("convert", "export", run, directory)
    assert code == 4 and "is not empty" in err
    code, _, err = outcome("convert", "export", run, tmp_path / "more", "--step", "7")
    assert code == 4 and "step=7 is not in" in err

    narrow = tmp_path / "narrow"
    assert outcome("convert", "export", run, narrow, "--dtype", "bfloat16", "--shard-gb", "1e-5")[0] == 0
    assert len(list(narrow.glob("*.safetensors"))) > 1
    assert outcome("convert", "verify", narrow)[0] == 0
    code, out, _ = outcome("convert", "verify", CHAT, "--against", narrow, "--tolerance", "0")
    assert code == 1 and "different: 0." in out and "11 tensors differ: model.embed_tokens.weight: by up to" in out


def test_an_import_that_was_killed_is_not_taken_for_a_new_run(tmp_path, monkeypatch):
    """While the checkpoint was being written: a run there begins with the same model, not with a random one."""
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


def test_an_import_leaves_files_of_others_alone(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    _, _, err = outcome("convert", "import", CHAT, tmp_path)
    assert f"error: run_dir='{tmp_path}' has tokenizer in {tmp_path}, but not from a run" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.slow
def test_on_a_mesh_all_is_as_on_one_device(tmp_path, without_transformers):
    mesh = ("--mesh.fsdp", "4", "--mesh.data", "2")
    for command in (("import", CHAT, tmp_path / "run"), ("export", tmp_path / "run", tmp_path / "out")):
        code, _, err = outcome("convert", *command, *mesh, devices=8)
        assert code == 0, err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (CHAT / "model.safetensors").read_bytes()
    for words in ((), ("--against", CHAT)):
        code, out, _ = outcome("convert", "verify", tmp_path / "out", *words, *mesh, devices=8)
        assert code == 0 and "the same: " in out


@pytest.mark.slow
def test_the_export_of_a_run_with_running_means(tmp_path):
    """These by default, for weights that have some; --no-ema: the weights."""
    run, model, name = tmp_path / "run", ed.load_hf(CHAT), "embedding.table"
    outcome("convert", "import", CHAT, run)
    settings = load_settings(run / "settings.json")
    settings = dataclasses.replace(settings, optimizer=OptimizerConfig(ema_decay=0.5), params_dtype="bfloat16")
    save_settings(settings, run / "settings.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        half, ema = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), model), {name: 2 * model.embedding.table}
        checkpoints.save(1, {"model": half, "ema": ema}, data_state={"row": 1}, config="")
    for words, factor in (((), 2), (("--no-ema",), 1)):
        directory = tmp_path / f"out{factor}"
        assert outcome("convert", "export", run, directory, *words)[0] == 0
        found = named_leaves(ed.load_hf(directory, dtype="float32"))
        for path, leaf in named_leaves(half).items():
            assert_array_equal(found[path], leaf.astype("float32") * (factor if path == name else 1))


@pytest.mark.slow(fast=("chat_llama-11",))
@pytest.mark.parametrize("name, count", [("chat_llama", 11), ("gpt2", 28), ("qwen3_f16", None), ("llama_bf16", None)])
def test_tensors_come_back_bit_by_bit(without_transformers, name, count):
    code, out, _ = outcome("convert", "verify", FIXTURES / name)
    assert code == 0 and "transformers is not installed" in out and "have the bits of the files" in out
    assert count is None or f"all {count} tensors" in out


def test_a_gguf_file_is_verified_as_a_directory_is(without_transformers, tmp_path):
    file = tmp_path / "model.gguf"
    assert outcome("convert", "gguf", CHAT, file, "--dtype", "q8_0")[0] == 0
    code, out, _ = outcome("convert", "verify", file)
    assert code == 0 and "all 11 tensors, loaded and exported again, have the bits of the files" in out
    code, out, _ = outcome("convert", "verify", file, "--against", CHAT)
    assert code == 1 and "values: 8 tensors differ: model.embed_tokens.weight" in out  # the matrices, in 8 bits
    _, _, err = outcome("convert", "verify", tmp_path / "other.gguf")
    assert "other.gguf does not exist: give a GGUF file" in err


def test_a_tensor_that_changes_is_named(without_transformers, monkeypatch):
    load = verify.load_hf

    def broken(directory, **options):
        model = load(directory, **options)
        name = "segments.0.unit.0.mixer.key"
        return replaced(model, {name: -named_leaves(model)[name]})

    monkeypatch.setattr(verify, "load_hf", broken)
    code, out, _ = outcome("convert", "verify", CHAT)
    assert code == 1
    assert "different: 1 of 11 tensors change when loaded and exported: model.layers.0.self_attn.k_proj.weight" in out


@pytest.mark.slow(fast=("0.0-0",))
@pytest.mark.parametrize("shift, code", [(0.0, 0), (0.01, 1), (np.nan, 1)])
def test_logits_beside_those_of_transformers(monkeypatch, shift, code):
    expected = np.load(CHAT / "expected.npz")
    monkeypatch.setattr(verify, "has_transformers", lambda: True)
    monkeypatch.setattr(verify, "random_ids", lambda *_: expected["input_ids"])
    monkeypatch.setattr(verify, "transformers_logits", lambda *_: expected["logits"] + np.float32(shift))
    left, out, _ = outcome("convert", "verify", CHAT)
    assert left == code, out
    assert "here and in transformers" in out and "logits: largest |difference|" in out
    assert ("the same: " if code == 0 else "different: ") in out


@pytest.mark.parametrize(
    "config, says",
    [
        ({"rms_norm_eps": 0.5}, "pre_mixer_norm.eps: 1e-06 and 0.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "rope is: 'Rope' and"),
    ],
)
def test_another_meaning_of_the_settings_is_reported(tmp_path, config, says):
    code, out, _ = outcome("convert", "verify", CHAT, "--against", copied(tmp_path / "other", **config))
    assert code == 1 and "different: " in out and says in out


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (("verify", FIXTURES / "nothing"), 4, "does not exist"),
        (("verify", CHAT, "--tolerance", "-1"), 2, "tolerance=-1.0 must be"),
        (("verify",), 2, "required"),
        (("verfy",), 2, "verfy"),
        (("import", FIXTURES / "nothing", "x"), 4, "does not exist"),
        (("export", FIXTURES, "x"), 2, "is no run directory"),
        (("export", FIXTURES, "x", "--shard-gb", "0"), 2, "--shard-gb=0.0"),
        (("export", FIXTURES, "x", "--mesh.fsdp", "0"), 2, "is no run directory"),
        (("verify", CHAT, "--mesh.tensor", "0"), 2, "--mesh.tensor=0 must be"),
    ],
)
def test_mistakes_of_convert(arguments, code, says):
    left, _, err = outcome("convert", *arguments)
    assert left == code and says in " ".join(err.replace("│", "").split())


def test_verify_draws_the_ids_that_are_asked_for():
    ids = Verify(directory=str(CHAT), rows=1, length=3, seed=5)._ids(CHAT)
    assert ids.shape == (1, 3)
    assert np.any(ids != Verify(directory=str(CHAT), rows=1, length=3, seed=6)._ids(CHAT))
