"""Advantages: how much better an answer, or a token of it, was than expected. Computed on the host in float64."""

import math
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Float32, Float64, Integer, Shaped

from eqx_decoders.errors import check, check_integer, check_option


Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["none", "group", "batch", "mean"]


def group_advantages(
    rewards: Float[np.ndarray, "answers"],
    groups: Shaped[np.ndarray, "answers"],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "none",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float32[np.ndarray, "answers"]:
    """Compare each answer with the others to the same prompt: `(reward - baseline of the group) / scale`.

    | baseline | scale | name |
    |---|---|---|
    | `mean` | `none` | Dr. GRPO, arXiv 2503.20783 |
    | `mean` | `group`: std of the group's rewards + `eps` | GRPO, arXiv 2402.03300 |
    | `mean` | `batch`: std of all rewards + `eps` | |
    | `mean` | `mean`: the group's mean reward | MaxRL |
    | `leave_one_out`: the mean of the others | `none` | RLOO, arXiv 2402.14740 |
    | `none` | `none` | REINFORCE; with `whiten` REINFORCE++, arXiv 2501.03262 |

    A group whose rewards are all equal, compared exactly as they are given, has advantages of exactly 0, whatever the
    rounding of its mean and std; so has a group of one. Without a baseline its advantages are its rewards.

    **Arguments:**

    - `rewards`: NaN: could not be computed. The answer is of no group, and its advantage is NaN: give it no weight.
    - `groups`: which prompt each answer is of, numbers or words.
    - `ddof`: 1: std divides by n - 1; 0: by n.
    """
    check_option("baseline", baseline, get_args(Baseline))
    check_option("scale", scale, get_args(Scale))
    compared = baseline != "none" or scale in ("none", "batch")
    check(compared, f"scale={scale!r} needs a baseline: rewards of equal answers have no std to be divided by.")
    _, group = np.unique(groups, return_inverse=True)
    known = ~np.isnan(rewards)
    advantages = np.full(rewards.shape, np.nan)
    if np.any(known):
        some, numbers = rewards[known].astype(np.float64), group[known]
        advantages[known] = _known_advantages(some, numbers, baseline=baseline, scale=scale, ddof=ddof, eps=eps)
    return advantages.astype(np.float32)


def _known_advantages(
    rewards: np.ndarray, group: np.ndarray, *, baseline: str, scale: str, ddof: int, eps: float
) -> np.ndarray:
    """Compute the advantages of answers all of which have a reward; groups are numbered."""
    counts = np.bincount(group).clip(1)
    means = np.bincount(group, rewards) / counts
    centered = rewards - means[group]
    if baseline == "none":
        advantages = rewards
    elif baseline == "leave_one_out":
        advantages = centered * (counts / np.maximum(counts - 1, 1))[group]
    else:
        advantages = centered
    if scale == "group":
        squares = np.bincount(group, centered**2) / np.maximum(counts - ddof, 1)
        advantages = advantages / (np.sqrt(squares)[group] + eps)
    elif scale == "batch":
        squares = np.sum((rewards - rewards.mean()) ** 2) / max(rewards.size - ddof, 1)
        advantages = advantages / (np.sqrt(squares) + eps)
    elif scale == "mean":
        check(bool(rewards.min() >= 0), f"rewards with {rewards.min()} must be at least 0 with scale='mean'.")
        advantages = advantages / np.where(means > 0, means, 1.0)[group]
    return advantages if baseline == "none" else np.where(_constant(rewards, group), 0.0, advantages)


def _constant(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return whether all rewards of an answer's group are equal."""
    least, most = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(least, group, rewards)
    np.maximum.at(most, group, rewards)
    return (least == most)[group]


def whiten(
    values: Float[np.ndarray, "rows length"], mask: Shaped[np.ndarray, "rows length"], *, ddof: int = 1
) -> Float32[np.ndarray, "rows length"]:
    """Compute `(value - mean) / std` over all tokens of the mask, of the whole batch; 0 elsewhere.

    REINFORCE++ (arXiv 2501.03262) does so with the returns, and its form with a baseline with rewards less the mean of
    their group. Long answers count by their length. Values that are all equal become exactly 0.
    """
    real = np.asarray(mask) != 0
    numbers = values[real].astype(np.float64)
    result = np.zeros(values.shape)
    if numbers.size and numbers.min() < numbers.max():
        variance = np.sum((numbers - numbers.mean()) ** 2) / (numbers.size - ddof)
        result[real] = (numbers - numbers.mean()) / np.sqrt(variance + 1e-8)
    return result.astype(np.float32)


def token_rewards(
    rewards: Float[np.ndarray, "rows"],
    mask: Shaped[np.ndarray, "rows length"],
    *,
    divergence: Float[np.ndarray, "rows length"] | None = None,
    beta: float = 0.0,
) -> Float64[np.ndarray, "rows length"]:
    """Give the reward of an answer to its last token, and take `beta * divergence` off each: RLHF's KL in the reward.

    `divergence` is an estimate for each token, such as `log policy - log reference`. 0 outside of the mask.
    """
    real = np.asarray(mask) != 0
    result = np.zeros(real.shape) if divergence is None else np.where(real, -beta * divergence.astype(np.float64), 0.0)
    last = real.shape[1] - 1 - np.argmax(real[:, ::-1], axis=1)
    rows = np.flatnonzero(real.any(axis=1))
    result[rows, last[rows]] += rewards[rows]
    return result


def generalized_advantages(
    rewards: Float[np.ndarray, "rows length"],
    values: Float[np.ndarray, "rows length"],
    mask: Shaped[np.ndarray, "rows length"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Float[np.ndarray, "rows"] | None = None,
) -> tuple[Float32[np.ndarray, "rows length"], Float32[np.ndarray, "rows length"]]:
    """Compute `A_t = d_t + gamma lam A_(t+1)` with `d_t = reward_t + gamma V_(t+1) - V_t`, and returns `A_t + V_t`.

    GAE (arXiv 1506.02438) over the policy's own tokens: one of a tool between two of them is skipped, and the next
    value is that of the next token of the policy. Rows are answers (not packed), with any padding.

    **Arguments:**

    - `mask`: which tokens the policy drew. Values elsewhere may be anything; rewards elsewhere would be lost and are
        refused.
    - `bootstrap`: value of what would have come after a row that was truncated; 0 for rows that ended. None: all ended.

    **Returns:** advantages, to be whitened or not, and returns, which the critic learns; 0 outside of the mask.
    """
    real = np.asarray(mask) != 0
    check(not np.any(rewards[~real]), "rewards of tokens that are not in the mask would be lost: give them to others.")
    values = np.where(real, values.astype(np.float64), 0.0)
    following = np.zeros(real.shape[0]) if bootstrap is None else bootstrap.astype(np.float64)
    advantages, ahead = np.zeros(real.shape), np.zeros(real.shape[0])
    for index in reversed(range(real.shape[1])):
        here, value = real[:, index], values[:, index]
        advantage = rewards[:, index] + gamma * following - value + gamma * lam * ahead
        ahead, following = np.where(here, advantage, ahead), np.where(here, value, following)
        advantages[:, index] = np.where(here, advantage, 0.0)
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def discounted_returns(
    rewards: Float[np.ndarray, "rows length"], mask: Shaped[np.ndarray, "rows length"], *, gamma: float = 1.0
) -> Float32[np.ndarray, "rows length"]:
    """Compute `G_t = reward_t + gamma G_(t+1)` over the tokens of the mask; 0 elsewhere."""
    return generalized_advantages(rewards, np.zeros(rewards.shape), mask, gamma=gamma, lam=1.0)[0]


def overlong_penalty(lengths: Shaped[np.ndarray, "answers"], limit: int, buffer: int) -> Float64[np.ndarray, "answers"]:
    """Compute `(limit - buffer - length) / buffer`, within -1 and 0: a penalty to be added to rewards of long answers.

    DAPO (arXiv 2503.14476): 0 up to `limit - buffer` tokens, -1 from `limit` on.
    """
    check_integer("limit", limit)
    check_integer("buffer", buffer, maximum=limit)
    return np.clip((limit - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0) + 0.0


def pass_at_k(
    correct: Integer[np.ndarray, "prompts"], samples: Integer[np.ndarray, "prompts"], k: int
) -> Float64[np.ndarray, "prompts"]:
    """Estimate the chance that one of `k` answers is right: `1 - C(samples - correct, k) / C(samples, k)`.

    Unbiased (arXiv 2107.03374). Standard errors are those of prompts: answers to one prompt are not independent.
    """
    check_integer("k", k)
    check(bool(np.all(samples >= k)), f"k={k} must be at most the number of samples, {np.min(samples)}.")
    pairs = zip(correct.tolist(), samples.tolist(), strict=True)
    return np.asarray([1.0 - math.comb(n - c, k) / math.comb(n, k) for c, n in pairs], np.float64)
