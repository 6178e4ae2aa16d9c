"""Policy and value losses of reinforcement learning, from log-probs, advantages and values of tokens."""

import dataclasses
import math
from typing import Annotated, Literal, get_args

import jax.numpy as jnp
from jax import nn
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Float32, Int

from eqx_decoders.errors import (
    CheckedFields,
    InRange,
    NonNegativeFloat,
    PositiveFloat,
    Rate,
    check,
    check_option,
    check_unused,
)
from eqx_decoders.training.objectives.reductions import (
    completion_means,
    completion_sums,
    masked,
    masked_sum,
    to_tokens,
)


MAX_LOG_RATIO = 20.0  # larger log-ratios are clipped: they have no gradient, and exp stays finite

Sums = dict[str, Float32[Array, ""]]
Tokens = Float[Array, "batch length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction(CheckedFields):
    """Off-policy correction: importance weights for completions that were sampled from another distribution.

    `w = exp(old - sampler)` is the importance weight of a token, without gradient, and `W` that of a completion. The
    loss of a token is multiplied by a factor:

    | kind | factor | source |
    |---|---|---|
    | `none` | 1 | |
    | `tis`, `sequence_tis` | `min(w, cap)`; `min(W, cap)` | truncated importance sampling |
    | `mask`, `sequence_mask` | w if `floor <= w <= cap`, else 0; the same with W | IcePop, masked importance sampling |
    | `bypass` | 1; the sampler's log-probs replace the old log-probs in the importance ratio | |
    """

    kind: Literal["none", "tis", "mask", "sequence_tis", "sequence_mask", "bypass"] = "none"
    """Correction of the loss of a token for the difference between sampler and old policy."""
    cap: PositiveFloat = 2.0
    """Maximum importance weight."""
    floor: PositiveFloat | None = None
    """Minimum importance weight that is not masked. None: 1 / cap."""
    sequence_weight: Literal["product", "mean"] = "product"
    """Weight W of a completion. product: product of the weights w of its tokens; mean: their geometric mean, which does
    not grow with the length."""

    def __post_init__(self):
        super().__post_init__()
        is_weighted, is_masked = self.kind not in ("none", "bypass"), self.kind in ("mask", "sequence_mask")
        used = {"cap": is_weighted, "floor": is_masked, "sequence_weight": self.kind.startswith("sequence_")}
        check_unused(self, "kind", [name for name, read in used.items() if read])
        check(
            not is_masked or self.min_weight < self.cap,
            f"Correction.floor={self.min_weight} must be less than Correction.cap={self.cap}.",
        )

    @property
    def min_weight(self) -> float:
        """Minimum importance weight that is not masked."""
        return 1 / self.cap if self.floor is None else self.floor


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(CheckedFields):
    """Loss of a token with advantage A.

    The importance ratio of a token is `r = exp(log_prob - old)`, that of a completion `s = exp(mean(log_prob - old))`.

    | kind | loss | source |
    |---|---|---|
    | `clip` | `-min(r A, clip(r, 1 - low, 1 + high) A)`; for A < 0 at most `-dual A` | PPO, arXiv 1707.06347 |
    | `reinforce` | `-A log_prob`; with the correction `bypass` times r, without gradient | REINFORCE |
    | `cispo` | `-min(r, 1 + high) A log_prob`, the first factor without gradient | MiniMax-M1, arXiv 2506.13585 |
    | `gspo` | as `clip`, with s; its paper uses `low=3e-4, high=4e-4` | arXiv 2507.18071 |
    | `gspo_token` | the same value; the gradient of a token uses its own A | arXiv 2507.18071 |
    | `sapo` | `-4 / tau sigmoid(tau (r - 1)) A`, with tau by the sign of A | arXiv 2511.20347 |
    | `dppo` | `-r A`; 0 if A moves p away from the sampler's p beyond `threshold` | arXiv 2602.04879 |

    LUSPO is `gspo` with `aggregation="sequence_sum"`; GRPO, DAPO and Dr. GRPO are `clip` with other aggregations.
    """

    kind: Literal["clip", "reinforce", "cispo", "gspo", "gspo_token", "sapo", "dppo"] = "clip"
    """Policy loss."""
    low: Rate = 0.2
    """Lower clip range ε_low: with a negative advantage, ratios below 1 - low have no gradient."""
    high: NonNegativeFloat = 0.28
    """Upper clip range ε_high: with a positive advantage, ratios above 1 + high have no gradient."""
    dual: Annotated[float, InRange(above=1)] | None = None
    """Dual-clip bound: maximum ratio for negative advantages. None: no bound."""
    tau_positive: PositiveFloat = 1.0
    """Temperature τ of sapo for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Temperature τ of sapo for negative advantages."""
    threshold: PositiveFloat = 0.2
    """Maximum divergence of a token's probability from the sampler's probability (without one: from the old policy's),
    with dppo."""
    distance: Literal["tv", "kl"] = "tv"
    """Divergence of dppo. tv: difference of probabilities; kl: KL divergence of the two-class distribution "this token"
    and "another token"."""
    correction: Correction = Correction()
    """Correction for completions that older weights or another program sampled."""

    def __post_init__(self):
        super().__post_init__()
        used = {
            "clip": ("low", "high", "dual"),
            "cispo": ("high",),
            "gspo": ("low", "high", "dual"),
            "gspo_token": ("low", "high", "dual"),
            "sapo": ("tau_positive", "tau_negative"),
            "dppo": ("threshold", "distance"),
        }
        check_unused(self, "kind", (*used.get(self.kind, ()), "correction"))


def policy_loss(
    config: PolicyLoss,
    log_probs: Tokens,
    *,
    weights: Tokens,
    advantages: Tokens,
    old: Tokens | None = None,
    sampler: Tokens | None = None,
    completion_ids: Int[Array, "batch length"] | None = None,
    count: int = 1,
) -> tuple[Float32[Array, ""], Sums]:
    """Compute the sum of `weight * correction * loss` over tokens, and sums for metrics.

    Each element of an array belongs to the token at its index. Elements with weight 0 may be anything, also NaN. The
    gradient is with respect to `log_probs`.

    **Arguments:**

    - `log_probs`: log-probs of the policy that is trained.
    - `weights`: `token_weights` of the optimizer batch, so that the losses of microbatches add up to its loss.
    - `old`: log-probs of the weights that sampled the completions. None: the current weights (one update per batch), so
        that r = 1.
    - `sampler`: log-probs that the completions were sampled with. None: unknown, no correction.
    - `completion_ids`: number of each token's completion in its row, 1, 2, ..., `count`. None: a row is one completion.

    **Returns:** the loss, and sums over tokens with a weight other than 0: `tokens`, `ratio`, `clip_low` and
    `clip_high` (tokens without gradient because the ratio is below or above the clip range), `clip` (these and `dual`);
    with a sampler also `importance` (w before truncation), `importance_squared`, `log_prob_gap` (`|old - sampler|`) and
    `masked`.
    """
    kind = config.correction.kind
    check(
        kind == "none" or sampler is not None, f"Correction.kind={kind!r} needs the sampler's log-probs: pass sampler."
    )
    real = weights != 0
    log_probs, advantages = masked(log_probs, real), masked(advantages, real)
    old = stop_gradient(log_probs) if old is None else masked(old, real)
    sampler = None if sampler is None else masked(sampler, real)
    completion_ids = real.astype(jnp.int32) if completion_ids is None else jnp.where(real, completion_ids, 0)
    start = sampler if sampler is not None and kind == "bypass" else old
    ratio = _ratio(config, log_probs, start, completion_ids, count)
    low, high = _clipped(config, ratio, advantages, log_probs, old if sampler is None else sampler)
    dual = (advantages < 0) & (ratio > (math.inf if config.dual is None else config.dual))
    bounded = _bounded(config, ratio, low, high, dual)
    losses = _token_losses(config, ratio, bounded, advantages, log_probs)
    sums = dict(tokens=real, ratio=ratio, clip_low=low, clip_high=high, clip=low | high | dual)
    if sampler is not None:
        importance = jnp.exp(_log_ratio(old, sampler))
        factor = _correction_factor(config.correction, old, sampler, completion_ids, count)
        losses = losses * factor
        sums |= dict(importance=importance, importance_squared=importance**2, masked=factor == 0)
        sums |= dict(log_prob_gap=jnp.abs(old - sampler))
    loss = jnp.sum(jnp.where(real, weights.astype(jnp.float32) * losses, 0.0))
    return loss, {name: masked_sum(value, real) for name, value in sums.items()}


def _log_ratio(log_probs: Array, other: Array) -> Array:
    return jnp.clip(log_probs - other, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(config: PolicyLoss, log_probs: Array, start: Array, completion_ids: Array, count: int) -> Array:
    """Return the importance ratio of each token, or of its completion for `gspo`."""
    log_ratio = _log_ratio(log_probs, start)
    if config.kind not in ("gspo", "gspo_token"):
        return jnp.exp(log_ratio)
    of_completion = jnp.exp(to_tokens(completion_means(log_ratio, completion_ids, count), completion_ids))
    if config.kind == "gspo":
        return of_completion
    return stop_gradient(of_completion) * jnp.exp(log_probs - stop_gradient(log_probs))


def _clipped(
    config: PolicyLoss, ratio: Array, advantages: Array, log_probs: Array, sampler: Array
) -> tuple[Array, Array]:
    """Return which tokens are beyond the lower and the upper bound, with an advantage that moves them further away."""
    decreases, increases = advantages < 0, advantages > 0
    if config.kind == "dppo":
        below, above = _beyond_threshold(config, log_probs, sampler)
        return decreases & below, increases & above
    if config.kind in ("clip", "gspo", "gspo_token"):
        return decreases & (ratio < 1 - config.low), increases & (ratio > 1 + config.high)
    none = jnp.zeros_like(decreases)
    return none, (ratio > 1 + config.high if config.kind == "cispo" else none)


def _beyond_threshold(config: PolicyLoss, log_probs: Array, sampler: Array) -> tuple[Array, Array]:
    """Return where a token's probability is below, and above, the sampler's by more than `threshold`."""
    probs, sampler_probs = jnp.exp(log_probs), jnp.exp(sampler)
    distance = jnp.abs(probs - sampler_probs)
    if config.distance == "kl":
        eps = 1e-8
        distance = sampler_probs * _log_ratio(sampler, log_probs)
        distance += (1 - sampler_probs) * jnp.log((1 - sampler_probs + eps) / (1 - probs + eps))
    beyond = distance > config.threshold
    return beyond & (probs < sampler_probs), beyond & (probs > sampler_probs)


def _bounded(config: PolicyLoss, ratio: Array, low: Array, high: Array, dual: Array) -> Array:
    """Return the ratio, replaced by its bound where it is clipped; 0 where `dppo` masks a token."""
    bottom, top = (0.0, 0.0) if config.kind == "dppo" else (1 - config.low, 1 + config.high)
    bounded = jnp.where(high, top, jnp.where(low, bottom, ratio))
    return bounded if config.dual is None else jnp.where(dual, config.dual, bounded)


def _token_losses(config: PolicyLoss, ratio: Array, bounded: Array, advantages: Array, log_probs: Array) -> Array:
    """Return the loss of each token, without weight and correction."""
    if config.kind == "reinforce":
        factor = stop_gradient(ratio) if config.correction.kind == "bypass" else 1.0
        return -factor * advantages * log_probs
    if config.kind == "cispo":
        return -stop_gradient(bounded) * advantages * log_probs
    if config.kind == "sapo":
        tau = jnp.where(advantages > 0, config.tau_positive, config.tau_negative)
        return -4 / tau * nn.sigmoid(tau * (ratio - 1)) * advantages
    return -bounded * advantages


def _correction_factor(config: Correction, old: Array, sampler: Array, completion_ids: Array, count: int) -> Array:
    """Return the factor of each token's loss; `old` has no gradient."""
    if config.kind in ("none", "bypass"):
        return jnp.ones_like(old)
    log_weight = _log_ratio(old, sampler)
    if config.kind.startswith("sequence_"):
        reduce = completion_sums if config.sequence_weight == "product" else completion_means
        log_weight = to_tokens(reduce(log_weight, completion_ids, count), completion_ids)
    weight = jnp.exp(log_weight)
    if config.kind in ("tis", "sequence_tis"):
        return jnp.minimum(weight, config.cap)
    return jnp.where((weight >= config.min_weight) & (weight <= config.cap), weight, 0.0)


Estimator = Literal["k1", "k2", "k3", "k3_ratio"]


def kl_penalty(
    kind: Estimator,
    log_probs: Tokens,
    reference: Tokens,
    *,
    where: Bool[Array, "batch length"],
    old: Tokens | None = None,
) -> Tokens:
    """Estimate the KL divergence from a reference at each sampled token; 0 outside of `where`.

    With `d = log_prob - reference` and `r = exp(log_prob - old)`:

    | kind | estimate | expected gradient, for fixed samples |
    |---|---|---|
    | `k1` | `d` | 0: use it as a metric or in rewards, not as a loss |
    | `k2` | `d^2 / 2` | gradient of `KL(policy, reference)` |
    | `k3` | `exp(-d) - 1 + d` | gradient of `KL(reference, policy)`, with high variance |
    | `k3_ratio` | `r (exp(-d) - 1 + d)` | gradient of `KL(policy, reference)`, also off-policy |

    k1, k3 and k3_ratio are unbiased estimates of `KL(policy, reference)`; k2 has a small bias. k1 to k3 are from
    Schulman, "Approximating KL divergence", k3_ratio from DeepSeek-V3.2 (arXiv 2512.02556). Only k3_ratio reads `old`
    (see `policy_loss`).
    """
    check_option("kind", kind, get_args(Estimator))
    check(old is None or kind == "k3_ratio", f"kind={kind!r} does not read old: leave it out.")
    log_probs, reference = masked(log_probs, where), masked(reference, where)
    gap = _log_ratio(log_probs, reference)
    if kind == "k1":
        return gap
    if kind == "k2":
        return gap**2 / 2
    estimate = jnp.expm1(-gap) + gap
    if kind == "k3":
        return estimate
    old = stop_gradient(log_probs) if old is None else masked(old, where)
    return jnp.exp(_log_ratio(log_probs, old)) * estimate


def value_loss(
    values: Tokens, returns: Tokens, *, weights: Tokens, old: Tokens | None = None, clip: float = 0.2
) -> Float32[Array, ""]:
    """Compute PPO's clipped value loss: the sum of `weight / 2 * max((V - G)^2, (V' - G)^2)` over tokens.

    V' is V clipped to within `clip` of the old value. Without `old`, the loss is `weight / 2 * (V - G)^2`. Elements
    with weight 0 may be anything.
    """
    real = weights != 0
    values, returns = masked(values, real), masked(returns, real)
    squares = (values - returns) ** 2
    if old is not None:
        clipped = (_clip_near(values, masked(old, real), clip) - returns) ** 2
        squares = jnp.where(clipped > squares, clipped, squares)
    return jnp.sum(jnp.where(real, weights.astype(jnp.float32) * squares, 0.0)) / 2


def value_is_clipped(values: Tokens, returns: Tokens, *, old: Tokens, clip: float = 0.2) -> Bool[Array, "batch length"]:
    """Return where `value_loss` has no gradient because the value has moved by more than `clip` from the old value."""
    return (_clip_near(values, old, clip) - returns) ** 2 > (values - returns) ** 2


def _clip_near(values: Array, old: Array, clip: float) -> Array:
    return old + jnp.clip(values - old, -clip, clip)
