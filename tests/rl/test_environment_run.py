"""Test runs with an environment: on-policy sampling of turns, saved episodes and exact resuming."""

import json
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.rl.environments import EpisodeSampler
from eqx_decoders.rl.packing import StepAdvantages, pack_completions
from eqx_decoders.rl.rollouts import SamplerEngine
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from eqx_decoders.training.settings.rl import RLConfig
from tests.commands import steps_of
from tests.errors import assert_names
from tests.rl.test_run import BASE, completions_of, metrics_of, train


GAMES = """
import os, random, time

class Guess:
    def reset(self, task, seed):
        assert not os.path.exists(__file__ + ".closed"), "episodes are not to be played again"
        self.task, self.number = task, random.Random(seed).randrange(task["number"] + 2)
        return [{"role": "user", "content": f"a number below {task['number'] + 2}"}]

    def step(self, completion):
        if self.task["number"] == self.task.get("hangs"):
            time.sleep(60)
        text = completion["text"]
        if str(self.number) in text:
            return {"reward": {"found": 1.0}, "done": True}
        return {"messages": [{"role": "user", "content": "no"}], "reward": {"short": -0.01 * len(text)}}

class Wrong(Guess):
    def step(self, completion):
        return {"messages": "no"}

class Nothing:
    def reset(self, task, seed):
        return []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("games")
    (folder / "rewards.py").write_text(GAMES)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"number": number}) for number in range(10)))
    return folder


def play(folder, name, *more, game="Guess", **changes):
    settings = {"rl__environment": f"{folder / 'rewards.py'}:{game}", "rl__max_turns": 3, "batch_size": 12}
    more_settings: Any = settings | changes
    return train(folder, name, *more, **({"reward": None} | more_settings))


TOOLS = '''
from eqx_decoders.rl.tools import ToolEnvironment

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b

Sums = ToolEnvironment.of([add], lambda task, completion: len(set(completion)) / 20)
'''


@pytest.mark.slow
def test_environment_of_python_functions(folder):
    (folder / "tools.py").write_text(TOOLS)
    tasks = folder / "tools.jsonl"
    tasks.write_text("\n".join(json.dumps({"prompt": f"{number} + 1"}) for number in range(10)))
    play(folder, "tools", data=tasks, rl__environment=f"{folder / 'tools.py'}:Sums", rl__tool_call_parser="hermes")
    rows = steps_of(folder / "tools")
    assert all(row["reward"] > 0 and row["ended_done"] == 1 and row["metric/tool_calls"] == 0 for row in rows)
    _, err = play(folder, "bad tools", "--rl.tool-call-parser", "json", code=2)
    assert_names(err, "--rl.tool-call-parser")
    assert not (folder / "bad tools" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_on_policy_run_with_an_environment_resumes_exactly(folder):
    held_out = folder / "prompts.jsonl"
    _, err = play(folder, "whole", held_out=held_out)
    assert_names(err, "10 tasks")
    assert re.search(r"step 0\b.*reward_greedy", err) and "forked_segments" not in err
    rows = steps_of(folder / "whole")
    assert len(rows) == 4 and max(row["turns"] for row in rows) > 1
    for row in rows:
        assert row["ratio"] == 1.0 and row["log_prob_gap"] <= 1e-5 and abs(row["importance"] - 1) < 1e-4
        assert row["reward_failures"] == 0 and row["grad_norm"] > 0 and row["ended_done"] + row["ended_turns"] == 1
    for step in range(1, 5):
        for completion in completions_of(folder, "whole", step).completions:
            assert sum(part.sampled.sum() for part in completion.segments) == completion.num_tokens > 0
            assert all(np.all(part.rollout.log_probs[part.sampled] < 0) for part in completion.segments)
    shutil.copytree(folder / "whole", folder / "killed")
    (newest,) = (each for each in (folder / "killed" / "checkpoints").iterdir() if each.name.endswith("4"))
    shutil.rmtree(newest)
    play(folder, "killed")  # without held-out episodes, which would be repeated
    assert metrics_of(folder, "killed") == metrics_of(folder, "whole")
    shutil.rmtree(folder / "killed")
    play(folder, "again", rl__slots=2, rl__reward_workers=3)
    assert metrics_of(folder, "again") == metrics_of(folder, "whole")  # for any number of slots and workers


@pytest.mark.slow
def test_episodes_are_played_one_step_ahead(folder):
    ahead: Any = dict(sampler__devices=4, rl__max_staleness=1, mesh__fsdp=2)
    play(folder, "ahead", **ahead)
    assert [row["staleness_max"] for row in steps_of(folder / "ahead")] == [0, 1, 1, 1]
    shutil.copytree(folder / "ahead", folder / "ahead-killed")
    (newest,) = (each for each in (folder / "ahead-killed" / "checkpoints").iterdir() if each.name.endswith("4"))
    shutil.rmtree(newest)
    play(folder, "ahead-killed", **ahead)
    assert metrics_of(folder, "ahead-killed") == metrics_of(folder, "ahead")


@pytest.mark.slow
def test_trainer_log_probs_equal_sampler_log_probs(folder):
    """The log-probs of trainer and sampler differ by at most 1e-5: token ids and positions agree."""
    model, tokenizer, template = load_hf(BASE, dtype="float32"), load_tokenizer(BASE), load_chat_template(BASE)
    config = RLConfig(environment=f"{folder / 'rewards.py'}:Guess", max_turns=4, max_new_tokens=5, temperature=0.8)
    engine_config = EngineConfig(max_batch_size=3, max_length=100, prefill_chunk=16, token_budget=32)
    sampler = EpisodeSampler(
        config, tokenizer, template, max_tokens=100, stop_ids=(257,), engine=SamplerEngine(Engine, engine_config)
    )
    sampler.engine.load(model, version=0)
    tasks = [Prompt(number, (), {"number": 10 + number}) for number in range(3)]
    groups = sampler.sample(tasks, samples=2, temperature=0.8, seed="1")
    sampler.close()
    completions = [completion for group in groups for completion in group]
    nothing = np.zeros(len(completions))
    packed = pack_completions(
        completions, StepAdvantages(nothing, nothing), row_counts=[4], seq_len=256, completions_per_row=8
    )
    batch: Any = jax.tree.map(jnp.asarray, packed.batch)
    log_probs = np.asarray(token_log_probs(model, batch, temperature=0.8))
    sampled = np.asarray(batch.signals.completion_ids) > 0
    assert (
        sum(completion.episode.turns > 2 for completion in completions if completion.episode) > 2 and sampled.sum() > 60
    )
    assert np.abs(log_probs - batch.signals.sampler)[sampled].max() <= 1e-5


@pytest.mark.slow
def test_resumed_run_reuses_saved_episodes(folder):
    play(folder, "first", steps=2)
    (folder / "rewards.py.closed").write_text("")
    shutil.rmtree(folder / "first" / "checkpoints")
    _, err = play(folder, "first", steps=2)
    (folder / "rewards.py.closed").unlink()
    assert "warning: " not in err and len(steps_of(folder / "first")) == 2
    assert all(row["reward_failures"] == 0 for row in steps_of(folder / "first"))


@pytest.mark.slow
def test_environment_settings_and_failures(folder):
    _, err = play(folder, "wrong", game="Wrong", steps=1)
    (row,) = steps_of(folder / "wrong")
    assert row["reward_failures"] == 1 and row["loss"] == 0 and row["ended_error"] == 1
    assert_names(err, "100%", "step 1", "rl.environment, turn 1: step: messages=no")
    more = ["--rl.strict-prefix", "--rl.aggregation", "constant"]
    play(folder, "strict", *more, steps=2, rl__episode_tokens=48, rl__kl=0.1, rl__kl_in="reward", batch_size=6)
    rows = steps_of(folder / "strict")
    assert all(row["log_prob_gap"] <= 1e-5 and row["forked_segments"] == 0 for row in rows)
    (folder / "hangs.jsonl").write_text("\n".join(json.dumps({"number": n, "hangs": 1}) for n in range(3)))
    _, err = play(folder, "hangs", data=folder / "hangs.jsonl", steps=1, rl__reward_seconds=0.3)
    (row,) = steps_of(folder / "hangs")
    assert row["reward_failures"] == pytest.approx(1 / 3)
    assert_names(err, "turn 1", "0.3 s")


@pytest.mark.slow(fast=("reward",))
@pytest.mark.parametrize(
    ("game", "changes", "names"),
    [
        pytest.param("Guess", {"rl__reward": "a.py:f"}, ["--rl.reward='a.py:f'", "--rl.environment='"], id="reward"),
        pytest.param("Nothing", {}, ["--rl.environment='", ":Nothing'", "step"], id="no-step"),
        pytest.param("Guess", {"rl__episode_tokens": 97}, ["--rl.episode-tokens=97", "--seq-len=96"], id="tokens"),
        pytest.param("Guess", {"batch_size": 6}, ["96", "--batch-size=12", "6"], id="batch-size"),
        pytest.param("Guess", {"rl__max_turns": 17}, ["--rl.completions-per-row=16", "17"], id="max-turns"),
    ],
)
def test_invalid_settings_are_refused(folder, game, changes, names):
    _, err = play(folder, "refused", code=2, game=game, **changes)
    assert_names(err, *names)
