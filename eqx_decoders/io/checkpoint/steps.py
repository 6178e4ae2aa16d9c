"""Numbered steps in a directory: listed, written, deleted and set aside, so that a kill leaves none half complete.

On a disk, or a file system that hosts share, a directory is renamed in one operation. A step is written under another
name, and renamed to its number at the end; it is renamed back before it is deleted. In a bucket nothing can be renamed.
A step is written in its place, and a file in it (`commit_success.txt`, Orbax's) that is written last and deleted first
marks it complete. A marker next to it, `<step>.orbax-checkpoint-tmp`, says that it is being written or deleted: remains
of a killed process are deleted because of this marker alone, never because they look unfinished.
"""

import itertools
import os
import re
import shutil
from pathlib import Path

from etils import epath

from eqx_decoders.errors import CheckpointError, check, missing_package


TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a step that is being written or deleted, or of its marker
CORRUPT = ".corrupt"
COMMITTED = "commit_success.txt"
SET_ASIDE = "CORRUPT"  # a file in a step that cannot be renamed
WRITTEN = "_CHECKPOINT_METADATA"  # the file that Orbax writes last before it commits


def open_path(directory: str | os.PathLike[str]) -> epath.Path:
    """Return the absolute path of a directory on a disk or in a bucket of Google Cloud. Raises CheckpointError."""
    text = os.fspath(directory)
    if not re.match(r"\w\w+:/", text):  # one letter is a drive of Windows
        return epath.Path(Path(text).expanduser().resolve())
    valid = re.fullmatch(r"gs://[\w.-]+(/[\w.=@+,-]+)+/?", text) is not None  # no patterns, which fsspec would expand
    rule = "must be a path, or gs://bucket/path without blanks and special characters"
    remedy = "Give it as a text (pathlib drops a slash). Orbax writes into no other buckets: mount those"
    check(valid, f"directory={text!r} {rule}. {remedy}.", CheckpointError)
    _remember_no_listings(text)
    return epath.Path(text.rstrip("/"))


def can_rename(directory: epath.Path) -> bool:
    """Return whether directories in there can be renamed, in one operation."""
    return "://" not in str(directory)


class Steps:
    """Steps in a directory. Only one process may call methods that change them; reading is always safe."""

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = open_path(directory)
        self.in_place = not can_rename(self.directory)

    def path(self, step: int) -> epath.Path:
        """Return the path of a step, which may not exist."""
        return self.directory / str(step)

    def committed(self) -> tuple[int, ...]:
        """Return the complete steps, oldest first. Raises CheckpointError if the directory cannot be read.

        In a bucket it lists the directory and each step: only the files in a step say whether it is complete, another
        process may delete one at any time, and a recursive listing would read the names of all files of all arrays.
        A run has about `max_checkpoints` steps.
        """
        steps = [int(name) for name in names_in(self.directory) if name.isdecimal() and str(int(name)) == name]
        is_complete = self._is_complete if self.in_place else self._is_step
        return tuple(sorted(filter(is_complete, steps)))

    def existing(self, step: int | None) -> int:
        """Return `step`, or the newest one for None. Raises CheckpointError if it does not exist."""
        steps = self.committed()
        check(bool(steps), f"There is no checkpoint in {self.directory}.", CheckpointError)
        step = steps[-1] if step is None else step
        check(step in steps, f"step={step} is not in {self.directory}: it holds {list(steps)}.", CheckpointError)
        return step

    def begin(self, step: int) -> None:
        """Prepare the directory for the writing of a step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.in_place:
            marker = self._marker(step)
            marker.write_text("")
            if names_in(self.path(step)):  # a step that was set aside is in the way
                _delete(self.path(step))

    def uncommit(self, step: int) -> None:
        """Mark a step as incomplete, in one operation; `clean` deletes it."""
        if not self.in_place:
            self.path(step).rename(self._marker(step))
            return
        self._marker(step).write_text("")
        (self.path(step) / COMMITTED).unlink(missing_ok=True)

    def clean(self) -> None:
        """Delete incomplete steps, also those of a process that was killed while it wrote or deleted them."""
        for name in names_in(self.directory):
            number, marker, _ = name.partition(TEMPORARY)
            if marker and not self.in_place:
                shutil.rmtree(self.directory / name, ignore_errors=True)
            elif marker and number.isdecimal():
                if COMMITTED not in names_in(self.directory / number):
                    _delete(self.directory / number)
                (self.directory / name).unlink(missing_ok=True)

    def set_aside(self, step: int) -> None:
        """Set a damaged step aside, so that it is no longer listed; in a bucket, until the same step is saved anew."""
        path = self.path(step)
        if not self.in_place:
            names = itertools.chain([CORRUPT], (f"{CORRUPT}-{number}" for number in itertools.count(2)))
            targets = (path.with_name(path.name + name) for name in names)
            path.rename(next(target for target in targets if not target.exists()))
            return
        self._marker(step).unlink(missing_ok=True)
        (path / SET_ASIDE).write_text("This step could not be read back as it was written.\n")
        (path / COMMITTED).unlink(missing_ok=True)

    def _marker(self, step: int) -> epath.Path:
        return self.directory / f"{step}{TEMPORARY}"

    def _is_step(self, step: int) -> bool:
        """Return whether a directory with a number for its name is a step, or the remains of one."""
        return bool(names_in(self.path(step)) & {"arrays", "manifest", WRITTEN})

    def _is_complete(self, step: int) -> bool:
        names = names_in(self.path(step))
        if COMMITTED in names or WRITTEN not in names or SET_ASIDE in names:
            return COMMITTED in names
        # Being written or deleted; or copied here in part, and ignoring it would begin the run anew.
        busy, names = self._marker(step).name in names_in(self.directory), names_in(self.path(step))
        foreign = not busy and WRITTEN in names and COMMITTED not in names
        rule = f"{self.path(step)} is a step without {COMMITTED}, as if copied in part"
        remedy = "copy it again, put an empty file of that name into it if it is whole, or move it away"
        check(not foreign, f"{rule}: {remedy}.", CheckpointError)
        return COMMITTED in names


def names_in(directory: epath.Path) -> set[str]:
    """Return the names in a directory; none if it does not exist. Raises CheckpointError."""
    try:
        return {path.name for path in directory.iterdir() if path != directory}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except Exception as error:  # the packages for buckets raise their own kinds
        cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
        remedy = "look at its name, its permissions and the network, and start again"
        raise CheckpointError(f"directory={directory} cannot be listed ({cause}): {remedy}.") from error


def _delete(directory: epath.Path) -> None:
    for _ in range(2):  # the first time may leave a file that stands for a directory
        directory.rmtree(missing_ok=True)


def _remember_no_listings(url: str) -> None:
    """Switch fsspec's cache of listings off: it would miss what TensorStore and other hosts write into the bucket."""
    from etils.epath import backend

    try:
        listings = backend.fsspec_backend.fs(url).dircache
    except ImportError as error:
        raise missing_package("gcsfs", "gcs") from error
    listings.use_listings_cache = False
    listings.clear()
