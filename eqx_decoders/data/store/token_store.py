"""Tokens of a corpus, made once for all runs: shards in a shared cache, and in the run's directory which of them.

A corpus is a list of sources, a source one shard or, if it is large, several (`data.store.shards`). The documents are
those of the training data in their order, then those of held-out data of its own. Which of the former are held out
follows from a number that each draws by its hash, so another share of them needs no new tokens.

The manifest in the run's directory has the sources with their hashes and the shards with their numbers of documents. A
run that goes on with it has the same data; shards that the cache has lost are made again.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.data.media_documents import MediaReader
from eqx_decoders.data.sources.readers import Part, parts_of
from eqx_decoders.data.sources.sources import DATA, HELD_OUT, Entry, Paths, Source, describe_sources, find_sources
from eqx_decoders.data.store.corpus import held_out_draws, read_documents
from eqx_decoders.data.store.corpus_stats import CorpusStats, count
from eqx_decoders.data.store.length_index import DOCUMENT, open_list
from eqx_decoders.data.store.shards import Shard, ShardInfo, read_info, write_shard
from eqx_decoders.data.store.tokenization import Recipe, ShardTask, job_of, make_shards, shard_path
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.atomic_files import cache_directory, write_atomically, writing_to
from eqx_decoders.io.file_lock import locked
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer


FORMAT = 1
DRAWS = 2  # the rule by which documents with files are drawn; 1, which manifests do not say, is no longer known
MOST_OPEN = 1024  # shards that are mapped into memory at a time; of more there is a list of documents
FLAGS = {name: "--" + name.replace("_", "-") for name in ("tokenizer", "text_field", "chat_template")}
AT_ONCE = 1 << 20  # documents whose sizes are looked at together
TRAIN, OWN = "train:", "held_out:"  # before the names of sources


class TokenStore:
    """The finished tokens of a corpus; `store[i]` are those of document `i`.

    Of the documents only as much is in memory as is asked for; files are opened when they are needed.
    """

    def __init__(self, manifest: Mapping[str, Any], folder: Path):
        self.manifest, self._folder = manifest, folder
        self._shards: list[tuple[str, str, int]] = [
            (one["source"], one["key"], one["documents"]) for one in _rows(manifest)
        ]
        self._ends = np.cumsum([documents for _, _, documents in self._shards], dtype=np.int64)
        self._draws: tuple[float, float | None] = (manifest["held_out"]["below"], manifest["held_out"]["equal"])
        self.has_targets: bool = manifest["has_targets"]
        keys = [key for _, key, _ in self._shards]  # of which a cache refers to no more than to these
        self.shard = functools.lru_cache(MOST_OPEN)(lambda number: Shard(folder / f"{keys[number]}.tokens"))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, document: int | np.integer) -> np.ndarray:
        shard, number = self._find(document)
        return shard[number]

    def targets(self, document: int | np.integer) -> np.ndarray:
        """Which tokens of `document` are targets; the first never is."""
        shard, number = self._find(document)
        return shard.targets(number)

    def media(self, document: int | np.integer) -> tuple[str, ...]:
        """What `document` says of its images."""
        shard, number = self._find(document)
        return shard.media(number)

    def has_media(self, start: int, stop: int) -> np.ndarray:
        """Whether each of the documents from `start` up to `stop` has images."""
        return self._over(start, stop, lambda number, begin, end: self.shard(number).has_media(begin, end), np.bool_)

    def name(self, document: int | np.integer) -> str:
        """What errors call `document`: its number in its source, from 1, and the source."""
        self._find(document)
        number = int(np.searchsorted(self._ends, document, "right"))
        source = self._shards[number][0]
        first = next(place for place, (name, _, _) in enumerate(self._shards) if name == source)
        return f"document {int(document) - self._begin(first) + 1:,} of {source.partition(':')[2]}"

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Some of the documents at a time: what `sizes`, `has_media` and `is_held_out` take."""
        for start in range(0, len(self), AT_ONCE):
            yield start, min(start + AT_ONCE, len(self))

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Tokens of each of the documents from `start` up to `stop`, with its separators, as int64."""
        if self._list is not None:
            return self._listed(self._list["size"], start, stop)
        return self._over(start, stop, lambda number, begin, end: self.shard(number).sizes(begin, end), np.int64)

    def is_held_out(self, start: int, stop: int) -> np.ndarray:
        """Whether each of the documents from `start` up to `stop` is held out."""
        if self._list is None:
            draws = self._over(start, stop, self._draws_of, np.float64)
        else:
            draws = self._listed(self._list["draw"], start, stop)
        below, equal = self._draws
        return (draws < below) | (draws == equal) if equal is not None else draws < below

    @property
    def content_hash(self) -> str:
        """Equal for equal settings, tokenizers and sources, wherever, whenever and in which order they were read.

        The settings are the text field, which documents are held out and, where there are conversations, the chat
        template; of sources their names and contents.
        """
        return self.manifest["fingerprint"]

    @property
    def order_hash(self) -> str:
        """Equal for equal contents in the same order."""
        names = dict.fromkeys(name for name, _, _ in self._shards)
        return _digest(" ".join(self.manifest["sources"][name]["hash"] for name in names))

    def counts(self, split: str) -> CorpusStats:
        """How much there is of `split`."""
        return CorpusStats(**self.manifest["counts"][split])

    def documents_of(self, kind: str) -> int:
        """Documents of the data that are trained on and held out by share (TRAIN), or of held-out data (OWN)."""
        return sum(documents for source, _, documents in self._shards if source.startswith(kind))

    def check_ids(self, vocab_size: int, placeholders: Sequence[int] = ()) -> None:
        """Raise DataError where a document has an id that a model of so many has not. All tokens are looked at.

        placeholders: ids in whose places features stand, so that they need no row of the model's table.
        """
        with StatusLine("looking for ids that the model does not have", kept="the tokens are kept"):
            for number, (source, _, _) in enumerate(self._shards):
                shard = self.shard(number)
                places = np.flatnonzero(shard.tokens >= vocab_size)
                places = places[~np.isin(shard.tokens[places], placeholders)]
                if len(places) > 0:
                    place, beyond = int(places[0]), int(shard.tokens[places[0]])
                    document = int(np.searchsorted(shard.offsets, place, "right")) - 1
                    where = f"{source}: document {document} (from 0) of its shard {number} has the id {beyond}"
                    remedy = "leave such documents out, or choose a model with a larger table"
                    raise DataError(f"{where}, and the model only ids below {vocab_size}: {remedy}.")

    @property
    def shard_count(self) -> int:
        """How many shards there are; `shard(number)` opens one."""
        return len(self._shards)

    def _draws_of(self, number: int, begin: int, end: int) -> np.ndarray:
        """The draws of some documents of a shard; of held-out data of its own one that is below all others."""
        own = self._shards[number][0].startswith(OWN)
        return np.full(end - begin, -1.0) if own else self.shard(number).draws[begin:end]

    @functools.cached_property
    def _list(self) -> np.ndarray | None:
        """Sizes and draws of all documents, where there are too many shards to look into each of them."""
        if len(self._shards) <= MOST_OPEN:
            return None
        file = self._folder / f"{_digest(json.dumps([(name[:1], key) for name, key, _ in self._shards]))}.documents"
        return open_list(file, len(self), map(self._documents_in, range(len(self._shards))))

    def _documents_in(self, number: int) -> np.ndarray:
        found = np.empty(self._shards[number][2], DOCUMENT)
        found["size"] = self.shard(number).sizes(0, len(found))
        found["draw"] = self._draws_of(number, 0, len(found))
        return found

    def _listed(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start} to {stop} of {len(self)}")
        return np.array(values[start:stop])

    def _find(self, document: int | np.integer) -> tuple[Shard, int]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        number = int(np.searchsorted(self._ends, document, "right"))
        return self.shard(number), int(document) - self._begin(number)

    def _begin(self, number: int) -> int:
        return int(self._ends[number]) - self._shards[number][2]

    def _over(self, start: int, stop: int, read: Any, dtype: Any) -> np.ndarray:
        """`read(shard, begin, end)` of the shards in which the documents are, one behind the other."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start} to {stop} of {len(self)}")
        parts, number = [np.zeros(0, dtype)], int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            begin, end = self._begin(number), min(stop, int(self._ends[number]))
            if end > start:
                parts.append(read(number, start - begin, end - begin))
            start, number = max(start, end), number + 1
        return np.concatenate(parts)


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
) -> TokenStore:
    """Open the tokens of a corpus, making those that the cache doesn't have.

    `folder`, of the run, keeps which data they are; `cache_dir` (None: that of the user) the tokens themselves. All
    processes that share the cache take part in making them. `template` writes conversations as texts. With a
    `held_out_fraction` of 1 all documents are held out, and errors name the flag of held-out data.

    Raises DataError if the files, the tokenizer, the split or, where there are conversations, the template are not
    those of the manifest in `folder`, and says what changed.
    """
    folder, cache, all_held_out = Path(folder), cache_directory(cache_dir), held_out_fraction >= 1
    request = {
        "format": FORMAT,
        "tokenizer": tokenizer.content_hash,
        "text_field": text_field,
        "held_out_fraction": 0.0 if held_out_path or all_held_out else held_out_fraction,
        "own_held_out_path": held_out_path is not None,
    }
    recipe = Recipe(tokenizer, text_field, template, media)
    shards = cache / "tokens" / recipe.digest
    flag = HELD_OUT if all_held_out else DATA
    sources = {TRAIN + one.name: one for one in find_sources(path, flag)}
    sources |= {OWN + one.name: one for one in (find_sources(held_out_path, HELD_OUT) if held_out_path else ())}
    manifest = read_manifest(folder)
    with writing_to(cache):
        entries = describe_sources(sources, manifest["sources"] if manifest else {}, cache)
    if manifest is not None:
        _check_unchanged(folder, manifest, request, entries, template)
    jobs = _jobs(sources, entries, manifest, media)
    with writing_to(cache):
        make_shards(shards, [job for _, job in jobs], recipe)
    if manifest is not None and media is not None and media.reads_files:
        _check_draws(folder, manifest, [_info(shards, job) for _, job in jobs])
    with locked(folder / "lock"):
        made = read_manifest(folder)
        counted = made is not None and (not all_held_out or made["held_out"]["below"] >= 1)
        if made is None or not counted:  # or it was counted as what is trained on
            _check_any([_info(shards, job).documents for _, job in jobs], flag, path)
            made = _new_manifest(shards, jobs, recipe, request, entries, cache, all_held_out)
            made["fingerprint"] = manifest["fingerprint"] if manifest else made["fingerprint"]
            write_atomically(folder / "manifest.json", json.dumps(made, indent=1).encode())
        elif manifest is None:  # written by another process meanwhile
            _check_unchanged(folder, made, request, entries, template)
    keys = {(name, job.part): job.key for name, job in jobs}  # that earlier versions had others for
    rows = [row | {"key": keys.get((row["source"], _part(row)), row["key"])} for row in _rows(made)]
    return TokenStore(made | {"shards": rows}, shards)


def open_sample(
    folder: str | Path,
    tokenizer: Tokenizer,
    most: int,
    *,
    path: Paths = None,
    held_out_path: Paths = None,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
    template: ChatTemplate | None = None,
    media: MediaReader | None = None,
) -> TokenStore:
    """The first `most` documents of a corpus, to look at them: their tokens are written to `folder` and not kept."""
    folder, recipe = Path(folder), Recipe(tokenizer, text_field, template, media)
    folder.mkdir(parents=True, exist_ok=True)
    infos: list[tuple[str, str, ShardInfo]] = []
    for name, each, flag in ((TRAIN, path, DATA), (OWN, held_out_path, HELD_OUT)):
        if name == TRAIN or each:
            found = read_documents(each, text_field=text_field, tokenizer=tokenizer, flag=flag)
            file, key = folder / f"{name[:-1]}.tokens", name[:-1]
            some = itertools.islice(found, most)
            infos.append((name, key, write_shard(file, some, tokenizer, template, media=media)))
    rows = [{"source": name, "part": None, "key": key, "documents": info.documents} for name, key, info in infos]
    fraction = 0.0 if held_out_path else held_out_fraction
    manifest = _described([info for _, _, info in infos], infos[0][2:], fraction) | {"shards": rows, "sources": {}}
    _check_any([info.documents for _, _, info in infos], DATA, path)
    manifest["counts"] = count(TokenStore(manifest, folder), None, recipe)
    return TokenStore(manifest | {"fingerprint": ""}, folder)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What a run's directory says of its data; None if it says nothing. Raises DataError for another file's content."""
    file = folder / "manifest.json"
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):  # none, or one that was cut short
        return None
    own = isinstance(found, dict) and {"sources", "fingerprint", "shards"} <= found.keys()
    check(own, f"{file} is no manifest of tokens: give another folder, or move it.", DataError)
    return found


def is_made(folder: Path, cache_dir: str | Path | None, recipe: Recipe) -> bool:
    """Whether the tokens of a run's manifest are all in the cache."""
    manifest, shards = read_manifest(folder), cache_directory(cache_dir) / "tokens" / recipe.digest
    rows = _rows(manifest) if manifest is not None and "shards" in manifest else []
    return bool(rows) and all(read_info(shards / f"{row['key']}.tokens") is not None for row in rows)


def _rows(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return manifest["shards"]


def _part(row: Mapping[str, Any]) -> Part | None:
    return None if row["part"] is None else (row["part"][0], row["part"][1])


def _jobs(
    sources: Mapping[str, Source],
    entries: Mapping[str, Entry],
    manifest: Mapping[str, Any] | None,
    media: MediaReader | None,
) -> list[tuple[str, ShardTask]]:
    """A job for each part of each source, as the manifest has cut them."""
    parts: dict[str, list[Part | None]] = {}
    for row in _rows(manifest) if manifest is not None and "shards" in manifest else []:
        parts.setdefault(row["source"], []).append(_part(row))
    found = []
    for name, source in sources.items():
        here = parts.get(name) or parts_of(source, entries[name]["size"])
        found += [(name, job_of(source, entries[name], part, len(here), media)) for part in here]
    return found


def _new_manifest(
    shards: Path,
    jobs: list[tuple[str, ShardTask]],
    recipe: Recipe,
    request: Mapping[str, Any],
    entries: Mapping[str, Entry],
    cache: Path,
    all_held_out: bool,
) -> dict[str, Any]:
    infos = [_info(shards, job) for _, job in jobs]
    rows = [
        {"source": name, "part": job.part, "key": job.key, "documents": info.documents}
        for (name, job), info in zip(jobs, infos, strict=True)
    ]
    trained = [info for (name, _), info in zip(jobs, infos, strict=True) if name.startswith(TRAIN)]
    described = _described(infos, trained, 1.0 if all_held_out else request["held_out_fraction"])
    if recipe.template is not None and any(info.has_chats for info in infos):
        request = {**request, "chat_template": recipe.template.content_hash}
    content = json.dumps([request, {name: one["hash"] for name, one in entries.items()}], sort_keys=True)
    fingerprint = _digest(content)
    described["draws"] = DRAWS
    manifest = {**request, **described, "sources": dict(entries), "fingerprint": fingerprint, "shards": rows}
    file = cache / "counts" / f"{fingerprint}.{recipe.digest}{'.held_out' * all_held_out}.json"
    manifest["counts"] = _counts(TokenStore(manifest, shards), [job for _, job in jobs], recipe, file)
    return manifest


def _described(infos: list[ShardInfo], trained: Any, fraction: float) -> dict[str, Any]:
    """What a store needs to know of its shards beside their numbers of documents."""
    smallest = min((info.smallest for info in trained), default=1.0)
    largest = max((info.largest for info in trained), default=0.0)
    below, equal = held_out_draws(fraction, smallest, largest)
    has_targets = any("targets" in info.sections for info in infos)
    return {"held_out": {"below": below, "equal": equal}, "has_targets": has_targets}


def _counts(store: TokenStore, jobs: list[ShardTask], recipe: Recipe, file: Path) -> dict[str, Any]:
    """The counts of a corpus, which are kept in the cache, too."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        with StatusLine("counting", kept="the tokens are kept"):
            found = count(store, jobs, recipe)
        with writing_to(file.parent):
            write_atomically(file, json.dumps(found).encode())
        return found


def _digest(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _info(shards: Path, job: ShardTask) -> ShardInfo:
    info = read_info(shard_path(shards, job))
    if info is None:
        raise DataError(
            f"{shard_path(shards, job)} was made and is gone: does something delete the cache? Start again."
        )
    return info


def _check_any(documents: list[int], flag: str, path: Paths) -> None:
    check(any(documents), f"{flag} {path!r} holds no text, or nothing that is trained on.", DataError)


def _check_draws(folder: Path, manifest: Mapping[str, Any], infos: list[ShardInfo]) -> None:
    """Raise DataError where the run's documents were held out by another rule: what it has learned would be among them.

    The draws of documents without files are the same by all rules.
    """
    same = manifest.get("draws") == DRAWS or not any("media" in info.sections for info in infos)
    rule = f"the data of {folder} name images or videos, and an earlier version held others of them out"
    remedy = "export it (scripts/convert.py export), and begin a new run directory with --init-from that export"
    check(same, f"{rule}: this run can't go on with this one. To train further, {remedy}.", DataError)


def _held_out_part(settings: Mapping[str, Any]) -> str:
    own = settings.get("own_held_out_path")
    return "the data of --held-out" if own else f"--held-out-fraction {settings.get('held_out_fraction')}"


def _check_unchanged(
    folder: Path,
    manifest: Mapping[str, Any],
    request: Mapping[str, Any],
    entries: Mapping[str, Entry],
    template: ChatTemplate | None,
) -> None:
    """Raise DataError with every difference between the run's data and what is asked for."""
    if "chat_template" in manifest:
        request = {**request, "chat_template": None if template is None else template.content_hash}
    changes = [
        f"{FLAGS.get(key, key)} was {manifest.get(key)!r} and is {now!r}"
        for key, now in request.items()
        if manifest.get(key) != now and key not in ("held_out_fraction", "own_held_out_path")
    ]
    was, now = _held_out_part(manifest), _held_out_part(request)
    changes += [f"held out was {was} and is {now}"] * (was != now)
    old = manifest["sources"]
    if was != now:  # a file that comes or goes with them is no change of its own
        old = {name: entry for name, entry in old.items() if not name.startswith(OWN)}
        entries = {name: entry for name, entry in entries.items() if not name.startswith(OWN)}
    changes += [f"{name} is gone" for name in old if name not in entries]
    changes += [f"{name} is new" for name in entries if name not in old]
    changes += [
        f"{name} has other contents"
        for name, now in entries.items()
        if name in old and old[name]["hash"] != now["hash"]
    ]
    if changes:
        listed = "; ".join(changes[:8]) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
        raise DataError(
            f"the data are not those of the tokens in {folder}: {listed}. "
            "Restore them to go on with this run, or start another run directory."
        )
