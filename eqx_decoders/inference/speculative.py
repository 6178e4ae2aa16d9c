"""Speculative greedy decoding: multi-token prediction drafts some tokens, and the model verifies them at once.

A draft token is accepted only if the model predicts the same (Leviathan et al. 2023): the tokens are those of plain
greedy decoding, in fewer steps.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from eqx_decoders.context import Promises
from eqx_decoders.core.sampling import Greedy, Sampler, is_stop
from eqx_decoders.errors import check, check_integer
from eqx_decoders.inference.mtp_draft import MTPDepthStates, draft_with_mtp
from eqx_decoders.inference.unstack import inference_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.model.caches import block_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed


class Speculation(NamedTuple):
    """Result of speculative greedy decoding.

    **Arguments:**

    - `tokens`: of each row, as `generate` returns them.
    - `steps`: calls of the model for each row after its prompt; plain decoding has one per token.
    - `proposed`, `accepted`: draft tokens of each row, and the number of them that the model confirmed.
    """

    tokens: Int[Array, "batch new"]
    steps: Int[Array, "batch"]
    proposed: Int[Array, "batch"]
    accepted: Int[Array, "batch"]


class _SpeculationState(eqx.Module):
    """State of the decode loop: the next token, draft tokens for those after it, and the caches."""

    token: Int[Array, "batch"]
    draft: Int[Array, "batch draft"]
    cache: Cache
    depths: MTPDepthStates
    tokens: Int[Array, "batch new"]
    count: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    steps: Int[Array, "batch"]
    accepted: Int[Array, "batch"]


def check_draft(model: Decoder, num_draft_tokens: int, sampler: Sampler) -> None:
    """Raise ConfigError if the model can't draft so many tokens, or the sampler isn't greedy."""
    check_integer("generate: num_draft_tokens", num_draft_tokens, minimum=0)
    depths = 0 if model.config.mtp is None else model.config.mtp.num_depths
    check(
        num_draft_tokens <= depths,
        f"generate: num_draft_tokens={num_draft_tokens} must be at most {depths}, the model's depths of multi-token "
        "prediction.",
    )
    greedy = num_draft_tokens == 0 or isinstance(sampler, Greedy)
    check(greedy, f"generate: num_draft_tokens={num_draft_tokens} needs sampler=Greedy(), not {sampler}.")


def stream_speculative(
    model: Decoder,
    prompt: Int[AnyArray, "batch length"],
    lengths: Int[AnyArray, "batch"],
    max_new_tokens: Int[AnyArray, ""],
    room: int,
    num_draft_tokens: int,
    stop_ids: Int[AnyArray, "stops"],
    pad_id: int,
    cache_format: CacheFormat = CacheFormat(),
) -> Iterator[np.ndarray]:
    """Yield the tokens of `speculate` one by one, each with one id per row, as soon as all rows have it."""
    arguments = prompt, lengths, max_new_tokens, room, num_draft_tokens, stop_ids, pad_id, cache_format
    state, yielded = _first(model, *arguments), 0
    while True:
        tokens, count, done = jax.device_get((state.tokens, state.count, state.done))
        ready = int(np.max(count) if np.all(done) else np.min(count[~done]))
        yield from tokens.T[yielded:ready]
        if np.all(done):
            return
        state, yielded = _next((model, max_new_tokens, stop_ids), state), max(yielded, ready)


@eqx.filter_jit
def speculate(
    model: Decoder,
    prompt: Int[Array, "batch length"],
    lengths: Int[Array, "batch"],
    max_new_tokens: Int[AnyArray, ""],
    room: int,
    num_draft_tokens: int,
    stop_ids: Int[AnyArray, "stops"],
    pad_id: int,
    cache_format: CacheFormat = CacheFormat(),
) -> Speculation:
    """Continue every prompt greedily, drafting `num_draft_tokens` at each step: one program, as in `generate`."""
    arguments = prompt, lengths, max_new_tokens, room, num_draft_tokens, stop_ids, pad_id, cache_format
    return jax.tree.map(model.execution.layout.replicate, _speculation(model, *arguments))


@typed
def _speculation(model, prompt, lengths, max_new_tokens, room, drafts, stop_ids, pad_id, cache_format) -> Speculation:
    state = _prefill(model, prompt, lengths, max_new_tokens, room, drafts, stop_ids, pad_id, cache_format)
    state = jax.lax.while_loop(
        lambda state: ~jnp.all(state.done), lambda state: _decode_step(model, max_new_tokens, stop_ids, state), state
    )
    return Speculation(state.tokens, state.steps, state.steps * drafts, state.accepted)


@typed
def _prefill(
    model, prompt, lengths, max_new_tokens, room, num_draft_tokens, stop_ids, pad_id, cache_format
) -> _SpeculationState:
    """Run the prompts through the model and the depths."""
    config = model.config
    batch, width = prompt.shape
    cache = inference_cache(model, batch, room, cache_format)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    positions = jnp.where(index < lengths[:, None], index, -1)
    hidden, cache, _ = model.run(prompt, positions=positions, cache=cache, promises=Promises(cache_is_empty=True))
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    token = jnp.argmax(model.logits(last)[:, 0], axis=-1).astype(jnp.int32)
    following = jnp.concatenate([prompt[:, 1:], jnp.zeros((batch, 1), prompt.dtype)], axis=1).astype(jnp.int32)
    following = jnp.where(index == lengths[:, None] - 1, token[:, None], following)
    nothing = jnp.zeros((batch, 1, config.embed_dim), hidden.dtype)
    depths = MTPDepthStates(
        layer_caches=tuple(
            block_cache(config.mtp.block, 1, batch, room, cache_format) for _ in range(num_draft_tokens)
        ),
        last=(nothing,) * (num_draft_tokens - 1),
    )
    depths, draft = draft_with_mtp(
        model, depths, hidden, following, jnp.zeros_like(lengths), lengths, cache_is_empty=True
    )
    zeros = jnp.zeros((batch,), jnp.int32)
    return _SpeculationState(
        token=token,
        draft=draft,
        cache=cache,
        depths=depths,
        tokens=jnp.full((batch, room - width), pad_id, jnp.int32).at[:, 0].set(token),
        count=jnp.ones_like(zeros),
        done=is_stop(token, stop_ids) | (max_new_tokens == 1),
        steps=zeros,
        accepted=zeros,
    )


@typed
def _decode_step(model, max_new_tokens, stop_ids, state: _SpeculationState) -> _SpeculationState:
    """Verify the draft, accept its right tokens and the model's own next token, and draft again."""
    batch, count = state.draft.shape
    begin = state.cache.length
    index = jnp.arange(count + 1, dtype=jnp.int32)[None]
    inputs = jnp.concatenate([state.token[:, None], state.draft], axis=1)
    positions = jnp.where(state.done[:, None], -1, begin[:, None] + index)
    hidden, proposal, _ = model.forward_uncommitted(inputs, positions, cache=state.cache)
    predicted = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
    right = jnp.cumprod((predicted[:, :-1] == state.draft).astype(jnp.int32), axis=1)
    accepted = jnp.where(state.done, 0, 1 + jnp.sum(right, axis=1))  # tokens that are now certain
    cache = state.cache.commit(proposal.entries, jnp.where(index < accepted[:, None], positions, -1))
    depths, draft = draft_with_mtp(model, state.depths, hidden, predicted, begin, accepted)
    new, ends = _until_stop(predicted, accepted, stop_ids)
    target = state.count[:, None] + index
    where = jnp.where((index < new[:, None]) & (target < max_new_tokens), target, state.tokens.shape[1])
    tokens = state.tokens.at[jnp.arange(batch)[:, None], where].set(predicted, mode="drop")
    count = jnp.minimum(state.count + new, max_new_tokens)
    return _SpeculationState(
        token=jnp.take_along_axis(predicted, jnp.maximum(accepted - 1, 0)[:, None], axis=1)[:, 0],
        draft=draft,
        cache=cache,
        depths=depths,
        tokens=tokens,
        count=count,
        done=state.done | ends | (count >= max_new_tokens),
        steps=state.steps + (~state.done).astype(jnp.int32),
        accepted=state.accepted + jnp.maximum(accepted - 1, 0),
    )


def _readable(model: Decoder, state: _SpeculationState) -> _SpeculationState:
    """Return the state, with all that the host reads of it on every device."""
    replicate = model.execution.layout.replicate
    shown = {name: replicate(getattr(state, name)) for name in ("tokens", "count", "done")}
    return dataclasses.replace(state, **shown)


@eqx.filter_jit
def _first(model, *arguments) -> _SpeculationState:
    return _readable(model, _prefill(model, *arguments))


@eqx.filter_jit(donate="all-except-first")
def _next(inputs: tuple[Decoder, Any, Any], state: _SpeculationState) -> _SpeculationState:
    return _readable(inputs[0], _decode_step(*inputs, state))


def _until_stop(
    predicted: Int[Array, "batch length"], accepted: Int[Array, "batch"], stop_ids: Int[AnyArray, "stops"]
) -> tuple[Int[Array, "batch"], Bool[Array, "batch"]]:
    """Return the number of accepted tokens up to the first stop, itself included, and whether there is one."""
    index = jnp.arange(predicted.shape[1], dtype=jnp.int32)[None]
    stop = is_stop(predicted, stop_ids) & (index < accepted[:, None])
    ends = jnp.any(stop, axis=1)
    return jnp.where(ends, jnp.argmax(stop, axis=1).astype(jnp.int32) + 1, accepted), ends
