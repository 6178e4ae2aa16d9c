"""Chat templates: programs in tokenizers' directories that write a conversation as the text a model was trained on.

Templates are untrusted. They are rendered in Jinja's immutable sandbox, without a loader, in a separate process
(`chat_template_worker.py`) with limits on processor time, memory, files and sockets.
"""

import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

from eqx_decoders.errors import ConversionError, DataError, check, check_option, missing_package
from eqx_decoders.io.atomic_files import write_atomically, write_json
from eqx_decoders.io.gguf.gguf_header import is_gguf, read_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import tokenizer_settings
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.text.published_tokenizer import PublishedTokenizer


JINJA = "chat_template.jinja"
ADDITIONAL = "additional_chat_templates"  # subfolder of further templates, named NAME.jinja
TOOL_USE = "tool_use"  # name of the template for conversations with tools
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SOURCE_BYTES = 1_000_000
PIECE = 1 << 16  # letters that are written as JSON at once
SECONDS = 1.0  # of processor time for one conversation
MORE_SECONDS = 0.1  # for each in a process that renders many, on average
WALL_SECONDS = 60.0  # longer, since other programs may keep the machine busy
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")  # of the process: no keys, no passwords
END_MARK = "@end_of_message@ "  # templates that strip messages remove the space
_WORKER = Path(__file__).with_name("chat_template_worker.py")

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class Conversation(NamedTuple):
    """Conversation to render: messages (see `check_messages`), other variables, and the request for an answer."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = {}
    add_generation_prompt: bool = False


class Rendered(NamedTuple):
    """Rendered text, with [start, stop) of its parts in characters.

    - `generated`: parts that the template marks with `{% generation %}`; None where it has no such mark.
    - `messages`: parts that each iteration of the template's loops over the messages wrote, as (number of the message,
      start, stop).
    - `literal`: names of special tokens that come from the messages, to be encoded as plain text (see
        `ChatTemplate.literal`).
    """

    text: str
    generated: Sequence[tuple[int, int]] | None
    messages: Sequence[tuple[int, int, int]]
    literal: Sequence[Sequence[int]] = ()


class RenderingProcess:
    """Process for one `render_many`. Started ahead, it has loaded Python and Jinja when it is needed."""

    def __init__(self):
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        command = [sys.executable, "-I", str(_WORKER), json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)

    @property
    def alive(self) -> bool:
        """True while the process waits for its work."""
        return self._process.poll() is None

    def run(self, work: bytes, seconds: float) -> tuple[int, bytes, bytes]:
        """Run the process on its work; return its exit code, output and errors. Raises subprocess.TimeoutExpired."""
        try:
            output, errors = self._process.communicate(work, seconds)
            return self._process.returncode, output, errors
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        with self._process:  # which closes the pipes and waits
            self._process.kill()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Chat template: a Jinja program, the variables of every rendering (such as `bos_token`), and the file it is from.

    - `literal`: names of special tokens that are plain text in messages, tools and documents, so that only the
        template writes special tokens. Empty: as with transformers, `<|end|>` within a message becomes the special
        token.
    - `tool_source`: Jinja program for conversations with tools; None: `source` is used for all conversations.
    """

    source: str
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = "chat template"
    literal: Sequence[str] = ()
    tool_source: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "literal", tuple(self.literal))
        for source in (self.source, self.tool_source or ""):
            size = len(source.encode("utf-8", "surrogatepass"))
            rule = f"a chat template of more than {SOURCE_BYTES:,} is not rendered"
            check(size <= SOURCE_BYTES, f"{self.where} has {size:,} bytes: {rule}.", ConversionError)

    @property
    def source_with_tools(self) -> str:
        """Jinja program for conversations with tools."""
        return self.source if self.tool_source is None else self.tool_source

    def source_for(self, tools: Any) -> str:
        """Return the Jinja program for a conversation with these tools. None or an empty list: no tools."""
        return self.source_with_tools if tools else self.source

    @property
    def content_hash(self) -> str:
        """Hash of the template, independent of the file it is from."""
        literal = [sorted(self.literal)] if self.literal else []
        tools = [] if self.tool_source is None else [{"tools": self.tool_source}]
        content = json.dumps([self.source, dict(self.variables), *literal, *tools], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Render a conversation as a text, to be encoded by `tokenizer.encode(text, special=True)`; see `rendered`."""
        return self.rendered(messages, add_generation_prompt=add_generation_prompt, **variables).text

    def rendered(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **variables: Any) -> Rendered:
        """Render a conversation, to be encoded by `tokenizer.encode(it.text, special=True, literal=it.literal)`.

        **Arguments:**

        - `messages`: `{"role": "user", "content": "..."}` and so on; roles are usually system, user and assistant.
        - `add_generation_prompt`: end with what begins an answer of the assistant.
        - `variables`: others, as JSON values; templates document theirs, such as `tools` or `enable_thinking`.

        Raises DataError for messages of another form, and ConversionError with the reason where the template fails,
        refuses the conversation, or takes too much: more than a second of processor time, a gigabyte of memory or ten
        million characters.
        """
        (result,) = self.render_many([Conversation(check_messages(messages), variables, add_generation_prompt)])
        if isinstance(result, ConversionError):
            raise result
        return result

    def render_many(
        self, conversations: Sequence[Conversation], process: RenderingProcess | None = None
    ) -> list[Rendered | ConversionError]:
        """Render each conversation; return its text, or the error that `render` would raise for it.

        They are rendered in one process, which may have been started ahead, and in others where their texts have more
        than ten million characters together. Those of a process share the gigabyte, and may take a tenth of a second on
        average. Raises ConversionError if a process is ended.
        """
        numbers: dict[str, list[int]] = {}
        for number, conversation in enumerate(conversations):
            numbers.setdefault(self._source_of(conversation), []).append(number)
        done: dict[int, Rendered | ConversionError] = {}
        for group in numbers.values():
            while group:
                results, error = self._run([conversations[number] for number in group], process)
                if error is not None:
                    raise error
                done |= zip(group, results, strict=False)
                group = group[len(results) :]
        return [done[number] for number in range(len(conversations))]

    def render_some(
        self, conversations: Sequence[Conversation], process: RenderingProcess | None = None
    ) -> list[Rendered | ConversionError]:
        """Render as many of the first conversations as one process manages, at least one.

        If the process is ended at its first conversation, that is the conversation's error. Otherwise the conversation
        at which it ended has no result: it is the first of the next call.
        """
        results, error = self._run(conversations, process)
        return results or ([] if error is None else [error])

    def _run(
        self, conversations: Sequence[Conversation], process: RenderingProcess | None
    ) -> tuple[list[Rendered | ConversionError], ConversionError | None]:
        """Render the first conversations in a process, and return the error with which it ended before the others."""
        if sys.platform == "win32":
            raise self._error("Windows has no limits for the process that renders untrusted templates")
        if importlib.util.find_spec("jinja2") is None:
            raise missing_package("jinja2", "hf")
        source = self._source_of(conversations[0])
        conversations = list(itertools.takewhile(lambda each: self._source_of(each) == source, conversations))
        tasks = [
            {"tools": None, "documents": None, **self.variables, **_without_empty(variables), "messages": messages}
            | {"add_generation_prompt": prompt}
            for messages, variables, prompt in conversations
        ]
        work = {"source": source, "tasks": tasks, "literal": self.literal, "seconds": SECONDS}
        work["total_seconds"] = math.ceil(SECONDS + MORE_SECONDS * len(tasks)) + 1  # and a start of the process
        most = WALL_SECONDS + len(tasks)
        try:
            content = "".join(_json(work)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"messages and variables of a chat template must be JSON values: {error}.") from error
        process = process if process is not None and process.alive else RenderingProcess()
        try:
            code, output, errors = process.run(content, most)
        except subprocess.TimeoutExpired as error:
            raise self._error(f"it took more than {most:g} s") from error
        results, texts = [], []
        for value in (json.loads(line) for line in io.BytesIO(output) if line.endswith(b"\n")):
            if isinstance(value, str):
                texts.append(value)
            else:
                rendered = {"text": "".join(texts), **value}
                results.append(self._error(value["error"]) if "error" in value else Rendered(**rendered))
                texts = []
        if code == 0 and results:
            return results, None
        for number, each in ((signal.SIGPROF, f"{SECONDS:g} s"), (signal.SIGXCPU, f"{MORE_SECONDS:g} s on average")):
            if code == -number:
                return results, self._error(f"it takes more than {each} of processor time")
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return results, self._error(f"its process ended with {code} ({last})")

    def _source_of(self, conversation: Conversation) -> str:
        return self.source_for(conversation.variables.get("tools"))

    def _error(self, cause: str) -> ConversionError:
        printable = "".join(letter if letter.isprintable() else " " for letter in cause[:300])
        sentence = f"{self.where} cannot be rendered: {' '.join(printable.split()).rstrip('.')}"
        return ConversionError(f"{sentence}. Change the messages, or give the text without the template.")


def with_end_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with a mark after the text of the last message, at which `up_to_end_mark` cuts the rendering."""
    *others, last = messages
    return [*others, {**last, "content": last["content"] + END_MARK}]


def up_to_end_mark(rendered: Rendered, content: str) -> Rendered:
    """Return a rendering up to the end of the last message, so that a model continues the message.

    This is `continue_final_message` in transformers. Raises ConversionError if the template does not write the message.

    **Arguments:**

    - `rendered`: rendering of the messages of `with_end_mark`.
    - `content`: text of the last message, without the mark.
    """
    text = rendered.text
    stop = text.rfind(END_MARK.strip())
    if stop < 0 or content.strip() not in text[:stop]:
        raise ConversionError(
            f"the chat template does not write the last message, {content[-60:]!r}, so it cannot be continued. End the "
            "conversation with a message of the user."
        )
    if content.strip() and not text.startswith(END_MARK, stop):  # the template strips messages
        stop = len(text[:stop].rstrip())
    return rendered._replace(text=text[:stop], literal=[span for span in rendered.literal if span[1] <= stop])


def _without_empty(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Remove empty lists of tools or documents: templates often only test `tools is not none`."""
    return {name: value for name, value in variables.items() if value or name not in ("tools", "documents")}


def _json(value: Any) -> Iterator[str]:
    """Yield the text of `json.dumps` in pieces: one call for megabytes would block all threads."""
    if isinstance(value, str) and len(value) > PIECE:
        for begin in range(0, len(value), PIECE):
            yield ("" if begin else '"') + json.dumps(value[begin : begin + PIECE])[1:-1]
        yield '"'
    elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
        yield "{"
        for index, (name, member) in enumerate(value.items()):
            yield f"{', ' if index else ''}{json.dumps(name)}: "
            yield from _json(member)
        yield "}"
    elif isinstance(value, list | tuple) and any(isinstance(one, str | dict | list | tuple) for one in value):
        yield "["
        for index, member in enumerate(value):
            yield ", " if index else ""
            yield from _json(member)
        yield "]"
    else:
        yield json.dumps(value)


def read_chat_template(file: str | Path) -> ChatTemplate:
    """Read the chat template in a file of Jinja, without special tokens of a tokenizer. Raises ConfigError."""
    check(Path(file).is_file(), f"--data.chat-template (DataConfig.chat_template) {str(file)!r} is no file.")
    return ChatTemplate(source=_read(Path(file)), where=str(file))


def write_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Write a template to `chat_template.jinja` in a tokenizer's directory, and remove all other templates there.

    Programs differ in which of several templates they load.
    """
    for file in (folder / "chat_template.json", *(folder / ADDITIONAL).glob("*.jinja")):
        file.unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_bytes()) if config.exists() else {}
    if settings.pop("chat_template", None) is not None:
        write_json(config, settings)
    write_atomically(folder / JINJA, template.source.encode())
    if template.tool_source is not None:
        (folder / ADDITIONAL).mkdir(exist_ok=True)
        write_atomically(folder / ADDITIONAL / f"{TOOL_USE}.jinja", template.tool_source.encode())


def unify_chat_templates(folder: Path) -> None:
    """Keep only the template that `load_chat_template` loads, if the files of a directory have different templates.

    If a file cannot be read, nothing is changed.
    """
    try:
        directory = Directory(folder)
        settings, legacy = (
            directory.json(name) if directory.has(name) else {}
            for name in ("tokenizer_config.json", "chat_template.json")
        )
        texts = [content["chat_template"] for content in (settings, legacy) if content.get("chat_template") is not None]
        if directory.has(JINJA):
            texts.append(_read(directory.file(JINJA)))
        if all(text == texts[0] for text in texts):
            return
        template = load_chat_template(folder)
    except ConversionError:
        return
    if template is not None:
        write_chat_template(folder, template)


def load_chat_template(
    directory: str | Path, name: str = "default", *, file: str | Path | None = None
) -> ChatTemplate | None:
    """Load the chat template of a tokenizer's directory, or of `file` with the tokenizer's variables.

    Returns None if there is no template. As in transformers, the first of these sources is used:

    1. `chat_template.jinja`, with further named templates in `additional_chat_templates/NAME.jinja`;
    2. `chat_template.json`;
    3. `tokenizer_config.json`, which may have several named templates, or the metadata of a GGUF file.

    If there is a template with the name `tool_use`, it renders conversations with tools. Raises ConversionError for
    malformed files and for an unknown name.
    """
    folder = None if is_gguf(directory) else Directory(directory)
    if folder is None:
        files = PublishedTokenizer(tokenizer_settings(read_gguf(directory).metadata))
    else:
        files = PublishedTokenizer(
            *(folder.json(file) if folder.has(file) else {} for file in ("tokenizer_config.json", SPECIAL_TOKENS_MAP)),
            model_config=_class_config(folder),
        )
    variables = files.variables
    if file is not None:
        return dataclasses.replace(read_chat_template(file), variables=variables)
    origin, sources = _sources(folder, files.settings)
    if not sources:
        return None
    where = str(directory if folder is None else folder.path / origin)
    word = check_option(f"{where}: chat template", name, sources, ConversionError)
    tool_source = sources.get(TOOL_USE) if word == "default" else None
    return ChatTemplate(source=sources[word], variables=variables, where=where, tool_source=tool_source)


def _class_config(folder: Directory) -> dict[str, Any]:
    """Return the content of `config.json`, which may name the tokenizer's class; empty if it cannot be read."""
    try:
        return folder.json("config.json") if folder.has("config.json") else {}
    except ConversionError:
        return {}


def _sources(folder: Directory | None, settings: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the name of the file from which templates are read, and the templates by name."""
    if folder is not None:
        named = {path.stem: _read(path) for path in folder.files(ADDITIONAL, ".jinja")}
        if folder.has(JINJA):
            named["default"] = _read(folder.file(JINJA))
        if named:
            return JINJA if folder.has(JINJA) else ADDITIONAL, named
    origin, templates = "chat_template.json", None
    if folder is not None and folder.has(origin):
        templates = folder.json(origin).get("chat_template")
    if templates is None:
        origin, templates = "tokenizer_config.json", settings.get("chat_template")
    if templates is None:
        return origin, {}
    rows = templates if isinstance(templates, list) else [{"name": "default", "template": templates}]
    for row in rows:
        valid = isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("name", "template"))
        rule = "chat_template must be a text, or a list of objects with a name and a template each"
        check(valid, f"{origin if folder is None else folder.path / origin}: {rule}.", ConversionError)
    return origin, {row["name"]: row["template"] for row in rows}


def _read(path: Path) -> str:
    small = path.stat().st_size <= SOURCE_BYTES
    check(small, f"{path} has more than {SOURCE_BYTES:,} bytes: it is no chat template.", ConversionError)
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is no UTF-8 text: {error}. Download it again.") from error


def check_messages(messages: Sequence[Any], where: str = "messages") -> list[dict[str, Any]]:
    """Check messages, and return them as transformers gives them to a template. Raises DataError.

    Keys whose value is None are left out, since templates would take it for a text; but the content of a message that
    calls tools without a text stays None, as with transformers. A template that cannot take that, or the form of the
    calls' arguments, gets other forms (`chat_template_worker.forms`). The assistant's thoughts, which go by several
    names, are given as `reasoning_content` and `thinking`.

    An empty list of tool calls is left out, because some templates (such as Llama 3.1's) require a call if the message
    has the key `tool_calls`.
    """
    valid = isinstance(messages, list | tuple) and len(messages) > 0
    check(valid, f"{where}={str(messages)[:60]} must be a list with at least one message.", DataError)
    for number, message in enumerate(messages):
        path, mapping = f"{where}[{number}]", isinstance(message, Mapping)
        check(mapping, f"{path}={str(message)[:60]} must be an object with role and content.", DataError)
        role, content = message.get("role"), message.get("content")
        check(isinstance(role, str), f"{path}: role={str(role)[:60]!r} must be a word such as 'user'.", DataError)
        text = isinstance(content, str) or (content is None and "tool_calls" in message)
        missing = "content" not in message
        keys = ", ".join(map(str, message)) or "none"
        check(
            text or not missing, f"{path} has no content; its keys: {keys}. Write its text under 'content'.", DataError
        )
        check(text, f"{path}: content={str(content)[:60]!r} must be a text.", DataError)
    messages = [
        {key: value for key, value in message.items() if key == "content" or not _is_absent(key, value)}
        for message in messages
    ]
    return [_with_thoughts(message) for message in messages]


def object_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object, as chat templates expect them.

    OpenAI's API passes arguments as JSON text. Null, the text "null" and blank text become an empty object. Raises
    ValueError for a text that is not JSON. Values that are not objects are returned.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except RecursionError as error:
            raise ValueError("the JSON text is nested too deeply") from error
    return {} if arguments is None else arguments


def _is_absent(key: str, value: Any) -> bool:
    return value is None or (key == "tool_calls" and isinstance(value, list | tuple) and not value)


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    thoughts = next((message[name] for name in _THOUGHTS if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}
