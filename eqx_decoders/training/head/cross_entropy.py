"""Cross-entropy of next tokens: from logits, and fused with the output head without storing all logits."""

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
from eqx_decoders.training.head.head_tiles import HeadForm, HeadTiles, add_head_gradients, float32_zeros
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights


# Maximum number of tiles whose loop is unrolled, with `flatten`.
_MAX_UNROLLED = 4


class LossSums(NamedTuple):
    """Negative log-likelihood and number of correct predictions, as weighted sums over tokens, without gradients."""

    nll: Float[Array, ""]
    correct: Float[Array, ""]


def cross_entropy(
    logits: Float[Array, "batch length vocab"], targets: Integer[Array, "batch length"], *, z_loss: float = 0.0
) -> Float[Array, "batch length"]:
    """Compute `logsumexp(logits) - logits[target] + z_loss * logsumexp(logits)^2` of each token, in nats and float32.

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
    """Compute `sum(weights * cross_entropy(cap(hidden @ kernel + bias), targets))` in tiles of positions.

    `cap(x) = soft_cap * tanh(x / soft_cap)`. With `tied`, the kernel is the embedding table, `[vocab, embed]`. When the
    function is differentiated, the gradients are computed together with the loss (Liger, Hsu et al. 2024), with three
    products instead of four. `flatten`: see `numerics.einsum`.

    On the mesh of `layout`, tokens and vocabulary are split. A device gathers the features of its part of the
    vocabulary once, sums the gradient of this part over its tiles in float32, and the sums are reduced over devices
    once (reduce-scatter, in the dtype of `hidden`, but in float32 for float16). If this would need more than
    `tiles.head_bytes`, the part of a device is processed in several pieces, twice: for the normalizers and then for the
    gradients, with four products.

    Where a weight is zero, the target can be any number and the weight has no gradient. Elsewhere a target outside of
    the vocabulary results in NaN. Raises ConfigError for invalid options.
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
    """Compute `argmax(hidden @ kernel + bias)` in tiles of positions, as in `linear_cross_entropy`."""
    form = HeadForm(tied=tied, flatten=flatten, tiles=tiles, layout=Layout() if layout is None else layout)
    split = form.split(hidden, head.kernel)
    return split.shard_map(functools.partial(_argmax, form, split), split.tokens)(hidden, head)


def _argmax(form: HeadForm, split: HeadSplit, hidden: Array, head: HeadWeights) -> Array:
    local = DeviceHead.create(form, split, hidden, head)
    (tiles,) = local.split_tiles(hidden)

    def prepare(part: VocabPart) -> Any:
        def step(logits, _, best):
            highest = jnp.max(logits, axis=-1)
            better, best_id = highest > best[0], part.first + jnp.argmax(logits, axis=-1)  # the lowest of equal ids
            return jnp.where(better, highest, best[0]), jnp.where(better, best_id, best[1])

        return step

    begin = jnp.full(tiles.shape[:3], -jnp.inf, jnp.float32), jnp.zeros(tiles.shape[:3], jnp.int32)
    highest, where = local.over_logits(tiles, None, prepare, begin)[0]
    where = split.lowest(jnp.where(highest == split.highest(highest), where, jnp.iinfo(where.dtype).max))
    return local.join_tiles(where)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LossForm(HeadForm):
    """Function from hidden states to logits, and the cross-entropy with z-loss."""

    z_loss: NonNegativeFloat = 0.0

    def losses(self, sums: LogitSums) -> tuple[Array, Array, Array]:
        """Return loss, negative log-likelihood and correctness of each token."""
        nll = sums.normalizer - sums.picked[..., 0]
        return _with_z_loss(nll, sums.normalizer, self.z_loss), nll, sums.correct[..., 0]

    def logit_gradient(self, logits, targets, weights, normalizer):
        """Compute the gradient by the logits: `weight * ((1 + 2 z_loss normalizer) softmax - one_hot)`."""
        slope = weights * (1 + 2 * self.z_loss * normalizer)
        hits = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        return slope[..., None] * jnp.exp(logits - normalizer[..., None]) - jnp.where(hits, weights[..., None], 0.0)


def _pick(logits, targets):
    """Return `logits[target]`; NaN for targets outside of the vocabulary, which would wrap around otherwise."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where((targets >= 0) & (targets < logits.shape[-1]), picked, jnp.nan)


def _with_z_loss(nll, normalizer, z_loss):
    return nll + z_loss * normalizer**2 if z_loss else nll  # only then, because the square can overflow


def _sums(split, losses, weights):
    # in one array, so that there is one collective
    loss, nll, correct = split.sum_rows(jnp.stack([jnp.sum(weights * values) for values in losses]))
    return loss, LossSums(nll, correct)


def _loss_alone(form: _LossForm, hidden, head, targets, weights) -> tuple[Any, LossSums]:
    split = form.split(hidden, head.kernel)

    def on_device(hidden, head, targets, weights):
        local = DeviceHead.create(form, split, hidden, head)
        hidden, targets, weights = local.split_tiles(hidden, targets, weights)
        return _sums(split, form.losses(local.sums(hidden, targets[..., None])[0]), weights)

    return split.shard_map(on_device, PartitionSpec())(hidden, head, targets, weights)


def _fused_forward(form: _LossForm, hidden, head, targets, weights):
    split = form.split(hidden, head.kernel)

    def on_device(hidden, head, targets, weights):
        local = DeviceHead.create(form, split, hidden, head)
        hidden, targets, weights = local.split_tiles(hidden, targets, weights)
        make = _gradients if local.parts == 1 else _gradients_in_parts
        losses, to_hidden, to_head = make(form, local, hidden, targets, weights)
        to_weights = jnp.where(weights == 0, 0.0, losses[0])
        return _sums(split, losses, weights), (local.join_tiles(to_hidden), to_head, local.join_tiles(to_weights))

    outputs = (PartitionSpec(), (split.tokens, split.head_gradient, split.tokens))
    sums, found = split.shard_map(on_device, outputs)(hidden, head, targets, weights)
    like = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (hidden, head))
    return sums, (*found, like)


def _gradients(
    form: _LossForm, local: DeviceHead, hidden: Array, targets: Array, weights: Array
) -> tuple[Any, Array, HeadWeights]:
    """Compute losses, and the gradients of their sum with respect to hidden states and head, with three products."""
    split, whole = local.split, local.part(0, local.gather_kernel(0))
    (kernel, backward_kernel), (dimension, backward_dimension) = form.kernels(whole.head.kernel)

    def over_tile(total, tile):
        hidden, targets, weights, known = tile
        logits = form.logits(hidden, kernel, dimension, whole.head.bias)
        found = LogitSums.of(logits, targets[..., None], whole).over_ids(split, known[..., None])
        gradient = form.logit_gradient(logits, targets - whole.first, weights, found.normalizer)
        gradient = form.product_gradient(logits, gradient)
        total = add_head_gradients(total, form.weight_gradients(hidden, gradient, whole.head.bias))
        return total, (
            form.losses(found),
            split.sum_over_ids(form.multiply(gradient.astype(hidden.dtype), backward_kernel, backward_dimension)),
        )

    # Unrolled, the first addition to the kernel's gradient is omitted, and the last one is fused with what follows. Not
    # if memory is limited, because XLA could then compute several tiles at the same time.
    unroll = form.flatten and targets.shape[0] <= _MAX_UNROLLED
    tiles = (hidden, targets, weights, local.known(targets))
    total, (losses, to_hidden) = lax.scan(over_tile, float32_zeros(whole.head), tiles, unroll=unroll)
    to_head = split.reduce_scatter(total, hidden.dtype)
    if split.layout.backend.gradient_rings and local.is_large():
        # The reduction is finished here. Otherwise its sums could stay in memory during the complete backward pass.
        to_hidden, to_head = lax.optimization_barrier((to_hidden, to_head))
    return losses, to_hidden, split.sum_over_rows(to_head)


def _gradients_in_parts(
    form: _LossForm, local: DeviceHead, hidden: Array, targets: Array, weights: Array
) -> tuple[Any, Array, HeadWeights]:
    """Compute `_gradients` part by part of the vocabulary, in two passes. The second pass has the reverse order."""
    found, last = local.sums(hidden, targets[..., None])

    def prepare(part: VocabPart) -> Any:
        return lambda logits, values: form.logit_gradient(logits, values[0] - part.first, *values[1:])

    values = (targets, weights, found.normalizer)
    return form.losses(found), *local.gradients(hidden, values, prepare, last)


def _fused_backward(form, saved, cotangents):
    to_hidden, to_head, to_weights, like = saved
    cotangent = cotangents[0]  # the cotangents of the reported sums are zero
    # The saved gradients are those of the sum, so they are multiplied by the cotangent of a scaled loss.
    gradients = jax.tree.map(lambda x, other: (cotangent * x).astype(other.dtype), (to_hidden, to_head), like)
    return *gradients, None, cotangent * to_weights


_fused = jax.custom_vjp(_loss_alone, nondiff_argnums=(0,))
_fused.defvjp(_fused_forward, _fused_backward)
