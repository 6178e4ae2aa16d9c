"""Test the evaluation of tasks during a run: scores, and no effect on training."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from eqx_decoders.evaluation import task_evaluator
from eqx_decoders.evaluation.task import load_task
from eqx_decoders.evaluation.task_evaluator import TaskResults
from eqx_decoders.evaluation.task_run import AnswerSettings, evaluate_task, make_engine
from eqx_decoders.io.processes import Stop
from eqx_decoders.serving.engine.config import EngineLimits
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.run.evaluate import TaskEvaluation
from eqx_decoders.training.run.load_export import load_text_run
from eqx_decoders.training.run.log import read_metrics
from eqx_decoders.training.run.start import Run
from eqx_decoders.training.run.trackers import Trackers
from eqx_decoders.training.step.train_state import TrainState
from tests.commands import call, flags, steps_of, write_corpus
from tests.errors import assert_names


OPTIONS = {
    "--model": "gpt3-52k",
    "--tokenizer": "bytes",
    "--steps": 4,
    "--batch-size": 8,
    "--seq-len": 16,
    "--sample-tokens": 0,
    "--eval-every": 2,
    "--checkpoint-every": 2,
}
TASKS = """
from eqx_decoders.evaluation import Task

ROWS = [{"prompt": f"the {word}", "answer": word} for word in ("quick", "lazy", "small")]
letters = Task(examples=ROWS, grade=lambda example, answer: len(answer), max_new_tokens=4, stop=("e",))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_corpus(folder / "text")
    (folder / "tasks.py").write_text(TASKS)
    return folder


def train(folder: Path, name: str, *more: object) -> tuple[str, str]:
    return call("train", "--run-dir", folder / name, "--data", folder / "text", *flags(OPTIONS), *more)


@pytest.mark.slow
def test_task_evaluation_does_not_change_training(folder):
    """Losses and final weights are equal to the bit. The scores equal those of `evaluate`."""
    train(folder, "plain")
    tasks = ("--eval-tasks", f"{folder}/tasks.py:letters", "--eval-task-examples", 2)
    with mock.patch.object(task_evaluator, "evaluate_task", side_effect=evaluate_task) as evaluated:
        out, err = train(folder, "measured", *tasks)
    assert [len(call.args[2].examples) for call in evaluated.call_args_list] == [2, 3]
    steps = [steps_of(folder / name) for name in ("plain", "measured")]
    one, other = ([(row["step"], row["loss"], row["grad_norm"]) for row in rows] for rows in steps)
    assert one == other and len(one) == 4
    rows = [row for row in read_metrics(folder / "measured" / "metrics.jsonl") if "task/letters" in row]
    assert [row["step"] for row in rows] == [2, 4] and set(rows[0]) >= {"task/letters/error", "task/letters/truncated"}
    assert re.search(r"step 2\b.*letters", err) and "letters" in out
    texts = [load_text_run(folder / name) for name in ("plain", "measured")]
    first, second = (named_leaves(text.model) for text in texts)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first.keys() | second.keys())
    engine = make_engine(texts[1], EngineLimits(max_batch_size=2, max_length=32, prefill_chunk=16))
    scores = evaluate_task(texts[1], engine, load_task(f"{folder}/tasks.py:letters"), AnswerSettings())
    assert scores.score.mean == pytest.approx(rows[-1]["task/letters"]) and len(scores.completions) == 3


class Shown:
    """Logged lines and metric rows of a task evaluation after step 7."""

    def __init__(self, evaluate, stopped: bool = False):
        self.lines, self.rows = [], []
        run, trackers, state = (mock.Mock(spec=kind) for kind in (Run, Trackers, TrainState))
        run.tasks, trackers.write = SimpleNamespace(evaluate=evaluate), self.rows.append
        self.tasks = TaskEvaluation(run, trackers, self.lines.append, Stop(lambda: stopped))
        self.tasks.evaluate(7, state, is_last=True)


def test_failed_evaluation_is_reported_as_a_warning():
    def evaluate(text, *, examples, progress):
        raise ValueError("of the grade")

    shown = Shown(evaluate)
    (line,) = shown.lines
    assert_names(line, "warning: ", "step 7", "ValueError: of the grade")
    assert shown.rows == shown.tasks.lines == []


def test_signal_stops_an_evaluation():
    def evaluate(text, *, examples, progress):
        progress(1)
        return TaskResults([])

    assert Shown(evaluate).rows == [{"step": 7}]
    shown = Shown(evaluate, stopped=True)
    assert shown.lines == shown.rows == []


@pytest.mark.slow(fast=("file",))
@pytest.mark.parametrize(
    "task, names",
    [
        pytest.param("tasks.py:nothing", ["'nothing'"], id="task"),
        pytest.param("none.py:letters", ["'letters'"], id="file"),
    ],
)
def test_invalid_tasks_are_refused_before_the_first_step(folder, task, names):
    words = ("--run-dir", folder / "mistake", "--data", folder / "text", *flags(OPTIONS))
    _, err = call("train", *words, "--eval-tasks", f"{folder}/{task}", code=2)
    assert_names(err, "--eval-tasks='", folder / task.partition(":")[0], *names)
