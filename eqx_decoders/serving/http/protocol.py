"""Bodies of requests as declared types, whose schemas `openapi.py` prints, and checks that need the server's limits.

The description of a type is both in the schema and in the error message for a value that it cannot have.
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


LEAST_ENTRIES, ENTRIES_PER_TOKEN = 50_000, 4  # lists, objects and names of fields in a large body
MOST_TOKENS = 10_000  # that become a text, where the model takes fewer
COLDEST = 1e-5  # temperatures below it are 0: logits over them would be infinite

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
Stops = Annotated[str | tuple[str, ...], Meta(description="a text or a list of texts")]
TokenIds = Annotated[tuple[int, ...], Meta(description="a list of token ids")]
PROMPT = "a text, a list of token ids, or a list of texts or of such lists"
Prompt = Annotated[str | list[int | str | list[int]], Meta(description=PROMPT)]
SomeTexts = Annotated[
    list[Annotated[str, Meta(min_length=1)]],
    Meta(min_length=1, max_length=1000, description="a list of texts, at least one and at most 1,000"),
]
Schema = Annotated[dict[str, Any] | NonEmpty, Meta(description="an object or a text of JSON")]
Ignored = Annotated[Any, Meta(description="anything: it changes no answer")]


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
    """`response_format`. `schema` is the JSON Schema as llama.cpp takes it, with both types of JSON."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], Meta(description="one of text, json_object, json_schema")
    ]
    json_schema: Annotated[JsonSchemaFormat, Meta(description="an object")] | None = None
    schema: Schema | None = None


class StructuredOutputs(RequestFields):
    """`structured_outputs`, as vLLM has them."""

    json: Schema | None = None
    regex: NonEmpty | None = None
    choice: SomeTexts | None = None
    grammar: NonEmpty | None = None
    json_object: Flag = False


class RequestBody(RequestFields, dict=True):
    """Body of a request."""

    model: Text | None = None

    def check(self, config: ApiConfig) -> None:
        """Raise ApiError for values that exclude each other, or are beyond the server's limits."""


Body = TypeVar("Body", bound=RequestBody)


class GenerationRequest(RequestBody):
    """Fields that both kinds of requests for answers have."""

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
    stop: Stops = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    response_format: Annotated[ResponseFormat, Meta(description="an object")] | None = None
    structured_outputs: Annotated[StructuredOutputs, Meta(description="an object")] | None = None
    guided_json: Schema | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: SomeTexts | None = None
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
        """Number of alternatives with log-probabilities for each token; None: no log-probabilities."""
        return None

    @property
    def max_answer(self) -> int | None:
        """Maximum tokens of an answer; None: as many as there is room for, or at most 16 in continuing a text."""
        return None

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompt, for error messages."""
        return "prompt"

    @property
    def max_answer_field(self) -> str:
        """Name of the field that sets `max_answer`, for error messages."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @functools.cached_property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @functools.cached_property
    def grammar(self) -> tuple[str, Grammar | None]:
        """Grammar of the answer, with the name of the field that sets it."""
        grammars, outputs, form = dict[str, Grammar](), self.structured_outputs, self.response_format
        kinds: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")
        for owner, prefix in ((self, "guided_"), (outputs, "structured_outputs.")):
            for kind in kinds:
                content = getattr(owner, kind if owner is outputs else prefix + kind, None)
                if content is not None:
                    grammars[prefix + kind] = Grammar(kind, _grammar_content(content))
        if outputs is not None and outputs.json_object:
            grammars["structured_outputs.json_object"] = ANY_OBJECT
        if form is not None and form.type != "text":
            schema = form.schema if form.json_schema is None else form.json_schema.schema
            if schema is not None:
                grammars["response_format"] = Grammar("json", _grammar_content(schema))
            elif form.type == "json_object":
                grammars["response_format"] = ANY_OBJECT
            else:
                raise ApiError(400, "response_format.json_schema.schema is missing.", param="response_format")
        if len(grammars) > 1:
            raise ApiError(400, f"{' and '.join(grammars)} exclude each other: give one.", param=list(grammars)[1])
        return next(iter(grammars.items()), ("", None))

    def sampling(self, config: ApiConfig, seed: int) -> SamplingParams:
        """Return the parameters of the first answer to each prompt; `seed` is used if the request has none."""
        names = ("temperature", *FILTERS, "repetition_penalty")
        merged: dict[str, Any] = {"temperature": 1.0}
        for owner in (config.defaults, self):
            merged |= {name: getattr(owner, name) for name in names if getattr(owner, name) is not None}
        if merged["temperature"] < COLDEST or merged.get("top_p") == 0:  # nothing but the most likely token
            merged |= {"temperature": 0.0, "top_p": 1.0}
        if self.top_k is not None:
            merged["top_k"] = min(self.top_k, config.vocab_size) if self.top_k > 0 else None
        neutral = {"top_p": 1.0, "min_p": 0.0}  # values that cut nothing
        merged |= {name: getattr(self, name) for name in ("frequency_penalty", "presence_penalty")}
        merged = {name: value for name, value in merged.items() if value is not None and value != neutral.get(name)}
        biases = tuple((int(token), bias or 0.0) for token, bias in (self.logit_bias or {}).items())
        return SamplingParams(**merged, logit_bias=biases, seed=seed if self.seed is None else self.seed)

    def check(self, config: ApiConfig) -> None:
        if config.scores is not None:
            raise ApiError(400, "This model scores texts, and writes none: ask /classify.")
        answers = self.n * self.num_prompts
        if answers > config.max_choices:
            message = f"n={self.n} makes {answers:,} answers: at most {config.max_choices} are given."
            raise ApiError(400, message, param="n")
        if self.min_tokens > config.max_length:
            raise refuse("min_tokens", self.min_tokens, f"must be at most {config.max_length:,}")
        if self.grammar[1] is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            rule = "excludes an answer of a given form, which tells its end: leave one out"
            raise refuse(name, getattr(self, name), rule)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true.", param="stream_options")
        if self.priority and not config.allow_priority:
            rule = "must be 0: this server lets no request take the place of others, whose data it would have to keep"
            raise refuse("priority", self.priority, rule, "unsupported_parameter")
        _check_few("stop", self.stops, config.max_stops)
        for text in self.stops:
            if not 0 < len(text) <= config.max_stop_length:
                raise refuse("stop", text, f"must have 1 to {config.max_stop_length:,} characters")
        _check_few("stop_token_ids", self.stop_token_ids, config.max_stops)
        check_tokens("stop_token_ids", self.stop_token_ids, config)
        _check_biases(self.logit_bias or {}, config)

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return 1


class CompletionRequest(GenerationRequest, kw_only=True):
    """Request to continue texts or token ids; with `echo` they are returned before their answers."""

    prompt: Prompt
    echo: Flag = False
    max_tokens: Size | None = None
    logprobs: Size | None = None
    return_tokens_as_token_ids: Flag = False
    add_special_tokens: Flag = True

    @functools.cached_property
    def prompts(self) -> tuple[Any, ...]:
        """Texts and tuples of token ids to continue."""
        return split_prompts(self.prompt)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def max_answer(self) -> int | None:
        return self.max_tokens

    def check(self, config: ApiConfig) -> None:
        check_alternatives("logprobs", self.logprobs, config)
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", 0, "must be at least 1, unless echo asks for the prompt")
        check_prompts("prompt", self.prompts, config)
        super().check(config)
        if self.echo and self.grammar[1] is not None:
            raise refuse("echo", True, "excludes answers of a given form: leave one out")


class DetokenizeRequest(RequestBody):
    """Request for the text of token ids. It takes the response of /tokenize."""

    tokens: TokenIds = ()
    count: Ignored = None
    max_model_len: Ignored = None

    def check(self, config: ApiConfig) -> None:
        _check_few("tokens", self.tokens, max(config.max_length, MOST_TOKENS))
        check_tokens("tokens", self.tokens, config)


class LoadAdapterRequest(RequestBody, kw_only=True):
    """Request to load an adapter from a directory of the server, as vLLM has it."""

    lora_name: NonEmpty
    lora_path: NonEmpty
    load_inplace: Flag = False


class UnloadAdapterRequest(RequestBody, kw_only=True):
    """Request to drop an adapter, as vLLM has it."""

    lora_name: NonEmpty
    lora_int_id: Ignored = None


def read_body(kind: type[Body], content: bytes | bytearray, config: ApiConfig) -> Body:
    """Read a body as a declared type, and check it."""
    request = read(parse(content, LEAST_ENTRIES + ENTRIES_PER_TOKEN * config.max_length), kind)
    request.check(config)
    return request


# --- checks -----------------------------------------------------------------------------------------------------------


def check_tokens(field: str, ids: Sequence[int], config: ApiConfig) -> None:
    """Raise ApiError for an id that the model does not have."""
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise refuse(field, token, f"must be a token id from 0 to {config.vocab_size - 1}")


def split_prompts(prompt: Any) -> tuple[Any, ...]:
    """Return texts and tuples of token ids, of a single one or of a list of them."""
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in prompts)


def check_prompts(field: str, prompts: Sequence[Any], config: ApiConfig) -> None:
    """Raise ApiError for too many prompts, and for what is neither a text nor token ids of the model."""
    if len(prompts) > config.max_choices:
        rule = f"has {len(prompts):,} entries: at most {config.max_choices} are taken"
        raise ApiError(400, f"{field} {rule}.", param=field)
    for prompt in prompts:
        if not isinstance(prompt, str):
            _check_ids(field, prompt, config)


def _check_ids(field: str, ids: Any, config: ApiConfig) -> None:
    """Check token ids of a prompt."""
    if not isinstance(ids, tuple) or not ids:
        raise refuse(field, ids, f"must be {PROMPT}")
    if len(ids) >= config.max_length:  # before each of them is looked at
        message = f"The prompt has {len(ids):,} tokens, and together with the answer {config.max_length:,} are taken"
        raise ApiError(400, f"{message}: shorten it.", param=field, code="context_length_exceeded")
    wrong = next((each for each in ids if not isinstance(each, int)), None)
    if wrong is not None:
        raise refuse(field, wrong, f"must be {PROMPT}")
    check_tokens(field, ids, config)


def _check_few(field: str, values: Sequence[Any], maximum: int) -> None:
    if len(values) > maximum:
        rule = f"has {len(values):,} entries: at most {maximum:,} are taken"
        raise refuse(field, values[:maximum], rule)


def check_alternatives(field: str, count: int | None, config: ApiConfig) -> None:
    if count is not None and count > config.max_logprobs:
        raise refuse(field, count, f"must be at most {config.max_logprobs:,}")


def _check_biases(biases: Mapping[str, float | None], config: ApiConfig) -> None:
    _check_few("logit_bias", list(biases), config.max_bias)
    tokens = set[int]()
    for name in biases:
        token = int(name) if name.isascii() and name.isdigit() and len(name) < 12 else -1
        if not 0 <= token < config.vocab_size or token in tokens:
            rule = f"must be a token id from 0 to {config.vocab_size - 1}, each once"
            raise refuse("logit_bias", name, rule)
        tokens.add(token)


def _grammar_content(content: Any) -> str | tuple[str, ...]:
    if isinstance(content, dict):
        return write(content).decode()
    return content if isinstance(content, str) else tuple(content)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of `n` answers: they are those of `n` requests with consecutive seeds."""
    return (seed + choice + LARGEST) % (2 * LARGEST) - LARGEST
