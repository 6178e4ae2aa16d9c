"""The output head on one device of a mesh: its tokens in tiles, and if need be its ids in parts."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_decoders.training.head.head_tiles import HeadForm, added, cut, joined, tile_length, zeros
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights


MAX_ID = np.iinfo(np.int32).max  # larger than all ids


class VocabPart(NamedTuple):
    """Weights of the head for some of a device's ids.

    **Arguments:**

    - `number`: its number among the device's parts.
    - `head`: all features of these ids.
    - `begin`, `first`: the first id, counted from the device's first, and from that of all devices.
    - `repeated`: ids that were in the part before, too.
    """

    number: Array | int
    head: HeadWeights
    begin: Array | int
    first: Array | int
    repeated: Array | int

    def without_repeated(self, x: Array, fill: float) -> Array:
        """Replace the values of ids of the part before by `fill`; ids are the last dimension of `x`."""
        if isinstance(self.repeated, int):
            return x
        return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < self.repeated, fill, x)


class LogitSums(NamedTuple):
    """Sums of each token over some ids.

    **Arguments:**

    - `highest`: the highest logit.
    - `best`: the lowest id with the highest logit, which is the result of `argmax`.
    - `total`: `sum exp(logit - highest)`.
    - `targets`: ids whose logits are returned, one or more per token: `[..., targets]`.
    - `picked`: the logits of the targets.
    - `weighted`: `sum exp(logit - highest) logit`, of which entropy is made; None where nobody asks for it.
    """

    highest: Array
    best: Array
    total: Array
    targets: Array
    picked: Array
    weighted: Array | None = None

    @classmethod
    def of(cls, logits: Array, targets: Array, part: VocabPart, entropy: bool = False) -> "LogitSums":
        """Sum over the ids of a part."""
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
    def none(cls, targets: Array, entropy: bool = False) -> "LogitSums":
        """Return the sums over no ids."""
        nothing = jnp.zeros(targets.shape[:-1], jnp.float32)
        highest, best = jnp.full(nothing.shape, -jnp.inf, jnp.float32), jnp.full(nothing.shape, MAX_ID, jnp.int32)
        picked = jnp.zeros(targets.shape, jnp.float32)
        return cls(highest, best, nothing, targets, picked, nothing if entropy else None)

    def joined(self, other: "LogitSums") -> "LogitSums":
        """Join the sums over two sets of ids; those of `other` are over at least one id."""
        top = jnp.maximum(self.highest, other.highest)
        one, two = (jnp.exp(each.highest - top) for each in (self, other))
        weighted = None
        if self.weighted is not None and other.weighted is not None:
            weighted = self.weighted * one + other.weighted * two
        best = jnp.minimum(*(jnp.where(sums.highest == top, sums.best, MAX_ID) for sums in (self, other)))
        total, picked = self.total * one + other.total * two, self.picked + other.picked
        return LogitSums(top, best, total, self.targets, picked, weighted)

    def over_ids(self, split: HeadSplit, known: Array) -> "LogitSums":
        """Join the sums over all devices' ids; the logit of a target that is not known is NaN."""
        highest = split.highest(self.highest)
        scale = jnp.exp(self.highest - highest)
        picked = jnp.where(known, split.over_ids(self.picked), jnp.nan)
        weighted = None if self.weighted is None else split.over_ids(self.weighted * scale)
        best = split.lowest(jnp.where(self.highest == highest, self.best, MAX_ID))
        return LogitSums(highest, best, split.over_ids(self.total * scale), self.targets, picked, weighted)

    @property
    def normalizer(self) -> Array:
        """The logarithm of `sum exp(logit)`."""
        return self.highest + jnp.log(self.total)

    @property
    def right(self) -> Array:
        """Whether each target is the result of `argmax`, in f32: the lowest id that has the highest logit."""
        return (self.targets == self.best[..., None]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceHead:
    """Some features of a device's ids, and how its logits are computed: part by part, tile by tile.

    Features of others are gathered for one part of the ids at a time, and those of the next part while one is
    multiplied.

    **Arguments:**

    - `form`: the map from hidden states to logits.
    - `split`: the split over the mesh.
    - `weights`: this device's part of the head.
    - `dtype`: that of hidden states, in which features are gathered.
    - `parts`, `width`: parts of its ids, and ids of each.
    - `length`, `tile`: positions of a row, and of a tile.
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
        """Return the head of a device with these hidden states `[batch, length, embed]`."""
        parts, width = split.parts(weights.kernel, hidden.dtype, form.tiles.head_bytes)
        batch, length, _ = hidden.shape
        tile = tile_length(batch, length, width, form.tiles.positions, form.layout.backend)
        return cls(form, split, weights, hidden.dtype, parts, width, length, tile)

    def cut(self, *tokens: Array) -> tuple[Array, ...]:
        """Cut what a device has for each token into tiles: `[tiles, batch, tile, ...]`."""
        return tuple(cut(x, self.tile) for x in tokens)

    def joined(self, tiles: Array) -> Array:
        """Join tiles again."""
        return joined(tiles, self.length)

    def is_large(self) -> bool:
        """Return whether the gathered kernel and its gradient take more than half of their bound."""
        most = self.form.tiles.head_bytes
        return most is not None and self.split.parts(self.weights.kernel, self.dtype, max(1, most // 2))[0] > 1

    def known(self, ids: Array) -> Array:
        """Return whether each id is in the vocabulary."""
        return (ids >= 0) & (ids < self.split.vocab(self.weights.kernel))

    def _begin(self, index: Array | int) -> Array | int:
        """Return the first id of a part; the last part may have some of the one before."""
        ids = self.split.ids_of(self.weights.kernel)
        return 0 if self.width == ids else jnp.minimum(index * self.width, ids - self.width)

    def gathered(self, index: Array | int) -> Array:
        """Gather all features of the ids of a part."""
        axis, kernel, features = 1 - self.split.inside, self.weights.kernel, self.split.features
        if self.width < kernel.shape[axis]:
            kernel = lax.dynamic_slice_in_dim(kernel, self._begin(index), self.width, axis)
        kernel = kernel.astype(self.dtype)
        return lax.all_gather(kernel, features, axis=self.split.inside, tiled=True) if features else kernel

    def part(self, index: Array | int, kernel: Array) -> VocabPart:
        """Return the part whose kernel `gathered` has returned."""
        ids, bias, begin = self.split.ids_of(self.weights.kernel), self.weights.bias, self._begin(index)
        repeated = 0 if ids % self.width == 0 else index * self.width - begin
        bias = bias if bias is None or self.width == ids else lax.dynamic_slice_in_dim(bias, begin, self.width)
        first = begin + (lax.axis_index(self.split.ids) * ids if self.split.ids else 0)
        return VocabPart(index, HeadWeights(kernel, bias), begin, first, repeated)

    def over_parts(
        self, step: Callable[[Any, VocabPart], Any], carry: Any, last: Array | None = None
    ) -> tuple[Any, Array]:
        """Go through the parts of the vocabulary: while one is multiplied, the next is gathered.

        `step(carry, part)` returns the next carry. Return the last one, and the kernel of the part that was reached
        last, with which another pass may begin: given that as `last`, it takes the parts backwards.
        """
        first, step_by = (0, 1) if last is None else (self.parts - 1, -1)

        def run_and_gather(before, index):
            carry, kernel = before
            return (step(carry, self.part(index, kernel)), self.gathered(index + step_by)), None

        kernel = self.gathered(first) if last is None else last
        if self.parts > 1:
            order = first + step_by * jnp.arange(self.parts - 1, dtype=jnp.int32)
            carry, kernel = lax.scan(run_and_gather, (carry, kernel), order)[0]
        return step(carry, self.part(self.parts - 1 - first, kernel)), kernel

    def over_logits(
        self, hidden: Array, values: Any, prepare: Callable[[VocabPart], Callable[[Array, Any, Any], Any]], begin: Any
    ) -> tuple[Any, Array]:
        """Compute something of all tiles' logits, one part of the vocabulary after another; see `over_parts`.

        `prepare(part)` returns a function of a tile's logits, its `values` and what the parts before have left (`begin`
        at first), which returns what this one leaves.
        """

        def over_part(before, part):
            (forth, _), (dimension, _) = self.form.kernels(part.head.kernel)
            step = prepare(part)

            def over_tile(_, tile):
                hidden, values, before = tile
                return None, step(self.form.logits(hidden, forth, dimension, part.head.bias), values, before)

            return lax.scan(over_tile, None, (hidden, values, before))[1]

        return self.over_parts(over_part, begin)

    def sums(self, hidden: Array, targets: Array, entropy: bool = False) -> tuple[LogitSums, Array]:
        """Compute `LogitSums` of all tiles over all ids; `targets` are `[tiles, batch, tile, targets]`.

        Return the gathered kernel of the last part, too.
        """

        def prepare(part: VocabPart) -> Any:
            return lambda logits, targets, before: before.joined(LogitSums.of(logits, targets, part, entropy))

        found, last = self.over_logits(hidden, targets, prepare, LogitSums.none(targets, entropy))
        return found.over_ids(self.split, self.known(targets)), last

    def gradients(
        self,
        hidden: Array,
        values: Any,
        prepare: Callable[[VocabPart], Callable[[Array, Any], Array]],
        last: Array | None = None,
    ) -> tuple[Array, HeadWeights]:
        """Compute the gradients by hidden states (tiles) and head, part by part of the vocabulary.

        `prepare(part)` returns a function of a tile's logits and its `values`, the gradient by the logits. `last` is
        that of `over_parts`.
        """
        form, split = self.form, self.split

        def over_part(carry, part):
            (forth, back), (dimension, other) = form.kernels(part.head.kernel)
            by_logits = prepare(part)

            def over_tile(total, tile):
                hidden, values, to_hidden = tile
                logits = form.logits(hidden, forth, dimension, part.head.bias)
                gradient = form.before_cap(logits, by_logits(logits, values))
                gradient = part.without_repeated(gradient, 0.0)
                total = added(total, form.weight_gradients(hidden, gradient, part.head.bias))
                return total, to_hidden + form.times(gradient.astype(self.dtype), back, other)

            def add(before, more):
                axis = 0 if before.ndim == 1 else 1 - split.inside
                more = lax.dynamic_slice_in_dim(before, part.begin, self.width, axis) + more
                return lax.dynamic_update_slice_in_dim(before, more, part.begin, axis)

            to_hidden, to_head = carry
            total, to_hidden = lax.scan(over_tile, zeros(part.head), (hidden, values, to_hidden))
            shares = split.scattered(total, self.dtype)
            return to_hidden, shares if self.parts == 1 else jax.tree.map(add, to_head, shares)

        to_hidden, to_head = self.over_parts(over_part, zeros((hidden, self.weights)), last)[0]
        return split.over_ids(to_hidden), split.summed(to_head)
