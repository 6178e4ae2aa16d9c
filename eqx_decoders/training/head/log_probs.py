"""Log-probs, entropy and normalizer of tokens, fused with the output head without storing all logits."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.head.device_head import DeviceHead, LogitSums, VocabPart
from eqx_decoders.training.head.head_tiles import HeadForm, HeadTiles
from eqx_decoders.training.head.vocab_parallel import HeadWeights


class LogProbs(NamedTuple):
    """Log-probs of tokens and properties of the distributions, in nats and float32.

    **Arguments:**

    - `log_probs`: log-probs of the targets, `z[target] - log sum exp(z)`; at most 0.
    - `entropy`: entropy of the distribution at each position.
    - `normalizer`: `log sum exp(z)`.
    - `top`: 1 if the target is the result of `argmax` (the lowest id with the highest logit), otherwise 0; no gradient.
    """

    log_probs: Float[Array, "batch length *targets"]
    entropy: Float[Array, "batch length"]
    normalizer: Float[Array, "batch length"]
    top: Float[Array, "batch length *targets"]


def linear_log_probs(
    hidden: Float[Array, "batch length embed"],
    head: HeadWeights,
    targets: Integer[Array, "batch length *targets"],
    *,
    tied: bool,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    tiles: HeadTiles = HeadTiles(),
    flatten: bool = False,
    layout: Layout | None = None,
) -> LogProbs:
    """Compute `LogProbs` of `z = cap(hidden @ kernel + bias) / temperature`, in tiles of positions.

    `cap(x) = soft_cap * tanh(x / soft_cap)`. `temperature` is the sampling temperature of the targets. A position has
    one target, or several along a last dimension. Meshes, tiles and parts of the vocabulary are those of
    `linear_cross_entropy`. Log-probs, entropy and normalizer have gradients with respect to `hidden` and `head`, which
    compute the logits again (four products).

    A target outside of the vocabulary results in NaN. Raises ConfigError for invalid options.
    """
    options: Any = dict(flatten=flatten, tiles=tiles, layout=Layout() if layout is None else layout)
    form = HeadForm(tied=tied, soft_cap=soft_cap, temperature=temperature, **options)
    form.check_kernel("linear_log_probs", hidden, head.kernel)
    targets = jnp.asarray(as_int32("linear_log_probs: targets", targets))
    single = targets.ndim == 2
    found: Any = _log_probs(form, hidden, head, targets[..., None] if single else targets)
    return found._replace(log_probs=found.log_probs[..., 0], top=found.top[..., 0]) if single else found


def _of_sums(found: LogitSums) -> LogProbs:
    assert found.weighted is not None
    normalizer = found.normalizer
    entropy = jnp.maximum(normalizer - found.weighted / found.total, 0.0)
    log_probs = jnp.minimum(found.picked - normalizer[..., None], 0.0)  # NaN is kept
    return LogProbs(log_probs, entropy, normalizer, found.correct)


def _forward(form: HeadForm, hidden: Array, head: HeadWeights, targets: Array) -> LogProbs:
    split = form.split(hidden, head.kernel)

    def on_device(hidden, head, targets):
        local = DeviceHead.create(form, split, hidden, head)
        found = _of_sums(local.sums(*local.split_tiles(hidden, targets), entropy=True)[0])
        return jax.tree.map(local.join_tiles, found)

    outputs: Any = LogProbs(*(split.tokens for _ in LogProbs._fields))  # pyright: ignore[reportArgumentType]
    return split.shard_map(on_device, outputs)(hidden, head, targets)


def _forward_saved(form: HeadForm, hidden: Array, head: HeadWeights, targets: Array) -> Any:
    found = _forward(form, hidden, head, targets)
    return found, (hidden, head, targets, found.normalizer, found.entropy)


def _by_logits(part: VocabPart, logits: Array, values: Any) -> Array:
    """Compute `sum_k a_k one_hot_k + p (n - sum_k a_k - e (log p + entropy))` of the cotangents a, e, n."""
    targets, to_log_probs, to_entropy, to_normalizer, normalizer, entropy = values
    log_p = logits - normalizer[..., None]
    slope = to_normalizer - jnp.sum(to_log_probs, axis=-1)
    gradient = jnp.exp(log_p) * (slope[..., None] - to_entropy[..., None] * (log_p + entropy[..., None]))
    ids = targets - part.first
    if ids.shape[-1] == 1:
        hits = lax.broadcasted_iota(ids.dtype, logits.shape, 2) == ids
        return gradient + jnp.where(hits, to_log_probs, 0.0)
    ids = jnp.where((ids >= 0) & (ids < logits.shape[-1]), ids, logits.shape[-1])  # negative ids would wrap around
    add = jax.vmap(jax.vmap(lambda row, ids, values: row.at[ids].add(values, mode="drop")))
    return add(gradient, ids, to_log_probs)


def _backward(form: HeadForm, saved: Any, cotangents: LogProbs) -> Any:
    hidden, head, targets, normalizer, entropy = saved
    split = form.split(hidden, head.kernel)

    def prepare(part: VocabPart) -> Any:
        return functools.partial(_by_logits, part)

    def on_device(hidden, head, *values):
        local = DeviceHead.create(form, split, hidden, head)
        tiles, *values = local.split_tiles(hidden, *values)
        to_hidden, to_head = local.gradients(tiles, tuple(values), prepare)
        return local.join_tiles(to_hidden), to_head

    values = (targets, *cotangents[:3], normalizer, entropy)
    slopes = split.shard_map(on_device, (split.tokens, split.head_gradient))(hidden, head, *values)
    return *jax.tree.map(lambda x, like: x.astype(like.dtype), slopes, (hidden, head)), None


_log_probs = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))(_forward)
_log_probs.defvjp(_forward_saved, _backward)
