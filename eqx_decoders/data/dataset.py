"""Dataset of a run from its `DataConfig`: tokenizer, tokens, and the `Batches` for training and evaluation.

The tokens are in a cache that all runs share (`DataConfig.cache_dir`). A run's `folder` has a manifest for each corpus:
in the folder itself, for a mixture in `train/<source>`, and for held-out data with separate paths in `held_out/<name>`.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.data.batches import Batches, Corpus
from eqx_decoders.data.chats import render_documents
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.mixture import find_mixture, find_sets
from eqx_decoders.data.sources.documents import Document
from eqx_decoders.data.sources.sources import Paths
from eqx_decoders.data.store.corpus import SPLITS, held_out_rule, read_documents
from eqx_decoders.data.store.store import TokenStore, open_sample, open_store
from eqx_decoders.encoders.protocols import HasMedia
from eqx_decoders.errors import check, check_option
from eqx_decoders.io.atomic_files import new_directory
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate, read_chat_template
from eqx_decoders.io.text.tokenizer import Tokenizer, load_tokenizer, train_bpe, with_special_tokens_as_text


# Stores that `open_tokens` has opened in this process and that are still in use, by all arguments.
_in_use: weakref.WeakValueDictionary[tuple[Any, ...], TokenStore] = weakref.WeakValueDictionary()


def training_texts(config: DataConfig, *, max_bytes: int = 1 << 28) -> Iterator[str]:
    """Yield the texts of the first `max_bytes` of the training documents, without held-out documents, for `train_bpe`.

    Each source of a mixture contributes according to its weight.
    """
    mixture = find_mixture(config.path)
    total = sum(source.weight for source in mixture)
    for source in mixture:
        yield from _texts_of(config, source.path, int(max_bytes * source.weight / total))
    if not mixture:
        yield from _texts_of(config, config.path, max_bytes)


def _texts_of(config: DataConfig, path: Paths, max_bytes: int) -> Iterator[str]:
    fraction = 0.0 if config.held_out_path else config.held_out_fraction
    template = None if config.chat_template is None else read_chat_template(config.chat_template)

    def documents() -> Iterator[Document]:
        return render_documents(read_documents(path, text_field=config.text_field), template)

    is_held_out, size = held_out_rule(documents(), fraction), 0
    for document in documents():
        if is_held_out(document):
            continue
        text = document.text or ""
        size += len(text.encode())
        if size > max_bytes:
            return
        yield text


def prepare_tokenizer(folder: Path, spec: str, config: DataConfig, vocab_size: int) -> Tokenizer:
    """Load the tokenizer in `folder`. If it is missing, load or train the tokenizer `spec`, and write it there.

    `spec` is "bpe" (trained on the training texts, with at most `vocab_size` ids) or an argument of `load_tokenizer`.
    """
    if folder.exists():
        return load_tokenizer(folder)
    if spec == "bpe":
        with StatusLine("training the tokenizer", remains="nothing of it is kept") as status:
            tokenizer = train_bpe(status.counted(training_texts(config)), vocab_size)
    else:
        tokenizer = load_tokenizer(spec)
    with new_directory(folder) as partial:
        tokenizer.save(partial)
    return tokenizer


def written_by(config: DataConfig, template: ChatTemplate | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template that renders conversations, with or without special tokens in messages as `config` says."""
    return template if config.special_tokens_in_content else with_special_tokens_as_text(template, tokenizer)


def token_folders(config: DataConfig, folder: str | Path) -> Mapping[str, Path]:
    """Return the folder with the manifest of each source of a mixture by name; `{"": folder}` without a mixture."""
    names = [source.name for source in find_mixture(config.path)]
    return {name: Path(folder) / "train" / name for name in names} or {"": Path(folder)}


def held_out_folders(config: DataConfig, folder: str | Path) -> Mapping[str, Path]:
    """Return the folder with the manifest of each held-out set: the source's folder, unless the set has own paths."""
    if not config.evaluates:
        return {}
    folders = {name: Path(folder) / "held_out" / (name or "all") for name in _own_sets(config)}
    return folders or token_folders(config, folder)


def open_tokens(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    template: ChatTemplate | None = None,
    media: MediaReader | None = None,
    max_documents: int | None = None,
    may_be_in_use: bool = False,
) -> Mapping[str, TokenStore]:
    """Open the tokens of each source by its name, and tokenize what the cache lacks (see `open_store`).

    max_documents: open only the first documents, whose tokens are written into the folders (see `open_sample`).
    may_be_in_use: reuse stores that this process has open, without checking their sources again.
    """
    template = written_by(config, template, tokenizer)
    mixture = find_mixture(config.path)
    paths: dict[str, Paths] = {source.name: source.path for source in mixture} or {"": config.path}
    has_own_sets = bool(_own_sets(config))
    options: dict[str, Any] = {
        "held_out_path": None if has_own_sets else config.held_out_path,
        "held_out_fraction": 0.0 if has_own_sets else config.held_out_fraction,
        "text_field": config.text_field,
        "template": template,
        "media": media,
        "special_tokens_in_text": config.special_tokens_in_text,
    }
    folders = token_folders(config, folder)
    if max_documents is not None:
        return {
            name: open_sample(folders[name], tokenizer, max_documents, path=paths[name], **options) for name in paths
        }
    options["cache_dir"] = config.cache_dir
    stores = {}
    for name, path in paths.items():
        hashes = tokenizer.content_hash, None if template is None else template.content_hash
        plain = {**options, "template": hashes, "path": path, "folder": folders[name].absolute()}
        key = tuple(plain.items())
        store = _in_use.get(key) if may_be_in_use else None
        stores[name] = open_store(folders[name], tokenizer, path=path, **options) if store is None else store
        _in_use[key] = stores[name]
    return stores


def _own_sets(config: DataConfig) -> Mapping[str, Paths]:
    """Return the paths of the held-out sets that are separate corpora: sets with names, and sets of a mixture."""
    sets = find_sets(config.held_out_path)
    if sets or config.held_out_path is None or not find_mixture(config.path):
        return sets
    return {"": config.held_out_path}


def make_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    folder: str | Path,
    split: str = "train",
    rows: Sequence[int] | None = None,
    template: ChatTemplate | None = None,
    media: tuple[HasMedia, MediaReader] | None = None,
    groups: int = 1,
) -> Batches:
    """Return the batches of a split, `[batch_size, seq_len]`, or only their rows `rows`, `[len(rows), seq_len]`.

    In a run of several processes, `rows` of each process are `host_rows(layout, batch_size)`. "train" never ends, and
    has another order in each epoch. "held_out" is one pass, and its last batch is padded. The corpus is tokenized once,
    in `DataConfig.cache_dir`, and mapped into memory. `folder`, in the run's directory, contains the manifest (see
    `open_store`).

    template: renders conversations. media: configuration of a model and reader of images, videos and audio, which add
    the documents' files to batches, in `groups` of rows.

    Raises ConfigError for rows that a batch does not have or for several held-out sets, DataError if the data cannot be
    read or have changed, or if the split is empty.
    """
    check_option("split", split, SPLITS)
    rows = _checked_rows(config, rows)
    if split == "held_out":
        sets = make_held_out_sets(
            config, tokenizer, folder=folder, rows=rows, template=template, media=media, groups=groups
        )
        check(
            len(sets) > 0,
            "no data is held out, because DataConfig.held_out_fraction=0 and held_out_path=None: set one of them.",
        )
        check(len(sets) == 1, f"there are several held-out sets, {', '.join(sets)}: use make_held_out_sets.")
        return next(iter(sets.values()))
    folders = token_folders(config, folder)
    stores = open_tokens(config, tokenizer, folder, template=template, media=_reader(media))
    parts = [Corpus(name, store, held_out=False, folder=folders[name]) for name, store in stores.items()]
    weights = [source.weight for source in find_mixture(config.path)]
    return _batches(config, parts, split, rows, weights=weights, media=media, groups=groups)


def make_held_out_sets(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    folder: str | Path,
    rows: Sequence[int] | None = None,
    template: ChatTemplate | None = None,
    media: tuple[HasMedia, MediaReader] | None = None,
    groups: int = 1,
) -> dict[str, Batches]:
    """Return the batches of each held-out set by name; a set without a name is "". See `make_dataset`.

    They share the tokens that `make_dataset` has opened in this process for the same `folder`.
    """
    rows = _checked_rows(config, rows)
    if not config.evaluates:
        return {}
    sets, folders = _own_sets(config), held_out_folders(config, folder)
    if sets:
        template = written_by(config, template, tokenizer)
        options: dict[str, Any] = {"text_field": config.text_field, "template": template, "held_out_fraction": 1.0}
        options |= {"cache_dir": config.cache_dir, "media": _reader(media)}
        options["special_tokens_in_text"] = config.special_tokens_in_text
        stores = {name: open_store(folders[name], tokenizer, path=paths, **options) for name, paths in sets.items()}
    else:
        stores = open_tokens(config, tokenizer, folder, template=template, media=_reader(media), may_be_in_use=True)
    parts = [Corpus(name, store, held_out=True, folder=folders[name]) for name, store in stores.items()]
    return {part.name: _batches(config, [part], "held_out", rows, media=media, groups=groups) for part in parts}


def _reader(media: tuple[HasMedia, MediaReader] | None) -> MediaReader | None:
    return None if media is None else media[1]


def _batches(config: DataConfig, parts: Sequence[Corpus], split: str, rows: Sequence[int], **options: Any) -> Batches:
    sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len}
    return Batches(parts, split=split, rows=rows, seed=config.seed, pack=config.pack, **sizes, **options)


def _checked_rows(config: DataConfig, rows: Sequence[int] | None) -> Sequence[int]:
    rows = range(config.batch_size) if rows is None else tuple(rows)
    check(
        len(rows) > 0 and min(rows) >= 0 and max(rows) < config.batch_size,
        f"rows={rows} must be one or more rows from 0 to {config.batch_size - 1}, because "
        f"DataConfig.batch_size={config.batch_size}.",
    )
    return rows
