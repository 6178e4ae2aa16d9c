"""xIELU (Huang and Schlag 2024): an activation with a learned slope on each side of zero."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_decoders.sharding.axes import FROZEN


class XIELU(eqx.Module):
    """Activation `softplus(alpha_p) x² + beta x` above 0, else `(beta + softplus(alpha_n)) (exp(x) - 1 - x) + beta x`.

    Computed in float32. `exp` takes `min(x, eps)`, a number just below 0; it and `beta`, the slope at 0, are not
    trained, but checkpoints have them.
    """

    alpha_p: Float[Array, ""]
    alpha_n: Float[Array, ""]
    beta: Float[Array, ""] = eqx.field(metadata=FROZEN)
    eps: Float[Array, ""] = eqx.field(metadata=FROZEN)

    @classmethod
    def build(cls) -> "XIELU":
        """Return the activation before training: 0.8 is the factor of each side, and 0.5 the slope at 0."""
        beta, alpha = 0.5, 0.8
        numbers = math.log(math.expm1(alpha)), math.log(math.expm1(alpha - beta)), beta, -1e-6
        return cls(*(jnp.asarray(number, jnp.float32) for number in numbers))

    def __call__(self, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        numbers = self.alpha_p, self.alpha_n, self.beta, self.eps
        alpha_p, alpha_n, beta, eps = (each.astype(jnp.float32).reshape((1,) * x.ndim) for each in numbers)
        wide = x.astype(jnp.float32)
        # what the other side takes must be finite, or its gradient would not be 0
        above, below = jnp.maximum(wide, 0.0), jnp.minimum(wide, eps)
        rising = jax.nn.softplus(alpha_p) * above**2
        falling = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(below) - jnp.minimum(wide, 0.0))
        return (jnp.where(wide > 0, rising, falling) + beta * wide).astype(x.dtype)
