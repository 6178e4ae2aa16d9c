"""Test sampling one step ahead in a thread: used weights and prompts, resuming after a kill, and errors."""

import collections
import copy
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.prompt_batches import Prompt, PromptBatches, Prompts
from eqx_decoders.errors import ConfigError, EqxDecodersError
from eqx_decoders.rl.completions import Completion, CompletionFiles
from eqx_decoders.rl.rollouts import Sampler, SamplerEngine, StepRollouts, sampling_metrics
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.objectives.policy_loss import Correction, PolicyLoss
from eqx_decoders.training.settings.rl import RLConfig
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.sampler import SamplerConfig
from eqx_decoders.training.step.train_state import TrainState
from tests.errors import refused


STEPS = 6
RUN: Any = dict(method="rl", init_from="a", data=DataConfig(path="prompts.jsonl", seq_len=999))
Call = collections.namedtuple("Call", "step version prompts")


class Engine:
    """Fake engine without a model. It knows the version of its weights."""

    def __init__(self, model, config):
        self.version: int | None = 0

    def warm_up(self): ...

    def load(self, model, *, version):
        self.version = version

    def release(self):
        self.version = None

    def step(self):
        time.sleep(0.001)
        return []


class FakeSampler(Sampler):
    """Fake sampler that returns the version of the weights. Every third prompt has equal rewards."""

    def __init__(self, fails: str | None = None, hangs: bool = False):
        super().__init__(SamplerEngine(Engine, EngineConfig()))
        self.calls, self.threads, self._fails, self._hangs = [], set(), fails, hangs

    def sample(self, prompts, *, samples, temperature, seed):
        engine: Any = self.engine._engine
        self.threads.add(threading.current_thread().name)
        self.calls.append(Call(seed, engine.version, tuple(prompt.number for prompt in prompts)))
        if self._fails == seed:
            raise ValueError("the sampler has lost its devices")
        while self._hangs and threading.current_thread() is not threading.main_thread():
            self.engine.step()
        self.seconds, self.tokens = 1.0, 2
        versions = np.full(2, engine.version, np.int32)
        return [[self._completion(prompt, each, versions) for each in range(samples)] for prompt in prompts]

    def _completion(self, prompt, sample, versions):
        rollout = Rollout(versions + prompt.number, np.zeros(2, np.float32), versions, "stop")
        return Completion(prompt, rollout, "", 1.0 if prompt.number % 3 == 0 else float(sample))

    def close(self): ...


MODEL = ed.abstract(ed.get_config("tiny"))


@pytest.fixture(autouse=True)
def count_fingerprints(monkeypatch):
    """Replace the fingerprint of weights with the step number. Returns the list of computed fingerprints."""
    computed = []

    def fingerprint(self, state):
        computed.append(int(state.step))
        return computed[-1]

    monkeypatch.setattr(StepRollouts, "_weights_fingerprint", fingerprint)
    return computed


class Trained:
    """Fake run that records the completions of each step and the state saved in checkpoints."""

    def __init__(self, folder, staleness, *, sampler=None, start=0, prompt=0, dynamic=False):
        more: Any = dict(dynamic_sampling=dynamic, max_staleness=staleness)
        rl = RLConfig(reward="r.py:f", prompts=2, samples=2, max_new_tokens=8, **more)
        config = TrainConfig(steps=STEPS, rl=rl, sampler=SamplerConfig(devices=1), **RUN)
        self.prompts = PromptBatches(Prompts([Prompt(0, (1,), {}) for _ in range(4)], 9, 0), count=2, seed=0)
        self.prompts.take(prompt)
        self.sampler, self.step, self.learned = sampler or FakeSampler(), start, []
        self.rollouts = StepRollouts(config, self.sampler, self.prompts, CompletionFiles(folder), "k")

    @property
    def state(self):
        counts: Any = dict(step=np.asarray(self.step, np.int32), skipped=np.asarray(0, np.int32))
        return TrainState(model=MODEL, optimizer=None, key=jax.random.key(0), **counts)

    def run(self, steps=STEPS):
        while self.step < steps:
            call = self.rollouts.for_step(next(self.prompts), self.state)
            completions = [
                (a.prompt.number, *a.rollout.tokens, *a.rollout.versions, a.reward) for a in call.completions
            ]
            self.learned.append((completions, self.prompts.get_state()["prompt"], sampling_metrics(call, self.step)))
            self.step += 1
        return self

    def versions(self):
        return [int(call.version) for call in self.sampler.calls]


@pytest.mark.parametrize("dynamic", [False, True])
def test_sampling_ahead_uses_the_weights_of_the_previous_step(tmp_path, dynamic):
    strict, ahead = (Trained(tmp_path / str(one), one, dynamic=dynamic).run() for one in (0, 1))
    by_step = {call.step: call.version for call in strict.sampler.calls}
    assert [*by_step.values()] == [0, 1, 2, 3, 4, 5]
    assert {call.step: call.version for call in ahead.sampler.calls} == dict(
        zip(by_step, [0, 0, 1, 2, 3, 4], strict=True)
    )
    # prompts have the order of a run without the thread, although the thread takes prompts ahead
    assert [call.prompts for call in ahead.sampler.calls] == [call.prompts for call in strict.sampler.calls]
    assert [cursor for _, cursor, _ in ahead.learned] == [cursor for _, cursor, _ in strict.learned]
    assert ahead.learned[-1][1] > 2 * STEPS if dynamic else ahead.learned[-1][1] == 2 * STEPS
    for (_, _, figures), age in zip(ahead.learned, [0, 1, 1, 1, 1, 1], strict=True):
        assert figures["staleness"] == figures["staleness_max"] == age and figures["rollout_tokens_per_second"] > 0
    assert all(figures["staleness_max"] == 0 for _, _, figures in strict.learned)
    assert len(strict.sampler.threads) == 1 and len(ahead.sampler.threads) == STEPS


@pytest.mark.slow(fast=("2-False",))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("killed", [2, 3, 5])
def test_resumed_run_has_completions_of_the_same_weights(tmp_path, killed, dynamic):
    """The run resumes from the checkpoint of step 2, after a kill at that step or during later sampling."""
    whole = Trained(tmp_path / "whole", 1, dynamic=dynamic).run()
    first = Trained(tmp_path / "run", 1, dynamic=dynamic).run(2)
    first.rollouts.before_checkpoint(first.state)
    checkpoint: Any = dict(start=2, prompt=first.prompts.get_state()["prompt"])
    first.run(killed)
    first.rollouts.wait()  # unwritten completions are lost
    again = Trained(tmp_path / "run", 1, dynamic=dynamic, **checkpoint).run()
    assert [row[:2] for row in again.learned] == [row[:2] for row in whole.learned[2:]]
    seeds = [call.step for call in again.sampler.calls]
    assert seeds == [call.step for call in whole.sampler.calls if int(call.step[2:]) > max(3, killed)]
    moved = Trained(tmp_path / "run", 1, dynamic=dynamic, start=2, prompt=checkpoint["prompt"] + 1).run(3)
    moved.rollouts.wait()
    assert next(call.step for call in moved.sampler.calls) == "0/4"  # completions of other prompts
    alone = Trained(tmp_path / "other", 1, **checkpoint).run(
        3
    )  # without the files, completions are sampled with the current weights
    assert alone.versions()[0] == 2


def test_weights_are_fingerprinted_once_per_step(tmp_path, count_fingerprints):
    """This also holds if a checkpoint follows. Without sampling ahead, a checkpoint reads no weights."""
    for staleness in (0, 1):
        trained = Trained(tmp_path / str(staleness), staleness)
        count_fingerprints.clear()
        for step in range(1, 4):
            trained.run(step)
            trained.rollouts.before_checkpoint(trained.state)
        assert count_fingerprints == ([0, 1, 2] if staleness == 0 else [0, 1, 2, 3])


def test_errors_of_the_sampling_thread_are_raised(tmp_path):
    for name in ("for_step", "before_checkpoint", "wait"):
        trained = Trained(tmp_path / name, 1, sampler=FakeSampler(fails="0/3"))
        trained.run(2)
        with refused(ValueError, "the sampler has lost its devices"):  # raised by `FakeSampler`
            if name == "for_step":
                trained.run(3)
            elif name == "wait":
                trained.rollouts.wait()
            else:
                trained.rollouts.before_checkpoint(trained.state)
        trained.rollouts.close()


def test_closing_ends_the_sampling_thread(tmp_path):
    trained = Trained(tmp_path, 1, sampler=FakeSampler(hangs=True)).run(1)
    thread, ahead = trained.rollouts._thread, trained.rollouts._ahead
    assert thread is not None and ahead is not None and thread.is_alive()
    trained.rollouts.close()
    assert not thread.is_alive()
    with pytest.raises(EqxDecodersError):
        ahead.completions.result()


def test_staleness_is_validated_and_corrected_by_tis():
    with refused(ConfigError, "rl.max_staleness=1"):
        TrainConfig(**RUN, rl=RLConfig(reward="r.py:f", max_staleness=1))
    with refused(ConfigError, "rl.max_staleness=2"):
        RLConfig(max_staleness=2)
    found = TrainConfig(**RUN, rl=RLConfig(reward="r.py:f", max_staleness=1), sampler=SamplerConfig(devices=1)).rl
    assert found.policy.correction == Correction(kind="tis", cap=2.0) and RLConfig().policy.correction == Correction()
    bypass = PolicyLoss(correction=Correction(kind="bypass"))
    assert RLConfig(max_staleness=1, policy=bypass).policy == bypass
    assert copy.copy(found) == found
