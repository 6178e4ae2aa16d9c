"""Make the dataset of a run from `DataConfig`: tokenizer, tokens, and the `Batches` for training and evaluation.

The tokens are in a cache that all runs share (`DataConfig.cache_dir`). The `folder` of a run contains a manifest of
each corpus: in the folder itself, in `train/<source>` for each source of a mixture, and in `held_out/<name>` for each
held-out set with separate paths.
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


# Stores that `open_tokens` has opened in this process and that are still in use. The key contains all arguments.
_open_stores: weakref.WeakValueDictionary[tuple[Any, ...], TokenStore] = weakref.WeakValueDictionary()


def training_texts(config: DataConfig, *, max_bytes: int = 1 << 28) -> Iterator[str]:
    """Yield texts of training documents, up to `max_bytes` in total, on which `train_bpe` trains a tokenizer.

    The share of each source of a mixture is proportional to its weight.
    """
    mixture = find_mixture(config.path)
    total = sum(source.weight for source in mixture)
    for source in mixture:
        yield from _training_texts_of(config, source.path, int(max_bytes * source.weight / total))
    if not mixture:
        yield from _training_texts_of(config, config.path, max_bytes)


def _training_texts_of(config: DataConfig, path: Paths, max_bytes: int) -> Iterator[str]:
    fraction = 0.0 if config.held_out_path else config.held_out_fraction
    template = None if config.chat_template is None else read_chat_template(config.chat_template)

    def documents() -> Iterator[Document]:
        return render_documents(read_documents(path, text_field=config.text_field), template)

    is_held_out = held_out_rule(documents(), fraction)
    size = 0
    for document in documents():
        if is_held_out(document):
            continue
        text = document.text or ""
        size += len(text.encode())
        if size > max_bytes:
            return
        yield text


def prepare_tokenizer(folder: Path, spec: str, config: DataConfig, vocab_size: int) -> Tokenizer:
    """Load the tokenizer in `folder`. If the folder is missing, load or train a tokenizer and save it in `folder`.

    **Arguments:**

    - `spec`: "bpe" trains a tokenizer on the training texts; any other value is an argument of `load_tokenizer`.
    - `vocab_size`: maximum vocabulary size of a trained tokenizer.
    """
    if folder.exists():
        return load_tokenizer(folder)
    if spec == "bpe":
        with StatusLine("training the tokenizer", remains="the tokenizer was not saved") as status:
            tokenizer = train_bpe(status.counted(training_texts(config)), vocab_size)
    else:
        tokenizer = load_tokenizer(spec)
    with new_directory(folder) as partial:
        tokenizer.save(partial)
    return tokenizer


def with_special_token_setting(
    config: DataConfig, template: ChatTemplate | None, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """Apply `DataConfig.special_tokens_in_content` to a chat template.

    If the setting is False, the returned template renders names of special tokens in messages as plain text.
    """
    return template if config.special_tokens_in_content else with_special_tokens_as_text(template, tokenizer)


def token_folders(config: DataConfig, folder: str | Path) -> Mapping[str, Path]:
    """Return the folder of the manifest of each source of a mixture by name; `{"": folder}` without a mixture."""
    names = [source.name for source in find_mixture(config.path)]
    return {name: Path(folder) / "train" / name for name in names} or {"": Path(folder)}


def held_out_folders(config: DataConfig, folder: str | Path) -> Mapping[str, Path]:
    """Return the folder of the manifest of each held-out set by name.

    A set without separate paths has the folder of the training source.
    """
    if not config.evaluates:
        return {}
    folders = {name: Path(folder) / "held_out" / (name or "all") for name in _separate_sets(config)}
    return folders or token_folders(config, folder)


def open_tokens(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    template: ChatTemplate | None = None,
    media: MediaReader | None = None,
    max_documents: int | None = None,
    reuse_open: bool = False,
) -> Mapping[str, TokenStore]:
    """Return the token store of each source of the training data by name (see `open_store`).

    **Arguments:**

    - `folder`: folder of the manifests, in the run's directory.
    - `template`: chat template that renders conversations.
    - `media`: reader of images, videos and audio.
    - `max_documents`: open only the first documents, for a preview (see `open_sample`); None: all documents.
    - `reuse_open`: reuse stores that are open in this process, without checking the sources again.
    """
    template = with_special_token_setting(config, template, tokenizer)
    mixture = find_mixture(config.path)
    paths: dict[str, Paths] = {source.name: source.path for source in mixture} or {"": config.path}
    has_separate_sets = bool(_separate_sets(config))
    options: dict[str, Any] = {
        "held_out_path": None if has_separate_sets else config.held_out_path,
        "held_out_fraction": 0.0 if has_separate_sets else config.held_out_fraction,
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
        store = _open_stores.get(key) if reuse_open else None
        stores[name] = open_store(folders[name], tokenizer, path=path, **options) if store is None else store
        _open_stores[key] = stores[name]
    return stores


def _separate_sets(config: DataConfig) -> Mapping[str, Paths]:
    """Return the paths of held-out sets with separate manifests: named sets, and the held-out set of a mixture."""
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
    """Return an iterator over the batches of a split, with arrays `[len(rows), seq_len]`.

    The corpus is tokenized once, to `DataConfig.cache_dir`, and memory-mapped.

    **Arguments:**

    - `folder`: folder of the manifest, in the run's directory (see `open_store`).
    - `split`: "train" never ends, and is shuffled again in each epoch. "held_out" makes one pass, and the last batch is
      padded.
    - `rows`: indices of the rows of each batch to make; None: all rows. In a run of several processes, each process
      passes `host_rows(layout, batch_size)`.
    - `template`: chat template that renders conversations.
    - `media`: configuration of the model and reader of images, videos and audio; None: batches without media.
    - `groups`: number of groups of rows in `Batch.media`.

    Raises ConfigError if `rows` is not a valid selection of rows, or if there are several held-out sets. Raises
    DataError if the data cannot be read, have changed, or if the split is empty.
    """
    check_option("split", split, SPLITS)
    rows = _checked_rows(config, rows)
    if split == "held_out":
        sets = make_held_out_sets(
            config, tokenizer, folder=folder, rows=rows, template=template, media=media, groups=groups
        )
        check(
            len(sets) > 0,
            "there is no held-out data: DataConfig.held_out_fraction=0 and held_out_path=None. Set one of them.",
        )
        check(len(sets) == 1, f"there are several held-out sets, {', '.join(sets)}. Use make_held_out_sets.")
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
    """Return the batches of each held-out set by name. The name of an unnamed set is "".

    Tokens that `make_dataset` has opened in this process for the same `folder` are shared. See `make_dataset` for the
    arguments.
    """
    rows = _checked_rows(config, rows)
    if not config.evaluates:
        return {}
    sets, folders = _separate_sets(config), held_out_folders(config, folder)
    if sets:
        template = with_special_token_setting(config, template, tokenizer)
        options: dict[str, Any] = {"text_field": config.text_field, "template": template, "held_out_fraction": 1.0}
        options |= {"cache_dir": config.cache_dir, "media": _reader(media)}
        options["special_tokens_in_text"] = config.special_tokens_in_text
        stores = {name: open_store(folders[name], tokenizer, path=paths, **options) for name, paths in sets.items()}
    else:
        stores = open_tokens(config, tokenizer, folder, template=template, media=_reader(media), reuse_open=True)
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
