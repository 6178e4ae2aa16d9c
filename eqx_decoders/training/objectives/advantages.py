"""Advantages and weights of tokens, computed on the host in float64 over the completions of an optimizer step."""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped

from eqx_decoders.errors import check, check_integer, check_option


Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["none", "group", "batch", "mean"]
Aggregation = Literal["token", "sequence", "constant", "prompt", "sequence_sum"]


# --- advantages -------------------------------------------------------------------------------------------------------


def group_advantages(
    rewards: Float[np.ndarray, "completions"],
    groups: Shaped[np.ndarray, "completions"],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "none",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float32[np.ndarray, "completions"]:
    """Compute the advantage of each completion in its group, the completions of its prompt.

    The advantage is `(reward - baseline) / scale`:

    | baseline | scale | name |
    |---|---|---|
    | `mean` | `none` | Dr. GRPO, arXiv 2503.20783 |
    | `mean` | `group`: std of the group's rewards + `eps` | GRPO, arXiv 2402.03300 |
    | `mean` | `batch`: std of all rewards + `eps` | |
    | `mean` | `mean`: the group's mean reward | MaxRL |
    | `leave_one_out`: mean of the others | `none` | RLOO, arXiv 2402.14740 |
    | `none` | `none` | REINFORCE; with `whiten` REINFORCE++, arXiv 2501.03262 |

    With a baseline, a group whose rewards are exactly equal has advantages of exactly 0, independent of the rounding of
    its mean and std; so has a group of one completion.

    **Arguments:**

    - `rewards`: NaN for completions without a reward. They belong to no group and their advantage is NaN.
    - `groups`: the prompt of each completion, as a number or a string.
    - `ddof`: 1: std divides by n - 1; 0: by n.
    """
    check_option("baseline", baseline, get_args(Baseline))
    check_option("scale", scale, get_args(Scale))
    compared = baseline != "none" or scale in ("none", "batch")
    check(compared, f"scale={scale!r} needs a baseline: a group with equal rewards has no std to divide by.")
    _, group = np.unique(groups, return_inverse=True)
    known = ~np.isnan(rewards)
    advantages = np.full(rewards.shape, np.nan)
    if np.any(known):
        advantages[known] = _known_advantages(
            rewards[known].astype(np.float64), group[known], baseline=baseline, scale=scale, ddof=ddof, eps=eps
        )
    return advantages.astype(np.float32)


def _known_advantages(
    rewards: np.ndarray, group: np.ndarray, *, baseline: str, scale: str, ddof: int, eps: float
) -> np.ndarray:
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
        check(bool(rewards.min() >= 0), f"the reward {rewards.min()} must be at least 0 with scale='mean'.")
        advantages = advantages / np.where(means > 0, means, 1.0)[group]
    return advantages if baseline == "none" else np.where(_has_equal_rewards(rewards, group), 0.0, advantages)


def _has_equal_rewards(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return for each completion whether all rewards of its group are equal."""
    minima, maxima = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(minima, group, rewards)
    np.maximum.at(maxima, group, rewards)
    return (minima == maxima)[group]


def whiten(
    values: Float[np.ndarray, "rows length"], mask: Shaped[np.ndarray, "rows length"], *, ddof: int = 1
) -> Float32[np.ndarray, "rows length"]:
    """Compute `(value - mean) / std` over all tokens of the mask in the batch; 0 elsewhere.

    REINFORCE++ (arXiv 2501.03262) whitens returns; its variant with a baseline whitens rewards minus the mean of their
    group. Values that are all equal become exactly 0.
    """
    real = np.asarray(mask) != 0
    numbers = values[real].astype(np.float64)
    result = np.zeros(values.shape)
    if numbers.size and numbers.min() < numbers.max():
        variance = np.sum((numbers - numbers.mean()) ** 2) / (numbers.size - ddof)
        result[real] = (numbers - numbers.mean()) / np.sqrt(variance + 1e-8)
    return result.astype(np.float32)


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

    GAE (arXiv 1506.02438) over the sampled tokens: tokens of a tool between them are skipped, and the next value is
    that of the next sampled token. A row is a completion (not packed), with any padding.

    **Arguments:**

    - `mask`: which tokens the policy sampled. Values outside of the mask may be anything; rewards must be 0.
    - `bootstrap`: value after the last token of a truncated row, 0 for other rows. None: no row is truncated.

    **Returns:** advantages, and returns, which the critic learns; 0 outside of the mask.
    """
    real = np.asarray(mask) != 0
    check(not np.any(rewards[~real]), "rewards of tokens outside of the mask must be 0: assign them to sampled tokens.")
    values = np.where(real, values.astype(np.float64), 0.0)
    following = np.zeros(real.shape[0]) if bootstrap is None else bootstrap.astype(np.float64)
    advantages, ahead = np.zeros(real.shape), np.zeros(real.shape[0])
    for index in reversed(range(real.shape[1])):
        here, value = real[:, index], values[:, index]
        advantage = rewards[:, index] + gamma * following - value + gamma * lam * ahead
        ahead, following = np.where(here, advantage, ahead), np.where(here, value, following)
        advantages[:, index] = np.where(here, advantage, 0.0)
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def overlong_penalty(
    lengths: Shaped[np.ndarray, "completions"], limit: int, buffer: int
) -> Float64[np.ndarray, "completions"]:
    """Compute the soft overlong penalty of DAPO (arXiv 2503.14476), which is added to rewards.

    It is `(limit - buffer - length) / buffer`, clipped to [-1, 0]: 0 up to `limit - buffer` tokens, -1 from `limit` on.
    """
    check_integer("limit", limit)
    check_integer("buffer", buffer, maximum=limit)
    return np.clip((limit - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0) + 0.0


# --- weights of tokens ------------------------------------------------------------------------------------------------


def token_weights(
    tokens: Shaped[np.ndarray, "completions"] | Shaped[np.ndarray, "completions length"],
    aggregation: Aggregation = "token",
    *,
    groups: Shaped[np.ndarray, "completions"] | None = None,
    limit: int | None = None,
) -> Float32[np.ndarray, "completions"] | Float32[np.ndarray, "completions length"]:
    """Compute the weights `c` of `loss = sum over tokens of c * loss of the token`, for an optimizer step.

    | aggregation | c of a token of a completion with `T` tokens | source |
    |---|---|---|
    | `token` | `1 / N`, with N tokens in total | DAPO, arXiv 2503.14476 |
    | `sequence` | `1 / (B T)`, with B completions in total | GRPO, arXiv 2402.03300 |
    | `constant` | `1 / (B limit)` | Dr. GRPO, arXiv 2503.20783 |
    | `prompt` | `1 / (P S)`, with P prompts in total and S tokens in the group of the prompt | |
    | `sequence_sum` | `1 / B` | LUSPO, with the sequence-level importance ratio |

    Compute the weights before the batch is split into microbatches and over devices: the loss is then the sum of their
    losses. Completions without tokens have weight 0 and do not count, neither do their prompts.

    **Arguments:**

    - `tokens`: the number of tokens of each completion, or a mask of tokens (0 or 1).
    - `groups`: the prompt of each completion, as a number or a string. Only for `prompt`.
    - `limit`: a constant number of tokens, such as the maximum length of a completion. Only for `constant`.

    **Returns:** weights in the shape of `tokens`: for each completion, or for each token, 0 outside of the mask.
    """
    check_option("aggregation", aggregation, get_args(Aggregation))
    check(
        (groups is not None) == (aggregation == "prompt"),
        f"aggregation={aggregation!r}: pass groups with 'prompt', and only then.",
    )
    check(
        (limit is not None) == (aggregation == "constant"),
        f"aggregation={aggregation!r}: pass a limit with 'constant', and only then.",
    )
    mask = np.asarray(tokens, np.float64)
    lengths = mask if mask.ndim == 1 else mask.sum(axis=1)
    divisors = np.where(lengths > 0, _divisors(lengths, aggregation, groups, limit), np.inf)
    weights = 1.0 / divisors
    return (weights if mask.ndim == 1 else weights[:, None] * mask).astype(np.float32)


def _divisors(lengths: np.ndarray, aggregation: str, groups: np.ndarray | None, limit: int | None) -> np.ndarray:
    """Return 1 / c of each completion; any number for completions without tokens."""
    completions = np.full_like(lengths, np.count_nonzero(lengths))
    if aggregation == "token":
        return np.full_like(lengths, lengths.sum())
    if aggregation == "sequence":
        return completions * lengths
    if limit is not None:
        check_integer("limit", limit)
        return completions * limit
    if groups is not None:
        _, group = np.unique(groups, return_inverse=True)
        sizes = np.bincount(group, lengths)
        return np.count_nonzero(sizes) * sizes[group]
    return completions
