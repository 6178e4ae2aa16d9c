"""Test tasks from user files: loading, generation, grading and reports."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from eqx_decoders.errors import ConfigError, ConversionError, DataError
from eqx_decoders.evaluation.engine_requests import (
    Completion,
    CompletionRequest,
    _CompletionWriter,
    generate_completions,
)
from eqx_decoders.evaluation.grading import Grade, grade_completions
from eqx_decoders.evaluation.lm_eval_model import EngineMethods
from eqx_decoders.evaluation.score_tables import compare, describe
from eqx_decoders.evaluation.task import LoadedTask, Task, _examples, load_task
from eqx_decoders.evaluation.task_run import AnswerSettings, completion_requests, evaluate_task
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, JsonTokenizer
from eqx_decoders.serving.engine.request import RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams
from tests.errors import assert_names, refused
from tests.evaluation.models import chat_model, small_engine


TASKS = """
from eqx_decoders.evaluation import Task

ROWS = [{"prompt": f"the {word} fox", "answer": word} for word in ("quick", "lazy", "small")]

def has_e(example, answer):
    return "e" in answer

short = Task(examples=ROWS, grade=has_e, max_new_tokens=6, stop=("\\n",))
chats = Task(examples=lambda: [{"messages": [{"role": "user", "content": "fox"}]}], grade=has_e, max_new_tokens=6)
elsewhere = Task(examples="rows.jsonl", grade="rewards.py:exact")

class Own:
    examples = ROWS
    chat = False
    max_new_tokens = 12
    def grade(self, example, answer):
        return {"letters": len(answer), "known": example["answer"] in answer}

own = Own()

def made():
    yield from ROWS

def grade(example, answer):
    return len(answer) / 2 if example["answer"] != "lazy" else None

made.max_new_tokens = 4

bad = Task(examples=[], grade=has_e)
unlike = Task(examples=[{"prompt": "a"}, {"question": "b"}], grade=has_e)
both = Task(examples=[{"prompt": "a", "messages": []}, {"prompt": "b", "messages": [1]}], grade=has_e)
strange = Task(examples=[{"prompt": "a", "answer": {1, 2}}], grade=has_e)
number = Task(examples=[{"prompt": 3}], grade=has_e)
lost = Task(examples="nowhere.jsonl", grade=has_e)
class Bare:
    examples = ROWS
bare = Bare()
def raises():
    raise KeyError("no key")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tasks.py").write_text(TASKS)
    rows = [{"messages": [{"role": "user", "content": "a"}], "answer": 1}, {"prompt": "b", "answer": [2, None]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "tasks.py"


def test_forms_of_tasks(file):
    short = load_task(f"{file}:short")
    assert short.name == "short" and len(short.examples) == 3 and short.examples[1]["answer"] == "lazy"
    assert short.task.max_new_tokens == 6 and short.task.stop == ("\n",) and short.grader == f"{file}:short.grade"
    assert len(load_task(f"{file}:short", limit=2).examples) == 2
    assert load_task(f"{file}:own").grader == f"{file}:own.grade" and not load_task(f"{file}:own").task.chat
    made = load_task(f"{file}:made")
    assert made.grader == f"{file}:grade" and made.task.max_new_tokens == 4 and len(made.examples) == 3
    rows = load_task(f"{file}:elsewhere")
    assert rows.grader == "rewards.py:exact" and rows.examples[1] == {"prompt": "b", "answer": [2, None]}


INVALID = {
    "nothing": (ConfigError, ["'nothing'", "short, chats, elsewhere, own, bad"]),
    "Own": (ConfigError, ["own = Own()"]),
    "bare": (ConfigError, ["grade(example, completion)"]),
    "has_e": (ConfigError, ["TypeError: has_e()"]),
    "bad": (DataError, ["examples"]),
    "unlike": (DataError, ["example 2", "'prompt'", "'messages'", "question"]),
    "both": (DataError, ["example 2", "'prompt'", "'messages'"]),
    "strange": (DataError, ["example 1", "JSON", "set"]),
    "number": (DataError, ["example 1", "prompt"]),
    "lost": (DataError, ["nowhere.jsonl'"]),
    "raises": (ConfigError, ["KeyError: 'no key'"]),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_tasks_are_refused(file, name):
    error, named = INVALID[name]
    with refused(error, f"tasks='{file}:{name}'", *named):
        load_task(f"{file}:{name}")


def test_invalid_task_files_are_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    for spec, *named in (
        ("tasks.py", "tasks='tasks.py'", "file.py:name"),
        (f"{tmp_path}/none.py:a", f"tasks='{tmp_path}/none.py'", "'a'"),
        (f"{tmp_path}/broken.py:a", f"tasks='{tmp_path}/broken.py'", "ModuleNotFoundError", "nothing_of_this_name"),
    ):
        with refused(ConfigError, *named):
            load_task(spec)


GRADES = """
import math, time

def grade(example, answer):
    if example["do"] == "raise":
        raise ValueError("of " + answer)
    if example["do"] == "hang":
        time.sleep(60)
    return {"nan": math.nan, "none": None, "text": "yes", "right": True, "columns": {"a": 1, "b": 0.5}}[example["do"]]
"""


@pytest.mark.slow
def test_answers_with_failed_grades_have_no_score(tmp_path):
    (tmp_path / "grades.py").write_text(GRADES)
    words = ["right", "raise", "hang", "nan", "none", "text", "columns", "right"]
    grader = f"{tmp_path}/grades.py:grade"
    found = grade_completions(grader, [({"do": word}, "x") for word in words], seconds=1.0)
    right, raised, hung, nan, none, text, columns, again = found
    assert right == again == Grade({"score": 1.0}) and none == Grade(None) and columns.columns == {"a": 1.0, "b": 0.5}
    for grade, names in (
        (raised, ["ValueError: of x", "grades.py, line 6"]),
        (hung, ["1 s"]),
        (nan, ["'nan'"]),
        (text, ["'yes'"]),
    ):
        assert_names(grade.error, *names)
    with refused(ConfigError, f"'{grader}'", "2", "ValueError: of x"):
        grade_completions(grader, [({"do": "raise"}, "x")] * 2)
    with refused(ConfigError, f"task='{tmp_path}/grades.py:nothing'"):
        grade_completions(f"{tmp_path}/grades.py:nothing", [({}, "x")], flag="grade of task")
    assert grade_completions("nowhere.py:f", []) == []


def scored(*rows: str, name: str = "t") -> TaskScores:
    """Return answers given as letters: r right, w wrong, n not graded, t truncated; capitals have half the length."""
    columns = {"r": {"score": 1.0, "form": 0.5}, "w": {"score": 0.25, "form": 1.0}}
    grades = [[None if letter == "t" else Grade(columns.get(letter)) for letter in row] for row in rows]
    ends = {"t": "length", "w": "stop_string"}
    lengths = {"r": 4, "w": 8, "n": 6, "t": 20}
    answers = [[Completion(letter, lengths[letter], ends.get(letter, "stop_token")) for letter in row] for row in rows]
    examples = tuple({"prompt": str(number)} for number in range(len(rows)))
    task = Task(examples=examples, grade="a.py:b")
    return TaskScores(
        task=LoadedTask(name=name, task=task, examples=examples, grader="a.py:b"), completions=answers, grades=grades
    )


def test_scores_of_answers():
    """Truncated answers are wrong. Answers that could not be graded are excluded from means."""
    scores = scored("rrww", "tttr", "nnnn", "rwnt")
    assert scores.prompt_scores.tolist() == pytest.approx([0.625, 0.25, math.nan, 1.25 / 3], nan_ok=True)
    assert scores.score.mean == pytest.approx((0.625 + 0.25 + 1.25 / 3) / 3) and scores.score.prompts == 3
    assert scores.truncated == 4 / 16 and scores.ungraded == 5 / 16
    assert scores.pass_at(2).mean == pytest.approx((5 / 6 + 1 / 2 + 2 / 3) / 3)
    assert scores.lengths() == {"mean_length": (4 * 4 + 3 * 8 + 5 * 6 + 4 * 20) / 16, "max_length": 20.0} | {
        "correct_length": 4.0,
        "incorrect_length": (3 * 8 + 4 * 20) / 7,
    }
    figures = scores.figures((1, 2))
    assert figures["form"] == pytest.approx((0.75 + 0.125 + 0.5) / 3) and figures["pass@1"] == pytest.approx(13 / 36)
    assert figures["end_length"] == 0.25 and figures["end_stop_string"] == 3 / 16


def test_result_tables():
    lines = describe([scored("rrww", "tttr", "nnnn", "rwnt")], (1, 2))
    head, cells = (re.sub(r" +", " ", line) for line in (lines[0], lines[2]))
    columns = "task prompts score pass@1 pass@2 truncated tokens:_mean max correct incorrect end_reasons"
    assert head == "| " + " | ".join(name.replace("_", " ") for name in columns.split()) + " |"
    assert cells.startswith("| t | 4 | 0.4306 ± 0.1085 | 0.3611 ± 0.0735 | 0.6667 ± 0.0962 | 25.0% | 9 | 20 | 4 | 15 |")
    assert any(line.startswith("t: 31.2%") for line in lines)
    first, second = scored("rr", "rw", "ww", "nn", "rr"), scored("rw", "rw", "ww", "rr", "tt")
    lines = compare([first], [second], ("one", "other"))
    assert re.sub(r" +", " ", lines[0]) == "| task | one | other | difference | wins | ties | losses | p |"
    cells = re.sub(r" +", " ", lines[2])
    assert cells == "| t | 0.7188 ± 0.1795 | 0.5000 ± 0.1723 | +0.3438 ± 0.2359 | 2 | 2 | 0 | 0.500 |"


def test_score_names_are_unique():
    task = scored("rw")
    grades = [[Grade({"a": 1.0, "b": 1.0}), Grade({"b": 1.0})]]
    with refused(ConfigError, "grade", "a, b"):
        _ = dataclasses.replace(task, grades=grades).columns


@pytest.mark.parametrize(
    "options, named",
    [
        ({"samples": 4, "temperature": 0.0}, ["samples=4", "temperature=0.0"]),
        ({"samples": 2, "pass_at": (1, 4)}, ["pass_at=4", "samples=4", "2"]),
        ({"grade_workers": 0}, ["grade_workers=0"]),
        ({"samples": 0}, ["samples=0"]),
        ({"grade_seconds": math.nan}, ["grade_seconds=nan"]),
    ],
    ids=["temperature", "pass_at", "grade_workers", "samples", "grade_seconds"],
)
def test_invalid_settings_are_refused(options, named):
    with refused(ConfigError, *named):
        AnswerSettings(**options)


def test_sampling_settings():
    assert AnswerSettings().sampling_temperature == 0.0 and AnswerSettings(samples=2).sampling_temperature == 1.0
    assert AnswerSettings(samples=16).reported_ks == (1, 2, 4, 8) and AnswerSettings(
        samples=8, pass_at=(5,)
    ).reported_ks == (5,)
    settings = AnswerSettings(samples=2, temperature=0.5, top_k=3, top_p=0.9, seed=4)
    one = settings.sampling("task", 3, 1)
    assert (one.temperature, one.top_k, one.top_p) == (0.5, 3, 0.9) and one == settings.sampling("task", 3, 1)
    others = [("other", 3, 1), ("task", 2, 1), ("task", 3, 0)]
    assert len({one.seed, *(settings.sampling(*other).seed for other in others)}) == 4
    assert dataclasses.replace(settings, seed=5).sampling("task", 3, 1).seed != one.seed


def test_prompts_are_messages_if_the_model_has_a_template(file):
    text, short = chat_model(), load_task(f"{file}:short")
    asked = completion_requests(text, short, AnswerSettings(samples=2, max_new_tokens=9))
    assert len(asked) == 6 and asked[0].prompt == asked[1].prompt and asked[0].max_new_tokens == 9
    message = [{"role": "user", "content": "the lazy fox"}]
    assert asked[2].prompt == tuple(text.encode(message)) and asked[2].stop_ids == text.stop_ids
    raw = completion_requests(text, load_task(f"{file}:own"), AnswerSettings())
    assert raw[1].prompt == tuple(text.encode("the lazy fox"))
    without = dataclasses.replace(text, chat=None)
    assert [each.prompt for each in completion_requests(without, short, AnswerSettings())] == [
        each.prompt for each in raw
    ]
    with refused(ConfigError, "'chats'", "chat template"):
        completion_requests(without, load_task(f"{file}:chats"), AnswerSettings())


def test_tools_and_other_variables_are_in_the_prompt():
    source = (
        "{{ tools | tojson if tools }}{{ style }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    text = dataclasses.replace(chat_model(), chat=ChatTemplate(source=source))
    question = {"messages": [{"role": "user", "content": "hi"}]}
    variables = {"tools": json.dumps([{"name": "f"}]), "chat_template_kwargs": {"style": "short"}}
    examples = [question | variables, question, {"prompt": "hi", "tools": "calculator"}]
    task = Task(examples=examples, grade=lambda example, answer: 1)
    loaded = LoadedTask(name="t", task=task, examples=_examples(task, Path(), None, "t"), grader="")
    prompts = [each.prompt for each in completion_requests(text, loaded, AnswerSettings())]
    expected = ['[{"type": "function", "function": {"name": "f"}}]short<|user|>hi', "<|user|>hi", "<|user|>hi"]
    assert prompts == [tuple(text.tokenizer.encode(each, special=True).tolist()) for each in expected]


def test_model_is_evaluated(file, tmp_path):
    """Answers and grades equal those of single requests. Repeating the evaluation gives equal results."""
    text, engine = chat_model(), small_engine()
    settings = AnswerSettings(samples=3, temperature=1.5, seed=1)
    tasks = [load_task(f"{file}:{name}") for name in ("short", "own", "made")]
    short, own, made = (evaluate_task(text, engine, task, settings) for task in tasks)
    again = evaluate_task(text, engine, tasks[0], settings)
    assert again.completions == short.completions and again.grades == short.grades
    rows = zip(short.completions, short.grades, strict=True)
    pairs = [pair for answers, grades in rows for pair in zip(answers, grades, strict=True)]
    assert {grade is None for answer, grade in pairs if answer.end_reason == "length"} <= {True}
    assert all(grade.columns == {"score": float("e" in answer.text)} for answer, grade in pairs if grade is not None)
    assert own.columns == ["letters", "known"] and own.score.mean >= 0
    judged = [grade.columns is not None for grade in made.grades[1] if grade is not None]
    assert not any(judged)
    short.write(tmp_path / "answers.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 9 and lines[4]["example"] == 1 and lines[4]["sample"] == 1
    assert lines[4]["completion"] == short.completions[1][1].text and lines[4]["example.answer"] == "lazy"
    long = dataclasses.replace(tasks[0], examples=({"prompt": "fox " * 80},))
    with refused(ConfigError, "'short', example 1", "246 tokens", "max_new_tokens=6", "max_length=64"):
        evaluate_task(text, engine, long, settings)


@pytest.mark.parametrize(
    "text, stop, known",
    [
        ("ab, c", (), Completion("ab, c", 5, "length")),
        ("ab, c", (", d", "x"), Completion("ab, c", 5, "length")),
        ("ab, ", (", d",), Completion("ab, ", 4, "length")),
        ("ab, d.", (", d",), Completion("ab", 5, "stop_string")),
        ("ab!c", ("c",), Completion("ab", 3, "stop_token")),
    ],
    ids=["no stop", "other stop", "start of a stop", "stop string", "stop token"],
)
def test_text_held_back_for_a_stop_string_is_returned_at_the_end(text, stop, known):
    tokenizer = ByteTokenizer()
    writer = _CompletionWriter(tokenizer, CompletionRequest((1,), 9, stop=stop, stop_ids=(ord("!"),)))
    for token in tokenizer.encode(text).tolist():
        if writer.push(RequestOutput(request_id=0, tokens=(token,))) or token == ord("!"):
            break
    assert writer.finish() == known


@pytest.mark.slow
def test_answers_end_at_stop_strings_for_any_batch():
    text, prompt = chat_model(), tuple(chat_model().encode("the quick").tolist())
    drawn = [SamplingParams(temperature=1.2, seed=seed) for seed in range(8)]
    free = [CompletionRequest(prompt, 12, sampling, (), text.stop_ids) for sampling in drawn]
    known = [generate_completions(text.tokenizer, small_engine(), [each])[0] for each in free]
    counts = []
    assert generate_completions(text.tokenizer, small_engine(), free, counts.append) == known and sum(counts) == 8
    stops = [each._replace(stop=("e", "a")) for each in free]
    found = generate_completions(text.tokenizer, small_engine(), stops)
    for whole, cut in zip(known, found, strict=True):
        assert cut.text == re.split("[ea]", whole.text)[0]
        assert (cut.end_reason == "stop_string") == (cut.text != whole.text) and cut.num_tokens <= whole.num_tokens
    assert {answer.end_reason for answer in found} >= {"stop_string"} and "length" in {
        answer.end_reason for answer in known
    }


def test_final_assistant_message_is_continued():
    text, question = chat_model(), {"role": "user", "content": "the fox"}
    continued = text.encode([question, {"role": "assistant", "content": "the dog"}]).tolist()
    answered = text.encode([question]).tolist()
    assert continued == [*answered, *text.tokenizer.encode("the dog").tolist()]
    with refused(ConversionError, "chat template", "'the dog'"):
        silent = dataclasses.replace(text, chat=ChatTemplate(source="{{ messages[0].content }}"))
        silent.encode([question, {"role": "assistant", "content": "the dog"}])


@pytest.mark.parametrize("content", ["", " ", "e", "the dog "], ids=["empty", "space", "letter", "words"])
@pytest.mark.parametrize("strips", [False, True], ids=["unchanged", "stripped"])
def test_any_assistant_message_is_continued(strips, content):
    """The text may be empty, may occur in the end-of-turn token, or may occur in an earlier message."""
    source = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>{% endfor %}"
    source += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    chat = ChatTemplate(source=source.replace("m.content", "m.content | trim") if strips else source)
    question = {"role": "user", "content": "the dog is"}
    text = dataclasses.replace(chat_model(), chat=chat)
    assert isinstance(text.tokenizer, JsonTokenizer)
    expected = chat.render([question]) + (content.strip() if strips else content)
    continued = [question, {"role": "assistant", "content": content}]
    assert text.encode(continued).tolist() == text.tokenizer.encode(expected, special=True).tolist()
    assert EngineMethods(text, small_engine()).apply_chat_template(continued, False) == expected
