"""Sampling of the next token from logits, with top-k, top-p and min-p filters. Rows of logits are independent.

A filter is a minimum logit: tokens with smaller logits have probability 0. The vocabulary is not sorted. The minimum is
searched among the `NUM_LARGEST` largest logits and, if it is not among them, by bisection over all logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, PRNGKeyArray

from eqx_decoders.errors import CheckedFields, InRange, PositiveFloat, PositiveInt
from eqx_decoders.sharding.axes import AnyArray


Probability = Annotated[float, InRange(above=0, maximum=1)]
T = TypeVar("T")


def branch(needed: bool | Array, compute: Callable[..., T], otherwise: Callable[..., T], *operands: Any) -> T:
    """Return `compute(*operands)` if `needed`, else `otherwise(*operands)`.

    With a bool, the compiled program contains one of the two functions only. With an array, the program branches on the
    device (`jax.lax.cond`). On GPUs the host then waits for the condition before it launches further kernels.
    """
    if isinstance(needed, bool):
        return compute(*operands) if needed else otherwise(*operands)
    return jax.lax.cond(needed, compute, otherwise, *operands)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Greedy decoding: the most likely token. Of equally likely tokens, the one with the lowest id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(CheckedFields):
    """Sampling from `softmax(logits / temperature)`, restricted by the filters in the order below.

    **Arguments:**

    - `temperature`: above 0.
    - `top_k`: keep the k most likely tokens, and tokens that are as likely as the last of them.
    - `top_p`: keep the most likely tokens whose cumulative probability reaches p (Holtzman et al. 2020).
    - `min_p`: keep tokens at least p times as likely as the most likely token (Nguyen et al. 2024).
    """

    temperature: PositiveFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None


Sampler = Greedy | Sample


class RankedLogits(NamedTuple):
    """Input of a filter.

    **Arguments:**

    - `logits`: logits divided by the temperature.
    - `largest`: the largest logits, in descending order.
    - `min_logit`: minimum logit of the previous filters.
    - `always_search`: search all logits by bisection even if `largest` contains the minimum, to avoid a branch.
    """

    logits: Float32[Array, "rows vocab"]
    largest: Float32[Array, "rows num_largest"]
    min_logit: Float32[Array, "rows 1"]
    always_search: bool


class Filter(NamedTuple):
    """Filter of unlikely tokens.

    **Arguments:**

    - `neutral`: the parameter that keeps all tokens; its dtype is the dtype of the parameter.
    - `min_logit`: function from ranked logits and the parameter of each row to the minimum logit of each row.
    """

    neutral: np.int32 | np.float32
    min_logit: Callable[[RankedLogits, Array], Array]


def _top_k_min_logit(ranked: RankedLogits, top_k: Int32[Array, "rows 1"]) -> Float32[Array, "rows 1"]:
    vocab = ranked.logits.shape[1]
    num_largest = ranked.largest.shape[1]
    kth_largest = jnp.take_along_axis(ranked.largest, jnp.clip(top_k - 1, 0, num_largest - 1), axis=1)
    is_active = top_k < vocab
    weights = jnp.ones_like(ranked.logits)
    min_logit = _search_if_needed(
        (top_k > num_largest) & is_active, ranked, weights, top_k.astype(jnp.float32), kth_largest
    )
    return jnp.where(is_active, min_logit, -jnp.inf)


def _top_p_min_logit(ranked: RankedLogits, top_p: Float32[Array, "rows 1"]) -> Float32[Array, "rows 1"]:
    logits, largest, min_logit, _ = ranked
    num_largest = largest.shape[1]
    max_logit = largest[:, :1]
    weights = jnp.where(logits >= min_logit, jnp.exp(logits - max_logit), 0.0)
    target = top_p * jnp.sum(weights, axis=-1, keepdims=True)
    sums = jnp.cumsum(jnp.where(largest >= min_logit, jnp.exp(largest - max_logit), 0.0), axis=-1)
    index = jnp.sum(sums < target, axis=-1, keepdims=True, dtype=jnp.int32)
    among_largest = jnp.take_along_axis(largest, jnp.minimum(index, num_largest - 1), axis=-1)
    needs_search = (index >= num_largest) & (top_p < 1.0) & (num_largest < logits.shape[1])
    return _search_if_needed(needs_search, ranked, weights, target, among_largest)


def _min_p_min_logit(ranked: RankedLogits, min_p: Float32[Array, "rows 1"]) -> Float32[Array, "rows 1"]:
    return ranked.largest[:, :1] + jnp.log(min_p)


# By their field in `Sample` and `SamplingParams`, in the order in which they apply.
FILTERS = {
    "top_k": Filter(np.int32(0), _top_k_min_logit),
    "top_p": Filter(np.float32(1.0), _top_p_min_logit),
    "min_p": Filter(np.float32(0.0), _min_p_min_logit),
}
NUM_LARGEST = 64  # number of largest logits that filters search before they search all logits
CHUNK = 512  # tokens per chunk of the two-level sampling in `_inverse_cdf`


class SamplingTensors(NamedTuple):
    """Parameters of `Sample` as arrays, so that all samplers share one compiled program.

    **Arguments:**

    - `temperature`: temperature of each row, or a single temperature for all rows. 0: greedy decoding.
    - `filters`: parameters of the `FILTERS`, by name, shaped like `temperature`.
    """

    temperature: Float32[AnyArray, "rows"]
    filters: dict[str, AnyArray]

    @classmethod
    def greedy(cls, rows: int) -> "SamplingTensors":
        """Create the parameters of greedy decoding as NumPy arrays, which `set` can modify."""
        filters = {name: np.full(rows, token_filter.neutral) for name, token_filter in FILTERS.items()}
        return cls(np.zeros(rows, np.float32), filters)

    def set(self, row: int, sampler: Any) -> None:
        """Set the parameters of a row to those of a `Sample` or a `SamplingParams`."""
        self.temperature[row] = sampler.temperature
        for name, parameters in self.filters.items():
            value = getattr(sampler, name)
            parameters[row] = FILTERS[name].neutral if value is None else min(value, np.iinfo(np.int32).max)

    @classmethod
    def of(cls, sampler: Sampler) -> "SamplingTensors | None":
        """Return the parameters of a sampler as arrays of length 1, for all rows. None for `Greedy`."""
        if isinstance(sampler, Greedy):
            return None
        settings = cls.greedy(1)
        settings.set(0, sampler)
        return settings


def choose_tokens(
    logits: Float32[Array, "rows vocab"],
    settings: SamplingTensors | None,
    keys: AnyArray | None = None,
    index: Int[AnyArray, "rows"] | None = None,
) -> Int32[Array, "rows"]:
    """Return a token for each row: the most likely token, or a sample.

    The token of a row depends only on the logits, the parameters, the key and the index of this row. `generate`, the
    engine and the verification of draft tokens consume the same random numbers, so that they sample the same tokens.
    Computations that no row needs are skipped.

    **Arguments:**

    - `settings`: sampling parameters. None: greedy decoding.
    - `keys`: a Threefry key for each row (see `threefry_key`).
    - `index`: folded into the key of each row; one index per sampled token.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if settings is None:
        return best
    is_sampled = jnp.broadcast_to(settings.temperature, best.shape) > 0

    def sample() -> Array:
        tokens = sample_from_logits(filtered_logits(logits, settings), keys, index, best)
        return jnp.where(is_sampled, tokens, best)

    return jax.lax.cond(jnp.any(is_sampled), sample, lambda: best)


def threefry_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """Return the key if it is a Threefry key. Otherwise return a new Threefry key that is seeded from it.

    Other implementations, such as `rbg`, do not give each row independent random numbers under `vmap`.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


def sample_from_logits(
    logits: Float32[Array, "rows vocab"], keys: AnyArray, index: Int[AnyArray, "rows"], best: Int32[Array, "rows"]
) -> Int32[Array, "rows"]:
    """Sample a token for each row from `softmax(logits)`, with the key `fold_in(key, index)`.

    `best`: the most likely token of each row.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    uniform = jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i), (2,)))(keys, index)
    return _inverse_cdf(weights, uniform, best)


def filtered_logits(
    logits: Float32[Array, "rows vocab"], settings: SamplingTensors, filters: bool | None = None
) -> Float32[Array, "rows vocab"]:
    """Return the logits to sample from: divided by the temperature, and -inf for tokens that a filter removes.

    Greedy rows are treated as if their temperature were 1. For `filters`, see `needed` of `min_logits`.
    """
    temperature = jnp.broadcast_to(settings.temperature, logits.shape[:1])[:, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    return jnp.where(scaled >= min_logits(scaled, settings.filters, filters), scaled, -jnp.inf)


def min_logits(
    logits: Float32[Array, "rows vocab"], filters: dict[str, AnyArray], needed: bool | None = None
) -> Float32[Array, "rows 1"]:
    """Return the minimum logit that passes each row's filters. It is at most the row's maximum; -inf: all tokens pass.

    `needed`: whether any row has a filter. None: branch on the device, depending on `filters`.
    """
    parameters = {name: jnp.broadcast_to(filters[name], logits.shape[:1])[:, None] for name in FILTERS}
    is_active = {name: jnp.any(parameters[name] != token_filter.neutral) for name, token_filter in FILTERS.items()}
    unfiltered = jnp.full((logits.shape[0], 1), -jnp.inf, logits.dtype)

    def apply_filters() -> Array:
        # Without the barrier, XLA would sort all logits because only some of the largest logits are used.
        largest = jax.lax.optimization_barrier(jax.lax.top_k(logits, min(NUM_LARGEST, logits.shape[1]))[0])
        min_logit = unfiltered
        for name, token_filter in FILTERS.items():

            def apply(
                min_logit: Array, parameter: Array = parameters[name], token_filter: Filter = token_filter
            ) -> Array:
                ranked = RankedLogits(logits, largest, min_logit, needed is not None)
                new = token_filter.min_logit(ranked, parameter)
                return jnp.where(parameter == token_filter.neutral, min_logit, jnp.maximum(min_logit, new))

            min_logit = branch(needed or is_active[name], apply, lambda min_logit: min_logit, min_logit)
        return min_logit

    any_active = jnp.any(jnp.stack([*is_active.values()])) if needed is None else needed
    return branch(any_active, apply_filters, lambda: unfiltered)


def _search_if_needed(
    needs_search: Array, ranked: RankedLogits, weights: Array, target: Array, among_largest: Array
) -> Array:
    """Return `among_largest`, or the result of a search over all logits for rows where `needs_search` is true.

    Bisection is skipped if no row needs it, unless `ranked.always_search`.
    """

    def search() -> Array:
        return jnp.where(needs_search, _bisect(ranked.logits, weights, target), among_largest)

    return branch(ranked.always_search or jnp.any(needs_search), search, lambda: among_largest)


def _bisect(
    logits: Float32[Array, "rows vocab"], weights: Float32[Array, "rows vocab"], target: Float32[Array, "rows 1"]
) -> Float32[Array, "rows 1"]:
    """Return the largest logit x such that the weights of all logits >= x sum to at least `target`.

    If no logit does, return the smallest one. The result is exact: bisection runs over the 32 bits of an integer that
    is ordered like the floats. This is much faster than sorting.
    """
    keys = _ordered_int(logits)

    def halve(_: Array, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = interval
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        reaches = jnp.sum(jnp.where(keys >= middle, weights, 0.0), axis=-1, keepdims=True) >= target
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle - 1)

    interval = jnp.min(keys, axis=-1, keepdims=True), jnp.max(keys, axis=-1, keepdims=True)
    low, _ = jax.lax.fori_loop(0, 32, halve, interval)
    return jax.lax.bitcast_convert_type(_flip_negative(low), jnp.float32)


def _ordered_int(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Map floats to integers with the same order; 0.0 and -0.0 map to the same integer."""
    return _flip_negative(jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32))


def _flip_negative(bits: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Invert the lower 31 bits of negative integers. This function is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _inverse_cdf(weights: Array, uniform: Array, best: Array) -> Int32[Array, "rows"]:
    """Sample a token for each row with probability proportional to its weight, by two uniform numbers per row.

    The first uniform number selects a chunk of `CHUNK` tokens, the second a token of the chunk. A single float32 number
    would have too few bits for large vocabularies.
    """
    rows, vocab = weights.shape
    chunks = jnp.pad(weights, ((0, 0), (0, -vocab % CHUNK))).reshape(rows, -1, CHUNK)

    def sample_index(weights: Array, uniform: Array) -> Array:
        cumulative = jnp.cumsum(weights, axis=1)
        is_before = cumulative <= uniform[:, None] * cumulative[:, -1:]
        return jnp.minimum(jnp.sum(is_before.astype(jnp.int32), axis=1), weights.shape[1] - 1)

    chunk = sample_index(chunks.sum(-1), uniform[:, 0])
    offset = sample_index(jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0], uniform[:, 1])
    token = jnp.minimum(chunk * CHUNK + offset, vocab - 1).astype(jnp.int32)
    # Rounding errors can lead to a token of weight 0. Return the most likely token instead.
    return jnp.where(jnp.take_along_axis(weights, token[:, None], axis=1)[:, 0] > 0, token, best)


def is_stop(token: Int[Array, "*rows"], stop_ids: Int[AnyArray, "stops"]) -> Bool[Array, "*rows"]:
    """Return whether each token is one of `stop_ids`."""
    return jnp.any(token[..., None] == stop_ids.reshape((1,) * token.ndim + (-1,)), axis=-1)


# Defaults for models that publish no sampling parameters.
TEMPERATURE = 0.7
TOP_P = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Sampling parameters that are published with a model (`generation_config.json`). None: not set.

    **Arguments:**

    - `stop_ids`: generation ends after any of these tokens.
    - `do_sample`: False: greedy decoding.
    - `temperature`, `top_k`, `top_p`, `min_p`: see `Sample`. A temperature of 0: greedy decoding.
    - `repetition_penalty`: see `serving.SamplingParams`; only the server uses it.
    """

    stop_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampler(self, **settings: int | float | None) -> Sampler:
        """Return a sampler with these parameters of `Sample`; the published parameters replace those that are None.

        Returns `Greedy` if the temperature is 0, or if `do_sample` is False and all `settings` are None. For a model
        that publishes no parameters, the temperature is 0.7 and `top_p` is 0.95 unless `settings` has them. Any other
        parameter that is not set has the default of `Sample`.
        """
        names = ("temperature", *FILTERS)
        requested = {name: settings[name] for name in names if settings.get(name) is not None}
        if self.do_sample is False and not requested:
            return Greedy()
        published = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        merged: dict[str, Any] = {**(published or {"temperature": TEMPERATURE, "top_p": TOP_P}), **requested}
        if merged.get("temperature") == 0:
            return Greedy()
        return Sample(**merged)
