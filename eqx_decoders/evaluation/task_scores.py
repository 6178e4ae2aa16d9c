"""`TaskScores`: the completions of a task with their grades, and the metrics computed from them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from eqx_decoders.evaluation.engine_requests import Completion
from eqx_decoders.evaluation.grading import Grade, column_names
from eqx_decoders.evaluation.statistics import MeanScore, mean_over_prompts, mean_pass_at_k, prompt_means
from eqx_decoders.evaluation.task import LoadedTask
from eqx_decoders.io.atomic_files import write_atomically


CORRECT = 1.0  # minimum score of a correct completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScores:
    """Completions of a task and their grades, with one row per example and one column per sample.

    **Arguments:**

    - `task`: the task.
    - `completions`: the completions.
    - `grades`: the grades. None for truncated completions, which count as incorrect.
    """

    task: LoadedTask
    completions: Sequence[Sequence[Completion]]
    grades: Sequence[Sequence[Grade | None]]

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def num_samples(self) -> int:
        """Number of completions per prompt."""
        return len(self.completions[0])

    @property
    def columns(self) -> list[str]:
        """Names of the values of a grade, the score first."""
        return column_names([grade for row in self.grades for grade in row])

    def column(self, name: str) -> Float[np.ndarray, "prompts samples"]:
        """Return one value of each grade: 0 for truncated completions, NaN for completions without a grade."""

        def value(grade: Grade | None) -> float:
            if grade is None:
                return 0.0
            return np.nan if grade.columns is None else grade.columns.get(name, np.nan)

        return np.asarray([[value(grade) for grade in row] for row in self.grades], np.float64)

    @property
    def scores(self) -> Float[np.ndarray, "prompts samples"]:
        """Score of each completion."""
        return self.column(self.columns[0])

    @property
    def score(self) -> MeanScore:
        """Mean score, with the standard error over prompts."""
        return mean_over_prompts(self.scores)

    @property
    def prompt_scores(self) -> Float[np.ndarray, "prompts"]:
        """Mean score of each prompt."""
        return prompt_means(self.scores)

    def pass_at(self, k: int) -> MeanScore:
        """Return pass@k, the unbiased estimate of the probability that one of k completions is correct."""
        return mean_pass_at_k(_is_correct(self.scores), k)

    @property
    def end_reasons(self) -> dict[str, float]:
        """Fraction of the completions by end reason."""
        reasons = [completion.end_reason for row in self.completions for completion in row]
        known = ("stop_token", "stop_string", "length")
        return {reason: reasons.count(reason) / len(reasons) for reason in known if reason in reasons}

    @property
    def truncated(self) -> float:
        """Fraction of the completions that reached the maximum length."""
        return self.end_reasons.get("length", 0.0)

    @property
    def ungraded(self) -> float:
        """Fraction of the completions without a grade."""
        return float(np.isnan(self.scores).mean())

    @property
    def failures(self) -> list[str]:
        """Error messages of the grade function."""
        return [
            f"example {number}: {grade.error}"
            for number, row in enumerate(self.grades, 1)
            for grade in row
            if grade is not None and grade.error is not None
        ]

    def lengths(self) -> dict[str, float]:
        """Return mean and maximum number of tokens, and the mean of correct and of incorrect completions."""
        tokens = np.asarray([[completion.num_tokens for completion in row] for row in self.completions], np.float64)
        correct = _is_correct(self.scores)
        groups = {"correct": tokens[correct == 1.0], "incorrect": tokens[correct == 0.0]}
        means = {f"{name}_length": float(group.mean()) if group.size else np.nan for name, group in groups.items()}
        return {"mean_length": float(tokens.mean()), "max_length": float(tokens.max()), **means}

    def figures(self, pass_at: Sequence[int] = ()) -> dict[str, float]:
        """Return all metrics by name: `score`, `score_error`, `pass@4`, …"""
        means = {"score": self.score}
        means |= {name: mean_over_prompts(self.column(name)) for name in self.columns[1:]}
        means |= {f"pass@{k}": self.pass_at(k) for k in pass_at}
        figures = {name: score.mean for name, score in means.items()}
        figures |= {f"{name}_error": score.error for name, score in means.items()}
        figures |= {"truncated": self.truncated, "ungraded": self.ungraded, **self.lengths()}
        return figures | {f"end_{reason}": fraction for reason, fraction in self.end_reasons.items()}

    def write(self, path: Path) -> None:
        """Write one JSON line per completion, with its example, text, end reason and grade."""
        lines = [
            json.dumps(_row(number, sample, example, completion, grade), ensure_ascii=False)
            for number, (example, completions, grades) in enumerate(
                zip(self.task.examples, self.completions, self.grades, strict=True)
            )
            for sample, (completion, grade) in enumerate(zip(completions, grades, strict=True))
        ]
        write_atomically(path, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


def _is_correct(scores: Float[np.ndarray, "prompts samples"]) -> Float[np.ndarray, "prompts samples"]:
    """Return 1 for correct completions, 0 for incorrect ones, and NaN for completions without a grade."""
    return np.where(np.isnan(scores), np.nan, (scores >= CORRECT).astype(np.float64))


def _row(number: int, sample: int, example: Any, completion: Completion, grade: Grade | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "example": number,
        "sample": sample,
        "grade": {} if grade is None or grade.columns is None else grade.columns,
        "end": completion.end_reason,
        "tokens": completion.num_tokens,
    }
    if grade is not None and grade.error is not None:
        row["error"] = grade.error
    row["completion"] = completion.text
    return row | {f"example.{name}": value for name, value in example.items()}
