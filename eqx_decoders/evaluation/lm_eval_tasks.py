"""lm-eval's tasks (extra "lm-eval"): found, run and read; `lm-eval:arc_easy,hellaswag` names two of them."""

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
class HarnessSettings(CheckedFields):
    """How lm-eval runs its tasks.

    **Arguments:**

    - `include_path`: folder of tasks of one's own, YAML files.
    - `limit`: documents of each task; None: all.
    - `num_fewshot`: examples before each document; None: as the task says.
    - `chat`: contexts are messages, by the model's chat template.
    - `seed`: seed of the choice of examples.
    """

    include_path: str | None = None
    limit: PositiveInt | None = None
    num_fewshot: NonNegativeInt | None = None
    chat: bool = False
    seed: NonNegativeInt = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarnessScores:
    """Results of one task of lm-eval.

    **Arguments:**

    - `name`: name of the task, or of a group of tasks.
    - `metrics`: mean and standard error of each metric, as lm-eval computes them.
    - `documents`: values of each metric by document, where these are numbers.
    """

    name: str
    metrics: Mapping[str, MeanScore]
    documents: Mapping[str, np.ndarray]

    def figures(self) -> dict[str, float]:
        """Return all numbers by name."""
        means = {name: score.mean for name, score in self.metrics.items()}
        return means | {f"{name}_error": score.error for name, score in self.metrics.items()}


def task_names(specs: Sequence[str]) -> list[str]:
    """Return the names of lm-eval's tasks among these, `lm-eval:a,b`."""
    named = [spec.removeprefix(PREFIX) for spec in specs if spec.startswith(PREFIX)]
    return [name for names in named for name in names.split(",") if name]


def find_tasks(names: Sequence[str], settings: HarnessSettings) -> Any:
    """Return lm-eval's manager of tasks. Raises ConfigError for names that it does not know, MissingPackage."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_package("lm_eval", "lm-eval") from error
    manager = TaskManager(include_path=settings.include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"lm-eval has no task {name!r}.{suggest(name, manager.all_tasks)} `lm-eval ls tasks` lists all tasks; "
                "include_path is for your own tasks."
            )
    return manager


def run_tasks(lm: Any, names: Sequence[str], settings: HarnessSettings, manager: Any = None) -> list[HarnessScores]:
    """Run lm-eval's tasks on a model (see `make_lm`); return the results of each task and group.

    Raises DataError with lm-eval's error where a task cannot be run, as one whose data cannot be downloaded.
    """
    manager = find_tasks(names, settings) if manager is None else manager
    import lm_eval

    evaluate: Any = lm_eval.simple_evaluate
    options: dict[str, Any] = dict(limit=settings.limit, num_fewshot=settings.num_fewshot, task_manager=manager)
    options["apply_chat_template"] = settings.chat
    seeds = dict.fromkeys(
        ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), settings.seed
    )
    with own_random_numbers():
        try:
            evaluated: Any = evaluate(model=lm, tasks=list(names), **options, **seeds)
        except EqxDecodersError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:400]
            raise DataError(f"lm-eval can't run {', '.join(names)}: {type(error).__name__}: {text}") from error
    assert evaluated is not None
    results: dict[str, Any] = {**evaluated["results"], **evaluated.get("groups", {})}
    return [_scores(name, values, evaluated["samples"].get(name, [])) for name, values in results.items()]


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Leave the random numbers of `random` and NumPy as they were: lm-eval seeds them."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _scores(name: str, values: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> HarnessScores:
    """Return the results of a task; lm-eval names them `metric,filter`."""
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
    return HarnessScores(name=name, metrics=metrics, documents=documents)
