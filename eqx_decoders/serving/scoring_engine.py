"""`ScoringEngine`: engine of models that score texts, such as reward models."""

import dataclasses
import itertools
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.inference.generation import bucket
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.config import EngineLimits
from eqx_decoders.serving.engine.request import EngineStats, Request, RequestOutput
from eqx_decoders.serving.engine.request_queue import RequestQueue
from eqx_decoders.sharding.explicit import run_with_auto_axes


@dataclasses.dataclass(frozen=True)
class _Waiting:
    request_id: int
    request: Request


class ScoringEngine:
    """Engine of a model with `DecoderConfig.scores`, with the interface of `Engine` that the server uses.

    A step takes up to `max_batch_size` requests from the queue and computes their prompts in one batch. The score is
    computed at the last token of a prompt. Lengths are padded so that few programs are compiled; a program is compiled
    by the first request that needs it.
    """

    def __init__(self, model: Decoder, limits: EngineLimits):
        check(
            model.config.scores is not None,
            "ScoringEngine: DecoderConfig.scores=None: the model has no score head. Use Engine instead.",
        )
        self.model = model
        self.limits = limits
        self._queue: RequestQueue[_Waiting] = RequestQueue(limits.max_waiting, limits.max_waiting_tokens)
        self._ids, self._stats = itertools.count(), EngineStats()

    @property
    def has_work(self) -> bool:
        """True if requests are waiting."""
        return len(self._queue) > 0

    def warm_up(self) -> None:
        """Compile the program for the maximum length."""
        self._scores([(0,) * self.limits.max_length])

    def close(self) -> None:
        """Do nothing: the engine has no threads."""

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests that are submitted together and exceed the size of the waiting queue."""
        check(
            len(requests) <= self.limits.max_waiting,
            f"{len(requests)} texts are more than max_waiting={self.limits.max_waiting}: send fewer texts at once.",
        )

    def submit(self, request: Request) -> int:
        """Queue a request, and return its id. Raises ConfigError for a prompt that is too long, and QueueFull."""
        check(
            len(request.prompt) <= self.limits.max_length,
            f"Request.prompt has {len(request.prompt)} tokens, but max_length={self.limits.max_length}: shorten it.",
        )
        self._queue.check_room(request)
        entry = _Waiting(next(self._ids), request)
        self._queue.add(entry, set())
        return entry.request_id

    def cancel(self, request_id: int) -> None:
        """Remove a waiting request. Unknown ids are ignored."""
        self._queue.remove(request_id)

    def step(self) -> list[RequestOutput]:
        """Score the next batch of requests, and return their outputs."""
        entries = self._queue.ordered(lambda _: True)[: self.limits.max_batch_size]
        for entry in entries:
            self._queue.remove(entry.request_id)
            self._queue.charge(entry.request.client, len(entry.request.prompt))
        values = self._scores([entry.request.prompt for entry in entries])
        tokens = sum(len(entry.request.prompt) for entry in entries)
        stats = self._stats
        self._stats = dataclasses.replace(stats, steps=stats.steps + 1, prompt_tokens=stats.prompt_tokens + tokens)
        return [
            RequestOutput(request_id=entry.request_id, text_scores=tuple(row.tolist()), finish_reason="stop")
            for entry, row in zip(entries, values, strict=True)
        ]

    def counts(self) -> EngineStats:
        """Return the current statistics."""
        return dataclasses.replace(self._stats, waiting=len(self._queue))

    def _scores(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        width = min(bucket(max(map(len, prompts))), self.limits.max_length)
        tokens = np.zeros((self.limits.max_batch_size, width), np.int32)
        lengths = np.ones(self.limits.max_batch_size, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return np.asarray(text_scores(self.model, tokens, lengths))[: len(prompts)]


@eqx.filter_jit
@run_with_auto_axes
def text_scores(
    model: Decoder, tokens: Int32[np.ndarray | Array, "batch length"], lengths: Int32[np.ndarray | Array, "batch"]
) -> Float32[Array, "batch scores"]:
    """Return the scores of texts, computed at their last tokens.

    **Arguments:**

    - `tokens`: padded texts.
    - `lengths`: number of tokens of each text without padding, at least 1.

    Raises ConfigError for a model without scores.
    """
    if model.config.scores is None:
        raise ConfigError("text_scores: DecoderConfig.scores=None: the model returns logits, not scores.")
    real = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < jnp.asarray(lengths)[:, None]
    hidden, _, _ = model.run(jnp.asarray(tokens), None, real.astype(jnp.int32))
    last = jnp.take_along_axis(hidden, jnp.asarray(lengths)[:, None, None] - 1, axis=1)
    return model.logits(last)[:, 0]
