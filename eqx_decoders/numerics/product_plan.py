"""Parse and check the patterns of `einsum`, such as `"batch length embed, embed mlp -> batch length mlp"`."""

import dataclasses
import math
import string
from functools import lru_cache

from jaxtyping import Array, Float

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.sharding.axes import Axes


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """Parsed pattern of a product of an activation x and a weight.

    **Arguments:**

    - `pattern`: the pattern as written.
    - `left`, `right`, `out`: axes of x, of the weight and of the result.
    - `letters`: the equivalent pattern for `jnp.einsum`.
    - `contracted`: number of contracted axes, if they are the last axes of x and the first axes of the weight (the last
        ones if `transposed`); None for a product that cannot be flattened to a matrix product.
    """

    pattern: str
    left: Axes
    right: Axes
    out: Axes
    letters: str
    contracted: int | None
    transposed: bool

    def spelled(self, dimensions: int) -> tuple[Axes, Axes, Axes]:
        """Return the axes of x, weight and result for an x with `dimensions` axes; `...` becomes "... 0", "... 1"."""
        ellipsis = tuple(f"... {index}" for index in range(dimensions - len(self.left) + 1))
        left, out = (
            tuple(name for axis in side for name in (ellipsis if axis == "..." else (axis,)))
            for side in (self.left, self.out)
        )
        return left, self.right, out

    def check_shapes(self, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
        """Raise ConfigError if the shapes of x and the weight do not fit the pattern."""
        left = self._sizes("x", self.left, x)
        right = self._sizes("weight", self.right, weight)
        for axis in left:
            if left[axis] != right.get(axis, left[axis]):
                raise ConfigError(
                    f"einsum pattern={self.pattern!r}: {axis}={left[axis]} of x {x} must be equal to "
                    f"{axis}={right[axis]} of the weight {weight}."
                )

    def _sizes(self, operand: str, axes: Axes, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the size of each axis, except those of `...`."""
        has_ellipsis = "..." in axes
        num_ellipsis = len(shape) - len(axes) + has_ellipsis
        if num_ellipsis < 0 or (num_ellipsis > 0 and not has_ellipsis):
            raise ConfigError(
                f"einsum pattern={self.pattern!r}: {operand} of shape {shape} must have the axes {' '.join(axes)!r}."
            )
        if has_ellipsis:
            start = axes.index("...")
            axes = axes[:start] + axes[start + 1 :]
            shape = shape[:start] + shape[start + num_ellipsis :]
        return dict(zip(axes, shape, strict=True))

    def has_one_row(self, x: Array) -> bool:
        """Return whether the product is that of a single row with a matrix."""
        return self.contracted is not None and math.prod(x.shape[: x.ndim - self.contracted]) == 1

    def spread_outputs(self, table: Float[Array, "..."], dimensions: int) -> Float[Array, "..."]:
        """Reshape a table over the weight's output axes so that it broadcasts against the result.

        `dimensions`: number of dimensions of x.
        """
        _, right, out = self.spelled(dimensions)
        output_axes = [axis for axis in right if axis in out]
        sizes = dict(zip(output_axes, table.shape, strict=True))
        table = table.transpose([output_axes.index(axis) for axis in out if axis in output_axes])
        return table.reshape([sizes.get(axis, 1) for axis in out])

    def flattened(
        self, x: Float[Array, "..."], weight: Float[Array, "..."]
    ) -> tuple[Float[Array, "rows inner"], Float[Array, "..."], tuple[int, ...]]:
        """Return x and the weight as matrices, and the shape of the result; `contracted` must not be None."""
        assert self.contracted is not None
        split = weight.ndim - self.contracted if self.transposed else self.contracted
        first, last = weight.shape[:split], weight.shape[split:]
        inner, outer = (last, first) if self.transposed else (first, last)
        rows = x.shape[: x.ndim - self.contracted]
        matrix = x.reshape(math.prod(rows), math.prod(inner))
        return matrix, weight.reshape(math.prod(first), math.prod(last)), (*rows, *outer)


@lru_cache(maxsize=512)
def product_plan(pattern: str) -> ProductPlan:
    """Parse a pattern; raises ConfigError if it is malformed."""
    sides = pattern.split("->")
    operands = sides[0].split(",")
    check(
        len(sides) == 2 and len(operands) == 2,
        f"einsum pattern={pattern!r} must be 'axes of x, axes of the weight -> axes of the result'.",
    )
    left, right, out = (tuple(side.split()) for side in (*operands, sides[1]))
    _check_axes(pattern, left, right, out)
    axes = [axis for axis in dict.fromkeys(left + right) if axis != "..."]
    letters = dict(zip(axes, string.ascii_letters, strict=False)) | {"...": "..."}
    left_letters, right_letters, out_letters = ("".join(letters[axis] for axis in side) for side in (left, right, out))
    contracted = tuple(axis for axis in left if axis in right and axis not in out)
    columns = tuple(axis for axis in right if axis not in left)
    rows = left[: len(left) - len(contracted)]
    is_matrix_product = (
        bool(contracted)
        and left == rows + contracted
        and out == rows + columns
        and right in (contracted + columns, columns + contracted)
    )
    return ProductPlan(
        pattern=pattern,
        left=left,
        right=right,
        out=out,
        letters=f"{left_letters},{right_letters}->{out_letters}",
        contracted=len(contracted) if is_matrix_product else None,
        transposed=is_matrix_product and bool(columns) and right == columns + contracted,
    )


def _check_axes(pattern: str, left: Axes, right: Axes, out: Axes) -> None:
    for side in (left, right, out):
        check(
            len(set(side)) == len(side),
            f"einsum pattern={pattern!r}: {' '.join(side)!r} has the same axis twice. Give each axis another name.",
        )
        for axis in side:
            check(
                axis == "..." or axis.isidentifier(),
                f"einsum pattern={pattern!r}: {axis!r} is no axis name. Separate identifiers (or '...') by spaces.",
            )
    check("..." not in right, f"einsum pattern={pattern!r}: '...' can be used for axes of x, but not of the weight.")
    check(
        len(set(left + right)) <= len(string.ascii_letters),
        f"einsum pattern={pattern!r} has more than {len(string.ascii_letters)} axes.",
    )
    for axis in out:
        check(
            axis in left + right,
            f"einsum pattern={pattern!r}: axis {axis!r} of the result must be an axis of x or of the weight.",
        )
    for axis in set(left) ^ set(right):
        check(
            axis in out,
            f"einsum pattern={pattern!r}: axis {axis!r} is in one operand only, so the result must have it, too.",
        )
