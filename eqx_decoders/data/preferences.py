"""Preference data as tokens: pairs of a chosen and a rejected completion, and single completions with a label.

A record has a `prompt` (or `messages`) with `chosen` and `rejected`, or with a `completion` and its `label`. The fields
are texts, or lists of messages, which are rendered by the chat template as in `chats`. The completion of a conversation
is the assistant's text after the prompt, with the end-of-turn token. Texts are tokenized without a template: the tokens
of the prompt, the tokens of the completion, and the end-of-sequence token.

Malformed records raise DataError. Records without a training signal (equal or empty completions) and records that are
longer than a sequence are skipped and counted. Records are not truncated, because a completion would lose its end, and
the completions of a pair could become equal.
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
from eqx_decoders.data.sources.records import COLUMNS, MEDIA_FIELDS, TRAIN, field_names, normalize_record, split_flags
from eqx_decoders.data.sources.sources import DATA, Paths, find_sources
from eqx_decoders.data.store.shards import separators
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.status import StatusLine, quantity
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer


RECORDS_PER_CHUNK = 1024  # records that are rendered and tokenized together
REASONS = {  # why a record is skipped: description for messages
    "identical": "with equal completions",
    "empty": "with an empty completion",
    "excluded": "with a completion that is excluded by the fields 'weight' or 'train'",
    "too_long": "longer than a sequence",
}

Messages = list[Any]


class Completion(NamedTuple):
    """Tokens of a prompt followed by its completion.

    `targets` is True at the tokens of the completion, including the end-of-turn token.
    """

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
    """A pair of a chosen and a rejected completion, or a completion with a label.

    **Fields:**

    - `completions`: `(chosen, rejected)`, or `(completion,)`.
    - `label`: 1 (desirable) or -1 (undesirable); 0 for pairs.
    - `margin`: margin of a pair in the loss of a reward model; 0.0 if the record has no margin.
    """

    completions: tuple[Completion, ...]
    label: int = 0
    margin: float = 0.0

    @property
    def size(self) -> int:
        """Number of tokens of all completions with their prompts."""
        return sum(len(completion.tokens) for completion in self.completions)


@dataclasses.dataclass(frozen=True)
class Preferences:
    """Tokenized preference examples, in the order of the records: only pairs, or only labeled completions.

    **Arguments:**

    - `examples`: at least one example; each has at most `seq_len` tokens, including the prompts.
    - `dropped`: number of skipped records by reason, a key of `REASONS`.
    - `notes`: number of affected completions by warning.
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
        """Hash of the tokens, targets, labels and margins of all examples, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            for tokens, targets in example.completions:
                digest.update(len(tokens).to_bytes(8, "little") + tokens.astype("<i4").tobytes() + targets.tobytes())
            digest.update(bytes([example.label + 1]))
            if example.margin:
                digest.update(np.float64(example.margin).tobytes())
        return digest.hexdigest()

    @property
    def has_margins(self) -> bool:
        """True if some pairs have a margin."""
        return any(example.margin for example in self.examples)

    def describe(self) -> str:
        """Return a summary with the counts of examples, tokens and skipped records, and the warnings."""
        tokens = sum(example.size for example in self.examples)
        targets = sum(int(completion.targets.sum()) for example in self.examples for completion in example.completions)
        examples = quantity(len(self.examples), "pair" if self.paired else "labeled completion")
        line = f"{examples}, {quantity(tokens, 'token')}, including {targets:,} in completions"
        warning = warning_prefix(sum(self.dropped.values()), len(self.examples))
        notes = [f"warning: {quantity(count, 'completion')}: {note}" for note, count in self.notes.items()]
        return "\n".join([f"{warning}{line}; skipped records: {_count_by_reason(self.dropped) or 'none'}", *notes])


class _Record(NamedTuple):
    """Prompt and completions of a record: all of them texts, or all of them lists of messages.

    `where`: location (file and row) of the record. `variables`: variables for the chat template.
    """

    where: str
    prompt: str | Messages
    completions: tuple[str | Messages, ...]
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
    """Read and tokenize pairs from records such as `{"prompt": …, "chosen": …, "rejected": …}`.

    The prompt and the completions are texts or lists of messages. If the prompt is a list of messages, a completion may
    also be a single message or a text. Completions may repeat the messages of the prompt. If completions are lists of
    messages and `prompt` is not, the prompt consists of the messages with which both completions start.

    **Arguments:**

    - `path`: files, directories or data sets with the records.
    - `seq_len`: maximum number of tokens of a pair, including the prompt in front of each completion.
    - `template`: chat template, which is needed only for messages.
    - `flag`: command-line option named in errors about `path`.
    - `margins`: read the numeric column `margin`.

    Raises DataError, with file and row, if a record is invalid, and if all records are skipped.
    """
    optional_fields = ("margin",) if margins else ()
    records = _records(path, flag, ("chosen", "rejected"), _pair, optional_fields)
    return _read(records, path, tokenizer, seq_len, template)


def read_labeled_completions(
    path: Paths, tokenizer: Tokenizer, *, seq_len: int, template: ChatTemplate | None = None, flag: str = DATA
) -> Preferences:
    """Read and tokenize records such as `{"prompt": …, "completion": …, "label": true}`.

    The completion of a conversation, `{"messages": …, "label": true}`, is its last message. `seq_len` is the maximum
    number of tokens of a prompt with its completion. See `read_pairs` for the other arguments and the errors.
    """
    records = _records(path, flag, ("completion", "label"), _labeled_completion)
    return _read(records, path, tokenizer, seq_len, template)


# --- records ----------------------------------------------------------------------------------------------------------


def _records(
    path: Paths,
    flag: str,
    fields: Sequence[str],
    parse: Callable[[Mapping[str, Any], str], _Record],
    optional_fields: Sequence[str] = (),
) -> Iterator[_Record]:
    """Yield the parsed records. Raises DataError if a field of `fields` is missing."""
    columns = (*COLUMNS, *optional_fields)
    for source in find_sources(path, flag):
        for where, raw in read_records(source, columns):
            record = normalize_record(raw, where, "prompt")
            if "completion" in fields:
                record = _with_completion(record)
            missing = [name for name in fields if record.get(name) is None]
            if missing:
                raise DataError(
                    f"{where} has no field {', '.join(map(repr, missing))}. A record needs a prompt, {_join(fields)}. "
                    f"This record has the fields: {', '.join(field_names(raw)) or 'none'}."
                )
            media = [name for name in MEDIA_FIELDS if record.get(name)]
            check(
                not media,
                f"{where} has the fields {', '.join(media)}, but preference data can only contain text.",
                DataError,
            )
            parsed = parse(record, where)
            yield parsed._replace(margin=_margin(record, where)) if "margin" in optional_fields else parsed


def _with_completion(record: dict[str, Any]) -> dict[str, Any]:
    """Split the field `messages` into `prompt` and `completion` if the last message is an assistant message.

    LLaMA-Factory and ms-swift write labeled completions as conversations.
    """
    messages = record.get("messages")
    if record.get("completion") is not None or not isinstance(messages, list) or not messages:
        return record
    if messages[-1].get("role") != "assistant":
        return record
    return {**record, "prompt": messages[:-1], "completion": messages[-1:]}


def _join(fields: Sequence[str]) -> str:
    return " and ".join(map(repr, fields))


def _pair(record: Mapping[str, Any], where: str) -> _Record:
    return _with_prompt(record, where, ("chosen", "rejected"), 0)


def _margin(record: Mapping[str, Any], where: str) -> float:
    margin = record.get("margin")
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
    check(margin is None or is_number, f"{where}: margin={str(margin)[:60]!r} must be a finite number.", DataError)
    return float(margin or 0.0)


def _labeled_completion(record: Mapping[str, Any], where: str) -> _Record:
    label = record["label"]
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise DataError(f"{where}: label={str(label)[:60]!r} must be true or false, 1 or 0.")
    return _with_prompt(record, where, ("completion",), 1 if label else -1)


def _with_prompt(record: Mapping[str, Any], where: str, fields: Sequence[str], label: int) -> _Record:
    """Return the prompt and the completions of a record as a `_Record`.

    Without a list of messages in `prompt` or `messages`, the prompt of conversations is the messages with which all
    completions start.
    """
    prompt = record["prompt"] if record.get("prompt") is not None else record.get("messages")
    completions = [record[name] for name in fields]
    are_messages = [isinstance(value, list) for value in completions]
    if not isinstance(prompt, list) and not any(are_messages):
        check(prompt is not None, f"{where} has {_join(fields)}, but no field 'prompt'.", DataError)
        texts = [checked_text(value, name, where) for name, value in zip(fields, completions, strict=True)]
        return _Record(where, checked_text(prompt, "prompt", where), tuple(texts), label, {})
    if isinstance(prompt, list):
        conversations = [
            as_messages(value, "assistant", name, where) for name, value in zip(fields, completions, strict=True)
        ]
        if all(split_flags(conversation[: len(prompt)])[0] == split_flags(prompt)[0] for conversation in conversations):
            conversations = [conversation[len(prompt) :] for conversation in conversations]
    else:
        check(
            all(are_messages),
            f"{where}: {_join(fields)} must be either all lists of messages or all texts.",
            DataError,
        )
        prompt, conversations = _shared_prompt(prompt, completions, where)
    check(len(prompt) > 0, f"{where}: the prompt must have at least one message.", DataError)
    for name, conversation in zip(fields, conversations, strict=True):
        _check_roles(conversation, f"{where}: {name}")
    return _Record(where, prompt, tuple(conversations), label, template_variables(record, where))


def _shared_prompt(prompt: Any, conversations: Sequence[Messages], where: str) -> tuple[Messages, list[Messages]]:
    """Split conversations after the messages with which all of them start.

    Returns the prompt and the completions. If the conversations have different first messages, or if there is only one
    conversation, the prompt is a user message with the text `prompt`.
    """
    max_shared = min(map(len, conversations)) - 1  # the last message always belongs to the completion
    shared = next(
        (n for n in range(max_shared) if any(conversation[n] != conversations[0][n] for conversation in conversations)),
        max(0, max_shared),
    )
    if len(conversations) == 1 or shared == 0:
        check(
            prompt is not None,
            f"{where} has no field 'prompt', and the completions do not start with the same messages.",
            DataError,
        )
        return [{"role": "user", "content": checked_text(prompt, "prompt", where)}], list(conversations)
    return conversations[0][:shared], [conversation[shared:] for conversation in conversations]


def _check_roles(completion: Messages, where: str) -> None:
    """Raise DataError unless the first and the last message of a completion are assistant messages."""
    check(bool(completion), f"{where} must have an assistant message after the prompt.", DataError)
    for position, message in ("start", completion[0]), ("end", completion[-1]):
        check(
            isinstance(message, dict) and message.get("role") == "assistant",
            f"{where} must {position} with an assistant message after the prompt, not with {str(message)[:60]}.",
            DataError,
        )


def _is_empty(completion: str | Messages) -> bool:
    if isinstance(completion, str):
        return not completion.strip()
    messages = _assistant_messages(completion)
    return all(str(message.get("content")).strip() == "" and not message.get("tool_calls") for message in messages)


def _assistant_messages(completion: Messages) -> list[dict[str, Any]]:
    return [message for message in completion if isinstance(message, dict) and message.get("role") == "assistant"]


# --- tokens -----------------------------------------------------------------------------------------------------------


def _read(
    records: Iterator[_Record], path: Paths, tokenizer: Tokenizer, seq_len: int, template: ChatTemplate | None
) -> Preferences:
    examples = list[Example]()
    dropped = dict.fromkeys(REASONS, 0)
    name = "records"
    report = ReadReport()
    with StatusLine("tokenizing preferences", remains="no tokenized preferences were saved"):
        while chunk := list(itertools.islice(records, RECORDS_PER_CHUNK)):
            name = "pairs" if chunk[0].label == 0 else "labeled completions"
            for example_or_reason in _examples(chunk, tokenizer, template, seq_len, report):
                if isinstance(example_or_reason, Example):
                    examples.append(example_or_reason)
                else:
                    dropped[example_or_reason] += 1
    reasons = _count_by_reason(dropped) or "there are no records"
    if not examples:
        remedy = f" Raise --seq-len {seq_len}, or use other data." if dropped["too_long"] else ""
        raise DataError(f"none of the {sum(dropped.values()):,} {name} in {path} can be trained on: {reasons}.{remedy}")
    return Preferences(examples, seq_len, dropped, dict(report.notes))


def _count_by_reason(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in dropped.items() if count)


def _examples(
    records: Sequence[_Record],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    seq_len: int,
    report: ReadReport,
) -> Iterator[Example | str]:
    """Yield the example of each record, or the reason for skipping the record (a key of `REASONS`)."""
    reasons = [_skip_reason(record.completions, map(_is_empty, record.completions)) for record in records]
    usable = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
    chat_records = [record for record in usable if isinstance(record.prompt, list)]
    text_records = [record for record in usable if isinstance(record.prompt, str)]
    chats = iter(_encode_chats(chat_records, tokenizer, template, report))
    texts = iter(_encode_texts(text_records, tokenizer, report))
    for record, reason in zip(records, reasons, strict=True):
        if reason is not None:
            yield reason
            continue
        completions = next(chats if isinstance(record.prompt, list) else texts)
        example = Example(completions, record.label, record.margin)
        token_ids = [completion.tokens.tolist() for completion in completions]
        reason = _skip_reason(token_ids, (not completion.targets.any() for completion in completions))
        if reason == "empty" and any(map(_is_excluded, record.completions)):
            reason = "excluded"
        yield reason or ("too_long" if example.size > seq_len else example)


def _skip_reason(completions: Sequence[Any], are_empty: Iterable[bool]) -> str | None:
    """Return "identical" or "empty" for records without a training signal; None for other records."""
    if len(completions) == 2 and completions[0] == completions[1]:
        return "identical"
    return "empty" if any(are_empty) else None


def _is_excluded(completion: str | Messages) -> bool:
    """Return whether every assistant message is excluded from training by the field `train` or `weight`."""
    if isinstance(completion, str):
        return False
    messages = _assistant_messages(completion)
    return bool(messages) and all(message.get(TRAIN) is False for message in messages)


def _encode_chats(
    records: Sequence[_Record], tokenizer: Tokenizer, template: ChatTemplate | None, report: ReadReport
) -> Iterator[tuple[Completion, ...]]:
    documents = [
        [_document(record, completion, f"{number} {index}") for index, completion in enumerate(record.completions)]
        for number, record in enumerate(records)
    ]
    document_report = ReadReport(notes=report.notes)  # skipped completions are counted once per record, in `_read`
    rendered = list(render_documents(itertools.chain(*documents), template, document_report))
    requests = [] if template is None else render_requests([completions[0] for completions in documents], template)
    parts = [(document.text or "", document.spans or (), document.literal) for document in rendered]
    encoded = encode_spans(tokenizer, *zip(*parts, strict=True), report=report) if parts else []
    for ids, targets in encoded:
        note_missing_end(tokenizer, ids, targets, report)
    rendered_by_key = {document.key: document for document in rendered}
    encoded_by_key = {document.key: tokens for document, tokens in zip(rendered, encoded, strict=True)}
    for record_documents, request in zip(documents, requests, strict=True):
        completions = list[Completion]()
        for document in record_documents:
            if document.key not in encoded_by_key:
                completions.append(Completion(np.zeros(0, np.int32), np.zeros(0, bool)))
                continue
            if template is not None:
                _check_prompt(rendered_by_key[document.key], request, template)
            completions.append(_completion(*encoded_by_key[document.key]))
        yield tuple(completions)


def _document(record: _Record, completion: str | Messages, key: str) -> Document:
    chat = ChatDocument.create([*record.prompt, *completion], len(record.prompt), record.variables)
    return Document(record.where, key=key, chat=chat)


def _check_prompt(document: Document, request: str, template: ChatTemplate) -> None:
    """Raise DataError unless the rendered text before the completion is the prompt that is rendered at inference."""
    check(
        not document.media,
        f"{document.where} has images or other media, but preference data can only contain text.",
        DataError,
    )
    start = min(start for start, stop in document.spans or () if start < stop)
    before = (document.text or "")[:start]
    check(
        request.startswith(before) or before.startswith(request),
        f"{document.where}: {template.where} renders the prompt differently when a completion follows. Remove the "
        "record, or use a chat template that does not change earlier messages (--chat-template).",
        DataError,
    )


def _completion(ids: np.ndarray, targets: np.ndarray) -> Completion:
    """Return a `Completion`. The first token is not a target, because no token predicts it."""
    return Completion(ids.astype(np.int32), targets & (np.arange(len(ids)) > 0))


def _encode_texts(
    records: Sequence[_Record], tokenizer: Tokenizer, report: ReadReport
) -> Iterator[tuple[Completion, ...]]:
    if not records:
        return
    prefix_ids, eos_id = separators(tokenizer)
    texts = [(str(record.prompt), str(completion)) for record in records for completion in record.completions]
    spans = [((len(prompt), len(prompt) + len(completion)),) for prompt, completion in texts]
    encoded = iter(encode_spans(tokenizer, [prompt + completion for prompt, completion in texts], spans, report=report))
    for record in records:
        completions = []
        for _ in record.completions:
            ids, targets = next(encoded)
            before = [] if tuple(ids[: len(prefix_ids)].tolist()) == prefix_ids else prefix_ids
            after = [eos_id] if eos_id is not None and ids[-1:].tolist() != [eos_id] else []
            mask = np.concatenate([np.zeros(len(before), bool), targets, np.ones(len(after), bool)])
            completions.append(_completion(np.concatenate([before, ids, after]), mask))
        yield tuple(completions)
