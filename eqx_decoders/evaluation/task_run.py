"""`evaluate_task`: generates completions for the examples of a task, and grades them."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.core.sampling import Probability
from eqx_decoders.data.sources.documents import template_variables
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.evaluation.engine_requests import (
    CompletionRequest,
    EvaluationEngine,
    Progress,
    generate_completions,
    no_progress,
)
from eqx_decoders.evaluation.grading import Grade, grade_completions
from eqx_decoders.evaluation.task import LoadedTask
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.output_parsing.formats import find_reasoning_format
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.serving.engine.config import EngineConfig, EngineLimits
from eqx_decoders.serving.engine.sampler import SamplingParams


@runtime_checkable
class TextSource(Protocol):
    """The part of the interface of `TextModel` that evaluations use."""

    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat(self) -> ChatTemplate | None: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    def encode(self, prompt: Any) -> Any: ...
    def encode_many(
        self, prompts: Sequence[Any], variables: Sequence[Mapping[str, Any]] | None = None
    ) -> list[np.ndarray]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings(CheckedFields):
    """Settings for generating and grading the completions of a task."""

    checked_name = ""

    samples: PositiveInt = 1
    """Number of completions per prompt."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature. 0: greedy decoding. None: 0 for one sample, 1 for several."""
    top_k: PositiveInt | None = None
    """Sample from the k most likely tokens."""
    top_p: Probability | None = None
    """Sample from the most likely tokens whose probabilities add up to p."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens of a completion. None: the task's value."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values k of pass@k, each at most --samples. Empty: the powers of 2 below --samples."""
    seed: NonNegativeInt = 0
    """Sampling seed. The seed of a completion depends only on it, the task, the example and the index of the sample."""
    grade_workers: PositiveInt = 2
    """Number of processes that grade completions."""
    grade_seconds: PositiveFloat = 10.0
    """Time limit in seconds for grading a completion. After it the process is killed, and the completion counts as not
    graded."""

    def __post_init__(self):
        super().__post_init__()
        check(
            self.samples == 1 or self.sampling_temperature > 0,
            f"samples={self.samples} with temperature={self.temperature} would generate the same completion "
            f"{self.samples} times: set a temperature above 0, or samples=1.",
        )
        for k in self.pass_at:
            check(
                k <= self.samples,
                f"pass_at={k} needs at least samples={k}, but samples={self.samples}: increase samples.",
            )

    @property
    def sampling_temperature(self) -> float:
        """Sampling temperature, with the default filled in."""
        return self.temperature if self.temperature is not None else float(self.samples > 1)

    @property
    def reported_ks(self) -> tuple[int, ...]:
        """Values k of pass@k that are reported."""
        powers = (2**power for power in range(self.samples.bit_length()))
        return self.pass_at or tuple(k for k in powers if k < self.samples)

    def sampling(self, task: str, example: int, sample: int) -> SamplingParams:
        """Return the sampling parameters of one completion."""
        identity = json.dumps([self.seed, task, example, sample]).encode()
        seed = int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest(), "big")
        return SamplingParams(temperature=self.sampling_temperature, top_k=self.top_k, top_p=self.top_p, seed=seed)


def default_prefill_chunk(text: TextSource) -> int:
    """Return the default size of prefill chunks.

    Small chunks let continuations share more of their context. They cost nothing on CPUs.
    """
    return 32 if text.model.execution.layout.backend.active_rows_only else EngineLimits.prefill_chunk


def make_engine(text: TextSource, limits: EngineLimits) -> Any:
    """Return an `Engine` for generation and scoring: with one logprob per token and one logit bias per request."""
    from eqx_decoders.serving.engine.engine import Engine

    fields = {field.name: getattr(limits, field.name) for field in dataclasses.fields(EngineLimits)}
    return Engine(text.model, EngineConfig(**fields, max_logprobs=1, max_logit_bias=1))


def completion_requests(text: TextSource, task: LoadedTask, settings: AnswerSettings) -> list[CompletionRequest]:
    """Return the requests for all completions of a task, in the order of the examples, then of the samples."""
    prompts: list[Any] = [example.get("messages") or example["prompt"] for example in task.examples]
    if text.chat is not None and task.task.chat:
        prompts = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
    check(
        text.chat is not None or all(isinstance(prompt, str) for prompt in prompts),
        f"task {task.name!r} has examples with messages, but the model has no chat template: use the field 'prompt'.",
    )
    variables = [
        template_variables(example, f"task {task.name!r}, example {number}") if example.get("messages") else {}
        for number, example in enumerate(task.examples, 1)
    ]
    reasoning = None if text.chat is None else find_reasoning_format(text.chat.source)
    return [
        CompletionRequest(
            prompt=tuple(ids.tolist()),
            max_new_tokens=settings.max_new_tokens or task.task.max_new_tokens,
            sampling=settings.sampling(task.name, number, sample),
            stop=task.task.stop,
            stop_ids=text.stop_ids,
            reasoning=reasoning,
        )
        for number, ids in enumerate(text.encode_many(prompts, variables))
        for sample in range(settings.samples)
    ]


def check_lengths(task: LoadedTask, requests: Sequence[CompletionRequest], max_length: int) -> None:
    """Raise ConfigError for an example whose prompt and completion exceed `max_length` tokens."""
    samples = len(requests) // len(task.examples)
    for index, request in enumerate(requests):
        check(
            len(request.prompt) + request.max_new_tokens <= max_length,
            f"task {task.name!r}, example {index // samples + 1}: the prompt has {len(request.prompt)} tokens, "
            f"which with "
            f"max_new_tokens={request.max_new_tokens} is more than max_length={max_length}. Increase max_length, or "
            f"decrease max_new_tokens.",
        )


def evaluate_task(
    text: TextSource,
    engine: EvaluationEngine,
    task: LoadedTask,
    settings: AnswerSettings,
    progress: Progress = no_progress,
) -> TaskScores:
    """Generate and grade the completions of a task.

    Raises ConfigError for a prompt that is too long, and for a grade function that fails for every completion.
    """
    requests = completion_requests(text, task, settings)
    check_lengths(task, requests, engine.config.max_length)
    completions = generate_completions(text.tokenizer, engine, requests, progress)
    samples = settings.samples
    untruncated = [index for index, completion in enumerate(completions) if completion.end_reason != "length"]
    computed = grade_completions(
        task.grader,
        [(task.examples[index // samples], completions[index].text) for index in untruncated],
        workers=settings.grade_workers,
        seconds=settings.grade_seconds,
        flag=f"grade of task {task.name!r}",
    )
    grades: list[Grade | None] = [None] * len(completions)
    for index, grade in zip(untruncated, computed, strict=True):
        grades[index] = grade
    rows = range(0, len(completions), samples)
    return TaskScores(
        task=task,
        completions=[completions[row : row + samples] for row in rows],
        grades=[grades[row : row + samples] for row in rows],
    )
