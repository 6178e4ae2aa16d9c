"""Preference data as tokens: pairs of a chosen and a rejected answer, and single answers with a label.

A record has a `prompt` (or `messages`) with `chosen` and `rejected`, or with a `completion` and its `label`. They are
texts, or messages that the chat template renders as the conversations of `chats`. The answer is the text of the
assistant after the prompt, with the token that ends its turn. Texts get no template: their tokens are the tokens of the
prompt, the tokens of the answer, and the token that ends documents.

Malformed records are errors. Records without a signal (equal or empty answers) and records that are longer than a
sequence are left out and counted. Nothing is truncated: an answer would lose its end, and answers might become equal.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from eqx_decoders.data.chats import encode_spans, render_documents, render_requests
from eqx_decoders.data.end_of_turn import note_missing_end
from eqx_decoders.data.sources.documents import (
    ChatDocument,
    Document,
    ReadReport,
    as_messages,
    checked_text,
    template_variables,
    warning_prefix,
)
from eqx_decoders.data.sources.readers import read_records
from eqx_decoders.data.sources.records import COLUMNS, FILES, TRAIN, field_names, normalize_record, split_flags
from eqx_decoders.data.sources.sources import DATA, Paths, find_sources
from eqx_decoders.data.store.shards import separators
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.status import StatusLine, quantity
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer


RECORDS_AT_ONCE = 1024  # records that are rendered and tokenized together
REASONS = {
    "identical": "with equal answers",
    "empty": "with an empty answer",
    "excluded": "with an answer that flags exclude (weight, train)",
    "too_long": "longer than a sequence",
}

Messages = list[Any]


class Answer(NamedTuple):
    """Tokens of a prompt and its answer. `targets` is a mask of the answer, with the token that ends its turn."""

    tokens: Int[np.ndarray, "length"]
    targets: Bool[np.ndarray, "length"]

    @property
    def start(self) -> int:
        """Number of tokens of the prompt."""
        return int(np.argmax(self.targets))

    @property
    def prompt(self) -> Int[np.ndarray, "prompt"]:
        """Tokens of the prompt."""
        return self.tokens[: self.start]


class Example(NamedTuple):
    """Pair of a chosen and a rejected answer, or one answer with its label.

    label: 1 (desirable) or -1 (undesirable); 0 for pairs. margin: margin of the pair for reward models.
    """

    answers: tuple[Answer, ...]
    label: int = 0
    margin: float = 0.0

    @property
    def size(self) -> int:
        """Number of tokens of all answers with their prompts."""
        return sum(len(answer.tokens) for answer in self.answers)


@dataclasses.dataclass(frozen=True)
class Preferences:
    """Examples of at most `seq_len` tokens, either all pairs or all answers with labels, in the order of the records.

    dropped: number of records that were left out, by reason (see `REASONS`). notes: number of answers by warning.
    """

    examples: Sequence[Example]
    seq_len: int
    dropped: Mapping[str, int]
    notes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def paired(self) -> bool:
        """True if the examples are pairs."""
        return self.examples[0].label == 0

    @functools.cached_property
    def content_hash(self) -> str:
        """Hash of the examples, in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            for tokens, targets in example.answers:
                digest.update(len(tokens).to_bytes(8, "little") + tokens.astype("<i4").tobytes() + targets.tobytes())
            digest.update(
                bytes([example.label + 1]) + (np.float64(example.margin).tobytes() if example.margin else b"")
            )
        return digest.hexdigest()

    @property
    def has_margins(self) -> bool:
        """True if some pairs have a margin."""
        return any(example.margin for example in self.examples)

    def describe(self) -> str:
        """Describe the examples, the records that were left out, and warnings."""
        tokens = sum(example.size for example in self.examples)
        targets = sum(int(answer.targets.sum()) for example in self.examples for answer in example.answers)
        examples = quantity(len(self.examples), "pair" if self.paired else "labelled answer")
        line = f"{examples}, {quantity(tokens, 'token')}, {targets:,} of them in answers"
        warning = warning_prefix(sum(self.dropped.values()), len(self.examples))
        notes = [f"warning: {quantity(count, 'answer')}: {note}" for note, count in self.notes.items()]
        return "\n".join([f"{warning}{line}; left out: {_counted(self.dropped) or 'none'}", *notes])


class _Record(NamedTuple):
    """Prompt and answers of a record, which are either all texts or all lists of messages."""

    where: str
    prompt: str | Messages
    answers: tuple[str | Messages, ...]
    label: int
    variables: Mapping[str, Any]
    margin: float = 0.0


def read_pairs(
    path: Paths,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    template: ChatTemplate | None = None,
    flag: str = DATA,
    margins: bool = False,
) -> Preferences:
    """Read pairs, `{"prompt": …, "chosen": …, "rejected": …}`, of at most `seq_len` tokens including both prompts.

    Prompt and answers are texts or lists of messages. With messages, an answer may also be one message or a text.
    Answers may repeat the messages of the prompt. If `prompt` is not a list, the prompt is the common start of both
    answers. margins: read the column `margin`, which contains numbers.

    Raises DataError with file and row for other records, and if no pair is left.
    """
    fields, more = ("chosen", "rejected"), ("margin",) if margins else ()
    return _read(_records(path, flag, fields, _pair, more), path, tokenizer, seq_len, template)


def read_labelled_answers(
    path: Paths, tokenizer: Tokenizer, *, seq_len: int, template: ChatTemplate | None = None, flag: str = DATA
) -> Preferences:
    """Read answers with labels, `{"prompt": …, "completion": …, "label": true}`, of at most `seq_len` tokens.

    The answer of a conversation, `{"messages": …, "label": true}`, is its last message. Records are read as in
    `read_pairs`, which also describes the errors.
    """
    return _read(_records(path, flag, ("completion", "label"), _labelled), path, tokenizer, seq_len, template)


# --- records ----------------------------------------------------------------------------------------------------------


def _records(
    path: Paths,
    flag: str,
    fields: Sequence[str],
    parse: Callable[[Mapping[str, Any], str], _Record],
    more: Sequence[str] = (),
) -> Iterator[_Record]:
    columns = (*COLUMNS, *more)
    for source in find_sources(path, flag):
        for where, raw in read_records(source, columns):
            record = normalize_record(raw, where, "prompt")
            if "completion" in fields:
                record = _with_completion(record)
            missing = [name for name in fields if record.get(name) is None]
            if missing:
                raise DataError(
                    f"{where} has no field {', '.join(map(repr, missing))}: a record needs a prompt with "
                    f"{_listed(fields)}; its fields: {', '.join(field_names(raw)) or 'none'}."
                )
            media = [name for name in FILES if record.get(name)]
            check(not media, f"{where} has {', '.join(media)}: preference data can only contain text.", DataError)
            found = parse(record, where)
            yield found._replace(margin=_margin(record, where)) if "margin" in more else found


def _with_completion(record: dict[str, Any]) -> dict[str, Any]:
    """Split a conversation before its last message, an assistant message, into `prompt` and `completion`.

    LLaMA-Factory and ms-swift write answers with labels as conversations.
    """
    messages = record.get("messages")
    if record.get("completion") is not None or not isinstance(messages, list) or not messages:
        return record
    if messages[-1].get("role") != "assistant":
        return record
    return {**record, "prompt": messages[:-1], "completion": messages[-1:]}


def _listed(fields: Sequence[str]) -> str:
    return " and ".join(map(repr, fields))


def _pair(record: Mapping[str, Any], where: str) -> _Record:
    return _with_prompt(record, where, ("chosen", "rejected"), 0)


def _margin(record: Mapping[str, Any], where: str) -> float:
    margin = record.get("margin")
    number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
    check(margin is None or number, f"{where}: margin={str(margin)[:60]!r} must be a number.", DataError)
    return float(margin or 0.0)


def _labelled(record: Mapping[str, Any], where: str) -> _Record:
    label = record["label"]
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise DataError(f"{where}: label={str(label)[:60]!r} must be true or false, 1 or 0.")
    return _with_prompt(record, where, ("completion",), 1 if label else -1)


def _with_prompt(record: Mapping[str, Any], where: str, fields: Sequence[str], label: int) -> _Record:
    """Return a record with its prompt, which may be the common first messages of its answers."""
    prompt = record["prompt"] if record.get("prompt") is not None else record.get("messages")
    answers = [record[name] for name in fields]
    are_messages = [isinstance(value, list) for value in answers]
    if not isinstance(prompt, list) and not any(are_messages):
        check(prompt is not None, f"{where} has no field 'prompt' for {_listed(fields)}.", DataError)
        texts = [checked_text(value, name, where) for name, value in zip(fields, answers, strict=True)]
        return _Record(where, checked_text(prompt, "prompt", where), tuple(texts), label, {})
    if isinstance(prompt, list):
        conversations = [
            as_messages(value, "assistant", name, where) for name, value in zip(fields, answers, strict=True)
        ]
        if all(split_flags(conversation[: len(prompt)])[0] == split_flags(prompt)[0] for conversation in conversations):
            conversations = [conversation[len(prompt) :] for conversation in conversations]
    else:
        check(
            all(are_messages),
            f"{where}: {_listed(fields)} must all be lists of messages, or all be texts.",
            DataError,
        )
        prompt, conversations = _shared_prompt(prompt, answers, where)
    check(len(prompt) > 0, f"{where}: the prompt of {_listed(fields)} has no messages.", DataError)
    for name, conversation in zip(fields, conversations, strict=True):
        _check_turns(conversation, f"{where}: {name}")
    return _Record(where, prompt, tuple(conversations), label, template_variables(record, where))


def _shared_prompt(prompt: Any, conversations: Sequence[Messages], where: str) -> tuple[Messages, list[Messages]]:
    """Split conversations after their common first messages; without these, the prompt is a user message."""
    max_shared = min(map(len, conversations)) - 1  # the last message is always an answer
    shared = next(
        (n for n in range(max_shared) if any(conversation[n] != conversations[0][n] for conversation in conversations)),
        max(0, max_shared),
    )
    if len(conversations) == 1 or shared == 0:
        check(
            prompt is not None,
            f"{where} has no field 'prompt', and its answers do not start with the same messages.",
            DataError,
        )
        return [{"role": "user", "content": checked_text(prompt, "prompt", where)}], list(conversations)
    return conversations[0][:shared], [conversation[shared:] for conversation in conversations]


def _check_turns(conversation: Messages, where: str) -> None:
    """Raise DataError unless the messages of an answer start and end with an assistant message."""
    for place, turn in (("start", conversation[0]), ("end", conversation[-1])) if conversation else (("start", None),):
        by_assistant = isinstance(turn, dict) and turn.get("role") == "assistant"
        check(
            by_assistant,
            f"{where} must {place} with an assistant message after the prompt, not with {str(turn)[:60]}.",
            DataError,
        )


def _is_empty(answer: str | Messages) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    turns = [turn for turn in answer if isinstance(turn, dict) and turn.get("role") == "assistant"]
    return all(str(turn.get("content")).strip() == "" and not turn.get("tool_calls") for turn in turns)


# --- tokens -----------------------------------------------------------------------------------------------------------


def _read(
    records: Iterator[_Record], path: Paths, tokenizer: Tokenizer, seq_len: int, template: ChatTemplate | None
) -> Preferences:
    examples, dropped, name = list[Example](), dict.fromkeys(REASONS, 0), "records"
    report = ReadReport()
    with StatusLine("tokenizing preferences", remains="nothing of them is kept"):
        while group := list(itertools.islice(records, RECORDS_AT_ONCE)):
            name = _name(group[0].label == 0)
            for example in _examples(group, tokenizer, template, seq_len, report):
                if isinstance(example, Example):
                    examples.append(example)
                else:
                    dropped[example] += 1
    reasons = _counted(dropped) or "there are no records"
    if not examples:
        remedy = f" Raise --seq-len {seq_len}, or give other data." if dropped["too_long"] else ""
        raise DataError(f"none of the {sum(dropped.values()):,} {name} in {path} can be trained on: {reasons}.{remedy}")
    return Preferences(examples, seq_len, dropped, dict(report.notes))


def _name(paired: bool) -> str:
    return "pairs" if paired else "labelled answers"


def _counted(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in dropped.items() if count)


def _examples(
    records: Sequence[_Record],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    seq_len: int,
    report: ReadReport,
) -> Iterator[Example | str]:
    """Yield the example of each record, or the reason for leaving it out."""
    reasons = [_reason(record.answers, map(_is_empty, record.answers)) for record in records]
    useful = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
    conversations = [each for each in useful if isinstance(each.prompt, list)]
    chats = iter(_encode_chats(conversations, tokenizer, template, report))
    texts = iter(_encode_texts([each for each in useful if isinstance(each.prompt, str)], tokenizer, report))
    for record, reason in zip(records, reasons, strict=True):
        if reason is not None:
            yield reason
            continue
        answers = next(chats if isinstance(record.prompt, list) else texts)
        example = Example(answers, record.label, record.margin)
        same = [answer.tokens.tolist() for answer in answers]
        reason = _reason(same, (not answer.targets.any() for answer in answers))
        if reason == "empty" and any(map(_is_excluded, record.answers)):
            reason = "excluded"
        yield reason or ("too_long" if example.size > seq_len else example)


def _reason(answers: Sequence[Any], empty: Iterable[bool]) -> str | None:
    """Return the reason for leaving out a record with equal or empty answers; None for other records."""
    if len(answers) == 2 and answers[0] == answers[1]:
        return "identical"
    return "empty" if any(empty) else None


def _is_excluded(answer: str | Messages) -> bool:
    """Return whether flags exclude all assistant messages from training."""
    if isinstance(answer, str):
        return False
    turns = [turn for turn in answer if isinstance(turn, dict) and turn.get("role") == "assistant"]
    return bool(turns) and all(turn.get(TRAIN) is False for turn in turns)


def _encode_chats(
    records: Sequence[_Record], tokenizer: Tokenizer, template: ChatTemplate | None, report: ReadReport
) -> Iterator[tuple[Answer, ...]]:
    documents = [
        [_document(record, answer, f"{number} {index}") for index, answer in enumerate(record.answers)]
        for number, record in enumerate(records)
    ]
    counts = ReadReport(notes=report.notes)  # dropped answers are counted with their records
    rendered = list(render_documents(itertools.chain(*documents), template, counts))
    requests = [] if template is None else render_requests([each[0] for each in documents], template)
    parts = [(document.text or "", document.spans or (), document.literal) for document in rendered]
    encoded = encode_spans(tokenizer, *zip(*parts, strict=True), report=report) if parts else []
    for ids, targets in encoded:
        note_missing_end(tokenizer, ids, targets, report)
    pairs = {document.key: (document, ids) for document, ids in zip(rendered, encoded, strict=True)}
    for each, request in zip(documents, requests, strict=True):
        answers = [pairs.get(document.key) for document in each]
        for answer in answers:
            if answer is not None and template is not None:
                _check_prompt(answer[0], request, template)
        yield tuple(_nothing() if answer is None else _answer(*answer[1]) for answer in answers)


def _document(record: _Record, answer: str | Messages, key: str) -> Document:
    chat = ChatDocument.create([*record.prompt, *answer], len(record.prompt), record.variables)
    return Document(record.where, key=key, chat=chat)


def _check_prompt(document: Document, request: str, template: ChatTemplate) -> None:
    """Raise DataError unless the text before an answer equals the prompt at inference."""
    check(not document.media, f"{document.where} has images or other files, but preferences must be texts.", DataError)
    start = min(start for start, stop in document.spans or () if start < stop)
    before = (document.text or "")[:start]
    check(
        request.startswith(before) or before.startswith(request),
        f"{document.where}: {template.where} renders the prompt differently when an answer follows. Remove the record, "
        "or give a template that does not change earlier messages (--chat-template).",
        DataError,
    )


def _answer(ids: np.ndarray, targets: np.ndarray) -> Answer:
    """Return an answer. The first token is not a target, because no token predicts it."""
    return Answer(ids.astype(np.int32), targets & (np.arange(len(ids)) > 0))


def _nothing() -> Answer:
    return Answer(np.zeros(0, np.int32), np.zeros(0, bool))


def _encode_texts(records: Sequence[_Record], tokenizer: Tokenizer, report: ReadReport) -> Iterator[tuple[Answer, ...]]:
    if not records:
        return
    start, end = separators(tokenizer)
    texts = [(str(record.prompt), str(answer)) for record in records for answer in record.answers]
    spans = [((len(prompt), len(prompt) + len(answer)),) for prompt, answer in texts]
    encoded = iter(encode_spans(tokenizer, [prompt + answer for prompt, answer in texts], spans, report=report))
    for record in records:
        answers = []
        for _ in record.answers:
            ids, targets = next(encoded)
            before = [] if tuple(ids[: len(start)].tolist()) == start else start
            after = [end] if end is not None and ids[-1:].tolist() != [end] else []
            mask = np.concatenate([np.zeros(len(before), bool), targets, np.ones(len(after), bool)])
            answers.append(_answer(np.concatenate([before, ids, after]), mask))
        yield tuple(answers)
