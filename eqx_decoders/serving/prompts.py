"""From what clients send to what a model reads: texts, conversations and the pictures in them."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.encoders.media import Media
from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text import TextModel, prompt_ids
from eqx_decoders.io.chat import ChatTemplate, Conversation, RenderingProcess, check_messages
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.processors.prompts import check_parts
from eqx_decoders.io.processors.rules import Seen
from eqx_decoders.io.tokenizer import JsonTokenizer, Tokenizer
from eqx_decoders.sampling import GenerationConfig
from eqx_decoders.serving.files import FileReading, FilesConfig, Upload
from eqx_decoders.serving.wire import ApiError, Fields, refuse


# Of each kind of part the field that holds its file, and how that is written.
FILES = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
HEAD = 1000  # letters of a data: URL before its content
SHRINKS = 4  # letters that a normaliser may make one of

Result = TypeVar("Result")


class Read(NamedTuple):
    """A prompt's token ids, and what the model sees and hears beside them."""

    ids: tuple[int, ...]
    media: Media | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """What lies between a model and text.

    **Arguments:**

    - `tokenizer`, `chat`, `published`: those of `TextModel`.
    - `stop_ids`: tokens that end an answer.
    - `defaults`: sampling settings that were published with the model.
    - `config`, `processor`, `directory`: of a model that sees or hears, the last with the settings of its processor;
        None for one that reads text alone.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    published: bool = False
    stop_ids: tuple[int, ...] = ()
    defaults: GenerationConfig = GenerationConfig()
    config: DecoderConfig | None = None
    processor: Processor | None = None
    directory: str | None = None

    @classmethod
    def of(cls, text: TextModel) -> "Language":
        """That of a model, with the rules for its files where its directory has some."""
        origin, tokenizer, processor = text.model.origin, text.tokenizer, None
        folder = None if origin is None or text.model.config.media is None else origin.directory
        if folder is not None and isinstance(tokenizer, JsonTokenizer):
            with contextlib.suppress(ConversionError):  # a directory without the rules for its files: it reads text
                processor = Processor.load(folder)  # with a tokenizer of its own, for its own thread
        return cls(
            tokenizer=tokenizer,
            chat=text.chat,
            published=text.published,
            stop_ids=text.stop_ids,
            defaults=text.model.generation_config,
            config=text.model.config if processor is not None else None,
            processor=processor,
            directory=None if processor is None or folder is None else str(folder),
        )

    @property
    def sees(self) -> bool:
        """Whether pictures can be given."""
        return self.processor is not None and self.processor.pictures is not None

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The ids of a text to be continued; without `special`, nothing is put before it."""
        tokenizer = self.tokenizer
        if not special:
            ids = (
                tokenizer.encode(text, special=True) if isinstance(tokenizer, JsonTokenizer) else tokenizer.encode(text)
            )
        elif self.published and isinstance(tokenizer, JsonTokenizer):
            ids = tokenizer.encode_prompt(text)
        else:
            ids = prompt_ids(tokenizer, text)
        return tuple(ids.tolist())

    def seen(self, text: str, read: Mapping[str, Sequence[Seen]]) -> Read:
        """A rendered conversation with files, which `FileReading` has read."""
        assert self.processor is not None and self.config is not None
        made = self.processor.join(text, read, rendered=True)
        arrays: dict[str, Any] = dict(made.arrays)
        media = Media.create(self.config, made.input_ids, **arrays) if arrays else None
        return Read(tuple(made.input_ids[0].tolist()), media)


class PromptReader:
    """Reads prompts beside the event loop: tokenizers are not made for several threads, so each has one of its own.

    Files are decoded in processes (see `FileReading`), for which texts do not wait.
    """

    def __init__(self, language: Language, *, max_length: int, max_files: int = 16, files: FilesConfig = FilesConfig()):
        self.language = language
        self._max_length, self._max_files = max_length, max_files
        self._most = max_length * longest_token(language.tokenizer) * SHRINKS
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prompts")
        self._packing = concurrent.futures.ThreadPoolExecutor(1, "packing")
        self._files = None if language.directory is None else FileReading(language.directory, max_length, files)
        self._waiting: list[tuple[Conversation, asyncio.Future[str]]] = []
        self._rendering = False
        self._process: RenderingProcess | None = None  # for the next conversations
        self._closed = False

    async def run(self, call: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Call something that takes the tokenizer, in its thread."""
        whole = functools.partial(call, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, whole)

    async def text(self, text: str, *, special: bool = True) -> Read:
        """The ids of a text."""
        self._check(text)
        return Read(await self.run(self.language.encode, text, special=special))

    async def chat(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool, client: str = ""
    ) -> Read:
        """The ids of a conversation, and its files."""
        chat, tokenizer = self.language.chat, self.language.tokenizer
        if chat is None or not isinstance(tokenizer, JsonTokenizer):
            raise ApiError(400, "This model has no chat template: use /v1/completions.", param="messages")
        if "tools" in variables and "tools" not in chat.source:
            raise ApiError(400, "This model's chat template knows no tools: leave them out.", param="tools")
        found = _Parts(self.language, self._max_files, self._max_length)
        plain = [found.message(number, one) for number, one in enumerate(messages)]
        if found.files:
            return await self._seen(plain, variables, answer=answer, client=client)
        text = await self._render(Conversation(check_messages(plain), variables, answer))
        self._check(text)
        ids = await self.run(tokenizer.encode, text, special=True)
        return Read(tuple(ids.tolist()))

    async def _seen(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool, client: str
    ) -> Read:
        """The same with files. The text comes first: what cannot be rendered needs no files."""
        assert self._files is not None and self.language.processor is not None
        whole, files = check_parts(messages)
        conversation, template = Conversation(whole, variables, answer), self.language.processor.template_for(whole)
        if template.source == getattr(self.language.chat, "source", None):
            text = await self._render(conversation)
        else:  # one for films
            text = await asyncio.to_thread(_rendered, template, conversation)
        self._check(text)
        async with self._files.read(files, client) as read:
            make = functools.partial(self.language.seen, text, read)
            made = await asyncio.get_running_loop().run_in_executor(self._packing, make)
            self._files.hold(made.media)
            return made

    def close(self) -> None:
        """End the threads, and the processes."""
        self._closed = True
        if self._process is not None:
            self._process.close()
        if self._files is not None:
            self._files.close()
        for thread in (self._thread, self._packing):
            thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, text: str) -> None:
        """Refuse what cannot fit before it's encoded: millions of letters take seconds."""
        if len(text) > self._most:
            told = f"The prompt has {len(text):,} characters, which are more than {self._max_length:,} tokens"
            raise ApiError(400, f"{told}: shorten it.", code="context_length_exceeded")

    async def _render(self, conversation: Conversation) -> str:
        """The text of a conversation. Those that come while a process renders share the next one: each costs 0.1 s."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((conversation, done))
        if not self._rendering:
            self._rendering = True
            self._task = asyncio.ensure_future(self._render_all())
        return await done

    async def _render_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:32], self._waiting[32:]
                batch = [(one, done) for one, done in batch if not done.done()]
                if batch:
                    await self._render_batch(batch)
        finally:
            self._rendering = False

    async def _render_batch(self, batch: Sequence[tuple[Conversation, asyncio.Future[str]]]) -> None:
        try:
            found: Sequence[Any] = await asyncio.to_thread(self._render_many, [one for one, _ in batch])
        except Exception as error:
            if len(batch) > 1:  # one of them ended the process: each for itself
                for one in batch:
                    await self._render_batch([one])
                return
            found = [error]
        for (_, done), one in zip(batch, found, strict=True):
            if done.done():
                continue
            if isinstance(one, Exception):
                done.set_exception(one)
            else:
                done.set_result(one.text)

    def _render_many(self, conversations: Sequence[Conversation]) -> Sequence[Any]:
        """In the process that waits for it, if there is one; another one then waits for the next conversations."""
        process, self._process = self._process, None
        assert self.language.chat is not None
        try:
            return self.language.chat.render_many(conversations, process)
        finally:
            if not self._closed:
                self._process = RenderingProcess()


def _rendered(template: ChatTemplate, conversation: Conversation) -> str:
    (found,) = template.render_many([conversation])
    if isinstance(found, Exception):
        raise found
    return found.text


class _Parts:
    """Turns OpenAI's messages into those of chat templates. Only what is known here of a part goes on."""

    def __init__(self, language: Language, max_files: int, max_parts: int):
        self._language, self._max_files, self._left = language, max_files, max_parts
        self.files = 0

    def message(self, number: int, given: Mapping[str, Any]) -> dict[str, Any]:
        where, content = f"messages[{number}]", given.get("content")
        role = "system" if given["role"] == "developer" else given["role"]
        message = {**given, "role": role}
        if given.get("tool_calls") is not None:
            message["tool_calls"] = _tool_calls(where, given["tool_calls"])
        if isinstance(content, list):
            self._left -= len(content)
            if self._left < 0:
                told = f"{where}.content: messages have more parts than the model takes tokens"
                raise ApiError(400, f"{told}: send fewer.", param="messages", code="context_length_exceeded")
            parts = [self._part(f"{where}.content[{at}]", part) for at, part in enumerate(content)]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            message["content"] = "\n".join(texts) if len(texts) == len(parts) else parts
        return message

    def _part(self, where: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise refuse(where, given, "must be an object with a type")
        fields = Fields(given, where)
        kind = fields.word("type", ("text", *FILES))
        if kind is None:
            raise refuse(where, given, f"must have a type: text, {', '.join(FILES)}")
        if kind == "text":
            text = fields.text("text")
            if text is None:
                raise fields.refuse("text", "must be a text")
            return {"type": "text", "text": text}
        return self._file(fields, kind)

    def _file(self, fields: Fields, kind: str) -> dict[str, Any]:
        name, processor = FILES[kind], self._language.processor
        takes = {"image": "pictures", "video": "films", "audio": "sounds"}[name]
        if processor is None or getattr(processor, takes) is None:
            raise ApiError(400, f"{fields.name('type')}: this model takes no {takes}.", param=fields.name("type"))
        self.files += 1
        if self.files > self._max_files:
            raise ApiError(400, f"messages have more than {self._max_files} files.", param="messages")
        inner = fields.inner(kind)
        if inner is None:
            raise fields.refuse(kind, "must be an object with the file")
        field = "data" if kind == "input_audio" else "url"
        return {"type": name, name: _upload(inner, field, whole=field == "url")}


def _upload(fields: Fields, field: str, *, whole: bool) -> Upload:
    """What is in base64, of a data: URL where `whole`. Nothing is fetched from a network."""
    text = fields.text(field)
    if text is None:
        raise fields.refuse(field, "must be a text")
    begin = 0
    if whole:
        begin = text.find(",", 0, HEAD) + 1
        head = text[: max(0, begin - 1)].lower()
        if not head.startswith("data:") or not head.endswith(";base64"):
            rule = "must be a data: URL in base64, such as data:image/png;base64,…: this server fetches no files"
            raise fields.refuse(field, rule)
    if len(text) == begin:
        raise ApiError(400, f"{fields.name(field)} has no bytes.", param=fields.name(field))
    return Upload(fields.name(field), text, begin)


def _tool_calls(where: str, given: Any) -> list[Any]:
    """Calls whose arguments are objects, as templates take them; OpenAI has them as texts."""
    if not isinstance(given, list):
        raise refuse(f"{where}.tool_calls", given, "must be a list")
    calls = []
    for one in given:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict):
            raise refuse(f"{where}.tool_calls", one, "must be objects with a function")
        given_arguments = function.get("arguments")
        try:
            arguments = json.loads(given_arguments) if isinstance(given_arguments, str) else given_arguments
        except (ValueError, RecursionError) as error:
            raise refuse(f"{where}.tool_calls", given_arguments, "must have arguments in JSON") from error
        calls.append({**one, "function": {**function, "arguments": arguments}})
    return calls


def longest_token(tokenizer: Tokenizer) -> int:
    """The most letters that one token stands for."""
    if not isinstance(tokenizer, JsonTokenizer):
        return 1
    return max((len(tokenizer.name_of(index) or "") for index in range(tokenizer.vocab_size)), default=1)
