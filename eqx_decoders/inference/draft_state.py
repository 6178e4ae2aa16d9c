"""State of a drafter, and the verified tokens that it receives after each decoding step."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Int32

from eqx_decoders.layers.cache.base import is_layer_cache


class DraftState(eqx.Module):
    """State of a drafter, with one row per sequence.

    **Arguments:**

    - `layer_caches`: caches of the drafter's layers.
    - `last_hidden`: hidden states of the last tokens that the next step needs (`MTPDrafter`); () for other drafters.
    - `tokens`: drafts for the next step.
    """

    layer_caches: Any
    last_hidden: tuple[Float[Array, "rows 1 embed"], ...]
    tokens: Int32[Array, "rows drafts"]

    def row(self, row: Int[Array, ""]) -> "DraftState":
        """Return the state of one row."""
        caches = jax.tree.map(lambda cache: cache.row(row), self.layer_caches, is_leaf=is_layer_cache)
        arrays = self.last_hidden, self.tokens
        return DraftState(caches, *jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), arrays))

    def with_row(self, row: Int[Array, ""], new: "DraftState") -> "DraftState":
        """Replace the state of one row."""
        caches = jax.tree.map(
            lambda cache, new_cache: cache.with_row(row, new_cache),
            self.layer_caches,
            new.layer_caches,
            is_leaf=is_layer_cache,
        )
        arrays = self.last_hidden, self.tokens
        new_arrays = new.last_hidden, new.tokens
        return DraftState(caches, *jax.tree.map(lambda x, new: x.at[row].set(new[0]), arrays, new_arrays))

    def empty_rows(self, rows: Int[Array, "rows"]) -> "DraftState":
        """Mark rows as empty. Row indices beyond the last row are ignored."""
        caches = jax.tree.map(lambda cache: cache.empty_rows(rows), self.layer_caches, is_leaf=is_layer_cache)
        arrays = self.last_hidden, self.tokens
        return DraftState(caches, *jax.tree.map(lambda x: x.at[rows].set(0, mode="drop"), arrays))


class VerifiedStep(NamedTuple):
    """Tokens that the model has processed and verified in one step.

    **Arguments:**

    - `tokens`, `positions`: processed tokens and their positions; the position of a rejected token is -1.
    - `hidden`: hidden state of the model at each token.
    - `following`: the token that the model chose after each token.
    - `start`: position of the first token.
    - `num_accepted`: number of accepted tokens, drafts included.
    - `experts`: selected experts of each token, recorded with `Execution.expert_choices`.
    """

    tokens: Int[Array, "rows columns"]
    positions: Int[Array, "rows columns"]
    hidden: Float[Array, "rows columns embed"]
    following: Int[Array, "rows columns"]
    start: Int[Array, "rows"]
    num_accepted: Int[Array, "rows"]
    experts: Int[Array, "layers rows columns slots"] | None = None
