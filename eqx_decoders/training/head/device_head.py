"""The output head on one device of a mesh: tiles of its tokens and, if necessary, parts of its vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_decoders.training.head.head_tiles import (
    HeadForm,
    add_head_gradients,
    float32_zeros,
    join_tiles,
    split_tiles,
    tile_length,
)
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights


MAX_ID = np.iinfo(np.int32).max  # not less than any id


class VocabPart(NamedTuple):
    """Part of a device's vocabulary, with the weights of the head.

    **Arguments:**

    - `number`: number of the part on the device.
    - `head`: the weights, with all features.
    - `begin`, `first`: the first id of the part, relative to the first id of the device, and in the vocabulary.
    - `repeated`: number of first ids that are also in the previous part.
    """

    number: Array | int
    head: HeadWeights
    begin: Array | int
    first: Array | int
    repeated: Array | int

    def without_repeated(self, x: Array, fill: float) -> Array:
        """Replace values of ids that are also in the previous part with `fill`. The last dimension of `x` is ids."""
        if isinstance(self.repeated, int):
            return x
        return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < self.repeated, fill, x)


class LogitSums(NamedTuple):
    """Reductions of the logits of each token over a set of ids.

    **Arguments:**

    - `highest`: the highest logit.
    - `best`: the lowest id with the highest logit, which is the result of `argmax`.
    - `total`: `sum exp(logit - highest)`.
    - `targets`: ids whose logits are returned, one or more per token: `[..., targets]`.
    - `picked`: the logits of the targets.
    - `weighted`: `sum exp(logit - highest) logit`, for the entropy; None if it is not requested.
    """

    highest: Array
    best: Array
    total: Array
    targets: Array
    picked: Array
    weighted: Array | None = None

    @classmethod
    def of(cls, logits: Array, targets: Array, part: VocabPart, entropy: bool = False) -> "LogitSums":
        """Compute the reductions over the ids of a part."""
        logits, ids = part.without_repeated(logits, -jnp.inf), targets - part.first
        inside = (ids >= part.repeated) & (ids < logits.shape[-1])
        highest = jnp.max(logits, axis=-1)
        # instead of `argmax`: XLA computes this minimum and the sum of exponentials in one pass over the logits
        order = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        best = part.first + jnp.min(jnp.where(logits == highest[..., None], order, MAX_ID - part.first), axis=-1)
        terms = jnp.exp(logits - highest[..., None])
        weighted = jnp.sum(jnp.where(terms > 0, terms * logits, 0.0), axis=-1) if entropy else None
        picked = jnp.where(inside, jnp.take_along_axis(logits, ids, axis=-1, mode="clip"), 0.0)
        return cls(highest, best, jnp.sum(terms, axis=-1), targets, picked, weighted)

    @classmethod
    def empty(cls, targets: Array, entropy: bool = False) -> "LogitSums":
        """Return the reductions over no ids."""
        zero = jnp.zeros(targets.shape[:-1], jnp.float32)
        highest, best = jnp.full(zero.shape, -jnp.inf, jnp.float32), jnp.full(zero.shape, MAX_ID, jnp.int32)
        picked = jnp.zeros(targets.shape, jnp.float32)
        return cls(highest, best, zero, targets, picked, zero if entropy else None)

    def merge(self, other: "LogitSums") -> "LogitSums":
        """Combine the reductions over two sets of ids. The set of `other` must not be empty."""
        highest = jnp.maximum(self.highest, other.highest)
        own_scale, other_scale = (jnp.exp(sums.highest - highest) for sums in (self, other))
        weighted = None
        if self.weighted is not None and other.weighted is not None:
            weighted = self.weighted * own_scale + other.weighted * other_scale
        best = jnp.minimum(*(jnp.where(sums.highest == highest, sums.best, MAX_ID) for sums in (self, other)))
        total = self.total * own_scale + other.total * other_scale
        return LogitSums(highest, best, total, self.targets, self.picked + other.picked, weighted)

    def over_ids(self, split: HeadSplit, known: Array) -> "LogitSums":
        """Combine the reductions of all devices. The logits of targets that are not `known` become NaN."""
        highest = split.highest(self.highest)
        scale = jnp.exp(self.highest - highest)
        picked = jnp.where(known, split.sum_over_ids(self.picked), jnp.nan)
        weighted = None if self.weighted is None else split.sum_over_ids(self.weighted * scale)
        best = split.lowest(jnp.where(self.highest == highest, self.best, MAX_ID))
        return LogitSums(highest, best, split.sum_over_ids(self.total * scale), self.targets, picked, weighted)

    @property
    def normalizer(self) -> Array:
        """Logarithm of `sum exp(logit)`."""
        return self.highest + jnp.log(self.total)

    @property
    def correct(self) -> Array:
        """1.0 where a target is the result of `argmax` (the lowest id with the highest logit), otherwise 0.0."""
        return (self.targets == self.best[..., None]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceHead:
    """The head on a device: computes logits part by part of the vocabulary, and tile by tile of the tokens.

    The kernel of a part is gathered from the devices that hold its features, while the previous part is multiplied.

    **Arguments:**

    - `form`: the function from hidden states to logits.
    - `split`: the division over the mesh.
    - `weights`: the weights of the head on this device.
    - `dtype`: dtype of the hidden states, in which kernels are gathered.
    - `parts`, `width`: number of parts of the device's vocabulary, and number of ids of a part.
    - `length`, `tile`: number of positions of a sequence, and of a tile.
    """

    form: HeadForm
    split: HeadSplit
    weights: HeadWeights
    dtype: Any
    parts: int
    width: int
    length: int
    tile: int

    @classmethod
    def create(cls, form: HeadForm, split: HeadSplit, hidden: Array, weights: HeadWeights) -> "DeviceHead":
        """Return the head of a device for hidden states `[batch, length, embed]`."""
        parts, width = split.parts(weights.kernel, hidden.dtype, form.tiles.head_bytes)
        batch, length, _ = hidden.shape
        tile = tile_length(batch, length, width, form.tiles.positions, form.layout.backend)
        return cls(form, split, weights, hidden.dtype, parts, width, length, tile)

    def split_tiles(self, *tokens: Array) -> tuple[Array, ...]:
        """Split arrays with a value for each token into tiles: `[tiles, batch, tile, ...]`."""
        return tuple(split_tiles(x, self.tile) for x in tokens)

    def join_tiles(self, tiles: Array) -> Array:
        """Join the tiles of `split_tiles`."""
        return join_tiles(tiles, self.length)

    def is_large(self) -> bool:
        """Return whether the gathered kernel and its gradient need more than half of `head_bytes`."""
        head_bytes = self.form.tiles.head_bytes
        if head_bytes is None:
            return False
        return self.split.parts(self.weights.kernel, self.dtype, max(1, head_bytes // 2))[0] > 1

    def known(self, ids: Array) -> Array:
        """Return whether each id is in the vocabulary."""
        return (ids >= 0) & (ids < self.split.vocab(self.weights.kernel))

    def _begin(self, index: Array | int) -> Array | int:
        """Return the first id of a part, relative to the device. The last part may overlap with the previous one."""
        ids = self.split.ids_of(self.weights.kernel)
        return 0 if self.width == ids else jnp.minimum(index * self.width, ids - self.width)

    def gather_kernel(self, index: Array | int) -> Array:
        """Gather the kernel of a part, with all features."""
        axis, kernel, features = 1 - self.split.inside, self.weights.kernel, self.split.features
        if self.width < kernel.shape[axis]:
            kernel = lax.dynamic_slice_in_dim(kernel, self._begin(index), self.width, axis)
        kernel = kernel.astype(self.dtype)
        return lax.all_gather(kernel, features, axis=self.split.inside, tiled=True) if features else kernel

    def part(self, index: Array | int, kernel: Array) -> VocabPart:
        """Return a part, given its gathered kernel."""
        ids, bias, begin = self.split.ids_of(self.weights.kernel), self.weights.bias, self._begin(index)
        repeated = 0 if ids % self.width == 0 else index * self.width - begin
        bias = bias if bias is None or self.width == ids else lax.dynamic_slice_in_dim(bias, begin, self.width)
        first = begin + (lax.axis_index(self.split.ids) * ids if self.split.ids else 0)
        return VocabPart(index, HeadWeights(kernel, bias), begin, first, repeated)

    def over_parts(
        self, step: Callable[[Any, VocabPart], Any], carry: Any, last: Array | None = None
    ) -> tuple[Any, Array]:
        """Run `step(carry, part)`, which returns the next carry, for all parts of the vocabulary.

        While a part is multiplied, the kernel of the next part is gathered. Returns the last carry, and the kernel of
        the last part. If this kernel is passed as `last` to another call, the parts are visited in reverse order.
        """
        first, direction = (0, 1) if last is None else (self.parts - 1, -1)

        def run_and_gather(before, index):
            carry, kernel = before
            return (step(carry, self.part(index, kernel)), self.gather_kernel(index + direction)), None

        kernel = self.gather_kernel(first) if last is None else last
        if self.parts > 1:
            order = first + direction * jnp.arange(self.parts - 1, dtype=jnp.int32)
            carry, kernel = lax.scan(run_and_gather, (carry, kernel), order)[0]
        return step(carry, self.part(self.parts - 1 - first, kernel)), kernel

    def over_logits(
        self, hidden: Array, values: Any, prepare: Callable[[VocabPart], Callable[[Array, Any, Any], Any]], begin: Any
    ) -> tuple[Any, Array]:
        """Reduce the logits of all tiles, over all parts of the vocabulary; see `over_parts`.

        `prepare(part)` returns a function of the logits of a tile, its `values` and the result of the previous parts
        (initially `begin`), which returns the new result.
        """

        def over_part(before, part):
            (kernel, _), (dimension, _) = self.form.kernels(part.head.kernel)
            step = prepare(part)

            def over_tile(_, tile):
                hidden, values, before = tile
                return None, step(self.form.logits(hidden, kernel, dimension, part.head.bias), values, before)

            return lax.scan(over_tile, None, (hidden, values, before))[1]

        return self.over_parts(over_part, begin)

    def sums(self, hidden: Array, targets: Array, entropy: bool = False) -> tuple[LogitSums, Array]:
        """Compute `LogitSums` of all tiles over all ids, and return them with the gathered kernel of the last part.

        `targets`: `[tiles, batch, tile, targets]`.
        """

        def prepare(part: VocabPart) -> Any:
            return lambda logits, targets, before: before.merge(LogitSums.of(logits, targets, part, entropy))

        found, last = self.over_logits(hidden, targets, prepare, LogitSums.empty(targets, entropy))
        return found.over_ids(self.split, self.known(targets)), last

    def gradients(
        self,
        hidden: Array,
        values: Any,
        prepare: Callable[[VocabPart], Callable[[Array, Any], Array]],
        last: Array | None = None,
    ) -> tuple[Array, HeadWeights]:
        """Compute the gradients with respect to hidden states (as tiles) and head, part by part of the vocabulary.

        `prepare(part)` returns a function from the logits of a tile and its `values` to the gradient with respect to
        the logits. `last`: see `over_parts`.
        """
        form, split = self.form, self.split

        def over_part(carry, part):
            (kernel, backward_kernel), (dimension, backward_dimension) = form.kernels(part.head.kernel)
            logit_gradient = prepare(part)

            def over_tile(total, tile):
                hidden, values, to_hidden = tile
                logits = form.logits(hidden, kernel, dimension, part.head.bias)
                gradient = form.product_gradient(logits, logit_gradient(logits, values))
                gradient = part.without_repeated(gradient, 0.0)
                total = add_head_gradients(total, form.weight_gradients(hidden, gradient, part.head.bias))
                return total, to_hidden + form.multiply(
                    gradient.astype(self.dtype), backward_kernel, backward_dimension
                )

            def add(total, update):
                axis = 0 if total.ndim == 1 else 1 - split.inside
                update = lax.dynamic_slice_in_dim(total, part.begin, self.width, axis) + update
                return lax.dynamic_update_slice_in_dim(total, update, part.begin, axis)

            to_hidden, to_head = carry
            total, to_hidden = lax.scan(over_tile, float32_zeros(part.head), (hidden, values, to_hidden))
            shares = split.reduce_scatter(total, self.dtype)
            return to_hidden, shares if self.parts == 1 else jax.tree.map(add, to_head, shares)

        to_hidden, to_head = self.over_parts(over_part, float32_zeros((hidden, self.weights)), last)[0]
        return split.sum_over_ids(to_hidden), split.sum_over_rows(to_head)
