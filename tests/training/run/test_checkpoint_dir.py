"""Runs whose checkpoints are elsewhere than their run directory: in a bucket, or on another disk."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from etils import epath

from eqx_decoders.cli.train import parse
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import CheckpointError, ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.checkpoint.run_backup import RunBackup
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.run.hooks.metrics_reporter import MetricsReporter
from eqx_decoders.training.run.loop import TrainingLoop
from eqx_decoders.training.settings_file import save_settings
from tests.buckets import bucket
from tests.commands import ROOT, call, flags, steps_of, write_corpus
from tests.training.run.starts import resumed
from tests.training.run.test_loop import OPTIONS, QUICK


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", 12, 40)


@pytest.fixture(scope="module", params=["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def elsewhere(request, tmp_path_factory):
    """A directory for checkpoints: a path, and a URL."""
    return str(tmp_path_factory.mktemp("elsewhere") / "run") if request.param == "disk" else f"{bucket()}/elsewhere/run"


def train(run, *words, code=0, **options):
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return call("train", "--run-dir", run, *flags(given), *words, code=code)


def begin(run, corpus, *words, code=0, **options):
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in (OPTIONS | QUICK).items()}
    del given["model"]
    given["optimizer.schedule"] = "constant"  # which does not depend on the number of steps
    given["model_config"] = ROOT / "tests/fixtures/chat_llama/config.json"
    return train(run, *words, code=code, **(given | {"data": corpus} | options))


@pytest.fixture(scope="module")
def first(elsewhere, corpus, tmp_path_factory):
    """The directory of a run of four steps, with checkpoints elsewhere; it is not changed by tests."""
    run = tmp_path_factory.mktemp("first") / "run"
    out, _ = begin(run, corpus, checkpoint_dir=elsewhere)
    assert f"checkpoints are in {elsewhere}; metrics.jsonl, loss.png are in {run}" in out
    return run


@pytest.mark.slow
def test_a_new_machine_goes_on_with_what_is_beside_the_checkpoints(first, elsewhere, corpus, tmp_path):
    """No flag but the two directories is given: the same run, to the bit, and all of its metrics."""
    assert not (first / "checkpoints").exists() and Checkpoints(elsewhere).steps == (2, 4)
    if "://" in elsewhere:
        options = ("--prompt", "the", "--max-new-tokens", 4, "--temperature", 0)
        one, other = (call("generate", "--run-dir", place, *options)[0] for place in (first, elsewhere))
        assert one == other
    call("convert", "export", elsewhere if "://" in elsewhere else first, tmp_path / "exported")
    assert (tmp_path / "exported/model.safetensors").exists()
    begin(tmp_path / "whole", corpus, steps=6)
    _, err = train(tmp_path / "new", checkpoint_dir=elsewhere, steps=6)
    assert "resumed at step 4" in err
    whole, new = (steps_of(tmp_path / name) for name in ("whole", "new"))
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [row[name] for row in new] == [row[name] for row in whole]
    assert Checkpoints(elsewhere).steps == (2, 4, 6)
    assert parse(["--run-dir", str(tmp_path / "new")]).checkpoint_dir == elsewhere  # from now on it needs no flag


@pytest.mark.slow
def test_a_start_that_fails_on_a_new_machine_leaves_nothing(first, elsewhere, tmp_path):
    _, err = train(tmp_path / "new", checkpoint_dir=elsewhere, seed=1, code=2)
    assert "seed=1, but" in err and "was begun with 0" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_run_that_was_started_last_has_the_directory(elsewhere, corpus, tmp_path, monkeypatch):
    """A machine that was believed to be lost stops at its next save, before it writes anything."""
    place, report = f"{elsewhere}-two", MetricsReporter.report

    def another(self, row):
        report(self, row)
        if row["step"] == 3:
            RunBackup(tmp_path / "run", place).claim()

    monkeypatch.setattr(MetricsReporter, "report", another)
    _, err = begin(tmp_path / "run", corpus, checkpoint_dir=place, code=4)
    assert f"--checkpoint-dir={place!r} is in use by pid" in err and "which was started after this run" in err
    assert Checkpoints(place).steps == (2,)


@pytest.mark.slow
def test_a_machine_that_comes_back_goes_on_from_where_the_other_one_was(elsewhere, corpus, tmp_path):
    """Its own metrics are not those of the run any more."""
    place = f"{elsewhere}-back"
    begin(tmp_path / "one", corpus, checkpoint_dir=place, steps=2)
    train(tmp_path / "two", checkpoint_dir=place, steps=4)
    _, err = train(tmp_path / "one", steps=6)
    assert "resumed at step 4" in err and "changed: --steps 4 -> 6" in err
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert [row["step"] for row in one] == [1, 2, 3, 4, 5, 6] and one[:4] == two
    _, err = train(tmp_path / "one")
    assert "changed" not in err


@pytest.mark.slow
def test_checkpoints_that_are_gone_are_not_begun_anew(corpus, tmp_path):
    """As on a disk that is not mounted."""
    place, run = tmp_path / "disk", tmp_path / "run"
    begin(run, corpus, checkpoint_dir=place / "run", steps=2)
    rows = steps_of(run)
    place.rename(tmp_path / "away")
    _, err = train(run, steps=4, code=4)
    assert "is empty, but" in err and "is it mounted?" in err and steps_of(run) == rows
    shutil.rmtree(place)
    (tmp_path / "away").rename(place)
    _, err = train(run, steps=4)
    assert "resumed at step 2" in err


@pytest.mark.slow(fast=("disk",))
def test_checkpoints_that_are_moved_must_be_there_and_the_run_s_own(elsewhere, tmp_path):
    """A run that finds none would begin anew; one that finds another's would go on with those."""
    run, place = tmp_path / "run", f"{elsewhere}-moved"
    old, new = TrainConfig(run_dir=str(run)), TrainConfig(run_dir=str(run), checkpoint_dir=place)
    save_settings(old, run / "settings.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(4, {"x": jnp.zeros(2)}, data_state={"row": 3}, config="")
    rule = rf"checkpoint_dir='{place}', but step 4 of {run} is in {run}/checkpoints: copy .* to {place}, or leave"
    with pytest.raises(ConfigError, match=rule):
        resumed(new, run)
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file():
            target = epath.Path(place) / path.relative_to(run / "checkpoints")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    assert resumed(new, run) == (new, {"checkpoint_dir": (None, place)})
    assert Checkpoints(place).restore({"x": jnp.ones(2)}).step == 4
    save_settings(TrainConfig(dataset=DataConfig(seed=1)), tmp_path / "other/settings.json")
    RunBackup(tmp_path / "other", place).save()
    with pytest.raises(ConfigError, match=rf"seed=0, but {place} was begun with 1"):
        resumed(new, run)


def test_a_run_directory_is_no_bucket():
    with pytest.raises(ConfigError, match=r"run_dir='gs://bucket/run'.*checkpoint_dir='gs://bucket/run'"):
        TrainConfig(run_dir="gs://bucket/run")


def test_what_cannot_be_copied_is_told_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "settings.json").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint_dir='.*/file/there'"):
        RunBackup(tmp_path, str(tmp_path / "file/there")).save()
    options = {"run_dir": str(tmp_path / "run"), "checkpoint_dir": str(tmp_path / "file/there")}
    with pytest.raises(CheckpointError, match="that you may write and delete there"):
        TrainingLoop(TrainConfig(**options, dataset=DataConfig(path="nowhere"))).train()
    assert not (tmp_path / "run").exists()


def test_files_of_others_beside_checkpoints_are_left_alone(tmp_path):
    place = tmp_path / "there" / "run"
    place.mkdir(parents=True)
    (place / "probe").write_text("mine")
    RunBackup(tmp_path / "new", str(tmp_path / "there")).check_writable()
    (place / "metrics.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"checkpoint_dir='.*there'.*metrics.jsonl"):
        RunBackup(tmp_path / "new", str(tmp_path / "there")).check_writable()
    assert {path.name: path.read_text() for path in place.iterdir()} == {"probe": "mine", "metrics.jsonl": "mine"}


def test_copies_come_back_as_they_were(tmp_path):
    (tmp_path / "run/source/deep").mkdir(parents=True)
    (tmp_path / "run/source/deep/a").write_bytes(b"\x00")
    (tmp_path / "run/settings.json").write_text(json.dumps({}))
    (tmp_path / "run/data/train/web").mkdir(parents=True)
    for name in ("manifest.json", "lock", "train/web/manifest.json", "train/web/rows-1.npy"):
        (tmp_path / "run/data" / name).write_text(name)
    copies = RunBackup(tmp_path / "run", str(tmp_path / "there"))
    assert not copies.is_complete
    copies.save()
    RunBackup(tmp_path / "new", str(tmp_path / "there")).restore()
    found = {
        str(path.relative_to(tmp_path / "new")): path for path in Path(tmp_path / "new").rglob("*") if path.is_file()
    }
    data = {"data/manifest.json", "data/train/web/manifest.json"}
    assert found.keys() == {"source/deep/a", "settings.json", *data}
    assert found["source/deep/a"].read_bytes() == b"\x00"
    RunBackup(tmp_path / "run", None).save()  # without a directory elsewhere there is nothing to do
