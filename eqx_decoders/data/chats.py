"""Conversations rendered as texts, with the spans of the assistant messages, whose tokens are targets.

The text is always one rendering of the complete conversation, since a template may render a message differently when
other messages follow (Qwen3 leaves out the reasoning of earlier messages). The spans come from the template's
`{% generation %}` blocks. A template without such blocks is traced while it runs: the text that an iteration of its
loop over the messages writes belongs to that message. The span of an assistant message starts after the header that
`add_generation_prompt` adds. (If the template has no token that ends a message, or writes it with the next message, as
in GLM-4, the model does not learn such a token.)

If this finds no spans (a template renders the last message outside of its loop, collects its text, or has another
header after the result of a tool), the conversation is also rendered up to each assistant message: without the message,
with `add_generation_prompt`, and with the message. The span is the text after the generation prompt, up to the end of
the message.
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
from eqx_decoders.io.text.answers.formats import functions_of
from eqx_decoders.io.text.chat_rendering import called_tools
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer


CHARACTERS_AT_ONCE, CHATS_AT_ONCE = 1 << 21, 4096  # that are rendered together
KNOWN_ROLES = ("system", "user", "assistant", "tool")
PROMPT_DIFFERS = (
    "the prompt before the last answer differs from what the template generates with add_generation_prompt=True"
)
LEAVES_OUT_REASONING = "the chat template leaves out the reasoning of an answer that is trained on"
LEAVES_OUT_TEXT = "the chat template leaves out the text of an answer that is trained on"
LEAVES_OUT_TOOLS = "the chat template leaves out the definitions of tools"
EMPTY_ANSWER = "an assistant message is empty and is not trained on"
ANSWER = "@answer@"  # text of an assistant message in probes; no header contains it

Span = tuple[int, int]
T = TypeVar("T")


def render_documents(
    documents: Iterator[Document], template: ChatTemplate | None, report: ReadReport | None = None
) -> Iterator[Document]:
    """Yield the documents in order, with the rendered text and the spans of assistant messages of conversations.

    Conversations without assistant messages are left out, and counted in `report`.

    Raises DataError with file and line for a conversation that the template refuses or fails to render, or whose
    assistant messages cannot be found in the text.
    """
    report = ReadReport() if report is None else report
    for batch in _grouped(documents, lambda each: each.size + (0 if each.chat is None else len(str(each.chat)))):
        chats = [(document, document.chat) for document in batch if document.chat is not None]
        rendered = iter(_rendered(chats, template, report) if chats else [])
        for document in batch:
            document = document if document.chat is None else next(rendered)
            if document.spans is None or any(start < stop for start, stop in document.spans):
                yield document
            else:
                report.dropped[_reason_to_drop(document)] += 1


def _reason_to_drop(document: Document) -> str:
    """Return why a rendered document is left out, one of `DROP_REASONS`."""
    if document.chat is None:
        return "empty_completion"
    roles = {str(message.get("role")) for message in document.chat.messages[document.chat.first :]}
    if "assistant" not in roles:
        return f"no_assistant_message: {', '.join(sorted(roles))[:80]}"
    if document.chat.excluded:
        return "excluded"
    return "empty_answers"


def _rendered(
    chats: Sequence[tuple[Document, ChatDocument]], template: ChatTemplate | None, report: ReadReport
) -> Iterator[Document]:
    """Yield the document of each conversation with its text, spans and media."""
    documents = [document for document, _ in chats]
    if template is None:
        raise DataError(
            f"{documents[0].where} is a conversation, but there is no chat template to render it. Start from a chat "
            "model (--init-from), or give a Jinja file with --chat-template (DataConfig.chat_template)."
        )
    variables_by_key = {_settings_key(chat.variables): chat.variables for _, chat in chats}
    probes = [probe for variables in variables_by_key.values() for probe in _probes(variables)]
    files, conversations, all_turns, all_empty = [], [], [], []
    for document, chat in chats:
        messages, names = _checked(as_texts(chat.messages), document.where)
        files.append(names)
        conversations.append(Conversation(messages, chat.variables))
        turns = [number for number in range(chat.first, len(messages)) if messages[number]["role"] == "assistant"]
        empty = [number for number in turns if number not in chat.excluded and _is_empty(messages[number])]
        all_empty.append(empty)
        all_turns.append([number for number in turns if number not in (*chat.excluded, *empty)])
    requests = {
        number: conversation._replace(messages=conversation.messages[: turns[-1]], add_generation_prompt=True)
        for number, (conversation, turns) in enumerate(zip(conversations, all_turns, strict=True))
        if turns and turns[-1] > 0
    }
    rendered = template.render_many([*probes, *conversations, *requests.values()])
    answers = (rendered[3 * number : 3 * number + 3] for number in range(len(variables_by_key)))
    headers = dict(zip(variables_by_key, map(_header, answers), strict=True))
    texts = rendered[len(probes) : len(probes) + len(chats)]
    prompts = dict(zip(requests, rendered[len(probes) + len(chats) :], strict=True))
    rendered_chats = []
    rows = zip(chats, conversations, texts, all_turns, all_empty, strict=True)
    for (document, chat), conversation, text, turns, empty in rows:
        if isinstance(text, ConversionError):
            raise DataError(f"{document.where}: {text}") from text
        rendered_chat = _RenderedChat(conversation, text, chat.first, turns, (*chat.excluded, *empty))
        if turns and empty:
            report.notes[EMPTY_ANSWER] += 1
        report.notes.update(rendered_chat.left_out(f"{document.where}: {template.where}"))
        rendered_chats.append(rendered_chat)
    spans = [
        rendered_chat.spans(headers[_settings_key(rendered_chat.chat.variables)], each.where)
        for rendered_chat, each in zip(rendered_chats, documents, strict=True)
    ]
    unknown = [
        number for number, turns in enumerate(spans) if turns is None and rendered_chats[number].text.generated is None
    ]
    requested = _requested([rendered_chats[number] for number in unknown], template)
    for number, turns in zip(unknown, requested, strict=True):
        spans[number] = turns
    for number, prompt in prompts.items():
        text, turns = rendered_chats[number].text.text, spans[number]
        if not turns or not isinstance(prompt, Rendered):
            continue
        if text.startswith(prompt.text):
            spans[number] = _split_at_prompt(turns, len(prompt.text))
        else:
            report.notes[PROMPT_DIFFERS] += 1
    for document, rendered_chat, turns, names in zip(documents, rendered_chats, spans, files, strict=True):
        check(
            turns is not None,
            f"{document.where}: the assistant messages cannot be found in the text that {template.where} renders. Mark "
            "them in the template with {% generation %}, or remove the conversation.",
            DataError,
        )
        rendered_chat.check_calls(turns or (), f"{document.where}: {template.where}")
        in_fields = {parse_reference(name)[0] for name in document.media}  # kinds that the record's own fields list
        names = [name for name in names if parse_reference(name)[0] not in in_fields]
        literal = tuple(map(tuple, rendered_chat.text.literal))
        yield document._replace(
            text=rendered_chat.text.text, spans=turns, literal=literal, media=(*document.media, *names)
        )


def render_requests(documents: Sequence[Document], template: ChatTemplate) -> list[str]:
    """Return the prompts of documents: their messages before `ChatDocument.first`, rendered with a generation prompt.

    Raises DataError with file and line for a conversation that the template refuses.
    """
    chats = [(each.where, each.chat) for each in documents if each.chat is not None]
    requests = [
        Conversation(
            _checked(as_texts(chat.messages[: chat.first]), where)[0], chat.variables, add_generation_prompt=True
        )
        for where, chat in chats
    ]
    texts = []
    for (where, _), text in zip(chats, template.render_many(requests), strict=True):
        if isinstance(text, ConversionError):
            raise DataError(f"{where}: {text}") from text
        texts.append(text.text)
    return texts


class _RenderedChat(NamedTuple):
    """Conversation with its rendered text.

    - `turns`: indices of the assistant messages that are trained on, all of them `first` or larger.
    - `excluded`: indices of the assistant messages that flags exclude from training, or that are empty.
    """

    chat: Conversation
    text: Rendered
    first: int
    turns: Sequence[int]
    excluded: Sequence[int] = ()

    def spans(self, header: str | None, where: str) -> tuple[Span, ...] | None:
        """Return the spans of the assistant messages; None if they are unknown."""
        if self.text.generated is not None:
            return _without_excluded(self, _marked(self.text, self.first, (*self.turns, *self.excluded)), where)
        return _turns(self.text, len(self.chat.messages), self.turns, header)

    def left_out(self, where: str) -> list[str]:
        """Return a warning for each kind of content that the template leaves out.

        Raises DataError for a message whose role is not in KNOWN_ROLES.
        """
        roles = sorted(self._left_out_roles(where))
        warnings = [f"the chat template leaves out a message of the role {role!r}" for role in roles]
        parts = [_reasoning_and_text(self.chat.messages[turn]) for turn in self.turns]
        if any(reasoning not in self.text.text for reasoning, _ in parts):
            warnings.append(LEAVES_OUT_REASONING)
        if any(text not in self.text.text for _, text in parts):
            warnings.append(LEAVES_OUT_TEXT)
        tools = [self.chat.variables.get("tools"), *(message.get("tools") for message in self.chat.messages)]
        if any(name not in self.text.text for name in itertools.chain.from_iterable(map(_tool_names, tools))):
            warnings.append(LEAVES_OUT_TOOLS)
        return warnings

    def _left_out_roles(self, where: str) -> set[str]:
        """Return the roles of messages that the template leaves out. Raises DataError for a role not in KNOWN_ROLES."""
        left_out = set[str]()
        for number, message in enumerate(self.chat.messages):
            if message["role"] == "assistant" or self._is_written(number):
                continue
            left_out.add(message["role"])
            if message["role"] not in KNOWN_ROLES:
                raise DataError(
                    f"{where} leaves out messages[{number}], whose role {message['role']!r} it does not support. "
                    f"Rename the role to one of {', '.join(KNOWN_ROLES)}, or leave the message out."
                )
        return left_out

    def _is_written(self, number: int) -> bool:
        """Return whether the template wrote a message's text, in the loop iteration of the message or elsewhere."""
        content = self.chat.messages[number].get("content")
        if not isinstance(content, str) or not content.strip():
            return True
        content = content.strip()
        own = [self.text.text[start:stop] for other, start, stop in self.text.messages if other == number]
        if self.chat.messages[number]["role"] in KNOWN_ROLES and any(map(str.strip, own)):
            return True  # the template may have changed the text
        if any(content in part for part in own):
            return True
        # Other messages may have the same text: it must occur for each of them.
        texts = (message.get("content") for message in self.chat.messages)
        expected = sum(text.count(content) for text in texts if isinstance(text, str))
        escaped = json.dumps(content, ensure_ascii=False)[1:-1]
        return max(self.text.text.count(content), self.text.text.count(escaped)) >= expected

    def check_calls(self, spans: Sequence[Span], where: str) -> None:
        """Raise DataError if the template leaves out tool calls of the assistant."""
        learned = " ".join(self.text.text[start:stop] for start, stop in spans)
        names = [name for turn in self.turns for name in called_tools(self.chat.messages[turn])]
        missing = next((name for name in names if name not in learned), None)
        check(
            missing is None,
            f"{where} leaves out tool calls, such as the call of {missing!r}, so the model would learn empty answers. "
            "Give a template that renders tool calls (--chat-template), or remove such conversations.",
            DataError,
        )


def left_out_of_prompt(prompt: Conversation, text: Rendered, where: str) -> list[str]:
    """Return a warning for each kind of content that the template leaves out of a prompt.

    Raises DataError for a message whose role is not in KNOWN_ROLES.
    """
    return _RenderedChat(prompt, text, len(prompt.messages), ()).left_out(where)


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether an assistant message has no text, reasoning, tool call or file."""
    content = message.get("content")
    has_content = bool(content.strip() if isinstance(content, str) else content)
    return not has_content and not message.get("tool_calls") and not message.get("reasoning_content")


def _reasoning_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return reasoning and text of an assistant message. The reasoning is a separate key, or precedes `</think>`."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    before, _, text = content.rpartition("</think>") if isinstance(content, str) else ("", "", "")
    before = reasoning if isinstance(reasoning, str) else before.rpartition("<think>")[2]
    return before.strip(), text.strip()


def _tool_names(tools: Any) -> list[str]:
    """Return the names of the functions in the definitions of tools."""
    return [function["name"] for function in functions_of(tools)] if isinstance(tools, list) else []


def _split_at_prompt(spans: tuple[Span, ...], end: int) -> tuple[Span, ...]:
    """Split the span that contains the end of the prompt, so that the prompt has the same tokens as at inference.

    An example is a generation prompt that ends with `<think>` and a newline, if `<think>` is a target.
    """
    number = next((number for number, (start, stop) in enumerate(spans) if start < end < stop), None)
    if number is None:
        return spans
    start, stop = spans[number]
    return (*spans[:number], (start, end), (end, stop), *spans[number + 1 :])


def _checked(messages: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Check messages; return them in the form for templates, with references to the files in their parts."""
    if not any(isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in messages):
        return check_messages(messages, f"{where}: messages"), ()
    try:
        result, files = check_parts(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    for kind, names in files.items():
        valid = all(isinstance(name, str) and name for name in names)
        check(valid, f"{where}: message parts of the type {kind!r} must contain the name of a file.", DataError)
    return result, tuple(reference(kind, name) for kind, names in files.items() for name in names)


def _marked(text: Rendered, first: int, turns: Sequence[int]) -> tuple[Span, ...] | None:
    """Return the spans of `{% generation %}` blocks from message `first` on; None if no assistant message has one."""
    begin = 0
    if first > 0:
        begin = min((start for number, start, _ in text.messages if number >= first), default=len(text.text))
    spans = tuple((start, stop) for start, stop in text.generated or () if start >= begin)
    return spans if spans or not turns else None


def _without_excluded(
    rendered_chat: _RenderedChat, spans: tuple[Span, ...] | None, where: str
) -> tuple[Span, ...] | None:
    """Return the spans without the spans of excluded messages."""
    if spans is None or not rendered_chat.excluded:
        return spans
    written = {number: (start, stop) for number, start, stop in rendered_chat.text.messages}
    ordered = sorted((*rendered_chat.turns, *rendered_chat.excluded))
    if all(number in written for number in rendered_chat.excluded):
        excluded = [written[number] for number in rendered_chat.excluded]
        return tuple(span for span in spans if not any(start <= span[0] < stop for start, stop in excluded))
    if len(spans) == len(ordered):
        return tuple(span for number, span in zip(ordered, spans, strict=True) if number not in rendered_chat.excluded)
    raise DataError(
        f"{where}: weight or train excludes messages, or an assistant message is empty, but it is unknown which "
        "{% generation %} block of the chat template belongs to which message. Leave the conversation out, or use "
        "another template."
    )


def _turns(text: Rendered, count: int, turns: Sequence[int], header: str | None) -> tuple[Span, ...] | None:
    """Return the spans of the messages `turns` in a traced text, without their headers; None if they are uncertain."""
    spans, writing = [], {number for number, _, _ in text.messages}
    for turn in turns:
        written = [(start, stop) for number, start, stop in text.messages if number == turn]
        next_writes = turn + 1 == count or turn + 1 in writing  # otherwise the text may contain the next message
        if header is None or len(written) != 1 or not next_writes:
            return None
        start, stop = written[0]
        if turn == 0:  # the start of every conversation may precede its header
            start = text.text.find(header, start, stop)
        others = any(start < end and begin < stop for number, begin, end in text.messages if number != turn)
        if start < 0 or others or not text.text.startswith(header, start):
            return None
        spans.append((start + len(header), stop))
    return tuple(spans)


def _requested(rendered_chats: Sequence[_RenderedChat], template: ChatTemplate) -> Iterator[tuple[Span, ...] | None]:
    """Yield the spans of each conversation, found by rendering it up to each assistant message; None if unknown."""
    for group in _grouped(
        rendered_chats, lambda rendered_chat: 3 * len(rendered_chat.turns) * len(rendered_chat.text.text)
    ):
        parts = [
            part for rendered_chat in group for turn in rendered_chat.turns for part in _up_to(rendered_chat.chat, turn)
        ]
        texts = iter(template.render_many(parts))
        for rendered_chat in group:
            turns = [
                _after_request(rendered_chat, turn, [next(texts) for _ in range(3)]) for turn in rendered_chat.turns
            ]
            spans = tuple(span for span in turns if span is not None)
            disjoint = all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
            yield spans if len(spans) == len(turns) and disjoint else None


def _grouped(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield groups of conversations or documents that are rendered together."""
    group, size = [], 0
    for item in items:
        more = size_of(item)
        if group and (size + more > CHARACTERS_AT_ONCE or len(group) == CHATS_AT_ONCE):
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    yield from [group] if group else []


def _up_to(chat: Conversation, turn: int) -> list[Conversation]:
    """Return a conversation up to a message: without the message, with a generation prompt, and with the message."""
    before, turns = chat.messages[:turn], chat.messages[: turn + 1]
    return [chat._replace(messages=before), chat._replace(messages=before, add_generation_prompt=True),
            chat._replace(messages=turns)]  # fmt: skip


def _after_request(rendered_chat: _RenderedChat, turn: int, parts: Sequence[Rendered | ConversionError]) -> Span | None:
    """Return the span of a message in the complete text: after the common start of text and generation prompt."""
    text, written = rendered_chat.text.text, rendered_chat.text.messages
    own_spans = [(start, stop) for number, start, stop in written if number == turn]
    next_writes = any(number == turn + 1 for number, _, _ in written)
    before, request, whole = (part.text if isinstance(part, Rendered) else None for part in parts)
    if before is None or request is None or not text.startswith(before):
        return None
    start = len(before) + len(_common(request[len(before) :], text[len(before) :]))
    if turn + 1 == len(rendered_chat.chat.messages):
        stop = len(text)
    elif whole is not None and text.startswith(whole) and len(whole) >= start:
        stop = len(whole)
    elif len(own_spans) == 1 and own_spans[0][0] <= start <= own_spans[0][1] and next_writes:
        stop = own_spans[0][1]
    else:  # the text may contain the next message
        return None
    others = any(start < end and begin < stop for number, begin, end in written if number != turn)
    return None if others else (start, stop)


def _common(request: str, *answers: str) -> str:
    """Return the common prefix of all texts, without the start of a token's name (`<|` of `<|user|>` and `<|end|>`)."""
    equal = (len(set(letters)) == 1 for letters in zip(request, *answers, strict=False))
    common = request[: sum(itertools.takewhile(bool, equal))]
    return common if common == request else re.sub(r"<[^<>\s]*\Z", "", common)


def _settings_key(variables: Mapping[str, Any]) -> str:
    return json.dumps([_settings(variables), bool(variables.get("tools"))], sort_keys=True, default=str)


def _settings(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template variables on which the header of an assistant message may depend.

    The header may also depend on whether there are tools, but not on which ones.
    """
    return {name: value for name, value in variables.items() if name not in ("tools", "documents")}


def _probes(variables: Mapping[str, Any]) -> list[Conversation]:
    """Return three conversations: a question, the question with a generation prompt, and two questions with answers."""
    question, answer = ({"role": role, "content": ANSWER} for role in ("user", "assistant"))
    settings = _settings(variables) | ({"tools": variables["tools"]} if variables.get("tools") else {})
    return [
        Conversation([question], settings),
        Conversation([question], settings, add_generation_prompt=True),
        Conversation([question, answer] * 2, settings),
    ]


def _header(answers: Sequence[Rendered | ConversionError]) -> str | None:
    """Return the header of assistant messages: the common start of generation prompt and messages; None without one."""
    texts = [answer for answer in answers if isinstance(answer, Rendered)]
    if len(texts) < 3 or not texts[0].messages:
        return None
    question, request, whole = texts
    # the template may end the text of a single question, and continue it before a generation prompt
    end = len(question.text) if request.text.startswith(question.text) else question.messages[0][2]
    begins = [whole.text[start:stop].partition(ANSWER)[0] for number, start, stop in whole.messages if number % 2]
    return _common(request.text[end:], *begins) if begins else None


SPLIT = "a token would span the end of the prompt, so prompt and answer are tokenized separately"
JOINED = "a token spans the end of the prompt and cannot be split, so the prompt has different tokens at inference"


def encode_spans(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    literal: Sequence[Sequence[Span]] | None = None,
    report: ReadReport | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokenize each text; return its ids, and a mask of the ids in its spans.

    The text before a span has the same tokens as a prompt at inference. `report` counts the texts in which a token
    would cross the start of a span. Names of special tokens become special tokens, except in the spans `literal`.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return [_encode_pieces(tokenizer, *each) for each in zip(texts, spans, strict=True)]
    results = []
    for encoded in span_encoding.encode_spans(tokenizer, texts, spans, literal):
        if report is not None and (encoded.split or encoded.joined):
            report.notes[SPLIT if encoded.split else JOINED] += 1
        results.append((encoded.ids, encoded.mask))
    return results


def _encode_pieces(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    cuts = [0, *(cut for span in spans for cut in span), len(text)]
    pieces = [tokenizer.encode(text[start:stop]) for start, stop in itertools.pairwise(cuts)]
    inside = [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(pieces)]
    return np.concatenate(pieces), np.concatenate(inside)
