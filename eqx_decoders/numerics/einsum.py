"""`einsum` and `grouped_products` of activations and weights, and `AbstractWeight`, the interface of weights.

A weight is a plain array or an `AbstractWeight`, and every product of a model with a weight goes through this module. A
plain array is cast when it is used, so that only one layer exists in the compute dtype at a time. Its product has two
implementations with equal results: `jnp.einsum`, and a flattened matrix product, which is two to eight times faster on
XLA's CPU backend.
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
from eqx_decoders.numerics.grouped_matmul import GroupedForm, grouped_arrays
from eqx_decoders.numerics.matmul import cast_in_loop, product
from eqx_decoders.numerics.product_plan import ProductPlan, product_plan
from eqx_decoders.numerics.rings.dense_product import multiply_with_ring
from eqx_decoders.numerics.rings.grouped_product import GroupRing, ring_groups
from eqx_decoders.sharding.axes import AXES, AnyArray, Axes
from eqx_decoders.sharding.layout import Layout


class ProductOptions(NamedTuple):
    """Options of a product: dtype of the result, and the layout (mesh and platform)."""

    dtype: np.dtype
    layout: Layout | None = None

    @property
    def flatten(self) -> bool:
        """Whether to compute `[rows, contracted] @ [contracted, out]`, which is fast on CPUs, as are its gradients.

        It merges dimensions, which needs communication if they are sharded over several mesh axes.
        """
        return self.layout is not None and self.layout.backend.flat_products

    def gathers(self, plan: ProductPlan, weight_size: int, x: Array) -> bool:
        """Return whether to all-gather the weight of a product before multiplying.

        It is gathered if there is a layout, if the weight has only logical axes, and if it has at most as many elements
        as the activation `x`.
        """
        return self.layout is not None and all(axis in AXES for axis in plan.right) and weight_size <= x.size


class LowRankPair(NamedTuple):
    """Low-rank update `scale * lora_a @ lora_b` of a weight, and a factor for each column of the sum (None: 1)."""

    scale: float
    lora_a: Any
    lora_b: Any
    factor: Any = None


class AbstractWeight(eqx.Module):
    """Weight that replaces an array: stored as several arrays (quantized, LoRA), or with a custom product."""

    # whether a product with all experts at once needs no further steps, as with a plain array
    plain_product: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype | None:
        """Dtype of the weight as an array; None if it has none, like a quantized weight."""

    @abstractmethod
    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of each field, in the order of the fields, given the axes of the weight."""

    @abstractmethod
    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the weight as one array, with the values that a product over the `contracted` dimensions uses."""

    @abstractmethod
    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Return the product of an activation and the weight, as `einsum` does. Shapes are checked already."""

    @classmethod
    def contract_groups(cls, x: Array, weights: "Sequence[Any]", counts: Array, form: GroupedForm) -> tuple[Array, ...]:
        """Multiply sorted rows by several weights of this class, as `grouped_products` does."""
        raise ConfigError(f"{cls.__name__} does not support grouped products: do not use it for weights of experts.")

    def base_and_pair(self) -> tuple[Any, LowRankPair | None]:
        """Return the weight without its low-rank pair, and the pair."""
        return self, None


class AbstractArrayWeight(AbstractWeight):
    """Weight that is stored as one array, `values`."""

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
    """Adapter from a plain array to `AbstractWeight`. Models contain the array itself."""

    plain_product: ClassVar[bool] = True

    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of the array."""
        return {"values": weight_axes}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the array."""
        return self.values

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the array, cast to the dtype of the activation."""
        if options.flatten and plan.contracted is not None:
            rows, matrix, shape = plan.flattened(x, self.values)
            return product(rows, matrix, transposed=plan.transposed, out_dtype=options.dtype).reshape(shape)
        weight = cast_in_loop(self.values, x.dtype)
        layout = options.layout
        if layout is not None and layout.backend.duplicates_single_row and plan.has_one_row(x):
            # for a single row, XLA:GPU would write all products to memory before it sums them
            two_rows = jnp.concatenate([x, x])
            return jnp.einsum(plan.letters, two_rows, weight, preferred_element_type=options.dtype)[:1]
        if layout is not None and options.gathers(plan, weight.size, x):
            result = multiply_with_ring(plan, x, weight, options.dtype, layout)
            if result is not None:
                return result
            weight = layout.gather_weight(weight, plan.right)
        return jnp.einsum(plan.letters, x, weight, preferred_element_type=options.dtype)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[ArrayWeight]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by several arrays."""
        return grouped_arrays(x, tuple(weight.values for weight in weights), counts, form)


class RingWeight(AbstractArrayWeight):
    """Shard of expert weights inside a `shard_map`: gathered for products; its gradient is a ring reduce-scatter."""

    ring: GroupRing = eqx.field(static=True)

    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of the array."""
        return {"values": weight_axes}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Gather the array."""
        return self.ring.gather(self.values)

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the gathered array."""
        return ArrayWeight(self.array()).contract(plan, x, options)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[RingWeight]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by several gathered arrays."""
        rings = tuple(weight.ring for weight in weights)
        return ring_groups(rings, form, x, tuple(weight.values for weight in weights), counts)


def as_weight(weight: Float[AnyArray, "..."] | AbstractWeight) -> AbstractWeight:
    """Return a weight of any kind as an `AbstractWeight`."""
    return weight if isinstance(weight, AbstractWeight) else ArrayWeight(weight)


def contract(plan: ProductPlan, x: Array, weight: Array | AbstractWeight, options: ProductOptions) -> Array:
    """Multiply an activation by a weight like `einsum`, with a parsed pattern."""
    abstract_weight = as_weight(weight)
    plan.check_shapes(x.shape, abstract_weight.shape)
    return abstract_weight.contract(plan, x, options)


def einsum(
    pattern: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."] | AbstractWeight,
    *,
    out_dtype: DTypeLike | None = None,
    layout: Layout | None = None,
) -> Float[Array, "..."]:
    """Multiply an activation by a weight, as in `"batch length embed, embed mlp -> batch length mlp"`.

    The weight is cast to the dtype of `x`. Sums are accumulated in float32 (at least) and returned in `out_dtype`. The
    gradients have the dtypes of `x` and of `weight`. Raises ConfigError for a malformed pattern, and for shapes that do
    not fit it.

    **Arguments:**

    - `pattern`: axes of x, of the weight and of the result; `...` stands for any number of axes of `x`.
    - `out_dtype`: dtype of the result; None: that of `x`.
    - `layout`: mesh and platform of the product. On a single CPU device, patterns of matrix products are flattened to
        a product of two matrices. On a mesh, a weight that is not larger than the activation is all-gathered; for a
        larger weight the partitioning is left to XLA.
    """
    dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    return contract(product_plan(pattern), x, weight, ProductOptions(dtype, layout))


def grouped_products(
    x: Float[Array, "rows inner"],
    weights: Sequence[Array | AbstractWeight],
    counts: Int[Array, "groups"],
    *,
    form: GroupedForm,
) -> tuple[Float[Array, "rows outer"], ...]:
    """Return `x[row] @ weight[group of row]` for each weight, as `jax.lax.ragged_dot` does.

    Weights are cast to the dtype of `x`; sums are accumulated in float32 (at least).

    **Arguments:**

    - `x`: rows sorted by group. The last `form.block` rows must not belong to a group. Rows that belong to no group may
        have any values, and so may their results and gradients.
    - `weights`: weights `groups inner outer`.
    - `counts`: number of rows of each group (`group_sizes` of `ragged_dot`).
    - `form`: implementation, from `choose_form`.
    """
    bases, pairs = zip(*(as_weight(weight).base_and_pair() for weight in weights), strict=True)
    bases = [as_weight(base) for base in bases]
    classes = dict.fromkeys(map(type, bases))  # weights of the same class are multiplied together
    outs = {
        cls: iter(cls.contract_groups(x, [base for base in bases if type(base) is cls], counts, form))
        for cls in classes
    }

    def add_pair(out: Array, pair: LowRankPair | None) -> Array:
        if pair is None:
            return out
        (low,) = grouped_products(x, (pair.lora_a,), counts, form=form)
        out = out + grouped_products(pair.scale * low, (pair.lora_b,), counts, form=form)[0]
        if pair.factor is None:
            return out
        return (out * jnp.repeat(pair.factor, counts, axis=0, total_repeat_length=len(out))).astype(out.dtype)

    return tuple(add_pair(next(outs[type(base)]), pair) for base, pair in zip(bases, pairs, strict=True))


def add_bias(x: Array, bias: Array | None) -> Array:
    """Return `x + bias` in the dtype of `x`; the bias has the trailing axes of `x`."""
    return x if bias is None else x + bias.astype(x.dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)


def scale(x: Array, factor: float) -> Array:
    """Return `x * factor`, or `x` itself if the factor is 1."""
    return x if factor == 1.0 else x * factor
