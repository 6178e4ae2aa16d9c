"""Input layers of an encoder of whole audio clips: convolutions over log-mel spectra, frame by frame (Gemma 4)."""

import dataclasses
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import Context
from eqx_decoders.encoders.packed_rows import FrameRows
from eqx_decoders.errors import CheckedFields, NonEmpty, PositiveInt
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameStemConfig(CheckedFields):
    """Layers `act(norm(convolution(x)))`, 3 x 3 in steps of 2 over frames and bands; then one matrix.

    Padding frames count as zeros before each convolution, so that an audio clip's features depend on it alone.

    **Arguments:**

    - `mel_bands`: number of bands of a frame.
    - `filters`: number of filters of each convolution.
    - `norm`: norm over the filters of each position.
    - `activation`: one of `ACTIVATIONS`, behind each norm.
    """

    mel_bands: PositiveInt
    filters: Annotated[tuple[PositiveInt, ...], NonEmpty("number: one for each convolution")] = (128, 32)
    norm: LayerNormConfig = LayerNormConfig(bias=False)
    activation: ActivationName = "relu"

    group = 1  # tokens that become one row of features

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
                    kernel=fan_in(key, (count, read, 3, 3), jnp.float32, 9 * read), norm=self.norm.build(count)
                )
                for count, read, key in zip(self.filters, inputs, keys, strict=True)
            ),
            out=fan_in(out_key, (bands, self.filters[-1], embed_dim), jnp.float32, bands * self.filters[-1]),
            config=self,
        )


class NormedConvolution(eqx.Module):
    """Convolution `norm(kernel * x)` over 3 x 3 neighbors, in steps of 2."""

    kernel: Float[Array, "filters input_filters kernel_columns kernel_rows"]
    norm: LayerNorm

    def __call__(self, x: Float[Array, "batch frames mel input_filters"]) -> Float[Array, "batch rows columns filters"]:
        kernel, edges = self.kernel.astype(x.dtype), ((1, 1), (1, 1))
        return self.norm(
            jax.lax.conv_general_dilated(x, kernel, (2, 2), edges, dimension_numbers=("NHWC", "OIHW", "NHWC"))
        )


class FrameStem(eqx.Module):
    """Input layers: convolutions over the frames of a row, and one matrix."""

    convolutions: tuple[NormedConvolution, ...]
    out: Float[Array, "mel filters embed"]
    config: FrameStemConfig = eqx.field(static=True)

    def __call__(self, rows: FrameRows, ctx: Context) -> Float[Array, "batch length embed"]:
        x = jnp.asarray(rows.frames).astype(ctx.execution.precision.compute)[..., None]
        real = jnp.asarray(rows.real)
        for convolution in self.convolutions:
            x = jnp.where(real[:, :, None, None], x, jnp.zeros((), x.dtype))
            x = ACTIVATIONS[self.config.activation](convolution(x))
            real = real[:, ::2]
        x = ctx.einsum("batch length mel filters, mel filters embed -> batch length embed", x, self.out)
        return ctx.constrain(x, "batch length embed")
