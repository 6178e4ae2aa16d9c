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

    With H = 2^n heads the slopes are `2^(-max_exponent h / H)` for h = 1, ..., H. Any other number of heads has the
    slopes of the next smaller power of two, followed by every second slope of the next larger power of two.

    **Arguments:**

    - `max_exponent`: the smallest slope is `2^-max_exponent` if the number of heads is a power of two.
    - `scale`: multiplies all slopes (Falcon: the scale of its queries).
    - `rounded`: whether positions, slopes and their products are rounded to bfloat16 (Falcon). Neighboring keys then
        have the same bias.
    """

    max_exponent: PositiveFloat = 8.0
    scale: PositiveFloat = 1.0
    rounded: bool = False

    def slopes(self, heads: int) -> Float32[Array, "heads"]:
        """Return the slope of each head, without the scale."""
        power = 2 ** (heads.bit_length() - 1)
        regular = np.arange(1, power + 1) / power
        interpolated = np.arange(1, 2 * (heads - power), 2) / (2 * power)
        exponents = np.concatenate([regular, interpolated])
        return jnp.asarray(2.0 ** (-self.max_exponent * exponents), jnp.float32)

    def bias(
        self,
        slopes: Float[Array, "*heads"],
        query_positions: Int[Array, "*queries"],
        key_positions: Int[Array, "*keys"],
    ) -> Float32[Array, "..."]:
        """Compute the biases. The shapes of slopes and of both positions must broadcast."""
        if not self.rounded:
            return self.scale * slopes * (key_positions - query_positions).astype(jnp.float32)
        slopes, key_positions, query_positions = (
            _round_to_bfloat16(x.astype(jnp.float32)) for x in (slopes, key_positions, query_positions)
        )
        return self.scale * (_round_to_bfloat16(slopes * key_positions) - _round_to_bfloat16(slopes * query_positions))


def _round_to_bfloat16(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Round to bfloat16 precision. XLA may remove a cast to bfloat16 and back, so this is no pair of casts."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
