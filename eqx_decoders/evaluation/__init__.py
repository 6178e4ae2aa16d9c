"""Evaluation with a serving engine: custom tasks, lm-eval tasks, and perplexity.

Write a task
    `Task` has examples and a grade function. `load_task` loads a task from a Python file (`LoadedTask`).

Evaluate a model
    `evaluate_task` generates and grades completions (`AnswerSettings`, `TaskScores`). `evaluate_texts` computes the
    `TextScores` of a `TextSet`. `make_engine` creates the engine for both.

Score tokens
    `score_continuations` and `score_texts` compute log-probabilities of given tokens.

Use lm-eval
    `make_lm` returns the model as an LM object of lm-eval. `run_tasks` runs lm-eval tasks.

Compute statistics
    `pass_at_k`, `mean_over_prompts`, `paired_difference` (`MeanScore`) and `win_counts` (`WinCounts`).
"""

from typing import TYPE_CHECKING

from eqx_decoders.core.lazy_imports import lazy


# Lazy imports, because the grading processes import users' files, which import `Task`, and do not need JAX.
if TYPE_CHECKING:
    from eqx_decoders.evaluation.lm_eval_model import make_lm as make_lm
    from eqx_decoders.evaluation.lm_eval_tasks import run_tasks as run_tasks
    from eqx_decoders.evaluation.scoring import score_continuations as score_continuations, score_texts as score_texts
    from eqx_decoders.evaluation.statistics import (
        MeanScore as MeanScore,
        WinCounts as WinCounts,
        mean_over_prompts as mean_over_prompts,
        paired_difference as paired_difference,
        pass_at_k as pass_at_k,
        win_counts as win_counts,
    )
    from eqx_decoders.evaluation.task import LoadedTask as LoadedTask, Task as Task, load_task as load_task
    from eqx_decoders.evaluation.task_run import (
        AnswerSettings as AnswerSettings,
        evaluate_task as evaluate_task,
        make_engine as make_engine,
    )
    from eqx_decoders.evaluation.task_scores import TaskScores as TaskScores
    from eqx_decoders.evaluation.text_sets import (
        TextScores as TextScores,
        TextSet as TextSet,
        evaluate_texts as evaluate_texts,
    )

__getattr__, __all__, __dir__ = lazy(
    __name__,
    {
        "evaluation.lm_eval_model": "make_lm",
        "evaluation.lm_eval_tasks": "run_tasks",
        "evaluation.scoring": "score_continuations score_texts",
        "evaluation.statistics": "MeanScore WinCounts mean_over_prompts paired_difference pass_at_k win_counts",
        "evaluation.task": "LoadedTask Task load_task",
        "evaluation.task_run": "AnswerSettings evaluate_task make_engine",
        "evaluation.task_scores": "TaskScores",
        "evaluation.text_sets": "TextScores TextSet evaluate_texts",
    },
)
