"""Grading of completions: calls a user's function in separate processes, with a time limit."""

from collections.abc import Sequence
from typing import NamedTuple

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.evaluation.task import Example
from eqx_decoders.io.function_workers import CallResult, FunctionWorkers, numbers_by_name
from eqx_decoders.io.processes import LONG_TIMEOUT, broadcast_json, run_in_process_0


SCORE = "score"  # name of the value of a grade that is a single number


class Grade(NamedTuple):
    """Grade of one completion: values by name, the score first.

    `columns=None`: no grade, because the function returned None or failed with `error`.
    """

    columns: dict[str, float] | None
    error: str | None = None


def grade_completions(
    grader: str, calls: Sequence[tuple[Example, str]], *, workers: int = 2, seconds: float = 10.0, flag: str = "tasks"
) -> list[Grade]:
    """Return the grades of pairs of example and completion, in order. In a multi-process run the first process grades.

    Raises ConfigError for a function that cannot be imported or fails for every completion.
    """
    if not calls:
        return []

    def grade() -> list[Grade]:
        with FunctionWorkers(grader, workers=min(workers, len(calls)), seconds=seconds, flag=flag) as processes:
            grades = [_grade(result) for result in processes.map(calls)]
        errors = [grade.error for grade in grades if grade.error is not None]
        check(
            len(errors) < len(grades),
            f"the grade function {grader!r} failed for all {len(grades)} completions. First error: {errors[:1]}.",
        )
        return grades

    grades = run_in_process_0("grading", grade, seconds=LONG_TIMEOUT)
    return [Grade(*row) for row in broadcast_json("grades", grades)]


def _grade(result: CallResult) -> Grade:
    """Return the grade for the result of a call."""
    if result.error is not None:
        return Grade(None, result.error)
    value = result.value
    if value is None:
        return Grade(None)
    columns = numbers_by_name(value, SCORE)
    if columns is None:
        shown = repr(value)[:80]
        return Grade(None, f"returned {shown}, but must return a finite number, a bool, a dictionary of these, or None")
    return Grade(columns)


def column_names(grades: Sequence[Grade | None]) -> list[str]:
    """Return the names of all values, the score first.

    Raises ConfigError if the first value, which is the score, has different names in different grades.
    """
    names_by_grade = [list(grade.columns) for grade in grades if grade is not None and grade.columns]
    score_names = sorted({names[0] for names in names_by_grade})
    if len(score_names) > 1:
        raise ConfigError(
            f"the first value of a grade is the score, and must always have the same name, but has the names "
            f"{', '.join(score_names)}. Return the values in the same order."
        )
    return list(dict.fromkeys(name for names in names_by_grade for name in names)) or [SCORE]
