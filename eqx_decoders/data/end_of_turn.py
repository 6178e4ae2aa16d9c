"""End-of-turn tokens of a chat template: the tokens that a model learns to generate at the end of its answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eqx_decoders.data.chats import encode_spans, render_documents
from eqx_decoders.data.sources.documents import ChatDocument, Document, ReadReport
from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer


NO_END = (
    "no special token that ends a turn is trained on after the last answer, so the model does not learn to stop. Use a "
    "chat template that writes such a token after each answer, inside of its {% generation %} block if it has one"
)

_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}


def end_of_turn_ids(tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[int, ...]:
    """Return the ids of the added tokens that end an answer or a tool call in rendered conversations.

    Only targets count: templates that end a turn with plain text, or with the start of the next turn, have no such
    tokens. Returns no ids if the template cannot render a question with an answer.
    """
    if template is None or not isinstance(tokenizer, JsonTokenizer):
        return ()
    user = {"role": "user", "content": "1"}
    answer = _trailing_ids(tokenizer, template, [user, {"role": "assistant", "content": "1"}])
    ends = set(answer)
    if "tool" in template.source + (template.tool_source or ""):
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        ends |= set(_trailing_ids(tokenizer, template, [user, call], {"tools": [_TOOL]})[-1:])
    return tuple(sorted(ends))


def _trailing_ids(
    tokenizer: JsonTokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the added tokens at the end of the last message, ignoring whitespace. Empty if rendering fails."""
    document = Document("the chat template", chat=ChatDocument(list(messages), variables=dict(variables or {})))
    try:
        (rendered,) = list(render_documents(iter([document]), template))
    except (ConversionError, DataError, ValueError):
        return []
    ((ids, targets),) = encode_spans(tokenizer, [rendered.text or ""], [rendered.spans or ()], [rendered.literal])
    return _last_added_ids(tokenizer, ids, targets)


def note_missing_end(tokenizer: Tokenizer, ids: np.ndarray, targets: np.ndarray, report: ReadReport) -> None:
    """Count a conversation in `report` if no added token ends the last answer that is trained on."""
    if isinstance(tokenizer, JsonTokenizer) and np.any(targets) and not _last_added_ids(tokenizer, ids, targets):
        report.notes[NO_END] += 1


def _last_added_ids(tokenizer: JsonTokenizer, ids: np.ndarray, targets: np.ndarray) -> list[int]:
    """Return the added tokens at the end of the targets, ignoring whitespace."""
    found: list[int] = []
    for index in reversed(ids[np.asarray(targets, bool)].tolist()):
        name = tokenizer.decode([index], special=True)
        if index in tokenizer.added_ids and name.strip():
            found.insert(0, index)
        elif name.strip():
            break
    return found
