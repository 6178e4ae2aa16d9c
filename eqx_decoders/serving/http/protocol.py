"""Bodies of requests, read strictly into dataclasses."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import check, check_integer, check_number
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.serving.frontend import incremental_json
from eqx_decoders.serving.frontend.json_fields import LARGEST, ApiError, JsonFields, refuse, token_of
from eqx_decoders.serving.frontend.structured_output import ANY_OBJECT, Grammar
from eqx_decoders.serving.http import request_fields


Prompts = tuple[str | tuple[int, ...], ...]

COLDEST = 1e-5  # temperatures below it are 0: logits over them would be infinite
FORMS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
ROLES = ("system", "developer", "user", "assistant", "tool")
# Variables of a chat template that clients may not set; the last five are names of arguments here.
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "self", "prompt", "images", "videos", "audio"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """Limits and defaults of the API.

    **Arguments:**

    - `name`: name of the model in requests.
    - `max_length`: maximum tokens of a prompt and its answer together.
    - `vocab_size`: number of the model's logits.
    - `max_logprobs`: maximum alternatives for a token.
    - `max_choices`: maximum answers to one request: prompts times `n`.
    - `max_stops`: maximum of stop strings, and of stop tokens.
    - `max_stop_length`: maximum characters of a stop string.
    - `max_bias`: maximum tokens with a bias.
    - `max_files`: maximum images, videos and audio of one request.
    - `max_body_bytes`: maximum size of a body.
    - `max_scores`: maximum log-probabilities of one response: `1 + logprobs` for each token that has some.
    - `allow_priority`: clients may set priorities.
    - `max_open`: requests that may be open at once; the engine's own limit bounds how many of them it queues.
    - `max_open_bytes`: total size of the bodies of open requests, where one has more than 64 kB.
    - `body_seconds`: time in which a body must arrive.
    - `api_keys`: one of them must be sent as `Authorization: Bearer …`; empty: no key is needed.
    - `seed`: seed of requests without one; None: a random one for each.
    - `defaults`: sampling settings published with the model, for requests without them; the next defaults are OpenAI's:
        temperature 1 and nothing cut.
    """

    name: str
    max_length: int
    vocab_size: int
    max_logprobs: int = 20
    max_choices: int = 128
    max_stops: int = 16
    max_stop_length: int = 1000
    max_bias: int = 300
    max_files: int = 16
    max_body_bytes: int = 32_000_000
    max_scores: int = 1 << 18
    allow_priority: bool = False
    max_open: int = 1000
    max_open_bytes: int = 512_000_000
    body_seconds: int | float = 30.0
    api_keys: tuple[str, ...] = ()
    seed: int | None = None
    defaults: GenerationConfig = GenerationConfig()

    def __post_init__(self):
        check(len(self.name) > 0, "ApiConfig.name='' must not be empty: clients ask for the model by it.")
        for field in ("max_length", "vocab_size", "max_choices", "max_body_bytes", "max_scores", "max_open"):
            check_integer(f"ApiConfig.{field}", getattr(self, field))
        check_integer("ApiConfig.max_open_bytes", self.max_open_bytes, minimum=self.max_body_bytes)
        for field in ("max_logprobs", "max_stops", "max_stop_length", "max_bias", "max_files"):
            check_integer(f"ApiConfig.{field}", getattr(self, field), minimum=0)
        check_number("ApiConfig.body_seconds", self.body_seconds, above=0)
        check(all(self.api_keys), "ApiConfig.api_keys has an empty key: leave it out, or give one that nobody guesses.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Common fields of both kinds of requests.

    - `max_tokens`: maximum length of an answer; None: as many as there is room for, or at most 16 in continuing a text.
    - `sampling`: parameters of the first answer to each prompt; the next ones have the next seeds.
    - `logprobs`: alternatives for each token; None: no log-probabilities.
    - `grammar`, `grammar_field`: grammar of the answer, and the field that has set it.
    """

    max_tokens: int | None
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    grammar_field: str = ""
    keep_special_tokens: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    priority: int = 0
    user: str = ""
    cache_salt: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    """Request to continue texts or token ids; with `echo` they are returned before their answers."""

    prompts: Prompts
    echo: bool = False
    add_special_tokens: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatCompletionRequest(GenerationRequest):
    """Request to answer a conversation; `variables` are those of the chat template."""

    messages: tuple[dict[str, Any], ...]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True


def read_completion(body: Mapping[str, Any], config: ApiConfig, seed: int) -> CompletionRequest:
    """Read a body of /v1/completions; `seed` is used if it has none."""
    fields = JsonFields(body)
    fields.check_known(request_fields.COMPLETION, request_fields.NEUTRAL, request_fields.ADVICE)
    prompts = read_prompts(fields, config)
    logprobs = fields.integer("logprobs", minimum=0, maximum=config.max_logprobs)
    echo, max_tokens = fields.flag("echo"), fields.integer("max_tokens", minimum=0)
    if max_tokens == 0 and not echo:
        raise fields.refuse("max_tokens", "must be at least 1, unless echo asks for the prompt")
    common = _common(fields, config, seed, len(prompts))
    if echo and common["grammar"] is not None:
        raise fields.refuse("echo", "excludes answers of a given form: leave one out")
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        max_tokens=max_tokens,
        logprobs=logprobs,
        add_special_tokens=fields.flag("add_special_tokens", True),
        **common,
    )


def read_chat(body: Mapping[str, Any], config: ApiConfig, seed: int) -> ChatCompletionRequest:
    """Read a body of /v1/chat/completions; `seed` is used if it has none."""
    fields = JsonFields(body)
    fields.check_known(request_fields.CHAT, request_fields.NEUTRAL, request_fields.ADVICE)
    top_logprobs = fields.integer("top_logprobs", minimum=0, maximum=config.max_logprobs)
    wants_logprobs = fields.flag("logprobs")
    if top_logprobs and not wants_logprobs:
        raise fields.refuse("top_logprobs", "needs logprobs=true")
    limits = [fields.integer(name, minimum=1) for name in ("max_completion_tokens", "max_tokens")]
    common = _common(fields, config, seed, 1)
    return ChatCompletionRequest(
        messages=read_messages(fields, config),
        variables=read_variables(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        logprobs=(top_logprobs or 0) if wants_logprobs else None,
        **common,
    )


def read_prompts(fields: JsonFields, config: ApiConfig) -> Prompts:
    """Read `prompt`: a text, token ids, or a list of either."""
    prompt, vocab_size = fields.raw("prompt"), config.vocab_size
    rule = f"must be a text, a list of token ids from 0 to {vocab_size - 1}, or a list of texts or of such lists"
    if prompt is None:
        raise ApiError(400, f"prompt is missing: it {rule}.", param="prompt", code="missing_field")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise fields.refuse("prompt", rule)
    if not isinstance(prompt[0], str | list):
        prompt = [prompt]
    if len(prompt) > config.max_choices:
        raise ApiError(
            400, f"prompt has {len(prompt):,} entries: at most {config.max_choices} are taken.", param="prompt"
        )
    return tuple(entry if isinstance(entry, str) else _ids(entry, config, rule) for entry in prompt)


def _ids(ids: Any, config: ApiConfig, rule: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise refuse("prompt", ids, rule)
    if len(ids) >= config.max_length:  # before each of them is looked at
        message = f"The prompt has {len(ids):,} tokens, and together with the answer {config.max_length:,} are taken"
        raise ApiError(400, f"{message}: shorten it.", param="prompt", code="context_length_exceeded")
    for token in ids:
        if token_of(token, config.vocab_size) is None:
            raise refuse("prompt", token, rule)
    return tuple(ids)


def _common(fields: JsonFields, config: ApiConfig, seed: int, prompts: int) -> dict[str, Any]:
    """Read the arguments of `GenerationRequest` that both kinds of requests have."""
    n = fields.integer("n", minimum=1)
    n = 1 if n is None else n
    if n * prompts > config.max_choices:
        raise ApiError(400, f"n={n} makes {n * prompts:,} answers: at most {config.max_choices} are given.", param="n")
    min_tokens = fields.integer("min_tokens", minimum=0, maximum=config.max_length) or 0
    (field, grammar), ignore_eos = read_grammar(fields), fields.flag("ignore_eos")
    if grammar is not None and (ignore_eos or min_tokens):
        name = "ignore_eos" if ignore_eos else "min_tokens"
        raise fields.refuse(name, "excludes an answer of a given form, which tells its end: leave one out")
    options = _inner(fields, "stream_options", request_fields.STREAM_OPTIONS)
    if options is not None and not fields.flag("stream"):
        raise fields.refuse("stream_options", "needs stream=true")
    return dict(
        n=n,
        sampling=_sampling(fields, config, seed),
        stop=_stops(fields, config),
        stop_token_ids=fields.many(
            "stop_token_ids",
            lambda value: token_of(value, config.vocab_size),
            f"token ids from 0 to {config.vocab_size - 1}",
            maximum=config.max_stops,
        ),
        include_stop=fields.flag("include_stop_str_in_output"),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        grammar=grammar,
        grammar_field=field,
        keep_special_tokens=not fields.flag("skip_special_tokens", True),
        stream=fields.flag("stream"),
        include_usage=options is not None and options.flag("include_usage"),
        return_token_ids=fields.flag("return_token_ids"),
        priority=_priority(fields, config),
        user=fields.text("user", maximum=256) or "",
        cache_salt=fields.text("cache_salt", maximum=256) or "",
    )


def _priority(fields: JsonFields, config: ApiConfig) -> int:
    """Read the priority: the engine's highest comes first, in vLLM's API the lowest."""
    priority = fields.integer("priority", minimum=-1_000_000, maximum=1_000_000) or 0
    if priority and not config.allow_priority:
        rule = "must be 0: this server lets no request take the place of others, whose data it would have to keep"
        raise fields.refuse("priority", rule, "unsupported_parameter")
    return -priority


def _sampling(fields: JsonFields, config: ApiConfig, seed: int) -> SamplingParams:
    from_request: dict[str, int | float | None] = {
        "temperature": fields.number("temperature", minimum=0, maximum=1000),
        "top_p": fields.number("top_p", minimum=0, maximum=1),
        "min_p": fields.number("min_p", minimum=0, maximum=1),
        "repetition_penalty": fields.number("repetition_penalty", above=0, maximum=1000),
        "frequency_penalty": fields.number("frequency_penalty", minimum=-2, maximum=2),
        "presence_penalty": fields.number("presence_penalty", minimum=-2, maximum=2),
    }
    top_k = fields.integer("top_k", minimum=-1)
    names = ("temperature", "top_p", "min_p", "top_k", "repetition_penalty")
    from_model = {name: getattr(config.defaults, name) for name in names}
    merged: dict[str, Any] = {"temperature": 1.0}
    for settings in (from_model, from_request):
        merged |= {name: value for name, value in settings.items() if value is not None}
    if merged["temperature"] < COLDEST or merged.get("top_p") == 0:  # nothing but the most likely token
        merged |= {"temperature": 0.0, "top_p": 1.0}
    if top_k is not None:
        merged["top_k"] = min(top_k, config.vocab_size) if top_k > 0 else None
    neutral = {"top_p": 1.0, "min_p": 0.0}  # values that cut nothing
    merged = {name: value for name, value in merged.items() if value is not None and value != neutral.get(name)}
    request_seed = fields.integer("seed")
    return SamplingParams(
        **merged, logit_bias=_bias(fields, config), seed=seed if request_seed is None else request_seed
    )


def _bias(fields: JsonFields, config: ApiConfig) -> tuple[tuple[int, float], ...]:
    mapping = fields.mapping("logit_bias")
    if len(mapping) > config.max_bias:
        raise ApiError(
            400, f"logit_bias has {len(mapping):,} tokens: at most {config.max_bias} are taken.", param="logit_bias"
        )
    biases = JsonFields(mapping, "logit_bias")
    by_token: dict[int, float] = {}
    for name in mapping:
        token = token_of(int(name), config.vocab_size) if name.isascii() and name.isdigit() and len(name) < 12 else None
        if token is None or token in by_token:
            raise refuse("logit_bias", name, f"must be a token id from 0 to {config.vocab_size - 1}, each once")
        value = biases.number(name, minimum=-100, maximum=100)
        by_token[token] = 0.0 if value is None else value
    return tuple(by_token.items())


def _stops(fields: JsonFields, config: ApiConfig) -> tuple[str, ...]:
    if isinstance(fields.raw("stop"), str):
        fields = JsonFields({"stop": [fields.raw("stop")]})
    max_length = config.max_stop_length

    def read_text(value: Any) -> str | None:
        return value if isinstance(value, str) and 0 < len(value) <= max_length else None

    return fields.many("stop", read_text, f"texts of 1 to {max_length:,} characters", maximum=config.max_stops)


def read_grammar(fields: JsonFields) -> tuple[str, Grammar | None]:
    """Read the grammar of an answer, with the name of its field: `response_format`, vLLM's `structured_outputs`, or its
    older `guided_…`.
    """
    grammars: dict[str, Grammar] = {}
    for name, kind in FORMS.items():
        if fields.has(name):
            grammars[fields.name(name)] = _read_grammar(fields, name, kind)
    outputs = _inner(fields, "structured_outputs", request_fields.STRUCTURED_OUTPUTS)
    for kind in ("json", "regex", "choice", "grammar"):
        if outputs is not None and outputs.has(kind):
            grammars[outputs.name(kind)] = _read_grammar(outputs, kind, kind)
    if outputs is not None and outputs.flag("json_object"):
        grammars[outputs.name("json_object")] = ANY_OBJECT
    from_format = _response_format(fields)
    if from_format is not None:
        grammars["response_format"] = from_format
    if len(grammars) > 1:
        raise ApiError(400, f"{' and '.join(grammars)} exclude each other: give one.", param=list(grammars)[1])
    return next(iter(grammars.items()), ("", None))


def _response_format(fields: JsonFields) -> Grammar | None:
    response_format = _inner(fields, "response_format", request_fields.RESPONSE_FORMAT)
    if response_format is None:
        return None
    kind = response_format.word("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise ApiError(
            400,
            "response_format.type is missing: give text, json_object or json_schema.",
            param=response_format.name("type"),
        )
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    inner = _inner(response_format, "json_schema", request_fields.JSON_SCHEMA)
    if inner is None or not inner.has("schema"):
        raise ApiError(400, "response_format.json_schema.schema is missing.", param="response_format")
    return _read_grammar(inner, "schema", "json")


def _read_grammar(fields: JsonFields, name: str, kind: Literal["json", "regex", "choice", "grammar"] | str) -> Grammar:
    value = fields.raw(name)
    if kind == "choice":
        texts = fields.many(name, lambda one: one if isinstance(one, str) and one else None, "texts", maximum=1000)
        if not texts:
            raise fields.refuse(name, "must be a list of texts, at least one")
        return Grammar("choice", texts)
    if kind == "json" and isinstance(value, dict):
        return Grammar("json", incremental_json.write(value).decode())
    if not isinstance(value, str) or not value:
        raise fields.refuse(name, "must be an object or a text of JSON" if kind == "json" else "must be a text")
    return Grammar("json" if kind == "json" else "regex" if kind == "regex" else "grammar", value)


def _inner(fields: JsonFields, name: str, names: Collection[str]) -> JsonFields | None:
    """Read an object within a body, and refuse unknown fields."""
    inner = fields.inner(name)
    if inner is not None:
        inner.check_known(names, request_fields.NEUTRAL, request_fields.ADVICE)
    return inner


def read_variables(fields: JsonFields) -> dict[str, Any]:
    """Read the variables of the chat template: `tools`, and those of `chat_template_kwargs`."""
    variables = dict(fields.mapping("chat_template_kwargs"))
    reserved = RESERVED & variables.keys()
    if reserved:
        raise fields.refuse("chat_template_kwargs", f"must not have {sorted(reserved)[0]!r}: it's set by the server")
    fields.many("modalities", lambda one: one if one == "text" else None, "'text' alone", maximum=1)
    choice = fields.raw("tool_choice")
    tools = fields.many("tools", lambda one: one if _is_tool(one) else None, "functions with a name", maximum=1000)
    if choice not in (None, "none", "auto"):
        raise fields.refuse("tool_choice", "is not offered: give 'auto' or 'none'", "unsupported_parameter")
    if tools and choice != "none":
        variables["tools"] = list(tools)
    if fields.has("reasoning_effort"):
        variables["reasoning_effort"] = fields.text("reasoning_effort", maximum=100)
    return variables


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def read_messages(fields: JsonFields, config: ApiConfig) -> tuple[dict[str, Any], ...]:
    """Read `messages`, whose contents are texts or lists of parts (read by `PromptPreparer`)."""
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.refuse("messages", "must be a list with at least one message")
    if len(messages) > config.max_length:  # each has a token at least: before they are looked at, and rendered
        error = f"messages has {len(messages):,} entries, and {config.max_length:,} tokens are taken"
        raise ApiError(400, f"{error}: shorten it.", param="messages", code="context_length_exceeded")
    for number, entry in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(entry, dict):
            raise refuse(where, entry, "must be an object with role and content")
        message = JsonFields(entry, where)
        if message.word("role", ROLES) is None:
            raise ApiError(400, f"{where}.role is missing: give one of {', '.join(ROLES)}.", param=f"{where}.role")
        content = message.raw("content")
        may_be_empty = content is None and (message.has("tool_calls") or entry["role"] == "assistant")
        if not (isinstance(content, str | list) or may_be_empty):
            raise message.refuse("content", "must be a text or a list of parts")
    return tuple(_with_content(entry) for entry in messages)


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """Add an empty text to the message of an assistant that neither says anything nor calls a tool."""
    silent = message.get("content") is None and message.get("tool_calls") is None
    return {**message, "content": ""} if silent else message


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of `n` answers: they are those of `n` requests with consecutive seeds."""
    return (seed + choice + LARGEST) % (2 * LARGEST) - LARGEST
