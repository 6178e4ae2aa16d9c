"""Worker process that calls a function of a user's Python file. `function_workers` runs it as a script.

The argument is a JSON object: `function`, `path` (`sys.path`), the names of the `arguments` if they are always the
same, and the `methods` that a class needs. The first line of output is `{}`, or `{"error": message}`. Each line of
standard input is a task: a list of arguments, or an object with `object` (a number), `new`, `method` and `arguments`.
Its answer is a line `{"value": …}` or `{"error": …}`, with `lost` if the object was lost with its process. The output
of the function goes to standard error.
"""

import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    task = json.loads(sys.argv[1])
    sys.path[:] = task["path"]
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            function = find(task["function"])
            check_methods(function, task["function"], task["methods"])
            check_arguments(function, task["arguments"])
        except Exception as error:
            send(answers, {"error": described(error)})
            return
        send(answers, {})
        objects = {}
        for line in sys.stdin:
            send(answers, answer(function, objects, json.loads(line)))


def find(name):
    """Return the function `file.py:function` or `module:function`, or an attribute of an object, `task.grade`."""
    file, _, words = name.rpartition(":")
    if file.endswith(".py"):
        path = Path(file).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"the file {file} does not exist")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(file)
    found = module
    for word in words.split("."):
        if not hasattr(found, word):
            known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise AttributeError(f"{file} has no {words!r}; it has {', '.join(known) or 'no functions'}")
        found = getattr(found, word)
    if not callable(found):
        raise TypeError(f"{words!r} is not a function")
    return found


def check_methods(function, name, methods):
    """Raise TypeError if there are `methods` and the function is not a class that has them."""
    missing = [method for method in methods if not callable(getattr(function, method, None))]
    if methods and not isinstance(function, type):
        raise TypeError(f"{name} is not a class with {' and '.join(methods)}")
    missing = missing or sorted(getattr(function, "__abstractmethods__", ()) if methods else ())
    if missing:
        raise TypeError(f"the class has no method {' and no '.join(missing)}")


def check_arguments(function, names):
    """Raise TypeError unless the function accepts these arguments. Some names show that it expects lists, as in TRL."""
    if not names:
        return
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions in C may have no signature
        return
    try:
        signature.bind(*names)
        parameters = [*signature.parameters]
        in_order = all(names.index(name) == index for index, name in enumerate(parameters) if name in names)
        takes = in_order and not {"prompts", "completions"} & set(parameters)
    except TypeError:
        takes = False
    if not takes:
        name = getattr(function, "__name__", "it")
        raise TypeError(f"{name}{signature} is called once for each completion, as {name}({', '.join(names)})")


def answer(function, objects, task):
    """Return the answer to one task."""
    try:
        if isinstance(task, list):
            return checked(function(*task))
        number, method = task["object"], task["method"]
        if method == "close":
            removed = objects.pop(number, None)
            return checked(removed.close() if hasattr(removed, "close") else None)
        if number not in objects:
            if not task["new"]:
                return {"error": "the object was lost because its process ended", "lost": True}
            objects[number] = function()
        return checked(getattr(objects[number], method)(*task["arguments"]))
    except Exception as error:
        return {"error": described(error)}


def checked(value):
    """Return an answer with the value as plain JSON. NumPy numbers become Python numbers."""
    return {"value": plain(value)}


def plain(value):
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "__dict__"):
        return plain(vars(value))
    raise TypeError(f"returned {type(value).__name__}, which is not a JSON value")


def described(error) -> str:
    """Return the error with the line of the user's file where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    inside = [frame for frame in frames if "importlib" not in frame.filename]
    where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
    return f"{type(error).__name__}: {error}{where}"


def send(answers, value) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
