"""Input layers of an encoder of whole audio clips: convolutions over log-mel spectra, frame by frame.

Those of Gemma 3n and 4, and of Phi-4 (NeMo's; Kuchaiev et al. 2019).
"""

import dataclasses
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.packed_rows import FrameRows
from eqx_decoders.errors import CheckedFields, NonEmpty, PositiveFloat, PositiveInt
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class CumulativeNormConfig(CheckedFields):
    """Configuration of `scale (x_t - m_t) / sqrt(v_t + eps)` (Gemma 3n): of all features up to the frame t of a clip.

    m_t is the mean of all bands and filters of the frames s <= t, and v_t that of `(x_s - m_s)²`.

    **Arguments:**

    - `eps`: added to the variance.
    """

    eps: PositiveFloat = 1e-3

    def build(self, size: int) -> "CumulativeNorm":
        return CumulativeNorm(scale=jnp.ones((size,)), config=self)


class CumulativeNorm(eqx.Module):
    """Norm `scale (x_t - m_t) / sqrt(v_t + eps)`, of all features up to the frame t of a clip, in float32."""

    scale: Float[Array, "norm"]
    config: CumulativeNormConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch frames mel norm"], first: Bool[Array, "batch frames"]
    ) -> Float[Array, "batch frames mel norm"]:
        """Normalise; `first` is True at the first frame of a clip."""
        y = x.astype(jnp.float32)
        count = _since(jnp.full(first.shape, float(y.shape[2] * y.shape[3])), first)
        y = y - (_since(jnp.sum(y, axis=(2, 3)), first) / count)[:, :, None, None]
        variance = _since(jnp.sum(y * y, axis=(2, 3)), first) / count
        y = y * jax.lax.rsqrt(variance + self.config.eps)[:, :, None, None]
        return (y * self.scale.astype(jnp.float32)[None, None, None]).astype(x.dtype)


def _since(x: Float[Array, "batch frames"], first: Bool[Array, "batch frames"]) -> Float[Array, "batch frames"]:
    """Return the sums of all frames of a clip up to each."""

    def add(before: tuple[Array, Array], behind: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.where(behind[1], behind[0], before[0] + behind[0]), before[1] | behind[1]

    return jax.lax.associative_scan(add, (x, first), axis=1)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameStemConfig(CheckedFields):
    """Layers `act(norm(point(convolution(x))))`, 3 x 3 in steps of 2 over frames and bands; then one matrix.

    Padding frames count as zeros before each convolution, so that an audio clip's features depend on it alone; with
    `frames="behind"` also on the few frames of padding that its last ones look at.

    **Arguments:**

    - `mel_bands`: number of bands of a frame.
    - `filters`: number of filters of each convolution.
    - `norm`: norm over the filters of each position, or of all frames up to it; None for none.
    - `activation`: one of `ACTIVATIONS`, behind each norm.
    - `separable`: whether each convolution but the first one is of each filter by itself, with a matrix `point` over
        all filters behind it (Phi-4).
    - `bias`: whether convolutions and matrices have one.
    - `standardize`: whether a mean of each band is first subtracted, and a scale multiplied, which are not trained.
    - `longest`: tokens of a document for the layers: those of longer clips are cut, and the last piece is filled up
        with zeros, to which the others attend (Phi-4); None for no such bound.
    - `frames`: frames that a convolution looks at beside its own: one `"around"` it on each side, or two `"behind"` it.
    - `group`: tokens that become one row of features.
    - `rows_per_clip`: rows of features of each clip, filled up with `EncoderTokensConfig.fill`; None for as many as its
        frames make.
    """

    mel_bands: PositiveInt
    filters: Annotated[tuple[PositiveInt, ...], NonEmpty("number: one for each convolution")] = (128, 32)
    norm: LayerNormConfig | CumulativeNormConfig | None = LayerNormConfig(bias=False)
    activation: ActivationName = "relu"
    separable: bool = False
    bias: bool = False
    standardize: bool = False
    longest: PositiveInt | None = None
    frames: Literal["around", "behind"] = "around"
    group: PositiveInt = 1
    rows_per_clip: PositiveInt | None = None

    @property
    def stride(self) -> int:
        """Number of frames from one token to the next."""
        return 2 ** len(self.filters)

    def output_size(self, size: int) -> int:
        """Return the size that the convolutions leave of `size` frames or bands."""
        return -(-size // self.stride)

    def filled(self, tokens: int) -> int:
        """Return the number of a clip's tokens with those that fill its last piece up."""
        longest = self.longest
        return tokens if longest is None or tokens <= longest else -(-tokens // longest) * longest

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "FrameStem":
        *keys, out_key = jax.random.split(key, len(self.filters) + 1)
        inputs, bands = (1, *self.filters[:-1]), self.output_size(self.mel_bands)
        return FrameStem(
            convolutions=tuple(self._convolution(*sizes) for sizes in zip(self.filters, inputs, keys, strict=True)),
            out=fan_in(out_key, (bands, self.filters[-1], embed_dim), jnp.float32, bands * self.filters[-1]),
            out_bias=jnp.zeros((embed_dim,)) if self.bias else None,
            mean=jnp.zeros((self.mel_bands,)) if self.standardize else None,
            scale=jnp.ones((self.mel_bands,)) if self.standardize else None,
            config=self,
        )

    def _convolution(self, count: int, read: int, key: PRNGKeyArray) -> "NormedConvolution":
        alone, point_key = self.separable and read > 1, jax.random.fold_in(key, 0)
        inputs = 1 if alone else read
        return NormedConvolution(
            kernel=fan_in(key, (read if alone else count, inputs, 3, 3), jnp.float32, 9 * inputs),
            bias=jnp.zeros((read if alone else count,)) if self.bias else None,
            point=fan_in(point_key, (count, read), jnp.float32, read) if alone else None,
            point_bias=jnp.zeros((count,)) if alone and self.bias else None,
            norm=None if self.norm is None else self.norm.build(count),
            edges=(0, 2) if self.frames == "behind" else (1, 1),
        )


class NormedConvolution(eqx.Module):
    """Convolution `norm(point(kernel * x + bias))` over 3 x 3 neighbors, in steps of 2."""

    kernel: Float[Array, "filters input_filters kernel_columns kernel_rows"]
    bias: Float[Array, "filters"] | None
    point: Float[Array, "outer inner"] | None
    point_bias: Float[Array, "outer"] | None
    norm: LayerNorm | CumulativeNorm | None
    edges: tuple[int, int] = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch frames mel input_filters"], first: Bool[Array, "batch tokens"]
    ) -> Float[Array, "batch rows columns filters"]:
        """Convolve frames; `first` is True at the first token of a clip."""
        kernel, edges = self.kernel.astype(x.dtype), (self.edges, (1, 1))
        numbers: Any = dict(
            dimension_numbers=("NHWC", "OIHW", "NHWC"), feature_group_count=x.shape[-1] // kernel.shape[1]
        )
        y = add_bias(jax.lax.conv_general_dilated(x, kernel, (2, 2), edges, **numbers), self.bias)
        if self.point is not None:
            y = add_bias(jnp.einsum("bfmi,oi->bfmo", y, self.point.astype(x.dtype)), self.point_bias)
        if self.norm is None or isinstance(self.norm, LayerNorm):
            return y if self.norm is None else self.norm(y)
        steps = y.shape[1] // first.shape[1]
        return self.norm(y, jnp.pad(first[:, :, None], ((0, 0), (0, 0), (0, steps - 1))).reshape(y.shape[:2]))


class FrameStem(eqx.Module):
    """Input layers: convolutions over the frames of a row, and one matrix."""

    convolutions: tuple[NormedConvolution, ...]
    out: Float[Array, "mel filters embed"]
    out_bias: Float[Array, "embed"] | None
    mean: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    scale: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    config: FrameStemConfig = eqx.field(static=True)

    def __call__(self, rows: FrameRows, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        x = jnp.asarray(rows.frames)
        if self.mean is not None and self.scale is not None:
            x = (x.astype(jnp.float32) - self.mean.astype(jnp.float32)[None, None]) * self.scale[None, None]
        x = x.astype(ctx.execution.precision.compute)[..., None]
        real, first = jnp.asarray(rows.real), jnp.asarray(rows.positions) == 0
        for convolution in self.convolutions:
            x = jnp.where(real[:, :, None, None], x, jnp.zeros((), x.dtype))
            x = ACTIVATIONS[self.config.activation](convolution(x, first))
            real = real[:, ::2]
        x = ctx.einsum("batch length mel filters, mel filters embed -> batch length embed", x, self.out)
        x = add_bias(x, self.out_bias)
        x = x if self.config.longest is None else jnp.where(real[:, :, None], x, jnp.zeros((), x.dtype))
        return ctx.constrain(x, "batch length embed")
