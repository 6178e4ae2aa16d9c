"""Grouped products by JAX's Pallas kernel for TPUs (megablox; Gale et al., 2022), forward and backward.

XLA has a kernel of its own for `jax.lax.ragged_dot`, but takes it by default on v4 and v5p alone; elsewhere it
multiplies all rows by all weights (libtpu 0.0.52). 16,384 rows of 2,048 features, 64 weights of 2,048 x 1,024,
bfloat16, operations in units of what is needed:

    ragged_dot, v4 and v5p: 1, 0.37 GB read and written;  v5e, v6e, v7x: 64
    megablox, anywhere:     1, 0.50 GB

So these have the kernel, and v4 and v5p `ragged_dot`.
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
DENSE_BY_XLA = ("TPU v5 lite", "TPU v6 lite", "TPU7x")


def fits(kind: str, dtype: DTypeLike) -> bool:
    """Return whether devices of a kind want this kernel, and it can multiply numbers of this dtype."""
    return kind in DENSE_BY_XLA and multiplies(dtype)


def multiplies(dtype: DTypeLike) -> bool:
    """Return whether this kernel multiplies numbers of a dtype."""
    return dtype in (jnp.bfloat16, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel_product(
    interpret: bool,
    x: Float[Array, "rows inner"],
    weight: Float[Array, "groups inner outer"],
    counts: Int[Array, "groups"],
) -> Float[Array, "rows outer"]:
    """Compute `x[r] @ weight[g]` for the rows of each group; results for rows beyond the groups may be anything."""
    return _product(x, weight, counts, interpret)


def _forward(interpret, x, weight, counts):
    return _product(x, weight, counts, interpret), (x, weight, counts)


def _backward(interpret, residuals, out_bar):
    x, weight, counts = residuals
    to_x = _product(out_bar, weight, counts, interpret, transposed=True)
    return to_x, kernel_columns(interpret, x, out_bar, counts, weight.dtype), None


kernel_product.defvjp(_forward, _backward)


def kernel_columns(
    interpret: bool, x: Float[Array, "rows inner"], g: Float[Array, "rows outer"], counts: Int[Array, "groups"], dtype
) -> Float[Array, "groups inner outer"]:
    """Compute `x^T g` over the rows of each group."""
    tiling, pad = _tiling(x, (len(counts), x.shape[1], g.shape[1]), jnp.dtype(dtype).itemsize)
    with _settings(x):
        return megablox.tgmm(pad(x).T, pad(g), counts, dtype, tiling, interpret=interpret)


def _product(x: Array, weight: Array, counts: Array, interpret: bool, transposed: bool = False) -> Array:
    groups, inner, outer = (weight.shape[0], *weight.shape[:0:-1]) if transposed else weight.shape
    tiling, pad = _tiling(x, (groups, inner, outer), x.dtype.itemsize)
    options: dict = dict(transpose_rhs=transposed, interpret=interpret)
    with _settings(x):
        return megablox.gmm(pad(x), weight, counts, x.dtype, tiling, **options)[: x.shape[0]]


@contextlib.contextmanager
def _settings(x: Array):
    """Override what a user has set for all of JAX.

    Products of 16-bit numbers are exact, and TPUs refuse "highest" for them. The kernel adds truth values to numbers.
    """
    precision = "default" if x.dtype.itemsize < 4 else getattr(jax.config, "jax_default_matmul_precision", None)
    with jax.default_matmul_precision(precision), jax.numpy_dtype_promotion("standard"):
        yield


def _tiling(x: Array, sizes: tuple[int, int, int], bytes_out: int):
    """Return rows, inner and outer features of a tile, within v5e's 16 MiB of vector memory; and padding of rows."""
    rows, (groups, inner, outer) = x.shape[0], sizes
    most = 2048 // max(x.dtype.itemsize, bytes_out)
    mean = rows // groups
    tile = 512 if mean >= 1024 else 256 if mean >= 256 else LANES

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, -rows % tile), (0, 0)))

    return (tile, _even(inner, most), _even(outer, most)), pad


def _even(size: int, most: int) -> int:
    """Return the size of the fewest equal tiles of at most `most` features."""
    if size <= most:
        return size
    parts = -(-size // most)
    return -(-size // (parts * LANES)) * LANES
