"""Products of activations and weights, through which every weight goes, and what every kind of weight can do.

A weight is a plain array or an `AbstractWeight`. A plain one is cast at its use, so that only the copy of one layer
exists in the compute dtype at a time. Its product has two forms with equal results: the plain one, and a flattened one
that XLA's CPU backend runs two to eight times faster.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from eqx_decoders.errors import ConfigError
from eqx_decoders.numerics.gradient_ring import GroupRing, gradient_ring, ring_groups, ring_product
from eqx_decoders.numerics.grouped_matmul import GroupedForm, grouped_arrays
from eqx_decoders.numerics.matmul import cast_in_loop, product
from eqx_decoders.numerics.product_plan import ProductPlan, product_plan
from eqx_decoders.sharding.axes import AXES, AnyArray, Axes
from eqx_decoders.sharding.layout import Layout


class ProductOptions(NamedTuple):
    """Options of a product: the dtype of its result, whether to flatten it, and the devices that multiply."""

    dtype: np.dtype
    flatten: bool = False
    layout: Layout | None = None

    def gathers(self, plan: ProductPlan, weight_size: int, x: Array) -> bool:
        """Return whether a weight is gathered for its product: on a mesh, if it is no larger than the activation."""
        return self.layout is not None and all(word in AXES for word in plan.right) and weight_size <= x.size


class LowRankPair(NamedTuple):
    """Low-rank update of a weight: `scale lora_a lora_b`, and the factors of the columns of their sum; None for 1."""

    scale: float
    lora_a: Any
    lora_b: Any
    factor: Any = None


class AbstractWeight(eqx.Module):
    """Weight that stands in place of an array: held in several arrays, or multiplied in a way of its own."""

    # whether the product with all experts at once takes no more steps than one with an array
    plain_product: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype | None:
        """Dtype of the weight as an array; None if its numbers have none of their own."""

    @abstractmethod
    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of each of its fields, in order, given the axes of the weight."""

    @abstractmethod
    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the weight as one array, with the numbers of products that contract these dimensions."""

    @abstractmethod
    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the weight, as `einsum` does; shapes have been checked."""

    @classmethod
    def contract_groups(cls, x: Array, weights: "Sequence[Any]", counts: Array, form: GroupedForm) -> tuple[Array, ...]:
        """Multiply sorted rows by several weights of this kind, as `grouped_products` does."""
        raise ConfigError(f"{cls.__name__} has no product by groups: experts can't have such weights.")

    def base_and_pair(self) -> tuple[Any, LowRankPair | None]:
        """Return the weight without its low-rank pair, and the pair."""
        return self, None


class AbstractArrayWeight(AbstractWeight):
    """Weight that is one array, `values`, however it is multiplied."""

    values: Float[AnyArray, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self.values.dtype


class ArrayWeight(AbstractArrayWeight):
    """Plain array as an `AbstractWeight`; models hold the array itself."""

    plain_product: ClassVar[bool] = True

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of the array."""
        return {"values": words}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the array."""
        return self.values

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the array, cast to its dtype."""
        if options.flatten and plan.contracted is not None:
            flat, matrix, shape = plan.flattened(x, self.values)
            return product(flat, matrix, transposed=plan.transposed, out_dtype=options.dtype).reshape(shape)
        weight, layout = cast_in_loop(self.values, x.dtype), options.layout
        if layout is not None and layout.backend.doubles_one_row and plan.has_one_row(x):
            twice = jnp.concatenate([x, x])
            return jnp.einsum(plan.letters, twice, weight, preferred_element_type=options.dtype)[:1]
        if layout is not None and options.gathers(plan, weight.size, x):
            ring = gradient_ring(plan, layout, x, weight)
            if ring is not None:
                return ring_product(plan, options.dtype, layout, ring, x, weight)
            weight = layout.gather_weight(weight, plan.right)
        return jnp.einsum(plan.letters, x, weight, preferred_element_type=options.dtype)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[ArrayWeight]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by several arrays at once."""
        return grouped_arrays(x, tuple(weight.values for weight in weights), counts, form)


class RingWeight(AbstractArrayWeight):
    """Part of experts on a device of a `shard_map`: gathered for products, and its gradient added up in a ring."""

    ring: GroupRing = eqx.field(static=True)

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of the part."""
        return {"values": words}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Gather the array."""
        return self.ring.gather(self.values)

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the array."""
        return ArrayWeight(self.array()).contract(plan, x, options)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[RingWeight]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by several arrays at once."""
        return ring_groups(tuple(w.ring for w in weights), form, x, tuple(w.values for w in weights), counts)


def as_weight(weight: Float[AnyArray, "..."] | AbstractWeight) -> AbstractWeight:
    """Return a weight of any kind as an `AbstractWeight`."""
    return weight if isinstance(weight, AbstractWeight) else ArrayWeight(weight)


def contract(plan: ProductPlan, x: Array, weight: Array | AbstractWeight, options: ProductOptions) -> Array:
    """Multiply an activation by a weight, as `einsum` does, by a parsed pattern."""
    some = as_weight(weight)
    plan.check_shapes(x.shape, some.shape)
    return some.contract(plan, x, options)


def einsum(
    pattern: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."] | AbstractWeight,
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

    Raises ConfigError for a malformed pattern, or for shapes that do not fit it.
    """
    dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    return contract(product_plan(pattern), x, weight, ProductOptions(dtype, flatten, layout))


def grouped_products(
    x: Float[Array, "rows inner"],
    weights: Sequence[Array | AbstractWeight],
    counts: Int[Array, "groups"],
    *,
    form: GroupedForm,
) -> tuple[Float[Array, "rows outer"], ...]:
    """Compute `x[r] @ weight[g]` for every row r of every group g, with each of some weights `groups inner outer`.

    Rows are sorted by group; `counts` has the number of rows of each. Rows beyond their sum may hold anything, and
    results and gradients do so there. Weights are cast to the dtype of `x` at their use; sums are accumulated in f32
    (at least).

    `form` is what `choose_form` chose; its last `form.block` rows must belong to no group.
    """
    bases, pairs = zip(*(as_weight(weight).base_and_pair() for weight in weights), strict=True)
    bases = [as_weight(base) for base in bases]
    kinds = dict.fromkeys(map(type, bases))  # weights of one kind are multiplied together
    outs = {
        kind: iter(kind.contract_groups(x, [base for base in bases if type(base) is kind], counts, form))
        for kind in kinds
    }

    def plus_pair(out: Array, pair: LowRankPair | None) -> Array:
        if pair is None:
            return out
        (low,) = grouped_products(x, (pair.lora_a,), counts, form=form)
        out = out + grouped_products(pair.scale * low, (pair.lora_b,), counts, form=form)[0]
        if pair.factor is None:
            return out
        return (out * jnp.repeat(pair.factor, counts, axis=0, total_repeat_length=len(out))).astype(out.dtype)

    return tuple(plus_pair(next(outs[type(base)]), pair) for base, pair in zip(bases, pairs, strict=True))


def add_bias(x: Array, bias: Array | None) -> Array:
    """Return `x + bias` in the dtype of `x`; the bias has the trailing axes of `x`."""
    return x if bias is None else x + bias.astype(x.dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)


def scale(x: Array, factor: float) -> Array:
    """Return `x * factor`, or `x` itself where that is 1."""
    return x if factor == 1.0 else x * factor
