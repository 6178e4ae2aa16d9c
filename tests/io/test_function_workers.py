"""Calls of user functions in worker processes."""

import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.function_workers import FunctionWorkers
from tests.errors import assert_names, refused


FILE = """
import os, time

def judge(row, answer):
    print("not an answer")
    if answer == "raise":
        raise ValueError("no number")
    if answer == "hang":
        time.sleep(100)
    if answer == "exit":
        os._exit(3)
    if answer == "set":
        return {1, 2}
    return {"same": row["answer"] == answer, "ratio": float("nan"), "none": None}

class Counter:
    def __init__(self):
        self.count = 0
    def add(self, number):
        self.count += number
        return self.count
    def end(self):
        os._exit(3)
    def close(self):
        return "closed"

task = Counter()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "judges.py"
    path.write_text(FILE)
    return path


def test_failed_calls_do_not_affect_the_others(file):
    answers = ["42", "raise", "hang", "exit", "set", "41", "42"]
    with FunctionWorkers(f"{file}:judge", workers=2, seconds=0.5) as workers:
        results = workers.map([({"answer": "42"}, answer) for answer in answers])
    good = {"same": True, "ratio": "nan", "none": None}
    assert [result.value for result in results] == [good, None, None, None, None, good | {"same": False}, good]
    assert results[1].error == "ValueError: no number (judges.py, line 7)"
    for number, name in ((2, "0.5 s"), (3, "3"), (4, "set")):
        assert_names(str(results[number].error), name)
    assert results[2].timed_out
    assert [result.timed_out for result in results].count(True) == 1


@pytest.mark.slow
def test_objects_stay_in_their_process(file):
    with FunctionWorkers(f"{file}:Counter", workers=2) as workers:
        first = [workers.call_method(number, "add", 10 + number) for number in range(3)]
        assert [each.result().value for each in first] == [10, 11, 12]
        assert [workers.call_method(number, "add", 1).result().value for number in range(3)] == [11, 12, 13]
        assert workers.call_method(1, "close").result().value == "closed"
        assert workers.call_method(1, "add", 5).result().value == 5  # a new process
        assert workers.call_method(1, "add", 5, new=False).result().value == 10
    with FunctionWorkers(f"{file}:Counter", workers=1, methods=("add", "close")) as workers:
        assert workers.call_method(0, "add", 1).result().value == 1
        assert_names(str(workers.call_method(1, "end").result().error), "3")  # object 0 is lost as well
        assert workers.call_method(0, "add", 1, new=False).result().lost
        assert workers.call_method(0, "add", 1).result().value == 1
    with refused(ConfigError, f"function='{file}:Counter'", "no", "other"):
        FunctionWorkers(f"{file}:Counter", methods=("add", "no", "other"))
    with FunctionWorkers(f"{file}:task.add", workers=1) as workers:
        assert workers.submit(3).result().value == 3


def test_functions_with_other_arguments_are_refused(tmp_path):
    """Reward functions of TRL take lists of columns; here, a call gets one completion."""
    lines = ["def lists(completions, **columns): ...", "def one(completion, answer): ...", "def three(a, b, c): ..."]
    lines += ["def right(prompt, answer, exact=True): return 1", "def mine(task, text): return 2"]
    (tmp_path / "of_trl.py").write_text("\n".join(lines))
    for name, signature in (
        ("lists", "(completions, **columns)"),
        ("one", "(completion, answer)"),
        ("three", "(a, b, c)"),
    ):
        with refused(ConfigError, f"{name}{signature}", f"{name}(prompt, completion)"):
            FunctionWorkers(f"{tmp_path}/of_trl.py:{name}", arguments=("prompt", "completion"))
    for name, value in (("right", 1), ("mine", 2)):
        with FunctionWorkers(f"{tmp_path}/of_trl.py:{name}", workers=1, arguments=("prompt", "completion")) as workers:
            assert workers.map([({}, "x")])[0].value == value


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("judges.py:other", ["'other'", "judge, Counter"]),
        ("judges.py:task", ["'task'"]),
        ("none.py:judge", ["none.py"]),
        ("broken.py:judge", ["NameError", "broken.py", "line 2"]),
        ("judge", ["file.py:function"]),
    ],
    ids=["name", "no function", "no file", "error", "no path"],
)
def test_functions_that_cannot_be_imported_are_refused(file, function, named):
    (file.parent / "broken.py").write_text("\nundefined\n")
    function = function if ":" not in function else f"{file.parent}/{function}"
    with refused(ConfigError, f"--rl.reward='{function}'", *named):
        FunctionWorkers(function, flag="--rl.reward")
