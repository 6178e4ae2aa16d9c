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
    """The waiting queue is full. The request can be submitted again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(CheckedFields):
    """Request for a completion of a prompt.

    **Arguments:**

    - `prompt`: token ids, at least one.
    - `max_new_tokens`: maximum number of generated tokens.
    - `sampling`: sampling parameters.
    - `stop_ids`: token ids that end the completion. The stop token is its last token.
    - `min_new_tokens`: number of tokens that are generated before a stop token can be sampled.
    - `logprobs`: number of most likely tokens to return with the log-probability of each generated token. 0: the
        generated token only. None: no log-probabilities.
    - `logprobs_mode`: "raw": log-probabilities of the model's logits; "processed": of the distribution that tokens are
        sampled from, after logit biases, penalties, temperature, top-k, top-p and min-p.
    - `prompt_logprobs`: like `logprobs`, for each prompt token except the first.
    - `prompt_logprobs_from`: index of the first prompt token with log-probabilities. Tokens before it can come from the
        prefix cache.
    - `constraint`: mask of the allowed tokens. None: all tokens are allowed.
    - `media`: images, videos and audio, created by `Media.create` for this prompt.
    - `priority`: requests with a higher priority are scheduled first and preempt requests with a lower one.
    - `client`: client name. Clients with requests of the same priority take turns.
    - `adapter`: name of a loaded adapter (`Engine.load_adapter`). None: the base model.
    - `cache_salt`: cached prefixes are shared only between requests with the same salt.
    """

    prompt: Annotated[tuple[int, ...], NonEmpty("token, such as the tokenizer's bos_id")]
    max_new_tokens: PositiveInt
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: NonNegativeInt = 0
    logprobs: NonNegativeInt | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
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
        check(
            self.logprobs_mode == "raw" or (self.logprobs is not None and self.sampling.temperature > 0),
            f"Request.logprobs_mode={self.logprobs_mode!r} needs logprobs, which is {self.logprobs}, and a temperature "
            f"above 0, which is {self.sampling.temperature}: greedy decoding does not sample. Use 'raw'.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Output of one step for one request.

    **Arguments:**

    - `request_id`: id returned by `Engine.submit`.
    - `tokens`: new tokens of the completion.
    - `scores`: log-probabilities of `tokens`, if `Request.logprobs` is set.
    - `prompt_scores`: log-probabilities of the prompt tokens from `Request.prompt_logprobs_from` on, if
        `Request.prompt_logprobs` is set.
    - `text_scores`: scores of the prompt by a scoring model, such as a reward model (see `ScoringEngine`).
    - `cached_tokens`: number of prompt tokens taken from the prefix cache.
    - `queue_seconds`: time that the request waited for a slot. The fields `queue_seconds`, `cached_tokens` and
        `prompt_scores` are set in the output with the first token.
    - `experts`: experts that each token of the prompt and the completion was routed to, in the last output, if
        `EngineConfig.expert_choices` is set. -1 for the last token, which is never fed to the model.
    - `version`: version of the weights that computed `tokens` (see `Engine.load`).
    - `finish_reason`: `"stop"`: a stop token was generated; `"length"`: `max_new_tokens` were generated;
        `"cancelled"`; `"error"`. None: the request is not finished.
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
    """Current state of an engine, and totals since its start.

    **Arguments:**

    - `running`, `waiting`: number of requests with and without a slot.
    - `cache_usage`: fraction of the cache (slots or pages) in use, from 0 to 1.
    - `prompt_tokens`, `generated_tokens`: total number of prompt tokens and generated tokens.
    - `prefix_queries`, `prefix_hits`: number of prompt tokens looked up and found in the prefix cache.
    - `preemptions`: number of preemptions.
    - `steps`: number of engine steps.
    - `draft_tokens`, `accepted_draft_tokens`: number of proposed and accepted tokens of speculative decoding.
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
