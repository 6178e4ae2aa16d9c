"""Files of settings: `settings.json` of a run, files that flags name, and the changes that a resumed run allows."""

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
from eqx_decoders.training.config import METHOD_GROUPS, TrainConfig
from eqx_decoders.training.config_file import flat_settings, read_mapping, typed_settings, with_settings
from eqx_decoders.training.flags import SHORT_FLAGS


# Other names of settings in files: their short flags.
_ALIASES = {short.removeprefix("--").replace("-", "_"): name for name, short in SHORT_FLAGS.items()}

# Which run it is: never changed.
_IDENTITY = (
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
# How the run learns: changed only with `allow_changes`.
_LEARNING = (
    *(f"{group}.*" for group in METHOD_GROUPS),
    "optimizer.*",
    "data.batch_size",
    "step.z_loss",
    "step.qk_clip_threshold",
)
# Where state is stored, not what: changed at will.
_STORAGE = ("optimizer.shard_over_data",)
# Of one start, not of the run.
_OF_A_START = (
    "run_dir",
    "config",
    "allow_changes",
    "describe",
    "list_models",
    "distributed",
    "distributed_timeout",
)

Changes = Mapping[str, tuple[Any, Any]]


def changed_settings(old: TrainConfig, new: TrainConfig) -> Changes:
    """Return the settings of a run that differ, by their dotted names: the old and the new value."""
    was, now = flat_settings(old), flat_settings(new)
    return {name: (was[name], now[name]) for name in was if name not in _OF_A_START and was[name] != now[name]}


def check_changes(changes: Changes, run_dir: str | Path, *, allowed: bool, trained: bool) -> None:
    """Raise ConfigError if a run has another model, tokenizer or seed; or, once trained, if it learns in another way.

    The latter may be `allowed`. More steps always are: a schedule that depends on them takes their course from here.
    """
    relevant = {name: pair for name, pair in changes.items() if name not in _STORAGE}
    fixed, learning = (_matching(relevant, patterns) for patterns in (_IDENTITY, _LEARNING))
    was, now = changes.get("data.path", (None, None))
    if shares_of(was) != shares_of(now):  # other paths may be the same data in another place
        learning = {**learning, "data.path": (was, now)}
    check(not fixed, f"{_listed(fixed, f'but {run_dir} was begun with')}: choose another run_dir.")
    remedy = "leave it out to keep the run's, or give allow_changes to go on with the new one"
    free = allowed or not trained or not learning
    check(free, f"{_listed(learning, f'but {run_dir} was trained with')}: {remedy}.")


def _matching(changes: Changes, patterns: tuple[str, ...]) -> Changes:
    return {name: pair for name, pair in changes.items() if any(fnmatch.fnmatch(name, each) for each in patterns)}


def _listed(changes: Changes, rule: str) -> str:
    return "; ".join(f"{name}={now!r}, {rule} {was!r}" for name, (was, now) in changes.items())


def is_new(directory: str) -> bool:
    """Return whether a directory is empty or does not exist."""
    path = Path(directory)
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def save_settings(settings: TrainConfig, path: Path, *, changes: Changes | None = None, step: int = 0) -> None:
    """Write the settings of a run as JSON, for people and for `load_settings`.

    `changes`, made at `step`, are added to its history: the settings, their old and new values, and the time.
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


def settings_of(values: Any) -> TrainConfig | None:
    """Parse the settings that `settings_json` gave; None for anything else."""
    if not isinstance(values, dict) or "optimizer" not in values:
        return None
    return with_settings(TrainConfig(), _typed(values, "checkpoint"))


def is_of_a_run(path: str | Path) -> bool:
    """Return whether a settings file is the `settings.json` of a run, which contains all settings.

    It is enough if the file contains more than half of the settings, because a run may be older than some settings.
    """
    if Path(path).suffix != ".json":
        return False
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    return len(names & read_mapping(path).keys()) > len(names) / 2


def with_file(settings: TrainConfig, path: str | Path, *, without: Sequence[str] = ()) -> TrainConfig:
    """Replace settings by those of a file, in the names of flags or fields; unchecked until flags are added.

    Names in `without` are not read. JSON and YAML files with the same content give the same settings. If the file is
    the `settings.json` of another run, it is read without the settings of a single start, `checkpoint_dir`, and exports
    that are already written.
    """
    values = read_mapping(path)
    if is_of_a_run(path):
        dropped = ("history", *_OF_A_START, "checkpoint_dir")
        values = {name: value for name, value in values.items() if name not in dropped}
        values = {name: value for name, value in values.items() if not _is_written(name, value)}
    check("config" not in values, f"{path}: config={values.get('config')!r} can't be read from there: give one file.")
    typed = {name: value for name, value in _typed(values, path).items() if name not in without}
    return with_settings(settings, typed | {"config": str(path)}, checked=False)


def of_a_new_start(settings: TrainConfig, run_dir: str) -> TrainConfig:
    """Return the settings of a run that is started again, without an export that was written already."""
    once = {"config": None, "export": None, "export_adapter": None, "allow_changes": False, "distributed": False}
    unwritten = {
        name: value for name in ("export", "export_adapter") if not _is_written(name, value := getattr(settings, name))
    }
    return dataclasses.replace(settings, **{"run_dir": run_dir} | once | unwritten)


def _typed(values: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the settings in a file by the dotted names; the names of short flags are accepted, too."""
    return typed_settings(values, TrainConfig(), _ALIASES, path)


def _is_written(name: str, value: Any) -> bool:
    return name in ("export", "export_adapter") and value is not None and not is_new(value)


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the JSON of a run's settings, without its history."""
    check(path.is_file(), f"{path} is not there: {path.parent} is no run directory of scripts/train.py.")
    return {name: value for name, value in read_mapping(path).items() if name != "history"}
