"""Gated short convolution (LFM2; Liquid AI 2025): `out(c * conv(b * x))`.

b, c and x are projections of the residual stream. The convolution is causal and depthwise, without an activation. The
only state is the last `taps - 1` inputs of the convolution.
"""

import dataclasses
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.cache.recurrent_state import ConvShape
from eqx_decoders.layers.recurrent.common import RecurrentLayer, convolve_channels, read_cache
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedConvolutionConfig(MixerConfig):
    """Configuration of the gated short convolution `out(c * conv(b * x))`.

    **Arguments:**

    - `channels`: features of b, c and x.
    - `taps`: kernel size of the causal convolution.
    - `bias`: whether the projections and the convolution have biases.
    """

    channels: PositiveInt
    taps: Annotated[int, AtLeast(2)] = 3
    bias: bool = False

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the cache shapes by name; they do not depend on `max_length`."""
        return {"stream": ConvShape(num_inputs=self.taps - 1, channels=self.channels)}

    def token_products(self, length: int) -> int:
        """Return the multiplications per token of the convolution."""
        return self.channels * self.taps

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "GatedConvolution":
        keys = jax.random.split(key, 3)
        channels = self.channels

        def zeros(*shape: int) -> Array | None:
            return jnp.zeros(shape) if self.bias else None

        return GatedConvolution(
            inputs=fan_in(keys[0], (embed_dim, 3, channels), jnp.float32, embed_dim),
            inputs_bias=zeros(3, channels),
            taps=fan_in(keys[1], (channels, self.taps), jnp.float32, self.taps),
            taps_bias=zeros(channels),
            out=fan_in(keys[2], (channels, embed_dim), jnp.float32, channels),
            out_bias=zeros(embed_dim),
            config=self,
        )


class GatedConvolution(RecurrentLayer):
    """Gated short convolution `out(c * conv(b * x))`; `inputs` are the projections to b, c and x, in this order."""

    inputs: Float[Array, "embed inputs mlp"]
    inputs_bias: Float[Array, "inputs mlp"] | None
    taps: Float[Array, "mlp taps"]
    taps_bias: Float[Array, "mlp"] | None
    out: Float[Array, "mlp embed"]
    out_bias: Float[Array, "embed"] | None
    config: GatedConvolutionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, cache: dict[str, Any] | None = None
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any]]:
        """Return the layer's output, and the proposed updates of its cache by name."""
        pattern = "batch length embed, embed inputs mlp -> batch length inputs mlp"
        projected = save(add_bias(ctx.einsum(pattern, x, self.inputs), self.inputs_bias), "qkv_proj")
        input_gate, output_gate, inner = (projected[:, :, index] for index in range(3))
        flat = ctx.constrain(input_gate * inner, "batch length channels")
        convolved, update = convolve_channels(flat, self.taps, self.taps_bias, read_cache(cache, "stream"), ctx)
        gated = save(ctx.constrain(output_gate * convolved, "batch length mlp"), "attention_out")
        out = add_bias(ctx.einsum("batch length mlp, mlp embed -> batch length embed", gated, self.out), self.out_bias)
        return save(ctx.constrain(out, "batch length embed"), "out_proj"), {"stream": update}
