"""Preparation of prompts: token ids and media of texts and conversations."""

import asyncio
import concurrent.futures
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.encoders.media import Media
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.processors.prompts import check_parts
from eqx_decoders.io.text.answers.parser import PROMPT_END
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages, object_arguments
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, prompt_ids
from eqx_decoders.io.text.tool_calls import ToolFormat
from eqx_decoders.media_files.base import ProcessedFile
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.serving.frontend.answer_reader import AnswerReader, create_reader
from eqx_decoders.serving.frontend.api_errors import ApiError, refuse
from eqx_decoders.serving.frontend.chat_rendering import Renderer
from eqx_decoders.serving.frontend.fair_semaphore import FairSemaphore
from eqx_decoders.serving.frontend.media_files import MediaFiles, MediaFilesConfig, Upload
from eqx_decoders.serving.frontend.worker_threads import SLOW, run_in_worker_if_large


# Kind of media by the type of a message part, which is also the name of its field.
FILES = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
HEAD = 1000  # characters of a data: URL before its content
SHRINKS = 4  # characters that a normalizer may merge into one
TYPICAL_CHARACTERS = 8  # per token: shorter texts are encoded without a check of their beginning
PIECE = 1 << 14  # characters that are encoded at once, to check the length of a text
AROUND = 256  # characters around blanks that decide if a tokenizer drops these: longer than any special token
ENTRIES, PER_TOKEN = 20_000, 8  # maximum entries of lists and objects in a conversation, and more per token

_blanks = re.compile(r"\s+")
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
    - `stop_ids`: tokens that end an answer.
    - `defaults`: sampling settings published with the model.
    - `config`, `processor`, `directory`: configuration, processor and directory of a multimodal model; None for a text
        model.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    stop_ids: tuple[int, ...] = ()
    defaults: GenerationConfig = GenerationConfig()
    config: DecoderConfig | None = None
    processor: Processor | None = None
    directory: str | None = None

    def answer_reader(
        self,
        prompt: PreparedPrompt,
        calls: ToolFormat | None,
        tools: Sequence[Any],
        *,
        special: bool,
        must_call: bool = False,
    ) -> AnswerReader | None:
        """Create the reader of an answer to a conversation. See `create_reader` for the arguments.

        Returns None if all text of the answer is content.
        """
        if self.chat is None or not isinstance(self.tokenizer, JsonTokenizer):
            return None
        source, end = self.chat.source_for(tools), prompt.ids[-PROMPT_END:]
        return create_reader(self.tokenizer, source, calls, tools, end, special=special, must_call=must_call)

    @property
    def takes_images(self) -> bool:
        """True for models that take images."""
        return self.processor is not None and self.processor.images is not None

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Encode a text to be continued; without `special`, no tokens are put before it."""
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


class PromptPreparer:
    """Preparation of prompts in threads: a tokenizer is not thread-safe, so it has a thread of its own.

    Files are decoded in processes (see `MediaFiles`), for which texts do not wait.
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
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prompts")
        self._semaphore = FairSemaphore("their prompts", 1)
        self._media_thread = concurrent.futures.ThreadPoolExecutor(1, "packing")
        self._files = None if frontend.directory is None else MediaFiles(frontend.directory, max_length, files)
        # errors of the template go to clients, who need not know where it is
        chat = None if frontend.chat is None else dataclasses.replace(frontend.chat, where="The chat template")
        self._renderer = None if chat is None else Renderer(chat)
        videos = None if frontend.processor is None else frontend.processor.videos
        video_template = None if videos is None else videos.template  # of conversations with videos
        self._video_renderer = None
        if chat is not None and video_template is not None:
            self._video_renderer = Renderer(dataclasses.replace(chat, source=video_template))

    async def run(self, call: Callable[..., Result], *args: Any, client: str = "", **options: Any) -> Result:
        """Call a function that uses the tokenizer, in its thread; clients take turns."""
        bound = functools.partial(call, *args, **options)
        async with self._semaphore.acquire(client):
            return await asyncio.get_running_loop().run_in_executor(self._thread, bound)

    async def text(self, text: str, *, special: bool = True, client: str = "", param: str = "prompt") -> PreparedPrompt:
        """Encode a text."""
        await self.check(text, client, param)
        return PreparedPrompt(await self.run(self.frontend.encode, text, special=special, client=client))

    async def chat(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool, client: str = ""
    ) -> PreparedPrompt:
        """Prepare a conversation and its files."""
        chat, tokenizer = self.frontend.chat, self.frontend.tokenizer
        if chat is None or not isinstance(tokenizer, JsonTokenizer):
            raise ApiError(400, "This model has no chat template: use /v1/completions.", param="messages")
        if "tools" in variables and "tools" not in chat.source_with_tools:
            raise ApiError(400, "This model's chat template knows no tools: leave them out.", param="tools")
        reader = _PartReader(self.frontend, self._max_files)
        contents = [message.get("content") for message in messages]
        size = SLOW * sum(len(content) if isinstance(content, list) else 1 for content in contents)
        converted = await run_in_worker_if_large(size, lambda: [reader.message(*pair) for pair in enumerate(messages)])
        if reader.files:
            return await self._with_media(converted, variables, answer=answer, client=client)
        rendered = await self._render(Conversation(converted, variables, answer), client)
        await self.check(rendered.text, client)
        ids = await self.run(tokenizer.encode, rendered.text, special=True, literal=rendered.literal, client=client)
        return PreparedPrompt(tuple(ids.tolist()))

    async def _with_media(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool, client: str
    ) -> PreparedPrompt:
        """Prepare a conversation with files. It is rendered first: one that cannot be rendered needs no files."""
        assert self._files is not None
        checked, files = await run_in_worker_if_large(SLOW * len(messages), lambda: check_parts(messages))
        renderer = self._video_renderer if files["video"] else None
        rendered = await self._render(Conversation(checked, variables, answer), client, check=list, renderer=renderer)
        await self.check(rendered.text, client)
        async with self._files.read(files, client) as decoded:
            join = functools.partial(self.frontend.join_media, rendered, decoded)
            prompt = await asyncio.get_running_loop().run_in_executor(self._media_thread, join)
            self._files.hold(prompt.media, client)
            return prompt

    def close(self) -> None:
        """End the threads and processes."""
        for renderer in (self._renderer, self._video_renderer):
            if renderer is not None:
                renderer.close()
        if self._files is not None:
            self._files.close()
        for thread in (self._thread, self._media_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, text: str, client: str = "", param: str = "messages") -> None:
        """Raise ApiError for a text that is too long, without encoding all of it: that could take seconds."""
        if len(text) > self._max_characters or (
            len(text) > TYPICAL_CHARACTERS * self._max_length
            and await self.run(is_too_long, self.frontend.tokenizer, text, self._max_length, client=client)
        ):
            self._refuse(len(text), param)

    def _refuse(self, length: int, param: str = "messages") -> NoReturn:
        message = f"The prompt has {length:,} characters, which are more than {self._max_length:,} tokens"
        raise ApiError(400, f"{message}: shorten it.", param=param, code="context_length_exceeded")

    async def _render(
        self,
        conversation: Conversation,
        client: str,
        check: Callable[[Sequence[Any]], list[Any]] = check_messages,
        renderer: Renderer | None = None,
    ) -> Rendered:
        """Render a conversation."""
        renderer = self._renderer if renderer is None else renderer
        assert renderer is not None

        def check_and_measure() -> tuple[Conversation, int, int]:
            messages = check(conversation.messages)
            if "tool_calls" not in renderer.source and any(message.get("tool_calls") for message in messages):
                rule = "This model's chat template leaves out tool_calls: write them as text."
                raise ApiError(400, rule, param="messages")
            return conversation._replace(messages=messages), *size_of(conversation)

        num_messages = len(conversation.messages)
        checked, length, entries = await run_in_worker_if_large(SLOW * num_messages, check_and_measure)
        if length > self._max_characters:
            self._refuse(length)
        if entries > ENTRIES + PER_TOKEN * self._max_length:
            raise ApiError(400, f"messages, tools and chat_template_kwargs have {entries:,} entries: send fewer.")
        try:
            rendered = await renderer.render(checked, length + entries, client)
        except ConversionError as error:
            raise ApiError(400, str(error), param="messages") from error
        find = functools.partial(first_left_out, rendered, checked.messages)
        left_out = await run_in_worker_if_large(SLOW * num_messages + len(rendered.text) // 64, find)
        if left_out is not None:
            role = checked.messages[left_out]["role"]
            content = checked.messages[left_out]["content"]
            rule = f"is left out by this model's chat template: it has the role {role!r} where the template allows none"
            raise refuse(f"messages[{left_out}].content", content, f"{rule}. Move its text to another message")
        return rendered


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
    """Return whether a text surely has more than `max_tokens` tokens, judged from its beginning.

    The text is encoded piece by piece, until the pieces have twice as many tokens. Cutting a text can add tokens: two
    at each cut. So two tokens of each piece don't count; the rest is at most twice the number of the whole text,
    whatever the tokenizer's normalizer, longest token or merges are: those act within words. Some tokenizers drop
    blanks, depending on their neighbors: a piece that begins or ends with blanks is encoded with its neighbors.
    """

    def size(text: str) -> int:
        if isinstance(tokenizer, JsonTokenizer):
            return len(tokenizer.encode(text, special=True))
        return len(tokenizer.encode(text))

    count = start = stop = 0  # start of the blanks before a piece, and end of the blanks after it
    for begin in range(0, len(text), PIECE):
        piece, end = text[begin : begin + PIECE], min(begin + PIECE, len(text))
        if stop < end:
            stop = _after_blanks(text, end)
        left = text[max(0, start - AROUND) : start] if piece[0].isspace() else ""
        right = text[stop : stop + AROUND] if piece[-1].isspace() else ""
        count += max(0, size(left + piece + right) - size(left) - size(right) - 2)
        if count > 2 * max_tokens:
            return True
        num_visible = len(piece.rstrip())
        start = begin + num_visible if num_visible else start
    return False


def _after_blanks(text: str, begin: int) -> int:
    while (match := _blanks.match(text, begin, begin + PIECE)) is not None:
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
    """Converter of OpenAI's messages, checked by their types, to those of chat templates.

    Only known fields of a part are passed on.
    """

    def __init__(self, frontend: TextFrontend, max_files: int):
        self._frontend, self._max_files = frontend, max_files
        self.files = 0

    def message(self, index: int, original: Mapping[str, Any]) -> dict[str, Any]:
        where, content = f"messages[{index}]", original.get("content")
        role = "system" if original["role"] == "developer" else original["role"]
        message = {**original, "role": role}
        if original.get("tool_calls") is not None:
            message["tool_calls"] = _tool_calls(where, original["tool_calls"])
        if isinstance(content, list):
            parts = [self._part(f"{where}.content[{at}]", part) for at, part in enumerate(content)]
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
            raise ApiError(400, f"{where}.type: this model takes no {plural}.", param=f"{where}.type")
        self.files += 1
        if self.files > self._max_files:
            raise ApiError(400, f"messages have more than {self._max_files} files.", param="messages")
        field = "data" if kind == "input_audio" else "url"
        return {"type": name, name: _upload(f"{where}.{kind}.{field}", part[kind][field], is_url=field == "url")}


def _upload(param: str, text: str, *, is_url: bool) -> Upload:
    """Return the base64 text of a field, which is a data: URL where `is_url`. Nothing is fetched from a network."""
    begin = 0
    if is_url:
        begin = text.find(",", 0, HEAD) + 1
        head = text[: max(0, begin - 1)].lower()
        if not head.startswith("data:") or not head.endswith(";base64"):
            rule = "must be a data: URL in base64, such as data:image/png;base64,…: this server fetches no files"
            raise refuse(param, text, rule)
    if len(text) == begin:
        raise ApiError(400, f"{param} has no bytes.", param=param)
    return Upload(param, text, begin)


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
