"""Choice of the next token from logits: filters and draws, row by row.

Nothing is sorted: a filter is a least logit, taken from the largest few or, where they do not reach it, by bisection.
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


Probability = Annotated[float, InRange(above=0, most=1)]
T = TypeVar("T")


def branch(needed: bool | Array, compute: Callable[..., T], otherwise: Callable[..., T], *operands: Any) -> T:
    """Return `compute(*operands)` where it is needed, else `otherwise(*operands)`.

    A program made with a bool has one of them alone; with an array it branches on the device. On GPUs that is a wait:
    the host launches nothing more before it has read the condition.
    """
    if isinstance(needed, bool):
        return compute(*operands) if needed else otherwise(*operands)
    return jax.lax.cond(needed, compute, otherwise, *operands)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Choice of the most likely token; the lowest id of equally likely ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(CheckedFields):
    """A draw from `softmax(logits / temperature)`, cut by the filters in this order.

    **Arguments:**

    - `temperature`: above 0.
    - `top_k`: only the k most likely tokens (ties with the last of them stay).
    - `top_p`: only the most likely tokens that together reach probability p (Holtzman et al. 2020).
    - `min_p`: only tokens at least p times as likely as the most likely one (Nguyen et al. 2024).
    """

    temperature: PositiveFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None


Sampler = Greedy | Sample


class RankedLogits(NamedTuple):
    """Logits over temperature: all, the largest few in order, and the least that passed the filters before.

    With `search`, all are searched, also where the largest few would do.
    """

    logits: Float32[Array, "rows vocab"]
    largest: Float32[Array, "rows few"]
    lowest: Float32[Array, "rows 1"]
    search: bool


class Filter(NamedTuple):
    """A way to cut unlikely tokens.

    **Arguments:**

    - `neutral`: the setting that cuts nothing, of the dtype of settings.
    - `lowest`: returns the least logit that passes, from ranked logits and the setting of each row.
    """

    neutral: np.int32 | np.float32
    lowest: Callable[[RankedLogits, Array], Array]


def _lowest_of_top_k(ranked: RankedLogits, top_k: Int32[Array, "rows 1"]) -> Float32[Array, "rows 1"]:
    vocab, few = ranked.logits.shape[1], ranked.largest.shape[1]
    kth = jnp.take_along_axis(ranked.largest, jnp.clip(top_k - 1, 0, few - 1), axis=1)
    cuts, ones, count = top_k < vocab, jnp.ones_like(ranked.logits), top_k.astype(jnp.float32)
    return jnp.where(cuts, _search_beyond((top_k > few) & cuts, ranked, ones, count, kth), -jnp.inf)


def _lowest_of_top_p(ranked: RankedLogits, top_p: Float32[Array, "rows 1"]) -> Float32[Array, "rows 1"]:
    logits, largest, lowest, _ = ranked
    few, top = largest.shape[1], largest[:, :1]
    weights = jnp.where(logits >= lowest, jnp.exp(logits - top), 0.0)
    wanted = top_p * jnp.sum(weights, axis=-1, keepdims=True)
    sums = jnp.cumsum(jnp.where(largest >= lowest, jnp.exp(largest - top), 0.0), axis=-1)
    reached = jnp.sum(sums < wanted, axis=-1, keepdims=True, dtype=jnp.int32)
    nucleus = jnp.take_along_axis(largest, jnp.minimum(reached, few - 1), axis=-1)
    beyond = (reached >= few) & (top_p < 1.0) & (few < logits.shape[1])
    return _search_beyond(beyond, ranked, weights, wanted, nucleus)


def _lowest_of_min_p(ranked: RankedLogits, min_p: Float32[Array, "rows 1"]) -> Float32[Array, "rows 1"]:
    return ranked.largest[:, :1] + jnp.log(min_p)


FILTERS = {  # by their fields in `Sample` and `SamplingParams`, in the order in which they apply
    "top_k": Filter(np.int32(0), _lowest_of_top_k),
    "top_p": Filter(np.float32(1.0), _lowest_of_top_p),
    "min_p": Filter(np.float32(0.0), _lowest_of_min_p),
}
LIKELY = 64  # largest logits among which filters look first
BLOCK = 512  # tokens whose probabilities are added up before a draw looks into them


class DrawSettings(NamedTuple):
    """Settings of `Sample` as arrays, an entry for each row or one for all: all samplers share one program.

    A temperature of 0 stands for greedy rows. `filters` has the settings of `FILTERS`.
    """

    temperature: Float32[AnyArray, "rows"]
    filters: dict[str, AnyArray]

    @classmethod
    def greedy(cls, rows: int) -> "DrawSettings":
        """Create greedy rows on the host, to be filled by `set`."""
        filters = {name: np.full(rows, each.neutral) for name, each in FILTERS.items()}
        return cls(np.zeros(rows, np.float32), filters)

    def set(self, row: int, sampler: Any) -> None:
        """Write the fields of a `Sample` or of `SamplingParams` into a row."""
        self.temperature[row] = sampler.temperature
        for name, settings in self.filters.items():
            value = getattr(sampler, name)
            settings[row] = FILTERS[name].neutral if value is None else min(value, np.iinfo(np.int32).max)

    @classmethod
    def of(cls, sampler: Sampler) -> "DrawSettings | None":
        """Return the settings of all rows; None for greedy decoding."""
        if isinstance(sampler, Greedy):
            return None
        settings = cls.greedy(1)
        settings.set(0, sampler)
        return settings


def choose_tokens(
    logits: Float32[Array, "rows vocab"],
    settings: DrawSettings | None,
    keys: AnyArray | None = None,
    index: Int[AnyArray, "rows"] | None = None,
) -> Int32[Array, "rows"]:
    """Return a token for each row: the most likely one, or draw number `index` of its key.

    A row's token depends on its own logits, settings and key alone. A draw takes two random numbers, wherever it is
    made: so `generate`, the engine and the verification of drafts choose alike. Steps that no row needs are skipped.
    The keys are Threefry's: `vmap` gives other generators of JAX one number for all rows.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if settings is None:
        return best
    drawn = jnp.broadcast_to(settings.temperature, best.shape) > 0

    def draw() -> Array:
        tokens = draw_tokens(draw_logits(logits, settings), keys, index, best)
        return jnp.where(drawn, tokens, best)

    return jax.lax.cond(jnp.any(drawn), draw, lambda: best)


def threefry_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """Return the key if it is a Threefry key. Otherwise return a new Threefry key that is seeded from it.

    Other implementations, such as `rbg`, do not give each row independent random numbers under `vmap`.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


def draw_tokens(
    logits: Float32[Array, "rows vocab"], keys: AnyArray, index: Int[AnyArray, "rows"], best: Int32[Array, "rows"]
) -> Int32[Array, "rows"]:
    """Return draw number `index` of each row's key from `softmax(logits)`, whose most likely tokens are `best`."""
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    uniform = jax.vmap(lambda key, number: jax.random.uniform(jax.random.fold_in(key, number), (2,)))(keys, index)
    return _inverse_cdf(weights, uniform, best)


def draw_logits(
    logits: Float32[Array, "rows vocab"], settings: DrawSettings, filters: bool | None = None
) -> Float32[Array, "rows vocab"]:
    """Return the logits of the distribution that a token is drawn from: over temperature, -inf where a filter cuts.

    Greedy rows, which draw nothing, are as at a temperature of 1. `filters` as in `min_logits`.
    """
    temperature = jnp.broadcast_to(settings.temperature, logits.shape[:1])[:, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    return jnp.where(scaled >= min_logits(scaled, settings.filters, filters), scaled, -jnp.inf)


def min_logits(
    logits: Float32[Array, "rows vocab"], filters: dict[str, AnyArray], needed: bool | None = None
) -> Float32[Array, "rows 1"]:
    """Return the least logit that passes each row's filters, -inf where all pass; the most likely token always does.

    `needed` says whether any row has a filter; None: the program branches by what the rows have.
    """
    settings = {name: jnp.broadcast_to(filters[name], logits.shape[:1])[:, None] for name in FILTERS}
    cuts = {name: jnp.any(settings[name] != each.neutral) for name, each in FILTERS.items()}
    everything = jnp.full((logits.shape[0], 1), -jnp.inf, logits.dtype)

    def lowest_of_all() -> Array:
        # XLA would sort all logits if it saw that only some of the largest are read
        largest = jax.lax.optimization_barrier(jax.lax.top_k(logits, min(LIKELY, logits.shape[1]))[0])
        lowest = everything
        for name, each in FILTERS.items():

            def cut(lowest: Array, setting: Array = settings[name], each: Filter = each) -> Array:
                new = each.lowest(RankedLogits(logits, largest, lowest, needed is not None), setting)
                return jnp.where(setting == each.neutral, lowest, jnp.maximum(lowest, new))

            lowest = branch(needed or cuts[name], cut, lambda lowest: lowest, lowest)
        return lowest

    any_cuts = jnp.any(jnp.stack([*cuts.values()])) if needed is None else needed
    return branch(any_cuts, lowest_of_all, lambda: everything)


def _search_beyond(beyond: Array, ranked: RankedLogits, weights: Array, wanted: Array, otherwise: Array) -> Array:
    """Search by bisection only where a row's least logit is not among the largest few."""

    def search() -> Array:
        return jnp.where(beyond, _least_reaching(ranked.logits, weights, wanted), otherwise)

    return branch(ranked.search or jnp.any(beyond), search, lambda: otherwise)


def _least_reaching(
    logits: Float32[Array, "rows vocab"], weights: Float32[Array, "rows vocab"], wanted: Float32[Array, "rows 1"]
) -> Float32[Array, "rows 1"]:
    """Return the largest logit such that the weights of it and of all above it sum to `wanted`; else the least.

    It is exact: found bit by bit of an integer that orders as floats do. A sort would take far longer.
    """
    keys = _ordered(logits)

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        enough = jnp.sum(jnp.where(keys >= middle, weights, 0.0), axis=-1, keepdims=True) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    ends = jnp.min(keys, axis=-1, keepdims=True), jnp.max(keys, axis=-1, keepdims=True)
    low, _ = jax.lax.fori_loop(0, 32, halve, ends)
    return jax.lax.bitcast_convert_type(_flipped(low), jnp.float32)


def _ordered(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Return integers in the order of floats; both zeros are the same."""
    return _flipped(jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32))


def _flipped(bits: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Invert the lower bits of negative numbers, which is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _inverse_cdf(weights: Array, uniform: Array, best: Array) -> Int32[Array, "rows"]:
    """Return a token drawn by its weight: a block of tokens by the first uniform number, and one of it by the second.

    Each is the first where the cumulative weight exceeds that share of all. One number would have too few bits
    for large vocabularies.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)

    def draw(weights: Array, uniform: Array) -> Array:
        ends = jnp.cumsum(weights, axis=1)
        beyond = ends <= uniform[:, None] * ends[:, -1:]
        return jnp.minimum(jnp.sum(beyond.astype(jnp.int32), axis=1), weights.shape[1] - 1)

    block = draw(blocks.sum(-1), uniform[:, 0])
    offset = draw(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
    token = jnp.minimum(block * BLOCK + offset, vocab - 1).astype(jnp.int32)
    # where rounding has led to a token of no weight
    return jnp.where(jnp.take_along_axis(weights, token[:, None], axis=1)[:, 0] > 0, token, best)


def is_stop(token: Int[Array, "*rows"], stop_ids: Int[AnyArray, "stops"]) -> Bool[Array, "*rows"]:
    """Return whether a token is one of `stop_ids`."""
    return jnp.any(token[..., None] == stop_ids.reshape((1,) * token.ndim + (-1,)), axis=-1)


TEMPERATURE, TOP_P = 0.7, 0.95  # defaults if neither the user nor the file has any


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Sampling settings that a model is published with; None for those that it leaves out.

    **Arguments:**

    - `stop_ids`: a text ends with any of these tokens.
    - `do_sample`: False: always the most likely token.
    - `temperature`, `top_k`, `top_p`, `min_p`: those of `Sample`.
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
        """Return the sampler of these settings, with published ones for those that are None.

        A temperature of 0 is greedy, and so is `do_sample` = False without any settings. If neither sets anything,
        temperature 0.7 and top_p 0.95.
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
