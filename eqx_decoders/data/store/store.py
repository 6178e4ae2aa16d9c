"""Token store: the tokens of a corpus, in shards of a cache that all runs share.

`open_store` finds the sources of a corpus, writes the shards that are missing in the cache (`tokenize.py`), and writes
`manifest.json` into the run's directory. The manifest lists the sources with hashes of their contents, and the shards
with their numbers of documents. So a resumed run has the same data; shards that have been deleted from the cache are
written again.

A store contains the documents of the training data in order, followed by the documents of separate held-out data. Each
document of the training data has a split hash, which determines whether the document is held out. So a change of the
held-out fraction does not require new tokens.
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
from eqx_decoders.data.sources.documents import ReadReport, describe_drop_counts
from eqx_decoders.data.sources.readers import Part, read_source, split_into_parts
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

MAX_OPEN_SHARDS = 1024  # shards that are memory-mapped at a time; larger corpora have an index of all documents
DOCUMENTS_PER_READ = 1 << 20  # documents whose sizes are read together
DOCUMENT_DTYPE = np.dtype([("size", "<i8"), ("split_hash", "<f8")])
MAX_COMPRESSED = 1 << 30  # the gzip baseline is computed from the held-out text in the first MAX_COMPRESSED bytes


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
    """Open the tokens of a corpus. Sources that are missing in the cache are tokenized.

    All processes that share the cache directory share this work.

    **Arguments:**

    - `folder`: folder of the manifest, in the run's directory.
    - `path`: sources of the training data; None: the standard library of Python.
    - `held_out_path`: sources of separate held-out data.
    - `held_out_fraction`: share of the training documents that is held out, without `held_out_path`. 1: all documents
      are held out, and errors name the flag of held-out data.
    - `template`: chat template that renders conversations.
    - `cache_dir`: directory of the tokens; None: in the user's cache directory.
    - `media`: reader of images, videos and audio.
    - `text_field`, `special_tokens_in_text`: see `DataConfig`.

    Raises DataError that lists all differences if the files, the tokenizer, the split or, with conversations, the
    template differ from the manifest in `folder`.
    """
    folder = Path(folder)
    cache = cache_directory(cache_dir)
    all_held_out = held_out_fraction >= 1
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
        # The counts of an existing manifest are wrong if the documents were training data and all are held out now.
        has_counts = current is not None and (not all_held_out or current["held_out"]["below"] >= 1)
        if current is None or not has_counts:
            _check_not_empty([_info(shards, task) for _, task in tasks], flag, path)
            current = _new_manifest(corpus, cache, all_held_out)
            current["fingerprint"] = manifest["fingerprint"] if manifest else current["fingerprint"]
            write_atomically(folder / "manifest.json", json.dumps(current, indent=1).encode())
        elif manifest is None:  # another process has just written the manifest
            check_unchanged(folder, current, request, entries, template)
    # With images the keys of shards depend on the folder of the source, which may have been moved.
    keys = {(name, task.part): task.key for name, task in tasks}
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
    """Tokenize the first `max_documents` documents of a corpus, for a preview.

    The tokens are written to `folder` and not to the cache. See `open_store` for the other arguments.
    """
    folder = Path(folder)
    config = TokenizationConfig(tokenizer, text_field, template, media, special_tokens_in_text)
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
    _check_not_empty(infos, DATA, path)
    manifest["counts"] = count_corpus(TokenStore(manifest, folder), None, config)
    return TokenStore(manifest | {"fingerprint": ""}, folder)


def is_tokenized(folder: Path, cache_dir: str | Path | None, config: TokenizationConfig) -> bool:
    """Return whether the cache contains all tokens of a run's manifest."""
    manifest = read_manifest(folder)
    shards = cache_directory(cache_dir) / "tokens" / config.digest
    rows = manifest["shards"] if manifest is not None else []
    return bool(rows) and all(read_info(shards / f"{row['key']}.tokens") is not None for row in rows)


def _tasks(
    sources: Mapping[str, Source],
    entries: Mapping[str, Entry],
    manifest: Mapping[str, Any] | None,
    media: MediaReader | None,
) -> list[tuple[str, ShardTask]]:
    """Return the name of the source and the task for each part of each source.

    If there is a manifest, sources are split into the same parts as in the manifest.
    """
    known_parts: dict[str, list[Part | None]] = {}
    for row in manifest["shards"] if manifest is not None else []:
        known_parts.setdefault(row["source"], []).append(part_of(row))
    tasks = []
    for name, source in sources.items():
        parts = known_parts.get(name) or split_into_parts(source, entries[name]["size"])
        tasks += [(name, make_task(source, entries[name], part, len(parts), media)) for part in parts]
    return tasks


def _info(shards: Path, task: ShardTask) -> ShardInfo:
    info = read_info(shard_path(shards, task))
    if info is None:
        raise DataError(
            f"{shard_path(shards, task)} was deleted after it was written. Start again, and check whether another "
            "program deletes files of the cache."
        )
    return info


def _check_not_empty(infos: list[ShardInfo], flag: str, path: Paths) -> None:
    if not any(info.documents for info in infos):
        dropped = sum((collections.Counter(info.dropped) for info in infos), collections.Counter[str]())
        reasons = (
            f"all of its {dropped.total():,} records are skipped: {describe_drop_counts(dropped)}"
            if dropped
            else "it is empty"
        )
        raise DataError(f"{flag} {path!r} contains no documents to train on: {reasons}.")


# --- manifest ---------------------------------------------------------------------------------------------------------


class _Corpus(NamedTuple):
    """Corpus with complete shards.

    - `shards`: folder of the shards.
    - `tasks`: name of the source, and task, of each shard.
    - `request`: settings that are recorded in the manifest.
    - `entries`: entry of each source (see `describe_sources`).
    """

    shards: Path
    tasks: list[tuple[str, ShardTask]]
    config: TokenizationConfig
    request: Mapping[str, Any]
    entries: Mapping[str, Entry]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest in a folder; None if it is missing or incomplete.

    Raises DataError if `manifest.json` has other content.
    """
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError):  # missing or incomplete
        return None
    check(
        isinstance(manifest, dict) and {"sources", "fingerprint", "shards"} <= manifest.keys(),
        f"{file} is not a manifest of tokens. Use another run directory, or move the file.",
        DataError,
    )
    return manifest


def part_of(row: Mapping[str, Any]) -> Part | None:
    """Return the part of the source of a shard in the manifest; None: the shard contains the complete source."""
    return None if row["part"] is None else (row["part"][0], row["part"][1])


def describe_shards(infos: Sequence[ShardInfo], trained: Sequence[ShardInfo], fraction: float) -> dict[str, Any]:
    """Return fields of the manifest: the held-out rule, whether documents have spans of targets, and report counts.

    **Arguments:**

    - `infos`: descriptions of all shards.
    - `trained`: descriptions of the shards of the training data.
    - `fraction`: share of the training data that is held out.
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
    """Raise DataError, with a list of all differences, if the requested data differ from the data of the manifest."""
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
        # The files of separate held-out data follow from this change: do not list them again.
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
            f"the data differ from the data of the run in {folder}: {listed}. Restore the data to resume this run, or "
            "use another run directory."
        )


def _split_text(settings: Mapping[str, Any]) -> str:
    has_path = settings.get("own_held_out_path")
    return "--held-out" if has_path else f"--held-out-fraction {settings.get('held_out_fraction')}"


# --- counts -----------------------------------------------------------------------------------------------------------


def count_corpus(
    store: "TokenStore", tasks: Sequence[ShardTask] | None, config: TokenizationConfig
) -> dict[str, dict[str, Any]]:
    """Return the fields of the `CorpusStats` of each split.

    `tasks`: task of each shard, used to read the held-out text again for the gzip baseline; None: no baseline.
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
    for begin in range(0, len(shard) if held_out.any() else 0, DOCUMENTS_PER_READ):
        end = min(begin + DOCUMENTS_PER_READ, len(shard))
        mask = held_out[begin:end]
        tokens, targets = shard.sizes(begin, end)[mask].sum(), shard.target_counts(begin, end)[mask].sum()
        counts += np.array([mask.sum(), tokens, targets])
    return np.stack([np.array([info.documents, info.tokens, info.targets]) - counts, counts])


def _known_bytes(shard: Shard, held_out: np.ndarray) -> list[int | None]:
    """Return the bytes of text in each split, [train, held_out]; None if a document of the split was read as tokens."""
    parts = (shard.bytes[~held_out], shard.bytes[held_out])
    return [None if (part < 0).any() else int(part.sum()) for part in parts]


def _held_out_texts(task: ShardTask, config: TokenizationConfig, held_out: np.ndarray) -> Iterator[bytes]:
    """Yield the held-out texts of a source.

    The source is read again, because some tokenizers do not preserve every character.
    """
    documents = read_source(task.source, config.read_options(ReadReport()), task.part)
    for document, is_held_out in zip(render_documents(documents, config.template), held_out, strict=True):
        if is_held_out:
            text = trained_text(document)
            yield (config.tokenizer.decode(np.asarray(document.tokens)) if text is None else text).encode()


def _decoded_texts(shard: Shard, tokenizer: Tokenizer, held_out: np.ndarray) -> Iterator[bytes]:
    """Yield the text of each held-out document, decoded from its tokens.

    Only the number of bytes is needed. So for documents with a known number of bytes, zeros are returned instead.
    """
    start, end = separators(tokenizer)
    for document in np.flatnonzero(held_out).tolist():
        size = int(shard.bytes[document])
        tokens = shard[document][len(start) : None if end is None else -1]
        yield tokenizer.decode(tokens).encode() if size < 0 else bytes(size)


# --- reading ----------------------------------------------------------------------------------------------------------


class TokenStore:
    """Tokens of a corpus: `store[i]` are the tokens of document `i`. Shards are opened when they are needed."""

    def __init__(self, manifest: Mapping[str, Any], folder: Path):
        self.manifest, self._folder = manifest, folder
        self._shards: list[tuple[str, str, int]] = [
            (row["source"], row["key"], row["documents"]) for row in manifest["shards"]
        ]
        self._ends = np.cumsum([documents for _, _, documents in self._shards], dtype=np.int64)
        self._held_out: tuple[float, float | None] = (manifest["held_out"]["below"], manifest["held_out"]["equal"])
        self.has_targets: bool = manifest["has_targets"]
        keys = [key for _, key, _ in self._shards]  # the cached function must not refer to the store
        self.shard = functools.lru_cache(MAX_OPEN_SHARDS)(lambda number: Shard(folder / f"{keys[number]}.tokens"))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, document: int | np.integer) -> np.ndarray:
        shard, number = self._find(document)
        return shard[number]

    def targets(self, document: int | np.integer) -> np.ndarray:
        """Return a mask of the tokens of a document that are targets. The first token is never a target."""
        shard, number = self._find(document)
        return shard.targets(number)

    def media(self, document: int | np.integer) -> tuple[str, ...]:
        """Return the references to the images, videos and audio of a document."""
        shard, number = self._find(document)
        return shard.media(number)

    def has_media(self, start: int, stop: int) -> np.ndarray:
        """Return a mask of the documents `start:stop` that have images, videos or audio."""
        parts = [self.shard(number).has_media(begin, end) for number, begin, end in self._parts(start, stop)]
        return np.concatenate([np.zeros(0, bool), *parts])

    def name(self, document: int | np.integer) -> str:
        """Return a name of a document for messages, such as `document 3 of a.jsonl`, counted from 1."""
        self._find(document)
        number = int(np.searchsorted(self._ends, document, "right"))
        source = self._shards[number][0]
        first = next(shard for shard, (name, _, _) in enumerate(self._shards) if name == source)
        return f"document {int(document) - self._begin(first) + 1:,} of {source.partition(':')[2]}"

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges of all documents, for `sizes`, `has_media` and `is_held_out`."""
        for start in range(0, len(self), DOCUMENTS_PER_READ):
            yield start, min(start + DOCUMENTS_PER_READ, len(self))

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the number of tokens, with separators, of each of the documents `start:stop`, in int64."""
        return self._values("size", start, stop)

    def is_held_out(self, start: int, stop: int) -> np.ndarray:
        """Return a mask of the documents `start:stop` that are held out."""
        hashes = self._values("split_hash", start, stop)
        below, equal = self._held_out
        return (hashes < below) | (hashes == equal) if equal is not None else hashes < below

    @property
    def content_hash(self) -> str:
        """Hash of the tokenizer, the settings, and the names and contents of the sources, independent of their order.

        The settings are the text field, the split and, if there are conversations, the chat template.
        """
        return self.manifest["fingerprint"]

    @functools.cached_property  # read after each step, as part of the state of the data iterator
    def order_hash(self) -> str:
        """Hash of the contents of the sources in their order."""
        names = dict.fromkeys(name for name, _, _ in self._shards)
        return checksum(" ".join(self.manifest["sources"][name]["hash"] for name in names).encode())

    def counts(self, split: str) -> CorpusStats:
        """Return the counts of `split`, "train" or "held_out"."""
        return CorpusStats(**self.manifest["counts"][split])

    def report(self) -> list[str]:
        """Return lines with the counts of skipped records and the warnings (see `ReadReport`)."""
        dropped, notes = (collections.Counter(self.manifest.get(name, {})) for name in ("dropped", "notes"))
        return ReadReport(dropped, notes).lines(len(self))

    def documents_of(self, kind: str) -> int:
        """Return the number of documents of the training data (TRAIN) or of separate held-out data (HELD_OUT_DATA)."""
        return sum(documents for source, _, documents in self._shards if source.startswith(kind))

    def check_ids(self, vocab_size: int, placeholders: Sequence[int] = ()) -> None:
        """Raise DataError if a document has a token id that is not below `vocab_size`. Reads all tokens.

        `placeholders`: ids of placeholder tokens, which are replaced by image or audio features and may be larger.
        """
        with StatusLine("checking token ids", remains=KEPT):
            for number, (source, _, _) in enumerate(self._shards):
                shard = self.shard(number)
                positions = np.flatnonzero(shard.tokens >= vocab_size)
                positions = positions[~np.isin(shard.tokens[positions], placeholders)]
                if len(positions) > 0:
                    position = int(positions[0])
                    document = int(np.searchsorted(shard.offsets, position, "right")) - 1
                    token = int(shard.tokens[position])
                    raise DataError(
                        f"{source}: document {document} (counted from 0) of its shard {number} has the token id "
                        f"{token}, but the vocab_size of the model is {vocab_size}. Remove such documents, or use a "
                        "model with a larger vocabulary."
                    )

    @property
    def shard_count(self) -> int:
        """Number of shards; `shard(number)` opens one."""
        return len(self._shards)

    def _values(self, field: str, start: int, stop: int) -> np.ndarray:
        """Return a field of `DOCUMENT_DTYPE` for the documents `start:stop`."""
        parts = self._parts(start, stop)
        if self._index is not None:
            return np.array(self._index[field][start:stop])
        return np.concatenate([np.zeros(0, DOCUMENT_DTYPE[field]), *(self._values_in(field, *part) for part in parts)])

    def _values_in(self, field: str, number: int, begin: int, end: int) -> np.ndarray:
        """Return a field for the documents `begin:end` of shard `number`.

        Documents of separate held-out data have the split hash -1, which is always below the threshold.
        """
        if field == "size":
            return self.shard(number).sizes(begin, end)
        is_separate = self._shards[number][0].startswith(HELD_OUT_DATA)
        return np.full(end - begin, -1.0) if is_separate else self.shard(number).split_hashes[begin:end]

    @functools.cached_property
    def _index(self) -> np.ndarray | None:
        """Sizes and split hashes of all documents, in a memory-mapped file; None if there are few shards.

        Rows are planned from the sizes of thousands of consecutive documents. With many small sources, thousands of
        shards would have to be opened for each plan.
        """
        if len(self._shards) <= MAX_OPEN_SHARDS:
            return None
        content = json.dumps([(name[:1], key) for name, key, _ in self._shards])
        file = self._folder / f"{checksum(content.encode())}.documents"
        if not file.is_file() or file.stat().st_size != len(self) * DOCUMENT_DTYPE.itemsize:
            status = StatusLine("listing documents", remains=KEPT)
            with status, writing_to(file.parent), atomic_stream(file) as stream:
                for number, (_, _, documents) in enumerate(self._shards):
                    listed = np.empty(documents, DOCUMENT_DTYPE)
                    for field in DOCUMENT_DTYPE.names or ():
                        listed[field] = self._values_in(field, number, 0, documents)
                    stream.write(listed.tobytes())
        return np.asarray(np.memmap(file, DOCUMENT_DTYPE, "r", shape=(len(self),)))

    def _find(self, document: int | np.integer) -> tuple[Shard, int]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} is not in a store of {len(self)} documents")
        number = int(np.searchsorted(self._ends, document, "right"))
        return self.shard(number), int(document) - self._begin(number)

    def _begin(self, number: int) -> int:
        return int(self._ends[number]) - self._shards[number][2]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shard, and the range of documents in the shard, for each shard with documents of `start:stop`."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start}:{stop} are not in a store of {len(self)} documents")
        numbers = range(np.searchsorted(self._ends, start, "right"), np.searchsorted(self._ends, stop, "left") + 1)
        begins = ((number, self._begin(number)) for number in numbers if start < stop)
        parts = ((n, max(start - begin, 0), min(stop - begin, self._shards[n][2])) for n, begin in begins)
        return ((number, begin, end) for number, begin, end in parts if begin < end)
