"""Quantized weights whose values are whole numbers or short floats.

The dtype of the values says what they are: `int8` and `int4` whole numbers, `uint8` the bits of E4M3 and `uint4` of
E2M1. Short floats are stored as bits since XLA takes ten times as long on a CPU to slice and widen its dtypes of them.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight


class QuantizedWeight(AbstractQuantizedWeight):
    """Quantized weight whose values are whole numbers, or the bits of E4M3 or E2M1."""

    @property
    def format(self) -> str:
        """Dtype of its values."""
        return self.values.dtype.name

    @property
    def eight_bit(self) -> Array | None:
        """The values as int8 or E4M3; None for those of 4 bits."""
        values = lax.stop_gradient(self.values)
        if values.dtype == jnp.uint8:
            return lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        return values if values.dtype == jnp.int8 else None

    def numbers(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the values as floats, without scales; no value is rounded."""
        return _decoded(lax.stop_gradient(self.values), dtype)


def _decoded(values: Array, dtype: DTypeLike) -> Float[Array, "..."]:
    """Decode values of any format to floats. Bits of short floats become those of float32: their exponent is moved."""
    if values.dtype not in (jnp.uint8, jnp.uint4):
        return values.astype(dtype)
    mantissa, bias, each = (3, 7, 2.0**-9) if values.dtype == jnp.uint8 else (1, 1, 0.5)
    bits = values.astype(jnp.int32)
    size = bits & (2**7 - 1 if mantissa == 3 else 2**3 - 1)
    floats = lax.bitcast_convert_type((size << (23 - mantissa)) + ((127 - bias) << 23), jnp.float32)
    floats = jnp.where(size < 2**mantissa, size.astype(jnp.float32) * each, floats)  # below the least normal one
    floats = jnp.where(size == 2**7 - 1, jnp.float32(np.nan), floats) if mantissa == 3 else floats
    return jnp.where(bits > size, -floats, floats).astype(dtype)
