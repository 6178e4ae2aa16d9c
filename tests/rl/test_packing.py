"""Test the completions of a step: rewards, advantages, weights, files and packed rows."""

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
from eqx_decoders.rl.completions import Completion, CompletionFiles, Episode, Segment, StepCompletions
from eqx_decoders.rl.packing import pack_completions, place_completions, possible_row_counts, step_advantages
from eqx_decoders.rl.rewards import RewardFunction, reward_metrics
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.objectives.policy_loss import PolicyLoss
from eqx_decoders.training.settings.rl import PRESETS, RLConfig
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


def completion(group, length, reward=0.0, *, prompt=3, reason: Any = "stop", columns=None):
    tokens = np.arange(1, length + 1, dtype=np.int32) + 10 * group
    rollout = Rollout(tokens, -0.1 * tokens.astype(np.float32), np.full(length, 4, np.int32), reason)
    record = {"prompt": "1+1", "answer": 2}
    asked = Prompt(group, tuple(range(100, 100 + prompt)), record)
    return Completion(asked, rollout, "2", reward, {"reward": reward} if columns is None else columns, None, 0.25)


STEP = [
    completion(0, 3, 1.0),
    completion(0, 1, 0.0),
    completion(1, 2, 1.0),
    completion(1, 4, math.nan, reason="length", columns={}),
]


def advantages_of(config, completions=STEP):
    return step_advantages(config, completions)


def per_completion(found):
    """Return one advantage per completion; all tokens of a completion must have the same advantage."""
    assert all(len({*each.tolist()}) == 1 for each in found.advantages)
    return [each[0] for each in found.advantages]


def test_token_weights_of_a_step():
    plain = advantages_of(RLConfig(samples=2))
    assert_allclose(per_completion(plain), [0.5, -0.5, 0, 0])
    assert_allclose(plain.weights, [1 / 6, 1 / 6, 1 / 6, 0])  # the last completion has no reward and is not counted
    assert_allclose(advantages_of(RLConfig(samples=2, aggregation="sequence")).weights, [1 / 9, 1 / 3, 1 / 6, 0])
    constant = advantages_of(RLConfig(samples=2, aggregation="constant", max_new_tokens=8))
    assert_allclose(constant.weights, [1 / 24, 1 / 24, 1 / 24, 0])
    assert_allclose(advantages_of(RLConfig(samples=2, aggregation="prompt")).weights, [1 / 8, 1 / 8, 1 / 4, 0])
    cut = [completion(0, 3, 1.0, reason="length"), completion(0, 1, 0.0)]
    masked = advantages_of(RLConfig(samples=2, truncated="mask"), cut)
    assert_allclose(masked.weights, [0, 1])
    assert_allclose(per_completion(masked), [0, -0.5])  # the masked reward is part of the baseline
    white = advantages_of(RLConfig(samples=2, baseline="none", whiten=True))
    tokens = np.concatenate(white.advantages[:3])
    assert abs(tokens.mean()) < 1e-6 and tokens.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_split_episode_at_the_token_limit_is_truncated():
    """The first segment ended with a stop token. A limit on turns does not count as truncation."""
    first, last = completion(0, 2), completion(0, 3, reason="length")
    segments = tuple(Segment((9,), each.rollout, np.ones(len(each.rollout.tokens), bool)) for each in (first, last))
    for end, truncated in (("tokens", 1.0), ("turns", 0.0), ("done", 0.0)):
        forked = completion(0, 2, 1.0)._replace(episode=Episode(segments, turns=2, end=end))
        group = [forked, completion(0, 1, 0.0)]
        assert reward_metrics(group)["truncated"] == truncated / 2
        assert (advantages_of(RLConfig(samples=2, truncated="mask"), group).weights[0] == 0) == bool(truncated)
        assert forked.is_truncated == (end != "done")


def test_rows_have_the_arrays_of_each_completion():
    packed = pack_completions(
        STEP, advantages_of(RLConfig(samples=2)), row_counts=[1, 2, 4], seq_len=12, completions_per_row=3
    )
    batch: Any = packed.batch
    signals = batch.signals
    assert batch.tokens.shape == (2, 12) and signals.max_completions == 3
    advantages, weights, *_ = advantages_of(RLConfig(samples=2))
    for each, advantage, weight, (rows, columns) in zip(STEP, advantages, weights, packed.sampled, strict=True):
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
    assert place_completions([5, 5, 5, 2], rows=2, length=10, max_segments=2) == [
        (0, 0, 1),
        (0, 5, 2),
        (1, 0, 1),
        (1, 5, 2),
    ]
    assert place_completions([5, 4, 0], [2, 2, 0], rows=2, length=10, max_segments=3) == [
        (0, 0, 1),
        (1, 0, 1),
        (0, 5, 3),
    ]
    assert place_completions([5, 5, 5], rows=1, length=20, max_segments=2) is None
    assert (
        possible_row_counts(24, 2) == [6, 12, 24]
        and possible_row_counts(7, 1) == [7]
        and possible_row_counts(8, 8) == [8]
    )
    with refused(DataError, "4 completions", "22 tokens", "12"):
        pack_completions(STEP, advantages_of(RLConfig(samples=2)), row_counts=[1], seq_len=12, completions_per_row=3)


def test_completions_survive_saving_and_loading(tmp_path):
    files, found = CompletionFiles(tmp_path / "rollouts"), StepCompletions(STEP, num_prompts=3, filtered_groups=1)
    assert files.read(7, "key") is None
    files.write(7, "key", found)
    assert files.path(7).name == "step-000007.jsonl.zst" and files.read(7, "other") is None
    again = files.read(7, "key")
    assert again is not None and (again.num_prompts, again.filtered_groups) == (3, 1)
    for one, other in zip(found.completions, again.completions, strict=True):
        assert one.prompt == other.prompt and (one.text, one.rewards) == (other.text, other.rewards)
        assert one.reward == other.reward or (math.isnan(one.reward) and math.isnan(other.reward))
        for name in ("tokens", "log_probs", "versions"):
            assert_array_equal(getattr(one.rollout, name), getattr(other.rollout, name))
            assert getattr(one.rollout, name).dtype == getattr(other.rollout, name).dtype


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(
        "def judge(prompt, completion):\n    return {'exact': completion == '2', 'length': len(completion)}\n"
    )
    return f"{path}:judge"


def test_rewards_are_weighted_sums(judge):
    weights = ("length=0.1",)
    workers: dict[str, Any] = dict(reward_workers=1, reward_seconds=5.0)
    config = RLConfig(reward=judge, reward_weights=weights, max_new_tokens=8, overlong_buffer=4, **workers)
    function, asked = RewardFunction(config), completion(0, 6)
    found = function.completion(asked.prompt, asked.rollout, "2", function.submit(asked.prompt, "2").result())
    assert found.reward == pytest.approx(1 + 0.1 - 0.5) and found.error is None
    assert found.rewards == {"exact": 1.0, "length": 1.0, "overlong": -0.5}
    for result, name in (
        (CallResult(None), None),
        (CallResult(error="it raised"), "it raised"),
        (CallResult("nan"), "nan"),
        (CallResult({"a": None}), "None"),
    ):
        nothing = function.completion(asked.prompt, asked.rollout, "2", result)
        assert math.isnan(nothing.reward) and not nothing.rewards
        assert nothing.error is None if name is None else name in nothing.error
    function.close()
    scored = RewardFunction(RLConfig(reward_model="judge"))  # the score is added to 0
    assert scored.completion(asked.prompt, asked.rollout, "2", scored.submit(asked.prompt, "2").result()).reward == 0
    with refused(ConfigError, f"rl.reward='{judge.replace(':judge', ':no')}'"):
        RewardFunction(RLConfig(reward=judge.replace(":judge", ":no")))


def test_reward_metrics():
    found = reward_metrics(STEP)
    assert found["reward"] == pytest.approx(2 / 3) and found["reward_failures"] == 0.25 and found["truncated"] == 0.25
    assert found["zero_variance_groups"] == 0.5 and found["reward_std_in_groups"] == pytest.approx(0.25)
    assert found["completion_tokens"] == 2.5 and found["completion_tokens_max"] == 4
    assert found["completion_tokens_better"] == 2.5 and found["completion_tokens_worse"] == 1
    assert "reward" not in reward_metrics([completion(0, 1, math.nan)])


def test_copied_configs_are_equal():
    config = RLConfig(preset="ppo", kl=0.1)
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config):
        assert other == config and vars(other).keys() == {field.name for field in dataclasses.fields(config)}
        assert dataclasses.replace(other, kl=0.2).preset == "ppo"


def test_presets_set_default_values():
    for name, settings in PRESETS.items():
        found = RLConfig(preset=cast(Any, name))
        assert all(getattr(found, field) == value for field, value in settings.items())
        assert RLConfig(**dict(vars(found), preset=name)) == found  # the preset is applied again when a run resumes
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
def test_invalid_settings_are_refused(settings, names):
    with refused(ConfigError, *names):
        RLConfig(**settings)
