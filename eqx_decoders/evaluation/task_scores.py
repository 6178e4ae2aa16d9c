"""What a model's answers to the examples of a task amount to."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from eqx_decoders.evaluation.engine_requests import WrittenAnswer
from eqx_decoders.evaluation.grading import Grade, column_names
from eqx_decoders.evaluation.statistics import MeanScore, mean_over_prompts, mean_pass_at_k, prompt_means
from eqx_decoders.evaluation.task import LoadedTask
from eqx_decoders.io.atomic_files import write_atomically


RIGHT = 1.0  # the least score of a right answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScores:
    """Answers of a model to the examples of a task, and their grades: a row for each example, a column for each sample.

    **Arguments:**

    - `task`: the task.
    - `answers`: the answers.
    - `grades`: their grades; None for a truncated answer, which is wrong, whatever it says.
    """

    task: LoadedTask
    answers: Sequence[Sequence[WrittenAnswer]]
    grades: Sequence[Sequence[Grade | None]]

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def num_samples(self) -> int:
        """Answers to each prompt."""
        return len(self.answers[0])

    @property
    def columns(self) -> list[str]:
        """Names of the numbers of a grade, the score first."""
        return column_names([grade for row in self.grades for grade in row])

    def column(self, name: str) -> Float[np.ndarray, "prompts samples"]:
        """Return one number of each grade: 0 for truncated answers, NaN for those that could not be judged."""

        def number(grade: Grade | None) -> float:
            if grade is None:
                return 0.0
            return np.nan if grade.columns is None else grade.columns.get(name, np.nan)

        return np.asarray([[number(grade) for grade in row] for row in self.grades], np.float64)

    @property
    def scores(self) -> Float[np.ndarray, "prompts samples"]:
        """Score of each answer."""
        return self.column(self.columns[0])

    @property
    def score(self) -> MeanScore:
        """Mean score, with the standard error over prompts."""
        return mean_over_prompts(self.scores)

    @property
    def prompt_scores(self) -> Float[np.ndarray, "prompts"]:
        """Mean score of each prompt, for comparisons."""
        return prompt_means(self.scores)

    def pass_at(self, k: int) -> MeanScore:
        """Return the unbiased chance that one of k answers is right, over prompts."""
        return mean_pass_at_k(_right(self.scores), k)

    @property
    def ends(self) -> dict[str, float]:
        """Share of the answers by what ended them."""
        ends = [answer.end for row in self.answers for answer in row]
        return {end: ends.count(end) / len(ends) for end in ("stop_token", "stop_string", "length") if end in ends}

    @property
    def truncated(self) -> float:
        """Share of answers that the limit of their length has ended."""
        return self.ends.get("length", 0.0)

    @property
    def unjudged(self) -> float:
        """Share of answers that could not be judged."""
        return float(np.isnan(self.scores).mean())

    @property
    def failures(self) -> list[str]:
        """Errors of the grade function, each with its example."""
        rows = enumerate(self.grades, 1)
        graded = [(number, grade) for number, row in rows for grade in row if grade is not None]
        return [f"example {number}: {grade.error}" for number, grade in graded if grade.error is not None]

    def lengths(self) -> dict[str, float]:
        """Return mean and largest numbers of tokens, and the means of right and of wrong answers."""
        tokens = np.asarray([[answer.num_tokens for answer in row] for row in self.answers], np.float64)
        right = _right(self.scores)
        parts = {"right": tokens[right == 1.0], "wrong": tokens[right == 0.0]}
        means = {f"{name}_length": float(part.mean()) if part.size else np.nan for name, part in parts.items()}
        return {"mean_length": float(tokens.mean()), "max_length": float(tokens.max()), **means}

    def figures(self, pass_at: Sequence[int] = ()) -> dict[str, float]:
        """Return all numbers by name: `score`, `score_error`, `pass@4`, …"""
        named = {"score": self.score}
        named |= {name: mean_over_prompts(self.column(name)) for name in self.columns[1:]}
        named |= {f"pass@{k}": self.pass_at(k) for k in pass_at}
        figures = {name: each.mean for name, each in named.items()}
        figures |= {f"{name}_error": each.error for name, each in named.items()}
        figures |= {"truncated": self.truncated, "unjudged": self.unjudged, **self.lengths()}
        return figures | {f"end_{name}": share for name, share in self.ends.items()}

    def write(self, path: Path) -> None:
        """Write a line for each answer: its example, its text, its end and its grade."""
        lines = [
            json.dumps(row, ensure_ascii=False)
            for number, (example, answers, grades) in enumerate(
                zip(self.task.examples, self.answers, self.grades, strict=True)
            )
            for sample, (answer, grade) in enumerate(zip(answers, grades, strict=True))
            for row in [_row(number, sample, example, answer, grade)]
        ]
        write_atomically(path, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


def _right(scores: Float[np.ndarray, "prompts samples"]) -> Float[np.ndarray, "prompts samples"]:
    """Return 1 for right answers, 0 for wrong ones, and NaN for those that could not be judged."""
    return np.where(np.isnan(scores), np.nan, (scores >= RIGHT).astype(np.float64))


def _row(number: int, sample: int, example: Any, answer: WrittenAnswer, grade: Grade | None) -> dict[str, Any]:
    grades: dict[str, Any] = {} if grade is None or grade.columns is None else grade.columns
    row = {"example": number, "sample": sample, "grade": grades, "end": answer.end, "tokens": answer.num_tokens}
    row |= {} if grade is None or grade.error is None else {"error": grade.error}
    return row | {"answer": answer.text, **{f"example.{name}": value for name, value in example.items()}}
