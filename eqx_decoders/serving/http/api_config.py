"""Limits and defaults of the HTTP API."""

import dataclasses
from typing import Annotated

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.errors import CheckedFields, InRange, NonNegativeInt, PositiveInt, check, check_integer
from eqx_decoders.io.text.tool_calls import ToolFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiConfig(CheckedFields):
    """Limits and defaults of the API.

    **Arguments:**

    - `name`: name of the model in requests.
    - `adapters`: names of the model's adapters that the engine has.
    - `max_length`: maximum tokens of a prompt and its answer together.
    - `vocab_size`: number of the model's logits.
    - `scores`: scores that the model gives for a text, in place of answers; None for a model that answers.
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
    - `tool_call_parser`: format in which the model calls tools; None: calls are texts in answers.
    - `api_keys`: one of them must be sent as `Authorization: Bearer …`; empty: no key is needed.
    - `seed`: seed of requests without one; None: a random one for each.
    - `defaults`: sampling settings published with the model, for requests without them; the next defaults are OpenAI's:
        temperature 1 and nothing cut.
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
    max_open: PositiveInt = 1000
    max_open_bytes: int = 512_000_000
    body_seconds: Annotated[int | float, InRange(above=0)] = 30.0
    tool_call_parser: ToolFormat | None = None
    api_keys: tuple[str, ...] = ()
    seed: int | None = None
    defaults: GenerationConfig = GenerationConfig()

    def __post_init__(self):
        super().__post_init__()
        check(len(self.name) > 0, "ApiConfig.name='' must not be empty: clients ask for the model by it.")
        names = (self.name, *self.adapters)
        rule = f"must differ from one another and from name={self.name!r}: clients ask for them by these"
        check(len(set(names)) == len(names), f"ApiConfig.adapters={self.adapters} {rule}.")
        check_integer("ApiConfig.max_open_bytes", self.max_open_bytes, minimum=self.max_body_bytes)
        check(all(self.api_keys), "ApiConfig.api_keys has an empty key: leave it out, or give one that nobody guesses.")
