"""Requests to an engine, and the outputs and statistics that it returns."""

import dataclasses
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Int16

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.encoders.media import Media
from eqx_decoders.errors import CheckedFields, EqxDecodersError, NonEmpty, NonNegativeInt, PositiveInt, check
from eqx_decoders.serving.engine.sampler import Constraint, SamplingParams, TokenScore


FinishReason = Literal["stop", "length", "cancelled", "error"]


class QueueFull(EqxDecodersError):
    """Error for a request that comes while the queue is full; it can be sent again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(CheckedFields):
    """Prompt to be continued.

    **Arguments:**

    - `prompt`: token ids, at least one.
    - `max_new_tokens`: maximum length of the answer.
    - `sampling`: sampling parameters.
    - `stop_ids`: an answer ends with one of these, which is its last token.
    - `min_new_tokens`: tokens before which none of `stop_ids` is sampled.
    - `logprobs`: number of most likely tokens to report with the log-probability of each token of the answer; None: no
        log-probabilities.
    - `logprobs_of`: "model": of the model itself, before `sampling`; "draws": of the distribution that tokens are drawn
        from, with biases, penalties, temperature and filters.
    - `prompt_logprobs`: the same for each prompt token but the first.
    - `prompt_logprobs_from`: first prompt token with log-probabilities; those before it may come from the prefix cache.
    - `constraint`: mask of the allowed tokens; None: all are allowed.
    - `media`: images, videos and audio, from `Media.create` for this prompt alone.
    - `priority`: requests with a higher one come first, and preempt those with a lower one.
    - `client`: clients take turns within a priority.
    - `adapter`: name of the adapter that answers (`Engine.load_adapter`); None: the model itself.
    - `cache_salt`: cached prefixes are shared only among requests with the same salt.
    """

    prompt: Annotated[tuple[int, ...], NonEmpty("token, such as the tokenizer's bos_id")]
    max_new_tokens: PositiveInt
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: NonNegativeInt = 0
    logprobs: NonNegativeInt | None = None
    logprobs_of: Literal["model", "draws"] = "model"
    prompt_logprobs: NonNegativeInt | None = None
    prompt_logprobs_from: PositiveInt = 1
    constraint: Constraint | None = None
    media: Media | None = None
    priority: int = 0
    client: str = ""
    adapter: str | None = None
    cache_salt: str = ""

    def __post_init__(self):
        for field in ("prompt", "stop_ids"):
            ids = as_int32(f"Request.{field}", tuple(getattr(self, field)) or np.zeros(0, np.int32))
            object.__setattr__(self, field, tuple(ids.tolist()))
        super().__post_init__()
        drawn = self.logprobs is not None and self.sampling.temperature > 0
        rule = "needs logprobs, and a temperature above 0: the most likely token is not drawn"
        check(self.logprobs_of == "model" or drawn, f"Request.logprobs_of={self.logprobs_of!r} {rule}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Output of one step for one request.

    **Arguments:**

    - `request_id`: id that `Engine.submit` returned.
    - `tokens`: new tokens of the answer.
    - `scores`: log-probabilities of these tokens, where `Request.logprobs` asks for them.
    - `prompt_scores`: log-probabilities of the prompt tokens from `Request.prompt_logprobs_from` on, once, where
        `Request.prompt_logprobs` asks for them.
    - `text_scores`: scores of the prompt, by a model that gives these (see `ScoringEngine`).
    - `cached_tokens`: prompt tokens taken from the prefix cache.
    - `queue_seconds`: time that the request waited for a slot. This, `cached_tokens` and `prompt_scores` come with the
        first token.
    - `experts`: with the last output, the experts that each token of prompt and answer was sent to, where
        `EngineConfig.expert_choices` asks for them; -1 for the last token, which was sent nowhere.
    - `version`: number of the weights that computed these tokens (see `Engine.load`).
    - `finish_reason`: reason why the answer is complete: `"stop"`, one of `stop_ids`; `"length"`, `max_new_tokens` or
        the engine's `max_length`; `"cancelled"`; `"error"`. None: it goes on.
    - `error`: error message.
    """

    request_id: int
    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    text_scores: tuple[float, ...] = ()
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    experts: Int16[np.ndarray, "tokens layers choices"] | None = None
    version: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """State of an engine, and its totals since the start.

    **Arguments:**

    - `running`, `waiting`: requests with a slot, and without.
    - `cache_usage`: share of the slots' (or pages') tokens in use, from 0 to 1.
    - `prompt_tokens`, `generated_tokens`: tokens of all prompts and answers.
    - `prefix_queries`, `prefix_hits`: prompt tokens looked up in the prefix cache, and found.
    - `preemptions`: preempted requests.
    - `steps`: engine steps.
    - `draft_tokens`, `accepted_draft_tokens`: tokens of speculative decoding.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
