"""A request on its way through the engine."""

import collections
import concurrent.futures
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from eqx_decoders.serving.engine.drafters import Drafts, PromptLookup
from eqx_decoders.serving.engine.model_runner import CacheSnapshot
from eqx_decoders.serving.engine.request import FinishReason, Request, TokenScore


@dataclasses.dataclass(eq=False)
class SharedPrompt:
    """What the requests of one prompt, those for several answers to it, compute once.

    **Arguments:**

    - `scores`: of all the prompt's tokens, where they are asked for; None: not known yet.
    - `features_bytes`: memory of what the encoders make.
    - `seeing`: brings what the encoders make of its images, videos and audio; None: not begun.
    - `seen`: the prompt's cache and the logits behind it, while others wait for them.
    - `end`: what a slot remembers of the prompt's last tokens, and of all of it, and the logits behind it.
    - `waiting`: how many of the requests have not begun.
    """

    scores: tuple[TokenScore, ...] | None = None
    features_bytes: int = 0
    seeing: concurrent.futures.Future | None = None
    seen: tuple[Any, Any] | None = None
    end: tuple[CacheSnapshot, Any, Any] | None = None
    waiting: int = 0

    def leave(self) -> None:
        """One of the requests waits no more; what waits for nobody is given up."""
        self.waiting -= 1
        if self.waiting == 0:
            self.look_away()
            self.seen = self.end = None

    def look_away(self) -> None:
        """Give up what encoders make."""
        if self.seeing is not None:
            self.seeing.cancel()
        self.seeing = None


class PromptResults:
    """Prompts whose results are kept for requests that have not begun: those used last, as far as memory goes."""

    def __init__(self):
        self._sizes: collections.OrderedDict[SharedPrompt, int] = collections.OrderedDict()

    def use(self, shared: SharedPrompt, room: int) -> None:
        """Count one that was used. Others give up theirs beyond `room` bytes; it is computed again if it is needed."""
        self._sizes[shared] = sum(leaf.nbytes for leaf in jax.tree.leaves((shared.seen, shared.end)))
        self._sizes.move_to_end(shared)
        for other in [each for each in self._sizes if each.seen is None and each.end is None]:
            del self._sizes[other]
        while len(self._sizes) > 1 and sum(self._sizes.values()) > room:
            oldest, _ = self._sizes.popitem(last=False)
            oldest.seen = oldest.end = None


@dataclasses.dataclass(eq=False)
class SequenceState:
    """A request, and how far it is.

    **Arguments:**

    - `names`: of the blocks of its prompt, as the prefix cache knows them.
    - `shared`: what it has in common with other requests of its prompt.
    - `idle`: it is no request of anybody: a text that was written is computed as a prompt, for the prefix cache.
    - `awaited`: whether a request waits for what it computes.
    - `begun`: whether it has looked for what is known of its prompt.
    - `branches`: after how many blocks other prompts part from its own: what ends there is kept.
    - `arrived`, `queue_seconds`: when it came, by `time.monotonic`, and how long it waited for a slot.
    - `slot`: its place; -1 while it waits.
    - `done`: tokens of the prompt, and then of the answer, that the cache holds.
    - `cached`: tokens of the prompt that were not computed again.
    - `answer`: its tokens.
    - `told`: those that were told before it had to begin again; they are fed once more, and told no more.
    - `drafted`: whether drafts have been made on the device since it came to its slot.
    - `prompt_scores`: of the prompt's tokens, as far as it is done.
    - `saved`: what its slot held when it had to give it up, and `saved_bytes`, how much that is.
    """

    request_id: int
    request: Request
    names: list[bytes] = dataclasses.field(default_factory=list)
    shared: SharedPrompt = dataclasses.field(default_factory=SharedPrompt)
    idle: bool = False
    awaited: bool = False
    begun: bool = False
    branches: set[int] = dataclasses.field(default_factory=set)
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    slot: int = -1
    done: int = 0
    cached: int = 0
    answer: list[int] = dataclasses.field(default_factory=list)
    told: list[int] = dataclasses.field(default_factory=list)
    drafted: bool = False
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)
    saved: "tuple[list[CacheSnapshot], Any] | None" = None
    saved_bytes: int = 0

    def __post_init__(self):
        self._waits = False
        self._text: np.ndarray | None = None
        self._filled = 0

    @property
    def decodes(self) -> bool:
        """Whether its prompt is done."""
        return len(self.answer) > 0

    def shows(self) -> bool:
        """Whether its prompt shows something, and is not in its slot or kept of it."""
        return self.request.media is not None and self.saved is None

    def has_to_see(self) -> bool:
        """Whether it needs what encoders make for its prompt."""
        return self.shows() and self.shared.seen is None

    def is_ready(self) -> bool:
        """Whether what encoders make for its prompt is there."""
        seeing = self.shared.seeing
        return not self.has_to_see() or (seeing is not None and seeing.done())

    @property
    def repeats(self) -> bool:
        """Whether its next token has been told before."""
        return len(self.answer) < len(self.told)

    @property
    def wants_scores(self) -> bool:
        """Whether its prompt has to be computed for the log-probabilities of all its tokens."""
        return self.request.prompt_logprobs is not None and self.shared.scores is None

    def is_alike(self, request: Request) -> bool:
        """Whether a request has the same prompt, and asks for the same of it."""
        own = self.request
        same = own.media is request.media and own.cache_salt == request.cache_salt
        return same and own.prompt_logprobs == request.prompt_logprobs and own.prompt == request.prompt

    def restart(self) -> None:
        """Forget all that was computed of it; what was told stays told."""
        self.told = self.told if self.repeats else list(self.answer)
        self.answer, self.prompt_scores, self.saved, self.saved_bytes = [], [], None, 0
        self.done, self.begun, self.drafted = 0, False, False

    def join(self, shared: SharedPrompt) -> None:
        """Wait with others of its prompt."""
        self.shared, self._waits = shared, True
        shared.waiting += 1

    def wait_no_more(self) -> None:
        """It has what it waited for with others, or was given up."""
        if self._waits:
            self._waits = False
            self.shared.leave()

    def text(self) -> np.ndarray:
        """Its prompt and its answer, of which only new tokens are written: a long text is looked at in every step."""
        count, have = len(self.request.prompt), len(self.answer)
        if self._text is None:
            self._text = np.zeros(count + self.request.max_new_tokens, np.int32)
            self._text[:count] = self.request.prompt
        self._text[count + self._filled : count + have] = self.answer[self._filled :]
        self._filled = have
        return self._text[: count + have]

    def drafts(self, config: Drafts | None) -> list[int]:
        """The drafts for its next step; -1 for one that the device knows."""
        request = self.request
        room = request.max_new_tokens - len(self.answer) - 1
        apart = request.sampling.penalises or request.constraint is not None or self.repeats
        if config is None or room < 1 or apart or len(self.answer) < request.min_new_tokens:
            return []
        if isinstance(config, PromptLookup):
            return config.find(self.text())[:room]
        return [-1] * min(config.num_tokens, room) if self.drafted else []

    def mask(self, words: np.ndarray) -> bool:
        """Whether only some tokens are allowed next: then the bits of these are set in `words`, 32 in each."""
        request = self.request
        early = len(self.answer) < request.min_new_tokens and len(request.stop_ids) > 0
        if self.repeats or (not early and request.constraint is None):
            return False
        words[:] = -1
        if request.constraint is not None:
            request.constraint.fill(words)
        for token in request.stop_ids if early else ():
            if token < 32 * len(words):
                words[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
        return True

    def ends(self, token: int) -> tuple[FinishReason | None, str | None]:
        """Whether the answer is complete with this token, its last one, and why."""
        request = self.request
        if token in request.stop_ids and len(self.answer) > request.min_new_tokens:
            return "stop", None
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
            except Exception as failure:  # a grammar that can't go on ends its own request and no other
                return "error", f"{type(failure).__name__}: {failure}"
        return ("length" if len(self.answer) >= request.max_new_tokens else None), None
