"""Which files, directories and datasets a corpus is made of, and what tells that their content is the same.

Without a path the corpus is the source code of Python's own standard library, about 12 MB on every machine that runs
this: nothing is downloaded.
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

from eqx_decoders.data.sources.compressed import is_compressed, plain_suffix
from eqx_decoders.data.sources.hub_datasets import HubDataset, hub_dataset, saved_files, saved_split
from eqx_decoders.data.sources.remote import RemoteFile, find_remote, is_remote
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.file_lock import locked
from eqx_decoders.io.status import StatusLine


Paths = str | Sequence[str] | None
File = Path | RemoteFile
Place = File | HubDataset
Entry = dict[str, Any]  # what is kept of a source: its size, the time of its last change, and the hash of its content

DATA, HELD_OUT = "--data (DataConfig.path)", "--held-out (DataConfig.held_out_path)"  # for error messages
ARRAY_RECORDS = (".arrayrecord", ".array_record")
RECORDS = (".jsonl", ".parquet", *ARRAY_RECORDS, ".bin", ".npy", ".json")
UNCOMPRESSED = (".parquet", *ARRAY_RECORDS, ".bin", ".npy")  # mapped into memory, or compressed inside
TEXTS = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".rs"),
)

# Which files of a directory are its corpus: the first of these that chooses any. `.json` is late, since a folder of
# texts or records often has settings beside them.
PREFERENCES: tuple[Callable[[File], bool], ...] = (
    lambda file: file.suffix in RECORDS[:-1],
    lambda file: is_compressed(file) and plain_suffix(file) == ".jsonl",
    lambda file: file.suffix in TEXTS,
    lambda file: plain_suffix(file) == ".json",
    lambda file: is_compressed(file) and plain_suffix(file) in TEXTS,
)

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
BUILD_SETTINGS = "_sysconfigdata"  # the file that describes the machine on which Python was compiled

KEPT = "the tokens that were made are kept"
EVERYWHERE = re.compile(r"(?:(?<=/)|^)\*\*(?:/|$)")  # in a pattern: any folders
CHUNK = 1 << 20  # bytes that are hashed at once
JUST_NOW = 2_000_000_000  # nanoseconds: a file that was changed so lately may change once more at the same time


class Source(NamedTuple):
    """A file or dataset of the corpus and the name under which it is known, relative to the corpus.

    `by_name`: documents are held out by this name, not by their content.
    """

    name: str
    file: Place
    by_name: bool = False


def as_paths(path: Paths) -> tuple[str | None, ...]:
    """The paths one by one; of None: the one that stands for the standard library."""
    return (path,) if path is None or isinstance(path, str) else tuple(path)


def as_place(text: str) -> Place:
    """The file or dataset whose `str` this is."""
    return _dataset(text) or (RemoteFile(text) if is_remote(text) else Path(text))


def folder_of(file: Place) -> Path | None:
    """Where relative paths in a source begin: its directory, or itself if it is one; None if it is elsewhere."""
    if not isinstance(file, Path):
        return None
    return (file if file.is_dir() else file.parent).resolve()


def _dataset(path: str) -> HubDataset | None:
    """The dataset of the hub that a path names; None for a file in one."""
    dataset = hub_dataset(path)
    is_file = dataset is not None and plain_suffix(Path(dataset.config or "")) in RECORDS + TEXTS
    return None if is_file else dataset


def find_sources(path: Paths, flag: str = DATA) -> tuple[Source, ...]:
    """The sources at `path`: one or several, each a file, directory, glob or dataset (None: the standard library).

    Addresses such as `gs://…` and `https://…` are read through fsspec, `hf://datasets/org/name[/config][:split]` is a
    dataset of the hub, and a directory may be one that the `save_to_disk` of `datasets` wrote.

    The files of a directory or glob come in the order of their names. Of a directory the records (.jsonl, .parquet,
    .arrayrecord, .bin, .npy) are taken or, where it has none, the compressed ones; then the plain texts; then what else
    can be read. Files and globs must have endings that are known, or none at all: that is plain text, as in `LICENSE`.

    Raises DataError, with the flag, if there are none.
    """
    found: dict[str, Source] = {}
    for one in as_paths(path):
        for source in _find(one, flag):
            copies = (f"{source.name} ({number})" for number in itertools.count(2))
            name = source.name if source.name not in found else next(copy for copy in copies if copy not in found)
            found[name] = source._replace(name=name)
    return tuple(found.values())


def _find(path: str | None, flag: str) -> Sequence[Source]:
    if path is None:
        return _standard_library()
    if (dataset := _dataset(path)) is not None:
        return [Source(str(dataset), dataset)]
    if is_remote(path):
        return _find_elsewhere(path, flag)
    root = Path(path)
    if root.is_dir():
        saved = saved_split(root, flag)
        return _chosen(_below(root), path, flag) if saved is None else [Source(root.name, saved)]
    matches = [root] if root.is_file() else _matching(path)
    files = _once(file for file in matches if file.is_file())
    _check_files(files, path, flag)
    return [Source(file.name if file == root else file.as_posix(), file) for file in files]


def _find_elsewhere(path: str, flag: str) -> Sequence[Source]:
    folder, files = find_remote(path, flag)
    if folder is not None:
        below = [(file.url.removeprefix(folder + "/"), file) for file in files]
        shown = (Source(*one) for one in below if not any(part.startswith(".") for part in one[0].split("/")))
        return _chosen(sorted(shown, key=lambda one: one.name), path, flag)
    _check_files(files, path, flag)
    return [Source(file.name if file.url == path else file.url, file) for file in files]


def _chosen(found: Sequence[Source], path: str, flag: str) -> Sequence[Source]:
    """The files of a directory that are its corpus."""
    files: list[Source] = []
    for is_chosen in PREFERENCES:
        files = files or [one for one in found if isinstance(one.file, File) and is_chosen(one.file)]
    known = " ".join(RECORDS + TEXTS)
    check(bool(files), f"{flag} {path!r} holds no file that can be read; known endings: {known}.", DataError)
    once = set(_once(one.file for one in files if isinstance(one.file, Path)))
    return [one for one in files if one.file in once or isinstance(one.file, RemoteFile)]


def _check_files(files: Sequence[File], path: str, flag: str) -> None:
    rule = "it must be a file, a directory or a pattern that matches files"
    check(bool(files), f"{flag} {path!r} does not exist: {rule}.", DataError)
    for file in files:
        whole = not is_compressed(file) or plain_suffix(file) not in UNCOMPRESSED
        rule = f"known endings are {' '.join(RECORDS + TEXTS)}, and .gz and .zst behind those of text and JSON"
        good = plain_suffix(file) in ("", *RECORDS, *TEXTS) and whole
        check(good, f"{flag} {str(file)!r} is of an unknown kind: {rule}. Rename it to .txt if it is text.", DataError)


def _below(root: Path, skip: frozenset[str] = frozenset()) -> list[Source]:
    """All files below `root`, without hidden ones and folders named in `skip`."""
    files = (Path(folder, name) for folder, names in _folders(root, skip) for name in names if not name.startswith("."))
    found = [Source(file.relative_to(root).as_posix(), file) for file in files if file.is_file()]
    return sorted(found, key=lambda one: one.name)


def _folders(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """`root` and the folders below, with the names of their files, each once: not also where a link leads back to it.

    Hidden folders and those named in `skip` are left out.
    """
    seen, waiting = set(root.resolve().parents), collections.deque([root])
    while waiting:
        for folder, folders, names in os.walk(waiting.popleft()):
            place = Path(folder).resolve()
            if place in seen:
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in skip)
            waiting += [link for one in folders if (link := Path(folder, one)).is_symlink()]  # behind all real ones
            yield folder, names


def _matching(pattern: str) -> Iterator[Path]:
    """What `glob` finds; a `**` follows links as `_folders` does: glob would go round in circles."""
    head, *tail = EVERYWHERE.split(pattern, maxsplit=1)
    if not tail:
        yield from map(Path, glob.glob(pattern))
        return
    for root in glob.glob(head) if head else ["."]:
        for folder, _ in _folders(Path(root)):
            yield from _matching(os.path.join(glob.escape(folder), tail[0] or "*"))


def _once(files: Iterable[Path]) -> list[Path]:
    """Each file by the shortest of its paths, in order; links to one of the others are left out."""
    found: dict[str, Path] = {}
    real = functools.cache(os.path.realpath)
    for file in sorted(files, key=lambda one: (len(one.parts), one)):
        found.setdefault(os.path.join(real(file.parent), file.name), file)
    return sorted(file for file in found.values() if not file.is_symlink() or os.path.realpath(file) not in found)


def _standard_library() -> tuple[Source, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (one for one in _below(root, SKIPPED_FOLDERS) if one.name.endswith(".py"))
    found = tuple(one._replace(by_name=True) for one in files if BUILD_SETTINGS not in one.name)
    check(bool(found), f"the standard library at {root} holds no source files: give {DATA}.", DataError)
    return found


# --- what tells that the content is the same --------------------------------------------------------------------------


def describe_sources(sources: Mapping[str, Source], known: Mapping[str, Entry], cache: Path) -> dict[str, Entry]:
    """Size, time of the last change and hash of the content of each source.

    Files whose size and time are those of a `known` entry, or of one that was written into `cache` when they were read
    last, are not read again. The others are, several at a time, and by one process for all that need them.
    """
    found = {name: _as_known(source, known.get(name)) for name, source in sources.items()}
    if all(found.values()):
        return {name: entry for name, entry in found.items() if entry is not None}
    names = json.dumps([str(_absolute(source.file)) for source in sources.values()]).encode()
    memory = cache / "sources" / f"{hashlib.blake2b(names, digest_size=16).hexdigest()}.json"
    with StatusLine("reading the text", kept=KEPT) as waiting, locked(memory.with_suffix(".lock")):
        remembered = _read_json(memory)
        found = {
            name: found[name] or _as_known(source, remembered.get(str(_absolute(source.file))))
            for name, source in sources.items()
        }
        left = {name: sources[name] for name, entry in found.items() if entry is None}
        read = _describe_all(left, waiting)
        lately = time.time_ns() - JUST_NOW
        for name, entry in read.items():
            if isinstance(entry["mtime_ns"], int) and entry["mtime_ns"] < lately:
                remembered[str(_absolute(sources[name].file))] = entry
        if read:
            write_atomically(memory, json.dumps(remembered).encode())
    return {name: entry or read[name] for name, entry in found.items()}


def _describe_all(sources: Mapping[str, Source], waiting: StatusLine) -> dict[str, Entry]:
    pool = concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, max(1, len(sources))))
    try:
        return dict(zip(sources, pool.map(lambda one: describe(one.file, waiting), sources.values()), strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def describe(file: Place, waiting: StatusLine | None = None) -> Entry:
    """Size, time of the last change (None for what has none that can be relied on) and hash of a source.

    Raises DataError for what cannot be read.
    """
    if isinstance(file, HubDataset):
        commit = file.with_commit()
        return {"size": None, "mtime_ns": None, "hash": _short([str(commit)]), "revision": commit.revision}
    if isinstance(file, RemoteFile):
        checksum = file.checksum
        return {"size": file.size, "mtime_ns": None, "hash": _short([checksum]) if checksum else _hash(file, waiting)}
    try:
        size, changed = _size_and_time(file)
        digest = _short([_hash(one, waiting) for one in saved_files(file)]) if file.is_dir() else _hash(file, waiting)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    return {"size": size, "mtime_ns": changed, "hash": digest}


def is_as_described(file: Place, digest: str, seen: tuple[int, int] | None) -> bool:
    """Whether a source is still that of an entry with this hash, as far as that is told without reading it.

    seen: the entry's size and time of the last change, where it has both.
    """
    if isinstance(file, RemoteFile):
        checksum = file.checksum
        return checksum is None or _short([checksum]) == digest
    try:
        return seen is None or isinstance(file, HubDataset) or _size_and_time(file) == seen
    except OSError:
        return False


def _as_known(source: Source, entry: Entry | None) -> Entry | None:
    """`entry`, if the source is still what it describes as far as that is told without reading it."""
    if entry is None or isinstance(source.file, RemoteFile):
        return None
    if isinstance(source.file, HubDataset):  # the commit that was taken first stays
        return entry if entry.get("revision") else None
    return entry if _size_and_time(source.file) == (entry["size"], entry["mtime_ns"]) else None


def _size_and_time(file: Path) -> tuple[int, int]:
    stats = [one.stat() for one in (saved_files(file) if file.is_dir() else [file])]
    return sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)


def _hash(file: File, waiting: StatusLine | None) -> str:
    digest = hashlib.blake2b()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            if waiting is not None:
                waiting.add(len(chunk))
    return digest.hexdigest()[:32]


def _short(parts: list[str]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _absolute(file: Place) -> Place:
    return file.absolute() if isinstance(file, Path) else file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
