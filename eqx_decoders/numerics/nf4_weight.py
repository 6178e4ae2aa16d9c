"""Weights in NF4, a 4-bit format whose levels are quantiles of the normal distribution (QLoRA; Dettmers et al. 2023).

w = LEVELS[values] * scale,   scale: largest absolute value of a quantization group (rows of one column)
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight, Quantization


# Appendix E of the paper. A stored value is the index of its level minus 8, because checkpoints support signed int4.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class NF4Weight(AbstractQuantizedWeight):
    """Quantized weight whose values, `int4`, are indices of NF4 levels, minus 8."""

    @property
    def format(self) -> str:
        """Name of the format."""
        return "nf4"

    def decode(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the levels of the values, rounded to `dtype`."""
        return _level(lax.stop_gradient(self.values).astype(jnp.int32) + 8, LEVELS).astype(dtype)


def _level(index: Array, levels: tuple[float, ...]) -> Array:
    """Return `levels[index]` by a binary search with selects, because a table lookup would be a gather per value."""
    if len(levels) == 1:
        return jnp.float32(levels[0])
    half = len(levels) // 2
    return jnp.where(index & half > 0, _level(index, levels[half:]), _level(index, levels[:half]))


def _nearest(x: Array) -> Array:
    """Return the index of the nearest level, minus 8."""
    midpoints = (np.asarray(LEVELS[1:]) + np.asarray(LEVELS[:-1])) / 2
    below = ((x > midpoint).astype(jnp.int8) for midpoint in midpoints)
    return sum(below, jnp.full(x.shape, -8, jnp.int8)).astype(jnp.int4)


NF4 = Quantization(NF4Weight, largest=1.0, encode=_nearest, groups=(64, 32))
