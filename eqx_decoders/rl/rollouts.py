"""Sampling of completions: the engine, samplers, and the rollouts of each step, possibly one step ahead."""

import abc
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from eqx_decoders.context import Execution
from eqx_decoders.data.prompt_batches import Prompt, PromptBatches
from eqx_decoders.errors import DataError, EqxDecodersError, check
from eqx_decoders.inference.unstack import unstack_in_place
from eqx_decoders.io.processes import broadcast_json
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.weights_fingerprint import weights_fingerprint
from eqx_decoders.rl.completions import CompletionFiles, Groups, StepCompletions, completion_text
from eqx_decoders.rl.compute_dtype import cast_weights, weights_cast_to_compute_dtype
from eqx_decoders.rl.packing import has_zero_variance
from eqx_decoders.rl.rewards import RewardFunction, RewardModel
from eqx_decoders.serving.engine.request import Request, RequestOutput
from eqx_decoders.serving.rollouts import rollout
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.settings.rl import RLConfig
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.train_state import TrainState


JOIN_SECONDS = 30.0  # max time for the sampling thread to end


# --- engine -----------------------------------------------------------------------------------------------------------


def sampler_execution(execution: Execution, layout: Layout) -> Execution:
    """Return the execution options of a model that samples on the devices of `layout`."""
    return dataclasses.replace(execution, layout=layout, pipeline=None, batch_split=1)


class SamplerEngine:
    """Engine that holds weights between `load` and `release`. The first `load` creates and compiles it.

    **Arguments:**

    - `make`: creates the engine from a model and `config`, as `Engine` does from an `EngineConfig`.
    - `layout`: layout of the engine's copy of the weights. None: use the trainer's arrays.
    - `compute_dtype`: whether to copy the weights that are only read in the compute dtype to that dtype.
    """

    def __init__(
        self,
        make: Callable[[Decoder, Any], Any],
        config: Any,
        layout: Layout | None = None,
        *,
        compute_dtype: bool = False,
    ):
        self.config, self._make, self._layout = config, make, layout
        self._cast: frozenset[str] | None = None if compute_dtype else frozenset()
        self._engine: Any = None
        self._shardings: Any = None
        self._stopped = False

    def load(self, model: Decoder, *, version: int) -> None:
        """Use the weights of a model from now on. Copies are complete on return; earlier copies are dropped first."""
        self.release()
        model = self._placed(model)
        if self._engine is not None:
            self._engine.load(model, version=version)
            return
        self._engine = self._make(model, self.config)
        self._engine.warm_up()
        self._engine.version = version

    def release(self) -> None:
        """Drop the weights. Called before a step overwrites them."""
        if self._engine is not None:
            self._engine.release()

    def submit(self, request: Request) -> int:
        """Queue a request, as `Engine.submit` does."""
        return self._engine.submit(request)

    def step(self) -> list[RequestOutput]:
        """Run one step, as `Engine.step` does. Raises EqxDecodersError after `stop`."""
        check(not self._stopped, "sampling was stopped: the run has ended.", EqxDecodersError)
        return self._engine.step()

    def stop(self) -> None:
        """Make all later calls of `step` raise an error, from any thread."""
        self._stopped = True

    def _placed(self, trained: Decoder) -> Decoder:
        """Return the model in the engine's dtypes and layout."""
        if self._cast is None:
            self._cast = weights_cast_to_compute_dtype(trained)
        model = cast_weights(trained, self._cast) if self._cast else trained
        if self._layout is None:  # copies need not be stacked
            return unstack_in_place(model, shared=jax.tree.leaves(trained)) if self._cast else model
        execution = sampler_execution(model.execution, self._layout)
        arrays, static = eqx.partition(dataclasses.replace(model, execution=execution), eqx.is_array)
        if self._shardings is None:
            self._shardings = self._layout.shardings(arrays)
        return eqx.combine(jax.block_until_ready(jax.device_put(arrays, self._shardings)), static)


# --- samplers ---------------------------------------------------------------------------------------------------------


class Sampler(abc.ABC):
    """Samples groups of completions and computes their rewards.

    **Arguments:**

    - `engine`: a `SamplerEngine`, which holds weights between its `load` and `release`.
    - `reward_model`: adds its score to the rewards of completions. None: no reward model.
    - `seconds`, `tokens`: duration of the last call of `sample`, and number of tokens that it sampled.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.reward_model: RewardModel | None = None
        self.seconds, self.tokens = 0.0, 0

    def sample_with_rewards(self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str) -> Groups:
        """Sample `samples` completions for each prompt, with all of their rewards; groups are in prompt order."""
        groups = self.sample(prompts, samples=samples, temperature=temperature, seed=seed)
        return groups if self.reward_model is None else self.reward_model.add_scores(groups)

    @abc.abstractmethod
    def sample(self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str) -> Groups:
        """Sample `samples` completions for each prompt, with the rewards of the reward function or environment."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop all worker processes."""


class CompletionSampler(Sampler):
    """Sampler of single completions. Rewards are computed in worker processes while other completions are sampled.

    **Arguments:**

    - `stop_ids`: tokens that end completions.
    """

    def __init__(self, config: RLConfig, tokenizer: Tokenizer, *, stop_ids: Sequence[int], engine: Any):
        super().__init__(engine)
        self._config, self._tokenizer, self._stop_ids = config, tokenizer, tuple(stop_ids)
        self._reward_function = RewardFunction(config)

    def close(self) -> None:
        """Stop the worker processes of the reward function."""
        self._reward_function.close()

    def sample(self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str) -> Groups:
        """Sample completions for each prompt and compute their rewards; groups are in prompt order."""
        started, pending = time.perf_counter(), {}
        self.tokens = 0
        groups = rollout(
            self.engine,
            [prompt.tokens for prompt in prompts],
            samples=samples,
            max_new_tokens=self._config.max_new_tokens,
            temperature=temperature,
            stop_ids=self._stop_ids,
            seed=seed,
            ids=[prompt.number for prompt in prompts],
        )
        for group in groups:
            texts = [completion_text(self._tokenizer, sampled) for sampled in group.rollouts]
            results = [self._reward_function.submit(prompts[group.number], text) for text in texts]
            pending[group.number] = [*zip(group.rollouts, texts, results, strict=True)]
            self.tokens += sum(len(sampled.tokens) for sampled in group.rollouts)
        self.seconds = time.perf_counter() - started
        return [
            [
                self._reward_function.completion(prompt, sampled, text, result.result())
                for sampled, text, result in pending[index]
            ]
            for index, prompt in enumerate(prompts)
        ]


# --- rollouts of steps ------------------------------------------------------------------------------------------------


class _StepAhead(NamedTuple):
    """Completions of a later step, sampled in a thread or read from a file.

    `sampled_by`: key of the weights, settings and prompts that they are sampled from.
    """

    step: int
    sampled_by: str
    completions: "Future[StepCompletions]"


class StepRollouts:
    """Completions of the steps of a run. All completions of a step are sampled from one version of the weights.

    The completions of step k + 1 are sampled before it starts, from the weights after step k. With `rl.max_staleness=1`
    they are sampled in a thread while step k is trained, from the weights after step k - 1; the initial weights sample
    for the first two steps. `before_checkpoint` waits for the thread, so that a resumed run finds in the files the
    completions of weights that were overwritten; it samples all later completions from the same weights as before.
    Without these files, its first step samples from the weights of the checkpoint.

    **Arguments:**

    - `settings_key`: hash of everything that completions depend on besides the weights and the position in the prompts.
    """

    def __init__(
        self, config: TrainConfig, sampler: Sampler, prompts: PromptBatches, files: CompletionFiles, settings_key: str
    ):
        self._config, self._rl, self._settings_key = config, config.rl, settings_key
        self._sampler, self._prompts, self._files = sampler, prompts, files
        self._ahead: _StepAhead | None = None
        self._thread: threading.Thread | None = None
        self._written: tuple[int, str] | None = None  # step and key of the last file that was sampled ahead
        self._fingerprint: tuple[int, int] | None = None  # last step, and the fingerprint of its weights
        self._wait_seconds = 0.0

    def for_step(self, prompts: list[Prompt], state: TrainState) -> StepCompletions:
        """Return the completions of the next step of a state, for the prompts that were taken for it.

        The data's cursor advances past all prompts that were sampled. Raises the errors of the sampling thread.
        """
        step, key = int(state.step) + 1, self._key(state)
        found = self._take_ahead(step, key) or self._read(step, key)
        if found is None:
            self._sampler.engine.load(state.model, version=step - 1)
            found = self._sample(prompts, copy.copy(self._prompts), step)
            if jax.process_index() == 0:
                self._files.write(step, key, found)
        self._prompts.take(found.num_prompts - len(prompts))
        if self._rl.max_staleness and step < self._config.steps:
            self._start_ahead(step + 1, key, state)
        return found

    def wait(self) -> None:
        """Wait until no thread uses the engine. Raises the error of the thread."""
        started = time.perf_counter()
        if self._ahead is not None:
            self._ahead.completions.result()
        self._wait_seconds += time.perf_counter() - started

    def before_checkpoint(self, state: TrainState) -> None:
        """Wait for completions of the state's next step that are being sampled, and write them."""
        step = int(state.step) + 1
        if self._ahead is not None and self._ahead.step == step:
            self._take_ahead(step, self._key(state))

    def close(self) -> None:
        """Stop the thread and the worker processes."""
        self._sampler.engine.stop()
        self._sampler.close()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    # --- one step ahead ---

    def _start_ahead(self, step: int, key: str, state: TrainState) -> None:
        """Start to sample the completions of a step, unless a file of an earlier, killed run has them."""
        cursor = copy.copy(self._prompts)
        sampled_by = f"{key} {cursor.get_state()['prompt']}"
        found, future = self._files.read(step, sampled_by, field="sampled_by"), Future[StepCompletions]()
        self._ahead, self._wait_seconds = _StepAhead(step, sampled_by, future), 0.0
        if found is not None:
            future.set_result(found)
            return
        self._sampler.engine.load(state.model, version=int(state.step))

        def sample() -> None:
            try:
                future.set_result(self._sample(next(cursor), cursor, step))
            except BaseException as error:
                future.set_exception(error)

        self._thread = threading.Thread(target=sample, daemon=True)
        self._thread.start()

    def _take_ahead(self, step: int, key: str) -> StepCompletions | None:
        """Wait for the completions of a step that were sampled ahead, and write them; None if there are none."""
        ahead = self._ahead
        if ahead is None or ahead.step != step:
            return None
        self.wait()
        found = ahead.completions.result()
        if self._written != (step, key):  # weights that a step did not change have the same key
            self._files.write(step, key, found, sampled_by=ahead.sampled_by)
            self._written = (step, key)
        return found._replace(wait_seconds=self._wait_seconds)

    # --- one step ---

    def _key(self, state: TrainState) -> str:
        """Return the key of a state's weights. All weights are read, but only once per step."""
        step = int(state.step)
        if self._fingerprint is None or self._fingerprint[0] != step:
            self._fingerprint = step, self._weights_fingerprint(state)
        return f"{self._fingerprint[1]:08x}{self._settings_key}"

    def _weights_fingerprint(self, state: TrainState) -> int:
        return int(weights_fingerprint(state.model))

    def _read(self, step: int, key: str) -> StepCompletions | None:
        """Read the completions of a step that a killed run has already sampled."""
        found = self._files.read(step, key)
        if not broadcast_json(f"completions {step}", found is not None):
            return None
        check(
            found is not None,
            f"{self._files.path(step)} differs from that of process 0: all processes must share run_dir.",
            DataError,
        )
        return found

    def _sample(self, prompts: list[Prompt], cursor: PromptBatches, step: int) -> StepCompletions:
        """Sample groups. With dynamic sampling, groups with equal rewards are replaced by groups of further prompts."""
        rl, groups, zero_variance, num_prompts = self._rl, Groups(), Groups(), 0
        seconds, tokens = 0.0, 0
        while prompts:
            num_prompts += len(prompts)
            seed = f"{self._config.data.seed}/{step}"
            sampled = self._sampler.sample_with_rewards(
                prompts, samples=rl.samples, temperature=rl.temperature, seed=seed
            )
            seconds += self._sampler.seconds
            tokens += self._sampler.tokens
            for group in _rewards_of_first_process(sampled, f"rewards {step} {num_prompts}"):
                (zero_variance if rl.dynamic_sampling and has_zero_variance(rl, group) else groups).append(group)
            missing = min(rl.prompts - len(groups), rl.max_sampling_rounds * rl.prompts - num_prompts)
            prompts = cursor.take(missing) if rl.dynamic_sampling and missing > 0 else []
        self._sampler.engine.release()
        completions = [completion for group in groups or zero_variance for completion in group]
        return StepCompletions(completions, num_prompts, len(zero_variance) if groups else 0, seconds, tokens)


def _rewards_of_first_process(groups: Groups, name: str) -> Groups:
    """Return the groups with the rewards of process 0: those of other processes may differ, or may have failed."""
    if jax.process_count() == 1:
        return groups
    fields = ("reward", "rewards", "error", "seconds")
    rows = broadcast_json(name, [[{field: getattr(c, field) for field in fields} for c in group] for group in groups])
    return [
        [completion._replace(**row) for completion, row in zip(group, group_rows, strict=True)]
        for group, group_rows in zip(groups, rows, strict=True)
    ]


def sampling_metrics(found: StepCompletions, version: int) -> dict[str, float]:
    """Return metrics of the sampling of a step; `version`: number of the weights that the step updates."""
    segments = [segment for completion in found.completions for segment in completion.segments]
    versions = np.concatenate([segment.rollout.versions[segment.sampled] for segment in segments])
    staleness = version - versions
    metrics = {"filtered_groups": float(found.filtered_groups)}
    metrics |= {"staleness": float(staleness.mean()), "staleness_max": float(staleness.max())}
    if found.seconds > 0:
        metrics["rollout_seconds"] = found.seconds
        metrics["rollout_tokens_per_second"] = found.tokens / found.seconds
    if found.wait_seconds > 0:
        metrics["rollout_wait_seconds"] = found.wait_seconds
    return metrics
