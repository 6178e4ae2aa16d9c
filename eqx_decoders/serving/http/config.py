"""Settings of the HTTP server and of the API."""

import dataclasses

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import CheckedFields, ConfigError, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from eqx_decoders.io.text.output_parsing.formats import ToolFormatName


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(CheckedFields):
    """Limits and timeouts of the HTTP server. A reverse proxy in front of it sets further limits (see the README).

    **Arguments:**

    - `limit_concurrency`: maximum number of open connections, as in uvicorn: requests of further connections are
        answered with status 503.
    - `timeout_keep_alive`: seconds after which an idle connection is closed, as in uvicorn.
    - `drain_seconds`: time in seconds that open requests have to finish when the server stops.
    - `shutdown_seconds`: time in seconds that cancelled requests have to send their errors, and that the last step of
        the engine has to end.
    """

    limit_concurrency: PositiveInt = 1000
    timeout_keep_alive: PositiveInt = 30
    drain_seconds: NonNegativeFloat = 10.0
    shutdown_seconds: PositiveFloat = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiConfig(CheckedFields):
    """Limits and defaults of the API.

    **Arguments:**

    - `name`: name of the model in requests.
    - `adapters`: names of the adapters that the engine has loaded.
    - `max_length`: maximum number of tokens of a prompt and its completion.
    - `vocab_size`: number of logits of the model.
    - `scores`: number of scores per text of a reward model or classifier. None: the model generates text.
    - `max_logprobs`: maximum number of alternatives per token.
    - `max_choices`: maximum number of completions per request: prompts times `n`.
    - `max_stops`: maximum number of stop strings, and of stop tokens.
    - `max_stop_length`: maximum number of characters of a stop string.
    - `max_bias`: maximum number of tokens in `logit_bias`.
    - `max_files`: maximum number of images, videos and audio files of a request.
    - `max_body_bytes`: maximum size of a request body.
    - `max_scores`: maximum number of log-probabilities in a response: `1 + logprobs` per scored token.
    - `allow_priority`: clients may set priorities.
    - `tool_call_parser`: tool-call format of the model. None: tool calls are returned as text.
    - `api_keys`: clients must send one of these keys as `Authorization: Bearer …`. Empty: no key is required.
    - `seed`: seed of requests without a seed. None: a random seed for each request.
    - `defaults`: published sampling settings of the model, for requests without them. If the model has none, the
        defaults are those of OpenAI's API: temperature 1, no truncation.
    """

    name: str
    adapters: tuple[str, ...] = ()
    max_length: PositiveInt
    vocab_size: PositiveInt
    scores: PositiveInt | None = None
    max_logprobs: NonNegativeInt = 20
    max_choices: PositiveInt = 128
    max_stops: NonNegativeInt = 16
    max_stop_length: NonNegativeInt = 1000
    max_bias: NonNegativeInt = 300
    max_files: NonNegativeInt = 16
    max_body_bytes: PositiveInt = 32_000_000
    max_scores: PositiveInt = 1 << 18
    allow_priority: bool = False
    tool_call_parser: ToolFormatName | None = None
    api_keys: tuple[str, ...] = ()
    seed: int | None = None
    defaults: GenerationConfig = GenerationConfig()

    def __post_init__(self):
        super().__post_init__()
        if not self.name:
            raise ConfigError("ApiConfig.name='' must not be empty: clients request the model by its name.")
        names = (self.name, *self.adapters)
        if len(set(names)) < len(names):
            raise ConfigError(
                f"ApiConfig.adapters={self.adapters} must differ from each other and from name={self.name!r}, because "
                "clients request the model and its adapters by these names."
            )
        if not all(self.api_keys):
            raise ConfigError("ApiConfig.api_keys contains an empty key. Remove it.")
