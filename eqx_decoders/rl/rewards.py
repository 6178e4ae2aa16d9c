"""Rewards of completions: a user's function in worker processes, the scores of a reward model, metrics, and a plot."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float32

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.function_workers import CallResult, FunctionWorkers, numbers_by_name
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.weights_fingerprint import weights_fingerprint
from eqx_decoders.rl.completions import EPISODE_ENDS, Completion, Episode, Groups
from eqx_decoders.rl.packing import CompletionPacker
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.methods.teachers import check_same_tokens
from eqx_decoders.training.objectives.advantages import overlong_penalty
from eqx_decoders.training.objectives.scores import reward_scores
from eqx_decoders.training.run.log import new_figure, read_metrics, series_of
from eqx_decoders.training.settings.rl import RLConfig


# --- reward functions -------------------------------------------------------------------------------------------------


class RewardFunction:
    """Worker processes that call `rl.reward`. Without a reward function, all rewards are 0.

    Raises ConfigError if the function cannot be imported.
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
                arguments=("prompt", "completion"),
            )

    def submit(self, prompt: Prompt, text: str) -> "Future[CallResult]":
        """Start to compute the reward of a completion."""
        if self._workers is None:
            zero: Future[CallResult] = Future()
            zero.set_result(CallResult(0.0))
            return zero
        return self._workers.submit(dict(prompt.record), text)

    def completion(self, prompt: Prompt, rollout: Rollout, text: str, result: CallResult) -> Completion:
        """Return the completion with the reward of `result`, and with the soft overlong penalty."""
        rewards, error = rewards_by_name(result)
        reward = weighted_reward(rewards, self._weights)
        if rewards and self._config.overlong_buffer:
            num_tokens, limit = np.asarray([len(rollout.tokens)]), self._config.max_new_tokens
            penalty = float(overlong_penalty(num_tokens, limit, self._config.overlong_buffer)[0])
            rewards = {**rewards, "overlong": penalty}
            reward += penalty
        return Completion(prompt, rollout, text, reward, rewards, error, result.seconds)

    def close(self) -> None:
        """Stop the worker processes."""
        if self._workers is not None:
            self._workers.close()


def weighted_reward(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of rewards; the default weight is 1. NaN if there are no rewards."""
    return sum(weights.get(name, 1.0) * value for name, value in rewards.items()) if rewards else math.nan


def rewards_by_name(result: CallResult) -> tuple[Mapping[str, float], str | None]:
    """Return the rewards of a call by name, and an error if the function raised or returned something else."""
    if result.error is not None or result.value is None:
        return {}, result.error
    rewards = numbers_by_name(result.value, "reward")
    if rewards is None:
        return {}, f"the reward {str(result.value)[:80]} must be a number, a dict of numbers by name, or None"
    return rewards, None


# --- reward models ----------------------------------------------------------------------------------------------------


MODEL_REWARD = "reward_model"  # name of the score among the rewards of a completion


class RewardModel:
    """Reward model of a run, on the mesh of the run. Its score is one of the rewards of a completion.

    It reads the tokens of the prompt and the sampled tokens, never text that is tokenized again; of an episode, the
    last segment up to the last sampled token. Completions are packed like training batches, so that one program is
    compiled for each number of rows.
    """

    def __init__(self, rl: RLConfig, tokenizer: Tokenizer, execution: Execution, packer: CompletionPacker):
        self._model = load_reward_model(str(rl.reward_model), tokenizer, execution)
        max_positions = getattr(self._model.config.positions, "max_positions", None)
        check(
            max_positions is None or packer.seq_len <= max_positions,
            f"seq_len={packer.seq_len} exceeds the {max_positions} learned positions of "
            f"rl.reward_model={rl.reward_model!r}: lower seq_len.",
        )
        self._packer = packer
        self._batch_size = rl.prompts * rl.samples  # number of completions that fit into a batch
        self._weight = rl.weights().get(MODEL_REWARD, 1.0)
        self._is_only_reward = rl.reward is None and rl.environment is None
        self.fingerprint = f"{int(weights_fingerprint(self._model)):08x} {self._model.config!r}"

    def add_scores(self, groups: Groups) -> Groups:
        """Add the score of each completion to its rewards. Completions without a reward do not get one."""
        completions = [completion for group in groups for completion in group]
        scores = []
        for start in range(0, len(completions), self._batch_size):
            scores += self._scores(completions[start : start + self._batch_size])
        remaining = iter(scores)
        return [[self._with_score(completion, next(remaining)) for completion in group] for group in groups]

    def _scores(self, completions: Sequence[Completion]) -> list[float]:
        """Compute the scores of at most a batch of completions; NaN for completions without tokens."""
        packed = self._packer([_last_sampled_segment(completion) for completion in completions])
        scores = np.asarray(_replicated_scores(self._model, packed.batch))
        return [
            float(scores[rows[0], number - 1]) if len(rows) else math.nan
            for (rows, _), number in zip(packed.sampled, packed.numbers, strict=True)
        ]

    def _with_score(self, completion: Completion, score: float) -> Completion:
        check(
            MODEL_REWARD not in completion.rewards,
            f"rl.reward returns a number named {MODEL_REWARD!r}, which is the name of the reward model's score: rename "
            "it.",
            DataError,
        )
        if math.isnan(completion.reward):
            return completion
        if not math.isfinite(score):
            error = f"the score of rl.reward_model is {score}"
            return completion._replace(reward=math.nan, rewards={}, error=error)
        rewards = {} if self._is_only_reward else dict(completion.rewards)
        weighted_score, episode = self._weight * score, completion.episode
        if episode is not None:  # the score is a reward of the last turn
            turn_rewards = (*episode.turn_rewards[:-1], sum(episode.turn_rewards[-1:]) + weighted_score)
            episode = episode._replace(turn_rewards=turn_rewards)
        return completion._replace(
            reward=completion.reward + weighted_score, rewards={**rewards, MODEL_REWARD: score}, episode=episode
        )


def load_reward_model(source: str, tokenizer: Tokenizer, execution: Execution) -> Decoder:
    """Load a reward model from a run directory, a directory in Hugging Face's format, or "org/name".

    Raises ConfigError for a model without a score head, or with another vocabulary than the policy's.
    """
    from eqx_decoders.training.run.load_export import OtherModel  # late: most of its imports are not needed here

    name, other = f"rl.reward_model={source!r}", OtherModel(source)
    with StatusLine(f"loading the reward model {source}", remains="what was downloaded is kept"):
        remedy = "Use a reward model with the policy's tokenizer"
        check_same_tokens(tokenizer, other.tokenizer, name, "the policy's", remedy)
        model = other.load(execution)
    check(
        model.config.scores == 1,
        f"{name} must have one score, but DecoderConfig.scores={model.config.scores}: use a model that was trained "
        "with method='reward'.",
    )
    return model


def _last_sampled_segment(completion: Completion) -> Completion:
    """Return the last segment with sampled tokens, up to its last sampled token, as a completion of its context."""
    with_samples = [segment for segment in completion.segments if segment.sampled.any()]
    segment = with_samples[-1] if with_samples else completion.segments[-1]
    end = int(np.flatnonzero(segment.sampled)[-1]) + 1 if with_samples else 0
    rollout = Rollout(
        tokens=segment.rollout.tokens[:end],
        log_probs=segment.rollout.log_probs[:end],
        versions=segment.rollout.versions[:end],
        finish_reason=segment.rollout.finish_reason,
    )
    prompt = completion.prompt._replace(tokens=segment.context)
    return completion._replace(prompt=prompt, rollout=rollout, episode=None)


@jax.jit
def _replicated_scores(model: Decoder, batch: Batch) -> Float32[Array, "batch completions"]:
    return model.execution.layout.replicate(reward_scores(model, batch))


# --- metrics ----------------------------------------------------------------------------------------------------------


def reward_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return metrics of the rewards and lengths of the completions of a step."""
    rewards = np.asarray([completion.reward for completion in completions])
    groups = np.asarray([completion.prompt.number for completion in completions])
    lengths = np.asarray([completion.num_tokens for completion in completions])
    seconds = np.asarray([completion.seconds for completion in completions])
    known = ~np.isnan(rewards)
    metrics = {
        "reward_failures": 1.0 - float(known.mean()),
        "reward_seconds_p50": float(np.quantile(seconds, 0.5)),
        "reward_seconds_p99": float(np.quantile(seconds, 0.99)),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(np.mean([completion.reached_token_limit for completion in completions])),
        **_episode_metrics([completion.episode for completion in completions if completion.episode is not None]),
    }
    if not known.any():
        return metrics
    by_group = [rewards[known & (groups == group)] for group in np.unique(groups[known])]
    metrics |= {
        "reward": float(rewards[known].mean()),
        "reward_std": float(rewards[known].std()),
        "reward_std_in_groups": float(np.mean([group.std() for group in by_group])),
        "zero_variance_groups": float(np.mean([group.min() == group.max() for group in by_group])),
    }
    for name in sorted({name for completion in completions for name in completion.rewards}):
        values = [c.rewards.get(name, 0.0) for c in completions if _has_reward(c, name)]
        metrics[f"reward/{name}"] = float(np.mean(values))
    better = known & (rewards > rewards[known].mean())
    for name, subset in (("completion_tokens_better", better), ("completion_tokens_worse", known & ~better)):
        if subset.any():
            metrics[name] = float(lengths[subset].mean())
    return metrics


def _has_reward(completion: Completion, name: str) -> bool:
    """Return whether a completion has a reward of this name; in an episode with a reward, missing rewards are 0."""
    return name in completion.rewards or (completion.episode is not None and not math.isnan(completion.reward))


def _episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    if not episodes:
        return {}
    turns = [episode.turns for episode in episodes]
    metrics = {
        "turns": float(np.mean(turns)),
        "turns_max": float(max(turns)),
        "forked_segments": float(sum(len(episode.segments) - 1 for episode in episodes)),
    }
    for end in EPISODE_ENDS:
        metrics[f"ended_{end}"] = float(np.mean([episode.end == end for episode in episodes]))
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        metrics[f"metric/{name}"] = float(np.mean(values))
    return metrics


PANELS = {  # title: labels of the metrics, by their names in metrics.jsonl
    "reward": {
        "reward": "training, sampled",
        "eval_reward": "held-out, sampled",
        "eval_reward_greedy": "held-out, greedy",
    },
    "entropy (nats per token)": {"entropy": "entropy"},
    "divergence": {"k3": "KL from the reference (k3)", "log_prob_gap": "|trainer - sampler|"},
    "critic": {"explained_variance": "explained variance", "value_loss": "loss"},
    "tokens per completion": {
        "completion_tokens_better": "reward above the mean",
        "completion_tokens_worse": "other completions",
    },
    "fraction of": {
        "zero_variance_groups": "groups with equal rewards",
        "truncated": "completions truncated",
        "clip": "tokens clipped",
    },
}


def plot_rewards(metrics_path: str | Path, out_png: str | Path) -> None:
    """Plot rewards, entropy, divergences and lengths of a run over its steps."""
    rows = read_metrics(metrics_path)
    has_critic = len(series_of(rows, "value_loss")[0]) > 0
    panels = {title: labels for title, labels in PANELS.items() if has_critic or title != "critic"}
    figure, write = new_figure(8, 2 * len(panels))
    all_axes = figure.subplots(len(panels), sharex=True)
    for axes, (title, labels) in zip(all_axes, panels.items(), strict=True):
        for index, (name, label) in enumerate(labels.items()):
            steps, values = series_of(rows, name)
            style = "o-" if name.startswith("eval_") else "-"
            if len(steps):
                axes.plot(steps, values, style, color=f"C{index}", markersize=4, linewidth=1.2, label=label)
        axes.set_ylabel(title)
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
        if axes.lines:
            axes.legend(loc="best", fontsize="small")
    all_axes[-1].set_xlabel("step (updates of the weights)")
    write(out_png)
