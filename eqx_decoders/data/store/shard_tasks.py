"""Tasks of tokenization: which part of a source becomes a shard, by which recipe, and how it is made.

Worker processes import this (`tokenization_worker`), and for texts neither JAX nor a model's layers.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import ReadReport
from eqx_decoders.data.sources.hub_datasets import HubDataset
from eqx_decoders.data.sources.readers import LONG, PIECE, Part, ReadOptions, kind_of, read_source
from eqx_decoders.data.sources.sources import Entry, Source, folder_of, hash_json, is_as_described, parse_location
from eqx_decoders.data.store.shard_lock import GONE, copy_path
from eqx_decoders.data.store.shard_writer import separators, write_shard
from eqx_decoders.data.store.shards import FORMAT, read_info
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.atomic_files import writing_to
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Recipe of tokens: everything that they depend on besides their source."""

    tokenizer: Tokenizer
    text_field: str
    template: ChatTemplate | None
    media: MediaReader | None = None
    special_tokens_in_text: bool | None = None

    @property
    def digest(self) -> str:
        """Hash of the recipe."""
        tokenizer = self.tokenizer
        template = None if self.template is None else self.template.content_hash
        form = [FORMAT, LONG, PIECE] + ([] if self.media is None else [self.media.digest()])
        ids = [tokenizer.content_hash, tokenizer.vocab_size, separators(tokenizer), tokenizer.bos_id]
        return hash_json([form, *ids, self.text_field, template, self.special_tokens_in_text])

    @property
    def reading(self) -> ReadOptions:
        """Options for the readers of sources."""
        return ReadOptions(self.text_field, self.tokenizer)


class ShardTask(NamedTuple):
    """Task of making one shard from a source, or from a part of it.

    size: bytes of the source or part; None: unknown. seen: bytes and time of the last change of the whole source when
    its content was hashed, where they are known. folder: directory of the source, if its tokens depend on that.
    """

    source: Source
    part: Part | None
    content_hash: str
    size: int | None
    seen: tuple[int, int] | None = None
    folder: str | None = None

    @property
    def key(self) -> str:
        """Name of the shard: a hash of the content that it is made from."""
        name = self.source.name if self.source.by_name else None
        folder = [] if self.folder is None else [self.folder]
        return hash_json([self.content_hash, kind_of(self.source.file), self.part, name, *folder])


def make_task(
    source: Source, entry: Entry, part: Part | None, parts: int, media: MediaReader | None = None
) -> ShardTask:
    """Return the task for one of the `parts` of a source that `entry` describes."""
    folder = folder_of(source.file) if media is not None and media.reads_files else None
    if isinstance(source.file, HubDataset):
        source = source._replace(file=source.file._replace(revision=entry["revision"]))
    size, changed = entry["size"], entry["mtime_ns"]
    seen = None if changed is None else (size, changed)
    size = size if size is None else -(-size // parts)
    return ShardTask(source, part, entry["hash"], size, seen, None if folder is None else str(folder))


def shard_path(folder: Path, task: ShardTask) -> Path:
    """Return the path of a task's shard in the folder of its recipe."""
    return folder / f"{task.key}.tokens"


def make_shard(folder: Path, task: ShardTask, recipe: Recipe, partial: Path, done: Callable[[int], None]) -> None:
    """Write one shard to `partial` and move it into place.

    Raises DataError if the source cannot be read or has changed, or if the cache cannot be written.
    """
    target, reading = shard_path(folder, task), recipe.reading._replace(copy=copy_path(partial))
    with writing_to(folder):
        for more in (2, 1, 0):
            try:
                report = ReadReport()
                documents = read_source(task.source, reading._replace(report=report), task.part)
                write_shard(
                    partial,
                    documents,
                    recipe.tokenizer,
                    recipe.template,
                    done,
                    recipe.media,
                    recipe.special_tokens_in_text,
                    report,
                )
                same = is_as_described(task.source.file, task.content_hash, task.seen)
                rule = f"{task.source.file} was changed while it was read"
                check(same, f"{rule}: start again when it stays as it is.", DataError)
                if read_info(target) is None:  # else another host has made it, and processes may have mapped it
                    os.replace(partial, target)
                return
            except OSError as error:
                if read_info(target) is not None:  # made by another host, which does not see our lock
                    return
                if error.errno not in GONE or not more:
                    raise


def task_to_json(task: ShardTask) -> dict[str, Any]:
    """Return a task as a JSON object."""
    name, file, by_name = task.source
    return {**task._asdict(), "source": [name, str(file), by_name]}


def task_from_json(content: dict[str, Any]) -> ShardTask:
    """Return the task that `task_to_json` has written."""
    name, file, by_name = content["source"]
    part = None if content["part"] is None else tuple(content["part"])
    seen = None if content["seen"] is None else tuple(content["seen"])
    rest = content["content_hash"], content["size"], seen, content["folder"]
    return ShardTask(Source(name, parse_location(file), by_name), part, *rest)
