"""Ways in which weights are rounded to few bits, and arrays rounded so."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from eqx_decoders.errors import check
from eqx_decoders.numerics.affine_weight import QuantizedWeight
from eqx_decoders.numerics.nf4_weight import NF4
from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight, Quantization


def _whole(dtype: DTypeLike) -> Callable[[Array], Array]:
    return lambda x: jnp.round(x).astype(dtype)


def _e4m3(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)


QUANTIZATIONS: dict[str, Quantization] = {
    "int8": Quantization(QuantizedWeight, 127.0, _whole(jnp.int8)),
    "int4": Quantization(QuantizedWeight, 7.0, _whole(jnp.int4), groups=(128, 64, 32)),
    "fp8": Quantization(QuantizedWeight, 448.0, _e4m3),
    "fp8_block": Quantization(QuantizedWeight, 448.0, _e4m3, block=(128, 128)),
    "nf4": NF4,
}


def check_rounds(weight: AbstractQuantizedWeight, what: str) -> None:
    """Raise ConfigError for a quantized weight of a kind that `quantize` doesn't make: no other is rounded like it."""
    good = _format_of(weight) is not None and weight.zeros is None and weight.scales.dtype != jnp.uint8
    rule = f"is in {weight.format} with zeros or scales that nothing is rounded to here"
    check(good, f"{what} {rule}. Call dequantize first.")


def rounded_like(weight: Float[Array, "..."], like: AbstractQuantizedWeight) -> AbstractQuantizedWeight:
    """Round a weight as another one of its shape is rounded (`check_rounds`)."""
    name = _format_of(like)
    assert name is not None
    node = quantized(weight, QUANTIZATIONS[name], like.block, like.inner, like.outer)
    return dataclasses.replace(node, scales=node.scales.astype(like.scales.dtype))


def _format_of(weight: AbstractQuantizedWeight) -> str | None:
    """Return the mode of `quantize` that makes such values."""
    return {"int8": "int8", "int4": "int4", "uint8": "fp8", "nf4": "nf4"}.get(weight.format)


def quantized(
    weight: Float[Array, "..."], kind: Quantization, block: tuple[int, int], inner: int, outer: int
) -> AbstractQuantizedWeight:
    """Round a weight to the nearest numbers of a kind, each block scaled by its largest one."""
    lead = weight.shape[: weight.ndim - inner - outer]
    outer_shape = weight.shape[weight.ndim - outer :]
    rows, columns = math.prod(weight.shape[len(lead) : weight.ndim - outer]), math.prod(outer_shape)
    wide = weight.astype(np.promote_types(weight.dtype, np.float32)).reshape(*lead, rows, columns)
    counts = [-(-size // min(each, size)) for size, each in zip((rows, columns), block, strict=True)]
    sizes = [min(each, size) for size, each in zip((rows, columns), block, strict=True)]
    missing = [count * each - size for count, each, size in zip(counts, sizes, (rows, columns), strict=True)]
    padded = jnp.pad(jnp.abs(wide), [(0, 0)] * len(lead) + [(0, more) for more in missing])
    padded = padded.reshape(*lead, counts[0], sizes[0], counts[1], sizes[1])
    largest = jnp.max(padded, axis=(-3, -1))
    # so large that neither the scale nor its inverse leaves the range of normal numbers
    scales = (jnp.maximum(largest, kind.largest * 2.0**-100) / kind.largest).astype(jnp.float32)
    spread = jnp.repeat(jnp.repeat(scales, sizes[0], axis=-2)[..., :rows, :], sizes[1], axis=-1)[..., :columns]
    values = kind.encode(jnp.clip(wide / spread, -kind.largest, kind.largest)).reshape(weight.shape)
    scales = scales.reshape(*lead, counts[0], *outer_shape) if block[1] == 1 else scales
    return kind.weight(values, scales, None, block, inner, outer)
