"""A model on tasks: it answers their examples, and the answers are graded."""

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
    AnswerRequest,
    EvaluationEngine,
    Progress,
    no_progress,
    write_answers,
)
from eqx_decoders.evaluation.grading import Grade, grade_answers
from eqx_decoders.evaluation.task import LoadedTask
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.io.text.answers.formats import reasoning_format
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.serving.engine.config import EngineConfig, EngineLimits
from eqx_decoders.serving.engine.sampler import SamplingParams


@runtime_checkable
class TextSource(Protocol):
    """What evaluations need of a `TextModel`."""

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
    """How the answers to a task's examples are drawn and graded."""

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
        many = f"samples={self.samples} with temperature={self.temperature} are the same answer {self.samples} times"
        check(self.samples == 1 or self.drawn_at > 0, f"{many}: give a temperature above 0, or one sample.")
        for k in self.pass_at:
            check(k <= self.samples, f"pass_at={k} needs samples={k} at least, and there are {self.samples}.")

    @property
    def drawn_at(self) -> float:
        """Temperature of the draws."""
        return self.temperature if self.temperature is not None else float(self.samples > 1)

    @property
    def ks(self) -> tuple[int, ...]:
        """Numbers k of pass@k that are reported."""
        powers = (2**power for power in range(self.samples.bit_length()))
        return self.pass_at or tuple(k for k in powers if k < self.samples)

    def sampling(self, task: str, example: int, sample: int) -> SamplingParams:
        """Return the sampling parameters of one answer."""
        names = json.dumps([self.seed, task, example, sample]).encode()
        seed = int.from_bytes(hashlib.blake2b(names, digest_size=7).digest(), "big")
        return SamplingParams(temperature=self.drawn_at, top_k=self.top_k, top_p=self.top_p, seed=seed)


def default_chunk(text: TextSource) -> int:
    """Return the prompt tokens that an evaluation computes at once: few on CPUs, where that costs nothing, so that
    continuations share more of their context.
    """
    return 32 if text.model.execution.layout.backend.active_rows_only else EngineLimits.prefill_chunk


def make_engine(text: TextSource, limits: EngineLimits) -> Any:
    """Make an `Engine` that answers and scores: it reports the most likely token, and takes one bias of a request."""
    from eqx_decoders.serving.engine.engine import Engine

    fields = {field.name: getattr(limits, field.name) for field in dataclasses.fields(EngineLimits)}
    return Engine(text.model, EngineConfig(**fields, max_logprobs=1, max_logit_bias=1))


def answer_requests(text: TextSource, task: LoadedTask, settings: AnswerSettings) -> list[AnswerRequest]:
    """Return the requests for all answers to a task's examples, those to one example one after the other."""
    prompts: list[Any] = [example.get("messages") or example["prompt"] for example in task.examples]
    if text.chat is not None and task.task.chat:
        prompts = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts]
    conversations = not all(isinstance(one, str) for one in prompts)
    rule = "and this model has no chat template: give a prompt in their place"
    check(text.chat is not None or not conversations, f"task {task.name!r} has examples with messages, {rule}.")
    variables = [
        template_variables(example, f"task {task.name!r}, example {number}") if example.get("messages") else {}
        for number, example in enumerate(task.examples, 1)
    ]
    new, stop = settings.max_new_tokens or task.task.max_new_tokens, task.task.stop
    reasoning = None if text.chat is None else reasoning_format(text.chat.source)
    return [
        AnswerRequest(
            tuple(ids.tolist()), new, settings.sampling(task.name, number, sample), stop, text.stop_ids, reasoning
        )
        for number, ids in enumerate(text.encode_many(prompts, variables))
        for sample in range(settings.samples)
    ]


def check_lengths(task: LoadedTask, requests: Sequence[AnswerRequest], max_length: int) -> None:
    """Raise ConfigError for an example whose prompt and answer exceed `max_length` tokens."""
    samples = len(requests) // len(task.examples)
    for number, each in enumerate(requests):
        text = f"task {task.name!r}, example {number // samples + 1}: its prompt has {len(each.prompt)} tokens"
        rule = f"more than max_length={max_length}. Raise it, or lower max_new_tokens"
        fits = len(each.prompt) + each.max_new_tokens <= max_length
        check(fits, f"{text}, with max_new_tokens={each.max_new_tokens} {rule}.")


def evaluate_task(
    text: TextSource,
    engine: EvaluationEngine,
    task: LoadedTask,
    settings: AnswerSettings,
    progress: Progress = no_progress,
) -> TaskScores:
    """Let a model answer the examples of a task, and grade the answers.

    Raises ConfigError for a prompt that is too long, and for a grade that fails at every answer.
    """
    requests = answer_requests(text, task, settings)
    check_lengths(task, requests, engine.config.max_length)
    answers = write_answers(text.tokenizer, engine, requests, progress)
    samples = settings.samples
    whole = [number for number, answer in enumerate(answers) if answer.end != "length"]
    calls = [(task.examples[number // samples], answers[number].text) for number in whole]
    limits: dict[str, Any] = dict(workers=settings.grade_workers, seconds=settings.grade_seconds)
    graded = grade_answers(task.grader, calls, **limits, flag=f"grade of task {task.name!r}")
    grades: list[Grade | None] = [None] * len(answers)
    for number, grade in zip(whole, graded, strict=True):
        grades[number] = grade
    rows = range(0, len(answers), samples)
    return TaskScores(
        task=task,
        answers=[answers[row : row + samples] for row in rows],
        grades=[grades[row : row + samples] for row in rows],
    )
