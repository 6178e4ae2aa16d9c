"""Cross-entropy of next tokens: the plain form, and one fused with the output head that never holds all logits."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.errors import check, check_integer, check_number
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.matmul import matmul, reads_weights_by_row, row_major_transpose
from eqx_decoders.sharding.backend import Backend
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.step.vocab_parallel import HeadSplit, HeadWeights, VocabPart


# Positions below which a tile is not worth reading the whole kernel for.
_TILE_LEAST = 64

# So few tiles run as a sequence instead of a loop, if `flatten`.
_UNROLLED = 4


class HeadTiles(NamedTuple):
    """Parts in which head and loss are computed together.

    **Arguments:**

    - `positions`: of each sequence on a device in a tile; None: so many that their logits take 64 MB there, 256 MB on a
        TPU or GPU.
    - `head_bytes`: bound of a device's gathered kernel and its gradient; None: no bound.
    """

    positions: int | None = None
    head_bytes: int | None = None


class LossSums(NamedTuple):
    """Weighted sums over all tokens that are reported with the loss; they have no gradients."""

    nll: Float[Array, ""]
    correct: Float[Array, ""]


def cross_entropy(
    logits: Float[Array, "batch length vocab"], targets: Integer[Array, "batch length"], *, z_loss: float = 0.0
) -> Float[Array, "batch length"]:
    """Compute `logsumexp(logits) - logits[target] + z_loss * logsumexp(logits)^2` of each token, in nats and f32.

    The last term keeps the normalizer near 1 (PaLM, 2022). A target outside the vocabulary gives NaN.
    """
    logits, targets = logits.astype(jnp.float32), as_int32("cross_entropy: targets", targets)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return _with_z_loss(normalizer - _pick(logits, targets), normalizer, z_loss)


def linear_cross_entropy(
    hidden: Float[Array, "batch length embed"],
    head: HeadWeights,
    targets: Integer[Array, "batch length"],
    weights: Float[Array, "batch length"],
    *,
    tied: bool,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    tiles: HeadTiles = HeadTiles(),
    flatten: bool = False,
    layout: Layout | None = None,
) -> tuple[Float[Array, ""], LossSums]:
    """Compute `sum(weights * cross_entropy(cap(hidden @ kernel + bias), targets))`, a tile of positions at a time.

    `cap(x) = soft_cap * tanh(x / soft_cap)`. The kernel is `[vocab, embed]` if `tied`, the table of the embedding. When
    differentiated, the gradients are computed along with the loss (Liger, Hsu et al. 2024): three products, not four.
    `flatten` as in `numerics.einsum`.

    On the mesh of a `layout` tokens and vocabulary are split by it. A device gathers the features of its part of the
    vocabulary once, and adds the gradient of that part up in f32 over all its tiles; then devices share the sums once
    (reduce-scatter, in the dtype of `hidden`, as that of all other weights; in f32 for float16). Where that would take
    more than `tiles.head_bytes`, it goes through its part of the vocabulary in several pieces, twice: for the
    normalizers, then for the gradients. That is four products.

    Where a weight is zero the target may be anything, and that weight gets no gradient; elsewhere a target outside the
    vocabulary gives NaN. Options out of range raise ConfigError.
    """
    shape = head.kernel.shape
    check(
        shape[1 if tied else 0] == hidden.shape[2],
        f"linear_cross_entropy kernel of shape {shape} with tied={tied} does not fit hidden {hidden.shape}:"
        " it must be [vocab, embed] if tied, otherwise [embed, vocab].",
    )
    check_number("linear_cross_entropy z_loss", z_loss, least=0.0)
    if soft_cap is not None:
        check_number("linear_cross_entropy soft_cap", soft_cap, above=0.0)
    if tiles.positions is not None:
        check_integer("linear_cross_entropy tiles.positions", tiles.positions)
    if tiles.head_bytes is not None:
        check_integer("linear_cross_entropy tiles.head_bytes", tiles.head_bytes)
    form = _HeadForm(tied, soft_cap, z_loss, flatten, tiles, Layout() if layout is None else layout)
    targets = jnp.asarray(as_int32("linear_cross_entropy: targets", targets))
    targets = jnp.where(weights == 0, jnp.zeros_like(targets), targets)
    loss, sums = _fused(form, hidden, head, targets, weights.astype(jnp.float32))
    return loss, lax.stop_gradient(sums)


def linear_argmax(
    hidden: Float[Array, "batch length embed"],
    head: HeadWeights,
    *,
    tied: bool,
    tiles: HeadTiles = HeadTiles(),
    flatten: bool = False,
    layout: Layout | None = None,
) -> Int[Array, "batch length"]:
    """Compute `argmax(hidden @ kernel + bias)` for a tile of positions at a time, as in `linear_cross_entropy`."""
    form = _HeadForm(tied, None, 0.0, flatten, tiles, Layout() if layout is None else layout)
    split = form.split(hidden, head.kernel)
    return split.mapped(functools.partial(_argmax, form, split), split.tokens)(hidden, head)


def _argmax(form: "_HeadForm", split: HeadSplit, hidden: Array, head: HeadWeights) -> Array:
    count, width = form.parts(split, hidden, head.kernel)
    tiles = _cut(hidden, form.tile_length(hidden, width))

    def over_part(best, index):
        part = split.gathered(head, index, width, hidden.dtype)
        (forth, _), (dimension, _) = form.kernels(part.head.kernel)

        def over_tile(_, tile):
            hidden, highest, where = tile
            logits = form.logits(hidden, forth, dimension, part.head.bias)
            top = jnp.max(logits, axis=-1)
            better, best_id = top > highest, part.first + jnp.argmax(logits, axis=-1)  # of equals the lowest id
            return None, (jnp.where(better, top, highest), jnp.where(better, best_id, where))

        return lax.scan(over_tile, None, (tiles, *best))[1], None

    begin = jnp.full(tiles.shape[:3], -jnp.inf, jnp.float32), jnp.zeros(tiles.shape[:3], jnp.int32)
    highest, where = _over_parts(over_part, begin, count)[0]
    where = split.lowest(jnp.where(highest == split.highest(highest), where, jnp.iinfo(where.dtype).max))
    return _joined(where, hidden.shape[1])


def _tile_length(batch: int, length: int, vocab: int, tile: int | None, backend: Backend) -> int:
    """Return the requested length, or the largest within the bound (but no sliver), evened out over the tiles.

    Logits of a tile are small beside the weights, and large enough that few gradients of the kernel are added: an
    accelerator reads and writes that sum as fast as it multiplies from about a thousand positions on.
    """
    if tile is None:
        tile = max(_TILE_LEAST, backend.loss_tile_bytes // max(1, 4 * batch * vocab))
        tile = math.ceil(length / max(1, math.ceil(length / tile)))
    return max(1, min(tile, length))


def _over_parts(step: Any, carry: Any, count: int) -> Any:
    """Scan over the parts of the vocabulary; a single part is no loop."""
    return step(carry, 0) if count == 1 else lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))


def _cut(x: Any, tile: int) -> Any:
    """Cut `[batch, length, ...]` into `[tiles, batch, tile, ...]`, zeros filling the last one; the batch stays."""
    missing = -x.shape[1] % tile
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // tile, tile, *x.shape[2:]), 1, 0)


def _joined(tiles: Any, length: int) -> Any:
    """Join the tiles of `_cut` again."""
    x = jnp.moveaxis(tiles, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


@dataclasses.dataclass(frozen=True)
class _HeadForm:
    """The map from hidden states to logits, and the gradient before the cap from that of the logits."""

    tied: bool
    soft_cap: float | None
    z_loss: float
    flatten: bool
    tiles: HeadTiles
    layout: Layout

    def split(self, hidden: Array, kernel: Array) -> HeadSplit:
        return HeadSplit.create(self.layout, self.tied, hidden.shape, kernel.shape)

    def parts(self, split: HeadSplit, hidden: Array, kernel: Array) -> tuple[int, int]:
        return split.parts(kernel, hidden.dtype, self.tiles.head_bytes)

    def tile_length(self, hidden: Array, vocab: int) -> int:
        return _tile_length(hidden.shape[0], hidden.shape[1], vocab, self.tiles.positions, self.layout.backend)

    def kernels(self, kernel):
        """Return the kernel for the logits and for the gradient of hidden, and the dimensions to contract."""
        inside = 1 if self.tied else 0
        if self.flatten and reads_weights_by_row(kernel.dtype):
            pair = (row_major_transpose(kernel), kernel)
            return (pair if self.tied else pair[::-1]), (0, 0)
        return (kernel, kernel), (inside, 1 - inside)

    def logits(self, hidden, kernel, dimension, bias):
        logits = add_bias(self.times(hidden, kernel, dimension), bias)
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def gradient(self, logits, normalizer, targets, weights):
        """Compute the gradient before the cap: `weight * ((1 + 2 z_loss normalizer) softmax - one_hot)`."""
        slope = weights * (1 + 2 * self.z_loss * normalizer)
        hits = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        gradient = slope[..., None] * jnp.exp(logits - normalizer[..., None]) - jnp.where(hits, weights[..., None], 0.0)
        if self.soft_cap is not None:
            gradient = gradient * (1 - (logits / self.soft_cap) ** 2)
        return gradient

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


class _Scores(NamedTuple):
    """Sums of each token over some ids: the highest logit, `sum exp(logit - highest)`, and the logit of the target."""

    highest: Array
    total: Array
    picked: Array

    @classmethod
    def of(cls, logits, targets, part: VocabPart) -> "_Scores":
        logits, ids = part.without_repeated(logits, -jnp.inf), targets - part.first
        inside = (ids >= part.repeated) & (ids < logits.shape[-1])
        highest = jnp.max(logits, axis=-1)
        total = jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1)
        return cls(highest, total, jnp.where(inside, _target_logits(logits, ids), 0.0))

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "_Scores":
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(jnp.full(shape, -jnp.inf, jnp.float32), zeros, zeros)

    def joined(self, other: "_Scores") -> "_Scores":
        """Join the sums over two sets of ids; those of `other` are over at least one id."""
        top = jnp.maximum(self.highest, other.highest)
        one, two = (each.total * jnp.exp(each.highest - top) for each in (self, other))
        return _Scores(top, one + two, self.picked + other.picked)

    def losses(self, split: HeadSplit, known, z_loss):
        """Return (loss, nll, correct) and the normalizer of each token; a tie for the highest logit is correct."""
        highest = split.highest(self.highest)
        total = split.over_ids(self.total * jnp.exp(self.highest - highest))
        normalizer = highest + jnp.log(total)
        picked = jnp.where(known, split.over_ids(self.picked), jnp.nan)
        nll = normalizer - picked
        return (_with_z_loss(nll, normalizer, z_loss), nll, (picked >= highest).astype(jnp.float32)), normalizer


def _pick(logits, targets):
    """Return `logits[target]`; NaN for a target outside, which would otherwise be taken from the other end."""
    return jnp.where((targets >= 0) & (targets < logits.shape[-1]), _target_logits(logits, targets), jnp.nan)


def _target_logits(logits, targets):
    return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]


def _with_z_loss(nll, normalizer, z_loss):
    return nll + z_loss * normalizer**2 if z_loss else nll  # the square may overflow


def _sums(split, losses, weights):
    # in one array, so that devices meet once
    loss, nll, correct = split.over_rows(jnp.stack([jnp.sum(weights * each) for each in losses]))
    return loss, LossSums(nll, correct)


def _loss_alone(form, hidden, head, targets, weights) -> tuple[Any, LossSums]:
    split = form.split(hidden, head.kernel)

    def on_device(hidden, head, targets, weights):
        tiles = _Tiles.of(form, split, hidden, head, targets, weights)
        losses, _ = _losses(form, split, tiles, head)
        return _sums(split, losses, tiles.weights)

    return split.mapped(on_device, PartitionSpec())(hidden, head, targets, weights)


def _fused_forward(form, hidden, head, targets, weights):
    split = form.split(hidden, head.kernel)

    def on_device(hidden, head, targets, weights):
        tiles, length = _Tiles.of(form, split, hidden, head, targets, weights), hidden.shape[1]
        make = _gradients if form.parts(split, hidden, head.kernel)[0] == 1 else _gradients_in_parts
        losses, to_hidden, to_head = make(form, split, tiles, head)
        to_weights = jnp.where(tiles.weights == 0, 0.0, losses[0])
        return _sums(split, losses, tiles.weights), (_joined(to_hidden, length), to_head, _joined(to_weights, length))

    outputs = (PartitionSpec(), (split.tokens, HeadWeights(split.gradient, split.bias), split.tokens))
    sums, gradients = split.mapped(on_device, outputs)(hidden, head, targets, weights)
    like = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (hidden, head))
    return sums, (*gradients, like)


class _Tiles(NamedTuple):
    """The tokens of one device, tile by tile: `[tiles, batch, tile, ...]`."""

    hidden: Array
    targets: Array
    weights: Array

    @classmethod
    def of(cls, form: _HeadForm, split: HeadSplit, hidden: Array, head: HeadWeights, *others: Array) -> "_Tiles":
        size = form.tile_length(hidden, form.parts(split, hidden, head.kernel)[1])
        return cls(*(_cut(x, size) for x in (hidden, *others)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.targets.shape

    def known(self, split: HeadSplit, kernel: Array) -> Array:
        """Return whether each target is in the vocabulary."""
        return (self.targets >= 0) & (self.targets < split.vocab(kernel))


def _losses(form: _HeadForm, split: HeadSplit, tiles: _Tiles, head: HeadWeights) -> Any:
    """Compute `_Scores.losses` of all tiles, over all parts of the vocabulary."""
    count, width = form.parts(split, tiles.hidden, head.kernel)

    def over_part(scores, index):
        part = split.gathered(head, index, width, tiles.hidden.dtype)
        (forth, _), (dimension, _) = form.kernels(part.head.kernel)

        def over_tile(_, tile):
            (hidden, targets, _), before = tile
            logits = form.logits(hidden, forth, dimension, part.head.bias)
            return None, before.joined(_Scores.of(logits, targets, part))

        return lax.scan(over_tile, None, (tiles, scores))[1], None

    scores = _over_parts(over_part, _Scores.none(tiles.shape), count)[0]
    return scores.losses(split, tiles.known(split, head.kernel), form.z_loss)


def _zeros(like: Any) -> Any:
    """Return zeros in f32, in which gradients are added up."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)


def _added(one: HeadWeights, other: HeadWeights) -> HeadWeights:
    return jax.tree.map(jnp.add, one, other)


def _gradients(form: _HeadForm, split: HeadSplit, tiles: _Tiles, head: HeadWeights) -> tuple[Any, Array, HeadWeights]:
    """Compute losses and the gradients of their sum by hidden states and head: three products for each tile."""
    whole = split.gathered(head, 0, head.kernel.shape[1 - split.inside], tiles.hidden.dtype)
    (forth, back), (dimension, other) = form.kernels(whole.head.kernel)

    def over_tile(total, tile):
        (hidden, targets, weights), known = tile
        logits = form.logits(hidden, forth, dimension, whole.head.bias)
        losses, normalizer = _Scores.of(logits, targets, whole).losses(split, known, form.z_loss)
        gradient = form.gradient(logits, normalizer, targets - whole.first, weights)
        total = _added(total, form.weight_gradients(hidden, gradient, whole.head.bias))
        return total, (losses, split.over_ids(form.times(gradient.astype(hidden.dtype), back, other)))

    # Written out, the first addition of the kernel's gradient disappears and the last one joins what follows. (Not
    # where memory is short: the tiles could then be worked on at the same time.)
    unroll = form.flatten and tiles.shape[0] <= _UNROLLED
    total, (losses, to_hidden) = lax.scan(
        over_tile, _zeros(whole.head), (tiles, tiles.known(split, head.kernel)), unroll=unroll
    )
    return losses, to_hidden, split.summed(split.scattered(total, tiles.hidden.dtype))


def _gradients_in_parts(
    form: _HeadForm, split: HeadSplit, tiles: _Tiles, head: HeadWeights
) -> tuple[Any, Array, HeadWeights]:
    """Compute `_gradients` for one part of the vocabulary after another, each gathered twice: four products."""
    (count, width), dtype = form.parts(split, tiles.hidden, head.kernel), tiles.hidden.dtype
    losses, normalizers = _losses(form, split, tiles, head)

    def over_part(carry, index):
        part = split.gathered(head, index, width, dtype)
        (forth, back), (dimension, other) = form.kernels(part.head.kernel)

        def over_tile(total, tile):
            (hidden, targets, weights), normalizer, to_hidden = tile
            logits = form.logits(hidden, forth, dimension, part.head.bias)
            gradient = form.gradient(logits, normalizer, targets - part.first, weights)
            gradient = part.without_repeated(gradient, 0.0)
            total = _added(total, form.weight_gradients(hidden, gradient, part.head.bias))
            return total, to_hidden + form.times(gradient.astype(dtype), back, other)

        def add(before, more):
            axis = split.ids_axis(before)
            more = lax.dynamic_slice_in_dim(before, part.begin, width, axis) + more
            return lax.dynamic_update_slice_in_dim(before, more, part.begin, axis)

        to_hidden, to_head = carry
        total, to_hidden = lax.scan(over_tile, _zeros(part.head), (tiles, normalizers, to_hidden))
        return (to_hidden, jax.tree.map(add, to_head, split.scattered(total, dtype))), None

    to_hidden, to_head = _over_parts(over_part, _zeros((tiles.hidden, head)), count)[0]
    return losses, split.over_ids(to_hidden), split.summed(to_head)


def _fused_backward(form, saved, cotangents):
    to_hidden, to_head, to_weights, like = saved
    cotangent = cotangents[0]  # those of the reported sums are zero: they carry no gradients
    # All gradients are of a plain sum, so all take the cotangent: a scaled loss, or one of several accumulated.
    gradients = jax.tree.map(lambda x, other: (cotangent * x).astype(other.dtype), (to_hidden, to_head), like)
    return *gradients, None, cotangent * to_weights


_fused = jax.custom_vjp(_loss_alone, nondiff_argnums=(0,))
_fused.defvjp(_fused_forward, _fused_backward)
