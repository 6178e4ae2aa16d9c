"""Quantization of keys and values: conversion to stored values and scales, and back.

`layers/cache/format.py` describes the formats.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num


BOUNDS = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
SCALE = jnp.bfloat16


def quantize(
    x: Float[Array, "*shape kv_heads head_dim"], dtype: DTypeLike, scale_heads: int
) -> tuple[Num[Array, "*shape kv_heads head_dim"], Float[Array, "*shape scale_heads"]]:
    """Quantize keys or values: return the stored values and their scales. Zero vectors get scale 1."""
    dtype = jnp.dtype(dtype)
    blocks = _quant_blocks(x.astype(jnp.float32), scale_heads)
    bound = BOUNDS[dtype.name]
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    largest = jnp.max(largest, axis=-1, keepdims=True) if scale_heads < x.shape[-2] else largest
    scale = (largest / bound).astype(SCALE)
    scale = jnp.where(scale < jnp.finfo(SCALE).tiny, 1, scale)  # False for NaN: NaN is not hidden
    ratio = blocks / scale.astype(jnp.float32)[..., None]
    ratio = ratio if jnp.issubdtype(dtype, jnp.floating) else jnp.rint(ratio)
    return jnp.clip(ratio, -bound, bound).astype(dtype).reshape(x.shape), scale


def dequantize(
    stored: Num[Array, "*shape head_dim"], scale: Float[Array, "..."] | None, dtype: DTypeLike
) -> Float[Array, "*shape head_dim"]:
    """Dequantize: return `scale * stored`; without scales only cast `stored`.

    A scale has the axes of `stored` without the last one. Instead of the heads axis it may have an axis of size 1 (one
    scale per token), or of the quantization blocks of all heads, ordered by head.
    """
    if scale is None:
        return stored.astype(dtype)
    upcast = stored.astype(jnp.float32)
    scale = scale.astype(jnp.float32)[..., None]
    axis = next((i for i in range(stored.ndim - 1) if scale.shape[i] > stored.shape[i]), None)
    if axis is None:
        return (upcast * scale).astype(dtype)
    count = scale.shape[axis] // stored.shape[axis]
    scale = scale.reshape(*stored.shape[: axis + 1], count, *stored.shape[axis + 1 : -1], 1)
    blocks = upcast.reshape(*stored.shape[:-1], count, -1)
    return (blocks * jnp.moveaxis(scale, axis + 1, -2)).reshape(stored.shape).astype(dtype)


def _quant_blocks(x: Array, count: int) -> Array:
    """Reshape the heads to `count` quantization blocks, if there are more blocks than heads."""
    return x if count <= x.shape[-2] else x.reshape(*x.shape[:-2], count, -1)
