"""Input layers of an encoder of whole audio clips: convolutions over log-mel spectra, frame by frame (Gemma 3n, 4)."""

import dataclasses
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from eqx_decoders.context import Context
from eqx_decoders.encoders.packed_rows import FrameRows
from eqx_decoders.errors import CheckedFields, NonEmpty, PositiveFloat, PositiveInt
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig
from eqx_decoders.numerics.initializers import fan_in


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
    """Layers `act(norm(convolution(x)))`, 3 x 3 in steps of 2 over frames and bands; then one matrix.

    Padding frames count as zeros before each convolution, so that an audio clip's features depend on it alone; with
    `frames="behind"` also on the few frames of padding that its last ones look at.

    **Arguments:**

    - `mel_bands`: number of bands of a frame.
    - `filters`: number of filters of each convolution.
    - `norm`: norm over the filters of each position, or of all frames up to it.
    - `activation`: one of `ACTIVATIONS`, behind each norm.
    - `frames`: frames that a convolution looks at beside its own: one `"around"` it on each side, or two `"behind"` it.
    - `group`: tokens that become one row of features.
    - `rows_per_clip`: rows of features of each clip, filled up with `EncoderTokensConfig.fill`; None for as many as its
        frames make.
    """

    mel_bands: PositiveInt
    filters: Annotated[tuple[PositiveInt, ...], NonEmpty("number: one for each convolution")] = (128, 32)
    norm: LayerNormConfig | CumulativeNormConfig = LayerNormConfig(bias=False)
    activation: ActivationName = "relu"
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

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "FrameStem":
        *keys, out_key = jax.random.split(key, len(self.filters) + 1)
        inputs, bands = (1, *self.filters[:-1]), self.output_size(self.mel_bands)
        return FrameStem(
            convolutions=tuple(
                NormedConvolution(
                    kernel=fan_in(key, (count, read, 3, 3), jnp.float32, 9 * read),
                    norm=self.norm.build(count),
                    edges=(0, 2) if self.frames == "behind" else (1, 1),
                )
                for count, read, key in zip(self.filters, inputs, keys, strict=True)
            ),
            out=fan_in(out_key, (bands, self.filters[-1], embed_dim), jnp.float32, bands * self.filters[-1]),
            config=self,
        )


class NormedConvolution(eqx.Module):
    """Convolution `norm(kernel * x)` over 3 x 3 neighbors, in steps of 2."""

    kernel: Float[Array, "filters input_filters kernel_columns kernel_rows"]
    norm: LayerNorm | CumulativeNorm
    edges: tuple[int, int] = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch frames mel input_filters"], first: Bool[Array, "batch tokens"]
    ) -> Float[Array, "batch rows columns filters"]:
        """Convolve frames; `first` is True at the first token of a clip."""
        kernel, edges = self.kernel.astype(x.dtype), (self.edges, (1, 1))
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), edges, dimension_numbers=("NHWC", "OIHW", "NHWC"))
        if isinstance(self.norm, LayerNorm):
            return self.norm(y)
        steps = y.shape[1] // first.shape[1]
        return self.norm(y, jnp.pad(first[:, :, None], ((0, 0), (0, 0), (0, steps - 1))).reshape(y.shape[:2]))


class FrameStem(eqx.Module):
    """Input layers: convolutions over the frames of a row, and one matrix."""

    convolutions: tuple[NormedConvolution, ...]
    out: Float[Array, "mel filters embed"]
    config: FrameStemConfig = eqx.field(static=True)

    def __call__(self, rows: FrameRows, ctx: Context) -> Float[Array, "batch length embed"]:
        x = jnp.asarray(rows.frames).astype(ctx.execution.precision.compute)[..., None]
        real, first = jnp.asarray(rows.real), jnp.asarray(rows.positions) == 0
        for convolution in self.convolutions:
            x = jnp.where(real[:, :, None, None], x, jnp.zeros((), x.dtype))
            x = ACTIVATIONS[self.config.activation](convolution(x, first))
            real = real[:, ::2]
        x = ctx.einsum("batch length mel filters, mel filters embed -> batch length embed", x, self.out)
        return ctx.constrain(x, "batch length embed")
