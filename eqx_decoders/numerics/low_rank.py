"""Low-rank updates of weights (LoRA; Hu et al. 2021)."""

import string
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from eqx_decoders.errors import ConfigError
from eqx_decoders.numerics.einsum import AbstractWeight, LowRankPair, ProductOptions, as_weight, contract
from eqx_decoders.numerics.product_plan import ProductPlan, product_plan
from eqx_decoders.sharding.axes import FROZEN, AnyArray, Axes, path_name, product_axes, replaced


T = TypeVar("T")


class _Letters(NamedTuple):
    """Letters of a weight's dimensions, and of the two factors with Z for the rank; `stack` of them count matrices."""

    base: str
    stack: int
    rows: str
    columns: str

    @property
    def factors(self) -> tuple[str, str]:
        """Letters of both factors."""
        return f"{self.rows}Z", f"{self.columns[: self.stack]}Z{self.columns[self.stack :]}"


class LowRank(AbstractWeight):
    """Weight with a low-rank update, `base + scale * lora_a lora_b`; the base is frozen (LoRA, Hu et al. 2021).

    It is never merged for a product: `x base + scale (x lora_a) lora_b`. No gradient reaches `base`.

    With magnitudes (DoRA, Liu et al. 2024) each column of the sum is scaled to a length of its own, `factor` times what
    it is: `(|start| + lora_magnitude) / |sum|`. The length of the sum is a number there: no gradient flows through it.

    **Arguments:**

    - `base`: the weight, say `embed heads head_dim`, of any kind; it may be quantized (QLoRA, Dettmers et al. 2023).
    - `lora_a`: the axes that the weight contracts, then `rank`: `embed rank`.
    - `lora_b`: `rank`, then the weight's output axes: `rank heads head_dim`.
    - `scale`: multiplies the product of the two.
    - `lora_magnitude`: by how much the lengths of columns are to differ from those at the start: `heads head_dim`.
    - `start_a`, `start_b`: the pair at the start, which was taken out of the base (PiSSA, Meng et al. 2024), or None.
    - `factor`: the factors of columns, computed before (`settled`), in place of `lora_magnitude`.
    """

    base: Float[AnyArray, "..."] | AbstractWeight = eqx.field(metadata=FROZEN)
    lora_a: Float[AnyArray, "..."]
    lora_b: Float[AnyArray, "..."]
    scale: float = eqx.field(static=True)
    lora_magnitude: Float[AnyArray, "..."] | None = None
    start_a: Float[AnyArray, "..."] | None = eqx.field(default=None, metadata=FROZEN)
    start_b: Float[AnyArray, "..."] | None = eqx.field(default=None, metadata=FROZEN)
    factor: Float[AnyArray, "..."] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the base."""
        return as_weight(self.base).shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the base, or of the pair if the base has none of its own."""
        dtype = as_weight(self.base).dtype
        return self.lora_a.dtype if dtype is None else dtype

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of all arrays, given the axes of the weight."""
        pair = pair_axes(words)
        columns = tuple(word for word in pair["lora_b"] if word != "rank")
        start = {"start_a": pair["lora_a"], "start_b": pair["lora_b"]}
        return {"base": words} | pair | {"lora_magnitude": columns} | start | {"factor": columns}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Merge base and pair into one array, computed in f32; its axes must be in the order of `part_axes`."""
        base = as_weight(self.base).array(*contracted)
        base, letters = base.astype(np.promote_types(base.dtype, np.float32)), self._letters
        pair = self.lora_a.astype(base.dtype), self.lora_b.astype(base.dtype)
        merged = base + self.scale * _einsum(letters.factors, letters.base, *pair)
        factor = self.column_factor()
        if factor is not None:
            merged = _einsum((letters.base, letters.columns), letters.base, merged, factor)
        return merged.astype(self.dtype)

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the base and by the pair, and add both products."""
        (base, pair), (into, out_of) = self.base_and_pair(), pair_plans(plan)
        y = contract(plan, x, base, options)
        low = contract(into, x, pair.lora_a, options._replace(dtype=x.dtype))
        y = y + contract(out_of, pair.scale * low, pair.lora_b, options)
        if pair.factor is None:
            return y
        # in f32 (at least): a factor near 1 would be 1 in 16 bits
        return (y * plan.spread_outputs(pair.factor, x.ndim)).astype(y.dtype)

    def base_and_pair(self) -> tuple[Array | AbstractWeight, LowRankPair]:
        """Return the base, which no gradient reaches, and the pair."""
        return lax.stop_gradient(self.base), LowRankPair(self.scale, self.lora_a, self.lora_b, self.column_factor())

    def column_factor(self) -> Float[Array, "..."] | None:
        """Return the factor of each column of the sum, in f32 (at least); None without magnitudes."""
        if self.lora_magnitude is None:
            return self.factor
        first, length = self.lengths()
        return (first + self.lora_magnitude.astype(first.dtype)) / jnp.maximum(length, jnp.finfo(length.dtype).tiny)

    def lengths(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Return the lengths of columns at the start and now, in f32 (at least), without gradients."""
        letters = self._letters
        base = as_weight(self.base).array(*range(letters.stack, len(letters.rows)))
        base = lax.stop_gradient(base.astype(np.promote_types(base.dtype, np.float32)))
        added = partial(_added_squares, letters, base, self.scale)
        own = _einsum((letters.base, letters.base), letters.columns, base, base)
        start = own if self.start_a is None or self.start_b is None else own + added(self.start_a, self.start_b)
        # a second factor of zeros adds exactly 0, so that a new pair changes nothing
        squares = start, own + added(self.lora_a, self.lora_b)
        first, length = (jnp.sqrt(jnp.maximum(square, 0.0)) for square in squares)
        return first, length

    @property
    def rank_axis(self) -> int:
        """Dimension of `lora_b` that is the rank."""
        return self._letters.stack

    def settled(self) -> "LowRank":
        """Return the weight with the factors of its columns in place of their magnitudes."""
        if self.lora_magnitude is None:
            return self
        return LowRank(self.base, self.lora_a, self.lora_b, self.scale, factor=self.column_factor())

    def first(self) -> Float[AnyArray, "..."] | AbstractWeight:
        """Return the weight before any training, of the same arrays: the base, with the pair taken out of it."""
        if self.start_a is None or self.start_b is None:
            return self.base
        return LowRank(self.base, self.start_a, self.start_b, self.scale)

    @property
    def _letters(self) -> _Letters:
        base = string.ascii_letters[: len(self.shape)]
        stack, split = self.lora_a.ndim + self.lora_b.ndim - len(base) - 2, self.lora_a.ndim - 1
        return _Letters(base, stack, base[:split], base[:stack] + base[split:])


def _einsum(operands: tuple[str, str], out: str, *arrays: Array) -> Array:
    return jnp.einsum(f"{','.join(operands)}->{out}", *arrays, precision=lax.Precision.HIGHEST)


def _added_squares(letters: _Letters, base: Array, scale: float, a: Array, b: Array) -> Array:
    """Return by how much `scale a b` changes the squared lengths of the base's columns, without their sum:

    `2 scale <base, a b> + scale^2 |a b|^2`, from `a^T base` and `a^T a`.
    """
    a, b = (lax.stop_gradient(factor.astype(base.dtype)) for factor in (a, b))
    of_a, of_b = letters.factors
    across = _einsum((of_a, letters.base), of_b, a, base)
    stack = letters.base[: letters.stack]
    gram = _einsum((of_a, f"{letters.rows}Y"), f"{stack}ZY", a, a)
    both = 2.0 * scale * across + scale**2 * _einsum((f"{stack}ZY", of_b.replace("Z", "Y")), of_b, gram, b)
    return _einsum((of_b, of_b), letters.columns, b, both)


def pair_axes(words: Axes) -> dict[str, Axes]:
    """Return the axes of the two factors of a weight's low-rank pair, given the axes of the weight."""
    split = product_axes(words)
    if split is None:
        raise ConfigError(f"A weight with the axes {' '.join(words)!r} is no matrix: it takes no low-rank update.")
    contracted, outputs = split
    each = words[: words[:1] == ("experts",)]  # every expert has a pair of its own
    return {"lora_a": (*each, *contracted, "rank"), "lora_b": (*each, "rank", *outputs)}


@lru_cache(maxsize=512)
def pair_plans(plan: ProductPlan, between: Axes = ("rank",)) -> tuple[ProductPlan, ProductPlan]:
    """Split the product of a weight in two, for its low-rank pair: to `rank`, and from `rank` to the outputs.

    `between`: all axes between the two factors, which end the first and begin the second one.
    """
    rows = [word for word in plan.left if word in plan.out]
    batch = [word for word in plan.right if word in plan.left and word in plan.out]
    contracted = [word for word in plan.right if word not in plan.out]
    columns = [word for word in plan.right if word not in plan.left]
    low = " ".join([*rows, *between])
    return (
        product_plan(f"{' '.join(plan.left)}, {' '.join([*batch, *contracted, *between])} -> {low}"),
        product_plan(f"{low}, {' '.join([*batch, *between, *columns])} -> {' '.join(plan.out)}"),
    )


def low_rank_weights(tree: PyTree) -> dict[str, LowRank]:
    """Return the weights of a tree that have a low-rank pair, by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, LowRank))
    return {path_name(path): node for path, node in leaves if isinstance(node, LowRank)}


def settled(tree: T) -> T:
    """Return a tree with the factors of columns in place of magnitudes, for products with parts of its weights."""
    nodes = {path: node.settled() for path, node in low_rank_weights(tree).items() if node.lora_magnitude is not None}
    return replaced(tree, nodes) if nodes else tree
