"""Test reward-model scores as rewards: independence of packing, and reuse of saved scores."""

import math
import shutil
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from eqx_decoders.model.init import add_score_head
from eqx_decoders.rl.completions import Completion, Episode, Segment
from eqx_decoders.rl.packing import CompletionPacker
from eqx_decoders.rl.rewards import RewardModel, load_reward_model
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.objectives.scores import reward_scores
from eqx_decoders.training.settings.rl import RLConfig
from eqx_decoders.training.settings.run import TrainConfig
from tests.commands import call, steps_of
from tests.errors import assert_names, refused
from tests.programs import compilations
from tests.rl.test_run import BASE, REWARDS, completions_of, metrics_of, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with prompts, reward functions, and a model with a new score head."""
    folder = tmp_path_factory.mktemp("add_scores")
    (folder / "rewards.py").write_text(REWARDS)
    rows = [f'{{"prompt": "the cat {number}", "number": {number}}}' for number in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    ed.save_hf(add_score_head(ed.load_hf(BASE), key=jax.random.key(1)), folder / "judge", tokenizer=BASE)
    return folder


def reward_model(folder, **settings):
    rl = RLConfig(prompts=2, samples=2, max_new_tokens=8, reward_model=str(folder / "judge"), **settings)
    execution = TrainConfig().execution(jax.devices()[:1])
    packer = CompletionPacker(execution.layout, row_counts=[1, 2, 4], seq_len=32, completions_per_row=16)
    return RewardModel(rl, load_tokenizer(BASE), execution, packer)


def rollout(*tokens, reason: Any = "stop"):
    ids = np.asarray(tokens, np.int32)
    return Rollout(ids, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32), reason)


def completion(context, sampled, reward=0.0, **more):
    columns = {} if math.isnan(reward) else {"reward": reward}
    return Completion(Prompt(0, tuple(context), {}), sampled, "", reward, columns, **more)


def test_scores_do_not_depend_on_packing(folder):
    """Cases: complete and truncated completions, and an episode, which is scored at its last sampled token."""
    scorer = reward_model(folder, reward_weights=("reward_model=0.5",))
    forked = (
        Segment((40, 41), rollout(42, 43), np.array([True, True])),
        Segment((50, 51, 52), rollout(60, 61, 62, 63), np.array([True, False, True, False])),
    )
    episode = Episode(forked, turns=3, end="done")
    groups = [
        [completion([30, 31, 32], rollout(33, 34, 257)), completion([30, 31, 32], rollout(35, reason="length"))],
        [completion([40, 41], forked[0].rollout, episode=episode), completion([7] * 20, rollout(1, 2, 3))],
        [
            completion([9], rollout(257)),
            completion([9], rollout(8, 257), math.nan),
        ],  # more completions than fit into a batch
    ]
    scores = scorer.add_scores(groups)
    read = [[30, 31, 32, 33, 34, 257], [30, 31, 32, 35], [50, 51, 52, 60, 61, 62], [*[7] * 20, 1, 2, 3], [9, 257]]
    for each, tokens in zip([one for group in scores for one in group], read, strict=False):
        batch = Batch(
            tokens=np.array([tokens]), signals=Signals(completion_ids=np.array([[0] * (len(tokens) - 1) + [1]]))
        )
        want = float(reward_scores(scorer._model, batch)[0, 0])
        assert each.rewards == {"reward_model": pytest.approx(want, abs=1e-5)} and abs(want) > 1e-3
        assert each.reward == pytest.approx(0.5 * want, abs=1e-5) and each.error is None
    with compilations() as compiled:  # a single program for all lengths
        scorer.add_scores([[completion([3] * 9, rollout(4, 5)), completion([6], rollout(7, 8, 9, 10))]] * 2)
    assert not compiled
    nothing = scores[2][1]
    assert math.isnan(nothing.reward) and not nothing.rewards  # a completion without rewards has no score
    scorer._model = replaced(scorer._model, {"head.kernel": named_leaves(scorer._model)["head.kernel"] * np.nan})
    (broken, _), *_ = scorer.add_scores(groups[:1])
    assert math.isnan(broken.reward) and broken.rewards == {} and broken.error is not None
    assert_names(broken.error, "rl.reward_model", "nan")
    with refused(DataError, "rl.reward", "'reward_model'"):
        scorer.add_scores([[completion([1], rollout(2))._replace(rewards={"reward_model": 1.0})]])


def test_models_without_scores_are_refused(folder):
    execution = TrainConfig().execution(jax.devices()[:1])
    with refused(ConfigError, f"rl.reward_model='{folder / 'judge'}'"):
        load_reward_model(str(folder / "judge"), ByteTokenizer(), execution)
    with refused(ConfigError, "DecoderConfig.scores=None"):
        load_reward_model(str(BASE), load_tokenizer(BASE), execution)


@pytest.mark.slow
def test_scores_are_not_computed_again(folder):
    """Scores are saved with the completions of a killed run. A different reward model computes new scores."""
    more: Any = dict(rl__reward_model=folder / "judge", batch_size=6)
    train(folder, "whole", held_out=folder / "prompts.jsonl", **more)
    for row in steps_of(folder / "whole"):
        parts = row["reward/reward_model"] + row["reward/short"] + row["reward/number"]
        assert row["reward"] == pytest.approx(parts, abs=1e-5) and row["reward_failures"] == 0
    shutil.copytree(folder / "whole", folder / "killed")
    shutil.rmtree(next(each for each in (folder / "killed" / "checkpoints").iterdir() if each.name.endswith("4")))
    with mock.patch.object(RewardModel, "add_scores", side_effect=AssertionError("scores are computed again")):
        train(folder, "killed", **more)
    assert metrics_of(folder, "killed") == metrics_of(folder, "whole")
    more |= {"reward": None, "steps": 1}
    train(folder, "alone", **more)
    before = [each.rewards for each in completions_of(folder, "alone", 1).completions]
    assert all({*columns} == {"reward_model"} for columns in before)
    pairs = folder / "pairs.jsonl"
    pairs.write_text('{"prompt": "the cat", "chosen": "sat", "rejected": "ate"}\n' * 4)
    words = f"--run-dir {folder / 'other'} --method reward --init-from {BASE} --data {pairs} --seq-len 96"
    call("train", *words.split(), "--eval-every", 0, "--steps", 1, "--batch-size", 2)
    shutil.rmtree(folder / "alone" / "checkpoints")
    train(folder, "alone", **more | {"rl__reward_model": folder / "other"})
    assert [
        each.rewards for each in completions_of(folder, "alone", 1).completions
    ] != before  # computed with the weights of a run
