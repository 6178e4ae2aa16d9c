"""Text generation: one compiled loop on the device, or a stream of tokens."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int, Integer, PRNGKeyArray

from eqx_decoders.core.auto_jit import bounded_jit, concrete
from eqx_decoders.core.input_checks import as_int32, check_inputs, check_shapes
from eqx_decoders.core.sampling import DrawSettings, Greedy, Sampler, choose_tokens, is_stop, threefry_key
from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.merge import check_tokens, without_placeholders
from eqx_decoders.errors import ConfigError, check, check_integer
from eqx_decoders.inference.decode_step import decode_step, prefill_prompts
from eqx_decoders.inference.draft_state import DraftState, VerifiedStep
from eqx_decoders.inference.drafters import Drafter, with_models
from eqx_decoders.inference.mtp_draft import MTPDrafter
from eqx_decoders.inference.unstack import default_cache_format, inference_cache, unstack_layers
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.caches import abstract_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed


class GenerationOptions(TypedDict, total=False):
    """Arguments of `generate` and `stream` that are rarely given."""

    prompt_lengths: Integer[AnyArray, "batch"] | None
    stop_ids: tuple[int, ...] | None
    drafts: Drafter | None
    num_draft_tokens: int
    media: Media | None
    cache_dtype: DTypeLike | CacheFormat | None


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
    - `drafts`: drafter whose tokens the model verifies, such as `DraftModel(model=smaller)`: the same tokens, but for
        rounding, in fewer steps. Not one that drafts on the host, as `PromptLookup` does for the engine.
    - `num_draft_tokens`: in place of `drafts`: `MTPDrafter(num_tokens=…)`, the model's multi-token prediction.
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
    request = _Request.create(model, prompt, max_new_tokens, sampler, key, options)
    tokens, _ = _generate(unstack_layers(model), request, np.asarray(pad_id, np.int32))
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
    request = _Request.create(model, prompt, max_new_tokens, sampler, key, options)
    return _stream(unstack_layers(model), request, np.asarray(pad_id, np.int32))


def bucket(length: int) -> int:
    """Round up to one of 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, …: four an octave."""
    if length <= 64:
        return max(8, 1 << (length - 1).bit_length())
    step = max(64, 1 << ((length - 1).bit_length() - 3))
    return -(-length // step) * step


class _Rules(eqx.Module):
    """How tokens are chosen after prompts of any length, and when a row ends.

    **Arguments:**

    - `new`: number of new tokens.
    - `settings`: settings of draws; None for greedy decoding.
    - `drafter`: what drafts tokens for each step, if anything does.
    """

    new: Int[AnyArray, ""]
    settings: DrawSettings | None
    key: PRNGKeyArray | None
    stop_ids: Int[AnyArray, "stops"]
    drafter: Drafter | None

    def choose(
        self, logits: Float32[Array, "batch columns vocab"], count: Int[Array, "batch"]
    ) -> Int[Array, "batch columns"]:
        """Return the tokens of each row that follow its first `count` ones."""
        batch, columns, vocab = logits.shape
        keys = index = None
        if self.key is not None:
            of_row = partial(jax.random.fold_in, threefry_key(self.key))
            keys = jnp.repeat(jax.vmap(of_row)(jnp.arange(batch)), columns, axis=0)
            index = (count[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
        return choose_tokens(logits.reshape(-1, vocab), self.settings, keys, index).reshape(batch, columns)


class _Request(eqx.Module):
    """Arguments of `generate`, as arrays of few shapes.

    **Arguments:**

    - `prompt`, `lengths`: the prompts, padded to a bucket, and their numbers of tokens.
    - `room`: length of caches: a bucket for padded prompts and new tokens.
    - `cache_format`: format of keys and values in caches.
    """

    prompt: Int[AnyArray, "batch length"]
    lengths: Int[AnyArray, "batch"]
    rules: _Rules
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
        options: GenerationOptions,
    ) -> "_Request":
        """Check everything that can be known before compiling."""
        model.config.check_logits("generate()")
        for name in options.keys() - GenerationOptions.__annotations__.keys():
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        cache_dtype, media = options.get("cache_dtype"), options.get("media")
        drafts, num_draft_tokens = options.get("drafts"), options.get("num_draft_tokens", 0)
        lengths, stop_ids = options.get("prompt_lengths"), options.get("stop_ids")
        cache_format = default_cache_format(model.execution) if cache_dtype is None else CacheFormat.of(cache_dtype)
        check_integer("generate: max_new_tokens", new)
        settings = _settings(model, sampler, key)
        if not hasattr(prompt, "shape"):
            rule = "generate: media belongs to an array of prompts, the one that Media.create was called with"
            check(media is None, f"{rule}: pad lists on the right, and give prompt_lengths.")
            prompt, lengths = _from_lists(prompt, lengths)
        elif media is not None:
            check_tokens(prompt, media)
            plain = num_draft_tokens == 0 and drafts is None
            check(plain, "generate: num_draft_tokens > 0 or drafts with media: drafts see no images. Leave them out.")
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
        _check_ids(model, known, counts, media)
        longest = width if counts is None else int(counts.max())
        _check_positions(model, longest, new)
        stops = tuple(model.generation_config.stop_ids if stop_ids is None else stop_ids)
        stops = as_int32("generate: stop_ids", stops) if stops else np.zeros(0, np.int32)
        if known is None:  # traced, or of other processes: used as it is
            room = width + new
        else:
            padded = bucket(longest)
            prompt = np.zeros((rows, padded), np.int32)
            prompt[:, :longest] = known[:, :longest]
            room = bucket(padded + new)
            media = None if media is None else media.cut(longest).padded(padded)
        if cache_format.scale_block is not None:  # its blocks must divide the heads
            abstract_cache(model.config, rows, room, dtype=cache_format)
        drafter = _drafter(model, drafts, num_draft_tokens)
        rules = _Rules(np.asarray(new, np.int32), settings, None if settings is None else key, stops, drafter)
        return cls(prompt, lengths, rules, media, room, cache_format)


def _settings(model: Decoder, sampler: Sampler | None, key: PRNGKeyArray | None) -> DrawSettings | None:
    """Return the settings of draws, by default as the model was published; None for greedy decoding."""
    config = model.generation_config
    if sampler is None:
        sampler = config.sampler() if config.do_sample else Greedy()
    drawable = isinstance(sampler, Greedy) or key is not None
    check(drawable, f"{sampler} draws at random: pass key=jax.random.key(seed), or sampler=Greedy().")
    return DrawSettings.of(sampler)


def _drafter(model: Decoder, drafts: Drafter | None, num_draft_tokens: int) -> Drafter | None:
    """Return the drafter, for the model alone; None for none."""
    check_integer("generate: num_draft_tokens", num_draft_tokens, minimum=0)
    if num_draft_tokens > 0:
        check(drafts is None, f"generate: num_draft_tokens={num_draft_tokens} and drafts exclude each other: give one.")
        drafter = MTPDrafter(num_tokens=num_draft_tokens)
        drafter.check_model(model, "generate: num_draft_tokens")
        return drafter
    if drafts is None:
        return None
    good = isinstance(drafts, Drafter) and drafts.find([0]) is None
    check(good, f"generate: drafts={drafts} must draft on the device, as DraftModel and MTPDrafter do.")
    drafts.check_model(model)
    return with_models(unstack_layers, drafts)


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


def _check_ids(model: Decoder, prompt: Any, lengths: Any, media: Media | None) -> None:
    """Raise ConfigError for ids that the model does not have, where prompts and lengths are known."""
    if prompt is not None and lengths is not None:
        index = np.arange(prompt.shape[1])[None]
        real = np.where(index < lengths[:, None], index, -1)
        ids = prompt if media is None else without_placeholders(prompt, media)
        check_inputs(model.config, ids, real, name="generate: prompt")


def _check_positions(model: Decoder, longest: int, new: int) -> None:
    """Raise ConfigError beyond the last learned position; warn beyond the length that a model was trained on."""
    text = f"generate: prompt of {longest} + max_new_tokens={new}"
    positions = model.config.positions
    if isinstance(positions, LearnedPositions) and longest + new > positions.max_positions:
        raise ConfigError(f"{text} exceed its {positions.max_positions} learned positions.")
    trained = model.trained_positions
    if trained is not None and longest + new > trained:
        warnings.warn(f"{text} are more than the {trained} positions that the model was trained on.", stacklevel=4)


class _GenerationState(eqx.Module):
    """State of the decode loop.

    **Arguments:**

    - `tokens`, `count`: new tokens of each row, followed by `pad_id`, and their number.
    - `done`: whether a row has ended.
    - `steps`: forward passes of each row after its prompt: one per token, or fewer with drafts.
    - `drafts`: state of the drafter, if there is one.
    """

    tokens: Int[Array, "batch new"]
    count: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    steps: Int[Array, "batch"]
    cache: Any  # a Cache: `run` returns one where it is given one
    drafts: DraftState | None

    def extended(self, rules: _Rules, tokens: Int[Array, "batch columns"], accepted: Int[Array, "batch"]) -> Any:
        """Append the first `accepted` tokens of each row, up to a stop, itself included, or to the last new token."""
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        stop = is_stop(tokens, rules.stop_ids) & (index < accepted[:, None])
        ends = jnp.any(stop, axis=1)
        new = jnp.where(ends, jnp.argmax(stop, axis=1).astype(jnp.int32) + 1, accepted)
        new = jnp.minimum(new, rules.new - self.count)
        where = jnp.where(index < new[:, None], self.count[:, None] + index, self.tokens.shape[1])
        rows, count = jnp.arange(tokens.shape[0])[:, None], self.count + new
        written = self.tokens.at[rows, where].set(tokens, mode="drop")
        done = self.done | ends | (count >= rules.new)
        return dataclasses.replace(self, tokens=written, count=count, done=done)


def _stream(model: Decoder, request: _Request, pad_id: np.ndarray) -> Iterator[np.ndarray]:
    """Yield tokens as soon as all rows have them. A step returns the few that are next; rows may be further on."""
    (state, shown), yielded = _first(model, request, pad_id), 0
    while True:
        tokens, count, done = jax.device_get(shown)
        ready = int(np.max(count) if np.all(done) else np.min(count[~done]))
        begin = min(yielded, state.tokens.shape[1] - tokens.shape[1])  # as `dynamic_slice` has it
        if ready > begin + tokens.shape[1]:  # the slowest row has ended: the others are known to be ahead of it
            tokens, begin = jax.device_get(_all_tokens(model, state)), 0
        yield from tokens.T[yielded - begin : ready - begin].copy()
        if np.all(done):
            return
        yielded = max(yielded, ready)
        state, shown = _next((model, request.rules, np.asarray(yielded, np.int32)), state)


@typed
def _prefill(model: Decoder, request: _Request, pad_id: Int[AnyArray, ""]) -> _GenerationState:
    """Run the prompts, choose the first new token, and draft those after it."""
    rules, lengths, prompt = request.rules, jnp.asarray(request.lengths), jnp.asarray(request.prompt)
    batch, width = prompt.shape
    sizes = batch, request.room, request.cache_format
    cache = inference_cache(model, *sizes)
    hidden, cache, logits = prefill_prompts(model, prompt, lengths, cache, media=request.media)
    zeros, drafts = jnp.zeros((batch,), jnp.int32), None
    token = rules.choose(logits[:, None], zeros)
    if rules.drafter is not None:
        index = jnp.arange(width, dtype=jnp.int32)[None]
        following = jnp.where(index == lengths[:, None] - 1, token, jnp.roll(prompt, -1, axis=1))
        read = VerifiedStep(prompt, jnp.where(index < lengths[:, None], index, -1), hidden, following, zeros, lengths)
        drafts = rules.drafter.empty(model, *sizes)
        assert drafts is not None
        drafts = rules.drafter.step(model, drafts, read, cache_is_empty=True)
    tokens = jnp.full((batch, request.room - width), pad_id, jnp.int32)
    state = _GenerationState(tokens, zeros, jnp.zeros((batch,), bool), zeros, cache, drafts)
    return state.extended(rules, token, jnp.ones_like(zeros))


@typed
def _decode(model: Decoder, rules: _Rules, state: _GenerationState) -> _GenerationState:
    """Compute one step. Rows that have ended store nothing more."""
    tokens = jnp.take_along_axis(state.tokens, state.count[:, None] - 1, axis=1)
    if state.drafts is not None:
        tokens = jnp.concatenate([tokens, state.drafts.tokens], axis=1)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(state.done[:, None], -1, state.cache.length[:, None] + index)
    choose = lambda logits: (rules.choose(logits, state.count), None)  # noqa: E731
    cache, verified, _ = decode_step(model, state.cache, tokens, positions, choose)
    drafts = state.drafts
    if rules.drafter is not None and drafts is not None:
        drafts = rules.drafter.step(model, drafts, verified)
    steps = state.steps + (~state.done).astype(jnp.int32)
    state = dataclasses.replace(state, cache=cache, drafts=drafts, steps=steps)
    return state.extended(rules, verified.following, verified.num_accepted)


def _shown(model: Decoder, state: _GenerationState, begin: Int[AnyArray, ""]) -> tuple[Array, Array, Array]:
    """Return tokens of all rows from `begin` on, as many as a step adds, and the rows' counts and ends."""
    width = min(1 if state.drafts is None else 1 + state.drafts.tokens.shape[1], state.tokens.shape[1])
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, begin, width, axis=1)
    return jax.tree.map(model.execution.layout.replicate, (tokens, state.count, state.done))


@bounded_jit
def _all_tokens(model: Decoder, state: _GenerationState) -> Int[Array, "batch new"]:
    return model.execution.layout.replicate(state.tokens)


@bounded_jit
def _first(model: Decoder, request: _Request, pad_id: Int[AnyArray, ""]) -> tuple[_GenerationState, Any]:
    state = _prefill(model, request, pad_id)
    return state, _shown(model, state, jnp.zeros((), jnp.int32))


@partial(bounded_jit, donate="all-except-first")
def _next(inputs: tuple[Decoder, _Rules, Int[AnyArray, ""]], state: _GenerationState) -> tuple[_GenerationState, Any]:
    model, rules, begin = inputs
    state = _decode(model, rules, state)
    return state, _shown(model, state, begin)


@bounded_jit
def _generate(
    model: Decoder, request: _Request, pad_id: Int[AnyArray, ""]
) -> tuple[Int[Array, "batch new"], Int[Array, "batch"]]:
    """Run the loop until all rows have ended; returns their tokens, and the steps of each."""
    state = _last_state(model, request, pad_id)
    return jax.tree.map(model.execution.layout.replicate, (state.tokens, state.steps))


@typed
def _last_state(model: Decoder, request: _Request, pad_id: Int[AnyArray, ""]) -> _GenerationState:
    state, unfinished = _prefill(model, request, pad_id), lambda state: ~jnp.all(state.done)
    return jax.lax.while_loop(unfinished, lambda state: _decode(model, request.rules, state), state)
