"""Perplexity of sets of texts: bits per byte, and perplexity per token."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.data.sources.documents import decode
from eqx_decoders.data.sources.readers import ALL_COLUMNS, read_records
from eqx_decoders.data.sources.sources import find_sources
from eqx_decoders.errors import DataError, check
from eqx_decoders.evaluation.engine_requests import EvaluationEngine, Progress, no_progress
from eqx_decoders.evaluation.scoring import score_texts
from eqx_decoders.evaluation.statistics import MeanScore, ratio_of_sums
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSet:
    """Named set of documents."""

    name: str
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScores:
    """Negative log-likelihood of a set of texts.

    **Arguments:**

    - `name`: name of the set.
    - `nats`: negative log-probability of each text.
    - `num_tokens`, `num_bytes`: number of tokens and of UTF-8 bytes of each text.
    """

    name: str
    nats: np.ndarray
    num_tokens: np.ndarray
    num_bytes: np.ndarray

    @property
    def bits_per_byte(self) -> MeanScore:
        """Bits per byte over all texts, with the standard error over texts."""
        return ratio_of_sums(self.nats / math.log(2), self.num_bytes)

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(min(700.0, float(self.nats.sum()) / float(self.num_tokens.sum())))

    def figures(self) -> dict[str, float]:
        """Return all metrics by name."""
        bits, tokens, size = self.bits_per_byte, float(self.num_tokens.sum()), float(self.num_bytes.sum())
        figures = {"bits_per_byte": bits.mean, "bits_per_byte_error": bits.error, "byte_perplexity": 2.0**bits.mean}
        return figures | {"token_perplexity": self.perplexity, "tokens": tokens, "bytes": size, "texts": len(self.nats)}


def load_text_set(spec: str, field: str = "text", limit: int | None = None, flag: str = "text") -> TextSet:
    """Load the set of texts `name=path`.

    A plain text file is one document. In a file of records (.jsonl, .json, .parquet) each record is a document, with
    its text in `field`. Raises DataError for a set without texts.
    """
    name, equals, path = spec.partition("=")
    check(bool(name and equals and path), f"{flag}={spec!r} must be name=path, such as wiki=wiki.txt.")
    texts: list[str] = []
    for source in find_sources(expanded(path), f"{flag}={spec!r}:"):
        if isinstance(source.file, Path) and source.file.suffix not in (".jsonl", ".json", ".parquet", ".gz", ".zst"):
            texts.append(_read(source.file))
            continue
        for where, record in read_records(source, ALL_COLUMNS):
            value: Any = record.get(field) if isinstance(record, dict) else None
            check(
                isinstance(value, str),
                f"{where} has no text in the field {field!r}: set text_field to the name of the field with the text.",
                DataError,
            )
            texts.append(value)
    texts = [text for text in texts if text][:limit]
    check(len(texts) > 0, f"{flag}={spec!r} has no texts.", DataError)
    return TextSet(name=name, texts=tuple(texts))


def _read(path: Path) -> str:
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def prefix_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that is put before texts: BOS, or EOS without BOS, as in lm-eval. None: there is neither."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def with_prefix(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Return tokens with `prefix_id` in front. Without it, the first token of a text cannot be scored."""
    first = prefix_id(tokenizer)
    return list(tokens) if first is None else [first, *tokens]


def evaluate_texts(
    tokenizer: Tokenizer, engine: EvaluationEngine, texts: TextSet, context: int = 1, progress: Progress = no_progress
) -> TextScores:
    """Compute the likelihood of each text of a set, in windows of the engine's `max_length` (see `rolling_windows`)."""
    ids = [with_prefix(tokenizer, tokens.tolist()) for tokens in tokenizer.encode_many(texts.texts)]
    logprobs = score_texts(engine, ids, context, progress)
    return TextScores(
        name=texts.name,
        nats=-np.asarray(logprobs, np.float64),
        num_tokens=np.asarray([len(tokens) - 1 for tokens in ids], np.float64),
        num_bytes=np.asarray([len(text.encode()) for text in texts.texts], np.float64),
    )
