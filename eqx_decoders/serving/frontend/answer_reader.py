"""Answers of chats from token ids: reasoning, content and tool calls, with stop strings and stop tokens of the content.

An answer is split first (`io.text.answers`). Special tokens are known by their ids: those that belong to the format of
the answer separate its parts, the names of others are left out, or are text if the client wants them. Stop strings and
stop tokens of the client end the content only; they do not cut the reasoning.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.answers.cut_calls import CutCall, cut_call
from eqx_decoders.io.text.answers.formats import TOOL_CALL_FORMAT, FunctionCall, ToolFormat
from eqx_decoders.io.text.answers.parser import (
    AnswerFormat,
    AnswerParser,
    Call,
    Content,
    ContentSpacing,
    ContentWasReasoning,
    Event,
    Partial,
    Reasoning,
)
from eqx_decoders.io.text.tokenizer import JsonTokenizer, decode
from eqx_decoders.serving.frontend.detokenizer import Detokenizer, StopStrings


class AnswerParts(NamedTuple):
    """What tokens add to the parts of an answer.

    **Arguments:**

    - `content`, `reasoning`: text that can be shown now.
    - `calls`: tool calls that are complete, or a call that is cut off if there must be one.
    - `was_reasoning`: all content and calls before this were reasoning: the answer has a marker of its end, but none
        of its start.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[FunctionCall | CutCall, ...] = ()
    was_reasoning: bool = False


class AnswerReader:
    """Reader of the tokens of one answer. The parts of an answer do not depend on the pieces in which it comes.

    **Arguments:**

    - `form`, `parser`: format of the answer and the parser of this answer.
    - `special`: write the names of special tokens that do not belong to the format.
    - `stops`: stop strings of the content, which are searched for.
    - `has_calls`: the answer may have tool calls.
    - `cut`: returns the call that a text starts. Set where the answer must be a call: if the answer is cut off before
        its first call is complete, this call is returned.
    """

    def __init__(
        self,
        tokenizer: JsonTokenizer,
        form: AnswerFormat,
        parser: AnswerParser,
        *,
        special: bool = False,
        stops: StopStrings | None = None,
        has_calls: bool = True,
        cut: Callable[[str, str], CutCall | None] | None = None,
    ):
        self._form, self._parser, self._special = form, parser, special
        self._cut = cut
        self._ids: Mapping[int, str] = tokenizer.special_ids
        self._text = Detokenizer(tokenizer)
        self.stops = StopStrings(()) if stops is None else stops
        self._spacing = ContentSpacing() if has_calls else None

    @property
    def may_reason(self) -> bool:
        """True if the model may reason before it answers."""
        return self._form.is_harmony or self._form.reasoning is not None

    @property
    def in_reasoning(self) -> bool:
        """True while the answer is in its reasoning."""
        return self._parser.in_reasoning

    @property
    def is_undecided(self) -> bool:
        """True while the tokens so far may be the start of the reasoning."""
        return self._parser.is_undecided

    def may_stop(self, token: int) -> bool:
        """Return whether a stop token ends the answer here: not in the reasoning, nor as a part of its first marker."""
        name = self._ids.get(token)
        if name is not None and name not in self._form.placeholders:
            return not self.in_reasoning
        text = self._text.copy().push(token) if name is None else self._form.placeholders[name]
        return not self._parser.may_reason(text)

    def push(self, token: int, *, search: bool = True) -> AnswerParts:
        """Add a token, and return what is certain now. `search`: search the content for stop strings."""
        name = self._ids.get(token)
        if name is None:
            return self._parts(self._parser.push(self._text.push(token)), search=search)
        text = self._text.flush()
        self._text.push(token)  # what a word starts with may depend on the tokens before it
        if name in self._form.placeholders:
            text += self._form.placeholders[name]
        elif self._special:
            text += name
        return self._parts(self._parser.push(text), search=search)

    def flush(self, *, search: bool = True) -> AnswerParts:
        """Return what was held back, as no more tokens come. After a stop string there is nothing."""
        if self.stops.found is not None:
            return AnswerParts(self._shown("", final=True))
        parts = self._parts([*self._parser.push(self._text.flush()), *self._parser.flush()], search=search)
        rest = "" if self.stops.found is not None else self.stops.flush()
        return parts._replace(content=parts.content + self._shown(rest, final=True))

    def _parts(self, events: Sequence[Event], *, search: bool) -> AnswerParts:
        content = reasoning = ""
        calls, was_reasoning = list[FunctionCall | CutCall](), False
        for event in events:
            if self.stops.found is not None:
                break
            if isinstance(event, Reasoning):
                reasoning += self._visible(event.text)
            elif isinstance(event, ContentWasReasoning):
                reasoning, content = reasoning + content + self.stops.flush(), ""
                calls, was_reasoning = [], True
                self._spacing = None if self._spacing is None else ContentSpacing()
            elif isinstance(event, Partial) and (call := self._cut_call(event)) is not None:
                calls.append(call)
            elif isinstance(event, Call):
                self._cut = None  # of further calls, only complete ones are returned
                content += self._shown(self.stops.flush())
                calls.append(event.call)
                if self._spacing is not None:
                    self._spacing.call()
            elif isinstance(event, Content) and search:
                content += self._shown(self.stops.push(self._visible(event.text)))
            else:  # calls that cannot be read are content as they are
                content += self._shown(self.stops.flush() + self._visible(event.text))
        return AnswerParts(content, reasoning, tuple(calls), was_reasoning)

    def _cut_call(self, event: Partial) -> CutCall | None:
        return None if self._cut is None else self._cut(self._form.restore(event.text), event.tool)

    def _visible(self, text: str) -> str:
        """Replace or leave out the placeholders of special tokens."""
        return self._form.restore(text) if self._special else self._form.remove_placeholders(text)

    def _shown(self, text: str, *, final: bool = False) -> str:
        if self._spacing is None:
            return text
        return self._spacing.push(text) + (self._spacing.flush() if final else "")


@functools.lru_cache(8)
def answer_format(source: str, special_names: tuple[str, ...], calls: ToolFormat | None) -> AnswerFormat:
    """Return the format of the answers to a chat template: see `AnswerFormat.of_template`."""
    return AnswerFormat.of_template(source, special_names, calls)


def prompt_text(tokenizer: JsonTokenizer, form: AnswerFormat, ids: Sequence[int]) -> str:
    """Return the text of the end of a prompt, in which special tokens of the format are placeholders."""
    pieces, plain = list[str](), list[int]()
    for token in ids:
        name = tokenizer.special_ids.get(token)
        if name is None:
            plain.append(token)
            continue
        pieces += decode(tokenizer, plain), form.placeholders.get(name, "")
        plain = []
    return "".join([*pieces, decode(tokenizer, plain)])


def create_reader(
    tokenizer: JsonTokenizer,
    source: str,
    calls: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    *,
    special: bool,
    stops: StopStrings | None = None,
    must_call: bool = False,
) -> AnswerReader | None:
    """Create the reader of an answer, or None if its text is its content.

    **Arguments:**

    - `source`: the chat template.
    - `calls`: format of tool calls; None: calls are text.
    - `tools`: tools that the answer may call; empty: calls are text.
    - `prompt`: the last ids of the prompt, which may start or end the reasoning.
    - `special`: keep the names of special tokens that do not belong to the format.
    - `stops`: stop strings of the content.
    - `must_call`: the answer must be a tool call.
    """
    form = answer_format(source, tokenizer.special_names, calls)
    has_calls = bool(tools) and calls is not None
    if not form.is_harmony and form.reasoning is None and not has_calls:
        return None
    parser = form.parser(tools, prompt=prompt_text(tokenizer, form, prompt), calls=has_calls, must_call=must_call)
    cut = None
    if must_call and calls is not None:
        cut = functools.partial(cut_call, TOOL_CALL_FORMAT[calls], tools)
    return AnswerReader(tokenizer, form, parser, special=special, stops=stops, has_calls=has_calls, cut=cut)
