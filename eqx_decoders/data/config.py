"""Settings of the data of a run."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from eqx_decoders.errors import AtLeast, CheckedFields, NonNegativeInt, PositiveInt, Rate, check
from eqx_decoders.io.atomic_files import expand_paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(CheckedFields):
    """Settings of the data: sources, held-out data, tokens and batches."""

    path: str | Sequence[str] | None = None
    """Files, directories or globs: text, .jsonl, .json, also with .gz or .zst, .parquet, .arrayrecord, tokens in .bin
    or .npy; also at gs://, s3://, https://. Datasets: hf://datasets/org/name[/config][:split], or a directory that
    `save_to_disk` wrote. None: the text of Python's own library. `path=weight` for each: a mixture, whose sequences
    they share by their weights."""
    held_out_path: str | Sequence[str] | None = None
    """Data for evaluation, of the same kinds; None: a part of the training data, cut off by document, a set for each
    source of a mixture. `name=path` for each: sets of these names, whose losses are told apart."""
    held_out_fraction: Rate = 0.05
    """Share of the documents that is held out, chosen by hash, where evaluation has no data of its own; 0: none."""
    text_field: str = "text"
    """Field of records or column of .parquet files that holds the text, or a list of messages; records without it may
    have `messages`, `conversations` (ShareGPT), `prompt` and `completion`, or `instruction` and `output` (Alpaca)."""
    chat_template: str | None = None
    """File of the chat template (Jinja) that writes conversations as texts; None: that of init_from."""
    special_tokens_in_content: bool = True
    """Names of special tokens in messages become these, as with transformers; otherwise they are letters."""
    special_tokens_in_text: bool | None = None
    """Tokenize names of special tokens in the texts of `text_field` as special tokens; False: as plain text. None: only
    in texts that look like rendered chats, which start with such a name and contain another; their number is
    reported."""
    cache_dir: str | None = None
    """Directory of the tokens of all runs; None: $EQX_DECODERS_CACHE, else eqx_decoders in the user's
    folder for caches ($XDG_CACHE_HOME or ~/.cache)."""
    batch_size: PositiveInt = 8
    """Sequences per step, over all devices and processes."""
    seq_len: Annotated[int, AtLeast(2)] = 256
    """Tokens per sequence."""
    seed: NonNegativeInt = 0
    """Seed of the order of documents and sequences; in a training run also of weights, dropout and samples."""
    pack: bool = True
    """Put several documents into one sequence, kept apart by segment ids; otherwise pad each piece to seq_len."""

    def __post_init__(self):
        super().__post_init__()
        for field in ("path", "held_out_path"):  # one path is a string, several are a tuple: as JSON gives them back
            value = getattr(self, field)
            if value is not None and not isinstance(value, str):
                check(len(value) > 0, f"DataConfig.{field}={value!r} must have at least one path.")
                object.__setattr__(self, field, value[0] if len(value) == 1 else tuple(value))
        expand_paths(self, "path", "held_out_path", "chat_template", "cache_dir")

    @property
    def evaluates(self) -> bool:
        """True if any data are held out."""
        return self.held_out_path is not None or self.held_out_fraction > 0
