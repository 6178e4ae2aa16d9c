"""Text generation: one compiled loop on the device, or a stream of tokens."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Integer, PRNGKeyArray

from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.core.input_checks import as_int32, check_inputs, check_shapes
from eqx_decoders.core.sampling import Greedy, Sampler, SamplerArrays, is_stop, sample_token
from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.merge import check_tokens, without_placeholders
from eqx_decoders.errors import ConfigError, check, check_integer
from eqx_decoders.inference.speculative import check_draft, speculate, stream_speculative
from eqx_decoders.inference.unstack import default_cache_format, inference_cache, unstack_layers
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed


class _GenerationState(eqx.Module):
    """Where generation stands: the token of each row that comes next, and what the rows remember."""

    token: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    cache: Any  # a Cache: `run` returns one where it is given one


def generate(
    model: Decoder,
    prompt: Integer[AnyArray, "batch length"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKeyArray | None = None,
    prompt_lengths: Integer[AnyArray, "batch"] | None = None,
    stop_ids: tuple[int, ...] | None = None,
    pad_id: int = 0,
    num_draft_tokens: int = 0,
    media: Media | None = None,
    cache_dtype: DTypeLike | CacheFormat | None = None,
) -> Int[Array, "batch new"]:
    """Continue every prompt by `max_new_tokens` tokens.

    **Arguments:**

    - `prompt`: ids: lists, which may differ in length, or an array, padded on the right.
    - `prompt_lengths`: tokens of each row of an array that count; default all.
    - `sampler`: `Greedy()` or `Sample(...)`; the latter needs `key`. The same key gives the same tokens. Default: as
        `model.generation_config` says, else greedy.
    - `stop_ids`: a row ends with one of these; what follows is `pad_id`. Default: those of `model.generation_config`.
    - `num_draft_tokens`: how many tokens multi-token prediction drafts at each step, for the model to verify:
        the same tokens in fewer steps, greedily.
    - `media`: images, videos and audio, made by `Media.create` for an array of prompts. They are encoded once.
    - `cache_dtype`: how keys and values are stored, as `init_cache` has it; None: in the dtype of activations, or on
        CPU, where that is faster, in float32.

    **Returns:**

    The new tokens. One program: prefill, then a loop on the device that ends when all rows have stopped. Prompts and
    budgets are rounded up to few sizes (`bucket`), so few programs are compiled. Raises ConfigError for arguments that
    do not fit the model.

    On a mesh the rows are split over the axes that divide them; the others compute the same rows. In a run of several
    processes all of them must call this, with the same arguments, and all get the tokens.
    """
    options = (prompt_lengths, stop_ids, num_draft_tokens, media, cache_dtype)
    asked = _Request.create(model, prompt, max_new_tokens, sampler, key, *options)
    model = unstack_layers(model)
    if num_draft_tokens > 0:
        tokens = speculate(model, *asked.draft, num_draft_tokens, asked.stop_ids, pad_id, asked.cache_format).tokens
    else:
        tokens = _generate(model, asked, pad_id)
    if tokens.shape[1] == max_new_tokens:
        return tokens
    known = concrete(tokens)  # cut on the host: on the device each length would be a program
    return tokens[:, :max_new_tokens] if known is None else jax.device_put(known[:, :max_new_tokens].copy())


def stream(
    model: Decoder,
    prompt: Integer[AnyArray, "batch length"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKeyArray | None = None,
    prompt_lengths: Integer[AnyArray, "batch"] | None = None,
    stop_ids: tuple[int, ...] | None = None,
    pad_id: int = 0,
    num_draft_tokens: int = 0,
    media: Media | None = None,
    cache_dtype: DTypeLike | CacheFormat | None = None,
) -> Iterator[np.ndarray]:
    """The tokens of `generate` one by one, each an array with one id per row, as soon as they are known."""
    # now, not at the first token
    options = (prompt_lengths, stop_ids, num_draft_tokens, media, cache_dtype)
    asked = _Request.create(model, prompt, max_new_tokens, sampler, key, *options)
    model = unstack_layers(model)
    if num_draft_tokens > 0:
        return stream_speculative(model, *asked.draft, num_draft_tokens, asked.stop_ids, pad_id, asked.cache_format)
    return _stream(model, asked, max_new_tokens, pad_id)


def bucket(length: int) -> int:
    """The next of 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, ...: four an octave."""
    if length <= 64:
        return max(8, 1 << (length - 1).bit_length())
    step = max(64, 1 << ((length - 1).bit_length() - 3))
    return -(-length // step) * step


class _Request(eqx.Module):
    """What `generate` is asked for: arrays of few shapes.

    **Arguments:**

    - `prompt`, `lengths`: the prompts, padded to a bucket, and how many tokens of each count.
    - `new`: tokens to make.
    - `room`: what caches have room for: a bucket for padded prompts and new tokens.
    - `cache_format`: how caches store keys and values.
    """

    prompt: Int[AnyArray, "batch length"]
    lengths: Int[AnyArray, "batch"]
    new: Int[AnyArray, ""]
    sampler: SamplerArrays | None
    key: PRNGKeyArray | None
    stop_ids: Int[AnyArray, "stops"]
    media: Media | None
    room: int = eqx.field(static=True)
    cache_format: CacheFormat = eqx.field(static=True)

    @classmethod
    def create(
        cls, model, prompt, new, sampler, key, lengths, stop_ids, num_draft_tokens, media=None, cache_dtype=None
    ) -> "_Request":
        """Check everything that can be known before compiling."""
        kept = default_cache_format(model.execution) if cache_dtype is None else CacheFormat.of(cache_dtype)
        check_integer("generate: max_new_tokens", new)
        config = model.generation_config
        if sampler is None:
            sampler = config.sampler() if config.do_sample and num_draft_tokens == 0 else Greedy()
        check_draft(model, num_draft_tokens, sampler)
        drawn = isinstance(sampler, Greedy) or key is not None
        check(drawn, f"{sampler} draws at random: pass key=jax.random.key(seed), or sampler=Greedy().")
        if not hasattr(prompt, "shape"):
            rule = "generate: media belongs to an array of prompts, the one that Media.create was called with"
            check(media is None, f"{rule}: pad lists on the right, and give prompt_lengths.")
            prompt, lengths = _from_lists(prompt, lengths)
        elif media is not None:
            check_tokens(prompt, media)
            check(num_draft_tokens == 0, "generate: num_draft_tokens > 0 with media: drafts see no images. Leave it 0.")
        prompt, lengths = as_int32("generate: prompt", prompt), as_int32("generate: prompt_lengths", lengths)
        rows, width = check_shapes(model.config, prompt, name="generate: prompt")
        check(width > 0, "generate: prompt has length 0; give at least one token, such as the tokenizer's bos_id.")
        known = concrete(prompt)
        if lengths is None:
            lengths = np.full((rows,), width, np.int32)
        counts = concrete(lengths)
        if counts is not None:
            good = counts.shape == (rows,) and bool(np.all((counts >= 1) & (counts <= width)))
            check(good, f"generate: prompt_lengths={counts.tolist()} must be {rows} numbers from 1 to {width}.")
        if known is not None and counts is not None:
            index = np.arange(width)[None]
            real = np.where(index < counts[:, None], index, -1)
            ids = known if media is None else without_placeholders(known, media)
            check_inputs(model.config, ids, real, name="generate: prompt")
        longest = width if counts is None else int(counts.max())
        _check_positions(model, longest, new)
        stops = tuple(config.stop_ids if stop_ids is None else stop_ids)
        stops = as_int32("generate: stop_ids", stops) if stops else np.zeros(0, np.int32)
        if known is None:  # traced, or of other processes: taken as it is
            room = width + new
        else:
            padded = bucket(longest)
            prompt = np.zeros((rows, padded), np.int32)
            prompt[:, :longest] = known[:, :longest]
            room = bucket(padded + new)
            media = None if media is None else media.cut(longest).padded(padded)
        numbers = SamplerArrays.of(sampler)
        return cls(prompt, lengths, np.asarray(new, np.int32), numbers, key, stops, media, room, kept)

    @property
    def draft(self):
        """The arguments of speculative decoding."""
        return self.prompt, self.lengths, self.new, self.room


def _from_lists(prompt: Sequence[Sequence[int]], lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ids as an array, padded on the right, and their lengths."""
    check(lengths is None, "generate: prompt_lengths belongs to a padded array; lists have lengths of their own.")
    rows = [np.asarray(row) for row in prompt]
    good = len(rows) > 0 and all(row.ndim == 1 and len(row) > 0 and row.dtype.kind in "iu" for row in rows)
    check(good, f"generate: prompt={str(prompt)[:60]} must hold lists of token ids, each with at least one.")
    padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded, np.asarray([len(row) for row in rows], np.int32)


def _check_positions(model: Decoder, longest: int, new: int) -> None:
    """Learned positions end; others go on, but beyond what a model was trained on its text gets worse."""
    text = f"generate: prompt of {longest} + max_new_tokens={new}"
    positions = model.config.positions
    if isinstance(positions, LearnedPositions) and longest + new > positions.max_positions:
        raise ConfigError(f"{text} exceed its {positions.max_positions} learned positions.")
    trained = model.trained_positions
    if trained is not None and longest + new > trained:
        warnings.warn(f"{text} are more than the {trained} positions that the model was trained on.", stacklevel=4)


def _stream(model, asked, max_new_tokens, pad_id):
    row = _first(model, asked)
    for step in range(1, max_new_tokens + 1):
        token, done = jax.device_get((row.token, row.done))
        yield token
        if step == max_new_tokens or done.all():
            return
        here = asked.sampler, asked.key, np.asarray(step, np.int32), asked.stop_ids, np.asarray(pad_id, np.int32)
        row = _next((model, *here), row)


@typed
def _prefill(model: Decoder, asked: _Request) -> _GenerationState:
    """Prefill, and the first new token."""
    lengths = asked.lengths
    batch, width = asked.prompt.shape
    cache = inference_cache(model, batch, asked.room, asked.cache_format)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    positions = jnp.where(index < lengths[:, None], index, -1)
    options: Any = dict(media=asked.media, cache_is_empty=True, contiguous=True)
    hidden, cache, _ = model.run(asked.prompt, positions, cache=cache, **options)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    token = sample_token(asked.sampler, model.logits(last)[:, 0], _at_step(asked.key, 0))
    return _GenerationState(token=token, done=is_stop(token, asked.stop_ids), cache=cache)


@typed
def _decode_step(model: Decoder, sampler, key, step, stop_ids, pad_id, row: _GenerationState) -> _GenerationState:
    """Feed the token that was chosen, choose the next. Rows that have stopped store nothing more."""
    positions = jnp.where(row.done, -1, row.cache.length)[:, None]
    hidden, cache, _ = model.run(row.token[:, None], positions=positions, cache=row.cache)
    token = sample_token(sampler, model.logits(hidden)[:, 0], _at_step(key, step))
    token = jnp.where(row.done, pad_id, token)
    return _GenerationState(token=token, done=row.done | is_stop(token, stop_ids), cache=cache)


def _readable(model: Decoder, row: _GenerationState) -> _GenerationState:
    """The state, with what the host reads of it on every device."""
    replicate = model.execution.layout.replicate
    return dataclasses.replace(row, token=replicate(row.token), done=replicate(row.done))


@eqx.filter_jit
def _first(model: Decoder, asked: _Request) -> _GenerationState:
    return _readable(model, _prefill(model, asked))


@eqx.filter_jit(donate="all-except-first")
def _next(inputs: tuple[Decoder, Any, Any, Any, Any, Any], row: _GenerationState) -> _GenerationState:
    return _readable(inputs[0], _decode_step(*inputs, row))


@eqx.filter_jit
def _generate(model: Decoder, asked: _Request, pad_id: int) -> Int[Array, "batch new"]:
    return model.execution.layout.replicate(_all_tokens(model, asked, pad_id))


@typed
def _all_tokens(model: Decoder, asked: _Request, pad_id: int) -> Int[Array, "batch new"]:
    row = _prefill(model, asked)
    batch, width = asked.prompt.shape
    tokens = jnp.full((batch, asked.room - width), pad_id, jnp.int32).at[:, 0].set(row.token)

    def going(state):
        step, row, _ = state
        return (step < asked.new) & ~jnp.all(row.done)

    def body(state):
        step, row, tokens = state
        row = _decode_step(model, asked.sampler, asked.key, step, asked.stop_ids, pad_id, row)
        return step + 1, row, tokens.at[:, step].set(row.token)

    return jax.lax.while_loop(going, body, (jnp.int32(1), row, tokens))[2]


def _at_step(key: PRNGKeyArray | None, step: Any) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, step)
