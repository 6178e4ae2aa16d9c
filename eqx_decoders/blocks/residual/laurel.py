"""Learned augmented residual layers (LAuReL, Menghani et al. 2024): a low-rank branch in parallel to the mixer."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BlockLayer, ReadWriteResidual, Residual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laurel(Residual):
    """Configuration of LAuReL: `x = (x + mixer(n) + n + norm(right^T left^T n)) / sqrt(2)`.

    n is the mixer's normalized input. The outputs of other layers are added as in `Sequential`.

    **Arguments:**

    - `rank`: rank of the product of the matrices `left` and `right`.
    - `norm`: norm of the output of the low-rank branch.
    """

    keeps_normed: ClassVar[bool] = True
    rank: PositiveInt = 64
    norm: NormConfig = RMSNormConfig()

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "LaurelResidual":
        left_key, right_key = jax.random.split(key)
        return LaurelResidual(
            left=fan_in(left_key, (embed_dim, self.rank), jnp.float32, embed_dim),
            right=fan_in(right_key, (self.rank, embed_dim), jnp.float32, self.rank),
            norm=self.norm.build(embed_dim),
        )


class LaurelResidual(ReadWriteResidual):
    """LAuReL connection; see `Laurel`."""

    left: Float[Array, "embed latent"]
    right: Float[Array, "latent embed"]
    norm: Norm

    def read(self, state: Array, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, Array | None]:
        x = state if layer.stream_norm is None else layer.stream_norm(state)
        if layer.name != "mixer":
            return x, None
        latent = ctx.einsum("batch length embed, embed latent -> batch length latent", x, self.left)
        out = ctx.einsum("batch length latent, latent embed -> batch length embed", latent, self.right)
        return x, x + self.norm(ctx.constrain(out, "batch length embed"))

    def write(self, state: Array, out: Array, coefficients: Array | None = None) -> Array:
        return state + out if coefficients is None else (state + out + coefficients) * 2**-0.5
