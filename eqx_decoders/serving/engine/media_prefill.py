"""Prompts with images, videos and audio: what encoders make of these is computed beside the engine's thread.

Programs depend on sizes. There are few of those: rows of patches and of audio are padded to four lengths an octave,
and prompts to those of `bucket`; each by itself, since the encoders have programs of their own. Features wait on the
host, as many as there are, and are padded when a prompt is read.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.encoders.merge import check_tokens
from eqx_decoders.encoders.packed_rows import AudioRows, ChunkRows, PatchRows
from eqx_decoders.encoders.packing import few_sizes
from eqx_decoders.errors import ConfigError, EqxDecodersError
from eqx_decoders.inference.generation import bucket
from eqx_decoders.inference.unstack import inference_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.sequence import SequenceState
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed


FEATURES = 1 << 30  # bytes of those that wait
AHEAD = 8  # prompts of one client that are encoded at a time: others' come between
PROGRAMS = 64  # that are kept, the ones used last: each takes some megabytes
POLL = 0.01  # seconds to wait for them where there is nothing else to do

_log = logging.getLogger("eqx_decoders.serving")


class PreparedMedia(eqx.Module):
    """A prompt that is ready to be read, once its features are padded to its length.

    **Arguments:**

    - `prompt`, `lengths`: its tokens, padded, and how many of them count.
    - `media`: where features stand, without what they were made of.
    - `features`: those of the tokens, and what is added behind each of the first layers.
    """

    prompt: Int[AnyArray, "1 length"]
    lengths: Int[AnyArray, "1"]
    media: Media
    features: tuple[Float[AnyArray, "groups features embed"], ...]


class MediaPrefill:
    """Encodes what prompts show, and reads such prompts.

    **Arguments:**

    - `model`: whose encoders and layers.
    - `room`: tokens that the caches of prompts have room for.
    - `kind`: how these store keys and values.

    `feature_bytes` is the memory of what stands for one token.
    """

    def __init__(self, model: Decoder, room: int, kind: CacheFormat):
        self._room, self._kind = room, kind
        vision = None if model.config.media is None else model.config.media.vision
        size = np.dtype(model.execution.precision.compute).itemsize * model.config.embed_dim
        self.feature_bytes = size * (1 + (0 if vision is None else len(vision.deepstack)))
        arrays, self._static = eqx.partition(model, eqx.is_array)
        self._weights, self._tree = jax.tree.flatten(arrays)
        self._programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        # two threads: what has its programs does not wait for what has to be compiled
        pool = concurrent.futures.ThreadPoolExecutor
        self._encoding, self._compiling = pool(1, "encoding"), pool(1, "compiling")

    def look_ahead(self, jobs: Sequence[SequenceState]) -> None:
        """Begin to encode what waiting requests show, in their turn, as far as `FEATURES` goes; the first in any case.

        For that one the last ones give up theirs, and are encoded again when there is room.
        """
        first = next(job for job in jobs if job.has_to_see())
        held = {job.shared: job.request.client for job in jobs if job.shared.seeing is not None}
        busy = collections.Counter(held[shared] for shared in held if shared.seeing and not shared.seeing.done())
        used = sum(shared.features_bytes for shared in held)
        for job in jobs:
            shared, request = job.shared, job.request
            done = shared.seeing is not None or not job.has_to_see()
            if done or request.media is None or busy[request.client] >= AHEAD:
                continue
            while job is first and held and used + shared.features_bytes > FEATURES:
                last = next(other.shared for other in reversed(jobs) if other.shared in held)
                used -= last.features_bytes
                del held[last]
                last.look_away()
            if job is not first and used + shared.features_bytes > FEATURES:
                break
            shared.seeing = self.prepare(request.prompt, request.media)
            held[shared] = request.client
            used += shared.features_bytes
            busy[request.client] += 1

    def prepare(self, prompt: tuple[int, ...], media: Media) -> "concurrent.futures.Future[PreparedMedia]":
        """Begin to encode what a prompt shows, and to compile what reads it."""
        found: concurrent.futures.Future[PreparedMedia] = concurrent.futures.Future()
        self._encoding.submit(self._work, found, prompt, media, compiles=False)
        return found

    def read(self, seen: PreparedMedia) -> tuple[Cache, Float32[Array, "1 vocab"]]:
        """A cache of one row that has seen the prompt, and the logits behind it."""
        seen = _padded(seen)
        return self._program(self._read, seen, compiles=True)(self._weights, seen)

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self._encoding, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, found: concurrent.futures.Future, prompt: tuple[int, ...], media: Media, *, compiles: bool) -> None:
        """In a thread: what `prepare` promises, unless nobody waits for it any more."""
        try:
            if not found.cancelled():
                _settle(found.set_result, self._seen(prompt, media, compiles=compiles))
        except _NotCompiled:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._compiling.submit(self._work, found, prompt, media, compiles=True)
        except Exception as error:
            _settle(found.set_exception, error)

    def _seen(self, prompt: tuple[int, ...], media: Media, *, compiles: bool) -> PreparedMedia:
        width = min(bucket(len(prompt)), self._room)
        ids = np.zeros((1, width), np.int32)
        ids[0, : len(prompt)] = prompt
        rows = rounded(media)
        made: Encoded = self._program(self._encode, rows, compiles=compiles)(self._weights, rows)
        count = _count(media)
        features = tuple(np.asarray(each)[:, :count].copy() for each in (made.by_group, *made.deepstack))
        bare = dataclasses.replace(media, images=None, audio=None, order=np.zeros((1, 1), np.int32)).padded(width)
        lengths = np.asarray([len(prompt)], np.int32)
        seen = PreparedMedia(ids, lengths, bare, features)
        self._program(self._read, _padded(seen), compiles=compiles)
        return seen

    # --- programs -----------------------------------------------------------------------------------------------------

    def _program(self, function: Callable[..., Any], inputs: Any, *, compiles: bool) -> Any:
        """The program of these shapes: it is compiled if it may be, and else _NotCompiled is raised."""
        leaves, form = jax.tree.flatten(inputs)
        key = function.__name__, form, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
        if not compiles:
            raise _NotCompiled
        made = jax.jit(lambda *inputs: function(*inputs)).lower(self._weights, inputs).compile()
        with self._lock:
            self._programs[key] = made
            while len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        return made

    def _encode(self, weights: list[Array], rows: Media) -> Encoded:
        encoded = self._model(weights).encode(rows)
        return Encoded(by_group=encoded.by_group, deepstack=encoded.deepstack)

    def _read(self, weights: list[Array], seen: PreparedMedia) -> tuple[Cache, Float32[Array, "1 vocab"]]:
        return _read(self._model(weights), seen, self._room, self._kind)

    def _model(self, weights: list[Array]) -> Decoder:
        return eqx.combine(jax.tree.unflatten(self._tree, weights), self._static)


def features_bytes(sight: MediaPrefill | None, request: Request) -> int:
    """Memory of what encoders make for a request. ConfigError where there are none, or its prompt is not for it."""
    if request.media is None:
        return 0
    if sight is None:
        raise ConfigError("Request.media is given, but this model has no encoders (DecoderConfig.media is None).")
    check_tokens(np.zeros((1, len(request.prompt))), request.media)
    return _count(request.media) * sight.feature_bytes


def wait_for_one(pending: Iterable[concurrent.futures.Future | None]) -> None:
    """Wait for a moment, or until one of them is there."""
    pending = [each for each in pending if each is not None]
    if pending:
        concurrent.futures.wait(pending, POLL, concurrent.futures.FIRST_COMPLETED)


def what_failed(error: Exception) -> str:
    """What a client is told of an error in computing what its prompt shows; the log has all of it."""
    if isinstance(error, EqxDecodersError):
        return str(error)
    _log.error("what a prompt shows could not be computed", exc_info=error)
    return f"What this prompt shows could not be computed ({type(error).__name__}): ask for less of it."


def _count(media: Media) -> int:
    """How many features stand among a prompt's tokens."""
    return int(np.max(np.asarray(media.index))) + 1


def _padded(seen: PreparedMedia) -> PreparedMedia:
    """With as many features as tokens, of which there are no fewer: what reads them depends on one length alone."""
    longer = partial(_of_length, length=seen.prompt.shape[1])
    return dataclasses.replace(seen, features=tuple(map(longer, seen.features)))


class _NotCompiled(Exception):
    """A program is missing."""


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
        settle(value)


@typed
def _read(model: Decoder, seen: PreparedMedia, room: int, kind: CacheFormat) -> tuple[Any, Float32[Array, "1 vocab"]]:
    cache, prompt, lengths = inference_cache(model, 1, room, kind), jnp.asarray(seen.prompt), jnp.asarray(seen.lengths)
    index = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(index < lengths[:, None], index, -1)
    by_group, *further = map(jnp.asarray, seen.features)
    beside: Any = dict(media=seen.media, encoded=Encoded(by_group=by_group, deepstack=tuple(further)))
    hidden, cache, _ = model.run(prompt, positions, cache=cache, cache_is_empty=True, contiguous=True, **beside)
    return cache, model.logits(jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1))[:, 0]


# --- few lengths ------------------------------------------------------------------------------------------------------


def rounded(media: Media) -> Media:
    """The same for one group of rows, these padded to few lengths."""
    images, audio = _longer(media.images), _longer(media.audio)
    order, begin, total = np.asarray(media.order), 0, 0
    moved = np.zeros_like(order)
    for old, new in ((media.images, images), (media.audio, audio)):
        if old is None or new is None:
            continue
        # features are counted row by row: those of later rows stand further back
        length, longer = (each.positions.shape[1] // each.group for each in (old, new))
        row, place = np.divmod(order - begin, length)
        end = begin + len(old.positions) * length
        moved = np.where((order >= begin) & (order < end), total + row * longer + place, moved)
        begin, total = end, total + len(new.positions) * longer
    none = dict(spans=None, real=None, grid_positions=None)  # encoders read nothing of the tokens
    order, index = _of_length(moved.astype(np.int32), total), np.full((1, 1), -1, np.int32)
    return dataclasses.replace(media, images=images, audio=audio, order=order, index=index, **none)


def _longer(rows: PatchRows | AudioRows | None) -> Any:
    """Rows with nothing behind what they have."""
    if rows is None:
        return None
    pieces = rows.chunks.shape[1] if isinstance(rows, ChunkRows) else rows.positions.shape[1] // rows.group
    more, changes = few_sizes(pieces), {}
    for field in dataclasses.fields(rows):
        x = getattr(rows, field.name)
        if field.name != "group" and x is not None:
            empty = -1 if field.name == "positions" else 0
            changes[field.name] = _of_length(np.asarray(x), x.shape[1] // pieces * more, empty)
    return dataclasses.replace(rows, **changes)


def _of_length(x: np.ndarray, length: int, empty: int = 0) -> np.ndarray:
    """An array whose second axis is cut, or filled up, to a length."""
    x = x[:, :length]
    more = [(0, 0)] * x.ndim
    more[1] = (0, length - x.shape[1])
    return np.pad(x, more, constant_values=empty)
