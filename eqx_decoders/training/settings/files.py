"""Files of settings: `settings.json` of a run, files for `--config`, and the changes that a resumed run allows."""

import dataclasses
import datetime
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.data.mixture import shares_of
from eqx_decoders.errors import check
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.training.settings.flags import SHORT_FLAGS
from eqx_decoders.training.settings.run import METHOD_GROUPS, TrainConfig
from eqx_decoders.training.settings.values import flat_settings, read_mapping, typed_settings, with_settings


# Other names of settings in files: those of the short flags.
_ALIASES = {short.removeprefix("--").replace("-", "_"): name for name, short in SHORT_FLAGS.items()}

# Settings that cannot change in a run.
_FIXED = (
    "method",
    "model",
    "model_config",
    "set",
    "init_from",
    "mtp_depths",
    "lora.*",
    "tokenizer",
    "bpe_vocab_size",
    "data.seed",
    "params_dtype",
    "optimizer.moments_dtype",
)
# Settings that change the results of training: they can change with `allow_changes`.
_LEARNING = (
    *(f"{group}.*" for group in METHOD_GROUPS),
    "optimizer.*",
    "data.batch_size",
    "step.z_loss",
    "step.qk_clip_threshold",
)
# Settings of the storage of arrays, which can always change.
_STORAGE = ("optimizer.shard_over_data",)
# Settings of one start of the program. They are not settings of the run.
_START_ONLY = (
    "run_dir",
    "config",
    "epochs",
    "allow_changes",
    "describe",
    "list_models",
    "distributed",
    "distributed_timeout",
)

Changes = Mapping[str, tuple[Any, Any]]


def changed_settings(old: TrainConfig, new: TrainConfig) -> Changes:
    """Return the old and the new value of each setting of a run that differs, by dotted name."""
    old_values, new_values = flat_settings(old), flat_settings(new)
    return {
        name: (value, new_values[name])
        for name, value in old_values.items()
        if name not in _START_ONLY and value != new_values[name]
    }


def check_changes(changes: Changes, run_dir: str | Path, *, allowed: bool, trained: bool) -> None:
    """Raise ConfigError for changes of settings that a run does not support.

    The model, the tokenizer and the seed cannot change. Settings that change the results of training can change before
    the first checkpoint, or with `allow_changes`. The number of steps can always change: a schedule that depends on it
    continues at the current step.

    **Arguments:**

    - `changes`: see `changed_settings`.
    - `allowed`: the setting `allow_changes`.
    - `trained`: whether the run has a checkpoint.
    """
    changes_to_check = {name: pair for name, pair in changes.items() if name not in _STORAGE}
    fixed, learning = (_matching(changes_to_check, patterns) for patterns in (_FIXED, _LEARNING))
    old_path, new_path = changes.get("data.path", (None, None))
    if shares_of(old_path) != shares_of(new_path):  # other paths may be the same data in another place
        learning = {**learning, "data.path": (old_path, new_path)}
    check(not fixed, f"{_list_changes(fixed, run_dir)}. These settings cannot change: choose another run_dir.")
    check(
        allowed or not trained or not learning,
        f"{_list_changes(learning, run_dir)}. Remove the setting to keep the value of the run, or set allow_changes to "
        "continue with the new value.",
    )


def _matching(changes: Changes, patterns: tuple[str, ...]) -> Changes:
    return {name: pair for name, pair in changes.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}


def _list_changes(changes: Changes, run_dir: str | Path) -> str:
    return "; ".join(f"{name}={new!r}, but the run in {run_dir} has {old!r}" for name, (old, new) in changes.items())


def is_new(directory: str) -> bool:
    """Return whether a directory is empty or does not exist."""
    path = Path(directory)
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def save_settings(settings: TrainConfig, path: Path, *, changes: Changes | None = None, step: int = 0) -> None:
    """Write the settings of a run as JSON; `load_settings` reads them.

    `changes` that are made at a `step` are added to the list `history` of the file, with the time.
    """
    history = read_mapping(path).get("history", []) if path.is_file() else []
    if changes:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        history = [*history, {"step": step, "time": now, "changes": dict(changes)}]
    write_json(path, settings_json(settings) | ({"history": history} if history else {}))


def settings_json(settings: TrainConfig) -> dict[str, Any]:
    """Return the settings as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def load_settings(path: Path) -> TrainConfig:
    """Read the settings that `save_settings` wrote."""
    return with_settings(TrainConfig(), _typed(_read_settings(path), path))


def parse_settings(values: Any) -> TrainConfig | None:
    """Parse the result of `settings_json`. Returns None for other values."""
    if not isinstance(values, dict) or "optimizer" not in values:
        return None
    return with_settings(TrainConfig(), _typed(values, "checkpoint"))


def is_settings_of_run(path: str | Path) -> bool:
    """Return whether a settings file is the `settings.json` of a run, which contains all settings.

    It is enough if the file contains more than half of the settings, because a run may be older than some settings.
    """
    if Path(path).suffix != ".json":
        return False
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    return len(names & read_mapping(path).keys()) > len(names) / 2


def with_file(settings: TrainConfig, path: str | Path, *, without: Sequence[str] = ()) -> TrainConfig:
    """Return the settings with the values of a file, which has the names of flags or fields. They are not validated.

    Names in `without` are not read. JSON and YAML files with the same content give the same settings. If the file is
    the `settings.json` of another run, it is read without the settings of a single start, without `checkpoint_dir`,
    and without exports that are already written.
    """
    values = read_mapping(path)
    if is_settings_of_run(path):
        dropped = ("history", *_START_ONLY, "checkpoint_dir")
        values = {name: value for name, value in values.items() if name not in dropped}
        values = {name: value for name, value in values.items() if not _is_written(name, value)}
    check(
        "config" not in values,
        f"{path}: config={values.get('config')!r}: a settings file cannot name another one. Merge the two files.",
    )
    typed = {name: value for name, value in _typed(values, path).items() if name not in without}
    return with_settings(settings, typed | {"config": str(path)}, checked=False)


def settings_to_resume(settings: TrainConfig, run_dir: str) -> TrainConfig:
    """Return the saved settings of a run for another start, without exports that are already written."""
    start_only = {
        "config": None,
        "epochs": None,
        "export": None,
        "export_adapter": None,
        "allow_changes": False,
        "distributed": False,
    }
    unwritten = {
        name: value for name in ("export", "export_adapter") if not _is_written(name, value := getattr(settings, name))
    }
    return dataclasses.replace(settings, **{"run_dir": run_dir} | start_only | unwritten)


def _typed(values: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the settings of a file by dotted name. Names of short flags are also accepted."""
    return typed_settings(values, TrainConfig(), _ALIASES, path)


def _is_written(name: str, value: Any) -> bool:
    return name in ("export", "export_adapter") and value is not None and not is_new(value)


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a run, without their history."""
    check(path.is_file(), f"{path} does not exist: {path.parent} is not a run directory of scripts/train.py.")
    return {name: value for name, value in read_mapping(path).items() if name != "history"}
