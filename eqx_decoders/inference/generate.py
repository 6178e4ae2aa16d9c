"""Text generation: one compiled loop on the device, or a stream of tokens."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from eqx_decoders.axes import AnyArray
from eqx_decoders.create import init_cache
from eqx_decoders.decoder import Cache, Decoder
from eqx_decoders.errors import ConfigError, check, check_integer
from eqx_decoders.inference.sampling import Greedy, Sampler, is_stop, sample_token
from eqx_decoders.inference.speculative import check_draft, speculate, stream_speculative
from eqx_decoders.layers.embedding import LearnedPositions


class _State(eqx.Module):
    """Where generation stands: the token of each row that comes next, and what the rows remember."""

    token: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    cache: Cache


def generate(
    model: Decoder,
    prompt: Int[AnyArray, "batch length"],
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: PRNGKeyArray | None = None,
    prompt_lengths: Int[AnyArray, "batch"] | None = None,
    stop_ids: tuple[int, ...] = (),
    pad_id: int = 0,
    num_draft_tokens: int = 0,
) -> Int[Array, "batch new"]:
    """Continue every prompt by `max_new_tokens` tokens.

    **Arguments:**

    - `prompt`: ids, padded on the right where prompts differ in length.
    - `prompt_lengths`: tokens of each prompt that count; default all.
    - `sampler`: `Greedy()` or `Sample(...)`; the latter needs `key`. The same key gives the same tokens.
    - `stop_ids`: a row ends with one of these; what follows is `pad_id`.
    - `num_draft_tokens`: how many tokens multi-token prediction drafts at each step, for the model to verify:
        the same tokens in fewer steps, greedily.

    **Returns:**

    The new tokens. One program: prefill, then a loop on the device that ends when all rows have stopped.
    """
    lengths = _check_arguments(model, prompt, prompt_lengths, max_new_tokens, sampler, key, num_draft_tokens)
    prompt = jnp.asarray(prompt)
    if num_draft_tokens > 0:
        return speculate(model, prompt, lengths, max_new_tokens, num_draft_tokens, tuple(stop_ids), pad_id).tokens
    return _generate(model, prompt, lengths, max_new_tokens, sampler, key, tuple(stop_ids), pad_id)


def stream(
    model: Decoder,
    prompt: Int[AnyArray, "batch length"],
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: PRNGKeyArray | None = None,
    prompt_lengths: Int[AnyArray, "batch"] | None = None,
    stop_ids: tuple[int, ...] = (),
    pad_id: int = 0,
    num_draft_tokens: int = 0,
) -> Iterator[np.ndarray]:
    """The tokens of `generate` one by one, each an array with one id per row, as soon as they are known."""
    # now, not at the first token
    lengths = _check_arguments(model, prompt, prompt_lengths, max_new_tokens, sampler, key, num_draft_tokens)
    prompt = jnp.asarray(prompt)
    if num_draft_tokens > 0:
        return stream_speculative(model, prompt, lengths, max_new_tokens, num_draft_tokens, tuple(stop_ids), pad_id)
    return _stream(model, prompt, lengths, max_new_tokens, sampler, key, tuple(stop_ids), pad_id)


def _stream(model, prompt, lengths, max_new_tokens, sampler, key, stop_ids, pad_id):
    row = _first(model, prompt, lengths, max_new_tokens, sampler, _at_step(key, 0), stop_ids)
    for step in range(1, max_new_tokens + 1):
        yield np.asarray(row.token)
        if step == max_new_tokens or bool(jnp.all(row.done)):
            return
        row = _next(model, row, sampler, _at_step(key, step), stop_ids, pad_id)


def _prefill(model, prompt, lengths, max_new_tokens, sampler, key, stop_ids) -> _State:
    """Prefill, and the first new token."""
    config, layout = model.config, model.execution.layout
    batch, width = prompt.shape
    cache = init_cache(config, batch, width + max_new_tokens, dtype=model.execution.precision.compute, layout=layout)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    positions = jnp.where(index < lengths[:, None], index, -1)
    hidden, cache, _ = model.run(prompt, positions=positions, cache=cache, cache_is_empty=True)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    token = sample_token(sampler, model.logits(last)[:, 0], key)
    return _State(token=token, done=is_stop(token, stop_ids), cache=cache)


def _decode_step(model, row: _State, sampler, key, stop_ids, pad_id) -> _State:
    """Feed the token that was chosen, choose the next. Rows that have stopped store nothing more."""
    positions = jnp.where(row.done, -1, row.cache.length)[:, None]
    hidden, cache, _ = model.run(row.token[:, None], positions=positions, cache=row.cache)
    token = sample_token(sampler, model.logits(hidden)[:, 0], key)
    token = jnp.where(row.done, pad_id, token)
    return _State(token=token, done=row.done | is_stop(token, stop_ids), cache=cache)


_first = eqx.filter_jit(_prefill)


@eqx.filter_jit(donate="all-except-first")
def _next(model, row, sampler, key, stop_ids, pad_id) -> _State:
    return _decode_step(model, row, sampler, key, stop_ids, pad_id)


@eqx.filter_jit
def _generate(model, prompt, lengths, max_new_tokens, sampler, key, stop_ids, pad_id):
    row = _prefill(model, prompt, lengths, max_new_tokens, sampler, _at_step(key, 0), stop_ids)
    tokens = jnp.full((prompt.shape[0], max_new_tokens), pad_id, jnp.int32).at[:, 0].set(row.token)

    def going(state):
        step, row, _ = state
        return (step < max_new_tokens) & ~jnp.all(row.done)

    def body(state):
        step, row, tokens = state
        row = _decode_step(model, row, sampler, _at_step(key, step), stop_ids, pad_id)
        return step + 1, row, tokens.at[:, step].set(row.token)

    return jax.lax.while_loop(going, body, (jnp.int32(1), row, tokens))[2]


def _at_step(key: PRNGKeyArray | None, step: Any) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, step)


def _check_arguments(model, prompt, lengths, max_new_tokens, sampler, key, num_draft_tokens) -> Array:
    """The prompts' lengths, after everything that can be known before compiling was checked."""
    check_integer("generate: max_new_tokens", max_new_tokens)
    check_draft(model, num_draft_tokens, sampler)
    check(isinstance(sampler, Greedy) or key is not None, f"{sampler} draws at random: pass key=jax.random.key(seed).")
    batch, width = prompt.shape
    check(width > 0, "generate: prompt has length 0; give at least one token, such as the tokenizer's bos_id.")
    positions = model.config.positions
    room = positions.max_positions if isinstance(positions, LearnedPositions) else None
    if room is not None and width + max_new_tokens > room:
        raise ConfigError(
            f"generate: prompt of {width} + max_new_tokens={max_new_tokens} exceed its {room} learned positions."
        )
    if not isinstance(prompt, Tracer):
        low, high = int(np.min(prompt)), int(np.max(prompt))
        good = low >= 0 and high < model.config.vocab_size
        check(
            good, f"generate: prompt holds ids from {low} to {high}; they must be 0 to {model.config.vocab_size - 1}."
        )
    if lengths is None:
        return jnp.full((batch,), width, jnp.int32)
    if not isinstance(lengths, Tracer):
        good = int(np.min(lengths)) >= 1 and int(np.max(lengths)) <= width
        check(good, f"generate: prompt_lengths={np.asarray(lengths).tolist()} must be from 1 to {width}.")
    return jnp.asarray(lengths, jnp.int32)
