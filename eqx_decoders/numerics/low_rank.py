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
    """Einsum letters of a weight (`base`), of its rows and columns; Z is the rank.

    The first `stack` dimensions are batch dimensions (layers, experts), which rows and columns include.
    """

    base: str
    stack: int
    rows: str
    columns: str

    @property
    def factors(self) -> tuple[str, str]:
        """Letters of `lora_a` and `lora_b`."""
        return f"{self.rows}Z", f"{self.columns[: self.stack]}Z{self.columns[self.stack :]}"


class LowRank(AbstractWeight):
    """Weight with a low-rank update, `base + scale * lora_a lora_b`; the base is frozen (LoRA, Hu et al. 2021).

    Products do not merge the update: `x base + scale (x lora_a) lora_b`. `base` has no gradient.

    With magnitudes (DoRA, Liu et al. 2024), each column of the sum is multiplied by
    `factor = (|start| + lora_magnitude) / |sum|`, where `|start|` is the column's norm before training. Gradients do
    not flow through the norms.

    **Arguments:**

    - `base`: the weight, for example `embed heads head_dim`; an array or any `AbstractWeight`, such as a quantized one
        (QLoRA, Dettmers et al. 2023).
    - `lora_a`: the contracted axes of the weight, then `rank`: `embed rank`.
    - `lora_b`: `rank`, then the output axes of the weight: `rank heads head_dim`.
    - `scale`: multiplies `lora_a lora_b`.
    - `lora_magnitude`: column norms minus their values before training, `heads head_dim`; None without DoRA.
    - `start_a`, `start_b`: initial pair, if it was subtracted from the base (PiSSA, Meng et al. 2024); otherwise None.
    - `factor`: precomputed column factors, which replace `lora_magnitude` (see `settled`).
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
        """Dtype of the base, or of the pair if the base has none."""
        dtype = as_weight(self.base).dtype
        return self.lora_a.dtype if dtype is None else dtype

    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of all arrays, by field."""
        pair = pair_axes(weight_axes)
        columns = tuple(axis for axis in pair["lora_b"] if axis != "rank")
        start = {"start_a": pair["lora_a"], "start_b": pair["lora_b"]}
        return {"base": weight_axes} | pair | {"lora_magnitude": columns} | start | {"factor": columns}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Merge base and pair into one array, computed in float32.

        The axes of the weight must be the contracted axes and then the output axes, as `pair_axes` assumes.
        """
        base = as_weight(self.base).array(*contracted)
        base = base.astype(np.promote_types(base.dtype, np.float32))
        letters = self._letters
        lora_a = self.lora_a.astype(base.dtype)
        lora_b = self.lora_b.astype(base.dtype)
        merged = base + self.scale * _einsum(letters.factors, letters.base, lora_a, lora_b)
        factor = self.column_factor()
        if factor is not None:
            merged = _einsum((letters.base, letters.columns), letters.base, merged, factor)
        return merged.astype(self.dtype)

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the base and by the pair, and add both products."""
        base, pair = self.base_and_pair()
        plan_a, plan_b = pair_plans(plan)
        y = contract(plan, x, base, options)
        low_rank = contract(plan_a, x, pair.lora_a, options._replace(dtype=x.dtype))
        y = y + contract(plan_b, pair.scale * low_rank, pair.lora_b, options)
        if pair.factor is None:
            return y
        # in float32 (at least): a factor near 1 would be rounded to 1 in 16 bits
        return (y * plan.spread_outputs(pair.factor, x.ndim)).astype(y.dtype)

    def base_and_pair(self) -> tuple[Array | AbstractWeight, LowRankPair]:
        """Return the base, without a gradient, and the low-rank pair."""
        return lax.stop_gradient(self.base), LowRankPair(self.scale, self.lora_a, self.lora_b, self.column_factor())

    def column_factor(self) -> Float[Array, "..."] | None:
        """Return the factor of each column of the sum, in float32 (at least); None without magnitudes."""
        if self.lora_magnitude is None:
            return self.factor
        initial_norm, norm = self.column_norms()
        magnitude = initial_norm + self.lora_magnitude.astype(initial_norm.dtype)
        return magnitude / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)

    def column_norms(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Return the norms of columns before training and now, in float32 (at least), without gradients."""
        letters = self._letters
        base = as_weight(self.base).array(*range(letters.stack, len(letters.rows)))
        base = lax.stop_gradient(base.astype(np.promote_types(base.dtype, np.float32)))
        change = partial(_change_of_squared_norms, letters, base, self.scale)
        base_squares = _einsum((letters.base, letters.base), letters.columns, base, base)
        initial_squares = base_squares
        if self.start_a is not None and self.start_b is not None:
            initial_squares = base_squares + change(self.start_a, self.start_b)
        # if `lora_b` is zero the change is exactly 0, so that a new pair does not change the model
        squares = base_squares + change(self.lora_a, self.lora_b)
        return jnp.sqrt(jnp.maximum(initial_squares, 0.0)), jnp.sqrt(jnp.maximum(squares, 0.0))

    @property
    def rank_axis(self) -> int:
        """Index of the rank dimension of `lora_b`."""
        return self._letters.stack

    def settled(self) -> "LowRank":
        """Return the weight with column factors computed from its magnitudes."""
        if self.lora_magnitude is None:
            return self
        return LowRank(self.base, self.lora_a, self.lora_b, self.scale, factor=self.column_factor())

    def first(self) -> Float[AnyArray, "..."] | AbstractWeight:
        """Return the weight before training, from the same arrays: the base plus the initial pair, if there is one."""
        if self.start_a is None or self.start_b is None:
            return self.base
        return LowRank(self.base, self.start_a, self.start_b, self.scale)

    @property
    def _letters(self) -> _Letters:
        base = string.ascii_letters[: len(self.shape)]
        stack = self.lora_a.ndim + self.lora_b.ndim - len(base) - 2
        split = self.lora_a.ndim - 1
        return _Letters(base, stack, base[:split], base[:stack] + base[split:])


def _einsum(operands: tuple[str, str], out: str, *arrays: Array) -> Array:
    return jnp.einsum(f"{','.join(operands)}->{out}", *arrays, precision=lax.Precision.HIGHEST)


def _change_of_squared_norms(letters: _Letters, base: Array, scale: float, a: Array, b: Array) -> Array:
    """Return `2 scale <base, a b> + scale^2 |a b|^2`: the change of the base's squared column norms by `scale a b`.

    Computed from `a^T base` and `a^T a`, without an array of the size of the weight.
    """
    a, b = (lax.stop_gradient(factor.astype(base.dtype)) for factor in (a, b))
    a_letters, b_letters = letters.factors
    a_base = _einsum((a_letters, letters.base), b_letters, a, base)
    stack = letters.base[: letters.stack]
    gram = _einsum((a_letters, f"{letters.rows}Y"), f"{stack}ZY", a, a)
    gram_b = _einsum((f"{stack}ZY", b_letters.replace("Z", "Y")), b_letters, gram, b)
    return _einsum((b_letters, b_letters), letters.columns, b, 2.0 * scale * a_base + scale**2 * gram_b)


def pair_axes(weight_axes: Axes) -> dict[str, Axes]:
    """Return the axes of `lora_a` and `lora_b`, given the axes of the weight. Raises ConfigError if it is no matrix."""
    split = product_axes(weight_axes)
    if split is None:
        raise ConfigError(
            f"A weight with the axes {' '.join(weight_axes)!r} is not a matrix and cannot have a low-rank update. "
            "Select other weights."
        )
    contracted, outputs = split
    experts = weight_axes[: weight_axes[:1] == ("experts",)]  # every expert has a separate pair
    return {"lora_a": (*experts, *contracted, "rank"), "lora_b": (*experts, "rank", *outputs)}


@lru_cache(maxsize=512)
def pair_plans(plan: ProductPlan, between: Axes = ("rank",)) -> tuple[ProductPlan, ProductPlan]:
    """Return the products of `lora_a` and `lora_b` for the product of a weight: x to rank, and rank to the outputs.

    `between`: the axes between the two factors; they are the last axes of the first factor and the first of the second.
    """
    rows = [axis for axis in plan.left if axis in plan.out]
    batch = [axis for axis in plan.right if axis in plan.left and axis in plan.out]
    contracted = [axis for axis in plan.right if axis not in plan.out]
    columns = [axis for axis in plan.right if axis not in plan.left]
    low_rank = " ".join([*rows, *between])
    return (
        product_plan(f"{' '.join(plan.left)}, {' '.join([*batch, *contracted, *between])} -> {low_rank}"),
        product_plan(f"{low_rank}, {' '.join([*batch, *between, *columns])} -> {' '.join(plan.out)}"),
    )


def low_rank_weights(tree: PyTree) -> dict[str, LowRank]:
    """Return the `LowRank` weights of a tree, by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, LowRank))
    return {path_name(path): node for path, node in leaves if isinstance(node, LowRank)}


def settled(tree: T) -> T:
    """Return a tree whose DoRA weights have precomputed column factors.

    Needed before weights are sharded in a `shard_map`: column norms cannot be computed from a shard.
    """
    nodes = {path: node.settled() for path, node in low_rank_weights(tree).items() if node.lora_magnitude is not None}
    return replaced(tree, nodes) if nodes else tree
