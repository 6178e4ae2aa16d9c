"""xIELU (Huang and Schlag 2024): an activation with a learned slope on each side of zero."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_decoders.sharding.axes import FROZEN


class XIELU(eqx.Module):
    """Activation `softplus(alpha_p) x² + beta x` if x > 0, else `(beta + softplus(alpha_n)) (exp(x) - 1 - x) + beta x`.

    Computed in float32. `exp` is applied to `min(x, eps)`, with `eps` just below 0. `eps` and `beta`, the slope at 0,
    are stored in checkpoints but not trained.
    """

    alpha_p: Float[Array, ""]
    alpha_n: Float[Array, ""]
    beta: Float[Array, ""] = eqx.field(metadata=FROZEN)
    eps: Float[Array, ""] = eqx.field(metadata=FROZEN)

    @classmethod
    def build(cls) -> "XIELU":
        """Return the initial activation: the factor is 0.8 on both sides of 0, and the slope at 0 is 0.5."""
        beta = 0.5
        factor = 0.8
        parameters = math.log(math.expm1(factor)), math.log(math.expm1(factor - beta)), beta, -1e-6
        return cls(*(jnp.asarray(parameter, jnp.float32) for parameter in parameters))

    def __call__(self, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        parameters = self.alpha_p, self.alpha_n, self.beta, self.eps
        alpha_p, alpha_n, beta, eps = (parameter.astype(jnp.float32).reshape((1,) * x.ndim) for parameter in parameters)
        upcast = x.astype(jnp.float32)
        # `where` computes both branches: clip their inputs, as the gradient of an infinite branch would be NaN
        positive = jnp.maximum(upcast, 0.0)
        negative = jnp.minimum(upcast, eps)
        positive_branch = jax.nn.softplus(alpha_p) * positive**2
        negative_branch = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(negative) - jnp.minimum(upcast, 0.0))
        return (jnp.where(upcast > 0, positive_branch, negative_branch) + beta * upcast).astype(x.dtype)
