"""Preview of the data of a run, for people: its first documents, with the targets marked, and the counts."""

import collections
import dataclasses
import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from eqx_decoders.data.dataset import open_tokens, token_folders, training_texts, written_by
from eqx_decoders.data.sources.documents import parse_reference
from eqx_decoders.data.sources.records import FILES
from eqx_decoders.data.store.open_store import is_made
from eqx_decoders.data.store.shard_tasks import Recipe
from eqx_decoders.data.store.token_store import TRAIN, TokenStore
from eqx_decoders.encoders.media_config import placeholders
from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.io.status import quantity
from eqx_decoders.io.text.chat_template import ChatTemplate, load_chat_template
from eqx_decoders.io.text.tokenizer import Tokenizer, decode, load_tokenizer, train_bpe
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.run.media_eval import with_images
from eqx_decoders.training.run.resume_run import resume
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.run.run_model import run_config


SHOWN, TOKENS = 3, 400  # documents, and tokens of each
MOST, BYTES = 1000, 1 << 22  # documents that are read where there are no tokens yet, and bytes for a tokenizer
MARKS = {True: ("\x1b[32m", "\x1b[0m"), False: ("⟦", "⟧")}  # around targets, with colors and without


def describe_data(settings: TrainConfig, *, color: bool = False) -> str:
    """Return the first training documents as text, the targets in green or in ⟦brackets⟧, and the counts.

    A run's own tokens are used where it has them. Otherwise the first thousand documents are tokenized, and counted.
    """
    run, _ = resume(RunDirectory(settings))
    settings, source = run.settings, run.source
    if settings.init_from is not None and not (source.exists() and run.has_started):
        source = resolve(settings.init_from).path
    config = read_config(source)[0] if source.exists() else run_config(run)
    data, reader = with_images(settings.dataset, config, source)
    tokenizer, template = _tokenizer_and_template(
        RunDirectory(dataclasses.replace(settings, dataset=data)), source, config
    )
    template = written_by(data, template, tokenizer)
    recipe = Recipe(tokenizer, data.text_field, template, reader, data.special_tokens_in_text)
    folders = token_folders(data, run.data).values()
    tokenized = all(is_made(folder, data.cache_dir, recipe) for folder in folders)
    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, most = (run.data, None) if tokenized else (scratch, MOST)
        for name, store in open_tokens(data, tokenizer, folder, template=template, media=reader, most=most).items():
            chosen = itertools.islice(_documents(store), SHOWN)
            parts += [f"=== {name} ==="] * bool(name)
            parts += [_document(store, tokenizer, document, config, MARKS[color]) for document in chosen]
            parts.append(_counts(store, data.seq_len, None if tokenized else MOST))
        return "\n\n".join(parts)


def _tokenizer_and_template(
    run: RunDirectory, source: Path, config: DecoderConfig
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Load those of the run, or those of a new run; a new BPE is trained on less text."""
    settings, folder = run.settings, run.path / "tokenizer"
    if folder.exists():
        return load_tokenizer(folder), run.template()
    spec = settings.tokenizer or ("bpe" if settings.init_from is None else str(source))
    if spec != "bpe":
        folder = source if settings.tokenizer is None else Path(spec)
        file = settings.dataset.chat_template
        has_template = folder.is_dir() or is_gguf(folder)
        there = has_template or file is not None
        template = load_chat_template(folder if has_template else folder.parent, file=file) if there else None
        return load_tokenizer(spec), template
    with tempfile.TemporaryDirectory() as scratch:
        size = min(settings.bpe_vocab_size or 4096, *placeholders(config.media), config.vocab_size)
        tokenizer = train_bpe(training_texts(settings.dataset, max_bytes=BYTES), size)
        tokenizer.save(scratch)
        return tokenizer, load_chat_template(scratch, file=settings.dataset.chat_template)


def _documents(store: TokenStore) -> Iterator[int]:
    """Yield the numbers of the documents that are trained on."""
    for start, stop in store.ranges():
        yield from (start + np.flatnonzero(~store.is_held_out(start, stop))).tolist()


def _document(
    store: TokenStore, tokenizer: Tokenizer, document: int, config: DecoderConfig, marks: tuple[str, str]
) -> str:
    tokens, targets, text, shown, left = store[document], store.targets(document), "", 0, TOKENS
    seen = np.where(np.isin(tokens, placeholders(config.media)), tokens.astype(np.int64), -1)
    cuts = np.flatnonzero(np.diff(targets) | (np.diff(seen) != 0)) + 1
    for part in np.split(np.arange(len(tokens)), cuts):
        if left <= 0:
            break
        first = int(part[0])
        if seen[first] >= 0:  # together they count as one
            kind = _kinds(config)[int(seen[first])]
            letters, part_left = f"<{len(part):,} tokens of a{'n' * (kind[0] in 'aeiou')} {kind}>", 1
        else:
            part = part[:left]
            letters, part_left = _letters(tokenizer, tokens[part]), len(part)
        text += letters.join(marks) if targets[first] else letters
        shown, left = shown + len(part), left - part_left
    rest = f" … and {len(tokens) - shown:,} tokens more" if len(tokens) > shown else ""
    files = "".join(f", {count}" for count in _file_counts(store.media(document)))
    counts = f"{quantity(len(tokens), 'token')}, {quantity(int(targets.sum()), 'target')}"
    return f"--- document {document}: {counts}{files} ---\n{text}{rest}"


def _letters(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Decode tokens, with all characters replaced that control a terminal."""
    letters = decode(tokenizer, tokens, special=True)
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in letters)


def _kinds(config: DecoderConfig) -> dict[int, str]:
    """Return the kind of file of each placeholder."""
    media = config.media
    tokens = () if media is None else (media.image_token, media.video_token, media.audio_token)
    return {token: word for token, word in zip(tokens, FILES.values(), strict=False) if token is not None}


def _file_counts(references: Iterable[str]) -> list[str]:
    """Count the kinds of files: `3 images`, `1 video` and so on."""
    counts = collections.Counter(parse_reference(one)[0] for one in references)
    return [quantity(count, word) for word, count in counts.items()]


def _counts(store: TokenStore, seq_len: int, most: int | None) -> str:
    """Describe the size of a store of `most` documents (None: of all), without its held-out documents."""
    counts, read = store.counts("train"), store.documents_of(TRAIN)
    share = f"{counts.targets:,} of them targets ({counts.targets / max(counts.tokens, 1):.1%})"
    first = f", of the first {read:,}" * (most is not None and read >= most)
    documents, tokens = quantity(counts.documents, "document"), quantity(counts.tokens, "token")
    lines = [f"{documents} to train on{first}, {tokens}, {share}"]
    seen = [part[0] + np.flatnonzero(store.has_media(*part) & ~store.is_held_out(*part)) for part in store.ranges()]
    files = _file_counts(itertools.chain.from_iterable(map(store.media, itertools.chain.from_iterable(seen))))
    if files:
        lines.append(f"{', '.join(files)} in {sum(map(len, seen)):,} of the documents")
    if store.has_targets:
        ranges = [(part, store.sizes(*part) > seq_len, ~store.is_held_out(*part)) for part in store.ranges()]
        longer = sum(int((long & trained).sum()) for _, long, trained in ranges)
        lines.append(f"{longer:,} are longer than --seq-len {seq_len}, and are cut; the others stay whole")
        refused = sum(int((long & trained & store.has_media(*part)).sum()) for part, long, trained in ranges)
        if refused:
            lines.append(f"{refused:,} of these have files, and can't be cut: raise it, or leave them out")
    return "\n".join([*lines, *store.report()])
