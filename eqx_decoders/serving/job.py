"""A request on its way through the engine."""

import dataclasses
import time
from typing import Any

from eqx_decoders.serving.request import Request, TokenScore
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
