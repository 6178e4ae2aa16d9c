"""How much an engine takes on."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike

from eqx_decoders.encoders.merge import without_placeholders
from eqx_decoders.errors import check, check_integer
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.drafters import Drafts, check_drafts
from eqx_decoders.serving.engine.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much an engine takes on, and how it works.

    **Arguments:**

    - `max_batch_size`: requests that are worked on at once, each in a slot of its own.
    - `max_length`: tokens that a prompt and its answer may have together: the length of a slot.
    - `prefill_chunk`: tokens of a prompt that are computed at once; also the size of a block of the prefix cache.
    - `token_budget`: tokens that one step computes at most, those of answers first; prompts get a chunk in any case.
    - `max_waiting`, `max_waiting_tokens`: requests that wait for a slot, and tokens of their prompts, at most.
    - `prefix_cache_bytes`: memory for prompts that begin alike; 0 for none.
    - `preempted_bytes`: memory for what was computed of requests that had to give up their slots, and as much again for
        what several answers to one prompt share; beyond that it is computed again.
    - `max_logprobs`: the most likely tokens that a request may ask for beside each of its own.
    - `max_logit_bias`: biases that a request may have.
    - `cache_dtype`: of keys and values, as `init_cache` has it; None: as `generate` stores them.
    - `pages`: keys and values are in pages, which slots have as they need them; `prefill_chunk` must be whole pages.
        None: each slot has room for `max_length` tokens, which is faster where no kernel reads pages (CPU, GPU).
    - `drafts`: how several tokens of an answer are guessed and verified in one step; None: a step for each. Answers
        with penalties, constraints or `min_new_tokens` take a step for each in any case.
    - `batch_invariant`: a step computes all slots, so that an answer's last bits do not depend on how many others there
        are. False: on a CPU a step computes 1, 2, 4, 8 ... rows, as few as hold all answers, up to three times as fast;
        other rounding can then choose another token where two are almost equally likely.
    """

    max_batch_size: int = 8
    max_length: int = 2048
    prefill_chunk: int = 128
    token_budget: int = 512
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    prefix_cache_bytes: int = 1 << 30
    preempted_bytes: int = 1 << 27
    max_logprobs: int = 20
    max_logit_bias: int = 300
    cache_dtype: DTypeLike | CacheFormat | None = None
    pages: PageConfig | None = None
    drafts: Drafts | None = None
    batch_invariant: bool = True

    def __post_init__(self):
        for field in ("max_batch_size", "max_length", "prefill_chunk", "token_budget", "max_waiting"):
            check_integer(f"EngineConfig.{field}", getattr(self, field))
        check_integer("EngineConfig.max_waiting_tokens", self.max_waiting_tokens)
        for field in ("prefix_cache_bytes", "preempted_bytes", "max_logprobs", "max_logit_bias"):
            check_integer(f"EngineConfig.{field}", getattr(self, field), minimum=0)
        if self.cache_dtype is not None:
            CacheFormat.of(self.cache_dtype)
        if self.pages is not None:
            size = self.pages.page_size
            rule = f"EngineConfig.prefill_chunk={self.prefill_chunk} must be a multiple of pages.page_size={size}"
            check(self.prefill_chunk % size == 0, f"{rule}: prompts share whole pages.")
        check(self.max_length > 1, "EngineConfig.max_length=1 has no room for an answer: at least 2.")

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests that come at once, and are more than could ever wait together."""
        count, tokens = len(requests), sum(len(request.prompt) for request in requests)
        few = count <= self.max_waiting
        check(few, f"n and prompt ask for {count:,} answers: at most max_waiting={self.max_waiting:,} can wait.")
        short, most = count == 1 or tokens <= self.max_waiting_tokens, self.max_waiting_tokens
        told = f"the prompts of {count:,} answers have {tokens:,} tokens together"
        check(short, f"{told}: at most max_waiting_tokens={most:,} can wait. Ask for fewer answers at once.")

    def check_model(self, model: Decoder) -> None:
        """Raise ConfigError where a model can't do this."""
        positions = model.config.positions
        limit = positions.max_positions if isinstance(positions, LearnedPositions) else None
        rule = f"EngineConfig.max_length={self.max_length} must be at most {limit}, the model's learned positions"
        check(limit is None or self.max_length <= limit, f"{rule}.")
        check_drafts(self.drafts, model)

    def check_request(self, request: Request, vocab_size: int) -> None:
        """Raise ConfigError for a request that an engine of a model with so many token ids could never answer."""
        prompt = np.asarray([request.prompt])
        known = prompt if request.media is None else without_placeholders(prompt, request.media)
        text = f"the prompt has {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens}"
        rule = f"together they must be at most max_length={self.max_length}"
        check(len(request.prompt) + request.max_new_tokens <= self.max_length, f"{text}: {rule}.")
        biased = [token for token, _ in request.sampling.logit_bias]
        for name, ids in (("prompt", known[0].tolist()), ("logit_bias", biased)):
            wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
            check(wrong is None, f"{name} has the token id {wrong}: ids are from 0 to {vocab_size - 1}.")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(request, field) or 0
            check(count <= self.max_logprobs, f"{field}={count} must be at most {self.max_logprobs}.")
        most, biases = self.max_logit_bias, len(biased)
        check(biases <= most, f"logit_bias has {biases} tokens, of at most {most}.")
        alone = request.media is None or request.prompt_logprobs is None
        check(alone, "prompt_logprobs are not given for prompts with images, videos or audio: leave it out.")
