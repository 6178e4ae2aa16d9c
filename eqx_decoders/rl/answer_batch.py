"""Batches of answers: advantages, weights of tokens, and the rows in which answers lie behind their prompts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import hand_over, host_rows
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import DataError, check
from eqx_decoders.rl.drawn_answers import AnswerPart, JudgedAnswer
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.objectives.advantages import group_advantages, whiten
from eqx_decoders.training.objectives.token_weights import token_weights


class AnswerNumbers(NamedTuple):
    """Numbers of the answers of a step: the advantage and the weight of each, which its tokens have."""

    advantages: Float[np.ndarray, "answers"]
    weights: Float[np.ndarray, "answers"]


def answer_numbers(config: RLConfig, answers: Sequence[JudgedAnswer], rewards: np.ndarray) -> AnswerNumbers:
    """Compute advantages and weights of a step's answers, of their rewards, NaN for those that were not judged.

    An answer without a reward, or one that was cut with `truncated="mask"`, weighs nothing, and neither it nor its
    tokens are counted.
    """
    groups = np.asarray([answer.prompt.number for answer in answers])
    lengths = np.asarray([answer.length for answer in answers])
    advantages = group_advantages(rewards, groups, baseline=config.baseline, scale=config.scale)
    known = ~np.isnan(advantages)
    if config.truncated == "mask":
        known &= np.asarray([answer.rollout.finish_reason != "length" for answer in answers])
    if config.whiten:
        advantages = _whitened(advantages, np.where(known, lengths, 0))
    more: dict[str, Any] = {}
    if config.aggregation == "prompt":
        more = {"groups": groups}
    elif config.aggregation == "constant":
        more = {"limit": config.longest_answer}
    weights = token_weights(np.where(known, lengths, 0), config.aggregation, **more)
    return AnswerNumbers(np.where(known, advantages, 0.0), weights)


def _whitened(advantages: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Whiten advantages of answers over all their tokens."""
    mask = np.arange(max(1, lengths.max()))[None] < lengths[:, None]
    tokens = np.broadcast_to(np.where(np.isnan(advantages), 0.0, advantages)[:, None], mask.shape)
    return whiten(tokens, mask)[:, 0]


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
    check(places is not None, f"{rule}: raise dataset.batch_size, or draw fewer (rl.prompts, rl.samples).", DataError)
    ints = {name: np.zeros((rows, seq_len), np.int32) for name in ("tokens", "segment_ids", "positions", "answers")}
    floats = {name: np.zeros((rows, seq_len), np.float32) for name in ("policy", "advantages", "sampler")}
    experts = _no_experts(parts, rows, seq_len)
    drawn = list[tuple[np.ndarray, np.ndarray]]()
    for each, place, advantage, weight in zip(parts, places or (), *numbers, strict=True):
        start, columns = place.start, [np.zeros(0, np.int64)]
        for number, part in enumerate(each, start=place.number):
            span, start = (place.row, slice(start, start + part.size)), start + part.size
            ints["tokens"][span] = np.concatenate([part.context, part.rollout.tokens])
            ints["positions"][span], ints["segment_ids"][span] = np.arange(part.size), number
            if experts is not None and part.rollout.experts is not None:
                experts[span] = part.rollout.experts
            columns.append(start - len(part.drawn) + np.flatnonzero(part.drawn))
            ints["answers"][place.row, columns[-1]] = place.number  # of all parts: they are one answer
            floats["sampler"][place.row, columns[-1]] = part.rollout.log_probs[part.drawn]
        of_answer = np.concatenate(columns)
        drawn.append((np.full_like(of_answer, place.row), of_answer))
        floats["policy"][drawn[-1]], floats["advantages"][drawn[-1]] = weight, advantage
    marks = ints.pop("answers")
    more = {"divergence": divergence * floats["policy"]} if divergence else {}
    signals = Signals(**floats, **more, answers=marks, experts=experts, most_answers=answers_per_row)
    arrays: dict[str, Any] = ints
    batch = Batch(**arrays, loss_mask=marks > 0, signals=signals, contiguous=True)
    return PackedAnswers(batch, drawn, [place.number for place in places or ()])


def _no_experts(parts: Sequence[Sequence[AnswerPart]], rows: int, length: int) -> np.ndarray | None:
    """Return an array for the experts of all tokens, -1 so far; None if those of no answer are known."""
    known = (part.rollout.experts for each in parts for part in each if part.rollout.experts is not None)
    first = next(known, None)
    return None if first is None else np.full((rows, length, *first.shape[1:]), -1, np.int16)


class AnswerPacker:
    """Packs the answers of a run, and puts this process's rows of the batch on the devices."""

    def __init__(self, layout: Layout, *, choices: Sequence[int], seq_len: int, answers_per_row: int):
        self._layout, self.seq_len = layout, seq_len
        self._sizes: dict[str, Any] = dict(choices=choices, seq_len=seq_len, answers_per_row=answers_per_row)

    def __call__(
        self, answers: Sequence[JudgedAnswer], numbers: AnswerNumbers | None = None, *, divergence: float = 0.0
    ) -> PackedAnswers:
        """Pack answers with their numbers, or with none; `divergence` is as of `pack_answers`."""
        numbers = AnswerNumbers(*np.zeros((2, len(answers)))) if numbers is None else numbers
        packed = pack_answers(answers, numbers, divergence=divergence, **self._sizes)
        rows = packed.batch.tokens.shape[0]
        held = np.asarray(host_rows(self._layout, rows))
        batch = hand_over(jax.tree.map(lambda leaf: leaf[held], packed.batch), self._layout, rows)
        return packed._replace(batch=batch)
