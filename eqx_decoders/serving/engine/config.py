"""`EngineConfig`: limits and modes of an engine, and checks of models and requests against them."""

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

    - `max_batch_size`: number of slots, which is the maximum number of running requests. A slot is one row of the
        cache. It has memory for `max_length` tokens, unless the cache is paged.
    - `max_length`: maximum number of tokens of a prompt and its completion.
    - `prefill_chunk`: number of prompt tokens per prefill chunk; also the block size of the prefix cache.
    - `token_budget`: maximum number of tokens per step. Decoding has priority, and at least one prefill chunk is
        computed. Small values keep the latency of running requests low; large values increase throughput.
    - `max_waiting`: maximum number of waiting requests. A server refuses further requests with status 429.
    - `max_waiting_tokens`: maximum number of prompt tokens of all waiting requests.
    - `prefix_cache_bytes`: size of the prefix cache. 0: no prefix cache.
    - `preempted_bytes`: memory for the caches of preempted requests, and the same amount again for prompts that several
        completions share. Caches beyond this size are recomputed.
    - `max_adapters`: maximum number of loaded adapters (`Engine.load_adapter`). 0: no adapters.
    - `max_adapter_rank`: maximum LoRA rank. A PiSSA adapter counts with twice its rank.
    - `adapter_targets`: path patterns of the weights that adapters may change.
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

    - the fields of `EngineLimits`.
    - `max_logprobs`: maximum value of `Request.logprobs` and `Request.prompt_logprobs`.
    - `max_logit_bias`: maximum number of logit biases per request.
    - `cache_dtype`: dtype or `CacheFormat` of keys and values, as in `init_cache`. None: the same as in `generate`.
    - `pages`: size and number of pages of a paged cache, whose pages are allocated on demand. `prefill_chunk` must be a
        multiple of the page size. None: each slot has memory for `max_length` tokens, which is faster on devices
        without a paged attention kernel.
    - `drafts`: drafter for speculative decoding. None: one token per step. Requests with penalties, a constraint or
        `min_new_tokens` not yet reached always decode one token per step.
    - `batch_invariant`: compute all slots in each decoding step, so that the result of a request does not depend on the
        number of running requests. False: on CPUs a step computes the smallest of 1, 2, 4, 8, … rows that holds all
        running requests. This is up to three times as fast, but different rounding can select another token where two
        tokens are almost equally likely.
    - `expert_choices`: return the experts that tokens were routed to (`RequestOutput.experts`), for router replay in
        training. The cache then stores 2 bytes per token and selected expert.
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
        check(
            self.drafts is None or isinstance(self.drafts, Drafter),
            f"EngineConfig.drafts={self.drafts!r} must be a Drafter, such as PromptLookup().",
        )
        if self.pages is not None:
            check(
                self.prefill_chunk % self.pages.page_size == 0,
                f"EngineConfig.prefill_chunk={self.prefill_chunk} must be a multiple of "
                f"pages.page_size={self.pages.page_size}, because prompts share complete pages only.",
            )

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests that are submitted together and exceed the size of the waiting queue."""
        count = len(requests)
        tokens = sum(len(request.prompt) for request in requests)
        check(
            count <= self.max_waiting,
            f"n and prompt ask for {count:,} completions, but at most max_waiting={self.max_waiting:,} can wait. "
            f"Request fewer completions at once.",
        )
        check(
            count == 1 or tokens <= self.max_waiting_tokens,
            f"the prompts of {count:,} completions have {tokens:,} tokens together, but at most "
            f"max_waiting_tokens={self.max_waiting_tokens:,} can wait. Request fewer completions at once.",
        )

    def check_model(self, model: Decoder) -> None:
        """Raise ConfigError for a model that the engine does not support."""
        model.config.check_logits("Engine")
        positions = model.config.positions
        if isinstance(positions, LearnedPositions):
            check(
                self.max_length <= positions.max_positions,
                f"EngineConfig.max_length={self.max_length} must be at most {positions.max_positions}, the number of "
                f"the model's learned positions.",
            )
        fixed_length = model.config.fixed_length
        check(
            fixed_length is None or self.max_length <= fixed_length,
            f"EngineConfig.max_length={self.max_length} must be at most {fixed_length}: beyond this length the model's "
            f"RoPE frequencies change, which would invalidate cached keys.",
        )
        if self.expert_choices:
            check_choices(model.config, "EngineConfig.expert_choices=True")
        if self.drafts is not None:
            self.drafts.check_model(model)
        execution = model.execution
        check(
            self.max_adapters == 0 or (execution.pipeline is None and execution.batch_split == 1),
            f"EngineConfig.max_adapters={self.max_adapters} does not support Execution.pipeline and "
            f"Execution.batch_split={execution.batch_split}: remove them.",
        )

    def check_request(self, request: Request, vocab_size: int) -> None:
        """Raise ConfigError for a request that the engine can never serve."""
        check(
            len(request.prompt) + request.max_new_tokens <= self.max_length,
            f"the prompt has {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens}: their sum must "
            f"be at most max_length={self.max_length}.",
        )
        prompt = np.asarray([request.prompt])
        prompt = prompt if request.media is None else without_placeholders(prompt, request.media)
        biased_tokens = [token for token, _ in request.sampling.logit_bias]
        for name, token_ids in (("prompt", prompt[0].tolist()), ("logit_bias", biased_tokens)):
            unknown = next((token for token in token_ids if not 0 <= token < vocab_size), None)
            check(unknown is None, f"{name} has the token id {unknown}: ids must be from 0 to {vocab_size - 1}.")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(request, field) or 0
            check(count <= self.max_logprobs, f"{field}={count} must be at most {self.max_logprobs}.")
        check(
            len(biased_tokens) <= self.max_logit_bias,
            f"logit_bias has {len(biased_tokens)} tokens, but at most {self.max_logit_bias} are supported.",
        )
        if request.media is not None:
            check(
                not self.expert_choices,
                "expert_choices=True does not support prompts with images, videos or audio: send text only.",
            )
            check(
                request.adapter is None,
                f"adapter={request.adapter!r} does not support prompts with images, videos or audio: send text only.",
            )
            check(
                request.prompt_logprobs is None,
                f"prompt_logprobs={request.prompt_logprobs} does not support prompts with images, videos or audio: "
                f"leave it out.",
            )
