"""Cross-entropy of next tokens: the plain form, and one fused with the output head that never holds all logits."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from eqx_decoders.errors import check, check_integer, check_number
from eqx_decoders.layout import Layout
from eqx_decoders.numerics import matmul, row_major_transpose, wants_row_major


# Bytes of one tile of logits in f32: small beside the weights, large enough that few gradients of the kernel are added.
_TILE_BYTES = 64 * 2**20

# Positions below which a tile is not worth reading the whole kernel for.
_TILE_LEAST = 64

# So few tiles run as a sequence instead of a loop, if `flatten`.
_UNROLLED = 4


class LossSums(NamedTuple):
    """What is reported beside the loss: weighted sums over all tokens, with no gradients."""

    nll: Float[Array, ""]
    correct: Float[Array, ""]


def cross_entropy(
    logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"], *, z_loss: float = 0.0
) -> Float[Array, "batch length"]:
    """`logsumexp(logits) - logits[target] + z_loss * logsumexp(logits)^2` for each token, in nats and f32.

    The last term keeps the normaliser near 1 (PaLM, 2022). A target outside the vocabulary gives NaN.
    """
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    return _with_z_loss(normaliser - _pick(logits, targets), normaliser, z_loss)


def linear_cross_entropy(
    hidden: Float[Array, "batch length embed"],
    kernel: Float[Array, "embed vocab"] | Float[Array, "vocab embed"],
    targets: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
    *,
    tied: bool,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    tile: int | None = None,
    flatten: bool = False,
    layout: Layout | None = None,
) -> tuple[Float[Array, ""], LossSums]:
    """`sum(weights * cross_entropy(cap(hidden @ kernel), targets))`, with logits of `tile` positions at a time.

    `cap(x) = soft_cap * tanh(x / soft_cap)`. The kernel is `[vocab, embed]` if `tied`, the table of the embedding. When
    differentiated, the gradients are computed along with the loss (Liger, Hsu et al. 2024): three products, not four.
    `tile` counts positions of each sequence, by default so many that their logits take 64 MB on a device. `flatten` as
    in `numerics.einsum`. With a `layout` each tile's logits are split by it, and so is the kernel's gradient that the
    tiles add up: each device holds its part of it only.

    Where a weight is zero the target may be anything, and that weight gets no gradient; elsewhere a target outside the
    vocabulary gives NaN. Options out of range raise ConfigError.
    """
    check(
        kernel.shape[1 if tied else 0] == hidden.shape[2],
        f"linear_cross_entropy kernel of shape {kernel.shape} with tied={tied} does not fit hidden {hidden.shape}:"
        " it must be [vocab, embed] if tied, otherwise [embed, vocab].",
    )
    check_number("linear_cross_entropy z_loss", z_loss, least=0.0)
    if soft_cap is not None:
        check_number("linear_cross_entropy soft_cap", soft_cap, above=0.0)
    if tile is not None:
        check_integer("linear_cross_entropy tile", tile)
    layout = Layout() if layout is None else layout
    head = _Head(tied, soft_cap, z_loss, flatten, layout)
    targets = jnp.where(weights == 0, jnp.zeros_like(targets), targets)
    batch, length = targets.shape
    size = _tile_length(batch, length, kernel.shape[0 if tied else 1], tile, layout)
    loss, sums = _fused(head, _cut(hidden, size), kernel, _cut(targets, size), _cut(weights.astype(jnp.float32), size))
    return loss, lax.stop_gradient(sums)


def linear_argmax(
    hidden: Float[Array, "batch length embed"],
    kernel: Float[Array, "embed vocab"] | Float[Array, "vocab embed"],
    *,
    tied: bool,
    flatten: bool = False,
    layout: Layout | None = None,
) -> Int[Array, "batch length"]:
    """`argmax(hidden @ kernel)`, some positions at a time, as in `linear_cross_entropy`."""
    layout = Layout() if layout is None else layout
    head = _Head(tied, None, 0.0, flatten, layout)
    batch, length, _ = hidden.shape
    size = _tile_length(batch, length, kernel.shape[0 if tied else 1], None, layout)
    (kernel, _), (dimension, _) = head.kernels(kernel, hidden.dtype)
    best = lax.map(lambda tile: jnp.argmax(head.logits(tile, kernel, dimension), axis=-1), _cut(hidden, size))
    return jnp.moveaxis(best, 0, 1).reshape(batch, -1)[:, :length].astype(jnp.int32)


def _tile_length(batch: int, length: int, vocab: int, tile: int | None, layout: Layout = Layout()) -> int:
    """The asked length, or the largest one within the bound (but no sliver), evened out over the tiles."""
    if tile is None:
        parts = layout.activation_parts("batch vocab", (batch, vocab))
        tile = max(_TILE_LEAST, _TILE_BYTES * parts // max(1, 4 * batch * vocab))
        tile = math.ceil(length / max(1, math.ceil(length / tile)))
    return max(1, min(tile, length))


def _cut(x: Any, tile: int) -> Any:
    """`[batch, length, ...]` -> `[tiles, batch, tile, ...]`, zeros filling the last one. The batch stays whole."""
    missing = -x.shape[1] % tile
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // tile, tile, *x.shape[2:]), 1, 0)


@dataclasses.dataclass(frozen=True)
class _Head:
    """From hidden states to logits, and back from the gradient of logits to that of the raw product."""

    tied: bool
    soft_cap: float | None
    z_loss: float
    flatten: bool
    layout: Layout

    def kernels(self, kernel, dtype):
        """The kernel as the logits want it and as the gradient of hidden wants it, with the dimensions to contract."""
        kernel, inside = kernel.astype(dtype), 1 if self.tied else 0
        if self.flatten and wants_row_major(kernel.dtype):
            pair = (row_major_transpose(kernel), kernel)
            return (pair if self.tied else pair[::-1]), (0, 0)
        return (kernel, kernel), (inside, 1 - inside)

    def logits(self, hidden, kernel, dimension):
        logits = self.layout.constrain(self.times(hidden, kernel, dimension), "batch length vocab")
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def raw_gradient(self, gradient, logits):
        if self.soft_cap is not None:
            gradient = gradient * (1 - (logits / self.soft_cap) ** 2)
        return gradient

    def split(self, to_kernel):
        """The kernel's gradient, split like the kernel."""
        return self.layout.constrain_weight(to_kernel, "vocab embed" if self.tied else "embed vocab")

    def times(self, x, kernel, dimension):
        """`[batch, tile, n]` by the kernel over n, in f32."""
        if not self.flatten:
            return lax.dot_general(x, kernel, (((2,), (dimension,)), ((), ())), preferred_element_type=jnp.float32)
        batch, tile, inner = x.shape
        product = matmul(x.reshape(batch * tile, inner), kernel, (1, dimension), jnp.float32)
        return product.reshape(batch, tile, kernel.shape[1 - dimension])

    def outer(self, hidden, gradient):
        """The gradient of the kernel, in f32."""
        a, b = (gradient, hidden) if self.tied else (hidden, gradient)
        if not self.flatten:
            return lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
        rows = a.shape[0] * a.shape[1]
        return matmul(a.reshape(rows, a.shape[2]), b.reshape(rows, b.shape[2]), (0, 0), jnp.float32)


def _pick(logits, targets):
    """`logits[target]`; NaN for a target outside, which would otherwise be taken from the other end."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where((targets >= 0) & (targets < logits.shape[-1]), picked, jnp.nan)


def _with_z_loss(nll, normaliser, z_loss):
    return nll + z_loss * normaliser**2 if z_loss else nll  # the square may overflow


def _softmax_parts(head, logits, targets):
    """(loss, nll, correct, normaliser) of each token of a tile. A tie for the highest logit counts as correct."""
    highest = jnp.max(logits, axis=-1)
    normaliser = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1))
    picked = _pick(logits, targets)
    nll = normaliser - picked
    return (_with_z_loss(nll, normaliser, head.z_loss), nll, (picked >= highest).astype(jnp.float32)), normaliser


def _sums(losses, weights):
    loss, nll, correct = (jnp.sum(weights * each) for each in losses)
    return loss, LossSums(nll, correct)


def _loss_alone(head, hidden, kernel, targets, weights) -> tuple[Any, LossSums]:
    (kernel, _), (dimension, _) = head.kernels(kernel, hidden.dtype)

    def step(carry, tile):
        hidden, targets = tile
        losses, _ = _softmax_parts(head, head.logits(hidden, kernel, dimension), targets)
        return carry, losses

    _, losses = lax.scan(step, None, (hidden, targets))
    return _sums(losses, weights)


def _fused_forward(head, hidden, kernel, targets, weights):
    (forth, back), (dimension, other) = head.kernels(kernel, hidden.dtype)

    def step(total, tile):
        hidden, targets, weights = tile
        logits = head.logits(hidden, forth, dimension)
        losses, normaliser = _softmax_parts(head, logits, targets)
        slope = weights * (1 + 2 * head.z_loss * normaliser)
        hits = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        gradient = slope[..., None] * jnp.exp(logits - normaliser[..., None]) - jnp.where(hits, weights[..., None], 0.0)
        gradient = head.raw_gradient(gradient, logits).astype(hidden.dtype)
        return total + head.split(head.outer(hidden, gradient)), (losses, head.times(gradient, back, other))

    # Written out, the first addition of the kernel's gradient disappears and the last one joins what follows. (Not
    # where memory is short: the tiles could then be worked on at the same time.)
    unroll = head.flatten and hidden.shape[0] <= _UNROLLED
    tiles = (hidden, targets, weights)
    total, (losses, to_hidden) = lax.scan(step, head.split(jnp.zeros(kernel.shape, jnp.float32)), tiles, unroll=unroll)
    like = (jnp.zeros((0,), hidden.dtype), jnp.zeros((0,), kernel.dtype))
    return _sums(losses, weights), (to_hidden, total, jnp.where(weights == 0, 0.0, losses[0]), like)


def _fused_backward(head, saved, cotangents):
    to_hidden, to_kernel, to_weights, like = saved
    cotangent = cotangents[0]  # those of the reported sums are zero: they carry no gradients
    # Both gradients are of a plain sum, so both take the cotangent: a scaled loss, or one of several accumulated.
    return (
        (cotangent * to_hidden).astype(like[0].dtype),
        (cotangent * to_kernel).astype(like[1].dtype),
        None,
        cotangent * to_weights,
    )


_fused = jax.custom_vjp(_loss_alone, nondiff_argnums=(0,))
_fused.defvjp(_fused_forward, _fused_backward)
