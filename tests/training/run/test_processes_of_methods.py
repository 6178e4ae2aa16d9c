"""Test that two processes have the losses of one process, with every training method."""

import json

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.training.run.log import read_metrics
from tests.commands import ROOT, call, flags, steps_of
from tests.compare import assert_allclose
from tests.data.test_host_rows import finish, launch, settings
from tests.training.run.test_process_meshes import WORKER


pytestmark = pytest.mark.slow

BASE = ROOT / "tests" / "fixtures" / "chat_llama"
PAIRS = {"--data": "pairs.jsonl", "--batch-size": 4, "--seq-len": 64, "--mesh.fsdp": 4, "--sample-tokens": 0}
TEACHER = {"--method": "distill", "--distill.teacher": "teacher", "--mesh.fsdp": 2, "--mesh.context": 2}
REWARDS = {"--method": "rl", "--data": "prompts.jsonl", "--rl.reward": "rewards.py:length", "--rl.prompts": 3}
REWARDS |= {"--rl.samples": 4, "--rl.max-new-tokens": 6, "--rl.slots": 4, "--batch-size": 4, "--seq-len": 64}
REWARDS |= {"--mesh.fsdp": 4, "--sample-tokens": 0, "--rl.kl": 0.1, "--rl.kl-in": "reward"}
CASES = {
    "reward": PAIRS | {"--method": "reward"},
    "pairs": PAIRS | {"--method": "dpo", "--preference.save-reference": None},
    "teacher": TEACHER,
    "likeliest": TEACHER | {"--distill.top": 5},
    "rewards": REWARDS,
    "critic": REWARDS | {"--rl.preset": "ppo", "--rl.critic.updates": 2},
    "tasks": PAIRS | {"--method": "dpo", "--eval-tasks": "tasks.py:letters", "--eval-every": 2},
}


FILES = ("pairs.jsonl", "teacher", "prompts.jsonl", "rewards.py", "tasks.py")
TASKS = """
from eqx_decoders.evaluation import Task

def grade(example, answer):
    with open(__file__ + ".graded", "a") as file:
        file.write("graded\\n")
    return len(answer) / 100

ROWS = [{"prompt": f"the {word}"} for word in ("quick", "lazy", "small", "old")]
letters = Task(examples=ROWS, grade=grade, max_new_tokens=4, stop=("e",))
"""


def words_of(folder, options):
    """Return the command-line arguments of a run. Paths of files are relative to the folder."""
    options = settings(folder) | {"--eval-every": 0} | options
    alone = [name for name, value in options.items() if value is None]
    found = {name: value for name, value in options.items() if value is not None}
    found |= {name: folder / value for name, value in found.items() if str(value).startswith(FILES)}
    return [*map(str, flags(found)), *alone]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder in which two processes have trained with every method."""
    folder, draws = tmp_path_factory.mktemp("methods"), np.random.default_rng(0)
    words = ["many", "birds", "sing", "in", "old", "green", "trees"]
    text = lambda count: " ".join(draws.choice(words, count))  # noqa: E731
    pairs = [{"prompt": text(2), "chosen": text(3), "rejected": text(1 + number % 3)} for number in range(24)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    prompts = [{"prompt": text(2)} for _ in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "rewards.py").write_text("def length(prompt, answer):\n    return len(answer)\n")
    (folder / "tasks.py").write_text(TASKS)
    ed.save_hf(jax.tree.map(lambda leaf: 1.3 * leaf, ed.load_hf(BASE)), folder / "teacher")
    (folder / "cases.json").write_text(json.dumps({name: words_of(folder, each) for name, each in CASES.items()}))
    both = launch(folder, {}, worker=WORKER)
    for process, output in zip(both, finish(both, 600), strict=True):
        assert process.returncode == 0, output[-4000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one_process_with_every_method(folder, name):
    call("train", "--run-dir", folder / f"{name} alone", *words_of(folder, CASES[name]), devices=4)
    both, alone = (
        [[row["loss"], row["grad_norm"]] for row in steps_of(folder / each)] for each in (name, f"{name} alone")
    )
    assert len(both) == 3
    assert_allclose(both, alone, rtol=1e-4, atol=1e-6)  # the loss of an on-policy step is near 0


def test_tasks_are_graded_by_a_single_process(folder):
    """Both evaluations have the scores of a run with one process."""
    graded = folder / "tasks.py.graded"
    assert graded.read_text().count("graded") <= 8  # truncated answers are not graded
    graded.unlink()
    call("train", "--run-dir", folder / "tasks again", *words_of(folder, CASES["tasks"]), devices=4)
    both, one = (
        [
            (row["step"], row["task/letters"], row["task/letters/length"])
            for row in read_metrics(path)
            if "task/letters" in row
        ]
        for path in (folder / name / "metrics.jsonl" for name in ("tasks", "tasks again"))
    )
    assert both == one and [step for step, *_ in both] == [2, 3]
