"""The run directory: the one owner of a run's files, settings, lock, backup, tokenizer and checkpoints.

A run that starts from a Hugging Face checkpoint has its `config.json` and tokenizer in `source/`, so that it can be
resumed, sampled and exported when the checkpoint is gone. Others have their configuration in `model.json`.
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
from eqx_decoders.errors import CheckpointError, check
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.checkpoint.run_backup import RunBackup
from eqx_decoders.io.file_lock import read_owner
from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.heartbeat import ON_FAILURE
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.huggingface.generation_config import add_stop_ids, parse_token_ids, read_generation_config
from eqx_decoders.io.run_lock import OWNER, RunLock, check_run_dir
from eqx_decoders.io.text.chat_template import (
    JINJA,
    ChatTemplate,
    load_chat_template,
    read_chat_template,
    write_chat_template,
)
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.settings_file import Changes, load_settings, save_settings


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """A run's directory as a start with `settings` sees it: `settings.run_dir`, and the checkpoints, maybe elsewhere.

    `RunDirectory.open` takes the settings that are saved there. Nothing is read before it is needed, and only what is
    called save or write changes files.
    """

    settings: TrainConfig

    @classmethod
    def open(cls, run_dir: str | Path) -> "RunDirectory":
        """Open a run as it was saved; for `gs://…`, the directory of its checkpoints, its backup is downloaded."""
        if "://" not in str(run_dir):
            return cls(TrainConfig(run_dir=str(run_dir))).as_saved()
        run = cls.download(str(run_dir))
        if run is None:
            rule = f"run_dir={str(run_dir)!r} is no checkpoint_dir of a run: it has no run/settings.json"
            raise CheckpointError(f"{rule}. Give the run's directory, or its checkpoint_dir.")
        return run

    @classmethod
    def download(cls, checkpoint_dir: str) -> "RunDirectory | None":
        """Copy the backup beside a run's checkpoints into a temporary run directory; return None if there is none."""
        if not RunBackup("", checkpoint_dir).is_complete:
            return None
        folder = tempfile.mkdtemp(prefix="eqx_decoders-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        RunBackup(folder, checkpoint_dir).restore()
        saved = cls(TrainConfig(run_dir=folder)).as_saved()
        run = cls(dataclasses.replace(saved.settings, checkpoint_dir=checkpoint_dir))
        run.save_settings()
        return run

    @classmethod
    def find(cls, run_dir: str, checkpoint_dir: str | None) -> "RunDirectory | None":
        """Find a run that has started: its directory, or a download of the backup beside its checkpoints.

        The backup counts where this machine has no such directory, or the run was started on another one since.
        """
        run = cls(TrainConfig(run_dir=run_dir))
        if run.has_model:
            check_run_dir(run_dir)
            checkpoint_dir = checkpoint_dir or run.as_saved().settings.checkpoint_dir
            if not RunBackup(run_dir, checkpoint_dir).is_taken_over:
                return run.as_saved()
        return None if checkpoint_dir is None else cls.download(checkpoint_dir)

    @property
    def path(self) -> Path:
        return Path(self.settings.run_dir)

    @property
    def source(self) -> Path:
        """Directory with the description and the tokenizer of the model that the run starts from."""
        return self.path / "source"

    @property
    def model_file(self) -> Path:
        """File with the configuration of a model that is no other's."""
        return self.path / "model.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def data(self) -> Path:
        """Directory of the tokens."""
        return self.path / "data"

    @property
    def tokenizer(self) -> Path:
        """Directory of the tokenizer: `tokenizer`, or `source` if it is that of `init_from`."""
        return self.source if self.settings.tokenizer is None and self.source.exists() else self.path / "tokenizer"

    # --- settings ---

    @property
    def _settings_file(self) -> Path:
        return self.path / "settings.json"

    def as_saved(self) -> "RunDirectory":
        """Return the run with the settings that are saved in this directory."""
        return RunDirectory(dataclasses.replace(load_settings(self._settings_file), run_dir=str(self.path)))

    def save_settings(self, changes: Changes | None = None, step: int = 0) -> None:
        """Write the settings, and to their history the `changes` that were made at `step`."""
        save_settings(self.settings, self._settings_file, changes=changes, step=step)

    # --- what was made of it ---

    @property
    def has_settings(self) -> bool:
        return self._settings_file.is_file()

    @property
    def has_started(self) -> bool:
        """True if the run has at least a tokenizer or a checkpoint, or has come to its first step.

        An earlier start may have been stopped before. `source/` alone is no sign that anything was made of it.
        """
        results = ("tokenizer", "checkpoints", OWNER)
        stepped = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return self.has_settings and (stepped or any((self.path / name).exists() for name in results))

    @property
    def has_model(self) -> bool:
        """True if a start without `init_from` has a model to go on with, or one to start from."""
        return self.has_started or (self.has_settings and self.source.exists())

    @property
    def is_imported(self) -> bool:
        """True if the checkpoint is weights alone, from the convert program."""
        checkpoints = self.checkpoints()
        return checkpoints.latest == 0 and checkpoints.manifest(0)["data_state"] == {}

    # --- checkpoints, their backup, and the lock ---

    @property
    def checkpoint_directory(self) -> str:
        """Directory in which the run saves its checkpoints."""
        return self.settings.checkpoint_dir or str(self.path / "checkpoints")

    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints for reading: where the run saves, or those of the convert program in the run."""
        saved = Checkpoints(self.checkpoint_directory)
        if self.settings.checkpoint_dir is None or saved.latest is not None:
            return saved
        return Checkpoints(self.path / "checkpoints")

    @functools.cached_property
    def backup(self) -> RunBackup:
        """Copies of the small files beside checkpoints that are elsewhere, with the owner that this start claims."""
        return RunBackup(self.path, self.settings.checkpoint_dir)

    def restore(self) -> None:
        """Restore the files from the backup, on a machine that has none or older ones."""
        self.backup.check_writable()
        if not self.has_started or self.backup.is_taken_over:
            self.backup.restore()

    def check_checkpoint_dir(self, changes: Changes) -> None:
        """Raise CheckpointError if the checkpoint_dir of a run that has taken steps is empty: not mounted?"""
        elsewhere = self.settings.checkpoint_dir
        if elsewhere is None or "checkpoint_dir" in changes or not self.metrics.exists():
            return
        saved = self.metrics.stat().st_size == 0 or self.backup.is_complete
        rule = f"checkpoint_dir={elsewhere!r} is empty, but {self.path} has saved there"
        check(saved, f"{rule}: is it mounted? To begin anew, choose another run_dir.", CheckpointError)

    def lock_owner(self) -> str:
        """Return the text that names the process which holds the lock; empty without any."""
        return read_owner(self.path / ".lock").decode()

    @contextlib.contextmanager
    def undo_on_failure(self, lock: RunLock | None) -> Iterator[None]:
        """Leave the directory as it was if the start fails, here or elsewhere; lock: None but for the writer."""
        files = (self._settings_file, self.model_file)
        before = {file: file.read_bytes() for file in files if lock is not None and file.is_file()}

        def undo() -> None:
            if lock is not None:
                lock.undo()
                for file, content in before.items():
                    file.write_bytes(content)

        ON_FAILURE.append(undo)  # of another process
        try:
            yield
        except Exception:
            undo()
            raise
        finally:
            ON_FAILURE.remove(undo)

    # --- chat template ---

    def template(self) -> ChatTemplate | None:
        """Load the chat template: the file in the settings, else the one beside the tokenizer."""
        file = self.settings.dataset.chat_template
        copied = file is not None and not Path(file).exists() and (self.tokenizer / JINJA).exists()
        return load_chat_template(self.tokenizer, file=None if copied else file)

    def write_template(self) -> None:
        """Write the run's only chat template: from `dataset.chat_template`, else from the directory of `tokenizer`."""
        file = self.settings.dataset.chat_template
        if file is not None:
            if Path(file).exists():
                write_chat_template(self.tokenizer, read_chat_template(file))
            return
        path = Path(self.settings.tokenizer or "bpe")
        if str(path) in ("bpe", "bytes") or not path.exists() or load_chat_template(self.tokenizer) is not None:
            return
        template = load_chat_template(path if path.is_dir() or is_gguf(path) else path.parent)
        if template is not None:
            write_chat_template(self.tokenizer, template)

    def write_stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Add the end-of-turn tokens of the chat template to the stop ids, and return the new ids.

        Stop ids are `eos_token_id` in the `generation_config.json` of the tokenizer's directory, which exports,
        generation and the server read.
        """
        ends = end_of_turn_ids(tokenizer, self.template())
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        return add_stop_ids(self.tokenizer, ends, ids) if ends else ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text: `eos_token_id` in the run's `generation_config.json` and `config.json`."""
        folder = Directory(self.tokenizer)
        config = folder.json("config.json") if folder.has("config.json") else {}
        ids = parse_token_ids("config.json: eos_token_id", config.get("eos_token_id"))
        return tuple(dict.fromkeys((*read_generation_config(folder).stop_ids, *ids)))

    @property
    def trains_on_chats(self) -> bool:
        """Whether the run trains on conversations.

        For SFT the manifests of its data say so; other methods do if there is a chat template.
        """
        if self.settings.method != "sft":
            return self.template() is not None
        return any("chat_template" in json.loads(file.read_bytes()) for file in self.data.rglob("manifest.json"))
