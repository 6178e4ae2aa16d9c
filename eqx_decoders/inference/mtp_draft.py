"""Speculative decoding with the multi-token prediction (MTP) depths of the model itself."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.inference.draft_state import DraftState, VerifiedStep
from eqx_decoders.inference.drafters import Drafter
from eqx_decoders.layers.cache import base as cache_base
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.model.caches import block_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.explicit import at_layer


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPDrafter(Drafter):
    """Drafter that uses the model's multi-token prediction (MTP).

    **Arguments:**

    - `num_tokens`: number of drafts per step. Depth k drafts token k, so this is also the number of depths used.
    """

    num_tokens: PositiveInt = 1
    drafts_prompts: ClassVar[bool] = True

    def check_model(self, model: Decoder, name: str = "MTPDrafter.num_tokens") -> None:
        depths = 0 if model.config.mtp is None else model.config.mtp.num_depths
        check(
            self.num_tokens <= depths,
            f"{name}={self.num_tokens} must be at most {depths}, the model's number of multi-token prediction depths.",
        )

    def empty(self, model: Decoder, rows: int, length: int, cache_format: CacheFormat) -> DraftState:
        assert model.config.mtp is not None
        block = model.config.mtp.block
        count = self.num_tokens
        zeros = jnp.zeros((rows, 1, model.config.hidden_features), model.execution.precision.compute)
        caches = tuple(block_cache(block, 1, rows, length, cache_format) for _ in range(count))
        return DraftState(caches, (zeros,) * (count - 1), jnp.zeros((rows, count), jnp.int32))

    def step(
        self, model: Decoder, state: DraftState, verified: VerifiedStep, *, cache_is_empty: bool = False
    ) -> DraftState:
        """Run the MTP depths on the verified tokens, and draft the tokens after them.

        Depth k needs token t + k to process position t. Its cache is therefore k - 1 positions behind the cache of
        depth 1, which has the same length as the model's cache. `state.last_hidden[k - 1]` is the residual stream of
        depth k at position p - k, where p is the next position.
        """
        assert model.mtp is not None
        start = verified.start
        num_accepted = verified.num_accepted
        following = verified.following
        length = verified.hidden.shape[1]
        depths = model.mtp.unstacked()
        stream = model.mtp_input(verified.hidden)
        drafts = []
        caches = []
        last_hidden = []
        for index, cache in enumerate(state.layer_caches):
            # This depth starts `index` positions before `start`, where it had to stop in the previous step. So its
            # inputs are one token longer than the inputs of the depth before.
            if index > 0:
                stream = depths[index - 1].next_input(jnp.concatenate([state.last_hidden[index - 1], stream], axis=1))
                following = _with_draft(following, num_accepted + index - 1, drafts[-1])
            offset = jnp.arange(length + index, dtype=jnp.int32)[None]
            positions = start[:, None] - index + offset
            is_token = (positions >= 0) & (offset < num_accepted[:, None] + index) & (num_accepted[:, None] > 0)
            positions = jnp.where(is_token, positions, -1)
            ctx = ForwardContext(positions=positions, execution=model.execution, cache_is_empty=cache_is_empty)
            # `following` holds the tokens index + 1 positions later
            following_positions = jnp.where(is_token, positions + index + 1, -1)
            following_ctx = ForwardContext(positions=following_positions, execution=model.execution)
            cached = None if cache_is_empty else cache_base.pasts(cache, at_layer(cache_base.slices(cache), 0))
            stream, new_state, _ = depths[index](stream, model.embed(following, following_ctx), ctx, cached)
            # Commit only positions whose inputs contain no draft.
            committed = jnp.where(offset < num_accepted[:, None], positions, -1)
            caches.append(cache_base.commit(cache, jax.tree.map(lambda x: x[None], new_state), committed))
            last_index = jnp.maximum(num_accepted - 1, 0)[:, None, None]
            draft_hidden = jnp.take_along_axis(stream, last_index + index, axis=1)
            drafts.append(jnp.argmax(model.logits(draft_hidden, depth=index + 1)[:, 0], axis=-1).astype(jnp.int32))
            last_hidden.append(jnp.take_along_axis(stream, last_index, axis=1))
        active = (num_accepted > 0)[:, None]
        # the last depth used here stores no hidden state, since no further depth reads it
        merged_hidden = tuple(
            jnp.where(active[..., None], new, old) for old, new in zip(state.last_hidden, last_hidden, strict=False)
        )
        tokens = jnp.where(active, jnp.stack(drafts, axis=1), state.tokens)
        return DraftState(tuple(caches), merged_hidden, tokens)


def _with_draft(
    following: Int[Array, "batch length"], draft_index: Int[Array, "batch"], draft: Int[Array, "batch"]
) -> Int[Array, "batch longer"]:
    """Append a column, and write the draft of each sequence at its `draft_index`."""
    padded = jnp.pad(following, ((0, 0), (0, 1)))
    index = jnp.arange(padded.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index == draft_index[:, None], draft[:, None], padded)
