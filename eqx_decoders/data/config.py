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
    """Training data: files, directories or globs of text, .jsonl, .json (also .gz or .zst), .parquet, .arrayrecord,
    tokens in .bin or .npy; also at gs://, s3:// and https://. Datasets: hf://datasets/org/name[/config][:split], or
    a directory written by `save_to_disk`. `path=weight` for each path: a mixture, sampled by weight. None: the
    source text of Python's standard library."""
    held_out_path: str | Sequence[str] | None = None
    """Held-out data, of the same kinds. `name=path` for each path: sets with separate losses. None: a share of the
    training documents, as a separate set for each source of a mixture."""
    held_out_fraction: Rate = 0.05
    """Share of the training documents that is held out if held_out is None. Documents are chosen by their hash. 0:
    none."""
    text_field: str = "text"
    """Field of records, or column of .parquet files, with the text or a list of messages. Records without it may have
    `messages`, `conversations` (ShareGPT), `prompt` and `completion`, or `instruction` and `output` (Alpaca)."""
    chat_template: str | None = None
    """Jinja file of the chat template that formats conversations. None: the chat template of init_from."""
    special_tokens_in_content: bool = True
    """Tokenize names of special tokens in messages as special tokens, as transformers does. False: as plain text."""
    special_tokens_in_text: bool | None = None
    """Tokenize names of special tokens in the texts of `text_field` as special tokens. False: as plain text. None: only
    in texts that look like formatted chats, which start with such a name and contain another; their number is
    reported."""
    cache_dir: str | None = None
    """Directory of tokenized data, shared by all runs. None: $EQX_DECODERS_CACHE, otherwise eqx_decoders in the user's
    cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    batch_size: PositiveInt = 8
    """Global batch size: sequences per step, over all devices and processes."""
    seq_len: Annotated[int, AtLeast(2)] = 256
    """Sequence length in tokens."""
    seed: NonNegativeInt = 0
    """Seed of the order of documents and sequences. In a training run, also of weights, dropout and samples."""
    pack: bool = True
    """Pack several documents into one sequence, separated by segment ids. False: pad each document to seq_len."""

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
