"""What all attention kernels share: their results, and what is done to scores."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


EMPTY = -1e30  # lse of a query that sees nothing: finite, so that differences and gradients stay finite

Result = tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]


def cap_scores(scores: Float[Array, "*shape"], soft_cap: float | None) -> Float[Array, "*shape"]:
    """`cap * tanh(scores / cap)`; None leaves them."""
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap
