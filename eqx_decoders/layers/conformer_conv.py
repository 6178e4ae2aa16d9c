"""Gated depthwise convolution of a Conformer along the sequence (Gulati et al. 2020)."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.base import BranchResult, ExtraConfig
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.recurrent.sharded_conv import convolve_on_mesh
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightConvolutionConfig(ExtraConfig):
    """Configuration of `out(act(norm(point(convolution(a * gate(b))))))` with `[a, b] = into x`; it is causal.

    **Arguments:**

    - `taps`: kernel size of the convolution: the token itself and the `taps - 1` tokens before it.
    - `activation`, `gate`: names in `ACTIVATIONS`.
    - `norm`: normalization of the convolution's output; None for none.
    - `pointwise`: whether a pointwise convolution `point` follows the depthwise convolution (Phi-4).
    - `bias`: whether all projections and the convolution have biases. a and b then have a second bias each (Phi-4).
    """

    encoder_only: ClassVar[bool] = True

    taps: PositiveInt = 5
    activation: ActivationName = "silu"
    gate: ActivationName = "sigmoid"
    norm: NormConfig | None = RMSNormConfig()
    pointwise: bool = False
    bias: bool = False

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LightConvolution":
        keys = jax.random.split(key, 3)
        point_key = jax.random.fold_in(key, 3)

        def zeros(*shape: int) -> Array | None:
            return jnp.zeros((*shape, embed_dim)) if self.bias else None

        return LightConvolution(
            into=fan_in(keys[0], (embed_dim, 2, embed_dim), jnp.float32, embed_dim),
            taps=fan_in(keys[1], (embed_dim, self.taps), jnp.float32, self.taps),
            norm=None if self.norm is None else self.norm.build(embed_dim),
            point=fan_in(point_key, (embed_dim, embed_dim), jnp.float32, embed_dim) if self.pointwise else None,
            out=fan_in(keys[2], (embed_dim, embed_dim), jnp.float32, embed_dim),
            into_bias=zeros(2),
            value_shift=zeros(),
            gate_shift=zeros(),
            taps_bias=zeros(),
            point_bias=zeros() if self.pointwise else None,
            out_bias=zeros(),
            config=self,
        )


class LightConvolution(eqx.Module):
    """Gated convolution `out(act(norm(point(convolution(a * gate(b))))))` with `[a, b] = into x`."""

    into: Float[Array, "embed inputs channels"]
    taps: Float[Array, "channels taps"]
    norm: Norm | None
    point: Float[Array, "channels outer"] | None
    out: Float[Array, "channels embed"]
    into_bias: Float[Array, "inputs channels"] | None
    value_shift: Float[Array, "channels"] | None
    gate_shift: Float[Array, "channels"] | None
    taps_bias: Float[Array, "channels"] | None
    point_bias: Float[Array, "outer"] | None
    out_bias: Float[Array, "embed"] | None
    config: LightConvolutionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        inputs = ctx.einsum("batch length embed, embed inputs channels -> batch length inputs channels", x, self.into)
        inputs = save(add_bias(inputs, self.into_bias), "mlpwi")
        gate = ACTIVATIONS[self.config.gate](add_bias(inputs[:, :, 1], self.gate_shift))
        gated = ctx.constrain(add_bias(inputs[:, :, 0], self.value_shift) * gate, "batch length channels")
        positions, segments = ctx.positions, ctx.segment_ids
        y = convolve_on_mesh(gated, self.taps, self.taps_bias, None, positions, segments, execution=ctx.execution)
        if self.point is not None:
            y = ctx.einsum("batch length channels, channels outer -> batch length outer", y, self.point)
            y = add_bias(y, self.point_bias)
        y = ACTIVATIONS[self.config.activation](y if self.norm is None else self.norm(y))
        out = ctx.einsum("batch length channels, channels embed -> batch length embed", y, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "mlpwo")

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`."""
        return BranchResult(self(x, ctx))
