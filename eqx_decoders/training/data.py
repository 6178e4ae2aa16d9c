"""Batches for training and evaluation, read by grain from a token store; exactly resumable, for any process count.

Rows are planned, not streamed: which piece of which document stands in which row of an epoch follows from the seed
alone. So a row is found by its number, the state of the iterator is that number, and each process makes just those rows
of the same global batches that its devices hold. grain reads and prefetches the batches; its own packing and shuffling
are not used, since they are streams, whose rows cannot be found by number.

**Packing** is concatenate, then split: the documents of an epoch, in an order drawn from the seed, are one long text
that is cut into rows of `seq_len`. Only the end of the last row is wasted, whereas fitting whole documents into rows
leaves gaps and has to cut long documents anyway. Segment ids keep the documents apart.

**Targets.** Token `t` is predicted from token `t-1` of its segment; the loss finds the targets in `tokens` itself.
`loss_mask[t]` says that token `t` is a target: all but padding and the first token of a segment. In training a cut
costs one target (another one in each epoch, since the order changes). Held-out pieces, and those of `pack=False`,
overlap by one token, so that every token of a document behind its leading separator, the closing one included, is a
target exactly once, and `total loss / bytes` are honest nats per byte.

**Conversations, and prompts with completions,** are trained on in part, and what comes before is its context. In a
corpus that has any, documents of up to `seq_len` tokens are never cut: whole documents are fitted into rows. Longer
ones are cut into pieces that overlap by one token; a piece may hold no target at all.
"""

import dataclasses
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int

from eqx_decoders.axes import AnyArray
from eqx_decoders.errors import DataError, check, check_integer, check_number, check_word, need_extra
from eqx_decoders.io.chat import ChatTemplate, read_chat_template
from eqx_decoders.io.files import new_directory
from eqx_decoders.io.tokenizer import Tokenizer, load_tokenizer, train_bpe
from eqx_decoders.io.waiting import Waiting
from eqx_decoders.training.chats import render_documents
from eqx_decoders.training.corpus import held_out_rule, read_documents
from eqx_decoders.training.counts import SPLITS
from eqx_decoders.training.packing import Plan, permutation, plan_overlapping, plan_packed, plan_padded, plan_whole
from eqx_decoders.training.token_store import TokenStore, open_sample, open_store


class Batch(eqx.Module):
    """Sequences for one step, of numpy or JAX arrays.

    - `tokens`: ids, 0 where there is padding.
    - `segment_ids`: 1, 2, … for the documents within a row, 0 for padding. None: each row is one document.
    - `positions`: place in the document's piece, from 0. None: 0, 1, …
    - `loss_mask`: weight of token `t` *as a target*, predicted from token `t-1`. None: all count.
    """

    tokens: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"] | None = None
    positions: Int[AnyArray, "batch length"] | None = None
    loss_mask: Float[AnyArray, "batch length"] | Bool[AnyArray, "batch length"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    path: str | Sequence[str] | None = None
    """Files, directories or globs: text, .jsonl, .json, also with .gz or .zst, .parquet, .arrayrecord, tokens in .bin
    or .npy; also at gs://, s3://, https://. Datasets: hf://datasets/org/name[/config][:split], or a directory that
    `save_to_disk` wrote. None: the text of Python's own library."""
    held_out_path: str | Sequence[str] | None = None
    """Data for evaluation, of the same kinds; None: a part of the training data, cut off by document."""
    held_out_fraction: float = 0.05
    """Share of the documents that is held out, chosen by hash, where evaluation has no data of its own; 0: none."""
    text_field: str = "text"
    """Field of records or column of .parquet files that holds the text, or a list of messages; records without it may
    have `messages`, or `prompt` and `completion`."""
    chat_template: str | None = None
    """File of the chat template (Jinja) that writes conversations as texts; None: that of init_from."""
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
    """The first `max_bytes` of the training documents, for `train_bpe`: none that is held out is among them."""
    fraction = 0.0 if config.held_out_path else config.held_out_fraction
    is_held_out = held_out_rule(read_documents(config.path, text_field=config.text_field), fraction)
    template = None if config.chat_template is None else read_chat_template(config.chat_template)
    documents = (one for one in read_documents(config.path, text_field=config.text_field) if not is_held_out(one))
    size = 0
    for document in render_documents(documents, template):
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
        with Waiting("training the tokenizer", kept="nothing of it is kept") as waiting:
            tokenizer = train_bpe(waiting.counted(training_texts(config)), vocab_size)
    else:
        tokenizer = load_tokenizer(spec)
    with new_directory(folder) as partial:
        tokenizer.save(partial)
    return tokenizer


def open_tokens(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    template: ChatTemplate | None = None,
    most: int | None = None,
) -> TokenStore:
    """The tokens of the data, made if they are not in the cache (see `open_store`); `folder` keeps which they are.

    With `most`, those of so many documents, in `folder` itself (see `open_sample`).
    """
    source: dict[str, Any] = {
        "path": config.path,
        "held_out_path": config.held_out_path,
        "held_out_fraction": config.held_out_fraction,
        "text_field": config.text_field,
        "template": template,
    }
    if most is not None:
        return open_sample(folder, tokenizer, most, **source)
    return open_store(folder, tokenizer, cache_dir=config.cache_dir, **source)


def make_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    cache_dir: str | Path,
    split: str = "train",
    rows: Sequence[int] | None = None,
    template: ChatTemplate | None = None,
) -> "Batches":
    """The batches of a split, `[batch_size, seq_len]`, or only these `rows` of each of them, `[len(rows), seq_len]`.

    In a run of several processes each takes its own `host_rows(layout, batch_size)`. "train" never ends and is in
    another order in each epoch; "held_out" is one pass, its last batch filled up with padding. The tokens are made
    once, in `DataConfig.cache_dir`, and mapped into memory; the folder `cache_dir` keeps which they are (see
    `open_store`). `template` writes conversations as texts.

    Raises ConfigError for rows that a batch does not have, DataError if the data cannot be read, have changed or
    leave the split empty.
    """
    check_word("split", split, SPLITS)
    rows = range(config.batch_size) if rows is None else tuple(rows)
    rule = f"rows={rows} must be one or more of the rows 0 to {config.batch_size - 1} of a batch"
    fits = len(rows) > 0 and min(rows) >= 0 and max(rows) < config.batch_size
    check(fits, f"{rule}: DataConfig.batch_size={config.batch_size}.")
    store = open_tokens(config, tokenizer, cache_dir, template=template)
    few = "give more documents, or --held-out (DataConfig.held_out_path)"
    remedy = few if split == "held_out" else "lower --held-out-fraction (DataConfig.held_out_fraction)"
    check(store.counts(split).documents > 0, f"the split {split!r} of the data is empty: {remedy}.", DataError)
    return Batches(store, config, split, rows)


class Batches:
    """Iterator over `Batch`es of numpy arrays. Close it (or use `with`) to end its reading thread."""

    def __init__(self, store: TokenStore, config: DataConfig, split: str, rows: Sequence[int]):
        self.store = store
        self._config = config
        self._split = split
        self._rows = rows
        self._planning = threading.Lock()
        self._plan = functools.lru_cache(2)(self._make_plan)  # a batch may stand across the end of an epoch
        self.rows_per_epoch: int = len(self._plan(0).order)
        self._row = 0
        self._iterator: Any = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = self._start()
        batch = Batch(**next(self._iterator))
        self._row += self._config.batch_size
        return batch

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading thread. The iterator may go on afterwards: it starts another one."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None

    def rewind(self) -> "Batches":
        """Start again from the first batch: `for batch in held_out.rewind(): …` is one pass."""
        self.close()
        self._row = 0
        return self

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands, as plain JSON: the number of sequences taken and what they depend on."""
        return {"row": self._row, **self._identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on exactly where `get_state` was called; `batch_size` and the number of processes may differ.

        Raises DataError if the sequences of `state` are others than these.
        """
        pairs = {key: (state.get(key), now) for key, now in self._identity().items()}
        changes = [f"{key} was {old!r} and is {now!r}" for key, (old, now) in pairs.items() if old != now]
        remedy = "go on with the data and settings of the checkpoint, or start another run directory"
        check(not changes, f"the checkpoint's data differ: {'; '.join(changes)}: {remedy}.", DataError)
        self.close()
        self._row = int(state["row"])

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self._row / self.rows_per_epoch

    def _identity(self) -> dict[str, Any]:
        config = self._config
        settings = {"seed": config.seed, "seq_len": config.seq_len, "pack": config.pack}
        return {"split": self._split, "data": self.store.content_hash, **settings}

    def _start(self) -> Any:
        try:
            import grain
        except ImportError as error:
            raise need_extra("grain", "train") from error
        left = sys.maxsize
        if self._split == "held_out":
            left = max(0, -(-(self.rows_per_epoch - self._row) // self._config.batch_size))
        make = functools.partial(self._batch, self._row)
        # One thread that reads ahead; worker processes would only copy what is mapped into memory anyway.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        return iter(grain.MapDataset.range(left).map(make).to_iter_dataset(options))

    def _batch(self, first_row: int, number: int) -> dict[str, np.ndarray]:
        start = first_row + number * self._config.batch_size
        rows = [self._fill(start + row) for row in self._rows]
        names = ("tokens", "segment_ids", "positions", "loss_mask")
        return {name: np.stack(arrays) for name, arrays in zip(names, zip(*rows, strict=True), strict=True)}

    def _fill(self, row: int) -> tuple[np.ndarray, ...]:
        """Tokens, segment ids, positions and loss mask of one sequence."""
        tokens, segments, positions = np.zeros((3, self._config.seq_len), np.int32)
        targets = np.zeros(self._config.seq_len, bool)
        used = 0
        for segment, (document, start, stop) in enumerate(self._pieces(row), 1):
            here = slice(used, used + stop - start)
            tokens[here] = self.store[document][start:stop]
            segments[here] = segment
            positions[here] = np.arange(stop - start)
            targets[here] = self.store.targets(document)[start:stop]
            targets[here.start] = False  # nothing of its piece predicts it
            used = here.stop
        return tokens, segments, positions, targets

    def _pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        epoch, place = divmod(row, self.rows_per_epoch)
        if self._split == "held_out" and epoch > 0:  # behind the last row there is padding
            return iter(())
        with self._planning:  # else two threads might make the same plan
            return self._plan(epoch).pieces(place)

    def _make_plan(self, epoch: int) -> Plan:
        store, config = self.store, self._config
        documents = np.flatnonzero(store.is_held_out(0, len(store)) == (self._split == "held_out"))
        sizes = store.sizes(0, len(store))[documents]
        pack = plan_whole if self.store.has_targets else plan_overlapping if self._split == "held_out" else plan_packed
        make = pack if config.pack else plan_padded
        if self._split == "held_out":
            return make(documents, sizes, config.seq_len)
        order = permutation(len(documents), f"{config.seed}/{epoch}/documents")
        plan = make(documents[order], sizes[order], config.seq_len)
        return plan._replace(order=permutation(len(plan.order), f"{config.seed}/{epoch}/rows"))
