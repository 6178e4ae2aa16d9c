"""Prompts of requests: token ids and media of texts and conversations."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from eqx_decoders.encoders.media import Media
from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text_model import TextModel
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.processors.prompts import check_parts
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages, object_arguments
from eqx_decoders.io.text.output_parsing.formats import ToolFormatName
from eqx_decoders.io.text.output_parsing.parser import PROMPT_TAIL_TOKENS
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, decode, prompt_ids
from eqx_decoders.media_files.base import ProcessedFile
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.serving.frontend.api_errors import ApiError, refuse
from eqx_decoders.serving.frontend.completion_reader import CompletionReader, create_reader
from eqx_decoders.serving.frontend.media_files import MediaFiles, MediaFilesConfig, Upload
from eqx_decoders.serving.frontend.worker_threads import run_in_worker


# Kind of media by the type of a message part, which is also the name of its field.
FILES = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
MAX_URL_HEAD = 1000  # characters of a data: URL before its content
SHRINKS = 4  # characters that a normalizer may merge into one
TYPICAL_CHARACTERS = 8  # per token: texts up to this length are encoded without a check of their start
PIECE = 1 << 14  # characters that are encoded at once, to check the length of a text
AROUND = 256  # characters around whitespace that decide if a tokenizer drops them: longer than any special token
MAX_ENTRIES, MAX_ENTRIES_PER_TOKEN = 20_000, 8  # of lists and objects in a conversation; the limits are added
MAX_BLANK_TOKENS = 8  # that a chat template may write after the last message of a scored conversation

_whitespace = re.compile(r"\s+")
_removable = re.compile(r"\s+|/(?:no_?)?think\b")

Result = TypeVar("Result")


class PreparedPrompt(NamedTuple):
    """Token ids of a prompt, and its images, videos and audio."""

    ids: tuple[int, ...]
    media: Media | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFrontend:
    """Tokenizer, chat template and processor of a model.

    **Arguments:**

    - `tokenizer`, `chat`: tokenizer and chat template of the model, as in `TextModel`.
    - `stop_ids`: tokens that end a completion.
    - `config`, `processor`, `directory`: configuration, processor and directory of a multimodal model; None for a text
        model.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    stop_ids: tuple[int, ...] = ()
    config: DecoderConfig | None = None
    processor: Processor | None = None
    directory: str | None = None

    def completion_reader(
        self,
        prompt: PreparedPrompt,
        calls: ToolFormatName | None,
        tools: Sequence[Any],
        *,
        special: bool,
        must_call: bool = False,
    ) -> CompletionReader | None:
        """Create the reader of a completion to a conversation. See `create_reader` for the arguments.

        Returns None if all text of the completion is content.
        """
        if self.chat is None or not isinstance(self.tokenizer, JsonTokenizer):
            return None
        source, end = self.chat.source_for(tools), prompt.ids[-PROMPT_TAIL_TOKENS:]
        return create_reader(self.tokenizer, source, calls, tools, end, special=special, must_call=must_call)

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return self.processor is not None and self.processor.images is not None

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Encode a prompt. `special`: add the special tokens with which prompts start."""
        tokenizer = self.tokenizer
        if not special:
            ids = (
                tokenizer.encode(text, special=True) if isinstance(tokenizer, JsonTokenizer) else tokenizer.encode(text)
            )
        else:
            ids = prompt_ids(tokenizer, text)
        return tuple(ids.tolist())

    def join_media(self, rendered: Rendered, files: Mapping[str, Sequence[ProcessedFile]]) -> PreparedPrompt:
        """Combine a rendered conversation with its decoded files."""
        assert self.processor is not None and self.config is not None
        joined = self.processor.join(rendered, files)
        arrays: dict[str, Any] = dict(joined.arrays)
        media = Media.create(self.config, joined.input_ids, **arrays) if arrays else None
        return PreparedPrompt(tuple(joined.input_ids[0].tolist()), media)


def create_frontend(text: TextModel, *, special_tokens_in_content: bool = False) -> TextFrontend:
    """Create the frontend of a model, with the processor of its directory if there is one.

    `special_tokens_in_content`: encode the names of special tokens in messages as special tokens. By default they are
    plain text, because messages may quote texts of third parties.
    """
    text = text if special_tokens_in_content else text.with_special_tokens_as_text()
    origin, tokenizer, processor = text.model.origin, text.tokenizer, None
    directory = None if origin is None or text.model.config.media is None else origin.directory
    if directory is not None and isinstance(tokenizer, JsonTokenizer):
        with contextlib.suppress(ConversionError):  # a directory without a processor: text only
            processor = Processor.load(directory)  # with a separate tokenizer, for a separate thread
            processor = processor.with_special_tokens_as_text(() if text.chat is None else text.chat.literal)
    for used in (tokenizer, None if processor is None else processor.tokenizer):
        if isinstance(used, JsonTokenizer) and text.chat is not None and text.chat.literal:
            used.renamed  # noqa: B018 - computed now, because it takes a second
    return TextFrontend(
        tokenizer=tokenizer,
        chat=text.chat,
        stop_ids=text.stop_ids,
        config=text.model.config if processor is not None else None,
        processor=processor,
        directory=None if processor is None or directory is None else str(directory),
    )


class PromptPreparer:
    """Converter of the texts and conversations of requests to prompts.

    Conversations are rendered in worker threads. A tokenizer is not thread-safe, so one thread uses it. Files are
    decoded in processes (see `MediaFiles`); other requests do not wait for them.

    **Arguments:**

    - `max_length`: maximum number of tokens of a prompt.
    - `max_files`: maximum number of images, videos and audio files of a request.
    - `files`: limits on the decoding of files.
    """

    def __init__(
        self,
        frontend: TextFrontend,
        *,
        max_length: int,
        max_files: int = 16,
        files: MediaFilesConfig = MediaFilesConfig(),
    ):
        self.frontend = frontend
        self._max_length, self._max_files = max_length, max_files
        self._max_characters = max_length * longest_token(frontend.tokenizer) * SHRINKS
        self._tokenizer_thread = concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
        self._media_thread = concurrent.futures.ThreadPoolExecutor(1, "media")
        self._files = None if frontend.directory is None else MediaFiles(frontend.directory, max_length, files)
        # clients read the errors of the template: they must not contain the path of its file
        chat = None if frontend.chat is None else dataclasses.replace(frontend.chat, where="The chat template")
        self._chat = self._video_chat = chat
        videos = None if frontend.processor is None else frontend.processor.videos
        if chat is not None and videos is not None and videos.template is not None:
            self._video_chat = dataclasses.replace(chat, source=videos.template)

    async def run(self, call: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Call a function that uses the tokenizer, in the thread of the tokenizer."""
        bound = functools.partial(call, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, bound)

    async def text(self, text: str, *, special: bool = True, param: str = "prompt") -> PreparedPrompt:
        """Encode a text. Raises ApiError if it is too long. `param`: field of the text, for the error message."""
        await self._check_length(text, param)
        return PreparedPrompt(await self.run(self.frontend.encode, text, special=special))

    async def chat(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> PreparedPrompt:
        """Render and encode a conversation, and decode its files. `variables`: variables of the chat template.

        Raises ApiError for a conversation that is too long, and for one that the template does not render completely.
        """
        chat, tokenizer = self._chat, self.frontend.tokenizer
        if chat is None or not isinstance(tokenizer, JsonTokenizer):
            raise ApiError(400, "This model has no chat template. Use /v1/completions.", param="messages")
        if "tools" in variables and "tools" not in chat.source_with_tools:
            raise ApiError(400, "The chat template of this model does not support tools. Remove them.", param="tools")
        # rendered before files are decoded: files of a conversation that the template refuses are not decoded
        rendered, files = await run_in_worker(
            functools.partial(self._render, messages, variables, add_generation_prompt)
        )
        await self._check_length(rendered.text, "messages")
        if files is None:
            ids = await self.run(tokenizer.encode, rendered.text, special=True, literal=rendered.literal)
            return PreparedPrompt(tuple(ids.tolist()))
        assert self._files is not None
        async with self._files.read(files) as decoded:
            join = functools.partial(self.frontend.join_media, rendered, decoded)
            prompt = await asyncio.get_running_loop().run_in_executor(self._media_thread, join)
            self._files.hold(prompt.media)
            return prompt

    async def scored_chat(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> PreparedPrompt:
        """Render and encode a conversation up to the token at which a reward model reads the score, as in training.

        This is the last token of the last message: whitespace that the template writes after it are removed.
        """
        prompt = await self.chat(messages, variables, add_generation_prompt=False)
        stop_ids = self.frontend.stop_ids
        end = max((position for position, token in enumerate(prompt.ids, 1) if token in stop_ids), default=None)
        if end is None or len(prompt.ids) - end > MAX_BLANK_TOKENS:
            return prompt
        is_whitespace = not decode(self.frontend.tokenizer, prompt.ids[end:]).strip()
        return PreparedPrompt(prompt.ids[:end]) if is_whitespace else prompt

    def close(self) -> None:
        """End the threads and processes."""
        if self._files is not None:
            self._files.close()
        for thread in (self._tokenizer_thread, self._media_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _check_length(self, text: str, param: str) -> None:
        """Raise ApiError for a text that is too long, without encoding all of it: that could take seconds."""
        if len(text) > self._max_characters or (
            len(text) > TYPICAL_CHARACTERS * self._max_length
            and await self.run(is_too_long, self.frontend.tokenizer, text, self._max_length)
        ):
            raise self._too_long(len(text), param)

    def _too_long(self, num_characters: int, param: str) -> ApiError:
        return ApiError(
            400,
            f"The prompt has {num_characters:,} characters, which are more than {self._max_length:,} tokens. "
            "Shorten it.",
            param=param,
            code="context_length_exceeded",
        )

    def _render(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], add_generation_prompt: bool
    ) -> tuple[Rendered, dict[str, list[Any]] | None]:
        """Render a conversation, in a worker thread. Returns also its files by kind; None: it has no files."""
        reader = _PartReader(self.frontend, self._max_files)
        converted = [reader.message(index, message) for index, message in enumerate(messages)]
        checked, files = check_parts(converted) if reader.num_files else (check_messages(converted), None)
        chat = self._video_chat if files is not None and files["video"] else self._chat
        assert chat is not None
        if "tool_calls" not in chat.source_for(variables.get("tools")) and any(
            message.get("tool_calls") for message in checked
        ):
            raise ApiError(
                400,
                "The chat template of this model leaves out tool_calls. Write them as text.",
                param="messages",
            )
        conversation = Conversation(checked, variables, add_generation_prompt)
        num_characters, num_entries = size_of(conversation)
        if num_characters > self._max_characters:
            raise self._too_long(num_characters, "messages")
        if num_entries > MAX_ENTRIES + MAX_ENTRIES_PER_TOKEN * self._max_length:
            raise ApiError(
                400, f"messages, tools and chat_template_kwargs have {num_entries:,} entries in total. Send fewer."
            )
        (rendered,) = chat.render_many([conversation])
        if isinstance(rendered, ConversionError):
            raise ApiError(400, str(rendered), param="messages") from rendered
        index = first_left_out(rendered, checked)
        if index is not None:
            raise refuse(
                f"messages[{index}].content",
                checked[index]["content"],
                f"is left out by the chat template of this model: it does not allow the role "
                f"{checked[index]['role']!r} at this position. Move the text to another message",
            )
        return rendered, files


def first_left_out(rendered: Rendered, messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the first message whose text the template leaves out; None: it writes all messages.

    Messages of the assistant are not checked: templates leave out earlier reasoning, and text before tool calls.
    Blanks and switches such as `/no_think` do not count, because templates remove them from messages.
    """
    written = {number for number, start, stop in rendered.messages if rendered.text[start:stop].strip()}
    text = None
    for number, message in enumerate(messages):
        content = message.get("content")
        if message["role"] == "assistant" or number in written or not isinstance(content, str):
            continue
        if content.strip() in rendered.text:
            continue
        escaped = json.dumps(content, ensure_ascii=False)[1:-1]
        text = _without_removable(rendered.text) if text is None else text
        if _without_removable(content) not in text and _without_removable(escaped) not in text:
            return number
    return None


def _without_removable(text: str) -> str:
    return "".join(_removable.sub("", line) for line in text.splitlines())


def is_too_long(tokenizer: Tokenizer, text: str, max_tokens: int) -> bool:
    """Return whether a text certainly has more than `max_tokens` tokens, without encoding all of it.

    The text is encoded piece by piece, until the pieces have twice as many tokens. Cutting a text can add tokens: two
    at each cut. So two tokens of each piece are not counted. The count is then at most twice the number of tokens of
    the text, whatever the normalizer, the longest token or the merges of the tokenizer are, because they act within
    words. Some tokenizers drop whitespace depending on the text around it, so a piece that starts or ends with
    whitespace is encoded with this text.
    """

    def size(text: str) -> int:
        if isinstance(tokenizer, JsonTokenizer):
            return len(tokenizer.encode(text, special=True))
        return len(tokenizer.encode(text))

    count = start = stop = 0  # start of the whitespace before a piece, and end of the whitespace after it
    for begin in range(0, len(text), PIECE):
        piece, end = text[begin : begin + PIECE], min(begin + PIECE, len(text))
        if stop < end:
            stop = _after_whitespace(text, end)
        left = text[max(0, start - AROUND) : start] if piece[0].isspace() else ""
        right = text[stop : stop + AROUND] if piece[-1].isspace() else ""
        count += max(0, size(left + piece + right) - size(left) - size(right) - 2)
        if count > 2 * max_tokens:
            return True
        num_visible = len(piece.rstrip())
        start = begin + num_visible if num_visible else start
    return False


def _after_whitespace(text: str, begin: int) -> int:
    while (match := _whitespace.match(text, begin, begin + PIECE)) is not None:
        begin = match.end()
    return begin


def size_of(value: Any) -> tuple[int, int]:
    """Count the characters of all texts in a JSON value, keys included, and the entries of its lists and objects."""
    characters, entries, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict | list | tuple):
            pending.extend([*item, *item.values()] if isinstance(item, dict) else item)
            entries += len(item)
    return characters, entries


class _PartReader:
    """Converter of messages of OpenAI's API, whose types are checked, to messages for chat templates.

    Unknown fields of a part are dropped.
    """

    def __init__(self, frontend: TextFrontend, max_files: int):
        self._frontend, self._max_files = frontend, max_files
        self.num_files = 0

    def message(self, index: int, original: Mapping[str, Any]) -> dict[str, Any]:
        where, content = f"messages[{index}]", original.get("content")
        role = "system" if original["role"] == "developer" else original["role"]
        message = {**original, "role": role}
        if original.get("tool_calls") is not None:
            message["tool_calls"] = _tool_calls(where, original["tool_calls"])
        if isinstance(content, list):
            parts = [self._part(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            message["content"] = "\n".join(texts) if len(texts) == len(parts) else parts
        return message

    def _part(self, where: str, part: Mapping[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        if kind in ("text", "refusal"):
            return {"type": "text", "text": part[kind]}
        name, processor = FILES[kind], self._frontend.processor
        plural = {"image": "images", "video": "videos", "audio": "audio"}[name]
        if processor is None or getattr(processor, plural) is None:
            raise ApiError(400, f"{where}.type: this model does not take {plural}.", param=f"{where}.type")
        self.num_files += 1
        if self.num_files > self._max_files:
            raise ApiError(400, f"messages have more than {self._max_files} files. Send fewer.", param="messages")
        field = "data" if kind == "input_audio" else "url"
        return {"type": name, name: _upload(f"{where}.{kind}.{field}", part[kind][field], is_url=field == "url")}


def _upload(param: str, text: str, *, is_url: bool) -> Upload:
    """Return the base64 text of a field. `is_url`: the field is a data: URL. Other URLs are refused, not fetched."""
    start = 0
    if is_url:
        start = text.find(",", 0, MAX_URL_HEAD) + 1
        head = text[: max(0, start - 1)].lower()
        if not head.startswith("data:") or not head.endswith(";base64"):
            raise refuse(
                param,
                text,
                "must be a data: URL in base64, such as data:image/png;base64,… This server fetches no files",
            )
    if len(text) == start:
        raise ApiError(400, f"{param} has no bytes.", param=param)
    return Upload(param, text, start)


def _tool_calls(where: str, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return tool calls with their arguments as objects. Raises ApiError for arguments that are not an object."""
    converted = []
    for index, call in enumerate(calls):
        function = call["function"]
        field = f"{where}.tool_calls[{index}].function.arguments"
        arguments = function.get("arguments")
        try:
            value = object_arguments(arguments)
        except ValueError as error:
            raise refuse(field, arguments, "must be a JSON object, such as '{}'") from error
        if not isinstance(value, dict):
            raise refuse(field, arguments, "must be a JSON object, such as '{}'")
        converted.append({**call, "function": {**function, "arguments": value}})
    return converted


def longest_token(tokenizer: Tokenizer) -> int:
    """Return the number of characters of the longest token."""
    if not isinstance(tokenizer, JsonTokenizer):
        return 1
    return max((len(tokenizer.name_of(index) or "") for index in range(tokenizer.vocab_size)), default=1)
