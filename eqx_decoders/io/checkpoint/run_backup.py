"""What is small of a run, copied beside checkpoints that are elsewhere than its run directory.

Where checkpoints are in a bucket, a machine that is lost takes the run directory with it. With these copies a new one
goes on: settings, model, tokenizer, metrics and which data are trained on are brought back, tokens are made again. A
file there names the start of the run that saves into the directory; the lock of a run directory is not seen by other
machines.
"""

import contextlib
import datetime
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from eqx_decoders.errors import CheckpointError, ConfigError, check
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.checkpoint.steps import names_in, open_path
from eqx_decoders.io.run_lock import OWNER, check_own, has_owner


FOLDER = "run"  # in the directory of the checkpoints
GROWING = ("metrics.jsonl", "trackers.json")
COPIED = ("model.json", "source", "tokenizer", "data", *GROWING, "settings.json")  # with the last one all are there
ONLY = {"data": "manifest.json"}  # the one kind of files that is copied of a directory


class RunBackup:
    """The copies of a run's files in `<checkpoint_dir>/run`; without a `checkpoint_dir` there are none to be made."""

    def __init__(self, run_dir: str | Path, checkpoint_dir: str | None):
        self.run = Path(run_dir)
        self.folder = None if checkpoint_dir is None else open_path(checkpoint_dir) / FOLDER
        self._id = secrets.token_hex(8)

    @property
    def there(self) -> bool:
        """Whether there are all that a run directory needs."""
        return self.folder is not None and COPIED[-1] in names_in(self.folder)

    @property
    def taken_over(self) -> bool:
        """Whether the run was started with another run directory since it was started with this one."""
        if self.folder is None or not self.there:
            return False
        theirs, own = _owner_of(self.folder), _owner_of(epath.Path(self.run))
        return theirs is not None and theirs != own

    def bring_back(self) -> None:
        """Copy what is there into the run directory. Raises CheckpointError where it cannot be read."""
        if self.folder is not None and self.there:
            with self._told("you may read there"):
                for name in reversed(COPIED):  # the settings first: what follows is then known to be a run's
                    _copy(self.folder / name, epath.Path(self.run / name), ONLY.get(name))

    def keep(self, names: tuple[str, ...] = COPIED) -> None:
        """Copy these from the run directory. Raises CheckpointError where they cannot be written."""
        if self.folder is not None:
            with self._told("you may write there"):
                for name in names:
                    _copy(epath.Path(self.run / name), self.folder / name, ONLY.get(name))

    def try_out(self) -> None:
        """Raise CheckpointError if nothing can be written there: now, not after the tokens of the run were made.

        ConfigError if what is there is not a run's, and would be written over.
        """
        if self.folder is not None:
            with self._told("you may write and delete there"):
                if not has_owner(self.folder):  # its copies may not be complete: the settings are the last
                    check_own(self.folder, COPIED, "checkpoint_dir", str(self.folder.parent))
                probe = self.folder / f"probe-{self._id}"
                _write(probe, b"")
                probe.unlink()

    def claim(self) -> None:
        """Say that from now on this start of the run saves there; an earlier one stops at its next `check_owner`."""
        if self.folder is not None:
            now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            who = {"id": self._id, "pid": os.getpid(), "host": socket.gethostname(), "since": now}
            for folder in (self.folder, epath.Path(self.run)):
                _write(folder / OWNER, json.dumps(who).encode() + b"\n")

    def check_owner(self) -> None:
        """Raise CheckpointError if another start, on this machine or another one, has claimed the directory since."""
        if self.folder is None:
            return
        try:
            who = json.loads((self.folder / OWNER).read_bytes())
            owner = f"pid {who['pid']} on {who['host']} since {who['since']}"
        except Exception:  # it cannot be read now: no reason to stop
            return
        rule = f"checkpoint_dir={str(self.folder.parent)!r} is in use by {owner}, which was started after this run"
        check(who["id"] == self._id, f"{rule}: give one of them another directory.", CheckpointError)

    @contextlib.contextmanager
    def _told(self, rule: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # the packages for buckets raise their own kinds
            where = "" if self.folder is None else str(self.folder.parent)
            told = f"{type(error).__name__}: {str(error).strip()[:300]}"
            raise CheckpointError(f"checkpoint_dir={where!r} ({told}): check its name, and that {rule}.") from error


def _owner_of(folder: epath.Path) -> str | None:
    """Which start has claimed a directory, as far as it says; also the one whose run directory this is."""
    try:
        return json.loads((folder / OWNER).read_bytes())["id"]
    except Exception:  # there is none, or it cannot be read now
        return None


def _copy(source: epath.Path, target: epath.Path, only: str | None = None) -> None:
    """A file or a directory of files, or of those with the name `only`; nothing if there is none."""
    if source.is_dir():
        for path in source.iterdir():
            if path != source:
                _copy(path, target / path.name, only)
    elif source.exists() and only in (None, source.name):
        _write(target, source.read_bytes())


def _write(path: epath.Path, content: bytes) -> None:
    if "://" in str(path):
        path.write_bytes(content)  # an object is there whole or not at all
    else:
        write_atomically(Path(path), content)
