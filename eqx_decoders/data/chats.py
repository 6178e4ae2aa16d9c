"""Conversations as texts, with the parts that the assistant wrote: what is trained on.

The text is always one rendering of the whole conversation, since templates may write a turn in another way when others
follow it (Qwen3 leaves out what was thought in earlier turns). Which part of it is the assistant's is told by the
template's `{% generation %}` marks. A template without any is watched while it runs: what a turn of its loop over the
messages writes is the text of that message. Of it all is trained on but the header: that with which a request for an
answer ends, as far as it does not depend on the answer. (Where the template has no token that ends a turn, or writes it
in the turn of the next message, as in GLM-4, none is learned.)

Where that tells nothing (a template writes the last turn outside of its loop, gathers its text, or has another header
behind the result of a tool), the conversation is rendered up to each turn as well: without it, with the request for it,
and with it. What is behind the request, up to where the turn ends, is the assistant's.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.sources.documents import Document, reference, referred
from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.io.processors.prompts import check_parts
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.chat_template_worker import called
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer


CHARACTERS_AT_ONCE, CHATS_AT_ONCE = 1 << 21, 4096  # that are rendered by one process
ANSWER = "@answer@"  # of the probes that tell the header of an answer: nothing that stands in a header

Span = tuple[int, int]


def render_documents(documents: Iterator[Document], template: ChatTemplate | None) -> Iterator[Document]:
    """The documents in their order, conversations with their text and the spans of the assistant's turns.

    Conversations without any are left out. Raises DataError with file and line for a conversation that the template
    refuses, or in which it writes turns so that they cannot be told apart; ConversionError for a template that takes
    too much.
    """
    for batch in _batches(documents):
        chats = [one for one in batch if one.chat is not None]
        found = iter(_rendered(chats, template) if chats else [])
        whole = (one if one.chat is None else next(found) for one in batch)
        yield from (one for one in whole if one.spans is None or any(start < stop for start, stop in one.spans))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.size + (0 if document.chat is None else len(str(document.chat)))
        if size >= CHARACTERS_AT_ONCE or len(batch) >= CHATS_AT_ONCE:
            yield batch
            batch, size = [], 0
    yield batch


def _rendered(documents: Sequence[Document], template: ChatTemplate | None) -> Iterator[Document]:
    if template is None:
        rule = "is a conversation, and there is no chat template that writes it as a text"
        remedy = "Start from a chat model (--init-from), or give a file of Jinja with --chat-template"
        raise DataError(f"{documents[0].where} {rule}. {remedy} (DataConfig.chat_template).")
    checked = [_checked(one.chat.messages, one.where) for one in documents if one.chat is not None]
    chats = [
        Conversation(messages, one.chat.variables)
        for (messages, _), one in zip(checked, documents, strict=True)
        if one.chat is not None
    ]
    kinds = {_kind(chat.variables): chat.variables for chat in chats}
    probes = [probe for variables in kinds.values() for probe in _probes(variables)]
    try:
        texts = template.render_many([*probes, *chats])
    except ConversionError as error:  # the process ended, in any of them
        raise ConversionError(f"in {documents[0].where} to {documents[-1].where}: {error}") from error
    answers = (texts[3 * number : 3 * number + 3] for number in range(len(kinds)))
    headers = dict(zip(kinds, map(_header, answers), strict=True))
    images = (found for _, found in checked)
    talks = []
    for document, chat, text in zip(documents, chats, texts[len(probes) :], strict=True):
        if isinstance(text, ConversionError):
            raise DataError(f"{document.where}: {text}") from text
        first = 0 if document.chat is None else document.chat.first
        turns = [number for number in range(first, len(chat.messages)) if chat.messages[number]["role"] == "assistant"]
        talks.append(_Talk(chat, text, first, turns))
    spans = [one.spans(headers[_kind(one.chat.variables)]) for one in talks]
    unknown = [number for number, found in enumerate(spans) if found is None and talks[number].text.generated is None]
    for number, found in zip(unknown, _requested([talks[number] for number in unknown], template), strict=True):
        spans[number] = found
    for document, talk, found, given in zip(documents, talks, spans, images, strict=True):
        rule = f"the assistant's turns cannot be told from the others in what {template.where} writes"
        remedy = "Mark them there with {% generation %}, or leave the conversation out"
        check(found is not None, f"{document.where}: {rule}. {remedy}.", DataError)
        talk.check_calls(found or (), f"{document.where}: {template.where}")
        kinds_given = {referred(one)[0] for one in document.media}  # in fields beside the messages
        parts = [one for one in given if referred(one)[0] not in kinds_given]
        literal = tuple(map(tuple, talk.text.literal))
        yield document._replace(text=talk.text.text, spans=found, literal=literal, media=(*document.media, *parts))


class _Talk(NamedTuple):
    """A conversation, what the template made of it, and which of its messages from `first` on are the assistant's."""

    chat: Conversation
    text: Rendered
    first: int
    turns: Sequence[int]

    def spans(self, header: str | None) -> tuple[Span, ...] | None:
        """The assistant's parts; None where they cannot be told."""
        if self.text.generated is not None:
            return _marked(self.text, self.first, self.turns)
        return _turns(self.text, len(self.chat.messages), self.turns, header)

    def check_calls(self, spans: Sequence[Span], where: str) -> None:
        """DataError where the template leaves out what the assistant calls."""
        learned = " ".join(self.text.text[start:stop] for start, stop in spans)
        names = [name for turn in self.turns for name in called(self.chat.messages[turn])]
        missing = next((name for name in names if name not in learned), None)
        remedy = "Give one that writes them (--chat-template), or leave such conversations out"
        rule = f"leaves out calls of tools, such as that of {missing!r}, and the assistant would learn to say nothing"
        check(missing is None, f"{where} {rule}. {remedy}.", DataError)


def _checked(messages: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Messages as a template takes them, and the files that their parts name."""
    if not any(isinstance(one, Mapping) and isinstance(one.get("content"), list) for one in messages):
        return check_messages(messages, f"{where}: messages"), ()
    try:
        found, files = check_parts(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    for kind, some in files.items():
        named = all(isinstance(one, str) and one for one in some)
        check(named, f"{where}: parts of type {kind!r} must name files.", DataError)
    return found, tuple(reference(kind, one) for kind, some in files.items() for one in some)


def _marked(text: Rendered, first: int, turns: Sequence[int]) -> tuple[Span, ...] | None:
    """What the template marks, from message `first` on; None if that is nothing, although there are turns."""
    begin = 0
    if first > 0:
        begin = min((start for number, start, _ in text.messages if number >= first), default=len(text.text))
    spans = tuple((start, stop) for start, stop in text.generated or () if start >= begin)
    return spans if spans or not turns else None


def _turns(text: Rendered, count: int, turns: Sequence[int], header: str | None) -> tuple[Span, ...] | None:
    """What the messages `turns` of `count` wrote, each behind the header; None where that isn't certain."""
    spans, writing = [], {number for number, _, _ in text.messages}
    for turn in turns:
        places = [(start, stop) for number, start, stop in text.messages if number == turn]
        next_writes = turn + 1 == count or turn + 1 in writing  # else this turn may have written the next message
        if header is None or len(places) != 1 or not next_writes:
            return None
        start, stop = places[0]
        if turn == 0:  # what begins every conversation may stand before its header
            start = text.text.find(header, start, stop)
        others = any(start < end and begin < stop for number, begin, end in text.messages if number != turn)
        if start < 0 or others or not text.text.startswith(header, start):
            return None
        spans.append((start + len(header), stop))
    return tuple(spans)


def _requested(talks: Sequence[_Talk], template: ChatTemplate) -> Iterator[tuple[Span, ...] | None]:
    """The spans of conversations that are rendered up to each of the assistant's turns as well."""
    for some in _groups(talks):
        parts = [part for talk in some for turn in talk.turns for part in _up_to(talk.chat, turn)]
        texts = iter(template.render_many(parts))
        for talk in some:
            found = [_behind_request(talk, turn, [next(texts) for _ in range(3)]) for turn in talk.turns]
            spans = tuple(span for span in found if span is not None)
            apart = all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
            yield spans if len(spans) == len(found) and apart else None


def _groups(talks: Sequence[_Talk]) -> Iterator[list[_Talk]]:
    """As many conversations as one process may render up to each turn."""
    group, size = [], 0
    for talk in talks:
        more = 3 * len(talk.turns) * len(talk.text.text)
        if group and size + more > CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(talk)
        size += more
    yield from [group] if group else []


def _up_to(chat: Conversation, turn: int) -> list[Conversation]:
    """A conversation before a turn, with the request for it, and with the turn."""
    before, turns = chat.messages[:turn], chat.messages[: turn + 1]
    return [chat._replace(messages=before), chat._replace(messages=before, add_generation_prompt=True),
            chat._replace(messages=turns)]  # fmt: skip


def _behind_request(talk: _Talk, turn: int, parts: Sequence[Rendered | ConversionError]) -> Span | None:
    """Where a turn stands in the whole text: behind as much of the request for it as is there."""
    text, written = talk.text.text, talk.text.messages
    places = [(start, stop) for number, start, stop in written if number == turn]
    before, request, whole = (one.text if isinstance(one, Rendered) else None for one in parts)
    if before is None or request is None or not text.startswith(before):
        return None
    start = len(before) + len(_common(request[len(before) :], text[len(before) :]))
    if turn + 1 == len(talk.chat.messages):
        stop = len(text)
    elif whole is not None and text.startswith(whole) and len(whole) >= start:
        stop = len(whole)
    elif len(places) == 1 and places[0][0] <= start <= places[0][1] and any(one[0] == turn + 1 for one in written):
        stop = places[0][1]
    else:  # this turn may have written the next message, too
        return None
    others = any(start < end and begin < stop for number, begin, end in written if number != turn)
    return None if others else (start, stop)


def _common(request: str, *answers: str) -> str:
    """What all begin with; no half of a token's name, as in `<|user|>` and `<|end|>`, which both begin with `<|`."""
    equal = (len(set(letters)) == 1 for letters in zip(request, *answers, strict=False))
    common = request[: sum(itertools.takewhile(bool, equal))]
    return common if common == request else re.sub(r"<[^<>\s]*\Z", "", common)


def _kind(variables: Mapping[str, Any]) -> str:
    return json.dumps(_settings(variables), sort_keys=True)


def _settings(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables on which the header of an answer may depend."""
    return {name: value for name, value in variables.items() if name not in ("tools", "documents")}


def _probes(variables: Mapping[str, Any]) -> list[Conversation]:
    """A question, the same with a request for an answer, and two questions with answers."""
    question, answer = ({"role": role, "content": ANSWER} for role in ("user", "assistant"))
    settings = _settings(variables)
    return [
        Conversation([question], settings),
        Conversation([question], settings, add_generation_prompt=True),
        Conversation([question, answer] * 2, settings),
    ]


def _header(answers: Sequence[Rendered | ConversionError]) -> str | None:
    """What all answers begin with, as far as a request for an answer ends with it; None if the probes don't tell."""
    texts = [one for one in answers if isinstance(one, Rendered)]
    if len(texts) < 3 or not texts[0].messages:
        return None
    question, request, whole = texts
    end = len(question.text) if request.text.startswith(question.text) else question.messages[0][2]  # it may end it
    begins = [whole.text[start:stop].partition(ANSWER)[0] for number, start, stop in whole.messages if number % 2]
    return _common(request.text[end:], *begins) if begins else None


def encode_spans(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    literal: Sequence[Sequence[Span]] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each text, and which tokens lie in its spans.

    Names of special tokens become these, but for those in the spans `literal` of each text.
    """
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.encode_spans(texts, spans, literal)
    return [_encode_pieces(tokenizer, *one) for one in zip(texts, spans, strict=True)]


def _encode_pieces(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    cuts = [0, *(cut for span in spans for cut in span), len(text)]
    pieces = [tokenizer.encode(text[start:stop]) for start, stop in itertools.pairwise(cuts)]
    inside = [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(pieces)]
    return np.concatenate(pieces), np.concatenate(inside)
