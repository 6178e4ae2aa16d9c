"""Grades of answers: a user's function, called in processes of their own with deadlines."""

from collections.abc import Sequence
from typing import NamedTuple

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.evaluation.task import Example
from eqx_decoders.io.function_workers import CallResult, FunctionWorkers, numbers_by_name
from eqx_decoders.io.processes import LONG, from_first, in_first


SCORE = "score"  # name of the column of a grade that is a single number


class Grade(NamedTuple):
    """Grade of one answer: numbers by name, the score first; None: it cannot be judged, for `error` or by itself."""

    columns: dict[str, float] | None
    error: str | None = None


def grade_answers(
    grader: str, calls: Sequence[tuple[Example, str]], *, workers: int = 2, seconds: float = 10.0, flag: str = "tasks"
) -> list[Grade]:
    """Return the grades of answers to examples, in order. Of several processes the first computes those of all.

    Raises ConfigError for a function that cannot be imported, and for one that fails at every answer.
    """
    if not calls:
        return []

    def grade() -> list[Grade]:
        with FunctionWorkers(grader, workers=min(workers, len(calls)), seconds=seconds, flag=flag) as processes:
            grades = [_grade(result) for result in processes.map(calls)]
        errors = [grade.error for grade in grades if grade.error is not None]
        check(len(errors) < len(grades), f"the grade {grader!r} failed for all {len(grades)} answers: {errors[:1]}.")
        return grades

    return [Grade(*each) for each in from_first("grades", in_first("grading", grade, seconds=LONG))]


def _grade(result: CallResult) -> Grade:
    """Return the grade that a call has brought."""
    if result.error is not None:
        return Grade(None, result.error)
    value = result.value
    if value is None:
        return Grade(None)
    columns = numbers_by_name(value, SCORE)
    if columns is None:
        shown = repr(value)[:80]
        return Grade(None, f"it returned {shown}: it must be a finite number, a bool, several by name, or None")
    return Grade(columns)


def column_names(grades: Sequence[Grade | None]) -> list[str]:
    """Return the names of all columns, those of the first grade that has some first.

    Raises ConfigError where the first column, the score, has several names.
    """
    known = [list(grade.columns) for grade in grades if grade is not None and grade.columns]
    firsts = sorted({names[0] for names in known})
    if len(firsts) > 1:
        raise ConfigError(f"the first number of a grade is its score: it must have one name, not {', '.join(firsts)}.")
    return list(dict.fromkeys(name for names in known for name in names)) or [SCORE]
