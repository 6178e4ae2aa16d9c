"""Find the end-of-turn tokens of a chat template: the tokens that a model learns to generate after its messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eqx_decoders.data.chats import encode_spans, render_documents
from eqx_decoders.data.sources.documents import ChatDocument, Document, ReadReport
from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer


NO_END_OF_TURN = (
    "there is no end-of-turn token among the targets after the last assistant message, so the model does not learn to "
    "stop. Use a chat template that writes a special token after each assistant message (inside of the "
    "{% generation %} block, if the template has such blocks)"
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
    """Return the ids of the added tokens at the end of assistant messages and tool calls, in ascending order.

    Only targets are considered. So the result is empty if the template ends a message with plain text or with the start
    of the next message, and if the template cannot render a question with an answer.
    """
    if template is None or not isinstance(tokenizer, JsonTokenizer):
        return ()
    user = {"role": "user", "content": "1"}
    ids = set(_trailing_ids(tokenizer, template, [user, {"role": "assistant", "content": "1"}]))
    if "tool" in template.source + (template.tool_source or ""):
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        ids |= set(_trailing_ids(tokenizer, template, [user, call], {"tools": [_TOOL]})[-1:])
    return tuple(sorted(ids))


def _trailing_ids(
    tokenizer: JsonTokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of the added tokens at the end of a conversation, ignoring whitespace.

    Returns an empty list if the template cannot render the conversation.
    """
    document = Document("the chat template", chat=ChatDocument(list(messages), variables=dict(variables or {})))
    try:
        (rendered,) = list(render_documents(iter([document]), template))
    except (ConversionError, DataError, ValueError):
        return []
    ((ids, targets),) = encode_spans(tokenizer, [rendered.text or ""], [rendered.spans or ()], [rendered.literal])
    return _last_added_ids(tokenizer, ids, targets)


def note_missing_end(tokenizer: Tokenizer, ids: np.ndarray, targets: np.ndarray, report: ReadReport) -> None:
    """Count a conversation in `report` if its targets do not end with an added token.

    **Arguments:**

    - `ids`, `targets`: token ids of the conversation, and a mask of the targets.
    """
    if isinstance(tokenizer, JsonTokenizer) and np.any(targets) and not _last_added_ids(tokenizer, ids, targets):
        report.notes[NO_END_OF_TURN] += 1


def _last_added_ids(tokenizer: JsonTokenizer, ids: np.ndarray, targets: np.ndarray) -> list[int]:
    """Return the ids of the added tokens at the end of the targets, ignoring whitespace."""
    trailing: list[int] = []
    for index in reversed(ids[np.asarray(targets, bool)].tolist()):
        name = tokenizer.decode([index], special=True)
        if index in tokenizer.added_ids and name.strip():
            trailing.insert(0, index)
        elif name.strip():
            break
    return trailing
