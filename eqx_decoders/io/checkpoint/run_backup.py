"""Backup of a run's small files in its checkpoint directory, if this is not in the run directory.

If checkpoints are in a bucket and the machine is lost, the run directory is lost, too. With the backup, the run can
resume on another machine: settings, model, tokenizer, metrics and manifests of the data are restored, and the text is
tokenized again. An owner file shows which process saves into the directory, because other machines do not see the lock
of the run directory.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from eqx_decoders.errors import CheckpointError, ConfigError
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.checkpoint.steps import names_in, open_path
from eqx_decoders.io.file_lock import holder_text, own_process
from eqx_decoders.io.run_lock import OWNER, check_own, has_owner


FOLDER = "run"  # in the directory of the checkpoints
GROWING = ("metrics.jsonl", "trackers.json")
# Files and directories of a backup, in the order of copying. The last file marks the backup as complete.
COPIED = ("model.json", "source", "tokenizer", "data", *GROWING, "settings.json")
ONLY = {"data": "manifest.json"}  # the only files that are copied from a directory


class RunBackup:
    """Backup of a run's files in `<checkpoint_dir>/run`; without a `checkpoint_dir` all methods do nothing."""

    def __init__(self, run_dir: str | Path, checkpoint_dir: str | None):
        self.run = Path(run_dir)
        self.folder = None if checkpoint_dir is None else open_path(checkpoint_dir) / FOLDER
        self._id = secrets.token_hex(8)

    @property
    def is_complete(self) -> bool:
        """Whether the backup has all files that a run directory needs."""
        return self.folder is not None and COPIED[-1] in names_in(self.folder)

    @property
    def is_taken_over(self) -> bool:
        """Whether the run was started with another run directory after it was started with this one."""
        if self.folder is None or not self.is_complete:
            return False
        backup_owner, run_owner = _owner_of(self.folder), _owner_of(epath.Path(self.run))
        return backup_owner is not None and backup_owner != run_owner

    def restore(self) -> None:
        """Copy the backup into the run directory. Raises CheckpointError if it cannot be read."""
        if self.folder is not None and self.is_complete:
            with self._as_checkpoint_errors("reading"):
                for name in reversed(COPIED):  # settings.json is first: it marks a run directory
                    _copy(self.folder / name, epath.Path(self.run / name), ONLY.get(name))

    def save(self, names: tuple[str, ...] = COPIED) -> None:
        """Copy files with these names from the run directory. Raises CheckpointError if they cannot be written."""
        if self.folder is not None:
            with self._as_checkpoint_errors("writing"):
                for name in names:
                    _copy(epath.Path(self.run / name), self.folder / name, ONLY.get(name))

    def check_writable(self) -> None:
        """Raise CheckpointError for a directory that cannot be written. Called before the data are tokenized.

        Raises ConfigError if the directory contains files that do not belong to a run and would be overwritten.
        """
        if self.folder is not None:
            with self._as_checkpoint_errors("writing and deleting"):
                if not has_owner(self.folder):  # a directory with an owner file is a backup, also if it is incomplete
                    check_own(self.folder, COPIED, "checkpoint_dir", str(self.folder.parent))
                probe = self.folder / f"probe-{self._id}"
                _write(probe, b"")
                probe.unlink()

    def claim(self) -> None:
        """Write an owner file for this process. A process that claimed the directory earlier stops in `check_owner`."""
        if self.folder is not None:
            owner = {"id": self._id, **own_process()}
            for folder in (self.folder, epath.Path(self.run)):
                _write(folder / OWNER, json.dumps(owner).encode() + b"\n")

    def check_owner(self) -> None:
        """Raise CheckpointError if another process, on any machine, has claimed the directory after this one."""
        if self.folder is None:
            return
        try:
            content = (self.folder / OWNER).read_bytes()
            is_own = json.loads(content)["id"] == self._id
        except Exception:  # a failed read is not a reason to stop
            return
        if not is_own:
            raise CheckpointError(
                f"checkpoint_dir={str(self.folder.parent)!r} is in use by {holder_text(content)}, which was started "
                "after this run. Use another directory for one of the runs."
            )

    @contextlib.contextmanager
    def _as_checkpoint_errors(self, access: str) -> Iterator[None]:
        """Convert errors to CheckpointError. `access`: the access that the with block needs, such as "writing"."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # packages for buckets raise their own exceptions
            directory = "" if self.folder is None else str(self.folder.parent)
            cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
            raise CheckpointError(
                f"checkpoint_dir={directory!r} does not allow {access} ({cause}). Check its name and the permissions."
            ) from error


def _owner_of(folder: epath.Path) -> str | None:
    """Return the id of the process that has claimed a directory; None if there is none, or it cannot be read."""
    try:
        return json.loads((folder / OWNER).read_bytes())["id"]
    except Exception:
        return None


def _copy(source: epath.Path, target: epath.Path, only: str | None = None) -> None:
    """Copy a file or directory if it exists. `only`: name of the only files that are copied from a directory."""
    if source.is_dir():
        for path in source.iterdir():
            if path != source:
                _copy(path, target / path.name, only)
    elif source.exists() and only in (None, source.name):
        _write(target, source.read_bytes())


def _write(path: epath.Path, content: bytes) -> None:
    if "://" in str(path):
        path.write_bytes(content)  # an object is written completely or not at all
    else:
        write_atomically(Path(path), content)
