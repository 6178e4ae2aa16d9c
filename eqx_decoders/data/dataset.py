"""What is trained on and evaluated with, by the settings: tokenizer, tokens, and the `Batches` made of them.

Tokens are made once, in the cache that runs share (`DataConfig.cache_dir`). A run's `folder` keeps which they are, in a
manifest for each corpus: in the folder itself, for a mixture in `train/<source>`, for held-out data that are corpora of
their own in `held_out/<name>`.
"""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.data.batches import Batches, Corpus
from eqx_decoders.data.chats import render_documents
from eqx_decoders.data.media_documents import MediaReader
from eqx_decoders.data.mixture import find_mixture, find_sets
from eqx_decoders.data.sources.documents import Document
from eqx_decoders.data.sources.sources import Paths
from eqx_decoders.data.store.corpus import held_out_rule, read_documents
from eqx_decoders.data.store.corpus_stats import SPLITS
from eqx_decoders.data.store.token_store import TokenStore, open_sample, open_store
from eqx_decoders.encoders.media import HasMedia
from eqx_decoders.errors import check, check_integer, check_number, check_word
from eqx_decoders.io.atomic_files import expand_paths, new_directory
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate, read_chat_template
from eqx_decoders.io.text.tokenizer import Tokenizer, load_tokenizer, train_bpe, with_letters


# What `open_tokens` opened in this process and is still in use, by all that it was opened with.
_in_use: weakref.WeakValueDictionary[tuple[Any, ...], TokenStore] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    path: str | Sequence[str] | None = None
    """Files, directories or globs: text, .jsonl, .json, also with .gz or .zst, .parquet, .arrayrecord, tokens in .bin
    or .npy; also at gs://, s3://, https://. Datasets: hf://datasets/org/name[/config][:split], or a directory that
    `save_to_disk` wrote. None: the text of Python's own library. `path=weight` for each: a mixture, whose sequences
    they share by their weights."""
    held_out_path: str | Sequence[str] | None = None
    """Data for evaluation, of the same kinds; None: a part of the training data, cut off by document, a set for each
    source of a mixture. `name=path` for each: sets of these names, whose losses are told apart."""
    held_out_fraction: float = 0.05
    """Share of the documents that is held out, chosen by hash, where evaluation has no data of its own; 0: none."""
    text_field: str = "text"
    """Field of records or column of .parquet files that holds the text, or a list of messages; records without it may
    have `messages`, or `prompt` and `completion`."""
    chat_template: str | None = None
    """File of the chat template (Jinja) that writes conversations as texts; None: that of init_from."""
    special_tokens_in_content: bool = True
    """Names of special tokens in messages become these, as with transformers; otherwise they are letters."""
    cache_dir: str | None = None
    """Directory in which tokens are kept for all runs; None: $EQX_DECODERS_CACHE, else eqx_decoders in the user's
    folder for caches ($XDG_CACHE_HOME or ~/.cache)."""
    batch_size: int = 8
    """Sequences per step, over all devices and processes."""
    seq_len: int = 256
    """Tokens per sequence."""
    seed: int = 0
    """Seed of the order of documents and sequences; in a training run also of weights, dropout and samples."""
    pack: bool = True
    """Put several documents into one sequence, kept apart by segment ids; otherwise pad each piece to seq_len."""

    def __post_init__(self):
        for field in ("path", "held_out_path"):  # one path is a string, several are a tuple: as JSON gives them back
            value = getattr(self, field)
            if value is not None and not isinstance(value, str):
                check(len(value) > 0, f"DataConfig.{field}={value!r} must have at least one path.")
                object.__setattr__(self, field, value[0] if len(value) == 1 else tuple(value))
        expand_paths(self, "path", "held_out_path", "chat_template", "cache_dir")
        check_integer("DataConfig.batch_size", self.batch_size)
        check_integer("DataConfig.seq_len", self.seq_len, 2)
        check_integer("DataConfig.seed", self.seed, 0)
        check_number("DataConfig.held_out_fraction", self.held_out_fraction, least=0.0)
        rule = f"DataConfig.held_out_fraction={self.held_out_fraction} must be below 1"
        check(self.held_out_fraction < 1, f"{rule}: something must be left to train on.")

    @property
    def evaluates(self) -> bool:
        """Whether anything is held out."""
        return self.held_out_path is not None or self.held_out_fraction > 0


def training_texts(config: DataConfig, *, max_bytes: int = 1 << 28) -> Iterator[str]:
    """The first `max_bytes` of the training documents, for `train_bpe`: none that is held out is among them.

    Of a mixture each source gives its share of them.
    """
    mixture = find_mixture(config.path)
    total = sum(one.weight for one in mixture)
    for one in mixture:
        yield from _texts_of(config, one.path, int(max_bytes * one.weight / total))
    if not mixture:
        yield from _texts_of(config, config.path, max_bytes)


def _texts_of(config: DataConfig, path: Paths, max_bytes: int) -> Iterator[str]:
    fraction = 0.0 if config.held_out_path else config.held_out_fraction
    template = None if config.chat_template is None else read_chat_template(config.chat_template)

    def documents() -> Iterator[Document]:
        return render_documents(read_documents(path, text_field=config.text_field), template)

    is_held_out, size = held_out_rule(documents(), fraction), 0
    for document in (one for one in documents() if not is_held_out(one)):
        text = document.text or ""
        size += len(text.encode())
        if size > max_bytes:
            return
        yield text


def prepare_tokenizer(folder: Path, spec: str, config: DataConfig, vocab_size: int) -> Tokenizer:
    """The tokenizer in `folder`; if there is none, the one that `spec` asks for, which is written there.

    `spec` is "bpe" (trained on the training texts, `vocab_size` ids at most) or what `load_tokenizer` takes.
    """
    if folder.exists():
        return load_tokenizer(folder)
    if spec == "bpe":
        with StatusLine("training the tokenizer", kept="nothing of it is kept") as waiting:
            tokenizer = train_bpe(waiting.counted(training_texts(config)), vocab_size)
    else:
        tokenizer = load_tokenizer(spec)
    with new_directory(folder) as partial:
        tokenizer.save(partial)
    return tokenizer


def written_by(config: DataConfig, template: ChatTemplate | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that writes conversations, which knows whether messages may have special tokens."""
    return template if config.special_tokens_in_content else with_letters(template, tokenizer)


def token_folders(config: DataConfig, folder: str | Path) -> Mapping[str, Path]:
    """Where the manifest of each source of a mixture is, by its name; for what is no mixture "" and `folder`."""
    names = [one.name for one in find_mixture(config.path)]
    return {name: Path(folder) / "train" / name for name in names} or {"": Path(folder)}


def held_out_folders(config: DataConfig, folder: str | Path) -> Mapping[str, Path]:
    """The same of the held-out sets: `folder` or that of their source, unless they are files of their own."""
    if not config.evaluates:
        return {}
    own = {name: Path(folder) / "held_out" / (name or "all") for name in _own_sets(config)}
    return own or token_folders(config, folder)


def open_tokens(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    template: ChatTemplate | None = None,
    media: MediaReader | None = None,
    most: int | None = None,
    may_be_in_use: bool = False,
) -> Mapping[str, TokenStore]:
    """The tokens of each source, made if they are not in the cache (see `open_store`); its folder keeps which they are.

    With `most`, those of so many documents, in the folders themselves (see `open_sample`). `may_be_in_use`: stores that
    this process has open are taken as they are, and their sources not asked once more.
    """
    template = written_by(config, template, tokenizer)
    paths: dict[str, Paths] = {one.name: one.path for one in find_mixture(config.path)} or {"": config.path}
    apart = bool(_own_sets(config))
    options: dict[str, Any] = {
        "held_out_path": None if apart else config.held_out_path,
        "held_out_fraction": 0.0 if apart else config.held_out_fraction,
        "text_field": config.text_field,
        "template": template,
        "media": media,
    }
    folders = token_folders(config, folder)
    if most is not None:
        return {name: open_sample(folders[name], tokenizer, most, path=paths[name], **options) for name in paths}
    options["cache_dir"] = config.cache_dir
    found = {}
    for name, path in paths.items():
        hashes = tokenizer.content_hash, None if template is None else template.content_hash
        plain = {**options, "template": hashes, "path": path, "folder": folders[name].absolute()}
        key = tuple(plain.items())
        store = _in_use.get(key) if may_be_in_use else None
        found[name] = open_store(folders[name], tokenizer, path=path, **options) if store is None else store
        _in_use[key] = found[name]
    return found


def _own_sets(config: DataConfig) -> Mapping[str, Paths]:
    """The held-out sets that are corpora of their own: those with names, and any beside a mixture."""
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
    """The batches of a split, `[batch_size, seq_len]`, or only these `rows` of each of them, `[len(rows), seq_len]`.

    In a run of several processes each takes its own `host_rows(layout, batch_size)`. "train" never ends and is in
    another order in each epoch; "held_out" is one pass, its last batch filled up with padding. The tokens are made
    once, in `DataConfig.cache_dir`, and mapped into memory; `folder`, of the run, keeps which they are (see
    `open_store`). `template` writes conversations as texts. `media`, a model's configuration and what reads images,
    puts those of documents beside their tokens, `groups` of rows having each their own.

    Raises ConfigError for rows that a batch does not have or several held-out sets, DataError if the data cannot be
    read, have changed or leave the split empty.
    """
    check_word("split", split, SPLITS)
    rows = _checked_rows(config, rows)
    if split == "held_out":
        sets = make_held_out_sets(
            config, tokenizer, folder=folder, rows=rows, template=template, media=media, groups=groups
        )
        check(len(sets) > 0, "there is no held-out data: DataConfig.held_out_fraction=0 and no held_out_path.")
        check(len(sets) == 1, f"there are several held-out sets, {', '.join(sets)}: use make_held_out_sets.")
        return next(iter(sets.values()))
    folders = token_folders(config, folder)
    stores = open_tokens(config, tokenizer, folder, template=template, media=_reader(media))
    parts = [Corpus(name, store, held_out=False, folder=folders[name]) for name, store in stores.items()]
    weights = [one.weight for one in find_mixture(config.path)]
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
    """The batches of each held-out set by its name, which is "" where there is one without; see `make_dataset`.

    Those of data that `make_dataset` has open in this process, in the same `folder`, are of the same tokens.
    """
    rows = _checked_rows(config, rows)
    if not config.evaluates:
        return {}
    own, folders = _own_sets(config), held_out_folders(config, folder)
    if own:
        template = written_by(config, template, tokenizer)
        options: dict[str, Any] = {"text_field": config.text_field, "template": template, "held_out_fraction": 1.0}
        options |= {"cache_dir": config.cache_dir, "media": _reader(media)}
        stores = {name: open_store(folders[name], tokenizer, path=paths, **options) for name, paths in own.items()}
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
    rule = f"rows={rows} must be one or more of the rows 0 to {config.batch_size - 1} of a batch"
    fits = len(rows) > 0 and min(rows) >= 0 and max(rows) < config.batch_size
    check(fits, f"{rule}: DataConfig.batch_size={config.batch_size}.")
    return rows
