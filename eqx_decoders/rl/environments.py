"""Environments: objects of a user's class in worker processes, their calls, and the checks of what they return."""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.function_workers import CallResult, FunctionWorkers, is_number
from eqx_decoders.io.text.chat_template import check_messages
from eqx_decoders.rl.rewards import reward_columns
from eqx_decoders.training.methods.rl_config import RLConfig


Message = Mapping[str, Any]


@runtime_checkable
class Environment(Protocol):
    """What a class of a user's has, plain Python; one object is one episode. `close`, if there is one, ends it."""

    def reset(self, task: dict, seed: int) -> Sequence[Message] | dict:
        """Begin a conversation on a task, a record of the data: its messages, or `{"messages": …, "tools": …}`."""
        ...

    def step(self, answer: dict) -> dict:
        """Answer to the model's answer: `{"messages": …, "reward": …, "done": …, "metrics": …}`, each may be left out.

        The answer has `text`, `message` (as in a conversation, with `tool_calls` where the episode has tools and the
        text calls some), `malformed_calls` if some can't be read (`id` and `error` of each), `finish_reason` (`"stop"`
        or `"length"`), and `tokens_left` and `turns_left` of the episode. A reward is a number, numbers by name, or
        None for what can't be judged.
        """
        ...


class EpisodeStart(NamedTuple):
    """Beginning of an episode: messages, and variables of the chat template, such as `tools`."""

    messages: Sequence[Message]
    variables: Mapping[str, Any]


class EnvironmentTurn(NamedTuple):
    """Result of a step: messages, rewards by name (None: it can't be judged), whether it is the end, and numbers."""

    messages: Sequence[Message]
    columns: Mapping[str, float] | None
    done: bool
    metrics: Mapping[str, float]


class Environments:
    """Objects of the environment's class by numbers, in worker processes.

    Where a process is killed, since another of its objects took too long, `step` has a result that is `lost`.

    Raises ConfigError with the reason where the class cannot be imported, or has no `reset` or `step`.
    """

    def __init__(self, config: RLConfig):
        settings: dict[str, Any] = {"workers": config.reward_workers, "seconds": config.reward_seconds}
        methods, name = ("reset", "step"), str(config.environment)
        self._workers = FunctionWorkers(name, flag="rl.environment", methods=methods, **settings)
        self._numbers = itertools.count()

    def reset(self, number: int, task: Mapping[str, Any], seed: int) -> "Future[CallResult]":
        """Make an object, and begin its episode."""
        return self._workers.call_method(number, "reset", dict(task), seed)

    def step(self, number: int, answer: Mapping[str, Any]) -> "Future[CallResult]":
        """Give an object the model's answer."""
        return self._workers.call_method(number, "step", dict(answer), new=False)

    def end(self, number: int) -> None:
        """Close an object, if it is still there."""
        self._workers.call_method(number, "close")

    def new_number(self) -> int:
        """Return a number that no object has had."""
        return next(self._numbers)

    def close(self) -> None:
        """End the processes."""
        self._workers.close()


def checked_beginning(value: Any) -> EpisodeStart:
    """Return what `reset` returned. Raises DataError for what is no beginning of a conversation."""
    known = {"messages", "tools"}
    form = isinstance(value, list) or (isinstance(value, dict) and "messages" in value and value.keys() <= known)
    check(form, f"reset returned {_short(value)}, and neither messages nor messages and tools by name", DataError)
    messages, tools = (value, None) if isinstance(value, list) else (value["messages"], value.get("tools"))
    return EpisodeStart(_checked_messages(messages, "reset"), {"tools": tools} if tools else {})


def checked_turn(value: Any) -> EnvironmentTurn:
    """Return what `step` returned. Raises DataError for what has another form."""
    known = ("messages", "reward", "done", "metrics")
    form = isinstance(value, dict) and value.keys() <= set(known)
    check(form, f"step returned {_short(value)}, and not some of {', '.join(known)} by name", DataError)
    done, metrics = value.get("done", False), value.get("metrics") or {}
    check(isinstance(done, bool), f"step: done={_short(done)} must be True or False", DataError)
    good = isinstance(metrics, dict) and all(map(is_number, metrics.values()))
    check(good, f"step: metrics={_short(metrics)} must be numbers by name", DataError)
    columns = _columns(value.get("reward", {}))
    messages = value.get("messages") or []
    if messages or not done:
        messages = _checked_messages(messages, "step")
    return EnvironmentTurn(messages, columns, done, {name: float(each) for name, each in metrics.items()})


def _columns(reward: Any) -> Mapping[str, float] | None:
    """Return the rewards of a turn by name; None for one that can't be judged."""
    if reward is None or reward == {}:
        return reward
    columns, error = reward_columns(CallResult(reward))
    check(error is None, f"step: {error}", DataError)
    return columns


def _checked_messages(messages: Any, where: str) -> Sequence[Message]:
    messages = check_messages(messages, f"{where}: messages")
    rule = "the last message is the assistant's: there is nothing to be answered."
    check(messages[-1]["role"] != "assistant", f"{where}: {rule}", DataError)
    return messages


def _short(value: Any) -> str:
    return str(value)[:80]
