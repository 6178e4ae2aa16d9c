"""Moments of an optimizer in 8 bits, with one float32 number for each row of a weight (after Dettmers et al. 2021)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, Shaped


class EightBits(NamedTuple):
    """Codes of a moment in 8 bits: `x = sign(c) largest (c / C)^2`, C being 127, or 255 where nothing is negative.

    Squares reach further down than equal steps do: to 1/16129 of the largest of a row, or 1/65025.
    """

    codes: Shaped[Array, "*shape"]
    largest: Float32[Array, "*rows 1"]


class Counted(NamedTuple):
    """The state of an optimizer that rounds at random, and the number of its steps, from which it draws."""

    steps: Int32[Array, ""]
    state: Any


def to_eight_bits(x: Float32[Array, "*shape"], key: PRNGKeyArray, *, positive: bool) -> EightBits:
    """Round each number of a moment up or down by chance, so that its mean is exact.

    Rounded to the nearest, a moment would stay where it is: what a step adds is less than half of what lies between two
    codes. `positive` is for a second moment: its root is stored, and no number above 0 becomes 0, by which the first
    moment would be divided.
    """
    levels = 255 if positive else 127
    size = jnp.sqrt(x) if positive else jnp.abs(x)
    largest = jnp.max(size, axis=-1, keepdims=True, initial=0.0)
    share = size / jnp.where(largest == 0, 1.0, largest)
    below = jnp.clip(jnp.floor(jnp.sqrt(share) * levels), 0, levels - 1)
    low, high = (below / levels) ** 2, ((below + 1) / levels) ** 2
    draw = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32) / 2**16
    codes = below + ((share - low) / (high - low) > draw).astype(jnp.float32)
    if positive:
        codes = jnp.where(size > 0, jnp.maximum(codes, 1.0), 0.0)
        return EightBits(codes.astype(jnp.uint8), largest)
    return EightBits((jnp.sign(x) * codes).astype(jnp.int8), largest)


def from_eight_bits(moment: EightBits) -> Float32[Array, "*shape"]:
    """Return the moment in float32."""
    codes, positive = moment.codes.astype(jnp.float32), moment.codes.dtype == jnp.uint8
    size = moment.largest * jnp.square(codes / (255 if positive else 127))
    return jnp.square(size) if positive else jnp.sign(codes) * size


def is_eight_bits(node: Any) -> bool:
    """Return whether a node of a tree is a moment in 8 bits."""
    return isinstance(node, EightBits)
