"""Opening of a corpus's tokens, which are made once for all runs: shards in a shared cache, a manifest in each run.

A corpus is a list of sources, a source one shard or, if it is large, several (`data.store.shards`). The documents are
those of the training data in their order, then those of held-out data of its own. Each document of the training data
draws a number from its hash, and the draws decide which are held out: another share of them needs no new tokens.
"""

import collections
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import ReadReport, counted
from eqx_decoders.data.sources.readers import Part, parts_of
from eqx_decoders.data.sources.sources import DATA, HELD_OUT, Entry, Paths, Source, describe_sources, find_sources
from eqx_decoders.data.store.corpus import read_documents
from eqx_decoders.data.store.count_corpus import count_corpus
from eqx_decoders.data.store.shard_tasks import Recipe, ShardTask, make_task, shard_path
from eqx_decoders.data.store.shard_writer import write_shard
from eqx_decoders.data.store.shards import ShardInfo, checksum, read_info
from eqx_decoders.data.store.token_manifest import (
    check_unchanged,
    describe_shards,
    part_of,
    read_manifest,
)
from eqx_decoders.data.store.token_store import OWN, TRAIN, TokenStore
from eqx_decoders.data.store.tokenization import make_shards
from eqx_decoders.errors import DataError
from eqx_decoders.io.atomic_files import cache_directory, write_atomically, writing_to
from eqx_decoders.io.file_lock import file_lock
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer


FORMAT = 1


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
) -> TokenStore:
    """Open the tokens of a corpus, making those that the cache doesn't have.

    `folder`, of the run, keeps the manifest; `cache_dir` (None: the user's) the tokens themselves. All processes that
    share the cache take part in making them. `template` writes conversations as texts. With a `held_out_fraction`
    of 1 all documents are held out, and errors name the flag of held-out data.

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
    if special_tokens_in_text is not None:
        request["special_tokens_in_text"] = special_tokens_in_text
    recipe = Recipe(tokenizer, text_field, template, media, special_tokens_in_text)
    shards = cache / "tokens" / recipe.digest
    flag = HELD_OUT if all_held_out else DATA
    sources = {TRAIN + source.name: source for source in find_sources(path, flag)}
    if held_out_path:
        sources |= {OWN + source.name: source for source in find_sources(held_out_path, HELD_OUT)}
    manifest = read_manifest(folder)
    with writing_to(cache):
        entries = describe_sources(sources, manifest["sources"] if manifest else {}, cache)
    if manifest is not None:
        check_unchanged(folder, manifest, request, entries, template)
    tasks = _tasks(sources, entries, manifest, media)
    with writing_to(cache):
        make_shards(shards, [task for _, task in tasks], recipe)
    corpus = _Corpus(shards, tasks, recipe, request, entries)
    with file_lock(folder / "lock"):
        current = read_manifest(folder)
        # counted as training data before, if only now all of it is held out
        counted = current is not None and (not all_held_out or current["held_out"]["below"] >= 1)
        if current is None or not counted:
            _check_any([_info(shards, task) for _, task in tasks], flag, path)
            current = _new_manifest(corpus, cache, all_held_out)
            current["fingerprint"] = manifest["fingerprint"] if manifest else current["fingerprint"]
            write_atomically(folder / "manifest.json", json.dumps(current, indent=1).encode())
        elif manifest is None:  # written by another process meanwhile
            check_unchanged(folder, current, request, entries, template)
    keys = {(name, task.part): task.key for name, task in tasks}  # another folder of images, another key
    rows = [row | {"key": keys.get((row["source"], part_of(row)), row["key"])} for row in current["shards"]]
    return TokenStore(current | {"shards": rows}, shards)


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
    special_tokens_in_text: bool | None = None,
) -> TokenStore:
    """Open the first `most` documents of a corpus for a preview: their tokens are written to `folder`, not cached."""
    folder, recipe = Path(folder), Recipe(tokenizer, text_field, template, media, special_tokens_in_text)
    folder.mkdir(parents=True, exist_ok=True)
    infos: list[tuple[str, str, ShardInfo]] = []
    for name, paths, flag in ((TRAIN, path, DATA), (OWN, held_out_path, HELD_OUT)):
        if name == TRAIN or paths:
            report = ReadReport()
            documents = read_documents(paths, text_field=text_field, tokenizer=tokenizer, flag=flag, report=report)
            file, key = folder / f"{name[:-1]}.tokens", name[:-1]
            first = itertools.islice(documents, most)
            info = write_shard(
                file,
                first,
                tokenizer,
                template,
                media=media,
                special_tokens_in_text=special_tokens_in_text,
                report=report,
            )
            infos.append((name, key, info))
    rows = [{"source": name, "part": None, "key": key, "documents": info.documents} for name, key, info in infos]
    fraction = 0.0 if held_out_path else held_out_fraction
    described = describe_shards([info for _, _, info in infos], [infos[0][2]], fraction)
    manifest = described | {"shards": rows, "sources": {}}
    _check_any([info for _, _, info in infos], DATA, path)
    manifest["counts"] = count_corpus(TokenStore(manifest, folder), None, recipe)
    return TokenStore(manifest | {"fingerprint": ""}, folder)


def is_made(folder: Path, cache_dir: str | Path | None, recipe: Recipe) -> bool:
    """Return whether the tokens of a run's manifest are all in the cache."""
    manifest, shards = read_manifest(folder), cache_directory(cache_dir) / "tokens" / recipe.digest
    rows = manifest["shards"] if manifest is not None else []
    return bool(rows) and all(read_info(shards / f"{row['key']}.tokens") is not None for row in rows)


class _Corpus(NamedTuple):
    """Corpus whose shards are made: their folder, their tasks with the names of their sources, recipe and request."""

    shards: Path
    tasks: list[tuple[str, ShardTask]]
    recipe: Recipe
    request: Mapping[str, Any]
    entries: Mapping[str, Entry]


def _tasks(
    sources: Mapping[str, Source],
    entries: Mapping[str, Entry],
    manifest: Mapping[str, Any] | None,
    media: MediaReader | None,
) -> list[tuple[str, ShardTask]]:
    """Return a task for each part of each source, cut as in the manifest if there is one."""
    cut: dict[str, list[Part | None]] = {}
    for row in manifest["shards"] if manifest is not None else []:
        cut.setdefault(row["source"], []).append(part_of(row))
    tasks = []
    for name, source in sources.items():
        parts = cut.get(name) or parts_of(source, entries[name]["size"])
        tasks += [(name, make_task(source, entries[name], part, len(parts), media)) for part in parts]
    return tasks


def _new_manifest(corpus: _Corpus, cache: Path, all_held_out: bool) -> dict[str, Any]:
    shards, tasks, recipe, request, entries = corpus
    infos = [_info(shards, task) for _, task in tasks]
    rows = [
        {"source": name, "part": task.part, "key": task.key, "documents": info.documents}
        for (name, task), info in zip(tasks, infos, strict=True)
    ]
    trained = [info for (name, _), info in zip(tasks, infos, strict=True) if name.startswith(TRAIN)]
    described = describe_shards(infos, trained, 1.0 if all_held_out else request["held_out_fraction"])
    if recipe.template is not None and any(info.has_chats for info in infos):
        request = {**request, "chat_template": recipe.template.content_hash}
    content = json.dumps([request, {name: entry["hash"] for name, entry in entries.items()}], sort_keys=True)
    fingerprint = checksum(content.encode())
    manifest = {**request, **described, "sources": dict(entries), "fingerprint": fingerprint, "shards": rows}
    file = cache / "counts" / f"{fingerprint}.{recipe.digest}{'.held_out' * all_held_out}.json"
    manifest["counts"] = _counts(TokenStore(manifest, shards), [task for _, task in tasks], recipe, file)
    return manifest


def _counts(store: TokenStore, tasks: list[ShardTask], recipe: Recipe, file: Path) -> dict[str, Any]:
    """Return the counts of a corpus from the `file` in the cache, which is written if it is missing."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        with StatusLine("counting", remains="the tokens are kept"):
            counts = count_corpus(store, tasks, recipe)
        with writing_to(file.parent):
            write_atomically(file, json.dumps(counts).encode())
        return counts


def _info(shards: Path, task: ShardTask) -> ShardInfo:
    info = read_info(shard_path(shards, task))
    if info is None:
        raise DataError(
            f"{shard_path(shards, task)} was made and is gone: does something delete the cache? Start again."
        )
    return info


def _check_any(infos: list[ShardInfo], flag: str, path: Paths) -> None:
    if not any(info.documents for info in infos):
        dropped = sum((collections.Counter(info.dropped) for info in infos), collections.Counter[str]())
        reasons = (
            f"all of its {dropped.total():,} records are left out: {counted(dropped)}" if dropped else "it is empty"
        )
        raise DataError(f"{flag} {path!r} holds no text, or nothing that is trained on: {reasons}.")
