"""Records (JSON lines, a JSON list, Parquet) as documents: texts, conversations, prompts with their completions."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.errors import DataError, check, need_extra
from eqx_decoders.io.compressed import open_stream, plain_suffix


SET_FIELD = "Set --text-field (DataConfig.text_field)"
NO_TEXT = "a text or a list of messages"


class Chat(NamedTuple):
    """A conversation, of which the assistant's turns from `messages[first]` on are trained on.

    `variables` are further ones of the template, such as `tools`.
    """

    messages: list[Any]
    first: int = 0
    variables: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Document(NamedTuple):
    """One document: its text, its tokens without special ones around them, or a conversation.

    `where` is for error messages. `spans` are the characters of `text` that are trained on, as (start, stop); None: all
    of it. A conversation gets its text from a chat template (see `training.chats`).
    """

    where: str
    text: str | None = None
    tokens: np.ndarray | None = None
    key: str | None = None  # hashed instead of the content to decide whether the document is held out
    spans: tuple[tuple[int, int], ...] | None = None
    chat: Chat | None = None

    def draw(self) -> float:
        """A number in [0, 1) from the hash of the document: equal on every machine, uniform over documents."""
        if self.key is not None:
            content = self.key.encode()
        elif self.tokens is not None:
            content = self.tokens.astype("<i8").tobytes()
        elif self.chat is not None:
            content = json.dumps(self.chat, sort_keys=True).encode()
        else:
            content = (self.text or "").encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big") / 2**48


def read_json(file: Path, field: str) -> Iterator[Document]:
    """The documents of JSON lines, or of a file that holds one list of records, which is read at once."""
    with open_stream(file) as stream:
        for where, record in _json_records(stream, file):
            check(isinstance(record, dict), f"{where} must hold a JSON object with the field {field!r}.", DataError)
            yield _document(record, field, where)


def _json_records(stream: Any, file: Path) -> Iterator[tuple[str, Any]]:
    may_be_list = plain_suffix(file) == ".json"
    for number, line in enumerate(stream, 1):
        if may_be_list and line.lstrip().startswith(b"["):
            records = _parsed(line + stream.read(), str(file))
            yield from ((f"{file}, record {place}", record) for place, record in enumerate(records, 1))
        elif line.strip():
            may_be_list = False
            yield f"{file}:{number}", _parsed(line, f"{file}:{number}")


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(decode(content, where))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from error


def read_parquet(file: Path, field: str) -> Iterator[Document]:
    """A document for each row. Keys without a value are left out of messages: a column gives every row all keys."""
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise need_extra("pyarrow", "train") from error
    try:
        with parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            known = [name for name in (field, *CHAT_FIELDS) if name in columns]
            rule = f"has no column {field!r}; its columns: {', '.join(columns)}"
            check(_form(known, field) is not None, f"{file} {rule}. {SET_FIELD}.", DataError)
            row = 0
            for batch in table.iter_batches(batch_size=512, columns=known):  # one row group at a time
                for record in batch.to_pylist():
                    yield _document(_without_none(record, keep=(field,)), field, f"{file}, row {row}")
                    row += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} is not a Parquet file that can be read: {error}") from error


def _without_none(value: Any, keep: tuple[str, ...] = ()) -> Any:
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None or key in keep}
    return value


def _document(record: dict[str, Any], field: str, where: str) -> Document:
    """The document of a record: of its text field, else of its `messages`, else of its `prompt` and `completion`."""
    form = _form([name for name, value in record.items() if value is not None], field)
    if form is not None:
        return form(record, field, where)
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
        return Document(where, chat=Chat(value, 0, _variables(record, where)))
    return Document(where, checked_text(value, field, where))


def _pair(record: dict[str, Any], field: str, where: str) -> Document:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return Document(where, chat=Chat(prompt + completion, len(prompt), _variables(record, where)))
    both = isinstance(prompt, list) == isinstance(completion, list)
    check(both, f"{where}: prompt and completion must both be texts, or both lists of messages.", DataError)
    text = checked_text(prompt, "prompt", where)
    whole = text + checked_text(completion, "completion", where)
    return Document(where, whole, spans=((len(text), len(whole)),))


# Fields of a record beside its text field, with the names of TRL's conversational formats.
VARIABLES = ("tools", "documents", "chat_template_kwargs")
CHAT_FIELDS = ("messages", "prompt", "completion", *VARIABLES)


def _variables(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The variables of the template on a record; `tools` may be a text of JSON."""
    found = {name: record[name] for name in VARIABLES if record.get(name)}
    if isinstance(found.get("tools"), str):
        found["tools"] = _parsed(found["tools"].encode(), f"{where}: field 'tools'")
    more = found.pop("chat_template_kwargs", {})
    check(isinstance(more, dict), f"{where}: field 'chat_template_kwargs' must be a JSON object.", DataError)
    return {**found, **more}


def checked_text(value: Any, field: str, where: str) -> str:
    """`value` if it is a text, else DataError."""
    kind = type(value).__name__
    check(isinstance(value, str), f"{where}: field {field!r} must be {NO_TEXT}, not {kind}.", DataError)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} is no Unicode text: {error}.") from error
    return value


def decode(content: bytes, where: str) -> str:
    """The text of UTF-8, else DataError."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}. Convert it, or leave it out.") from error
