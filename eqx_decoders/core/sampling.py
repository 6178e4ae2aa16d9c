"""Choice of the next token from logits."""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PRNGKeyArray

from eqx_decoders.errors import CheckedFields, ConfigError, InRange, PositiveFloat, PositiveInt
from eqx_decoders.sharding.axes import AnyArray


Probability = Annotated[float, InRange(above=0, most=1)]


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


class SamplerArrays(eqx.Module):
    """Numbers of a `Sample` as arrays, so that samplers with the same filters share one program.

    `most` is the number of largest logits that are found: at least `top_k`, rounded up to a power of two.
    """

    temperature: Float[AnyArray, ""]
    top_k: Int[AnyArray, ""] | None
    top_p: Float[AnyArray, ""] | None
    min_p: Float[AnyArray, ""] | None
    most: int = eqx.field(static=True)

    @classmethod
    def of(cls, sampler: Sampler) -> "SamplerArrays | None":
        """Return the arrays of a sampler; None for greedy decoding, which has no numbers."""
        if isinstance(sampler, Greedy):
            return None
        numbers = (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p)
        dtypes = (np.float32, np.int32, np.float32, np.float32)
        arrays = (None if x is None else np.asarray(x, dtype) for x, dtype in zip(numbers, dtypes, strict=True))
        return cls(*arrays, most=1 << ((sampler.top_k or 1) - 1).bit_length())


def sample_token(
    sampler: Sampler | SamplerArrays | None, logits: Float[Array, "batch vocab"], key: PRNGKeyArray | None
) -> Int[Array, "batch"]:
    """Return one token for each row."""
    if sampler is None or isinstance(sampler, Greedy):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if key is None:
        raise ConfigError(f"{sampler} draws at random: pass key=jax.random.key(seed).")
    return jax.random.categorical(key, filter_logits(sampler, logits)).astype(jnp.int32)


def is_stop(token: Int[Array, "*rows"], stop_ids: Int[AnyArray, "stops"]) -> Bool[Array, "*rows"]:
    """Return whether a token is one of `stop_ids`."""
    return jnp.any(token[..., None] == stop_ids.reshape((1,) * token.ndim + (-1,)), axis=-1)


def filter_logits(sampler: Sample | SamplerArrays, logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    """Return logits over temperature, -inf where a filter cuts; the most likely token always stays."""
    numbers = SamplerArrays.of(sampler) if isinstance(sampler, Sample) else sampler
    assert numbers is not None
    return _filtered(numbers, logits)


def _filtered(sampler: SamplerArrays, logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    logits = logits / sampler.temperature
    if sampler.top_k is not None:
        largest = jax.lax.top_k(logits, min(sampler.most, logits.shape[-1]))[0]
        lowest = jnp.take(largest, sampler.top_k - 1, axis=-1, mode="clip")[:, None]
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    if sampler.top_p is not None:
        logits = jnp.where(logits >= _lowest_of_mass(logits, sampler.top_p), logits, -jnp.inf)
    if sampler.min_p is not None:
        lowest = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampler.min_p)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    return logits


LIKELY = 64  # largest logits among which the end of a top-p filter is searched first


def _lowest_of_mass(logits: Float[Array, "batch vocab"], mass: Float[AnyArray, ""]) -> Float[Array, "batch 1"]:
    """Return the smallest logit of the nucleus: the most likely tokens that together have this probability.

    If all tokens together have less, it is the smallest of all. A sort would take a hundred times longer than finding a
    few; if these have less, in one row or more, bisection finds it.
    """
    wide, count = logits.astype(jnp.float32), min(LIKELY, logits.shape[-1])
    order = jax.lax.top_k(logits, count)[0]
    top = jnp.max(wide, axis=-1, keepdims=True)
    wanted = mass * jnp.sum(jnp.exp(wide - top), axis=-1, keepdims=True)
    sums = jnp.cumsum(jnp.exp(order.astype(jnp.float32) - top), axis=-1)
    reached = jnp.sum(sums < wanted, axis=-1, keepdims=True, dtype=jnp.int32)
    lowest = jnp.take_along_axis(order, jnp.minimum(reached, count - 1), axis=-1)
    if count == logits.shape[-1]:
        return lowest
    reaches = reached < count
    return jnp.where(
        reaches, lowest, least_reaching(wide, jnp.exp(wide - top), wanted, ~jnp.all(reaches)).astype(logits.dtype)
    )


def least_reaching(
    logits: Float32[Array, "batch vocab"],
    weights: Float32[Array, "batch vocab"],
    wanted: Float32[Array, "batch 1"],
    needed: Bool[Array, ""],
) -> Float32[Array, "batch 1"]:
    """Return the largest logit such that the weights of it and of all above it sum to `wanted`; else the least.

    It is exact: found bit by bit of an integer that orders as floats do. Without `needed` no step is taken.
    """
    keys = _ordered(logits)

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, low, high = state
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        enough = jnp.sum(jnp.where(keys >= middle, weights, 0.0), axis=-1, keepdims=True) >= wanted
        return step - 1, jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    ends = jnp.min(keys, axis=-1, keepdims=True), jnp.max(keys, axis=-1, keepdims=True)
    steps = jnp.where(needed, 32, 0)
    low = jax.lax.while_loop(lambda state: state[0] > 0, halve, (steps, *ends))[1]
    return jax.lax.bitcast_convert_type(_flipped(low), jnp.float32)


def _ordered(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Return integers in the order of floats; both zeros are the same."""
    return _flipped(jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32))


def _flipped(bits: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Invert the lower bits of negative numbers, which is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
        names = ("temperature", "top_k", "top_p", "min_p")
        requested = {name: settings[name] for name in names if settings.get(name) is not None}
        if self.do_sample is False and not requested:
            return Greedy()
        published = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        merged: dict[str, Any] = {**(published or {"temperature": TEMPERATURE, "top_p": TOP_P}), **requested}
        if merged.get("temperature") == 0:
            return Greedy()
        return Sample(**merged)
