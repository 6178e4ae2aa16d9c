"""Rotary position embedding (Su et al. 2021) and its long-context variants.

Pair k of a head is rotated by the angle `position * frequency_k`; with `half` pairing, pair k is the features k and
k + dim/2, with `interleaved` pairing the features 2k and 2k + 1.
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
from eqx_decoders.layers.recurrent.causal_conv import document_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope(CheckedFields):
    """Plain rotary embedding: `frequency_k = theta^(-2k/dim)`.

    **Arguments:**

    - `theta`: the base.
    - `fraction`: the part of a head's features that is rotated, the first ones.
    - `pairing`: `"half"` or `"interleaved"`.
    - `sections`: for positions of several dimensions (time, height and width of an image's patches: M-RoPE), the
        number of pairs rotated by each of them. Where all dimensions are equal, as in text, nothing depends on it.
        Empty: there is one dimension.
    - `reverse`: whether pairs turn by `-position * frequency_k` (nanochat).
    - `interleaved_sections`: whether pairs take turns, and the first dimension has what is left (Qwen3-VL), or the
        pairs of a dimension stand together (Qwen2-VL).
    """

    theta: PositiveFloat = 10_000.0
    fraction: Annotated[float, InRange(above=0, most=1)] = 1.0
    pairing: Literal["half", "interleaved", "half_of_axis"] = "half"
    sections: tuple[NonNegativeInt, ...] = ()
    interleaved_sections: bool = True
    reverse: bool = False

    def __post_init__(self):
        super().__post_init__()
        axial = self.has_axes or self.pairing != "half_of_axis"
        check(axial, f"{type(self).__name__}.pairing='half_of_axis' needs AxialRope: there is one axis.")

    has_axes: ClassVar[bool] = False  # whether each half of the pairs turns by a coordinate of its own

    def rotated(self, head_dim: int) -> int:
        """Return the number of rotated features of a head: an even number."""
        count = int(head_dim * self.fraction)
        check(
            count % 2 == 0 and count > 0,
            f"{type(self).__name__}: head_dim={head_dim} x fraction={self.fraction} = {count} must be even, above 0.",
        )
        return count

    def frequencies(self, dim: int) -> np.ndarray:
        """Return the `dim / 2` angles per position, in radians."""
        return self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)

    @property
    def dimensions(self) -> int:
        """Number of dimensions of a position; 0 for a plain position in the sequence."""
        return len(self.sections)

    @property
    def fixed_length(self) -> int | None:
        """Tokens up to which angles do not depend on the length of a text; None: they never do."""
        return None

    def stretch(self, last: Float32[Array, "batch _"], dim: int) -> Float[Array, "batch _ pairs"]:
        """Return factors of the angles in documents with these last positions, for embeddings with a `fixed_length`."""
        raise AssertionError(f"{type(self).__name__} does not depend on the length of a text")

    def magnitudes(self, last: Float32[Array, "batch _"]) -> Float[Array, "batch _"]:
        """Return factors of cosine and sine in documents with these last positions."""
        return jnp.full(last.shape, self.magnitude)

    def turns(
        self, positions: Num[Array, "batch length *axes"], dim: int, segments: Int[Array, "batch length"] | None = None
    ) -> tuple[Float[Array, "batch length pairs"], Float[Array, "batch _ 1"] | float]:
        """Return the angle of each pair, and factors of cosine and sine.

        Positions below 0 count as 0, and have one dimension or several. `segments` number the documents of a row, whose
        lengths may count.
        """
        angles = self._plain_angles(positions, dim)
        if self.fixed_length is None:
            return angles, self.magnitude
        last = _last_positions(positions, segments).astype(jnp.float32)
        return angles * self.stretch(last, dim), self.magnitudes(last)[..., None]

    def _plain_angles(
        self, positions: Num[Array, "batch length *axes"], dim: int
    ) -> Float[Array, "batch length pairs"]:
        frequencies = jnp.asarray(self.frequencies(dim) * (-1 if self.reverse else 1), jnp.float32)[None, None]
        real = jnp.maximum(positions, 0).astype(jnp.float32)
        if real.ndim == 2:
            return real[..., None] * frequencies
        name, count = type(self).__name__, real.shape[-1]
        rule = f"must have a number for each of the {count} dimensions of the positions"
        check(count == self.dimensions, f"{name}.sections={self.sections} {rule}.")
        return real[..., self._axis_of_pairs(dim)] * frequencies

    def _axis_of_pairs(self, dim: int) -> np.ndarray:
        """Return the dimension of a position that rotates each pair."""
        pairs, count = np.arange(dim // 2), len(self.sections)
        if not self.interleaved_sections:
            together = f"{self.sections} must have {dim // 2} pairs together: each turns by one dimension"
            check(sum(self.sections) == dim // 2, f"{type(self).__name__}.sections={together}.")
            return np.repeat(np.arange(count), self.sections)
        axis = pairs % count
        return np.where(pairs < count * np.asarray(self.sections)[axis], axis, 0)

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """Factor by which latent attention multiplies its scores in addition."""
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxialRope(Rope):
    """Rotary embedding by the coordinates of a patch: half of the pairs by one of them, the rest by the other.

    Each half has the frequencies of plain RoPE for half a head: `theta^(-4k/dim)`, `k < dim / 4`.

    **Arguments:**

    - `pairing`: of the whole head, `"half"` (Qwen) or `"interleaved"` (Llama 4), or `"half_of_axis"`: each coordinate
        has half of the head's features, and pairs the two halves of these (Gemma 4).
    - `staggered`: whether the frequencies are those of plain RoPE for the whole head, in turn for one coordinate and
        for the other (Pixtral).
    """

    staggered: bool = False
    has_axes: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check(
            not self.sections, f"AxialRope.sections={self.sections} must be empty: each coordinate has half the pairs."
        )

    @property
    def dimensions(self) -> int:
        return 2

    def rotated(self, head_dim: int) -> int:
        count = super().rotated(head_dim)
        check(count % 4 == 0, f"AxialRope: head_dim={head_dim} x fraction={self.fraction} must be a multiple of 4.")
        return count

    def frequencies(self, dim: int) -> np.ndarray:
        if self.staggered:
            return super().frequencies(dim).reshape(-1, 2).T.reshape(-1)
        return np.tile(super().frequencies(dim // 2), 2)

    def _axis_of_pairs(self, dim: int) -> np.ndarray:
        return np.arange(dim // 2) // (dim // 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al. 2023): all frequencies divided by `factor`."""

    factor: Annotated[float, InRange(least=1)]

    def frequencies(self, dim: int) -> np.ndarray:
        return super().frequencies(dim) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKRope(Rope):
    """NTK-aware scaling by a fixed number (Hunyuan): the base is `theta * alpha^(dim / (dim - 2))`.

    **Arguments:**

    - `alpha`: by how much the longest wavelength grows.
    """

    alpha: Annotated[float, InRange(least=1)]

    def frequencies(self, dim: int) -> np.ndarray:
        check(dim > 2, f"NTKRope: dim={dim} must be above 2.")
        base = self.theta * self.alpha ** (dim / (dim - 2))
        return base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalRope(Rope):
    """Gemma 4's partial rotation: the first `fraction` of the pairs rotate as in plain RoPE, the others not at all.

    Pairs span the whole head, and frequencies are those of the whole head: `theta^(-2k/head_dim) / factor`.
    """

    factor: Annotated[float, InRange(least=1)] = 1.0

    def rotated(self, head_dim: int) -> int:
        check(head_dim % 2 == 0, f"ProportionalRope: head_dim={head_dim} must be even.")
        return head_dim

    def frequencies(self, dim: int) -> np.ndarray:
        turning = np.arange(dim // 2) < int(self.fraction * dim // 2)
        return np.where(turning, super().frequencies(dim) / self.factor, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones unchanged, smooth in between.

    **Arguments:**

    - `factor`: by how much the longest wavelengths grow.
    - `low_frequency_factor`, `high_frequency_factor`: wavelengths above `original_length / low` are scaled, those
        below `original_length / high` are not; where both are equal (Llama 4) there is nothing in between.
    - `original_length`: the context length before scaling, in tokens.
    """

    factor: Annotated[float, InRange(least=1)] = 8.0
    low_frequency_factor: PositiveFloat = 1.0
    high_frequency_factor: float = 4.0
    original_length: PositiveInt = 8192

    def __post_init__(self):
        super().__post_init__()
        check_number("Llama3Rope.high_frequency_factor", self.high_frequency_factor, least=self.low_frequency_factor)

    def frequencies(self, dim: int) -> np.ndarray:
        plain = super().frequencies(dim)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_length * plain / (2 * math.pi)  # over the original context
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(np.float64)
        return (1 - smooth) * plain / self.factor + smooth * plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicRope(Rope):
    """RoPE whose base grows with the length of the text beyond `original_length` (NTK-aware; InternLM 3).

    With L the greater of `original_length` and the last position of a document + 1, the base of `d` rotated features is
    `theta (factor L / original_length - (factor - 1))^(d / (d - 2))`. As in transformers, keys in a cache keep the base
    of their own call: beyond `original_length` a text in pieces differs from the whole.

    **Arguments:**

    - `factor`: how fast the base grows.
    - `original_length`: the context length that the model was trained on, in tokens.
    """

    factor: Annotated[float, InRange(least=1)]
    original_length: PositiveInt

    @property
    def fixed_length(self) -> int | None:
        return self.original_length

    def stretch(self, last: Float32[Array, "batch _"], dim: int) -> Float[Array, "batch _ pairs"]:
        beyond = jnp.maximum(last + 1.0, self.original_length) / self.original_length - 1.0
        powers = -2.0 * jnp.arange(dim // 2, dtype=jnp.float32) / max(dim - 2, 1)
        return (1.0 + self.factor * beyond)[..., None] ** powers[None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024): each pair's frequency is divided by a number of its own, another for long texts.

    A document is long where its last position is not below `original_length`. Keys in a cache keep the numbers of their
    own call: a text in pieces that becomes long differs from the whole, which transformers computes again there.

    **Arguments:**

    - `short_factors`, `long_factors`: divisors of the frequencies, one for each pair.
    - `original_length`: the context length that the model was trained on, in tokens.
    - `factor`: extension of the context, of which `magnitude` is made: `sqrt(1 + ln(factor) / ln(original_length))`.
    - `attention_factor`: multiplies cosine and sine in place of that.
    - `long_attention_factor`: the same for long texts; None for no other number.
    - `keeps_short`: whether long texts have the divisors of short ones (Phi-3.5-MoE in transformers).
    """

    short_factors: tuple[PositiveFloat, ...]
    long_factors: tuple[PositiveFloat, ...]
    original_length: Annotated[int, InRange(above=1)]
    factor: Annotated[float, InRange(least=1)] = 1.0
    attention_factor: PositiveFloat | None = None
    long_attention_factor: PositiveFloat | None = None
    keeps_short: bool = False

    def __post_init__(self):
        super().__post_init__()
        same = len(self.short_factors) == len(self.long_factors) > 0
        rule = f"and short_factors={self.short_factors} must both have a number for each rotated pair"
        check(same, f"LongRope.long_factors={self.long_factors} {rule}.")

    @property
    def fixed_length(self) -> int | None:
        same = self.keeps_short and self.long_attention_factor in (None, self.magnitude)
        return None if same else self.original_length

    def frequencies(self, dim: int) -> np.ndarray:
        count = len(self.short_factors)
        check(
            count == dim // 2, f"LongRope.short_factors has {count} numbers, but heads have {dim // 2} rotated pairs."
        )
        return super().frequencies(dim) / np.asarray(self.short_factors)

    def stretch(self, last: Float32[Array, "batch _"], dim: int) -> Float[Array, "batch _ pairs"]:
        long = self.short_factors if self.keeps_short else self.long_factors
        shorter = np.asarray(self.short_factors) / np.asarray(long)
        return jnp.where((last >= self.original_length)[..., None], jnp.asarray(shorter, jnp.float32)[None, None], 1.0)

    def magnitudes(self, last: Float32[Array, "batch _"]) -> Float[Array, "batch _"]:
        return jnp.where(last >= self.original_length, self.long_attention_factor or self.magnitude, self.magnitude)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023): interpolate slow pairs, leave fast ones, and sharpen the attention.

    **Arguments:**

    - `factor`: extension of the context.
    - `original_length`: the context length before, in tokens.
    - `beta_fast`, `beta_slow`: pairs with more turns over the original context than `beta_fast` are unchanged, those
        with fewer than `beta_slow` are interpolated.
    - `truncate`: whether the bounds of the ramp are rounded to whole pairs.
    - `mscale`, `mscale_all_dim`: with `m(s) = 0.1 s ln(factor) + 1`, cosine and sine are multiplied by
        `m(mscale) / m(mscale_all_dim)`, without `mscale` by `m(1)`; latent attention multiplies its scores by
        `m(mscale_all_dim)²`. `mscale` needs `mscale_all_dim`.
    - `attention_factor`: multiplies cosine and sine in place of what follows from `mscale`.
    """

    factor: Annotated[float, InRange(least=1)]
    original_length: PositiveInt
    beta_fast: float = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None

    def __post_init__(self):
        super().__post_init__()
        check_number("YarnRope.beta_fast", self.beta_fast, least=self.beta_slow)
        check(self.theta > 1, f"YarnRope.theta={self.theta} must be above 1.")
        check(
            self.mscale is None or (self.mscale_all_dim is not None and self.attention_factor is None),
            f"YarnRope.mscale={self.mscale} needs mscale_all_dim, and excludes attention_factor.",
        )

    def frequencies(self, dim: int) -> np.ndarray:
        plain = super().frequencies(dim)
        low, high = self._pair_of(self.beta_fast, dim), self._pair_of(self.beta_slow, dim)
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
            return self._m(1.0)
        return self._m(self.mscale) / self._m(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        return 1.0 if self.mscale_all_dim is None else self._m(self.mscale_all_dim) ** 2

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def _pair_of(self, turns: float, dim: int) -> float:
        """Return the (fractional) pair that makes so many turns over the original context."""
        return dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def _last_positions(
    positions: Num[Array, "batch length *axes"], segments: Int[Array, "batch length"] | None
) -> Num[Array, "batch _"]:
    """Return the last position of each token's document, or of each row where there are no `segments`."""
    latest = positions if positions.ndim == 2 else positions.max(-1)
    if segments is None:
        return latest.max(1, keepdims=True)
    numbers = document_numbers(latest >= 0, segments)
    count = latest.shape[1] + 1
    return jax.vmap(lambda last, number: jax.ops.segment_max(last, number, count)[number])(latest, numbers)


def rotary_positions(ctx: ForwardContext, rope: Rope) -> Num[Array, "batch length *axes"]:
    """Return the positions by which heads are rotated: of several dimensions if the call and `rope` have such."""
    positions = ctx.rotary_positions if rope.dimensions else None
    return ctx.positions if positions is None else positions


def rotate(
    x: Float[Array, "batch length heads head_dim"],
    positions: Num[Array, "batch length *axes"],
    rope: Rope,
    segments: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """Rotate the features of every head by its token's position; float32 inside. Positions below 0 count as 0.

    `segments` number the documents of a row.
    """
    count = rope.rotated(x.shape[-1])
    angles, magnitude = rope.turns(positions, count, segments)
    cos, sin = ((turned * magnitude)[:, :, None] for turned in (jnp.cos(angles), jnp.sin(angles)))
    cos, sin = jax.lax.optimization_barrier((cos, sin))  # or a compiler would compute them again for each head
    turned = x[..., :count].astype(jnp.float32)
    if rope.pairing != "interleaved":
        parts = 2 if rope.pairing == "half_of_axis" else 1
        turned, cos, sin = (y.reshape(*y.shape[:-1], parts, y.shape[-1] // parts) for y in (turned, cos, sin))
        first, second = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = turned.reshape(*x.shape[:-1], count)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(turned.shape)
    turned = turned.astype(x.dtype)
    return turned if count == x.shape[-1] else jnp.concatenate([turned, x[..., count:]], axis=-1)
