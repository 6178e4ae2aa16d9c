"""Drafters for speculative decoding: cheap guesses of the next tokens, which the model verifies in one step.

`decode_step` samples (or takes the maximum) exactly as it would without drafts, and accepts a draft that equals the
sampled token. This is the rule of speculative sampling (Leviathan et al. 2023) for a draft distribution that puts all
probability on one token: token x is accepted with probability p(x); otherwise a different token is sampled from p.
Drafts therefore do not change the generated tokens, for the same seed, except for rounding: a step that computes
several tokens may differ in the last bits in low precision. `generate` accepts drafters that run on the device; the
engine also accepts drafters that run on the host.
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
    """Source of up to `num_tokens` drafts per step.

    A drafter on the host implements `find`. A drafter on the device implements the other methods. `drafts_prompts`:
    whether `prefill` returns drafts for the tokens after a prompt.
    """

    num_tokens: PositiveInt
    drafts_prompts: ClassVar[bool] = False

    def check_model(self, model: Decoder) -> None:
        """Raise ConfigError if the model cannot verify these drafts."""

    def find(self, tokens: Sequence[int] | np.ndarray) -> list[int] | None:
        """Return drafts for the tokens after `tokens`; None if this drafter runs on the device."""

    def empty(self, model: Decoder, rows: int, length: int, cache_format: CacheFormat) -> DraftState | None:
        """Create the state of empty rows, with caches of `length` tokens; None if this drafter runs on the host."""

    def prefill(self, model: Decoder, state: DraftState, row: Int[Array, ""], chunk: VerifiedStep) -> DraftState:
        """Update the state of one row with a chunk of its prompt."""
        return state.with_row(row, self.step(model, state.row(row), chunk))

    def step(
        self, model: Decoder, state: DraftState, verified: VerifiedStep, *, cache_is_empty: bool = False
    ) -> DraftState:
        """Update the state of all rows with the tokens of a step, and draft the tokens after them."""
        return state


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(Drafter):
    """Drafts copied from an earlier occurrence of the last tokens in the text (Saxena 2023).

    **Arguments:**

    - `num_tokens`: maximum number of drafts per step.
    - `longest`, `shortest`: maximum and minimum number of last tokens (n-gram size) to search for; longer matches are
        preferred.
    """

    num_tokens: PositiveInt = 4
    longest: PositiveInt = 3
    shortest: PositiveInt = 2

    def __post_init__(self):
        super().__post_init__()
        check(
            self.shortest <= self.longest,
            f"PromptLookup.shortest={self.shortest} must be at most longest={self.longest}.",
        )

    def find(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        """Return the tokens that follow the latest earlier occurrence of the last tokens; [] if there is no match."""
        tokens = np.asarray(tokens)
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            suffix_start = len(tokens) - size
            matches = np.flatnonzero(tokens[:suffix_start] == tokens[suffix_start])
            for index in range(1, size):
                matches = matches[tokens[matches + index] == tokens[suffix_start + index]]
            if len(matches) > 0:
                start = int(matches[-1]) + size
                return tokens[start : start + self.num_tokens].tolist()
        return []


def with_models(function: Callable[[Decoder], Decoder], drafter: Drafter) -> Drafter:
    """Return the drafter after applying `function` to each model that it contains."""

    def change(node: Any) -> Any:  # a drafter that is not registered as a pytree is a leaf itself
        return function(node) if isinstance(node, Decoder) else node

    return jax.tree.map(change, drafter, is_leaf=lambda node: isinstance(node, Decoder))
