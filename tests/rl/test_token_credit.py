"""What the tokens of answers are credited with: the numbers of generalized advantages, and of turns, by hand."""

import math
from typing import Any

import numpy as np
import pytest

from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.errors import ConfigError
from eqx_decoders.rl.answer_batch import AnswerNumbers, answer_numbers, pack_answers
from eqx_decoders.rl.drawn_answers import AnswerPart, Episode, JudgedAnswer
from eqx_decoders.rl.step_draws import is_constant
from eqx_decoders.rl.token_credit import explained_variance, rewards_of_tokens
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.methods.rl_config import CriticConfig, RLConfig
from tests.compare import assert_allclose
from tests.errors import assert_names, refused


PPO = RLConfig(baseline="critic")
TURNS = RLConfig(environment="a.py:A", returns="turn", samples=2)


def rollout(length, reason: Any = "stop"):
    return Rollout(np.arange(length, dtype=np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32), reason)


def answer(length, reward, *, group=0, reason="stop"):
    return JudgedAnswer(Prompt(group, (7, 8), {}), rollout(length, reason), "", reward, {}, None)


def episode(group, *turns, end="done", reward=None):
    """An episode of turns with as many tokens and such rewards; two tokens of the environment stand between them."""
    lengths, rewards = zip(*turns, strict=True)
    drawn = np.concatenate([np.arange(size + 2) < size for size in lengths])[:-2]
    part = AnswerPart((7, 8), rollout(len(drawn)), drawn)
    total = sum(rewards) if reward is None else reward
    whole = Episode((part,), len(turns), end, turn_tokens=lengths, turn_rewards=rewards)
    return JudgedAnswer(Prompt(group, (7, 8), {}), part.rollout, "", total, {}, None, 0.0, whole)


def same(got, want):
    assert_allclose(got, want, rtol=0, atol=1e-6)


def test_generalized_advantages_of_answers():
    """Tokens of tools are skipped, truncated answers are bootstrapped, and answers without a reward are left out."""
    tool = episode(0, (2, 0.0), (1, 1.0))
    answers = [answer(4, 1.0), tool, answer(2, math.nan), answer(4, 1.0, reason="length")]
    four, last = [0.5, 0.4, 0.9, 0.3], 0.2
    values = [np.array([*four, last]), np.array([0.5, 0.4, 0.3, last]), np.ones(3), np.array([*four, last])]
    numbers = answer_numbers(PPO, answers, values=values)
    assert numbers.values is not None and numbers.returns is not None
    same(numbers.advantages[0], [0.433662, 0.561750, 0.065, 0.7])
    same(numbers.returns[0], [0.933662, 0.961750, 0.965, 1])
    same(numbers.advantages[1], [0.436750, 0.565, 0.7])
    same(numbers.returns[1], [0.936750, 0.965, 1])
    same(numbers.returns[3] - numbers.returns[0], last * 0.95 ** np.arange(4)[::-1])
    ended = answer_numbers(RLConfig(baseline="critic", critic=CriticConfig(bootstrap=False)), answers, values=values)
    same(ended.advantages[3], numbers.advantages[0])
    assert not numbers.weights[2] and not numbers.advantages[2].any()
    same(numbers.weights[[0, 1, 3]], 1 / 11)
    alone = answer_numbers(RLConfig(preset="ppo"), [tool, answers[2]], values=values[1:3])
    assert alone.returns is not None
    same(alone.advantages[0], [-0.991344, -0.017092, 1.008436])
    same(alone.returns[0], numbers.returns[1])  # as they are before
    figures = alone.figures()
    assert figures["value"] == pytest.approx(0.4) and figures["return"] == pytest.approx(0.967250, abs=1e-6)
    assert figures["explained_variance"] == explained_variance(values[1][:3], np.asarray(alone.returns[0]))
    packed = pack_answers(answers, numbers, choices=[1], seq_len=40, answers_per_row=4)
    signals: Any = packed.batch.signals
    for each, places in enumerate(packed.drawn):
        same(signals.values[places], numbers.values[each])
        same(signals.returns[places], numbers.returns[each])
        same(signals.advantages[places], numbers.advantages[each])


def test_divergences_are_taken_off_each_token():
    plain = RLConfig(baseline="critic", kl=0.1, kl_in="reward", critic=CriticConfig(lam=1.0))
    kl = [np.array([0.1, -0.2, 0.3])]
    numbers = answer_numbers(plain, [answer(3, 1.0)], divergences=kl, values=[np.zeros(4)])
    assert numbers.returns is not None
    same(numbers.returns[0], [0.98, 0.99, 0.97])
    discounted = RLConfig(baseline="critic", kl=0.1, critic=CriticConfig(lam=1.0, gamma=0.5))
    numbers = answer_numbers(discounted, [answer(3, 1.0)], divergences=kl, values=[np.zeros(4)])
    same(numbers.advantages[0], [-0.01 + 0.01 + 0.2425, 0.02 + 0.485, 0.97])
    whole = answer_numbers(RLConfig(kl=0.1), [answer(3, 1.0), answer(1, 0.0)], divergences=[*kl, np.array([0.4])])
    same(whole.advantages[0], 0.5 * (1 - 0.02 + 0.04))


def test_a_turn_is_compared_with_the_same_turn_of_others():
    """Rewards of this and later turns count. A turn that only one episode has gets no advantage."""
    answers = [episode(0, (2, 1.0), (1, 0.5)), episode(0, (1, 0.0), (3, 2.5)), episode(0, (1, 2.0)),
               episode(1, (1, 1.0), (2, math.nan), reward=math.nan), episode(1, (1, 1.0))]  # fmt: skip
    numbers = answer_numbers(TURNS, answers)
    mean = (1.5 + 2.5 + 2.0) / 3
    same(numbers.advantages[0], [1.5 - mean, 1.5 - mean, 0.5 - 1.5])
    same(numbers.advantages[1], [2.5 - mean, *[2.5 - 1.5] * 3])
    assert numbers.advantages[2].item() == 0 and not any(each.any() for each in numbers.advantages[3:])
    same(numbers.weights, [1 / 9] * 3 + [0, 1 / 9])
    episodes = answer_numbers(RLConfig(environment="a.py:A", samples=2), answers)
    assert np.ptp(episodes.advantages[1]) == 0 and np.ptp(numbers.advantages[1]) > 0
    same(rewards_of_tokens(TURNS, answers[:1])[0], [0, 1.0, 0.5])
    swapped = [episode(0, (2, 1.0), (1, 0.0)), episode(0, (2, 0.0), (1, 1.0))]
    assert not is_constant(TURNS, swapped) and is_constant(RLConfig(environment="a.py:A"), swapped)
    paid = RLConfig(environment="a.py:A", returns="turn", baseline="critic", critic=CriticConfig(lam=1.0))
    with_critic = answer_numbers(paid, swapped[:1], values=[np.zeros(4)])
    same(with_critic.advantages[0], [1, 1, 0])


def test_description_of_presets():
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
def test_bad_settings(settings, names):
    with refused(ConfigError, *names):
        RLConfig(**settings)


def test_a_step_of_failed_episodes_is_no_error():
    numbers = answer_numbers(PPO, [answer(0, math.nan)], values=[np.zeros(0)])
    assert isinstance(numbers, AnswerNumbers) and numbers.figures() == {"advantage_std": 0.0}
