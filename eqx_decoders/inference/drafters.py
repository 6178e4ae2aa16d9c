"""Drafters of speculative decoding: cheap guesses of the next tokens, which the model verifies at once.

A draft is accepted where the model chooses the same token, by the draw (or the maximum) that it would have made without
drafts (`decode_step`). As a draft is certain of its token, this is the rule of speculative sampling (Leviathan et al.
2023): a token x is accepted with probability p(x), and another one is drawn from the rest of p. So drafts change no
text but for rounding, seeds included: a step computes several tokens, whose last bits may differ in low precision.
`generate` and the engine take any drafter that drafts on the device, the engine also those that draft on the host.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Int

from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.inference.draft_state import DraftState, VerifiedStep
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.model.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter(CheckedFields, abc.ABC):
    """Source of `num_tokens` drafts of each step: on the host by `find`, or on the device by all the others.

    `drafts_prompts` says whether `prefill` drafts the tokens after a prompt.
    """

    num_tokens: PositiveInt
    drafts_prompts: ClassVar[bool] = False

    def check_model(self, model: Decoder) -> None:
        """Raise ConfigError for a model that can't verify these drafts."""

    def find(self, text: Sequence[int] | np.ndarray) -> list[int] | None:
        """Return the drafts after a text; None where they are made on the device."""

    def empty(self, model: Decoder, rows: int, length: int, cache_format: CacheFormat) -> DraftState | None:
        """Create the state of empty rows; None where drafts are made on the host."""

    def prefill(self, model: Decoder, state: DraftState, row: Int[Array, ""], read: VerifiedStep) -> DraftState:
        """Update the state of one row after a part of its prompt."""
        return state.with_row(row, self.step(model, state.row(row), read))

    def step(
        self, model: Decoder, state: DraftState, verified: VerifiedStep, *, cache_is_empty: bool = False
    ) -> DraftState:
        """Update the state after a step of all rows, and draft the tokens after it; on the host there is none."""
        return state


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(Drafter):
    """Drafts copied from an earlier occurrence of the last tokens in the text (Saxena 2023).

    **Arguments:**

    - `num_tokens`: maximum drafts of each step.
    - `longest`, `shortest`: numbers of last tokens to search for, the longest first.
    """

    num_tokens: PositiveInt = 4
    longest: PositiveInt = 3
    shortest: PositiveInt = 2

    def __post_init__(self):
        super().__post_init__()
        rule = f"PromptLookup.shortest={self.shortest} must be at most longest={self.longest}"
        check(self.shortest <= self.longest, f"{rule}.")

    def find(self, text: Sequence[int] | np.ndarray) -> list[int]:
        """Return the drafts after a text: the tokens that follow the latest match."""
        text = np.asarray(text)
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            end = len(text) - size  # where the last tokens begin, and up to which other places may begin
            starts = np.flatnonzero(text[:end] == text[end])
            for index in range(1, size):
                starts = starts[text[starts + index] == text[end + index]]
            if len(starts) > 0:
                begin = int(starts[-1]) + size
                return text[begin : begin + self.num_tokens].tolist()
        return []


def with_models(function: Callable[[Decoder], Decoder], drafter: Drafter) -> Drafter:
    """Return a drafter with its models, if it has any, changed by a function."""

    def change(each: Any) -> Any:  # a drafter that JAX does not know is a leaf, too
        return function(each) if isinstance(each, Decoder) else each

    return jax.tree.map(change, drafter, is_leaf=lambda each: isinstance(each, Decoder))
