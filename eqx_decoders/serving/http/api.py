"""Handlers of the endpoints of OpenAI's API. `app.py` has the transport."""

import contextlib
import dataclasses
import functools
import hmac
import importlib.metadata
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.responses import Response

from eqx_decoders.errors import EqxDecodersError, MissingPackage
from eqx_decoders.io.text.output_parsing.parser import PROMPT_TAIL_TOKENS
from eqx_decoders.io.text.tokenizer import JsonTokenizer, decode
from eqx_decoders.serving.engine.request import QueueFull, Request
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.completion_grammar import chat_grammar
from eqx_decoders.serving.frontend.detokenizer import CONTEXT, Detokenizer, TokenTexts
from eqx_decoders.serving.frontend.prompts import PreparedPrompt, PromptPreparer, TextFrontend
from eqx_decoders.serving.frontend.structured_output import AnyGrammar, GrammarCompiler, TokenConstraint
from eqx_decoders.serving.frontend.worker_threads import ITEMS_PER_STEP, run_in_worker, run_in_worker_if_large
from eqx_decoders.serving.http.chat_page import chat_page
from eqx_decoders.serving.http.chat_protocol import (
    AnyConversation,
    ChatCompletionRequest,
    ClassifyRequest,
    TokenizeRequest,
    conversation,
)
from eqx_decoders.serving.http.config import ApiConfig
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
    parse_request_body,
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
from eqx_decoders.serving.http.streaming import EventStream, PendingResponse, json_response


MAX_ECHO = 1 << 22  # characters of prompts in one response
RETRY_AFTER = 1  # seconds after which a client may send a request again


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """HTTP request.

    - `request_id`: id in the response and the log.
    - `client`: client by API key or address, for the turns of clients in the engine's queue.
    - `with_key`: whether `client` is identified by an API key.
    - `arrived`: time of arrival by `time.monotonic`.
    """

    request_id: str
    client: str = ""
    with_key: bool = False
    body: bytes | bytearray = b""
    arrived: float = dataclasses.field(default_factory=time.monotonic)


class Api:
    """Handlers of the endpoints.

    **Arguments:**

    - `frontend`: tokenizer, chat template and processor of the model.
    - `engine_thread`: started thread of the engine of the model.
    - `config`: limits and defaults.
    - `read_adapter`: reads the directory of an adapter that a client loads. None: clients cannot load adapters.
    """

    def __init__(
        self,
        frontend: TextFrontend,
        engine_thread: EngineThread,
        config: ApiConfig,
        read_adapter: Callable[[str], Any] | None = None,
    ):
        self.frontend, self.engine_thread, self.config = frontend, engine_thread, config
        self._adapters, self._read_adapter = config.adapters, read_adapter
        self.metrics = Metrics(config.name, lambda: engine_thread.counts)
        self.stopping = False
        self._preparer = PromptPreparer(frontend, max_length=config.max_length, max_files=config.max_files)
        self._grammars = GrammarCompiler(frontend.tokenizer, config.vocab_size, frontend.stop_ids)
        self._grammars.warm_up()
        self._texts = TokenTexts(frontend.tokenizer)
        self._seeds = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()
        self._created = int(time.time())
        needs_key = bool(config.api_keys)
        self._description = write(describe_api(Api, _version(), needs_key))
        self._page = chat_page(
            config.name, max_length=config.max_length, takes_images=frontend.takes_images, needs_key=needs_key
        )

    def find_key(self, header: str | None) -> int | None:
        """Return the index of the key in an `Authorization` header. None: a wrong key; -1: no key is required."""
        if not self.config.api_keys:
            return -1
        kind, _, key = (header or "").partition(" ")
        # compares all keys, each in constant time, so that the duration reveals nothing about a key
        matches = [hmac.compare_digest(key.strip().encode(), known.encode()) for known in self.config.api_keys]
        return matches.index(True) if any(matches) and kind.lower() == "bearer" else None

    def close(self) -> None:
        """End the threads and processes that prepare prompts and compile grammars."""
        self._preparer.close()
        self._grammars.close()

    # --- the server ---------------------------------------------------------------------------------------------------

    async def health(self, http_request: HttpRequest) -> Response:
        """Return status 200 if the server accepts requests, 503 if it stops or its engine has failed or hangs."""
        if self.engine_thread.state == "failed":
            state = "failed"
        elif self.stopping or (self.engine_thread.state != "running" and not self.engine_thread.hangs):
            state = "stopping"
        else:
            state = "hanging" if self.engine_thread.hangs else "ok"
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
        return json_response(ModelList(data=[self._model(name) for name in (None, *self._adapters)]))

    async def model(self, http_request: HttpRequest, name: str) -> Response:
        """Describe the model, or an adapter."""
        return json_response(self._model(self._find_adapter(name)))

    def _model(self, adapter: str | None) -> Model:
        base, max_length = self.config.name, self.config.max_length
        name, parent = (base, None) if adapter is None else (adapter, base)
        return Model(id=name, root=name, parent=parent, created=self._created, max_model_len=max_length)

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, http_request: HttpRequest) -> Response:
        """Load an adapter from a directory of the server, if the server allows it."""
        request = await self._read(http_request, LoadAdapterRequest)
        name, reader = request.lora_name, self._adapter_reader()
        if name == self.config.name or (name in self._adapters and not request.load_inplace):
            raise ApiError(400, f"lora_name={name[:60]!r} is already in use. Choose another name.", param="lora_name")
        with client_errors():
            parts = await run_in_worker(lambda: reader(request.lora_path))
            await self.engine_thread.call(lambda engine: _replace_adapter(engine, name, parts))
        self._adapters = (*(other for other in self._adapters if other != name), name)
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, http_request: HttpRequest) -> Response:
        """Unload an adapter, if the server allows it. Open requests for the adapter are completed."""
        request = await self._read(http_request, UnloadAdapterRequest)
        self._adapter_reader()
        name = request.lora_name
        if name not in self._adapters:
            raise ApiError(404, f"lora_name={name[:60]!r} is not loaded.", param="lora_name", code="model_not_found")
        self._adapters = tuple(other for other in self._adapters if other != name)
        with client_errors():
            await self.engine_thread.call(lambda engine: engine.drop_adapter(name))
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    def _adapter_reader(self) -> Callable[[str], Any]:
        if self._read_adapter is None:
            raise ApiError(404, "This server does not load adapters. Start it with --allow-adapter-loading.")
        return self._read_adapter

    def _find_adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request selects; None for the model itself. Raises ApiError for unknown names."""
        if model is None or model == self.config.name:
            return None
        if model not in self._adapters:
            known = " or ".join(map(repr, (self.config.name, *self._adapters)))
            raise ApiError(
                404, f"model={model[:60]!r} is not served here. Use {known}.", param="model", code="model_not_found"
            )
        return model

    # --- the tokenizer ------------------------------------------------------------------------------------------------

    async def tokenize(self, http_request: HttpRequest) -> Response:
        """Return the token ids of a text, or of a conversation as it is rendered for a chat completion."""
        request = await self._read(http_request, TokenizeRequest)
        if request.messages is not None:
            prompt = await self._prepare_chat(request, add_generation_prompt=request.add_generation_prompt)
        else:
            (prompt,) = await self._prepare_prompts([request.prompt or ""], special=request.add_special_tokens)
        count = len(prompt.ids)
        body = TokenizedText(tokens=prompt.ids, count=count, max_model_len=self.config.max_length)
        return await run_in_worker_if_large(count, lambda: json_response(body))

    async def detokenize(self, http_request: HttpRequest) -> Response:
        """Return the text of token ids."""
        request = await self._read(http_request, DetokenizeRequest)
        with client_errors():
            text = await self._preparer.run(decode, self.frontend.tokenizer, request.tokens, special=True)
        return await run_in_worker_if_large(len(text) // 8, lambda: json_response(DetokenizedText(prompt=text)))

    async def tokenizer_info(self, http_request: HttpRequest) -> Response:
        """Describe the tokenizer, for clients that render prompts themselves."""
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

    # --- completions --------------------------------------------------------------------------------------------------

    async def completions(self, http_request: HttpRequest) -> Response:
        """Complete texts or token ids."""
        request, seed = await self._read(http_request, CompletionRequest), self._seeds.getrandbits(63)
        prompts = await self._prepare_prompts(request.prompts, special=request.add_special_tokens)
        size = sum(len(prompt.ids) for prompt in prompts) // 8
        count_limits = functools.partial(self._completion_limits, request, prompts, default=16, echo=request.echo)
        limits = await run_in_worker_if_large(size, count_limits)
        choices = await self._choices(request, prompts)
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
        """Complete a conversation."""
        request = await self._read(http_request, ChatCompletionRequest)
        seed = self._seeds.getrandbits(63)
        prompt = await self._prepare_chat(request, add_generation_prompt=request.add_generation_prompt)
        limits = self._completion_limits(request, [prompt])
        create_reader = functools.partial(
            self.frontend.completion_reader,
            prompt,
            self.config.tool_call_parser,
            request.callable,
            special=not request.skip_special_tokens,
            must_call=request.allowed.required,
        )
        choices = [Choice(request, self.frontend.tokenizer, reader=create_reader()) for _ in range(request.n)]
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

    def _chat_grammar(self, request: ChatCompletionRequest, prompt: PreparedPrompt) -> tuple[str, AnyGrammar | None]:
        """Return the field of the request that constrains the completion, and the grammar; None: no constraint."""
        field, grammar = request.grammar
        calls = request.calls(self.config.tool_call_parser)
        if grammar is None and calls is None:
            return "", None
        if grammar is None or request.allowed.required:
            field = "tool_choice" if request.allowed.restricts else "parallel_tool_calls"
        end = decode(self.frontend.tokenizer, prompt.ids[-PROMPT_TAIL_TOKENS:], special=True)
        chat = self.frontend.chat
        template = "" if chat is None else chat.source_for(request.callable and request.tools)
        return field, chat_grammar(template, end, grammar, calls)

    async def classify(self, http_request: HttpRequest) -> Response:
        """Score texts or a conversation with a reward model or classifier, as in vLLM."""
        request = await self._read(http_request, ClassifyRequest)
        prompts = await self._prepare_prompts(request.prompts, special=request.add_special_tokens, param="input")
        if request.messages is not None:
            with client_errors():
                prompts.append(await self._preparer.scored_chat(*conversation(request)))
        for prompt in prompts:
            self._completion_limit(prompt, None, 1, "input" if request.messages is None else "messages")
        requests = [Request(prompt=prompt.ids, max_new_tokens=1, client=http_request.client) for prompt in prompts]
        scores = await text_scores(await self._submit(requests), len(prompts), activation=request.use_activation)
        return json_response(classification(http_request.request_id, self.config.name, prompts, scores))

    async def _prepare_prompts(
        self, prompts: Sequence[str | tuple[int, ...]], *, special: bool, param: str = "prompt"
    ) -> list[PreparedPrompt]:
        """Encode the texts among the prompts. `special`: add the special tokens with which prompts start."""
        with client_errors():
            return [
                await self._preparer.text(prompt, special=special, param=param)
                if isinstance(prompt, str)
                else PreparedPrompt(prompt)
                for prompt in prompts
            ]

    async def _prepare_chat(self, request: AnyConversation, *, add_generation_prompt: bool) -> PreparedPrompt:
        with client_errors():
            return await self._preparer.chat(*conversation(request), add_generation_prompt=add_generation_prompt)

    async def _choices(self, request: CompletionRequest, prompts: Sequence[PreparedPrompt]) -> list[Choice]:
        """Create the choices of a response: `n` per prompt."""
        tokenizer = self.frontend.tokenizer
        pairs = zip(prompts, request.prompts, strict=True)
        echoes = [await self._echo(*pair) if request.echo else None for pair in pairs]
        length = request.n * sum(len(echo.text) for echo in echoes if echo is not None)
        if length > MAX_ECHO:
            raise ApiError(
                400,
                f"echo=true returns prompts of {length:,} characters in total. At most {MAX_ECHO:,} are allowed.",
                param="echo",
                code="too_many",
            )

        def create_detokenizers() -> list[Detokenizer]:
            special = not request.skip_special_tokens
            return [Detokenizer(tokenizer, prompt.ids, special=special) for prompt in prompts]

        num_items = 2 * CONTEXT * ITEMS_PER_STEP * len(prompts)
        detokenizers = await run_in_worker_if_large(num_items, create_detokenizers)
        return [
            Choice(request, tokenizer, text=detokenizer, echo=echo, wanted=request.max_tokens != 0)
            for detokenizer, echo in zip(detokenizers, echoes, strict=True)
            for _ in range(request.n)
        ]

    async def _echo(self, prepared: PreparedPrompt, prompt: str | Sequence[int]) -> Echo:
        if isinstance(prompt, str):
            return Echo(text=prompt, ids=prepared.ids)
        text = await self._preparer.run(decode, self.frontend.tokenizer, prompt)
        return Echo(text=text, ids=prepared.ids)

    def _completion_limits(
        self,
        request: GenerationRequest,
        prompts: Sequence[PreparedPrompt],
        *,
        default: int = LARGEST,
        echo: bool = False,
    ) -> list[int]:
        """Return the maximum number of tokens of the completions of each prompt.

        Raises ApiError if there is no room for a completion, and for too many log-probabilities.
        """
        limits = [
            self._completion_limit(
                prompt, request.max_new_tokens, default, request.prompt_field, request.max_new_tokens_field
            )
            for prompt in prompts
        ]
        if request.alternatives is None:
            return limits
        scores_per_token, max_scores = request.n * (1 + request.alternatives), self.config.max_scores
        num_scored = sum(len(prompt.ids) for prompt in prompts) if echo else 0
        remaining = max_scores // scores_per_token - num_scored  # tokens of the completions of all prompts
        num_requested = len(prompts) if request.max_new_tokens is None else sum(limits)
        if num_requested > remaining:
            raise ApiError(
                400,
                f"{request.n} times {num_scored + num_requested:,} tokens with {1 + request.alternatives} "
                f"log-probabilities each are more than {max_scores:,} log-probabilities. Request fewer.",
                param="logprobs",
                code="too_many",
            )
        return [min(limit, remaining // len(prompts)) if request.max_new_tokens is None else limit for limit in limits]

    def _completion_limit(
        self,
        prompt: PreparedPrompt,
        max_tokens: int | None,
        default: int,
        prompt_field: str,
        max_tokens_field: str = "max_tokens",
    ) -> int:
        """Return the maximum number of tokens of a completion. Raises ApiError for an invalid or too long prompt."""
        count, max_length = len(prompt.ids), self.config.max_length
        if count == 0:
            raise ApiError(
                400,
                f"{prompt_field} is empty, and the tokenizer has no token that starts a text.",
                param=prompt_field,
            )
        if max(prompt.ids) >= self.config.vocab_size:
            raise ApiError(
                400, f"{prompt_field} has token {max(prompt.ids)}, which the model does not have.", param=prompt_field
            )
        if count >= max_length:
            raise ApiError(
                400,
                f"The maximum length of a prompt with its completion is {max_length:,} tokens. The prompt has "
                f"{count:,}. Shorten it.",
                param=prompt_field,
                code="context_length_exceeded",
            )
        room = max_length - count
        if max_tokens is not None and max_tokens > room:
            raise ApiError(
                400,
                f"The maximum length of a prompt with its completion is {max_length:,} tokens. The prompt has "
                f"{count:,}, so {max_tokens_field}={max_tokens:,} must be at most {room:,}.",
                param=max_tokens_field,
                code="context_length_exceeded",
            )
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
        sampling, adapter = request.sampling(self.config, seed), self._find_adapter(request.model)
        constraints = await self._constraints(field, grammar, len(choices), limits[0])
        client = http_request.client if http_request.with_key else request.user or http_request.client
        # the prefix cache is not shared between keys: response times would reveal the prompts of other clients
        salt = f"{http_request.client} {request.cache_salt}" if http_request.with_key else request.cache_salt

        def create_request(index: int) -> Request:
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
                priority=-request.priority,  # the engine prefers high values, vLLM's API low values
                client=client,
                cache_salt=salt,
                adapter=adapter,
            )

        num_tokens = sum(len(prompt.ids) for prompt in prompts) * request.n
        requests = await run_in_worker_if_large(
            num_tokens, lambda: [create_request(index) for index in range(len(choices))]
        )
        pending = PendingResponse(
            request=request,
            builder=builder,
            outputs=await self._submit(requests),
            choices=choices,
            timers=[RequestTimer(self.metrics, http_request.arrived) for _ in choices],
            prompts=[engine_request.prompt for engine_request in requests],
            constraints=constraints,
            stop_ids=self.frontend.stop_ids,
        )
        return EventStream(pending.events(), pending.close) if request.stream else await pending.complete()

    async def _constraints(
        self, field: str, grammar: AnyGrammar | None, count: int, max_tokens: int
    ) -> Sequence[TokenConstraint | None]:
        if grammar is None:
            return [None] * count
        try:
            with client_errors():
                return await self._grammars.prepare(grammar, count, max_tokens)
        except ApiError as error:
            error.param = field
            raise

    async def _submit(self, requests: Sequence[Request]) -> RequestOutputs:
        with client_errors():
            return await self.engine_thread.submit(requests)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self.stopping:
            raise ApiError(503, "The server is stopping and refuses new requests.", retry_after=RETRY_AFTER)

    async def _read(self, http_request: HttpRequest, kind: type[Body]) -> Body:
        """Read a body as a declared type. Large bodies are read in a worker thread."""
        self._check_running()
        call = functools.partial(parse_request_body, kind, http_request.body, self.config)
        request = call() if len(http_request.body) <= SMALL else await run_in_worker(call)
        self._find_adapter(request.model)
        return request


@contextlib.contextmanager
def client_errors() -> Iterator[None]:
    """Convert errors of this library about the content of a request to ApiErrors."""
    try:
        yield
    except ApiError:
        raise
    except QueueFull as error:
        raise ApiError(429, f"The server is busy: {error}", code="queue_full", retry_after=RETRY_AFTER) from error
    except NotServing as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from error
    except MissingPackage as error:
        raise ApiError(500, f"The server lacks a package for this request. {error}") from error
    except EqxDecodersError as error:
        raise ApiError(400, str(error)) from error


def _replace_adapter(engine: Any, name: str, parts: Any) -> None:
    if name in engine.adapters:
        engine.drop_adapter(name)
    engine.load_adapter(name, parts)


def _version() -> str:
    try:
        return importlib.metadata.version("eqx_decoders")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0"
