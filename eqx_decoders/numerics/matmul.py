"""Dtypes, initialisers, and the one product through which every weight goes.

`einsum` casts a weight at its use, so that only the copy of one layer exists in the compute dtype at a time. It has two
forms with equal results: the plain one, and a flattened one that XLA's CPU backend runs two to eight times faster.
"""

import dataclasses
import math
import string
from functools import lru_cache, partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as MemoryLayout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, PRNGKeyArray, PyTree

from eqx_decoders.errors import ConfigError, check, check_integer, check_number, check_word
from eqx_decoders.numerics.int8_matmul import Rounded, rounded_product
from eqx_decoders.numerics.quantized_weight import QuantizedWeight, group_product, matrix_product, takes_groups
from eqx_decoders.sharding.axes import (
    AXES,
    FROZEN,
    AnyArray,
    Axes,
    axes,
    named_leaves,
    path_name,
    product_axes,
    replaced,
)
from eqx_decoders.sharding.layout import Layout


T = TypeVar("T")

# From jax 0.11 XLA's CPU backend runs 16-bit products on matrix units, but only those of plain row-major operands.
_MATRIX_UNITS = jax.__version_info__ >= (0, 11)

# Below so many rows a product takes less time, however it runs, than bringing a weight into the order of matrix units.
_FEW_ROWS = 128

# Of so many terms are the sums that the product of one row is made of.
_TERMS = 8

_FLOATS = ("float32", "bfloat16", "float16", "float64")

# Standard deviation of a standard normal cut off at two.
_TRUNCATED_STDDEV = 0.87962566103423978


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a model: weights are stored in `params` and cast to `compute`, the dtype of activations, at their use.

    Any spelling of a floating dtype is taken (`jnp.bfloat16`, `"bfloat16"`); others raise ConfigError.
    """

    params: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for field in ("params", "compute"):
            object.__setattr__(self, field, _floating(f"Precision.{field}", getattr(self, field)))


def _floating(field: str, value: DTypeLike) -> np.dtype:
    try:
        dtype = np.dtype(value)
    except TypeError as error:
        raise ConfigError(f"{field}={value!r} is not a dtype. Known: {', '.join(_FLOATS)}.") from error
    check_word(field, dtype.name, _FLOATS)
    return dtype


class LowRank(eqx.Module):
    """A weight `base + scale * lora_a lora_b`, kept in parts: the base is frozen, the pair is trained (Hu et al. 2021).

    It stands wherever `einsum` takes a weight. No gradient reaches `base`.

    **Arguments:**

    - `base`: the weight, say `embed heads head_dim`; it may be kept in few bits (QLoRA, Dettmers et al. 2023).
    - `lora_a`: the axes that the weight contracts, then `rank`: `embed rank`.
    - `lora_b`: `rank`, then those that it makes: `rank heads head_dim`.
    - `scale`: multiplies the product of the two.
    """

    base: Float[AnyArray, "..."] | QuantizedWeight = eqx.field(metadata=FROZEN)
    lora_a: Float[AnyArray, "..."]
    lora_b: Float[AnyArray, "..."]
    scale: float = eqx.field(static=True)

    @staticmethod
    def part_axes(words: Axes) -> dict[str, Axes]:
        """The words of the three arrays, given those of the weight."""
        split = product_axes(words)
        if split is None:
            raise ConfigError(f"A weight with the axes {' '.join(words)!r} is no matrix: it takes no low-rank update.")
        contracted, made = split
        each = words[: words[:1] == ("experts",)]  # every expert has a pair of its own
        return {"base": words, "lora_a": (*each, *contracted, "rank"), "lora_b": (*each, "rank", *made)}

    def merged(self) -> Float[Array, "..."]:
        """The weight as one array in the dtype of the base, computed in f32; for axes in the order of `part_axes`.

        Of a base in few bits it is a plain array in the dtype of the pair.
        """
        if isinstance(self.base, QuantizedWeight):
            return LowRank(self.base.widened(), self.lora_a, self.lora_b, self.scale).merged().astype(self.lora_a.dtype)
        dtype = np.promote_types(self.base.dtype, np.float32)
        stacked = self.lora_a.ndim + self.lora_b.ndim - self.base.ndim - 2
        letters = string.ascii_letters[: self.base.ndim]
        stack, rows, columns = letters[:stacked], letters[: self.lora_a.ndim - 1], letters[self.lora_a.ndim - 1 :]
        pair = self.lora_a.astype(dtype), self.lora_b.astype(dtype)
        update = jnp.einsum(f"{rows}Z,{stack}Z{columns}->{letters}", *pair, precision=lax.Precision.HIGHEST)
        return (self.base.astype(dtype) + self.scale * update).astype(self.base.dtype)


def low_rank_weights(tree: PyTree) -> dict[str, LowRank]:
    """The weights of a tree that have a pair, by dotted path."""
    places = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, LowRank))
    return {path_name(path): node for path, node in places if isinstance(node, LowRank)}


class ClippedWeight(eqx.Module):
    """A weight whose product is kept within bounds on both sides: `clip(clip(x) w)` (Gemma 4's encoders).

    It stands wherever `einsum` takes a weight. Gradients pass to what lies within its bounds, ends included. None
    reaches the bounds, which are measured and not trained.

    **Arguments:**

    - `weight`: an array, or a weight in parts.
    - `input_min`, `input_max`: bounds of x, one number for each layer; infinite ones clip nothing.
    - `output_min`, `output_max`: those of the product.
    """

    weight: Float[AnyArray, "..."] | LowRank | Rounded | QuantizedWeight
    input_min: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    input_max: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    output_min: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    output_max: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)

    @staticmethod
    def part_axes(words: Axes) -> dict[str, Axes]:
        """The words of the five arrays, given those of the weight."""
        return {"weight": words, "input_min": (), "input_max": (), "output_min": (), "output_max": ()}


def with_bounds(tree: T) -> T:
    """A tree of modules whose matrices are each in a `ClippedWeight`, with bounds that clip nothing."""
    leaves, nodes = named_leaves(tree), {}
    for path, words in axes(tree).items():
        if product_axes(words) is not None:
            stack = leaves[path].shape[: words.count("layers")]
            low, high = jnp.full(stack, -jnp.inf), jnp.full(stack, jnp.inf)
            nodes[path] = ClippedWeight(leaves[path], input_min=low, input_max=high, output_min=low, output_max=high)
    return replaced(tree, nodes)


def _within(x: Array, low: Array, high: Array) -> Array:
    """`x` between two numbers; with `jnp.clip` alone half of a gradient would be lost at the ends."""
    low, high = lax.stop_gradient((low.astype(x.dtype), high.astype(x.dtype)))
    return jnp.where((x >= low) & (x <= high), x, jnp.clip(x, low, high))


@dataclasses.dataclass(frozen=True)
class _ProductPlan:
    """A parsed pattern: words of both operands, the letters for jnp.einsum, and how to flatten it (None: it cannot be).

    `contracted` words end x and stand first in the weight, or last in it if `transposed`.
    """

    pattern: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    letters: str
    contracted: int | None
    transposed: bool

    def spelled(self, dimensions: int) -> tuple[Axes, Axes, Axes]:
        """The words of x, of the weight and of the result, with one for each dimension that `...` stands for."""
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
    kept = tuple(word for word in right if word not in left)
    rows = left[: len(left) - len(shared)]
    flat = bool(shared) and left == rows + shared and out == rows + kept and right in (shared + kept, kept + shared)
    return _ProductPlan(
        pattern=pattern,
        left=left,
        right=right,
        letters=f"{written[0]},{written[1]}->{written[2]}",
        contracted=len(shared) if flat else None,
        transposed=flat and bool(kept) and right == kept + shared,
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
    """The size of each word, leaving those of `...` out."""
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
    """The product of an activation and a weight, such as `"batch length embed, embed mlp -> batch length mlp"`.

    The weight is cast to the dtype of `x`; sums are accumulated in f32 (at least) and returned as `out_dtype`, by
    default that of `x`. Gradients have the dtypes of `x` and of `weight`. `...` stands for further dimensions of `x`.

    `flatten` chooses the form that is fast on CPU: activations as `[rows, contracted]`, the weight as `[contracted,
    out]`, so that the gradients contract one dimension too. It merges dimensions, which costs communication where these
    are sharded over several axes; on TPU and GPU leave it off. Patterns that are not of this form run plainly.

    `layout` says which devices multiply. On a mesh a weight that is no larger than the activation is gathered; by a
    larger one XLA may multiply where its parts are.

    A weight in parts is never put together: `x base + scale (x lora_a) lora_b`. A rounded one is multiplied in 8 bits.
    One in few bits is widened, and its columns' scales multiply the product. Of one with bounds `x` and the product are
    clipped.

    A malformed pattern, or shapes that do not fit it, raise ConfigError.
    """
    if isinstance(weight, ClippedWeight):
        x = _within(x, weight.input_min, weight.input_max)
        y = einsum(pattern, x, weight.weight, flatten=flatten, out_dtype=out_dtype, layout=layout)
        return _within(y, weight.output_min, weight.output_max)
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
            return rounded_product(words, x, weight, dtype=dtype, layout=layout, gathers=gathers)
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
        matrix = Rounded(array=matrix, seed=weight.seed, config=weight.config)
        return rounded_product(words, flat, matrix, dtype=dtype, layout=layout).reshape(*rows, *outside)
    return product(flat, matrix, transposed=plan.transposed, out_dtype=dtype).reshape(*rows, *outside)


def _quantized(
    plan: _ProductPlan, x: Array, weight: QuantizedWeight, dtype: np.dtype, flatten: bool, layout: Layout | None
) -> Array:
    _check_shapes(plan, x.shape, weight.shape)
    if flatten and plan.contracted == weight.inner and not plan.transposed and weight.lead == 0:
        rows = x.shape[: x.ndim - weight.inner]
        y: Any = matrix_product(dtype, x.reshape(math.prod(rows), weight.rows), weight.of_matrix())
        return y.reshape(*rows, *weight.shape[weight.inner :])
    gathers = layout is not None and all(word in AXES for word in plan.right) and weight.size <= x.size
    places = layout.gather_places(plan.right, weight.shape) if layout is not None and gathers else None
    if places is not None:  # few bits travel
        values = lax.with_sharding_constraint(lax.stop_gradient(weight.values), places[0])
        weight = dataclasses.replace(weight, values=values)
    rows = x.shape[: x.ndim - weight.inner]
    standard = plan.contracted == weight.inner and not plan.transposed
    if standard and not weight.by_column and takes_groups(weight, math.prod(rows)):
        return group_product(dtype, x, weight)
    _, right, out = plan.spelled(x.ndim)
    made = [word for word in right if word in out]
    summed = right[weight.lead :][: weight.inner]
    whole = right == (*made[: weight.lead], *summed, *made[weight.lead :]) and not set(summed) & set(made)
    if not (weight.by_column and whole):  # other dimensions are contracted than scales are common to
        return jnp.einsum(plan.letters, x, weight.widened(x.dtype), preferred_element_type=dtype)
    wide = np.promote_types(dtype, np.float32)
    kernel, scales = weight.numbers(x.dtype), weight.factors(wide)
    sizes = dict(zip(right, weight.shape, strict=True))
    scales = scales.squeeze(weight.lead).transpose([made.index(word) for word in out if word in made])
    scales = scales.reshape([sizes[word] if word in made else 1 for word in out])
    return (jnp.einsum(plan.letters, x, kernel, preferred_element_type=wide) * scales).astype(dtype)


def _low_rank(pattern: str, x: Array, weight: LowRank, out_dtype: DTypeLike | None, options: dict[str, Any]) -> Array:
    into, out_of = _pair_patterns(pattern)
    y = einsum(pattern, x, lax.stop_gradient(weight.base), out_dtype=out_dtype, **options)
    low = einsum(into, x, weight.lora_a, **options)
    return y + einsum(out_of, weight.scale * low, weight.lora_b, out_dtype=out_dtype, **options)


@lru_cache(maxsize=512)
def _pair_patterns(pattern: str) -> tuple[str, str]:
    """`"length embed, embed mlp -> length mlp"` -> `"length embed, embed rank -> length rank"` and the second half."""
    plan = _plan(pattern)
    out = tuple(pattern.split("->")[1].split())
    rows = [word for word in plan.left if word in out]
    batch = [word for word in plan.right if word in plan.left and word in out]
    contracted = [word for word in plan.right if word not in out]
    made = [word for word in plan.right if word not in plan.left]
    low = " ".join([*rows, "rank"])
    return (
        f"{' '.join(plan.left)}, {' '.join([*batch, *contracted, 'rank'])} -> {low}",
        f"{low}, {' '.join([*batch, 'rank', *made])} -> {' '.join(out)}",
    )


def cast_weight(weight: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    """The weight in the dtype of its product; a real cast is named, so that remat may keep the copy."""
    return weight if weight.dtype == dtype else checkpoint_name(weight.astype(dtype), "quantization")


def cast_in_loop(weight: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    """`cast_weight` for TPU and GPU, where XLA would cast the weights of all layers before a loop over them: a copy of
    half of their size, kept for the whole step. Rounding first, it is done where it stands; the numbers are the same.
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
    """`x @ weight`, or `x @ weight.T` if `transposed`, in the form that a CPU runs fastest in both passes.

    In 16 bits it has its own reverse-mode rule; in f32 and f64 forward mode works too.
    """
    dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    if x.dtype.itemsize == 2:
        return _half_product(transposed, dtype, x, weight)
    return matmul(x, cast_weight(weight, x.dtype), (1, 1 if transposed else 0), dtype)


def matmul(
    a: Float[Array, "..."], b: Float[Array, "..."], contract: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "..."]:
    """The product of two matrices over dimension `contract[0]` of `a` and `contract[1]` of `b`.

    16-bit operands are first brought into the order that the matrix units of a CPU want; but of a few rows the product
    takes less time than that. One row is never multiplied as such: XLA's form for it takes several times longer.
    """
    rows = a.shape[1 - contract[0]]
    if wants_row_major(a.dtype) and 0 < rows < _FEW_ROWS:
        a = a.T if contract[0] == 0 else a
        if rows == 1 and contract[1] == 0 and b.shape[0] % _TERMS == 0:
            return _row_product(a, b).astype(dtype)
        a = jnp.pad(a, ((0, 7 if rows == 1 else 0), (0, 0)))
        over = (((1,), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, over, preferred_element_type=np.dtype(dtype))[:rows]
    if wants_row_major(a.dtype):
        a, b = (row_major_transpose(a) if contract[0] == 0 else a), (row_major_transpose(b) if contract[1] else b)
        contract = (1, 0)
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=np.dtype(dtype))


def _row_product(row: Float[Array, "1 inner"], b: Float[Array, "inner outer"]) -> Float32[Array, "1 outer"]:
    """`row @ b` as sums of a few terms, and their sum: one pass over `b`, cast on the way, at the memory's speed."""
    row, b = lax.optimization_barrier((row, b))  # or a loop over tokens would be led by a cast of all weights
    inner, outer = b.shape
    terms = 2 * _TERMS if outer >= 4 * inner and inner % (2 * _TERMS) == 0 else _TERMS  # fewer sums where they are long
    factors, rows = row.astype(jnp.float32).reshape(-1, terms, 1), b.reshape(-1, terms, outer)
    sums = sum(factors[:, term] * rows[:, term].astype(jnp.float32) for term in range(terms))
    return jnp.sum(lax.optimization_barrier(sums), axis=0, keepdims=True)  # a pass of its own: XLA would join the two


def wants_row_major(dtype: np.dtype) -> bool:
    """Whether products of this dtype run on a CPU's matrix units, which take plain row-major operands only."""
    return _MATRIX_UNITS and dtype.itemsize == 2


def row_major_transpose(a: Float[Array, "m n"]) -> Float[Array, "n m"]:
    """The transpose, written out: otherwise XLA folds it into the product, which then leaves the matrix units."""
    return with_layout_constraint(a.T, MemoryLayout((0, 1)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
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


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, stddev: float) -> Float[Array, "..."]:
    """Normal numbers of standard deviation `stddev`, drawn in f32 and then cast."""
    check_number("normal stddev", stddev, least=0.0)
    return (stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def fan_in(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, fan: int, distribution: str = "truncated"
) -> Float[Array, "..."]:
    """Numbers of variance `1 / fan`, `fan` being the size of what is contracted; drawn in f32 and then cast.

    `distribution` is `"normal"`, or `"truncated"`: a normal cut at two standard deviations, widened to this variance.
    """
    check_integer("fan_in fan", fan)
    check_word("fan_in distribution", distribution, ("truncated", "normal"))
    stddev = fan**-0.5
    if distribution == "normal":
        return normal(key, shape, dtype, stddev)
    draws = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return (stddev / _TRUNCATED_STDDEV * draws).astype(dtype)
