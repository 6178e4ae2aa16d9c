"""Division of the tokens and the vocabulary of the loss over a mesh, and the collectives of its devices."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from eqx_decoders.numerics.rings.reduce_scatter import ring_sum
from eqx_decoders.sharding.axes import names_of
from eqx_decoders.sharding.layout import Layout


class HeadWeights(NamedTuple):
    """Weights of the output head, or a tree of the same structure: gradients, or shardings.

    **Arguments:**

    - `kernel`: `[embed, vocab]`, or the embedding table, `[vocab, embed]`.
    - `bias`: bias of each id, or None.
    """

    kernel: Any
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """Division of the loss over a mesh: each device computes logits of its tokens and ids, and stores some features of
    the kernel.

    Features of other devices are gathered, for all ids of the device or for a part of them. The gradient of the
    gathered kernel is summed over the tokens of the device before it is summed over devices.

    **Arguments:**

    - `layout`: the mesh and its sharding rules.
    - `inside`: the contracted dimension of the kernel: 1 for the embedding table, otherwise 0.
    - `tokens`, `kernel`: sharding of `[batch, length]` and of the kernel.
    - `gradient`: sharding of the kernel's gradient: that of the kernel, except that dimension `spread` is also split
        over `data`.
    - `ids`, `features`, `rows`: mesh axes that split the vocabulary, the features of the kernel, and the tokens.
    """

    layout: Layout
    inside: int
    tokens: PartitionSpec
    kernel: PartitionSpec
    gradient: PartitionSpec
    spread: int | None
    ids: tuple[str, ...]
    features: tuple[str, ...]
    rows: tuple[str, ...]

    @classmethod
    def create(cls, layout: Layout, tied: bool, hidden: tuple[int, ...], kernel: tuple[int, ...]) -> "HeadSplit":
        inside = 1 if tied else 0
        tokens = layout.activation_spec("batch length vocab", (*hidden[:2], kernel[1 - inside]))
        *rows, ids = (names_of(group) for group in tokens)
        axes = "vocab embed" if tied else "embed vocab"
        spec = layout.weight_spec(axes, kernel, "kernel")
        features = tuple(name for name in names_of(spec[inside]) if name not in ids)
        split = (ids or None, features or None) if tied else (features or None, ids or None)
        specs = PartitionSpec(*tokens[:2]), PartitionSpec(*split)
        rows, spread = sum(rows, ()), layout.gradient_spec(axes, kernel)
        new = [index for index in range(2) if "data" in rows and spread[index] != spec[index]]
        gradient = (names_of(group) + ("data",) * (index in new) for index, group in enumerate(split))
        specs = *specs, PartitionSpec(*(names or None for names in gradient))
        return cls(layout, inside, *specs, spread=next(iter(new), None), ids=ids, features=features, rows=rows)

    @property
    def bias(self) -> PartitionSpec:
        """Sharding of the bias and of its gradient."""
        return PartitionSpec(self.ids or None)

    @property
    def head(self) -> HeadWeights:
        """Sharding of the weights of the head."""
        return HeadWeights(self.kernel, self.bias)

    @property
    def head_gradient(self) -> HeadWeights:
        """Sharding of the gradients of the head."""
        return HeadWeights(self.gradient, self.bias)

    def shard_map(self, function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Run `function(hidden, head, *arrays)` on each device. `arrays` have a value for each token.

        `outputs`: shardings of the results.
        """
        if self.layout.single:
            return function

        def on_mesh(hidden, head, *arrays):
            specs = (self.tokens, self.head, *(self.tokens for _ in arrays))
            return self.layout.shard_map(function, specs, outputs)(hidden, head, *arrays)

        return on_mesh

    def _count(self, names: tuple[str, ...]) -> int:
        return math.prod(self.layout.sizes[name] for name in names)

    def ids_of(self, kernel: Array) -> int:
        """Return the number of ids of a device."""
        return kernel.shape[1 - self.inside]

    def vocab(self, kernel: Array) -> int:
        """Return the number of ids of all devices."""
        return self.ids_of(kernel) * self._count(self.ids)

    def parts(self, kernel: Array, dtype: Any, head_bytes: int | None) -> tuple[int, int]:
        """Return the number of parts in which the ids of a device are gathered, and the number of ids of a part.

        The kernel and the gradient of a part need at most `head_bytes`, including the kernel of the next part if there
        are several. The number of ids of a part is a multiple of 128, the number of lanes of a TPU.
        """
        ids, embed = self.ids_of(kernel), kernel.shape[self.inside] * self._count(self.features)
        if head_bytes is None or not self.features:
            return 1, ids
        gathered, gradient = embed * jnp.dtype(dtype).itemsize, embed * 4  # float32
        if ids * (gathered + gradient) <= head_bytes:
            return 1, ids
        count = -(-ids * (2 * gathered + gradient) // head_bytes)
        width = min(ids, -(-ids // count // 128) * 128)
        return -(-ids // width), width

    def reduce_scatter(self, gradients: HeadWeights, dtype: Any) -> HeadWeights:
        """Sum the gradient of the kernel over the devices with other features; return the features of this device.

        The sum is computed in `dtype`, but in float32 for float16, because sums over tokens can exceed the largest
        float16 value. The gradient of the bias has no features and is not changed.
        """
        dtype, gradient = jnp.float32 if dtype == jnp.float16 else dtype, gradients.kernel
        for name in self.features:
            if name in self.rows:
                terms = gradient.astype(dtype)
                if self.layout.backend.gradient_rings:
                    sums = ring_sum(self.layout, terms, (name,), self.inside)
                else:
                    sums = lax.psum_scatter(terms, name, scatter_dimension=self.inside, tiled=True)
                gradient = sums.astype(gradient.dtype)
            else:  # the devices along this axis have the same tokens
                size = gradient.shape[self.inside] // self.layout.sizes[name]
                gradient = lax.dynamic_slice_in_dim(gradient, lax.axis_index(name) * size, size, self.inside)
        return HeadWeights(gradient, gradients.bias)

    def sum_over_rows(self, gradients: HeadWeights) -> HeadWeights:
        """Sum the gradients of `reduce_scatter` over the tokens of all other devices.

        Returns the gradients, split over `data` in dimension `spread` of the kernel if it is set. The gradient of the
        bias is summed in float32.
        """
        others, gradient = tuple(name for name in self.rows if name not in self.features), gradients.kernel
        if self.spread is not None:
            gradient = lax.psum_scatter(gradient, "data", scatter_dimension=self.spread, tiled=True)
            others = tuple(name for name in others if name != "data")
        gradient = lax.psum(gradient, others) if others else gradient
        return HeadWeights(gradient, None if gradients.bias is None else self.sum_rows(gradients.bias))

    def sum_over_ids(self, x: Any) -> Any:
        """Sum over the ids of all devices."""
        return lax.psum(x, self.ids) if self.ids else x

    def highest(self, x: Array) -> Array:
        """Return the maximum over the ids of all devices."""
        return lax.pmax(x, self.ids) if self.ids else x

    def lowest(self, x: Array) -> Array:
        """Return the minimum over the ids of all devices."""
        return lax.pmin(x, self.ids) if self.ids else x

    def sum_rows(self, sums: Any) -> Any:
        """Sum over the tokens of all devices."""
        return lax.psum(sums, self.rows) if self.rows else sums
