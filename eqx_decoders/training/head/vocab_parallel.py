"""Tokens and vocabulary of the loss split over a mesh, and the collectives between its devices."""

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
    """Weights of the output head, or what belongs to them: their gradients, or how they are split.

    **Arguments:**

    - `kernel`: `[embed, vocab]`, or the table of the embedding, `[vocab, embed]`.
    - `bias`: added to the products of each id; None for none.
    """

    kernel: Any
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """Split of the loss over a mesh: each device has logits of its own tokens and ids, and some features of the kernel.

    The others' features are gathered, for all of its ids at once or for some at a time, and the gradient of what has
    been gathered is added up over all of its tokens before devices share it.

    **Arguments:**

    - `layout`: the mesh and its tables.
    - `inside`: the dimension of the kernel that is contracted, 1 if it is the embedding's table.
    - `tokens`, `kernel`: how `[batch, length]` and the kernel are split.
    - `gradient`: how the kernel's gradient is split: like the kernel, or in dimension `spread` over `data`, too.
    - `ids`, `features`, `rows`: mesh axes that split the vocabulary, the kernel's features and the tokens.
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
        words = "vocab embed" if tied else "embed vocab"
        spec = layout.weight_spec(words, kernel, "kernel")
        features = tuple(name for name in names_of(spec[inside]) if name not in ids)
        split = (ids or None, features or None) if tied else (features or None, ids or None)
        specs = PartitionSpec(*tokens[:2]), PartitionSpec(*split)
        rows, spread = sum(rows, ()), layout.gradient_spec(words, kernel)
        new = [index for index in range(2) if "data" in rows and spread[index] != spec[index]]
        gradient = (names_of(group) + ("data",) * (index in new) for index, group in enumerate(split))
        specs = *specs, PartitionSpec(*(names or None for names in gradient))
        return cls(layout, inside, *specs, spread=next(iter(new), None), ids=ids, features=features, rows=rows)

    @property
    def bias(self) -> PartitionSpec:
        """How the bias and its gradient are split."""
        return PartitionSpec(self.ids or None)

    @property
    def head(self) -> HeadWeights:
        """How the weights of the head are split."""
        return HeadWeights(self.kernel, self.bias)

    @property
    def head_gradient(self) -> HeadWeights:
        """How the gradients of the head are split."""
        return HeadWeights(self.gradient, self.bias)

    def mapped(self, function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Map `function(hidden, head, *of tokens)` over the devices' parts; `outputs` are the specs of results."""
        if self.layout.single:
            return function

        def everywhere(hidden, head, *others):
            specs = (self.tokens, self.head, *(self.tokens for _ in others))
            return self.layout.shard_map(function, specs, outputs)(hidden, head, *others)

        return everywhere

    def _count(self, names: tuple[str, ...]) -> int:
        return math.prod(self.layout.sizes[name] for name in names)

    def ids_of(self, kernel: Array) -> int:
        """Return the number of a device's ids."""
        return kernel.shape[1 - self.inside]

    def vocab(self, kernel: Array) -> int:
        """Return the number of ids of all devices."""
        return self.ids_of(kernel) * self._count(self.ids)

    def parts(self, kernel: Array, dtype: Any, most: int | None) -> tuple[int, int]:
        """Return in how many parts a device's ids are gathered, and ids of each.

        A part's kernel and gradient take at most `most` bytes, with the kernel of the next part if there are several;
        ids of a part are rounded up to 128, the lanes of a TPU.
        """
        ids, embed = self.ids_of(kernel), kernel.shape[self.inside] * self._count(self.features)
        if most is None or not self.features:
            return 1, ids
        gathered, gradient = embed * jnp.dtype(dtype).itemsize, embed * 4  # added up in f32
        if ids * (gathered + gradient) <= most:
            return 1, ids
        count = -(-ids * (2 * gathered + gradient) // most)
        width = min(ids, -(-ids // count // 128) * 128)
        return -(-ids // width), width

    def scattered(self, gradients: HeadWeights, dtype: Any) -> HeadWeights:
        """Sum over the devices that share the kernel's features, in `dtype`; return this device's features.

        In float32 for float16: these are sums over tokens, not yet means, and may be above its largest number. The
        bias has no features, and waits for `summed`.
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
            else:  # its devices have the same tokens
                size = gradient.shape[self.inside] // self.layout.sizes[name]
                gradient = lax.dynamic_slice_in_dim(gradient, lax.axis_index(name) * size, size, self.inside)
        return HeadWeights(gradient, gradients.bias)

    def summed(self, gradients: HeadWeights) -> HeadWeights:
        """Sum scattered gradients over all other devices' tokens; return them, or this device's part of the kernel's.

        Those of the bias are in float32 throughout.
        """
        others, gradient = tuple(name for name in self.rows if name not in self.features), gradients.kernel
        if self.spread is not None:
            gradient = lax.psum_scatter(gradient, "data", scatter_dimension=self.spread, tiled=True)
            others = tuple(name for name in others if name != "data")
        gradient = lax.psum(gradient, others) if others else gradient
        return HeadWeights(gradient, None if gradients.bias is None else self.over_rows(gradients.bias))

    def over_ids(self, x: Any) -> Any:
        """Sum over all devices' ids."""
        return lax.psum(x, self.ids) if self.ids else x

    def highest(self, x: Array) -> Array:
        """Return the maximum over all devices' ids."""
        return lax.pmax(x, self.ids) if self.ids else x

    def lowest(self, x: Array) -> Array:
        """Return the minimum over all devices' ids."""
        return lax.pmin(x, self.ids) if self.ids else x

    def over_rows(self, sums: Any) -> Any:
        """Sum over all devices' tokens."""
        return lax.psum(sums, self.rows) if self.rows else sums
