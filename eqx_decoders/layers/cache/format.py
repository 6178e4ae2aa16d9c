"""Formats of cached keys and values: floating point, or quantized with scales.

    scale = max|x| / bound,    stored = round(x / scale),    x ~ scale * stored

The maximum is over the features of a head, over a block of these features, or over all heads of a token. The bound is
the largest value of the dtype: 127 (int8), 7 (int4) or 448 (e4m3). The error of int8 is at most 1/254 of the largest
value in the head, of int4 1/14; the error of e4m3 is at most 1/16 of the value itself.

Scales are bfloat16, which has the range of float32. Values are divided by the stored (rounded) scale, so that rounding
the scale adds no error. With int8 and 128 features per head the scales need 1.6 % of the memory. Quantizing dequantized
values again returns the same stored values and scales.

Quantization blocks are features of one token, as in DeepSeek-V3.2 (latents in e4m3, one scale for 128 features), so
that each new token has its own scales. A block of several tokens would need its scale before the later tokens are
known, or would have to be quantized again for each new token (KIVI, Liu et al. 2024, keeps the newest keys unquantized
until a block is full).
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.layers.attention.kernels.quantized_kv import BOUNDS


ScaleOver = Literal["head_dim", "heads_and_head_dim"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFormat(CheckedFields):
    """Format of a cache's keys, values, latents and indexer keys.

    **Arguments:**

    - `dtype`: a floating-point dtype of at least 16 bits; or "int8", "int4" or "float8_e4m3fn" for quantization with
        scales. Recurrent states are always float32; in a quantized cache, so are convolution states.
    - `scale_over`: axes that share a scale: "head_dim", one scale per token and head; or "heads_and_head_dim", one
        scale per token, which needs less memory and is less accurate.
    - `scale_block`: number of adjacent features of a head that share a scale, so that an outlier affects only its
        block. Keys and values are then dequantized before attention. It must divide `head_dim`, unless it is larger.
        None: scales as in `scale_over`.
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
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        check(
            dtype is not None and (is_float or dtype.name in BOUNDS),
            f"CacheFormat.dtype={self.dtype!r} must be a floating-point dtype of at least 16 bits, or one of "
            f"{', '.join(map(repr, BOUNDS))}.",
        )
        assert dtype is not None
        object.__setattr__(self, "dtype", dtype.name)
        check(
            self.scale_block is None or (self.bound is not None and self.scale_over == "head_dim"),
            f"CacheFormat.scale_block={self.scale_block} needs scale_over='head_dim' and a dtype of "
            f"{', '.join(map(repr, BOUNDS))}, not {self.scale_over!r} and {dtype.name!r}.",
        )

    @classmethod
    def of(cls, dtype_or_format: "DTypeLike | CacheFormat") -> "CacheFormat":
        """Return the format with this dtype; a `CacheFormat` is returned unchanged."""
        return dtype_or_format if isinstance(dtype_or_format, CacheFormat) else cls(dtype=dtype_or_format)

    @property
    def bound(self) -> float | None:
        """Largest stored value of a quantized format; None for formats without scales."""
        return BOUNDS.get(str(self.dtype))

    @property
    def unscaled_dtype(self) -> Any:
        """Dtype of convolution states, which have no scales."""
        return jnp.dtype(self.dtype if self.bound is None else jnp.float32)

    def scale_heads(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of scales of one token's keys."""
        if self.scale_over == "heads_and_head_dim":
            return 1
        block = min(self.scale_block or head_dim, head_dim)
        check(head_dim % block == 0, f"CacheFormat.scale_block={block} must divide the {head_dim} features of a head.")
        return kv_heads * (head_dim // block)
