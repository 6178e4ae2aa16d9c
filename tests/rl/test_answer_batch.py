"""Answers of a step: their rewards, advantages and weights, their files and their rows."""

import copy
import dataclasses
import math
import pickle
from typing import Any, cast

import numpy as np
import pytest

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.io.function_workers import CallResult
from eqx_decoders.rl.answer_batch import answer_numbers, find_places, pack_answers, row_choices
from eqx_decoders.rl.drawn_answers import AnswerFiles, JudgedAnswer, StepAnswers
from eqx_decoders.rl.rewards import Rewards, reward_figures
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.methods.rl_config import PRESETS, RLConfig
from eqx_decoders.training.objectives.policy_loss import PolicyLoss
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


def answer(group, length, reward=0.0, *, prompt=3, reason: Any = "stop", columns=None):
    tokens = np.arange(1, length + 1, dtype=np.int32) + 10 * group
    rollout = Rollout(tokens, -0.1 * tokens.astype(np.float32), np.full(length, 4, np.int32), reason)
    record = {"prompt": "1+1", "answer": 2}
    asked = Prompt(group, tuple(range(100, 100 + prompt)), record)
    return JudgedAnswer(asked, rollout, "2", reward, {"reward": reward} if columns is None else columns, None, 0.25)


STEP = [answer(0, 3, 1.0), answer(0, 1, 0.0), answer(1, 2, 1.0), answer(1, 4, math.nan, reason="length", columns={})]


def numbers(config, answers=STEP):
    return answer_numbers(config, answers)


def of_answers(found):
    """The advantages of answers, all of whose tokens have one."""
    assert all(len({*each.tolist()}) == 1 for each in found.advantages)
    return [each[0] for each in found.advantages]


def test_weights_of_a_step():
    plain = numbers(RLConfig(samples=2))
    assert_allclose(of_answers(plain), [0.5, -0.5, 0, 0])
    assert_allclose(plain.weights, [1 / 6, 1 / 6, 1 / 6, 0])  # no reward: not counted
    assert_allclose(numbers(RLConfig(samples=2, aggregation="row")).weights, [1 / 9, 1 / 3, 1 / 6, 0])
    constant = numbers(RLConfig(samples=2, aggregation="constant", max_new_tokens=8))
    assert_allclose(constant.weights, [1 / 24, 1 / 24, 1 / 24, 0])
    assert_allclose(numbers(RLConfig(samples=2, aggregation="prompt")).weights, [1 / 8, 1 / 8, 1 / 4, 0])
    cut = [answer(0, 3, 1.0, reason="length"), answer(0, 1, 0.0)]
    masked = numbers(RLConfig(samples=2, truncated="mask"), cut)
    assert_allclose(masked.weights, [0, 1])
    assert_allclose(of_answers(masked), [0, -0.5])  # its reward is compared with
    white = numbers(RLConfig(samples=2, baseline="none", whiten=True))
    tokens = np.concatenate(white.advantages[:3])
    assert abs(tokens.mean()) < 1e-6 and tokens.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_rows_have_the_arrays_of_each_answer():
    packed = pack_answers(STEP, numbers(RLConfig(samples=2)), choices=[1, 2, 4], seq_len=12, answers_per_row=3)
    batch: Any = packed.batch
    signals = batch.signals
    assert batch.tokens.shape == (2, 12) and signals.most_answers == 3
    advantages, weights, *_ = numbers(RLConfig(samples=2))
    for each, advantage, weight, (rows, columns) in zip(STEP, advantages, weights, packed.drawn, strict=True):
        length, row, span = len(each.rollout.tokens), rows[0], slice(columns[0], columns[-1] + 1)
        assert batch.tokens[row, span].tolist() == each.rollout.tokens.tolist()
        before = slice(span.start - 3, span.start)
        assert batch.tokens[row, before].tolist() == list(each.prompt.tokens)
        whole = slice(span.start - 3, span.stop)
        assert batch.positions[row, whole].tolist() == list(range(3 + length))
        assert len(set(batch.segment_ids[row, whole].tolist())) == 1 and batch.loss_mask[row, span].all()
        assert not batch.loss_mask[row, before].any()
        assert_array_equal(signals.sampler[row, span], each.rollout.log_probs)
        assert_allclose(signals.advantages[row, span], advantage)
        assert_allclose(signals.policy[row, span], weight)
    assert signals.policy.sum() == pytest.approx(1)


def test_rows_are_packed():
    assert find_places([5, 5, 5, 2], rows=2, length=10, most=2) == [(0, 0, 1), (0, 5, 2), (1, 0, 1), (1, 5, 2)]
    assert find_places([5, 4, 0], [2, 2, 0], rows=2, length=10, most=3) == [(0, 0, 1), (1, 0, 1), (0, 5, 3)]
    assert find_places([5, 5, 5], rows=1, length=20, most=2) is None
    assert row_choices(24, 2) == [6, 12, 24] and row_choices(7, 1) == [7] and row_choices(8, 8) == [8]
    with refused(DataError, "4 answers", "22 tokens", "12"):
        pack_answers(STEP, numbers(RLConfig(samples=2)), choices=[1], seq_len=12, answers_per_row=3)


def test_files_are_exact(tmp_path):
    files, found = AnswerFiles(tmp_path / "rollouts"), StepAnswers(STEP, prompts=3, constant=1)
    assert files.read(7, "key") is None
    files.write(7, "key", found)
    assert files.path(7).name == "step-000007.jsonl.zst" and files.read(7, "other") is None
    again = files.read(7, "key")
    assert again is not None and (again.prompts, again.constant) == (3, 1)
    for one, other in zip(found.answers, again.answers, strict=True):
        assert one.prompt == other.prompt and (one.text, one.columns) == (other.text, other.columns)
        assert one.reward == other.reward or (math.isnan(one.reward) and math.isnan(other.reward))
        for name in ("tokens", "log_probs", "versions"):
            assert_array_equal(getattr(one.rollout, name), getattr(other.rollout, name))
            assert getattr(one.rollout, name).dtype == getattr(other.rollout, name).dtype


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text("def judge(prompt, answer):\n    return {'exact': answer == '2', 'length': len(answer)}\n")
    return f"{path}:judge"


def test_rewards_are_weighted_sums(judge):
    weights = ("length=0.1",)
    workers: dict[str, Any] = dict(reward_workers=1, reward_seconds=5.0)
    config = RLConfig(reward=judge, reward_weights=weights, max_new_tokens=8, overlong_buffer=4, **workers)
    rewards, asked = Rewards(config), answer(0, 6)
    found = rewards.judged(asked.prompt, asked.rollout, "2", rewards.start(asked.prompt, "2").result())
    assert found.reward == pytest.approx(1 + 0.1 - 0.5) and found.error is None
    assert found.columns == {"exact": 1.0, "length": 1.0, "overlong": -0.5}
    for result, name in (
        (CallResult(None), None),
        (CallResult(error="it raised"), "it raised"),
        (CallResult("nan"), "nan"),
        (CallResult({"a": None}), "None"),
    ):
        nothing = rewards.judged(asked.prompt, asked.rollout, "2", result)
        assert math.isnan(nothing.reward) and not nothing.columns
        assert nothing.error is None if name is None else name in nothing.error
    rewards.close()
    scored = Rewards(RLConfig(reward_model="judge"))  # its score is added to 0
    assert scored.judged(asked.prompt, asked.rollout, "2", scored.start(asked.prompt, "2").result()).reward == 0
    with refused(ConfigError, f"rl.reward='{judge.replace(':judge', ':no')}'"):
        Rewards(RLConfig(reward=judge.replace(":judge", ":no")))


def test_figures_of_rewards():
    found = reward_figures(STEP)
    assert found["reward"] == pytest.approx(2 / 3) and found["reward_failures"] == 0.25 and found["truncated"] == 0.25
    assert found["constant_groups"] == 0.5 and found["reward_std_in_groups"] == pytest.approx(0.25)
    assert found["answer_tokens"] == 2.5 and found["answer_tokens_max"] == 4
    assert found["answer_tokens_better"] == 2.5 and found["answer_tokens_worse"] == 1
    assert "reward" not in reward_figures([answer(0, 1, math.nan)])


def test_copies_have_the_same_fields_and_no_others():
    config = RLConfig(preset="ppo", kl=0.1)
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config):
        assert other == config and vars(other).keys() == {field.name for field in dataclasses.fields(config)}
        assert dataclasses.replace(other, kl=0.2).preset == "ppo"


def test_presets_are_what_is_not_set():
    for name, settings in PRESETS.items():
        found = RLConfig(preset=cast(Any, name))
        assert all(getattr(found, field) == value for field, value in settings.items())
        assert RLConfig(**dict(vars(found), preset=name)) == found  # again, as when a run goes on
    assert RLConfig(preset="grpo", aggregation="prompt").aggregation == "prompt"
    given = RLConfig(preset="ppo", whiten=False, policy=PolicyLoss())
    assert given.kl_in == "reward" and not given.whiten and given.policy.high == 0.28
    assert "rl.whiten=False" in given.describe_preset() and dataclasses.replace(given, kl=0.1).whiten is False
    assert copy.deepcopy(given) == given and vars(given).keys() == type(given).__dataclass_fields__.keys()
    assert RLConfig(preset="dapo").dynamic_sampling and not RLConfig(preset="grpo").dynamic_sampling


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        pytest.param(dict(samples=1), ["rl.samples=1", "rl.baseline='mean'"], id="samples"),
        pytest.param(dict(reward_weights=("a",)), ["rl.reward_weights='a'"], id="reward_weights"),
        pytest.param(
            dict(overlong_buffer=8, max_new_tokens=8), ["rl.overlong_buffer=8", "rl.max_new_tokens=8"], id="buffer"
        ),
    ],
)
def test_bad_settings(settings, names):
    with refused(ConfigError, *names):
        RLConfig(**settings)
