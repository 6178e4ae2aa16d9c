"""Environments whose tools are Python functions: calls of the model are run, and their results are told to it."""

import abc
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from eqx_decoders.rl.tools.tool_schema import tool_schema


Tool = Callable[..., Any]


class ToolEnvironment(abc.ABC):
    """Environment in which a model calls Python functions until it answers without a call, which is rewarded.

        class Sums(ToolEnvironment):
            tools = (add,)

            def reward(self, task: dict, answer: str) -> float:
                return float(answer.strip() == task["answer"])

    An error of a tool, of its arguments, or of the form of a call is told to the model as the result. An object is one
    episode, so that tools may be its methods: `tools` is a property then, which returns `(self.add,)`.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    """Functions with type hints and a docstring of Google's style (`tool_schema`)."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        if not isinstance(cls.tools, property):
            _schemas(cls.tools)

    @classmethod
    def of(cls, tools: Sequence[Tool], reward: Callable[[dict, str], Any]) -> "type[ToolEnvironment]":
        """Return the environment of these tools, whose answers `reward(task, answer)` judges."""
        return type("Tools", (cls,), {"tools": tuple(tools), "reward": staticmethod(reward)})

    @abc.abstractmethod
    def reward(self, task: dict, answer: str) -> float | dict[str, float] | None:
        """Judge the answer behind the last call: a number, numbers by name, or None for what can't be judged.

        Where a limit of turns or tokens ends the episode, it is the text of the last answer beside its calls.
        """

    def begin(self, task: dict, seed: int) -> Sequence[Mapping[str, Any]]:
        """Return the messages that begin the conversation: `messages` of the task, or `prompt`, a text or messages."""
        prompt = task.get("messages", task.get("prompt"))
        if prompt is None:
            raise ValueError("the task has neither messages nor a prompt: give it one, or the environment a begin()")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def reset(self, task: dict, seed: int) -> dict[str, Any]:
        """Begin a conversation; the chat template describes the tools."""
        self.task = task
        self.calls, self.failed, self.malformed = 0, 0, 0
        return {"messages": self.begin(task, seed), "tools": _schemas(self.tools)}

    def step(self, answer: dict) -> dict[str, Any]:
        """Run the calls of an answer in their order, or reward one without."""
        message, unread = answer["message"], answer.get("malformed_calls", [])
        messages = [self._result(call) for call in message.get("tool_calls", [])]
        messages += [_message("", each["id"], f"Error: this call can't be read: {each['error']}") for each in unread]
        self.malformed += len(unread)
        counts = {"tool_calls": self.calls, "failed_calls": self.failed, "malformed_calls": self.malformed}
        turn: dict[str, Any] = {"messages": messages, "metrics": counts, "done": not messages}
        last = not messages or answer["turns_left"] < 1 or answer["tokens_left"] < 1
        return turn | ({"reward": self.reward(self.task, message["content"])} if last else {})

    def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Run a call; return its result as a message."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        by_name = {tool.__name__: tool for tool in self.tools}
        self.calls += 1
        if name not in by_name:
            self.failed += 1
            return _message(name, call["id"], f"Error: there is no tool {name!r}: take one of {', '.join(by_name)}")
        try:
            result = by_name[name](**arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:
            self.failed += 1
            text = f"Error: {type(error).__name__}: {error}"
        return _message(name, call["id"], text)


def _schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool_schema(tool) for tool in tools]


def _message(name: str, number: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": number, "content": text}
