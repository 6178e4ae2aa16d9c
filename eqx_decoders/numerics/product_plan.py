"""Patterns of products, as in `"batch length embed, embed mlp -> batch length mlp"`, parsed and checked."""

import dataclasses
import math
import string
from functools import lru_cache

from jaxtyping import Array, Float

from eqx_decoders.errors import check
from eqx_decoders.sharding.axes import Axes


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """Parsed pattern of a product: the axes of both operands and of the result, and the split for flattening.

    **Arguments:**

    - `pattern`: as it was written.
    - `left`, `right`, `out`: axes of x, of the weight and of the result.
    - `letters`: the pattern for `jnp.einsum`.
    - `contracted`: number of axes that end x and stand first in the weight, or last in it if `transposed`; None for a
        product that cannot be flattened.
    """

    pattern: str
    left: Axes
    right: Axes
    out: Axes
    letters: str
    contracted: int | None
    transposed: bool

    def spelled(self, dimensions: int) -> tuple[Axes, Axes, Axes]:
        """Return the axes of x, of the weight and of the result, with one name for each dimension of `...`."""
        more = tuple(f"... {index}" for index in range(dimensions - len(self.left) + 1))
        left, result = (
            tuple(word for each in side for word in (more if each == "..." else (each,)))
            for side in (self.left, self.out)
        )
        return left, self.right, result

    def check_shapes(self, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
        """Raise ConfigError for shapes of x and the weight that do not fit the pattern."""
        left, right = self._sizes("x", self.left, x), self._sizes("weight", self.right, weight)
        for word in (word for word in left if word in right):
            check(
                left[word] == right[word],
                f"einsum pattern={self.pattern!r}: {word}={left[word]} in x {x} must be {word}={right[word]} of the "
                f"weight {weight}.",
            )

    def _sizes(self, what: str, words: Axes, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the size of each axis but the ones of `...`."""
        missing = len(shape) - len(words) + ("..." in words)
        good = missing >= 0 if "..." in words else missing == 0
        rule = f"{what} of shape {shape} must have the dimensions {' '.join(words)!r}"
        check(good, f"einsum pattern={self.pattern!r}: {rule}.")
        if "..." in words:
            place = words.index("...")
            words, shape = words[:place] + words[place + 1 :], shape[:place] + shape[place + missing :]
        return dict(zip(words, shape, strict=True))

    def has_one_row(self, x: Array) -> bool:
        """Return whether an activation has one row, which is multiplied by a matrix."""
        return self.contracted is not None and math.prod(x.shape[: x.ndim - self.contracted]) == 1

    def spread_outputs(self, table: Float[Array, "..."], dimensions: int) -> Float[Array, "..."]:
        """Return a number for each output of the weight as it multiplies the result of an x of so many dimensions."""
        _, right, out = self.spelled(dimensions)
        columns = [word for word in right if word in out]
        sizes = dict(zip(columns, table.shape, strict=True))
        table = table.transpose([columns.index(word) for word in out if word in columns])
        return table.reshape([sizes.get(word, 1) for word in out])

    def flattened(
        self, x: Float[Array, "..."], weight: Float[Array, "..."]
    ) -> tuple[Float[Array, "rows inner"], Float[Array, "..."], tuple[int, ...]]:
        """Return both operands as matrices, and the shape of the result; `contracted` must not be None."""
        assert self.contracted is not None
        split = weight.ndim - self.contracted if self.transposed else self.contracted
        first, last = weight.shape[:split], weight.shape[split:]
        inside, outside = (last, first) if self.transposed else (first, last)
        rows = x.shape[: x.ndim - self.contracted]
        flat = x.reshape(math.prod(rows), math.prod(inside))
        return flat, weight.reshape(math.prod(first), math.prod(last)), (*rows, *outside)


@lru_cache(maxsize=512)
def product_plan(pattern: str) -> ProductPlan:
    """Parse a pattern. Raises ConfigError for a malformed one."""
    sides = pattern.split("->")
    operands = sides[0].split(",")
    check(
        len(sides) == 2 and len(operands) == 2,
        f"einsum pattern={pattern!r} must be 'words of x, words of weight -> words of result'.",
    )
    left, right, out = (tuple(side.split()) for side in (*operands, sides[1]))
    _check_words(pattern, left, right, out)
    names = [word for word in dict.fromkeys(left + right) if word != "..."]
    letter = dict(zip(names, string.ascii_letters, strict=False)) | {"...": "..."}
    written = ["".join(letter[word] for word in side) for side in (left, right, out)]
    shared = tuple(word for word in left if word in right and word not in out)
    columns = tuple(word for word in right if word not in left)
    rows = left[: len(left) - len(shared)]
    flat = (
        bool(shared)
        and left == rows + shared
        and out == rows + columns
        and right in (shared + columns, columns + shared)
    )
    return ProductPlan(
        pattern=pattern,
        left=left,
        right=right,
        out=out,
        letters=f"{written[0]},{written[1]}->{written[2]}",
        contracted=len(shared) if flat else None,
        transposed=flat and bool(columns) and right == columns + shared,
    )


def _check_words(pattern: str, left: Axes, right: Axes, out: Axes) -> None:
    where = f"einsum pattern={pattern!r}"
    for side in (left, right, out):
        check(len(set(side)) == len(side), f"{where}: a word stands twice in {' '.join(side)!r}.")
        for word in side:
            check(word == "..." or word.isidentifier(), f"{where}: {word!r} is no word.")
    check("..." not in right, f"{where}: '...' may stand for dimensions of x alone, not of the weight.")
    check(len(set(left + right)) <= len(string.ascii_letters), f"{where} has too many words.")
    for word in out:
        check(word in left + right, f"{where}: {word!r} of the result is in neither operand.")
    for word in set(left) ^ set(right):
        check(word in out, f"{where}: {word!r} is in one operand alone, so it must be in the result.")
