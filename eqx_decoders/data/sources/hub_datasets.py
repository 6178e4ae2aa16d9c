"""Read datasets with the package `datasets`: directories of `save_to_disk`, and streamed Hugging Face datasets."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.data.sources.data_files import retry
from eqx_decoders.errors import DataError, check, missing_package


HUB = "hf://datasets/"
DEFAULT_SPLIT = "train"
ROWS_PER_READ = 512
_FORM = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.]+))?"
)


class HubDataset(NamedTuple):
    """Dataset of the Hugging Face Hub: `hf://datasets/org/name[@revision][/config][:split]`."""

    name: str
    revision: str | None = None
    config: str | None = None
    split: str = DEFAULT_SPLIT

    def __str__(self) -> str:
        parts = [HUB, self.name, "@" + self.revision if self.revision else "", "/" + self.config if self.config else ""]
        return "".join(parts) + f":{self.split}"

    def with_commit(self) -> "HubDataset":
        """Look up the commit of the revision on the Hub; return the dataset with this commit. Raises DataError."""
        return self._replace(revision=retry(lambda: _commit(self), str(self)))

    def open(self) -> Any:
        """Open a stream of the rows. The files of the dataset can be read separately, as shards of the stream."""
        return retry(lambda: _stream(self), str(self))

    def rows(self, part: tuple[int, int] | None) -> Iterator[Mapping[str, Any]]:
        """Yield all rows, or the rows of the files `part[0]:part[1]`."""
        stream = self.open()
        if part is None:
            yield from stream
            return
        for number in range(*part):
            yield from stream.shard(num_shards=stream.num_shards, index=number)


def hub_dataset(path: str) -> HubDataset | None:
    """Parse a URL of a dataset; return None for other paths, such as `hf://datasets/org/name/data/train.parquet`."""
    match = _FORM.fullmatch(path)
    if match is None:
        return None
    return HubDataset(match["name"], match["revision"], match["config"], match["split"] or DEFAULT_SPLIT)


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
    """Return the directory of a dataset written by `save_to_disk`: `folder`, or `folder/train` if it has splits.

    Returns None for other directories. Raises DataError, with a list of the splits, if there is no split "train".
    """
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return folder
    if not (folder / "dataset_dict.json").is_file():
        return None
    splits = json.loads((folder / "dataset_dict.json").read_bytes()).get("splits", [])
    check(
        DEFAULT_SPLIT in splits,
        f"{flag} {str(folder)!r} has the splits {', '.join(splits)}, but not {DEFAULT_SPLIT!r}. Use the directory of a "
        f"split, such as {folder / (splits or ['…'])[0]}.",
        DataError,
    )
    return folder / DEFAULT_SPLIT


def saved_files(folder: Path) -> list[Path]:
    """Return the files of a saved dataset in order: the rows, and the permutation of the rows if there is one."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        files = [*state["_data_files"], *(state.get("_indices_data_files") or [])]
        return [folder / file["filename"] for file in files]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}/state.json was not written by `save_to_disk` ({error}). Save the dataset again."
        ) from error


def open_saved(folder: Path) -> Any:
    """Open a dataset that was written by `save_to_disk`. Raises DataError if it cannot be read."""
    try:
        return _package().load_from_disk(str(folder)).with_format("arrow")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} cannot be read as a dataset: {error}. Save the dataset again.") from error


def saved_rows(dataset: Any, part: tuple[int, int], columns: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows `part[0]:part[1]` of a saved dataset."""
    selected = dataset.select_columns(columns)
    for start in range(part[0], part[1], ROWS_PER_READ):
        yield from selected[start : min(start + ROWS_PER_READ, part[1])].to_pylist(maps_as_pydicts="strict")


def _package() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", "data") from error
    return datasets
