"""`Task`: examples and a function that grades completions. Users define tasks in Python files.

    # tasks.py
    from eqx_decoders.evaluation import Task

    def last_number(example: dict, completion: str) -> bool:
        numbers = re.findall(r"-?\\d+", completion)
        return bool(numbers) and numbers[-1] == example["answer"]

    gsm8k = Task(examples="gsm8k.jsonl", grade=last_number, max_new_tokens=400)

Any object with `examples` and `grade` is a task. A function that returns examples is a task, too, if its file has a
function `grade`.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from eqx_decoders.data.sources.readers import ALL_COLUMNS, read_records
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
    """Examples of a task, and the function that grades completions.

    **Arguments:**

    - `examples`: list of examples, a function that returns it, or the path of a file (.jsonl, .json, .parquet) relative
        to the task's file. An example is a dictionary with `prompt` or `messages`, and further fields for the grade
        function. With `messages`, the fields `tools` and `chat_template_kwargs` are passed to the chat template.
    - `grade`: function `grade(example, completion)`, or its location, such as `rewards.py:exact`. It returns a number
        or bool, or a dictionary of several, whose first value is the score. A score of at least 1 is correct. None: the
        completion cannot be graded.
    - `max_new_tokens`: maximum number of tokens of a completion.
    - `stop`: strings that end a completion. Needed for prompts without a chat template.
    - `chat`: format a `prompt` as a user message if the model has a chat template.
    """

    examples: str | Iterable[Example] | Callable[[], Iterable[Example]]
    grade: GradeFunction | str
    max_new_tokens: PositiveInt = DEFAULT_NEW_TOKENS
    stop: tuple[str, ...] = ()
    chat: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """Task with loaded examples.

    **Arguments:**

    - `name`: name in results.
    - `task`: the task.
    - `examples`: the examples.
    - `grader`: location of the grade function, `file.py:function`, for `FunctionWorkers`.
    """

    name: str
    task: Task
    examples: tuple[Example, ...]
    grader: str


def load_task(spec: str, limit: int | None = None, flag: str = FLAG) -> LoadedTask:
    """Load the task `file.py:name` with its first `limit` examples.

    Raises ConfigError for an invalid file or name, and DataError for invalid examples.
    """
    file, _, name = spec.rpartition(":")
    check(bool(file and name), f"{flag}={spec!r} must be file.py:name, such as tasks.py:gsm8k.")
    module = run_python_file(file, "tasks", flag, f"the task {name!r}")
    task, grader = _find(module, expanded(file), name, f"{flag}={spec!r}")
    examples = _examples(task, Path(expanded(file)).parent, limit, f"{flag}={spec!r}")
    return LoadedTask(name=name, task=task, examples=examples, grader=grader)


def _find(module: ModuleType, file: str, name: str, what: str) -> tuple[Task, str]:
    """Return the task with this name in a module, and the location of its grade function."""
    found: Any = getattr(module, name, None)
    others = [other for other, value in vars(module).items() if _is_task(value) and not other.startswith("_")]
    known = f" The file has the tasks {', '.join(others)}." if others else ""
    check(found is not None, f"{what}: the file has no {name!r}.{known}")
    check(not isinstance(found, type), f"{what} is a class: create an instance, {name.lower()} = {name}().")
    owner = "grade" if inspect.isfunction(found) and not hasattr(found, "grade") else f"{name}.grade"
    grade: Any = getattr(module if owner == "grade" else found, "grade", None)
    check(
        callable(grade) or isinstance(grade, str),
        f"{what} has no grade function: it must have examples and grade(example, completion), as Task has.{known}",
    )
    task = found if isinstance(found, Task) else _as_task(found, grade, what)
    return task, grade if isinstance(grade, str) else f"{file}:{owner}"


def _as_task(source: Any, grade: Any, what: str) -> Task:
    """Convert an object with examples, or a function that returns examples, to a task."""
    examples: Any = source if inspect.isfunction(source) else getattr(source, "examples", None)
    check(examples is not None, f"{what} has no examples: it must have examples and a grade function, as Task has.")
    optional = [field.name for field in dataclasses.fields(Task) if field.name not in ("examples", "grade")]
    settings = {field: getattr(source, field) for field in optional if hasattr(source, field)}
    return Task(examples=examples, grade=grade, **settings)


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
            location = where if isinstance(where, str) else f"{what}, example {where}"
            checked.append(_checked(example, location))
    except EqxDecodersError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {str(error)[:300]}"
        raise ConfigError(f"{what}: reading the examples failed: {message}. Fix the function in the file.") from error
    check(len(checked) > 0, f"{what} has no examples.", DataError)
    return tuple(checked)


def _records(path: str, folder: Path, what: str) -> Iterable[tuple[str, Any]]:
    """Yield the records of a file. A relative path is relative to the folder of the task's file."""
    path = expanded(path)
    path = path if "://" in path else str(folder / path)
    for source in find_sources(path, f"{what}: examples"):
        yield from read_records(source, ALL_COLUMNS)


def _checked(example: Any, where: str) -> Example:
    """Return an example as plain JSON. Raises DataError for an example without a prompt."""
    check(isinstance(example, Mapping), f"{where} must be a dictionary, not {type(example).__name__}.", DataError)
    columns = [name for name in COLUMNS if example.get(name)]
    check(len(columns) < 2, f"{where} has both 'prompt' and 'messages'. Remove one of them.", DataError)
    example = normalize_prompt(example, where)
    for name, value in example.items():
        check_unicode(value, str(name), where)
    prompt = example["prompt"]
    is_valid = isinstance(prompt, str | list) and len(prompt) > 0
    check(is_valid, f"{where}: the prompt must be a non-empty text or list of messages.", DataError)
    if isinstance(prompt, list):
        example = {name: value for name, value in example.items() if name != "prompt"} | {"messages": as_texts(prompt)}
    try:
        return json.loads(json.dumps(example))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} must be plain JSON, because it is sent to the grading process: {error}. Convert its fields to "
            f"numbers, texts, lists and dictionaries."
        ) from error
