"""Parameters of requests as rows of a batch, and their effect on logits before a token is chosen; log-probabilities.

All parameters are arrays, so requests of any kind share one program; steps that no row needs are skipped
(`jax.lax.cond`). Where a branch makes the host wait (`Backend.branches_block_host`), usual batches have
programs without one, each for a `SamplingForm`. Filters and draws are those of `core/sampling.py`.
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

    They apply in this order: `logit_bias` and penalties, temperature, `top_k`, `top_p`, `min_p`, and one draw. The most
    likely token is never cut. A draw depends only on the seed and on the number of tokens that the answer has.

    **Arguments:**

    - `temperature`: divides logits; 0: always the most likely token (the lowest id of equals).
    - `top_k`, `top_p`, `min_p`: as those of `eqx_decoders.Sample`; None cuts nothing.
    - `repetition_penalty`: logits of tokens in the prompt or the answer are divided by it where positive, and
        multiplied where negative (Keskar et al. 2019).
    - `frequency_penalty`, `presence_penalty`: subtracted from a token's logit for each of its occurrences in the
        answer, and once if there is any (OpenAI).
    - `logit_bias`: pairs of a token and a number that is added to its logit.
    - `seed`: seed of the draws.
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
        check(len(set(tokens)) == len(tokens), "SamplingParams.logit_bias names a token twice: give each once.")
        good = isinstance(self.seed, int) and not isinstance(self.seed, bool) and -(2**63) <= self.seed < 2**63
        check(good, f"SamplingParams.seed={self.seed!r} must be an integer of 64 bits.")

    @property
    def penalizes(self) -> bool:
        """True where logits depend on the tokens before."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> bool:
        """True where unlikely tokens are left out."""
        return any(getattr(self, name) is not None for name in FILTERS)


@runtime_checkable
class Constraint(Protocol):
    """Mask of the tokens with which an answer may go on, such as those that lead to JSON. Belongs to one request."""

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of allowed tokens: one bit each, the lowest of an int32 word first."""
        ...

    def accept(self, token: int) -> None:
        """Advance by one token of the answer."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """Log-probability of a token, and the most likely tokens at its position with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class BatchSamplingParams(NamedTuple):
    """`SamplingParams` as arrays, an entry for each row; parameters that are not set have values that change nothing.

    `seed` has the two halves of 64 bits; `bias_ids` are -1 where there is no bias.
    """

    draws: SamplingTensors
    repetition_penalty: Float32[AnyArray, "rows"]
    frequency_penalty: Float32[AnyArray, "rows"]
    presence_penalty: Float32[AnyArray, "rows"]
    bias_ids: Int32[AnyArray, "rows biases"]
    bias_values: Float32[AnyArray, "rows biases"]
    seed: AnyArray

    @classmethod
    def empty(cls, rows: int, biases: int) -> "BatchSamplingParams":
        """Create rows on the host that sample greedily, to be filled by `set`."""
        zeros = np.zeros(rows, np.float32)
        return cls(
            draws=SamplingTensors.greedy(rows),
            repetition_penalty=np.ones(rows, np.float32),
            frequency_penalty=zeros,
            presence_penalty=zeros.copy(),
            bias_ids=np.full((rows, biases), -1, np.int32),
            bias_values=np.zeros((rows, biases), np.float32),
            seed=np.zeros((rows, 2), np.uint32),
        )

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Write the parameters of a request into a row."""
        self.draws.set(row, sampling)
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.bias_ids[row], self.bias_values[row] = -1, 0.0
        for index, (token, value) in enumerate(sampling.logit_bias):
            self.bias_ids[row, index], self.bias_values[row, index] = token, value
        bits = sampling.seed % 2**64
        self.seed[row] = bits >> 32, bits & 0xFFFFFFFF

    def repeated(self, times: int) -> "BatchSamplingParams":
        """Repeat every row so many times."""
        return self if times == 1 else jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), times, axis=0), self)

    @property
    def keys(self) -> Array:
        """Key of each row's draws."""
        return jax.random.wrap_key_data(jnp.asarray(self.seed), impl="threefry2x32")


class TokenHistory(NamedTuple):
    """Tokens of each row so far, for penalties.

    **Arguments:**

    - `tokens`: tokens by position.
    - `prompt_length`, `length`: number of prompt tokens, and of all.
    """

    tokens: Int[AnyArray, "rows length"]
    prompt_length: Int[AnyArray, "rows"]
    length: Int[AnyArray, "rows"]


class SamplingBatch(NamedTuple):
    """Sampling inputs of a batch of rows.

    **Arguments:**

    - `sampling`: sampling parameters by row.
    - `count`: tokens that each answer has already.
    - `prompt_length`: tokens before the answer.
    - `allowed`, `masked`: where a row is masked, only tokens whose bit is set can be sampled.
    - `adapter`: place of the adapter of each row, which its forward pass reads (see `adapters.py`); 0 for none.
    - `scores_draws`: rows whose log-probabilities are those of the distribution that they are drawn from.
    - `wants_scores`: whether any row needs log-probabilities.
    """

    sampling: BatchSamplingParams
    count: Int[AnyArray, "rows"]
    prompt_length: Int[AnyArray, "rows"]
    allowed: Int32[AnyArray, "rows words"]
    masked: Bool[AnyArray, "rows"]
    adapter: Int32[AnyArray, "rows"]
    scores_draws: Bool[AnyArray, "rows"]
    wants_scores: Bool[AnyArray, ""]

    @classmethod
    def greedy(cls, rows: int, words: int, max_biases: int) -> "SamplingBatch":
        """Create rows on the host that sample greedily, with masks of `words` 32-bit words."""
        return cls(
            sampling=BatchSamplingParams.empty(rows, max_biases),
            count=np.zeros(rows, np.int32),
            prompt_length=np.zeros(rows, np.int32),
            allowed=np.full((rows, words), -1, np.int32),
            masked=np.zeros(rows, bool),
            adapter=np.zeros(rows, np.int32),
            scores_draws=np.zeros(rows, bool),
            wants_scores=np.asarray(False),
        )

    def of(self, rows: np.ndarray, wants_scores: bool) -> "SamplingBatch":
        """Copy some rows: on CPU, JAX may read an argument after the call has returned."""
        part = jax.tree.map(lambda numbers: numbers[rows], self._replace(wants_scores=None))
        return part._replace(wants_scores=np.asarray(wants_scores))


class SamplingForm(NamedTuple):
    """Steps of sampling that any row of a batch needs besides a draw: a program for it has these, and no branches.

    **Arguments:**

    - `filters`: a row draws from the most likely tokens only.
    - `scores`: a row needs log-probabilities.
    """

    filters: bool
    scores: bool


SAMPLING_FORMS = tuple(SamplingForm(filters, scores) for filters in (False, True) for scores in (False, True))


class SamplingTable:
    """Sampling inputs of all slots, on the host (`rows`), and batches of them for programs.

    Of a batch of several rows, what changes with the request of a slot alone stays on the device for the next steps,
    and so do masks that allow all tokens.

    **Arguments:**

    - `rows`: inputs of all slots, as `SamplingBatch.greedy` makes them.
    - `place`: copies an array to all devices; it does not change any more, as CPUs may read it where it is.
    """

    def __init__(self, rows: SamplingBatch, place: Callable[[np.ndarray], Array]):
        self.rows, self._place = rows, place
        self._slots: np.ndarray | None = None
        self._on_device: dict[str, Any] = {}
        self._unmasked: dict[int, Array] = {}  # by the number of rows
        slots = len(rows.count)
        self._filters, self._adjusts = np.zeros(slots, bool), np.zeros(slots, bool)

    def set(self, slot: int, sampling: SamplingParams, *, prompt_length: int, adapter: int, scores_draws: bool) -> None:
        """Write the inputs of a request into its slot."""
        self.rows.sampling.set(slot, sampling)
        self.rows.prompt_length[slot], self.rows.count[slot] = prompt_length, 0
        self.rows.scores_draws[slot], self.rows.adapter[slot] = scores_draws, adapter
        self._filters[slot] = (sampling.temperature > 0 or scores_draws) and sampling.filters
        self._adjusts[slot] = sampling.penalizes or len(sampling.logit_bias) > 0
        self._slots = None

    def form(self, slots: Sequence[int] | np.ndarray, wants_scores: bool) -> SamplingForm | None:
        """Return what the answers in some slots need; None where one has biases, penalties or a constraint."""
        slots = np.asarray(slots)
        if self._adjusts[slots].any() or self.rows.masked[slots].any():
            return None
        return SamplingForm(bool(self._filters[slots].any()), wants_scores)

    def of(self, slots: Sequence[int] | np.ndarray, wants_scores: bool) -> SamplingBatch:
        """Return the inputs of some slots."""
        rows = np.asarray(slots)
        if len(rows) == 1:
            return self.rows.of(rows, wants_scores)
        if self._slots is None or not np.array_equal(self._slots, rows):
            self._slots = rows
            names = "sampling", "prompt_length", "adapter", "scores_draws"
            fixed = {name: getattr(self.rows, name) for name in names}
            self._on_device = jax.tree.map(lambda numbers: self._place(numbers[rows]), fixed)
        count, masked, wanted = self.rows.count[rows], self.rows.masked[rows], np.asarray(wants_scores)
        allowed = self.rows.allowed[rows] if masked.any() else self._all_allowed(len(rows))
        return SamplingBatch(**self._on_device, count=count, allowed=allowed, masked=masked, wants_scores=wanted)

    def _all_allowed(self, rows: int) -> Array:
        if rows not in self._unmasked:
            self._unmasked[rows] = self._place(np.full((rows, self.rows.allowed.shape[1]), -1, np.int32))
        return self._unmasked[rows]


def adjust_logits(
    logits: Float32[Array, "rows vocab"],
    sampling: BatchSamplingParams,
    history: TokenHistory,
    allowed: Int32[AnyArray, "rows words"],
    masked: Bool[AnyArray, "rows"],
) -> Float32[Array, "rows vocab"]:
    """Add biases and penalties to logits; -inf where a `masked` row has no bit in `allowed`."""
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
    in_text = index < jnp.asarray(history.length)[:, None]
    answer = in_text & (index >= jnp.asarray(history.prompt_length)[:, None])
    counts = jnp.zeros(logits.shape, jnp.int32).at[rows, history.tokens].add(answer.astype(jnp.int32), mode="drop")
    occurs = jnp.zeros(logits.shape, bool).at[rows, history.tokens].max(in_text, mode="drop")
    repetition, frequency, presence = (
        jnp.asarray(x)[:, None]
        for x in (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(occurs, repeated, logits)
    return logits - frequency * counts.astype(jnp.float32) - jnp.where(counts > 0, presence, 0.0)


class Scores(NamedTuple):
    """Log-probabilities of chosen tokens, and of the most likely ones, best first."""

    chosen: Float32[Array, "rows"]
    top_ids: Int32[Array, "rows top"]
    top: Float32[Array, "rows top"]


def score_tokens(
    logits: Float32[Array, "rows vocab"], tokens: Int[Array, "rows"], num_top: int, wanted: Bool[Array, ""] | bool
) -> Scores:
    """Return log-probabilities of tokens and of the `num_top` most likely ones; zeros where not `wanted`."""
    rows, num_top = logits.shape[0], min(num_top, logits.shape[1])

    def compute() -> Scores:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        largest, ids = jax.lax.top_k(logits, num_top)
        chosen = jnp.take_along_axis(logits, jnp.clip(tokens, 0, logits.shape[1] - 1)[:, None], axis=1)
        return Scores((chosen - total)[:, 0], ids.astype(jnp.int32), largest - total)

    shape = (rows, num_top)
    nothing = Scores(jnp.zeros((rows,), jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    return branch(wanted, compute, lambda: nothing)


class SampledTokens(NamedTuple):
    """Tokens that a step has sampled, by rows and columns; the first `num_accepted` of each row are valid."""

    tokens: Int32[Array, "rows columns"]
    num_accepted: Int32[Array, "rows"]
    scores: Scores


def sample_rows(
    logits: Array,
    batch: SamplingBatch,
    history: TokenHistory,
    columns: int,
    num_top: int,
    form: SamplingForm | None = None,
) -> tuple[Array, Scores]:
    """Sample and score a token for each row of logits; each row of `batch` has `columns` of them.

    With a `form`, of which all rows are, without a branch.
    """
    sampling = batch.sampling.repeated(columns)
    allowed, masked = (jnp.repeat(jnp.asarray(x), columns, axis=0) for x in (batch.allowed, batch.masked))
    flat = logits.reshape(-1, logits.shape[-1])
    index = (jnp.asarray(batch.count)[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
    of_draws = jnp.repeat(jnp.asarray(batch.scores_draws), columns)[:, None]
    if form is not None:
        best, drawable = (
            jnp.argmax(flat, axis=-1).astype(jnp.int32),
            filtered_logits(flat, sampling.draws, form.filters),
        )
        drawn = sample_from_logits(drawable, sampling.keys, index, best)
        tokens = jnp.where(jnp.asarray(sampling.draws.temperature) > 0, drawn, best)
        return tokens, score_tokens(jnp.where(of_draws, drawable, flat), tokens, num_top, form.scores)
    adjusted = adjust_logits(flat, sampling, history, allowed, masked)
    tokens = choose_tokens(adjusted, sampling.draws, sampling.keys, index)
    scored = _apply_if(
        jnp.any(of_draws), lambda flat: jnp.where(of_draws, filtered_logits(adjusted, sampling.draws), flat), flat
    )
    return tokens, score_tokens(scored, tokens, num_top, jnp.asarray(batch.wants_scores))


def token_scores(scores: Any, rows: range, tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """Convert scores to those of single tokens, by their rows; `scores` are `Scores` with lists in place of arrays."""
    span = slice(rows.start, rows.stop)
    if num_top == 0:
        return [TokenScore(token, score) for token, score in zip(tokens, scores.chosen[span], strict=True)]
    lists = zip(tokens, scores.chosen[span], scores.top_ids[span], scores.top[span], strict=True)
    return [
        TokenScore(token, score, tuple(zip(ids[:num_top], best[:num_top], strict=True)))
        for token, score, ids, best in lists
    ]
