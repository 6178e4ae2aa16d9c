"""`TaskEvaluator`: evaluates tasks repeatedly during a training run, with the current weights."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from eqx_decoders.errors import check
from eqx_decoders.evaluation.engine_requests import EvaluationEngine, Progress, no_progress
from eqx_decoders.evaluation.lm_eval_tasks import (
    PREFIX,
    LMEvalScores,
    LMEvalSettings,
    find_tasks,
    run_tasks,
    task_names,
)
from eqx_decoders.evaluation.task import LoadedTask, load_task
from eqx_decoders.evaluation.task_run import (
    AnswerSettings,
    TextSource,
    completion_requests,
    default_prefill_chunk,
    evaluate_task,
    make_engine,
)
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.io.processes import check_same
from eqx_decoders.serving.engine.config import EngineConfig, EngineLimits


MAX_LENGTH = 2048  # maximum tokens of a context and its continuation in lm-eval tasks


class TaskResults(NamedTuple):
    """Scores of several tasks."""

    scores: Sequence[TaskScores | LMEvalScores]

    def figures(self) -> dict[str, float]:
        """Return all metrics by name: `gsm8k`, `gsm8k/error`, `gsm8k/truncated`, `arc_easy/acc`, …"""
        figures: dict[str, float] = {}
        for task in self.scores:
            if isinstance(task, TaskScores):
                figures[task.name] = task.score.mean
                numbers = task.figures()
                metrics = {"error": numbers["score_error"], "length": numbers["mean_length"]}
                metrics |= {name: numbers[name] for name in ("truncated", "ungraded", *task.columns[1:])}
            else:
                metrics = {name: score.mean for name, score in task.metrics.items()}
            figures |= {f"{task.name}/{name}": value for name, value in metrics.items()}
        return figures

    def lines(self) -> list[str]:
        """Return one line per score, such as `gsm8k 0.4231 ± 0.0137, 2.1% truncated`."""
        lines = []
        for task in self.scores:
            if isinstance(task, TaskScores):
                lines.append(f"{task.name} {task.score}, {task.truncated:.1%} truncated")
            else:
                lines += [f"{task.name} {name} {score}" for name, score in task.metrics.items()]
        return lines


@dataclasses.dataclass(kw_only=True)
class TaskEvaluator:
    """Tasks and an engine, whose programs are compiled once and used for all weights of one model.

    **Arguments:**

    - `tasks`: custom tasks.
    - `lm_eval_tasks`: names of lm-eval tasks.
    - `manager`: lm-eval's task manager. None: no lm-eval tasks.
    - `settings`: settings for generation and grading.
    - `limits`: limits of the engine.
    """

    tasks: Sequence[LoadedTask]
    lm_eval_tasks: Sequence[str]
    manager: Any
    settings: AnswerSettings
    limits: EngineLimits
    _engine: Any = None

    @classmethod
    def create(
        cls, specs: Sequence[str], text: TextSource, settings: AnswerSettings = AnswerSettings(), *, flag: str = "tasks"
    ) -> "TaskEvaluator":
        """Load tasks (`file.py:name` or `lm-eval:name`) for a model, which can have shapes instead of arrays.

        Raises ConfigError and DataError for tasks that cannot be loaded or do not fit the model, and for tasks that
        differ between processes, because all processes generate the completions together.
        """
        tasks = [load_task(spec, flag=flag) for spec in specs if not spec.startswith(PREFIX)]
        lm_eval_tasks = task_names(specs)
        names = [*(task.name for task in tasks), *lm_eval_tasks]
        check(len(set(names)) == len(names), f"{flag} has {', '.join(names)}: give each name once.")
        once = dataclasses.replace(settings, samples=1, pass_at=())
        requests = [request for task in tasks for request in completion_requests(text, task, once)]
        prompts = hashlib.blake2b(repr([request.prompt for request in requests]).encode(), digest_size=16)
        check_same("the examples of tasks", prompts.hexdigest(), "they must not be random or depend on the machine")
        lengths = [len(request.prompt) + request.max_new_tokens for request in requests]
        lengths += [min(MAX_LENGTH, text.model.trained_positions or MAX_LENGTH)] if lm_eval_tasks else []
        limits = EngineLimits(max_length=max(lengths), prefill_chunk=default_prefill_chunk(text))
        EngineConfig(max_length=limits.max_length).check_model(text.model)
        manager = find_tasks(lm_eval_tasks, LMEvalSettings()) if lm_eval_tasks else None
        return cls(tasks=tasks, lm_eval_tasks=lm_eval_tasks, manager=manager, settings=settings, limits=limits)

    def evaluate(
        self, text: TextSource, *, examples: int | None = None, progress: Progress = no_progress
    ) -> TaskResults:
        """Evaluate a model on the first `examples` examples of each task (None: all).

        Its weights are released after.
        """
        engine = self._engine_of(text)
        try:
            results: list[TaskScores | LMEvalScores] = []
            for task in self.tasks:
                part = dataclasses.replace(task, examples=task.examples[:examples])
                results.append(evaluate_task(text, engine, part, self.settings, progress))
            return TaskResults([*results, *self._evaluate_lm_eval(text, engine, examples, progress)])
        except BaseException:
            self._engine = None
            raise
        finally:
            engine.clear_prefix_cache()
            engine.release()

    def _engine_of(self, text: TextSource) -> Any:
        """Return the engine with the weights of a model."""
        if self._engine is None:
            self._engine = make_engine(text, self.limits)
        else:
            self._engine.load(text.model)
        return self._engine

    def _evaluate_lm_eval(
        self, text: TextSource, engine: EvaluationEngine, examples: int | None, progress: Progress
    ) -> list[LMEvalScores]:
        if not self.lm_eval_tasks:
            return []
        from eqx_decoders.evaluation.lm_eval_model import make_lm

        settings = LMEvalSettings(limit=examples, seed=self.settings.seed)
        lm = make_lm(text, engine, seed=self.settings.seed, progress=progress)
        return run_tasks(lm, self.lm_eval_tasks, settings, self.manager)
