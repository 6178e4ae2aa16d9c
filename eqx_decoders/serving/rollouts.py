"""Answers of an engine for training: several to each prompt, with the log-probabilities that they were drawn by."""

import collections
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int16, Int32

from eqx_decoders.errors import EqxDecodersError, check, check_integer
from eqx_decoders.serving.engine.request import FinishReason, QueueFull, Request, RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams


class Rollout(NamedTuple):
    """Answer that a model drew.

    **Arguments:**

    - `tokens`: its tokens, with the one that ended it.
    - `log_probs`: log-probability of each, of the distribution that it was drawn from.
    - `versions`: number of the weights that drew each (see `Engine.load`).
    - `finish_reason`: `"stop"` for a token that ends answers, `"length"` for an answer that was cut.
    - `experts`: the experts that each token of the prompt and of the answer was sent to, with
        `EngineConfig.expert_choices`; -1 for tokens of which they are not known, such as the last one.
    """

    tokens: Int32[np.ndarray, "length"]
    log_probs: Float32[np.ndarray, "length"]
    versions: Int32[np.ndarray, "length"]
    finish_reason: FinishReason
    experts: Int16[np.ndarray, "all_length layers choices"] | None = None

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> "Rollout":
        """Join the outputs of a request."""
        tokens = [token for output in outputs for token in output.tokens]
        scores = [score.logprob for output in outputs for score in output.scores]
        versions = [output.version for output in outputs for _ in output.tokens]
        reason = outputs[-1].finish_reason or "length"
        check(reason != "error", f"an answer has failed: {outputs[-1].error}", EqxDecodersError)
        lists = np.asarray(tokens, np.int32), np.asarray(scores, np.float32), np.asarray(versions, np.int32)
        return cls(*lists, reason, outputs[-1].experts)


class RolloutGroup(NamedTuple):
    """Answers to one prompt; `number`: which of the prompts it is."""

    number: int
    prompt: tuple[int, ...]
    rollouts: tuple[Rollout, ...]


@runtime_checkable
class RequestEngine(Protocol):
    """What answers are drawn by: an `Engine`, with its `EngineConfig`."""

    config: Any

    def submit(self, request: Request) -> int:
        """Queue a request, and return the id that its outputs have. Raises QueueFull."""
        ...

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return its outputs."""
        ...


def rollout(
    engine: RequestEngine,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    stop_ids: Sequence[int] = (),
    seed: int | str = 0,
    ids: Sequence[int | str] | None = None,
) -> Iterator[RolloutGroup]:
    """Yield `samples` answers to each prompt, in the order in which groups are complete.

    An answer depends on the weights, its prompt and its seed alone, which is a hash of `seed`, the prompt's id and the
    number of the sample: never on what else the engine computes (with `EngineConfig.batch_invariant`, to the last bit).
    No filter cuts the distribution, so that log-probabilities are those of a trainer at the same temperature.

    **Arguments:**

    - `engine`: without open requests.
    - `max_new_tokens`: of each answer; fewer where the engine's `max_length` leaves fewer.
    - `temperature`: of the draws; 0: the most likely tokens, with the model's own log-probabilities.
    - `stop_ids`: an answer ends with one of these.
    - `seed`: of this call, such as "run/step".
    - `ids`: names of the prompts; None: their numbers.

    Raises ConfigError for a prompt without room for an answer.
    """
    check_integer("samples", samples)
    names, limit = (range(len(prompts)) if ids is None else ids), engine.config.max_length
    waiting = collections.deque[tuple[int, int, Request]]()
    for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        rule = f"leaves no room for an answer: the engine has max_length={limit}"
        check(0 < len(prompt) < limit, f"prompt {index} of {len(prompt)} tokens {rule}.")
        for sample in range(samples):
            sampling = SamplingParams(temperature=temperature, seed=answer_seed(seed, name, sample))
            options = dict(max_new_tokens=min(max_new_tokens, limit - len(prompt)), stop_ids=tuple(stop_ids))
            waiting.append((index, sample, scored_request(prompt, sampling, **options)))
    yield from _groups(engine, waiting, samples)


def scored_request(prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> Request:
    """Return a request for an answer with log-probabilities: of the draws, or at temperature 0 the model's own."""
    scored = "draws" if sampling.temperature > 0 else "model"
    return Request(prompt=tuple(prompt), sampling=sampling, logprobs=0, logprobs_of=scored, **options)


def _groups(
    engine: RequestEngine, waiting: "collections.deque[tuple[int, int, Request]]", samples: int
) -> Iterator[RolloutGroup]:
    """Yield the answers to requests by the numbers of their prompts, as soon as a prompt has all."""
    outputs: dict[int, list[RequestOutput]] = {}
    running: dict[int, tuple[int, int, Request]] = {}
    done: dict[int, dict[int, Rollout]] = collections.defaultdict(dict)
    while waiting or running:
        while waiting and (number := submitted(engine, waiting[0][2])) is not None:
            running[number], outputs[number] = waiting.popleft(), []
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.finish_reason is None:
                continue
            index, sample, request = running.pop(output.request_id)
            done[index][sample] = Rollout.of(outputs.pop(output.request_id))
            if len(done[index]) == samples:
                answers = done.pop(index)
                yield RolloutGroup(index, request.prompt, tuple(answers[each] for each in range(samples)))


def submitted(engine: RequestEngine, request: Request) -> int | None:
    """Return the id of a request; None while the queue is full."""
    try:
        return engine.submit(request)
    except QueueFull:
        return None


def answer_seed(seed: int | str, name: int | str, sample: int) -> int:
    """Return the seed of an answer's draws: 64 bits of a hash of the call, the prompt and the sample."""
    digest = hashlib.blake2b(f"{seed}/{name}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
