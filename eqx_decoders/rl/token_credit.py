"""What the tokens of answers are credited with: rewards where they were earned, returns of turns, and advantages."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from eqx_decoders.rl.drawn_answers import JudgedAnswer
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.objectives.advantages import Baseline, generalized_advantages, group_advantages, whiten


ByToken = Sequence[np.ndarray]  # of each answer: a number for each token that was drawn


def rewards_of_tokens(
    config: RLConfig, answers: Sequence[JudgedAnswer], divergences: ByToken | None = None
) -> list[np.ndarray]:
    """Give each reward to the last token that it was given for, of an answer or of a turn; NaN of no reward.

    `divergences`: `log p - log reference` of each token, which is taken off with the weight `rl.kl`.
    """
    rewards = [np.zeros(answer.length) for answer in answers]
    for number, (each, answer) in enumerate(zip(rewards, answers, strict=True)):
        if divergences is not None:
            each -= config.kl * divergences[number]
        turns, earned = turns_of(config, answer)
        each[np.cumsum(turns) - 1] += earned
        if np.isnan(answer.reward):
            each[:] = np.nan
    return rewards


def turns_of(config: RLConfig, answer: JudgedAnswer) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of tokens of the turns that rewards are credited to, and their rewards."""
    if config.returns == "turn" and answer.episode is not None:
        return np.asarray(answer.episode.turn_tokens, np.int64), np.asarray(answer.episode.turn_rewards, np.float64)
    there = answer.length > 0
    return np.asarray([answer.length] * there, np.int64), np.asarray([answer.reward] * there, np.float64)


def turn_advantages(config: RLConfig, answers: Sequence[JudgedAnswer], rewards: ByToken) -> list[np.ndarray]:
    """Compare the rewards from each turn on with those of the same turn of the prompt's other episodes.

    A turn that no other episode has is compared with nothing, and has an advantage of 0.
    """
    lengths = [turns_of(config, answer)[0] for answer in answers]
    to_go = [each[::-1].cumsum()[::-1][np.cumsum(turns) - turns] for each, turns in zip(rewards, lengths, strict=True)]
    groups = [
        f"{answer.prompt.number} {turn}"
        for answer, turns in zip(answers, lengths, strict=True)
        for turn in range(len(turns))
    ]
    baseline = cast(Baseline, config.baseline)
    by_turn = group_advantages(np.concatenate(to_go), np.asarray(groups), baseline=baseline, scale=config.scale)
    cuts = np.cumsum([len(turns) for turns in lengths])[:-1]
    return [each.repeat(turns) for each, turns in zip(np.split(by_turn, cuts), lengths, strict=True)]


def critic_advantages(
    config: RLConfig, answers: Sequence[JudgedAnswer], rewards: ByToken, values: ByToken
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute generalized advantages and returns of the tokens that were drawn; those between them are skipped.

    `values`: of each token, and one more of what would have come behind the last: the return of an answer that was cut
    goes on with it, unless a limit is an end (`rl.critic.bootstrap`). What has no reward has numbers of 0.
    """
    known = [np.full(len(each), not np.isnan(answer.reward)) for each, answer in zip(rewards, answers, strict=True)]
    mask = padded(known)
    paid = np.where(mask, padded(rewards), 0.0)
    goes_on = [config.critic.bootstrap and answer.truncated and answer.length > 0 for answer in answers]
    cut = [each[-1] if more else 0.0 for each, more in zip(values, goes_on, strict=True)]
    options: dict[str, Any] = dict(gamma=config.critic.gamma, lam=config.critic.lam, bootstrap=np.asarray(cut))
    advantages, returns = generalized_advantages(paid, padded([each[:-1] for each in values]), mask, **options)
    return unpadded(advantages, rewards), unpadded(returns, rewards)


def whitened(advantages: ByToken, counted: Sequence[bool] | np.ndarray) -> list[np.ndarray]:
    """Give the tokens of the answers that count a mean of 0 and a std of 1; those of others have 0."""
    mask = padded([np.full(len(each), bool(real)) for each, real in zip(advantages, counted, strict=True)])
    return unpadded(whiten(np.where(mask, padded(advantages), 0.0), mask), advantages)


def padded(rows: ByToken) -> np.ndarray:
    """Put rows of any lengths into one array, with 0 behind them."""
    result = np.zeros((len(rows), max([1, *map(len, rows)])), rows[0].dtype)
    for number, row in enumerate(rows):
        result[number, : len(row)] = row
    return result


def unpadded(array: np.ndarray, like: ByToken) -> list[np.ndarray]:
    """Return the rows of an array, as long as those of `like`."""
    return [row[: len(each)] for row, each in zip(array, like, strict=True)]


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Compute `1 - var(returns - values) / var(returns)`: 1 of a critic that knows all, 0 of one that knows a mean."""
    return float(1 - (returns - values).var() / returns.var())
