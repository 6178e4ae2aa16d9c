"""Engine of models that score texts, such as reward models: it answers a request with the scores of its prompt."""

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
    """Engine of a model with `DecoderConfig.scores`, as the server's thread runs one.

    A step takes the requests that come first, at most `max_batch_size`, and computes their prompts together, each as a
    row of its own. The score is read at the last token of a prompt. Lengths are rounded up, so that few programs are
    compiled; the first request of a length waits for its program.
    """

    def __init__(self, model: Decoder, limits: EngineLimits):
        check(
            model.config.scores is not None, "ScoringEngine: DecoderConfig.scores=None: take Engine for such a model."
        )
        self.model, self.limits = model, limits
        self._queue: RequestQueue[_Waiting] = RequestQueue(limits.max_waiting, limits.max_waiting_tokens)
        self._ids, self._stats = itertools.count(), EngineStats()

    @property
    def has_work(self) -> bool:
        """Whether requests wait."""
        return len(self._queue) > 0

    def warm_up(self) -> None:
        """Compile the program of the longest texts."""
        self._scores([(0,) * self.limits.max_length])

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for more requests than ever wait."""
        most = self.limits.max_waiting
        check(len(requests) <= most, f"{len(requests)} texts are more than max_waiting={most}: send fewer.")

    def submit(self, request: Request) -> int:
        """Queue a request; return its id. Raises ConfigError for a prompt that is too long, and QueueFull."""
        length, most = len(request.prompt), self.limits.max_length
        check(length <= most, f"Request.prompt has {length} tokens: at most max_length={most} are taken.")
        self._queue.check_room(request)
        entry = _Waiting(next(self._ids), request)
        self._queue.add(entry, set())
        return entry.request_id

    def cancel(self, request_id: int) -> None:
        """Forget a request."""
        self._queue.remove(request_id)

    def step(self) -> list[RequestOutput]:
        """Score the requests that come first."""
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
        """Return what waits, and totals."""
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
    """Compute the scores of texts at their last tokens; `lengths` are at least 1, and what follows is padding."""
    if model.config.scores is None:
        raise ConfigError("text_scores: DecoderConfig.scores=None: the model gives logits.")
    real = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < jnp.asarray(lengths)[:, None]
    hidden, _, _ = model.run(jnp.asarray(tokens), None, real.astype(jnp.int32))
    last = jnp.take_along_axis(hidden, jnp.asarray(lengths)[:, None, None] - 1, axis=1)
    return model.logits(last)[:, 0]
