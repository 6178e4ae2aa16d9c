"""Environments whose tools are Python functions. Imports no JAX: worker processes import this module."""

import abc
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal


# --- tool environments ------------------------------------------------------------------------------------------------


Tool = Callable[..., Any]


class ToolEnvironment(abc.ABC):
    """Environment in which a model calls Python functions until a completion has no tool call, which is rewarded.

        class Sums(ToolEnvironment):
            tools = (add,)

            def reward(self, task: dict, completion: str) -> float:
                return float(completion.strip() == task["answer"])

    If a tool raises, or a call is malformed or has wrong arguments, the error is the result of the call. An instance is
    one episode, so tools may be its methods: `tools` is then a property that returns, for example, `(self.add,)`.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    """Functions with type hints and a Google-style docstring (see `tool_schema`)."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        if not isinstance(cls.tools, property):
            _schemas(cls.tools)

    @classmethod
    def of(cls, tools: Sequence[Tool], reward: Callable[[dict, str], Any]) -> "type[ToolEnvironment]":
        """Return an environment class with these tools and `reward(task, completion)`."""
        return type("Tools", (cls,), {"tools": tuple(tools), "reward": staticmethod(reward)})

    @abc.abstractmethod
    def reward(self, task: dict, completion: str) -> float | dict[str, float] | None:
        """Return the reward of the last completion: a number, numbers by name, or None if it cannot be judged.

        If a limit of turns or tokens ends the episode after a completion, `completion` is the text of this completion
        without its tool calls. If the results of tools do not fit into the tokens of the episode, the episode ends
        without a call of this method, and its reward is 0.
        """

    def first_messages(self, task: dict, seed: int) -> Sequence[Mapping[str, Any]]:
        """Return the first messages of the conversation: `messages` of the task, or its `prompt`, text or messages."""
        prompt = task.get("messages", task.get("prompt"))
        if prompt is None:
            raise ValueError("the task has neither messages nor a prompt: add one, or override first_messages()")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def reset(self, task: dict, seed: int) -> dict[str, Any]:
        """Start an episode. The chat template describes the tools."""
        self.task = task
        self.calls, self.failed, self.malformed = 0, 0, 0
        return {"messages": self.first_messages(task, seed), "tools": _schemas(self.tools)}

    def step(self, completion: dict) -> dict[str, Any]:
        """Run the tool calls of a completion in order, or reward a completion without calls."""
        message, malformed = completion["message"], completion.get("malformed_calls", [])
        messages = [self._result(call) for call in message.get("tool_calls", [])]
        for call in malformed:
            messages.append(_message("", call["id"], f"Error: this call cannot be parsed: {call['error']}"))
        self.malformed += len(malformed)
        counts = {"tool_calls": self.calls, "failed_calls": self.failed, "malformed_calls": self.malformed}
        turn: dict[str, Any] = {"messages": messages, "metrics": counts, "done": not messages}
        if not messages or completion["turns_left"] < 1 or completion["tokens_left"] < 1:
            turn["reward"] = self.reward(self.task, message["content"])
        return turn

    def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Run a tool call and return the message with its result."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        by_name = {tool.__name__: tool for tool in self.tools}
        self.calls += 1
        if name not in by_name:
            self.failed += 1
            return _message(name, call["id"], f"Error: unknown tool {name!r}: the tools are {', '.join(by_name)}")
        try:
            result = by_name[name](**arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:
            self.failed += 1
            text = f"Error: {type(error).__name__}: {error}"
        return _message(name, call["id"], text)


def _schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool_schema(tool) for tool in tools]


def _message(name: str, call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": text}


# --- JSON schemas of functions ----------------------------------------------------------------------------------------


_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
_SECTION = re.compile(r"^(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)[ \t]*(?:\([^)]*\))?:[ \t]*(.*)")  # an optional type in parentheses
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.DOTALL | re.IGNORECASE)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function for the variable `tools` of chat templates.

    The result equals that of transformers' `get_json_schema`. Each parameter needs a type hint and an entry in the
    section `Args:` of a Google-style docstring; the section `Returns:` is optional. `(choices: ["a", "b"])` at the end
    of an entry lists the allowed values. Raises TypeError with what is missing.
    """
    name, docstring = function.__name__, inspect.getdoc(function)
    if not docstring:
        raise TypeError(f"the tool {name} has no docstring: add one, which tells the model what the tool does")
    description, arguments, returns = _parsed(docstring)
    hints = typing.get_type_hints(function)
    return_hint = hints.pop("return", None)
    properties, required = dict[str, Any](), list[str]()
    for key, parameter in inspect.signature(function).parameters.items():
        if key not in hints:
            raise TypeError(f"the parameter {key} of the tool {name} has no type hint")
        if key not in arguments:
            raise TypeError(f"the parameter {key} of the tool {name} has no line in the section Args: of its docstring")
        properties[key] = _described(_schema(hints[key], f"{name}.{key}"), arguments[key])
        if parameter.default is inspect.Parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    schema: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if return_hint is not None:
        schema["return"] = _schema(return_hint, f"the result of {name}")
        if returns is not None:
            schema["return"]["description"] = returns
    return {"type": "function", "function": schema}


def _parsed(docstring: str) -> tuple[str, dict[str, str], str | None]:
    """Return the descriptions of the function, of its arguments by name, and of its result."""
    description, *sections = _SECTION.split(docstring)
    by_name = dict(zip(sections[::2], sections[1::2], strict=True))
    lines = inspect.cleandoc("\n" + by_name.get("Args", "")).splitlines()
    arguments, name = dict[str, str](), ""
    for line in lines:
        entry = _ARGUMENT.match(line)
        name = name if entry is None else entry[1]
        arguments[name] = f"{arguments.get(name, '')} {line.strip() if entry is None else entry[2]}".strip()
    returns = " ".join(by_name["Returns"].split()) if "Returns" in by_name else None
    return description.strip(), arguments, returns


def _described(schema: dict[str, Any], description: str) -> dict[str, Any]:
    choices = _CHOICES.search(description)
    if choices is not None:
        schema = schema | {"enum": [str(choice).strip() for choice in json.loads(choices[1])]}
        description = description[: choices.start()].strip()
    return schema | {"description": description}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint. Raises TypeError for types that JSON does not have."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        kinds = sorted({_JSON_TYPES[type(value)] for value in arguments})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, where)
    kind = hint if origin is None else origin
    if kind in (list, Sequence):
        return {"type": "array"} | ({"items": _schema(arguments[0], where)} if arguments else {})
    if kind is tuple:
        items = [_schema(argument, where) for argument in arguments]
        return {"type": "array"} | ({"prefixItems": items} if arguments else {})
    if kind in (dict, Mapping):
        return {"type": "object"} | ({"additionalProperties": _schema(arguments[1], where)} if arguments else {})
    raise TypeError(f"{where} has the type {hint}, which JSON does not have: use numbers, strings, lists and dicts")


def _union(hints: Sequence[Any], where: str) -> dict[str, Any]:
    parts = [_schema(hint, where) for hint in hints if hint is not types.NoneType]
    if len(parts) == 1:
        schema = parts[0]
    elif all(isinstance(part.get("type"), str) and len(part) == 1 for part in parts):
        schema = {"type": sorted(part["type"] for part in parts)}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if types.NoneType in hints else {})
