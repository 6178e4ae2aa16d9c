"""Product of an activation and a weight over named axes: `einsum`, through which every weight goes.

It casts a weight at its use, so that only the copy of one layer exists in the compute dtype at a time. It has two
forms with equal results: the plain one, and a flattened one that XLA's CPU backend runs two to eight times faster.
"""

import dataclasses
import math
import string
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from eqx_decoders.errors import check
from eqx_decoders.numerics.clipped_weight import ClippedWeight, clip_between
from eqx_decoders.numerics.low_precision import ProductSharding, Rounded, rounded_product
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.matmul import cast_in_loop, product
from eqx_decoders.numerics.quantized_weight import QuantizedWeight, group_product, matrix_product, takes_groups
from eqx_decoders.sharding.axes import AXES, Axes, names_of
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class _ProductPlan:
    """Parsed pattern: axes of both operands, the letters for jnp.einsum, and the split for flattening.

    `contracted` axes end x and stand first in the weight, or last in it if `transposed`; None: it cannot be flattened.
    """

    pattern: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    letters: str
    contracted: int | None
    transposed: bool

    def spelled(self, dimensions: int) -> tuple[Axes, Axes, Axes]:
        """Return the axes of x, of the weight and of the result, with one name for each dimension of `...`."""
        more = tuple(f"... {index}" for index in range(dimensions - len(self.left) + 1))
        out = tuple(self.pattern.split("->")[1].split())
        left, result = (
            tuple(word for each in side for word in (more if each == "..." else (each,))) for side in (self.left, out)
        )
        return left, self.right, result


@lru_cache(maxsize=512)
def _plan(pattern: str) -> _ProductPlan:
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
    return _ProductPlan(
        pattern=pattern,
        left=left,
        right=right,
        letters=f"{written[0]},{written[1]}->{written[2]}",
        contracted=len(shared) if flat else None,
        transposed=flat and bool(columns) and right == columns + shared,
    )


def _check_words(pattern: str, left: tuple[str, ...], right: tuple[str, ...], out: tuple[str, ...]) -> None:
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


def _check_shapes(plan: _ProductPlan, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    left = _spread(plan, "x", plan.left, x)
    right = _spread(plan, "weight", plan.right, weight)
    for word in (word for word in left if word in right):
        check(
            left[word] == right[word],
            f"einsum pattern={plan.pattern!r}: {word}={left[word]} in x {x} must be {word}={right[word]} of the weight"
            f" {weight}.",
        )


def _spread(plan: _ProductPlan, what: str, words: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, int]:
    """Return the size of each axis but the ones of `...`."""
    missing = len(shape) - len(words) + ("..." in words)
    good = missing >= 0 if "..." in words else missing == 0
    check(
        good, f"einsum pattern={plan.pattern!r}: {what} of shape {shape} must have the dimensions {' '.join(words)!r}."
    )
    if "..." in words:
        place = words.index("...")
        words, shape = words[:place] + words[place + 1 :], shape[:place] + shape[place + missing :]
    return dict(zip(words, shape, strict=True))


def einsum(
    pattern: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."] | LowRank | ClippedWeight | Rounded | QuantizedWeight,
    *,
    flatten: bool = False,
    out_dtype: DTypeLike | None = None,
    layout: Layout | None = None,
) -> Float[Array, "..."]:
    """Multiply an activation by a weight, as in `"batch length embed, embed mlp -> batch length mlp"`.

    The weight is cast to the dtype of `x`; sums are accumulated in f32 (at least) and returned as `out_dtype`, by
    default the dtype of `x`. Gradients have the dtypes of `x` and of `weight`. `...` stands for more dimensions of `x`.

    `flatten` chooses the form that is fast on CPU: activations as `[rows, contracted]`, the weight as `[contracted,
    out]`, so that the gradients contract one dimension too. It merges dimensions, which costs communication where these
    are sharded over several axes; on TPU and GPU leave it off. Patterns that are not of this form run plainly.

    `layout` says which devices multiply. On a mesh a weight that is no larger than the activation is gathered; by a
    larger one XLA may multiply where its parts are.

    A `LowRank` weight is never merged: `x base + scale (x lora_a) lora_b`. A `Rounded` one is multiplied in 8 bits. A
    `QuantizedWeight` is widened, and its columns' scales multiply the product. A `ClippedWeight` clips `x` and the
    product.

    Raises ConfigError for a malformed pattern, or for shapes that do not fit it.
    """
    if isinstance(weight, ClippedWeight):
        x = clip_between(x, weight.input_min, weight.input_max)
        y = einsum(pattern, x, weight.weight, flatten=flatten, out_dtype=out_dtype, layout=layout)
        return clip_between(y, weight.output_min, weight.output_max)
    if isinstance(weight, LowRank):
        return _low_rank(pattern, x, weight, out_dtype, dict(flatten=flatten, layout=layout))
    if isinstance(weight, QuantizedWeight):
        return _quantized(_plan(pattern), x, weight, np.dtype(out_dtype or x.dtype), flatten, layout)
    plan, array = _plan(pattern), weight.array if isinstance(weight, Rounded) else weight
    _check_shapes(plan, x.shape, array.shape)
    dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    gathers = layout is not None and all(word in AXES for word in plan.right) and array.size <= x.size
    if not flatten or plan.contracted is None:
        if isinstance(weight, Rounded):
            words = plan.spelled(x.ndim)
            sharding = _product_sharding(words, x.shape, array.shape, layout, gathers)
            return rounded_product(words, x, weight, dtype=dtype, sharding=sharding)
        weight = cast_in_loop(weight, x.dtype)
        weight = layout.gather_weight(weight, plan.right) if layout is not None and gathers else weight
        return jnp.einsum(plan.letters, x, weight, preferred_element_type=dtype)
    split = len(array.shape) - plan.contracted if plan.transposed else plan.contracted
    first, last = array.shape[:split], array.shape[split:]
    inside, outside = (last, first) if plan.transposed else (first, last)
    rows = x.shape[: x.ndim - plan.contracted]
    flat = x.reshape(math.prod(rows), math.prod(inside))
    matrix = array.reshape(math.prod(first), math.prod(last))
    if isinstance(weight, Rounded):
        words = ("rows", "inner"), ("outer", "inner") if plan.transposed else ("inner", "outer"), ("rows", "outer")
        rounded = Rounded(array=matrix, seed=weight.seed, config=weight.config)
        sharding = _product_sharding(words, flat.shape, matrix.shape, layout, gathers=False)
        return rounded_product(words, flat, rounded, dtype=dtype, sharding=sharding).reshape(*rows, *outside)
    return product(flat, matrix, transposed=plan.transposed, out_dtype=dtype).reshape(*rows, *outside)


def _product_sharding(
    words: tuple[Axes, Axes, Axes], x: tuple[int, ...], weight: tuple[int, ...], layout: Layout | None, gathers: bool
) -> ProductSharding | None:
    """Return the placement of a product in 8 bits; `gathers` says that each device gets the whole weight."""
    if layout is None:
        return None
    native = layout.platform != "cpu"
    if not gathers:
        return ProductSharding(native)
    left, right, _ = words
    return ProductSharding(native, _parts(left, right, x, weight, layout), layout.gather_places(right, weight))


def _parts(
    left: Axes, right: Axes, x: tuple[int, ...], weight: tuple[int, ...], layout: Layout
) -> tuple[tuple[str, int], ...]:
    """Count the parts into which the mesh splits each axis of a product with a gathered weight."""
    used = {word: names_of(group) for word, group in zip(right, layout.used_spec(right), strict=True)}
    taken = {name for names in used.values() for name in names}
    sizes = dict(zip(left, x, strict=True)) | dict(zip(right, weight, strict=True))
    known = tuple(word for word in left if word in AXES)
    spec = layout.activation_spec(known, tuple(sizes[word] for word in known))
    rows = {word: names_of(group) for word, group in zip(known, spec, strict=True) if word not in right}
    names_by_axis = used | {word: tuple(name for name in names if name not in taken) for word, names in rows.items()}
    counts = {word: math.prod(layout.sizes[name] for name in names) for word, names in names_by_axis.items()}
    return tuple((word, count) for word, count in counts.items() if count > 1 and sizes[word] % count == 0)


def _quantized(
    plan: _ProductPlan, x: Array, weight: QuantizedWeight, dtype: np.dtype, flatten: bool, layout: Layout | None
) -> Array:
    _check_shapes(plan, x.shape, weight.shape)
    if flatten and plan.contracted == weight.inner and not plan.transposed and weight.lead == 0:
        rows = x.shape[: x.ndim - weight.inner]
        y: Any = matrix_product(dtype, x.reshape(math.prod(rows), weight.rows), weight.of_matrix())
        return y.reshape(*rows, *weight.shape[weight.inner :])
    gathers = layout is not None and all(word in AXES for word in plan.right) and weight.size <= x.size
    shardings = layout.gather_places(plan.right, weight.shape) if layout is not None and gathers else None
    if shardings is not None:  # few bits travel
        values = lax.with_sharding_constraint(lax.stop_gradient(weight.values), shardings[0])
        weight = dataclasses.replace(weight, values=values)
    rows = x.shape[: x.ndim - weight.inner]
    standard = plan.contracted == weight.inner and not plan.transposed
    if standard and not weight.by_column and takes_groups(weight, math.prod(rows)):
        return group_product(dtype, x, weight)
    _, right, out = plan.spelled(x.ndim)
    columns = [word for word in right if word in out]
    summed = right[weight.lead :][: weight.inner]
    whole = right == (*columns[: weight.lead], *summed, *columns[weight.lead :]) and not set(summed) & set(columns)
    if not (weight.by_column and whole):  # other dimensions are contracted than scales are common to
        return jnp.einsum(plan.letters, x, weight.dequantized(x.dtype), preferred_element_type=dtype)
    wide = np.promote_types(dtype, np.float32)
    kernel, scales = weight.numbers(x.dtype), weight.factors(wide)
    sizes = dict(zip(right, weight.shape, strict=True))
    scales = scales.squeeze(weight.lead).transpose([columns.index(word) for word in out if word in columns])
    scales = scales.reshape([sizes[word] if word in columns else 1 for word in out])
    return (jnp.einsum(plan.letters, x, kernel, preferred_element_type=wide) * scales).astype(dtype)


def _low_rank(pattern: str, x: Array, weight: LowRank, out_dtype: DTypeLike | None, options: dict[str, Any]) -> Array:
    into, out_of = _pair_patterns(pattern)
    y = einsum(pattern, x, lax.stop_gradient(weight.base), out_dtype=out_dtype, **options)
    low = einsum(into, x, weight.lora_a, **options)
    return y + einsum(out_of, weight.scale * low, weight.lora_b, out_dtype=out_dtype, **options)


@lru_cache(maxsize=512)
def _pair_patterns(pattern: str) -> tuple[str, str]:
    """Split the pattern of a weight in two, for its low-rank pair: to `rank`, and from `rank` to the outputs."""
    plan = _plan(pattern)
    out = tuple(pattern.split("->")[1].split())
    rows = [word for word in plan.left if word in out]
    batch = [word for word in plan.right if word in plan.left and word in out]
    contracted = [word for word in plan.right if word not in out]
    columns = [word for word in plan.right if word not in plan.left]
    low = " ".join([*rows, "rank"])
    return (
        f"{' '.join(plan.left)}, {' '.join([*batch, *contracted, 'rank'])} -> {low}",
        f"{low}, {' '.join([*batch, 'rank', *columns])} -> {' '.join(out)}",
    )


def add_bias(x: Array, bias: Array | None) -> Array:
    """Return `x + bias` in the dtype of `x`; the bias has the trailing axes of `x`."""
    return x if bias is None else x + bias.astype(x.dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
