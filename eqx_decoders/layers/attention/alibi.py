"""Attention with linear biases (ALiBi; Press et al. 2022)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.errors import CheckedFields, PositiveFloat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alibi(CheckedFields):
    """Linear biases: `scale * slope_h * (key position - query position)` is added to the scores of head h.

    Of H = 2^n heads, slopes are `2^(-max_exponent h / H)`, h from 1 to H; other numbers of heads have those of the
    next smaller power of two, and then every other one of the next larger.

    **Arguments:**

    - `max_exponent`: of the smallest slope, for powers of two.
    - `scale`: multiplies all slopes (Falcon: the scale of its queries).
    - `rounded`: whether positions, slopes and their products are rounded to bfloat16 (Falcon): keys that are near one
        another then have the same bias.
    """

    max_exponent: PositiveFloat = 8.0
    scale: PositiveFloat = 1.0
    rounded: bool = False

    def slopes(self, heads: int) -> Float32[Array, "heads"]:
        """Return the slope of each head, without the scale."""
        power = 2 ** (heads.bit_length() - 1)
        first, others = np.arange(1, power + 1), np.arange(1, 2 * (heads - power), 2)
        exponents = np.concatenate([first / power, others / (2 * power)])
        return jnp.asarray(2.0 ** (-self.max_exponent * exponents), jnp.float32)

    def bias(
        self, slopes: Float[Array, "*heads"], of_query: Int[Array, "*queries"], of_key: Int[Array, "*keys"]
    ) -> Float32[Array, "..."]:
        """Compute the biases, where slopes and the positions of queries and keys stand on axes of their own."""
        if not self.rounded:
            return self.scale * slopes * (of_key - of_query).astype(jnp.float32)
        slopes, of_key, of_query = (_rounded(x.astype(jnp.float32)) for x in (slopes, of_key, of_query))
        return self.scale * (_rounded(slopes * of_key) - _rounded(slopes * of_query))


def _rounded(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Round to bfloat16; XLA may leave out casts there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
