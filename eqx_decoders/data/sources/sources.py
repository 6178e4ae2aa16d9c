"""Find the sources of a corpus (files, directories and datasets), and detect changes by their sizes and hashes.

Without a path, the corpus is the source code of Python's standard library: about 12 MB, available on every machine.
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
Entry = dict[str, Any]  # entry of a source in manifests: size, modification time, hash of the content

# Names of settings in error messages.
DATA = "--data (DataConfig.path)"
HELD_OUT = "--held-out (DataConfig.held_out_path)"

ARRAY_RECORDS = (".arrayrecord", ".array_record")
RECORDS = (".jsonl", ".parquet", *ARRAY_RECORDS, ".bin", ".npy", ".json")
UNCOMPRESSED = (".parquet", *ARRAY_RECORDS, ".bin", ".npy")  # mapped into memory, or compressed internally
TEXTS = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".rs"),
)

# The corpus of a directory consists of the files of the first of these kinds that the directory contains. `.json` comes
# after texts and records, because directories often contain settings in `.json` files.
KINDS_BY_PRIORITY: tuple[Callable[[File], bool], ...] = (
    lambda file: file.suffix in RECORDS[:-1],
    lambda file: is_compressed(file) and plain_suffix(file) == ".jsonl",
    lambda file: file.suffix in TEXTS,
    lambda file: plain_suffix(file) == ".json",
    lambda file: is_compressed(file) and plain_suffix(file) in TEXTS,
)

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
BUILD_SETTINGS = "_sysconfigdata"  # prefix of a file that describes the machine on which Python was compiled

KEPT = "the tokens written so far are kept"
ANY_FOLDERS = re.compile(r"(?:(?<=/)|^)\*\*(?:/|$)")  # `**` in a glob
HASH_CHUNK_BYTES = 1 << 20
MTIME_RESOLUTION = 2_000_000_000  # nanoseconds within which a file may change twice with the same modification time


class Source(NamedTuple):
    """A file or dataset of a corpus.

    - `name`: name relative to the corpus.
    - `by_name`: whether the split hash of documents is computed from `name` instead of the content.
    """

    name: str
    file: Location
    by_name: bool = False


def as_paths(path: Paths) -> tuple[str | None, ...]:
    """Return the paths as a tuple. None (the standard library) becomes `(None,)`."""
    return (path,) if path is None or isinstance(path, str) else tuple(path)


def parse_location(text: str) -> Location:
    """Return the file or dataset for a path or URL. The inverse of `str`."""
    return _dataset(text) or (RemoteFile(text) if is_remote(text) else Path(text))


def folder_of(file: Location) -> Path | None:
    """Return the directory to which relative paths in a source refer; None for a remote source."""
    if not isinstance(file, Path):
        return None
    return (file if file.is_dir() else file.parent).resolve()


def _dataset(path: str) -> HubDataset | None:
    """Return the Hugging Face dataset at a path; None for other paths, and for a single file of a dataset."""
    dataset = hub_dataset(path)
    is_file = dataset is not None and plain_suffix(Path(dataset.config or "")) in RECORDS + TEXTS
    return None if is_file else dataset


def find_sources(path: Paths, flag: str = DATA) -> tuple[Source, ...]:
    """Return the sources of a corpus.

    The files of a directory or glob are sorted by name. The sources of a directory are the files with records (.jsonl,
    .parquet, .arrayrecord, .bin, .npy). If there are no such files, the sources are the compressed records; otherwise
    the plain texts; otherwise other readable files. Files and globs must have known suffixes. A file without a suffix,
    such as `LICENSE`, is plain text.

    **Arguments:**

    - `path`: one or several files, directories, globs, URLs or datasets; None: the standard library. URLs such as
      `gs://…` and `https://…` are read with fsspec. `hf://datasets/org/name[/config][:split]` is a dataset of the
      Hugging Face Hub. A directory may have been written by `save_to_disk` of the package `datasets`.
    - `flag`: name of the setting in error messages.

    Raises DataError if there are no sources.
    """
    sources: dict[str, Source] = {}
    for one_path in as_paths(path):
        for source in _find(one_path, flag):
            name = source.name
            for number in itertools.count(2):
                if name not in sources:
                    break
                name = f"{source.name} ({number})"
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
        return _select_kind(_files_below(root), path, flag) if saved is None else [Source(root.name, saved)]
    matches = [root] if root.is_file() else _expand_glob(path)
    files = _unique_files(file for file in matches if file.is_file())
    _check_files(files, path, flag)
    return [Source(file.name if file == root else file.as_posix(), file) for file in files]


def _find_remote(path: str, flag: str) -> Sequence[Source]:
    folder, files = find_remote(path, flag)
    if folder is not None:
        sources = [Source(file.url.removeprefix(folder + "/"), file) for file in files]
        visible = [source for source in sources if not any(part.startswith(".") for part in source.name.split("/"))]
        return _select_kind(sorted(visible, key=lambda source: source.name), path, flag)
    _check_files(files, path, flag)
    return [Source(file.name if file.url == path else file.url, file) for file in files]


def _select_kind(sources: Sequence[Source], path: str, flag: str) -> Sequence[Source]:
    """Return the files of the first kind in `KINDS_BY_PRIORITY` that a directory contains, without duplicates."""
    selected: list[Source] = []
    for is_of_kind in KINDS_BY_PRIORITY:
        selected = [source for source in sources if isinstance(source.file, File) and is_of_kind(source.file)]
        if selected:
            break
    known = " ".join(RECORDS + TEXTS)
    check(bool(selected), f"{flag} {path!r} contains no readable files. Known suffixes are {known}.", DataError)
    unique = set(_unique_files(source.file for source in selected if isinstance(source.file, Path)))
    return [source for source in selected if source.file in unique or isinstance(source.file, RemoteFile)]


def _check_files(files: Sequence[File], path: str, flag: str) -> None:
    check(
        bool(files),
        f"{flag} {path!r} does not exist. It must be a file, a directory, or a glob that matches files.",
        DataError,
    )
    for file in files:
        may_have_suffix = not is_compressed(file) or plain_suffix(file) not in UNCOMPRESSED
        check(
            plain_suffix(file) in ("", *RECORDS, *TEXTS) and may_have_suffix,
            f"{flag} {str(file)!r} has an unknown suffix. Known suffixes are {' '.join(RECORDS + TEXTS)}, and .gz and "
            ".zst after suffixes of text and JSON. Rename the file to .txt if it is text.",
            DataError,
        )


def _files_below(root: Path, skip: frozenset[str] = frozenset()) -> list[Source]:
    """Return the files in all folders below `root`, without hidden files, hidden folders, and folders in `skip`."""
    files = (Path(folder, name) for folder, names in _folders(root, skip) for name in names if not name.startswith("."))
    sources = [Source(file.relative_to(root).as_posix(), file) for file in files if file.is_file()]
    return sorted(sources, key=lambda source: source.name)


def _folders(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """Yield `root` and all folders below it, with the names of their files.

    Symbolic links are followed, but each folder is yielded once. Hidden folders and folders in `skip` are skipped.
    """
    seen = set(root.resolve().parents)
    waiting = collections.deque([root])
    while waiting:
        for folder, folders, names in os.walk(waiting.popleft()):
            real = Path(folder).resolve()
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skip)
            # Visit links after all folders that are not links.
            waiting += [link for name in folders if (link := Path(folder, name)).is_symlink()]
            yield folder, names


def _expand_glob(pattern: str) -> Iterator[Path]:
    """Yield the paths that match a glob. `**` follows links as in `_folders`; `glob.glob` might not terminate."""
    head, *tail = ANY_FOLDERS.split(pattern, maxsplit=1)
    if not tail:
        yield from map(Path, glob.glob(pattern))
        return
    for root in glob.glob(head) if head else ["."]:
        for folder, _ in _folders(Path(root)):
            yield from _expand_glob(os.path.join(glob.escape(folder), tail[0] or "*"))


def _unique_files(files: Iterable[Path]) -> list[Path]:
    """Return the files sorted by path, without duplicates.

    Of several paths of the same file, the shortest is returned. Links to other files of the list are removed.
    """
    unique: dict[str, Path] = {}
    real = functools.cache(os.path.realpath)
    for file in sorted(files, key=lambda path: (len(path.parts), path)):
        unique.setdefault(os.path.join(real(file.parent), file.name), file)
    return sorted(file for file in unique.values() if not file.is_symlink() or os.path.realpath(file) not in unique)


def _standard_library() -> tuple[Source, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = tuple(
        source._replace(by_name=True)
        for source in _files_below(root, SKIPPED_FOLDERS)
        if source.name.endswith(".py") and BUILD_SETTINGS not in source.name
    )
    check(bool(sources), f"the standard library at {root} contains no source files. Set {DATA}.", DataError)
    return sources


# --- entries of sources ----------------------------------------------------------------------------------------------


def describe_sources(sources: Mapping[str, Source], known: Mapping[str, Entry], cache: Path) -> dict[str, Entry]:
    """Return the entry of each source: size, modification time, and hash of the content.

    A file is not read if its size and modification time are unchanged since a known entry. Other files are read in
    parallel, by one process at a time.

    **Arguments:**

    - `known`: entries of a manifest by source name.
    - `cache`: cache directory, with entries of all files that were read before.
    """
    entries = {name: _if_unchanged(source, known.get(name)) for name, source in sources.items()}
    if all(entries.values()):
        return {name: entry for name, entry in entries.items() if entry is not None}
    names = json.dumps([str(_absolute(source.file)) for source in sources.values()]).encode()
    cache_file = cache / "sources" / f"{hashlib.blake2b(names, digest_size=16).hexdigest()}.json"
    with StatusLine("reading the text", remains=KEPT) as status, file_lock(cache_file.with_suffix(".lock")):
        cached = _read_json(cache_file)
        entries = {
            name: entries[name] or _if_unchanged(source, cached.get(str(_absolute(source.file))))
            for name, source in sources.items()
        }
        unknown = {name: sources[name] for name, entry in entries.items() if entry is None}
        read = _describe_all(unknown, status)
        latest = time.time_ns() - MTIME_RESOLUTION
        for name, entry in read.items():
            if isinstance(entry["mtime_ns"], int) and entry["mtime_ns"] < latest:
                cached[str(_absolute(sources[name].file))] = entry
        if read:
            write_atomically(cache_file, json.dumps(cached).encode())
    return {name: entry or read[name] for name, entry in entries.items()}


def _describe_all(sources: Mapping[str, Source], status: StatusLine) -> dict[str, Entry]:
    pool = concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, max(1, len(sources))))
    try:
        entries = pool.map(lambda source: describe(source.file, status), sources.values())
        return dict(zip(sources, entries, strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def describe(file: Location, status: StatusLine | None = None) -> Entry:
    """Return the entry of a source: size, modification time (None if it is not reliable), and hash of the content.

    Raises DataError if the source cannot be read.
    """
    if isinstance(file, HubDataset):
        commit = file.with_commit()
        return {"size": None, "mtime_ns": None, "hash": hash_json([str(commit)]), "revision": commit.revision}
    if isinstance(file, RemoteFile):
        checksum = file.checksum
        return {"size": file.size, "mtime_ns": None, "hash": hash_json([checksum]) if checksum else _hash(file, status)}
    try:
        size, mtime_ns = _size_and_time(file)
        if file.is_dir():
            digest = hash_json([_hash(saved_file, status) for saved_file in saved_files(file)])
        else:
            digest = _hash(file, status)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    return {"size": size, "mtime_ns": mtime_ns, "hash": digest}


def is_as_described(file: Location, digest: str, seen: tuple[int, int] | None) -> bool:
    """Return whether a source is unchanged, as far as this can be determined without reading the source.

    **Arguments:**

    - `digest`: hash in the entry of the source.
    - `seen`: size and modification time in the entry of the source; None: unknown.
    """
    if isinstance(file, RemoteFile):
        checksum = file.checksum
        return checksum is None or hash_json([checksum]) == digest
    try:
        return seen is None or isinstance(file, HubDataset) or _size_and_time(file) == seen
    except OSError:
        return False


def _if_unchanged(source: Source, entry: Entry | None) -> Entry | None:
    """Return `entry` if the source is known to be unchanged without reading it; otherwise None."""
    if entry is None or isinstance(source.file, RemoteFile):
        return None
    if isinstance(source.file, HubDataset):  # a run always reads the commit that it read first
        return entry if entry.get("revision") else None
    return entry if _size_and_time(source.file) == (entry["size"], entry["mtime_ns"]) else None


def _size_and_time(file: Path) -> tuple[int, int]:
    """Return the total size in bytes, and the latest modification time in nanoseconds."""
    stats = [path.stat() for path in (saved_files(file) if file.is_dir() else [file])]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)


def _hash(file: File, status: StatusLine | None) -> str:
    digest = hashlib.blake2b()
    with file.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            if status is not None:
                status.add(len(chunk))
    return digest.hexdigest()[:32]


def hash_json(content: Any) -> str:
    """Return the hash of a JSON value, with 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _absolute(file: Location) -> Location:
    return file.absolute() if isinstance(file, Path) else file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
