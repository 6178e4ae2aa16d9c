"""Formats of cached keys and values: floating point, or small numbers with scales.

    scale = max|x| / bound,    stored = round(x / scale),    x ~ scale * stored

The maximum is over the features of a head, over a block of them, or over all heads of a token. The bound is the
dtype's largest number: 127, 7, or 448 (e4m3). The error of int8 is at most 1/254 of the largest number in the head, of
int4 1/14, of e4m3 1/16 of the number itself.

Scales are bfloat16. Numbers are divided by the scale as it is stored, so its rounding adds no error, and it has the
range of float32; with 128 features in int8 it takes 1.6 % more. Stored numbers are stored again bit by bit: the
largest becomes the bound, and the scale the same.

Blocks are of features of one token, as in DeepSeek-V3.2, whose latents are in e4m3 with a scale for each 128 of them:
a token that is appended brings its own scales. A block of positions would need its scale before its later tokens are
known, or be written again for each (KIVI, Liu et al. 2024, leaves the newest keys unquantised until a block is full).
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from eqx_decoders.errors import CheckedFields, PositiveInt, check


ScaleOver = Literal["head_dim", "heads_and_head_dim"]
BOUNDS = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
SCALE = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFormat(CheckedFields):
    """Format of a cache's keys, values, latents and keys of indexers.

    **Arguments:**

    - `dtype`: a floating-point dtype of 16 bits or more, or "int8", "int4" or "float8_e4m3fn", with scales. States of
        recurrences stay in float32, and so do convolution states in a cache with scales.
    - `scale_over`: what shares a scale: the features of a head ("head_dim"), or the features of all heads of a token
        ("heads_and_head_dim"), which takes less memory and loses more.
    - `scale_block`: adjacent features of a head that share a scale, so that a large one costs only its neighbors
        precision; heads are decoded before their products. It must divide heads that are larger. None: as `scale_over`.
    """

    dtype: DTypeLike = "bfloat16"
    scale_over: ScaleOver = "head_dim"
    scale_block: PositiveInt | None = None

    def __post_init__(self):
        super().__post_init__()
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError:
            dtype = None
        wide = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        rule = "must be a floating-point dtype of 16 bits or more, or one of"
        good = dtype is not None and (wide or dtype.name in BOUNDS)
        check(good, f"CacheFormat.dtype={self.dtype!r} {rule} {', '.join(map(repr, BOUNDS))}.")
        assert dtype is not None
        object.__setattr__(self, "dtype", dtype.name)
        alone = self.scale_block is None or (self.bound is not None and self.scale_over == "head_dim")
        rule = f"needs scale_over='head_dim' and a dtype of {', '.join(map(repr, BOUNDS))}"
        check(alone, f"CacheFormat.scale_block={self.scale_block} {rule}, not {self.scale_over!r} and {dtype.name!r}.")

    @classmethod
    def of(cls, dtype_or_format: "DTypeLike | CacheFormat") -> "CacheFormat":
        """Return the format for a dtype, or a format itself."""
        return dtype_or_format if isinstance(dtype_or_format, CacheFormat) else cls(dtype=dtype_or_format)

    @property
    def bound(self) -> float | None:
        """Largest number that is stored; None: numbers are stored without scales."""
        return BOUNDS.get(str(self.dtype))

    @property
    def unscaled_dtype(self) -> Any:
        """Dtype of arrays without scales: convolution states."""
        return jnp.dtype(self.dtype if self.bound is None else jnp.float32)

    def scale_heads(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of scales of a token's key."""
        if self.scale_over == "heads_and_head_dim":
            return 1
        block = min(self.scale_block or head_dim, head_dim)
        check(head_dim % block == 0, f"CacheFormat.scale_block={block} must divide heads of {head_dim} features.")
        return kv_heads * (head_dim // block)


def encode(
    x: Float[Array, "*shape kv_heads head_dim"], dtype: DTypeLike, scale_heads: int
) -> tuple[Num[Array, "*shape kv_heads head_dim"], Float[Array, "*shape scale_heads"]]:
    """Encode vectors: return the stored numbers, and their scales. Zeros are stored as zeros, with scale 1."""
    dtype, blocks = jnp.dtype(dtype), _blocks(x.astype(jnp.float32), scale_heads)
    bound = BOUNDS[dtype.name]
    most = jnp.max(jnp.abs(blocks), axis=-1)
    most = jnp.max(most, axis=-1, keepdims=True) if scale_heads < x.shape[-2] else most
    scale = (most / bound).astype(SCALE)
    scale = jnp.where(scale < jnp.finfo(SCALE).tiny, 1, scale)  # so that NaN stays, and is seen
    ratio = blocks / scale.astype(jnp.float32)[..., None]
    ratio = ratio if jnp.issubdtype(dtype, jnp.floating) else jnp.rint(ratio)
    return jnp.clip(ratio, -bound, bound).astype(dtype).reshape(x.shape), scale


def decode(
    stored: Num[Array, "*shape head_dim"], scale: Float[Array, "..."] | None, dtype: DTypeLike
) -> Float[Array, "*shape head_dim"]:
    """Compute `scale * stored`; a scale has the axes of what is stored but the last, with a number of heads or blocks.

    Blocks of a head follow one another where the heads are.
    """
    if scale is None:
        return stored.astype(dtype)
    wide, scale = stored.astype(jnp.float32), scale.astype(jnp.float32)[..., None]
    axis = next((i for i in range(stored.ndim - 1) if scale.shape[i] > stored.shape[i]), None)
    if axis is None:
        return (wide * scale).astype(dtype)
    count = scale.shape[axis] // stored.shape[axis]
    scale = scale.reshape(*stored.shape[: axis + 1], count, *stored.shape[axis + 1 : -1], 1)
    blocks = wide.reshape(*stored.shape[:-1], count, -1)
    return (blocks * jnp.moveaxis(scale, axis + 1, -2)).reshape(stored.shape).astype(dtype)


def _blocks(x: Array, count: int) -> Array:
    """Reshape heads to their blocks, if there are any: `count` in all."""
    return x if count <= x.shape[-2] else x.reshape(*x.shape[:-2], count, -1)
