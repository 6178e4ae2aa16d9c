"""Quantization modes of weights, and the quantization of single arrays."""

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


def _round_to(dtype: DTypeLike) -> Callable[[Array], Array]:
    return lambda x: jnp.round(x).astype(dtype)


def _e4m3(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)


QUANTIZATIONS: dict[str, Quantization] = {
    "int8": Quantization(QuantizedWeight, 127.0, _round_to(jnp.int8)),
    "int4": Quantization(QuantizedWeight, 7.0, _round_to(jnp.int4), groups=(128, 64, 32)),
    "fp8": Quantization(QuantizedWeight, 448.0, _e4m3),
    "fp8_block": Quantization(QuantizedWeight, 448.0, _e4m3, block=(128, 128)),
    "nf4": NF4,
}


def check_requantizable(weight: AbstractQuantizedWeight, what: str) -> None:
    """Raise ConfigError for a quantized weight whose format `quantize` cannot produce; `what` names the weight.

    `rounded_like` can quantize other arrays only to formats of `quantize`.
    """
    supported = _mode_of(weight) is not None and weight.zeros is None and weight.scales.dtype != jnp.uint8
    check(
        supported,
        f"{what} is quantized to {weight.format} in a way that this library can read, but not write "
        "(with zeros, e8m0 scales or another format). Call dequantize first.",
    )


def rounded_like(weight: Float[Array, "..."], like: AbstractQuantizedWeight) -> AbstractQuantizedWeight:
    """Quantize `weight` to the format of `like`, a weight of the same shape that passes `check_requantizable`."""
    mode = _mode_of(like)
    assert mode is not None
    node = quantized(weight, QUANTIZATIONS[mode], like.block, like.inner, like.outer)
    return dataclasses.replace(node, scales=node.scales.astype(like.scales.dtype))


def _mode_of(weight: AbstractQuantizedWeight) -> str | None:
    """Return the mode of `quantize` that produces the format of `weight`; None if there is no such mode."""
    return {"int8": "int8", "int4": "int4", "uint8": "fp8", "nf4": "nf4"}.get(weight.format)


def quantized(
    weight: Float[Array, "..."], quantization: Quantization, block: tuple[int, int], inner: int, outer: int
) -> AbstractQuantizedWeight:
    """Quantize a weight to the nearest values of a format, with one scale per quantization block (absmax).

    **Arguments:**

    - `weight`: its last `inner + outer` axes are a matrix; earlier axes are stacked matrices.
    - `quantization`: format of the values.
    - `block`: rows and columns of the matrix that share a scale; blocks at the edge may be smaller.
    - `inner`, `outer`: number of axes that are the rows (contracted) and the columns of the matrix.
    """
    lead = weight.shape[: weight.ndim - inner - outer]
    outer_shape = weight.shape[weight.ndim - outer :]
    rows = math.prod(weight.shape[len(lead) : weight.ndim - outer])
    columns = math.prod(outer_shape)
    matrix = weight.astype(np.promote_types(weight.dtype, np.float32)).reshape(*lead, rows, columns)
    block_rows, block_columns = min(block[0], rows), min(block[1], columns)
    row_blocks, column_blocks = -(-rows // block_rows), -(-columns // block_columns)
    padding = [(0, 0)] * len(lead) + [(0, row_blocks * block_rows - rows), (0, column_blocks * block_columns - columns)]
    padded = jnp.pad(jnp.abs(matrix), padding)
    padded = padded.reshape(*lead, row_blocks, block_rows, column_blocks, block_columns)
    largest = jnp.max(padded, axis=(-3, -1))
    # the lower bound keeps the scale and its inverse within the normal range of float32
    scales = (jnp.maximum(largest, quantization.largest * 2.0**-100) / quantization.largest).astype(jnp.float32)
    row_scales = jnp.repeat(scales, block_rows, axis=-2)[..., :rows, :]
    element_scales = jnp.repeat(row_scales, block_columns, axis=-1)[..., :columns]
    clipped = jnp.clip(matrix / element_scales, -quantization.largest, quantization.largest)
    values = quantization.encode(clipped).reshape(weight.shape)
    scales = scales.reshape(*lead, row_blocks, *outer_shape) if block[1] == 1 else scales
    return quantization.weight(values, scales, None, block, inner, outer)
