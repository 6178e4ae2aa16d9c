"""Messages of environments as tokens: what a chat template adds to the tokens so far, which are never made again."""

import concurrent.futures
from collections.abc import Sequence
from typing import Literal

from eqx_decoders.data.prompt_batches import encode_beginning, encode_rendered
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer


Written = Sequence[Rendered | ConversionError]
QUESTION, THOUGHTS = {"role": "user", "content": "1"}, "<think>\n1\n</think>\n\n"


class TurnWriter:
    """Writes conversations with a chat template, or without one as the contents of their messages, one after another.

    The tokens of a conversation are those that were drawn. `go_on` encodes only what a rendering with further messages
    has behind the text so far, so that drawn tokens are never made from text again.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        self._tokenizer, self._template = tokenizer, template
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rendering")

    def render(self, conversations: Sequence[Conversation]) -> "concurrent.futures.Future[Written]":
        """Start to render conversations, with the generation prompt, in a thread."""
        return self._thread.submit(render_all, self._template, conversations)

    def written(self, text: str, stop_id: int | None, before: Rendered | ConversionError) -> str | None:
        """Return what the template writes as an answer behind `text`, up to its end; None for an answer that was cut.

        `before` is the rendering of the conversation up to the answer.
        """
        if stop_id is None or isinstance(before, ConversionError) or not before.text.startswith(text):
            return None
        content, ending, _ = before.text[len(text) :].rpartition(self._name(stop_id))
        return content if ending else None

    def begin(self, rendered: Rendered) -> tuple[int, ...]:
        """Encode a whole conversation."""
        if self._template is None:
            return encode_beginning(self._tokenizer, rendered.text)
        return encode_rendered(self._tokenizer, rendered.text, rendered.literal)

    def go_on(self, text: str, content: str, stop_id: int | None, rendered: Rendered) -> tuple[int, ...] | None:
        """Encode what a rendering adds to the text so far: `text`, an answer, and the token that ended it, if one did.

        None if the template wrote the text so far another way: it leaves out earlier thoughts, for example.
        """
        ending = "" if stop_id is None or self._template is None else self._name(stop_id)
        start = added_from(text, content, ending, rendered.text)
        if start is None:
            return None
        if self._template is None:
            return tuple(self._tokenizer.encode(rendered.text[start:]).tolist())
        ids = self._encode_from(rendered, start - len(ending))  # behind the token, as in the whole text
        return ids[1:] if ending and ids[:1] == (stop_id,) else self._encode_from(rendered, start)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], special=True) if isinstance(self._tokenizer, JsonTokenizer) else ""

    def _encode_from(self, rendered: Rendered, start: int) -> tuple[int, ...]:
        literal = [(begin - start, end - start) for begin, end in rendered.literal if begin >= start]
        return encode_rendered(self._tokenizer, rendered.text[start:], literal)


def added_from(text: str, content: str, ending: str, rendered: str) -> int | None:
    """Return where a rendering goes on behind `text + content + ending`; None if it does not begin so.

    Blanks around the content may be others: templates trim messages, and that changes no turn.
    """
    if not rendered.startswith(text):
        return None
    start = len(text)
    if not rendered.startswith(content + ending, start):
        content = content.strip()
        start += len(rendered[start:]) - len(rendered[start:].lstrip())
    return start + len(content + ending) if rendered.startswith(content + ending, start) else None


def render_all(template: ChatTemplate | None, conversations: Sequence[Conversation]) -> Written:
    """Render conversations; join the contents of their messages if there is no template."""
    if template is not None:
        return template.render_many(conversations)
    texts = ["".join(message.get("content") or "" for message in each.messages) for each in conversations]
    return [Rendered(text, None, ()) for text in texts]


def takes_calls_as_text(template: ChatTemplate | None) -> bool:
    """Return whether results of tools may stand behind an answer that is a text, in a template, again and again."""
    answer, result = {"role": "assistant", "content": "1"}, {"role": "tool", "name": "a", "content": "1"}
    turns = (answer, {**result, "tool_call_id": "000000000"}) * 2
    return isinstance(render_all(template, [Conversation((QUESTION, *turns), {}, True)])[0], Rendered)


RewrittenTurn = Literal["plain", "reasoning"]


def rewritten_turns(template: ChatTemplate | None) -> tuple[RewrittenTurn, ...]:
    """Return the kinds of assistant messages that a template renders differently when a message follows them.

    "plain": messages without reasoning; "reasoning": messages with reasoning.
    """
    if template is None:
        return ()
    answers: dict[RewrittenTurn, str] = {"plain": "1"}
    if "think" in template.source:
        answers["reasoning"] = THOUGHTS + "1"
    talks = [(QUESTION, {"role": "assistant", "content": answer}, QUESTION) for answer in answers.values()]
    first, *later = render_all(template, [Conversation(talk, {}, True) for talk in ((QUESTION,), *talks)])
    rewritten = []
    for (name, answer), rendered in zip(answers.items(), later, strict=True):
        if isinstance(first, ConversionError) or isinstance(rendered, ConversionError):
            continue
        if added_from(first.text, answer, "", rendered.text) is None:
            rewritten.append(name)
    return tuple(rewritten)
