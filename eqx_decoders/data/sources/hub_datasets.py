"""Datasets of the package `datasets`: directories written by `save_to_disk`, and streamed datasets of the Hub."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.data.sources.data_files import try_again
from eqx_decoders.errors import DataError, check, missing_package


HUB = "hf://datasets/"
SPLIT = "train"  # default split
ROWS = 512  # rows that are read at once
_FORM = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.]+))?"
)


class HubDataset(NamedTuple):
    """Dataset of the Hub: `hf://datasets/org/name[@revision][/config][:split]`."""

    name: str
    revision: str | None = None
    config: str | None = None
    split: str = SPLIT

    def __str__(self) -> str:
        parts = [HUB, self.name, "@" + self.revision if self.revision else "", "/" + self.config if self.config else ""]
        return "".join(parts) + f":{self.split}"

    def with_commit(self) -> "HubDataset":
        """Return the dataset with the commit of its revision, which is looked up on the Hub. Raises DataError."""
        return self._replace(revision=try_again(lambda: _commit(self), str(self)))

    def open(self) -> Any:
        """Open the stream of its rows. Its `num_shards` files can be read separately."""
        return try_again(lambda: _stream(self), str(self))

    def rows(self, part: tuple[int, int] | None) -> Iterator[Mapping[str, Any]]:
        """Yield all rows, or the rows of the files `part[0]:part[1]`."""
        stream = self.open()
        if part is None:
            yield from stream
            return
        for number in range(*part):
            yield from stream.shard(num_shards=stream.num_shards, index=number)


def hub_dataset(path: str) -> HubDataset | None:
    """Return the dataset at a path; None for other paths, such as `hf://datasets/org/name/data/train.parquet`."""
    match = _FORM.fullmatch(path)
    if match is None:
        return None
    named = match.groupdict()
    return HubDataset(named["name"], named["revision"], named["config"], named["split"] or SPLIT)


def _commit(dataset: HubDataset) -> str:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise missing_package("huggingface_hub", "data") from error
    return str(HfApi().dataset_info(dataset.name, revision=dataset.revision).sha)


def _stream(dataset: HubDataset) -> Any:
    options = {"revision": dataset.revision, "split": dataset.split, "streaming": True}
    return _package().load_dataset(dataset.name, dataset.config, **options)


def saved_split(folder: Path, flag: str) -> Path | None:
    """Return the directory with the rows of `save_to_disk`: `folder` or `folder/train`; None for other directories.

    Raises DataError that lists the splits if there are several without `train`.
    """
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return folder
    if not (folder / "dataset_dict.json").is_file():
        return None
    splits = json.loads((folder / "dataset_dict.json").read_bytes()).get("splits", [])
    check(
        SPLIT in splits,
        f"{flag} {str(folder)!r} has the splits {', '.join(splits)}, but not {SPLIT!r}: give the directory of a split, "
        f"such as {folder / (splits or ['…'])[0]}.",
        DataError,
    )
    return folder / SPLIT


def saved_files(folder: Path) -> list[Path]:
    """Return the files of a saved dataset in order: rows, and the order of the rows if it is stored separately."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        files = [*state["_data_files"], *(state.get("_indices_data_files") or [])]
        return [folder / file["filename"] for file in files]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}/state.json was not written by `save_to_disk` ({error}): save the dataset again."
        ) from error


def open_saved(folder: Path) -> Any:
    """Open a dataset that was written by `save_to_disk`. Raises DataError."""
    try:
        return _package().load_from_disk(str(folder)).with_format("arrow")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} cannot be read as a dataset: {error}. Save the dataset again.") from error


def saved_rows(dataset: Any, part: tuple[int, int], columns: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows `part[0]:part[1]` of a saved dataset."""
    chosen = dataset.select_columns(columns)
    for start in range(part[0], part[1], ROWS):
        yield from chosen[start : min(start + ROWS, part[1])].to_pylist(maps_as_pydicts="strict")


def _package() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", "data") from error
    return datasets
