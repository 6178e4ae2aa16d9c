"""Test runs with a `checkpoint_dir`, such as a bucket or a different disk than the run directory."""

import json
import os
import re
import shutil

import jax.numpy as jnp
import pytest
from etils import epath

from eqx_decoders.cli.train import parse
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import CheckpointError, ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.checkpoint.run_backup import RunBackup
from eqx_decoders.training import train as start_run
from eqx_decoders.training.run.loop import MetricsReporter
from eqx_decoders.training.settings.files import save_settings
from eqx_decoders.training.settings.run import TrainConfig
from tests.buckets import bucket
from tests.commands import ROOT, call, flags, steps_of, write_corpus
from tests.errors import assert_names, refused
from tests.training.run.starts import first_step, resumed
from tests.training.run.test_loop import OPTIONS, QUICK


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", 12, 40)


@pytest.fixture(scope="module", params=["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def elsewhere(request, tmp_path_factory):
    """Return a checkpoint directory, as a path or a URL."""
    return str(tmp_path_factory.mktemp("elsewhere") / "run") if request.param == "disk" else f"{bucket()}/elsewhere/run"


def train(run, *words, code=0, **options):
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return call("train", "--run-dir", run, *flags(given), *words, code=code)


def begin(run, corpus, *words, code=0, **options):
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in (OPTIONS | QUICK).items()}
    del given["model"]
    given["optimizer.schedule"] = "constant"  # this schedule does not depend on the number of steps
    given["model_config"] = ROOT / "tests/fixtures/chat_llama/config.json"
    return train(run, *words, code=code, **(given | {"data": corpus} | options))


@pytest.fixture(scope="module")
def first(elsewhere, corpus, tmp_path_factory):
    """Return the directory of a run of four steps. Tests must not change it."""
    run = tmp_path_factory.mktemp("first") / "run"
    out, _ = begin(run, corpus, checkpoint_dir=elsewhere)
    assert re.search(rf"{re.escape(elsewhere)}\b.*metrics\.jsonl, loss\.png\b.*{re.escape(str(run))}", out)
    return run


@pytest.mark.slow
def test_new_machine_resumes_from_the_checkpoint_directory(first, elsewhere, corpus, tmp_path):
    """The two directories are the only flags. Metrics equal those of an uninterrupted run to the bit."""
    assert not (first / "checkpoints").exists() and Checkpoints(elsewhere).steps == (2, 4)
    if "://" in elsewhere:
        options = ("--prompt", "the", "--max-new-tokens", 4, "--temperature", 0)
        one, other = (call("generate", "--run-dir", place, *options)[0] for place in (first, elsewhere))
        assert one == other
    call("convert", "export", elsewhere if "://" in elsewhere else first, tmp_path / "exported")
    assert (tmp_path / "exported/model.safetensors").exists()
    begin(tmp_path / "whole", corpus, steps=6)
    _, err = train(tmp_path / "new", checkpoint_dir=elsewhere, steps=6)
    assert first_step(err) == 4
    whole, new = (steps_of(tmp_path / name) for name in ("whole", "new"))
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [row[name] for row in new] == [row[name] for row in whole]
    assert Checkpoints(elsewhere).steps == (2, 4, 6)
    assert parse(["--run-dir", str(tmp_path / "new")]).checkpoint_dir == elsewhere  # without the flag


@pytest.mark.slow
def test_failed_start_on_a_new_machine_leaves_no_files(first, elsewhere, tmp_path):
    _, err = train(tmp_path / "new", checkpoint_dir=elsewhere, seed=1, code=2)
    assert re.search(r"--seed=1\b.*\b0\b", err)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_run_stops_at_the_next_save_if_another_run_took_its_directory(elsewhere, corpus, tmp_path, monkeypatch):
    place, report = f"{elsewhere}-two", MetricsReporter.report

    def another(self, row):
        report(self, row)
        if row["step"] == 3:
            RunBackup(tmp_path / "run", place).claim()

    monkeypatch.setattr(MetricsReporter, "report", another)
    _, err = begin(tmp_path / "run", corpus, checkpoint_dir=place, code=4)
    assert_names(err, f"--checkpoint-dir={place!r}", f"pid {os.getpid()}")
    assert Checkpoints(place).steps == (2,)


@pytest.mark.slow
def test_machine_resumes_after_another_machine_continued_the_run(elsewhere, corpus, tmp_path):
    """Local metrics are replaced by the metrics stored with the checkpoints."""
    place = f"{elsewhere}-back"
    begin(tmp_path / "one", corpus, checkpoint_dir=place, steps=2)
    train(tmp_path / "two", checkpoint_dir=place, steps=4)
    _, err = train(tmp_path / "one", steps=6)
    assert first_step(err) == 4
    assert_names(err, "--steps 4 -> 6")
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert [row["step"] for row in one] == [1, 2, 3, 4, 5, 6] and one[:4] == two
    _, err = train(tmp_path / "one")
    assert " -> " not in err


@pytest.mark.slow
def test_resuming_without_the_checkpoints_is_refused(corpus, tmp_path):
    """This happens if a disk is not mounted."""
    place, run = tmp_path / "disk", tmp_path / "run"
    begin(run, corpus, checkpoint_dir=place / "run", steps=2)
    rows = steps_of(run)
    place.rename(tmp_path / "away")
    _, err = train(run, steps=4, code=4)
    assert_names(err, place / "run")
    assert steps_of(run) == rows
    shutil.rmtree(place)
    (tmp_path / "away").rename(place)
    _, err = train(run, steps=4)
    assert first_step(err) == 2


@pytest.mark.slow(fast=("disk",))
def test_changed_checkpoint_directory_must_have_checkpoints_of_the_run(elsewhere, tmp_path):
    """A directory without checkpoints and a directory with checkpoints of another run are refused."""
    run, place = tmp_path / "run", f"{elsewhere}-moved"
    old, new = TrainConfig(run_dir=str(run)), TrainConfig(run_dir=str(run), checkpoint_dir=place)
    save_settings(old, run / "settings.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(4, {"x": jnp.zeros(2)}, data_state={"row": 3}, config="")
    with refused(ConfigError, f"checkpoint_dir='{place}'", "step 4", f"{run}/checkpoints"):
        resumed(new, run)
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file():
            target = epath.Path(place) / path.relative_to(run / "checkpoints")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    assert resumed(new, run) == (new, {"checkpoint_dir": (None, place)})
    assert Checkpoints(place).restore({"x": jnp.ones(2)}).step == 4
    save_settings(TrainConfig(data=DataConfig(seed=1)), tmp_path / "other/settings.json")
    RunBackup(tmp_path / "other", place).save()
    with refused(ConfigError, "seed=0", place, "1"):
        resumed(new, run)


def test_url_as_run_directory_is_refused():
    with refused(ConfigError, "run_dir='gs://bucket/run'", "checkpoint_dir='gs://bucket/run'"):
        TrainConfig(run_dir="gs://bucket/run")


def test_unwritable_checkpoint_directory_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "settings.json").touch()
    place = str(tmp_path / "file/there")
    with refused(CheckpointError, f"checkpoint_dir='{place}'"):
        RunBackup(tmp_path, place).save()
    options = {"run_dir": str(tmp_path / "run"), "checkpoint_dir": place}
    with refused(CheckpointError, f"checkpoint_dir='{place}'"):
        start_run(TrainConfig(**options, data=DataConfig(path="nowhere")))
    assert not (tmp_path / "run").exists()


def test_unrelated_files_in_the_checkpoint_directory_are_not_changed(tmp_path):
    place = tmp_path / "there" / "run"
    place.mkdir(parents=True)
    (place / "probe").write_text("mine")
    RunBackup(tmp_path / "new", str(tmp_path / "there")).check_writable()
    (place / "metrics.jsonl").write_text("mine")
    with refused(ConfigError, f"checkpoint_dir='{tmp_path / 'there'}'", "metrics.jsonl"):
        RunBackup(tmp_path / "new", str(tmp_path / "there")).check_writable()
    assert {path.name: path.read_text() for path in place.iterdir()} == {"probe": "mine", "metrics.jsonl": "mine"}


def test_backup_of_the_run_directory_is_restored_exactly(tmp_path):
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
    new = tmp_path / "new"
    found = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()}
    data = {"data/manifest.json", "data/train/web/manifest.json"}
    assert found == {"source/deep/a", "settings.json", *data}
    assert (new / "source/deep/a").read_bytes() == b"\x00"
    RunBackup(tmp_path / "run", None).save()  # does nothing
