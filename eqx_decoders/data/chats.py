"""Render conversations with a chat template, and find the spans of the assistant messages: their tokens are targets.

The text is one rendering of the complete conversation, because a template may render a message differently when other
messages follow (Qwen3 omits the reasoning of earlier messages). The spans are found in one of three ways:

1. **Generation blocks.** If the template has `{% generation %}` blocks, the spans are the text of these blocks.
2. **Tracing.** Otherwise the template is traced while it runs. The text that is written in an iteration of the
   template's loop over the messages belongs to that message. The span of an assistant message starts after the header
   that `add_generation_prompt` adds. (If the template has no end-of-turn token, or writes it at the start of the next
   message, as in GLM-4, the model does not learn an end-of-turn token.)
3. **Repeated rendering.** Tracing fails if a template renders the last message outside of its loop, collects the text
   before writing it, or uses another header after a tool result. Then the conversation is rendered three times for each
   assistant message: up to the message, up to the message with `add_generation_prompt`, and including the message. The
   span is the text from the end of the generation prompt to the end of the message.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from eqx_decoders.data.sources.documents import ChatDocument, Document, ReadReport, parse_reference, reference
from eqx_decoders.data.sources.records import as_texts
from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.io.processors.prompts import check_parts
from eqx_decoders.io.text import span_encoding
from eqx_decoders.io.text.chat_rendering import called_tools
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.output_parsing.formats import iter_functions
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer


MAX_CHARACTERS_PER_CHUNK = 1 << 21  # of conversations that are rendered together
MAX_CHATS_PER_CHUNK = 4096
KNOWN_ROLES = ("system", "user", "assistant", "tool")
PROMPT_DIFFERS = (
    "the prompt before the last assistant message differs from the template's output with add_generation_prompt=True"
)
REASONING_OMITTED = "the chat template omits the reasoning of an assistant message that is trained on"
TEXT_OMITTED = "the chat template omits the text of an assistant message that is trained on"
TOOLS_OMITTED = "the chat template omits the definitions of tools"
EMPTY_MESSAGE = "an assistant message is empty and is not trained on"
NUM_PROBES = 3  # conversations of `_probes`
PROBE_TEXT = "@answer@"  # text of the messages in probes; does not occur in headers of messages

Span = tuple[int, int]  # start (inclusive) and stop (exclusive), in characters
T = TypeVar("T")


def render_documents(
    documents: Iterator[Document], template: ChatTemplate | None, report: ReadReport | None = None
) -> Iterator[Document]:
    """Render the conversations among documents; yield all documents in order.

    Conversations get the fields `text` and `spans` (the spans of the assistant messages). Documents without targets are
    skipped and counted in `report`.

    Raises DataError, with file and line, if the template cannot render a conversation, or if the assistant messages of
    a conversation cannot be found in the rendered text.
    """
    report = ReadReport() if report is None else report
    for chunk in _chunked(documents, _num_characters):
        chats = [(document, document.chat) for document in chunk if document.chat is not None]
        rendered = iter(_render_chats(chats, template, report) if chats else [])
        for document in chunk:
            document = document if document.chat is None else next(rendered)
            if document.spans is None or any(start < stop for start, stop in document.spans):
                yield document
            else:
                report.dropped[_reason_to_drop(document)] += 1


def _num_characters(document: Document) -> int:
    return document.size + (0 if document.chat is None else len(str(document.chat)))


def _reason_to_drop(document: Document) -> str:
    """Return why a rendered document without targets is skipped: a key of `DROP_REASONS`, sometimes with roles."""
    if document.chat is None:
        return "empty_completion"
    roles = {str(message.get("role")) for message in document.chat.messages[document.chat.first :]}
    if "assistant" not in roles:
        return f"no_assistant_message: {', '.join(sorted(roles))[:80]}"
    if document.chat.excluded:
        return "excluded"
    return "empty_answers"


def _render_chats(
    chats: Sequence[tuple[Document, ChatDocument]], template: ChatTemplate | None, report: ReadReport
) -> Iterator[Document]:
    """Yield the document of each conversation with the fields `text`, `spans`, `literal` and `media`."""
    documents = [document for document, _ in chats]
    if template is None:
        raise DataError(
            f"{documents[0].where} is a conversation, but there is no chat template to render it. Start from a chat "
            "model (--init-from), or set --chat-template (DataConfig.chat_template) to a Jinja file."
        )
    variables_by_key = {_settings_key(chat.variables): chat.variables for _, chat in chats}
    probes = [probe for variables in variables_by_key.values() for probe in _probes(variables)]
    media_references, conversations, trained_messages, empty_messages = [], [], [], []
    for document, chat in chats:
        messages, references = _check_messages(as_texts(chat.messages), document.where)
        media_references.append(references)
        conversations.append(Conversation(messages, chat.variables))
        assistant = [index for index in range(chat.first, len(messages)) if messages[index]["role"] == "assistant"]
        empty = [index for index in assistant if index not in chat.excluded and _is_empty(messages[index])]
        empty_messages.append(empty)
        trained_messages.append([index for index in assistant if index not in (*chat.excluded, *empty)])
    requests = {  # the prompt before the last assistant message of each conversation
        number: conversation._replace(messages=conversation.messages[: trained[-1]], add_generation_prompt=True)
        for number, (conversation, trained) in enumerate(zip(conversations, trained_messages, strict=True))
        if trained and trained[-1] > 0
    }
    outputs = iter(template.render_many([*probes, *conversations, *requests.values()]))
    headers = {key: _header([next(outputs) for _ in range(NUM_PROBES)]) for key in variables_by_key}
    texts = [next(outputs) for _ in chats]
    prompts = dict(zip(requests, outputs, strict=True))
    rendered_chats = []
    rows = zip(chats, conversations, texts, trained_messages, empty_messages, strict=True)
    for (document, chat), conversation, text, trained, empty in rows:
        if isinstance(text, ConversionError):
            raise DataError(f"{document.where}: {text}") from text
        rendered_chat = _RenderedChat(conversation, text, chat.first, trained, (*chat.excluded, *empty))
        if trained and empty:
            report.notes[EMPTY_MESSAGE] += 1
        report.notes.update(rendered_chat.omissions(f"{document.where}: {template.where}"))
        rendered_chats.append(rendered_chat)
    all_spans = [
        rendered_chat.spans(headers[_settings_key(rendered_chat.chat.variables)], document.where)
        for rendered_chat, document in zip(rendered_chats, documents, strict=True)
    ]
    unknown = [
        number
        for number, spans in enumerate(all_spans)
        if spans is None and rendered_chats[number].text.generated is None
    ]
    found = _spans_by_repeated_rendering([rendered_chats[number] for number in unknown], template)
    for number, spans in zip(unknown, found, strict=True):
        all_spans[number] = spans
    for number, prompt in prompts.items():
        text, spans = rendered_chats[number].text.text, all_spans[number]
        if not spans or not isinstance(prompt, Rendered):
            continue
        if text.startswith(prompt.text):
            all_spans[number] = _split_at_prompt(spans, len(prompt.text))
        else:
            report.notes[PROMPT_DIFFERS] += 1
    for document, rendered_chat, spans, references in zip(
        documents, rendered_chats, all_spans, media_references, strict=True
    ):
        check(
            spans is not None,
            f"{document.where}: the assistant messages cannot be found in the text that {template.where} renders. Mark "
            "them in the template with {% generation %}, or remove the conversation.",
            DataError,
        )
        rendered_chat.check_calls(spans or (), f"{document.where}: {template.where}")
        kinds_in_fields = {parse_reference(name)[0] for name in document.media}  # these kinds are listed in a field
        references = [name for name in references if parse_reference(name)[0] not in kinds_in_fields]
        literal = tuple(map(tuple, rendered_chat.text.literal))
        yield document._replace(
            text=rendered_chat.text.text, spans=spans, literal=literal, media=(*document.media, *references)
        )


def render_requests(documents: Sequence[Document], template: ChatTemplate) -> list[str]:
    """Render the prompts of conversations: the messages before `ChatDocument.first`, with a generation prompt.

    Raises DataError, with file and line, if the template cannot render a prompt.
    """
    chats = [(document.where, document.chat) for document in documents if document.chat is not None]
    requests = []
    for where, chat in chats:
        messages, _ = _check_messages(as_texts(chat.messages[: chat.first]), where)
        requests.append(Conversation(messages, chat.variables, add_generation_prompt=True))
    texts = []
    for (where, _), text in zip(chats, template.render_many(requests), strict=True):
        if isinstance(text, ConversionError):
            raise DataError(f"{where}: {text}") from text
        texts.append(text.text)
    return texts


class _RenderedChat(NamedTuple):
    """A conversation with its rendered text.

    - `first`: index of the first message that may be trained on.
    - `trained`: indices of the assistant messages that are trained on.
    - `excluded`: indices of the assistant messages that are not trained on, because they are empty or because the field
      `train` or `weight` excludes them.
    """

    chat: Conversation
    text: Rendered
    first: int
    trained: Sequence[int]
    excluded: Sequence[int] = ()

    def spans(self, header: str | None, where: str) -> tuple[Span, ...] | None:
        """Return the spans of the trained messages, or None if they cannot be determined from this rendering.

        `header`: header of assistant messages, such as `<|im_start|>assistant`; None if it is unknown.
        """
        if self.text.generated is None:
            return _traced_spans(self.text, len(self.chat.messages), self.trained, header)
        spans = _generation_blocks(self.text, self.first)
        if not spans and (self.trained or self.excluded):
            return None
        return _remove_excluded(self, spans, where)

    def omissions(self, where: str) -> list[str]:
        """Return a warning for each kind of content that the template omits from the text.

        Raises DataError if the template omits a message with a role that is not in `KNOWN_ROLES`.
        """
        roles = sorted(self._omitted_roles(where))
        warnings = [f"the chat template omits a message of the role {role!r}" for role in roles]
        parts = [_reasoning_and_text(self.chat.messages[index]) for index in self.trained]
        if any(reasoning not in self.text.text for reasoning, _ in parts):
            warnings.append(REASONING_OMITTED)
        if any(text not in self.text.text for _, text in parts):
            warnings.append(TEXT_OMITTED)
        tools = [self.chat.variables.get("tools"), *(message.get("tools") for message in self.chat.messages)]
        if any(name not in self.text.text for name in itertools.chain.from_iterable(map(_tool_names, tools))):
            warnings.append(TOOLS_OMITTED)
        return warnings

    def _omitted_roles(self, where: str) -> set[str]:
        omitted = set[str]()
        for number, message in enumerate(self.chat.messages):
            if message["role"] == "assistant" or self._is_written(number):
                continue
            omitted.add(message["role"])
            if message["role"] not in KNOWN_ROLES:
                raise DataError(
                    f"{where} omits messages[{number}] because it does not support the role {message['role']!r}. "
                    f"Rename the role to one of {', '.join(KNOWN_ROLES)}, or remove the message."
                )
        return omitted

    def _is_written(self, number: int) -> bool:
        """Return whether the rendered text contains message `number`, written in its loop iteration or elsewhere."""
        content = self.chat.messages[number].get("content")
        if not isinstance(content, str) or not content.strip():
            return True
        content = content.strip()
        written = [self.text.text[start:stop] for index, start, stop in self.text.messages if index == number]
        if self.chat.messages[number]["role"] in KNOWN_ROLES and any(map(str.strip, written)):
            return True  # the template may have changed the text
        if any(content in part for part in written):
            return True
        # Several messages may have the same content: the text must contain it once for each message.
        texts = (message.get("content") for message in self.chat.messages)
        expected = sum(text.count(content) for text in texts if isinstance(text, str))
        escaped = json.dumps(content, ensure_ascii=False)[1:-1]
        return max(self.text.text.count(content), self.text.text.count(escaped)) >= expected

    def check_calls(self, spans: Sequence[Span], where: str) -> None:
        """Raise DataError if the spans of the assistant messages do not contain the names of all called tools."""
        targets = " ".join(self.text.text[start:stop] for start, stop in spans)
        names = [name for index in self.trained for name in called_tools(self.chat.messages[index])]
        missing = next((name for name in names if name not in targets), None)
        check(
            missing is None,
            f"{where} omits tool calls, such as the call of {missing!r}, so the model would learn empty messages. Use "
            "a chat template that renders tool calls (--chat-template), or remove conversations with tool calls.",
            DataError,
        )


def omissions_of_prompt(prompt: Conversation, text: Rendered, where: str) -> list[str]:
    """Return a warning for each kind of content that the template omits from a prompt.

    Raises DataError if the template omits a message with a role that is not in `KNOWN_ROLES`.
    """
    return _RenderedChat(prompt, text, first=len(prompt.messages), trained=()).omissions(where)


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether an assistant message has no text, reasoning, tool calls and media."""
    content = message.get("content")
    has_content = bool(content.strip() if isinstance(content, str) else content)
    return not has_content and not message.get("tool_calls") and not message.get("reasoning_content")


def _reasoning_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reasoning (`reasoning_content`, or the content before `</think>`) and the text of a message."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    before, _, text = content.rpartition("</think>") if isinstance(content, str) else ("", "", "")
    before = reasoning if isinstance(reasoning, str) else before.rpartition("<think>")[2]
    return before.strip(), text.strip()


def _tool_names(tools: Any) -> list[str]:
    """Return the names of the functions in the definitions of tools."""
    return [function["name"] for function in iter_functions(tools)] if isinstance(tools, list) else []


def _split_at_prompt(spans: tuple[Span, ...], end: int) -> tuple[Span, ...]:
    """Split the span that contains the end of the prompt, so that the prompt has the same tokens as at inference.

    Such a span exists, for example, if the generation prompt ends with `<think>` and a newline, and `<think>` is in a
    `{% generation %}` block.

    **Arguments:**

    - `spans`: spans of the assistant messages.
    - `end`: number of characters of the prompt.
    """
    result = list[Span]()
    for start, stop in spans:
        result += [(start, end), (end, stop)] if start < end < stop else [(start, stop)]
    return tuple(result)


def _check_messages(messages: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Check messages; return the messages as the template expects them, and references to the media files in them."""
    if not any(isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in messages):
        return check_messages(messages, f"{where}: messages"), ()
    try:
        result, files = check_parts(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    for kind, names in files.items():
        check(
            all(isinstance(name, str) and name for name in names),
            f"{where}: message parts of the type {kind!r} must contain the name of a file.",
            DataError,
        )
    return result, tuple(reference(kind, name) for kind, names in files.items() for name in names)


def _generation_blocks(text: Rendered, first: int) -> tuple[Span, ...]:
    """Return the spans of the `{% generation %}` blocks from message `first` on."""
    min_start = 0
    if first > 0:
        min_start = min((start for index, start, _ in text.messages if index >= first), default=len(text.text))
    return tuple((start, stop) for start, stop in text.generated or () if start >= min_start)


def _remove_excluded(rendered_chat: _RenderedChat, spans: tuple[Span, ...], where: str) -> tuple[Span, ...]:
    """Remove the spans of excluded messages. Raises DataError if the message of a span is unknown."""
    if not rendered_chat.excluded:
        return spans
    written = {number: (start, stop) for number, start, stop in rendered_chat.text.messages}
    assistant = sorted((*rendered_chat.trained, *rendered_chat.excluded))
    if all(number in written for number in rendered_chat.excluded):
        excluded = [written[number] for number in rendered_chat.excluded]
        return tuple(span for span in spans if not any(start <= span[0] < stop for start, stop in excluded))
    if len(spans) == len(assistant):  # one span per assistant message
        return tuple(span for index, span in zip(assistant, spans, strict=True) if index not in rendered_chat.excluded)
    raise DataError(
        f"{where}: an assistant message is empty, or is excluded by the field 'weight' or 'train', but the "
        "{% generation %} blocks of the chat template cannot be matched to the messages. Remove the conversation, or "
        "use another chat template."
    )


def _traced_spans(
    text: Rendered, num_messages: int, trained: Sequence[int], header: str | None
) -> tuple[Span, ...] | None:
    """Return the spans of the messages `trained` in a traced text, without the headers; None if they are uncertain."""
    spans = []
    traced = {index for index, _, _ in text.messages}
    for message in trained:
        written = [(start, stop) for index, start, stop in text.messages if index == message]
        # If the next message was not traced, the text of this message may contain it.
        next_is_traced = message + 1 == num_messages or message + 1 in traced
        if header is None or len(written) != 1 or not next_is_traced:
            return None
        start, stop = written[0]
        if message == 0:  # text that starts every conversation may precede the header
            start = text.text.find(header, start, stop)
        overlaps = any(start < end and begin < stop for index, begin, end in text.messages if index != message)
        if start < 0 or overlaps or not text.text.startswith(header, start):
            return None
        spans.append((start + len(header), stop))
    return tuple(spans)


def _spans_by_repeated_rendering(
    rendered_chats: Sequence[_RenderedChat], template: ChatTemplate
) -> Iterator[tuple[Span, ...] | None]:
    """Render each conversation up to each assistant message; yield the spans of the conversation, or None."""

    def num_characters(rendered_chat: _RenderedChat) -> int:
        return 3 * len(rendered_chat.trained) * len(rendered_chat.text.text)

    for chunk in _chunked(rendered_chats, num_characters):
        prefixes = [
            prefix
            for rendered_chat in chunk
            for message in rendered_chat.trained
            for prefix in _prefixes(rendered_chat.chat, message)
        ]
        outputs = iter(template.render_many(prefixes))
        for rendered_chat in chunk:
            spans = [
                _span_of_message(rendered_chat, message, next(outputs), next(outputs), next(outputs))
                for message in rendered_chat.trained
            ]
            known = tuple(span for span in spans if span is not None)
            disjoint = all(first[1] <= second[0] for first, second in itertools.pairwise(known))
            yield known if len(known) == len(spans) and disjoint else None


def _chunked(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield chunks of items that are rendered together. `size_of` returns the number of characters of an item."""
    chunk, size = list[T](), 0
    for item in items:
        item_size = size_of(item)
        if chunk and (size + item_size > MAX_CHARACTERS_PER_CHUNK or len(chunk) == MAX_CHATS_PER_CHUNK):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += item_size
    if chunk:
        yield chunk


def _prefixes(chat: Conversation, message: int) -> list[Conversation]:
    """Return the conversation before a message, the same with a generation prompt, and including the message."""
    before = chat._replace(messages=chat.messages[:message])
    return [
        before,
        before._replace(add_generation_prompt=True),
        chat._replace(messages=chat.messages[: message + 1]),
    ]


def _span_of_message(
    rendered_chat: _RenderedChat,
    message: int,
    before: Rendered | ConversionError,
    request: Rendered | ConversionError,
    including: Rendered | ConversionError,
) -> Span | None:
    """Return the span of a message in the text of the complete conversation; None if it is uncertain.

    `before`, `request` and `including` are the renderings of `_prefixes`. The span starts where the complete text and
    the generation prompt begin to differ.
    """
    text, traced = rendered_chat.text.text, rendered_chat.text.messages
    written = [(start, stop) for index, start, stop in traced if index == message]
    next_is_traced = any(index == message + 1 for index, _, _ in traced)
    if not isinstance(before, Rendered) or not isinstance(request, Rendered) or not text.startswith(before.text):
        return None
    start = len(before.text) + len(_common_prefix(request.text[len(before.text) :], text[len(before.text) :]))
    if message + 1 == len(rendered_chat.chat.messages):
        stop = len(text)
    elif isinstance(including, Rendered) and text.startswith(including.text) and len(including.text) >= start:
        stop = len(including.text)
    elif len(written) == 1 and written[0][0] <= start <= written[0][1] and next_is_traced:
        stop = written[0][1]
    else:  # the text may contain the next message
        return None
    overlaps = any(start < end and begin < stop for index, begin, end in traced if index != message)
    return None if overlaps else (start, stop)


def _common_prefix(request: str, *texts: str) -> str:
    """Return the common prefix of all texts, without an incomplete token name such as the `<|` of `<|user|>`."""
    equal = (len(set(letters)) == 1 for letters in zip(request, *texts, strict=False))
    common = request[: sum(itertools.takewhile(bool, equal))]
    return common if common == request else re.sub(r"<[^<>\s]*\Z", "", common)


def _settings_key(variables: Mapping[str, Any]) -> str:
    return json.dumps([_settings(variables), bool(variables.get("tools"))], sort_keys=True, default=str)


def _settings(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template variables that may change the header of assistant messages.

    The header may also depend on whether there are tools, but not on the definitions of the tools.
    """
    return {name: value for name, value in variables.items() if name not in ("tools", "documents")}


def _probes(variables: Mapping[str, Any]) -> list[Conversation]:
    """Return `NUM_PROBES` short conversations, which show the header of assistant messages (see `_header`).

    The conversations are a question, the question with a generation prompt, and two questions with answers.
    """
    question, answer = ({"role": role, "content": PROBE_TEXT} for role in ("user", "assistant"))
    settings = _settings(variables) | ({"tools": variables["tools"]} if variables.get("tools") else {})
    return [
        Conversation([question], settings),
        Conversation([question], settings, add_generation_prompt=True),
        Conversation([question, answer] * 2, settings),
    ]


def _header(probes: Sequence[Rendered | ConversionError]) -> str | None:
    """Return the header of assistant messages; None if the template has no header or fails to render the probes.

    The header is the common prefix of the generation prompt and the text of assistant messages. `probes`: the
    renderings of the conversations of `_probes`.
    """
    texts = [probe for probe in probes if isinstance(probe, Rendered)]
    if len(texts) < NUM_PROBES or not texts[0].messages:
        return None
    question, request, complete = texts
    # A template may write a final text after a single question, and omit it before a generation prompt.
    end = len(question.text) if request.text.startswith(question.text) else question.messages[0][2]
    starts = [
        complete.text[start:stop].partition(PROBE_TEXT)[0] for index, start, stop in complete.messages if index % 2
    ]
    return _common_prefix(request.text[end:], *starts) if starts else None


# --- tokens -----------------------------------------------------------------------------------------------------------

TOKENIZED_SEPARATELY = (
    "a token would span the end of the prompt, so the prompt and the assistant message are tokenized separately"
)
TOKEN_SPANS_PROMPT_END = (
    "a token spans the end of the prompt and cannot be split, so the prompt has different tokens at inference"
)


def encode_spans(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    literal: Sequence[Sequence[Span]] | None = None,
    report: ReadReport | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokenize each text; return the token ids, and a mask that is True for the tokens in the spans.

    The text before a span gets the same tokens as a prompt at inference.

    **Arguments:**

    - `spans`: spans of each text, whose tokens are targets.
    - `literal`: spans of each text in which the names of special tokens are tokenized as plain text.
    - `report`: counts the texts in which a token would cross the start of a span.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return [_encode_pieces(tokenizer, text, text_spans) for text, text_spans in zip(texts, spans, strict=True)]
    results = []
    for encoded in span_encoding.encode_spans(tokenizer, texts, spans, literal):
        if report is not None and (encoded.split or encoded.joined):
            report.notes[TOKENIZED_SEPARATELY if encoded.split else TOKEN_SPANS_PROMPT_END] += 1
        results.append((encoded.ids, encoded.mask))
    return results


def _encode_pieces(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize the text of each span, and the text between spans, separately."""
    cuts = [0, *(cut for span in spans for cut in span), len(text)]
    pieces = [tokenizer.encode(text[start:stop]) for start, stop in itertools.pairwise(cuts)]
    inside = [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(pieces)]
    return np.concatenate(pieces), np.concatenate(inside)
