"""The run directory: which files a run has there, and which of them tell that it has started.

A run that starts from a Hugging Face checkpoint has its `config.json` and tokenizer in `source/`, so that it can be
resumed, sampled and exported when the checkpoint is gone. Others have their configuration in `model.json`.
"""

import atexit
import dataclasses
import shutil
import tempfile
from pathlib import Path

from eqx_decoders.errors import CheckpointError, check
from eqx_decoders.io.atomic_files import expanded, write_atomically
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.checkpoint.run_backup import RunBackup
from eqx_decoders.io.run_lock import OWNER, check_run_dir
from eqx_decoders.io.text.chat_template import JINJA, ChatTemplate, load_chat_template, read_chat_template
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.settings_file import Changes, load_settings, save_settings


SOURCE = "source"
MODEL = "model.json"


def checkpoint_directory(settings: TrainConfig, run_dir: str | Path) -> str | Path:
    """Return the directory in which a run saves its checkpoints."""
    return settings.checkpoint_dir or Path(run_dir) / "checkpoints"


def checkpoints_of(settings: TrainConfig, run_dir: str | Path) -> Checkpoints:
    """Return the checkpoints of a run for reading: where it saves, or those of the convert program in the run."""
    saved = Checkpoints(checkpoint_directory(settings, run_dir))
    if settings.checkpoint_dir is None or saved.latest is not None:
        return saved
    return Checkpoints(Path(run_dir) / "checkpoints")


def download_run(checkpoint_dir: str) -> Path | None:
    """Copy the backup beside the checkpoints of a run into a temporary run directory; return None if there is none."""
    if not RunBackup("", checkpoint_dir).is_complete:
        return None
    folder = Path(tempfile.mkdtemp(prefix="eqx_decoders-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    RunBackup(folder, checkpoint_dir).restore()
    settings = load_settings(folder / "settings.json")
    save_settings(dataclasses.replace(settings, checkpoint_dir=checkpoint_dir), folder / "settings.json")
    return folder


def local_run(run_dir: str | Path) -> Path:
    """Return a run directory, downloaded if it is `gs://…`, the directory of the checkpoints of a run."""
    if "://" not in str(run_dir):
        return Path(expanded(run_dir))
    folder = download_run(str(run_dir))
    if folder is None:
        rule = f"run_dir={str(run_dir)!r} is no checkpoint_dir of a run"
        raise CheckpointError(f"{rule}: it has no run/settings.json. Give the run's directory, or its checkpoint_dir.")
    return folder


def find_run(run_dir: str | Path, checkpoint_dir: str | None) -> Path | None:
    """Find the files of a run that has started: its directory, or a download of the backup beside its checkpoints.

    The backup counts where this machine has no such directory, or the run was started on another one since.
    """
    run = Path(run_dir)
    if has_model(run):
        check_run_dir(run)
        checkpoint_dir = checkpoint_dir or load_settings(run / "settings.json").checkpoint_dir
        if not RunBackup(run, checkpoint_dir).is_taken_over:
            return run
    return None if checkpoint_dir is None else download_run(checkpoint_dir)


def check_checkpoint_dir(settings: TrainConfig, changes: Changes, run_dir: str | Path) -> None:
    """Raise CheckpointError if the checkpoint_dir of a run that has taken steps is empty: not mounted?"""
    metrics = Path(run_dir) / "metrics.jsonl"
    if settings.checkpoint_dir is None or "checkpoint_dir" in changes or not metrics.exists():
        return
    saved = metrics.stat().st_size == 0 or RunBackup(run_dir, settings.checkpoint_dir).is_complete
    rule = f"checkpoint_dir={settings.checkpoint_dir!r} is empty, but {run_dir} has saved there"
    check(saved, f"{rule}: is it mounted? To begin anew, choose another run_dir.", CheckpointError)


def has_started(run_dir: str | Path) -> bool:
    """Return whether a run has at least a tokenizer or a checkpoint, or has come to its first step.

    An earlier start may have been stopped before. `source/` alone is no sign that anything was made of it.
    """
    run = Path(run_dir)
    results, metrics = ("tokenizer", "checkpoints", OWNER), run / "metrics.jsonl"
    stepped = metrics.is_file() and metrics.stat().st_size > 0
    return (run / "settings.json").is_file() and (stepped or any((run / name).exists() for name in results))


def has_model(run: Path) -> bool:
    """Return whether a start without `init_from` has a model to go on with, or one to start from."""
    return has_started(run) or ((run / "settings.json").is_file() and (run / SOURCE).exists())


def is_imported(settings: TrainConfig, run_dir: str | Path) -> bool:
    """Return whether the checkpoint of a run is weights alone, from the convert program."""
    checkpoints = checkpoints_of(settings, run_dir)
    return checkpoints.latest == 0 and checkpoints.manifest(0)["data_state"] == {}


def tokenizer_directory(settings: TrainConfig, run_dir: str | Path) -> Path:
    """Return the directory of the tokenizer of a run: `tokenizer`, or `source` if it is that of `init_from`."""
    of_source = settings.tokenizer is None and (Path(run_dir) / SOURCE).exists()
    return Path(run_dir) / (SOURCE if of_source else "tokenizer")


def run_template(settings: TrainConfig, run_dir: str | Path) -> ChatTemplate | None:
    """Load the chat template of a run: the file in its settings, else the one beside its tokenizer."""
    folder, file = tokenizer_directory(settings, run_dir), settings.dataset.chat_template
    copied = file is not None and not Path(file).exists() and (folder / JINJA).exists()
    return load_chat_template(folder, file=None if copied else file)


def write_template(settings: TrainConfig, run_dir: str | Path) -> None:
    """Copy the file of a chat template beside the tokenizer of the run, with which it is exported."""
    file = settings.dataset.chat_template
    if file is not None and Path(file).exists():
        source = read_chat_template(file).source
        write_atomically(tokenizer_directory(settings, run_dir) / JINJA, source.encode())
