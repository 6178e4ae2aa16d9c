"""Tables of the results of one model, and of two models compared."""

from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import DataError
from eqx_decoders.evaluation.lm_eval_tasks import LMEvalScores
from eqx_decoders.evaluation.statistics import (
    MeanScore,
    mean_over_prompts,
    paired_difference,
    ratio_of_sums,
    win_counts,
)
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.evaluation.text_sets import TextScores


Scores = TaskScores | TextScores | LMEvalScores

END_REASONS = {"stop_token": "token", "stop_string": "text", "length": "length"}


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, given its header and rows. Columns after the first are right-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(map(_aligned, row, widths, range(len(row)))) for row in rows]
    rule = "|".join("-" * (width + 2) if at == 0 else "-" * (width + 1) + ":" for at, width in enumerate(widths))
    return [f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])]


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def describe(results: Sequence[Scores], pass_at: Sequence[int] = ()) -> list[str]:
    """Return the tables of a model's results: custom tasks, texts, and lm-eval tasks."""
    tasks = [scores for scores in results if isinstance(scores, TaskScores)]
    texts = [scores for scores in results if isinstance(scores, TextScores)]
    lm_eval_tasks = [scores for scores in results if isinstance(scores, LMEvalScores)]
    tables = [_tasks_table(tasks, pass_at)] if tasks else []
    tables += [_texts_table(texts)] if texts else []
    tables += [_lm_eval_table(lm_eval_tasks)] if lm_eval_tasks else []
    lines = [line for table in tables for line in [*format_table(table), ""]]
    return lines + [line for task in tasks for line in _notes(task)]


def _tasks_table(tasks: Sequence[TaskScores], pass_at: Sequence[int]) -> list[list[str]]:
    head = ["task", "prompts", "score", *(f"pass@{k}" for k in pass_at)]
    rows = [[*head, "truncated", "tokens: mean", "max", "correct", "incorrect", "end reasons"]]
    for task in tasks:
        lengths = [f"{value:.0f}" if value == value else "-" for value in task.lengths().values()]
        ends = ", ".join(f"{END_REASONS[name]} {fraction:.0%}" for name, fraction in task.end_reasons.items())
        numbers = [str(len(task.completions)), str(task.score), *(str(task.pass_at(k)) for k in pass_at)]
        rows.append([task.name, *numbers, f"{task.truncated:.1%}", *lengths, ends])
        rows += [["  " + name, "", str(column), *[""] * (len(pass_at) + 6)] for name, column in _columns(task)]
    return rows


def _columns(task: TaskScores) -> list[tuple[str, MeanScore]]:
    return [(name, mean_over_prompts(task.column(name))) for name in task.columns[1:]]


def _texts_table(results: Sequence[TextScores]) -> list[list[str]]:
    rows = [["text", "texts", "bytes", "tokens", "bits per byte", "perplexity per token"]]
    for scores in results:
        sizes = [len(scores.nats), int(scores.num_bytes.sum()), int(scores.num_tokens.sum())]
        values = [str(scores.bits_per_byte), f"{scores.perplexity:.3f}"]
        rows.append([scores.name, *(f"{size:,}" for size in sizes), *values])
    return rows


def _lm_eval_table(results: Sequence[LMEvalScores]) -> list[list[str]]:
    rows = [["lm-eval", "metric", "value"]]
    for scores in results:
        rows += [[scores.name, name, str(score)] for name, score in scores.metrics.items()]
    return rows


def _notes(task: TaskScores) -> list[str]:
    """Return notes about completions without a grade."""
    lines = []
    if task.ungraded:
        lines.append(
            f"{task.name}: {task.ungraded:.1%} of the completions have no grade, and are left out of the means."
        )
    if task.failures:
        lines.append(f"{task.name}: the grade function failed for {len(task.failures)} completions; {task.failures[0]}")
    return lines


def compare(first: Sequence[Scores], second: Sequence[Scores], names: tuple[str, str]) -> list[str]:
    """Return a table that compares two models: scores, paired difference, and numbers of prompts won."""
    rows = [["task", *names, "difference", "wins", "ties", "losses", "p"]]
    for first_scores, second_scores in zip(first, second, strict=True):
        rows += _compared(first_scores, second_scores)
    return format_table(rows) if len(rows) > 1 else []


def _compared(first: Scores, second: Scores) -> list[list[str]]:
    if isinstance(first, TaskScores) and isinstance(second, TaskScores):
        return [[first.name, str(first.score), str(second.score), *_paired(first.prompt_scores, second.prompt_scores)]]
    if isinstance(first, TextScores) and isinstance(second, TextScores):
        difference = ratio_of_sums((first.nats - second.nats) / np.log(2), first.num_bytes)
        bits = [str(first.bits_per_byte), str(second.bits_per_byte)]
        wins = _wins(-first.nats, -second.nats)  # fewer bits are better
        return [[f"{first.name} (bits)", *bits, _signed(difference), *wins]]
    if not (isinstance(first, LMEvalScores) and isinstance(second, LMEvalScores)):
        raise DataError(
            f"task {first.name!r}: the models have scores of the kinds {type(first).__name__} and "
            f"{type(second).__name__}. Compare models that were evaluated on the same tasks."
        )
    rows = []
    for name, score in first.metrics.items():
        values = [scores.documents.get(name) for scores in (first, second)]
        cells = ["", "", "", "", ""]
        if values[0] is not None and values[1] is not None and len(values[0]) == len(values[1]):
            cells = _paired(values[0], values[1])
        rows.append([f"{first.name} {name}", str(score), str(second.metrics[name]), *cells])
    return rows


def _paired(first: np.ndarray, second: np.ndarray) -> list[str]:
    return [_signed(paired_difference(first, second)), *_wins(first, second)]


def _wins(first: np.ndarray, second: np.ndarray) -> list[str]:
    counts = win_counts(first, second)
    return [str(counts.wins), str(counts.ties), str(counts.losses), f"{counts.p_value:.3f}"]


def _signed(score: MeanScore) -> str:
    return ("+" if score.mean >= 0 else "") + str(score)
