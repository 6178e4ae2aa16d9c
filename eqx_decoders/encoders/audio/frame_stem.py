"""Stem of an audio encoder that reads complete clips: convolutions over the frames of log-mel spectra.

Used by Gemma 3n, Gemma 4 and Phi-4 (as in NeMo; Kuchaiev et al. 2019).
"""

import dataclasses
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.packed_rows import PackedFrames
from eqx_decoders.encoders.stem import StemConfig
from eqx_decoders.errors import CheckedFields, NonEmpty, PositiveFloat, PositiveInt
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.axes import BUFFER


@dataclasses.dataclass(frozen=True, kw_only=True)
class CumulativeNormConfig(CheckedFields):
    """Configuration of the cumulative norm `scale (x_t - m_t) / sqrt(v_t + eps)` (Gemma 3n).

    m_t is the mean over all bands and filters of the frames s <= t of a clip; v_t is the mean of `(x_s - m_s)²` over
    the same values.

    **Arguments:**

    - `eps`: added to the variance.
    """

    eps: PositiveFloat = 1e-3

    def build(self, size: int) -> "CumulativeNorm":
        return CumulativeNorm(scale=jnp.ones((size,)), config=self)


class CumulativeNorm(eqx.Module):
    """Cumulative norm `scale (x_t - m_t) / sqrt(v_t + eps)` in float32; see `CumulativeNormConfig`."""

    scale: Float[Array, "norm"]
    config: CumulativeNormConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch frames mel norm"], first: Bool[Array, "batch frames"]
    ) -> Float[Array, "batch frames mel norm"]:
        """Normalize `x`; `first` is True at the first frame of each clip."""
        y = x.astype(jnp.float32)
        count = _cumulative_sum(jnp.full(first.shape, float(y.shape[2] * y.shape[3])), first)
        y = y - (_cumulative_sum(jnp.sum(y, axis=(2, 3)), first) / count)[:, :, None, None]
        variance = _cumulative_sum(jnp.sum(y * y, axis=(2, 3)), first) / count
        y = y * jax.lax.rsqrt(variance + self.config.eps)[:, :, None, None]
        return (y * self.scale.astype(jnp.float32)[None, None, None]).astype(x.dtype)


def _cumulative_sum(
    x: Float[Array, "batch frames"], first: Bool[Array, "batch frames"]
) -> Float[Array, "batch frames"]:
    """Return the cumulative sum over frames, which starts again where `first` is True."""

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        left_sum, left_first = left
        right_sum, right_first = right
        return jnp.where(right_first, right_sum, left_sum + right_sum), left_first | right_first

    return jax.lax.associative_scan(add, (x, first), axis=1)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameStemConfig(StemConfig):
    """Configuration of layers `act(norm(point(convolution(x))))` and a linear layer.

    Convolutions are 3 x 3 with stride 2 over frames and bands. Padding frames are set to zero before each convolution,
    so that the features of an audio clip do not depend on other clips. With `frames="behind"`, the last features also
    depend on a few padding frames after the clip.

    **Arguments:**

    - `mel_bands`: number of mel bands per frame.
    - `filters`: number of filters of each convolution.
    - `norm`: norm over the filters at each position, or cumulative over frames; None: no norm.
    - `activation`: one of `ACTIVATIONS`, applied after each norm.
    - `separable`: whether convolutions after the first are depthwise, followed by a pointwise convolution `point`
        (Phi-4).
    - `bias`: whether convolutions and linear layers have a bias.
    - `standardize`: whether the spectrum is first standardized with a mean and a scale per band, which are not trained.
    - `longest`: maximum number of tokens of a document in the layers. Longer clips are split into several documents,
        and the last document is padded with zeros, which its tokens attend to (Phi-4). None: no maximum.
    - `frames`: the input frames of a 3 x 3 convolution: `"around"`, the current, previous and next frame; `"behind"`,
        the current frame and the next two.
    - `merge`: number of consecutive tokens that become one feature.
    - `rows_per_clip`: fixed number of features per clip, padded with the embedding of `EncoderTokensConfig.fill`.
        None: the number depends on the length of the clip.
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
    merge: PositiveInt = 1
    rows_per_clip: PositiveInt | None = None

    @property
    def group(self) -> int:
        """Number of tokens that become one feature."""
        return self.merge

    @property
    def stride(self) -> int:
        """Number of frames from one token to the next."""
        return 2 ** len(self.filters)

    def output_size(self, size: int) -> int:
        """Return the number of frames or bands after the convolutions, from the number before them."""
        return -(-size // self.stride)

    def filled(self, tokens: int) -> int:
        """Return the number of tokens of a clip, including the padding of its last document (see `longest`)."""
        longest = self.longest
        return tokens if longest is None or tokens <= longest else -(-tokens // longest) * longest

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "FrameStem":
        *keys, out_key = jax.random.split(key, len(self.filters) + 1)
        input_filters = (1, *self.filters[:-1])
        bands = self.output_size(self.mel_bands)
        return FrameStem(
            convolutions=tuple(
                self._convolution(*sizes) for sizes in zip(self.filters, input_filters, keys, strict=True)
            ),
            out=fan_in(out_key, (bands, self.filters[-1], embed_dim), jnp.float32, bands * self.filters[-1]),
            out_bias=jnp.zeros((embed_dim,)) if self.bias else None,
            mean=jnp.zeros((self.mel_bands,)) if self.standardize else None,
            scale=jnp.ones((self.mel_bands,)) if self.standardize else None,
            config=self,
        )

    def _convolution(self, filters: int, input_filters: int, key: PRNGKeyArray) -> "NormedConvolution":
        depthwise = self.separable and input_filters > 1
        kernel_inputs = 1 if depthwise else input_filters
        kernel_outputs = input_filters if depthwise else filters
        point_key = jax.random.fold_in(key, 0)
        return NormedConvolution(
            kernel=fan_in(key, (kernel_outputs, kernel_inputs, 3, 3), jnp.float32, 9 * kernel_inputs),
            bias=jnp.zeros((kernel_outputs,)) if self.bias else None,
            point=fan_in(point_key, (filters, input_filters), jnp.float32, input_filters) if depthwise else None,
            point_bias=jnp.zeros((filters,)) if depthwise and self.bias else None,
            norm=None if self.norm is None else self.norm.build(filters),
            edges=(0, 2) if self.frames == "behind" else (1, 1),
        )


class NormedConvolution(eqx.Module):
    """3 x 3 convolution with stride 2: `norm(point(kernel * x + bias))`."""

    kernel: Float[Array, "filters input_filters kernel_columns kernel_rows"]
    bias: Float[Array, "filters"] | None
    point: Float[Array, "outer inner"] | None
    point_bias: Float[Array, "outer"] | None
    norm: LayerNorm | CumulativeNorm | None
    edges: tuple[int, int] = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch frames mel input_filters"], first: Bool[Array, "batch tokens"]
    ) -> Float[Array, "batch rows columns filters"]:
        """Convolve frames; `first` is True at the first token of each clip."""
        kernel = self.kernel.astype(x.dtype)
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            (2, 2),
            (self.edges, (1, 1)),
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
            feature_group_count=x.shape[-1] // kernel.shape[1],
        )
        y = add_bias(y, self.bias)
        if self.point is not None:
            y = add_bias(jnp.einsum("bfmi,oi->bfmo", y, self.point.astype(x.dtype)), self.point_bias)
        if self.norm is None or isinstance(self.norm, LayerNorm):
            return y if self.norm is None else self.norm(y)
        frames_per_token = y.shape[1] // first.shape[1]
        first_frame = jnp.pad(first[:, :, None], ((0, 0), (0, 0), (0, frames_per_token - 1))).reshape(y.shape[:2])
        return self.norm(y, first_frame)


class FrameStem(eqx.Module):
    """Stem of an audio encoder: convolutions over the frames of packed clips, and a linear layer."""

    convolutions: tuple[NormedConvolution, ...]
    out: Float[Array, "mel filters embed"]
    out_bias: Float[Array, "embed"] | None
    mean: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    scale: Float[Array, "norm"] | None = eqx.field(metadata=BUFFER)
    config: FrameStemConfig = eqx.field(static=True)

    def __call__(self, rows: PackedFrames, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        x = jnp.asarray(rows.frames)
        if self.mean is not None and self.scale is not None:
            x = (x.astype(jnp.float32) - self.mean.astype(jnp.float32)[None, None]) * self.scale[None, None]
        x = x.astype(ctx.execution.precision.compute)[..., None]
        is_frame = jnp.asarray(rows.real)
        first = jnp.asarray(rows.positions) == 0
        for convolution in self.convolutions:
            x = jnp.where(is_frame[:, :, None, None], x, jnp.zeros((), x.dtype))
            x = ACTIVATIONS[self.config.activation](convolution(x, first))
            is_frame = is_frame[:, ::2]
        x = ctx.einsum("batch length mel filters, mel filters embed -> batch length embed", x, self.out)
        x = add_bias(x, self.out_bias)
        x = x if self.config.longest is None else jnp.where(is_frame[:, :, None], x, jnp.zeros((), x.dtype))
        return ctx.constrain(x, "batch length embed")
