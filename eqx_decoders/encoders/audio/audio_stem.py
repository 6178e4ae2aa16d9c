"""Stem of an audio encoder that reads chunks: convolutions over log-mel spectra (Qwen3-Omni)."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.packed_rows import PackedChunks
from eqx_decoders.encoders.stem import StemConfig
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.embedding.embedding import sinusoids
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioStemConfig(StemConfig):
    """Configuration of 3 x 3 convolutions with stride 2 over the bands and frames of a chunk, a linear layer, and
    sinusoidal positions within the chunk.

    **Arguments:**

    - `mel_bands`: number of mel bands per frame.
    - `chunk_frames`: number of frames per chunk.
    - `filters`: number of filters of each convolution.
    - `convolutions`: number of convolutions.
    - `activation`: one of `ACTIVATIONS`, applied after each convolution.
    """

    mel_bands: PositiveInt
    chunk_frames: PositiveInt
    filters: PositiveInt
    convolutions: PositiveInt = 3
    activation: ActivationName = "gelu"

    def output_size(self, size: int) -> int:
        """Return the number of frames (or bands) after the convolutions; `size` is the number of input frames."""
        for _ in range(self.convolutions):
            size = (size + 1) // 2
        return size

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens of a full chunk."""
        return self.output_size(self.chunk_frames)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "AudioStem":
        *keys, out_key = jax.random.split(key, self.convolutions + 1)
        inputs = (1, *(self.filters,) * (self.convolutions - 1))
        bands = self.output_size(self.mel_bands)
        return AudioStem(
            convolutions=tuple(_convolution(count, self.filters, key) for count, key in zip(inputs, keys, strict=True)),
            out=fan_in(out_key, (self.filters, bands, embed_dim), jnp.float32, self.filters * bands),
            config=self,
        )


class Convolution(eqx.Module):
    """3 x 3 convolution `kernel * x + bias` with stride 2."""

    kernel: Float[Array, "filters input_filters kernel_rows kernel_columns"]
    bias: Float[Array, "filters"]

    def __call__(
        self, x: Float[Array, "chunks input_filters mel frames"]
    ) -> Float[Array, "chunks filters rows columns"]:
        kernel = self.kernel.astype(x.dtype)
        padding = ((1, 1), (1, 1))
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), padding, dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return y + self.bias.astype(x.dtype)[None, :, None, None]


def _convolution(inputs: int, filters: int, key: PRNGKeyArray) -> Convolution:
    return Convolution(kernel=fan_in(key, (filters, inputs, 3, 3), jnp.float32, 9 * inputs), bias=jnp.zeros((filters,)))


class AudioStem(eqx.Module):
    """Stem of an audio encoder: convolutions, a linear layer, and sinusoidal positions within a chunk."""

    convolutions: tuple[Convolution, ...]
    out: Float[Array, "filters mel embed"]
    config: AudioStemConfig = eqx.field(static=True)

    def __call__(self, rows: PackedChunks, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        dtype = ctx.execution.precision.compute
        chunks = jnp.asarray(rows.chunks).astype(dtype)
        batch, count = chunks.shape[:2]
        x = chunks.reshape(batch * count, 1, *chunks.shape[2:])
        for convolution in self.convolutions:
            x = ACTIVATIONS[self.config.activation](convolution(x))
        x = jnp.moveaxis(x, 3, 1).reshape(batch, -1, *x.shape[1:3])
        x = ctx.einsum("batch length filters mel, filters mel embed -> batch length embed", x, self.out)
        positions = jnp.tile(jnp.arange(x.shape[1] // count), count)
        position_embedding = sinusoids(positions, x.shape[-1], 10_000.0)
        return ctx.constrain(x + position_embedding.astype(dtype)[None], "batch length embed")
