"""Optimizer moments in 8 bits, with one float32 scale for each row of a weight (after Dettmers et al. 2021)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, Shaped


class EightBits(NamedTuple):
    """Moment in 8 bits: `x = sign(c) largest (c / C)^2`, where C is 127, or 255 for moments without negative values.

    Squared codes represent smaller values than a linear scale: down to 1/16129, or 1/65025, of the largest value of a
    row.

    **Arguments:**

    - `codes`: the codes `c`; int8, or uint8 for moments without negative values.
    - `largest`: the largest absolute value of each row.
    """

    codes: Shaped[Array, "*shape"]
    largest: Float32[Array, "*rows 1"]


class Counted(NamedTuple):
    """State of an optimizer with stochastic rounding, and the number of its steps, which is the seed."""

    steps: Int32[Array, ""]
    state: Any


def to_eight_bits(x: Float32[Array, "*shape"], key: PRNGKeyArray, *, positive: bool) -> EightBits:
    """Convert a moment to 8 bits with stochastic rounding, so that its expected value is exact.

    With rounding to nearest, a moment would not change, because the increment of a step is smaller than half of the
    distance between two codes. `positive`: the moment is a second moment. Its root is stored, and values above 0 do not
    become 0, because the first moment is divided by them.
    """
    levels = 255 if positive else 127
    magnitude = jnp.sqrt(x) if positive else jnp.abs(x)
    largest = jnp.max(magnitude, axis=-1, keepdims=True, initial=0.0)
    share = magnitude / jnp.where(largest == 0, 1.0, largest)
    below = jnp.clip(jnp.floor(jnp.sqrt(share) * levels), 0, levels - 1)
    low, high = (below / levels) ** 2, ((below + 1) / levels) ** 2
    draw = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32) / 2**16
    codes = below + ((share - low) / (high - low) > draw).astype(jnp.float32)
    if positive:
        codes = jnp.where(magnitude > 0, jnp.maximum(codes, 1.0), 0.0)
        return EightBits(codes.astype(jnp.uint8), largest)
    return EightBits((jnp.sign(x) * codes).astype(jnp.int8), largest)


def from_eight_bits(moment: EightBits) -> Float32[Array, "*shape"]:
    """Convert a moment to float32."""
    codes, positive = moment.codes.astype(jnp.float32), moment.codes.dtype == jnp.uint8
    size = moment.largest * jnp.square(codes / (255 if positive else 127))
    return jnp.square(size) if positive else jnp.sign(codes) * size


def is_eight_bits(node: Any) -> bool:
    """Return whether a node of a tree is a moment in 8 bits."""
    return isinstance(node, EightBits)
