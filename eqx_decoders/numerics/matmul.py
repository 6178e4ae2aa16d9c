"""Matrix products in the forms that are fastest on XLA's CPU backend, and casts of weights to the compute dtype."""

import contextlib
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as MemoryLayout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


# Since jax 0.11, XLA's CPU backend multiplies 16-bit floats without converting to float32, with AMX if there is AMX.
_HALF_WIDTH = jax.__version_info__ >= (0, 11)

# Ratio of the columns of `a` and `b` up to which transposing a float32 `a` in memory is worth its cost.
_MAX_COLUMN_RATIO = 4

# Below this number of rows, a product takes less time than transposing the weight in memory for the matrix units.
_FEW_ROWS = 128

# Number of terms that the product of a single row sums in one pass.
_TERMS = 8


def cast_weight(weight: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    """Cast a weight to the dtype of its product. The copy has the checkpoint name "cast_weight" for remat policies."""
    return weight if weight.dtype == dtype else checkpoint_name(weight.astype(dtype), "cast_weight")


def cast_in_loop(weight: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    """Cast a weight inside of a loop over layers on TPU and GPU, as `cast_weight` does.

    XLA would hoist the cast out of the loop: a bfloat16 copy of the weights of all layers, stored for the entire step.
    `reduce_precision` prevents that, and does not change the values.
    """
    if weight.dtype == jnp.float32 and dtype == jnp.bfloat16:
        weight = lax.reduce_precision(weight, exponent_bits=8, mantissa_bits=7)
    return cast_weight(weight, dtype)


def product(
    x: Float[Array, "rows inner"],
    weight: Float[Array, "inner outer"] | Float[Array, "outer inner"],
    *,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "rows outer"]:
    """Return `x @ weight`, or `x @ weight.T` if `transposed`; forward and backward pass are optimized for CPUs.

    16-bit products have a custom VJP, so forward-mode differentiation works for float32 and float64 only.
    """
    dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    if x.dtype.itemsize == 2:
        return _half_product(transposed, dtype, x, weight)
    return matmul(x, cast_weight(weight, x.dtype), (1, 1 if transposed else 0), dtype)


def matmul(
    a: Float[Array, "..."], b: Float[Array, "..."], contract: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "..."]:
    """Multiply two matrices over dimension `contract[0]` of `a` and `contract[1]` of `b`.

    XLA's fast kernels need a row-major `a`, and with AMX and 16-bit floats also a row-major `b`. Other operands are
    transposed in memory first, unless the product has few rows and takes less time than the transpose. A single row of
    16-bit floats is padded or summed by `_row_product`, because XLA's matrix-vector product is several times slower.
    """
    rows = a.shape[1 - contract[0]]
    is_half = a.dtype.itemsize == 2
    if _HALF_WIDTH and is_half and 0 < rows < _FEW_ROWS:
        a = a.T if contract[0] == 0 else a
        if rows == 1 and contract[1] == 0 and b.shape[0] % _TERMS == 0:
            return _row_product(a, b).astype(dtype)
        a = jnp.pad(a, ((0, 7 if rows == 1 else 0), (0, 0)))
        dimensions = (((1,), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, dimensions, preferred_element_type=np.dtype(dtype))[:rows]
    is_narrow_float32 = a.dtype.itemsize == 4 and a.shape[1] <= _MAX_COLUMN_RATIO * b.shape[1 - contract[1]]
    if contract[0] == 0 and (is_half or is_narrow_float32):
        a = row_major_transpose(a)
        contract = (1, contract[1])
    if contract[1] == 1 and prefers_row_major_weights(b.dtype):
        b = row_major_transpose(b)
        contract = (contract[0], 0)
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=np.dtype(dtype))


def _row_product(row: Float[Array, "1 inner"], b: Float[Array, "inner outer"]) -> Float32[Array, "1 outer"]:
    """Return `row @ b` as partial sums of a few terms and then their sum, reading and casting `b` once."""
    row, b = lax.optimization_barrier((row, b))  # XLA would hoist the cast of `b` out of a loop over tokens
    inner, outer = b.shape
    terms = 2 * _TERMS if outer >= 4 * inner and inner % (2 * _TERMS) == 0 else _TERMS  # fewer partial sums if long
    factors = row.astype(jnp.float32).reshape(-1, terms, 1)
    rows = b.reshape(-1, terms, outer)
    sums = sum(factors[:, term] * rows[:, term].astype(jnp.float32) for term in range(terms))
    sums = lax.optimization_barrier(sums)  # keeps XLA from fusing the two sums
    return jnp.sum(sums, axis=0, keepdims=True)


def prefers_row_major_weights(dtype: np.dtype) -> bool:
    """Return whether products of this dtype are several times faster with a weight that is not transposed."""
    return _HALF_WIDTH and dtype.itemsize == 2 and _has_amx()


@functools.cache
def _has_amx() -> bool:
    """Return whether this CPU has matrix units for bfloat16 (Intel AMX)."""
    with contextlib.suppress(OSError):
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return False


def row_major_transpose(a: Float[Array, "m n"]) -> Float[Array, "n m"]:
    """Transpose a matrix in memory. XLA would fold a plain transpose into the product, which has no fast kernel."""
    return with_layout_constraint(a.T, MemoryLayout((0, 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _half_product(transposed, dtype, x, weight):
    return matmul(x, cast_weight(weight, x.dtype), (1, 1 if transposed else 0), dtype)


def _half_product_forward(transposed, dtype, x, weight):
    cast = cast_weight(weight, x.dtype)
    # an empty array carries the dtype of the weight's gradient
    return matmul(x, cast, (1, 1 if transposed else 0), dtype), (x, cast, jnp.zeros((0,), weight.dtype))


def _half_product_backward(transposed, dtype, residuals, gradient):
    x, cast, like = residuals
    gradient = gradient.astype(x.dtype)
    x_gradient = matmul(gradient, cast, (1, 0 if transposed else 1), x.dtype)
    pair = (gradient, x) if transposed else (x, gradient)
    # sum in the dtype of the weight: rounding a float32 gradient to 16 bits first would lose half of its digits
    return x_gradient, matmul(*pair, (0, 0), like.dtype)


_half_product.defvjp(_half_product_forward, _half_product_backward)
