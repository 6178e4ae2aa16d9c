"""`EngineConfig`: limits of an engine, and checks of models and requests against them."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from jax.typing import DTypeLike

from eqx_decoders.encoders.merge import without_placeholders
from eqx_decoders.errors import AtLeast, CheckedFields, NonEmpty, NonNegativeInt, PositiveInt, check
from eqx_decoders.inference.drafters import Drafter
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.expert_choices import check_choices
from eqx_decoders.serving.engine.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLimits(CheckedFields):
    """Limits of an engine: requests, tokens and bytes.

    **Arguments:**

    - `max_batch_size`: number of slots: requests that are computed at the same time. Each slot has memory for
        `max_length` tokens, unless the cache has pages.
    - `max_length`: maximum number of tokens of a prompt and its completion.
    - `prefill_chunk`: number of prompt tokens per prefill step; also the block size of the prefix cache.
    - `token_budget`: maximum number of tokens per step. Decoding has priority, and at least one prefill chunk is
        computed. Small values keep the latency of running requests low; large values increase throughput.
    - `max_waiting`: maximum number of waiting requests. A server refuses further requests with status 429.
    - `max_waiting_tokens`: maximum number of prompt tokens of all waiting requests.
    - `prefix_cache_bytes`: size of the prefix cache. 0: no prefix cache.
    - `max_adapters`: maximum number of loaded adapters (`Engine.load_adapter`). 0: none.
    - `max_adapter_rank`: maximum LoRA rank. The rank of a PiSSA adapter counts twice.
    - `adapter_targets`: path patterns of the weights that adapters may change.
    - `preempted_bytes`: memory for the caches of preempted requests, and the same again for prompts that several
        completions share. Beyond it, they are recomputed.
    """

    max_batch_size: PositiveInt = 8
    max_length: Annotated[int, AtLeast(2)] = 2048
    prefill_chunk: PositiveInt = 128
    token_budget: PositiveInt = 512
    max_waiting: PositiveInt = 1024
    max_waiting_tokens: PositiveInt = 1 << 20
    prefix_cache_bytes: NonNegativeInt = 1 << 30
    preempted_bytes: NonNegativeInt = 1 << 27
    max_adapters: NonNegativeInt = 0
    max_adapter_rank: PositiveInt = 16
    adapter_targets: Annotated[tuple[str, ...], NonEmpty("pattern, such as 'scanned_layers.*'")] = ("scanned_layers.*",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineLimits):
    """Limits and modes of an engine.

    **Arguments:**

    - those of `EngineLimits`.
    - `max_logprobs`: maximum of `logprobs` of a request.
    - `max_logit_bias`: maximum biases of a request.
    - `cache_dtype`: format of keys and values, as `init_cache` takes it; None: as `generate` stores them.
    - `pages`: paged cache, whose pages are allocated to slots as needed; `prefill_chunk` must be whole pages. None:
        each slot has room for `max_length` tokens, which is faster where no kernel reads pages (CPU, GPU).
    - `drafts`: speculative decoding: how drafts are made that one step verifies; None: one token a step. Answers with
        penalties, constraints or `min_new_tokens` always take one token a step.
    - `batch_invariant`: a step computes all slots, so that an answer's last bits do not depend on the number of others.
        False: on a CPU a step computes 1, 2, 4, 8 ... rows, the fewest that hold all answers, up to three times as
        fast; other rounding can then choose another token where two are almost equally likely.
    - `expert_choices`: the last output of a request has the experts that its tokens were sent to, for a training that
        replays them (`RequestOutput.experts`). Slots, the prefix cache and preempted slots keep them beside keys and
        values, 2 bytes a choice.
    """

    max_logprobs: NonNegativeInt = 20
    max_logit_bias: NonNegativeInt = 300
    cache_dtype: DTypeLike | CacheFormat | None = None
    pages: PageConfig | None = None
    drafts: Drafter | None = None
    batch_invariant: bool = True
    expert_choices: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.cache_dtype is not None:
            CacheFormat.of(self.cache_dtype)
        known = self.drafts is None or isinstance(self.drafts, Drafter)
        check(known, f"EngineConfig.drafts={self.drafts!r} must be a Drafter, such as PromptLookup().")
        if self.pages is not None:
            size = self.pages.page_size
            rule = f"EngineConfig.prefill_chunk={self.prefill_chunk} must be a multiple of pages.page_size={size}"
            check(self.prefill_chunk % size == 0, f"{rule}: prompts share whole pages.")

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests submitted at once that are more than the queue can ever hold."""
        count, tokens = len(requests), sum(len(request.prompt) for request in requests)
        fits = count <= self.max_waiting
        check(fits, f"n and prompt ask for {count:,} answers: at most max_waiting={self.max_waiting:,} can wait.")
        limit = self.max_waiting_tokens
        fits = count == 1 or tokens <= limit
        message = f"the prompts of {count:,} answers have {tokens:,} tokens together"
        check(fits, f"{message}: at most max_waiting_tokens={limit:,} can wait. Ask for fewer answers at once.")

    def check_model(self, model: Decoder) -> None:
        """Raise ConfigError for a model that is not supported."""
        model.config.check_logits("Engine")
        positions = model.config.positions
        limit = positions.max_positions if isinstance(positions, LearnedPositions) else None
        rule = f"EngineConfig.max_length={self.max_length} must be at most {limit}, the model's learned positions"
        check(limit is None or self.max_length <= limit, f"{rule}.")
        fixed = model.config.fixed_length
        rule = f"EngineConfig.max_length={self.max_length} must be at most {fixed}: keys of longer texts turn by others"
        check(fixed is None or self.max_length <= fixed, f"{rule}.")
        if self.expert_choices:
            check_choices(model.config, "EngineConfig.expert_choices=True")
        if self.drafts is not None:
            self.drafts.check_model(model)
        run = model.execution
        whole = self.max_adapters == 0 or (run.pipeline is None and run.batch_split == 1)
        rule = "needs whole batches: leave out Execution.pipeline and Execution.batch_split"
        check(whole, f"EngineConfig.max_adapters={self.max_adapters} {rule}.")

    def check_request(self, request: Request, vocab_size: int) -> None:
        """Raise ConfigError for a request that an engine with so many token ids could never answer."""
        prompt = np.asarray([request.prompt])
        ids = prompt if request.media is None else without_placeholders(prompt, request.media)
        text = f"the prompt has {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens}"
        rule = f"together they must be at most max_length={self.max_length}"
        check(len(request.prompt) + request.max_new_tokens <= self.max_length, f"{text}: {rule}.")
        biased = [token for token, _ in request.sampling.logit_bias]
        for name, token_ids in (("prompt", ids[0].tolist()), ("logit_bias", biased)):
            unknown = next((token for token in token_ids if not 0 <= token < vocab_size), None)
            check(unknown is None, f"{name} has the token id {unknown}: ids are from 0 to {vocab_size - 1}.")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(request, field) or 0
            check(count <= self.max_logprobs, f"{field}={count} must be at most {self.max_logprobs}.")
        most, biases = self.max_logit_bias, len(biased)
        check(biases <= most, f"logit_bias has {biases} tokens, of at most {most}.")
        text_only = request.media is None or not self.expert_choices
        check(text_only, "expert_choices=True: experts are reported of texts alone, without images, videos or audio.")
        text_only = request.media is None or request.adapter is None
        check(text_only, f"adapter={request.adapter!r}: adapters answer texts alone, without images, videos or audio.")
        text_only = request.media is None or request.prompt_logprobs is None
        check(text_only, "prompt_logprobs are not given for prompts with images, videos or audio: leave it out.")
