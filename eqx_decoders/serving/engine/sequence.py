"""`SequenceState`: a request and its progress. `SharedPrompt`: results that requests with the same prompt share."""

import collections
import concurrent.futures
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from eqx_decoders.inference.drafters import Drafter
from eqx_decoders.serving.engine.adapters import Adapter
from eqx_decoders.serving.engine.programs import CacheSnapshot
from eqx_decoders.serving.engine.request import FinishReason, Request
from eqx_decoders.serving.engine.sampler import TokenScore


@dataclasses.dataclass(eq=False)
class SharedPrompt:
    """Results that several requests with the same prompt share.

    **Arguments:**

    - `scores`: log-probabilities of all prompt tokens. None: not computed.
    - `features_bytes`: memory of the encoder outputs.
    - `encoding`: future of the encoded images, videos and audio. None: not started.
    - `prefilled`: cache and last logits of a multimodal prompt, stored while other requests wait for them.
    - `prompt_end`: snapshot of the prompt's last block, recurrent states after the prompt, and the last logits.
    - `num_waiting`: number of requests whose prefill has not started.
    """

    scores: tuple[TokenScore, ...] | None = None
    features_bytes: int = 0
    encoding: concurrent.futures.Future | None = None
    prefilled: tuple[Any, Any] | None = None
    prompt_end: tuple[CacheSnapshot, Any, Any] | None = None
    num_waiting: int = 0

    def leave(self) -> None:
        """Remove one waiting request. Results are deleted when no request waits for them."""
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.drop_encoding()
            self.prefilled = self.prompt_end = None

    def drop_encoding(self) -> None:
        """Cancel the encoding and delete its features."""
        if self.encoding is not None:
            self.encoding.cancel()
        self.encoding = None


class SharedPromptCache:
    """LRU cache of the results of shared prompts, with a limit on their memory."""

    def __init__(self):
        self._sizes: collections.OrderedDict[SharedPrompt, int] = collections.OrderedDict()

    def use(self, shared: SharedPrompt, capacity: int) -> None:
        """Mark a prompt as the most recently used one, and evict results of other prompts beyond `capacity` bytes."""
        self._sizes[shared] = sum(leaf.nbytes for leaf in jax.tree.leaves((shared.prefilled, shared.prompt_end)))
        self._sizes.move_to_end(shared)
        without_results = [prompt for prompt in self._sizes if prompt.prefilled is None and prompt.prompt_end is None]
        for prompt in without_results:
            del self._sizes[prompt]
        while len(self._sizes) > 1 and sum(self._sizes.values()) > capacity:
            oldest, _ = self._sizes.popitem(last=False)
            oldest.prefilled = oldest.prompt_end = None


@dataclasses.dataclass(eq=False)
class SequenceState:
    """A request and its progress.

    **Arguments:**

    - `block_hashes`: hashes of the prompt's blocks in the prefix cache.
    - `shared`: results shared with other requests with the same prompt.
    - `adapter`: adapter of the request. None: the base model.
    - `is_warmup`: True for a sequence without a client, whose prompt is prefilled in order to cache it
        (`PrefixWarmup`).
    - `is_leader`: True if another sequence waits for the blocks that this sequence prefills.
    - `prefill_started`: True once the cached prefix was looked up and restored.
    - `branch_points`: block counts after which other prompts diverge from this one. Recurrent states are saved there.
    - `arrival_time`, `queue_seconds`: arrival by `time.monotonic`, and the time that the request waited for a slot.
    - `slot`: slot index. -1 while the sequence waits.
    - `num_computed`: number of prompt and output tokens whose keys and values are in the cache.
    - `num_cached`: number of prompt tokens taken from the prefix cache.
    - `output_tokens`: generated tokens that the host has read.
    - `num_pending`: number of further tokens that dispatched steps sample, and that the host has not read.
    - `replay_tokens`: output tokens from before a restart. They are fed again but not returned again.
    - `has_drafts`: True if the device has made drafts since the sequence got its slot.
    - `prompt_scores`: scores of the prompt tokens computed so far.
    - `saved`, `saved_bytes`: contents of the slot when the sequence was preempted, and their size.
    """

    request_id: int
    request: Request
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    shared: SharedPrompt = dataclasses.field(default_factory=SharedPrompt)
    adapter: Adapter | None = None
    is_warmup: bool = False
    is_leader: bool = False
    prefill_started: bool = False
    branch_points: set[int] = dataclasses.field(default_factory=set)
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    slot: int = -1
    num_computed: int = 0
    num_cached: int = 0
    output_tokens: list[int] = dataclasses.field(default_factory=list)
    num_pending: int = 0
    replay_tokens: list[int] = dataclasses.field(default_factory=list)
    has_drafts: bool = False
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)
    saved: "tuple[list[CacheSnapshot], Any] | None" = None
    saved_bytes: int = 0

    def __post_init__(self):
        self._is_waiting = False
        self._ids: np.ndarray | None = None
        self._num_written = 0

    @property
    def salt(self) -> str:
        """Salt of the block hashes. Each adapter has its own cached prefixes."""
        return self.request.cache_salt if self.adapter is None else f"{self.adapter.key}\0{self.request.cache_salt}"

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, including those that only the device knows."""
        return len(self.output_tokens) + self.num_pending

    @property
    def is_decoding(self) -> bool:
        """True when the prompt is prefilled."""
        return self.num_sampled > 0

    @property
    def last_token(self) -> int:
        """The last sampled token; -1 if only the device knows it."""
        index = self.num_sampled - 1
        tokens = self.output_tokens if index < len(self.output_tokens) else self.replay_tokens
        return tokens[index] if index < len(tokens) else -1

    def needs_results(self, *, drafts: bool) -> bool:
        """Return whether the next step depends on unread results: drafts, or the token mask of a constraint."""
        return self.num_pending > 0 and (drafts or (self.request.constraint is not None and self.last_token < 0))

    def needs_media(self) -> bool:
        """Return whether the prompt has images, videos or audio that must be prefilled."""
        return self.request.media is not None and self.saved is None

    def needs_encoding(self) -> bool:
        """Return whether the images, videos or audio of the prompt must be encoded."""
        return self.needs_media() and self.shared.prefilled is None

    def is_ready(self) -> bool:
        """Return whether all required encodings are done."""
        encoding = self.shared.encoding
        return not self.needs_encoding() or (encoding is not None and encoding.done())

    @property
    def is_replaying(self) -> bool:
        """True while the next token is one that was returned before a restart."""
        return self.num_sampled < len(self.replay_tokens)

    @property
    def needs_prompt_scores(self) -> bool:
        """True if prompt tokens must be computed for their log-probabilities (see `reusable_tokens`)."""
        return self.request.prompt_logprobs is not None and self.shared.scores is None

    @property
    def reusable_tokens(self) -> int:
        """Number of prompt tokens that can come from the prefix cache.

        The last prompt token is always computed, and so are tokens whose log-probabilities are requested.
        """
        count = len(self.request.prompt)
        return min(count, self.request.prompt_logprobs_from if self.needs_prompt_scores else count) - 1

    def has_same_prompt(self, request: Request) -> bool:
        """Return whether a request has the same prompt and needs the same results of it."""
        fields = ("adapter", "cache_salt", "prompt_logprobs", "prompt_logprobs_from", "prompt")
        same = all(getattr(self.request, field) == getattr(request, field) for field in fields)
        return same and self.request.media is request.media

    def restart(self) -> None:
        """Discard all computed results, except the tokens that were returned."""
        self.replay_tokens = self.replay_tokens if self.is_replaying else list(self.output_tokens)
        self.output_tokens, self.prompt_scores, self.saved, self.saved_bytes = [], [], None, 0
        self.num_computed, self.prefill_started, self.has_drafts = 0, False, False

    def join(self, shared: SharedPrompt) -> None:
        """Wait for the results of a shared prompt."""
        self.shared, self._is_waiting = shared, True
        shared.num_waiting += 1

    def stop_waiting(self) -> None:
        """Stop waiting for the results of the shared prompt."""
        if self._is_waiting:
            self._is_waiting = False
            self.shared.leave()

    def token_ids(self) -> np.ndarray:
        """Return prompt and output tokens. The array is extended in place, because drafters read it in every step."""
        count, length = len(self.request.prompt), len(self.output_tokens)
        if self._ids is None:
            self._ids = np.zeros(count + self.request.max_new_tokens, np.int32)
            self._ids[:count] = self.request.prompt
        self._ids[count + self._num_written : count + length] = self.output_tokens[self._num_written :]
        self._num_written = length
        return self._ids[: count + length]

    def draft_tokens(self, drafter: Drafter | None) -> list[int]:
        """Return the draft tokens of the next step. -1: a draft that only the device knows."""
        if drafter is None:
            return []
        request = self.request
        max_drafts = request.max_new_tokens - len(self.output_tokens) - 1
        one_token_only = request.sampling.has_penalties or request.constraint is not None or self.is_replaying
        if max_drafts < 1 or one_token_only or len(self.output_tokens) < request.min_new_tokens:
            return []
        drafts = drafter.find(self.token_ids())
        if drafts is None:
            drafts = [-1] * drafter.num_tokens if self.has_drafts else []
        return drafts[:max_drafts]

    def fill_allowed(self, words: np.ndarray) -> bool:
        """Write the bit mask of the allowed next tokens, 32 tokens per word. Returns False if all are allowed."""
        request = self.request
        must_continue = self.num_sampled < request.min_new_tokens and len(request.stop_ids) > 0
        if self.is_replaying or (not must_continue and request.constraint is None):
            return False
        words[:] = -1
        if request.constraint is not None:
            request.constraint.fill(words)
        for token in request.stop_ids if must_continue else ():
            if token < 32 * len(words):
                words[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
        return True

    def finish_reason(self, token: int) -> tuple[FinishReason | None, str | None]:
        """Return the finish reason after the last output token, and the error message. None: the request continues."""
        request = self.request
        if token in request.stop_ids and len(self.output_tokens) > request.min_new_tokens:
            return "stop", None
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
            except Exception as failure:  # an error in a grammar must not affect other requests
                return "error", f"{type(failure).__name__}: {failure}"
        return ("length" if len(self.output_tokens) >= request.max_new_tokens else None), None
