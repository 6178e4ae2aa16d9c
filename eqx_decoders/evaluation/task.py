"""`Task`: examples and the function that grades answers to them. A user's task stands in a Python file.

    # tasks.py
    from eqx_decoders.evaluation import Task

    def last_number(example: dict, answer: str) -> bool:
        numbers = re.findall(r"-?\\d+", answer)
        return bool(numbers) and numbers[-1] == example["answer"]

    gsm8k = Task(examples="gsm8k.jsonl", grade=last_number, max_new_tokens=400)

Any object with `examples` and `grade` is a task, and so is a function that returns examples, in a file with `grade`.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from eqx_decoders.data.sources.readers import ALL, read_records
from eqx_decoders.data.sources.records import as_texts, check_unicode, normalize_prompt
from eqx_decoders.data.sources.sources import find_sources
from eqx_decoders.errors import CheckedFields, ConfigError, DataError, EqxDecodersError, PositiveInt, check
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.python_file import run_python_file


Example = dict[str, Any]
GradeFunction = Callable[[Example, str], Any]

FLAG = "tasks"
DEFAULT_NEW_TOKENS = 256
COLUMNS = ("prompt", "messages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(CheckedFields):
    """Examples of a task, and how answers to them are graded.

    **Arguments:**

    - `examples`: examples, a function that returns them, or the path of their file (.jsonl, .json, .parquet), from the
        folder of the task's file. An example has a `prompt` or `messages`, and whatever its grade needs. Beside
        messages, `tools` and `chat_template_kwargs` are variables of the chat template.
    - `grade`: `grade(example, answer)` returns a number or a bool, or several by name, the first of which is the score;
        None for an answer that cannot be judged. An answer of at least 1 is right. Or where such a function stands:
        `rewards.py:exact`.
    - `max_new_tokens`: maximum length of an answer.
    - `stop`: texts that end an answer, which a prompt without a chat template needs.
    - `chat`: a `prompt` is a message of the user, where the model has a chat template.
    """

    examples: str | Iterable[Example] | Callable[[], Iterable[Example]]
    grade: GradeFunction | str
    max_new_tokens: PositiveInt = DEFAULT_NEW_TOKENS
    stop: tuple[str, ...] = ()
    chat: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """Task with its examples.

    **Arguments:**

    - `name`: what results call it.
    - `task`: its settings.
    - `examples`: the examples.
    - `grader`: where its grade function stands, as `FunctionWorkers` takes it.
    """

    name: str
    task: Task
    examples: tuple[Example, ...]
    grader: str


def load_task(spec: str, limit: int | None = None, flag: str = FLAG) -> LoadedTask:
    """Load a task, `file.py:name`, with its first `limit` examples.

    Raises ConfigError for a file or a name that cannot be used, and DataError for examples that cannot.
    """
    file, _, name = spec.rpartition(":")
    check(bool(file and name), f"{flag}={spec!r} must be file.py:name, such as tasks.py:gsm8k.")
    module = run_python_file(file, "tasks", flag, f"the task {name!r}")
    task, grader = _find(module, expanded(file), name, f"{flag}={spec!r}")
    examples = _examples(task, Path(expanded(file)).parent, limit, f"{flag}={spec!r}")
    return LoadedTask(name=name, task=task, examples=examples, grader=grader)


def _find(module: ModuleType, file: str, name: str, what: str) -> tuple[Task, str]:
    """Return the task of this name in a module, and where its grade function stands."""
    named: Any = getattr(module, name, None)
    others = [each for each, value in vars(module).items() if _is_task(value) and not each.startswith("_")]
    there = f" The file has the tasks {', '.join(others)}." if others else ""
    check(named is not None, f"{what}: the file has no {name!r}.{there}")
    check(not isinstance(named, type), f"{what} is a class: give an object of it, {name.lower()} = {name}().")
    owner = "grade" if inspect.isfunction(named) and not hasattr(named, "grade") else f"{name}.grade"
    grade: Any = getattr(module if owner == "grade" else named, "grade", None)
    good = callable(grade) or isinstance(grade, str)
    check(good, f"{what} has no grade: it must have examples and grade(example, answer) (see Task).{there}")
    task = named if isinstance(named, Task) else _as_task(named, grade, what)
    return task, grade if isinstance(grade, str) else f"{file}:{owner}"


def _as_task(named: Any, grade: Any, what: str) -> Task:
    """Return the task that an object or a function of examples stands for."""
    examples: Any = named if inspect.isfunction(named) else getattr(named, "examples", None)
    check(examples is not None, f"{what} has no examples: it must have examples and a grade (see Task).")
    settings = {each.name: getattr(named, each.name) for each in _settings() if hasattr(named, each.name)}
    return Task(examples=examples, grade=grade, **settings)


def _settings() -> Sequence[Any]:
    return [each for each in dataclasses.fields(Task) if each.name not in ("examples", "grade")]


def _is_task(value: Any) -> bool:
    return hasattr(value, "examples") and hasattr(value, "grade") and not isinstance(value, type)


def _examples(task: Task, folder: Path, limit: int | None, what: str) -> tuple[Example, ...]:
    try:
        examples = task.examples() if callable(task.examples) else task.examples
        records = _records(examples, folder, what) if isinstance(examples, str) else enumerate(examples, 1)
        checked = []
        for where, example in records:
            if limit is not None and len(checked) == limit:
                break
            place = where if isinstance(where, str) else f"{what}, example {where}"
            checked.append(_checked(example, place))
    except EqxDecodersError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: its examples can't be made: {type(error).__name__}: {str(error)[:300]}.") from error
    check(len(checked) > 0, f"{what} has no examples.", DataError)
    return tuple(checked)


def _records(path: str, folder: Path, what: str) -> Iterable[tuple[str, Any]]:
    """Yield the records of a file, whose relative path goes from the folder of the task's file."""
    place = expanded(path)
    place = place if "://" in place else str(folder / place)
    for source in find_sources(place, f"{what}: examples"):
        yield from read_records(source, ALL)


def _checked(example: Any, where: str) -> Example:
    """Return an example as JSON holds it. Raises DataError for one without a prompt."""
    check(isinstance(example, Mapping), f"{where} must be a dictionary, not {type(example).__name__}.", DataError)
    columns = [name for name in COLUMNS if example.get(name)]
    check(len(columns) < 2, f"{where} has both 'prompt' and 'messages'. Remove one of them.", DataError)
    example = normalize_prompt(example, where)
    for name, value in example.items():
        check_unicode(value, str(name), where)
    prompt = example["prompt"]
    is_valid = isinstance(prompt, str | list) and len(prompt) > 0
    check(is_valid, f"{where}: the prompt must be a text or a list of messages, and not empty.", DataError)
    if isinstance(prompt, list):
        example = {name: value for name, value in example.items() if name != "prompt"} | {"messages": as_texts(prompt)}
    try:
        return json.loads(json.dumps(example))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} must be plain JSON, which the process that grades is sent: {error}.") from error
