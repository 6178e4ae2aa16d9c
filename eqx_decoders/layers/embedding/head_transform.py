"""Transform between the final norm and the output head: linear map, activation and norm (BERT, Devlin et al. 2019)."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, PositiveInt
from eqx_decoders.layers.mlp import ACTIVATIONS, ActivationName
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTransformConfig(CheckedFields):
    """Configuration of the head transform `norm(act(kernel^T x + bias))`, whose output is the head's input.

    **Arguments:**

    - `features`: output features; None: the features of the residual stream.
    - `activation`: one of `ACTIVATIONS`.
    - `bias`: whether to add a bias.
    - `norm`: norm of the output; None for no norm.
    """

    features: PositiveInt | None = None
    activation: ActivationName = "gelu"
    bias: bool = False
    norm: NormConfig | None = None

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "HeadTransform":
        size = self.features or embed_dim
        return HeadTransform(
            kernel=fan_in(key, (embed_dim, size), jnp.float32, embed_dim),
            bias=jnp.zeros((size,)) if self.bias else None,
            norm=None if self.norm is None else self.norm.build(size),
            config=self,
        )


class HeadTransform(eqx.Module):
    """Head transform `norm(act(kernel^T x + bias))`."""

    kernel: Float[Array, "embed outer"]
    bias: Float[Array, "outer"] | None
    norm: Norm | None
    config: HeadTransformConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length outer"]:
        x = ctx.einsum("batch length embed, embed outer -> batch length outer", x, self.kernel)
        x = ctx.constrain(ACTIVATIONS[self.config.activation](add_bias(x, self.bias)), "batch length outer")
        return x if self.norm is None else self.norm(x)
