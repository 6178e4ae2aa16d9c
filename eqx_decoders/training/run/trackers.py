"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, and the protocol for others.

A thread sends the rows to the trackers, so that a slow service does not slow down the training. A resumed run continues
the same run of each tracker. The ids of these runs are in `trackers.json`. Steps after the last checkpoint of a killed
process are computed again, but not logged twice. A tracker may miss the last rows of a killed process, `metrics.jsonl`
does not.
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.errors import ConfigError, missing_package
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.training.run.log import MetricsFile, MetricsRow, read_metrics


PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # by tracker, which is also the extra
IDS_FILE = "trackers.json"
CLOSE_SECONDS = 60.0  # maximum wait for services at the end of a run

_log = logging.getLogger("eqx_decoders")


@runtime_checkable
class Tracker(Protocol):
    """An experiment tracker, which gets the row of each step: `{"step": 7, "loss": 2.5, …}`."""

    def write(self, row: MetricsRow) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files to `directory`.

    `start`: the first step that will be written. TensorBoard hides existing events of this step and later ones.
    """

    def __init__(self, directory: str | Path, *, start: int = 0):
        try:
            from tensorboardX import SummaryWriter  # its import takes two seconds
        except ImportError as error:
            raise missing_package("tensorboardX", "tensorboard") from error
        self._writer = SummaryWriter(str(directory), purge_step=start)

    def write(self, row: MetricsRow) -> None:
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, with the settings as its config. Its files are in `<directory>/wandb`.

    The environment variables of Weights & Biases apply, such as WANDB_PROJECT and WANDB_MODE=offline.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], run_id: str | None):
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb", "wandb") from error
        options: Any = {"dir": str(directory), "name": directory.name, "config": dict(settings)}
        self._run = wandb.init(**options, id=run_id, resume="allow", allow_val_change=True)
        self.id = self._run.id

    def write(self, row: MetricsRow) -> None:
        self._run.log(_scalars(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, with the settings of its first start as its parameters.

    It is stored in MLFLOW_TRACKING_URI, by default `<directory>/mlflow.db`, in the experiment MLFLOW_EXPERIMENT_NAME.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], run_id: str | None):
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise missing_package("mlflow", "mlflow") from error
        local = f"sqlite:///{directory.resolve() / 'mlflow.db'}"
        self._client, self._metric = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local), Metric
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
            existing = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
            run_id = self._client.create_run(experiment, run_name=directory.name).info.run_id
            params = [Param(name, str(value)[:500]) for name, value in settings.items()]
            for start in range(0, len(params), 100):  # MLflow's limit for one call
                self._client.log_batch(run_id, params=params[start : start + 100])
        self.id = run_id

    def write(self, row: MetricsRow) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, row["step"]) for name, value in _scalars(row).items()]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.id)


class Trackers:
    """The metrics file and the trackers of a run. The file is written at once, the trackers from a thread.

    A tracker that fails is reported and gets no more rows. The metrics file gets the next row nevertheless.

    **Arguments:**

    - `warn`: called with a message about each failure.
    - `patience`: maximum number of seconds that `close` waits for the trackers.
    """

    def __init__(self, *trackers: Tracker, warn: Callable[[str], None] = _log.warning, patience: float = CLOSE_SECONDS):
        self._files = [tracker for tracker in trackers if isinstance(tracker, MetricsFile)]
        self._services = [tracker for tracker in trackers if not isinstance(tracker, MetricsFile)]
        self._warn, self._patience = warn, patience
        self._failed: set[int] = set()
        self._rows: queue.Queue[MetricsRow | None] = queue.Queue()
        self._thread = threading.Thread(target=self._log_rows, daemon=True)

    def write(self, row: MetricsRow) -> None:
        """Log a row. Its values must not change afterwards."""
        for file in self._files:
            self._try(file, lambda file=file: file.write(row))
        if self._services:
            if self._thread.ident is None:
                self._thread.start()
            self._rows.put(row)

    def flush(self) -> None:
        """Wait until all trackers have the rows that were written."""
        self._rows.join()

    def close(self) -> None:
        """Close all trackers. Trackers that do not respond within `patience` seconds are reported and left open."""
        for file in self._files:
            self._try(file, file.close)
        if not self._services:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._rows.put(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            names = ", ".join(_name(tracker) for tracker in self._services)
            rows = max(0, self._rows.unfinished_tasks - 1)
            self._warn(
                f"no response from {names} within {self._patience:g} s: closing without waiting. Up to {rows} rows of "
                "metrics are missing there; metrics.jsonl has all rows."
            )

    def _log_rows(self) -> None:
        """Write the rows of the queue to the trackers until a row is None, then close the trackers."""
        while (row := self._rows.get()) is not None:
            for tracker in tuple(self._services):
                self._try(tracker, lambda tracker=tracker, row=row: tracker.write(row))
            self._rows.task_done()
        for tracker in tuple(self._services):
            self._try(tracker, tracker.close)

    def _try(self, tracker: Tracker, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            is_file = tracker in self._files
            if not is_file:
                self._services.remove(tracker)
            if id(tracker) not in self._failed:
                self._failed.add(id(tracker))
                effect = "may miss rows" if is_file else "gets no more rows"
                self._warn(f"{_name(tracker)} failed and {effect}; training continues: {type(error).__name__}: {error}")


class _WithoutLogged:
    """A tracker that skips rows which it has already logged, identified by their step and their names."""

    def __init__(self, tracker: Tracker, logged: set[tuple[int, frozenset[str]]]):
        self.tracker, self._logged = tracker, logged

    def write(self, row: MetricsRow) -> None:
        if _row_key(row) not in self._logged:
            self.tracker.write(row)

    def close(self) -> None:
        self.tracker.close()


def check_installed(names: Sequence[str] | None) -> None:
    """Raise MissingPackage if the package of a tracker is not installed."""
    for name in names or ():
        if find_spec(PACKAGES[name]) is None:
            raise missing_package(PACKAGES[name], name)


def open_trackers(
    names: Sequence[str] | None,
    run_dir: str | Path,
    settings: Mapping[str, Any],
    *,
    start: int,
    warn: Callable[[str], None] = _log.warning,
) -> Trackers:
    """Open the metrics file and the trackers of a run.

    Raises ConfigError if a tracker cannot be opened, and MissingPackage if its package is not installed.

    **Arguments:**

    - `names`: the trackers; None: TensorBoard if it is installed.
    - `settings`: the settings of the run, by dotted name.
    - `start`: the first step that will be written.
    - `warn`: called with a message if a tracker fails later.
    """
    run, path = Path(run_dir), Path(run_dir) / "metrics.jsonl"
    if names is None:
        names = ("tensorboard",) if find_spec("tensorboardX") else ()
    logged = {_row_key(row) for row in read_metrics(path) if row.get("step", -1) >= start} if path.exists() else set()
    ids = json.loads((run / IDS_FILE).read_text()) if (run / IDS_FILE).exists() else {}
    trackers: list[Tracker] = []
    for name in dict.fromkeys(names):
        try:
            if name == "tensorboard":
                trackers.append(TensorBoard(run / "tensorboard", start=max(1, start)))
                continue
            service = {"wandb": WandB, "mlflow": MLflow}[name](run, settings, ids.get(name))
        except Exception as error:
            Trackers(*trackers).close()
            if isinstance(error, ImportError):
                raise
            remedy = f", or delete {run / IDS_FILE} to start a new run there" if name in ids else ""
            raise ConfigError(
                f"trackers={name!r} cannot be opened: {type(error).__name__}: {str(error).strip().rstrip('.')}. Set it "
                f"up, or leave it out{remedy}."
            ) from error
        trackers.append(_WithoutLogged(service, logged) if name in ids else service)
        if ids.get(name) != service.id:
            ids[name] = service.id
            write_json(run / IDS_FILE, ids)
    return Trackers(MetricsFile(path, start=start), *trackers, warn=warn)


def _row_key(row: MetricsRow) -> tuple[int, frozenset[str]]:
    return row.get("step", -1), frozenset(row)


def _name(tracker: Tracker) -> str:
    return type(tracker.tracker if isinstance(tracker, _WithoutLogged) else tracker).__name__


def _scalars(row: MetricsRow) -> dict[str, float]:
    """Return the scalars of a row, without its step."""
    arrays = {name: np.asarray(value) for name, value in row.items() if name != "step"}
    return {name: float(array) for name, array in arrays.items() if array.ndim == 0 and array.dtype.kind not in "USO"}
