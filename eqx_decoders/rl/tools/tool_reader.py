"""Answers that call tools: as an environment gets them, and as a chat template does."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.io.text.tool_calls import ParsedAnswer, ToolFormat, parse_tool_calls, tool_format
from eqx_decoders.rl.answerer import answer_text
from eqx_decoders.rl.open_episode import ReadAnswer
from eqx_decoders.rl.turn_writer import takes_calls_as_text
from eqx_decoders.serving.rollouts import Rollout


class ToolReader:
    """Reader of answers, whose calls it finds where an episode has tools.

    **Arguments:**

    - `parser`: the format of calls; `auto`: that of the chat template's models.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, parser: str):
        self._tokenizer, self._template = tokenizer, template
        source = "" if template is None else template.source
        self._form: Any = tool_format(source) if parser == "auto" else parser

    @property
    def form(self) -> ToolFormat:
        """Format of calls."""
        return self._form

    @functools.cached_property
    def _structured(self) -> bool:
        return not takes_calls_as_text(self._template)

    def read(self, rollout: Rollout, tools: Sequence[Mapping[str, Any]], before: int) -> ReadAnswer:
        """Read an answer of an episode with `tools`, in which there have been `before` calls."""
        text = answer_text(self._tokenizer, rollout)
        message = {"role": "assistant", "content": text}
        answer: dict[str, Any] = {"text": text, "message": message, "finish_reason": rollout.finish_reason}
        if not tools:
            return ReadAnswer(answer, message)
        parsed = parse_tool_calls(answer_text(self._tokenizer, rollout, special=True), self._form, tools)
        errors = (*parsed.malformed, *(["the call is incomplete"] if parsed.partial else []))
        if not parsed.calls and not errors:
            return ReadAnswer(answer, message)
        calls, unread = _calls(parsed, before), _unread(errors, before + len(parsed.calls))
        heard = {"role": "assistant", "content": parsed.content} | ({"tool_calls": calls} if calls else {})
        answer |= {"message": heard} | ({"malformed_calls": unread} if unread else {})
        if not self._structured:
            return ReadAnswer(answer, message)
        # one stands in the place of each call that can't be read: results need a call, and the text is not read again
        calls = calls + [_call(each["id"], "unknown", {}) for each in unread]
        return ReadAnswer(answer, {**heard, "tool_calls": calls}, structured=True)


def _calls(parsed: ParsedAnswer, first: int) -> list[dict[str, Any]]:
    return [_call(_number(first + index), *each) for index, each in enumerate(parsed.calls)]


def _call(number: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": number, "function": {"name": name, "arguments": dict(arguments)}}


def _unread(errors: Sequence[str], first: int) -> list[dict[str, Any]]:
    return [{"id": _number(first + index), "error": error} for index, error in enumerate(errors)]


def _number(index: int) -> str:
    return f"{index:09d}"  # as many letters as Mistral's templates want
