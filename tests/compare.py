"""How equal two results must be: one rule for all tests."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike


FLOOR = 1e-2
NOTHING = 1e29  # numbers at least so large stand for "empty": the log-sum-exp of a query that sees nothing is -1e30
LOOSEST = 0.51  # of an array's size: a bound above it says nothing


def unit(dtype: DTypeLike) -> float:
    """The relative distance between neighbouring numbers of a dtype: 1.2e-7 for float32, 7.8e-3 for bfloat16."""
    return float(jax.numpy.finfo(dtype).eps)


def largest(array: np.ndarray) -> float:
    """The largest absolute value; 0 of an empty array."""
    return float(np.max(np.abs(array), initial=0.0))


def root_mean_square(array: np.ndarray) -> float:
    """For results in which a rounding error may change a few numbers altogether."""
    return float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0


def _is_float(array: Any) -> bool:
    return bool(jax.numpy.issubdtype(np.asarray(array).dtype, np.floating))


def without_empty(array: Any, name: str = "", like: Any = None, rtol: float = 0.0) -> np.ndarray:
    """The numbers of an array that are no places for "nothing", in float64.

    `like` has such places at the same ones, with the same values up to `rtol`.
    """
    array = np.asarray(array, np.float64)
    assert np.all(np.isfinite(array)), f"{name} is not finite"
    empty = np.abs(array) >= NOTHING
    if like is not None:
        like = np.asarray(like, np.float64)
        np.testing.assert_array_equal(empty, np.abs(like) >= NOTHING, err_msg=f"{name}: empty at other places")
        if empty.any():
            np.testing.assert_allclose(array[empty], like[empty], rtol=rtol, err_msg=f"{name}: what is empty")
    return array[~empty]


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

    Numbers that stand for "empty" are at the same places in both, and count for no size. Trees that hold nothing else,
    and bounds of about the size of what is compared, are refused: such a test cannot fail.
    """
    got, want, *rounded = (jax.tree_util.tree_leaves_with_path(jax.device_get(tree)) for tree in (got, want, *rounded))
    assert all([path for path, _ in tree] == [path for path, _ in want] for tree in (got, *rounded))
    exact = [without_empty(array, f"what is wanted{jax.tree_util.keystr(path)}") for path, array in want]
    assert any(array.size for array in exact), "there is nothing to compare"
    sizes = list(map(measure, exact))
    top = max((size for size, (_, array) in zip(sizes, want, strict=True) if _is_float(array)), default=0.0)
    for (path, one), (_, other), plain, size, *lossy in zip(got, want, exact, sizes, *rounded, strict=True):
        name = jax.tree_util.keystr(path)
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape, f"{name}: {one.shape} != {other.shape}"
        if not _is_float(other):
            np.testing.assert_array_equal(one, other, err_msg=name)
            continue
        step = units * unit(dtype or one.dtype)
        lost = max((measure(without_empty(array, name, other) - plain) for _, array in lossy), default=0.0)
        bound = step * max(size, floor * top) + 2 * lost
        loosest = max(LOOSEST * size, floor * top)
        assert bound <= loosest, f"{name}: a bound of {bound:.3g} says nothing of numbers of size {size:.3g}"
        gap = measure(without_empty(one, name, other, step) - plain)
        assert gap <= bound, f"{name}: differs by {gap:.3g}, more than {bound:.3g}; its size is {size:.3g}"


def assert_array_equal(actual: Any, desired: Any, *, equal_nan: bool = False, **options: Any) -> None:
    """`numpy.testing.assert_array_equal`, which also fails where `desired` has NaN and `equal_nan` is not given."""
    _refuse_nan(desired, equal_nan)
    np.testing.assert_array_equal(actual, desired, **options)


def assert_allclose(
    actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, *, equal_nan: bool = False, **options: Any
) -> None:
    """`numpy.testing.assert_allclose`, which also fails where it cannot fail otherwise.

    It refuses empty arrays, NaN in `desired` unless `equal_nan` is given, and a tolerance of the size of `desired`.
    """
    _refuse_nan(desired, equal_nan)
    numbers = np.abs(np.asarray(desired, np.float64))
    assert numbers.size, "there is nothing to compare"
    size = np.max(numbers[numbers < NOTHING], initial=0.0)
    says = size == 0 or atol + rtol * size <= LOOSEST * size
    assert says, f"rtol={rtol}, atol={atol} say nothing of numbers of size {size:.3g}"
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=atol, equal_nan=equal_nan, **options)


def _refuse_nan(desired: Any, equal_nan: bool) -> None:
    if _is_float(desired) and not equal_nan:
        assert not np.isnan(np.asarray(desired).astype(np.float64)).any(), "what is wanted has NaN, equal to any NaN"
