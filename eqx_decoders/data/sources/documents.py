"""Records (JSON objects, rows of tables) as documents: texts, conversations, prompts with their completions."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.errors import DataError, check


SET_FIELD = "Set --text-field (DataConfig.text_field)"
NO_TEXT = "a text or a list of messages"


class ChatDocument(NamedTuple):
    """Conversation, whose assistant's turns from `messages[first]` on are trained on.

    `variables` are other variables of the template, such as `tools`.
    """

    messages: list[Any]
    first: int = 0
    variables: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Document(NamedTuple):
    """Document: a text, tokens without separators, or a conversation.

    `where` is for error messages. `spans` are the characters of `text` that are trained on, as (start, stop); None: all
    of it. In the spans `literal` names of special tokens are plain letters. A conversation gets its text from a chat
    template (see `data.chats`). `media` are references to files: relative paths begin in `folder` (None: the source is
    not on this machine). `drawn` is the document's `draw` when it was read.
    """

    where: str
    text: str | None = None
    tokens: np.ndarray | None = None
    key: str | None = None  # hashed instead of the content to decide whether the document is held out
    spans: tuple[tuple[int, int], ...] | None = None
    literal: tuple[tuple[int, int], ...] = ()
    chat: ChatDocument | None = None
    media: tuple[str, ...] = ()
    folder: Path | None = None
    drawn: float | None = None

    @property
    def size(self) -> int:
        """Number of characters of its text, or of bytes of its tokens."""
        return len(self.text or "") if self.tokens is None else self.tokens.nbytes

    def draw(self) -> float:
        """Draw a number in [0, 1) from the hash of the document: equal on every machine, uniform over documents.

        The document is hashed as it was read, before a template or the placeholders of files change it.
        """
        if self.drawn is not None:
            return self.drawn
        if self.key is not None:
            content = self.key.encode()
        elif self.tokens is not None:
            content = self.tokens.astype("<i8").tobytes()
        elif self.chat is not None:
            content = json.dumps(self.chat, sort_keys=True).encode()
        else:
            content = (self.text or "").encode()
        if self.media:  # many images have the same question
            content += json.dumps(self.media).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big") / 2**48


def record_documents(records: Iterable[tuple[str, Any]], field: str, *, from_table: bool = False) -> Iterator[Document]:
    """Yield the documents of JSON records or of rows of a table, each given with its place for messages.

    Keys without a value are left out of the messages in a row: a column gives every row all keys.
    """
    for where, record in records:
        check(isinstance(record, dict), f"{where} must hold a JSON object with the field {field!r}.", DataError)
        yield _document(_without_none(record, keep=(field,)) if from_table else record, field, where)


def used_columns(columns: Sequence[str], field: str, where: str) -> list[str]:
    """Return the columns of a table that documents are made of. Raises DataError if it has none of them."""
    known = [name for name in (field, *CHAT_FIELDS) if name in columns]
    rule = f"has no column {field!r}; its columns: {', '.join(columns)}"
    check(_form(known, field) is not None, f"{where} {rule}. {SET_FIELD}.", DataError)
    return known


def is_record(value: Any, field: str) -> bool:
    """Return whether a document can be made of the object."""
    return isinstance(value, dict) and _form([name for name in value if value[name] is not None], field) is not None


def parsed(content: bytes, where: str) -> Any:
    """Parse JSON. Raises DataError."""
    try:
        return json.loads(decode(content, where))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from error


def _without_none(value: Any, keep: tuple[str, ...] = ()) -> Any:
    if isinstance(value, list):
        return [_without_none(member) for member in value]
    if isinstance(value, dict):
        return {key: _without_none(member) for key, member in value.items() if member is not None or key in keep}
    return value


def _document(record: dict[str, Any], field: str, where: str) -> Document:
    """Make the document of a record from its text field, else its `messages`, else its `prompt` and `completion`."""
    form = _form([name for name, value in record.items() if value is not None], field)
    if form is not None:
        return form(record, field, where)._replace(media=_files(record, where))
    if field not in record:
        raise DataError(f"{where} has no field {field!r}; its fields: {', '.join(record)}. {SET_FIELD}.")
    raise DataError(f"{where}: field {field!r} must be {NO_TEXT}, not NoneType.")


def _form(names: list[str], field: str) -> Callable[[dict[str, Any], str, str], Document] | None:
    if field in names:
        return _text_or_messages
    if "messages" in names:
        return lambda record, _, where: _text_or_messages(record, "messages", where)
    return _pair if "prompt" in names and "completion" in names else None


def _text_or_messages(record: dict[str, Any], field: str, where: str) -> Document:
    value = record[field]
    if isinstance(value, list):
        return Document(where, chat=ChatDocument(value, 0, template_variables(record, where)))
    return Document(where, checked_text(value, field, where))


def _pair(record: dict[str, Any], field: str, where: str) -> Document:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return Document(where, chat=ChatDocument(prompt + completion, len(prompt), template_variables(record, where)))
    both = isinstance(prompt, list) == isinstance(completion, list)
    check(both, f"{where}: prompt and completion must both be texts, or both lists of messages.", DataError)
    text = checked_text(prompt, "prompt", where)
    whole = text + checked_text(completion, "completion", where)
    return Document(where, whole, spans=((len(text), len(whole)),))


# Fields of a record besides its text field, with the names of TRL's conversational formats.
VARIABLES = ("tools", "documents", "chat_template_kwargs")
FILES = {"images": "image", "videos": "video", "audios": "audio"}  # lists of references, in the order of placeholders
CHAT_FIELDS = ("messages", "prompt", "completion", *FILES, *VARIABLES)


def reference(kind: str, name: str, digest: str = "") -> str:
    """Return the reference to a file in `Document.media`: the name of an image, kind and name of other files.

    Once tokens have been made from the file, the reference has the digest of its content as well.
    """
    if digest:
        return f"{kind}\0{name}\0{digest}"
    return name if kind == "image" else f"{kind}\0{name}"


def parse_reference(text: str) -> tuple[str, str, str]:
    """Return kind, name and digest of a `reference`; the digest is empty where it has none."""
    if "\0" not in text:
        return "image", text, ""
    kind, name, *digest = text.split("\0")
    return kind, name, "".join(digest)


def _files(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    references: list[str] = []
    for field, kind in FILES.items():
        names = record.get(field)
        valid = names is None or (isinstance(names, list) and all(isinstance(name, str) and name for name in names))
        rule = f"must be a list of texts, each naming one {kind}"
        check(valid, f"{where}: field {field!r} {rule}.", DataError)
        references += [reference(kind, name) for name in names or ()]
    return tuple(references)


def template_variables(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the variables of a chat template that a record has; `tools` may be a text of JSON."""
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
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} is no Unicode text: {error}.") from error
    return value


def decode(content: bytes, where: str) -> str:
    """Decode UTF-8. Raises DataError."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}. Convert it, or leave it out.") from error
