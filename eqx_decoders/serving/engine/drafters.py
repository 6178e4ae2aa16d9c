"""Drafting on the device for speculative decoding: cheap guesses of the next tokens, which the model verifies at once.

A draft is accepted where the model samples the same token, by the draw (or the maximum) that it would have made without
drafts. As a draft is certain of its token, this is the rule of speculative sampling (Leviathan et al. 2023): a token x
is accepted with probability p(x), and another one is drawn from the rest of p. Answers don't change, seeds included.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_decoders.context import Promises
from eqx_decoders.inference.mtp_draft import MTPDepthStates, draft_with_mtp
from eqx_decoders.inference.unstack import inference_cache
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.model.caches import block_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.config import DraftModel, Drafts, MTPDrafter
from eqx_decoders.serving.engine.forward import DeviceDrafting
from eqx_decoders.serving.engine.slot_state import DraftState


class ModelDrafting(DeviceDrafting):
    """Drafting by the second of the models."""

    def empty(self, models: tuple[Decoder, ...], slots: int, length: int, dtype: Any) -> DraftState:
        cache = inference_cache(models[1], slots, length, dtype)
        return DraftState(layer_caches=cache.segments, last=(), tokens=jnp.zeros((slots, self.count), jnp.int32))

    def chunk(self, models, state, slot, tokens, positions, hidden, following) -> DraftState:
        cache = _cache(state)
        _, proposal, _ = models[1].forward_uncommitted(
            tokens, positions, cache=cache.at_rows(slot[None]), promises=Promises(accept_all=True)
        )
        cache = cache.commit_rows(slot[None], proposal.entries, proposal.positions)
        return dataclasses.replace(state, layer_caches=cache.segments)

    def step(self, models, state, verified) -> DraftState:
        # what it drafts is never in its cache before it is verified: so any kind of cache will do
        draft_model = models[1]
        _, proposal, _ = draft_model.forward_uncommitted(verified.tokens, verified.positions, cache=_cache(state))
        cache = _cache(state).commit(proposal.entries, proposal.positions)
        offsets, rows = jnp.arange(self.count, dtype=jnp.int32)[None], verified.tokens.shape[0]
        last = jnp.take_along_axis(verified.following, jnp.maximum(verified.num_accepted - 1, 0)[:, None], axis=1)
        begin = (verified.begin + verified.num_accepted)[:, None]

        def draft_next(index: Array, tokens: Array) -> Array:
            positions = jnp.where((offsets <= index) & (verified.num_accepted[:, None] > 0), begin + offsets, -1)
            hidden, _, _ = draft_model.forward_uncommitted(tokens[:, : self.count], positions, cache=cache)
            last_hidden = jax.lax.dynamic_slice_in_dim(hidden, index, 1, 1)
            draft = jnp.argmax(draft_model.logits(last_hidden)[:, 0], axis=-1).astype(jnp.int32)
            return jax.lax.dynamic_update_slice_in_dim(tokens, draft[:, None], index + 1, 1)

        tokens = jnp.concatenate([last, jnp.zeros((rows, self.count), jnp.int32)], axis=1).astype(jnp.int32)
        tokens = jax.lax.fori_loop(0, self.count, draft_next, tokens)
        return DraftState(layer_caches=cache.segments, last=(), tokens=tokens[:, 1:])


class MTPDrafting(DeviceDrafting):
    """Drafting by the model's MTP depths."""

    def empty(self, models: tuple[Decoder, ...], slots: int, length: int, dtype: Any) -> DraftState:
        model = models[0]
        assert model.config.mtp is not None
        zeros = jnp.zeros((slots, 1, model.config.embed_dim), model.execution.precision.compute)
        layer_caches = tuple(block_cache(model.config.mtp.block, 1, slots, length, dtype) for _ in range(self.count))
        tokens = jnp.zeros((slots, self.count), jnp.int32)
        return DraftState(layer_caches=layer_caches, last=(zeros,) * (self.count - 1), tokens=tokens)

    def chunk(self, models, state, slot, tokens, positions, hidden, following) -> DraftState:
        row = _map_layer_caches(lambda each: each.row(slot), state.layer_caches)
        last = tuple(jax.lax.dynamic_slice_in_dim(each, slot, 1, 0) for each in state.last)
        length = jnp.sum((positions >= 0).astype(jnp.int32), axis=1)
        depths, begin = MTPDepthStates(row, last), positions[:, 0]
        depths, drafts = draft_with_mtp(models[0], depths, hidden, following, begin, length)
        write_row = lambda each, new: each.with_row(slot, new)  # noqa: E731
        return DraftState(
            layer_caches=_map_layer_caches(write_row, state.layer_caches, depths.layer_caches),
            last=tuple(old.at[slot].set(new[0]) for old, new in zip(state.last, depths.last, strict=True)),
            tokens=state.tokens.at[slot].set(drafts[0]),
        )

    def step(self, models, state, verified) -> DraftState:
        depths = MTPDepthStates(state.layer_caches, state.last)
        inputs = verified.hidden, verified.following, verified.begin, verified.num_accepted
        depths, drafts = draft_with_mtp(models[0], depths, *inputs)
        active = (verified.num_accepted > 0)[:, None]
        last = tuple(jnp.where(active[..., None], new, old) for old, new in zip(state.last, depths.last, strict=True))
        return DraftState(layer_caches=depths.layer_caches, last=last, tokens=jnp.where(active, drafts, state.tokens))


def device_drafting(drafts: Drafts | None) -> DeviceDrafting | None:
    """Return the drafting that runs on the device; None where there is none, or the host looks drafts up."""
    if isinstance(drafts, DraftModel):
        return ModelDrafting(drafts.num_tokens)
    return MTPDrafting(drafts.num_tokens) if isinstance(drafts, MTPDrafter) else None


def _cache(state: DraftState) -> Cache:
    """Return the layer caches of the draft model as a `Cache`."""
    return Cache(segments=state.layer_caches, length=jnp.zeros((state.tokens.shape[0],), jnp.int32))


def _map_layer_caches(change: Any, *trees: Any) -> Any:
    return jax.tree.map(change, *trees, is_leaf=is_layer_cache)
