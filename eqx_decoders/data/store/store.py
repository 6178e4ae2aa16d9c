"""Token store: the tokens of a corpus, in shards of a cache that all runs share, listed in the manifest of a run.

`open_store` finds the sources of a corpus, writes the shards that the cache lacks (`tokenize.py`), and writes the
manifest `manifest.json` into the run's directory: the sources with hashes of their contents, and the shards with their
documents. A run that resumes with its manifest has the same data. Shards that are missing in the cache are written
again.

The documents of a store are those of the training data in their order, followed by those of separate held-out data.
Each document of the training data has a split hash, which decides whether it is held out: another held-out fraction
needs no new tokens.
"""

import collections
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.chats import render_documents
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import ReadReport, counted
from eqx_decoders.data.sources.readers import Part, parts_of, read_source
from eqx_decoders.data.sources.sources import DATA, HELD_OUT, Entry, Paths, Source, describe_sources, find_sources
from eqx_decoders.data.store.corpus import SPLITS, CorpusStats, Gzip, held_out_hashes, read_documents
from eqx_decoders.data.store.shards import (
    Shard,
    ShardInfo,
    TokenizationConfig,
    checksum,
    read_info,
    separators,
    trained_text,
    write_shard,
)
from eqx_decoders.data.store.tokenize import ShardTask, cpu_cores, make_task, shard_path, tokenize
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.atomic_files import atomic_stream, cache_directory, write_atomically, writing_to
from eqx_decoders.io.file_lock import file_lock
from eqx_decoders.io.processes import local_process_count
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer


FORMAT = 1  # version of the manifest
TRAIN, HELD_OUT_DATA = "train:", "held_out:"  # prefixes of the names of sources
FLAGS = {
    name: "--" + name.replace("_", "-")
    for name in ("tokenizer", "text_field", "chat_template", "special_tokens_in_text")
}
KEPT = "the tokens are kept"

MAX_OPEN = 1024  # shards that are mapped into memory at a time; a corpus with more shards has an index of documents
DOCUMENTS_AT_ONCE = 1 << 20  # documents whose sizes are read together
DOCUMENT = np.dtype([("size", "<i8"), ("split_hash", "<f8")])
MAX_COMPRESSED = 1 << 30  # bytes of sources whose held-out text is compressed for the gzip baseline


# --- opening ----------------------------------------------------------------------------------------------------------


def open_store(
    folder: str | Path,
    tokenizer: Tokenizer,
    *,
    path: Paths = None,
    held_out_path: Paths = None,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
    template: ChatTemplate | None = None,
    cache_dir: str | Path | None = None,
    media: MediaReader | None = None,
    special_tokens_in_text: bool | None = None,
) -> "TokenStore":
    """Open the tokens of a corpus, and tokenize what the cache lacks.

    `folder`, in the run's directory, contains the manifest. `cache_dir` (None: in the user's cache directory) contains
    the tokens. All processes that share the cache tokenize together. `template` renders conversations. With a
    `held_out_fraction` of 1 all documents are held out, and errors name the flag of held-out data.

    Raises DataError with all differences if the files, the tokenizer, the split or, with conversations, the template
    differ from the manifest in `folder`.
    """
    folder, cache, all_held_out = Path(folder), cache_directory(cache_dir), held_out_fraction >= 1
    request = {
        "format": FORMAT,
        "tokenizer": tokenizer.content_hash,
        "text_field": text_field,
        "held_out_fraction": 0.0 if held_out_path or all_held_out else held_out_fraction,
        "own_held_out_path": held_out_path is not None,
    }
    if special_tokens_in_text is not None:
        request["special_tokens_in_text"] = special_tokens_in_text
    config = TokenizationConfig(tokenizer, text_field, template, media, special_tokens_in_text)
    shards = cache / "tokens" / config.digest
    flag = HELD_OUT if all_held_out else DATA
    sources = {TRAIN + source.name: source for source in find_sources(path, flag)}
    if held_out_path:
        sources |= {HELD_OUT_DATA + source.name: source for source in find_sources(held_out_path, HELD_OUT)}
    manifest = read_manifest(folder)
    with writing_to(cache):
        entries = describe_sources(sources, manifest["sources"] if manifest else {}, cache)
    if manifest is not None:
        check_unchanged(folder, manifest, request, entries, template)
    tasks = _tasks(sources, entries, manifest, media)
    with writing_to(cache):
        workers = max(1, cpu_cores() // local_process_count())
        tokenize(shards, [task for _, task in tasks], config, max_workers=workers)
    corpus = _Corpus(shards, tasks, config, request, entries)
    with file_lock(folder / "lock"):
        current = read_manifest(folder)
        # with other counts if the documents were training data before, and all of them are held out now
        has_counts = current is not None and (not all_held_out or current["held_out"]["below"] >= 1)
        if current is None or not has_counts:
            _check_any([_info(shards, task) for _, task in tasks], flag, path)
            current = _new_manifest(corpus, cache, all_held_out)
            current["fingerprint"] = manifest["fingerprint"] if manifest else current["fingerprint"]
            write_atomically(folder / "manifest.json", json.dumps(current, indent=1).encode())
        elif manifest is None:  # another process has written it meanwhile
            check_unchanged(folder, current, request, entries, template)
    keys = {(name, task.part): task.key for name, task in tasks}  # the key depends on the folder of images
    rows = [row | {"key": keys.get((row["source"], part_of(row)), row["key"])} for row in current["shards"]]
    return TokenStore(current | {"shards": rows}, shards)


def open_sample(
    folder: str | Path,
    tokenizer: Tokenizer,
    max_documents: int,
    *,
    path: Paths = None,
    held_out_path: Paths = None,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
    template: ChatTemplate | None = None,
    media: MediaReader | None = None,
    special_tokens_in_text: bool | None = None,
) -> "TokenStore":
    """Open the first `max_documents` documents of a corpus for a preview. Their tokens are in `folder`, not cached."""
    folder, config = Path(folder), TokenizationConfig(tokenizer, text_field, template, media, special_tokens_in_text)
    folder.mkdir(parents=True, exist_ok=True)
    infos: list[ShardInfo] = []
    rows: list[dict[str, Any]] = []
    for name, paths, flag in ((TRAIN, path, DATA), (HELD_OUT_DATA, held_out_path, HELD_OUT)):
        if name == TRAIN or paths:
            report = ReadReport()
            documents = read_documents(paths, text_field=text_field, tokenizer=tokenizer, flag=flag, report=report)
            key = name[:-1]
            first = itertools.islice(documents, max_documents)
            info = write_shard(folder / f"{key}.tokens", first, config, report=report)
            infos.append(info)
            rows.append({"source": name, "part": None, "key": key, "documents": info.documents})
    described = describe_shards(infos, infos[:1], 0.0 if held_out_path else held_out_fraction)
    manifest = described | {"shards": rows, "sources": {}}
    _check_any(infos, DATA, path)
    manifest["counts"] = count_corpus(TokenStore(manifest, folder), None, config)
    return TokenStore(manifest | {"fingerprint": ""}, folder)


def is_tokenized(folder: Path, cache_dir: str | Path | None, config: TokenizationConfig) -> bool:
    """Return whether the cache contains all tokens of a run's manifest."""
    manifest, shards = read_manifest(folder), cache_directory(cache_dir) / "tokens" / config.digest
    rows = manifest["shards"] if manifest is not None else []
    return bool(rows) and all(read_info(shards / f"{row['key']}.tokens") is not None for row in rows)


def _tasks(
    sources: Mapping[str, Source],
    entries: Mapping[str, Entry],
    manifest: Mapping[str, Any] | None,
    media: MediaReader | None,
) -> list[tuple[str, ShardTask]]:
    """Return a task for each part of each source. The parts are those of the manifest if there is one."""
    known_parts: dict[str, list[Part | None]] = {}
    for row in manifest["shards"] if manifest is not None else []:
        known_parts.setdefault(row["source"], []).append(part_of(row))
    tasks = []
    for name, source in sources.items():
        parts = known_parts.get(name) or parts_of(source, entries[name]["size"])
        tasks += [(name, make_task(source, entries[name], part, len(parts), media)) for part in parts]
    return tasks


def _info(shards: Path, task: ShardTask) -> ShardInfo:
    info = read_info(shard_path(shards, task))
    if info is None:
        raise DataError(
            f"{shard_path(shards, task)} was written and is missing now. Start again, and check whether another "
            "program deletes files of the cache."
        )
    return info


def _check_any(infos: list[ShardInfo], flag: str, path: Paths) -> None:
    if not any(info.documents for info in infos):
        dropped = sum((collections.Counter(info.dropped) for info in infos), collections.Counter[str]())
        reasons = (
            f"all of its {dropped.total():,} records are left out: {counted(dropped)}" if dropped else "it is empty"
        )
        raise DataError(f"{flag} {path!r} contains no text to train on: {reasons}.")


# --- manifest ---------------------------------------------------------------------------------------------------------


class _Corpus(NamedTuple):
    """Corpus whose shards are written: their folder, their tasks with the names of the sources, and the settings."""

    shards: Path
    tasks: list[tuple[str, ShardTask]]
    config: TokenizationConfig
    request: Mapping[str, Any]
    entries: Mapping[str, Entry]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest in a run's directory, or None. Raises DataError for a file with other content."""
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError):  # missing or incomplete
        return None
    valid = isinstance(manifest, dict) and {"sources", "fingerprint", "shards"} <= manifest.keys()
    check(valid, f"{file} is not a manifest of tokens. Choose another run directory, or move the file.", DataError)
    return manifest


def part_of(row: Mapping[str, Any]) -> Part | None:
    """Return the part of its source that a shard of the manifest contains; None for the whole source."""
    return None if row["part"] is None else (row["part"][0], row["part"][1])


def describe_shards(infos: Sequence[ShardInfo], trained: Sequence[ShardInfo], fraction: float) -> dict[str, Any]:
    """Return the manifest's summary of all shards: the split, whether there are targets, and counts of dropped records.

    trained: shards of the training data, of which `fraction` is held out.
    """
    smallest = min((info.smallest for info in trained), default=1.0)
    largest = max((info.largest for info in trained), default=0.0)
    below, equal = held_out_hashes(fraction, smallest, largest)
    has_targets = any("targets" in info.sections for info in infos)
    counts: dict[str, collections.Counter[str]] = {"dropped": collections.Counter(), "notes": collections.Counter()}
    for info in infos:
        counts["dropped"].update(info.dropped)
        counts["notes"].update(info.notes)
    totals = {name: dict(count) for name, count in counts.items()}
    return {"held_out": {"below": below, "equal": equal}, "has_targets": has_targets, **totals}


def _new_manifest(corpus: _Corpus, cache: Path, all_held_out: bool) -> dict[str, Any]:
    shards, tasks, config, request, entries = corpus
    infos = [_info(shards, task) for _, task in tasks]
    rows = [
        {"source": name, "part": task.part, "key": task.key, "documents": info.documents}
        for (name, task), info in zip(tasks, infos, strict=True)
    ]
    trained = [info for (name, _), info in zip(tasks, infos, strict=True) if name.startswith(TRAIN)]
    described = describe_shards(infos, trained, 1.0 if all_held_out else request["held_out_fraction"])
    if config.template is not None and any(info.has_chats for info in infos):
        request = {**request, "chat_template": config.template.content_hash}
    content = json.dumps([request, {name: entry["hash"] for name, entry in entries.items()}], sort_keys=True)
    fingerprint = checksum(content.encode())
    manifest = {**request, **described, "sources": dict(entries), "fingerprint": fingerprint, "shards": rows}
    file = cache / "counts" / f"{fingerprint}.{config.digest}{'.held_out' if all_held_out else ''}.json"
    try:
        manifest["counts"] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        with StatusLine("counting", remains=KEPT):
            manifest["counts"] = count_corpus(TokenStore(manifest, shards), [task for _, task in tasks], config)
        with writing_to(file.parent):
            write_atomically(file, json.dumps(manifest["counts"]).encode())
    return manifest


def check_unchanged(
    folder: Path,
    manifest: Mapping[str, Any],
    request: Mapping[str, Any],
    entries: Mapping[str, Entry],
    template: ChatTemplate | None,
) -> None:
    """Raise DataError that lists all differences between the data of the manifest and the requested data."""
    if "chat_template" in manifest:
        request = {**request, "chat_template": None if template is None else template.content_hash}
    changes = [
        f"{FLAGS.get(key, key)} was {manifest.get(key)!r} and is {now!r}"
        for key, now in request.items()
        if manifest.get(key) != now and key not in ("held_out_fraction", "own_held_out_path")
    ]
    old_split, new_split = _split_text(manifest), _split_text(request)
    old = manifest["sources"]
    if old_split != new_split:
        changes.append(f"the held-out data was {old_split} and is {new_split}")
        # a file that appears or disappears with the flag is not a change of its own
        old = {name: entry for name, entry in old.items() if not name.startswith(HELD_OUT_DATA)}
        entries = {name: entry for name, entry in entries.items() if not name.startswith(HELD_OUT_DATA)}
    changes += [f"{name} is missing" for name in old if name not in entries]
    changes += [f"{name} is new" for name in entries if name not in old]
    changes += [
        f"the content of {name} has changed"
        for name, entry in entries.items()
        if name in old and old[name]["hash"] != entry["hash"]
    ]
    if changes:
        listed = "; ".join(changes[:8]) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
        raise DataError(
            f"the data differ from the data of the run in {folder}: {listed}. Restore them to resume this run, or "
            "choose another run directory."
        )


def _split_text(settings: Mapping[str, Any]) -> str:
    has_path = settings.get("own_held_out_path")
    return "--held-out" if has_path else f"--held-out-fraction {settings.get('held_out_fraction')}"


# --- counts -----------------------------------------------------------------------------------------------------------


def count_corpus(
    store: "TokenStore", tasks: Sequence[ShardTask] | None, config: TokenizationConfig
) -> dict[str, dict[str, Any]]:
    """Return the fields of the `CorpusStats` of each split.

    tasks: tasks of the shards, by which held-out text is read for the gzip baseline; None: no baseline.
    """
    totals = np.zeros((2, 3), np.int64)
    sizes: list[int | None] = [0, 0]
    gzip, read, start = Gzip(), 0, 0
    for number in range(store.shard_count):
        shard = store.shard(number)
        held_out = store.is_held_out(start, start + len(shard))
        start += len(shard)
        totals += _count_shard(shard, held_out)
        known = _known_bytes(shard, held_out)
        compressed = tasks is not None and read < MAX_COMPRESSED and held_out.any()
        texts: Iterable[bytes] = ()
        if tasks is not None and compressed:
            texts = _held_out_texts(tasks[number], config, held_out)
            read += tasks[number].size or shard.info.bytes or 4 * shard.info.tokens
        elif known[1] is None:
            texts = _decoded_texts(shard, config.tokenizer, held_out)
        length = 0
        for text in texts:
            length += len(text)
            if compressed:
                gzip.add(text)
        known[1] = length if known[1] is None else known[1]
        sizes = [None if a is None or b is None else a + b for a, b in zip(sizes, known, strict=True)]
    has_baseline = tasks is not None and totals[1, 0] > 0
    baselines = [(None, None), (gzip.nats_per_byte(), gzip.read) if has_baseline else (None, None)]
    rows = zip(SPLITS, totals.tolist(), sizes, baselines, strict=True)
    return {
        split: CorpusStats(documents, tokens, targets, size, *baseline)._asdict()
        for split, (documents, tokens, targets), size, baseline in rows
    }


def _count_shard(shard: Shard, held_out: np.ndarray) -> np.ndarray:
    """Return the numbers of documents, tokens and targets of each split, `[2, 3]`."""
    info = shard.info
    counts = np.zeros(3, np.int64)
    for begin in range(0, len(shard) if held_out.any() else 0, DOCUMENTS_AT_ONCE):
        end = min(begin + DOCUMENTS_AT_ONCE, len(shard))
        mask = held_out[begin:end]
        tokens, targets = shard.sizes(begin, end)[mask].sum(), shard.target_counts(begin, end)[mask].sum()
        counts += np.array([mask.sum(), tokens, targets])
    return np.stack([np.array([info.documents, info.tokens, info.targets]) - counts, counts])


def _known_bytes(shard: Shard, held_out: np.ndarray) -> list[int | None]:
    """Return the number of bytes of each split; None if a document of the split was given as tokens."""
    parts = (shard.bytes[~held_out], shard.bytes[held_out])
    return [None if (part < 0).any() else int(part.sum()) for part in parts]


def _held_out_texts(task: ShardTask, config: TokenizationConfig, held_out: np.ndarray) -> Iterator[bytes]:
    """Yield the held-out text of a source, read again because some tokenizers do not preserve every character."""
    documents = read_source(task.source, config.read_options(ReadReport()), task.part)
    for document, chosen in zip(render_documents(documents, config.template), held_out, strict=True):
        if chosen:
            text = trained_text(document)
            yield (config.tokenizer.decode(np.asarray(document.tokens)) if text is None else text).encode()


def _decoded_texts(shard: Shard, tokenizer: Tokenizer, held_out: np.ndarray) -> Iterator[bytes]:
    """Yield the text of held-out documents that were given as tokens; for other documents, zeros of the same length."""
    start, end = separators(tokenizer)
    for document in np.flatnonzero(held_out).tolist():
        size = int(shard.bytes[document])
        tokens = shard[document][len(start) : None if end is None else -1]
        yield tokenizer.decode(tokens).encode() if size < 0 else bytes(size)


# --- reading ----------------------------------------------------------------------------------------------------------


class TokenStore:
    """Tokens of a corpus: `store[i]` is the array of document `i`. Shards are opened and read when they are needed."""

    def __init__(self, manifest: Mapping[str, Any], folder: Path):
        self.manifest, self._folder = manifest, folder
        self._shards: list[tuple[str, str, int]] = [
            (row["source"], row["key"], row["documents"]) for row in manifest["shards"]
        ]
        self._ends = np.cumsum([documents for _, _, documents in self._shards], dtype=np.int64)
        self._held_out: tuple[float, float | None] = (manifest["held_out"]["below"], manifest["held_out"]["equal"])
        self.has_targets: bool = manifest["has_targets"]
        keys = [key for _, key, _ in self._shards]  # the cached function must not refer to the store
        self.shard = functools.lru_cache(MAX_OPEN)(lambda number: Shard(folder / f"{keys[number]}.tokens"))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, document: int | np.integer) -> np.ndarray:
        shard, number = self._find(document)
        return shard[number]

    def targets(self, document: int | np.integer) -> np.ndarray:
        """Return a mask of the tokens of `document` that are targets. The first token never is."""
        shard, number = self._find(document)
        return shard.targets(number)

    def media(self, document: int | np.integer) -> tuple[str, ...]:
        """Return the references to the images, videos and audio of `document`."""
        shard, number = self._find(document)
        return shard.media(number)

    def has_media(self, start: int, stop: int) -> np.ndarray:
        """Return a mask of the documents `start:stop` that have images, videos or audio."""
        parts = [self.shard(number).has_media(begin, end) for number, begin, end in self._parts(start, stop)]
        return np.concatenate([np.zeros(0, bool), *parts])

    def name(self, document: int | np.integer) -> str:
        """Return the name of `document` for messages: its number in its source, counted from 1, and the source."""
        self._find(document)
        number = int(np.searchsorted(self._ends, document, "right"))
        source = self._shards[number][0]
        first = next(shard for shard, (name, _, _) in enumerate(self._shards) if name == source)
        return f"document {int(document) - self._begin(first) + 1:,} of {source.partition(':')[2]}"

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges of all documents, for `sizes`, `has_media` and `is_held_out`."""
        for start in range(0, len(self), DOCUMENTS_AT_ONCE):
            yield start, min(start + DOCUMENTS_AT_ONCE, len(self))

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the number of tokens, with separators, of each of the documents `start:stop`, in int64."""
        return self._values("size", start, stop)

    def is_held_out(self, start: int, stop: int) -> np.ndarray:
        """Return a mask of the documents `start:stop` that are held out."""
        hashes, (below, equal) = self._values("split_hash", start, stop), self._held_out
        return (hashes < below) | (hashes == equal) if equal is not None else hashes < below

    @property
    def content_hash(self) -> str:
        """Hash of the settings, the tokenizer, and the names and contents of the sources in any order.

        The settings are the text field, the split and, if there are conversations, the chat template.
        """
        return self.manifest["fingerprint"]

    @functools.cached_property  # the iterator's state, which is read after each step, contains it
    def order_hash(self) -> str:
        """Hash of the contents of the sources in their order."""
        names = dict.fromkeys(name for name, _, _ in self._shards)
        return checksum(" ".join(self.manifest["sources"][name]["hash"] for name in names).encode())

    def counts(self, split: str) -> CorpusStats:
        """Return the counts of `split`, "train" or "held_out"."""
        return CorpusStats(**self.manifest["counts"][split])

    def report(self) -> list[str]:
        """Return sentences on the records that were left out, and warnings (see `ReadReport`)."""
        dropped, notes = (collections.Counter(self.manifest.get(name, {})) for name in ("dropped", "notes"))
        return ReadReport(dropped, notes).lines(len(self))

    def documents_of(self, kind: str) -> int:
        """Return the number of documents of the training data (TRAIN) or of separate held-out data (HELD_OUT_DATA)."""
        return sum(documents for source, _, documents in self._shards if source.startswith(kind))

    def check_ids(self, vocab_size: int, placeholders: Sequence[int] = ()) -> None:
        """Raise DataError for a document with a token id that is not below `vocab_size`. Reads all tokens.

        placeholders: ids of tokens that features replace, which need no row of the embedding.
        """
        with StatusLine("checking token ids", remains=KEPT):
            for number, (source, _, _) in enumerate(self._shards):
                shard = self.shard(number)
                positions = np.flatnonzero(shard.tokens >= vocab_size)
                positions = positions[~np.isin(shard.tokens[positions], placeholders)]
                if len(positions) > 0:
                    position, beyond = int(positions[0]), int(shard.tokens[positions[0]])
                    document = int(np.searchsorted(shard.offsets, position, "right")) - 1
                    raise DataError(
                        f"{source}: document {document} (counted from 0) of its shard {number} has the token id "
                        f"{beyond}, but the vocab_size of the model is {vocab_size}. Remove such documents, or use a "
                        "model with a larger vocabulary."
                    )

    @property
    def shard_count(self) -> int:
        """Number of shards; `shard(number)` opens one."""
        return len(self._shards)

    def _values(self, field: str, start: int, stop: int) -> np.ndarray:
        """Return a field of DOCUMENT for the documents `start:stop`."""
        parts = self._parts(start, stop)
        if self._index is not None:
            return np.array(self._index[field][start:stop])
        return np.concatenate([np.zeros(0, DOCUMENT[field]), *(self._values_in(field, *part) for part in parts)])

    def _values_in(self, field: str, number: int, begin: int, end: int) -> np.ndarray:
        """Return a field of documents of one shard. Separate held-out data has the split hash -1, below all others."""
        if field == "size":
            return self.shard(number).sizes(begin, end)
        is_separate = self._shards[number][0].startswith(HELD_OUT_DATA)
        return np.full(end - begin, -1.0) if is_separate else self.shard(number).split_hashes[begin:end]

    @functools.cached_property
    def _index(self) -> np.ndarray | None:
        """Sizes and split hashes of all documents, in one memory-mapped file; None for few shards.

        Rows are planned from them, thousands of documents at a time. With many small sources, these documents would be
        in thousands of files.
        """
        if len(self._shards) <= MAX_OPEN:
            return None
        content = json.dumps([(name[:1], key) for name, key, _ in self._shards])
        file = self._folder / f"{checksum(content.encode())}.documents"
        if not file.is_file() or file.stat().st_size != len(self) * DOCUMENT.itemsize:
            status = StatusLine("listing documents", remains=KEPT)
            with status, writing_to(file.parent), atomic_stream(file) as stream:
                for number, (_, _, documents) in enumerate(self._shards):
                    listed = np.empty(documents, DOCUMENT)
                    for field in DOCUMENT.names or ():
                        listed[field] = self._values_in(field, number, 0, documents)
                    stream.write(listed.tobytes())
        return np.asarray(np.memmap(file, DOCUMENT, "r", shape=(len(self),)))

    def _find(self, document: int | np.integer) -> tuple[Shard, int]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} is not in a store of {len(self)} documents")
        number = int(np.searchsorted(self._ends, document, "right"))
        return self.shard(number), int(document) - self._begin(number)

    def _begin(self, number: int) -> int:
        return int(self._ends[number]) - self._shards[number][2]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Return (shard, begin, end) for each shard with documents of `start:stop`."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start}:{stop} are not in a store of {len(self)} documents")
        numbers = range(np.searchsorted(self._ends, start, "right"), np.searchsorted(self._ends, stop, "left") + 1)
        begins = ((number, self._begin(number)) for number in numbers if start < stop)
        parts = ((n, max(start - begin, 0), min(stop - begin, self._shards[n][2])) for n, begin in begins)
        return ((number, begin, end) for number, begin, end in parts if begin < end)
