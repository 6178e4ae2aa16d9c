"""How a cache stores keys and values: as they are, or as small numbers with scales.

    scale = max|x| / bound,    stored = round(x / scale),    x ~ scale * stored

The maximum is over the features of a head, or over all heads of a token. The bound is the dtype's largest number: 127,
7, or 448 (e4m3). A number of int8 is wrong by at most 1/254 of the largest beside it, one of int4 by 1/14, one of e4m3
by 1/16 of itself.

Scales are bfloat16. Numbers are divided by the scale as it is stored, so its rounding adds no error, and it keeps the
range of float32; of 128 features in int8 it takes 1.6 % beside them. What was stored once is stored again bit by bit:
the largest number becomes the bound, and the scale the same.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from eqx_decoders.errors import check, check_word


ScaleOver = Literal["head_dim", "heads_and_head_dim"]
BOUNDS = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
SCALE = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """How a cache stores keys, values, latents and the keys of indexers.

    **Arguments:**

    - `dtype`: a floating-point dtype of 16 bits or more, or "int8", "int4" or "float8_e4m3fn", with scales. States of
        recurrences stay in float32, and so do the tails of convolutions beside keys with scales.
    - `scale_over`: what shares a scale: the features of a head ("head_dim"), or those of all heads of a token
        ("heads_and_head_dim"), which takes less memory and loses more.
    """

    dtype: DTypeLike = "bfloat16"
    scale_over: ScaleOver = "head_dim"

    def __post_init__(self):
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
        check_word("CacheFormat.scale_over", self.scale_over, get_args(ScaleOver))

    @classmethod
    def of(cls, given: "DTypeLike | CacheFormat") -> "CacheFormat":
        """A dtype as a format."""
        return given if isinstance(given, CacheFormat) else cls(dtype=given)

    @property
    def bound(self) -> float | None:
        """The largest number that is stored; None: numbers are stored as they are."""
        return BOUNDS.get(str(self.dtype))

    @property
    def beside(self) -> Any:
        """The dtype of what has no scales: tails of convolutions."""
        return jnp.dtype(self.dtype if self.bound is None else jnp.float32)

    def scale_heads(self, kv_heads: int) -> int:
        """How many scales a token's key has."""
        return kv_heads if self.scale_over == "head_dim" else 1


def encode(
    x: Float[Array, "*shape kv_heads head_dim"], dtype: DTypeLike, scale_heads: int
) -> tuple[Num[Array, "*shape kv_heads head_dim"], Float[Array, "*shape scale_heads"]]:
    """What is stored of vectors, and their scales. Of zeros it is zeros, with scale 1."""
    dtype, x = jnp.dtype(dtype), x.astype(jnp.float32)
    bound = BOUNDS[dtype.name]
    most = jnp.max(jnp.abs(x), axis=-1)
    most = most if scale_heads == x.shape[-2] else jnp.max(most, axis=-1, keepdims=True)
    scale = (most / bound).astype(SCALE)
    scale = jnp.where(scale < jnp.finfo(SCALE).tiny, 1, scale)  # so that NaN stays, and is seen
    ratio = x / scale.astype(jnp.float32)[..., None]
    ratio = ratio if jnp.issubdtype(dtype, jnp.floating) else jnp.rint(ratio)
    return jnp.clip(ratio, -bound, bound).astype(dtype), scale


def decode(
    stored: Num[Array, "*shape head_dim"], scale: Float[Array, "..."] | None, dtype: DTypeLike
) -> Float[Array, "*shape head_dim"]:
    """`scale * stored`; a scale has the axes of what is stored but the last, one of its heads standing for all."""
    if scale is None:
        return stored.astype(dtype)
    return (stored.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]).astype(dtype)
