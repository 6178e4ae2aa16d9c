"""Batches of answers: advantages, weights of tokens, and the rows in which answers lie behind their prompts."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Float

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import hand_over, host_rows
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import DataError, check
from eqx_decoders.rl.drawn_answers import AnswerPart, JudgedAnswer
from eqx_decoders.rl.token_credit import (
    ByToken,
    critic_advantages,
    explained_variance,
    rewards_of_tokens,
    turn_advantages,
    whitened,
)
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.objectives.advantages import Baseline, group_advantages
from eqx_decoders.training.objectives.token_weights import token_weights


class AnswerNumbers(NamedTuple):
    """Numbers of the answers of a step.

    **Arguments:**

    - `advantages`: of each token that was drawn; a number is that of all tokens of an answer.
    - `weights`: of each answer, which its tokens have.
    - `values`, `returns`: of each token that was drawn, what a critic expected, and what came; None without one.
    """

    advantages: Sequence[Any] | np.ndarray
    weights: Float[np.ndarray, "answers"]
    values: ByToken | None = None
    returns: ByToken | None = None

    def figures(self) -> dict[str, float]:
        """Return what is reported of them, over the tokens of answers that count."""
        real, advantages = self.weights > 0, np.concatenate([*self.advantages])
        figures = {"advantage_std": float(advantages.std()) if len(advantages) else 0.0}
        if self.values is not None and self.returns is not None and real.any():
            values, returns = (
                np.concatenate([each for each, counts in zip(of, real, strict=True) if counts])
                for of in (self.values, self.returns)
            )
            figures |= {"value": float(values.mean()), "return": float(returns.mean())}
            figures |= {"explained_variance": explained_variance(values, returns)} if np.ptp(returns) > 0 else {}
        return figures


def answer_numbers(
    config: RLConfig,
    answers: Sequence[JudgedAnswer],
    *,
    divergences: ByToken | None = None,
    values: ByToken | None = None,
) -> AnswerNumbers:
    """Compute advantages and weights of a step's answers, of their rewards, NaN for those that were not judged.

    An answer without a reward, or one that was cut with `truncated="mask"`, weighs nothing, and neither it nor its
    tokens are counted.

    **Arguments:**

    - `divergences`: of each token from the reference, taken off rewards with the weight `rl.kl`.
    - `values`: of each token by the critic, and one more behind the last, as `critic_advantages` reads them.
    """
    known = np.asarray([not np.isnan(answer.reward) for answer in answers])
    if config.truncated == "mask":
        known &= np.asarray([answer.rollout.finish_reason != "length" for answer in answers])
    advantages, returns = _advantages(config, answers, divergences, values)
    advantages = whitened(advantages, known) if config.whiten else advantages
    advantages = [np.where(real, each, 0.0) for real, each in zip(known, advantages, strict=True)]
    weights = _weights(config, answers, known)
    if values is None:
        return AnswerNumbers(advantages, weights)
    return AnswerNumbers(advantages, weights, [each[:-1] for each in values], returns)


def _advantages(
    config: RLConfig, answers: Sequence[JudgedAnswer], divergences: ByToken | None, values: ByToken | None
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Compute the advantages of the tokens of answers, and the returns that a critic learns, if there is one."""
    rewards = rewards_of_tokens(config, answers, divergences)
    if values is not None:
        return critic_advantages(config, answers, rewards, values)
    if config.returns == "turn":
        return turn_advantages(config, answers, rewards), None
    whole, baseline = np.asarray([answer.reward for answer in answers], np.float64), cast(Baseline, config.baseline)
    if divergences is not None:
        whole -= config.kl * np.asarray([each.sum() for each in divergences])
    groups: Any = np.asarray([answer.prompt.number for answer in answers])
    by_answer = group_advantages(whole, groups, baseline=baseline, scale=config.scale)
    return [np.full(answer.length, each) for answer, each in zip(answers, by_answer, strict=True)], None


def _weights(config: RLConfig, answers: Sequence[JudgedAnswer], known: np.ndarray) -> np.ndarray:
    """Compute the weight of each answer's tokens."""
    more: dict[str, Any] = {}
    if config.aggregation == "prompt":
        more = {"groups": np.asarray([answer.prompt.number for answer in answers])}
    elif config.aggregation == "constant":
        more = {"limit": config.longest_answer}
    lengths = np.asarray([answer.length for answer in answers])
    return token_weights(np.where(known, lengths, 0), config.aggregation, **more)


class Place(NamedTuple):
    """Where an answer with its prompt lies: row, first token, number within the row; of several, those of the first."""

    row: int
    start: int
    number: int


def find_places(
    sizes: Sequence[int], counts: Sequence[int] | None = None, *, rows: int, length: int, most: int
) -> list[Place] | None:
    """Put answers with prompts of `sizes` tokens into the first row with room; None if they do not fit.

    `counts`: of how many answers, which lie side by side, a size is; None: of one each.
    """
    used, taken, places = [0] * rows, [0] * rows, []
    for size, count in zip(sizes, [1] * len(sizes) if counts is None else counts, strict=True):
        fits = (row for row in range(rows) if used[row] + size <= length and taken[row] + count <= most)
        row = next(fits, None)
        if row is None:
            return None
        places.append(Place(row, used[row], taken[row] + 1))
        taken[row] += count
        used[row] += size
    return places


def row_choices(batch_size: int, unit: int) -> list[int]:
    """Return the numbers of rows that batches may have, few first: `batch_size`, its half, its quarter, and so on.

    Each is a multiple of `unit`, and each is a program of its own.
    """
    choices = [batch_size]
    while choices[-1] % 2 == 0 and choices[-1] // 2 % unit == 0:
        choices.append(choices[-1] // 2)
    return choices[::-1]


class PackedAnswers(NamedTuple):
    """Batch of answers, and where each of them lies.

    **Arguments:**

    - `drawn`: for each answer the places of the tokens that the model drew: their rows and columns.
    - `numbers`: the number of each answer within its row.
    """

    batch: Batch
    drawn: Sequence[tuple[np.ndarray, np.ndarray]]
    numbers: Sequence[int]


def pack_answers(
    answers: Sequence[JudgedAnswer],
    numbers: AnswerNumbers,
    *,
    choices: Sequence[int],
    seq_len: int,
    answers_per_row: int,
    divergence: float = 0.0,
) -> PackedAnswers:
    """Pack answers behind their prompts into as few rows of `seq_len` tokens as `choices` allow, as a whole batch.

    `divergence`: weight of the divergence of each token, relative to its own weight.
    """
    parts = [[part for part in answer.parts if part.drawn.any()] for answer in answers]
    sizes, counts = [sum(part.size for part in each) for each in parts], [len(each) for each in parts]
    tries = ((rows, find_places(sizes, counts, rows=rows, length=seq_len, most=answers_per_row)) for rows in choices)
    rows, places = next(((rows, places) for rows, places in tries if places is not None), (choices[-1], None))
    rule = f"{len(answers)} answers with {sum(sizes):,} tokens do not fit into {choices[-1]} rows of {seq_len}"
    check(places is not None, f"{rule}: raise data.batch_size, or draw fewer (rl.prompts, rl.samples).", DataError)
    ints = {name: np.zeros((rows, seq_len), np.int32) for name in ("tokens", "segment_ids", "positions", "answers")}
    sampler, drawn = np.zeros((rows, seq_len), np.float32), list[tuple[np.ndarray, np.ndarray]]()
    experts = _no_experts(parts, rows, seq_len)
    for each, place in zip(parts, places or (), strict=True):
        start, columns = place.start, [np.zeros(0, np.int64)]
        for number, part in enumerate(each, start=place.number):
            span, start = (place.row, slice(start, start + part.size)), start + part.size
            ints["tokens"][span] = np.concatenate([part.context, part.rollout.tokens])
            ints["positions"][span], ints["segment_ids"][span] = np.arange(part.size), number
            if experts is not None and part.rollout.experts is not None:
                experts[span] = part.rollout.experts
            columns.append(start - len(part.drawn) + np.flatnonzero(part.drawn))
            ints["answers"][place.row, columns[-1]] = place.number  # of all parts: they are one answer
            sampler[place.row, columns[-1]] = part.rollout.log_probs[part.drawn]
        of_answer = np.concatenate(columns)
        drawn.append((np.full_like(of_answer, place.row), of_answer))
    marks, by_token = ints.pop("answers"), {"policy": numbers.weights, "advantages": numbers.advantages}
    by_token |= {"values": numbers.values, "returns": numbers.returns}
    floats = {name: _spread(each, drawn, sampler.shape) for name, each in by_token.items() if each is not None}
    more = {"divergence": divergence * floats["policy"]} if divergence else {}
    marked: dict[str, Any] = dict(answers=marks, experts=experts, most_answers=answers_per_row)
    signals = Signals(**floats, **more, **marked, sampler=sampler)
    arrays: dict[str, Any] = ints
    batch = Batch(**arrays, loss_mask=marks > 0, signals=signals, contiguous=True)
    return PackedAnswers(batch, drawn, [place.number for place in places or ()])


def _no_experts(parts: Sequence[Sequence[AnswerPart]], rows: int, length: int) -> np.ndarray | None:
    """Return an array for the experts of all tokens, -1 so far; None if those of no answer are known."""
    known = (part.rollout.experts for each in parts for part in each if part.rollout.experts is not None)
    first = next(known, None)
    return None if first is None else np.full((rows, length, *first.shape[1:]), -1, np.int16)


def _spread(numbers: Any, drawn: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    """Put numbers of answers, or of their tokens, where these lie."""
    result = np.zeros(shape, np.float32)
    for each, where in zip(numbers, drawn, strict=True):
        result[where] = each
    return result


class AnswerPacker:
    """Packs the answers of a run, and puts this process's rows of the batch on the devices."""

    def __init__(self, layout: Layout, *, choices: Sequence[int], seq_len: int, answers_per_row: int):
        self._layout, self.seq_len = layout, seq_len
        self._sizes: dict[str, Any] = dict(choices=choices, seq_len=seq_len, answers_per_row=answers_per_row)

    def __call__(
        self, answers: Sequence[JudgedAnswer], numbers: AnswerNumbers | None = None, *, divergence: float = 0.0
    ) -> PackedAnswers:
        """Pack answers with their numbers, or with none; `divergence` is as of `pack_answers`."""
        nothing = np.zeros(len(answers))
        numbers = AnswerNumbers(nothing, nothing) if numbers is None else numbers
        packed = pack_answers(answers, numbers, divergence=divergence, **self._sizes)
        rows = packed.batch.tokens.shape[0]
        held = np.asarray(host_rows(self._layout, rows))
        batch = hand_over(jax.tree.map(lambda leaf: leaf[held], packed.batch), self._layout, rows)
        return packed._replace(batch=batch)
