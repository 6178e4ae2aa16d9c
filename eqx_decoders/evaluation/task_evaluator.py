"""Tasks that a model is measured on again and again, while its weights change: a held-out evaluation of a run."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from eqx_decoders.errors import check
from eqx_decoders.evaluation.engine_requests import EvaluationEngine, Progress, no_progress
from eqx_decoders.evaluation.lm_eval_tasks import (
    PREFIX,
    HarnessScores,
    HarnessSettings,
    find_tasks,
    run_tasks,
    task_names,
)
from eqx_decoders.evaluation.task import LoadedTask, load_task
from eqx_decoders.evaluation.task_run import (
    AnswerSettings,
    TextSource,
    answer_requests,
    default_chunk,
    evaluate_task,
    make_engine,
)
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.io.processes import check_same
from eqx_decoders.serving.engine.config import EngineConfig, EngineLimits


MAX_LENGTH = 2048  # tokens of a document of lm-eval with its continuation


class TaskResults(NamedTuple):
    """Scores of tasks."""

    scores: Sequence[TaskScores | HarnessScores]

    def figures(self) -> dict[str, float]:
        """Return all numbers by name: `gsm8k`, `gsm8k/error`, `gsm8k/truncated`, `arc_easy/acc`, …"""
        figures: dict[str, float] = {}
        for each in self.scores:
            if isinstance(each, TaskScores):
                figures[each.name] = each.score.mean
                numbers = each.figures()
                more = {"error": numbers["score_error"], "length": numbers["mean_length"]}
                more |= {name: numbers[name] for name in ("truncated", "unjudged", *each.columns[1:])}
            else:
                more = {name: score.mean for name, score in each.metrics.items()}
            figures |= {f"{each.name}/{name}": value for name, value in more.items()}
        return figures

    def lines(self) -> list[str]:
        """Return a line about each score: `gsm8k 0.4231 ± 0.0137, 2.1% truncated`."""
        lines = []
        for each in self.scores:
            if isinstance(each, TaskScores):
                lines.append(f"{each.name} {each.score}, {each.truncated:.1%} truncated")
            else:
                lines += [f"{each.name} {name} {score}" for name, score in each.metrics.items()]
        return lines


@dataclasses.dataclass(kw_only=True)
class TaskEvaluator:
    """Tasks, and the engine that answers them, whose programs are compiled once for all weights of one model.

    **Arguments:**

    - `tasks`: tasks of one's own.
    - `harness`: names of lm-eval's tasks, and `manager`, where it finds them.
    - `settings`: how answers are drawn and graded.
    - `limits`: limits of the engine.
    """

    tasks: Sequence[LoadedTask]
    harness: Sequence[str]
    manager: Any
    settings: AnswerSettings
    limits: EngineLimits
    _engine: Any = None

    @classmethod
    def create(
        cls, specs: Sequence[str], text: TextSource, settings: AnswerSettings = AnswerSettings(), *, flag: str = "tasks"
    ) -> "TaskEvaluator":
        """Load tasks, `file.py:name` or `lm-eval:name`, for a model, which may have shapes in place of arrays.

        Raises ConfigError and DataError for tasks that cannot be loaded, for those that the model cannot answer, and
        for others than those of the first process: all compute the answers together.
        """
        tasks = [load_task(spec, flag=flag) for spec in specs if not spec.startswith(PREFIX)]
        harness = task_names(specs)
        names = [*(task.name for task in tasks), *harness]
        check(len(set(names)) == len(names), f"{flag} has {', '.join(names)}: give each name once.")
        once = dataclasses.replace(settings, samples=1, pass_at=())
        requests = [request for task in tasks for request in answer_requests(text, task, once)]
        prompts = hashlib.blake2b(repr([request.prompt for request in requests]).encode(), digest_size=16)
        check_same("the examples of tasks", prompts.hexdigest(), "they must not depend on chance, or on the machine")
        lengths = [len(request.prompt) + request.max_new_tokens for request in requests]
        lengths += [min(MAX_LENGTH, text.model.trained_positions or MAX_LENGTH)] if harness else []
        limits = EngineLimits(max_length=max(lengths), prefill_chunk=default_chunk(text))
        EngineConfig(max_length=limits.max_length).check_model(text.model)
        manager = find_tasks(harness, HarnessSettings()) if harness else None
        return cls(tasks=tasks, harness=harness, manager=manager, settings=settings, limits=limits)

    def evaluate(
        self, text: TextSource, *, examples: int | None = None, progress: Progress = no_progress
    ) -> TaskResults:
        """Measure a model on the first `examples` of each task (None: all of them); its weights are not kept."""
        engine = self._engine_of(text)
        try:
            results: list[TaskScores | HarnessScores] = []
            for task in self.tasks:
                part = dataclasses.replace(task, examples=task.examples[:examples])
                results.append(evaluate_task(text, engine, part, self.settings, progress))
            return TaskResults([*results, *self._evaluate_harness(text, engine, examples, progress)])
        except BaseException:
            self._engine = None
            raise
        finally:
            engine.clear_prefix_cache()
            engine.release()

    def _engine_of(self, text: TextSource) -> Any:
        """Return the engine with the weights of this model."""
        if self._engine is None:
            self._engine = make_engine(text, self.limits)
        else:
            self._engine.load(text.model)
        return self._engine

    def _evaluate_harness(
        self, text: TextSource, engine: EvaluationEngine, examples: int | None, progress: Progress
    ) -> list[HarnessScores]:
        if not self.harness:
            return []
        from eqx_decoders.evaluation.lm_eval_model import make_lm

        settings = HarnessSettings(limit=examples, seed=self.settings.seed)
        lm = make_lm(text, engine, seed=self.settings.seed, progress=progress)
        return run_tasks(lm, self.harness, settings, self.manager)
