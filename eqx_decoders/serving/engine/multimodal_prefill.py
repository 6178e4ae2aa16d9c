"""Prefill of prompts with images, videos and audio, whose encoders run in background threads.

Inputs are padded to few shapes, so that few programs are compiled: rows of patches and of audio to four lengths per
power of two, prompts to the lengths of `bucket`. Encoders and decoder are separate programs. Encoded features are
stored on the host without padding until their prompt is prefilled.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.encoders.merge import check_tokens
from eqx_decoders.encoders.packed_rows import AudioRows, PackedChunks, PackedPatches
from eqx_decoders.encoders.packing import padded_count
from eqx_decoders.errors import ConfigError, EqxDecodersError
from eqx_decoders.inference.decode_step import prefill_prompts
from eqx_decoders.inference.generation import bucket
from eqx_decoders.inference.unstack import inference_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.sequence import SequenceState
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import run_with_auto_axes


MAX_FEATURE_BYTES = 1 << 30  # features of waiting requests
MAX_ENCODINGS_PER_CLIENT = 8  # concurrent encodings of one client, so that other clients get their turn
MAX_PROGRAMS = 64  # size of the LRU cache of compiled programs, which take some megabytes each
POLL_SECONDS = 0.01  # time that an idle step waits for features

_log = logging.getLogger("eqx_decoders.serving")


class PreparedMedia(eqx.Module):
    """Multimodal prompt with encoded features, ready for prefill.

    **Arguments:**

    - `prompt`, `lengths`: padded tokens, and the number of tokens without padding.
    - `media`: positions of the features, without the inputs of the encoders.
    - `features`: features that replace tokens, followed by features that are added after the first layers (DeepStack).
    """

    prompt: Int[AnyArray, "1 length"]
    lengths: Int[AnyArray, "1"]
    media: Media
    features: tuple[Float[AnyArray, "groups features embed"], ...]


class MultimodalPrefill:
    """Encoders in background threads, and the prefill of multimodal prompts.

    `feature_bytes`: memory of the features of one token.

    **Arguments:**

    - `model`: the model with its encoders.
    - `length`: maximum number of tokens of the cache.
    - `cache_format`: format of keys and values.
    """

    def __init__(self, model: Decoder, length: int, cache_format: CacheFormat):
        self._length, self._cache_format = length, cache_format
        vision = None if model.config.media is None else model.config.media.vision
        size = np.dtype(model.execution.precision.compute).itemsize * model.config.embed_dim
        self.feature_bytes = size * (1 + (0 if vision is None else len(vision.deepstack)))
        self.load(model)
        self._programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        # two threads, so that prompts whose programs exist do not wait for compilations
        pool = concurrent.futures.ThreadPoolExecutor
        self._encoding, self._compiling = pool(1, "encoding"), pool(1, "compiling")

    def load(self, model: Decoder) -> None:
        """Replace the weights."""
        arrays, self._static = eqx.partition(model, eqx.is_array)
        self._weights, self._tree = jax.tree.flatten(arrays)

    def release(self) -> None:
        """Release the weights."""
        self._weights = []

    def schedule_encoding(self, sequences: Sequence[SequenceState]) -> None:
        """Start to encode the media of waiting sequences, in scheduling order, within `MAX_FEATURE_BYTES`.

        The first sequence is always encoded: if there is no room, the last sequences discard their features, and are
        encoded again later.
        """
        first = next(sequence for sequence in sequences if sequence.needs_encoding())
        encoded = [sequence for sequence in sequences if sequence.shared.encoding is not None]
        clients = {sequence.shared: sequence.request.client for sequence in encoded}
        running = (shared for shared in clients if shared.encoding and not shared.encoding.done())
        running_by_client = collections.Counter(clients[shared] for shared in running)
        used_bytes = sum(shared.features_bytes for shared in clients)
        for sequence in sequences:
            shared, request = sequence.shared, sequence.request
            skipped = shared.encoding is not None or not sequence.needs_encoding()
            if skipped or request.media is None or running_by_client[request.client] >= MAX_ENCODINGS_PER_CLIENT:
                continue
            while sequence is first and clients and used_bytes + shared.features_bytes > MAX_FEATURE_BYTES:
                last = next(other.shared for other in reversed(sequences) if other.shared in clients)
                used_bytes -= last.features_bytes
                del clients[last]
                last.drop_encoding()
            if sequence is not first and used_bytes + shared.features_bytes > MAX_FEATURE_BYTES:
                break
            shared.encoding = self.submit(request.prompt, request.media)
            clients[shared] = request.client
            used_bytes += shared.features_bytes
            running_by_client[request.client] += 1

    def submit(self, prompt: tuple[int, ...], media: Media) -> "Future[PreparedMedia]":
        """Start to encode the media of a prompt and to compile its prefill, and return a future of the result."""
        result: Future[PreparedMedia] = Future()
        self._encoding.submit(self._work, result, prompt, media, compiles=False)
        return result

    def prefill(self, prepared: PreparedMedia) -> tuple[Cache, Float32[Array, "1 vocab"]]:
        """Prefill a prompt, and return its cache (with one row) and the logits after its last token."""
        prepared = _padded(prepared)
        return self._program(self._prefill, prepared, compiles=True)(self._weights, prepared)

    def close(self) -> None:
        """Stop the background threads after their current task."""
        for pool in (self._encoding, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)

    def _work(
        self, result: concurrent.futures.Future, prompt: tuple[int, ...], media: Media, *, compiles: bool
    ) -> None:
        """Compute the result of a future of `submit` in a background thread, unless the future was cancelled."""
        try:
            if not result.cancelled():
                _set_if_pending(result.set_result, self._encode_prompt(prompt, media, compiles=compiles))
        except _NotCompiled:
            with contextlib.suppress(RuntimeError):  # raised after `close`
                self._compiling.submit(self._work, result, prompt, media, compiles=True)
        except Exception as error:
            _set_if_pending(result.set_exception, error)

    def _encode_prompt(self, prompt: tuple[int, ...], media: Media, *, compiles: bool) -> PreparedMedia:
        """Encode the media of a prompt, and compile the program that prefills it."""
        width = min(bucket(len(prompt)), self._length)
        ids = np.zeros((1, width), np.int32)
        ids[0, : len(prompt)] = prompt
        rows = with_rounded_rows(media)
        encoded: Encoded = self._program(self._encode_rows, rows, compiles=compiles)(self._weights, rows)
        count = _count(media)
        features = tuple(np.asarray(array)[:, :count].copy() for array in (encoded.by_group, *encoded.deepstack))
        positions = dataclasses.replace(media, images=None, audio=None, order=np.zeros((1, 1), np.int32)).padded(width)
        lengths = np.asarray([len(prompt)], np.int32)
        prepared = PreparedMedia(ids, lengths, positions, features)
        self._program(self._prefill, _padded(prepared), compiles=compiles)
        return prepared

    # --- programs -----------------------------------------------------------------------------------------------------

    def _program(self, function: Callable[..., Any], inputs: Any, *, compiles: bool) -> Any:
        """Return the program for the shapes of `inputs`. A missing program is compiled, or raises _NotCompiled."""
        leaves, tree = jax.tree.flatten(inputs)
        key = function.__name__, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
        if not compiles:
            raise _NotCompiled
        program = jax.jit(lambda *inputs: function(*inputs)).lower(self._weights, inputs).compile()
        with self._lock:
            self._programs[key] = program
            while len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        return program

    def _encode_rows(self, weights: list[Array], rows: Media) -> Encoded:
        encoded = self._model(weights).encode(rows)
        return Encoded(by_group=encoded.by_group, deepstack=encoded.deepstack)

    def _prefill(self, weights: list[Array], prepared: PreparedMedia) -> tuple[Cache, Float32[Array, "1 vocab"]]:
        return _prefill_prompt(self._model(weights), prepared, self._length, self._cache_format)

    def _model(self, weights: list[Array]) -> Decoder:
        return eqx.combine(jax.tree.unflatten(self._tree, weights), self._static)


def features_bytes(multimodal: MultimodalPrefill | None, request: Request) -> int:
    """Return the memory of the features of a request.

    Raises ConfigError if the media do not fit the model or prompt.
    """
    if request.media is None:
        return 0
    if multimodal is None:
        raise ConfigError(
            "Request.media is set, but the model has no encoders (DecoderConfig.media=None): send a text prompt."
        )
    check_tokens(np.zeros((1, len(request.prompt))), request.media)
    return _count(request.media) * multimodal.feature_bytes


def wait_for_any(futures: Iterable[Future | None]) -> None:
    """Wait until one of the futures is done, at most `POLL_SECONDS`."""
    started = [future for future in futures if future is not None]
    if started:
        concurrent.futures.wait(started, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)


def error_message(error: Exception) -> str:
    """Return the error message for a client whose media could not be encoded. The traceback goes to the log."""
    if isinstance(error, EqxDecodersError):
        return str(error)
    _log.error("encoding or prefill of images, videos or audio failed", exc_info=error)
    return (
        f"The images, videos or audio of this prompt could not be processed ({type(error).__name__}): send fewer or "
        f"smaller files."
    )


def _count(media: Media) -> int:
    """Return the number of tokens that features replace."""
    return int(np.max(np.asarray(media.index))) + 1


def _padded(prepared: PreparedMedia) -> PreparedMedia:
    """Pad features to the length of the padded prompt, so that the shapes of a prefill depend only on that length."""
    pad = partial(_with_length, length=prepared.prompt.shape[1])
    return dataclasses.replace(prepared, features=tuple(map(pad, prepared.features)))


class _NotCompiled(Exception):
    """A program is not compiled yet."""


def _set_if_pending(set_result: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled
        set_result(value)


@run_with_auto_axes
def _prefill_prompt(
    model: Decoder, prepared: PreparedMedia, length: int, cache_format: CacheFormat
) -> tuple[Any, Float32[Array, "1 vocab"]]:
    """Prefill a prompt in one pass, and return its cache and the logits after its last token."""
    by_group, *deepstack = map(jnp.asarray, prepared.features)
    encoded = Encoded(by_group=by_group, deepstack=tuple(deepstack))
    cache = inference_cache(model, 1, length, cache_format)
    return prefill_prompts(model, prepared.prompt, prepared.lengths, cache, media=prepared.media, encoded=encoded)[1:]


# --- padding to few lengths -------------------------------------------------------------------------------------------


def with_rounded_rows(media: Media) -> Media:
    """Return the media as one group of rows, padded to one of few lengths."""
    images, audio = _pad_rows(media.images), _pad_rows(media.audio)
    order, old_begin, new_begin = np.asarray(media.order), 0, 0
    new_order = np.minimum(order, 0)  # -1: no feature
    for rows, padded in ((media.images, images), (media.audio, audio)):
        if rows is None or padded is None:
            continue
        # `order` has indices into the concatenated rows, which move because the rows become longer
        length, padded_length = (side.positions.shape[1] // side.group for side in (rows, padded))
        row, offset = np.divmod(order - old_begin, length)
        old_end = old_begin + len(rows.positions) * length
        new_order = np.where(
            (order >= old_begin) & (order < old_end), new_begin + row * padded_length + offset, new_order
        )
        old_begin, new_begin = old_end, new_begin + len(padded.positions) * padded_length
    unused = dict(spans=None, real=None, grid_positions=None)  # encoders do not read fields about tokens
    # padded audio clips can have more features than there are rows
    width = max(new_begin, new_order.shape[1])
    order, index = _with_length(new_order.astype(np.int32), width), np.full((1, 1), -1, np.int32)
    return dataclasses.replace(media, images=images, audio=audio, order=order, index=index, **unused)


def _pad_rows(rows: PackedPatches | AudioRows | None) -> Any:
    """Pad rows to one of few lengths."""
    if rows is None:
        return None
    pieces = rows.chunks.shape[1] if isinstance(rows, PackedChunks) else rows.positions.shape[1] // rows.group
    target, changes = padded_count(pieces), {}
    for field in dataclasses.fields(rows):
        x = getattr(rows, field.name)
        if field.name != "group" and x is not None:
            empty = -1 if field.name == "positions" else 0
            changes[field.name] = _with_length(np.asarray(x), x.shape[1] // pieces * target, empty)
    return dataclasses.replace(rows, **changes)


def _with_length(x: np.ndarray, length: int, empty: int = 0) -> np.ndarray:
    """Cut or pad the second axis of an array to a length."""
    x = x[:, :length]
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, length - x.shape[1])
    return np.pad(x, padding, constant_values=empty)
