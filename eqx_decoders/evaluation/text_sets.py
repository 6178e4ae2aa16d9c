"""Named sets of texts, and what a model makes of them: bits for each byte, perplexity for each token."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.data.sources.documents import decode
from eqx_decoders.data.sources.readers import ALL, read_records
from eqx_decoders.data.sources.sources import find_sources
from eqx_decoders.errors import DataError, check
from eqx_decoders.evaluation.engine_requests import EvaluationEngine, Progress, no_progress
from eqx_decoders.evaluation.scoring import score_texts
from eqx_decoders.evaluation.statistics import MeanScore, ratio_of_sums
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSet:
    """Texts with a name, each a document of its own."""

    name: str
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScores:
    """Likelihood of the texts of a set.

    **Arguments:**

    - `name`: name of the set.
    - `nats`: minus the log-probability of each text.
    - `num_tokens`, `num_bytes`: its tokens, and its bytes of UTF-8.
    """

    name: str
    nats: np.ndarray
    num_tokens: np.ndarray
    num_bytes: np.ndarray

    @property
    def bits_per_byte(self) -> MeanScore:
        """Bits for each byte of all texts, with the standard error over texts."""
        return ratio_of_sums(self.nats / math.log(2), self.num_bytes)

    @property
    def perplexity(self) -> float:
        """Exponential of the nats for each token."""
        return math.exp(min(700.0, float(self.nats.sum()) / float(self.num_tokens.sum())))

    def figures(self) -> dict[str, float]:
        """Return all numbers by name."""
        bits, tokens, size = self.bits_per_byte, float(self.num_tokens.sum()), float(self.num_bytes.sum())
        figures = {"bits_per_byte": bits.mean, "bits_per_byte_error": bits.error, "byte_perplexity": 2.0**bits.mean}
        return figures | {"token_perplexity": self.perplexity, "tokens": tokens, "bytes": size, "texts": len(self.nats)}


def load_text_set(spec: str, field: str = "text", limit: int | None = None, flag: str = "text") -> TextSet:
    """Load a set, `name=path`: a plain text is one document, each record of another file one with the text in `field`.

    Raises DataError for a set without texts.
    """
    name, equals, path = spec.partition("=")
    check(bool(name and equals and path), f"{flag}={spec!r} must be name=path, such as wiki=wiki.txt.")
    texts: list[str] = []
    for source in find_sources(expanded(path), f"{flag}={spec!r}:"):
        if isinstance(source.file, Path) and source.file.suffix not in (".jsonl", ".json", ".parquet", ".gz", ".zst"):
            texts.append(_read(source.file))
            continue
        for where, record in read_records(source, ALL):
            value: Any = record.get(field) if isinstance(record, dict) else None
            rule = f"{where} has no text {field!r}: give text_field, the name of the field that has it."
            check(isinstance(value, str), rule, DataError)
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
    """Return the token that a text begins with: bos, else eos, as in lm-eval; None for a tokenizer without both."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def with_prefix(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Put the token before a text that each text begins with; without one, its first token has no probability."""
    first = prefix_id(tokenizer)
    return list(tokens) if first is None else [first, *tokens]


def evaluate_texts(
    tokenizer: Tokenizer, engine: EvaluationEngine, texts: TextSet, context: int = 1, progress: Progress = no_progress
) -> TextScores:
    """Compute the likelihood of each text of a set, in windows as long as the engine has room (`rolling_windows`)."""
    ids = [with_prefix(tokenizer, each.tolist()) for each in tokenizer.encode_many(texts.texts)]
    logprobs = score_texts(engine, ids, context, progress)
    return TextScores(
        name=texts.name,
        nats=-np.asarray(logprobs, np.float64),
        num_tokens=np.asarray([len(each) - 1 for each in ids], np.float64),
        num_bytes=np.asarray([len(each.encode()) for each in texts.texts], np.float64),
    )
