"""How the next tokens of many requests are chosen at once, each by its own numbers.

All numbers are arrays, so requests of any kind share one program; what no row asks for is skipped (`jax.lax.cond`).
Nothing is sorted: a filter is a least logit, found among the largest few or, where they hold too little, by bisection.
What a row gets depends on its own logits, numbers and seed alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from eqx_decoders.core.sampling import LIKELY, least_reaching
from eqx_decoders.serving.engine.request import SamplingParams, TokenScore
from eqx_decoders.sharding.axes import AnyArray


_BLOCK = 512  # tokens whose probabilities are added up before a draw looks into them


class BatchSamplingParams(NamedTuple):
    """The numbers of `SamplingParams`, an entry for each row; what is not asked for has a number that changes nothing.

    `seed` has the two halves of the 64 bits; `bias_ids` are -1 where there is no bias.
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
        """Greedy rows, on the host, to be filled by `set`."""
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
        """Write the numbers of a request into a row."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k or 0, np.iinfo(np.int32).max)
        self.top_p[row] = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_p[row] = sampling.min_p or 0.0
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.bias_ids[row], self.bias_values[row] = -1, 0.0
        for place, (token, value) in enumerate(sampling.logit_bias):
            self.bias_ids[row, place], self.bias_values[row, place] = token, value
        bits = sampling.seed % 2**64
        self.seed[row] = bits >> 32, bits & 0xFFFFFFFF

    def of(self, rows: np.ndarray) -> "BatchSamplingParams":
        """The numbers of some rows."""
        return BatchSamplingParams(*(numbers[rows] for numbers in self))

    def repeated(self, times: int) -> "BatchSamplingParams":
        """Every row so many times."""
        return self if times == 1 else BatchSamplingParams(*(jnp.repeat(jnp.asarray(x), times, axis=0) for x in self))


class TokenHistory(NamedTuple):
    """The tokens of each row up to here, for penalties.

    **Arguments:**

    - `tokens`: by their positions.
    - `prompt_length`, `length`: how many there are of the prompt, and in all.
    """

    tokens: Int[AnyArray, "rows length"]
    prompt_length: Int[AnyArray, "rows"]
    length: Int[AnyArray, "rows"]


def adjusted(
    logits: Float32[Array, "rows vocab"],
    sampling: BatchSamplingParams,
    written: TokenHistory,
    allowed: Int32[AnyArray, "rows words"],
    masked: Bool[AnyArray, "rows"],
) -> Float32[Array, "rows vocab"]:
    """Logits with biases and penalties, -inf where a row that is `masked` has no bit in `allowed`."""
    rows = jnp.arange(logits.shape[0])[:, None]
    ids, values = jnp.asarray(sampling.bias_ids), jnp.asarray(sampling.bias_values)

    def biased(logits: Array) -> Array:
        return logits.at[rows, jnp.where(ids < 0, logits.shape[1], ids)].add(values, mode="drop")

    def penalised(logits: Array) -> Array:
        return _penalised(logits, sampling, written)

    def cut(logits: Array) -> Array:
        index = jnp.arange(logits.shape[1])
        bits = jnp.asarray(allowed)[:, index // 32] >> (index % 32)[None]
        return jnp.where(jnp.asarray(masked)[:, None] & (bits & 1 == 0), -jnp.inf, logits)

    logits = _where_asked(jnp.any(ids >= 0), biased, logits)
    penalties = (sampling.frequency_penalty, sampling.presence_penalty)
    asked = jnp.any(sampling.repetition_penalty != 1.0) | jnp.any(jnp.stack(penalties) != 0.0)
    logits = _where_asked(asked, penalised, logits)
    return _where_asked(jnp.any(masked), cut, logits)


def _where_asked(asked: Array, change, logits: Array) -> Array:
    return jax.lax.cond(asked, change, lambda logits: logits, logits)


def _penalised(logits: Array, sampling: BatchSamplingParams, written: TokenHistory) -> Array:
    rows, index = jnp.arange(logits.shape[0])[:, None], jnp.arange(written.tokens.shape[1])[None]
    there = index < jnp.asarray(written.length)[:, None]
    answer = there & (index >= jnp.asarray(written.prompt_length)[:, None])
    counts = jnp.zeros(logits.shape, jnp.int32).at[rows, written.tokens].add(answer.astype(jnp.int32), mode="drop")
    seen = jnp.zeros(logits.shape, bool).at[rows, written.tokens].max(there, mode="drop")
    repetition, frequency, presence = (
        jnp.asarray(x)[:, None]
        for x in (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    return logits - frequency * counts.astype(jnp.float32) - jnp.where(counts > 0, presence, 0.0)


def choose(
    logits: Float32[Array, "rows vocab"], sampling: BatchSamplingParams, index: Int[AnyArray, "rows"]
) -> Int32[Array, "rows"]:
    """One token for each row: the most likely one, or the draw number `index` of its seed."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jnp.asarray(sampling.temperature) > 0

    def draws() -> Array:
        heat = jnp.where(drawn, sampling.temperature, 1.0)[:, None]
        scaled = logits / heat
        weights = jnp.where(scaled >= least(scaled, sampling), jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
        return jnp.where(drawn, _drawn(weights, _uniform(sampling.seed, index), best), best)

    return jax.lax.cond(jnp.any(drawn), draws, lambda: best)


def least(logits: Float32[Array, "rows vocab"], sampling: BatchSamplingParams) -> Float32[Array, "rows 1"]:
    """The least logit that each row's filters leave, -inf where they leave all."""
    asked = jnp.any(sampling.top_k > 0) | jnp.any(sampling.top_p < 1.0)
    nothing = jnp.full((logits.shape[0], 1), -jnp.inf, logits.dtype)
    cut = jax.lax.cond(asked, lambda: _least_of_most(logits, sampling), lambda: nothing)
    min_p = jnp.asarray(sampling.min_p)[:, None]
    return jnp.maximum(cut, logits.max(-1, keepdims=True) + jnp.log(min_p))  # log(0) cuts nothing


def _least_of_most(logits: Array, sampling: BatchSamplingParams) -> Float32[Array, "rows 1"]:
    """What top_k and then top_p leave."""
    vocab = logits.shape[1]
    count = min(LIKELY, vocab)
    largest = jax.lax.top_k(logits, count)[0]
    top_k = jnp.clip(jnp.asarray(sampling.top_k), 0, vocab)
    top_k = jnp.where(top_k == vocab, 0, top_k)[:, None]
    kth = jnp.take_along_axis(largest, jnp.clip(top_k - 1, 0, count - 1), axis=1)
    far = top_k > count
    ones = jnp.ones_like(logits)
    kth = _where_far(far, lambda: least_reaching(logits, ones, top_k.astype(jnp.float32), jnp.any(far)), kth)
    kth = jnp.where(top_k > 0, kth, -jnp.inf)

    weights = jnp.where(logits >= kth, jnp.exp(logits - largest[:, :1]), 0.0)
    top_p = jnp.asarray(sampling.top_p)[:, None]
    wanted = top_p * weights.sum(-1, keepdims=True)
    mass = jnp.cumsum(jnp.where(largest >= kth, jnp.exp(largest - largest[:, :1]), 0.0), axis=1)
    reached = jnp.sum((mass < wanted).astype(jnp.int32), axis=1, keepdims=True)
    nucleus = jnp.take_along_axis(largest, jnp.minimum(reached, count - 1), axis=1)
    far = (reached >= count) & (top_p < 1.0) & (count < vocab)
    nucleus = _where_far(far, lambda: least_reaching(logits, weights, wanted, jnp.any(far)), nucleus)
    return jnp.where(top_p < 1.0, jnp.maximum(nucleus, kth), kth)


def _where_far(far: Array, find: Callable[[], Array], near: Array) -> Array:
    """What lies beyond the largest few logits; it is looked for only if it does so in some row."""
    return jax.lax.cond(jnp.any(far), lambda: jnp.where(far, find(), near), lambda: near)


def _uniform(seed: AnyArray, index: AnyArray) -> Float32[Array, "rows"]:
    """A number from 0 to below 1 for each row, by its seed and index alone."""

    def one(seed: Array, index: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, index))

    return jax.vmap(one)(jnp.asarray(seed), jnp.asarray(index))


def _drawn(weights: Array, uniform: Array, best: Array) -> Int32[Array, "rows"]:
    """The first token at which the sum of the weights up to it exceeds the uniform share of all.

    Sums of blocks first, then inside of the one block that it falls into.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    ends = jnp.cumsum(blocks.sum(-1), axis=1)
    goal = (uniform * ends[:, -1])[:, None]
    block = jnp.minimum(jnp.sum((ends <= goal).astype(jnp.int32), axis=1), blocks.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=1)
    place = jnp.sum((inside + before[:, None] <= goal).astype(jnp.int32), axis=1)
    token = jnp.minimum(block * _BLOCK + jnp.minimum(place, _BLOCK - 1), vocab - 1).astype(jnp.int32)
    # where rounding has led to a token of no weight
    return jnp.where(jnp.take_along_axis(weights, token[:, None], axis=1)[:, 0] > 0, token, best)


class Scores(NamedTuple):
    """Log-probabilities: of given tokens, and of the most likely ones, best first."""

    chosen: Float32[Array, "rows"]
    top_ids: Int32[Array, "rows top"]
    top: Float32[Array, "rows top"]


def scores(
    logits: Float32[Array, "rows vocab"], tokens: Int[Array, "rows"], count: int, asked: Bool[Array, ""]
) -> Scores:
    """Log-probabilities of tokens and of the `count` most likely ones; zeros where nobody asks."""
    rows, count = logits.shape[0], min(count, logits.shape[1])

    def found() -> Scores:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        largest, ids = jax.lax.top_k(logits, count)
        given = jnp.take_along_axis(logits, jnp.clip(tokens, 0, logits.shape[1] - 1)[:, None], axis=1)
        return Scores((given - total)[:, 0], ids.astype(jnp.int32), largest - total)

    shape = (rows, count)
    nothing = Scores(jnp.zeros((rows,), jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    return jax.lax.cond(asked, found, lambda: nothing)


def token_scores(scores: Scores, rows: range, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """Log-probabilities of single tokens, on the host, by their rows."""
    found = []
    for row, token in zip(rows, tokens, strict=True):
        best = zip(scores.top_ids[row, :count].tolist(), scores.top[row, :count].tolist(), strict=True)
        found.append(TokenScore(int(token), float(scores.chosen[row]), tuple(best)))
    return found
