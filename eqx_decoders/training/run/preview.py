"""Preview of a run's training data (`--describe-data`): the first documents with their targets marked, and counts."""

import collections
import dataclasses
import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from eqx_decoders.data.dataset import open_tokens, token_folders, training_texts, with_special_token_setting
from eqx_decoders.data.sources.documents import parse_reference
from eqx_decoders.data.sources.records import MEDIA_FIELDS
from eqx_decoders.data.store.shards import TokenizationConfig
from eqx_decoders.data.store.store import TRAIN, TokenStore, is_tokenized
from eqx_decoders.encoders.media_config import placeholders
from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.io.status import quantity
from eqx_decoders.io.text.chat_template import ChatTemplate, load_chat_template
from eqx_decoders.io.text.tokenizer import Tokenizer, decode, load_tokenizer, train_bpe
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.training.run.directory import RunDirectory, resume, run_config
from eqx_decoders.training.run.start import open_media
from eqx_decoders.training.settings.run import TrainConfig


NUM_DOCUMENTS = 3  # shown from each source
MAX_TOKENS = 400  # shown of each document
MAX_DOCUMENTS = 1000  # tokenized and counted, if the run has no tokenized data yet
MAX_BPE_BYTES = 1 << 22  # text on which a new tokenizer is trained
MARKS = {True: ("\x1b[32m", "\x1b[0m"), False: ("⟦", "⟧")}  # around targets, with and without colors


def describe_data(settings: TrainConfig, *, color: bool = False) -> str:
    """Return the first training documents as text, with the targets in green or in ⟦brackets⟧, and counts.

    If the run has no tokenized data yet, the first thousand documents are tokenized and counted.
    """
    run, _ = resume(RunDirectory(settings))
    settings, source = run.settings, run.source_dir
    if settings.init_from is not None and not (source.exists() and run.has_started):
        source = resolve(settings.init_from).path
    config = read_config(source)[0] if source.exists() else run_config(run)
    data, reader = open_media(settings.data, config, source)
    run = RunDirectory(dataclasses.replace(settings, data=data))
    tokenizer, template = _load_tokenizer(run, source, config)
    template = with_special_token_setting(data, template, tokenizer)
    tokenization = TokenizationConfig(tokenizer, data.text_field, template, reader, data.special_tokens_in_text)
    folders = token_folders(data, run.data_dir).values()
    is_complete = all(is_tokenized(folder, data.cache_dir, tokenization) for folder in folders)
    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, limit = (run.data_dir, None) if is_complete else (scratch, MAX_DOCUMENTS)
        stores = open_tokens(data, tokenizer, folder, template=template, media=reader, max_documents=limit)
        for name, store in stores.items():
            if name:
                parts.append(f"=== {name} ===")
            for document in itertools.islice(_training_documents(store), NUM_DOCUMENTS):
                parts.append(_describe_document(store, tokenizer, document, config, MARKS[color]))
            parts.append(_describe_counts(store, data.seq_len, limit))
        return "\n\n".join(parts)


def _load_tokenizer(run: RunDirectory, source: Path, config: DecoderConfig) -> tuple[Tokenizer, ChatTemplate | None]:
    """Load the tokenizer and chat template of the run.

    A new BPE is trained on less text than in the run, with at most 4,096 tokens unless `bpe_vocab_size` is set.
    """
    settings = run.settings
    chat_template = settings.data.chat_template
    folder = run.path / "tokenizer"
    if folder.exists():
        return load_tokenizer(folder), run.template()
    name = settings.tokenizer or ("bpe" if settings.init_from is None else str(source))
    if name == "bpe":
        with tempfile.TemporaryDirectory() as scratch:
            size = min(settings.bpe_vocab_size or 4096, *placeholders(config.media), config.vocab_size)
            tokenizer = train_bpe(training_texts(settings.data, max_bytes=MAX_BPE_BYTES), size)
            tokenizer.save(scratch)
            return tokenizer, load_chat_template(scratch, file=chat_template)
    path = source if settings.tokenizer is None else Path(name)
    template = None
    if path.is_dir() or is_gguf(path):
        template = load_chat_template(path, file=chat_template)
    elif chat_template is not None:
        template = load_chat_template(path.parent, file=chat_template)
    return load_tokenizer(name), template


def _training_documents(store: TokenStore) -> Iterator[int]:
    """Yield the indices of the documents that are not held out."""
    for start, stop in store.ranges():
        yield from (start + np.flatnonzero(~store.is_held_out(start, stop))).tolist()


def _describe_document(
    store: TokenStore, tokenizer: Tokenizer, document: int, config: DecoderConfig, marks: tuple[str, str]
) -> str:
    """Return the text of a document. Runs of media placeholders are replaced by their number."""
    tokens, targets = store[document], store.targets(document)
    kinds = _media_kinds(config)
    placeholder = np.where(np.isin(tokens, placeholders(config.media)), tokens.astype(np.int64), -1)
    cuts = np.flatnonzero(np.diff(targets) | (np.diff(placeholder) != 0)) + 1
    text, shown, left = "", 0, MAX_TOKENS
    for part in np.split(np.arange(len(tokens)), cuts):
        if left <= 0:
            break
        first = int(part[0])
        if placeholder[first] >= 0:
            kind = kinds[int(placeholder[first])]
            article = "an" if kind[0] in "aeiou" else "a"
            part_text = f"<{len(part):,} tokens of {article} {kind}>"
            left -= 1
        else:
            part = part[:left]
            part_text = _printable_text(tokenizer, tokens[part])
            left -= len(part)
        text += part_text.join(marks) if targets[first] else part_text
        shown += len(part)
    remaining = f" … and {len(tokens) - shown:,} more tokens" if len(tokens) > shown else ""
    files = "".join(f", {count}" for count in _count_files(store.media(document)))
    counts = f"{quantity(len(tokens), 'token')}, {quantity(int(targets.sum()), 'target')}"
    return f"--- document {document}: {counts}{files} ---\n{text}{remaining}"


def _printable_text(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Decode tokens; replace characters that control a terminal."""
    text = decode(tokenizer, tokens, special=True)
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _media_kinds(config: DecoderConfig) -> dict[int, str]:
    """Return "image", "video" or "audio" for each placeholder token."""
    media = config.media
    tokens = () if media is None else (media.image_token, media.video_token, media.audio_token)
    return {token: kind for token, kind in zip(tokens, MEDIA_FIELDS.values(), strict=False) if token is not None}


def _count_files(references: Iterable[str]) -> list[str]:
    """Count files by kind: `["3 images", "1 video"]`."""
    counts = collections.Counter(parse_reference(reference)[0] for reference in references)
    return [quantity(count, kind) for kind, count in counts.items()]


def _describe_counts(store: TokenStore, seq_len: int, limit: int | None) -> str:
    """Describe the training documents of a store; `limit`: the maximum number of documents that were tokenized."""
    counts, num_read = store.counts("train"), store.documents_of(TRAIN)
    share = f"{counts.targets:,} of them targets ({counts.targets / max(counts.tokens, 1):.1%})"
    first = f", of the first {num_read:,}" if limit is not None and num_read >= limit else ""
    documents, tokens = quantity(counts.documents, "document"), quantity(counts.tokens, "token")
    lines = [f"{documents} to train on{first}, {tokens}, {share}"]
    with_media = [
        start + np.flatnonzero(store.has_media(start, stop) & ~store.is_held_out(start, stop))
        for start, stop in store.ranges()
    ]
    references = (reference for part in with_media for document in part for reference in store.media(document))
    files = _count_files(references)
    if files:
        lines.append(f"{', '.join(files)} in {sum(map(len, with_media)):,} of the documents")
    if store.has_targets:
        num_long = num_long_media = 0
        for start, stop in store.ranges():
            is_long = (store.sizes(start, stop) > seq_len) & ~store.is_held_out(start, stop)
            num_long += int(is_long.sum())
            num_long_media += int((is_long & store.has_media(start, stop)).sum())
        lines.append(f"{num_long:,} are longer than --seq-len {seq_len}, and are cut; the others stay whole")
        if num_long_media:
            lines.append(
                f"{num_long_media:,} of these have images, videos or audio and cannot be cut: raise --seq-len, or "
                "remove them"
            )
    return "\n".join([*lines, *store.report()])
