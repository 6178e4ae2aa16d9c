"""A request on its way through the engine."""

import dataclasses
import time
from typing import Any

import numpy as np

from eqx_decoders.serving.drafts import Drafts, PromptLookup
from eqx_decoders.serving.request import FinishReason, Request, TokenScore
from eqx_decoders.serving.slots import Kept


@dataclasses.dataclass(eq=False)
class Job:
    """A request, and how far it is.

    **Arguments:**

    - `names`: of the blocks of its prompt, as the prefix cache knows them.
    - `branch`: how many of them were known when it came: where it parts from other prompts.
    - `arrived`, `queue_seconds`: when it came, by `time.monotonic`, and how long it waited for a slot.
    - `slot`: its place; -1 while it waits.
    - `done`: tokens of the prompt, and then of the answer, that the cache holds.
    - `cached`: tokens of the prompt that were not computed again.
    - `answer`: its tokens.
    - `drafted`: whether drafts have been made on the device since it came to its slot.
    - `prompt_scores`: of the prompt's tokens, as far as it is done.
    - `saved`: what its slot held when it had to give it up.
    """

    request_id: int
    request: Request
    names: list[bytes] = dataclasses.field(default_factory=list)
    branch: int = 0
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    slot: int = -1
    done: int = 0
    cached: int = 0
    answer: list[int] = dataclasses.field(default_factory=list)
    drafted: bool = False
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)
    saved: "tuple[list[Kept], Any] | None" = None

    @property
    def decodes(self) -> bool:
        """Whether its prompt is done."""
        return len(self.answer) > 0

    def drafts(self, config: Drafts | None) -> list[int]:
        """The drafts for its next step; -1 for one that the device knows."""
        request = self.request
        room = request.max_new_tokens - len(self.answer) - 1
        apart = request.sampling.penalises or request.constraint is not None
        if config is None or room < 1 or apart or len(self.answer) < request.min_new_tokens:
            return []
        if isinstance(config, PromptLookup):
            return config.find([*request.prompt, *self.answer])[:room]
        return [-1] * min(config.num_tokens, room) if self.drafted else []

    def mask(self, words: np.ndarray) -> bool:
        """Whether only some tokens are allowed next: then the bits of these are set in `words`, 32 in each."""
        request = self.request
        early = len(self.answer) < request.min_new_tokens and len(request.stop_ids) > 0
        if not early and request.constraint is None:
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
