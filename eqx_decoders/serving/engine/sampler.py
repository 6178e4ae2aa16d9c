"""Sampling of batches of requests: `SamplingParams`, their arrays, logit processing, and log-probabilities.

All parameters are arrays, so that one program serves all requests. Operations that no row needs are skipped by
`jax.lax.cond`. On backends where a `cond` blocks the host (`Backend.branches_block_host`), common batches use programs
without it, one for each `SamplingVariant`. The top-k, top-p and min-p filters are in `core/sampling.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from eqx_decoders.core.sampling import (
    FILTERS,
    Probability,
    SamplingTensors,
    branch,
    choose_tokens,
    filtered_logits,
    sample_from_logits,
)
from eqx_decoders.errors import (
    CheckedFields,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
)
from eqx_decoders.sharding.axes import AnyArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(CheckedFields):
    """Sampling parameters of one request.

    The parameters apply in this order: `logit_bias` and penalties, `temperature`, `top_k`, `top_p`, `min_p`. The most
    likely token is never filtered out. The sampled token depends only on the logits, the seed and the number of tokens
    generated before it.

    **Arguments:**

    - `temperature`: sampling temperature. 0: greedy decoding (the lowest id among equally likely tokens).
    - `top_k`, `top_p`, `min_p`: filters, as in `eqx_decoders.Sample`. None: no filter.
    - `repetition_penalty`: divides positive logits and multiplies negative logits of tokens that occur in the prompt or
        the completion (Keskar et al. 2019).
    - `frequency_penalty`, `presence_penalty`: subtracted from a token's logit for each occurrence in the completion,
        and once if the token occurs in the completion (OpenAI).
    - `logit_bias`: pairs of a token id and a value that is added to its logit.
    - `seed`: sampling seed, a 64-bit integer.
    """

    temperature: NonNegativeFloat = 0.0
    top_k: PositiveInt | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repetition_penalty: PositiveFloat = 1.0
    frequency_penalty: FiniteFloat = 0.0
    presence_penalty: FiniteFloat = 0.0
    logit_bias: tuple[tuple[NonNegativeInt, FiniteFloat], ...] = ()
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "logit_bias", tuple((token, value) for token, value in self.logit_bias))
        super().__post_init__()
        tokens = [token for token, _ in self.logit_bias]
        check(
            len(set(tokens)) == len(tokens),
            f"SamplingParams.logit_bias={self.logit_bias} has a token id twice: give each token id once.",
        )
        is_int64 = isinstance(self.seed, int) and not isinstance(self.seed, bool) and -(2**63) <= self.seed < 2**63
        check(is_int64, f"SamplingParams.seed={self.seed!r} must be a 64-bit integer.")

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on earlier tokens."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_filters(self) -> bool:
        """True if `top_k`, `top_p` or `min_p` is set."""
        return any(getattr(self, name) is not None for name in FILTERS)


@runtime_checkable
class Constraint(Protocol):
    """Mask of the allowed next tokens of one request, for example tokens that continue valid JSON."""

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of allowed tokens into int32 words, one bit per token id, the lowest bit first."""
        ...

    def accept(self, token: int) -> None:
        """Advance by one generated token."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """Log-probability of a token, and pairs of id and log-probability of the most likely tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class BatchSamplingParams(NamedTuple):
    """`SamplingParams` of a batch as arrays with one entry per row. Unset parameters have neutral values.

    **Arguments:**

    - `tensors`: temperature and filters.
    - `bias_ids`, `bias_values`: logit biases. Unused entries have the id -1.
    - `seed`: upper and lower 32 bits of the seed.
    """

    tensors: SamplingTensors
    repetition_penalty: Float32[AnyArray, "rows"]
    frequency_penalty: Float32[AnyArray, "rows"]
    presence_penalty: Float32[AnyArray, "rows"]
    bias_ids: Int32[AnyArray, "rows biases"]
    bias_values: Float32[AnyArray, "rows biases"]
    seed: AnyArray

    @classmethod
    def empty(cls, rows: int, biases: int) -> "BatchSamplingParams":
        """Return host arrays for greedy decoding, to be filled by `set`."""
        return cls(
            tensors=SamplingTensors.greedy(rows),
            repetition_penalty=np.ones(rows, np.float32),
            frequency_penalty=np.zeros(rows, np.float32),
            presence_penalty=np.zeros(rows, np.float32),
            bias_ids=np.full((rows, biases), -1, np.int32),
            bias_values=np.zeros((rows, biases), np.float32),
            seed=np.zeros((rows, 2), np.uint32),
        )

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Write the parameters of a request into a row."""
        self.tensors.set(row, sampling)
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.bias_ids[row], self.bias_values[row] = -1, 0.0
        for index, (token, value) in enumerate(sampling.logit_bias):
            self.bias_ids[row, index], self.bias_values[row, index] = token, value
        bits = sampling.seed % 2**64
        self.seed[row] = bits >> 32, bits & 0xFFFFFFFF

    def repeated(self, times: int) -> "BatchSamplingParams":
        """Return the parameters with each row repeated `times` times."""
        return self if times == 1 else jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), times, axis=0), self)

    @property
    def keys(self) -> Array:
        """Random key of each row."""
        return jax.random.wrap_key_data(jnp.asarray(self.seed), impl="threefry2x32")


class TokenHistory(NamedTuple):
    """Earlier tokens of each row, for penalties.

    **Arguments:**

    - `tokens`: tokens by position.
    - `prompt_length`: number of prompt tokens.
    - `length`: number of prompt and generated tokens.
    """

    tokens: Int[AnyArray, "rows length"]
    prompt_length: Int[AnyArray, "rows"]
    length: Int[AnyArray, "rows"]


class SamplingBatch(NamedTuple):
    """Sampling inputs of a batch of rows.

    **Arguments:**

    - `sampling`: sampling parameters by row.
    - `count`: number of tokens generated so far.
    - `prompt_length`: number of prompt tokens.
    - `allowed`, `masked`: in rows with `masked`, only tokens whose bit in `allowed` is set can be sampled.
    - `adapter`: adapter index of each row (see `adapters.py`). 0: the base model.
    - `processed_scores`: rows with `Request.logprobs_mode="processed"`.
    - `wants_scores`: whether any row needs log-probabilities.
    """

    sampling: BatchSamplingParams
    count: Int[AnyArray, "rows"]
    prompt_length: Int[AnyArray, "rows"]
    allowed: Int32[AnyArray, "rows words"]
    masked: Bool[AnyArray, "rows"]
    adapter: Int32[AnyArray, "rows"]
    processed_scores: Bool[AnyArray, "rows"]
    wants_scores: Bool[AnyArray, ""]

    @classmethod
    def greedy(cls, rows: int, words: int, max_biases: int) -> "SamplingBatch":
        """Return host arrays for greedy decoding, with masks of `words` 32-bit words."""
        return cls(
            sampling=BatchSamplingParams.empty(rows, max_biases),
            count=np.zeros(rows, np.int32),
            prompt_length=np.zeros(rows, np.int32),
            allowed=np.full((rows, words), -1, np.int32),
            masked=np.zeros(rows, bool),
            adapter=np.zeros(rows, np.int32),
            processed_scores=np.zeros(rows, bool),
            wants_scores=np.asarray(False),
        )

    def select(self, rows: np.ndarray, wants_scores: bool) -> "SamplingBatch":
        """Return copies of rows.

        Copies are required because JAX on CPU can read an argument after the call returned.
        """
        selected = jax.tree.map(lambda array: array[rows], self._replace(wants_scores=None))
        return selected._replace(wants_scores=np.asarray(wants_scores))


class SamplingVariant(NamedTuple):
    """Operations of a sampling program without `jax.lax.cond`.

    **Arguments:**

    - `filters`: apply top-k, top-p and min-p.
    - `scores`: compute log-probabilities.
    """

    filters: bool
    scores: bool


SAMPLING_VARIANTS = tuple(SamplingVariant(filters, scores) for filters in (False, True) for scores in (False, True))


class SamplingTable:
    """Sampling inputs of all slots, on the host (`rows`), and batches of them as inputs of programs.

    Arrays that change only with the request of a slot stay on the device between steps, and so do masks that allow all
    tokens.

    **Arguments:**

    - `rows`: inputs of all slots, from `SamplingBatch.greedy`.
    - `put`: copies an array to all devices. The host array must not change afterwards, because a CPU device may use the
        same memory.
    """

    def __init__(self, rows: SamplingBatch, put: Callable[[np.ndarray], Array]):
        self.rows = rows
        self._put = put
        self._slots: np.ndarray | None = None  # slots of the arrays in `_on_device`
        self._on_device: dict[str, Any] = {}
        self._unmasked: dict[int, Array] = {}  # by number of rows
        num_slots = len(rows.count)
        self._needs_filters = np.zeros(num_slots, bool)
        self._changes_logits = np.zeros(num_slots, bool)  # biases or penalties

    def set(
        self, slot: int, sampling: SamplingParams, *, prompt_length: int, adapter: int, processed_scores: bool
    ) -> None:
        """Write the inputs of a request into its slot."""
        self.rows.sampling.set(slot, sampling)
        self.rows.prompt_length[slot] = prompt_length
        self.rows.count[slot] = 0
        self.rows.processed_scores[slot] = processed_scores
        self.rows.adapter[slot] = adapter
        self._needs_filters[slot] = (sampling.temperature > 0 or processed_scores) and sampling.has_filters
        self._changes_logits[slot] = sampling.has_penalties or len(sampling.logit_bias) > 0
        self._slots = None

    def variant(self, slots: Sequence[int] | np.ndarray, wants_scores: bool) -> SamplingVariant | None:
        """Return the sampling variant for a batch of slots. None: a slot has biases, penalties or a constraint."""
        slots = np.asarray(slots)
        if self._changes_logits[slots].any() or self.rows.masked[slots].any():
            return None
        return SamplingVariant(bool(self._needs_filters[slots].any()), wants_scores)

    def batch_of(self, slots: Sequence[int] | np.ndarray, wants_scores: bool) -> SamplingBatch:
        """Return the sampling inputs of a batch of slots."""
        rows = np.asarray(slots)
        if len(rows) == 1:
            return self.rows.select(rows, wants_scores)
        if self._slots is None or not np.array_equal(self._slots, rows):
            self._slots = rows
            per_request = {
                name: getattr(self.rows, name) for name in ("sampling", "prompt_length", "adapter", "processed_scores")
            }
            self._on_device = jax.tree.map(lambda array: self._put(array[rows]), per_request)
        masked = self.rows.masked[rows]
        return SamplingBatch(
            **self._on_device,
            count=self.rows.count[rows],
            allowed=self.rows.allowed[rows] if masked.any() else self._all_allowed(len(rows)),
            masked=masked,
            wants_scores=np.asarray(wants_scores),
        )

    def _all_allowed(self, num_rows: int) -> Array:
        if num_rows not in self._unmasked:
            self._unmasked[num_rows] = self._put(np.full((num_rows, self.rows.allowed.shape[1]), -1, np.int32))
        return self._unmasked[num_rows]


def adjust_logits(
    logits: Float32[Array, "rows vocab"],
    sampling: BatchSamplingParams,
    history: TokenHistory,
    allowed: Int32[AnyArray, "rows words"],
    masked: Bool[AnyArray, "rows"],
) -> Float32[Array, "rows vocab"]:
    """Apply biases, penalties and masks to logits. Tokens that are not allowed get the logit -inf."""
    rows = jnp.arange(logits.shape[0])[:, None]
    ids, values = jnp.asarray(sampling.bias_ids), jnp.asarray(sampling.bias_values)

    def add_biases(logits: Array) -> Array:
        return logits.at[rows, jnp.where(ids < 0, logits.shape[1], ids)].add(values, mode="drop")

    def penalize(logits: Array) -> Array:
        return _penalize(logits, sampling, history)

    def mask(logits: Array) -> Array:
        index = jnp.arange(logits.shape[1])
        bits = jnp.asarray(allowed)[:, index // 32] >> (index % 32)[None]
        return jnp.where(jnp.asarray(masked)[:, None] & (bits & 1 == 0), -jnp.inf, logits)

    logits = _apply_if(jnp.any(ids >= 0), add_biases, logits)
    penalties = (sampling.frequency_penalty, sampling.presence_penalty)
    penalizes = jnp.any(sampling.repetition_penalty != 1.0) | jnp.any(jnp.stack(penalties) != 0.0)
    logits = _apply_if(penalizes, penalize, logits)
    return _apply_if(jnp.any(masked), mask, logits)


def _apply_if(condition: Array, change, logits: Array) -> Array:
    return jax.lax.cond(condition, change, lambda logits: logits, logits)


def _penalize(logits: Array, sampling: BatchSamplingParams, history: TokenHistory) -> Array:
    rows, index = jnp.arange(logits.shape[0])[:, None], jnp.arange(history.tokens.shape[1])[None]
    is_token = index < jnp.asarray(history.length)[:, None]
    is_generated = is_token & (index >= jnp.asarray(history.prompt_length)[:, None])
    counts = jnp.zeros(logits.shape, jnp.int32)
    counts = counts.at[rows, history.tokens].add(is_generated.astype(jnp.int32), mode="drop")
    occurs = jnp.zeros(logits.shape, bool).at[rows, history.tokens].max(is_token, mode="drop")
    repetition, frequency, presence = (
        jnp.asarray(x)[:, None]
        for x in (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(occurs, repeated, logits)
    return logits - frequency * counts.astype(jnp.float32) - jnp.where(counts > 0, presence, 0.0)


class Scores(NamedTuple):
    """Log-probabilities of given tokens, and of the most likely tokens in decreasing order."""

    chosen: Float32[Array, "rows"]
    top_ids: Int32[Array, "rows top"]
    top: Float32[Array, "rows top"]


def score_tokens(
    logits: Float32[Array, "rows vocab"], tokens: Int[Array, "rows"], num_top: int, wanted: Bool[Array, ""] | bool
) -> Scores:
    """Return the log-probabilities of `tokens` and of the `num_top` most likely tokens; zeros if not `wanted`."""
    rows, num_top = logits.shape[0], min(num_top, logits.shape[1])

    def compute() -> Scores:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        largest, ids = jax.lax.top_k(logits, num_top)
        chosen = jnp.take_along_axis(logits, jnp.clip(tokens, 0, logits.shape[1] - 1)[:, None], axis=1)
        return Scores((chosen - total)[:, 0], ids.astype(jnp.int32), largest - total)

    shape = (rows, num_top)
    zeros = Scores(jnp.zeros((rows,), jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    return branch(wanted, compute, lambda: zeros)


class SampledTokens(NamedTuple):
    """Tokens sampled by a step. In each row the first `num_accepted` columns are valid."""

    tokens: Int32[Array, "rows columns"]
    num_accepted: Int32[Array, "rows"]
    scores: Scores


def sample_rows(
    logits: Array,
    batch: SamplingBatch,
    history: TokenHistory,
    columns: int,
    num_top: int,
    variant: SamplingVariant | None = None,
) -> tuple[Array, Scores]:
    """Sample a token for each row of logits, and return the tokens and their log-probabilities.

    **Arguments:**

    - `columns`: number of consecutive rows of logits for each row of `batch` (1, or 1 plus the number of drafts).
    - `variant`: operations to run, without `jax.lax.cond`. None: any operations, with `jax.lax.cond`.
    """
    sampling = batch.sampling.repeated(columns)
    allowed, masked = (jnp.repeat(jnp.asarray(x), columns, axis=0) for x in (batch.allowed, batch.masked))
    flat = logits.reshape(-1, logits.shape[-1])
    index = (jnp.asarray(batch.count)[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
    processed = jnp.repeat(jnp.asarray(batch.processed_scores), columns)[:, None]
    if variant is not None:
        greedy = jnp.argmax(flat, axis=-1).astype(jnp.int32)
        filtered = filtered_logits(flat, sampling.tensors, variant.filters)
        sampled = sample_from_logits(filtered, sampling.keys, index, greedy)
        tokens = jnp.where(jnp.asarray(sampling.tensors.temperature) > 0, sampled, greedy)
        return tokens, score_tokens(jnp.where(processed, filtered, flat), tokens, num_top, variant.scores)
    adjusted = adjust_logits(flat, sampling, history, allowed, masked)
    tokens = choose_tokens(adjusted, sampling.tensors, sampling.keys, index)
    scored = _apply_if(
        jnp.any(processed), lambda flat: jnp.where(processed, filtered_logits(adjusted, sampling.tensors), flat), flat
    )
    return tokens, score_tokens(scored, tokens, num_top, jnp.asarray(batch.wants_scores))


def token_scores(scores: Any, rows: range, tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """Return a `TokenScore` for each token. `scores`: `Scores` with lists instead of arrays; `rows`: rows in them."""
    span = slice(rows.start, rows.stop)
    if num_top == 0:
        return [TokenScore(token, score) for token, score in zip(tokens, scores.chosen[span], strict=True)]
    lists = zip(tokens, scores.chosen[span], scores.top_ids[span], scores.top[span], strict=True)
    return [
        TokenScore(token, score, tuple(zip(ids[:num_top], best[:num_top], strict=True)))
        for token, score, ids, best in lists
    ]
