"""Chat templates: the program in a tokenizer's directory that writes a conversation as the text a model was trained on.

A template comes from a stranger. It is rendered in Jinja's immutable sandbox, without a loader, in a process of its own
(`io.chat_worker`) that the operating system bounds in time and memory and keeps from opening files.
"""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.errors import ConversionError, DataError, check, check_word, need_extra
from eqx_decoders.io import chat_worker
from eqx_decoders.io.directory import Directory


SOURCE_BYTES = 1_000_000
SECONDS = 1.0  # of processor time, for each rendering
_WALL_SECONDS = 60.0  # for a machine that is busy otherwise; what bounds a template is its processor time
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")  # no keys and passwords

# transformers' names of the tokens that a template can use as variables.
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template as it was read, with the special tokens that stand beside it.

    **Arguments:**

    - `source`: the Jinja program.
    - `variables`: what every rendering can use, such as `bos_token`.
    - `where`: the file it is from, for error messages.
    """

    source: str
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = "chat template"

    def __post_init__(self):
        size = len(self.source.encode("utf-8", "surrogatepass"))
        check(
            size <= SOURCE_BYTES,
            f"{self.where} has {size:,} bytes: a chat template of more than {SOURCE_BYTES:,} is not rendered.",
            ConversionError,
        )

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation.

        **Arguments:**

        - `messages`: `{"role": "user", "content": "..."}` and so on; roles are usually system, user and assistant.
        - `add_generation_prompt`: end with what begins an answer of the assistant.
        - `variables`: further ones, as JSON values; templates document theirs, such as `tools` or `enable_thinking`.

        **Returns:**

        A text to be encoded as a whole, special tokens recognised, none added: `tokenizer.encode(text, special=True)`.
        As with transformers that holds for the messages, too: `<|end|>` within one becomes the special token, so
        whoever lets strangers write messages must take such names out of them.

        Raises DataError for messages of another form, and ConversionError with the reason where the template fails,
        refuses the conversation, or takes too much: more than a second of processor time, a gigabyte of memory or ten
        million characters.
        """
        return self.render_many([messages], add_generation_prompt=add_generation_prompt, **variables)[0]

    def render_many(
        self, conversations: Sequence[Sequence[Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[str]:
        """`render` of each conversation, in one process: starting it takes longer than hundreds of renderings."""
        shared = {"tools": None, "documents": None, **self.variables, **variables}
        shared["add_generation_prompt"] = add_generation_prompt
        requests = [{**shared, "messages": _checked(messages)} for messages in conversations]
        return self._answer({"source": self.source, "requests": requests, "seconds": SECONDS, "path": _jinja_path()})

    def _answer(self, task: dict[str, Any]) -> list[str]:
        try:
            question = json.dumps(task).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"messages and variables of a chat template must be JSON values: {error}.") from error
        seconds = _WALL_SECONDS + SECONDS * len(task["requests"])
        command = [sys.executable, "-I", chat_worker.__file__]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            done = subprocess.run(
                command, input=question, capture_output=True, timeout=seconds, env=environment, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise self._error(f"it took more than {seconds:.0f} s") from error
        if done.returncode:
            raise self._error(_cause(done.returncode, done.stderr))
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise self._error(_printable(answer["error"]))
        return answer["texts"]

    def _error(self, cause: str) -> ConversionError:
        return ConversionError(
            f"{self.where} cannot be rendered: {cause}. Change the messages, or give the text without the template."
        )


def load_chat_template(directory: str | Path, name: str = "default") -> ChatTemplate | None:
    """The chat template of a tokenizer's directory; None if it has none.

    It is `chat_template.jinja`, else in `chat_template.json`, else in `tokenizer_config.json`, where there may be
    several with names. Raises ConversionError for files that are not as they should be, and for an unknown name.
    """
    folder = Directory(directory)
    settings = folder.json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    older = folder.json("special_tokens_map.json") if folder.has("special_tokens_map.json") else {}
    where, sources = _sources(folder, settings)
    if not sources:
        return None
    word = check_word(f"{where}: chat template", name, sources, ConversionError)
    variables = {token: text for token, text in special_tokens(settings, older).items() if text is not None}
    return ChatTemplate(source=sources[word], variables=variables, where=where)


def special_tokens(settings: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str | None]:
    """`bos_token` and so on by name, from `tokenizer_config.json` and the older `special_tokens_map.json`.

    As in transformers the older file wins, unless the newer one lists its added tokens: then only that one counts.
    null means that there is none.
    """
    found = settings if "added_tokens_decoder" in settings else {**settings, **older}
    return {token: _token(token, found[token]) for token in _TOKENS if token in found}


def _token(name: str, value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    check(
        text is None or isinstance(text, str),
        f"{name}={str(value)[:60]} must be a text, or an object with one as its content.",
        ConversionError,
    )
    return text


def _sources(folder: Directory, settings: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The file that says what the templates are, and the templates by name."""
    if folder.has("chat_template.jinja"):
        path = folder.file("chat_template.jinja")
        check(
            path.stat().st_size <= SOURCE_BYTES,
            f"{path} has more than {SOURCE_BYTES:,} bytes: it is no chat template.",
            ConversionError,
        )
        return str(path), {"default": _decoded(path)}
    files = {"tokenizer_config.json": settings}
    if folder.has("chat_template.json"):
        files = {"chat_template.json": folder.json("chat_template.json"), **files}
    for name, content in files.items():
        if content.get("chat_template") is not None:
            where = str(folder.path / name)
            return where, _named(where, content["chat_template"])
    return str(folder.path), {}


def _decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is no UTF-8 text: {error}. Download it again.") from error


def _named(where: str, value: Any) -> dict[str, str]:
    """The templates under the key `chat_template`: one text, or a list of `{"name": …, "template": …}`."""
    if isinstance(value, str):
        return {"default": value}
    rows = value if isinstance(value, list) else [None]
    found = {}
    for row in rows:
        name, template = (row.get("name"), row.get("template")) if isinstance(row, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ConversionError(
                f"{where}: chat_template must be a text, or a list of objects with a name and a template each."
            )
        found[name] = template
    return found


def _checked(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages without what is None, which templates take for a text."""
    good = isinstance(messages, list | tuple) and len(messages) > 0
    check(good, f"messages={str(messages)[:60]} must be a list with at least one message.", DataError)
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Any) -> dict[str, Any]:
    where = f"messages[{number}]"
    check(
        isinstance(message, Mapping), f"{where}={str(message)[:60]} must be an object with role and content.", DataError
    )
    role, content = message.get("role"), message.get("content")
    check(isinstance(role, str), f"{where}: role={str(role)[:60]!r} must be a word such as 'user'.", DataError)
    text = isinstance(content, str) or (content is None and "tool_calls" in message)
    check(text, f"{where}: content={str(content)[:60]!r} must be a text.", DataError)
    return {key: value for key, value in message.items() if value is not None}


def _jinja_path() -> list[str]:
    """Where the packages that the renderer needs are, in case its interpreter would not find them."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    paths = [str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin is not None]
    if len(paths) < len(found):
        raise need_extra("jinja2", "hf")
    return list(dict.fromkeys(paths))


def _cause(code: int, told: bytes) -> str:
    """Why the process ended without an answer."""
    if code == -signal.SIGPROF:
        return f"it takes more than {SECONDS:g} s of processor time"
    last = told.decode("utf-8", "replace").strip().splitlines()[-1:]
    return f"its process ended with {code} ({_printable(' '.join(last))})"


def _printable(text: str) -> str:
    """A stranger's words for a terminal: one line, no control characters."""
    kept = "".join(letter if letter.isprintable() else " " for letter in text[:300])
    return " ".join(kept.split()).rstrip(".")
