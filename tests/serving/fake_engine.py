"""An engine without a model, for tests of the server around it: the next token is the last token plus one."""

import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.errors import ConfigError
from eqx_decoders.serving.engine.request import EngineStats, QueueFull, Request, RequestOutput
from eqx_decoders.serving.engine.sampler import TokenScore


@dataclasses.dataclass
class FakeEngine:
    """The next token is `(last + 1) % letters`; sampled requests add a number that depends on the seed.

    Tokens from `letters` on are never generated, except by `script`, the tokens of every answer. `seconds` is the
    duration of a step, and `per_step` the number of tokens per answer and step.
    """

    vocab_size: int = 320
    letters: int = 256
    slots: int = 4
    max_length: int = 512
    max_waiting: int = 16
    seconds: float = 0.0
    per_step: int = 1
    script: tuple[int, ...] = ()
    fails: bool = False

    def load_adapter(self, name: str, adapter: object) -> None:
        if adapter == "too large":
            raise ConfigError(f"{name} is too large.")
        self.loaded[name] = adapter

    def drop_adapter(self, name: str) -> None:
        del self.loaded[name]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    def __post_init__(self):
        self.loaded: dict[str, object] = {}
        self.requests: dict[int, Request] = {}
        self.answers: dict[int, list[int]] = {}
        self.order: list[int] = []
        self.seen: list[Request] = []  # all submitted requests
        self.cancelled: list[int] = []
        self.gate = threading.Event()  # steps wait for this event
        self.gate.set()
        self.begun = threading.Event()  # a step has started
        self.done = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self.order)

    def check_together(self, requests: Sequence[Request]) -> None:
        if len(requests) > self.max_waiting + self.slots:
            raise ConfigError(f"{len(requests)} answers are more than max_waiting={self.max_waiting}: ask for fewer.")

    def submit(self, request: Request) -> int:
        if len(request.prompt) + request.max_new_tokens > self.max_length:
            raise ConfigError(f"max_new_tokens={request.max_new_tokens} does not fit: ask for less.")
        if len(self.order) >= self.slots + self.max_waiting:
            raise QueueFull(f"{len(self.order)} requests wait, the most that do: come again later.")
        number = len(self.seen)
        self.seen.append(request)
        self.order.append(number)
        self.requests[number], self.answers[number] = request, []
        return number

    def cancel(self, request_id: int) -> None:
        if request_id in self.order:
            self.order.remove(request_id)
            self.cancelled.append(request_id)

    def step(self) -> list[RequestOutput]:
        self.begun.set()
        self.gate.wait()
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("the device is gone")
        self.done = dataclasses.replace(self.done, steps=self.done.steps + 1)
        return [self._advance(number) for number in self.order[: self.slots]]

    def _advance(self, number: int) -> RequestOutput:
        request, answer, tokens, scores = self.requests[number], self.answers[number], [], []
        reason = None
        first = not answer
        while reason is None and len(tokens) < self.per_step:
            token = self._next(request, answer)
            answer.append(token)
            tokens.append(token)
            if request.logprobs is not None:
                scores.append(score(token, request.logprobs))
            if token in request.stop_ids and len(answer) > request.min_new_tokens:
                reason = "stop"
            elif len(answer) >= request.max_new_tokens:
                reason = "length"
            if request.constraint is not None and reason != "stop":
                request.constraint.accept(token)
        if reason is not None:
            self.order.remove(number)
        prompt = tuple(score(token, request.prompt_logprobs or 0) for token in request.prompt[1:])
        self.done = dataclasses.replace(
            self.done,
            prompt_tokens=self.done.prompt_tokens + first * len(request.prompt),
            generated_tokens=self.done.generated_tokens + len(tokens),
        )
        return RequestOutput(
            request_id=number,
            tokens=tuple(tokens),
            scores=tuple(scores),
            prompt_scores=prompt if first and request.prompt_logprobs is not None else (),
            cached_tokens=len(request.prompt) // 2 if first else 0,
            finish_reason=reason,
        )

    def _next(self, request: Request, answer: list[int]) -> int:
        if request.constraint is not None:
            allowed = allowed_tokens(request.constraint, self.vocab_size)
            return allowed[(len(answer) * 7 + request.sampling.seed) % len(allowed)]
        if len(answer) < len(self.script):
            return self.script[len(answer)]
        last = (request.prompt[-1:] + tuple(answer))[-1]
        if request.sampling.temperature > 0:
            last += 7 * request.sampling.seed + len(answer)
        biases = dict(request.sampling.logit_bias)
        best = max(biases, key=lambda token: biases[token], default=None)
        return best if best is not None and biases[best] > 0 else (last + 1) % self.letters

    def counts(self) -> EngineStats:
        running = min(len(self.order), self.slots)
        return dataclasses.replace(self.done, running=running, waiting=len(self.order) - running)


def allowed_tokens(constraint: Any, vocab_size: int = 320) -> list[int]:
    """Return the ids that the constraint allows next."""
    words = np.full((vocab_size + 31) // 32, -1, np.int32)
    constraint.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def score(token: int, count: int) -> TokenScore:
    """Return an invented score: the token itself is the most likely one, followed by the next ids."""
    top = [((token + at) % 256, -math.log(2.0) * (at + 1)) for at in range(count)]
    return TokenScore(token, -math.log(2.0) if token % 5 else -math.inf, tuple(top))
