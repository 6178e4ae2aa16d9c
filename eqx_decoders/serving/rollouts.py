"""Sampling of completions for training: several for each prompt, with the log-probs that they were sampled with."""

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
    """Sampled completion.

    **Arguments:**

    - `tokens`: sampled tokens, including the end token.
    - `log_probs`: log-prob of each token in the distribution that it was sampled from.
    - `versions`: version of the weights that sampled each token (see `Engine.load`).
    - `finish_reason`: `"stop"` for an end token, `"length"` for a truncated completion.
    - `experts`: experts of each token of prompt and completion, with `EngineConfig.expert_choices`. -1 for tokens
        whose experts are unknown, such as the last token.
    """

    tokens: Int32[np.ndarray, "length"]
    log_probs: Float32[np.ndarray, "length"]
    versions: Int32[np.ndarray, "length"]
    finish_reason: FinishReason
    experts: Int16[np.ndarray, "all_length layers choices"] | None = None

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> "Rollout":
        """Concatenate the outputs of a request. Raises EqxDecodersError if the request failed."""
        last = outputs[-1]
        check(last.finish_reason != "error", f"sampling a completion failed: {last.error}", EqxDecodersError)
        tokens = [token for output in outputs for token in output.tokens]
        log_probs = [score.logprob for output in outputs for score in output.scores]
        versions = [output.version for output in outputs for _ in output.tokens]
        return cls(
            tokens=np.asarray(tokens, np.int32),
            log_probs=np.asarray(log_probs, np.float32),
            versions=np.asarray(versions, np.int32),
            finish_reason=last.finish_reason or "length",
            experts=last.experts,
        )


class RolloutGroup(NamedTuple):
    """Completions of one prompt; `number`: index of the prompt."""

    number: int
    prompt: tuple[int, ...]
    rollouts: tuple[Rollout, ...]


@runtime_checkable
class RequestEngine(Protocol):
    """Interface of an `Engine` that samples completions; `config` is its `EngineConfig`."""

    config: Any

    def submit(self, request: Request) -> int:
        """Queue a request and return the id of its outputs. Raises QueueFull."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step and return its outputs."""
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
    """Sample completions for each prompt and yield their groups in the order in which they complete.

    A completion depends only on the weights, its prompt and its seed, which is a hash of `seed`, the id of the prompt
    and the index of the sample. It does not depend on other requests of the engine (with
    `EngineConfig.batch_invariant`, bit for bit). There is no top-k or top-p filter, so that log-probs equal the
    trainer's at the same temperature.

    **Arguments:**

    - `engine`: an engine without open requests.
    - `samples`: number of completions for each prompt.
    - `max_new_tokens`: maximum length of a completion. The engine's `max_length` may leave room for fewer tokens.
    - `temperature`: sampling temperature. 0: greedy, with log-probs of the model itself.
    - `stop_ids`: end tokens.
    - `seed`: seed of this call, such as "run/step".
    - `ids`: ids of the prompts. None: their indices.

    Raises ConfigError for a prompt without room for a completion.
    """
    check_integer("samples", samples)
    max_length = engine.config.max_length
    waiting = collections.deque[tuple[int, int, Request]]()
    for index, (prompt, name) in enumerate(zip(prompts, range(len(prompts)) if ids is None else ids, strict=True)):
        check(
            0 < len(prompt) < max_length,
            f"prompt {index} has {len(prompt)} tokens: it must have at least 1, and fewer than the engine's "
            f"max_length={max_length}.",
        )
        for sample in range(samples):
            request = request_with_log_probs(
                prompt,
                SamplingParams(temperature=temperature, seed=sample_seed(seed, name, sample)),
                max_new_tokens=min(max_new_tokens, max_length - len(prompt)),
                stop_ids=tuple(stop_ids),
            )
            waiting.append((index, sample, request))
    yield from _groups(engine, waiting, samples)


def request_with_log_probs(prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> Request:
    """Return a request with the log-probs of sampled tokens; at temperature 0, with the model's own log-probs."""
    mode = "processed" if sampling.temperature > 0 else "raw"
    return Request(prompt=tuple(prompt), sampling=sampling, logprobs=0, logprobs_mode=mode, **options)


def _groups(
    engine: RequestEngine, waiting: "collections.deque[tuple[int, int, Request]]", samples: int
) -> Iterator[RolloutGroup]:
    """Yield the group of each prompt as soon as all of its requests have completed."""
    outputs: dict[int, list[RequestOutput]] = {}
    running: dict[int, tuple[int, int, Request]] = {}
    completed: dict[int, dict[int, Rollout]] = collections.defaultdict(dict)
    while waiting or running:
        while waiting and (request_id := try_submit(engine, waiting[0][2])) is not None:
            running[request_id], outputs[request_id] = waiting.popleft(), []
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.finish_reason is None:
                continue
            index, sample, request = running.pop(output.request_id)
            completed[index][sample] = Rollout.of(outputs.pop(output.request_id))
            if len(completed[index]) == samples:
                rollouts = completed.pop(index)
                yield RolloutGroup(index, request.prompt, tuple(rollouts[number] for number in range(samples)))


def try_submit(engine: RequestEngine, request: Request) -> int | None:
    """Submit a request and return its id; None if the queue is full."""
    try:
        return engine.submit(request)
    except QueueFull:
        return None


def sample_seed(seed: int | str, name: int | str, sample: int) -> int:
    """Return the seed of a completion: 64 bits of a hash of the call's seed, the prompt's id and the sample's index."""
    digest = hashlib.blake2b(f"{seed}/{name}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
