"""The numbered steps in a directory: which of them are whole, and how one is written, deleted and set aside.

On a disk, or a file system that hosts share, a directory is renamed at once. A step is written under another name, and
renamed to its number as the last act; it is renamed back before it is deleted. In a bucket nothing can be renamed. A
step is written in its place, and a file in it (`commit_success.txt`, Orbax's) that is written last and deleted first
says that it is whole. A marker beside it, `<step>.orbax-checkpoint-tmp`, says that it is being written or deleted: what
a process that was killed has left is deleted by this marker alone, never because it looks unfinished.
"""

import itertools
import os
import re
import shutil
from pathlib import Path

from etils import epath

from eqx_decoders.errors import CheckpointError, check, need_extra


TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a step that is being written or deleted, or of its marker
CORRUPT = ".corrupt"
COMMITTED = "commit_success.txt"
SET_ASIDE = "CORRUPT"  # a file in a step that cannot be renamed
WRITTEN = "_CHECKPOINT_METADATA"  # what Orbax writes last before it commits


def open_path(directory: str | os.PathLike[str]) -> epath.Path:
    """A directory on a disk, absolute, or in a bucket of Google Cloud; raises CheckpointError for other places."""
    text = os.fspath(directory)
    if not re.match(r"\w\w+:/", text):  # one letter is a drive of Windows
        return epath.Path(Path(text).expanduser().resolve())
    good = re.fullmatch(r"gs://[\w.-]+(/[\w.=@+,-]+)+/?", text) is not None  # no patterns, which fsspec would expand
    rule = "must be a path, or gs://bucket/path without blanks and special characters"
    remedy = "Give it as a text (pathlib drops a slash). Orbax writes into no other buckets: mount those"
    check(good, f"directory={text!r} {rule}. {remedy}.", CheckpointError)
    _remember_no_listings(text)
    return epath.Path(text.rstrip("/"))


def can_rename(directory: epath.Path) -> bool:
    """Whether a directory in there is renamed at once."""
    return "://" not in str(directory)


class Steps:
    """The steps in `directory`. Only one process may call what changes them; reading is always safe."""

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = open_path(directory)
        self.in_place = not can_rename(self.directory)

    def path(self, step: int) -> epath.Path:
        """Where a step is, or would be."""
        return self.directory / str(step)

    def committed(self) -> tuple[int, ...]:
        """The steps that are whole, oldest first. Raises CheckpointError where that cannot be found out."""
        steps = [int(name) for name in names_in(self.directory) if name.isdecimal() and str(int(name)) == name]
        whole = self._is_whole if self.in_place else self._is_step
        return tuple(sorted(filter(whole, steps)))

    def existing(self, step: int | None) -> int:
        """`step`, which must be there, or the newest one for None."""
        steps = self.committed()
        check(bool(steps), f"There is no checkpoint in {self.directory}.", CheckpointError)
        step = steps[-1] if step is None else step
        check(step in steps, f"step={step} is not in {self.directory}: it holds {list(steps)}.", CheckpointError)
        return step

    def begin(self, step: int) -> None:
        """Make the directory ready for a step to be written."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.in_place:
            marker = self._marker(step)
            marker.write_text("")
            if names_in(self.path(step)):  # one that was set aside: it is in the way
                _delete(self.path(step))

    def uncommit(self, step: int) -> None:
        """Make a step one that is not whole, in one act; `clean` deletes it."""
        if not self.in_place:
            self.path(step).rename(self._marker(step))
            return
        self._marker(step).write_text("")
        (self.path(step) / COMMITTED).unlink(missing_ok=True)

    def clean(self) -> None:
        """Delete what is not whole, of a process that was killed, too, while it wrote or deleted."""
        for name in names_in(self.directory):
            number, found, _ = name.partition(TEMPORARY)
            if found and not self.in_place:
                shutil.rmtree(self.directory / name, ignore_errors=True)
            elif found and number.isdecimal():
                if COMMITTED not in names_in(self.directory / number):
                    _delete(self.directory / number)
                (self.directory / name).unlink(missing_ok=True)

    def set_aside(self, step: int) -> None:
        """Keep a damaged step where it is no longer listed, until the same step is written again in a bucket."""
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
        """Whether a directory that has a number for its name is one of ours, or what is left of one."""
        return bool(names_in(self.path(step)) & {"arrays", "manifest", WRITTEN})

    def _is_whole(self, step: int) -> bool:
        names = names_in(self.path(step))
        if COMMITTED in names or WRITTEN not in names or SET_ASIDE in names:
            return COMMITTED in names
        # Being written or deleted; or a part of what was copied here, and leaving it out would begin the run anew.
        busy, names = self._marker(step).name in names_in(self.directory), names_in(self.path(step))
        foreign = not busy and WRITTEN in names and COMMITTED not in names
        rule = f"{self.path(step)} is a step without {COMMITTED}, as if copied in part"
        remedy = "copy it again, put an empty file of that name into it if it is whole, or move it away"
        check(not foreign, f"{rule}: {remedy}.", CheckpointError)
        return COMMITTED in names


def names_in(directory: epath.Path) -> set[str]:
    """What a directory holds; nothing if there is none."""
    try:
        return {path.name for path in directory.iterdir() if path != directory}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except Exception as error:  # the packages for buckets raise their own kinds
        told = f"{type(error).__name__}: {str(error).strip()[:300]}"
        remedy = "look at its name, its permissions and the network, and start again"
        raise CheckpointError(f"directory={directory} cannot be listed ({told}): {remedy}.") from error


def _delete(directory: epath.Path) -> None:
    for _ in range(2):  # a file that stands for a directory may be left over by the first time
        directory.rmtree(missing_ok=True)


def _remember_no_listings(url: str) -> None:
    """Let fsspec ask the bucket each time: TensorStore and other hosts write there, too, and it would not notice."""
    from etils.epath import backend

    try:
        listings = backend.fsspec_backend.fs(url).dircache
    except ImportError as error:
        raise need_extra("gcsfs", "gcs") from error
    listings.use_listings_cache = False
    listings.clear()
