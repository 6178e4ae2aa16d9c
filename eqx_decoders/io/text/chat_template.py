"""Chat templates: Jinja programs in tokenizers' directories that write a conversation as the text of the training data.

`chat_rendering` renders them.
"""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.errors import ConversionError, DataError, check, check_option, missing_package
from eqx_decoders.io.atomic_files import write_atomically, write_json
from eqx_decoders.io.gguf.gguf_header import is_gguf, read_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import tokenizer_settings
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.text.chat_rendering import Rendered, render
from eqx_decoders.io.text.published_tokenizer import PublishedTokenizer


JINJA = "chat_template.jinja"
ADDITIONAL = "additional_chat_templates"  # subfolder of further templates, named NAME.jinja
TOOL_USE = "tool_use"  # name of the template for conversations with tools
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
MAX_SOURCE_BYTES = 1_000_000
END_MARK = "@end_of_message@ "  # templates that strip messages remove the space

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class Conversation(NamedTuple):
    """Conversation to render: messages (see `check_messages`), other variables, and the request for an answer."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = {}
    add_generation_prompt: bool = False


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
            check(
                size <= MAX_SOURCE_BYTES,
                f"{self.where} has {size:,} bytes. A chat template has at most {MAX_SOURCE_BYTES:,} bytes.",
                ConversionError,
            )

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
        - `add_generation_prompt`: end with the start of a message of the assistant.
        - `variables`: other variables of the template, as JSON values, such as `tools` or `enable_thinking`.

        Raises DataError for malformed messages. Raises ConversionError with the reason if the template fails, refuses
        the conversation, writes more than ten million characters, or takes more than a second in its loops.
        """
        (result,) = self.render_many([Conversation(check_messages(messages), variables, add_generation_prompt)])
        if isinstance(result, ConversionError):
            raise result
        return result

    def render_many(self, conversations: Sequence[Conversation]) -> list[Rendered | ConversionError]:
        """Render each conversation; return its text, or the error that `rendered` would raise for it.

        Raises DataError if messages or variables are not JSON values.
        """
        if importlib.util.find_spec("jinja2") is None:
            raise missing_package("jinja2", "hf")
        return [self._render(conversation) for conversation in conversations]

    def _render(self, conversation: Conversation) -> Rendered | ConversionError:
        given = {name: value for name, value in conversation.variables.items() if not _is_empty(name, value)}
        variables = {"tools": None, "documents": None, **self.variables, **given}
        variables["messages"] = conversation.messages
        variables["add_generation_prompt"] = conversation.add_generation_prompt
        try:
            variables = _copy_json(variables)
        except (TypeError, RecursionError) as error:
            raise DataError(f"messages and variables of a chat template must be JSON values: {error}.") from error
        try:
            return render(self.source_for(conversation.variables.get("tools")), variables, tuple(self.literal))
        except Exception as error:  # a template can raise anything
            return self._error(f"{type(error).__name__}: {error}")

    def _error(self, cause: str) -> ConversionError:
        printable = "".join(character if character.isprintable() else " " for character in cause[:300])
        cause = " ".join(printable.split()).rstrip(".")
        return ConversionError(
            f"{self.where} cannot be rendered: {cause}. Change the messages, or give the text without the template."
        )


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


def _is_empty(name: str, value: Any) -> bool:
    """Return whether a variable is an empty list of tools or documents: templates often only test for None."""
    return name in ("tools", "documents") and not value


def _copy_json(value: Any) -> Any:
    """Return `json.loads(json.dumps(value))` without writing the text. Raises TypeError for other types."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_copy_json(member) for member in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _copy_json(member) for key, member in value.items()}
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def read_chat_template(file: str | Path) -> ChatTemplate:
    """Read the chat template in a file of Jinja, without special tokens of a tokenizer. Raises ConfigError."""
    check(Path(file).is_file(), f"--chat-template (DataConfig.chat_template) {str(file)!r} is not a file.")
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
    name = check_option(f"{where}: chat template", name, sources, ConversionError)
    tool_source = sources.get(TOOL_USE) if name == "default" else None
    return ChatTemplate(source=sources[name], variables=variables, where=where, tool_source=tool_source)


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
        check(
            isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("name", "template")),
            f"{origin if folder is None else folder.path / origin}: chat_template must be a text, or a list of objects "
            "with the keys 'name' and 'template'.",
            ConversionError,
        )
    return origin, {row["name"]: row["template"] for row in rows}


def _read(path: Path) -> str:
    check(
        path.stat().st_size <= MAX_SOURCE_BYTES,
        f"{path} has more than {MAX_SOURCE_BYTES:,} bytes: it is not a chat template.",
        ConversionError,
    )
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8: {error}. Download it again.") from error


def check_messages(messages: Sequence[Any], where: str = "messages") -> list[dict[str, Any]]:
    """Check messages, and return them as transformers passes them to a template. Raises DataError.

    Keys whose value is None are removed, because templates would write the word None. The content of a message with
    tool calls may be None, as with transformers. `chat_rendering` passes other forms to a template that does not take
    this form, or the form of the arguments of tool calls. The reasoning of the assistant, for which several keys are in
    use, is passed as `reasoning_content` and `thinking`.

    An empty list of tool calls is removed, because some templates (such as Llama 3.1's) require a call if the message
    has the key `tool_calls`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"{where}={str(messages)[:60]} must be a list with at least one message.")
    for index, message in enumerate(messages):
        path = f"{where}[{index}]"
        if not isinstance(message, Mapping):
            raise DataError(f"{path}={str(message)[:60]} must be an object with role and content.")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise DataError(f"{path}: role={str(role)[:60]!r} must be a text such as 'user'.")
        if isinstance(content, str) or (content is None and "tool_calls" in message):
            continue
        if "content" not in message:
            keys = ", ".join(map(str, message))
            raise DataError(f"{path} has no content; its keys: {keys}. Write its text under 'content'.")
        raise DataError(f"{path}: content={str(content)[:60]!r} must be a text.")
    messages = [
        {key: value for key, value in message.items() if key == "content" or not _is_absent(key, value)}
        for message in messages
    ]
    return [_with_reasoning(message) for message in messages]


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


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING_KEYS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
