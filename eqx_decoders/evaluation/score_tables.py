"""Tables of evaluations, for people: of one model, and of two side by side."""

from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import DataError
from eqx_decoders.evaluation.lm_eval_tasks import HarnessScores
from eqx_decoders.evaluation.statistics import (
    MeanScore,
    mean_over_prompts,
    paired_difference,
    ratio_of_sums,
    win_counts,
)
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.evaluation.text_sets import TextScores


Scores = TaskScores | TextScores | HarnessScores

ENDS = {"stop_token": "token", "stop_string": "text", "length": "length"}


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows, the first of which is the head, as the lines of a Markdown table; numbers stand right."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(map(_fitted, row, widths, range(len(row)))) for row in rows]
    rule = "|".join("-" * (width + 2) if at == 0 else "-" * (width + 1) + ":" for at, width in enumerate(widths))
    return [f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])]


def _fitted(cell: str, width: int, at: int) -> str:
    return cell.ljust(width) if at == 0 else cell.rjust(width)


def describe(results: Sequence[Scores], pass_at: Sequence[int] = ()) -> list[str]:
    """Return the tables of a model's results: of tasks, of texts, and of lm-eval's tasks."""
    tasks = [each for each in results if isinstance(each, TaskScores)]
    texts = [each for each in results if isinstance(each, TextScores)]
    harness = [each for each in results if isinstance(each, HarnessScores)]
    tables = [_tasks(tasks, pass_at)] if tasks else []
    tables += [_texts(texts)] if texts else []
    tables += [_harness(harness)] if harness else []
    lines = [line for table in tables for line in [*format_table(table), ""]]
    return lines + [line for each in tasks for line in _notes(each)]


def _tasks(tasks: Sequence[TaskScores], pass_at: Sequence[int]) -> list[list[str]]:
    head = ["task", "prompts", "score", *(f"pass@{k}" for k in pass_at)]
    rows = [[*head, "truncated", "tokens: mean", "most", "right", "wrong", "ends"]]
    for each in tasks:
        lengths = [f"{value:.0f}" if value == value else "-" for value in each.lengths().values()]
        ends = ", ".join(f"{ENDS[name]} {share:.0%}" for name, share in each.ends.items())
        numbers = [str(len(each.answers)), str(each.score), *(str(each.pass_at(k)) for k in pass_at)]
        mean, most, right, wrong = lengths
        rows.append([each.name, *numbers, f"{each.truncated:.1%}", mean, most, right, wrong, ends])
        rows += [["  " + name, "", str(column), *[""] * (len(pass_at) + 6)] for name, column in _columns(each)]
    return rows


def _columns(task: TaskScores) -> list[tuple[str, MeanScore]]:
    return [(name, mean_over_prompts(task.column(name))) for name in task.columns[1:]]


def _texts(texts: Sequence[TextScores]) -> list[list[str]]:
    rows = [["text", "texts", "bytes", "tokens", "bits per byte", "perplexity per token"]]
    for each in texts:
        sizes = [len(each.nats), int(each.num_bytes.sum()), int(each.num_tokens.sum())]
        rows.append([each.name, *(f"{size:,}" for size in sizes), str(each.bits_per_byte), f"{each.perplexity:.3f}"])
    return rows


def _harness(results: Sequence[HarnessScores]) -> list[list[str]]:
    rows = [["lm-eval", "metric", "value"]]
    for each in results:
        rows += [[each.name, name, str(score)] for name, score in each.metrics.items()]
    return rows


def _notes(task: TaskScores) -> list[str]:
    """Return what a reader of the score must know."""
    lines = []
    if task.unjudged:
        lines.append(f"{task.name}: {task.unjudged:.1%} of the answers could not be judged; they are in no mean.")
    if task.failures:
        lines.append(f"{task.name}: the grade failed for {len(task.failures)} answers; {task.failures[0]}")
    return lines


def compare(first: Sequence[Scores], second: Sequence[Scores], names: tuple[str, str]) -> list[str]:
    """Return the table of two models over the same prompts: both scores, their paired difference, and who wins."""
    head = ["task", *names, "difference", "wins", "ties", "losses", "p"]
    rows = [head]
    for one, other in zip(first, second, strict=True):
        rows += _compared(one, other)
    return format_table(rows) if len(rows) > 1 else []


def _compared(one: Scores, other: Scores) -> list[list[str]]:
    if isinstance(one, TaskScores) and isinstance(other, TaskScores):
        return [[one.name, str(one.score), str(other.score), *_paired(one.prompt_scores, other.prompt_scores)]]
    if isinstance(one, TextScores) and isinstance(other, TextScores):
        difference = ratio_of_sums((one.nats - other.nats) / np.log(2), one.num_bytes)
        wins = _wins(-one.nats, -other.nats)  # fewer bits are better
        return [[f"{one.name} (bits)", str(one.bits_per_byte), str(other.bits_per_byte), _signed(difference), *wins]]
    if not (isinstance(one, HarnessScores) and isinstance(other, HarnessScores)):
        raise DataError(
            f"task {one.name!r}: the scores of the two models are {type(one).__name__} and {type(other).__name__}. "
            "Compare models that were evaluated on the same tasks."
        )
    rows = []
    for name, score in one.metrics.items():
        values = [each.documents.get(name) for each in (one, other)]
        cells = ["", "", "", "", ""]
        if values[0] is not None and values[1] is not None and len(values[0]) == len(values[1]):
            cells = _paired(values[0], values[1])
        rows.append([f"{one.name} {name}", str(score), str(other.metrics[name]), *cells])
    return rows


def _paired(one: np.ndarray, other: np.ndarray) -> list[str]:
    return [_signed(paired_difference(one, other)), *_wins(one, other)]


def _wins(one: np.ndarray, other: np.ndarray) -> list[str]:
    counts = win_counts(one, other)
    return [str(counts.wins), str(counts.ties), str(counts.losses), f"{counts.p_value:.3f}"]


def _signed(score: MeanScore) -> str:
    return ("+" if score.mean >= 0 else "") + str(score)
