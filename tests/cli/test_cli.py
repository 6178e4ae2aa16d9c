"""Test the command `eqx-decoders` and its programs."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import tomllib

import pytest

from eqx_decoders import cli
from eqx_decoders.cli import setting_flags
from eqx_decoders.cli.generate import GenerateConfig
from eqx_decoders.cli.setting_flags import flag_names
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.exit_codes import EXIT_SIGPIPE
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.files import save_settings
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.step import MeshConfig
from eqx_decoders.training.settings.values import field_types
from tests.commands import ROOT, call
from tests.errors import assert_names, refused


@pytest.mark.slow
def test_command_runs_its_programs(capsys):
    assert cli.main(["train", "--list-models"]) == 0
    assert "tiny-moe" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert "usage: eqx-decoders generate" in capsys.readouterr().out
    assert cli.main(["convert", "export", "no", "x"]) == 2
    assert_names(capsys.readouterr().err, "no/settings.json")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"eqx-decoders": "eqx_decoders.cli:main"}


@pytest.mark.parametrize("args, code", [([], 2), (["trian"], 2), (["--help"], 0)], ids=["none", "typo", "help"])
def test_programs_are_listed_without_a_known_program(capsys, args, code):
    assert cli.main(args) == code
    shown = capsys.readouterr()
    assert_names(shown.err if code else shown.out, "train", "generate", "serve", "evaluate", "convert", "plan")


@pytest.mark.parametrize("program", ["train", "generate", "evaluate", "convert", "plan"])
def test_missing_package_is_named(monkeypatch, program):
    find = cli.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "tyro" else find(name))
    _, err = call(program, code=1)
    assert_names(err, "'tyro'", "[train]'")


def test_help_shows_the_flags_of_the_method_and_help_all_shows_every_flag():
    def shown(*args):
        out, _ = call("train", *args)
        return set(re.findall(r"--[a-z][\w.-]*", out)), " ".join(out.replace("│", " ").split())

    short, text = shown("--help")
    assert {"--data", "--data.path", "--optimizer.eps", "--checkpoint-every", "--lora.rank"} <= short
    assert not any(name.startswith(("--rl.", "--sampler.", "--pipeline.")) for name in short)
    assert "--rl.kl" in shown("--method", "rl", "--help")[0] and "--kto.beta" not in shown("--method=rl", "-h")[0]
    assert "--mesh.tensor" in shown("--mesh.tensor", "2", "--help")[0]
    every, _ = shown("--help-all")
    assert short < every and set(flag_names(TrainConfig).values()) <= every
    docstrings = inspect.getsource(DataConfig)
    (batch_size,) = re.findall(r'batch_size: .*\n    """(\w+ \w+ \w+)', docstrings)
    assert batch_size in text


def test_closed_pipe_ends_a_program_without_a_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, ROOT / "scripts" / "train.py", "--help-all"]
    ended = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (EXIT_SIGPIPE, "")


def test_flags_become_settings():
    from eqx_decoders.cli.train import parse

    words = ["--data", "a", "--held-out", "b", "--no-pack", "--data.batch-size", "6", "--mesh.data", "2"]
    words += ["--optimizer.max-grad-norm", "None"]
    config = parse([*words, "--lora.rank", "2", "--lora.targets", "*.mlp.*", "*.query"])
    assert type(config) is TrainConfig and config.mesh == MeshConfig(data=2)
    assert config.data == DataConfig(path="a", held_out_path="b", pack=False, batch_size=6)
    assert parse(["--data", "a", "b.gz", "--held-out", "c", "d"]).data == DataConfig(
        path=("a", "b.gz"), held_out_path=["c", "d"]
    )
    assert parse(["--data", "None"]).data.path is None
    pairs = parse(["--optimizer.lr-multipliers", "*.mlp.*=2", "a=b=1e-1"]).optimizer.lr_multipliers
    assert pairs == (("*.mlp.*", 2.0), ("a=b", 0.1))
    ranks = parse(["--lora.rank", "2", "--lora.rank-pattern", "*.mlp.*=4", "--lora.alpha-pattern", "*.up=0.5"])
    assert (ranks.lora.rank_pattern, ranks.lora.alpha_pattern) == ((("*.mlp.*", 4),), (("*.up", 0.5),))
    assert config.optimizer.max_grad_norm is None and config.lora.targets == ("*.mlp.*", "*.query")


@pytest.mark.slow
def test_settings_default_to_the_settings_of_the_run(tmp_path):
    """Exceptions are `allow_changes` and an export that was already written."""
    from eqx_decoders.cli.train import parse

    optimizer = OptimizerConfig(name="muon", momentum=0.9)
    run = TrainConfig(run_dir="elsewhere", steps=7, optimizer=optimizer, export="out", allow_changes=True)
    save_settings(run, tmp_path / "settings.json")
    assert parse(["--run-dir", str(tmp_path)]) == TrainConfig(run_dir=str(tmp_path))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "written").mkdir()
    (tmp_path / "written" / "model").write_text("x")
    want = dataclasses.replace(run, run_dir=str(tmp_path), allow_changes=False)
    assert parse(["--run-dir", str(tmp_path)]) == want
    found = parse([f"--run_dir={tmp_path}", "--optimizer.momentum", "0.8", "--steps", "9"])
    assert found == dataclasses.replace(want, steps=9, optimizer=dataclasses.replace(optimizer, momentum=0.8))
    save_settings(dataclasses.replace(run, export=str(tmp_path / "written")), tmp_path / "settings.json")
    assert parse(["--run-dir", str(tmp_path)]) == dataclasses.replace(want, export=None)


@pytest.mark.slow
def test_explicit_settings_take_precedence_over_a_preset(tmp_path):
    """This also holds for explicit default values, in flags, files and runs. A new preset replaces the run's preset."""
    from eqx_decoders.cli.train import parse

    words = ["--method", "rl", "--init-from", "x", "--data", "a.jsonl", "--rl.reward", "a.py:f", "--seq-len", "512"]
    words += ["--run-dir"]
    ppo = parse([*words, "new", "--rl.preset", "ppo", "--rl.no-whiten", "--rl.policy.high", "0.4"])
    assert (ppo.rl.baseline, ppo.rl.whiten, ppo.rl.kl_in) == ("critic", False, "reward")
    assert (ppo.rl.policy.low, ppo.rl.policy.high) == (0.2, 0.4)
    (tmp_path / "a.yaml").write_text("rl: {preset: ppo, aggregation: token}")
    found = parse([*words, "new", "--config", str(tmp_path / "a.yaml"), "--rl.preset=grpo"])
    assert found.rl.preset == "grpo" and (found.rl.scale, found.rl.aggregation) == ("group", "token")
    save_settings(ppo, tmp_path / "settings.json")
    (tmp_path / "tokenizer").mkdir()
    again = parse(["--run-dir", str(tmp_path)])
    assert again == dataclasses.replace(ppo, run_dir=str(tmp_path)) and again.rl.whiten is False
    for start in (["--run-dir", str(tmp_path)], [*words, "new", "--config", str(tmp_path / "settings.json")]):
        rl = parse([*start, "--rl.preset", "dr_grpo"]).rl
        assert (rl.baseline, rl.kl_in, rl.aggregation) == ("mean", "loss", "constant") and rl.policy.high == 0.4


def test_paths_with_a_tilde_are_expanded(tmp_path, monkeypatch):
    """Cases: paths in flags, the path of the settings file, and paths in the settings file."""
    from eqx_decoders.cli.train import parse

    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "runs" / "x"
    (run / "tokenizer").mkdir(parents=True)
    save_settings(TrainConfig(steps=7), run / "settings.json")
    (tmp_path / "a.yaml").write_text("run-dir: ~/runs/x")
    for words in (["--run-dir=~/runs/x"], ["--config", "~/a.yaml"]):
        found = parse(words)
        assert found.steps == 7 and found.run_dir == str(run)


def test_flags_take_precedence_over_the_file_and_the_file_over_the_run(tmp_path):
    """The file may name the run directory. Its settings are checked together with the flags."""
    from eqx_decoders.cli.train import parse

    file = tmp_path / "run.yaml"
    file.write_text(f"run-dir: {tmp_path}\nsteps: 1e3\nbatch-size: 4\noptimizer: {{momentum: 0.9}}")
    words = ["--config", str(file), "--optimizer.name", "muon", "--batch-size", "2"]
    want = TrainConfig(run_dir=str(tmp_path), config=str(file), steps=1000, data=DataConfig(batch_size=2))
    muon = OptimizerConfig(name="muon", momentum=0.9)
    assert parse(words) == dataclasses.replace(want, optimizer=muon)
    run = TrainConfig(config="old.yaml", data=DataConfig(seq_len=32, batch_size=16), steps=7, optimizer=muon)
    save_settings(run, tmp_path / "settings.json")
    (tmp_path / "tokenizer").mkdir()
    merged = dataclasses.replace(want, data=DataConfig(seq_len=32, batch_size=4), optimizer=muon)
    assert parse([f"--config={file}"]) == merged
    assert parse(["--run-dir", str(tmp_path)]) == dataclasses.replace(run, run_dir=str(tmp_path), config=None)
    with refused(ConfigError, "OptimizerConfig.momentum=0.9"):
        parse([*words, "--optimizer.name", "lion"])
    file.write_text("steps: -3")
    with refused(ConfigError, "run.yaml", "steps=-3"):
        parse(["--config", str(file)])
    with refused(ConfigError, "steps=-4"):
        parse(["--config", str(file), "--steps", "-4"])


@pytest.mark.parametrize(
    "message, want",
    [
        ("--data (DataConfig.path) 'x' is gone", "--data 'x' is gone"),
        ("DataConfig.seq_len=1 must be 2.", "--seq-len=1 must be 2."),
        ("OptimizerConfig.eps=0, lower optimizer.eps.", "--optimizer.eps=0, lower --optimizer.eps."),
        ("Layout.fsdp_transpose=2 x Layout.fsdp=2", "--mesh.fsdp-transpose=2 x --mesh.fsdp=2"),
        ("give a held_out_path, or more data", "give a --held-out, or more data"),
        ("path=3 of data: model 'steps=3' and steps=4", "--data=3 of data: model 'steps=3' and --steps=4"),
        ("/tmp/run_dir/x and a-run_dir, run_dir/y; run_dir.", "/tmp/run_dir/x and a-run_dir, run_dir/y; --run-dir."),
        ("LoRAConfig.rank=0 and Remat.save='x'", "--lora.rank=0 and --remat-save='x'"),
        ("Layout.weights, DataConfig.seq_length", "Layout.weights, DataConfig.seq_length"),
    ],
    ids=["flag and field", "class", "field", "layout", "word", "quoted", "path", "lora and remat", "no flag"],
)
def test_field_names_in_messages_become_flags(message, want):
    assert cli.in_flags(message, flag_names(TrainConfig)) == want


def test_misspelled_flag_error_suggests_the_nearest_flag():
    _, err = call("train", "--seq-lenn", 32, code=2)
    assert_names(err.replace("--seq-lenn", ""), "--seq-len")


def test_flags_of_other_libraries_are_refused_with_the_flag_of_this_one():
    from eqx_decoders.cli.train import parse

    settings = {*field_types(TrainConfig), *field_types(GenerateConfig)}
    assert {*setting_flags._OTHER_NAMES.values()} <= settings
    for given, wanted in {
        "--lr": "--optimizer.learning-rate",
        "--bs=4": "--batch-size",
        "--max_steps": "--steps",
        "--num-train-epochs": "--epochs",
    }.items():
        with refused(ConfigError, given.partition("=")[0].replace("_", "-"), wanted):
            parse([given, "3"])
