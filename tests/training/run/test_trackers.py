"""Test experiment trackers: logged values, resumed runs, and failing trackers."""

import importlib.machinery
import json
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError, MissingPackage
from eqx_decoders.training.run.log import MetricsFile, read_metrics
from eqx_decoders.training.run.trackers import PACKAGES, TensorBoard, Trackers, check_installed, open_trackers
from tests.errors import assert_names, refused


SETTINGS = {"steps": 9, "optimizer.eps": 1e-8, "prompt": "x" * 9000, **{f"more{n}": n for n in range(150)}}


class Service:
    """Fake packages of the three services. `seen`: recorded calls. `runs`: logged rows by run id."""

    def __init__(self, monkeypatch):
        self.seen, self.runs, self.broken = [], {}, False
        self.fake(monkeypatch, "tensorboardX", SummaryWriter=self.writer)
        self.fake(monkeypatch, "wandb", init=self.init)
        names = "get_experiment_by_name create_experiment create_run update_run log_batch set_terminated"
        client = {name: getattr(self, name) for name in names.split()}
        self.fake(
            monkeypatch, "mlflow", MlflowClient=lambda uri: self.seen.append(uri) or types.SimpleNamespace(**client)
        )
        self.fake(monkeypatch, "mlflow.entities", Metric=lambda *fields: fields, Param=lambda *fields: fields)

    def fake(self, monkeypatch, name, **members):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    def check(self):
        if self.broken:
            raise ConnectionError("no route")

    def writer(self, directory, purge_step):
        self.seen.append((directory, purge_step))

        def add_scalar(name, value, step):
            self.check()
            self.runs.setdefault("tensorboard", []).append((step, name, value))

        return types.SimpleNamespace(add_scalar=add_scalar, close=lambda: self.seen.append("closed"))

    def init(self, *, id, resume, config, **places):
        self.check()
        run_id = id or f"w{len(self.runs)}"
        rows = self.runs.setdefault(run_id, [])
        self.seen.append((run_id, resume, config, places))

        def log(row, step):
            self.check()
            rows.append((step, row))

        return types.SimpleNamespace(id=run_id, log=log, finish=lambda: self.seen.append("finished"))

    def get_experiment_by_name(self, name):
        self.check()
        return types.SimpleNamespace(experiment_id="0") if name == "Default" else None

    def create_experiment(self, name):
        return name

    def create_run(self, experiment, run_name):
        run_id = f"m{len(self.runs)}"
        self.runs[run_id] = []
        self.seen.append((experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        self.seen.append((run_id, status))
        _ = self.runs[run_id]

    def log_batch(self, run_id, metrics=(), params=()):
        self.check()
        assert len(params) <= 100 and all(len(text) <= 6000 for _, text in params)
        self.seen += params
        self.runs[run_id] += [(step, name, value) for name, value, _, step in metrics]

    def set_terminated(self, run_id):
        self.seen.append(f"{run_id} ended")


@pytest.fixture
def service(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return Service(monkeypatch)


def row(step):
    return {"step": step, "loss": jnp.float32(step / 2), "name": "x", "per_layer": np.ones(2), "skipped": np.bool_(0)}


def logged(folder, names, steps, start=1, **options):
    trackers = open_trackers(names, folder, SETTINGS, start=start, **options)
    for step in steps:
        trackers.write(row(step))
        if step == 4:
            trackers.write({"step": step, "eval_loss": 3.0})
    trackers.close()


def test_trackers_log_scalars_and_settings(service, tmp_path):
    run = tmp_path / "run"
    logged(run, tuple(PACKAGES), [3])
    assert service.runs == {
        "tensorboard": [(3, "loss", 1.5), (3, "skipped", 0.0)],
        "w0": [(3, {"loss": 1.5, "skipped": 0.0})],
        "m1": [(3, "loss", 1.5), (3, "skipped", 0.0)],
    }
    board, wandb, uri, experiment, *params = service.seen[: len(SETTINGS) + 4]
    assert board == (str(run / "tensorboard"), 1) and wandb[:3] == ("w0", "allow", SETTINGS)
    assert wandb[3] == {"dir": str(run), "name": "run", "allow_val_change": True}
    assert uri == f"sqlite:///{run}/mlflow.db" and experiment == ("0", "run")
    assert dict(params)["optimizer.eps"] == "1e-08" and dict(params).keys() == SETTINGS.keys()
    assert service.seen[len(SETTINGS) + 4 :] == ["closed", "finished", "m1 ended"]
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl")] == [3]


def test_mlflow_reads_environment_variables(service, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    logged(tmp_path / "run", ("mlflow",), [])
    assert service.seen[:2] == ["http://there", ("mine", "run")]


def test_resumed_run_logs_each_row_once(service, tmp_path):
    """The run is killed after step 5 and resumes at step 2. The evaluation of step 4 is a separate row."""
    logged(tmp_path, ("wandb",), [1, 2, 3, 4, 5])
    logged(tmp_path, ("wandb", "mlflow", "tensorboard"), [3, 4, 5, 6], start=3)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "w0", "mlflow": "m1"}
    assert [step for step, _ in service.runs["w0"]] == [1, 2, 3, 4, 4, 5, 6]
    assert [step for step, *_ in service.runs["m1"] if _[0] == "loss"] == [3, 4, 5, 6]  # logged after the restart
    assert (str(tmp_path / "tensorboard"), 3) in service.seen
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 4, 5, 6]
    logged(tmp_path, ("mlflow",), [7], start=7)
    assert service.runs.keys() == {"w0", "m1", "tensorboard"} and ("m1", "RUNNING") in service.seen
    assert service.runs["m1"][-2:] == [(7, "loss", 3.5), (7, "skipped", 0.0)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_tracker_that_cannot_be_opened_is_an_error(service, tmp_path, name):
    logged(tmp_path, (name,), [1, 2])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    service.broken, service.seen = True, []
    if name == "mlflow":
        service.runs.clear()  # the run was deleted in the service
    with refused(ConfigError, f"trackers='{name}'", tmp_path / "trackers.json"):
        open_trackers(("tensorboard", name), tmp_path, SETTINGS, start=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and service.seen[-1] == "closed"


def test_failing_tracker_is_reported_once_and_disabled(service, tmp_path):
    warnings = []
    trackers = open_trackers(("wandb", "tensorboard"), tmp_path, SETTINGS, start=1, warn=warnings.append)
    trackers.write(row(1))
    trackers.flush()
    service.broken = True
    trackers.write(row(2))
    trackers.flush()
    service.broken = False
    trackers.write(row(3))
    trackers.close()
    for line, name in zip(warnings, ("WandB", "TensorBoard"), strict=True):
        assert_names(line, name, "ConnectionError: no route")
    assert [step for step, *_ in service.runs["w0"]] == [1] and "finished" not in service.seen
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_slow_service_does_not_slow_down_training(tmp_path):
    answered, got = threading.Event(), []

    class Slow:
        def write(self, row):
            assert answered.wait(60)
            got.append(row["step"])

        def close(self):
            got.append("closed")

    trackers = Trackers(MetricsFile(tmp_path / "m.jsonl"), Slow())
    for step in (1, 2, 3):
        trackers.write(row(step))
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3] and not got
    answered.set()
    trackers.close()
    assert got == [1, 2, 3, "closed"]


@pytest.mark.parametrize("hangs", ["write", "close"])
def test_closing_does_not_wait_for_an_unresponsive_service(tmp_path, hangs):
    released, warnings = threading.Event(), []

    class Hanging:
        def write(self, row):
            assert hangs != "write" or released.wait(60)

        def close(self):
            assert hangs != "close" or released.wait(60)

    trackers = Trackers(MetricsFile(tmp_path / "m.jsonl"), Hanging(), warn=warnings.append, patience=0.05)
    for step in (1, 2):
        trackers.write(row(step))
    trackers.close()
    assert len(warnings) == 1 and "Hanging" in warnings[0]
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [1, 2]
    released.set()


def test_writing_the_metrics_file_is_retried(tmp_path):
    """The disk may be full temporarily."""
    warnings, file = [], MetricsFile(tmp_path / "m.jsonl")
    trackers, real = Trackers(file, warn=warnings.append), file._file
    file._file = None  # pyright: ignore[reportAttributeAccessIssue]
    trackers.write(row(1))
    trackers.write(row(2))
    file._file = real
    trackers.write(row(3))
    trackers.close()
    (warning,) = warnings
    assert_names(warning, "MetricsFile")
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [3]


def test_tensorboard_is_the_default_if_installed(service, tmp_path, monkeypatch):
    logged(tmp_path, None, [1])
    assert service.runs.keys() == {"tensorboard"}
    monkeypatch.setattr("eqx_decoders.training.run.trackers.find_spec", lambda name: None)
    logged(tmp_path, None, [2], start=2)
    logged(tmp_path, (), [3], start=3)
    assert [step for step, *_ in service.runs["tensorboard"]] == [1, 1]


@pytest.mark.parametrize("name", PACKAGES)
def test_missing_package_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with refused(MissingPackage, f"[{name}]"):
        open_trackers((name,), tmp_path, SETTINGS, start=1)
    monkeypatch.setattr("eqx_decoders.training.run.trackers.find_spec", lambda name: None)
    with refused(MissingPackage, f"'{PACKAGES[name]}'", f"[{name}]"):
        check_installed((name,))
    check_installed(None)


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorBoard(tmp_path, start=2)
    tracker.write(row(3))
    tracker.close()
    assert list(tmp_path.glob("events.*"))
