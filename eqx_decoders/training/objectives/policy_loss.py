"""Losses of policies: what tokens drawn by a model lose, from their advantages and log-probs."""

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
from eqx_decoders.training.objectives.answers import answer_means, answer_sums, masked, masked_sum, to_tokens


LARGEST = 20.0  # of the logarithm of a ratio: what lies farther off has no gradient, and exp stays finite

Sums = dict[str, Float32[Array, ""]]
Tokens = Float[Array, "batch length"]
Sides = tuple[Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction(CheckedFields):
    """Correction of a policy loss for answers that another distribution than the old policy's was drawn from.

    `w = exp(old - sampler)` of a token, without gradient; `W` is that of an answer. The loss of a token is multiplied:

    | kind | by | source |
    |---|---|---|
    | `none` | 1 | |
    | `tis`, `row_tis` | `min(w, cap)`; `min(W, cap)` | truncated importance sampling |
    | `mask`, `row_mask` | w where `floor <= w <= cap`, else 0; the same of W | IcePop, masked importance sampling |
    | `bypass` | 1, and the sampler's log-probs stand in for the old ones in the ratio | |
    """

    kind: Literal["none", "tis", "mask", "row_tis", "row_mask", "bypass"] = "none"
    """Correction of the loss of a token for the difference between sampler and old policy."""
    cap: PositiveFloat = 2.0
    """Maximum weight."""
    floor: PositiveFloat | None = None
    """Minimum weight that is not masked. None: 1 / cap."""
    row: Literal["product", "mean"] = "product"
    """Weight W of a completion. product: product of the weights w of its tokens; mean: their geometric mean, which does
    not grow with the length."""

    def __post_init__(self):
        super().__post_init__()
        weighs, masks = self.kind not in ("none", "bypass"), self.kind in ("mask", "row_mask")
        used = {"cap": weighs, "floor": masks, "row": self.kind.startswith("row_")}
        check_unused(self, "kind", [name for name, read in used.items() if read])
        rule = f"must be less than Correction.cap={self.cap}"
        check(not masks or self.least < self.cap, f"Correction.floor={self.least} {rule}.")

    @property
    def least(self) -> float:
        """The least weight that is not masked."""
        return 1 / self.cap if self.floor is None else self.floor


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(CheckedFields):
    """Loss of a token: from its advantage A, `r = exp(log_prob - old)` and, in rows, `s = exp(mean(log_prob - old))`.

    | kind | loss | source |
    |---|---|---|
    | `clip` | `-min(r A, clip(r, 1 - low, 1 + high) A)`; of A < 0 at most `-dual A` | PPO, arXiv 1707.06347 |
    | `reinforce` | `-A log_prob`; times r, without gradient, with the correction `bypass` | REINFORCE |
    | `cispo` | `-min(r, 1 + high) A log_prob`, the first factor without gradient | MiniMax-M1, arXiv 2506.13585 |
    | `gspo` | as `clip` of s; `low=3e-4, high=4e-4` in its paper | arXiv 2507.18071 |
    | `gspo_token` | the same number; the gradient of a token is by its own A | arXiv 2507.18071 |
    | `sapo` | `-4 / tau sigmoid(tau (r - 1)) A`, tau by the sign of A | arXiv 2511.20347 |
    | `dppo` | `-r A`; 0 where A pushes p on and p is farther than `threshold` from the sampler's | arXiv 2602.04879 |

    LUSPO is `gspo` with weights of tokens of `aggregation="row_sum"`; GRPO, DAPO and Dr. GRPO are `clip` with others.
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
    answers: Int[Array, "batch length"] | None = None,
    count: int = 1,
) -> tuple[Float32[Array, ""], Sums]:
    """Sum `weight * correction * loss` over tokens, and what metrics are made of.

    All arrays are of tokens, at the index of the token that they are about. Tokens of weight 0 may hold anything, also
    NaN. The gradient is with respect to `log_probs`.

    **Arguments:**

    - `log_probs`: of the policy that is trained.
    - `weights`: `token_weights` of the whole optimizer batch, so that sums of microbatches are the loss of the batch.
    - `old`: log-probs of the weights that drew the answers; None: these weights (one update for each batch), r is 1.
    - `sampler`: log-probs that the answers were really drawn by; None: not known, and not corrected for.
    - `answers`: number of each token's answer in its row, 1, 2, … `count`; None: a row is one answer.

    **Returns:** the sum, and sums over the tokens of weights other than 0: `tokens`, `ratio`, `clip_low` and
    `clip_high` (tokens without gradient, since the ratio left the bounds), `clip` (these two and `dual`); with a
    sampler also `importance` (w as it is, before truncation), `importance_squared`, `log_prob_gap`
    (`|old - sampler|`) and `masked`.
    """
    kind = config.correction.kind
    check(kind == "none" or sampler is not None, f"Correction.kind={kind!r} needs the log-probs of the sampler.")
    real = weights != 0
    log_probs, advantages = masked(log_probs, real), masked(advantages, real)
    old = stop_gradient(log_probs) if old is None else masked(old, real)
    sampler = None if sampler is None else masked(sampler, real)
    answers = real.astype(jnp.int32) if answers is None else jnp.where(real, answers, 0)
    start = sampler if sampler is not None and kind == "bypass" else old
    ratio = _ratio(config, log_probs, start, answers, count)
    far = None if config.kind != "dppo" else _farther(config, log_probs, old if sampler is None else sampler)
    low, high = _outside(config, ratio, advantages, far)
    dual = (advantages < 0) & (ratio > (math.inf if config.dual is None else config.dual))
    bounded = _bounded(config, ratio, low, high, dual)
    losses = _token_losses(config, ratio, bounded, advantages, log_probs)
    sums = dict(tokens=real, ratio=ratio, clip_low=low, clip_high=high, clip=low | high | dual)
    if sampler is not None:
        importance = jnp.exp(_difference(old, sampler))
        factor = _factor(config.correction, old, sampler, answers, count)
        losses = losses * factor
        sums |= dict(importance=importance, importance_squared=importance**2, masked=factor == 0)
        sums |= dict(log_prob_gap=jnp.abs(old - sampler))
    loss = jnp.sum(jnp.where(real, weights.astype(jnp.float32) * losses, 0.0))
    return loss, {name: masked_sum(value, real) for name, value in sums.items()}


def _difference(one: Array, other: Array) -> Array:
    """Return the logarithm of a ratio, of which exp is finite."""
    return jnp.clip(one - other, -LARGEST, LARGEST)


def _ratio(config: PolicyLoss, log_probs: Array, start: Array, answers: Array, count: int) -> Array:
    """Return the ratio of each token: of its own probabilities, or of those of its answer."""
    logarithm = _difference(log_probs, start)
    if config.kind not in ("gspo", "gspo_token"):
        return jnp.exp(logarithm)
    row = jnp.exp(to_tokens(answer_means(logarithm, answers, count), answers))
    if config.kind == "gspo":
        return row
    return stop_gradient(row) * jnp.exp(log_probs - stop_gradient(log_probs))


def _outside(
    config: PolicyLoss, ratio: Array, advantages: Array, far: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """Return where the ratio left the bounds and its advantage pushes it on: downwards, upwards."""
    down, up = advantages < 0, advantages > 0
    if far is not None:
        below, above = far
        return down & below, up & above
    if config.kind in ("clip", "gspo", "gspo_token"):
        return down & (ratio < 1 - config.low), up & (ratio > 1 + config.high)
    if config.kind == "cispo":
        return jnp.zeros_like(down), ratio > 1 + config.high
    return jnp.zeros_like(down), jnp.zeros_like(down)


def _farther(config: PolicyLoss, log_probs: Array, start: Array) -> Sides:
    """Return where the probability of a token is below, and above, that of the sampler by more than the threshold."""
    one, other = jnp.exp(log_probs), jnp.exp(start)
    distance = jnp.abs(one - other)
    if config.distance == "kl":
        least = 1e-8
        same = other * _difference(start, log_probs)
        distance = same + (1 - other) * jnp.log((1 - other + least) / (1 - one + least))
    beyond = distance > config.threshold
    return beyond & (one < other), beyond & (one > other)


def _bounded(config: PolicyLoss, ratio: Array, low: Array, high: Array, dual: Array) -> Array:
    """Return the ratio where it has a gradient, and its bounds elsewhere; 0 where `dppo` masks a token."""
    bottom, top = (0.0, 0.0) if config.kind == "dppo" else (1 - config.low, 1 + config.high)
    bounded = jnp.where(high, top, jnp.where(low, bottom, ratio))
    return bounded if config.dual is None else jnp.where(dual, config.dual, bounded)


def _token_losses(config: PolicyLoss, ratio: Array, bounded: Array, advantages: Array, log_probs: Array) -> Array:
    """Return the loss of each token, not weighted and not corrected."""
    if config.kind == "reinforce":
        factor = stop_gradient(ratio) if config.correction.kind == "bypass" else 1.0
        return -factor * advantages * log_probs
    if config.kind == "cispo":
        return -stop_gradient(bounded) * advantages * log_probs
    if config.kind == "sapo":
        tau = jnp.where(advantages > 0, config.tau_positive, config.tau_negative)
        return -4 / tau * nn.sigmoid(tau * (ratio - 1)) * advantages
    return -bounded * advantages


def _factor(config: Correction, old: Array, sampler: Array, answers: Array, count: int) -> Array:
    """Return what the loss of each token is multiplied by; `old` has no gradient."""
    if config.kind in ("none", "bypass"):
        return jnp.ones_like(old)
    logarithm = _difference(old, sampler)
    if config.kind.startswith("row_"):
        of_answers = answer_sums if config.row == "product" else answer_means
        logarithm = to_tokens(of_answers(logarithm, answers, count), answers)
    weight = jnp.exp(logarithm)
    if config.kind in ("tis", "row_tis"):
        return jnp.minimum(weight, config.cap)
    return jnp.where((weight >= config.least) & (weight <= config.cap), weight, 0.0)


Estimator = Literal["k1", "k2", "k3", "k3_ratio"]


def kl_penalty(
    kind: Estimator,
    log_probs: Tokens,
    reference: Tokens,
    *,
    where: Bool[Array, "batch length"],
    old: Tokens | None = None,
) -> Tokens:
    """Estimate the KL divergence from a reference by each token drawn, `d = log_prob - reference`; 0 where not `where`.

    | kind | estimate | expectation of its gradient, the draws fixed |
    |---|---|---|
    | `k1` | `d` | 0: a number, or a part of rewards, and no loss |
    | `k2` | `d^2 / 2` | that of `KL(policy, reference)` |
    | `k3` | `exp(-d) - 1 + d` | that of `KL(reference, policy)`, with spikes |
    | `k3_ratio` | `r (exp(-d) - 1 + d)`, `r = exp(log_prob - old)` | that of `KL(policy, reference)`, also off policy |

    The expectation of k1, k3 and k3_ratio is `KL(policy, reference)`, that of k2 is near it. `k3_ratio` is of
    DeepSeek-V3.2 (arXiv 2512.02556), and only it reads `old`, which is as in `policy_loss`. The others: Schulman,
    "Approximating KL divergence".
    """
    check_option("kind", kind, get_args(Estimator))
    check(old is None or kind == "k3_ratio", f"kind={kind!r} does not use old: leave it out.")
    log_probs, reference = masked(log_probs, where), masked(reference, where)
    gap = _difference(log_probs, reference)
    if kind == "k1":
        return gap
    if kind == "k2":
        return gap**2 / 2
    estimate = jnp.expm1(-gap) + gap
    if kind == "k3":
        return estimate
    old = stop_gradient(log_probs) if old is None else masked(old, where)
    return jnp.exp(_difference(log_probs, old)) * estimate


def value_loss(
    values: Tokens, returns: Tokens, *, weights: Tokens, old: Tokens | None = None, clip: float = 0.2
) -> Float32[Array, ""]:
    """Sum `weight / 2 * max((V - G)^2, (V' - G)^2)` over tokens, V' at most `clip` from the old value; PPO's critic.

    `old` None: `weight / 2 * (V - G)^2`. Tokens of weight 0 may hold anything.
    """
    real = weights != 0
    values, returns = masked(values, real), masked(returns, real)
    squares = (values - returns) ** 2
    if old is not None:
        clipped = (_near(values, masked(old, real), clip) - returns) ** 2
        squares = jnp.where(clipped > squares, clipped, squares)
    return jnp.sum(jnp.where(real, weights.astype(jnp.float32) * squares, 0.0)) / 2


def value_is_clipped(values: Tokens, returns: Tokens, *, old: Tokens, clip: float = 0.2) -> Bool[Array, "batch length"]:
    """Return where `value_loss` has no gradient, since the value moved more than `clip` from the old one."""
    return (_near(values, old, clip) - returns) ** 2 > (values - returns) ** 2


def _near(values: Array, old: Array, clip: float) -> Array:
    return old + jnp.clip(values - old, -clip, clip)
