"""OpenAI's API in front of an engine: the handlers of all endpoints, without the transport (see `app.py`)."""

import contextlib
import dataclasses
import functools
import hmac
import importlib.metadata
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from eqx_decoders.errors import EqxDecodersError, MissingPackage
from eqx_decoders.io.text.answers.parser import PROMPT_END
from eqx_decoders.io.text.tokenizer import JsonTokenizer, decode
from eqx_decoders.serving.engine.request import QueueFull, Request
from eqx_decoders.serving.frontend.answer_grammar import chat_grammar
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.detokenizer import CONTEXT, Detokenizer, TokenTexts
from eqx_decoders.serving.frontend.prompts import PreparedPrompt, PromptPreparer, TextFrontend
from eqx_decoders.serving.frontend.scored_prompts import scored_prompts
from eqx_decoders.serving.frontend.structured_output import AnyGrammar, GrammarCompiler, TokenConstraint
from eqx_decoders.serving.frontend.worker_threads import SLOW, run_in_worker, run_in_worker_if_large
from eqx_decoders.serving.http import chat_protocol
from eqx_decoders.serving.http.api_config import ApiConfig
from eqx_decoders.serving.http.chat_page import page
from eqx_decoders.serving.http.engine_thread import EngineThread, NotServing, RequestOutputs
from eqx_decoders.serving.http.json_body import LARGEST, SMALL, write
from eqx_decoders.serving.http.metrics import Metrics, RequestTimer
from eqx_decoders.serving.http.openapi import describe_api
from eqx_decoders.serving.http.protocol import (
    Body,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    choice_seed,
    read_body,
)
from eqx_decoders.serving.http.response_types import (
    DetokenizedText,
    Health,
    Model,
    ModelList,
    TokenizedText,
    TokenizerInfo,
)
from eqx_decoders.serving.http.responses import (
    ChatResponseBuilder,
    Choice,
    Echo,
    ResponseBuilder,
    classification,
    text_scores,
)
from eqx_decoders.serving.http.served_adapters import ServedAdapters
from eqx_decoders.serving.http.streaming import EventStream, PendingResponse, json_response


MAX_ECHO = 1 << 22  # characters of prompts in one response
RETRY_AFTER = 1  # seconds, after which a queue that is full may have room

read_completion = functools.partial(read_body, CompletionRequest)
read_chat = functools.partial(read_body, chat_protocol.ChatCompletionRequest)
read_tokenize = functools.partial(read_body, chat_protocol.TokenizeRequest)
read_classify = functools.partial(read_body, chat_protocol.ClassifyRequest)
read_detokenize = functools.partial(read_body, DetokenizeRequest)
read_load = functools.partial(read_body, LoadAdapterRequest)
read_unload = functools.partial(read_body, UnloadAdapterRequest)

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """HTTP request.

    - `request_id`: id in its response and the log.
    - `client`: API key or address, by which clients take turns.
    - `arrived`: arrival by `time.monotonic`.
    """

    request_id: str
    client: str = ""
    with_key: bool = False
    body: bytes = b""
    arrived: float = dataclasses.field(default_factory=time.monotonic)


class Api:
    """Handlers of the endpoints.

    **Arguments:**

    - `frontend`: tokenizer, chat template and processor of the model.
    - `engine_thread`: thread of the model's engine, started.
    - `config`: limits and defaults.
    - `read_adapter`: reads the directory of an adapter that a client wants loaded; None: they can't load any.
    """

    def __init__(
        self,
        frontend: TextFrontend,
        engine_thread: EngineThread,
        config: ApiConfig,
        read_adapter: Callable[[str], Any] | None = None,
    ):
        self.frontend, self.engine_thread, self.config = frontend, engine_thread, config
        self.adapters = ServedAdapters(engine_thread, config.name, config.adapters, read_adapter)
        self.metrics = Metrics(config.name, lambda: engine_thread.counts)
        self.stopping = False
        self._preparer = PromptPreparer(frontend, max_length=config.max_length, max_files=config.max_files)
        self._grammars = GrammarCompiler(frontend.tokenizer, config.vocab_size, frontend.stop_ids)
        self._grammars.warm_up()
        self._texts = TokenTexts(frontend.tokenizer)
        self._seeds = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()
        self._created = int(time.time())
        options = dict(takes_images=frontend.takes_images, needs_key=bool(config.api_keys))
        self._description = write(describe_api(Api, _version(), bool(config.api_keys)))
        self._page = page(config.name, max_length=config.max_length, **options)

    def find_key(self, header: str | None) -> int | None:
        """Return the index of the key in an `Authorization` header; -1 where none is needed, None for a wrong one."""
        if not self.config.api_keys:
            return -1
        kind, _, key = (header or "").partition(" ")
        # all are compared, each in constant time: the time tells nothing about a key
        matches = [hmac.compare_digest(key.strip().encode(), known.encode()) for known in self.config.api_keys]
        return matches.index(True) if any(matches) and kind.lower() == "bearer" else None

    def close(self) -> None:
        """End the threads and processes that prepare prompts and compile grammars."""
        self._preparer.close()
        self._grammars.close()

    # --- the server ---------------------------------------------------------------------------------------------------

    async def health(self, http_request: HttpRequest) -> Response:
        """Report 200 while requests are taken, 503 when the server is stopping, or its engine has failed or hangs."""
        state = "hanging" if self.engine_thread.hangs else "ok" if self.engine_thread.state == "running" else "stopping"
        state = "failed" if self.engine_thread.state == "failed" else "stopping" if self.stopping else state
        return json_response(Health(status=state), 200 if state == "ok" else 503)

    async def show_metrics(self, http_request: HttpRequest) -> Response:
        """Return the metrics for Prometheus."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def show_page(self, http_request: HttpRequest) -> Response:
        """Return the chat page."""
        return Response(self._page.content, headers=self._page.headers, media_type="text/html")

    async def show_description(self, http_request: HttpRequest) -> Response:
        """Describe the API in OpenAPI 3.1."""
        return Response(self._description, media_type="application/json")

    async def models(self, http_request: HttpRequest) -> Response:
        """List the model and its adapters."""
        return json_response(ModelList(data=[self._model(name) for name in (None, *self.adapters.names)]))

    async def model(self, http_request: HttpRequest, name: str) -> Response:
        """Describe the model, or an adapter."""
        return json_response(self._model(self.adapters.find(name)))

    def _model(self, adapter: str | None) -> Model:
        base, max_length = self.config.name, self.config.max_length
        name, parent = (base, None) if adapter is None else (adapter, base)
        return Model(id=name, root=name, parent=parent, created=self._created, max_model_len=max_length)

    async def load_adapter(self, http_request: HttpRequest) -> Response:
        """Load an adapter from a directory of the server, if it allows that."""
        request = await self._read(http_request, read_load)
        work = self.adapters.load(request.lora_name, request.lora_path, in_place=request.load_inplace)
        return await self._changed(work, f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload_adapter(self, http_request: HttpRequest) -> Response:
        """Drop an adapter, if the server allows that; open requests have their answers."""
        request = await self._read(http_request, read_unload)
        work = self.adapters.unload(request.lora_name)
        return await self._changed(work, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    async def _changed(self, work: Awaitable[None], message: str) -> Response:
        await self._with_client_errors(work)
        return Response(message, media_type="text/plain")

    # --- the tokenizer ------------------------------------------------------------------------------------------------

    async def tokenize(self, http_request: HttpRequest) -> Response:
        """Return the token ids of a text, or of a conversation as it is rendered for an answer."""
        request = await self._read(http_request, read_tokenize)
        if request.messages is not None:
            answer = request.add_generation_prompt
            work = self._preparer.chat(*chat_protocol.conversation(request), answer=answer, client=http_request.client)
        else:
            text, special = request.prompt or "", request.add_special_tokens
            work = self._preparer.text(text, special=special, client=http_request.client)
        prompt = await self._with_client_errors(work)
        count = len(prompt.ids)
        body = TokenizedText(tokens=prompt.ids, count=count, max_model_len=self.config.max_length)
        return await run_in_worker_if_large(count, lambda: json_response(body))

    async def detokenize(self, http_request: HttpRequest) -> Response:
        """Return the text of some token ids."""
        tokens = (await self._read(http_request, read_detokenize)).tokens
        work = self._preparer.run(decode, self.frontend.tokenizer, tokens, special=True, client=http_request.client)
        text = await self._with_client_errors(work)
        return await run_in_worker_if_large(len(text) // 8, lambda: json_response(DetokenizedText(prompt=text)))

    async def tokenizer_info(self, http_request: HttpRequest) -> Response:
        """Describe the tokenizer, for clients that write prompts themselves."""
        tokenizer, chat = self.frontend.tokenizer, self.frontend.chat

        def name(token: int | None) -> str | None:
            return None if token is None or not isinstance(tokenizer, JsonTokenizer) else tokenizer.name_of(token)

        info = TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=tokenizer.vocab_size,
            bos_token=name(tokenizer.bos_id),
            eos_token=name(tokenizer.eos_id),
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eos_id,
            model_max_length=self.config.max_length,
            chat_template=None if chat is None else chat.source,
        )
        return json_response(info)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def completions(self, http_request: HttpRequest) -> Response:
        """Continue texts or token ids."""
        request, seed = await self._read(http_request, read_completion), self._seeds.getrandbits(63)
        prompts: list[PreparedPrompt] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                work = self._preparer.text(prompt, special=request.add_special_tokens, client=http_request.client)
                prompts.append(await self._with_client_errors(work))
            else:
                prompts.append(PreparedPrompt(prompt))
        size = sum(len(each.ids) for each in prompts) // 8
        count_limits = functools.partial(self._answer_limits, request, prompts, default=16, echo=request.echo)
        limits = await run_in_worker_if_large(size, count_limits)
        choices = await self._choices(request, prompts, http_request.client)
        builder = ResponseBuilder(http_request.request_id, request.model or self.config.name, request, self._texts)
        field, grammar = request.grammar
        return await self._respond(
            http_request,
            request,
            builder,
            prompts,
            limits,
            choices,
            seed,
            field=field,
            grammar=grammar,
            echo=request.echo,
        )

    async def chat(self, http_request: HttpRequest) -> Response:
        """Answer a conversation."""
        request, seed = await self._read(http_request, read_chat), self._seeds.getrandbits(63)
        answer = request.add_generation_prompt
        work = self._preparer.chat(*chat_protocol.conversation(request), answer=answer, client=http_request.client)
        prompt = await self._with_client_errors(work)
        limits = self._answer_limits(request, [prompt])
        read = functools.partial(self.frontend.answer_reader, prompt, self.config.tool_call_parser)
        special, must_call = not request.skip_special_tokens, request.allowed.required
        readers = (read(request.callable, special=special, must_call=must_call) for _ in range(request.n))
        choices = [Choice(request, self.frontend.tokenizer, reader=reader) for reader in readers]
        builder = ChatResponseBuilder(
            http_request.request_id,
            request.model or self.config.name,
            request,
            self._texts,
            call_format=self.config.tool_call_parser,
            num_earlier_calls=sum(len(message.get("tool_calls") or ()) for message in request.messages),
        )
        field, grammar = self._chat_grammar(request, prompt)
        return await self._respond(
            http_request, request, builder, [prompt], limits, choices, seed, field=field, grammar=grammar
        )

    def _chat_grammar(
        self, request: chat_protocol.ChatCompletionRequest, prompt: PreparedPrompt
    ) -> tuple[str, AnyGrammar | None]:
        """Return the field of the request that constrains the answer, and the grammar; None: no constraint."""
        field, form = request.grammar
        calls = request.calls(self.config.tool_call_parser)
        if form is None and calls is None:
            return "", None
        end = decode(self.frontend.tokenizer, prompt.ids[-PROMPT_END:], special=True)
        template = (
            "" if self.frontend.chat is None else self.frontend.chat.source_for(request.callable and request.tools)
        )
        if form is None or request.allowed.required:
            field = "tool_choice" if request.allowed.restricts else "parallel_tool_calls"
        return field, chat_grammar(template, end, form, calls)

    async def classify(self, http_request: HttpRequest) -> Response:
        """Score texts with a reward model, or another one that gives scores, as vLLM does."""
        request, client = await self._read(http_request, read_classify), http_request.client
        chat = None if request.messages is None else chat_protocol.conversation(request)
        prompts = await self._with_client_errors(scored_prompts(self._preparer, request, chat, client))
        for prompt in prompts:
            self._answer_limit(prompt, None, 1, "input" if request.messages is None else "messages")
        requests = [Request(prompt=prompt.ids, max_new_tokens=1, client=client) for prompt in prompts]
        rows = await text_scores(await self._submit(requests), len(prompts), activation=request.use_activation)
        return json_response(classification(http_request.request_id, self.config.name, prompts, rows))

    async def _choices(
        self, request: CompletionRequest, prompts: Sequence[PreparedPrompt], client: str
    ) -> list[Choice]:
        tokenizer = self.frontend.tokenizer
        pairs = zip(prompts, request.prompts, strict=True)
        echoes = [await self._echo(*pair, client) if request.echo else None for pair in pairs]
        length = request.n * sum(len(echo.text) for echo in echoes if echo is not None)
        if length > MAX_ECHO:
            message = f"echo=true gives prompts of {length:,} characters back, {request.n} times each"
            raise ApiError(400, f"{message}: at most {MAX_ECHO:,} are given.", param="echo", code="too_many")

        def detokenizers() -> list[Detokenizer]:
            return [Detokenizer(tokenizer, each.ids, special=not request.skip_special_tokens) for each in prompts]

        texts = await run_in_worker_if_large(2 * CONTEXT * SLOW * len(prompts), detokenizers)
        wanted = request.max_tokens != 0
        each = [(text, echo) for text, echo in zip(texts, echoes, strict=True) for _ in range(request.n)]
        return [Choice(request, tokenizer, text=text, echo=echo, wanted=wanted) for text, echo in each]

    async def _echo(self, prepared: PreparedPrompt, prompt: str | Sequence[int], client: str) -> Echo:
        if isinstance(prompt, str):
            return Echo(text=prompt, ids=prepared.ids)
        text = await self._preparer.run(decode, self.frontend.tokenizer, prompt, client=client)
        return Echo(text=text, ids=prepared.ids)

    def _answer_limits(
        self,
        request: GenerationRequest,
        prompts: Sequence[PreparedPrompt],
        *,
        default: int = LARGEST,
        echo: bool = False,
    ) -> list[int]:
        """Return the maximum length of the answers to each prompt; ApiError where no tokens or scores are left."""
        fields = request.prompt_field, request.max_answer_field
        limits = [self._answer_limit(prompt, request.max_answer, default, *fields) for prompt in prompts]
        if request.alternatives is None:
            return limits
        scores_per_token, max_scores = request.n * (1 + request.alternatives), self.config.max_scores
        num_scored = sum(len(prompt.ids) for prompt in prompts) if echo else 0
        remaining = max_scores // scores_per_token - num_scored  # tokens of the answers to all prompts
        num_wanted = len(prompts) if request.max_answer is None else sum(limits)
        if num_wanted > remaining:
            message = f"{num_scored + num_wanted:,} tokens with {1 + request.alternatives} log-probabilities each"
            message = f"{message}, {request.n} times, are more than {max_scores:,}: ask for fewer."
            raise ApiError(400, message, param="logprobs", code="too_many")
        return [min(limit, remaining // len(prompts)) if request.max_answer is None else limit for limit in limits]

    def _answer_limit(
        self,
        prompt: PreparedPrompt,
        max_tokens: int | None,
        default: int,
        prompt_field: str,
        max_tokens_field: str = "max_tokens",
    ) -> int:
        """Return the maximum length of an answer; ApiError for a prompt that leaves no room for it."""
        count, max_length = len(prompt.ids), self.config.max_length
        if count == 0:
            raise ApiError(
                400,
                f"{prompt_field} is empty, and the tokenizer has no token that begins a text.",
                param=prompt_field,
            )
        if max(prompt.ids) >= self.config.vocab_size:
            message = f"{prompt_field} has token {max(prompt.ids)}, which the model does not know."
            raise ApiError(400, message, param=prompt_field)
        message = f"This model takes {max_length:,} tokens of prompt and answer together. The prompt has {count:,}"
        if count >= max_length:
            raise ApiError(400, f"{message}: shorten it.", param=prompt_field, code="context_length_exceeded")
        room = max_length - count
        if max_tokens is not None and max_tokens > room:
            error = f"{message}, and {max_tokens_field}={max_tokens:,}: at most {room:,} fit."
            raise ApiError(400, error, param=max_tokens_field, code="context_length_exceeded")
        return max(1, min(default, room) if max_tokens is None else max_tokens)

    async def _respond(
        self,
        http_request: HttpRequest,
        request: GenerationRequest,
        builder: ResponseBuilder,
        prompts: Sequence[PreparedPrompt],
        limits: Sequence[int],
        choices: list[Choice],
        seed: int,
        *,
        field: str,
        grammar: AnyGrammar | None,
        echo: bool = False,
    ) -> Response:
        self._check_running()
        sampling, adapter = request.sampling(self.config, seed), self.adapters.find(request.model)
        constraints = await self._constraints(field, grammar, len(choices), limits[0], http_request.client)
        client = http_request.client if http_request.with_key else request.user or http_request.client
        # prefixes are not shared between keys: the time of an answer would tell what others have sent
        salt = f"{http_request.client} {request.cache_salt}" if http_request.with_key else request.cache_salt

        def engine_request(index: int) -> Request:
            prompt, choice = divmod(index, request.n)
            return Request(
                prompt=prompts[prompt].ids,
                media=prompts[prompt].media,
                max_new_tokens=limits[prompt],
                min_new_tokens=min(request.min_tokens, limits[prompt]),
                sampling=dataclasses.replace(sampling, seed=choice_seed(sampling.seed, choice)),
                stop_ids=(*(() if request.ignore_eos else self.frontend.stop_ids), *choices[index].engine_stop_ids),
                logprobs=request.alternatives,
                prompt_logprobs=request.alternatives if echo else None,
                constraint=constraints[index],
                priority=-request.priority,  # the engine's highest comes first, in vLLM's API the lowest
                client=client,
                cache_salt=salt,
                adapter=adapter,
            )

        num_tokens = sum(len(each.ids) for each in prompts) * request.n
        requests = await run_in_worker_if_large(
            num_tokens, lambda: [engine_request(index) for index in range(len(choices))]
        )
        pending = PendingResponse(
            request=request,
            builder=builder,
            outputs=await self._submit(requests),
            choices=choices,
            timers=[RequestTimer(self.metrics, http_request.arrived) for _ in choices],
            prompts=[each.prompt for each in requests],
            constraints=constraints,
            stop_ids=self.frontend.stop_ids,
        )
        return EventStream(pending.events(), pending.close) if request.stream else await pending.whole()

    async def _constraints(
        self, field: str, grammar: AnyGrammar | None, count: int, max_tokens: int, client: str
    ) -> Sequence[TokenConstraint | None]:
        if grammar is None:
            return [None] * count
        try:
            with client_errors():
                return await self._grammars.prepare(grammar, count, client, max_tokens)
        except ApiError as error:
            error.param = field
            raise

    async def _submit(self, requests: Sequence[Request]) -> RequestOutputs:
        return await self._with_client_errors(self.engine_thread.submit(requests))

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self.stopping:
            raise ApiError(503, "The server is stopping: no new requests are taken.", retry_after=RETRY_AFTER)

    async def _read(self, http_request: HttpRequest, read: Callable[[bytes, ApiConfig], Body]) -> Body:
        """Read a body; a large one in a worker thread."""
        self._check_running()
        call = functools.partial(read, http_request.body, self.config)
        request = call() if len(http_request.body) <= SMALL else await run_in_worker(call)
        self.adapters.find(request.model)
        return request

    async def _with_client_errors(self, work: Awaitable[Result]) -> Result:
        """Await `work`; this library's errors about what clients have sent become responses."""
        with client_errors():
            return await work


@contextlib.contextmanager
def client_errors():
    """Convert this library's errors about what a client has sent to those of its response."""
    try:
        yield
    except ApiError:
        raise
    except QueueFull as error:
        raise ApiError(429, f"The server is busy: {error}", code="queue_full", retry_after=RETRY_AFTER) from error
    except NotServing as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from error
    except MissingPackage as error:
        raise ApiError(500, f"The server lacks a package for this. {error}") from error
    except EqxDecodersError as error:
        raise ApiError(400, str(error)) from error


def _version() -> str:
    try:
        return importlib.metadata.version("eqx_decoders")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0"
