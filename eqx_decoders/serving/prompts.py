"""From what clients send to what a model reads: texts, conversations and the pictures in them."""

import asyncio
import base64
import binascii
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
from eqx_decoders.io.chat import ChatTemplate, Conversation, Rendered, RenderingProcess, check_messages
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.tokenizer import JsonTokenizer, Tokenizer
from eqx_decoders.sampling import GenerationConfig
from eqx_decoders.serving.wire import ApiError, Fields, refuse


# Of each kind of part the field that holds its file, and how that is written.
FILES = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
# Of one file from a stranger.
LIMITS = MediaLimits(
    max_pixels=40_000_000, max_film_pixels=1 << 26, max_decoded_pixels=1 << 33, max_seconds=600.0, max_files=64
)
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
    - `config`, `processor`: of a model that sees or hears; None for one that reads text alone.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    published: bool = False
    stop_ids: tuple[int, ...] = ()
    defaults: GenerationConfig = GenerationConfig()
    config: DecoderConfig | None = None
    processor: Processor | None = None

    @classmethod
    def of(cls, text: TextModel, *, special_tokens_in_content: bool = False) -> "Language":
        """That of a model, with the rules for its files where its directory has some.

        special_tokens_in_content: names of special tokens in messages become these; else they are letters, since
        clients pass on what strangers wrote.
        """
        text = text if special_tokens_in_content else text.with_letters()
        origin, tokenizer, processor = text.model.origin, text.tokenizer, None
        folder = None if origin is None or text.model.config.media is None else origin.directory
        if folder is not None and isinstance(tokenizer, JsonTokenizer):
            with contextlib.suppress(ConversionError):  # a directory without the rules for its files: it reads text
                processor = Processor.load(folder, limits=LIMITS)  # with a tokenizer of its own, for its own thread
                processor = processor.with_letters(() if text.chat is None else text.chat.literal)
        for one in (tokenizer, None if processor is None else processor.tokenizer):
            if isinstance(one, JsonTokenizer) and text.chat is not None and text.chat.literal:
                one.renamed  # noqa: B018 - made now, as it takes a second
        return cls(
            tokenizer=tokenizer,
            chat=text.chat,
            published=text.published,
            stop_ids=text.stop_ids,
            defaults=text.model.generation_config,
            config=text.model.config if processor is not None else None,
            processor=processor,
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

    def seen(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool) -> Read:
        """A conversation with files."""
        assert self.processor is not None and self.config is not None
        made = self.processor(messages, add_generation_prompt=answer, **variables)
        arrays: dict[str, Any] = dict(made.arrays)
        media = Media.create(self.config, made.input_ids, **arrays) if arrays else None
        return Read(tuple(made.input_ids[0].tolist()), media)


class PromptReader:
    """Reads prompts beside the event loop: tokenizers are not made for several threads, so each has one of its own.

    A film takes seconds, which texts do not wait for.
    """

    def __init__(self, language: Language, *, max_length: int, max_files: int = 16):
        self.language = language
        self._max_length, self._max_files = max_length, max_files
        self._most = max_length * longest_token(language.tokenizer) * SHRINKS
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prompts")
        self._files = concurrent.futures.ThreadPoolExecutor(1, "files")
        self._waiting: list[tuple[Conversation, asyncio.Future[Rendered]]] = []
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

    async def chat(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool) -> Read:
        """The ids of a conversation, and its files."""
        chat, tokenizer = self.language.chat, self.language.tokenizer
        if chat is None or not isinstance(tokenizer, JsonTokenizer):
            raise ApiError(400, "This model has no chat template: use /v1/completions.", param="messages")
        if "tools" in variables and "tools" not in chat.source:
            raise ApiError(400, "This model's chat template knows no tools: leave them out.", param="tools")
        if any(one.get("tool_calls") for one in messages) and "tool_calls" not in chat.source:
            raise ApiError(
                400, "This model's chat template leaves out tool_calls: write them as text.", param="messages"
            )
        found = _Parts(self.language, self._max_files)
        plain = [found.message(number, one) for number, one in enumerate(messages)]
        if found.files:
            seen = functools.partial(self.language.seen, plain, variables, answer=answer)
            return await asyncio.get_running_loop().run_in_executor(self._files, seen)
        rendered = await self._render(Conversation(check_messages(plain), variables, answer))
        self._check(rendered.text)
        ids = await self.run(tokenizer.encode, rendered.text, special=True, literal=rendered.literal)
        return Read(tuple(ids.tolist()))

    def close(self) -> None:
        """End the threads, and the process that waits."""
        self._closed = True
        if self._process is not None:
            self._process.close()
        for thread in (self._thread, self._files):
            thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, text: str) -> None:
        """Refuse what cannot fit before it's encoded: millions of letters take seconds."""
        if len(text) > self._most:
            told = f"The prompt has {len(text):,} characters, which are more than {self._max_length:,} tokens"
            raise ApiError(400, f"{told}: shorten it.", code="context_length_exceeded")

    async def _render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation. Those that come while a process renders share the next one: each costs 0.1 s."""
        done: asyncio.Future[Rendered] = asyncio.get_running_loop().create_future()
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

    async def _render_batch(self, batch: Sequence[tuple[Conversation, asyncio.Future[Rendered]]]) -> None:
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
                done.set_result(one)

    def _render_many(self, conversations: Sequence[Conversation]) -> Sequence[Any]:
        """In the process that waits for it, if there is one; another one then waits for the next conversations."""
        process, self._process = self._process, None
        assert self.language.chat is not None
        try:
            return self.language.chat.render_many(conversations, process)
        finally:
            if not self._closed:
                self._process = RenderingProcess()


class _Parts:
    """Turns OpenAI's messages into those of chat templates. Only what is known here of a part goes on."""

    def __init__(self, language: Language, max_files: int):
        self._language, self._max_files = language, max_files
        self.files = 0

    def message(self, number: int, given: Mapping[str, Any]) -> dict[str, Any]:
        where, content = f"messages[{number}]", given.get("content")
        role = "system" if given["role"] == "developer" else given["role"]
        message = {**given, "role": role}
        if given.get("tool_calls") is not None:
            message["tool_calls"] = _tool_calls(where, given["tool_calls"])
        if isinstance(content, list):
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
        return {"type": name, name: _decoded(inner, field, whole=field == "url")}


def _decoded(fields: Fields, field: str, *, whole: bool) -> bytes:
    """The bytes in base64, of a data: URL where `whole`. Nothing is fetched from a network."""
    text = fields.text(field)
    if text is None:
        raise fields.refuse(field, "must be a text")
    if whole:
        head, comma, text = text.partition(",")
        if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
            rule = "must be a data: URL in base64, such as data:image/png;base64,…: this server fetches no files"
            raise fields.refuse(field, rule)
    try:
        found = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"{fields.name(field)} is no base64: {error}.", param=fields.name(field)) from error
    if not found:
        raise ApiError(400, f"{fields.name(field)} has no bytes.", param=fields.name(field))
    return found


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
