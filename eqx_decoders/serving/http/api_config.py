"""Limits and defaults of the HTTP API."""

import dataclasses

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import check, check_integer, check_number


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
