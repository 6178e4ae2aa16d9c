"""Thoughts, content and calls of tools in the text of an answer that comes in pieces."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.io.text.tool_calls import (
    BEGINS,
    FunctionCall,
    HarmonyMessage,
    ParsedAnswer,
    ToolFormat,
    parse_tool_calls,
    tool_format,
)
from eqx_decoders.serving.frontend.detokenizer import partial_match


class AnswerParts(NamedTuple):
    """What a piece of an answer adds to its thoughts and content, and the calls at its end."""

    content: str = ""
    thoughts: str = ""
    calls: tuple[FunctionCall, ...] = ()


@runtime_checkable
class AnswerReader(Protocol):
    """Splitter of the text of an answer, with the names of special tokens; it holds back what more text may change."""

    def push(self, text: str) -> AnswerParts:
        """Add text, and return what is certain now."""
        ...

    def flush(self) -> AnswerParts:
        """Return what was held back, as no more text comes."""
        ...


Parser = Callable[[str], ParsedAnswer]

# Tags around thoughts, in the order in which chat templates are searched for them.
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_OF_FORMATS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", *_HARMONY_ENDS)


class AnswerFormat:
    """Format in which the models of a chat template think and call tools, by what its source mentions.

    **Arguments:**

    - `source`: the chat template.
    - `special`: names of special tokens, which are left out where they belong to no format.
    - `tools`: format of calls; None: they are texts.
    """

    def __init__(self, source: str, special: Sequence[str], tools: ToolFormat | None):
        self._channels = tool_format(source) == "harmony"
        self._tools: ToolFormat | None = "harmony" if self._channels and tools is not None else tools
        self._thoughts = next((tags for tags in THOUGHTS if any(tag in source for tag in tags)), None)
        marks = {
            *_OF_FORMATS,
            *(tag for tags in (*THOUGHTS, *(within for _, within in BEGINS.values())) for tag in tags),
        }
        names = "|".join(re.escape(name) for name in special if name not in marks)
        self._special = re.compile(names) if names else None

    def reader(self, tools: Sequence[Mapping[str, Any]], prompt: str, *, special: bool) -> AnswerReader | None:
        """Return a reader of an answer, or None where its text is its content.

        **Arguments:**

        - `tools`: what the answer may call.
        - `prompt`: the end of the prompt, which may begin the answer's thoughts.
        - `special`: keep the names of special tokens that belong to no format.
        """
        form = self._tools if tools else None
        parse = None if form is None else functools.partial(parse_tool_calls, form=form, tools=tools)
        names = None if special else self._special
        if self._channels:
            return _HarmonyReader(names, calls=form is not None)
        if self._thoughts is None and form is None:
            return None
        begins = ((), ()) if form is None else BEGINS[form]
        thinks = self._thoughts is not None and prompt.rstrip().endswith(self._thoughts[0])
        return _TagReader(names, parse, self._thoughts, begins, thinks=thinks)


answer_format = functools.lru_cache(AnswerFormat)


class _TagReader:
    """Reader of thoughts between tags, then content, then calls."""

    def __init__(
        self,
        names: re.Pattern[str] | None,
        parse: Parser | None,
        thoughts: tuple[str, str] | None,
        begins: tuple[Sequence[str], Sequence[str]],
        *,
        thinks: bool,
    ):
        self._names, self._parse, self._held = names, parse, ""
        self._first, self._marks = begins  # of calls that are the whole content, and of calls within it
        self._begin, self._end = thoughts or ("", "")
        self._state = "thoughts" if thinks else "start" if thoughts else "content"
        self._fresh = True  # nothing of this part was shown
        self._strips = thinks  # blanks at its begin are left out

    def push(self, text: str) -> AnswerParts:
        self._held += text if self._names is None else self._names.sub("", text)
        thoughts = content = ""
        if self._state == "start":
            self._look_for_thoughts()
        if self._state == "thoughts":
            thoughts, ended = self._take((self._end,))
            if ended:
                self._held, self._state = self._held.lstrip().removeprefix(self._end), "content"
                self._fresh = self._strips = True
        if self._state == "content":
            content = self._content()
        return AnswerParts(content, thoughts)

    def flush(self) -> AnswerParts:
        held, self._held = self._held, ""
        if self._state == "thoughts":
            return AnswerParts(thoughts=held.rstrip())
        if self._state == "calls" and self._parse is not None:
            parsed = self._parse(held)
            if parsed.calls and not parsed.malformed:
                return AnswerParts(parsed.content, calls=parsed.calls)
        return AnswerParts(held.lstrip() if self._fresh and self._strips else held)

    def _look_for_thoughts(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._begin):
            self._held, self._state, self._strips = text.removeprefix(self._begin), "thoughts", True
        elif text and not self._begin.startswith(text):
            self._state = "content"

    def _content(self) -> str:
        body = self._held.lstrip()
        if self._fresh and any(body.startswith(each) for each in self._first):
            self._state = "calls"
            return ""
        if self._fresh and any(each.startswith(body) for each in self._first):
            return ""
        content, called = self._take(self._marks)
        if called:
            self._state = "calls"
        return content

    def _take(self, marks: Sequence[str]) -> tuple[str, bool]:
        """Return the text before a mark, and whether one is there; blanks before it, and parts of one, are held."""
        text = self._held.lstrip() if self._fresh and self._strips else self._held
        place = min((place for place in map(text.find, marks) if place >= 0), default=-1)
        if place >= 0:
            shown = text[:place].rstrip()
            self._held = text[len(shown) :]
            return shown, True
        shown = text[: len(text) - partial_match(text, marks)]
        shown = shown.rstrip() if marks else shown
        self._held, self._fresh = text[len(shown) :], self._fresh and not shown
        return shown, False


class _HarmonyReader:
    """Reader of the messages of gpt-oss: each has a channel, of thoughts or content, or calls a tool."""

    def __init__(self, names: re.Pattern[str] | None, *, calls: bool):
        self._names, self._reads_calls, self._held = names, calls, ""
        self._message: HarmonyMessage | None = None  # which has begun
        self._calls = list[FunctionCall]()

    def push(self, text: str) -> AnswerParts:
        self._held += text if self._names is None else self._names.sub("", text)
        content = thoughts = ""
        while (part := self._next()) is not None:
            content, thoughts = content + part.content, thoughts + part.thoughts
        return AnswerParts(content, thoughts)

    def flush(self) -> AnswerParts:
        held, self._held = self._held, ""
        if self._message is None:  # a text without a header; of one that was cut off nothing is shown
            ended = AnswerParts("" if "<|" in held else held)
        else:
            ended = self._said(self._message, held, ended=True)
        return ended._replace(calls=tuple(self._calls))

    def _next(self) -> AnswerParts | None:
        """Read the next header, piece or end of a message; None where more text is needed."""
        if self._message is None:
            header, begun, held = self._held.partition("<|message|>")
            if not begun:
                return None
            self._held, self._message = held, HarmonyMessage.of(header, "")
        message, text = self._message, self._held
        place, end = min(((place, end) for end in _HARMONY_ENDS if (place := text.find(end)) >= 0), default=(-1, ""))
        if place >= 0:
            self._held, self._message = text[place + len(end) :], None
            return self._said(message, text[:place], ended=True)
        if message.tool is not None:
            return None
        shown = text[: len(text) - partial_match(text, _HARMONY_ENDS)]
        self._held = text[len(shown) :]
        return self._said(message, shown, ended=False) if shown else None

    def _said(self, message: HarmonyMessage, text: str, *, ended: bool) -> AnswerParts:
        if message.tool is None:
            return AnswerParts(thoughts=text) if message.channel == "analysis" else AnswerParts(text)
        call = message._replace(text=text).call if self._reads_calls and ended else None
        if not isinstance(call, FunctionCall):
            return AnswerParts(text)
        self._calls.append(call)
        return AnswerParts()
