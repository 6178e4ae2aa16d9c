"""Convert records (JSON objects, rows of tables) to documents: texts, conversations, or prompts with completions."""

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
    MEDIA_FIELDS,
    OPENAI_PAIRS,
    VARIABLES,
    check_unicode,
    field_names,
    normalize_record,
    split_flags,
)
from eqx_decoders.errors import DataError, check


SET_TEXT_FIELD = (
    "Set --text-field (DataConfig.text_field) to the column with the text. For questions with answers, rename the "
    "columns to 'instruction' and 'output' (rendered by the chat template) or 'prompt' and 'completion' (plain text)"
)
USE_PREFERENCE_METHOD = "To train on preference pairs, use --method dpo or another preference method"
PAIR_FIELDS = (("chosen", "rejected"), tuple(OPENAI_PAIRS))

# Why a record is skipped, and the description in reports. The reason no_assistant_message may be followed by the roles
# of the conversation: "no_assistant_message: human, user". The keys are stored with tokenized data: do not rename them.
DROP_REASONS = {
    "empty_text": "with an empty text",
    "no_messages": "without messages",
    "no_prompt": "without a prompt",
    "empty_completion": "with an empty completion",
    "no_assistant_message": "without an assistant message",
    "excluded": "in which the fields 'weight' or 'train' exclude all assistant messages",
    "empty_answers": "in which all assistant messages are empty",
}

WARNING_SHARE = 0.1  # a report starts with "warning" if a larger share of the records is skipped


@dataclasses.dataclass
class ReadReport:
    """Counts of skipped records and of records with warnings.

    - `dropped`: number of skipped records by reason, a key of `DROP_REASONS`.
    - `notes`: number of records by warning.
    """

    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def lines(self, read: int) -> list[str]:
        """Return the lines of the report. `read`: number of records that were not skipped."""
        skipped = sum(self.dropped.values())
        lines = []
        if skipped:
            warning = warning_prefix(skipped, read)
            reasons = describe_drop_counts(self.dropped)
            lines.append(f"{warning}{skipped:,} of {read + skipped:,} records are skipped: {reasons}")
        return lines + [f"warning: {count:,} of {read:,} records: {note}" for note, count in self.notes.most_common()]


def warning_prefix(dropped: int, read: int) -> str:
    """Return "warning: " if more than `WARNING_SHARE` of the records were skipped, otherwise an empty string."""
    return "warning: " if dropped > WARNING_SHARE * (read + dropped) else ""


def describe_drop_counts(counts: Mapping[str, int]) -> str:
    """Return a description such as `3 with an empty text, 1 without messages`, the largest count first.

    `counts`: number of skipped records by reason, a key of `DROP_REASONS`.
    """
    phrases = []
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        kind, _, roles = reason.partition(": ")
        phrases.append(f"{count:,} {DROP_REASONS[kind]}" + (f" (roles: {roles})" if roles else ""))
    return ", ".join(phrases)


class ChatDocument(NamedTuple):
    """A conversation.

    - `messages`: all messages, in the form of `normalize_messages`.
    - `first`: index of the first message that may be trained on; only assistant messages are trained on.
    - `variables`: other variables of the chat template, such as `tools`.
    - `excluded`: indices of assistant messages that are not trained on.
    """

    messages: list[Any]
    first: int = 0
    variables: dict[str, Any] = {}  # noqa: RUF012 - never changed
    excluded: tuple[int, ...] = ()

    @classmethod
    def create(cls, messages: Sequence[Any], first: int, variables: Mapping[str, Any]) -> "ChatDocument":
        """Return the document of normalized messages. Messages with `train: False` are excluded from training."""
        messages, excluded = split_flags(messages)
        return cls(messages, first, dict(variables), tuple(index for index in excluded if index >= first))


class Document(NamedTuple):
    """A document: a text, tokens without separators, or a conversation.

    - `where`: location (file and row) for error messages.
    - `key`: text that is hashed, instead of the content, to assign the document to a split.
    - `spans`: spans (start, stop) of `text` whose tokens are targets; None: all tokens.
    - `literal`: spans of `text` in which the names of special tokens are tokenized as plain text.
    - `chat`: conversation, which a chat template renders to `text` (see `data.chats`).
    - `media`: references to media files (see `reference`). Relative paths start at `folder`.
    - `folder`: directory of the source; None: the source is remote.
    - `known_hash`: the split hash, if it has been computed.
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
        """Return a hash of the document in [0, 1), which determines whether the document is held out.

        The hash is the same on every machine and uniformly distributed. It is computed before a chat template is
        applied and before placeholders of media files are expanded.
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
        if self.media:  # the same question may be asked about many images
            content += json.dumps(self.media).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big") / 2**48


def record_documents(
    records: Iterable[tuple[str, Any]], field: str, *, report: ReadReport | None = None
) -> Iterator[Document]:
    """Yield the documents of records. Records without targets are skipped and counted in `report`.

    **Arguments:**

    - `records`: location (for error messages) and content of each record, a JSON object or a row of a table.
    - `field`: name of the text field.
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
    """Return the reason for skipping a record in which all text and message fields are null; None for other records."""
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
    """Return the columns of a table that are read. Raises DataError if no column contains documents."""
    known = [name for name in dict.fromkeys((field, *COLUMNS)) if name in columns]
    if not _has_form(known, field):
        remedy = USE_PREFERENCE_METHOD if _is_pair(columns) else SET_TEXT_FIELD
        raise DataError(f"{where} has no column {field!r}. It has the columns: {', '.join(columns)}. {remedy}.")
    return known


def is_record(value: Any, field: str) -> bool:
    """Return whether a JSON value is an object with the fields of a document."""
    return isinstance(value, dict) and _has_form([name for name in value if value[name] is not None], field)


def _is_pair(names: Container[str]) -> bool:
    return any(chosen in names and rejected in names for chosen, rejected in PAIR_FIELDS)


def _has_form(names: Sequence[str], field: str) -> bool:
    """Return whether `names` contains all fields of one of the forms of documents."""
    forms = ((field,), ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
    return any(all(name in names for name in form) for form in forms)


def parsed(content: bytes, where: str) -> Any:
    """Parse JSON in UTF-8. Raises DataError if it is not valid."""
    try:
        return json.loads(decode(content, where))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from error


def _document(record: dict[str, Any], field: str, where: str, fields: Sequence[str]) -> Document:
    """Make a document from the text field, `messages`, or `prompt` and `completion` of a normalized record.

    `fields`: names of the fields before normalization, for error messages.
    """
    if field in record:
        document = _text_or_messages(record, field, where)
    elif "messages" in record:
        document = _text_or_messages(record, "messages", where)
    elif "prompt" in record and "completion" in record:
        document = _prompt_and_completion(record, where)
    else:
        remedy = USE_PREFERENCE_METHOD if _is_pair(fields) else SET_TEXT_FIELD
        raise DataError(f"{where} has no field {field!r}. It has the fields: {', '.join(fields) or 'none'}. {remedy}.")
    return document._replace(media=_files(record, where))


def _text_or_messages(record: dict[str, Any], field: str, where: str) -> Document:
    value = record[field]
    if isinstance(value, list):
        if isinstance(record.get("label"), bool):
            raise _label_error(record["label"], where)
        return Document(where, chat=ChatDocument.create(value, 0, template_variables(record, where)))
    return Document(where, checked_text(value, field, where))


def _prompt_and_completion(record: dict[str, Any], where: str) -> Document:
    if isinstance(record.get("label"), bool | int | float) and record["label"] in (0, 1):
        raise _label_error(record["label"], where)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        prompt = as_messages(prompt, "user", "prompt", where)
        completion = as_messages(completion, "assistant", "completion", where)
        variables = template_variables(record, where)
        return Document(where, chat=ChatDocument.create(prompt + completion, len(prompt), variables))
    prompt = checked_text(prompt, "prompt", where)
    text = prompt + checked_text(completion, "completion", where)
    return Document(where, text, spans=((len(prompt), len(text)),))


def _label_error(label: Any, where: str) -> DataError:
    return DataError(
        f"{where}: label={label} marks a completion as desirable or undesirable, which this method does not use. Train "
        "with --method kto, or remove the field and the undesirable completions."
    )


def as_messages(value: Any, role: str, field: str, where: str) -> list[Any]:
    """Return a list of messages unchanged; convert a text to a list with one message of the role `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": checked_text(value, field, where)}]


def reference(kind: str, name: str, digest: str = "") -> str:
    """Return the reference to a media file for `Document.media`.

    **Arguments:**

    - `kind`: "image", "video" or "audio".
    - `name`: path or URL of the file.
    - `digest`: hash of the content of the file, which is known after tokenization.
    """
    if digest:
        return f"{kind}\0{name}\0{digest}"
    return name if kind == "image" else f"{kind}\0{name}"


def parse_reference(text: str) -> tuple[str, str, str]:
    """Return kind, name and digest of a `reference`. The digest is empty before tokenization."""
    if "\0" not in text:
        return "image", text, ""
    kind, name, *digest = text.split("\0")
    return kind, name, "".join(digest)


def _files(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    references: list[str] = []
    for field, kind in MEDIA_FIELDS.items():
        names = record.get(field)
        check(
            names is None or (isinstance(names, list) and all(isinstance(name, str) and name for name in names)),
            f"{where}: field {field!r} (or {kind!r}) must be a list of paths of {kind} files. Save the files and list "
            "their paths, or remove the field.",
            DataError,
        )
        references += [reference(kind, name) for name in names or ()]
    return tuple(references)


def template_variables(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the variables of the chat template in a record. `tools` may be a JSON string."""
    variables = {name: record[name] for name in VARIABLES if record.get(name)}
    if isinstance(variables.get("tools"), str):
        variables["tools"] = parsed(variables["tools"].encode(), f"{where}: field 'tools'")
    kwargs = variables.pop("chat_template_kwargs", {})
    check(isinstance(kwargs, dict), f"{where}: field 'chat_template_kwargs' must be a JSON object.", DataError)
    return {**variables, **kwargs}


def checked_text(value: Any, field: str, where: str) -> str:
    """Return `value`. Raises DataError if it is not a string, or not valid Unicode."""
    check(
        isinstance(value, str),
        f"{where}: field {field!r} must be a text or a list of messages, not {type(value).__name__}.",
        DataError,
    )
    check_unicode(value, field, where)
    return value


def decode(content: bytes, where: str) -> str:
    """Decode UTF-8 and remove a byte-order mark. Raises DataError if the content is not valid UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}. Convert the file, or remove it.") from error
