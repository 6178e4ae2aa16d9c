"""Rewards of answers: a function of the user's in worker processes, its numbers, and the penalty for length."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.io.function_workers import CallResult, FunctionWorkers, numbers_by_name
from eqx_decoders.rl.drawn_answers import ENDS, Episode, JudgedAnswer
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.objectives.advantages import overlong_penalty


class Rewards:
    """Rewards by the settings of a run. `start` asks for one, and `JudgedAnswer`s are made of what comes.

    Without a function all rewards are 0, for a run that learns from a teacher.

    Raises ConfigError with the reason where the function cannot be imported.
    """

    def __init__(self, config: RLConfig):
        self._config, self._weights = config, config.weights()
        self._workers = None
        if config.reward is not None:
            self._workers = FunctionWorkers(
                config.reward,
                workers=config.reward_workers,
                seconds=config.reward_seconds,
                flag="rl.reward",
                arguments=("prompt", "answer"),
            )

    def start(self, prompt: Prompt, text: str) -> "Future[CallResult]":
        """Begin to judge an answer."""
        if self._workers is None:
            nothing: Future[CallResult] = Future()
            nothing.set_result(CallResult(0.0))
            return nothing
        return self._workers.submit(dict(prompt.record), text)

    def judged(self, prompt: Prompt, rollout: Rollout, text: str, result: CallResult) -> JudgedAnswer:
        """Make an answer with its reward; NaN where there is none, which is not 0."""
        columns, error = reward_columns(result)
        reward = weighted_reward(columns, self._weights)
        if columns and self._config.overlong_buffer:
            length, limit = np.asarray([len(rollout.tokens)]), self._config.max_new_tokens
            columns = {**columns, "overlong": float(overlong_penalty(length, limit, self._config.overlong_buffer)[0])}
            reward += columns["overlong"]
        return JudgedAnswer(prompt, rollout, text, reward, columns, error, result.seconds)

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()


def weighted_reward(columns: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Add up rewards by their weights, 1 for others; NaN if there are none."""
    return sum(weights.get(name, 1.0) * value for name, value in columns.items()) if columns else math.nan


def reward_columns(result: CallResult) -> tuple[Mapping[str, float], str | None]:
    """Return the numbers of a reward by name, or why there are none."""
    value = result.value
    if result.error is not None or value is None:
        return {}, result.error
    columns = numbers_by_name(value, "reward")
    if columns is None:
        return {}, f"the reward returned {str(value)[:80]}, which is no number, and no numbers by name"
    return columns, None


def _has(answer: JudgedAnswer, name: str) -> bool:
    """Return whether an answer has a reward of that name; an episode that was judged has all, those not given are 0."""
    return name in answer.columns or (answer.episode is not None and not math.isnan(answer.reward))


def _episode_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return what is reported of episodes: their turns, how they ended, and the environment's numbers."""
    if not episodes:
        return {}
    shares = {f"ended_{end}": float(np.mean([each.end == end for each in episodes])) for end in ENDS}
    turns, forks = [each.turns for each in episodes], sum(len(each.parts) - 1 for each in episodes)
    figures = {"turns": float(np.mean(turns)), "turns_max": float(max(turns)), "forked_rows": float(forks), **shares}
    for name in sorted({name for each in episodes for name in each.metrics}):
        figures[f"metric/{name}"] = float(np.mean([each.metrics[name] for each in episodes if name in each.metrics]))
    return figures


def reward_figures(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    """Return what is reported of the rewards of a step's answers."""
    rewards = np.asarray([answer.reward for answer in answers])
    groups = np.asarray([answer.prompt.number for answer in answers])
    known = ~np.isnan(rewards)
    lengths = np.asarray([answer.length for answer in answers])
    seconds = np.asarray([answer.seconds for answer in answers])
    by_group = [rewards[known & (groups == group)] for group in np.unique(groups)]
    by_group = [each for each in by_group if len(each)]
    figures = {
        "reward_failures": 1.0 - float(known.mean()),
        "reward_seconds_p50": float(np.quantile(seconds, 0.5)),
        "reward_seconds_p99": float(np.quantile(seconds, 0.99)),
        "answer_tokens": float(lengths.mean()),
        "answer_tokens_max": float(lengths.max()),
        "truncated": float(np.mean([answer.rollout.finish_reason == "length" for answer in answers])),
        **_episode_figures([answer.episode for answer in answers if answer.episode is not None]),
    }
    if not by_group:
        return figures
    figures |= {
        "reward": float(rewards[known].mean()),
        "reward_std": float(rewards[known].std()),
        "reward_std_in_groups": float(np.mean([each.std() for each in by_group])),
        "constant_groups": float(np.mean([each.min() == each.max() for each in by_group])),
    }
    for name in sorted({name for answer in answers for name in answer.columns}):
        figures[f"reward/{name}"] = float(np.mean([a.columns.get(name, 0.0) for a in answers if _has(a, name)]))
    better = known & (rewards > rewards[known].mean())
    for name, chosen in (("answer_tokens_better", better), ("answer_tokens_worse", known & ~better)):
        if chosen.any():
            figures[name] = float(lengths[chosen].mean())
    return figures
