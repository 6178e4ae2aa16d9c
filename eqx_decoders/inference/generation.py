"""Text generation: one compiled loop on the device, or a stream of tokens."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int, Integer, PRNGKeyArray

from eqx_decoders.core.auto_jit import bounded_jit, concrete
from eqx_decoders.core.input_checks import as_int32, as_key, check_inputs, check_shapes
from eqx_decoders.core.sampling import Greedy, Sample, Sampler, SamplingTensors, choose_tokens, is_stop, threefry_key
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
from eqx_decoders.sharding.explicit import run_with_auto_axes


def generate(
    model: Decoder,
    prompt: Integer[AnyArray, "batch length"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKeyArray | int | None = None,
    pad_id: int = 0,
    prompt_lengths: Integer[AnyArray, "batch"] | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    drafts: Drafter | None = None,
    num_draft_tokens: int = 0,
    media: Media | None = None,
    cache_dtype: DTypeLike | CacheFormat | None = None,
) -> Int[Array, "batch new"]:
    """Generate up to `max_new_tokens` tokens for each prompt.

    Runs one compiled program: prefill, then a loop on the device that ends when all sequences have stopped. Prompt
    lengths and `max_new_tokens` are padded to a small set of sizes (`bucket`) to limit the number of compilations.

    On a mesh, the batch is sharded over the mesh axes that divide it and replicated over the others. With several
    processes, all processes must call this function with the same arguments; all of them receive the tokens.

    **Arguments:**

    - `prompt`: token ids; lists, which may differ in length, or an array, padded on the right.
    - `max_new_tokens`: maximum number of new tokens per prompt.
    - `sampler`: `Greedy()` or `Sample(...)`. Default: the sampler of `model.generation_config`, which is greedy if
        `do_sample` is not set.
    - `key`: random key; required by `Sample`. The same key gives the same tokens.
    - `pad_id`: id that follows the stop id of a sequence.
    - `prompt_lengths`: number of tokens of each prompt, if `prompt` is an array. Default: all prompts are full.
    - `stop_ids`: a sequence ends with the first of these ids. Default: the stop ids of `model.generation_config`.
    - `drafts`: drafter for speculative decoding, such as `DraftModel(model=smaller)`. The tokens stay the same, except
        for rounding. It must run on the device; `PromptLookup` runs on the host and is supported only by the engine.
    - `num_draft_tokens`: shorthand for `drafts=MTPDrafter(num_tokens=…)`, the model's multi-token prediction.
    - `media`: images, videos and audio, created by `Media.create` for an array of prompts. They are encoded once.
    - `cache_dtype`: dtype of cached keys and values, as in `init_cache`. None: the compute dtype; on CPU float32, which
        is faster.

    **Returns:**

    The new tokens, `max_new_tokens` per prompt, with `pad_id` after a stop id. On a mesh they are replicated.

    Raises ConfigError if the arguments do not fit the model.
    """
    request = _Request.create(
        "generate",
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        key=key,
        pad_id=pad_id,
        prompt_lengths=prompt_lengths,
        stop_ids=stop_ids,
        drafts=drafts,
        num_draft_tokens=num_draft_tokens,
        media=media,
        cache_dtype=cache_dtype,
    )
    tokens = _generate(unstack_layers(model), request)
    if tokens.shape[1] == max_new_tokens:
        return tokens
    # Slice on the host: on the device, each length would compile a separate program.
    host_tokens = concrete(tokens)
    if host_tokens is None:
        return tokens[:, :max_new_tokens]
    new_tokens = host_tokens[:, :max_new_tokens].copy()
    return jax.make_array_from_callback(new_tokens.shape, tokens.sharding, lambda index: new_tokens[index])


def stream(
    model: Decoder,
    prompt: Integer[AnyArray, "batch length"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKeyArray | int | None = None,
    pad_id: int = 0,
    prompt_lengths: Integer[AnyArray, "batch"] | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    drafts: Drafter | None = None,
    num_draft_tokens: int = 0,
    media: Media | None = None,
    cache_dtype: DTypeLike | CacheFormat | None = None,
) -> Iterator[np.ndarray]:
    """Yield the new tokens one by one: arrays with one id per sequence, as soon as all running sequences have it.

    The tokens are those of `generate`, up to the last token of the longest sequence. With drafts, one step may yield
    several arrays.

    Takes the arguments of `generate`. Errors are raised by the call, not at the first token.
    """
    request = _Request.create(
        "stream",
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        key=key,
        pad_id=pad_id,
        prompt_lengths=prompt_lengths,
        stop_ids=stop_ids,
        drafts=drafts,
        num_draft_tokens=num_draft_tokens,
        media=media,
        cache_dtype=cache_dtype,
    )
    return _stream(unstack_layers(model), request)


def bucket(length: int) -> int:
    """Round a length up to one of 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, ….

    From 256 on, there are four sizes between a power of two and the next one.
    """
    if length <= 64:
        return max(8, 1 << (length - 1).bit_length())
    step = max(64, 1 << ((length - 1).bit_length() - 3))
    return -(-length // step) * step


class _DecodingRules(eqx.Module):
    """Arguments of `generate` that decide how tokens are chosen and when a sequence ends.

    **Arguments:**

    - `max_new_tokens`: maximum number of new tokens.
    - `sampling`: sampling parameters; None for greedy decoding.
    - `key`: random key; None for greedy decoding.
    - `stop_ids`: a sequence ends with the first of these ids.
    - `drafter`: drafter for speculative decoding; None without drafts.
    """

    max_new_tokens: Int[AnyArray, ""]
    sampling: SamplingTensors | None
    key: PRNGKeyArray | None
    stop_ids: Int[AnyArray, "stops"]
    drafter: Drafter | None

    def choose(
        self, logits: Float32[Array, "batch columns vocab"], count: Int[Array, "batch"]
    ) -> Int[Array, "batch columns"]:
        """Choose the next tokens of each sequence, which has `count` new tokens so far, from their logits."""
        batch, columns, vocab = logits.shape
        keys = None
        index = None
        if self.key is not None:
            fold_in_sequence = partial(jax.random.fold_in, threefry_key(self.key))
            keys = jnp.repeat(jax.vmap(fold_in_sequence)(jnp.arange(batch)), columns, axis=0)
            index = (count[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
        return choose_tokens(logits.reshape(-1, vocab), self.sampling, keys, index).reshape(batch, columns)


class _Request(eqx.Module):
    """Validated arguments of `generate`, padded to bucket sizes.

    **Arguments:**

    - `prompt`, `lengths`: the prompts, padded to a bucket, and their numbers of tokens.
    - `rules`: how tokens are chosen and when a sequence ends.
    - `media`: images, videos and audio of the prompts.
    - `cache_length`: number of slots per sequence in the cache: a bucket for the padded prompt and the new tokens.
    - `cache_format`: format of cached keys and values.
    - `pad_id`: id after the last token of a sequence.
    """

    prompt: Int[AnyArray, "batch length"]
    lengths: Int[AnyArray, "batch"]
    rules: _DecodingRules
    media: Media | None
    pad_id: Int[AnyArray, ""]
    cache_length: int = eqx.field(static=True)
    cache_format: CacheFormat = eqx.field(static=True)

    @classmethod
    def create(
        cls,
        function: str,
        model: Decoder,
        prompt: Any,
        *,
        max_new_tokens: int,
        sampler: Sampler | None = None,
        key: PRNGKeyArray | int | None = None,
        pad_id: int = 0,
        prompt_lengths: Any = None,
        stop_ids: Sequence[int] | None = None,
        drafts: Drafter | None = None,
        num_draft_tokens: int = 0,
        media: Media | None = None,
        cache_dtype: DTypeLike | CacheFormat | None = None,
    ) -> "_Request":
        """Validate and pad the arguments of `function`, "generate" or "stream", before anything is compiled."""
        model.config.check_logits(f"{function}()")
        lengths = prompt_lengths
        cache_format = default_cache_format(model.execution) if cache_dtype is None else CacheFormat.of(cache_dtype)
        check_integer(f"{function}: max_new_tokens", max_new_tokens)
        check_integer(f"{function}: pad_id", pad_id, minimum=-(2**31), maximum=2**31 - 1)
        typed_key: PRNGKeyArray | None = as_key(key, f"{function}: key")
        sampling = _sampling(function, model, sampler, typed_key)
        if not hasattr(prompt, "shape"):
            check(
                media is None,
                f"{function}: media needs prompt as an array, the array that Media.create was called with. Pad the "
                "lists on the right and pass prompt_lengths.",
            )
            prompt, lengths = _pad_lists(function, prompt, lengths)
        elif media is not None:
            check_tokens(prompt, media)
            check(
                num_draft_tokens == 0 and drafts is None,
                f"{function}: speculative decoding does not support media. Remove num_draft_tokens and drafts.",
            )
        prompt = as_int32(f"{function}: prompt", prompt)
        lengths = as_int32(f"{function}: prompt_lengths", lengths)
        rows, width = check_shapes(model.config, prompt, name=f"{function}: prompt")
        check(width > 0, f"{function}: prompt has length 0. Pass at least one token, such as the tokenizer's bos_id.")
        # None for traced arrays, and for arrays with shards in other processes: their values cannot be checked.
        concrete_prompt = concrete(prompt)
        if lengths is None:
            lengths = np.full((rows,), width, np.int32)
        concrete_lengths = concrete(lengths)
        if concrete_lengths is not None:
            check(
                concrete_lengths.shape == (rows,)
                and bool(np.all((concrete_lengths >= 1) & (concrete_lengths <= width))),
                f"{function}: prompt_lengths={concrete_lengths.tolist()} must be {rows} integers from 1 to {width}.",
            )
        _check_ids(function, model, concrete_prompt, concrete_lengths, media)
        max_length = width if concrete_lengths is None else int(concrete_lengths.max())
        _check_positions(function, model, max_length, max_new_tokens)
        stops = tuple(model.generation_config.stop_ids if stop_ids is None else stop_ids)
        stops = as_int32(f"{function}: stop_ids", stops) if stops else np.zeros(0, np.int32)
        if concrete_prompt is None:
            cache_length = width + max_new_tokens
        else:
            padded_length = bucket(max_length)
            prompt = np.zeros((rows, padded_length), np.int32)
            prompt[:, :max_length] = concrete_prompt[:, :max_length]
            cache_length = bucket(padded_length + max_new_tokens)
            media = None if media is None else media.cut(max_length).padded(padded_length)
        if cache_format.scale_block is not None:  # raise ConfigError unless the block size divides the heads
            abstract_cache(model.config, rows, cache_length, dtype=cache_format)
        rules = _DecodingRules(
            max_new_tokens=np.asarray(max_new_tokens, np.int32),
            sampling=sampling,
            key=None if sampling is None else typed_key,
            stop_ids=stops,
            drafter=_drafter(function, model, drafts, num_draft_tokens),
        )
        return cls(
            prompt=prompt,
            lengths=lengths,
            rules=rules,
            media=media,
            pad_id=np.asarray(pad_id, np.int32),
            cache_length=cache_length,
            cache_format=cache_format,
        )


def _sampling(
    function: str, model: Decoder, sampler: Sampler | None, key: PRNGKeyArray | int | None
) -> SamplingTensors | None:
    """Return the sampling parameters; None for greedy decoding. Default: those of `model.generation_config`."""
    config = model.generation_config
    if sampler is None:
        sampler = config.sampler() if config.do_sample else Greedy()
    check(
        isinstance(sampler, Greedy | Sample),
        f"{function}: sampler={sampler!r} must be a Greedy or a Sample, such as Greedy() or Sample(temperature=0.7).",
    )
    check(
        isinstance(sampler, Greedy) or key is not None,
        f"{function}: sampler={sampler} needs a random key. Pass key=jax.random.key(seed), or sampler=Greedy().",
    )
    return SamplingTensors.of(sampler)


def _pad_lists(function: str, prompt: Sequence[Sequence[int]], lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return lists of ids as an array, padded on the right, and the lengths of the lists."""
    check(
        lengths is None,
        f"{function}: prompt_lengths is used only if prompt is an array, but prompt is a list. Remove prompt_lengths.",
    )
    rows = [np.asarray(row) for row in prompt]
    check(
        len(rows) > 0 and all(row.ndim == 1 and len(row) > 0 and row.dtype.kind in "iu" for row in rows),
        f"{function}: prompt={str(prompt)[:60]} must be a non-empty list of non-empty lists of token ids.",
    )
    padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return padded, np.asarray([len(row) for row in rows], np.int32)


def _check_ids(function: str, model: Decoder, prompt: Any, lengths: Any, media: Media | None) -> None:
    """Raise ConfigError for ids outside of the vocabulary, unless the prompt or its lengths are unknown (None)."""
    if prompt is not None and lengths is not None:
        index = np.arange(prompt.shape[1])[None]
        positions = np.where(index < lengths[:, None], index, -1)
        ids = prompt if media is None else without_placeholders(prompt, media)
        check_inputs(model.config, ids, positions, name=f"{function}: prompt")


def _check_positions(function: str, model: Decoder, prompt_length: int, max_new_tokens: int) -> None:
    """Raise ConfigError beyond the last learned position; warn beyond the length that the model was trained on."""
    length = prompt_length + max_new_tokens
    positions = model.config.positions
    if isinstance(positions, LearnedPositions) and length > positions.max_positions:
        num_new = positions.max_positions - prompt_length
        remedy = f"Reduce max_new_tokens to {num_new}." if num_new > 0 else "Shorten the prompt."
        raise ConfigError(
            f"{function}: a prompt of {prompt_length} tokens with max_new_tokens={max_new_tokens} needs {length} "
            f"positions, but the model has {positions.max_positions} learned positions. {remedy}"
        )
    trained = model.trained_positions
    if trained is not None and length > trained:
        warnings.warn(
            f"{function}: a prompt of {prompt_length} tokens with max_new_tokens={max_new_tokens} needs {length} "
            f"positions, but the model was trained on {trained} positions.",
            stacklevel=4,
        )


def _drafter(function: str, model: Decoder, drafts: Drafter | None, num_draft_tokens: int) -> Drafter | None:
    check_integer(f"{function}: num_draft_tokens", num_draft_tokens, minimum=0)
    if num_draft_tokens > 0:
        check(
            drafts is None,
            f"{function}: num_draft_tokens={num_draft_tokens} and drafts exclude each other. Pass only one of them.",
        )
        drafter = MTPDrafter(num_tokens=num_draft_tokens)
        drafter.check_model(model, f"{function}: num_draft_tokens")
        return drafter
    if drafts is None:
        return None
    check(
        isinstance(drafts, Drafter) and drafts.find([0]) is None,
        f"{function}: drafts={drafts} must be a drafter that runs on the device: DraftModel or MTPDrafter.",
    )
    drafts.check_model(model)
    return with_models(unstack_layers, drafts)


class _GenerationState(eqx.Module):
    """State of the decode loop.

    **Arguments:**

    - `tokens`: new tokens of each sequence, followed by `pad_id`.
    - `count`: number of new tokens of each sequence.
    - `done`: whether a sequence has ended.
    - `cache`: a `Cache`.
    - `drafts`: state of the drafter; None without one.
    """

    tokens: Int[Array, "batch new"]
    count: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    cache: Any
    drafts: DraftState | None

    def append(
        self, rules: _DecodingRules, tokens: Int[Array, "batch columns"], num_accepted: Int[Array, "batch"]
    ) -> "_GenerationState":
        """Append the first `num_accepted` tokens of each sequence, up to and including a stop id.

        No sequence grows beyond `rules.max_new_tokens`.
        """
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        stop = is_stop(tokens, rules.stop_ids) & (index < num_accepted[:, None])
        stopped = jnp.any(stop, axis=1)
        num_new = jnp.where(stopped, jnp.argmax(stop, axis=1).astype(jnp.int32) + 1, num_accepted)
        num_new = jnp.minimum(num_new, rules.max_new_tokens - self.count)
        columns = jnp.where(index < num_new[:, None], self.count[:, None] + index, self.tokens.shape[1])
        rows = jnp.arange(tokens.shape[0])[:, None]
        count = self.count + num_new
        all_tokens = self.tokens.at[rows, columns].set(tokens, mode="drop")
        done = self.done | stopped | (count >= rules.max_new_tokens)
        return dataclasses.replace(self, tokens=all_tokens, count=count, done=done)


@bounded_jit
def _generate(model: Decoder, request: _Request) -> Int[Array, "batch new"]:
    return model.execution.layout.replicate(_final_state(model, request).tokens)


@run_with_auto_axes
def _final_state(model: Decoder, request: _Request) -> _GenerationState:
    """Run the prompts, then decode until all sequences have ended."""
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.done),
        lambda state: _decode(model, request.rules, state),
        _prefill(model, request),
    )


@run_with_auto_axes
def _prefill(model: Decoder, request: _Request) -> _GenerationState:
    """Run the prompts, choose the first new token of each sequence, and draft the tokens after it."""
    rules = request.rules
    lengths = jnp.asarray(request.lengths)
    prompt = jnp.asarray(request.prompt)
    batch, width = prompt.shape
    cache_size = batch, request.cache_length, request.cache_format
    cache = inference_cache(model, *cache_size)
    hidden, cache, logits = prefill_prompts(model, prompt, lengths, cache, media=request.media)
    zeros = jnp.zeros((batch,), jnp.int32)
    drafts = None
    token = rules.choose(logits[:, None], zeros)
    if rules.drafter is not None:
        index = jnp.arange(width, dtype=jnp.int32)[None]
        following = jnp.where(index == lengths[:, None] - 1, token, jnp.roll(prompt, -1, axis=1))
        positions = jnp.where(index < lengths[:, None], index, -1)
        verified = VerifiedStep(prompt, positions, hidden, following, zeros, lengths)
        drafts = rules.drafter.empty(model, *cache_size)
        assert drafts is not None
        drafts = rules.drafter.step(model, drafts, verified, cache_is_empty=True)
    tokens = jnp.full((batch, request.cache_length - width), request.pad_id, jnp.int32)
    state = _GenerationState(tokens=tokens, count=zeros, done=jnp.zeros((batch,), bool), cache=cache, drafts=drafts)
    return state.append(rules, token, jnp.ones_like(zeros))


@run_with_auto_axes
def _decode(model: Decoder, rules: _DecodingRules, state: _GenerationState) -> _GenerationState:
    """Run one decoding step. Sequences that have ended write nothing to the cache."""
    tokens = jnp.take_along_axis(state.tokens, state.count[:, None] - 1, axis=1)
    if state.drafts is not None:
        tokens = jnp.concatenate([tokens, state.drafts.tokens], axis=1)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(state.done[:, None], -1, state.cache.length[:, None] + index)

    def choose(logits: Float32[Array, "batch columns vocab"]) -> tuple[Int[Array, "batch columns"], None]:
        return rules.choose(logits, state.count), None

    cache, verified, _ = decode_step(model, state.cache, tokens, positions, choose)
    drafts = state.drafts
    if rules.drafter is not None and drafts is not None:
        drafts = rules.drafter.step(model, drafts, verified)
    state = dataclasses.replace(state, cache=cache, drafts=drafts)
    return state.append(rules, verified.following, verified.num_accepted)


def _stream(model: Decoder, request: _Request) -> Iterator[np.ndarray]:
    """Yield each column of new tokens as soon as all sequences have it.

    Each step transfers only a window of columns, as many as a step can add. With drafts, some sequences may be ahead of
    this window.
    """
    state, window = _first_step(model, request)
    num_yielded = 0
    while True:
        tokens, count, done = jax.device_get(window)
        num_ready = int(np.max(count) if np.all(done) else np.min(count[~done]))
        start = min(num_yielded, state.tokens.shape[1] - tokens.shape[1])  # `dynamic_slice` clamps its start like this
        if num_ready > start + tokens.shape[1]:  # the slowest sequence has ended, and the others are beyond the window
            tokens = jax.device_get(_all_tokens(model, state))
            start = 0
        yield from tokens.T[num_yielded - start : num_ready - start].copy()
        if np.all(done):
            return
        num_yielded = max(num_yielded, num_ready)
        state, window = _next_step((model, request.rules, np.asarray(num_yielded, np.int32)), state)


@bounded_jit
def _first_step(model: Decoder, request: _Request) -> tuple[_GenerationState, Any]:
    state = _prefill(model, request)
    return state, _window(model, state, jnp.zeros((), jnp.int32))


@partial(bounded_jit, donate="all-except-first")
def _next_step(
    inputs: tuple[Decoder, _DecodingRules, Int[AnyArray, ""]], state: _GenerationState
) -> tuple[_GenerationState, Any]:
    model, rules, start = inputs
    state = _decode(model, rules, state)
    return state, _window(model, state, start)


def _window(model: Decoder, state: _GenerationState, start: Int[AnyArray, ""]) -> tuple[Array, Array, Array]:
    """Return the new tokens from column `start` on, as many as one step can add, with `count` and `done`."""
    width = min(1 if state.drafts is None else 1 + state.drafts.tokens.shape[1], state.tokens.shape[1])
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
    return jax.tree.map(model.execution.layout.replicate, (tokens, state.count, state.done))


@bounded_jit
def _all_tokens(model: Decoder, state: _GenerationState) -> Int[Array, "batch new"]:
    return model.execution.layout.replicate(state.tokens)
