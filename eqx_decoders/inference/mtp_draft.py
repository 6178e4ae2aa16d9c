"""Drafts by multi-token prediction: its depths run over new tokens, and guess those after the last of them."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eqx_decoders.blocks.stack import at_layer
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.inference.draft_state import DraftState, VerifiedStep
from eqx_decoders.inference.drafters import Drafter
from eqx_decoders.layers.cache import base as cache_base
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.model.caches import block_cache
from eqx_decoders.model.decoder import Decoder


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPDrafter(Drafter):
    """Drafts from the model's own multi-token prediction (MTP).

    **Arguments:**

    - `num_tokens`: drafts of each step: one for each of its first depths.
    """

    num_tokens: PositiveInt = 1
    drafts_prompts: ClassVar[bool] = True

    def check_model(self, model: Decoder, name: str = "MTPDrafter.num_tokens") -> None:
        depths = 0 if model.config.mtp is None else model.config.mtp.num_depths
        rule = f"must be at most {depths}, the model's depths of multi-token prediction"
        check(self.num_tokens <= depths, f"{name}={self.num_tokens} {rule}.")

    def empty(self, model: Decoder, rows: int, length: int, cache_format: CacheFormat) -> DraftState:
        assert model.config.mtp is not None
        block, count = model.config.mtp.block, self.num_tokens
        zeros = jnp.zeros((rows, 1, model.config.hidden_features), model.execution.precision.compute)
        caches = tuple(block_cache(block, 1, rows, length, cache_format) for _ in range(count))
        return DraftState(caches, (zeros,) * (count - 1), jnp.zeros((rows, count), jnp.int32))

    def step(
        self, model: Decoder, state: DraftState, verified: VerifiedStep, *, cache_is_empty: bool = False
    ) -> DraftState:
        """Run all depths over new tokens, and draft those after the last of them.

        Depth k can store token t once token t + k is known, so it is k - 1 tokens behind the first depth, whose entries
        are as many as the model's. `state.last` has the stream of depth k at token p - k, p being the next position.
        """
        assert model.mtp is not None
        begin, known, following = verified.begin, verified.num_accepted, verified.following
        length, depth_modules = verified.hidden.shape[1], model.mtp.unstacked()
        stream, drafted, caches, last = model.mtp_input(verified.hidden), [], [], []
        for index, cache in enumerate(state.layer_caches):
            # it begins `index` tokens earlier, where the last call had to stop: stream and tokens are one longer
            if index > 0:
                stream = depth_modules[index - 1].next_input(jnp.concatenate([state.last[index - 1], stream], axis=1))
                following = _with_draft(following, known + index - 1, drafted[-1])
            offset = jnp.arange(length + index, dtype=jnp.int32)[None]
            positions = begin[:, None] - index + offset
            real = (positions >= 0) & (offset < known[:, None] + index) & (known[:, None] > 0)
            positions = jnp.where(real, positions, -1)
            ctx = ForwardContext(positions=positions, execution=model.execution, cache_is_empty=cache_is_empty)
            later = ForwardContext(positions=jnp.where(real, positions + index + 1, -1), execution=model.execution)
            past = None if cache_is_empty else cache_base.pasts(cache, at_layer(cache_base.slices(cache), 0))
            stream, entries, _ = depth_modules[index](stream, model.embed(following, later), ctx, past)
            # only entries whose input was no draft token
            stored = jnp.where(offset < known[:, None], positions, -1)
            caches.append(cache_base.commit(cache, jax.tree.map(lambda x: x[None], entries), stored))
            end = jnp.maximum(known - 1, 0)[:, None, None]
            tip = jnp.take_along_axis(stream, end + index, axis=1)
            drafted.append(jnp.argmax(model.logits(tip, depth=index + 1)[:, 0], axis=-1).astype(jnp.int32))
            last.append(jnp.take_along_axis(stream, end, axis=1))
        active = (known > 0)[:, None]
        last_states = (jnp.where(active[..., None], new, old) for old, new in zip(state.last, last, strict=False))
        tokens = jnp.where(active, jnp.stack(drafted, axis=1), state.tokens)
        return DraftState(tuple(caches), tuple(last_states), tokens)


def _with_draft(
    following: Int[Array, "batch length"], where: Int[Array, "batch"], token: Int[Array, "batch"]
) -> Int[Array, "batch longer"]:
    """Insert the draft token after the tokens of each row."""
    longer = jnp.pad(following, ((0, 0), (0, 1)))
    index = jnp.arange(longer.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index == where[:, None], token[:, None], longer)
