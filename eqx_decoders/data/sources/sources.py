"""Sources of a corpus: files, directories and datasets, and entries with sizes and hashes that show changes.

Without a path, the corpus is the source code of Python's standard library, about 12 MB that every machine has.
"""

import collections
import concurrent.futures
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.data.sources.data_files import File, RemoteFile, find_remote, is_compressed, is_remote, plain_suffix
from eqx_decoders.data.sources.hub_datasets import HubDataset, hub_dataset, saved_files, saved_split
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.file_lock import file_lock
from eqx_decoders.io.status import StatusLine


Paths = str | Sequence[str] | None
Location = File | HubDataset
Entry = dict[str, Any]  # entry of a source in manifests: size, time of the last change, hash of the content

DATA, HELD_OUT = "--data (DataConfig.path)", "--held-out (DataConfig.held_out_path)"  # for error messages
ARRAY_RECORDS = (".arrayrecord", ".array_record")
RECORDS = (".jsonl", ".parquet", *ARRAY_RECORDS, ".bin", ".npy", ".json")
UNCOMPRESSED = (".parquet", *ARRAY_RECORDS, ".bin", ".npy")  # mapped into memory, or compressed internally
TEXTS = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".rs"),
)

# Kinds of files. The corpus of a directory are its files of the first kind that it has. `.json` is late, since a
# directory of texts or records often contains settings as well.
PREFERENCES: tuple[Callable[[File], bool], ...] = (
    lambda file: file.suffix in RECORDS[:-1],
    lambda file: is_compressed(file) and plain_suffix(file) == ".jsonl",
    lambda file: file.suffix in TEXTS,
    lambda file: plain_suffix(file) == ".json",
    lambda file: is_compressed(file) and plain_suffix(file) in TEXTS,
)

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
BUILD_SETTINGS = "_sysconfigdata"  # prefix of a file that describes the machine on which Python was compiled

KEPT = "the tokens that were made are kept"
ANY_FOLDERS = re.compile(r"(?:(?<=/)|^)\*\*(?:/|$)")  # `**` in a glob
CHUNK = 1 << 20  # bytes that are hashed at once
RECENT = 2_000_000_000  # nanoseconds; a file that changed within this time may change again without a new mtime


class Source(NamedTuple):
    """Source: a file or dataset of the corpus, with its name relative to the corpus.

    by_name: the split hash of documents is the hash of this name, not of their content.
    """

    name: str
    file: Location
    by_name: bool = False


def as_paths(path: Paths) -> tuple[str | None, ...]:
    """Return the paths as a tuple. None, the standard library, becomes `(None,)`."""
    return (path,) if path is None or isinstance(path, str) else tuple(path)


def parse_location(text: str) -> Location:
    """Return the file or dataset whose `str` is `text`."""
    return _dataset(text) or (RemoteFile(text) if is_remote(text) else Path(text))


def folder_of(file: Location) -> Path | None:
    """Return the directory at which relative paths in a source start; None for a remote source."""
    if not isinstance(file, Path):
        return None
    return (file if file.is_dir() else file.parent).resolve()


def _dataset(path: str) -> HubDataset | None:
    """Return the dataset of the Hub at a path; None for other paths and for a single file of a dataset."""
    dataset = hub_dataset(path)
    is_file = dataset is not None and plain_suffix(Path(dataset.config or "")) in RECORDS + TEXTS
    return None if is_file else dataset


def find_sources(path: Paths, flag: str = DATA) -> tuple[Source, ...]:
    """Return the sources at `path`: one or several files, directories, globs or datasets (None: the standard library).

    URLs such as `gs://…` and `https://…` are read with fsspec. `hf://datasets/org/name[/config][:split]` is a dataset
    of the Hub. A directory may have been written by `save_to_disk` of `datasets`.

    The files of a directory or glob are sorted by name. The corpus of a directory are its records (.jsonl, .parquet,
    .arrayrecord, .bin, .npy). If it has none, the corpus are compressed records, then plain texts, then other readable
    files. Files and globs must have known suffixes, or no suffix: such files are plain text, for example `LICENSE`.

    Raises DataError with the flag if there are no sources.
    """
    sources: dict[str, Source] = {}
    for each in as_paths(path):
        for source in _find(each, flag):
            copies = (f"{source.name} ({number})" for number in itertools.count(2))
            name = source.name if source.name not in sources else next(copy for copy in copies if copy not in sources)
            sources[name] = source._replace(name=name)
    return tuple(sources.values())


def _find(path: str | None, flag: str) -> Sequence[Source]:
    if path is None:
        return _standard_library()
    if (dataset := _dataset(path)) is not None:
        return [Source(str(dataset), dataset)]
    if is_remote(path):
        return _find_remote(path, flag)
    root = Path(path)
    if root.is_dir():
        saved = saved_split(root, flag)
        return _chosen(_below(root), path, flag) if saved is None else [Source(root.name, saved)]
    matches = [root] if root.is_file() else _matching(path)
    files = _once(file for file in matches if file.is_file())
    _check_files(files, path, flag)
    return [Source(file.name if file == root else file.as_posix(), file) for file in files]


def _find_remote(path: str, flag: str) -> Sequence[Source]:
    folder, files = find_remote(path, flag)
    if folder is not None:
        below = [(file.url.removeprefix(folder + "/"), file) for file in files]
        visible = [Source(*each) for each in below if not any(part.startswith(".") for part in each[0].split("/"))]
        return _chosen(sorted(visible, key=lambda source: source.name), path, flag)
    _check_files(files, path, flag)
    return [Source(file.name if file.url == path else file.url, file) for file in files]


def _chosen(sources: Sequence[Source], path: str, flag: str) -> Sequence[Source]:
    """Return the files of a directory that are its corpus, each file once."""
    files: list[Source] = []
    for is_chosen in PREFERENCES:
        files = files or [each for each in sources if isinstance(each.file, File) and is_chosen(each.file)]
    known = " ".join(RECORDS + TEXTS)
    check(bool(files), f"{flag} {path!r} contains no readable file; known suffixes: {known}.", DataError)
    once = set(_once(each.file for each in files if isinstance(each.file, Path)))
    return [each for each in files if each.file in once or isinstance(each.file, RemoteFile)]


def _check_files(files: Sequence[File], path: str, flag: str) -> None:
    check(
        bool(files),
        f"{flag} {path!r} does not exist: it must be a file, a directory or a glob that matches files.",
        DataError,
    )
    for file in files:
        whole = not is_compressed(file) or plain_suffix(file) not in UNCOMPRESSED
        check(
            plain_suffix(file) in ("", *RECORDS, *TEXTS) and whole,
            f"{flag} {str(file)!r} has an unknown suffix. Known suffixes are {' '.join(RECORDS + TEXTS)}, and .gz and "
            ".zst after suffixes of text and JSON. Rename the file to .txt if it is text.",
            DataError,
        )


def _below(root: Path, skip: frozenset[str] = frozenset()) -> list[Source]:
    """Return all files below `root`, except hidden files and folders, and folders in `skip`."""
    files = (Path(folder, name) for folder, names in _folders(root, skip) for name in names if not name.startswith("."))
    sources = [Source(file.relative_to(root).as_posix(), file) for file in files if file.is_file()]
    return sorted(sources, key=lambda source: source.name)


def _folders(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """Yield `root` and the folders below it with the names of their files. Follows links, but yields each folder once.

    Hidden folders and folders in `skip` are left out.
    """
    seen, waiting = set(root.resolve().parents), collections.deque([root])
    while waiting:
        for folder, folders, names in os.walk(waiting.popleft()):
            real = Path(folder).resolve()
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skip)
            waiting += [link for name in folders if (link := Path(folder, name)).is_symlink()]  # after all real folders
            yield folder, names


def _matching(pattern: str) -> Iterator[Path]:
    """Yield the paths that match a glob. `**` follows links as `_folders` does; `glob.glob` would not terminate."""
    head, *tail = ANY_FOLDERS.split(pattern, maxsplit=1)
    if not tail:
        yield from map(Path, glob.glob(pattern))
        return
    for root in glob.glob(head) if head else ["."]:
        for folder, _ in _folders(Path(root)):
            yield from _matching(os.path.join(glob.escape(folder), tail[0] or "*"))


def _once(files: Iterable[Path]) -> list[Path]:
    """Return each file once, by its shortest path and in order, without links to another file of the list."""
    unique: dict[str, Path] = {}
    real = functools.cache(os.path.realpath)
    for file in sorted(files, key=lambda path: (len(path.parts), path)):
        unique.setdefault(os.path.join(real(file.parent), file.name), file)
    return sorted(file for file in unique.values() if not file.is_symlink() or os.path.realpath(file) not in unique)


def _standard_library() -> tuple[Source, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (each for each in _below(root, SKIPPED_FOLDERS) if each.name.endswith(".py"))
    sources = tuple(each._replace(by_name=True) for each in files if BUILD_SETTINGS not in each.name)
    check(bool(sources), f"the standard library at {root} contains no source files: give {DATA}.", DataError)
    return sources


# --- size, time and hash of a source ----------------------------------------------------------------------------------


def describe_sources(sources: Mapping[str, Source], known: Mapping[str, Entry], cache: Path) -> dict[str, Entry]:
    """Return the entry of each source: size, time of the last change and hash of the content.

    Files are not read if their size and time equal those of a `known` entry, or of an entry in `cache` from the last
    time they were read. Other files are read in parallel, by one process at a time.
    """
    entries = {name: _as_known(source, known.get(name)) for name, source in sources.items()}
    if all(entries.values()):
        return {name: entry for name, entry in entries.items() if entry is not None}
    names = json.dumps([str(_absolute(source.file)) for source in sources.values()]).encode()
    memory = cache / "sources" / f"{hashlib.blake2b(names, digest_size=16).hexdigest()}.json"
    with StatusLine("reading the text", remains=KEPT) as status, file_lock(memory.with_suffix(".lock")):
        remembered = _read_json(memory)
        entries = {
            name: entries[name] or _as_known(source, remembered.get(str(_absolute(source.file))))
            for name, source in sources.items()
        }
        unknown = {name: sources[name] for name, entry in entries.items() if entry is None}
        read = _describe_all(unknown, status)
        recently = time.time_ns() - RECENT
        for name, entry in read.items():
            if isinstance(entry["mtime_ns"], int) and entry["mtime_ns"] < recently:
                remembered[str(_absolute(sources[name].file))] = entry
        if read:
            write_atomically(memory, json.dumps(remembered).encode())
    return {name: entry or read[name] for name, entry in entries.items()}


def _describe_all(sources: Mapping[str, Source], status: StatusLine) -> dict[str, Entry]:
    pool = concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, max(1, len(sources))))
    try:
        entries = pool.map(lambda source: describe(source.file, status), sources.values())
        return dict(zip(sources, entries, strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def describe(file: Location, status: StatusLine | None = None) -> Entry:
    """Return the entry of a source: size, time of the last change (None if it is not reliable) and hash.

    Raises DataError for a source that cannot be read.
    """
    if isinstance(file, HubDataset):
        commit = file.with_commit()
        return {"size": None, "mtime_ns": None, "hash": hash_json([str(commit)]), "revision": commit.revision}
    if isinstance(file, RemoteFile):
        checksum = file.checksum
        return {"size": file.size, "mtime_ns": None, "hash": hash_json([checksum]) if checksum else _hash(file, status)}
    try:
        size, changed = _size_and_time(file)
        digest = (
            hash_json([_hash(each, status) for each in saved_files(file)]) if file.is_dir() else _hash(file, status)
        )
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    return {"size": size, "mtime_ns": changed, "hash": digest}


def is_as_described(file: Location, digest: str, seen: tuple[int, int] | None) -> bool:
    """Return whether a source still has the content of an entry, as far as is known without reading the source.

    digest: hash of the entry. seen: size and time of the last change of the entry, if it has both.
    """
    if isinstance(file, RemoteFile):
        checksum = file.checksum
        return checksum is None or hash_json([checksum]) == digest
    try:
        return seen is None or isinstance(file, HubDataset) or _size_and_time(file) == seen
    except OSError:
        return False


def _as_known(source: Source, entry: Entry | None) -> Entry | None:
    """Return `entry` if the source is unchanged, as far as is known without reading it; otherwise None."""
    if entry is None or isinstance(source.file, RemoteFile):
        return None
    if isinstance(source.file, HubDataset):  # a run keeps its first commit
        return entry if entry.get("revision") else None
    return entry if _size_and_time(source.file) == (entry["size"], entry["mtime_ns"]) else None


def _size_and_time(file: Path) -> tuple[int, int]:
    stats = [each.stat() for each in (saved_files(file) if file.is_dir() else [file])]
    return sum(each.st_size for each in stats), max((each.st_mtime_ns for each in stats), default=0)


def _hash(file: File, status: StatusLine | None) -> str:
    digest = hashlib.blake2b()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            if status is not None:
                status.add(len(chunk))
    return digest.hexdigest()[:32]


def hash_json(content: Any) -> str:
    """Return the hash of a JSON value, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _absolute(file: Location) -> Location:
    return file.absolute() if isinstance(file, Path) else file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
