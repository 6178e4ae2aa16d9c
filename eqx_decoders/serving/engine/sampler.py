"""Sampling of the next tokens of many requests at once, each with its own parameters.

All parameters are arrays, so requests of any kind share one program; steps that no row needs are skipped
(`jax.lax.cond`). Nothing is sorted: a filter is a minimum logit, taken from the largest few or, where they hold too
little mass, by bisection. A row's token depends on its own logits, parameters and seed alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from eqx_decoders.core.sampling import LIKELY, Probability, least_reaching
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


_BLOCK = 512  # tokens whose probabilities are added up before a draw looks into them


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

    temperature: Float32[AnyArray, "rows"]
    top_k: Int32[AnyArray, "rows"]
    top_p: Float32[AnyArray, "rows"]
    min_p: Float32[AnyArray, "rows"]
    repetition_penalty: Float32[AnyArray, "rows"]
    frequency_penalty: Float32[AnyArray, "rows"]
    presence_penalty: Float32[AnyArray, "rows"]
    bias_ids: Int32[AnyArray, "rows biases"]
    bias_values: Float32[AnyArray, "rows biases"]
    seed: AnyArray

    @classmethod
    def empty(cls, rows: int, biases: int) -> "BatchSamplingParams":
        """Create rows on the host that sample greedily, to be filled by `set`."""
        ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        return cls(
            temperature=zeros,
            top_k=np.zeros(rows, np.int32),
            top_p=ones,
            min_p=zeros.copy(),
            repetition_penalty=ones.copy(),
            frequency_penalty=zeros.copy(),
            presence_penalty=zeros.copy(),
            bias_ids=np.full((rows, biases), -1, np.int32),
            bias_values=np.zeros((rows, biases), np.float32),
            seed=np.zeros((rows, 2), np.uint32),
        )

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Write the parameters of a request into a row."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k or 0, np.iinfo(np.int32).max)
        self.top_p[row] = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_p[row] = sampling.min_p or 0.0
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.bias_ids[row], self.bias_values[row] = -1, 0.0
        for index, (token, value) in enumerate(sampling.logit_bias):
            self.bias_ids[row, index], self.bias_values[row, index] = token, value
        bits = sampling.seed % 2**64
        self.seed[row] = bits >> 32, bits & 0xFFFFFFFF

    def of(self, rows: np.ndarray) -> "BatchSamplingParams":
        """Return the parameters of some rows."""
        return BatchSamplingParams(*(numbers[rows] for numbers in self))

    def repeated(self, times: int) -> "BatchSamplingParams":
        """Repeat every row so many times."""
        return self if times == 1 else BatchSamplingParams(*(jnp.repeat(jnp.asarray(x), times, axis=0) for x in self))


class TokenHistory(NamedTuple):
    """Tokens of each row so far, for penalties.

    **Arguments:**

    - `tokens`: tokens by position.
    - `prompt_length`, `length`: number of prompt tokens, and of all.
    """

    tokens: Int[AnyArray, "rows length"]
    prompt_length: Int[AnyArray, "rows"]
    length: Int[AnyArray, "rows"]


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


def sample_tokens(
    logits: Float32[Array, "rows vocab"], sampling: BatchSamplingParams, index: Int[AnyArray, "rows"]
) -> Int32[Array, "rows"]:
    """Sample one token for each row: the most likely one, or draw number `index` of its seed."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jnp.asarray(sampling.temperature) > 0

    def draw() -> Array:
        temperature = jnp.where(drawn, sampling.temperature, 1.0)[:, None]
        scaled = logits / temperature
        passes = scaled >= min_logits(scaled, sampling)
        weights = jnp.where(passes, jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
        return jnp.where(drawn, _inverse_cdf(weights, _uniform(sampling.seed, index), best), best)

    return jax.lax.cond(jnp.any(drawn), draw, lambda: best)


def min_logits(logits: Float32[Array, "rows vocab"], sampling: BatchSamplingParams) -> Float32[Array, "rows 1"]:
    """Return the minimum logit that passes each row's filters, -inf where all pass."""
    filtered = jnp.any(sampling.top_k > 0) | jnp.any(sampling.top_p < 1.0)
    nothing = jnp.full((logits.shape[0], 1), -jnp.inf, logits.dtype)
    min_logit = jax.lax.cond(filtered, lambda: _min_logits_of_top(logits, sampling), lambda: nothing)
    min_p = jnp.asarray(sampling.min_p)[:, None]
    return jnp.maximum(min_logit, logits.max(-1, keepdims=True) + jnp.log(min_p))  # log(0) cuts nothing


def _min_logits_of_top(logits: Array, sampling: BatchSamplingParams) -> Float32[Array, "rows 1"]:
    """Return the minimum logit after `top_k` and then `top_p`."""
    vocab = logits.shape[1]
    count = min(LIKELY, vocab)
    largest = jax.lax.top_k(logits, count)[0]
    top_k = jnp.clip(jnp.asarray(sampling.top_k), 0, vocab)
    top_k = jnp.where(top_k == vocab, 0, top_k)[:, None]
    kth = jnp.take_along_axis(largest, jnp.clip(top_k - 1, 0, count - 1), axis=1)
    beyond = top_k > count
    ones = jnp.ones_like(logits)
    ranks = top_k.astype(jnp.float32)
    kth = _search_if_beyond(beyond, lambda: least_reaching(logits, ones, ranks, jnp.any(beyond)), kth)
    kth = jnp.where(top_k > 0, kth, -jnp.inf)

    weights = jnp.where(logits >= kth, jnp.exp(logits - largest[:, :1]), 0.0)
    top_p = jnp.asarray(sampling.top_p)[:, None]
    wanted = top_p * weights.sum(-1, keepdims=True)
    mass = jnp.cumsum(jnp.where(largest >= kth, jnp.exp(largest - largest[:, :1]), 0.0), axis=1)
    reached = jnp.sum((mass < wanted).astype(jnp.int32), axis=1, keepdims=True)
    nucleus = jnp.take_along_axis(largest, jnp.minimum(reached, count - 1), axis=1)
    beyond = (reached >= count) & (top_p < 1.0) & (count < vocab)
    nucleus = _search_if_beyond(beyond, lambda: least_reaching(logits, weights, wanted, jnp.any(beyond)), nucleus)
    return jnp.where(top_p < 1.0, jnp.maximum(nucleus, kth), kth)


def _search_if_beyond(beyond: Array, find: Callable[[], Array], otherwise: Array) -> Array:
    """Search by bisection only if some row's minimum lies beyond the largest few logits."""
    return jax.lax.cond(jnp.any(beyond), lambda: jnp.where(beyond, find(), otherwise), lambda: otherwise)


def _uniform(seed: AnyArray, index: AnyArray) -> Float32[Array, "rows"]:
    """Return a uniform number in [0, 1) for each row, from its seed and index alone."""

    def draw(seed: Array, index: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, index))

    return jax.vmap(draw)(jnp.asarray(seed), jnp.asarray(index))


def _inverse_cdf(weights: Array, uniform: Array, best: Array) -> Int32[Array, "rows"]:
    """Return the first token at which the cumulative weight exceeds the uniform share of the total.

    Blocks are summed first; then the one block of the token is searched.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    ends = jnp.cumsum(blocks.sum(-1), axis=1)
    target = (uniform * ends[:, -1])[:, None]
    block = jnp.minimum(jnp.sum((ends <= target).astype(jnp.int32), axis=1), blocks.shape[1] - 1)
    preceding = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    cumulative = jnp.cumsum(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=1)
    offset = jnp.sum((cumulative + preceding[:, None] <= target).astype(jnp.int32), axis=1)
    token = jnp.minimum(block * _BLOCK + jnp.minimum(offset, _BLOCK - 1), vocab - 1).astype(jnp.int32)
    # where rounding has led to a token of no weight
    return jnp.where(jnp.take_along_axis(weights, token[:, None], axis=1)[:, 0] > 0, token, best)


class Scores(NamedTuple):
    """Log-probabilities of chosen tokens, and of the most likely ones, best first."""

    chosen: Float32[Array, "rows"]
    top_ids: Int32[Array, "rows top"]
    top: Float32[Array, "rows top"]


def score_tokens(
    logits: Float32[Array, "rows vocab"], tokens: Int[Array, "rows"], num_top: int, wanted: Bool[Array, ""]
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
    return jax.lax.cond(wanted, compute, lambda: nothing)


def token_scores(scores: Scores, rows: range, tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """Convert scores to those of single tokens on the host, by their rows."""
    converted = []
    for row, token in zip(rows, tokens, strict=True):
        best = zip(scores.top_ids[row, :num_top].tolist(), scores.top[row, :num_top].tolist(), strict=True)
        converted.append(TokenScore(int(token), float(scores.chosen[row]), tuple(best)))
    return converted
