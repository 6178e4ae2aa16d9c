"""Cross-entropy of next tokens: the plain form, and one fused with the output head that never holds all logits."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.errors import NonNegativeFloat
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.head.device_head import DeviceHead, LogitSums, VocabPart
from eqx_decoders.training.head.head_tiles import HeadForm, HeadTiles, added, zeros
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights


# So few tiles run as a sequence instead of a loop, if `flatten`.
_UNROLLED = 4


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
    options: Any = dict(flatten=flatten, tiles=tiles, layout=Layout() if layout is None else layout)
    form = _LossForm(tied=tied, soft_cap=soft_cap, z_loss=z_loss, **options)
    form.check_kernel("linear_cross_entropy", hidden, head.kernel)
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
    form = HeadForm(tied=tied, flatten=flatten, tiles=tiles, layout=Layout() if layout is None else layout)
    split = form.split(hidden, head.kernel)
    return split.mapped(functools.partial(_argmax, form, split), split.tokens)(hidden, head)


def _argmax(form: HeadForm, split: HeadSplit, hidden: Array, head: HeadWeights) -> Array:
    local = DeviceHead.create(form, split, hidden, head)
    (tiles,) = local.cut(hidden)

    def prepare(part: VocabPart) -> Any:
        def step(logits, _, best):
            top = jnp.max(logits, axis=-1)
            better, best_id = top > best[0], part.first + jnp.argmax(logits, axis=-1)  # of equals the lowest id
            return jnp.where(better, top, best[0]), jnp.where(better, best_id, best[1])

        return step

    begin = jnp.full(tiles.shape[:3], -jnp.inf, jnp.float32), jnp.zeros(tiles.shape[:3], jnp.int32)
    highest, where = local.over_logits(tiles, None, prepare, begin)[0]
    where = split.lowest(jnp.where(highest == split.highest(highest), where, jnp.iinfo(where.dtype).max))
    return local.joined(where)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LossForm(HeadForm):
    """Logits with the weight of their squared normalizer in the loss."""

    z_loss: NonNegativeFloat = 0.0

    def losses(self, sums: LogitSums) -> tuple[Array, Array, Array]:
        """Return (loss, nll, correct) of each token."""
        nll = sums.normalizer - sums.picked[..., 0]
        return _with_z_loss(nll, sums.normalizer, self.z_loss), nll, sums.right[..., 0]

    def by_logits(self, logits, targets, weights, normalizer):
        """Compute the gradient by the logits: `weight * ((1 + 2 z_loss normalizer) softmax - one_hot)`."""
        slope = weights * (1 + 2 * self.z_loss * normalizer)
        hits = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        return slope[..., None] * jnp.exp(logits - normalizer[..., None]) - jnp.where(hits, weights[..., None], 0.0)


def _pick(logits, targets):
    """Return `logits[target]`; NaN for a target outside, which would otherwise be taken from the other end."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where((targets >= 0) & (targets < logits.shape[-1]), picked, jnp.nan)


def _with_z_loss(nll, normalizer, z_loss):
    return nll + z_loss * normalizer**2 if z_loss else nll  # the square may overflow


def _sums(split, losses, weights):
    # in one array, so that devices meet once
    loss, nll, correct = split.over_rows(jnp.stack([jnp.sum(weights * each) for each in losses]))
    return loss, LossSums(nll, correct)


def _loss_alone(form: _LossForm, hidden, head, targets, weights) -> tuple[Any, LossSums]:
    split = form.split(hidden, head.kernel)

    def on_device(hidden, head, targets, weights):
        local = DeviceHead.create(form, split, hidden, head)
        hidden, targets, weights = local.cut(hidden, targets, weights)
        return _sums(split, form.losses(local.sums(hidden, targets[..., None])[0]), weights)

    return split.mapped(on_device, PartitionSpec())(hidden, head, targets, weights)


def _fused_forward(form: _LossForm, hidden, head, targets, weights):
    split = form.split(hidden, head.kernel)

    def on_device(hidden, head, targets, weights):
        local = DeviceHead.create(form, split, hidden, head)
        hidden, targets, weights = local.cut(hidden, targets, weights)
        make = _gradients if local.parts == 1 else _gradients_in_parts
        losses, to_hidden, to_head = make(form, local, hidden, targets, weights)
        to_weights = jnp.where(weights == 0, 0.0, losses[0])
        return _sums(split, losses, weights), (local.joined(to_hidden), to_head, local.joined(to_weights))

    outputs = (PartitionSpec(), (split.tokens, split.head_gradient, split.tokens))
    sums, found = split.mapped(on_device, outputs)(hidden, head, targets, weights)
    like = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (hidden, head))
    return sums, (*found, like)


def _gradients(
    form: _LossForm, local: DeviceHead, hidden: Array, targets: Array, weights: Array
) -> tuple[Any, Array, HeadWeights]:
    """Compute losses and the gradients of their sum by hidden states and head: three products for each tile."""
    split, whole = local.split, local.part(0, local.gathered(0))
    (forth, back), (dimension, other) = form.kernels(whole.head.kernel)

    def over_tile(total, tile):
        hidden, targets, weights, known = tile
        logits = form.logits(hidden, forth, dimension, whole.head.bias)
        found = LogitSums.of(logits, targets[..., None], whole).over_ids(split, known[..., None])
        gradient = form.by_logits(logits, targets - whole.first, weights, found.normalizer)
        gradient = form.before_cap(logits, gradient)
        total = added(total, form.weight_gradients(hidden, gradient, whole.head.bias))
        return total, (form.losses(found), split.over_ids(form.times(gradient.astype(hidden.dtype), back, other)))

    # Written out, the first addition of the kernel's gradient disappears and the last one joins what follows. (Not
    # where memory is short: the tiles could then be worked on at the same time.)
    unroll = form.flatten and targets.shape[0] <= _UNROLLED
    tiles = (hidden, targets, weights, local.known(targets))
    total, (losses, to_hidden) = lax.scan(over_tile, zeros(whole.head), tiles, unroll=unroll)
    to_head = split.scattered(total, hidden.dtype)
    if split.layout.backend.gradient_rings and local.is_large():
        # now, or what is added up may be in memory throughout the backward pass, beside which it travels
        to_hidden, to_head = lax.optimization_barrier((to_hidden, to_head))
    return losses, to_hidden, split.summed(to_head)


def _gradients_in_parts(
    form: _LossForm, local: DeviceHead, hidden: Array, targets: Array, weights: Array
) -> tuple[Any, Array, HeadWeights]:
    """Compute `_gradients` part by part of the vocabulary, in two passes, of which the second goes backwards."""
    found, last = local.sums(hidden, targets[..., None])

    def prepare(part: VocabPart) -> Any:
        return lambda logits, values: form.by_logits(logits, values[0] - part.first, *values[1:])

    values = (targets, weights, found.normalizer)
    return form.losses(found), *local.gradients(hidden, values, prepare, last)


def _fused_backward(form, saved, cotangents):
    to_hidden, to_head, to_weights, like = saved
    cotangent = cotangents[0]  # those of the reported sums are zero: they carry no gradients
    # All gradients are of a plain sum, so all take the cotangent: a scaled loss, or one of several accumulated.
    gradients = jax.tree.map(lambda x, other: (cotangent * x).astype(other.dtype), (to_hidden, to_head), like)
    return *gradients, None, cotangent * to_weights


_fused = jax.custom_vjp(_loss_alone, nondiff_argnums=(0,))
_fused.defvjp(_fused_forward, _fused_backward)
