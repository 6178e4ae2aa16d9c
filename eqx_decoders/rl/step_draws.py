"""Answers of steps: drawn before a step, or by a thread while the step before is trained, or found in files."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import numpy as np

from eqx_decoders.data.prompt_batches import Prompt, PromptBatches
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.processes import from_first
from eqx_decoders.model.weights_fingerprint import weights_fingerprint
from eqx_decoders.rl.drawn_answers import AnswerFiles, JudgedAnswer, StepAnswers
from eqx_decoders.rl.sampler_engine import Drawer
from eqx_decoders.rl.token_credit import turns_of
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.step.train_state import TrainState


PATIENCE = 30.0  # seconds in which a thread must hear that its answers are not needed any more


class StepAhead(NamedTuple):
    """Answers of a step that are being drawn, or were found, before it comes; `drawn_by`: a key of all they are of."""

    step: int
    drawn_by: str
    answers: "Future[StepAnswers]"


class StepDraws:
    """Answers of steps, each drawn by one version of the weights, to prompts in their order.

    The answers of step k + 1 are drawn by the weights after step k, before it begins; with `rl.max_staleness` 1 by
    those after step k - 1, in a thread, while step k is trained (the first step has none before it: its weights draw
    for it and for the second). A checkpoint waits for the thread (`settle`), so that a run that goes on from it finds
    in the files what was drawn by weights that are gone; all later answers are drawn again by the same weights as
    before. Without these files its first step is drawn by the weights of the checkpoint.

    **Arguments:**

    - `known`: a hash of what answers follow from beside weights and prompts.
    """

    def __init__(self, config: TrainConfig, answerer: Drawer, prompts: PromptBatches, files: AnswerFiles, known: str):
        self._config, self._rl, self._known = config, config.rl, known
        self._answerer, self._prompts, self._files = answerer, prompts, files
        self._ahead: StepAhead | None = None
        self._thread: threading.Thread | None = None
        self._written: tuple[int, str] | None = None  # step and key of the last answers that were drawn ahead
        self._fingerprint: tuple[int, int] | None = None  # the last step, and the fingerprint of its weights
        self._waited = 0.0  # seconds in which they were waited for

    def answers(self, rows: list[Prompt], state: TrainState) -> StepAnswers:
        """Return the answers that the next step of a state learns from, to the prompts that were dealt out for it.

        The cursor goes on behind all prompts that they took. Raises what the thread that drew them has raised.
        """
        step, key = int(state.step) + 1, self._key(state)
        drawn = self._finished(step, key) or self._read(step, key)
        if drawn is None:
            self._answerer.engine.load(state.model, version=step - 1)
            drawn = self._draw(rows, copy.copy(self._prompts), step)
            if jax.process_index() == 0:
                self._files.write(step, key, drawn)
        self._prompts.take(drawn.prompts - len(rows))
        if self._rl.max_staleness and step < self._config.steps:
            self._begin(step + 1, key, state)
        return drawn

    def wait(self) -> None:
        """Wait until no thread uses the engine. Raises what it has raised."""
        started = time.perf_counter()
        if self._ahead is not None:
            self._ahead.answers.result()
        self._waited += time.perf_counter() - started

    def settle(self, state: TrainState) -> None:
        """Wait for the answers of the next step of a state, where they are being drawn, and write them."""
        step = int(state.step) + 1
        if self._ahead is not None and self._ahead.step == step:
            self._finished(step, self._key(state))

    def close(self) -> None:
        """End the thread and the processes of rewards."""
        self._answerer.engine.stop()
        self._answerer.close()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    # --- the step ahead ---

    def _begin(self, step: int, key: str, state: TrainState) -> None:
        """Begin to draw the answers of a step, unless they are in a file: a run was killed and comes by again."""
        cursor = copy.copy(self._prompts)
        drawn_by = f"{key} {cursor.get_state()['prompt']}"
        drawn, future = self._files.read(step, drawn_by, field="drawn_by"), Future[StepAnswers]()
        self._ahead, self._waited = StepAhead(step, drawn_by, future), 0.0
        if drawn is not None:
            future.set_result(drawn)
            return
        self._answerer.engine.load(state.model, version=int(state.step))
        self._thread = threading.Thread(
            target=_set_result, args=(future, lambda: self._draw(next(cursor), cursor, step)), daemon=True
        )
        self._thread.start()

    def _finished(self, step: int, key: str) -> StepAnswers | None:
        """Return the answers of a step that were drawn ahead, and write them; None if it has none."""
        ahead = self._ahead
        if ahead is None or ahead.step != step:
            return None
        self.wait()
        drawn = ahead.answers.result()
        if self._written != (step, key):  # the weights of steps that change nothing have one key
            self._files.write(step, key, drawn, drawn_by=ahead.drawn_by)
            self._written = (step, key)
        return drawn._replace(waited=self._waited)

    # --- one step ---

    def _key(self, state: TrainState) -> str:
        """Return a key of the weights of a state. All weights are read, but only once for each step."""
        step = int(state.step)
        if self._fingerprint is None or self._fingerprint[0] != step:
            self._fingerprint = step, self._weights_fingerprint(state)
        return f"{self._fingerprint[1]:08x}{self._known}"

    def _weights_fingerprint(self, state: TrainState) -> int:
        return int(weights_fingerprint(state.model))

    def _read(self, step: int, key: str) -> StepAnswers | None:
        """Read the answers of a step that was taken before, by these weights."""
        drawn = self._files.read(step, key)
        if not from_first(f"answers {step}", drawn is not None):
            return None
        rule = f"{self._files.path(step)} is not that of the first process: share one run_dir."
        check(drawn is not None, rule, DataError)
        return drawn

    def _draw(self, prompts: list[Prompt], cursor: PromptBatches, step: int) -> StepAnswers:
        """Draw groups of answers; with dynamic sampling, others from the cursor in place of those of one reward."""
        rl, chosen, constant, dealt = self._rl, list[list[JudgedAnswer]](), list[list[JudgedAnswer]](), 0
        seconds, tokens = 0.0, 0
        while prompts:
            dealt += len(prompts)
            seed = f"{self._config.data.seed}/{step}"
            groups = self._answerer.judged(prompts, samples=rl.samples, temperature=rl.temperature, seed=seed)
            groups = _same_everywhere(groups, f"rewards {step} {dealt}")
            seconds, tokens = seconds + self._answerer.seconds, tokens + self._answerer.tokens
            for group in groups:
                (constant if rl.dynamic_sampling and is_constant(rl, group) else chosen).append(group)
            room = min(rl.prompts - len(chosen), rl.most_draws * rl.prompts - dealt)
            prompts = cursor.take(room) if rl.dynamic_sampling and room > 0 else []
        self._answerer.engine.release()
        answers = [answer for group in chosen or constant for answer in group]
        return StepAnswers(answers, dealt, len(constant) if chosen else 0, seconds, tokens)


def draw_figures(drawn: StepAnswers, version: int) -> dict[str, float]:
    """Return what is reported of the draws of a step whose weights have this version, beside their rewards."""
    parts = [part for answer in drawn.answers for part in answer.parts]
    ages = version - np.concatenate([part.rollout.versions[part.drawn] for part in parts])
    figures = {"constant_left_out": float(drawn.constant)}
    figures |= {"staleness": float(ages.mean()), "staleness_max": float(ages.max())}
    if drawn.seconds > 0:
        figures |= {"rollout_seconds": drawn.seconds, "rollout_tokens_per_second": drawn.tokens / drawn.seconds}
    return figures | ({"rollout_wait_seconds": drawn.waited} if drawn.waited > 0 else {})


def _set_result(future: "Future[StepAnswers]", function: Callable[[], StepAnswers]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _same_everywhere(groups: list[list[JudgedAnswer]], name: str) -> list[list[JudgedAnswer]]:
    """Return the groups with the rewards of the first process: those of others may differ, or have failed."""
    if jax.process_count() == 1:
        return groups
    names = ("reward", "columns", "error", "seconds")
    said = from_first(name, [[{each: getattr(answer, each) for each in names} for answer in g] for g in groups])
    pairs = zip(groups, said, strict=True)
    return [[answer._replace(**row) for answer, row in zip(*pair, strict=True)] for pair in pairs]


def is_constant(rl: RLConfig, group: Sequence[JudgedAnswer]) -> bool:
    """Return whether all answers that were judged have the same reward, or the same in each turn where these count."""
    rewards = {tuple(turns_of(rl, answer)[1].tolist()) for answer in group if not np.isnan(answer.reward)}
    return len(rewards) < 2
