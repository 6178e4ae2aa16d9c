"""The directory of a training run: its files, its settings, and what a resumed run may change.

A run that starts from a Hugging Face checkpoint (`init_from`) keeps the checkpoint's `config.json` and tokenizer in
`source/`, so that the run can be resumed, sampled from and exported after the checkpoint was deleted. Other runs keep
the model's configuration in `model.json`.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eqx_decoders.data.end_of_turn import end_of_turn_ids
from eqx_decoders.errors import CheckpointError, ConfigError, check
from eqx_decoders.families.registry import get_config
from eqx_decoders.io.atomic_files import new_directory, write_atomically, write_json
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.checkpoint.run_backup import RunBackup
from eqx_decoders.io.file_lock import read_holder
from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.huggingface.directory import Directory, parse_json
from eqx_decoders.io.huggingface.export import export_config, merge_settings
from eqx_decoders.io.huggingface.export_directory import copy_tokenizer
from eqx_decoders.io.huggingface.generation_config import add_stop_ids, parse_token_ids, read_generation_config
from eqx_decoders.io.huggingface.load import decode_config
from eqx_decoders.io.processes import ON_FAILURE
from eqx_decoders.io.run_lock import OWNER, RunLock, check_run_dir
from eqx_decoders.io.text.chat_template import (
    JINJA,
    ChatTemplate,
    load_chat_template,
    read_chat_template,
    write_chat_template,
)
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.training.settings.files import Changes, changed_settings, check_changes, load_settings, save_settings
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.step import ModelSettings


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory `settings.run_dir`, for a run with these settings. Checkpoints may be in another directory.

    `RunDirectory.open` uses the settings saved in the directory. Files are read when they are needed, and only methods
    whose names start with `save`, `write` or `restore` change files of a run; `undo_on_failure` restores them.
    """

    settings: TrainConfig

    @classmethod
    def open(cls, run_dir: str | Path) -> "RunDirectory":
        """Open a run with its saved settings.

        If `run_dir` is a URL (`gs://…`), it must be the `checkpoint_dir` of a run. The backup of the run directory is
        downloaded from there.
        """
        if "://" not in str(run_dir):
            return cls(TrainConfig(run_dir=str(run_dir))).with_saved_settings()
        run = cls.download(str(run_dir))
        if run is None:
            raise CheckpointError(
                f"run_dir={str(run_dir)!r} is not the checkpoint_dir of a run: it has no run/settings.json. Give the "
                "directory of the run, or its checkpoint_dir."
            )
        return run

    @classmethod
    def download(cls, checkpoint_dir: str) -> "RunDirectory | None":
        """Copy the backup of a run from its `checkpoint_dir` to a temporary run directory; None if there is none."""
        if not RunBackup("", checkpoint_dir).is_complete:
            return None
        folder = tempfile.mkdtemp(prefix="eqx_decoders-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        RunBackup(folder, checkpoint_dir).restore()
        saved = cls(TrainConfig(run_dir=folder)).with_saved_settings()
        run = cls(dataclasses.replace(saved.settings, checkpoint_dir=checkpoint_dir))
        run.save_settings()
        return run

    @classmethod
    def find(cls, run_dir: str, checkpoint_dir: str | None) -> "RunDirectory | None":
        """Return the run in `run_dir`, otherwise its backup in `checkpoint_dir`; None if neither has a run.

        The backup is also used if another machine has started the run since this machine did.
        """
        run = cls(TrainConfig(run_dir=run_dir))
        if run.has_model:
            check_run_dir(run_dir)
            checkpoint_dir = checkpoint_dir or run.with_saved_settings().settings.checkpoint_dir
            if not RunBackup(run_dir, checkpoint_dir).is_taken_over:
                return run.with_saved_settings()
        return None if checkpoint_dir is None else cls.download(checkpoint_dir)

    # --- files ---

    @property
    def path(self) -> Path:
        return Path(self.settings.run_dir)

    @property
    def source_dir(self) -> Path:
        """Directory with `config.json` and the tokenizer of the checkpoint `init_from`."""
        return self.path / "source"

    @property
    def model_file(self) -> Path:
        """File with the model's configuration, in runs without `init_from`."""
        return self.path / "model.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def data_dir(self) -> Path:
        """Directory with the tokenized data."""
        return self.path / "data"

    @property
    def tokenizer_dir(self) -> Path:
        """Directory with the tokenizer: `source` if the run uses the tokenizer of `init_from`, else `tokenizer`."""
        if self.settings.tokenizer is None and self.source_dir.exists():
            return self.source_dir
        return self.path / "tokenizer"

    @property
    def _settings_file(self) -> Path:
        return self.path / "settings.json"

    # --- settings ---

    def with_saved_settings(self) -> "RunDirectory":
        """Return this run directory with the settings of `settings.json`."""
        return RunDirectory(dataclasses.replace(load_settings(self._settings_file), run_dir=str(self.path)))

    def save_settings(self, changes: Changes | None = None, step: int = 0) -> None:
        """Write `settings.json`, and add `changes`, made at `step`, to its history."""
        save_settings(self.settings, self._settings_file, changes=changes, step=step)

    @property
    def has_settings(self) -> bool:
        return self._settings_file.is_file()

    @property
    def has_started(self) -> bool:
        """Whether an earlier start of the run has made a tokenizer, a checkpoint or a step.

        Settings and `source/` alone do not count: they are written before anything is computed.
        """
        made = ("tokenizer", "checkpoints", OWNER)
        has_steps = self.metrics_file.is_file() and self.metrics_file.stat().st_size > 0
        return self.has_settings and (has_steps or any((self.path / name).exists() for name in made))

    @property
    def has_model(self) -> bool:
        """Whether the run can be started without `init_from`, because the directory has its model or `source/`."""
        return self.has_started or (self.has_settings and self.source_dir.exists())

    @contextlib.contextmanager
    def undo_on_failure(self, lock: RunLock | None) -> Iterator[None]:
        """Leave the directory as it was if the start fails, in this process or in another process of the run.

        `lock`: the lock on the directory; None in processes that do not write.
        """
        files = (self._settings_file, self.model_file)
        contents = {file: file.read_bytes() for file in files if lock is not None and file.is_file()}

        def undo() -> None:
            if lock is not None:
                lock.undo()
                for file, content in contents.items():
                    file.write_bytes(content)

        ON_FAILURE.append(undo)  # called if another process fails
        try:
            yield
        except Exception:
            undo()
            raise
        finally:
            ON_FAILURE.remove(undo)

    def lock_owner(self) -> str:
        """Return the text that identifies the process which holds the lock; empty if there is none."""
        return read_holder(self.path / ".lock").decode()

    # --- checkpoints and their backup ---

    @property
    def checkpoint_directory(self) -> str:
        """Directory in which the run saves its checkpoints."""
        return self.settings.checkpoint_dir or str(self.path / "checkpoints")

    def checkpoints(self) -> Checkpoints:
        """Open the checkpoints for reading.

        These are the checkpoints in `checkpoint_directory`. If it has none, they are those in the run directory, where
        `scripts/convert.py` writes imported weights.
        """
        saved = Checkpoints(self.checkpoint_directory)
        if self.settings.checkpoint_dir is None or saved.latest is not None:
            return saved
        return Checkpoints(self.path / "checkpoints")

    @property
    def is_imported(self) -> bool:
        """Whether the newest checkpoint has only weights, written by `scripts/convert.py`."""
        checkpoints = self.checkpoints()
        return checkpoints.latest == 0 and checkpoints.manifest(0)["data_state"] == {}

    @functools.cached_property
    def backup(self) -> RunBackup:
        """Backup of the small files in `checkpoint_dir`, with the owner id of this start."""
        return RunBackup(self.path, self.settings.checkpoint_dir)

    def restore_backup(self) -> None:
        """Restore the files from the backup if this machine has no files of the run, or older ones."""
        self.backup.check_writable()
        if not self.has_started or self.backup.is_taken_over:
            self.backup.restore()

    def check_checkpoint_dir(self, changes: Changes) -> None:
        """Raise CheckpointError if the run has taken steps but `checkpoint_dir` is empty: a disk may not be mounted."""
        directory = self.settings.checkpoint_dir
        if directory is None or "checkpoint_dir" in changes or not self.metrics_file.exists():
            return
        is_there = self.metrics_file.stat().st_size == 0 or self.backup.is_complete
        check(
            is_there,
            f"checkpoint_dir={directory!r} is empty, but {self.path} has saved checkpoints there. Mount the disk, or "
            "choose another run_dir to start a new run.",
            CheckpointError,
        )

    # --- tokenizer and chat template ---

    def template(self) -> ChatTemplate | None:
        """Load the chat template: the file `data.chat_template`, otherwise the template of the tokenizer."""
        file = self.settings.data.chat_template
        is_copied = file is not None and not Path(file).exists() and (self.tokenizer_dir / JINJA).exists()
        return load_chat_template(self.tokenizer_dir, file=None if is_copied else file)

    def write_template(self) -> None:
        """Write the chat template to the tokenizer's directory.

        It is the file `data.chat_template`, otherwise the template of the tokenizer that `tokenizer` names.
        """
        file = self.settings.data.chat_template
        if file is not None:
            if Path(file).exists():
                write_chat_template(self.tokenizer_dir, read_chat_template(file))
            return
        path = Path(self.settings.tokenizer or "bpe")
        if str(path) in ("bpe", "bytes") or not path.exists() or load_chat_template(self.tokenizer_dir) is not None:
            return
        template = load_chat_template(path if path.is_dir() or is_gguf(path) else path.parent)
        if template is not None:
            write_chat_template(self.tokenizer_dir, template)

    def write_stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Add the end-of-turn tokens of the chat template to the stop ids; return the ids that are new.

        Stop ids are `eos_token_id` in the `generation_config.json` of the tokenizer's directory, which exports,
        generation and the server read.
        """
        end_ids = end_of_turn_ids(tokenizer, self.template())
        special_ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        return add_stop_ids(self.tokenizer_dir, end_ids, special_ids) if end_ids else ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Stop ids of generation: `eos_token_id` in the run's `generation_config.json` and `config.json`."""
        folder = Directory(self.tokenizer_dir)
        config = folder.json("config.json") if folder.has("config.json") else {}
        ids = parse_token_ids("config.json: eos_token_id", config.get("eos_token_id"))
        return tuple(dict.fromkeys((*read_generation_config(folder).stop_ids, *ids)))

    @property
    def trains_on_chats(self) -> bool:
        """Whether the run trains on conversations.

        With the method `sft`, the manifests of the tokenized data say so. With other methods it is true if there is a
        chat template.
        """
        if self.settings.method != "sft":
            return self.template() is not None
        return any("chat_template" in json.loads(file.read_bytes()) for file in self.data_dir.rglob("manifest.json"))


def model_config(settings: ModelSettings) -> DecoderConfig:
    """Return the configuration that the settings describe: `model` or `model_config`, with the fields of `set`."""
    file = settings.model_config
    config = get_config(settings.model) if file is None else _read_config_file(file)
    return with_fields(config, settings.set)


def _read_config_file(path: str) -> DecoderConfig:
    """Read a configuration from a file of `DecoderConfig.to_json`, or from a `config.json` of Hugging Face."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_config={str(path)!r} cannot be read: {error}.") from error
    if '"model_type"' not in text:
        return DecoderConfig.from_json(text)
    return decode_config(parse_json(text.encode(), str(path)), str(path))[0]


def run_config(run: RunDirectory) -> DecoderConfig:
    """Return the configuration of the model of a run without `init_from`.

    It is read from `model.json`, unless the settings name another model than the saved settings.
    """
    is_saved = run.model_file.is_file() and run.has_settings
    if is_saved and names_same_model(run.with_saved_settings().settings, run.settings):
        return DecoderConfig.from_json(run.model_file.read_text())
    return model_config(run.settings)


def names_same_model(settings: TrainConfig, other: TrainConfig) -> bool:
    """Return whether the settings that name the model are equal."""
    names = ("model", "model_config", "set", "init_from")
    return all(getattr(settings, name) == getattr(other, name) for name in names)


def write_config(run: RunDirectory, *, save: bool = False) -> None:
    """Write `model.json` for a run without `init_from`; `save`: write `settings.json` before it.

    The settings come first because they mark the directory as that of a run. An interrupted call never leaves the
    settings of one model beside the configuration of another.
    """
    file = run.model_file
    has_config = run.settings.init_from is None and not run.source_dir.exists()
    content = run_config(run).to_json().encode() if has_config else b""
    if save:
        if has_config and file.is_file() and file.read_bytes() != content:
            file.unlink()
        run.save_settings()
    if has_config:
        write_atomically(file, content)


def write_source(model: Decoder, folder: Path) -> None:
    """Write `config.json`, the tokenizer and the generation settings of a loaded model to the `source` of a run."""
    if model.origin is None:
        return
    _, settings = export_config(model)
    with new_directory(folder) as partial:
        copy_tokenizer(model.origin.directory, partial)
        write_json(partial / "config.json", merge_settings(json.loads(model.origin.settings), settings))
        shutil.rmtree(folder, ignore_errors=True)  # left by a start that was interrupted


def resume(run: RunDirectory) -> tuple[RunDirectory, Changes]:
    """Return the run with the settings of this start, and what they change of the saved settings.

    When a run is resumed, `init_from` may be left out, and the same model may be named in another way. Raises
    ConfigError for changes that `check_changes` refuses. Every change is allowed if nothing was computed in the
    directory yet, or if it has only weights that `scripts/convert.py` imported.
    """
    if not run.has_model:
        return run, {}
    settings = run.settings
    saved_run = run.with_saved_settings()
    saved = saved_run.settings
    checkpoints = saved_run.checkpoints()
    if settings.init_from is None and settings.model == saved.model:
        settings = dataclasses.replace(settings, init_from=saved.init_from)
        run = RunDirectory(settings)
    if not (run.has_started or checkpoints.steps) or run.is_imported:
        return run, {}
    if settings.init_from is None and saved.init_from is None and not names_same_model(saved, settings):
        config = run_config(saved_run)
        only_set_differs = names_same_model(dataclasses.replace(saved, set=settings.set), settings)
        new_config = with_fields(config, settings.set) if only_set_differs else model_config(settings)
        if new_config == config:
            settings = dataclasses.replace(settings, model=saved.model, model_config=saved.model_config, set=saved.set)
            run = RunDirectory(settings)
    changes = changed_settings(saved, settings)
    latest = checkpoints.latest
    check_changes(changes, run.path, allowed=settings.allow_changes, trained=latest is not None)
    if "checkpoint_dir" in changes and latest is not None:
        _check_moved_checkpoints(saved_run, run, latest)
    return run, changes


def _check_moved_checkpoints(saved_run: RunDirectory, run: RunDirectory, latest: int) -> None:
    """Raise ConfigError unless the new `checkpoint_dir` has the checkpoints of this run, up to step `latest`."""
    old, new = saved_run.checkpoint_directory, run.checkpoint_directory
    moved = Checkpoints(new).latest
    check(
        moved is not None and moved >= latest,
        f"checkpoint_dir={run.settings.checkpoint_dir!r}, but step {latest} of {run.path} is in {old}: copy {old} to "
        f"{new}, or leave checkpoint_dir as it was.",
    )
    other = RunDirectory.download(new)
    if other is not None:
        changes = changed_settings(other.settings, run.settings)
        check_changes(changes, new, allowed=run.settings.allow_changes, trained=True)
