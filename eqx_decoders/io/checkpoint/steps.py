"""Numbered steps in a directory. A process that is killed never leaves an incomplete step that is listed as complete.

In a file system, renaming a directory is atomic. A step is written under another name, and renamed to its number at the
end. Before it is deleted, it is renamed back. In a bucket, directories cannot be renamed. A step is written to its
final path. A file in it, `commit_success.txt` of Orbax, is written last and deleted first, and marks the step as
complete. A file next to it, `<step>.orbax-checkpoint-tmp`, marks a step that is being written or deleted. Steps of
killed processes are only deleted if they have this marker.
"""

import itertools
import os
import re
import shutil
from pathlib import Path

from etils import epath

from eqx_decoders.errors import CheckpointError, missing_package


TEMPORARY = ".orbax-checkpoint-tmp"  # suffix of a step that is being written or deleted, or of its marker
CORRUPT = ".corrupt"  # suffix of a damaged step
COMMITTED = "commit_success.txt"
SET_ASIDE = "CORRUPT"  # file in a damaged step that cannot be renamed
WRITTEN = "_CHECKPOINT_METADATA"  # the file that Orbax writes last before it commits


def open_path(directory: str | os.PathLike[str]) -> epath.Path:
    """Return the absolute path of a directory in a file system or a bucket of Google Cloud. Raises CheckpointError."""
    text = os.fspath(directory)
    if not re.match(r"\w\w+:/", text):
        return epath.Path(Path(text).expanduser().resolve())
    if not re.fullmatch(r"gs://[\w.-]+(/[\w.=@+,-]+)+/?", text):  # without wildcards, which fsspec would expand
        raise CheckpointError(
            f"directory={text!r} must be a path, or gs://bucket/path without spaces and special characters. Give it as "
            "a string, because pathlib removes a slash. Other buckets are not supported: mount them as directories."
        )
    _disable_listings_cache(text)
    return epath.Path(text.rstrip("/"))


def can_rename(directory: epath.Path) -> bool:
    """Return whether directories in `directory` can be renamed atomically."""
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

        In a bucket, this lists the directory and each step, because only the files in a step show whether it is
        complete. A recursive listing would read the names of all files of all arrays.
        """
        steps = [int(name) for name in names_in(self.directory) if name.isdecimal() and str(int(name)) == name]
        is_complete = self._is_complete if self.in_place else self._is_step
        return tuple(sorted(filter(is_complete, steps)))

    def existing(self, step: int | None) -> int:
        """Return `step`, or the newest step if it is None. Raises CheckpointError if the step does not exist."""
        steps = self.committed()
        if not steps:
            raise CheckpointError(f"There is no checkpoint in {self.directory}. Give another directory.")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise CheckpointError(f"step={step} is not in {self.directory}, which has the steps {list(steps)}.")
        return step

    def begin(self, step: int) -> None:
        """Prepare the directory for writing a step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.in_place:
            self._marker(step).write_text("")
            if names_in(self.path(step)):  # a damaged step with the same number
                _delete(self.path(step))

    def uncommit(self, step: int) -> None:
        """Mark a step as incomplete, atomically. `clean` deletes it later."""
        if not self.in_place:
            self.path(step).rename(self._marker(step))
            return
        self._marker(step).write_text("")
        (self.path(step) / COMMITTED).unlink(missing_ok=True)

    def clean(self) -> None:
        """Delete incomplete steps, including steps of processes that were killed while they wrote or deleted them."""
        for name in names_in(self.directory):
            number, marker, _ = name.partition(TEMPORARY)
            if marker and not self.in_place:
                shutil.rmtree(self.directory / name, ignore_errors=True)
            elif marker and number.isdecimal():
                if COMMITTED not in names_in(self.directory / number):
                    _delete(self.directory / number)
                (self.directory / name).unlink(missing_ok=True)

    def set_aside(self, step: int) -> None:
        """Keep a damaged step under another name, so that it is not listed.

        In a bucket, it keeps its name, but loses the file that marks it as complete. Saving the same step replaces it.
        """
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
        """Return whether a directory, whose name is a number, contains files of a step."""
        return bool(names_in(self.path(step)) & {"arrays", "manifest", WRITTEN})

    def _is_complete(self, step: int) -> bool:
        names = names_in(self.path(step))
        if COMMITTED in names or WRITTEN not in names or SET_ASIDE in names:
            return COMMITTED in names
        # The step is being written or deleted, or it was copied here without its last file. In the second case,
        # ignoring it would start the run from the beginning.
        has_marker = self._marker(step).name in names_in(self.directory)
        names = names_in(self.path(step))
        if not has_marker and WRITTEN in names and COMMITTED not in names:
            raise CheckpointError(
                f"{self.path(step)} is a step without {COMMITTED}, so it was probably copied incompletely. Copy it "
                f"again, move it away, or, if all other files are there, create an empty file {COMMITTED} in it."
            )
        return COMMITTED in names


def names_in(directory: epath.Path) -> set[str]:
    """Return the names in a directory; an empty set if it does not exist. Raises CheckpointError for other errors."""
    try:
        return {path.name for path in directory.iterdir() if path != directory}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except Exception as error:  # packages for buckets raise their own exceptions
        cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
        raise CheckpointError(
            f"directory={directory} cannot be listed ({cause}). Check its name, the permissions and the network."
        ) from error


def _delete(directory: epath.Path) -> None:
    for _ in range(2):  # in a bucket, the first call may leave an object with the name of the directory
        directory.rmtree(missing_ok=True)


def _disable_listings_cache(url: str) -> None:
    """Disable fsspec's cache of listings, which would miss files that TensorStore and other hosts write."""
    from etils.epath import backend

    try:
        listings = backend.fsspec_backend.fs(url).dircache
    except ImportError as error:
        raise missing_package("gcsfs", "gcs") from error
    listings.use_listings_cache = False
    listings.clear()
