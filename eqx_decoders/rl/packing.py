"""Training batches of completions: rewards of tokens, advantages and weights, and packing into rows.

Everything is computed on the host over all completions of a step, so that the loss does not depend on microbatches,
packing or the mesh.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Float

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import host_rows, place_read_only
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import DataError
from eqx_decoders.rl.completions import Completion, Segment
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.objectives.advantages import (
    Baseline,
    generalized_advantages,
    group_advantages,
    token_weights,
    whiten,
)
from eqx_decoders.training.settings.rl import RLConfig


PerToken = Sequence[np.ndarray]  # for each completion, an array with an element for each sampled token


# --- rewards of tokens ------------------------------------------------------------------------------------------------


def token_rewards(
    config: RLConfig, completions: Sequence[Completion], divergences: PerToken | None = None
) -> list[np.ndarray]:
    """Assign each reward to the last sampled token of its completion or turn; NaN for completions without a reward.

    `divergences`: `log p - log p_ref` of each token. It is subtracted with the weight `rl.kl`.
    """
    rewards = [np.zeros(completion.num_tokens) for completion in completions]
    for index, completion in enumerate(completions):
        if divergences is not None:
            rewards[index] -= config.kl * divergences[index]
        turn_tokens, turn_rewards = credited_turns(config, completion)
        rewards[index][np.cumsum(turn_tokens) - 1] += turn_rewards
        if np.isnan(completion.reward):
            rewards[index][:] = np.nan
    return rewards


def credited_turns(config: RLConfig, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of tokens of the turns that receive rewards, and their rewards.

    With `rl.returns="episode"`, all tokens of a completion are one turn.
    """
    if config.returns == "turn" and completion.episode is not None:
        episode = completion.episode
        return np.asarray(episode.turn_tokens, np.int64), np.asarray(episode.turn_rewards, np.float64)
    has_tokens = completion.num_tokens > 0
    return (
        np.asarray([completion.num_tokens] * has_tokens, np.int64),
        np.asarray([completion.reward] * has_tokens, np.float64),
    )


def has_zero_variance(config: RLConfig, group: Sequence[Completion]) -> bool:
    """Return whether the completions of a group have equal rewards; with `rl.returns="turn"`, in each turn.

    The metric `zero_variance_groups` always compares the rewards of complete episodes.
    """
    known = [completion for completion in group if not np.isnan(completion.reward)]
    return len({tuple(credited_turns(config, completion)[1].tolist()) for completion in known}) < 2


# --- advantages and weights -------------------------------------------------------------------------------------------


class StepAdvantages(NamedTuple):
    """Advantages and weights of the completions of a step.

    **Arguments:**

    - `advantages`: for each completion, an array with an element for each sampled token, or one number for all tokens.
    - `weights`: for each completion, the weight of each of its tokens in the loss.
    - `values`, `returns`: values and returns of each sampled token, with a critic.
    """

    advantages: Sequence[Any] | np.ndarray
    weights: Float[np.ndarray, "completions"]
    values: PerToken | None = None
    returns: PerToken | None = None

    def metrics(self) -> dict[str, float]:
        """Return metrics over the tokens of completions with a weight."""
        advantages = np.concatenate([*self.advantages])
        metrics = {"advantage_std": float(advantages.std()) if len(advantages) else 0.0}
        counted = np.flatnonzero(self.weights > 0).tolist()
        if self.values is None or self.returns is None or not counted:
            return metrics
        values = np.concatenate([self.values[index] for index in counted])
        returns = np.concatenate([self.returns[index] for index in counted])
        metrics |= {"value": float(values.mean()), "return": float(returns.mean())}
        if np.ptp(returns) > 0:
            metrics["explained_variance"] = explained_variance(values, returns)
        return metrics


def step_advantages(
    config: RLConfig,
    completions: Sequence[Completion],
    *,
    divergences: PerToken | None = None,
    values: PerToken | None = None,
) -> StepAdvantages:
    """Compute the advantages and weights of the completions of a step.

    A completion without a reward has weight 0 and is not counted; with `rl.truncated="mask"`, so is a truncated one.

    **Arguments:**

    - `divergences`: `log p - log p_ref` of each token, subtracted from rewards with the weight `rl.kl`.
    - `values`: the critic's value of each token, and one more value after the last token (see `_critic_advantages`).
    """
    counted = np.asarray([not np.isnan(completion.reward) for completion in completions])
    if config.truncated == "mask":
        counted &= np.asarray([not completion.reached_token_limit for completion in completions])
    advantages, returns = _advantages(config, completions, divergences, values)
    if config.whiten:
        advantages = _whiten_counted(advantages, counted)
    advantages = [np.where(real, array, 0.0) for real, array in zip(counted, advantages, strict=True)]
    weights = _weights(config, completions, counted)
    if values is None:
        return StepAdvantages(advantages, weights)
    return StepAdvantages(advantages, weights, [array[:-1] for array in values], returns)


def _advantages(
    config: RLConfig, completions: Sequence[Completion], divergences: PerToken | None, values: PerToken | None
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Compute the advantages of tokens, and with a critic the returns that it learns."""
    rewards = token_rewards(config, completions, divergences)
    if values is not None:
        return _critic_advantages(config, completions, rewards, values)
    if config.returns == "turn":
        return _turn_advantages(config, completions, rewards), None
    totals = np.asarray([completion.reward for completion in completions], np.float64)
    if divergences is not None:
        totals -= config.kl * np.asarray([array.sum() for array in divergences])
    groups: Any = np.asarray([completion.prompt.number for completion in completions])
    advantages = group_advantages(totals, groups, baseline=cast(Baseline, config.baseline), scale=config.scale)
    return [np.full(c.num_tokens, value) for c, value in zip(completions, advantages, strict=True)], None


def _turn_advantages(config: RLConfig, completions: Sequence[Completion], rewards: PerToken) -> list[np.ndarray]:
    """Compare the return from each turn on with the returns from the same turn in other episodes of the prompt.

    A turn that no other episode has reached has an advantage of 0.
    """
    turn_tokens = [credited_turns(config, completion)[0] for completion in completions]
    returns, groups = [], []
    for completion, array, tokens in zip(completions, rewards, turn_tokens, strict=True):
        first_tokens = np.cumsum(tokens) - tokens
        returns.append(array[::-1].cumsum()[::-1][first_tokens])
        groups += [f"{completion.prompt.number} {turn}" for turn in range(len(tokens))]
    baseline = cast(Baseline, config.baseline)
    by_turn = group_advantages(np.concatenate(returns), np.asarray(groups), baseline=baseline, scale=config.scale)
    by_completion = np.split(by_turn, np.cumsum([len(tokens) for tokens in turn_tokens])[:-1])
    return [array.repeat(tokens) for array, tokens in zip(by_completion, turn_tokens, strict=True)]


def _critic_advantages(
    config: RLConfig, completions: Sequence[Completion], rewards: PerToken, values: PerToken
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute generalized advantages (GAE) and returns of the sampled tokens; tokens between them are skipped.

    The last of `values` is the value after the last token. With `rl.critic.bootstrap` the return of a truncated
    completion continues with it. Completions without a reward have advantages and returns of 0.
    """
    known = [
        np.full(len(array), not np.isnan(completion.reward))
        for array, completion in zip(rewards, completions, strict=True)
    ]
    mask = _pad(known)
    bootstrap = [
        array[-1] if config.critic.bootstrap and completion.is_truncated and completion.num_tokens > 0 else 0.0
        for array, completion in zip(values, completions, strict=True)
    ]
    advantages, returns = generalized_advantages(
        np.where(mask, _pad(rewards), 0.0),
        _pad([array[:-1] for array in values]),
        mask,
        gamma=config.critic.gamma,
        lam=config.critic.lam,
        bootstrap=np.asarray(bootstrap),
    )
    return _unpad(advantages, rewards), _unpad(returns, rewards)


def _whiten_counted(advantages: PerToken, counted: np.ndarray) -> list[np.ndarray]:
    """Normalize the tokens of counted completions to mean 0 and std 1; the tokens of others become 0."""
    mask = _pad([np.full(len(array), bool(real)) for array, real in zip(advantages, counted, strict=True)])
    return _unpad(whiten(np.where(mask, _pad(advantages), 0.0), mask), advantages)


def _pad(rows: PerToken) -> np.ndarray:
    result = np.zeros((len(rows), max([1, *map(len, rows)])), rows[0].dtype)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


def _unpad(array: np.ndarray, like: PerToken) -> list[np.ndarray]:
    return [row[: len(unpadded)] for row, unpadded in zip(array, like, strict=True)]


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Compute `1 - var(returns - values) / var(returns)`: 1 for a perfect critic, 0 for one that predicts the mean."""
    return float(1 - (returns - values).var() / returns.var())


def _weights(config: RLConfig, completions: Sequence[Completion], counted: np.ndarray) -> np.ndarray:
    """Compute the weight of each token of each completion."""
    lengths = np.asarray([completion.num_tokens for completion in completions])
    groups = np.asarray([completion.prompt.number for completion in completions])
    return token_weights(
        np.where(counted, lengths, 0),
        config.aggregation,
        groups=groups if config.aggregation == "prompt" else None,
        limit=config.max_completion_tokens if config.aggregation == "constant" else None,
    )


# --- packing ----------------------------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """Position of a completion with its prompt: row, first token, and number of its first segment in the row."""

    row: int
    start: int
    number: int


def place_completions(
    sizes: Sequence[int], counts: Sequence[int] | None = None, *, rows: int, length: int, max_segments: int
) -> list[Placement] | None:
    """Place completions of `sizes` tokens, with their contexts, into the first row with room; None if they do not fit.

    `counts`: number of segments of each completion. None: 1.
    """
    used, taken, placements = [0] * rows, [0] * rows, []
    for size, count in zip(sizes, [1] * len(sizes) if counts is None else counts, strict=True):
        fits = (row for row in range(rows) if used[row] + size <= length and taken[row] + count <= max_segments)
        row = next(fits, None)
        if row is None:
            return None
        placements.append(Placement(row, used[row], taken[row] + 1))
        taken[row] += count
        used[row] += size
    return placements


def possible_row_counts(batch_size: int, unit: int) -> list[int]:
    """Return the numbers of rows that a batch may have, in ascending order: `batch_size`, its half, its quarter, ...

    All are multiples of `unit`. The step is compiled once for each number of rows.
    """
    counts = [batch_size]
    while counts[-1] % 2 == 0 and counts[-1] // 2 % unit == 0:
        counts.append(counts[-1] // 2)
    return counts[::-1]


class PackedCompletions(NamedTuple):
    """Batch of completions, and the positions of their tokens.

    **Arguments:**

    - `sampled`: for each completion, rows and columns of its sampled tokens.
    - `numbers`: for each completion, its number in its row.
    """

    batch: Batch
    sampled: Sequence[tuple[np.ndarray, np.ndarray]]
    numbers: Sequence[int]


def pack_completions(
    completions: Sequence[Completion],
    advantages: StepAdvantages,
    *,
    row_counts: Sequence[int],
    seq_len: int,
    completions_per_row: int,
    kl_weight: float = 0.0,
) -> PackedCompletions:
    """Pack completions with their prompts into as few rows of `seq_len` tokens as `row_counts` allows.

    `kl_weight`: weight of the KL divergence of each token, relative to the weight of the token.
    """
    segments = [[segment for segment in c.segments if segment.sampled.any()] for c in completions]
    sizes = [sum(segment.size for segment in parts) for parts in segments]
    counts = [len(parts) for parts in segments]
    rows, placements = 0, None
    for rows in row_counts:
        placements = place_completions(sizes, counts, rows=rows, length=seq_len, max_segments=completions_per_row)
        if placements is not None:
            break
    if placements is None:
        raise DataError(
            f"{len(completions)} completions with {sum(sizes):,} tokens do not fit into {rows} rows of {seq_len}: "
            "raise data.batch_size, or lower rl.prompts or rl.samples."
        )
    shape = rows, seq_len
    tokens, segment_ids, positions, numbers = (np.zeros(shape, np.int32) for _ in range(4))
    sampler, experts = np.zeros(shape, np.float32), _unknown_experts(segments, shape)
    sampled = list[tuple[np.ndarray, np.ndarray]]()
    for parts, placement in zip(segments, placements, strict=True):
        row, start, columns = placement.row, placement.start, [np.zeros(0, np.int64)]
        for segment_id, segment in enumerate(parts, start=placement.number):
            span = row, slice(start, start + segment.size)
            start += segment.size
            tokens[span] = np.concatenate([segment.context, segment.rollout.tokens])
            positions[span] = np.arange(segment.size)
            segment_ids[span] = segment_id
            if experts is not None and segment.rollout.experts is not None:
                experts[span] = segment.rollout.experts
            columns.append(start - len(segment.sampled) + np.flatnonzero(segment.sampled))
            numbers[row, columns[-1]] = placement.number  # the same for all segments: they are one completion
            sampler[row, columns[-1]] = segment.rollout.log_probs[segment.sampled]
        all_columns = np.concatenate(columns)
        sampled.append((np.full_like(all_columns, row), all_columns))
    policy = _scatter(advantages.weights, sampled, shape)
    signals = Signals(
        policy=policy,
        advantages=_scatter(advantages.advantages, sampled, shape),
        values=None if advantages.values is None else _scatter(advantages.values, sampled, shape),
        returns=None if advantages.returns is None else _scatter(advantages.returns, sampled, shape),
        divergence=kl_weight * policy if kl_weight else None,
        sampler=sampler,
        completion_ids=cast(Any, numbers),
        experts=cast(Any, experts),
        max_completions=completions_per_row,
    )
    batch = Batch(
        tokens=cast(Any, tokens),
        segment_ids=cast(Any, segment_ids),
        positions=cast(Any, positions),
        loss_mask=numbers > 0,
        signals=signals,
        contiguous=True,
    )
    return PackedCompletions(batch, sampled, [placement.number for placement in placements])


def _unknown_experts(segments: Sequence[Sequence[Segment]], shape: tuple[int, int]) -> np.ndarray | None:
    """Return an array of -1 for the experts of all tokens; None if no completion has recorded experts."""
    recorded = (s.rollout.experts for parts in segments for s in parts if s.rollout.experts is not None)
    first = next(recorded, None)
    return None if first is None else np.full((*shape, *first.shape[1:]), -1, np.int16)


def _scatter(values: Any, sampled: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]) -> np.ndarray:
    """Write the values of each completion, or of its tokens, to the positions of its sampled tokens."""
    result = np.zeros(shape, np.float32)
    for value, indices in zip(values, sampled, strict=True):
        result[indices] = value
    return result


class CompletionPacker:
    """Packs the completions of a run and places this process's rows of the batch on the devices."""

    def __init__(self, layout: Layout, *, row_counts: Sequence[int], seq_len: int, completions_per_row: int):
        self.seq_len, self._layout = seq_len, layout
        self._row_counts, self._completions_per_row = row_counts, completions_per_row

    def __call__(
        self, completions: Sequence[Completion], advantages: StepAdvantages | None = None, *, kl_weight: float = 0.0
    ) -> PackedCompletions:
        """Pack completions with their advantages (None: 0); `kl_weight`: see `pack_completions`."""
        zeros = np.zeros(len(completions))
        packed = pack_completions(
            completions,
            StepAdvantages(zeros, zeros) if advantages is None else advantages,
            row_counts=self._row_counts,
            seq_len=self.seq_len,
            completions_per_row=self._completions_per_row,
            kl_weight=kl_weight,
        )
        rows = packed.batch.tokens.shape[0]
        local_rows = np.asarray(host_rows(self._layout, rows))
        batch = place_read_only(jax.tree.map(lambda leaf: leaf[local_rows], packed.batch), self._layout, rows)
        return packed._replace(batch=batch)
