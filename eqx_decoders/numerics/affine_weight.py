"""Weights quantized to integers or to FP8/FP4 floats.

The dtype of the stored values determines the format: `int8` and `int4` are integers, `uint8` the bits of E4M3, and
`uint4` the bits of E2M1. Floats are stored as bits, because XLA's FP8 and FP4 dtypes are ten times slower to slice and
convert on CPUs.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight


class QuantizedWeight(AbstractQuantizedWeight):
    """Quantized weight whose values are integers, or the bits of E4M3 or E2M1."""

    @property
    def format(self) -> str:
        """Name of the dtype of the stored values."""
        return self.values.dtype.name

    @property
    def eight_bit(self) -> Array | None:
        """The values as int8 or E4M3; None for 4-bit values."""
        values = lax.stop_gradient(self.values)
        if values.dtype == jnp.uint8:
            return lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        return values if values.dtype == jnp.int8 else None

    def decode(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the values as floats, without scales. The conversion is exact."""
        return _decoded(lax.stop_gradient(self.values), dtype)


def _decoded(values: Array, dtype: DTypeLike) -> Float[Array, "..."]:
    """Convert stored values of any format to floats. For E4M3 and E2M1, shift their bits into those of a float32."""
    if values.dtype not in (jnp.uint8, jnp.uint4):
        return values.astype(dtype)
    is_e4m3 = values.dtype == jnp.uint8
    mantissa_bits, bias, smallest = (3, 7, 2.0**-9) if is_e4m3 else (1, 1, 0.5)
    bits = values.astype(jnp.int32)
    magnitude = bits & (2**7 - 1 if is_e4m3 else 2**3 - 1)  # without the sign bit
    floats = lax.bitcast_convert_type((magnitude << (23 - mantissa_bits)) + ((127 - bias) << 23), jnp.float32)
    is_subnormal = magnitude < 2**mantissa_bits
    floats = jnp.where(is_subnormal, magnitude.astype(jnp.float32) * smallest, floats)
    floats = jnp.where(magnitude == 2**7 - 1, jnp.float32(np.nan), floats) if is_e4m3 else floats
    return jnp.where(bits > magnitude, -floats, floats).astype(dtype)
