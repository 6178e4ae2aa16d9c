"""Speculative decoding with a smaller draft model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eqx_decoders.context import Promises
from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.inference.draft_state import DraftState, VerifiedStep
from eqx_decoders.inference.drafters import Drafter
from eqx_decoders.inference.unstack import inference_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.model.decoder import Decoder


@functools.partial(jax.tree_util.register_dataclass, data_fields=("model",), meta_fields=("num_tokens",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(Drafter):
    """Drafter that takes the most likely tokens of a smaller model.

    **Arguments:**

    - `model`: the smaller model; it must have the same vocabulary.
    - `num_tokens`: number of drafts per step.
    """

    model: Decoder
    num_tokens: PositiveInt = 4

    def check_model(self, model: Decoder) -> None:
        draft_vocab_size = self.model.config.vocab_size
        vocab_size = model.config.vocab_size
        check(
            draft_vocab_size == vocab_size,
            f"DraftModel.model has vocab_size={draft_vocab_size}, but the model has vocab_size={vocab_size}. Use a "
            "draft model with the same vocabulary.",
        )

    def empty(self, model: Decoder, rows: int, length: int, cache_format: CacheFormat) -> DraftState:
        cache = inference_cache(self.model, rows, length, cache_format)
        return DraftState(
            layer_caches=cache.layer_caches, last_hidden=(), tokens=jnp.zeros((rows, self.num_tokens), jnp.int32)
        )

    def prefill(self, model: Decoder, state: DraftState, row: Int[Array, ""], chunk: VerifiedStep) -> DraftState:
        cache = _cache(state)
        _, proposal, _ = self.model.forward_uncommitted(
            chunk.tokens, chunk.positions, cache=cache.at_rows(row[None]), promises=Promises(accept_all=True)
        )
        cache = cache.commit_rows(row[None], proposal.entries, proposal.positions)
        return dataclasses.replace(state, layer_caches=cache.layer_caches)

    def step(
        self, model: Decoder, state: DraftState, verified: VerifiedStep, *, cache_is_empty: bool = False
    ) -> DraftState:
        # Only verified tokens enter the cache, so this also works for recurrent states, which cannot drop tokens.
        promises = Promises(cache_is_empty=cache_is_empty)
        _, cache, _ = self.model.run(verified.tokens, verified.positions, cache=_cache(state), promises=promises)
        assert cache is not None
        count = self.num_tokens
        offsets = jnp.arange(count, dtype=jnp.int32)[None]
        rows = verified.tokens.shape[0]
        last = jnp.take_along_axis(verified.following, jnp.maximum(verified.num_accepted - 1, 0)[:, None], axis=1)
        start = (verified.start + verified.num_accepted)[:, None]

        def draft_next(index: Array, tokens: Array) -> Array:
            positions = jnp.where((offsets <= index) & (verified.num_accepted[:, None] > 0), start + offsets, -1)
            hidden, _, _ = self.model.forward_uncommitted(tokens[:, :count], positions, cache=cache)
            last_hidden = jax.lax.dynamic_slice_in_dim(hidden, index, 1, 1)
            draft = jnp.argmax(self.model.logits(last_hidden)[:, 0], axis=-1).astype(jnp.int32)
            return jax.lax.dynamic_update_slice_in_dim(tokens, draft[:, None], index + 1, 1)

        tokens = jnp.concatenate([last, jnp.zeros((rows, count), jnp.int32)], axis=1).astype(jnp.int32)
        tokens = jax.lax.fori_loop(0, count, draft_next, tokens)
        return DraftState(layer_caches=cache.layer_caches, last_hidden=(), tokens=tokens[:, 1:])


def _cache(state: DraftState) -> Cache:
    """Return the layer caches of the draft model as a `Cache`."""
    return Cache(layer_caches=state.layer_caches, length=jnp.zeros((state.tokens.shape[0],), jnp.int32))
