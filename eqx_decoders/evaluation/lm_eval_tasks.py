"""Running lm-eval tasks (extra "lm-eval"), such as `lm-eval:arc_easy,hellaswag`, and reading their results."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eqx_decoders.errors import (
    CheckedFields,
    ConfigError,
    DataError,
    EqxDecodersError,
    NonNegativeInt,
    PositiveInt,
    missing_package,
    suggest,
)
from eqx_decoders.evaluation.statistics import MeanScore


PREFIX = "lm-eval:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMEvalSettings(CheckedFields):
    """Settings of lm-eval tasks.

    **Arguments:**

    - `include_path`: directory with custom lm-eval tasks (YAML files).
    - `limit`: maximum number of documents per task. None: all.
    - `num_fewshot`: number of few-shot examples. None: the task's value.
    - `chat`: apply the model's chat template.
    - `seed`: seed for the selection of few-shot examples.
    """

    include_path: str | None = None
    limit: PositiveInt | None = None
    num_fewshot: NonNegativeInt | None = None
    chat: bool = False
    seed: NonNegativeInt = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMEvalScores:
    """Results of one lm-eval task or group of tasks.

    **Arguments:**

    - `name`: name of the task or group.
    - `metrics`: mean and standard error of each metric, computed by lm-eval.
    - `documents`: values of each metric per document, if they are numbers.
    """

    name: str
    metrics: Mapping[str, MeanScore]
    documents: Mapping[str, np.ndarray]

    def figures(self) -> dict[str, float]:
        """Return all metrics by name."""
        means = {name: score.mean for name, score in self.metrics.items()}
        return means | {f"{name}_error": score.error for name, score in self.metrics.items()}


def task_names(specs: Sequence[str]) -> list[str]:
    """Return the names of the lm-eval tasks in `specs`, which have the form `lm-eval:a,b`."""
    lists = [spec.removeprefix(PREFIX) for spec in specs if spec.startswith(PREFIX)]
    return [name for names in lists for name in names.split(",") if name]


def find_tasks(names: Sequence[str], settings: LMEvalSettings) -> Any:
    """Return lm-eval's task manager. Raises ConfigError for unknown task names, and MissingPackage."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_package("lm_eval", "lm-eval") from error
    manager = TaskManager(include_path=settings.include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"lm-eval has no task {name!r}.{suggest(name, manager.all_tasks)} `lm-eval ls tasks` lists all tasks; "
                "include_path adds a directory with custom tasks."
            )
    return manager


def run_tasks(lm: Any, names: Sequence[str], settings: LMEvalSettings, manager: Any = None) -> list[LMEvalScores]:
    """Run lm-eval tasks with a model (see `make_lm`), and return the results of each task and group.

    Raises DataError with lm-eval's message if a task fails, for example because its data cannot be downloaded.
    """
    manager = find_tasks(names, settings) if manager is None else manager
    import lm_eval

    evaluate: Any = lm_eval.simple_evaluate
    options: dict[str, Any] = dict(limit=settings.limit, num_fewshot=settings.num_fewshot, task_manager=manager)
    options["apply_chat_template"] = settings.chat
    seeds = dict.fromkeys(
        ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), settings.seed
    )
    with preserved_random_state():
        try:
            evaluated: Any = evaluate(model=lm, tasks=list(names), **options, **seeds)
        except EqxDecodersError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:400]
            raise DataError(f"lm-eval failed to run {', '.join(names)}: {type(error).__name__}: {text}") from error
    assert evaluated is not None
    results: dict[str, Any] = {**evaluated["results"], **evaluated.get("groups", {})}
    return [_scores(name, values, evaluated["samples"].get(name, [])) for name, values in results.items()]


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random states of `random` and NumPy on exit, because lm-eval seeds them."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _scores(name: str, values: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> LMEvalScores:
    """Return the results of a task. The keys of lm-eval's results have the form `metric,filter`."""
    metrics: dict[str, MeanScore] = {}
    documents: dict[str, np.ndarray] = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if metric.endswith("_stderr") or not filtered or not isinstance(value, int | float):
            continue
        shown = metric if filtered == "none" else f"{metric} ({filtered})"
        error = values.get(f"{metric}_stderr,{filtered}")
        by_document = {
            row["doc_id"]: row.get(metric)
            for row in samples
            if row.get("filter", "none") == filtered and isinstance(row.get(metric), int | float)
        }
        count = len(by_document) or len({row["doc_id"] for row in samples})
        metrics[shown] = MeanScore(float(value), float(error) if isinstance(error, int | float) else math.nan, count)
        if by_document:
            documents[shown] = np.asarray([by_document[key] for key in sorted(by_document)], np.float64)
    return LMEvalScores(name=name, metrics=metrics, documents=documents)
