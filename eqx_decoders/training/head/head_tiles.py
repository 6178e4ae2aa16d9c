"""Logits and their gradients a tile of positions, and if need be a part of the vocabulary, at a time."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_decoders.errors import CheckedFields, PositiveFloat, check, check_integer
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.matmul import matmul, reads_weights_by_row, row_major_transpose
from eqx_decoders.sharding.backend import Backend
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights, VocabPart


# Positions below which a tile is not worth reading the whole kernel for.
_TILE_LEAST = 64


class HeadTiles(NamedTuple):
    """Parts in which head and loss are computed together.

    **Arguments:**

    - `positions`: of each sequence on a device in a tile; None: so many that their logits take 64 MB there, 256 MB on a
        TPU, 1 GB on a GPU.
    - `head_bytes`: bound of a device's gathered kernel and its gradient, with the kernel of the next part if there are
        several; None: no bound.
    """

    positions: int | None = None
    head_bytes: int | None = None


def tile_length(batch: int, length: int, vocab: int, tile: int | None, backend: Backend) -> int:
    """Return the requested length, or the largest within the bound (but no sliver), evened out over the tiles.

    Logits of a tile are small beside the weights, and large enough that few gradients of the kernel are added: an
    accelerator reads and writes that sum as fast as it multiplies from about a thousand positions on.
    """
    if tile is None:
        tile = max(_TILE_LEAST, backend.loss_tile_bytes // max(1, 4 * batch * vocab))
        tile = math.ceil(length / max(1, math.ceil(length / tile)))
    return max(1, min(tile, length))


def cut(x: Any, tile: int) -> Any:
    """Cut `[batch, length, ...]` into `[tiles, batch, tile, ...]`, zeros filling the last one; the batch stays."""
    missing = -x.shape[1] % tile
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // tile, tile, *x.shape[2:]), 1, 0)


def joined(tiles: Any, length: int) -> Any:
    """Join the tiles of `cut` again."""
    x = jnp.moveaxis(tiles, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def zeros(like: Any) -> Any:
    """Return zeros in f32, in which gradients are added up."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)


def added(one: HeadWeights, other: HeadWeights) -> HeadWeights:
    """Add gradients of the head."""
    return jax.tree.map(jnp.add, one, other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadForm(CheckedFields):
    """The map from hidden states to logits, `cap(hidden @ kernel + bias) / temperature`, and its gradients.

    Raises ConfigError for options out of range.
    """

    tied: bool
    soft_cap: PositiveFloat | None = None
    temperature: PositiveFloat = 1.0
    flatten: bool = False
    tiles: HeadTiles = HeadTiles()
    layout: Layout = Layout()

    def __post_init__(self):
        super().__post_init__()
        if self.tiles.positions is not None:
            check_integer("HeadTiles.positions", self.tiles.positions)
        if self.tiles.head_bytes is not None:
            check_integer("HeadTiles.head_bytes", self.tiles.head_bytes)

    def check_kernel(self, name: str, hidden: Array, kernel: Array) -> None:
        """Raise ConfigError if the kernel does not fit the hidden states."""
        shape = kernel.shape
        rule = f"{name} kernel of shape {shape} with tied={self.tied} does not fit hidden {hidden.shape}:"
        rule = f"{rule} it must be [vocab, embed] if tied, otherwise [embed, vocab]."
        check(shape[1 if self.tied else 0] == hidden.shape[2], rule)

    def split(self, hidden: Array, kernel: Array) -> HeadSplit:
        """Split tokens and vocabulary over the mesh."""
        return HeadSplit.create(self.layout, self.tied, hidden.shape, kernel.shape)

    def parts(self, split: HeadSplit, hidden: Array, kernel: Array) -> tuple[int, int]:
        """Return in how many parts a device takes its ids, and ids of each."""
        return split.parts(kernel, hidden.dtype, self.tiles.head_bytes)

    def is_large(self, split: HeadSplit, hidden: Array, kernel: Array) -> bool:
        """Return whether the gathered kernel and its gradient take more than half of their bound."""
        most = self.tiles.head_bytes
        return most is not None and split.parts(kernel, hidden.dtype, most // 2)[0] > 1

    def tile_length(self, hidden: Array, vocab: int) -> int:
        """Return the positions of a tile."""
        return tile_length(hidden.shape[0], hidden.shape[1], vocab, self.tiles.positions, self.layout.backend)

    def cut(self, split: HeadSplit, head: HeadWeights, hidden: Array, *others: Array) -> tuple[Array, ...]:
        """Cut one device's tokens into tiles: `[tiles, batch, tile, ...]`."""
        size = self.tile_length(hidden, self.parts(split, hidden, head.kernel)[1])
        return tuple(cut(x, size) for x in (hidden, *others))

    def kernels(self, kernel):
        """Return the kernel for the logits and for the gradient of hidden, and the dimensions to contract."""
        inside = 1 if self.tied else 0
        if self.flatten and reads_weights_by_row(kernel.dtype):
            pair = (row_major_transpose(kernel), kernel)
            return (pair if self.tied else pair[::-1]), (0, 0)
        return (kernel, kernel), (inside, 1 - inside)

    def logits(self, hidden, kernel, dimension, bias):
        """Compute the logits of a tile, in f32."""
        logits = add_bias(self.times(hidden, kernel, dimension), bias)
        logits = logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def before_cap(self, logits, gradient):
        """Compute the gradient by the products, before cap and temperature, from that by the logits."""
        if self.temperature != 1.0:
            logits, gradient = logits * self.temperature, gradient / self.temperature
        return gradient if self.soft_cap is None else gradient * (1 - (logits / self.soft_cap) ** 2)

    def times(self, x, kernel, dimension):
        """Multiply `[batch, tile, n]` by the kernel over n, in f32."""
        if not self.flatten:
            return lax.dot_general(x, kernel, (((2,), (dimension,)), ((), ())), preferred_element_type=jnp.float32)
        batch, tile, inner = x.shape
        product = matmul(x.reshape(batch * tile, inner), kernel, (1, dimension), jnp.float32)
        return product.reshape(batch, tile, kernel.shape[1 - dimension])

    def weight_gradients(self, hidden, gradient, bias):
        """Compute the gradients of the kernel, and of the bias if there is one, in f32."""
        to_bias = None if bias is None else jnp.sum(gradient, axis=(0, 1))
        return HeadWeights(self.outer(hidden, gradient.astype(hidden.dtype)), to_bias)

    def outer(self, hidden, gradient):
        """Compute the gradient of the kernel, in f32."""
        a, b = (gradient, hidden) if self.tied else (hidden, gradient)
        if not self.flatten:
            return lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
        rows = a.shape[0] * a.shape[1]
        return matmul(a.reshape(rows, a.shape[2]), b.reshape(rows, b.shape[2]), (0, 0), jnp.float32)


class LogitSums(NamedTuple):
    """Sums of each token over some ids.

    **Arguments:**

    - `highest`: the highest logit.
    - `total`: `sum exp(logit - highest)`.
    - `picked`: the logits of the targets, of which a token may have several: `[..., targets]`.
    - `weighted`: `sum exp(logit - highest) logit`, of which entropy is made; None where nobody asks for it.
    """

    highest: Array
    total: Array
    picked: Array
    weighted: Array | None = None

    @classmethod
    def of(cls, logits: Array, targets: Array, part: VocabPart, entropy: bool = False) -> "LogitSums":
        """Sum over the ids of a part."""
        logits, ids = part.without_repeated(logits, -jnp.inf), targets - part.first
        inside = (ids >= part.repeated) & (ids < logits.shape[-1])
        highest = jnp.max(logits, axis=-1)
        terms = jnp.exp(logits - highest[..., None])
        weighted = jnp.sum(jnp.where(terms > 0, terms * logits, 0.0), axis=-1) if entropy else None
        picked = jnp.where(inside, jnp.take_along_axis(logits, ids, axis=-1, mode="clip"), 0.0)
        return cls(highest, jnp.sum(terms, axis=-1), picked, weighted)

    @classmethod
    def none(cls, targets: Array, entropy: bool = False) -> "LogitSums":
        """Return the sums over no ids."""
        nothing = jnp.zeros(targets.shape[:-1], jnp.float32)
        picked = jnp.zeros(targets.shape, jnp.float32)
        return cls(jnp.full(nothing.shape, -jnp.inf, jnp.float32), nothing, picked, nothing if entropy else None)

    def joined(self, other: "LogitSums") -> "LogitSums":
        """Join the sums over two sets of ids; those of `other` are over at least one id."""
        top = jnp.maximum(self.highest, other.highest)
        one, two = (jnp.exp(each.highest - top) for each in (self, other))
        weighted = None
        if self.weighted is not None and other.weighted is not None:
            weighted = self.weighted * one + other.weighted * two
        return LogitSums(top, self.total * one + other.total * two, self.picked + other.picked, weighted)

    def over_ids(self, split: HeadSplit, known: Array) -> "LogitSums":
        """Join the sums over all devices' ids; the logit of a target that is not known is NaN."""
        highest = split.highest(self.highest)
        scale = jnp.exp(self.highest - highest)
        picked = jnp.where(known, split.over_ids(self.picked), jnp.nan)
        weighted = None if self.weighted is None else split.over_ids(self.weighted * scale)
        return LogitSums(highest, split.over_ids(self.total * scale), picked, weighted)

    @property
    def normalizer(self) -> Array:
        """The logarithm of `sum exp(logit)`."""
        return self.highest + jnp.log(self.total)

    @property
    def right(self) -> Array:
        """Whether each target has the highest logit; a tie counts, in f32."""
        return (self.picked >= self.highest[..., None]).astype(jnp.float32)


def over_parts(
    form: HeadForm,
    split: HeadSplit,
    hidden: Array,
    head: HeadWeights,
    step: Callable[[Any, VocabPart, Array | int], Any],
    carry: Any,
    last: Array | None = None,
) -> tuple[Any, Array]:
    """Go through the parts of the vocabulary: while one is multiplied, the next is gathered.

    `step(carry, part, index)` returns the next carry. Return the last one, and the kernel of the part that was reached
    last, with which another pass may begin: given that as `last`, it takes the parts backwards.
    """
    count, width = form.parts(split, hidden, head.kernel)
    first, step_by = (0, 1) if last is None else (count - 1, -1)

    def gather(index):
        return split.gathered(head, index, width, hidden.dtype)

    def run(carry, index, kernel):
        return step(carry, split.part(head, index, width, kernel), index)

    def run_and_gather(before, index):
        carry, kernel = before
        return (run(carry, index, kernel), gather(index + step_by)), None

    kernel = gather(first) if last is None else last
    if count > 1:
        order = first + step_by * jnp.arange(count - 1, dtype=jnp.int32)
        carry, kernel = lax.scan(run_and_gather, (carry, kernel), order)[0]
    return run(carry, count - 1 - first, kernel), kernel


def over_logits(
    form: HeadForm,
    split: HeadSplit,
    hidden: Array,
    values: Any,
    head: HeadWeights,
    prepare: Callable[[VocabPart, Array | int], Callable[[Array, Any, Any], Any]],
    begin: Any,
) -> tuple[Any, Array]:
    """Compute something of all tiles' logits, one part of the vocabulary after another; see `over_parts`.

    `prepare(part, index)` returns a function of a tile's logits, its `values` and what the parts before have left
    (`begin` at first), which returns what this one leaves.
    """

    def over_part(before, part, index):
        (forth, _), (dimension, _) = form.kernels(part.head.kernel)
        step = prepare(part, index)

        def over_tile(_, tile):
            hidden, values, before = tile
            return None, step(form.logits(hidden, forth, dimension, part.head.bias), values, before)

        return lax.scan(over_tile, None, (hidden, values, before))[1]

    return over_parts(form, split, hidden, head, over_part, begin)


def scores(
    form: HeadForm, split: HeadSplit, hidden: Array, targets: Array, head: HeadWeights, entropy: bool = False
) -> tuple[LogitSums, Array]:
    """Compute `LogitSums` of all tiles over all ids; `targets` are `[tiles, batch, tile, targets]`.

    Return the gathered kernel of the last part, too.
    """

    def prepare(part: VocabPart, _: Any) -> Any:
        return lambda logits, targets, before: before.joined(LogitSums.of(logits, targets, part, entropy))

    none = LogitSums.none(targets, entropy)
    sums, last = over_logits(form, split, hidden, targets, head, prepare, none)
    return sums.over_ids(split, known_ids(split, targets, head.kernel)), last


def known_ids(split: HeadSplit, ids: Array, kernel: Array) -> Array:
    """Return whether each id is in the vocabulary."""
    return (ids >= 0) & (ids < split.vocab(kernel))


def gradients(
    form: HeadForm,
    split: HeadSplit,
    hidden: Array,
    values: Any,
    head: HeadWeights,
    prepare: Callable[[VocabPart, Array | int], Callable[[Array, Any], Array]],
    last: Array | None = None,
) -> tuple[Array, HeadWeights]:
    """Compute the gradients by hidden states (tiles) and head, part by part of the vocabulary.

    `prepare(part, index)` returns a function of a tile's logits and its `values`, the gradient by the logits. `last` is
    that of `over_parts`.
    """
    (count, width), dtype = form.parts(split, hidden, head.kernel), hidden.dtype

    def over_part(carry, part, index):
        (forth, back), (dimension, other) = form.kernels(part.head.kernel)
        by_logits = prepare(part, index)

        def over_tile(total, tile):
            hidden, values, to_hidden = tile
            logits = form.logits(hidden, forth, dimension, part.head.bias)
            gradient = form.before_cap(logits, by_logits(logits, values))
            gradient = part.without_repeated(gradient, 0.0)
            total = added(total, form.weight_gradients(hidden, gradient, part.head.bias))
            return total, to_hidden + form.times(gradient.astype(dtype), back, other)

        def add(before, more):
            axis = split.ids_axis(before)
            more = lax.dynamic_slice_in_dim(before, part.begin, width, axis) + more
            return lax.dynamic_update_slice_in_dim(before, more, part.begin, axis)

        to_hidden, to_head = carry
        total, to_hidden = lax.scan(over_tile, zeros(part.head), (hidden, values, to_hidden))
        shares = split.scattered(total, dtype)
        return to_hidden, shares if count == 1 else jax.tree.map(add, to_head, shares)

    to_hidden, to_head = over_parts(form, split, hidden, head, over_part, zeros((hidden, head)), last)[0]
    return split.over_ids(to_hidden), split.summed(to_head)
