"""How equal two results must be: one rule for all tests."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike


FLOOR = 1e-2


def unit(dtype: DTypeLike) -> float:
    """The relative distance between neighbouring numbers of a dtype: 1.2e-7 for float32, 7.8e-3 for bfloat16."""
    return float(jax.numpy.finfo(dtype).eps)


def largest(array: np.ndarray) -> float:
    """The largest absolute value; 0 of an empty array."""
    return float(np.max(np.abs(array), initial=0.0))


def root_mean_square(array: np.ndarray) -> float:
    """For results in which a rounding error may change a few numbers altogether."""
    return float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0


def assert_close(
    got,
    want,
    *,
    units: float = 64,
    dtype: DTypeLike | None = None,
    floor: float = FLOOR,
    measure: Callable[[np.ndarray], float] = largest,
    rounded: Sequence[Any] = (),
) -> None:
    """Two trees of arrays are finite, of the same structure and shapes, and equal up to rounding.

    Each array may differ by `units` times the dtype's unit times its own size. Where all of an array is small because
    large numbers cancel in it (a bias that softmax ignores), `floor` times the size of the whole tree's largest array
    counts as its size. `dtype` is that in which the results were computed; default: that of each array itself.
    `rounded` are `want` computed in the plainest way with other roundings: twice the most that one lost is granted.
    """
    got, want, *rounded = (jax.tree_util.tree_leaves_with_path(jax.device_get(tree)) for tree in (got, want, *rounded))
    assert all([path for path, _ in tree] == [path for path, _ in want] for tree in (got, *rounded))
    sizes = [measure(np.asarray(array, np.float64)) for _, array in want]
    top = max(sizes, default=0.0)
    for (path, one), (_, other), size, *lossy in zip(got, want, sizes, *rounded, strict=True):
        name = jax.tree_util.keystr(path)
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape, f"{name}: {one.shape} != {other.shape}"
        if not jax.numpy.issubdtype(other.dtype, np.floating):
            np.testing.assert_array_equal(one, other, err_msg=name)
            continue
        assert np.all(np.isfinite(one)), f"{name} is not finite"
        exact = np.asarray(other, np.float64)
        lost = max((measure(np.asarray(array, np.float64) - exact) for _, array in lossy), default=0.0)
        bound = units * unit(dtype or one.dtype) * max(size, floor * top) + 2 * lost
        gap = measure(np.asarray(one, np.float64) - exact)
        assert gap <= bound, f"{name}: differs by {gap:.3g}, more than {bound:.3g}; its size is {size:.3g}"
