"""What clients ask for in the body of a request: read strictly, into plain records."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import check, check_integer, check_number
from eqx_decoders.serving.engine.request import SamplingParams
from eqx_decoders.serving.frontend.structured_output import ANY_OBJECT, Grammar
from eqx_decoders.serving.http import incremental_json, known_fields
from eqx_decoders.serving.http.json_fields import LARGEST, ApiError, JsonFields, refuse, token_of


Prompts = tuple[str | tuple[int, ...], ...]

COLDEST = 1e-5  # temperatures below it are 0: logits over them would be infinite
FORMS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
ROLES = ("system", "developer", "user", "assistant", "tool")
# Of a chat template's variables those that are not the client's; the last five name arguments here.
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "self", "prompt", "images", "videos", "audio"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """What a server takes.

    **Arguments:**

    - `name`: of the model, as clients ask for it.
    - `max_length`: the most tokens of a prompt and its answer together.
    - `vocab_size`: of the model's logits.
    - `max_logprobs`: the most alternatives for a token.
    - `max_choices`: the most answers to one request: prompts times `n`.
    - `max_stops`: the most stop strings, and stop tokens.
    - `max_stop_length`: characters of one of them.
    - `max_bias`: the most tokens with a bias.
    - `max_files`: the most images and audio of one request.
    - `max_body_bytes`: of a request.
    - `max_scores`: the most log-probabilities of one response: of all tokens that have some, `1 + logprobs` each.
    - `allow_priority`: whether clients may say which of their requests come before those of others.
    - `max_open`: requests at once, of which the engine queues as many as it is told to.
    - `max_open_bytes`: of the bodies of all of these together, where one has more than 64 kB.
    - `body_seconds`: in which a body must have come.
    - `api_keys`: one of them must be given as `Authorization: Bearer …`; empty: anybody is served.
    - `seed`: of the draws of requests without one; None: another one each time.
    - `defaults`: sampling settings where a request has none, those that were published with the model; where these have
        none either, OpenAI's: temperature 1 and nothing cut.
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
    """What both kinds of requests have.

    - `max_tokens`: None: as many as there is room for, or at most 16 in continuing a text.
    - `sampling`: of the first answer to each prompt; each further one has the next seed.
    - `logprobs`: so many alternatives for each token; None: nothing of it.
    - `form`: what the answer must be, and the field that said so.
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
    form: Grammar | None = None
    form_field: str = ""
    special: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    priority: int = 0
    user: str = ""
    cache_salt: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    """Texts, or token ids, to be continued; with `echo` they stand before their answers."""

    prompts: Prompts
    echo: bool = False
    add_special_tokens: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatCompletionRequest(GenerationRequest):
    """A conversation to be answered; `variables` are the chat template's."""

    messages: tuple[dict[str, Any], ...]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True


def read_completion(body: Mapping[str, Any], config: ApiConfig, seed: int) -> CompletionRequest:
    """A body of /v1/completions; `seed` if it has none."""
    fields = JsonFields(body)
    fields.check_known(known_fields.COMPLETION, known_fields.NEUTRAL, known_fields.ADVICE)
    prompts = read_prompts(fields, config)
    logprobs = fields.integer("logprobs", least=0, most=config.max_logprobs)
    echo, most = fields.flag("echo"), fields.integer("max_tokens", least=0)
    if most == 0 and not echo:
        raise fields.refuse("max_tokens", "must be at least 1, unless echo asks for the prompt")
    common = _common(fields, config, seed, len(prompts))
    if echo and common["form"] is not None:
        raise fields.refuse("echo", "excludes answers of a given form: leave one out")
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        max_tokens=most,
        logprobs=logprobs,
        add_special_tokens=fields.flag("add_special_tokens", True),
        **common,
    )


def read_chat(body: Mapping[str, Any], config: ApiConfig, seed: int) -> ChatCompletionRequest:
    """A body of /v1/chat/completions; `seed` if it has none."""
    fields = JsonFields(body)
    fields.check_known(known_fields.CHAT, known_fields.NEUTRAL, known_fields.ADVICE)
    top = fields.integer("top_logprobs", least=0, most=config.max_logprobs)
    asked = fields.flag("logprobs")
    if top and not asked:
        raise fields.refuse("top_logprobs", "needs logprobs=true")
    most = [fields.integer(name, least=1) for name in ("max_completion_tokens", "max_tokens")]
    common = _common(fields, config, seed, 1)
    return ChatCompletionRequest(
        messages=read_messages(fields, config),
        variables=read_variables(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        max_tokens=next((one for one in most if one is not None), None),
        logprobs=(top or 0) if asked else None,
        **common,
    )


def read_prompts(fields: JsonFields, config: ApiConfig) -> Prompts:
    """`prompt`: a text, token ids, or a list of either; the texts and ids of each."""
    given, vocabulary = fields.raw("prompt"), config.vocab_size
    rule = f"must be a text, a list of token ids from 0 to {vocabulary - 1}, or a list of texts or of such lists"
    if given is None:
        raise ApiError(400, f"prompt is missing: it {rule}.", param="prompt", code="missing_field")
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise fields.refuse("prompt", rule)
    if not isinstance(given[0], str | list):
        given = [given]
    if len(given) > config.max_choices:
        raise ApiError(
            400, f"prompt has {len(given):,} entries: at most {config.max_choices} are taken.", param="prompt"
        )
    return tuple(one if isinstance(one, str) else _ids(one, config, rule) for one in given)


def _ids(given: Any, config: ApiConfig, rule: str) -> tuple[int, ...]:
    if not isinstance(given, list) or not given:
        raise refuse("prompt", given, rule)
    if len(given) >= config.max_length:  # before each of them is looked at
        told = f"The prompt has {len(given):,} tokens, and together with the answer {config.max_length:,} are taken"
        raise ApiError(400, f"{told}: shorten it.", param="prompt", code="context_length_exceeded")
    for one in given:
        if token_of(one, config.vocab_size) is None:
            raise refuse("prompt", one, rule)
    return tuple(given)


def _common(fields: JsonFields, config: ApiConfig, seed: int, prompts: int) -> dict[str, Any]:
    """The arguments of `GenerationRequest` that both kinds of requests have."""
    n = fields.integer("n", least=1)
    n = 1 if n is None else n
    if n * prompts > config.max_choices:
        raise ApiError(400, f"n={n} makes {n * prompts:,} answers: at most {config.max_choices} are given.", param="n")
    least = fields.integer("min_tokens", least=0, most=config.max_length) or 0
    (field, form), ignore = read_form(fields), fields.flag("ignore_eos")
    if form is not None and (ignore or least):
        name = "ignore_eos" if ignore else "min_tokens"
        raise fields.refuse(name, "excludes an answer of a given form, which tells its end: leave one out")
    options = _inner(fields, "stream_options", known_fields.STREAM_OPTIONS)
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
            most=config.max_stops,
        ),
        include_stop=fields.flag("include_stop_str_in_output"),
        ignore_eos=ignore,
        min_tokens=least,
        form=form,
        form_field=field,
        special=not fields.flag("skip_special_tokens", True),
        stream=fields.flag("stream"),
        include_usage=options is not None and options.flag("include_usage"),
        return_token_ids=fields.flag("return_token_ids"),
        priority=_priority(fields, config),
        user=fields.text("user", most=256) or "",
        cache_salt=fields.text("cache_salt", most=256) or "",
    )


def _priority(fields: JsonFields, config: ApiConfig) -> int:
    """The engine's, where the highest comes first; in vLLM's API it is the lowest."""
    given = fields.integer("priority", least=-1_000_000, most=1_000_000) or 0
    if given and not config.allow_priority:
        rule = "must be 0: this server lets no request take the place of others, whose data it would have to keep"
        raise fields.refuse("priority", rule, "unsupported_parameter")
    return -given


def _sampling(fields: JsonFields, config: ApiConfig, seed: int) -> SamplingParams:
    given: dict[str, int | float | None] = {
        "temperature": fields.number("temperature", least=0, most=1000),
        "top_p": fields.number("top_p", least=0, most=1),
        "min_p": fields.number("min_p", least=0, most=1),
        "repetition_penalty": fields.number("repetition_penalty", above=0, most=1000),
        "frequency_penalty": fields.number("frequency_penalty", least=-2, most=2),
        "presence_penalty": fields.number("presence_penalty", least=-2, most=2),
    }
    top_k = fields.integer("top_k", least=-1)
    names = ("temperature", "top_p", "min_p", "top_k", "repetition_penalty")
    published = {name: getattr(config.defaults, name) for name in names}
    merged: dict[str, Any] = {"temperature": 1.0}
    for settings in (published, given):
        merged |= {name: value for name, value in settings.items() if value is not None}
    if merged["temperature"] < COLDEST or merged.get("top_p") == 0:  # nothing but the most likely token
        merged |= {"temperature": 0.0, "top_p": 1.0}
    if top_k is not None:
        merged["top_k"] = min(top_k, config.vocab_size) if top_k > 0 else None
    off = {"top_p": 1.0, "min_p": 0.0}  # values that cut nothing
    merged = {name: value for name, value in merged.items() if value is not None and value != off.get(name)}
    own = fields.integer("seed")
    return SamplingParams(**merged, logit_bias=_bias(fields, config), seed=seed if own is None else own)


def _bias(fields: JsonFields, config: ApiConfig) -> tuple[tuple[int, float], ...]:
    given = fields.mapping("logit_bias")
    if len(given) > config.max_bias:
        raise ApiError(
            400, f"logit_bias has {len(given):,} tokens: at most {config.max_bias} are taken.", param="logit_bias"
        )
    biases = JsonFields(given, "logit_bias")
    found: dict[int, float] = {}
    for name in given:
        token = token_of(int(name), config.vocab_size) if name.isascii() and name.isdigit() and len(name) < 12 else None
        if token is None or token in found:
            raise refuse("logit_bias", name, f"must be a token id from 0 to {config.vocab_size - 1}, each once")
        value = biases.number(name, least=-100, most=100)
        found[token] = 0.0 if value is None else value
    return tuple(found.items())


def _stops(fields: JsonFields, config: ApiConfig) -> tuple[str, ...]:
    if isinstance(fields.raw("stop"), str):
        fields = JsonFields({"stop": [fields.raw("stop")]})
    most = config.max_stop_length

    def read(value: Any) -> str | None:
        return value if isinstance(value, str) and 0 < len(value) <= most else None

    return fields.many("stop", read, f"texts of 1 to {most:,} characters", most=config.max_stops)


def read_form(fields: JsonFields) -> tuple[str, Grammar | None]:
    """What an answer must be, behind the field that says so.

    That is `response_format`, or of vLLM `structured_outputs` and its older `guided_…`.
    """
    found: dict[str, Grammar] = {}
    for name, kind in FORMS.items():
        if fields.has(name):
            found[fields.name(name)] = _form(fields, name, kind)
    whole = _inner(fields, "structured_outputs", known_fields.STRUCTURED_OUTPUTS)
    for kind in ("json", "regex", "choice", "grammar"):
        if whole is not None and whole.has(kind):
            found[whole.name(kind)] = _form(whole, kind, kind)
    if whole is not None and whole.flag("json_object"):
        found[whole.name("json_object")] = ANY_OBJECT
    asked = _response_format(fields)
    if asked is not None:
        found["response_format"] = asked
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)} exclude each other: give one.", param=list(found)[1])
    return next(iter(found.items()), ("", None))


def _response_format(fields: JsonFields) -> Grammar | None:
    asked = _inner(fields, "response_format", known_fields.RESPONSE_FORMAT)
    if asked is None:
        return None
    kind = asked.word("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise ApiError(
            400, "response_format.type is missing: give text, json_object or json_schema.", param=asked.name("type")
        )
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    inner = _inner(asked, "json_schema", known_fields.JSON_SCHEMA)
    if inner is None or not inner.has("schema"):
        raise ApiError(400, "response_format.json_schema.schema is missing.", param="response_format")
    return _form(inner, "schema", "json")


def _form(fields: JsonFields, name: str, kind: Literal["json", "regex", "choice", "grammar"] | str) -> Grammar:
    value = fields.raw(name)
    if kind == "choice":
        texts = fields.many(name, lambda one: one if isinstance(one, str) and one else None, "texts", most=1000)
        if not texts:
            raise fields.refuse(name, "must be a list of texts, at least one")
        return Grammar("choice", texts)
    if kind == "json" and isinstance(value, dict):
        return Grammar("json", incremental_json.write(value).decode())
    if not isinstance(value, str) or not value:
        raise fields.refuse(name, "must be an object or a text of JSON" if kind == "json" else "must be a text")
    return Grammar("json" if kind == "json" else "regex" if kind == "regex" else "grammar", value)


def _inner(fields: JsonFields, name: str, names: Collection[str]) -> JsonFields | None:
    """An object within a body, which has none but these fields."""
    found = fields.inner(name)
    if found is not None:
        found.check_known(names, known_fields.NEUTRAL, known_fields.ADVICE)
    return found


def read_variables(fields: JsonFields) -> dict[str, Any]:
    """Of the chat template: `tools`, and those that `chat_template_kwargs` has."""
    found = dict(fields.mapping("chat_template_kwargs"))
    taken = RESERVED & found.keys()
    if taken:
        raise fields.refuse("chat_template_kwargs", f"must not have {sorted(taken)[0]!r}: it's set by the server")
    fields.many("modalities", lambda one: one if one == "text" else None, "'text' alone", most=1)
    choice = fields.raw("tool_choice")
    tools = fields.many("tools", lambda one: one if _is_tool(one) else None, "functions with a name", most=1000)
    if choice not in (None, "none", "auto"):
        raise fields.refuse("tool_choice", "is not offered: give 'auto' or 'none'", "unsupported_parameter")
    if tools and choice != "none":
        found["tools"] = list(tools)
    if fields.has("reasoning_effort"):
        found["reasoning_effort"] = fields.text("reasoning_effort", most=100)
    return found


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def read_messages(fields: JsonFields, config: ApiConfig) -> tuple[dict[str, Any], ...]:
    """`messages`, whose contents are texts or lists of parts (see `prompts.parts_of`)."""
    given = fields.raw("messages")
    if not isinstance(given, list) or not given:
        raise fields.refuse("messages", "must be a list with at least one message")
    if len(given) > config.max_length:  # each has a token at least: before they are looked at, and rendered
        told = f"messages has {len(given):,} entries, and {config.max_length:,} tokens are taken"
        raise ApiError(400, f"{told}: shorten it.", param="messages", code="context_length_exceeded")
    for number, one in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(one, dict):
            raise refuse(where, one, "must be an object with role and content")
        message = JsonFields(one, where)
        if message.word("role", ROLES) is None:
            raise ApiError(400, f"{where}.role is missing: give one of {', '.join(ROLES)}.", param=f"{where}.role")
        content = message.raw("content")
        silent = content is None and (message.has("tool_calls") or one["role"] == "assistant")
        if not (isinstance(content, str | list) or silent):
            raise message.refuse("content", "must be a text or a list of parts")
    return tuple(_with_content(one) for one in given)


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant that neither says anything nor calls a tool has said an empty text."""
    silent = message.get("content") is None and message.get("tool_calls") is None
    return {**message, "content": ""} if silent else message


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of `n` answers: they are those of `n` requests with seeds that follow each other."""
    return (seed + choice + LARGEST) % (2 * LARGEST) - LARGEST
