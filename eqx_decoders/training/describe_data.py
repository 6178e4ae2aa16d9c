"""Some of what a run is trained on, for people: its first documents, with the targets marked, and how much there is."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eqx_decoders.io.chat import ChatTemplate, load_chat_template
from eqx_decoders.io.hub import resolve
from eqx_decoders.io.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer, train_bpe
from eqx_decoders.training.data import open_tokens, token_folders, training_texts, written_by
from eqx_decoders.training.runs import SOURCE, resume_settings, run_template
from eqx_decoders.training.settings import TrainConfig
from eqx_decoders.training.token_store import TRAIN, TokenStore, is_made
from eqx_decoders.training.tokenise import Recipe


SHOWN, TOKENS = 3, 400  # documents, and tokens of each
MOST, BYTES = 1000, 1 << 22  # documents that are read where there are no tokens yet, and bytes for a tokenizer
AT_ONCE = 1 << 20  # documents whose sizes are looked at together
MARKS = {True: ("\x1b[32m", "\x1b[0m"), False: ("⟦", "⟧")}  # around targets, with colours and without


def describe_data(settings: TrainConfig, *, colours: bool = False) -> str:
    """The first training documents as text, the targets in green or in ⟦brackets⟧, and the counts.

    A run's own tokens are used where it has them. Otherwise the first thousand documents are tokenised, and counted.
    """
    settings, _ = resume_settings(settings, settings.run_dir)
    run, data = Path(settings.run_dir), settings.dataset
    tokenizer, template = _tokenizer_and_template(settings, run)
    template = written_by(data, template, tokenizer)
    recipe, folders = Recipe(tokenizer, data.text_field, template), token_folders(data, run / "data").values()
    made = all(is_made(folder, data.cache_dir, recipe) for folder in folders)
    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, most = (run / "data", None) if made else (scratch, MOST)
        for name, store in open_tokens(data, tokenizer, folder, template=template, most=most).items():
            chosen = itertools.islice(_documents(store), SHOWN)
            parts += [f"=== {name} ==="] * bool(name)
            parts += [_document(store, tokenizer, document, MARKS[colours]) for document in chosen]
            parts.append(_counts(store, data.seq_len, None if made else MOST))
        return "\n\n".join(parts)


def _tokenizer_and_template(settings: TrainConfig, run: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    """Those of the run, or those that it would be begun with; a new BPE is made of less text."""
    if (run / "tokenizer").exists():
        return load_tokenizer(run / "tokenizer"), run_template(settings, run)
    source = run / SOURCE
    if settings.init_from is not None and not source.exists():
        source = resolve(settings.init_from).path
    spec = settings.tokenizer or ("bpe" if settings.init_from is None else str(source))
    if spec != "bpe":
        folder = source if settings.tokenizer is None else Path(spec)
        file = settings.dataset.chat_template
        there = folder.is_dir() or file is not None
        template = load_chat_template(folder if folder.is_dir() else folder.parent, file=file) if there else None
        return load_tokenizer(spec), template
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = train_bpe(training_texts(settings.dataset, max_bytes=BYTES), settings.bpe_vocab_size or 4096)
        tokenizer.save(scratch)
        return tokenizer, load_chat_template(scratch, file=settings.dataset.chat_template)


def _documents(store: TokenStore) -> Iterator[int]:
    """The documents that are trained on."""
    for start, stop in _ranges(store):
        yield from (start + np.flatnonzero(~store.is_held_out(start, stop))).tolist()


def _ranges(store: TokenStore) -> Iterator[tuple[int, int]]:
    for start in range(0, len(store), AT_ONCE):
        yield start, min(start + AT_ONCE, len(store))


def _document(store: TokenStore, tokenizer: Tokenizer, document: int, marks: tuple[str, str]) -> str:
    tokens, targets = store[document], store.targets(document)
    text, cuts = "", np.flatnonzero(np.diff(targets[:TOKENS])) + 1
    for part, is_target in zip(np.split(tokens[:TOKENS], cuts), np.split(targets[:TOKENS], cuts), strict=True):
        special = {"special": True} if isinstance(tokenizer, JsonTokenizer) else {}
        letters = tokenizer.decode(part, **special)
        letters = "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in letters)
        text += letters.join(marks) if is_target[0] else letters
    rest = f" … and {len(tokens) - TOKENS:,} tokens more" if len(tokens) > TOKENS else ""
    return f"--- document {document}: {len(tokens):,} tokens, {int(targets.sum()):,} targets ---\n{text}{rest}"


def _counts(store: TokenStore, seq_len: int, most: int | None) -> str:
    """How much there is, in a store of `most` documents (None: of all), those of held-out data of its own left out."""
    counts, read = store.counts("train"), store.documents_of(TRAIN)
    share = f"{counts.targets:,} of them targets ({counts.targets / max(counts.tokens, 1):.1%})"
    first = f", of the first {read:,}" * (most is not None and read >= most)
    lines = [f"{counts.documents:,} documents to train on{first}, {counts.tokens:,} tokens, {share}"]
    if store.has_targets:
        parts = [store.sizes(*part)[~store.is_held_out(*part)] for part in _ranges(store)]
        longer = sum(int((sizes > seq_len).sum()) for sizes in parts)
        lines.append(f"{longer:,} are longer than --seq-len {seq_len}, and are cut; the others stay whole")
    return "\n".join(lines)
