"""Runs that train on sampled completions: method="rl", and method="distill" with on_policy."""

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

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.dataset import with_special_token_setting
from eqx_decoders.data.end_of_turn import end_of_turn_ids
from eqx_decoders.data.prompt_batches import Prompt, PromptBatches, read_prompts, read_tasks
from eqx_decoders.data.signals import Signals
from eqx_decoders.data.store.shards import separators
from eqx_decoders.errors import check
from eqx_decoders.io.processes import check_same
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.expert_choices import check_choices
from eqx_decoders.rl.completions import Completion, CompletionFiles
from eqx_decoders.rl.critic import open_critic
from eqx_decoders.rl.environments import EpisodeSampler
from eqx_decoders.rl.packing import CompletionPacker, possible_row_counts, step_advantages
from eqx_decoders.rl.rewards import RewardModel, plot_rewards, reward_metrics
from eqx_decoders.rl.rollouts import (
    CompletionSampler,
    Sampler,
    SamplerEngine,
    StepRollouts,
    sampler_execution,
    sampling_metrics,
)
from eqx_decoders.rl.turns import rewritten_turns
from eqx_decoders.serving import Engine
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.describe import describe_devices
from eqx_decoders.training.lora import without_lora
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod, held_out_metrics
from eqx_decoders.training.methods.teachers import load_teacher
from eqx_decoders.training.objectives.distillation import DistillObjective
from eqx_decoders.training.objectives.objectives import PolicyObjective
from eqx_decoders.training.objectives.scores import token_values
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from eqx_decoders.training.run.log import MetricsRow, print_status
from eqx_decoders.training.run.model import new_base
from eqx_decoders.training.settings.rl import RLConfig
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.sampler import split_devices
from eqx_decoders.training.step.loss import Loss
from eqx_decoders.training.step.train_state import TrainState


# --- start of a run ---------------------------------------------------------------------------------------------------


def open_rl(start: MethodStart) -> OpenedMethod:
    """Open a run with method="rl": its prompts, rewards, sampler and critic."""
    return _open(start, RLRun)


def open_on_policy(start: MethodStart) -> OpenedMethod:
    """Open a run with method="distill" and `distill.on_policy`: its prompts, sampler and teacher."""
    return _open(start, OnPolicyDistillRun)


def _open(start: MethodStart, run_class: "type[RLRun]") -> OpenedMethod:
    start.check_text_only()
    config, data, tokenizer, rl = start.config, start.config.data, start.tokenizer, start.config.rl
    template = with_special_token_setting(data, start.options["template"], tokenizer)

    def prompt_batches(path: Any, flag: str, *, held_out: bool = False) -> PromptBatches:
        if rl.environment is None:
            max_tokens = data.seq_len - rl.max_new_tokens
            prompts = read_prompts(path, tokenizer, max_tokens=max_tokens, template=template, flag=flag)
        else:
            prompts = read_tasks(path, flag=flag)
        return PromptBatches(prompts, count=rl.prompts, seed=data.seed, held_out=held_out)

    train = prompt_batches(data.path, "--data")
    held_out = {}
    if data.held_out_path is not None:
        held_out[""] = prompt_batches(data.held_out_path, "--held-out", held_out=True)
    hashes = [batches.prompts.content_hash for batches in (train, *held_out.values())]
    check_same("the prompts", hashes, "all must read the same files")
    max_prompt_tokens = max(batches.prompts.max_length for batches in (train, *held_out.values()))
    max_tokens = max_prompt_tokens + rl.max_new_tokens
    if rl.environment is not None:
        max_tokens = rl.episode_tokens or data.seq_len
    _check_batch_size(config, max_tokens)
    if rl.routing_replay:
        check_choices(start.target.config, "rl.routing_replay=True")
    layout = _sampler_layout(start)
    engine = SamplerEngine(
        Engine,
        _engine_config(rl, max_prompt_tokens or max_tokens, max_tokens),
        layout,
        compute_dtype=config.sampler.compute_dtype,
    )
    stop_ids = _stop_ids(tokenizer, template, start.target.generation_config.stop_ids)
    if rl.environment is None:
        sampler = CompletionSampler(rl, tokenizer, stop_ids=stop_ids, engine=engine)
    else:
        _check_environment(template)
        sampler = EpisodeSampler(rl, tokenizer, template, max_tokens=max_tokens, stop_ids=stop_ids, engine=engine)
    if rl.reward_model is not None:
        execution = start.execution
        if layout is not None and config.sampler.devices:  # the thread must not use the devices that train
            execution = sampler_execution(execution, layout)
        sampler.reward_model = RewardModel(rl, tokenizer, execution, completion_packer(config, execution))
    method = run_class(start, train, sampler)
    start.stack.callback(method.close)
    if rl.preset is not None:
        print_status(f"rl.preset={rl.preset}: {rl.describe_preset()}")
    critic = open_critic(start) if rl.baseline == "critic" else None
    return OpenedMethod(train, held_out, method, critic, rl.critic.warmup_steps)


def _stop_ids(tokenizer: Tokenizer, template: ChatTemplate | None, model_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the end tokens of completions: those of the model, of documents, and of the assistant's turns."""
    _, end_of_document = separators(tokenizer)
    ids = {*model_ids, *end_of_turn_ids(tokenizer, template)}
    if end_of_document is not None:
        ids.add(end_of_document)
    return tuple(sorted(ids))


_REWRITTEN_TURNS = {"plain": "turns", "reasoning": "turns with reasoning"}


def _check_environment(template: ChatTemplate | None) -> None:
    """Raise ConfigError for several processes; print a line if the template renders earlier turns differently."""
    check(
        jax.process_count() == 1,
        f"rl.environment supports one process, not {jax.process_count()}: use one process, or rl.reward.",
    )
    rewritten = rewritten_turns(template)
    if rewritten:
        kinds = " and ".join(_REWRITTEN_TURNS[kind] for kind in rewritten)
        print_status(
            f"the chat template renders earlier {kinds} differently when a message follows: such episodes continue in "
            "another segment (forked_segments)"
        )


MAX_PREFILL_CHUNK = 128  # tokens


def _engine_config(rl: RLConfig, max_prompt_tokens: int, max_tokens: int) -> EngineConfig:
    chunk = min(MAX_PREFILL_CHUNK, max(16, 1 << (max_prompt_tokens - 1).bit_length()))
    slots = min(rl.slots, rl.prompts * rl.samples)
    return EngineConfig(
        max_batch_size=slots,
        max_length=max_tokens,
        prefill_chunk=chunk,
        token_budget=slots + 4 * chunk,
        max_logprobs=0,
        max_logit_bias=0,
        expert_choices=rl.routing_replay,
    )


def _sampler_layout(start: MethodStart) -> Layout | None:
    """Return the layout of the sampler's weights and print it; None: use the trainer's arrays."""
    sampler, trainer_layout = start.config.sampler, start.execution.layout
    if not sampler.is_separate:
        return None
    devices = split_devices(sampler.devices)[1] if sampler.devices else [*trainer_layout.mesh.devices.flat]
    layout = sampler.layout(devices, start.target)
    print_status(f"completions are sampled on {len(devices)} devices: {describe_devices(layout)}")
    return layout


def _check_batch_size(config: TrainConfig, max_tokens: int) -> None:
    """Raise ConfigError unless a batch has room for all completions of a step, with up to `max_tokens` tokens each."""
    rl, data = config.rl, config.data
    check(
        max_tokens <= data.seq_len,
        f"rl.episode_tokens={max_tokens} must be at most data.seq_len={data.seq_len}.",
    )
    check(
        rl.completions_per_row >= rl.max_segments,
        f"rl.completions_per_row={rl.completions_per_row} must be at least {rl.max_segments}, the number of segments "
        "that an episode of rl.max_turns may have: raise it, or set rl.strict_prefix.",
    )
    in_row = min(rl.completions_per_row // rl.max_segments, data.seq_len // max_tokens)
    rows = -(-rl.prompts * rl.samples // in_row)
    remedy = "" if rl.environment is None else ", or set rl.episode_tokens"
    check(
        rows <= data.batch_size,
        f"rl.prompts={rl.prompts} x rl.samples={rl.samples} completions of up to {max_tokens} tokens with prompt "
        f"need data.batch_size={rows}, not {data.batch_size}: raise it or data.seq_len={data.seq_len}, or lower "
        f"rl.prompts or rl.samples{remedy}.",
    )


def completion_packer(config: TrainConfig, execution: Execution) -> CompletionPacker:
    """Return the packer of a run's completions."""
    sizes = execution.layout.sizes
    unit = config.step.gradient_accumulation_steps * (config.pipeline.microbatches or 1)
    unit *= math.prod(sizes[axis] for axis in ("data", "fsdp", "fsdp_transpose", "expert"))
    return CompletionPacker(
        execution.layout,
        row_counts=possible_row_counts(config.data.batch_size, unit),
        seq_len=config.data.seq_len,
        completions_per_row=config.rl.completions_per_row,
    )


# --- reinforcement learning -------------------------------------------------------------------------------------------


ROLLOUTS = "rollouts"  # folder in the run directory


class RLRun:
    """Method of a run with rewards: samples the completions of each step and packs them into its batch.

    The sampler's engine uses the arrays of the training state and drops them before each step. Completions are sampled
    from the weights that learn from them, or with `rl.max_staleness=1` from those of one step before (see
    `StepRollouts`).
    """

    needs_current_weights = True
    evaluates_start = True
    loss: Loss

    def __init__(self, start: MethodStart, prompts: PromptBatches, sampler: Sampler):
        config, rl = start.config, start.config.rl
        self.loss = PolicyObjective(policy=rl.policy, temperature=rl.temperature, entropy=rl.entropy)
        self._config, self._rl, self._run, self._sampler = config, rl, start.run, sampler
        self._packer = completion_packer(config, start.execution)
        files, key = CompletionFiles(start.run.path / ROLLOUTS), _settings_key(config, prompts, sampler)
        self._rollouts = StepRollouts(config, sampler, prompts, files, key)
        self._reference = self._teacher = None
        if rl.kl > 0 and (config.lora.rank is None or rl.reference == "start"):
            self._reference = new_base(start.run, start.execution)
        if rl.teacher is not None:
            self._teacher = load_teacher(rl.teacher, start.tokenizer, start.execution, "rl.teacher")
        self._metrics: dict[str, float] = {}
        self._completions: Sequence[Completion] = ()  # of the last step

    def prepare(self, rows: list[Prompt], state: TrainState) -> Batch:
        """Sample completions for the prompts of a step, or read them, and pack them with their signals."""
        found = self._rollouts.for_step(rows, state)
        self._completions = found.completions
        self._metrics = reward_metrics(found.completions) | sampling_metrics(found, int(state.step))
        return self._batch(found.completions, state)

    def _batch(self, completions: Sequence[Completion], state: TrainState) -> Batch:
        rl, reference, divergences, values = self._rl, None, None, None
        if rl.kl > 0:
            reference = without_lora(state.model) if self._reference is None else self._reference
        if reference is not None and rl.kl_in == "reward":
            divergences = self._divergences(completions, reference)
        if state.critic is not None:
            values = self._values(completions, state.critic.model)
        advantages = step_advantages(rl, completions, divergences=divergences, values=values)
        self._metrics |= advantages.metrics()
        batch = self._packer(completions, advantages, kl_weight=rl.kl if rl.kl_in == "loss" else 0.0).batch
        if reference is not None:
            batch = _with_reference_log_probs(reference, batch, rl.temperature)
        if self._teacher is not None:
            batch = _with_teacher_advantages(self._teacher, batch, rl.teacher_weight, rl.temperature)
        return batch

    def _divergences(self, completions: Sequence[Completion], reference: Decoder) -> list[np.ndarray]:
        """Compute `log p - log p_ref` of each sampled token (k1), with the sampler's log-probs."""
        packed = self._packer(completions)
        log_probs = np.asarray(_replicated_log_probs(reference, packed.batch, self._rl.temperature), np.float64)
        divergences = []
        for completion, indices in zip(completions, packed.sampled, strict=True):
            sampler = [segment.rollout.log_probs[segment.sampled] for segment in completion.segments]
            divergences.append(np.concatenate(sampler) - log_probs[indices])
        return divergences

    def _values(self, completions: Sequence[Completion], critic: Decoder) -> list[np.ndarray]:
        """Compute the critic's value before each sampled token, and after the last one.

        The value before a token is the critic's output at the preceding token, which may belong to the prompt or to
        the environment.
        """
        packed = self._packer(completions)
        after = np.asarray(_replicated_values(critic, packed.batch), np.float64)
        return [
            after[np.append(rows, rows[-1:]), np.append(columns - 1, columns[-1:])] for rows, columns in packed.sampled
        ]

    def metrics(self) -> MetricsRow:
        """Return the metrics of the completions of the last step."""
        return dict(self._metrics)

    def evaluate(self, state: TrainState, batches: Iterable[list[Prompt]]) -> dict[str, float]:
        """Compute the mean rewards of greedy and of sampled completions of held-out prompts."""
        prompts, rl = [prompt for batch in batches for prompt in batch], self._rl
        self._rollouts.wait()
        self._sampler.engine.load(state.averaged, version=int(state.step))
        metrics, sampled = {}, {}
        for name, samples, temperature in (("reward_greedy", 1, 0.0), ("reward", rl.eval_samples, rl.temperature)):
            groups = self._sampler.sample_with_rewards(
                prompts, samples=samples, temperature=temperature, seed="held out"
            )
            sampled = reward_metrics([completion for group in groups for completion in group])
            metrics[name] = sampled.get("reward", float("nan"))
        self._sampler.engine.release()
        names, prefixes = ("completion_tokens", "truncated", "reward_failures", "turns"), ("reward/", "metric/")
        return metrics | {name: value for name, value in sampled.items() if name in names or name.startswith(prefixes)}

    def describe_step(self, row: MetricsRow) -> str | None:
        """Return a warning if completions have no reward, and after `eval_every` steps two completions as text."""
        step, failures = row["step"], row.get("reward_failures", 0.0)
        errors = [completion.error for completion in self._completions if completion.error]
        lines = []
        if failures and errors:
            lines.append(f"warning: {failures:.0%} of the completions of step {step} have no reward: {errors[0]}")
        if self._config.eval_every and step % self._config.eval_every == 0 and self._completions:
            first = self._completions[0]
            best = max(self._completions, key=lambda completion: (not np.isnan(completion.reward), completion.reward))
            lines += [_described(completion) for completion in ((first,) if best is first else (first, best))]
        return "\n".join(lines) or None

    def plot(self) -> None:
        """Write `rewards.png` in the run directory."""
        plot_rewards(self._run.metrics_file, self._run.path / "rewards.png")

    def before_checkpoint(self, state: TrainState) -> None:
        """Wait for completions of the next step that are being sampled, and write them."""
        self._rollouts.before_checkpoint(state)

    def close(self) -> None:
        """Stop sampling, and the worker processes."""
        self._rollouts.close()


def _settings_key(config: TrainConfig, prompts: PromptBatches, sampler: Sampler) -> str:
    """Return a hash of everything that completions depend on besides the weights."""
    settings = dataclasses.asdict(config.rl) | {"eval_samples": 0, "slots": 0, "reward_workers": 0, "critic": None}
    for name in ("reward", "environment"):
        settings[name] = _name_and_source_hash(getattr(config.rl, name))
    settings["reward_model"] = None if sampler.reward_model is None else sampler.reward_model.fingerprint
    settings["prompts_of"] = prompts.get_state() | {"prompt": 0}
    settings["rows"] = config.data.batch_size
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def _name_and_source_hash(function: str | None) -> str | None:
    """Return the name of a user's function with a hash of its file, because a changed file gives other rewards."""
    file = None if function is None else Path(function.rpartition(":")[0])
    if file is None or not file.is_file():
        return function
    return f"{function} {hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()}"


def _described(completion: Completion) -> str:
    prompt = completion.prompt.record if completion.episode is not None else completion.prompt.record["prompt"]
    text = prompt[-1].get("content") if isinstance(prompt, list) else prompt
    reward = "no reward" if np.isnan(completion.reward) else f"reward {completion.reward:g}"
    return f"  {str(text)[-200:]!r} -> {completion.text[:400]!r}: {reward}"


def _without_routing_replay(batch: Batch) -> Batch:
    """Return the batch without the sampler's experts: other models than the policy use their own routers."""
    return dataclasses.replace(batch, signals=dataclasses.replace(batch.signals or Signals(), experts=None))


@functools.partial(jax.jit, static_argnums=2)
def _with_reference_log_probs(reference: Decoder, batch: Batch, temperature: float) -> Batch:
    log_probs = token_log_probs(reference, _without_routing_replay(batch), temperature=temperature)
    return dataclasses.replace(batch, signals=dataclasses.replace(batch.signals or Signals(), reference=log_probs))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _with_teacher_advantages(teacher: Decoder, batch: Batch, weight: float, temperature: float) -> Batch:
    """Add `weight * (log p_teacher - log p_sampler)` to the advantage of each token."""
    log_probs = token_log_probs(teacher, _without_routing_replay(batch), temperature=temperature)
    signals = batch.signals or Signals()
    advantages = jnp.asarray(signals.advantages) + weight * (log_probs - jnp.asarray(signals.sampler))
    return dataclasses.replace(batch, signals=dataclasses.replace(signals, advantages=advantages))


@functools.partial(jax.jit, static_argnums=2)
def _replicated_log_probs(model: Decoder, batch: Batch, temperature: float) -> Float32[Array, "batch length"]:
    log_probs = token_log_probs(model, _without_routing_replay(batch), temperature=temperature)
    return model.execution.layout.replicate(log_probs)


@jax.jit
def _replicated_values(critic: Decoder, batch: Batch) -> Float32[Array, "batch length"]:
    return critic.execution.layout.replicate(token_values(critic, batch))


# --- on-policy distillation -------------------------------------------------------------------------------------------


class OnPolicyDistillRun(RLRun):
    """Method of on-policy distillation (GKD, arXiv 2306.13649): compares student and teacher on sampled completions."""

    def __init__(self, start: MethodStart, prompts: PromptBatches, sampler: Sampler):
        super().__init__(start, prompts, sampler)
        settings = start.config.distill
        teacher = load_teacher(str(settings.teacher), start.tokenizer, start.execution)
        self.loss = DistillObjective(teacher, **settings.loss_options())

    def evaluate(self, state: TrainState, batches: Iterable[list[Prompt]]) -> dict[str, float]:
        """Compute the loss and the divergence of completions of held-out prompts."""
        self._rollouts.wait()
        self._sampler.engine.load(state.averaged, version=int(state.step))
        options: dict[str, Any] = dict(samples=1, temperature=self._rl.temperature, seed="held out")
        groups = [self._sampler.sample(prompts, **options) for prompts in batches]
        self._sampler.engine.release()
        completions = ([completion for group in batch for completion in group] for batch in groups)
        packed = (self._packer(of_batch).batch for of_batch in completions)
        return held_out_metrics(self.loss, state, packed, lambda batch: batch)
