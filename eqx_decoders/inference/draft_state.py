"""What drafters keep for each row, and what they are told of each step."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Int32

from eqx_decoders.layers.cache.base import is_layer_cache


class DraftState(eqx.Module):
    """Drafting state of every row: layer caches, hidden states of the last tokens, and the next drafts."""

    layer_caches: Any
    last: tuple[Float[Array, "rows 1 embed"], ...]
    tokens: Int32[Array, "rows drafts"]

    def row(self, row: Int[Array, ""]) -> "DraftState":
        """Return the state of one row."""
        caches = jax.tree.map(lambda each: each.row(row), self.layer_caches, is_leaf=is_layer_cache)
        last, tokens = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), (self.last, self.tokens))
        return DraftState(caches, last, tokens)

    def with_row(self, row: Int[Array, ""], new: "DraftState") -> "DraftState":
        """Replace the state of one row."""
        write = lambda each, new: each.with_row(row, new)  # noqa: E731
        caches = jax.tree.map(write, self.layer_caches, new.layer_caches, is_leaf=is_layer_cache)
        others = (self.last, self.tokens), (new.last, new.tokens)
        return DraftState(caches, *jax.tree.map(lambda x, new: x.at[row].set(new[0]), *others))

    def empty_rows(self, rows: Int[Array, "rows"]) -> "DraftState":
        """Mark rows as empty. Row indices beyond the last row are ignored."""
        caches = jax.tree.map(lambda each: each.empty_rows(rows), self.layer_caches, is_leaf=is_layer_cache)
        return DraftState(caches, *jax.tree.map(lambda x: x.at[rows].set(0, mode="drop"), (self.last, self.tokens)))


class VerifiedStep(NamedTuple):
    """Tokens that the model has read, as far as they are right.

    **Arguments:**

    - `tokens`, `positions`: tokens that were fed; rejected ones are at position -1.
    - `hidden`: the model's hidden state at each.
    - `following`: the token that the model has chosen after each.
    - `begin`, `num_accepted`: position of the first token, and the number of accepted ones.
    - `experts`: the experts that each token was sent to, with `Execution.expert_choices`.
    """

    tokens: Int[Array, "rows columns"]
    positions: Int[Array, "rows columns"]
    hidden: Float[Array, "rows columns embed"]
    following: Int[Array, "rows columns"]
    begin: Int[Array, "rows"]
    num_accepted: Int[Array, "rows"]
    experts: Int[Array, "layers rows columns slots"] | None = None
