"""Records (JSON objects, rows of tables) as documents: texts, conversations, prompts with their completions."""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.sources.records import (
    COLUMNS,
    FILES,
    OPENAI_PAIRS,
    VARIABLES,
    check_unicode,
    field_names,
    normalize_record,
    split_flags,
)
from eqx_decoders.errors import DataError, check


SET_FIELD = (
    "Set --text-field (DataConfig.text_field) to the column with the text. For questions with answers, rename the "
    "columns to 'instruction' and 'output' (written by the chat template) or 'prompt' and 'completion' (plain text)"
)
PAIRS = "To train on preference pairs, use --method dpo or another preference method"
PAIR_FIELDS = (("chosen", "rejected"), tuple(OPENAI_PAIRS))
NO_TEXT = "a text or a list of messages"

# Reasons for which records are left out, and their description in reports. The reason no_assistant_message is followed
# by the roles of the conversation: "no_assistant_message: human, user".
DROP_REASONS = {
    "empty_text": "with an empty text",
    "no_messages": "without messages",
    "no_prompt": "without a prompt",
    "empty_completion": "with an empty completion",
    "no_assistant_message": "without an assistant message",
    "excluded": "whose assistant messages are all excluded by flags (weight, train)",
    "empty_answers": "with empty answers",
}

LARGE_SHARE = 0.1  # share of records left out above which a report starts with "warning"


@dataclasses.dataclass
class ReadReport:
    """Number of records left out by reason (`dropped`, see `DROP_REASONS`), and of records with warnings (`notes`)."""

    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def lines(self, read: int) -> list[str]:
        """Return a sentence for each kind of count. read: number of documents that were not left out."""
        total, lines = sum(self.dropped.values()), []
        if total:
            warning = warning_prefix(total, read)
            lines.append(f"{warning}{total:,} of {read + total:,} records are left out: {counted(self.dropped)}")
        return lines + [f"warning: {count:,} of {read:,} records: {note}" for note, count in self.notes.most_common()]


def warning_prefix(dropped: int, read: int) -> str:
    """Return "warning: " if more than LARGE_SHARE of the records were left out, else an empty string."""
    return "warning: " if dropped > LARGE_SHARE * (read + dropped) else ""


def counted(counts: Mapping[str, int]) -> str:
    """Return `3 with an empty text, 1 without …` for counts of `DROP_REASONS`, the largest count first."""
    phrases = []
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        kind, _, roles = reason.partition(": ")
        phrases.append(f"{count:,} {DROP_REASONS[kind]}" + (f" (roles: {roles})" if roles else ""))
    return ", ".join(phrases)


class ChatDocument(NamedTuple):
    """Conversation whose assistant messages from `messages[first]` on are trained on, except those in `excluded`.

    `variables` are other variables of the template, such as `tools`.
    """

    messages: list[Any]
    first: int = 0
    variables: dict[str, Any] = {}  # noqa: RUF012 - never changed
    excluded: tuple[int, ...] = ()

    @classmethod
    def create(cls, messages: Sequence[Any], first: int, variables: Mapping[str, Any]) -> "ChatDocument":
        """Return the document of normalized messages. Messages with `train: False` are excluded from training."""
        plain, excluded = split_flags(messages)
        return cls(plain, first, dict(variables), tuple(number for number in excluded if number >= first))


class Document(NamedTuple):
    """Document: a text, tokens without separators, or a conversation.

    - `where`: location for error messages.
    - `key`: text to be hashed instead of the content for the split.
    - `spans`: spans (start, stop) of `text` whose tokens are targets; None: the complete text.
    - `literal`: spans of `text` in which names of special tokens are plain text.
    - `chat`: conversation; a chat template renders its text (see `data.chats`).
    - `media`: references to files. Relative paths start at `folder` (None: the source is remote).
    - `known_hash`: split hash of the document as it was read.
    """

    where: str
    text: str | None = None
    tokens: np.ndarray | None = None
    key: str | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    literal: tuple[tuple[int, int], ...] = ()
    chat: ChatDocument | None = None
    media: tuple[str, ...] = ()
    folder: Path | None = None
    known_hash: float | None = None

    @property
    def size(self) -> int:
        """Number of characters of the text, or of bytes of the tokens."""
        return len(self.text or "") if self.tokens is None else self.tokens.nbytes

    def split_hash(self) -> float:
        """Return a hash of the document in [0, 1), which decides whether the document is held out.

        It is equal on every machine, and uniform over documents. The document is hashed as it was read, before a chat
        template or the placeholders of files change it.
        """
        if self.known_hash is not None:
            return self.known_hash
        if self.key is not None:
            content = self.key.encode()
        elif self.tokens is not None:
            content = self.tokens.astype("<i8").tobytes()
        elif self.chat is not None:
            chat = self.chat if self.chat.excluded else self.chat[:3]
            content = json.dumps(chat, sort_keys=True).encode()
        else:
            content = (self.text or "").encode()
        if self.media:  # many images have the same question
            content += json.dumps(self.media).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big") / 2**48


def record_documents(
    records: Iterable[tuple[str, Any]], field: str, *, report: ReadReport | None = None
) -> Iterator[Document]:
    """Yield the documents of records: JSON objects or rows of a table, with their location for error messages.

    Records without targets are left out, and counted in `report`.
    """
    report = ReadReport() if report is None else report
    for where, record in records:
        normalized = normalize_record(record, where, field)
        reason = _reason_for_null(record, normalized, field)
        document = _document(normalized, field, where, field_names(record)) if reason is None else None
        reason = reason if document is None else _reason_to_drop(document)
        if document is not None and reason is None:
            yield document
        else:
            report.dropped[str(reason)] += 1


def _reason_for_null(record: Mapping[str, Any], normalized: Mapping[str, Any], field: str) -> str | None:
    """Return the reason for leaving out a record whose text and message fields are all null; None for other records."""
    if _has_form(list(normalized), field) or {"chosen", "rejected"} <= normalized.keys():
        return None
    reasons = {field: "empty_text", "messages": "no_messages", "conversations": "no_messages"}
    reasons |= {"prompt": "no_prompt", "completion": "empty_completion"}
    reasons |= {"instruction": "no_prompt", "output": "empty_completion"}
    nulls = (reason for name, reason in reasons.items() if name in record and record[name] is None)
    return next(nulls, None)


def _reason_to_drop(document: Document) -> str | None:
    if document.chat is not None:
        return None if document.chat.messages else "no_messages"
    if not document.text:
        return "empty_text"
    return None if document.spans is None or document.spans[0][0] < document.spans[0][1] else "empty_completion"


def used_columns(columns: Sequence[str], field: str, where: str) -> list[str]:
    """Return the columns of a table that documents need. Raises DataError if the table has none of them."""
    known = [name for name in dict.fromkeys((field, *COLUMNS)) if name in columns]
    if not _has_form(known, field):
        remedy = PAIRS if _is_pair(columns) else SET_FIELD
        raise DataError(f"{where} has no column {field!r}; its columns: {', '.join(columns)}. {remedy}.")
    return known


def is_record(value: Any, field: str) -> bool:
    """Return whether the object is a record of a document."""
    return isinstance(value, dict) and _has_form([name for name in value if value[name] is not None], field)


def _is_pair(names: Container[str]) -> bool:
    return any(chosen in names and rejected in names for chosen, rejected in PAIR_FIELDS)


def _has_form(names: Sequence[str], field: str) -> bool:
    forms = ((field,), ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
    return any(all(name in names for name in form) for form in forms)


def parsed(content: bytes, where: str) -> Any:
    """Parse JSON. Raises DataError."""
    try:
        return json.loads(decode(content, where))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from error


def _document(record: dict[str, Any], field: str, where: str, fields: Sequence[str]) -> Document:
    """Make a document from the text field of a normalized record, `messages`, or `prompt` and `completion`.

    fields: names of the fields before normalization, for messages.
    """
    if field in record:
        document = _text_or_messages(record, field, where)
    elif "messages" in record:
        document = _text_or_messages(record, "messages", where)
    elif "prompt" in record and "completion" in record:
        document = _pair(record, where)
    else:
        remedy = PAIRS if _is_pair(fields) else SET_FIELD
        raise DataError(f"{where} has no field {field!r}; its fields: {', '.join(fields) or 'none'}. {remedy}.")
    return document._replace(media=_files(record, where))


def _text_or_messages(record: dict[str, Any], field: str, where: str) -> Document:
    value = record[field]
    if isinstance(value, list):
        if isinstance(record.get("label"), bool):
            raise _label_error(record["label"], where)
        return Document(where, chat=ChatDocument.create(value, 0, template_variables(record, where)))
    return Document(where, checked_text(value, field, where))


def _pair(record: dict[str, Any], where: str) -> Document:
    if isinstance(record.get("label"), bool | int | float) and record["label"] in (0, 1):
        raise _label_error(record["label"], where)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        prompt, completion = (
            as_messages(prompt, "user", "prompt", where),
            as_messages(completion, "assistant", "completion", where),
        )
        return Document(
            where, chat=ChatDocument.create(prompt + completion, len(prompt), template_variables(record, where))
        )
    text = checked_text(prompt, "prompt", where)
    whole = text + checked_text(completion, "completion", where)
    return Document(where, whole, spans=((len(text), len(whole)),))


def _label_error(label: Any, where: str) -> DataError:
    return DataError(
        f"{where}: label={label} marks a completion as desirable or undesirable, which this method does not use. Train "
        "with --method kto, or remove the field and the undesirable completions."
    )


def as_messages(value: Any, role: str, field: str, where: str) -> list[Any]:
    """Return a list of messages unchanged, and a text as one message of `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": checked_text(value, field, where)}]


def reference(kind: str, name: str, digest: str = "") -> str:
    """Return the reference to a file in `Document.media`: the name of an image, or kind and name of another file.

    After tokenization the reference also contains the digest of the file.
    """
    if digest:
        return f"{kind}\0{name}\0{digest}"
    return name if kind == "image" else f"{kind}\0{name}"


def parse_reference(text: str) -> tuple[str, str, str]:
    """Return kind, name and digest of a `reference`. A reference without digest returns an empty digest."""
    if "\0" not in text:
        return "image", text, ""
    kind, name, *digest = text.split("\0")
    return kind, name, "".join(digest)


def _files(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    references: list[str] = []
    for field, kind in FILES.items():
        names = record.get(field)
        valid = names is None or (isinstance(names, list) and all(isinstance(name, str) and name for name in names))
        check(
            valid,
            f"{where}: field {field!r} (or {kind!r}) must be a list of paths of {kind} files. Save the files and list "
            "their paths, or remove the field.",
            DataError,
        )
        references += [reference(kind, name) for name in names or ()]
    return tuple(references)


def template_variables(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the template variables of a record. `tools` may be a JSON text."""
    variables = {name: record[name] for name in VARIABLES if record.get(name)}
    if isinstance(variables.get("tools"), str):
        variables["tools"] = parsed(variables["tools"].encode(), f"{where}: field 'tools'")
    more = variables.pop("chat_template_kwargs", {})
    check(isinstance(more, dict), f"{where}: field 'chat_template_kwargs' must be a JSON object.", DataError)
    return {**variables, **more}


def checked_text(value: Any, field: str, where: str) -> str:
    """Return `value`, which must be a Unicode text. Raises DataError."""
    kind = type(value).__name__
    check(isinstance(value, str), f"{where}: field {field!r} must be {NO_TEXT}, not {kind}.", DataError)
    check_unicode(value, field, where)
    return value


def decode(content: bytes, where: str) -> str:
    """Decode UTF-8, without a byte-order mark. Raises DataError."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}. Convert the file, or remove it.") from error
