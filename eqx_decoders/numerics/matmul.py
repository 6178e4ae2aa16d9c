"""Matrix products in the forms that XLA's CPU backend runs fastest, and casts of weights at their use."""

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


# From jax 0.11 XLA's CPU backend runs 16-bit products in their own width, on AMX where the processor has it.
_HALF_WIDTH = jax.__version_info__ >= (0, 11)

# Columns of a float32 operand, as a multiple of the other's, above which its transpose costs more than it gains.
_MOST_COLUMNS = 4

# Below so many rows a product takes less time, however it runs, than bringing a weight into the order of matrix units.
_FEW_ROWS = 128

# Terms of each sum in the product of one row.
_TERMS = 8


def cast_weight(weight: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    """Cast a weight to the dtype of its product. A copy has the checkpoint name "cast_weight", so remat can save it."""
    return weight if weight.dtype == dtype else checkpoint_name(weight.astype(dtype), "cast_weight")


def cast_in_loop(weight: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    """Cast a weight inside of a loop over layers, as `cast_weight` does, for TPU and GPU.

    XLA would cast the weights of all layers before the loop: a copy of half of their size, held for the whole step.
    Rounding first, it is done where it stands; the numbers are the same.
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
    """Compute `x @ weight`, or `x @ weight.T` if `transposed`, in the form that a CPU runs fastest in both passes.

    In 16 bits it has its own reverse-mode rule; in f32 and f64 forward mode works too.
    """
    dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    if x.dtype.itemsize == 2:
        return _half_product(transposed, dtype, x, weight)
    return matmul(x, cast_weight(weight, x.dtype), (1, 1 if transposed else 0), dtype)


def matmul(
    a: Float[Array, "..."], b: Float[Array, "..."], contract: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "..."]:
    """Multiply two matrices over dimension `contract[0]` of `a` and `contract[1]` of `b`.

    XLA's fast kernels read `a` row by row, so that its transpose is made first, and with AMX `b` likewise, in 16 bits;
    but with a few rows the product takes less time than that. One row of 16 bits is never multiplied as such: XLA's
    form for it takes several times longer.
    """
    rows, half = a.shape[1 - contract[0]], a.dtype.itemsize == 2
    if _HALF_WIDTH and half and 0 < rows < _FEW_ROWS:
        a = a.T if contract[0] == 0 else a
        if rows == 1 and contract[1] == 0 and b.shape[0] % _TERMS == 0:
            return _row_product(a, b).astype(dtype)
        a = jnp.pad(a, ((0, 7 if rows == 1 else 0), (0, 0)))
        over = (((1,), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, over, preferred_element_type=np.dtype(dtype))[:rows]
    narrow = a.dtype.itemsize == 4 and a.shape[1] <= _MOST_COLUMNS * b.shape[1 - contract[1]]
    if contract[0] == 0 and (half or narrow):
        a, contract = row_major_transpose(a), (1, contract[1])
    if contract[1] == 1 and reads_weights_by_row(b.dtype):
        b, contract = row_major_transpose(b), (contract[0], 0)
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=np.dtype(dtype))


def _row_product(row: Float[Array, "1 inner"], b: Float[Array, "inner outer"]) -> Float32[Array, "1 outer"]:
    """Compute `row @ b` as sums of a few terms, and their sum: one pass over `b`, cast on the way."""
    row, b = lax.optimization_barrier((row, b))  # or a loop over tokens would be led by a cast of all weights
    inner, outer = b.shape
    terms = 2 * _TERMS if outer >= 4 * inner and inner % (2 * _TERMS) == 0 else _TERMS  # fewer sums where they are long
    factors, rows = row.astype(jnp.float32).reshape(-1, terms, 1), b.reshape(-1, terms, outer)
    sums = sum(factors[:, term] * rows[:, term].astype(jnp.float32) for term in range(terms))
    return jnp.sum(lax.optimization_barrier(sums), axis=0, keepdims=True)  # a pass of its own: XLA would join the two


def reads_weights_by_row(dtype: np.dtype) -> bool:
    """Return whether a product of this dtype is several times faster if its second operand is not transposed."""
    return _HALF_WIDTH and dtype.itemsize == 2 and _has_amx()


@functools.cache
def _has_amx() -> bool:
    """Return whether this processor multiplies tiles of 16-bit numbers (Intel's AMX)."""
    with contextlib.suppress(OSError):
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return False


def row_major_transpose(a: Float[Array, "m n"]) -> Float[Array, "n m"]:
    """Transpose a matrix in memory: otherwise XLA folds it into the product, for which it has no fast kernel."""
    return with_layout_constraint(a.T, MemoryLayout((0, 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _half_product(transposed, dtype, x, weight):
    return matmul(x, cast_weight(weight, x.dtype), (1, 1 if transposed else 0), dtype)


def _half_product_forward(transposed, dtype, x, weight):
    cast = cast_weight(weight, x.dtype)
    # An empty array carries the dtype of the weight's gradient.
    return matmul(x, cast, (1, 1 if transposed else 0), dtype), (x, cast, jnp.zeros((0,), weight.dtype))


def _half_product_backward(transposed, dtype, saved, gradient):
    x, cast, like = saved
    gradient = gradient.astype(x.dtype)
    to_x = matmul(gradient, cast, (1, 0 if transposed else 1), x.dtype)
    pair = (gradient, x) if transposed else (x, gradient)
    # Straight into the weight's own dtype: rounding to 16 bits first would lose half of an f32 gradient.
    return to_x, matmul(*pair, (0, 0), like.dtype)


_half_product.defvjp(_half_product_forward, _half_product_backward)
