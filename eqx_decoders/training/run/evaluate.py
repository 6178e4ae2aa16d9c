"""Evaluation during a run: held-out losses, tasks and samples, every `eval_every` steps and at the end."""

import contextlib
import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_decoders.core.sampling import Greedy
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import parse_reference
from eqx_decoders.data.store.store import TokenStore
from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.media_config import placeholders
from eqx_decoders.inference.generation import generate
from eqx_decoders.io.processes import Stop
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.evaluation import evaluate_sets, sample_text
from eqx_decoders.training.held_out import HeldOut
from eqx_decoders.training.methods.method import Method
from eqx_decoders.training.run.log import MetricsRow, plot_images
from eqx_decoders.training.run.start import Run
from eqx_decoders.training.run.trackers import Trackers
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.train_state import TrainState


MAX_QUESTIONS = 256  # held-out questions about images that are answered in one evaluation
MAX_PLOTTED = 24  # answered questions in answers.png


def evaluates_after(config: TrainConfig, step: int) -> bool:
    """Return whether a run is evaluated after a step, not counting the evaluation at the end."""
    return bool(config.eval_every) and step % config.eval_every == 0 and step < config.steps


@contextlib.contextmanager
def errors_as_warnings(work: str, step: int, show: Callable[[str], None], *, local: bool = False) -> Iterator[None]:
    """Show an error of optional work as a warning.

    In a run of several processes, errors are raised unless the work is `local`, which means that the processes compute
    nothing together. Otherwise the other processes would wait for this one in the middle of the computation. The run
    ends then, and is resumed from the checkpoint that was saved before the evaluation.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1 and not local:
            raise
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        show(f"warning: {work} at step {step} failed; training continues: {message}")


class HeldOutEvaluation:
    """Evaluation on the held-out sets: the first `eval_batches` batches of each set, at the end all batches.

    **Arguments:**

    - `trackers`: get the row of the evaluation.
    - `show`: prints a line of the progress.
    - `stop`: says whether a signal has asked the run to stop.

    **Attributes:**

    - `results`: losses of the last evaluation by held-out set; "" is the loss of all sets. Empty if the evaluation
        failed or was interrupted by a signal, or if there are no held-out sets.
    - `failed`: whether the last evaluation raised an error.
    """

    def __init__(self, run: Run, trackers: Trackers, show: Callable[[str], None], stop: Stop):
        self.run, self.trackers, self.show, self.stop = run, trackers, show, stop
        self.results: dict[str, HeldOut] = {}
        self.failed = False

    @property
    def is_finite(self) -> bool:
        """Whether the last evaluation did not fail and all of its losses are finite."""
        return not self.failed and all(math.isfinite(result.loss) for result in self.results.values())

    def evaluate(self, step: int, state: TrainState) -> None:
        """Evaluate the model after a step; write and show the result."""
        self.results = {}
        self.failed = True
        with errors_as_warnings("the evaluation", step, self.show):
            if self.run.method is None:
                self.results = self._losses(step, state)
            else:
                self._method_metrics(self.run.method, step, state)
            self.failed = False

    def _batches(self, step: int) -> dict[str, Iterator[Any]]:
        """Return the batches of each held-out set that are evaluated after a step."""
        config = self.run.config
        max_batches = config.eval_batches if step < config.steps else config.final_eval_batches
        return {name: itertools.islice(batches.rewind(), max_batches) for name, batches in self.run.held_out.items()}

    def _close_batches(self) -> None:
        for batches in self.run.held_out.values():
            batches.close()

    def _losses(self, step: int, state: TrainState) -> dict[str, HeldOut]:
        """Return the losses of next-token prediction, by held-out set; write and show them."""
        model = state.averaged  # a copy of the weights if the run has moving averages: there may be no memory for it
        try:
            total, by_set = evaluate_sets(model, self._batches(step), self.run.config.data.batch_size, stop=self.stop)
        finally:
            self._close_batches()
        if self.stop.agreed or not self.run.held_out:
            return {}
        by_set = {name: result for name, result in by_set.items() if name}
        row, message = describe_evaluation(step, total, by_set)
        self.trackers.write(row)
        self.show(message)
        return {"": total, **by_set}

    def _method_metrics(self, method: Method, step: int, state: TrainState) -> None:
        """Compute the metrics of the run's method on the held-out sets; write, show and plot them."""
        try:
            for name, batches in self._batches(step).items():
                metrics = method.evaluate(state, batches)
                suffix = f"/{name}" if name else ""
                self.trackers.write({"step": step} | {f"eval_{key}{suffix}": value for key, value in metrics.items()})
                text = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items())
                self.show(f"step {step}: held-out {text} ({name})" if name else f"step {step}: held-out {text}")
        finally:
            self._close_batches()
        if self.run.is_writer and step:
            with errors_as_warnings("plotting the metrics", step, self.show, local=True):
                method.plot()


def describe_evaluation(step: int, total: HeldOut, by_set: dict[str, HeldOut]) -> tuple[MetricsRow, str]:
    """Return the row of `metrics.jsonl` and the line of the progress for an evaluation."""
    row: dict[str, Any] = {"step": step, "eval_loss": total.loss}
    row |= {f"eval_loss/{name}": result.loss for name, result in by_set.items()}
    message = f"step {step}: held-out loss {total.loss:.4f} nats per token"
    if by_set:
        message += f" ({', '.join(f'{name} {result.loss:.4f}' for name, result in by_set.items())})"
    if total.acceptance:
        row["mtp_acceptance"] = total.acceptance
        message += f", draft tokens accepted {', '.join(f'{rate:.1%}' for rate in total.acceptance)}"
    return row, message


class _Interrupted(Exception):
    """A signal arrived during an evaluation on tasks, whose results are dropped."""


class TaskEvaluation:
    """Evaluation on the tasks of `eval_tasks`: the first `eval_task_examples` examples, at the end all examples.

    `lines`: results of the last evaluation. Empty if the evaluation failed or was interrupted by a signal.
    """

    def __init__(self, run: Run, trackers: Trackers, show: Callable[[str], None], stop: Stop):
        self.run, self.trackers, self.show, self.stop = run, trackers, show, stop
        self.lines: list[str] = []

    def evaluate(self, step: int, state: TrainState, *, is_last: bool = False) -> None:
        """Evaluate the model after a step; write and show the scores."""
        self.lines = []
        tasks = self.run.tasks
        if tasks is None or self.stop.agreed:
            return
        examples = None if is_last else self.run.config.eval_task_examples
        with errors_as_warnings("the evaluation of tasks", step, self.show):
            model = self.run.text_model(state.averaged)
            try:
                results = tasks.evaluate(model, examples=examples, progress=self._check_signals)
            except _Interrupted:
                return
            metrics = {name: value for name, value in results.figures().items() if math.isfinite(value)}
            self.trackers.write({"step": step} | {f"task/{name}": value for name, value in metrics.items()})
            self.lines = results.lines()
            self.show(f"step {step}: tasks {'; '.join(self.lines)}")

    def _check_signals(self, count: int) -> None:
        if self.stop():
            raise _Interrupted


class SampleEvaluation:
    """Samples of the model: a text, or answers to held-out questions about images.

    `text`: the last sample. Empty without samples, and if the sample failed or was interrupted by a signal.
    """

    def __init__(self, run: Run, show: Callable[[str], None], stop: Stop):
        self.run, self.show, self.stop = run, show, stop
        self.text = ""

    def evaluate(self, step: int, state: TrainState, *, is_last: bool = False) -> None:
        """Sample from the model after a step. After the last step, also plot answers about images."""
        self.text = ""
        with errors_as_warnings("the sample", step, self.show):
            self.text = self._sample(state, plot=is_last and self.run.is_writer)
        if self.text and self.run.is_writer and not is_last:
            self.show(self.text)

    def _sample(self, state: TrainState, *, plot: bool) -> str:
        run = self.run
        config = run.config
        model = state.averaged
        if config.sample_tokens == 0 or model.config.scores is not None or self.stop.agreed:
            return ""
        if run.reader is not None and run.held_out:
            answers = answer_questions(
                model,
                run.reader,
                run.tokenizer,
                [batches.store for batches in run.held_out.values() if isinstance(batches, Batches)],
                max_new_tokens=config.sample_tokens,
                max_tokens=config.data.batch_size * config.data.seq_len,
            )
            if plot and answers:
                plot_answers(run.reader, answers[:MAX_PLOTTED], run.directory.path / "answers.png")
            if answers:
                return describe_answers(answers)
        return sample_text(
            model,
            run.tokenizer,
            config.prompt,
            max_new_tokens=config.sample_tokens,
            seed=config.data.seed,
            stop_ids=run.directory.stop_ids,
        )


# --- questions about images ---


class Question(NamedTuple):
    """A held-out document that is split into a prompt, with all images, videos and audio, and the expected answer.

    **Arguments:**

    - `references`: the files of the document.
    - `prompt`, `answer`: tokens, `[length]`.
    """

    references: tuple[str, ...]
    prompt: np.ndarray
    answer: np.ndarray

    @classmethod
    def of(
        cls, tokens: np.ndarray, targets: np.ndarray, references: tuple[str, ...], media_tokens: Sequence[int]
    ) -> "Question | None":
        """Split a document; return None if no token after the last file is a target.

        The answer starts at the first target after the last file. In a conversation it is the first turn after it.

        **Arguments:**

        - `targets`: whether each token is trained on, `[length]`.
        - `media_tokens`: the placeholders of images, videos and audio.
        """
        media_end = int(np.flatnonzero(np.isin(tokens, media_tokens))[-1]) + 1
        if not targets[media_end:].any():
            return None
        start = media_end + int(np.argmax(targets[media_end:]))
        after = np.flatnonzero(~targets[start:])
        stop = len(tokens) if len(after) == 0 else start + int(after[0])
        return cls(references, tokens[:start].astype(np.int32), tokens[start:stop].astype(np.int32))


@dataclasses.dataclass(frozen=True)
class AnsweredQuestion:
    """A held-out question about images, and the model's answer.

    **Arguments:**

    - `references`: the images, videos and audio.
    - `question`, `expected`, `answer`: texts. `answer` is the model's.
    """

    references: tuple[str, ...]
    question: str
    expected: str
    answer: str

    @property
    def files(self) -> str:
        """Return the names of the files."""
        return ", ".join(Path(parse_reference(reference)[1]).name for reference in self.references)

    @property
    def is_correct(self) -> bool:
        """Whether the model's answer equals the expected answer."""
        return self.answer == self.expected


def answer_questions(
    model: Decoder,
    reader: MediaReader,
    tokenizer: Tokenizer,
    stores: Iterable[TokenStore],
    *,
    max_new_tokens: int,
    max_tokens: int,
    max_questions: int = MAX_QUESTIONS,
) -> list[AnsweredQuestion]:
    """Answer the first held-out questions about images with greedy decoding.

    **Arguments:**

    - `stores`: the tokens of the held-out sets.
    - `max_new_tokens`: maximum length of an answer. Longer expected answers are cut off before the comparison.
    - `max_tokens`: maximum number of tokens in a batch, including the answers.
    """
    media_tokens = placeholders(model.config.media)
    questions = list(itertools.islice(_read_questions(stores, media_tokens), max_questions))
    questions = [question._replace(answer=question.answer[:max_new_tokens]) for question in questions]
    hidden_ids = {*media_tokens, tokenizer.eos_id, tokenizer.bos_id}

    def text(tokens: np.ndarray) -> str:
        return tokenizer.decode([int(token) for token in tokens if int(token) not in hidden_ids]).strip()

    answers = _generate_answers(model, reader, questions, tokenizer.eos_id, max_tokens)
    return [
        AnsweredQuestion(question.references, text(question.prompt), text(question.answer), text(answer))
        for question, answer in zip(questions, answers, strict=True)
    ]


def _read_questions(stores: Iterable[TokenStore], media_tokens: Sequence[int]) -> Iterator[Question]:
    for store in stores:
        for start, stop in store.ranges():
            for document in start + np.flatnonzero(store.is_held_out(start, stop) & store.has_media(start, stop)):
                tokens, targets = np.asarray(store[document]), np.asarray(store.targets(document))
                question = Question.of(tokens, targets, store.media(document), media_tokens)
                if question is not None:
                    yield question


def _generate_answers(
    model: Decoder, reader: MediaReader, questions: Sequence[Question], eos_id: int | None, max_tokens: int
) -> Iterator[np.ndarray]:
    """Yield the tokens of each answer. All batches have the same shape, so that one program is compiled."""
    if not questions:
        return
    prompt_length = max(len(question.prompt) for question in questions)
    max_new_tokens = max(len(question.answer) for question in questions)
    batch_size = min(len(questions), max(1, max_tokens // (prompt_length + max_new_tokens)))
    last_tokens = {int(question.answer[-1]) for question in questions}
    stop_ids = () if eos_id is None else (eos_id,)
    if len(last_tokens) == 1:
        stop_ids = tuple(last_tokens)
    for start in range(0, len(questions), batch_size):
        batch = [*questions[start : start + batch_size]]
        count = len(batch)
        batch += batch[:1] * (batch_size - count)
        prompts = np.zeros((batch_size, prompt_length), np.int32)
        for row, question in zip(prompts, batch, strict=True):
            row[: len(question.prompt)] = question.prompt
        references = [reference for question in batch for reference in question.references]
        tokens = generate(
            model,
            prompts,
            prompt_lengths=np.asarray([len(question.prompt) for question in batch], np.int32),
            media=Media.create(model.config, prompts, **reader.arrays(references)),
            max_new_tokens=max_new_tokens,
            sampler=Greedy(),
            stop_ids=stop_ids,
            pad_id=stop_ids[0] if stop_ids else 0,
        )
        for row, question in zip(np.asarray(tokens)[:count], batch, strict=False):
            yield _cut_answer(row, question)


def _cut_answer(tokens: np.ndarray, question: Question) -> np.ndarray:
    """Cut generated tokens after the expected answer, otherwise after the first token that ends answers."""
    if np.array_equal(tokens[: len(question.answer)], question.answer):
        return question.answer
    ends = np.flatnonzero(tokens == question.answer[-1])
    return tokens[: int(ends[0]) + 1] if len(ends) else tokens


def plot_answers(reader: MediaReader, answers: Sequence[AnsweredQuestion], out_png: Path) -> None:
    """Plot the last image of each question, with the question and the answer. Videos and audio are left out."""
    images, titles, is_correct = [], [], []
    for answered in answers:
        all_pixels = map(reader.pixels, reversed(answered.references))
        pixels = next((pixels for pixels in all_pixels if pixels is not None), None)
        if pixels is not None:
            images.append(pixels)
            titles.append("\n".join(textwrap.shorten(text, 48) for text in (answered.question, answered.answer)))
            is_correct.append(answered.is_correct)
    if images:
        plot_images(images, titles, is_correct, out_png)


def describe_answers(answers: Sequence[AnsweredQuestion]) -> str:
    """Describe the share of correct answers, with a correct and a wrong example."""
    correct = [answered for answered in answers if answered.is_correct]
    wrong = [answered for answered in answers if not answered.is_correct]
    share = 100 * len(correct) / len(answers)
    lines = [f"held-out images: {len(correct)} of {len(answers)} answers are correct ({share:.1f} %)"]
    lines += [f"{answered.files} {answered.question} {answered.answer!r}" for answered in correct[:1]]
    lines += [
        f"{answered.files} {answered.question} {answered.answer!r}, expected {answered.expected!r}"
        for answered in wrong[:1]
    ]
    return "\n".join(lines)
