"""`SequenceState`: a request and its progress. `SharedPrompt`: results that requests of one prompt share."""

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

    - `scores`: log-probabilities of all prompt tokens; None: not computed.
    - `features_bytes`: memory of the features that the encoders compute.
    - `encoding`: future of the encoded images, videos and audio; None: not started.
    - `prefilled`: cache and last logits of a multimodal prompt, while other requests wait for them.
    - `prompt_end`: snapshot of the prompt's last block, states after the prompt, and the last logits.
    - `num_waiting`: requests that have not started.
    """

    scores: tuple[TokenScore, ...] | None = None
    features_bytes: int = 0
    encoding: concurrent.futures.Future | None = None
    prefilled: tuple[Any, Any] | None = None
    prompt_end: tuple[CacheSnapshot, Any, Any] | None = None
    num_waiting: int = 0

    def leave(self) -> None:
        """Count one waiting request less; results that no request waits for are dropped."""
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.drop_encoding()
            self.prefilled = self.prompt_end = None

    def drop_encoding(self) -> None:
        """Cancel the encoding, and drop its features."""
        if self.encoding is not None:
            self.encoding.cancel()
        self.encoding = None


class PromptResults:
    """Shared prompts whose results are in memory for waiting requests, the most recently used ones."""

    def __init__(self):
        self._sizes: collections.OrderedDict[SharedPrompt, int] = collections.OrderedDict()

    def use(self, shared: SharedPrompt, capacity: int) -> None:
        """Mark a prompt as used, and drop the results of others beyond `capacity` bytes."""
        self._sizes[shared] = sum(leaf.nbytes for leaf in jax.tree.leaves((shared.prefilled, shared.prompt_end)))
        self._sizes.move_to_end(shared)
        for other in [each for each in self._sizes if each.prefilled is None and each.prompt_end is None]:
            del self._sizes[other]
        while len(self._sizes) > 1 and sum(self._sizes.values()) > capacity:
            oldest, _ = self._sizes.popitem(last=False)
            oldest.prefilled = oldest.prompt_end = None


@dataclasses.dataclass(eq=False)
class SequenceState:
    """A request and its progress.

    **Arguments:**

    - `block_hashes`: names of the blocks of its prompt in the prefix cache.
    - `shared`: results shared with other requests of its prompt.
    - `adapter`: the adapter that computes it; None: the model itself.
    - `background`: nobody's request: a finished text that is prefilled for the prefix cache.
    - `awaited`: another sequence waits for the blocks that it prefills.
    - `started`: the prefix cache was searched for its prompt.
    - `branch_points`: numbers of blocks after which other prompts diverge from its own; states are saved there.
    - `arrived`, `queue_seconds`: arrival by `time.monotonic`, and the time that it waited for a slot.
    - `slot`: its slot; -1 while it waits.
    - `num_computed`: tokens of the prompt, and then of the answer, that the cache holds.
    - `num_cached`: prompt tokens taken from the prefix cache.
    - `answer`: tokens of the answer.
    - `num_pending`: tokens after these that the device samples, or has sampled, and that are not read.
    - `delivered`: tokens that were returned before it was restarted; they are fed again, and not returned again.
    - `has_drafts`: drafts were made on the device since it got its slot.
    - `prompt_scores`: scores of the prompt tokens computed so far.
    - `saved`, `saved_bytes`: contents of its slot when it was preempted, and their size.
    """

    request_id: int
    request: Request
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    shared: SharedPrompt = dataclasses.field(default_factory=SharedPrompt)
    adapter: Adapter | None = None
    background: bool = False
    awaited: bool = False
    started: bool = False
    branch_points: set[int] = dataclasses.field(default_factory=set)
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    slot: int = -1
    num_computed: int = 0
    num_cached: int = 0
    answer: list[int] = dataclasses.field(default_factory=list)
    num_pending: int = 0
    delivered: list[int] = dataclasses.field(default_factory=list)
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
        """Salt of its cached prefixes: an adapter's are those of nobody else."""
        return self.request.cache_salt if self.adapter is None else f"{self.adapter.key}\0{self.request.cache_salt}"

    @property
    def num_sampled(self) -> int:
        """Tokens of the answer, those included that are on the device alone."""
        return len(self.answer) + self.num_pending

    @property
    def is_decoding(self) -> bool:
        """True when its prompt is prefilled."""
        return self.num_sampled > 0

    @property
    def last_token(self) -> int:
        """The last token of the answer; -1 where it is on the device alone."""
        index = self.num_sampled - 1
        known = self.answer if index < len(self.answer) else self.delivered
        return known[index] if index < len(known) else -1

    def needs_results(self, *, drafts: bool) -> bool:
        """Return whether its next step depends on tokens that are not read: their drafts, or a mask after them."""
        return self.num_pending > 0 and (drafts or (self.request.constraint is not None and self.last_token < 0))

    def needs_media(self) -> bool:
        """Return whether its prompt has images, videos or audio that are not in a saved slot."""
        return self.request.media is not None and self.saved is None

    def needs_encoding(self) -> bool:
        """Return whether it needs the features of its prompt."""
        return self.needs_media() and self.shared.prefilled is None

    def is_ready(self) -> bool:
        """Return whether the features that it needs are encoded."""
        encoding = self.shared.encoding
        return not self.needs_encoding() or (encoding is not None and encoding.done())

    @property
    def is_replaying(self) -> bool:
        """True while the next token is one that was returned before."""
        return self.num_sampled < len(self.delivered)

    @property
    def needs_prompt_scores(self) -> bool:
        """True where its prompt must be computed for the log-probabilities of its tokens (see `reusable_tokens`)."""
        return self.request.prompt_logprobs is not None and self.shared.scores is None

    @property
    def reusable_tokens(self) -> int:
        """Prompt tokens that need not be computed if they are cached: all but those that the first result needs."""
        count = len(self.request.prompt)
        return min(count, self.request.prompt_logprobs_from if self.needs_prompt_scores else count) - 1

    def has_same_prompt(self, request: Request) -> bool:
        """Return whether a request has the same prompt, and needs the same results of it."""
        mine = self.request
        names = ("adapter", "cache_salt", "prompt_logprobs", "prompt_logprobs_from", "prompt")
        same = all(getattr(mine, name) == getattr(request, name) for name in names)
        return same and mine.media is request.media

    def restart(self) -> None:
        """Forget all computed results, but remember the tokens that were returned."""
        self.delivered = self.delivered if self.is_replaying else list(self.answer)
        self.answer, self.prompt_scores, self.saved, self.saved_bytes = [], [], None, 0
        self.num_computed, self.started, self.has_drafts = 0, False, False

    def join(self, shared: SharedPrompt) -> None:
        """Wait with the other requests of its prompt."""
        self.shared, self._is_waiting = shared, True
        shared.num_waiting += 1

    def stop_waiting(self) -> None:
        """Leave the requests that wait for the results of its prompt."""
        if self._is_waiting:
            self._is_waiting = False
            self.shared.leave()

    def token_ids(self) -> np.ndarray:
        """Return its prompt and answer, writing only new tokens: every step reads all of a long text."""
        count, length = len(self.request.prompt), len(self.answer)
        if self._ids is None:
            self._ids = np.zeros(count + self.request.max_new_tokens, np.int32)
            self._ids[:count] = self.request.prompt
        self._ids[count + self._num_written : count + length] = self.answer[self._num_written :]
        self._num_written = length
        return self._ids[: count + length]

    def draft_tokens(self, config: Drafter | None) -> list[int]:
        """Return the drafts for its next step; -1 stands for a draft that is on the device."""
        if config is None:
            return []
        request = self.request
        room = request.max_new_tokens - len(self.answer) - 1
        single = request.sampling.penalizes or request.constraint is not None or self.is_replaying
        if room < 1 or single or len(self.answer) < request.min_new_tokens:
            return []
        drafts = config.find(self.token_ids())
        if drafts is None:
            drafts = [-1] * config.num_tokens if self.has_drafts else []
        return drafts[:room]

    def fill_mask(self, words: np.ndarray) -> bool:
        """Write the bits of the tokens that are allowed next, 32 in each word; False where all are allowed."""
        request = self.request
        early = self.num_sampled < request.min_new_tokens and len(request.stop_ids) > 0
        if self.is_replaying or (not early and request.constraint is None):
            return False
        words[:] = -1
        if request.constraint is not None:
            request.constraint.fill(words)
        for token in request.stop_ids if early else ():
            if token < 32 * len(words):
                words[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
        return True

    def finish_reason(self, token: int) -> tuple[FinishReason | None, str | None]:
        """Return why the answer ends with this token, its last one, and an error; None where it goes on."""
        request = self.request
        if token in request.stop_ids and len(self.answer) > request.min_new_tokens:
            return "stop", None
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
            except Exception as failure:  # a grammar that can't go on ends its own request and no other
                return "error", f"{type(failure).__name__}: {failure}"
        return ("length" if len(self.answer) >= request.max_new_tokens else None), None
