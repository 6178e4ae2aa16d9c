"""Turns of a conversation: new messages as tokens, and completions as messages with tool calls."""

import concurrent.futures
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from eqx_decoders.data.prompt_batches import encode_rendered, encode_text_prompt
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered
from eqx_decoders.io.text.output_parsing.formats import ToolFormatName, tool_format_or_default
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer
from eqx_decoders.io.text.tool_calls import parse_tool_calls
from eqx_decoders.rl.completions import completion_text
from eqx_decoders.serving.rollouts import Rollout


# --- messages to tokens -----------------------------------------------------------------------------------------------


Renderings = Sequence[Rendered | ConversionError]


class ConversationEncoder:
    """Renders conversations with a chat template and encodes the text that new messages add.

    Without a template, a conversation is the concatenated content of its messages. Sampled tokens are never decoded
    and encoded again: `encode_added` encodes only the text that a rendering adds after them.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        self._tokenizer, self._template = tokenizer, template
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rendering")

    def render(self, conversations: Sequence[Conversation]) -> "concurrent.futures.Future[Renderings]":
        """Start to render conversations in a thread."""
        return self._thread.submit(render_all, self._template, conversations)

    def rendered_completion(self, text: str, stop_id: int | None, rendered: Rendered | ConversionError) -> str | None:
        """Return how the template renders the last completion, without its end token; None if it was truncated.

        **Arguments:**

        - `text`: rendering of the conversation before the completion.
        - `rendered`: rendering of the conversation up to and including the completion.
        """
        if stop_id is None or isinstance(rendered, ConversionError) or not rendered.text.startswith(text):
            return None
        content, end_token, _ = rendered.text[len(text) :].rpartition(self._token_name(stop_id))
        return content if end_token else None

    def encode(self, rendered: Rendered) -> tuple[int, ...]:
        """Encode a complete conversation."""
        if self._template is None:
            return encode_text_prompt(self._tokenizer, rendered.text)
        return encode_rendered(self._tokenizer, rendered.text, rendered.literal)

    def encode_added(self, text: str, content: str, stop_id: int | None, rendered: Rendered) -> tuple[int, ...] | None:
        """Encode what a rendering adds after `text`, a completion with this content, and its end token, if it has one.

        Returns None if the rendering does not start with them, for example because the template removes the reasoning
        of earlier turns.
        """
        end_token = "" if stop_id is None or self._template is None else self._token_name(stop_id)
        start = added_start(text, content, end_token, rendered.text)
        if start is None:
            return None
        if self._template is None:
            return tuple(self._tokenizer.encode(rendered.text[start:]).tolist())
        ids = self._encode_from(rendered, start - len(end_token))  # with the end token, as in the complete text
        return ids[1:] if end_token and ids[:1] == (stop_id,) else self._encode_from(rendered, start)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _token_name(self, token: int) -> str:
        return self._tokenizer.decode([token], special=True) if isinstance(self._tokenizer, JsonTokenizer) else ""

    def _encode_from(self, rendered: Rendered, start: int) -> tuple[int, ...]:
        literal = [(begin - start, end - start) for begin, end in rendered.literal if begin >= start]
        return encode_rendered(self._tokenizer, rendered.text[start:], literal)


def added_start(text: str, content: str, end_token: str, rendered: str) -> int | None:
    """Return the index after `text + content + end_token` in `rendered`; None if `rendered` does not start with them.

    Whitespace around the content may differ: templates strip messages, which changes no turn.
    """
    if not rendered.startswith(text):
        return None
    start = len(text)
    if not rendered.startswith(content + end_token, start):
        content = content.strip()
        start += len(rendered[start:]) - len(rendered[start:].lstrip())
    return start + len(content + end_token) if rendered.startswith(content + end_token, start) else None


def render_all(template: ChatTemplate | None, conversations: Sequence[Conversation]) -> Renderings:
    """Render conversations, or concatenate the contents of their messages if there is no template."""
    if template is not None:
        return template.render_many(conversations)
    texts = ["".join(message.get("content") or "" for message in c.messages) for c in conversations]
    return [Rendered(text, None, ()) for text in texts]


QUESTION = {"role": "user", "content": "1"}
REASONING = "<think>\n1\n</think>\n\n"


def accepts_tool_calls_in_text(template: ChatTemplate | None) -> bool:
    """Return whether a template renders tool results after assistant messages whose tool calls are in the text."""
    completion, result = {"role": "assistant", "content": "1"}, {"role": "tool", "name": "a", "content": "1"}
    turns = (completion, {**result, "tool_call_id": "000000000"}) * 2
    return isinstance(render_all(template, [Conversation((QUESTION, *turns), {}, True)])[0], Rendered)


RewrittenTurn = Literal["plain", "reasoning"]


def rewritten_turns(template: ChatTemplate | None) -> tuple[RewrittenTurn, ...]:
    """Return the kinds of assistant messages that a template renders differently when a message follows them.

    "plain": messages without reasoning; "reasoning": messages with reasoning.
    """
    if template is None:
        return ()
    contents: dict[RewrittenTurn, str] = {"plain": "1"}
    if "think" in template.source:
        contents["reasoning"] = REASONING + "1"
    conversations = [(QUESTION, {"role": "assistant", "content": content}, QUESTION) for content in contents.values()]
    first, *later = render_all(
        template, [Conversation(messages, {}, True) for messages in ((QUESTION,), *conversations)]
    )
    rewritten = []
    for (kind, content), rendered in zip(contents.items(), later, strict=True):
        if isinstance(first, ConversionError) or isinstance(rendered, ConversionError):
            continue
        if added_start(first.text, content, "", rendered.text) is None:
            rewritten.append(kind)
    return tuple(rewritten)


# --- completions to messages ------------------------------------------------------------------------------------------


class ParsedTurn(NamedTuple):
    """Completion of a turn.

    **Arguments:**

    - `completion`: argument of the environment's `step`.
    - `message`: message of the conversation, as the chat template reads it.
    - `structured`: whether tool calls are a field of `message`, because the template does not accept them in the text.
    """

    completion: dict[str, Any]
    message: Mapping[str, Any]
    structured: bool = False


class CompletionParser:
    """Parser of completions. It parses tool calls in conversations with tools.

    **Arguments:**

    - `parser`: format of tool calls. `auto`: the format of the chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, parser: Literal["auto"] | ToolFormatName):
        self._tokenizer, self._template = tokenizer, template
        source = "" if template is None else template.source_with_tools
        self._format: ToolFormatName = tool_format_or_default(source) if parser == "auto" else parser

    @functools.cached_property
    def _structured(self) -> bool:
        return not accepts_tool_calls_in_text(self._template)

    def parse(self, rollout: Rollout, tools: Sequence[Mapping[str, Any]], num_calls: int) -> ParsedTurn:
        """Parse a completion of a conversation with `tools` and `num_calls` earlier tool calls."""
        text = completion_text(self._tokenizer, rollout)
        message = {"role": "assistant", "content": text}
        completion: dict[str, Any] = {"text": text, "message": message, "finish_reason": rollout.finish_reason}
        if not tools:
            return ParsedTurn(completion, message)
        parsed = parse_tool_calls(completion_text(self._tokenizer, rollout, special=True), self._format, tools)
        errors = (*parsed.malformed, *(["the call is incomplete"] if parsed.incomplete else []))
        if not parsed.calls and not errors:
            return ParsedTurn(completion, message)
        calls = [_call(num_calls + index, *call) for index, call in enumerate(parsed.calls)]
        first_malformed = num_calls + len(calls)
        malformed = [{"id": _call_id(first_malformed + i), "error": error} for i, error in enumerate(errors)]
        structured = {"role": "assistant", "content": parsed.content} | ({"tool_calls": calls} if calls else {})
        completion |= {"message": structured} | ({"malformed_calls": malformed} if malformed else {})
        if not self._structured:
            return ParsedTurn(completion, message)
        # A placeholder stands for each malformed call: tool results need a call, and the text is not parsed again.
        placeholders = [_call(first_malformed + index, "unknown", {}) for index in range(len(malformed))]
        return ParsedTurn(completion, {**structured, "tool_calls": calls + placeholders}, structured=True)


def _call(index: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": _call_id(index), "function": {"name": name, "arguments": dict(arguments)}}


def _call_id(index: int) -> str:
    return f"{index:09d}"  # Mistral's templates require nine characters
