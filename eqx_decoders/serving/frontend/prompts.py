"""From what clients send to what a model reads: texts, conversations and the images in them."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.encoders.media import Media
from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text_model import TextModel, prompt_ids
from eqx_decoders.io.processors.base import ProcessedFile
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.processors.prompts import check_parts
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, check_messages
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer
from eqx_decoders.model.decoder import DecoderConfig
from eqx_decoders.serving.frontend.chat_rendering import Renderer
from eqx_decoders.serving.frontend.fair_turns import FairTurns
from eqx_decoders.serving.frontend.media_files import MediaFiles, MediaFilesConfig, Upload
from eqx_decoders.serving.frontend.threads import SLOW, unless_small
from eqx_decoders.serving.http.json_fields import ApiError, JsonFields, refuse


# Of each kind of part the field that holds its file, and how that is written.
FILES = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
HEAD = 1000  # letters of a data: URL before its content
SHRINKS = 4  # letters that a normaliser may make one of
LETTERS = 8  # of a token: shorter texts are encoded without a look at their beginning
PIECE = 1 << 14  # letters that are encoded at once, to see whether a text is too long
AROUND = 256  # letters around blanks that tell whether these are dropped: more than the name of a special token has
ENTRIES, PER_TOKEN = 20_000, 8  # of lists and objects in a conversation, at most; more where more tokens are taken

_blanks = re.compile(r"\s+")

Result = TypeVar("Result")


class PreparedPrompt(NamedTuple):
    """A prompt's token ids, and what the model sees and hears beside them."""

    ids: tuple[int, ...]
    media: Media | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFrontend:
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
    def of(cls, text: TextModel, *, special_tokens_in_content: bool = False) -> "TextFrontend":
        """That of a model, with the rules for its files where its directory has some.

        special_tokens_in_content: names of special tokens in messages become these; else they are letters, since
        clients pass on what strangers wrote.
        """
        text = text if special_tokens_in_content else text.with_letters()
        origin, tokenizer, processor = text.model.origin, text.tokenizer, None
        folder = None if origin is None or text.model.config.media is None else origin.directory
        if folder is not None and isinstance(tokenizer, JsonTokenizer):
            with contextlib.suppress(ConversionError):  # a directory without the rules for its files: it reads text
                processor = Processor.load(folder)  # with a tokenizer of its own, for its own thread
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
            directory=None if processor is None or folder is None else str(folder),
        )

    @property
    def sees(self) -> bool:
        """Whether images can be given."""
        return self.processor is not None and self.processor.images is not None

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

    def seen(self, text: Rendered, read: Mapping[str, Sequence[ProcessedFile]]) -> PreparedPrompt:
        """A rendered conversation with files, which `MediaFiles` has read."""
        assert self.processor is not None and self.config is not None
        made = self.processor.join(text, read)
        arrays: dict[str, Any] = dict(made.arrays)
        media = Media.create(self.config, made.input_ids, **arrays) if arrays else None
        return PreparedPrompt(tuple(made.input_ids[0].tolist()), media)


class PromptPreparer:
    """Reads prompts beside the event loop: tokenizers are not made for several threads, so each has one of its own.

    Files are decoded in processes (see `MediaFiles`), for which texts do not wait.
    """

    def __init__(
        self,
        language: TextFrontend,
        *,
        max_length: int,
        max_files: int = 16,
        files: MediaFilesConfig = MediaFilesConfig(),
    ):
        self.language = language
        self._max_length, self._max_files = max_length, max_files
        self._most = max_length * longest_token(language.tokenizer) * SHRINKS
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prompts")
        self._turns = FairTurns("their prompts", 1)
        self._packing = concurrent.futures.ThreadPoolExecutor(1, "packing")
        self._files = None if language.directory is None else MediaFiles(language.directory, max_length, files)
        # errors of the template go to clients, who need not know where it is
        chat = None if language.chat is None else dataclasses.replace(language.chat, where="The chat template")
        self._renderer = None if chat is None else Renderer(chat)
        videos = None if language.processor is None else language.processor.videos
        own = None if videos is None else videos.template  # of conversations with videos
        self._video_renderer = None if chat is None or own is None else Renderer(dataclasses.replace(chat, source=own))

    async def run(self, call: Callable[..., Result], *args: Any, client: str = "", **options: Any) -> Result:
        """Call something that takes the tokenizer, in its thread; clients take turns."""
        whole = functools.partial(call, *args, **options)
        async with self._turns.turn(client):
            return await asyncio.get_running_loop().run_in_executor(self._thread, whole)

    async def text(self, text: str, *, special: bool = True, client: str = "") -> PreparedPrompt:
        """The ids of a text."""
        await self.check(text, client)
        return PreparedPrompt(await self.run(self.language.encode, text, special=special, client=client))

    async def chat(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool, client: str = ""
    ) -> PreparedPrompt:
        """The ids of a conversation, and its files."""
        chat, tokenizer = self.language.chat, self.language.tokenizer
        if chat is None or not isinstance(tokenizer, JsonTokenizer):
            raise ApiError(400, "This model has no chat template: use /v1/completions.", param="messages")
        if "tools" in variables and "tools" not in chat.source:
            raise ApiError(400, "This model's chat template knows no tools: leave them out.", param="tools")
        found = _Parts(self.language, self._max_files, self._max_length)
        count = sum(len(one["content"]) if isinstance(one.get("content"), list) else 1 for one in messages)
        plain = await unless_small(SLOW * count, lambda: [found.message(*pair) for pair in enumerate(messages)])
        if found.files:
            return await self._seen(plain, variables, answer=answer, client=client)
        rendered = await self._render(Conversation(plain, variables, answer), client)
        await self.check(rendered.text, client)
        ids = await self.run(tokenizer.encode, rendered.text, special=True, literal=rendered.literal, client=client)
        return PreparedPrompt(tuple(ids.tolist()))

    async def _seen(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, answer: bool, client: str
    ) -> PreparedPrompt:
        """The same with files. The text comes first: what cannot be rendered needs no files."""
        assert self._files is not None
        whole, files = await unless_small(SLOW * len(messages), lambda: check_parts(messages))
        renderer = self._video_renderer if files["video"] else None
        text = await self._render(Conversation(whole, variables, answer), client, check=list, renderer=renderer)
        await self.check(text.text, client)
        async with self._files.read(files, client) as read:
            make = functools.partial(self.language.seen, text, read)
            made = await asyncio.get_running_loop().run_in_executor(self._packing, make)
            self._files.hold(made.media, client)
            return made

    def close(self) -> None:
        """End the threads, and the processes."""
        for renderer in (self._renderer, self._video_renderer):
            if renderer is not None:
                renderer.close()
        if self._files is not None:
            self._files.close()
        for thread in (self._thread, self._packing):
            thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, text: str, client: str = "") -> None:
        """ApiError for a text that cannot fit, before it is encoded whole: millions of letters take seconds."""
        if len(text) > self._most or (
            len(text) > LETTERS * self._max_length
            and await self.run(is_too_long, self.language.tokenizer, text, self._max_length, client=client)
        ):
            self._refuse(len(text))

    def _refuse(self, letters: int) -> NoReturn:
        told = f"The prompt has {letters:,} characters, which are more than {self._max_length:,} tokens"
        raise ApiError(400, f"{told}: shorten it.", code="context_length_exceeded")

    async def _render(
        self,
        conversation: Conversation,
        client: str,
        check: Callable[[Sequence[Any]], list[Any]] = check_messages,
        renderer: Renderer | None = None,
    ) -> Rendered:
        """The text of a conversation."""
        renderer = self._renderer if renderer is None else renderer
        assert renderer is not None

        def measured() -> tuple[Conversation, int, int]:
            whole = conversation._replace(messages=check(conversation.messages))
            if "tool_calls" not in renderer.source and any(one.get("tool_calls") for one in whole.messages):
                rule = "This model's chat template leaves out tool_calls: write them as text."
                raise ApiError(400, rule, param="messages")
            return whole, *size_of(conversation)

        checked, letters, entries = await unless_small(SLOW * len(conversation.messages), measured)
        if letters > self._most:
            self._refuse(letters)
        if entries > ENTRIES + PER_TOKEN * self._max_length:
            raise ApiError(400, f"messages, tools and chat_template_kwargs have {entries:,} entries: send fewer.")
        return await renderer.render(checked, letters + entries, client)


def is_too_long(tokenizer: Tokenizer, text: str, most: int) -> bool:
    """Whether a text surely has more than so many tokens, as far as its beginning tells.

    It is encoded piece by piece, until these have twice as many tokens. A text may have fewer than its pieces: where it
    is cut, two tokens for one. So of each piece two tokens don't count; what is left is at most twice what the whole
    has, whatever the tokenizer's normaliser, longest token or rules of merging are: those act within words. Some drop
    blanks, depending on what is around them: a piece that begins or ends with some is encoded with that.
    """

    def size(text: str) -> int:
        if isinstance(tokenizer, JsonTokenizer):
            return len(tokenizer.encode(text, special=True))
        return len(tokenizer.encode(text))

    count = start = stop = 0  # the last two: of the blanks at a piece's begin, and at its end
    for begin in range(0, len(text), PIECE):
        piece, end = text[begin : begin + PIECE], min(begin + PIECE, len(text))
        if stop < end:
            stop = _after_blanks(text, end)
        before = text[max(0, start - AROUND) : start] if piece[0].isspace() else ""
        behind = text[stop : stop + AROUND] if piece[-1].isspace() else ""
        count += max(0, size(before + piece + behind) - size(before) - size(behind) - 2)
        if count > 2 * most:
            return True
        shown = len(piece.rstrip())
        start = begin + shown if shown else start
    return False


def _after_blanks(text: str, at: int) -> int:
    while (found := _blanks.match(text, at, at + PIECE)) is not None:
        at = found.end()
    return at


def size_of(value: Any) -> tuple[int, int]:
    """Count the characters of all texts within a JSON value, keys among them, and the entries of lists and objects."""
    letters, entries, left = 0, 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            letters += len(one)
        elif isinstance(one, dict | list | tuple):
            left.extend([*one, *one.values()] if isinstance(one, dict) else one)
            entries += len(one)
    return letters, entries


class _Parts:
    """Turns OpenAI's messages into those of chat templates. Only what is known here of a part goes on."""

    def __init__(self, language: TextFrontend, max_files: int, max_parts: int):
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
        fields = JsonFields(given, where)
        kind = fields.word("type", ("text", *FILES))
        if kind is None:
            raise refuse(where, given, f"must have a type: text, {', '.join(FILES)}")
        if kind == "text":
            text = fields.text("text")
            if text is None:
                raise fields.refuse("text", "must be a text")
            return {"type": "text", "text": text}
        return self._file(fields, kind)

    def _file(self, fields: JsonFields, kind: str) -> dict[str, Any]:
        name, processor = FILES[kind], self._language.processor
        takes = {"image": "images", "video": "videos", "audio": "audio"}[name]
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


def _upload(fields: JsonFields, field: str, *, whole: bool) -> Upload:
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
