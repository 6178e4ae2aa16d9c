"""Gated convolution of a conformer: over a row's tokens, each feature by itself (Gulati et al. 2020)."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import Context
from eqx_decoders.errors import CheckedFields, PositiveInt
from eqx_decoders.layers.base import BranchResult
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.recurrent.sharded_conv import convolve_on_mesh
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightConvolutionConfig(CheckedFields):
    """Configuration of `out(act(norm(convolution(a * sigmoid(b)))))`, a and b being `into x`; it is causal.

    **Arguments:**

    - `taps`: tokens that the convolution sees, the last among them.
    - `activation`: one of `ACTIVATIONS`.
    - `norm`: normalization of the convolution's output.
    """

    taps: PositiveInt = 5
    activation: ActivationName = "silu"
    norm: NormConfig = RMSNormConfig()

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LightConvolution":
        keys = jax.random.split(key, 3)
        return LightConvolution(
            into=fan_in(keys[0], (embed_dim, 2, embed_dim), jnp.float32, embed_dim),
            taps=fan_in(keys[1], (embed_dim, self.taps), jnp.float32, self.taps),
            norm=self.norm.build(embed_dim),
            out=fan_in(keys[2], (embed_dim, embed_dim), jnp.float32, embed_dim),
            config=self,
        )


class LightConvolution(eqx.Module):
    """Gated convolution `out(act(norm(convolution(a * sigmoid(b)))))`, a and b being `into x`."""

    into: Float[Array, "embed inputs channels"]
    taps: Float[Array, "channels taps"]
    norm: Norm
    out: Float[Array, "channels embed"]
    config: LightConvolutionConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length embed"], ctx: Context) -> Float[Array, "batch length embed"]:
        both = ctx.einsum("batch length embed, embed inputs channels -> batch length inputs channels", x, self.into)
        both = save(both, "mlpwi")
        gated = ctx.constrain(both[:, :, 0] * jax.nn.sigmoid(both[:, :, 1]), "batch length channels")
        positions, segments = ctx.positions, ctx.segment_ids
        y = convolve_on_mesh(gated, self.taps, None, None, positions, segments, execution=ctx.execution)
        y = ACTIVATIONS[self.config.activation](self.norm(y))
        out = ctx.einsum("batch length channels, channels embed -> batch length embed", y, self.out)
        return save(ctx.constrain(out, "batch length embed"), "mlpwo")

    def branch(self, x: Array, ctx: Context, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(self(x, ctx))
