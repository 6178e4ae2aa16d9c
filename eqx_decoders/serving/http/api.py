"""OpenAI's API in front of an engine: what each address does, whatever carries the requests (see `app.py`)."""

import contextlib
import dataclasses
import hmac
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from eqx_decoders.errors import EqxDecodersError, MissingPackage
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.serving.engine.request import QueueFull, Request
from eqx_decoders.serving.frontend.detokenizer import CONTEXT, Detokenizer, TokenTexts, decode
from eqx_decoders.serving.frontend.prompts import PreparedPrompt, PromptPreparer, TextFrontend
from eqx_decoders.serving.frontend.structured_output import GrammarCompiler, TokenConstraint
from eqx_decoders.serving.frontend.threads import SLOW, beside, unless_small
from eqx_decoders.serving.http import known_fields
from eqx_decoders.serving.http.chat_page import page
from eqx_decoders.serving.http.engine_thread import EngineThread, NotServing, RequestOutputs
from eqx_decoders.serving.http.incremental_json import SMALL
from eqx_decoders.serving.http.json_fields import LARGEST, ApiError, JsonFields, parse, token_of
from eqx_decoders.serving.http.metrics import Clock, Metrics
from eqx_decoders.serving.http.protocol import (
    ApiConfig,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    choice_seed,
    read_chat,
    read_completion,
    read_messages,
    read_variables,
)
from eqx_decoders.serving.http.responses import ChatResponseBuilder, Choice, Echo, ResponseBuilder
from eqx_decoders.serving.http.streaming import EventStream, HttpResponse, PendingResponse


LEAST_ENTRIES = 10_000
ECHOED = 1 << 22  # letters of prompts in one response, at most
RETRY_AFTER = 1  # seconds, after which a queue that is full may have room

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """One request of HTTP.

    - `request_id`: under which it is answered and logged.
    - `client`: requests take turns by it: which API key, or where it is from.
    - `arrived`: by `time.monotonic`.
    """

    request_id: str
    client: str = ""
    with_key: bool = False
    body: bytes = b""
    arrived: float = dataclasses.field(default_factory=time.monotonic)


class Api:
    """What a server does with requests.

    **Arguments:**

    - `language`: what lies between the model and text.
    - `worker`: of the model's engine, started.
    - `config`: what is taken.
    """

    def __init__(self, language: TextFrontend, worker: EngineThread, config: ApiConfig):
        self.language, self.worker, self.config = language, worker, config
        self.metrics = Metrics(config.name, lambda: worker.counts)
        self.stopping = False
        self._reader = PromptPreparer(language, max_length=config.max_length, max_files=config.max_files)
        self._forms = GrammarCompiler(language.tokenizer, config.vocab_size, language.stop_ids)
        self._forms.warm_up()
        self._texts = TokenTexts(language.tokenizer)
        self._entries = max(config.max_length, config.max_choices, LEAST_ENTRIES)  # of a list in a large body
        self._seeds = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()
        self._created = int(time.time())
        self._page = page(config.name, max_length=config.max_length, sees=language.sees, key=bool(config.api_keys))

    def key(self, given: str | None) -> int | None:
        """Which API key a header `Authorization` has; -1 where none is needed, None for a wrong one."""
        if not self.config.api_keys:
            return -1
        kind, _, key = (given or "").partition(" ")
        # all are compared, each in the same time: how long it takes tells nothing
        same = [hmac.compare_digest(key.strip().encode(), known.encode()) for known in self.config.api_keys]
        return same.index(True) if any(same) and kind.lower() == "bearer" else None

    def close(self) -> None:
        """End the threads that read and compile, and the processes."""
        self._reader.close()
        self._forms.close()

    # --- what is asked about the server -------------------------------------------------------------------------------

    async def health(self, call: HttpRequest) -> HttpResponse:
        """200 while requests are taken, 503 from when the server is told to stop, or its engine fails or hangs."""
        state = "hanging" if self.worker.hangs else "ok" if self.worker.state == "running" else "stopping"
        state = "failed" if self.worker.state == "failed" else "stopping" if self.stopping else state
        good = state == "ok"
        return HttpResponse.json({"status": state}, 200 if good else 503)

    async def show_metrics(self, call: HttpRequest) -> HttpResponse:
        """For Prometheus."""
        return HttpResponse(content=self.metrics.text(), content_type=self.metrics.content_type)

    async def show_page(self, call: HttpRequest) -> HttpResponse:
        """A page to chat with the model."""
        html = "text/html; charset=utf-8"
        return HttpResponse(content=self._page.content, content_type=html, headers=self._page.headers)

    async def models(self, call: HttpRequest) -> HttpResponse:
        """The one model."""
        return HttpResponse.json({"object": "list", "data": [self._model]})

    async def model(self, call: HttpRequest, name: str) -> HttpResponse:
        """What is known of it."""
        self._check_model(name)
        return HttpResponse.json(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        found = {"id": self.config.name, "object": "model", "created": self._created, "owned_by": "eqx_decoders"}
        return {**found, "root": self.config.name, "parent": None, "max_model_len": self.config.max_length}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.name:
            message = f"model={name[:60]!r} is not served here: ask for {self.config.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    # --- the tokenizer ------------------------------------------------------------------------------------------------

    async def tokenize(self, call: HttpRequest) -> HttpResponse:
        """The ids of a text, or of a conversation as it is written for an answer."""

        def read(body: dict[str, Any]) -> tuple[str, bool, Sequence[dict[str, Any]], dict[str, Any]]:
            fields = JsonFields(body)
            fields.check_known(known_fields.TOKENIZE, known_fields.NEUTRAL, known_fields.ADVICE)
            if fields.has("messages"):
                answer, variables = fields.flag("add_generation_prompt", True), read_variables(fields)
                return "", answer, read_messages(fields, self.config), variables
            text = fields.text("prompt")
            if text is None:
                raise ApiError(400, "prompt is missing: give a text.", param="prompt")
            return text, fields.flag("add_special_tokens", True), (), {}

        text, flag, messages, variables = await self._asked(call, read)
        reading = self._reader.chat(messages, variables, answer=flag, client=call.client) if messages else None
        if reading is None:
            reading = self._reader.text(text, special=flag, client=call.client)
        found = await self._checked(reading)
        whole = {"tokens": found.ids, "count": len(found.ids), "max_model_len": self.config.max_length}
        return await unless_small(len(found.ids), lambda: HttpResponse.json(whole))

    async def detokenize(self, call: HttpRequest) -> HttpResponse:
        """The text of ids."""
        most = self.config.vocab_size

        def read(body: dict[str, Any]) -> tuple[int, ...]:
            fields = JsonFields(body)
            fields.check_known(known_fields.DETOKENIZE, known_fields.NEUTRAL, known_fields.ADVICE)
            rule = f"token ids from 0 to {most - 1}"
            return fields.many("tokens", lambda value: token_of(value, most), rule, most=self._entries)

        tokens = await self._asked(call, read)
        made = self._reader.run(decode, self.language.tokenizer, tokens, special=True, client=call.client)
        text = await self._checked(made)
        return await unless_small(len(text) // 8, lambda: HttpResponse.json({"prompt": text}))

    async def tokenizer_info(self, call: HttpRequest) -> HttpResponse:
        """What a client needs to write prompts itself."""
        tokenizer, chat = self.language.tokenizer, self.language.chat

        def name(token: int | None) -> str | None:
            return None if token is None or not isinstance(tokenizer, JsonTokenizer) else tokenizer.name_of(token)

        found: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size}
        found |= {"bos_token": name(tokenizer.bos_id), "eos_token": name(tokenizer.eos_id), "pad_token": None}
        found |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        found |= {"model_max_length": self.config.max_length, "chat_template": None if chat is None else chat.source}
        return HttpResponse.json(found)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def completions(self, call: HttpRequest) -> HttpResponse | EventStream:
        """Texts, or token ids, continued."""
        seed = self._seeds.getrandbits(63)
        asked = await self._asked(call, lambda body: read_completion(body, self.config, seed))
        reads: list[PreparedPrompt] = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                reading = self._reader.text(prompt, special=asked.add_special_tokens, client=call.client)
                reads.append(await self._checked(reading))
            else:
                reads.append(PreparedPrompt(prompt))
        size = sum(len(read.ids) for read in reads) // 8
        rooms = await unless_small(size, lambda: self._rooms(asked, reads, usual=16, echo=asked.echo))
        choices = await self._choices(asked, reads, call.client)
        shape = ResponseBuilder(call.request_id, self.config.name, asked, self._texts)
        return await self._answer(call, asked, shape, reads, rooms, choices, echo=asked.echo)

    async def chat(self, call: HttpRequest) -> HttpResponse | EventStream:
        """A conversation, answered."""
        seed = self._seeds.getrandbits(63)
        asked: ChatCompletionRequest = await self._asked(call, lambda body: read_chat(body, self.config, seed))
        answer = asked.add_generation_prompt
        reading = self._reader.chat(asked.messages, asked.variables, answer=answer, client=call.client)
        read = await self._checked(reading)
        rooms = self._rooms(asked, [read])
        choices = [Choice(asked, self.language.tokenizer) for _ in range(asked.n)]
        shape = ChatResponseBuilder(call.request_id, self.config.name, asked, self._texts)
        return await self._answer(call, asked, shape, [read], rooms, choices)

    async def _choices(self, asked: CompletionRequest, reads: Sequence[PreparedPrompt], client: str) -> list[Choice]:
        tokenizer = self.language.tokenizer
        pairs = zip(reads, asked.prompts, strict=True)
        echoes = [await self._echo(*pair, client) if asked.echo else None for pair in pairs]
        letters = asked.n * sum(len(echo.text) for echo in echoes if echo is not None)
        if letters > ECHOED:
            told = f"echo=true gives prompts of {letters:,} characters back, {asked.n} times each"
            raise ApiError(400, f"{told}: at most {ECHOED:,} are given.", param="echo", code="too_many")

        def begin() -> list[Detokenizer]:
            return [Detokenizer(tokenizer, read.ids, special=asked.special) for read in reads]

        options: dict[str, Any] = {"write": asked.max_tokens != 0}
        texts = await unless_small(2 * CONTEXT * SLOW * len(reads), begin)
        each = [(text, echo) for text, echo in zip(texts, echoes, strict=True) for _ in range(asked.n)]
        return [Choice(asked, tokenizer, text=text, echo=echo, **options) for text, echo in each]

    async def _echo(self, read: PreparedPrompt, prompt: str | Sequence[int], client: str) -> Echo:
        if isinstance(prompt, str):
            return Echo(text=prompt, ids=read.ids)
        return Echo(text=await self._reader.run(decode, self.language.tokenizer, prompt, client=client), ids=read.ids)

    def _rooms(
        self, asked: GenerationRequest, reads: Sequence[PreparedPrompt], *, usual: int = LARGEST, echo: bool = False
    ) -> list[int]:
        """The most tokens of the answers to each prompt, or ApiError where that cannot be, or has too many scores."""
        rooms = [self._room(read, asked.max_tokens, usual) for read in reads]
        if asked.logprobs is None:
            return rooms
        each, most = asked.n * (1 + asked.logprobs), self.config.max_scores
        scored = sum(len(read.ids) for read in reads) if echo else 0
        left = most // each - scored  # tokens of the answers to all prompts
        wanted = len(reads) if asked.max_tokens is None else sum(rooms)
        if wanted > left:
            told = f"{scored + wanted:,} tokens with {1 + asked.logprobs} log-probabilities each, {asked.n} times"
            raise ApiError(400, f"{told}, are more than {most:,}: ask for fewer.", param="logprobs", code="too_many")
        return [min(room, left // len(reads)) if asked.max_tokens is None else room for room in rooms]

    def _room(self, read: PreparedPrompt, asked: int | None, usual: int) -> int:
        """The most tokens that an answer may have, or ApiError for a prompt that leaves too little room for it."""
        count, most = len(read.ids), self.config.max_length
        if count == 0:
            raise ApiError(
                400, "prompt='' is empty, and the tokenizer has no token that begins a text.", param="prompt"
            )
        if max(read.ids) >= self.config.vocab_size:
            raise ApiError(400, f"prompt has token {max(read.ids)}, which the model does not know.", param="prompt")
        told = f"This model takes {most:,} tokens of prompt and answer together. The prompt has {count:,}"
        if count >= most:
            raise ApiError(400, f"{told}: shorten it.", param="prompt", code="context_length_exceeded")
        room = most - count
        if asked is not None and asked > room:
            message = f"{told}, and max_tokens={asked:,}: at most {room:,} fit."
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        return max(1, min(usual, room) if asked is None else asked)

    async def _answer(
        self,
        call: HttpRequest,
        asked: GenerationRequest,
        shape: ResponseBuilder,
        reads: Sequence[PreparedPrompt],
        rooms: Sequence[int],
        choices: list[Choice],
        *,
        echo: bool = False,
    ) -> HttpResponse | EventStream:
        self._check_running()
        constraints = await self._constraints(asked, len(choices), call.client)
        client = call.client if call.with_key else asked.user or call.client
        # what one key has asked is nothing that another one may find out, by how fast it is answered
        salt = f"{call.client} {asked.cache_salt}" if call.with_key else asked.cache_salt

        def request(number: int) -> Request:
            prompt, choice = divmod(number, asked.n)
            seed = choice_seed(asked.sampling.seed, choice)
            return Request(
                prompt=reads[prompt].ids,
                media=reads[prompt].media,
                max_new_tokens=rooms[prompt],
                min_new_tokens=min(asked.min_tokens, rooms[prompt]),
                sampling=dataclasses.replace(asked.sampling, seed=seed),
                stop_ids=(*(() if asked.ignore_eos else self.language.stop_ids), *asked.stop_token_ids),
                logprobs=asked.logprobs,
                prompt_logprobs=asked.logprobs if echo else None,
                constraint=constraints[number],
                priority=asked.priority,
                client=client,
                cache_salt=salt,
            )

        tokens = sum(len(read.ids) for read in reads) * asked.n
        requests = await unless_small(tokens, lambda: [request(number) for number in range(len(choices))])
        task = PendingResponse(
            asked=asked,
            shape=shape,
            answers=await self._submit(requests),
            choices=choices,
            clocks=[Clock(self.metrics, call.arrived) for _ in choices],
            prompts=[request.prompt for request in requests],
            constraints=constraints,
            stop_ids=self.language.stop_ids,
        )
        return EventStream(content=task.events(), close=task.close) if asked.stream else await task.whole()

    async def _constraints(self, asked: GenerationRequest, count: int, client: str) -> Sequence[TokenConstraint | None]:
        if asked.form is None:
            return [None] * count
        try:
            with client_errors():
                return await self._forms.prepare(asked.form, count, client)
        except ApiError as error:
            error.param = asked.form_field
            raise

    async def _submit(self, requests: Sequence[Request]) -> RequestOutputs:
        try:
            return await self._checked(self.worker.submit(requests))
        except QueueFull as error:
            raise ApiError(429, f"The server is busy: {error}", code="queue_full", retry_after=RETRY_AFTER) from error
        except NotServing as error:
            raise ApiError(503, str(error), retry_after=RETRY_AFTER) from error

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self.stopping:
            raise ApiError(503, "The server is stopping: no new requests are taken.", retry_after=RETRY_AFTER)

    def _body(self, call: HttpRequest) -> dict[str, Any]:
        self._check_running()
        body = parse(call.body, self._entries)
        self._check_model(JsonFields(body).text("model"))
        return body

    async def _asked(self, call: HttpRequest, read: Callable[[dict[str, Any]], Result]) -> Result:
        """What `read` makes of a body; a large one is not read on the event loop."""

        def whole() -> Result:
            return read(self._body(call))

        return whole() if len(call.body) <= SMALL else await beside(whole)

    async def _checked(self, work: Awaitable[Result]) -> Result:
        """What `work` gives; errors of this library in what clients have sent are theirs."""
        with client_errors():
            return await work


@contextlib.contextmanager
def client_errors():
    """Errors that this library raises in what a client has sent, as its response has them."""
    try:
        yield
    except (ApiError, QueueFull, NotServing):
        raise
    except MissingPackage as error:
        raise ApiError(500, f"The server lacks a package for this. {error}") from error
    except EqxDecodersError as error:
        raise ApiError(400, str(error)) from error
