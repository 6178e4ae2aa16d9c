"""Compare generalized advantages and turn-level advantages of completions with numbers computed by hand."""

import math
from typing import Any

import numpy as np
import pytest

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.errors import ConfigError
from eqx_decoders.rl.completions import Completion, Episode, Segment
from eqx_decoders.rl.packing import StepAdvantages, explained_variance, pack_completions, step_advantages, token_rewards
from eqx_decoders.rl.rollouts import has_zero_variance
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.settings.rl import CriticConfig, RLConfig
from tests.compare import assert_allclose
from tests.errors import assert_names, refused


PPO = RLConfig(baseline="critic")
TURNS = RLConfig(environment="a.py:A", returns="turn", samples=2)


def rollout(length, reason: Any = "stop"):
    return Rollout(np.arange(length, dtype=np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32), reason)


def completion(length, reward, *, group=0, reason="stop"):
    return Completion(Prompt(group, (7, 8), {}), rollout(length, reason), "", reward, {}, None)


def episode(group, *turns, end="done", reward=None):
    """Return an episode with the given turn lengths and rewards. Turns are separated by two environment tokens."""
    lengths, rewards = zip(*turns, strict=True)
    sampled = np.concatenate([np.arange(size + 2) < size for size in lengths])[:-2]
    part = Segment((7, 8), rollout(len(sampled)), sampled)
    total = sum(rewards) if reward is None else reward
    whole = Episode((part,), len(turns), end, turn_tokens=lengths, turn_rewards=rewards)
    return Completion(Prompt(group, (7, 8), {}), part.rollout, "", total, {}, None, 0.0, whole)


def assert_same(got, want):
    assert_allclose(got, want, rtol=0, atol=1e-6)


def test_generalized_advantages_of_completions():
    """Tool tokens are skipped, truncated completions are bootstrapped, and completions without a reward are skipped."""
    tool = episode(0, (2, 0.0), (1, 1.0))
    completions = [completion(4, 1.0), tool, completion(2, math.nan), completion(4, 1.0, reason="length")]
    four, last = [0.5, 0.4, 0.9, 0.3], 0.2
    values = [np.array([*four, last]), np.array([0.5, 0.4, 0.3, last]), np.ones(3), np.array([*four, last])]
    numbers = step_advantages(PPO, completions, values=values)
    assert numbers.values is not None and numbers.returns is not None
    assert_same(numbers.advantages[0], [0.433662, 0.561750, 0.065, 0.7])
    assert_same(numbers.returns[0], [0.933662, 0.961750, 0.965, 1])
    assert_same(numbers.advantages[1], [0.436750, 0.565, 0.7])
    assert_same(numbers.returns[1], [0.936750, 0.965, 1])
    assert_same(numbers.returns[3] - numbers.returns[0], last * 0.95 ** np.arange(4)[::-1])
    ended = step_advantages(
        RLConfig(baseline="critic", critic=CriticConfig(bootstrap=False)), completions, values=values
    )
    assert_same(ended.advantages[3], numbers.advantages[0])
    assert not numbers.weights[2] and not numbers.advantages[2].any()
    assert_same(numbers.weights[[0, 1, 3]], 1 / 11)
    alone = step_advantages(RLConfig(preset="ppo"), [tool, completions[2]], values=values[1:3])
    assert alone.returns is not None
    assert_same(alone.advantages[0], [-0.991344, -0.017092, 1.008436])
    assert_same(alone.returns[0], numbers.returns[1])  # equal to the returns before
    metrics = alone.metrics()
    assert metrics["value"] == pytest.approx(0.4) and metrics["return"] == pytest.approx(0.967250, abs=1e-6)
    assert metrics["explained_variance"] == explained_variance(values[1][:3], np.asarray(alone.returns[0]))
    packed = pack_completions(completions, numbers, row_counts=[1], seq_len=40, completions_per_row=4)
    signals: Any = packed.batch.signals
    for each, places in enumerate(packed.sampled):
        assert_same(signals.values[places], numbers.values[each])
        assert_same(signals.returns[places], numbers.returns[each])
        assert_same(signals.advantages[places], numbers.advantages[each])


def test_kl_penalty_is_subtracted_from_each_token():
    plain = RLConfig(baseline="critic", kl=0.1, kl_in="reward", critic=CriticConfig(lam=1.0))
    kl = [np.array([0.1, -0.2, 0.3])]
    numbers = step_advantages(plain, [completion(3, 1.0)], divergences=kl, values=[np.zeros(4)])
    assert numbers.returns is not None
    assert_same(numbers.returns[0], [0.98, 0.99, 0.97])
    discounted = RLConfig(baseline="critic", kl=0.1, critic=CriticConfig(lam=1.0, gamma=0.5))
    numbers = step_advantages(discounted, [completion(3, 1.0)], divergences=kl, values=[np.zeros(4)])
    assert_same(numbers.advantages[0], [-0.01 + 0.01 + 0.2425, 0.02 + 0.485, 0.97])
    whole = step_advantages(
        RLConfig(kl=0.1), [completion(3, 1.0), completion(1, 0.0)], divergences=[*kl, np.array([0.4])]
    )
    assert_same(whole.advantages[0], 0.5 * (1 - 0.02 + 0.04))


def test_turn_advantages_compare_equal_turns_of_a_group():
    """Rewards of the current and later turns are summed. A turn that only one episode has gets no advantage."""
    completions = [episode(0, (2, 1.0), (1, 0.5)), episode(0, (1, 0.0), (3, 2.5)), episode(0, (1, 2.0)),
               episode(1, (1, 1.0), (2, math.nan), reward=math.nan), episode(1, (1, 1.0))]  # fmt: skip
    numbers = step_advantages(TURNS, completions)
    mean = (1.5 + 2.5 + 2.0) / 3
    assert_same(numbers.advantages[0], [1.5 - mean, 1.5 - mean, 0.5 - 1.5])
    assert_same(numbers.advantages[1], [2.5 - mean, *[2.5 - 1.5] * 3])
    assert numbers.advantages[2].item() == 0 and not any(each.any() for each in numbers.advantages[3:])
    assert_same(numbers.weights, [1 / 9] * 3 + [0, 1 / 9])
    episodes = step_advantages(RLConfig(environment="a.py:A", samples=2), completions)
    assert np.ptp(episodes.advantages[1]) == 0 and np.ptp(numbers.advantages[1]) > 0
    assert_same(token_rewards(TURNS, completions[:1])[0], [0, 1.0, 0.5])
    swapped = [episode(0, (2, 1.0), (1, 0.0)), episode(0, (2, 0.0), (1, 1.0))]
    assert not has_zero_variance(TURNS, swapped) and has_zero_variance(RLConfig(environment="a.py:A"), swapped)
    paid = RLConfig(environment="a.py:A", returns="turn", baseline="critic", critic=CriticConfig(lam=1.0))
    with_critic = step_advantages(paid, swapped[:1], values=[np.zeros(4)])
    assert_same(with_critic.advantages[0], [1, 1, 0])


def test_descriptions_of_presets():
    names = ("rl.baseline=critic", "rl.whiten=True", "rl.kl_in=reward", "rl.policy.kind=clip", "rl.policy.high=0.2")
    assert RLConfig(preset="ppo").describe_preset().split(", ") == [*names]
    assert_names(RLConfig(preset="grpo", aggregation="prompt").describe_preset(), "rl.aggregation=prompt")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        pytest.param(
            dict(critic=CriticConfig(warmup_steps=3)), ["rl.critic.warmup_steps=3", "rl.baseline='mean'"], id="warmup"
        ),
        pytest.param(
            dict(preset="grpo", critic=CriticConfig(init_from="a")), ["rl.critic.init_from='a'"], id="init_from"
        ),
        pytest.param(dict(preset="ppo", scale="group"), ["rl.scale='group'", "rl.baseline='critic'"], id="scale"),
        pytest.param(dict(returns="turn"), ["rl.returns", "rl.environment"], id="returns"),
    ],
)
def test_invalid_settings_are_refused(settings, names):
    with refused(ConfigError, *names):
        RLConfig(**settings)


def test_step_with_only_failed_episodes_has_no_advantages():
    numbers = step_advantages(PPO, [completion(0, math.nan)], values=[np.zeros(0)])
    assert isinstance(numbers, StepAdvantages) and numbers.metrics() == {"advantage_std": 0.0}
