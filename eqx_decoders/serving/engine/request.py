"""What is asked of the engine, and what it tells of it."""

import dataclasses
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.encoders.media import Media
from eqx_decoders.errors import EqxDecodersError, check, check_integer, check_number


FinishReason = Literal["stop", "length", "cancelled", "error"]


class QueueFull(EqxDecodersError):
    """More requests wait than the engine keeps: come again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    In this order: `logit_bias` and penalties, temperature, `top_k`, `top_p`, `min_p`, and one draw. The most likely
    token is never cut. A draw depends on the seed and on how many tokens the answer has, and on nothing else.

    **Arguments:**

    - `temperature`: divides logits; 0: always the most likely token (of equals the lowest id).
    - `top_k`, `top_p`, `min_p`: as those of `eqx_decoders.Sample`; None cuts nothing.
    - `repetition_penalty`: logits of tokens that stand in the prompt or the answer are divided by it where positive,
        and multiplied where negative (Keskar et al. 2019).
    - `frequency_penalty`, `presence_penalty`: what is taken off a token's logit for each time that it stands in the
        answer, and once if it stands there (OpenAI).
    - `logit_bias`: pairs of a token and what is added to its logit.
    - `seed`: of the draws.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "logit_bias", tuple((token, value) for token, value in self.logit_bias))
        check_number("SamplingParams.temperature", self.temperature, least=0)
        if self.top_k is not None:
            check_integer("SamplingParams.top_k", self.top_k)
        for field in ("top_p", "min_p"):
            value = getattr(self, field)
            if value is not None:
                check_number(f"Sampling.{field}", value, above=0)
                check(value <= 1, f"Sampling.{field}={value} must be at most 1: it's a probability.")
        check_number("SamplingParams.repetition_penalty", self.repetition_penalty, above=0)
        for field in ("frequency_penalty", "presence_penalty"):
            check_number(f"Sampling.{field}", getattr(self, field))
        for token, value in self.logit_bias:
            check_integer("Sampling.logit_bias: token", token, minimum=0)
            check_number(f"Sampling.logit_bias[{token}]", value)
        tokens = [token for token, _ in self.logit_bias]
        check(len(set(tokens)) == len(tokens), "Sampling.logit_bias names a token twice: give each once.")
        good = isinstance(self.seed, int) and not isinstance(self.seed, bool) and -(2**63) <= self.seed < 2**63
        check(good, f"Sampling.seed={self.seed!r} must be an integer of 64 bits.")

    @property
    def penalises(self) -> bool:
        """Whether choices depend on the tokens that were chosen before."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@runtime_checkable
class Constraint(Protocol):
    """Which tokens an answer may go on with, such as those that lead to JSON. Belongs to one request."""

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of allowed tokens: one bit each, the lowest of an int32 word first."""
        ...

    def accept(self, token: int) -> None:
        """The answer has gone on with this token."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued.

    **Arguments:**

    - `prompt`: token ids, at least one.
    - `max_new_tokens`: the most that the answer may have.
    - `sampling`: how its tokens are chosen.
    - `stop_ids`: an answer ends with one of these, which is its last token.
    - `min_new_tokens`: before so many tokens none of `stop_ids` is chosen.
    - `logprobs`: of each token of the answer its log-probability (that of the model itself, before `sampling`) and
        those of so many most likely ones; None: nothing of it.
    - `prompt_logprobs`: the same for each token of the prompt but the first.
    - `constraint`: which tokens are allowed; None: all.
    - `media`: images, videos and audio, from `Media.create` for this prompt alone.
    - `priority`: requests with a higher one come first, and take the places of lower ones.
    - `client`: requests of one priority take turns by whom they come from.
    - `cache_salt`: prefixes are shared only among requests with the same one.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    media: Media | None = None
    priority: int = 0
    client: str = ""
    cache_salt: str = ""

    def __post_init__(self):
        for field in ("prompt", "stop_ids"):
            ids = as_int32(f"Request.{field}", tuple(getattr(self, field)) or np.zeros(0, np.int32))
            object.__setattr__(self, field, tuple(ids.tolist()))
        check(len(self.prompt) > 0, "Request.prompt=() must have at least one token, such as the tokenizer's bos_id.")
        check_integer("Request.max_new_tokens", self.max_new_tokens)
        check_integer("Request.min_new_tokens", self.min_new_tokens, minimum=0)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                check_integer(f"Request.{field}", getattr(self, field), minimum=0)


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """The log-probability of a token, and the most likely tokens in its place with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one step has brought to one request.

    **Arguments:**

    - `request_id`: as `Engine.submit` returned it.
    - `tokens`: new tokens of the answer.
    - `scores`: of each of them, where `Request.logprobs` asks for it.
    - `prompt_scores`: of the prompt's tokens from the second on, once, where `Request.prompt_logprobs` asks for it.
    - `cached_tokens`: tokens of the prompt that were not computed again.
    - `queue_seconds`: how long the request waited for a slot; with its first token, as is what stands above.
    - `finish_reason`: why the answer is complete: `"stop"`, one of `stop_ids`; `"length"`, `max_new_tokens` or the
        engine's `max_length`; `"cancelled"`; `"error"`. None: it goes on.
    - `error`: what went wrong.
    """

    request_id: int
    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """How an engine stands, and what it has done since its start.

    **Arguments:**

    - `running`, `waiting`: requests with a slot, and without.
    - `cache_usage`: share of the slots' (or pages') tokens that are in use, from 0 to 1.
    - `prompt_tokens`, `generated_tokens`: of all requests.
    - `prefix_queries`, `prefix_hits`: tokens of prompts that were looked for in the prefix cache, and found.
    - `preemptions`: how often a request had to give its place to another.
    - `steps`: of the engine.
    - `draft_tokens`, `accepted_draft_tokens`: of speculative decoding.
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
