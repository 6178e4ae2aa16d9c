"""What a run with rewards needs beside one on texts: prompts, answers, their rewards, and the batches of these."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.prompt_batches import Prompt, PromptBatches
from eqx_decoders.data.signals import Signals
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.rl.answer_batch import AnswerPacker, answer_numbers, row_choices
from eqx_decoders.rl.drawn_answers import AnswerFiles, JudgedAnswer
from eqx_decoders.rl.reward_plot import plot_rewards
from eqx_decoders.rl.rewards import reward_figures
from eqx_decoders.rl.sampler_engine import Drawer
from eqx_decoders.rl.step_draws import StepDraws, draw_figures
from eqx_decoders.training.lora import without_lora
from eqx_decoders.training.methods.method import MethodStart
from eqx_decoders.training.methods.teacher import load_teacher
from eqx_decoders.training.objectives.objectives import PolicyObjective
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from eqx_decoders.training.objectives.values import values_behind
from eqx_decoders.training.run.log import MetricsRow
from eqx_decoders.training.run.model import new_base
from eqx_decoders.training.step.loss import Loss
from eqx_decoders.training.step.train_state import TrainState


FOLDER = "rollouts"  # of the run directory


class RLRun:
    """Answers of a run with rewards, and the batches that its steps learn from.

    The engine that draws answers has the arrays of the training state, which it drops before each step: every answer is
    drawn by the weights that learn from it, or with `rl.max_staleness` 1 by those of one step before (see `StepDraws`).
    """

    waits = True
    evaluates_start = True
    loss: Loss

    def __init__(self, start: MethodStart, prompts: PromptBatches, answerer: Drawer):
        config = start.config
        self.loss = PolicyObjective(
            policy=config.rl.policy, temperature=config.rl.temperature, entropy=config.rl.entropy
        )
        self._config, self._rl, self._execution, self._run = config, config.rl, start.execution, start.run
        self._answerer = answerer
        self._packed = packer_of(start)
        known = dataclasses.asdict(config.rl) | {"eval_samples": 0, "slots": 0, "reward_workers": 0}
        known |= {name: _source_hash(getattr(config.rl, name)) for name in ("reward", "environment")}
        known |= {"critic": None}  # no answer depends on it
        known |= {"reward_model": None if answerer.judge is None else answerer.judge.fingerprint}
        known |= {"prompts_of": prompts.get_state() | {"prompt": 0}, "rows": config.data.batch_size}
        key = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=8).hexdigest()
        self._draws = StepDraws(config, answerer, prompts, AnswerFiles(start.run.path / FOLDER), key)
        self._reference = self._load_reference()
        self._teacher = None
        if config.rl.teacher is not None:
            self._teacher = load_teacher(config.rl.teacher, start.tokenizer, start.execution, "rl.teacher")
        self._figures: dict[str, float] = {}
        self._shown: Sequence[JudgedAnswer] = ()

    # --- a step -------------------------------------------------------------------------------------------------------

    def prepare(self, rows: list[Prompt], state: TrainState) -> Batch:
        """Draw answers to the prompts of a step, or find those that there are, and pack them with signals."""
        drawn = self._draws.answers(rows, state)
        self._shown = drawn.answers
        self._figures = reward_figures(drawn.answers) | draw_figures(drawn, int(state.step))
        return self._batch(drawn.answers, state)

    # --- its batch ----------------------------------------------------------------------------------------------------

    def _batch(self, answers: Sequence[JudgedAnswer], state: TrainState) -> Batch:
        rl, reference = self._rl, None
        more: dict[str, Any] = {}
        if rl.kl > 0:
            reference = without_lora(state.model) if self._reference is None else self._reference
        if reference is not None and rl.kl_in == "reward":
            more["divergences"] = self._divergences(answers, reference)
        if state.critic is not None:
            more["values"] = self._values(answers, state.critic.model)
        numbers = answer_numbers(rl, answers, **more)
        self._figures |= numbers.figures()
        batch = self._packed(answers, numbers, divergence=rl.kl if rl.kl_in == "loss" else 0.0).batch
        batch = batch if reference is None else _with_reference(reference, batch, rl.temperature)
        return batch if self._teacher is None else _taught(self._teacher, batch, rl.teacher_weight, rl.temperature)

    def _divergences(self, answers: Sequence[JudgedAnswer], reference: Decoder) -> list[np.ndarray]:
        """Estimate the divergence from the reference at each token that was drawn, `log p - log reference` (k1)."""
        batch, drawn, _ = self._packed(answers)
        log_probs = np.asarray(_replicated_log_probs(reference, batch, self._rl.temperature), np.float64)
        sampled = [np.concatenate([part.rollout.log_probs[part.drawn] for part in each.parts]) for each in answers]
        return [mine - log_probs[index] for mine, index in zip(sampled, drawn, strict=True)]

    def _values(self, answers: Sequence[JudgedAnswer], critic: Decoder) -> list[np.ndarray]:
        """Compute what a critic expects at each token that was drawn, and behind the last one.

        A value is read before its token: behind the one that precedes it, which may be of a prompt or of a tool.
        """
        batch, drawn, _ = self._packed(answers)
        behind = np.asarray(_replicated_values(critic, batch), np.float64)
        return [behind[np.append(rows, rows[-1:]), np.append(columns - 1, columns[-1:])] for rows, columns in drawn]

    # --- beside the steps ---------------------------------------------------------------------------------------------

    def figures(self) -> MetricsRow:
        """Return the figures of the answers of the last step."""
        return dict(self._figures)

    def evaluate(self, state: TrainState, batches: Iterable[list[Prompt]]) -> dict[str, float]:
        """Compute the mean rewards of held-out prompts, of the most likely answers and of drawn ones."""
        prompts, rl = [prompt for batch in batches for prompt in batch], self._rl
        self._draws.wait()
        self._answerer.engine.load(state.averaged, version=int(state.step))
        figures = {}
        for name, samples, temperature in (("reward_greedy", 1, 0.0), ("reward", rl.eval_samples, rl.temperature)):
            groups = self._answerer.judged(prompts, samples=samples, temperature=temperature, seed="held out")
            rewards = reward_figures([answer for group in groups for answer in group])
            figures[name] = rewards.get("reward", float("nan"))
        self._answerer.engine.release()
        kept, named = ("answer_tokens", "truncated", "reward_failures", "turns"), ("reward/", "metric/")
        return figures | {key: value for key, value in rewards.items() if key in kept or key.startswith(named)}

    def _draw_held_out(self, prompts: list[Prompt]) -> list[JudgedAnswer]:
        temperature = self._rl.temperature
        groups = self._answerer.answer(prompts, samples=1, temperature=temperature, seed="held out")
        return [answer for group in groups for answer in group]

    def note(self, row: MetricsRow) -> str | None:
        """Return an answer of the step as text, where one is due, and say what rewards lack."""
        step, failures = row["step"], row.get("reward_failures", 0.0)
        lines = []
        if failures and (error := next((each.error for each in self._shown if each.error), None)):
            lines.append(f"warning: {failures:.0%} of the answers of step {step} have no reward: {error}")
        if self._config.eval_every and step % self._config.eval_every == 0 and self._shown:
            best = max(self._shown, key=lambda each: (not np.isnan(each.reward), each.reward))
            lines += [_described(each) for each in {id(each): each for each in (self._shown[0], best)}.values()]
        return "\n".join(lines) or None

    def draw(self) -> None:
        """Draw `rewards.png` in the run directory."""
        plot_rewards(self._run.metrics_file, self._run.path / "rewards.png")

    def settle(self, state: TrainState) -> None:
        """Wait for the answers that the next step of a state learns from, where they are under way, and keep them."""
        self._draws.settle(state)

    def close(self) -> None:
        """End what is being drawn, and the processes of rewards."""
        self._draws.close()

    def _load_reference(self) -> Decoder | None:
        adapted = self._config.lora.rank is not None
        if self._rl.kl == 0 or (adapted and self._rl.reference in ("auto", "base")):
            return None
        return new_base(self._run, self._execution)


def _source_hash(function: str | None) -> str | None:
    """Return the name of a function with a hash of its file: another program gives other rewards."""
    file = None if function is None else Path(function.rpartition(":")[0])
    if file is None or not file.is_file():
        return function
    return f"{function} {hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()}"


def packer_of(start: MethodStart) -> AnswerPacker:
    """Return what packs the answers of a run."""
    config, sizes = start.config, start.execution.layout.sizes
    parts = config.step.gradient_accumulation_steps * (config.pipeline.microbatches or 1)
    parts *= math.prod(sizes[axis] for axis in ("data", "fsdp", "fsdp_transpose", "expert"))
    choices = row_choices(config.data.batch_size, parts)
    rows: dict[str, int] = dict(seq_len=config.data.seq_len, answers_per_row=config.rl.answers_per_row)
    return AnswerPacker(start.execution.layout, choices=choices, **rows)


def _described(answer: JudgedAnswer) -> str:
    prompt = answer.prompt.record if answer.episode is not None else answer.prompt.record["prompt"]
    text = prompt[-1].get("content") if isinstance(prompt, list) else prompt
    reward = "no reward" if np.isnan(answer.reward) else f"reward {answer.reward:g}"
    return f"  {str(text)[-200:]!r} -> {answer.text[:400]!r}: {reward}"


def _by_routers(batch: Batch) -> Batch:
    """Return a batch whose tokens are sent where routers send them: another model replays no choice of the policy."""
    return dataclasses.replace(batch, signals=dataclasses.replace(batch.signals or Signals(), experts=None))


@functools.partial(jax.jit, static_argnums=2)
def _with_reference(reference: Decoder, batch: Batch, temperature: float) -> Batch:
    log_probs = token_log_probs(reference, _by_routers(batch), temperature=temperature)
    return dataclasses.replace(batch, signals=dataclasses.replace(batch.signals or Signals(), reference=log_probs))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _taught(teacher: Decoder, batch: Batch, weight: float, temperature: float) -> Batch:
    """Add to the advantage of each token `weight * (log teacher - log p of the draw)`."""
    log_probs = token_log_probs(teacher, _by_routers(batch), temperature=temperature)
    signals = batch.signals or Signals()
    advantages = jnp.asarray(signals.advantages) + weight * (log_probs - jnp.asarray(signals.sampler))
    return dataclasses.replace(batch, signals=dataclasses.replace(signals, advantages=advantages))


@functools.partial(jax.jit, static_argnums=2)
def _replicated_log_probs(model: Decoder, batch: Batch, temperature: float) -> Float32[Array, "batch length"]:
    return model.execution.layout.replicate(token_log_probs(model, _by_routers(batch), temperature=temperature))


@jax.jit
def _replicated_values(critic: Decoder, batch: Batch) -> Float32[Array, "batch length"]:
    return critic.execution.layout.replicate(values_behind(critic, batch))
