"""Request bodies as declared types, and checks that need the limits of the server.

The description of a type is part of its schema in `/openapi.json`, and of the error message for an invalid value.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from eqx_decoders.core.sampling import FILTERS
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.serving.frontend.api_errors import ApiError, refuse
from eqx_decoders.serving.frontend.structured_output import ANY_OBJECT, Grammar, Kind
from eqx_decoders.serving.http.config import ApiConfig
from eqx_decoders.serving.http.json_body import LARGEST, Meta, RequestFields, parse, read, write


MAX_ENTRIES, MAX_ENTRIES_PER_TOKEN = 50_000, 4  # lists, objects and keys in a large body; the limits are added
MIN_DETOKENIZED = 10_000  # tokens that /detokenize accepts, even if the context length of the model is smaller
MIN_TEMPERATURE = 1e-5  # lower temperatures are treated as 0, because scaled logits would overflow

# --- types of fields --------------------------------------------------------------------------------------------------

Flag = Annotated[bool, Meta(description="true or false")]
Size = Annotated[int, Meta(ge=0, le=LARGEST - 1, description="an integer of at least 0")]
Count = Annotated[int, Meta(ge=1, le=LARGEST - 1, description="an integer of at least 1")]
AnyInteger = Annotated[int, Meta(ge=-LARGEST, le=LARGEST - 1, description="an integer of 64 bits")]
TopK = Annotated[int, Meta(ge=-1, le=LARGEST - 1, description="an integer of at least -1")]
Temperature = Annotated[float, Meta(ge=0, le=1000, description="a number from 0 to 1000")]
Probability = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Factor = Annotated[float, Meta(gt=0, le=1000, description="a number above 0 to 1000")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias | None], Meta(description="an object of token ids with numbers from -100 to 100")]
Priority = Annotated[int, Meta(ge=-1_000_000, le=1_000_000, description="an integer from -1,000,000 to 1,000,000")]
Text = Annotated[str, Meta(description="a text")]
ShortText = Annotated[str, Meta(max_length=256, description="a text of at most 256 characters")]
NonEmpty = Annotated[str, Meta(min_length=1, description="a text of at least one character")]
StopStrings = Annotated[str | tuple[str, ...], Meta(description="a text or a list of texts")]
TokenIds = Annotated[tuple[int, ...], Meta(description="a list of token ids")]
PROMPT = "a text, a list of token ids, or a list of texts or of such lists"
Prompt = Annotated[str | list[int | str | list[int]], Meta(description=PROMPT)]
Texts = Annotated[
    list[Annotated[str, Meta(min_length=1)]],
    Meta(min_length=1, max_length=1000, description="a list of texts, at least one and at most 1,000"),
]
Schema = Annotated[dict[str, Any] | NonEmpty, Meta(description="an object or a text of JSON")]
Ignored = Annotated[Any, Meta(description="anything, because it does not change the completion")]


class StreamOptions(RequestFields):
    """`stream_options`."""

    include_usage: Flag = False
    include_obfuscation: Ignored = None


class JsonSchemaFormat(RequestFields):
    """`response_format.json_schema`."""

    schema: Schema | None = None
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(RequestFields):
    """`response_format`. `schema` is the JSON Schema as in llama.cpp."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], Meta(description="one of text, json_object, json_schema")
    ]
    json_schema: Annotated[JsonSchemaFormat, Meta(description="an object")] | None = None
    schema: Schema | None = None


class StructuredOutputs(RequestFields):
    """`structured_outputs`, as in vLLM."""

    json: Schema | None = None
    regex: NonEmpty | None = None
    choice: Texts | None = None
    grammar: NonEmpty | None = None
    json_object: Flag = False


class RequestBody(RequestFields, dict=True):
    """Body of a request."""

    model: Text | None = None

    def check(self, config: ApiConfig) -> None:
        """Raise ApiError for incompatible values, and for values beyond the limits of the server."""


Body = TypeVar("Body", bound=RequestBody)


class GenerationRequest(RequestBody):
    """Fields of both kinds of completion requests."""

    n: Count = 1
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: Factor | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: AnyInteger | None = None
    min_tokens: Size = 0
    stop: StopStrings = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    response_format: Annotated[ResponseFormat, Meta(description="an object")] | None = None
    structured_outputs: Annotated[StructuredOutputs, Meta(description="an object")] | None = None
    guided_json: Schema | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Texts | None = None
    guided_grammar: NonEmpty | None = None
    stream: Flag = False
    stream_options: Annotated[StreamOptions, Meta(description="an object")] | None = None
    return_token_ids: Flag = False
    priority: Priority = 0
    user: ShortText = ""
    cache_salt: ShortText = ""
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities per token. None: no log-probabilities."""
        return None

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of a completion. None: the default of the endpoint."""
        return None

    @property
    def prompt_field(self) -> str:
        """Name of the field that contains the prompt, for error messages."""
        return "prompt"

    @property
    def max_new_tokens_field(self) -> str:
        """Name of the field that sets `max_new_tokens`, for error messages."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream contains the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @functools.cached_property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @functools.cached_property
    def grammar(self) -> tuple[str, Grammar | None]:
        """Name of the field that constrains the completion, and its grammar. None: no constraint."""
        grammars, outputs, response_format = dict[str, Grammar](), self.structured_outputs, self.response_format
        kinds: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")
        for owner, prefix in ((self, "guided_"), (outputs, "structured_outputs.")):
            for kind in kinds:
                content = getattr(owner, kind if owner is outputs else prefix + kind, None)
                if content is not None:
                    grammars[prefix + kind] = Grammar(kind, _grammar_content(content))
        if outputs is not None and outputs.json_object:
            grammars["structured_outputs.json_object"] = ANY_OBJECT
        if response_format is not None and response_format.type != "text":
            json_schema = response_format.json_schema
            schema = response_format.schema if json_schema is None else json_schema.schema
            if schema is not None:
                grammars["response_format"] = Grammar("json", _grammar_content(schema))
            elif response_format.type == "json_object":
                grammars["response_format"] = ANY_OBJECT
            else:
                raise ApiError(
                    400, "response_format.json_schema.schema is missing. Add the JSON Schema.", param="response_format"
                )
        if len(grammars) > 1:
            fields = " and ".join(grammars)
            raise ApiError(400, f"{fields} cannot be combined. Use one of them.", param=list(grammars)[1])
        return next(iter(grammars.items()), ("", None))

    def sampling(self, config: ApiConfig, seed: int) -> SamplingParams:
        """Return the sampling parameters of each prompt's first completion. `seed` is used if the request has none."""
        names = ("temperature", *FILTERS, "repetition_penalty")
        merged: dict[str, Any] = {"temperature": 1.0}
        for owner in (config.defaults, self):
            merged |= {name: getattr(owner, name) for name in names if getattr(owner, name) is not None}
        if merged["temperature"] < MIN_TEMPERATURE or merged.get("top_p") == 0:  # greedy
            merged |= {"temperature": 0.0, "top_p": 1.0}
        if self.top_k is not None:
            merged["top_k"] = min(self.top_k, config.vocab_size) if self.top_k > 0 else None
        neutral = {"top_p": 1.0, "min_p": 0.0}  # values that filter no tokens
        merged |= {name: getattr(self, name) for name in ("frequency_penalty", "presence_penalty")}
        merged = {name: value for name, value in merged.items() if value is not None and value != neutral.get(name)}
        biases = tuple((int(token), bias or 0.0) for token, bias in (self.logit_bias or {}).items())
        return SamplingParams(**merged, logit_bias=biases, seed=seed if self.seed is None else self.seed)

    def check(self, config: ApiConfig) -> None:
        if config.scores is not None:
            raise ApiError(400, "This model scores texts and does not generate text. Use /classify.")
        num_choices = self.n * self.num_prompts
        if num_choices > config.max_choices:
            raise ApiError(
                400,
                f"n={self.n} requests {num_choices:,} completions. At most {config.max_choices} are allowed.",
                param="n",
            )
        if self.min_tokens > config.max_length:
            raise refuse("min_tokens", self.min_tokens, f"must be at most {config.max_length:,}")
        if self.grammar[1] is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise refuse(
                name, getattr(self, name), "cannot be combined with structured output, which ends by its grammar"
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream=true.", param="stream_options")
        if self.priority and not config.allow_priority:
            raise refuse(
                "priority",
                self.priority,
                "must be 0, because this server does not let clients set priorities (--allow-priority)",
                "unsupported_parameter",
            )
        _check_count("stop", self.stops, config.max_stops)
        for text in self.stops:
            if not 0 < len(text) <= config.max_stop_length:
                raise refuse("stop", text, f"must have 1 to {config.max_stop_length:,} characters")
        _check_count("stop_token_ids", self.stop_token_ids, config.max_stops)
        check_tokens("stop_token_ids", self.stop_token_ids, config)
        _check_biases(self.logit_bias or {}, config)

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return 1


class CompletionRequest(GenerationRequest, kw_only=True):
    """Request to complete texts or token ids. With `echo`, the prompts are returned before their completions."""

    prompt: Prompt
    echo: Flag = False
    max_tokens: Size | None = None
    logprobs: Size | None = None
    return_tokens_as_token_ids: Flag = False
    add_special_tokens: Flag = True

    @functools.cached_property
    def prompts(self) -> tuple[Any, ...]:
        """Texts and tuples of token ids to complete."""
        return split_prompts(self.prompt)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    def check(self, config: ApiConfig) -> None:
        check_alternatives("logprobs", self.logprobs, config)
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", 0, "must be at least 1, except with echo")
        check_prompts("prompt", self.prompts, config)
        super().check(config)
        if self.echo and self.grammar[1] is not None:
            raise refuse("echo", True, "cannot be combined with structured output")


class DetokenizeRequest(RequestBody):
    """Request for the text of token ids. It accepts the response of /tokenize."""

    tokens: TokenIds = ()
    count: Ignored = None
    max_model_len: Ignored = None

    def check(self, config: ApiConfig) -> None:
        _check_count("tokens", self.tokens, max(config.max_length, MIN_DETOKENIZED))
        check_tokens("tokens", self.tokens, config)


class LoadAdapterRequest(RequestBody, kw_only=True):
    """Request to load an adapter from a directory of the server, as in vLLM."""

    lora_name: NonEmpty
    lora_path: NonEmpty
    load_inplace: Flag = False


class UnloadAdapterRequest(RequestBody, kw_only=True):
    """Request to unload an adapter, as in vLLM."""

    lora_name: NonEmpty
    lora_int_id: Ignored = None


def parse_request_body(kind: type[Body], content: bytes | bytearray, config: ApiConfig) -> Body:
    """Read a body as a declared type, and check it. Raises ApiError."""
    request = read(parse(content, MAX_ENTRIES + MAX_ENTRIES_PER_TOKEN * config.max_length), kind)
    request.check(config)
    return request


# --- checks -----------------------------------------------------------------------------------------------------------


def check_tokens(field: str, ids: Sequence[int], config: ApiConfig) -> None:
    """Raise ApiError for a token id that the model does not have."""
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise refuse(field, token, f"must be a token id from 0 to {config.vocab_size - 1}")


def split_prompts(prompt: Any) -> tuple[Any, ...]:
    """Return the texts and tuples of token ids of a field that is a prompt or a list of prompts."""
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in prompts)


def check_prompts(field: str, prompts: Sequence[Any], config: ApiConfig) -> None:
    """Raise ApiError for too many prompts, and for entries that are neither texts nor token ids of the model."""
    if len(prompts) > config.max_choices:
        raise ApiError(
            400, f"{field} has {len(prompts):,} entries. At most {config.max_choices} are allowed.", param=field
        )
    for prompt in prompts:
        if not isinstance(prompt, str):
            _check_ids(field, prompt, config)


def _check_ids(field: str, ids: Any, config: ApiConfig) -> None:
    """Check token ids of a prompt."""
    if not isinstance(ids, tuple) or not ids:
        raise refuse(field, ids, f"must be {PROMPT}")
    if len(ids) >= config.max_length:  # before the ids are checked one by one
        raise ApiError(
            400,
            f"The prompt has {len(ids):,} tokens. The maximum length of a prompt with its completion is "
            f"{config.max_length:,}. Shorten it.",
            param=field,
            code="context_length_exceeded",
        )
    invalid = next((token for token in ids if not isinstance(token, int)), None)
    if invalid is not None:
        raise refuse(field, invalid, f"must be {PROMPT}")
    check_tokens(field, ids, config)


def _check_count(field: str, values: Sequence[Any], maximum: int) -> None:
    if len(values) > maximum:
        raise refuse(field, values[:maximum], f"has {len(values):,} entries. At most {maximum:,} are allowed")


def check_alternatives(field: str, count: int | None, config: ApiConfig) -> None:
    if count is not None and count > config.max_logprobs:
        raise refuse(field, count, f"must be at most {config.max_logprobs:,}")


def _check_biases(biases: Mapping[str, float | None], config: ApiConfig) -> None:
    _check_count("logit_bias", list(biases), config.max_bias)
    tokens = set[int]()
    for name in biases:
        token = int(name) if name.isascii() and name.isdigit() and len(name) < 12 else -1
        if not 0 <= token < config.vocab_size or token in tokens:
            raise refuse(
                "logit_bias", name, f"must be a token id from 0 to {config.vocab_size - 1}, without duplicates"
            )
        tokens.add(token)


def _grammar_content(content: Any) -> str | tuple[str, ...]:
    if isinstance(content, dict):
        return write(content).decode()
    return content if isinstance(content, str) else tuple(content)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice. `n` choices equal the completions of `n` requests with consecutive seeds."""
    return (seed + choice + LARGEST) % (2 * LARGEST) - LARGEST
