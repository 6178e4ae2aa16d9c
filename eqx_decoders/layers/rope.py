"""Rotary position embedding (Su et al. 2021) and its long-context variants.

Pair k of a head's features is rotated by the angle `position * frequency_k`. With `"half"` pairing, pair k consists of
the features k and k + dim/2; with `"interleaved"` pairing, of the features 2k and 2k + 1.
"""

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Num

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, InRange, NonNegativeInt, PositiveFloat, PositiveInt, check, check_number
from eqx_decoders.layers.documents import document_indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope(CheckedFields):
    """Plain rotary embedding: `frequency_k = theta^(-2k/dim)`.

    **Arguments:**

    - `theta`: base of the frequencies.
    - `fraction`: fraction of a head's features that is rotated, from the first feature on.
    - `pairing`: `"half"`, `"interleaved"`, or for `AxialRope` also `"half_of_axis"`.
    - `sections`: M-RoPE, for positions with several dimensions (time, height and width of an image patch): the number
        of pairs that each dimension rotates. Without effect if all dimensions are equal, as in text. Empty: positions
        have one dimension.
    - `reverse`: whether pairs are rotated by `-position * frequency_k` (nanochat).
    - `interleaved_sections`: True: the dimensions alternate over the pairs, and the first dimension gets the remaining
        pairs (Qwen3-VL). False: the pairs of a dimension are contiguous (Qwen2-VL).
    """

    theta: PositiveFloat = 10_000.0
    fraction: Annotated[float, InRange(above=0, maximum=1)] = 1.0
    pairing: Literal["half", "interleaved", "half_of_axis"] = "half"
    sections: tuple[NonNegativeInt, ...] = ()
    interleaved_sections: bool = True
    reverse: bool = False

    def __post_init__(self):
        super().__post_init__()
        check(
            self.is_axial or self.pairing != "half_of_axis",
            f"{type(self).__name__}.pairing='half_of_axis' needs AxialRope: positions have only one coordinate.",
        )

    is_axial: ClassVar[bool] = False  # whether each half of the pairs is rotated by one of two coordinates

    def rotated(self, head_dim: int) -> int:
        """Return the number of rotated features of a head. Raises ConfigError unless it is even and positive."""
        count = int(head_dim * self.fraction)
        check(
            count % 2 == 0 and count > 0,
            f"{type(self).__name__}.fraction={self.fraction} with head_dim={head_dim}: head_dim * fraction = {count} "
            "features are rotated, which must be a positive even number.",
        )
        return count

    def frequencies(self, dim: int) -> np.ndarray:
        """Return the frequencies of the `dim / 2` pairs of `dim` rotated features, in radians per position."""
        return self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)

    @property
    def dimensions(self) -> int:
        """Number of dimensions of a position; 0 for a plain position in the sequence."""
        return len(self.sections)

    @property
    def fixed_length(self) -> int | None:
        """Document length up to which angles do not depend on the document length; None: they never depend on it."""
        return None

    def frequency_factors(self, last_positions: Float32[Array, "batch _"], dim: int) -> Float[Array, "batch _ pairs"]:
        """Return factors of the frequencies in documents with these last positions. Needs a `fixed_length`."""
        raise AssertionError(f"{type(self).__name__} does not depend on the document length")

    def magnitudes(self, last_positions: Float32[Array, "batch _"]) -> Float[Array, "batch _"]:
        """Return factors of cosine and sine in documents with these last positions."""
        return jnp.full(last_positions.shape, self.magnitude)

    def angles(
        self, positions: Num[Array, "batch length *axes"], dim: int, segments: Int[Array, "batch length"] | None = None
    ) -> tuple[Float[Array, "batch length pairs"], Float[Array, "batch _ 1"] | float]:
        """Return the angle of each pair, and factors of cosine and sine.

        **Arguments:**

        - `positions`: positions with one or several dimensions; negative positions count as 0.
        - `dim`: number of rotated features.
        - `segments`: document of each token, as factors may depend on the document length; None: a sequence is one
            document.
        """
        angles = self._unscaled_angles(positions, dim)
        if self.fixed_length is None:
            return angles, self.magnitude
        last_positions = _last_positions(positions, segments).astype(jnp.float32)
        return angles * self.frequency_factors(last_positions, dim), self.magnitudes(last_positions)[..., None]

    def _unscaled_angles(
        self, positions: Num[Array, "batch length *axes"], dim: int
    ) -> Float[Array, "batch length pairs"]:
        frequencies = jnp.asarray(self.frequencies(dim) * (-1 if self.reverse else 1), jnp.float32)[None, None]
        positions = jnp.maximum(positions, 0).astype(jnp.float32)
        if positions.ndim == 2:
            return positions[..., None] * frequencies
        dimensions = positions.shape[-1]
        check(
            dimensions == self.dimensions,
            f"{type(self).__name__}.sections={self.sections} must have a number for each of the {dimensions} "
            "dimensions of the positions.",
        )
        return positions[..., self._pair_dimensions(dim)] * frequencies

    def _pair_dimensions(self, dim: int) -> np.ndarray:
        """Return, for each pair, the dimension of a position that rotates it."""
        dimensions = len(self.sections)
        if not self.interleaved_sections:
            check(
                sum(self.sections) == dim // 2,
                f"{type(self).__name__}.sections={self.sections} must add up to {dim // 2}, the number of rotated "
                "pairs of a head.",
            )
            return np.repeat(np.arange(dimensions), self.sections)
        pairs = np.arange(dim // 2)
        dimension = pairs % dimensions
        return np.where(pairs < dimensions * np.asarray(self.sections)[dimension], dimension, 0)

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """Additional factor of attention scores in multi-head latent attention."""
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxialRope(Rope):
    """Two-dimensional rotary embedding of image patches: each of the two coordinates rotates half of the pairs.

    Each half has the frequencies of plain RoPE for half a head: `theta^(-4k/dim)`, `k < dim / 4`.

    **Arguments:**

    - `pairing`: `"half"` (Qwen) and `"interleaved"` (Llama 4) pair features of the full head. `"half_of_axis"`: each
        coordinate rotates one half of the head's features, with `"half"` pairing within it (Gemma 4).
    - `staggered`: whether the frequencies of plain RoPE for the full head alternate between the coordinates (Pixtral).
    """

    staggered: bool = False
    is_axial: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check(
            not self.sections,
            f"AxialRope.sections={self.sections} must be empty: each coordinate always rotates half of the pairs.",
        )

    @property
    def dimensions(self) -> int:
        return 2

    def rotated(self, head_dim: int) -> int:
        count = super().rotated(head_dim)
        check(
            count % 4 == 0,
            f"AxialRope.fraction={self.fraction} with head_dim={head_dim}: head_dim * fraction = {count} features are "
            "rotated, which must be a multiple of 4.",
        )
        return count

    def frequencies(self, dim: int) -> np.ndarray:
        if self.staggered:
            return super().frequencies(dim).reshape(-1, 2).T.reshape(-1)
        return np.tile(super().frequencies(dim // 2), 2)

    def _pair_dimensions(self, dim: int) -> np.ndarray:
        return np.arange(dim // 2) // (dim // 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al. 2023): all frequencies are divided by `factor`."""

    factor: Annotated[float, InRange(minimum=1)]

    def frequencies(self, dim: int) -> np.ndarray:
        return super().frequencies(dim) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKRope(Rope):
    """NTK-aware scaling with a fixed factor (Hunyuan): the base is `theta * alpha^(dim / (dim - 2))`.

    **Arguments:**

    - `alpha`: factor by which the longest wavelength grows.
    """

    alpha: Annotated[float, InRange(minimum=1)]

    def frequencies(self, dim: int) -> np.ndarray:
        check(dim > 2, f"NTKRope: dim={dim} must be above 2.")
        base = self.theta * self.alpha ** (dim / (dim - 2))
        return base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalRope(Rope):
    """Partial rotary embedding of Gemma 4: the first `fraction` of the pairs are rotated, the other pairs are not.

    Unlike with `Rope.fraction`, pairs are formed over the full head, and frequencies are those of the full head:
    `theta^(-2k/head_dim) / factor`.
    """

    factor: Annotated[float, InRange(minimum=1)] = 1.0

    def rotated(self, head_dim: int) -> int:
        check(head_dim % 2 == 0, f"ProportionalRope: head_dim={head_dim} must be even.")
        return head_dim

    def frequencies(self, dim: int) -> np.ndarray:
        is_rotated = np.arange(dim // 2) < int(self.fraction * dim // 2)
        return np.where(is_rotated, super().frequencies(dim) / self.factor, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Frequency scaling of Llama 3.1: low frequencies are divided by `factor`, high frequencies are unchanged.

    Frequencies in between are interpolated smoothly.

    **Arguments:**

    - `factor`: factor by which the longest wavelengths grow.
    - `low_frequency_factor`, `high_frequency_factor`: wavelengths above `original_length / low_frequency_factor` are
        scaled; wavelengths below `original_length / high_frequency_factor` are not. If both are equal (Llama 4) nothing
        is interpolated.
    - `original_length`: context length before scaling, in tokens.
    """

    factor: Annotated[float, InRange(minimum=1)] = 8.0
    low_frequency_factor: PositiveFloat = 1.0
    high_frequency_factor: float = 4.0
    original_length: PositiveInt = 8192

    def __post_init__(self):
        super().__post_init__()
        check_number("Llama3Rope.high_frequency_factor", self.high_frequency_factor, minimum=self.low_frequency_factor)

    def frequencies(self, dim: int) -> np.ndarray:
        plain = super().frequencies(dim)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        rotations = self.original_length * plain / (2 * math.pi)  # full rotations over the original context
        if high > low:
            smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        else:
            smooth = (rotations >= low).astype(np.float64)
        return (1 - smooth) * plain / self.factor + smooth * plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicRope(Rope):
    """Dynamic NTK scaling: the base grows with the document length beyond `original_length` (InternLM 3).

    With L = max(original_length, last position of the document + 1), the base for `d` rotated features is
    `theta (factor L / original_length - (factor - 1))^(d / (d - 2))`. As in transformers, cached keys keep the base of
    the call that computed them. So beyond `original_length` the result of several calls with a cache differs from the
    result of a single call.

    **Arguments:**

    - `factor`: growth rate of the base.
    - `original_length`: context length of training, in tokens.
    """

    factor: Annotated[float, InRange(minimum=1)]
    original_length: PositiveInt

    @property
    def fixed_length(self) -> int | None:
        return self.original_length

    def frequency_factors(self, last_positions: Float32[Array, "batch _"], dim: int) -> Float[Array, "batch _ pairs"]:
        excess = jnp.maximum(last_positions + 1.0, self.original_length) / self.original_length - 1.0
        exponents = -2.0 * jnp.arange(dim // 2, dtype=jnp.float32) / max(dim - 2, 1)
        return (1.0 + self.factor * excess)[..., None] ** exponents[None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024): a separate frequency divisor per pair, with other divisors for long documents.

    A document is long if its last position is at least `original_length`. Cached keys keep the divisors of the call
    that computed them. So when a document becomes long over several calls with a cache, the result differs from a
    single call. (transformers recomputes all keys at this point.)

    **Arguments:**

    - `short_factors`, `long_factors`: divisors of the frequencies, one for each pair.
    - `original_length`: context length of training, in tokens.
    - `factor`: factor by which the context was extended. Cosine and sine are multiplied by
        `sqrt(1 + ln(factor) / ln(original_length))`.
    - `attention_factor`: multiplies cosine and sine instead; None: computed from `factor`.
    - `long_attention_factor`: multiplies cosine and sine in long documents; None: as in short documents.
    - `keeps_short`: whether long documents use `short_factors`, too (Phi-3.5-MoE in transformers).
    """

    short_factors: tuple[PositiveFloat, ...]
    long_factors: tuple[PositiveFloat, ...]
    original_length: Annotated[int, InRange(above=1)]
    factor: Annotated[float, InRange(minimum=1)] = 1.0
    attention_factor: PositiveFloat | None = None
    long_attention_factor: PositiveFloat | None = None
    keeps_short: bool = False

    def __post_init__(self):
        super().__post_init__()
        check(
            len(self.short_factors) == len(self.long_factors) > 0,
            f"LongRope.long_factors={self.long_factors} and short_factors={self.short_factors} must both have a number "
            "for each rotated pair.",
        )

    @property
    def fixed_length(self) -> int | None:
        same_for_long = self.keeps_short and self.long_attention_factor in (None, self.magnitude)
        return None if same_for_long else self.original_length

    def frequencies(self, dim: int) -> np.ndarray:
        count = len(self.short_factors)
        check(
            count == dim // 2,
            f"LongRope.short_factors has {count} numbers, but must have {dim // 2}, one for each rotated pair.",
        )
        return super().frequencies(dim) / np.asarray(self.short_factors)

    def frequency_factors(self, last_positions: Float32[Array, "batch _"], dim: int) -> Float[Array, "batch _ pairs"]:
        long_factors = self.short_factors if self.keeps_short else self.long_factors
        long_ratio = jnp.asarray(np.asarray(self.short_factors) / np.asarray(long_factors), jnp.float32)[None, None]
        return jnp.where((last_positions >= self.original_length)[..., None], long_ratio, 1.0)

    def magnitudes(self, last_positions: Float32[Array, "batch _"]) -> Float[Array, "batch _"]:
        long_magnitude = self.long_attention_factor or self.magnitude
        return jnp.where(last_positions >= self.original_length, long_magnitude, self.magnitude)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023): interpolate low frequencies, keep high frequencies, and scale attention scores.

    **Arguments:**

    - `factor`: factor by which the context is extended.
    - `original_length`: context length before the extension, in tokens.
    - `beta_fast`, `beta_slow`: pairs with more than `beta_fast` full rotations over the original context are unchanged,
        pairs with fewer than `beta_slow` are interpolated, and there is a linear ramp in between.
    - `truncate`: whether the bounds of the ramp are rounded to integer pair indices.
    - `mscale`, `mscale_all_dim`: with `m(s) = 0.1 s ln(factor) + 1`, cosine and sine are multiplied by
        `m(mscale) / m(mscale_all_dim)`, or by `m(1)` if `mscale` is None. Multi-head latent attention also multiplies
        its scores by `m(mscale_all_dim)²`. `mscale` needs `mscale_all_dim`.
    - `attention_factor`: multiplies cosine and sine instead of the factor that follows from `mscale`.
    """

    factor: Annotated[float, InRange(minimum=1)]
    original_length: PositiveInt
    beta_fast: float = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None

    def __post_init__(self):
        super().__post_init__()
        check_number("YarnRope.beta_fast", self.beta_fast, minimum=self.beta_slow)
        check(self.theta > 1, f"YarnRope.theta={self.theta} must be above 1.")
        check(
            self.mscale is None or (self.mscale_all_dim is not None and self.attention_factor is None),
            f"YarnRope.mscale={self.mscale} needs mscale_all_dim, and excludes attention_factor.",
        )

    def frequencies(self, dim: int) -> np.ndarray:
        plain = super().frequencies(dim)
        low, high = self._pair_with_rotations(self.beta_fast, dim), self._pair_with_rotations(self.beta_slow, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
        return ramp * plain / self.factor + (1 - ramp) * plain

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._scale_factor(1.0)
        return self._scale_factor(self.mscale) / self._scale_factor(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        return 1.0 if self.mscale_all_dim is None else self._scale_factor(self.mscale_all_dim) ** 2

    def _scale_factor(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def _pair_with_rotations(self, rotations: float, dim: int) -> float:
        """Return the (fractional) index of the pair with this number of full rotations over the original context."""
        return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def _last_positions(
    positions: Num[Array, "batch length *axes"], segments: Int[Array, "batch length"] | None
) -> Num[Array, "batch _"]:
    """Return the last position of each token's document; without `segments`, of each sequence.

    Positions with several dimensions count by their largest coordinate.
    """
    largest = positions if positions.ndim == 2 else positions.max(-1)
    if segments is None:
        return largest.max(1, keepdims=True)
    documents = document_indices(largest >= 0, segments)
    num_documents = largest.shape[1] + 1
    return jax.vmap(lambda positions, documents: jax.ops.segment_max(positions, documents, num_documents)[documents])(
        largest, documents
    )


def rotary_positions(ctx: ForwardContext, rope: Rope) -> Num[Array, "batch length *axes"]:
    """Return the positions for `rotate`: `ctx.rotary_positions` if `rope` uses them, else `ctx.positions`."""
    positions = ctx.rotary_positions if rope.dimensions else None
    return ctx.positions if positions is None else positions


def rotate(
    x: Float[Array, "batch length heads head_dim"],
    positions: Num[Array, "batch length *axes"],
    rope: Rope,
    segments: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """Apply a rotary embedding to all heads, computed in float32.

    **Arguments:**

    - `x`: queries or keys.
    - `positions`: positions with one or several dimensions; negative positions count as 0.
    - `rope`: the rotary embedding.
    - `segments`: document of each token; None: each sequence is one document. Used by embeddings that depend on the
        document length.
    """
    count = rope.rotated(x.shape[-1])
    angles, magnitude = rope.angles(positions, count, segments)
    cos, sin = ((y * magnitude)[:, :, None] for y in (jnp.cos(angles), jnp.sin(angles)))
    cos, sin = jax.lax.optimization_barrier((cos, sin))  # without it, XLA recomputes them for each head
    rotated = x[..., :count].astype(jnp.float32)
    if rope.pairing != "interleaved":
        parts = 2 if rope.pairing == "half_of_axis" else 1
        rotated, cos, sin = (y.reshape(*y.shape[:-1], parts, y.shape[-1] // parts) for y in (rotated, cos, sin))
        first, second = jnp.split(rotated, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rotated = rotated.reshape(*x.shape[:-1], count)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(rotated.shape)
    rotated = rotated.astype(x.dtype)
    return rotated if count == x.shape[-1] else jnp.concatenate([rotated, x[..., count:]], axis=-1)
