"""Preference losses: of pairs of completions (DPO and others), of labeled completions (KTO), and of reward models."""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Literal

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Array, Bool, Float, Float32, Int

from eqx_decoders.errors import (
    CheckedFields,
    FiniteFloat,
    InRange,
    NonNegativeFloat,
    PositiveFloat,
    check,
    check_unused,
)
from eqx_decoders.training.objectives.reductions import masked, masked_sum


Pairs = Float[Array, "pairs"]
Completions = Float[Array, "completions"]
Sums = dict[str, Float32[Array, ""]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLoss(CheckedFields):
    """Loss of a pair of completions.

    `c` and `r` are the log-probs of the chosen and the rejected completion minus the reference's, `m = beta (c - r)` is
    the margin, and `s` the sigmoid.

    | kind | loss | source |
    |---|---|---|
    | `sigmoid` | `-(1 - smoothing) log s(m) - smoothing log s(-m)` | DPO, arXiv 2305.18290; smoothed: cDPO |
    | `robust` | `(-(1 - smoothing) log s(m) + smoothing log s(-m)) / (1 - 2 smoothing)` | arXiv 2403.00409 |
    | `hinge` | `max(0, 1 - m)` | SLiC, arXiv 2305.10425 |
    | `ipo` | `(c - r - 1 / (2 beta))^2` | arXiv 2310.12036 |
    | `apo_zero`, `apo_down` | `1 - s(beta c) + s(beta r)`; `s(beta c) + 1 - s(m)` | arXiv 2408.06266 |
    | `nca` | `-log s(beta c) - log s(-beta c) / 2 - log s(-beta r) / 2` | arXiv 2402.05369 |
    | `bco` | `-log s(beta c - b) - log s(b - beta r)`, with the baseline b | arXiv 2404.04656 |
    | `sppo` | `(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2` | SPPO hard, arXiv 2405.00675 |
    | `exo` | KL of (s(m), s(-m)) from (1 - smoothing, smoothing) | arXiv 2402.00856 |
    | `cpo` | `-log s(m)`, without reference | arXiv 2401.08417 |
    | `simpo` | `-log s(m - gamma)` of means over tokens, without reference | arXiv 2405.14734 |
    | `orpo` | `-beta log s(log odds(c) - log odds(r))` of means over tokens, without reference | arXiv 2403.07691 |

    `nll_weight` times the negative log-likelihood of the chosen completion, the mean over its tokens, is added.
    """

    kind: Literal[
        "sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "nca", "bco", "sppo", "exo", "cpo", "simpo", "orpo"
    ] = "sigmoid"
    """Preference loss. sigmoid is DPO."""
    beta: PositiveFloat = 0.1
    """Temperature β: factor of the difference of log-probs; for orpo, weight of the odds ratio. SimPO's authors use 2
    to 10."""
    smoothing: Annotated[float, InRange(minimum=0, below=0.5)] = 0.0
    """Label smoothing: assumed share of pairs with swapped completions."""
    over: Literal["sums", "tokens"] | None = None
    """Reduction of a completion's log-probs: sums, or tokens (mean). None: mean for simpo and orpo, otherwise sums.
    Required for ipo."""
    gamma: FiniteFloat = 0.0
    """Target margin γ between the rewards of the two completions."""
    nll_weight: NonNegativeFloat | None = None
    """Weight of the negative log-likelihood of the chosen completion. None: 1 for orpo and cpo, as in their papers,
    otherwise 0. With 0, both completions may become less likely while the margin grows."""

    def __post_init__(self):
        super().__post_init__()
        kind, name = _KINDS[self.kind], f"PairLoss.kind={self.kind!r}"
        # subclasses add fields of their own, which do not depend on the kind
        added = [f.name for f in dataclasses.fields(self) if f.name not in PairLoss.__dataclass_fields__]
        check_unused(self, "kind", ("beta", "nll_weight", *kind.options, *added))
        check(self.kind != "ipo" or self.over is not None, f"{name} needs over='sums' (its paper) or 'tokens' (TRL).")
        check(self.kind != "exo" or self.smoothing > 0, f"{name} needs smoothing above 0, such as 1e-3.")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a reference model."""
        return self.kind not in ("cpo", "simpo", "orpo")

    @property
    def means(self) -> bool:
        """Whether log-probs are averaged over tokens."""
        return self.kind in ("simpo", "orpo") or self.over == "tokens"

    @property
    def weight_of_nll(self) -> float:
        """Weight of the negative log-likelihood of the chosen completion."""
        default = 1.0 if self.kind in ("orpo", "cpo") else 0.0
        return default if self.nll_weight is None else self.nll_weight


def pair_loss(
    config: PairLoss,
    chosen: Pairs,
    rejected: Pairs,
    *,
    chosen_lengths: Int[Array, "pairs"],
    rejected_lengths: Int[Array, "pairs"],
    reference_chosen: Pairs | None = None,
    reference_rejected: Pairs | None = None,
    baseline: Float[Array, ""] | None = None,
) -> tuple[Float32[Array, "pairs"], Sums]:
    """Compute the loss of each pair from the summed log-probs of its completions, and sums for metrics.

    If one of its completions has no tokens, the loss of a pair is 0, and its log-probs may be anything.

    **Arguments:**

    - `chosen`, `rejected`: summed log-probs of the trained model. The gradient is with respect to these.
    - `chosen_lengths`, `rejected_lengths`: numbers of tokens.
    - `reference_chosen`, `reference_rejected`: summed log-probs of the reference model, if the loss has one.
    - `baseline`: running mean of all rewards, only for `bco`. None: 0.

    **Returns:** losses, and sums over pairs: `pairs`, `correct` (the chosen completion has the larger reward),
    `margin`, `chosen_reward` and `rejected_reward` (beta times the compared log-probs), `chosen_log_prob` and
    `rejected_log_prob` (summed over tokens).
    """
    num_references = (reference_chosen is not None) + (reference_rejected is not None)
    rule = "needs both log-probs of the reference" if config.needs_reference else "has no reference: leave it out"
    check(num_references == 2 * config.needs_reference, f"PairLoss.kind={config.kind!r} {rule}.")
    check(baseline is None or config.kind == "bco", f"PairLoss.kind={config.kind!r} has no baseline: leave it out.")
    real = (chosen_lengths > 0) & (rejected_lengths > 0)
    log_probs = [masked(values, real) for values in (chosen, rejected)]
    lengths = [jnp.maximum(count, 1).astype(jnp.float32) for count in (chosen_lengths, rejected_lengths)]
    ratios = log_probs
    if reference_chosen is not None and reference_rejected is not None:
        references = (reference_chosen, reference_rejected)
        ratios = [x - masked(y, real) for x, y in zip(log_probs, references, strict=True)]
    if config.means:
        ratios = [x / length for x, length in zip(ratios, lengths, strict=True)]
    compute = _KINDS[config.kind].loss
    losses = compute(config, ratios[0], ratios[1], jnp.float32(0) if baseline is None else baseline)
    losses = losses - config.weight_of_nll * log_probs[0] / lengths[0]
    rewards = [config.beta * x for x in ratios]
    sums = dict(pairs=real, correct=rewards[0] > rewards[1], margin=rewards[0] - rewards[1])
    sums |= dict(chosen_reward=rewards[0], rejected_reward=rewards[1])
    sums |= dict(chosen_log_prob=log_probs[0], rejected_log_prob=log_probs[1])
    return jnp.where(real, losses, 0.0), {name: masked_sum(value, real) for name, value in sums.items()}


# --- (config, c, r, baseline) -> loss, for each kind ---


def _dpo(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    margin = config.beta * (chosen - rejected) - config.gamma
    return -(1 - config.smoothing) * log_sigmoid(margin) - config.smoothing * log_sigmoid(-margin)


def _robust(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    margin, wrong = config.beta * (chosen - rejected), config.smoothing
    return (-(1 - wrong) * log_sigmoid(margin) + wrong * log_sigmoid(-margin)) / (1 - 2 * wrong)


def _hinge(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    return relu(1 - config.beta * (chosen - rejected))


def _ipo(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    return (chosen - rejected - 1 / (2 * config.beta)) ** 2


def _apo_zero(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    return 1 - sigmoid(config.beta * chosen) + sigmoid(config.beta * rejected)


def _apo_down(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    return sigmoid(config.beta * chosen) + 1 - sigmoid(config.beta * (chosen - rejected))


def _nca(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    chosen, rejected = config.beta * chosen, config.beta * rejected
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _bco(config: PairLoss, chosen: Array, rejected: Array, baseline: Array) -> Array:
    return -log_sigmoid(config.beta * chosen - baseline) - log_sigmoid(baseline - config.beta * rejected)


def _sppo(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    half = 1 / (2 * config.beta)
    return (chosen - half) ** 2 + (rejected + half) ** 2


def _exo(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    margin, wrong = config.beta * (chosen - rejected), config.smoothing
    right = sigmoid(margin) * (log_sigmoid(margin) - math.log1p(-wrong))
    return right + sigmoid(-margin) * (log_sigmoid(-margin) - math.log(wrong))


def _orpo(config: PairLoss, chosen: Array, rejected: Array, _: Array) -> Array:
    return -config.beta * log_sigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_probs: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Compute `log(p / (1 - p))` from `log p`, accurate in float32 for p near 1. At most 13.8, at `log p = -1e-6`."""
    log_probs = jnp.minimum(log_probs, -1e-6)
    return log_probs - jnp.log(-jnp.expm1(log_probs))


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Loss of a kind, and the options that it reads besides beta."""

    loss: Callable[[PairLoss, Array, Array, Array], Array]
    options: tuple[str, ...] = ("over",)


_KINDS = {
    "sigmoid": _Kind(_dpo, ("over", "smoothing")),
    "robust": _Kind(_robust, ("over", "smoothing")),
    "hinge": _Kind(_hinge),
    "ipo": _Kind(_ipo),
    "apo_zero": _Kind(_apo_zero),
    "apo_down": _Kind(_apo_down),
    "nca": _Kind(_nca),
    "bco": _Kind(_bco),
    "sppo": _Kind(_sppo),
    "exo": _Kind(_exo, ("over", "smoothing")),
    "cpo": _Kind(_dpo),
    "simpo": _Kind(_dpo, ("gamma",)),
    "orpo": _Kind(_orpo, ()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOLoss(CheckedFields):
    """Loss of a labeled completion (KTO, arXiv 2402.01306).

    With `v = beta (log_prob - reference - z)`, the loss of a desirable completion is
    `desirable_weight * (1 - sigmoid(v))`, that of an undesirable one `undesirable_weight * (1 - sigmoid(-v))`. The
    paper recommends that `desirable_weight` times the number of desirable completions is 1 to 4/3 times
    `undesirable_weight` times the number of undesirable ones.
    """

    beta: PositiveFloat = 0.1
    """Temperature β: factor of the difference of log-probs."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable completions."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable completions."""


def kto_loss(
    config: KTOLoss,
    log_probs: Completions,
    reference: Completions,
    desirable: Bool[Array, "completions"],
    *,
    lengths: Int[Array, "completions"],
    baseline: Float[Array, ""] | Completions,
) -> tuple[Float32[Array, "completions"], Sums]:
    """Compute the loss of each completion from its summed log-probs, and sums for metrics.

    The loss of a completion without tokens is 0, and its log-probs may be anything. `baseline` is z, the estimate of
    the KL divergence from the reference, `max(0, mean(log_prob - reference))` over completions of other prompts. It has
    no gradient.

    **Returns:** losses, and sums over completions: `completions`, `desirable`, and `desirable_reward` and
    `undesirable_reward`, `beta (log_prob - reference)` of each kind.
    """
    real = lengths > 0
    rewards = config.beta * (masked(log_probs, real) - masked(reference, real))
    values = rewards - config.beta * stop_gradient(baseline)
    losses = jnp.where(
        desirable, config.desirable_weight * sigmoid(-values), config.undesirable_weight * sigmoid(values)
    )
    sums = dict(completions=real, desirable=desirable)
    sums |= dict(desirable_reward=jnp.where(desirable, rewards, 0.0))
    sums |= dict(undesirable_reward=jnp.where(desirable, 0.0, rewards))
    return jnp.where(real, losses, 0.0), {name: masked_sum(value, real) for name, value in sums.items()}


def pair_metrics(sums: Sums) -> Sums:
    """Return means over pairs from sums over pairs."""
    pairs = jnp.maximum(sums["pairs"], 1.0)
    names = {"correct": "reward_accuracy", "margin": "reward_margin"}
    means = {names.get(name, name): value / pairs for name, value in sums.items() if name != "pairs"}
    return {"pairs": sums["pairs"]} | means


def reward_loss(
    chosen: Pairs,
    rejected: Pairs,
    *,
    real: Bool[Array, "pairs"] | None = None,
    margins: Pairs | None = None,
    centering: float = 0.0,
) -> tuple[Float32[Array, "pairs"], Sums]:
    """Compute `-log sigmoid(c - r - margin) + centering (c + r)^2` from the scores of each pair, and sums for metrics.

    Bradley–Terry loss, with the margins of Llama 2 (arXiv 2307.09288) and centered scores (arXiv 2312.09244). `real`:
    which pairs count. None: all pairs.

    **Returns:** losses, and sums over pairs: `pairs`, `correct`, `margin` (`c - r`), `chosen_reward`,
    `rejected_reward`.
    """
    real = jnp.ones(chosen.shape, bool) if real is None else real
    chosen, rejected = masked(chosen, real), masked(rejected, real)
    gaps = chosen - rejected
    needed = jnp.float32(0) if margins is None else masked(margins, real)
    losses = -log_sigmoid(gaps - needed) + centering * (chosen + rejected) ** 2
    sums = dict(pairs=real, correct=gaps > 0, margin=gaps, chosen_reward=chosen, rejected_reward=rejected)
    return jnp.where(real, losses, 0.0), {name: masked_sum(value, real) for name, value in sums.items()}
