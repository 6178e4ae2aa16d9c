"""Grouped products with JAX's Pallas kernel for TPUs (megablox; Gale et al. 2022), forward and backward.

XLA has a kernel for `jax.lax.ragged_dot`, but by default only on TPU v4 and v5p; on v5e, v6e and v7x it multiplies all
rows by all weights (libtpu 0.0.52). So v4 and v5p use `ragged_dot`, and v5e, v6e and v7x use this kernel. For 16,384
rows of 2,048 features and 64 weights of 2,048 x 1,024 in bfloat16, relative to the necessary operations:

    ragged_dot on v4 and v5p:      1x operations, 0.37 GB read and written
    ragged_dot on v5e, v6e, v7x:   64x operations
    megablox on all:               1x operations, 0.50 GB read and written

The same holds for 8-bit operands of `ragged_dot`. This kernel multiplies 16-bit and 32-bit floats only, so 8-bit values
are converted to the dtype of the activations, which is exact.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.sharding.chips import LANES


megablox = LazyModule("jax.experimental.pallas.ops.tpu.megablox.gmm")  # slow to import
_KINDS_WITHOUT_RAGGED_DOT_KERNEL = ("TPU v5 lite", "TPU v6 lite", "TPU7x")


def fits(device_kind: str, dtype: DTypeLike) -> bool:
    """Return whether to use this kernel on a kind of device (`jax.Device.device_kind`), for a dtype."""
    return device_kind in _KINDS_WITHOUT_RAGGED_DOT_KERNEL and supports(dtype)


def supports(dtype: DTypeLike) -> bool:
    """Return whether this kernel supports a dtype."""
    return dtype in (jnp.bfloat16, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel_product(
    interpret: bool,
    x: Float[Array, "rows inner"],
    weight: Float[Array, "groups inner outer"],
    counts: Int[Array, "groups"],
) -> Float[Array, "rows outer"]:
    """Return `x[r] @ weight[g]` for the rows r of each group g; results of rows beyond the groups are undefined."""
    return multiply_rows(interpret, x, weight, counts, x.dtype)


def _forward(interpret, x, weight, counts):
    return kernel_product(interpret, x, weight, counts), (x, weight, counts)


def _backward(interpret, residuals, gradient):
    x, weight, counts = residuals
    x_gradient = multiply_rows(interpret, gradient, weight, counts, gradient.dtype, transposed=True)
    return x_gradient, kernel_columns(interpret, x, gradient, counts, weight.dtype), None


kernel_product.defvjp(_forward, _backward)


def kernel_columns(
    interpret: bool, x: Float[Array, "rows inner"], g: Float[Array, "rows outer"], counts: Int[Array, "groups"], dtype
) -> Float[Array, "groups inner outer"]:
    """Return `x^T g` over the rows of each group."""
    tiling, pad = _tiling(x, (len(counts), x.shape[1], g.shape[1]), jnp.dtype(dtype).itemsize)
    with _settings(x):
        return megablox.tgmm(pad(x).T, pad(g), counts, dtype, tiling, interpret=interpret)


def multiply_rows(
    interpret: bool,
    x: Float[Array, "rows inner"],
    weight: Float[Array, "groups a b"],
    counts: Int[Array, "groups"],
    dtype: DTypeLike,
    *,
    transposed: bool = False,
) -> Float[Array, "rows outer"]:
    """Return `kernel_product` in `dtype`, by the weights or by their transposes; it has no gradient."""
    groups, inner, outer = (weight.shape[0], *weight.shape[:0:-1]) if transposed else weight.shape
    tiling, pad = _tiling(x, (groups, inner, outer), jnp.dtype(dtype).itemsize)
    options: dict = dict(transpose_rhs=transposed, interpret=interpret)
    with _settings(x):
        return megablox.gmm(pad(x), weight, counts, dtype, tiling, **options)[: x.shape[0]]


@contextlib.contextmanager
def _settings(x: Array):
    """Override global settings of JAX that the kernel does not support.

    TPUs reject precision "highest" for 16-bit floats, whose products are exact anyway. The kernel adds booleans to
    numbers, which strict dtype promotion rejects.
    """
    precision = "default" if x.dtype.itemsize < 4 else getattr(jax.config, "jax_default_matmul_precision", None)
    with jax.default_matmul_precision(precision), jax.numpy_dtype_promotion("standard"):
        yield


def _tiling(x: Array, sizes: tuple[int, int, int], bytes_out: int):
    """Return the tile sizes (rows, inner, outer), and a function that pads rows to a multiple of the tile.

    Tiles fit into the 16 MiB of vector memory of v5e. `sizes`: groups, inner and outer features.
    """
    rows = x.shape[0]
    groups, inner, outer = sizes
    max_features = 2048 // max(x.dtype.itemsize, bytes_out)
    mean_rows = rows // groups
    tile_rows = 512 if mean_rows >= 1024 else 256 if mean_rows >= 256 else LANES

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, -rows % tile_rows), (0, 0)))

    return (tile_rows, _tile_size(inner, max_features), _tile_size(outer, max_features)), pad


def _tile_size(size: int, max_size: int) -> int:
    """Return the size of the smallest number of equal tiles with at most `max_size` features each."""
    if size <= max_size:
        return size
    tiles = -(-size // max_size)
    return -(-size // (tiles * LANES)) * LANES
