"""Text generation: one compiled loop on the device, or a stream of tokens."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Integer, PRNGKeyArray

from eqx_decoders.context import Promises
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


class GenerationOptions(TypedDict, total=False):
    """Arguments of `generate` and `stream` that are rarely given."""

    prompt_lengths: Integer[AnyArray, "batch"] | None
    stop_ids: tuple[int, ...] | None
    num_draft_tokens: int
    media: Media | None
    cache_dtype: DTypeLike | CacheFormat | None


class _GenerationState(eqx.Module):
    """State of the decode loop: the next token of each row, and the cache."""

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
    pad_id: int = 0,
    **options: Unpack[GenerationOptions],
) -> Int[Array, "batch new"]:
    """Continue every prompt by `max_new_tokens` tokens.

    **Arguments:**

    - `prompt`: ids: lists, which may differ in length, or an array, padded on the right.
    - `prompt_lengths`: tokens of each row of an array that count; default all.
    - `sampler`: `Greedy()` or `Sample(...)`; the latter needs `key`. The same key gives the same tokens. Default: as
        `model.generation_config` says, else greedy.
    - `stop_ids`: a row ends with one of these, followed by `pad_id`. Default: those of `model.generation_config`.
    - `num_draft_tokens`: number of tokens that multi-token prediction drafts at each step, for the model to verify: the
        same tokens in fewer steps, greedily.
    - `media`: images, videos and audio, made by `Media.create` for an array of prompts. They are encoded once.
    - `cache_dtype`: dtype of stored keys and values, as in `init_cache`; None: in the dtype of activations, or on
        CPU, where that is faster, in float32.

    **Returns:**

    The new tokens. One program: prefill, then a loop on the device that ends when all rows have stopped. Prompts and
    budgets are rounded up to few sizes (`bucket`), so few programs are compiled. Raises ConfigError for arguments that
    do not fit the model.

    On a mesh the rows are split over the axes that divide them; the others compute the same rows. In a run of several
    processes all of them must call this, with the same arguments, and all get the tokens.
    """
    request = _Request.create(model, prompt, max_new_tokens, sampler, key, **options)
    model = unstack_layers(model)
    if (count := options.get("num_draft_tokens", 0)) > 0:
        drafts = count, request.stop_ids, pad_id, request.cache_format
        tokens = speculate(model, *request.draft, *drafts).tokens
    else:
        tokens = _generate(model, request, pad_id)
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
    pad_id: int = 0,
    **options: Unpack[GenerationOptions],
) -> Iterator[np.ndarray]:
    """Yield the tokens of `generate` one by one, each an array with one id per row, as soon as they are known."""
    # errors are raised now, not at the first token
    request = _Request.create(model, prompt, max_new_tokens, sampler, key, **options)
    model = unstack_layers(model)
    if (count := options.get("num_draft_tokens", 0)) > 0:
        drafts = count, request.stop_ids, pad_id, request.cache_format
        return stream_speculative(model, *request.draft, *drafts)
    return _stream(model, request, max_new_tokens, pad_id)


def bucket(length: int) -> int:
    """Round up to one of 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, …: four an octave."""
    if length <= 64:
        return max(8, 1 << (length - 1).bit_length())
    step = max(64, 1 << ((length - 1).bit_length() - 3))
    return -(-length // step) * step


class _Request(eqx.Module):
    """Arguments of `generate`, as arrays of few shapes.

    **Arguments:**

    - `prompt`, `lengths`: the prompts, padded to a bucket, and their numbers of tokens.
    - `new`: number of new tokens.
    - `room`: length of caches: a bucket for padded prompts and new tokens.
    - `cache_format`: format of keys and values in caches.
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
        cls,
        model: Decoder,
        prompt: Any,
        new: int,
        sampler: Sampler | None,
        key: PRNGKeyArray | None,
        *,
        prompt_lengths: Any = None,
        stop_ids: tuple[int, ...] | None = None,
        num_draft_tokens: int = 0,
        media: Media | None = None,
        cache_dtype: DTypeLike | CacheFormat | None = None,
    ) -> "_Request":
        """Check everything that can be known before compiling."""
        lengths = prompt_lengths
        cache_format = default_cache_format(model.execution) if cache_dtype is None else CacheFormat.of(cache_dtype)
        check_integer("generate: max_new_tokens", new)
        config = model.generation_config
        if sampler is None:
            sampler = config.sampler() if config.do_sample and num_draft_tokens == 0 else Greedy()
        check_draft(model, num_draft_tokens, sampler)
        drawable = isinstance(sampler, Greedy) or key is not None
        check(drawable, f"{sampler} draws at random: pass key=jax.random.key(seed), or sampler=Greedy().")
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
        if known is None:  # traced, or of other processes: used as it is
            room = width + new
        else:
            padded = bucket(longest)
            prompt = np.zeros((rows, padded), np.int32)
            prompt[:, :longest] = known[:, :longest]
            room = bucket(padded + new)
            media = None if media is None else media.cut(longest).padded(padded)
        numbers = SamplerArrays.of(sampler)
        return cls(prompt, lengths, np.asarray(new, np.int32), numbers, key, stops, media, room, cache_format)

    @property
    def draft(self):
        """Return the arguments of speculative decoding."""
        return self.prompt, self.lengths, self.new, self.room


def _from_lists(prompt: Sequence[Sequence[int]], lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return lists of ids as an array, padded on the right, and their lengths."""
    check(lengths is None, "generate: prompt_lengths belongs to a padded array; lists have lengths of their own.")
    rows = [np.asarray(row) for row in prompt]
    good = len(rows) > 0 and all(row.ndim == 1 and len(row) > 0 and row.dtype.kind in "iu" for row in rows)
    check(good, f"generate: prompt={str(prompt)[:60]} must hold lists of token ids, each with at least one.")
    padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded, np.asarray([len(row) for row in rows], np.int32)


def _check_positions(model: Decoder, longest: int, new: int) -> None:
    """Raise ConfigError beyond the last learned position; warn beyond the length that a model was trained on."""
    text = f"generate: prompt of {longest} + max_new_tokens={new}"
    positions = model.config.positions
    if isinstance(positions, LearnedPositions) and longest + new > positions.max_positions:
        raise ConfigError(f"{text} exceed its {positions.max_positions} learned positions.")
    trained = model.trained_positions
    if trained is not None and longest + new > trained:
        warnings.warn(f"{text} are more than the {trained} positions that the model was trained on.", stacklevel=4)


def _stream(model, request, max_new_tokens, pad_id):
    row = _first(model, request)
    for step in range(1, max_new_tokens + 1):
        token, done = jax.device_get((row.token, row.done))
        yield token
        if step == max_new_tokens or done.all():
            return
        numbers = np.asarray(step, np.int32), request.stop_ids, np.asarray(pad_id, np.int32)
        row = _next((model, request.sampler, request.key, *numbers), row)


@typed
def _prefill(model: Decoder, request: _Request) -> _GenerationState:
    """Run the prompts, and choose the first new token."""
    lengths = request.lengths
    batch, width = request.prompt.shape
    cache = inference_cache(model, batch, request.room, request.cache_format)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    positions = jnp.where(index < lengths[:, None], index, -1)
    options: Any = dict(media=request.media, promises=Promises(cache_is_empty=True, contiguous=True))
    hidden, cache, _ = model.run(request.prompt, positions, cache=cache, **options)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    token = sample_token(request.sampler, model.logits(last)[:, 0], _at_step(request.key, 0))
    return _GenerationState(token=token, done=is_stop(token, request.stop_ids), cache=cache)


@typed
def _decode_step(model: Decoder, sampler, key, step, stop_ids, pad_id, row: _GenerationState) -> _GenerationState:
    """Run the last token, and choose the next. Rows that have stopped store nothing more."""
    positions = jnp.where(row.done, -1, row.cache.length)[:, None]
    hidden, cache, _ = model.run(row.token[:, None], positions=positions, cache=row.cache)
    token = sample_token(sampler, model.logits(hidden)[:, 0], _at_step(key, step))
    token = jnp.where(row.done, pad_id, token)
    return _GenerationState(token=token, done=row.done | is_stop(token, stop_ids), cache=cache)


def _readable(model: Decoder, row: _GenerationState) -> _GenerationState:
    """Return the state, with all that the host reads of it on every device."""
    replicate = model.execution.layout.replicate
    return dataclasses.replace(row, token=replicate(row.token), done=replicate(row.done))


@eqx.filter_jit
def _first(model: Decoder, request: _Request) -> _GenerationState:
    return _readable(model, _prefill(model, request))


@eqx.filter_jit(donate="all-except-first")
def _next(inputs: tuple[Decoder, Any, Any, Any, Any, Any], row: _GenerationState) -> _GenerationState:
    return _readable(inputs[0], _decode_step(*inputs, row))


@eqx.filter_jit
def _generate(model: Decoder, request: _Request, pad_id: int) -> Int[Array, "batch new"]:
    return model.execution.layout.replicate(_all_tokens(model, request, pad_id))


@typed
def _all_tokens(model: Decoder, request: _Request, pad_id: int) -> Int[Array, "batch new"]:
    row = _prefill(model, request)
    batch, width = request.prompt.shape
    tokens = jnp.full((batch, request.room - width), pad_id, jnp.int32).at[:, 0].set(row.token)

    def unfinished(state):
        step, row, _ = state
        return (step < request.new) & ~jnp.all(row.done)

    def body(state):
        step, row, tokens = state
        row = _decode_step(model, request.sampler, request.key, step, request.stop_ids, pad_id, row)
        return step + 1, row, tokens.at[:, step].set(row.token)

    return jax.lax.while_loop(unfinished, body, (jnp.int32(1), row, tokens))[2]


def _at_step(key: PRNGKeyArray | None, step: Any) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, step)
