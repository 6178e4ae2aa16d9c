"""Backup of a run's small files in its checkpoint directory, where that is not in the run directory.

Where checkpoints are in a bucket, a machine that is lost takes the run directory with it. With the backup a new one
goes on: settings, model, tokenizer, metrics and manifests of the data are restored, tokens are made again. An owner
file names the start of the run that saves into the directory, since other machines do not see the run directory's lock.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from eqx_decoders.errors import CheckpointError, ConfigError, check
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.checkpoint.steps import names_in, open_path
from eqx_decoders.io.file_lock import holder_text, own_process
from eqx_decoders.io.run_lock import OWNER, check_own, has_owner


FOLDER = "run"  # in the directory of the checkpoints
GROWING = ("metrics.jsonl", "trackers.json")
COPIED = (
    "model.json",
    "source",
    "tokenizer",
    "data",
    *GROWING,
    "settings.json",
)  # the last one marks the backup complete
ONLY = {"data": "manifest.json"}  # the only files that are copied from a directory


class RunBackup:
    """Backup of a run's files in `<checkpoint_dir>/run`; without a `checkpoint_dir` all methods do nothing."""

    def __init__(self, run_dir: str | Path, checkpoint_dir: str | None):
        self.run = Path(run_dir)
        self.folder = None if checkpoint_dir is None else open_path(checkpoint_dir) / FOLDER
        self._id = secrets.token_hex(8)

    @property
    def is_complete(self) -> bool:
        """True if the backup has all files that a run directory needs."""
        return self.folder is not None and COPIED[-1] in names_in(self.folder)

    @property
    def is_taken_over(self) -> bool:
        """True if the run was started with another run directory since it was started with this one."""
        if self.folder is None or not self.is_complete:
            return False
        backup_owner, run_owner = _owner_of(self.folder), _owner_of(epath.Path(self.run))
        return backup_owner is not None and backup_owner != run_owner

    def restore(self) -> None:
        """Copy the backup into the run directory. Raises CheckpointError where it cannot be read."""
        if self.folder is not None and self.is_complete:
            with self._as_checkpoint_errors("you may read there"):
                for name in reversed(COPIED):  # the settings first: they show that the directory is a run's
                    _copy(self.folder / name, epath.Path(self.run / name), ONLY.get(name))

    def save(self, names: tuple[str, ...] = COPIED) -> None:
        """Copy files of these names from the run directory. Raises CheckpointError where they cannot be written."""
        if self.folder is not None:
            with self._as_checkpoint_errors("you may write there"):
                for name in names:
                    _copy(epath.Path(self.run / name), self.folder / name, ONLY.get(name))

    def check_writable(self) -> None:
        """Raise CheckpointError for a directory that cannot be written: now, not after the run's tokens were made.

        Raises ConfigError for a directory whose files are not a run's, and would be overwritten.
        """
        if self.folder is not None:
            with self._as_checkpoint_errors("you may write and delete there"):
                if not has_owner(self.folder):  # its copies may not be complete: the settings are the last
                    check_own(self.folder, COPIED, "checkpoint_dir", str(self.folder.parent))
                probe = self.folder / f"probe-{self._id}"
                _write(probe, b"")
                probe.unlink()

    def claim(self) -> None:
        """Write the owner file of this start of the run; an earlier start stops at its next `check_owner`."""
        if self.folder is not None:
            who = {"id": self._id, **own_process()}
            for folder in (self.folder, epath.Path(self.run)):
                _write(folder / OWNER, json.dumps(who).encode() + b"\n")

    def check_owner(self) -> None:
        """Raise CheckpointError if another start, on any machine, has claimed the directory since."""
        if self.folder is None:
            return
        try:
            content = (self.folder / OWNER).read_bytes()
            is_own = json.loads(content)["id"] == self._id
        except Exception:  # it cannot be read now: no reason to stop
            return
        where = f"checkpoint_dir={str(self.folder.parent)!r}"
        rule = f"{where} is in use by {holder_text(content)}, which was started after this run"
        check(is_own, f"{rule}: give one of them another directory.", CheckpointError)

    @contextlib.contextmanager
    def _as_checkpoint_errors(self, rule: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # the packages for buckets raise their own kinds
            where = "" if self.folder is None else str(self.folder.parent)
            cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
            raise CheckpointError(f"checkpoint_dir={where!r} ({cause}): check its name, and that {rule}.") from error


def _owner_of(folder: epath.Path) -> str | None:
    """Return the id of the start that has claimed a directory; None if there is none, or it cannot be read."""
    try:
        return json.loads((folder / OWNER).read_bytes())["id"]
    except Exception:
        return None


def _copy(source: epath.Path, target: epath.Path, only: str | None = None) -> None:
    """Copy a file, or the files of a directory (only the ones named `only`), unless it is missing."""
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
