"""Test convergence to the known optimum for one sampled token: `p* = reference * exp(reward / kl)`, normalized."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.model.init import add_score_head
from eqx_decoders.training.objectives.objectives import PolicyObjective
from eqx_decoders.training.objectives.policy_loss import PolicyLoss
from eqx_decoders.training.objectives.scores import ValueObjective, token_values
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.critic import Critic
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_allclose


VOCAB, KL, TEMPERATURE = 6, 0.5, 0.8
REWARDS = np.asarray([0.0, 1.0, 0.3, -0.5, 0.8, 0.1])


TOKENS = np.stack([[1, 2, completion] for completion in range(VOCAB)])
DRAWN = np.tile([False, False, True], (VOCAB, 1))


def at_sampled_tokens(values):
    """Return per-completion values as token signals at the sampled token."""
    return np.where(DRAWN, np.asarray(values, np.float32)[:, None], 0).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    sizes = dict(vocab_size=VOCAB, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)
    fields = [f"{name}={size}" for name, size in sizes.items()]
    return ed.init(with_fields(ed.get_config("tiny"), fields), key=jax.random.key(3))


def policy(model):
    """Return the distribution of the token after the prompt."""
    logits = model(np.asarray([[1, 2]])).logits[0, -1] / TEMPERATURE
    return np.asarray(jax.nn.softmax(logits), np.float64)


OPTIMIZER = OptimizerConfig(learning_rate=2e-2, schedule="constant", warmup_steps=0, weight_decay=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_policy_converges_to_the_optimum(model, where):
    """The batch contains every completion, weighted by its probability, so that steps use the expected gradient."""
    reference = policy(model)
    best = reference * np.exp(REWARDS / KL)
    best /= best.sum()
    assert np.abs(best - reference).max() > 0.1
    loss = PolicyObjective(policy=PolicyLoss(kind="reinforce"), temperature=TEMPERATURE)
    trainer = Trainer.create(OPTIMIZER, model, steps=200, loss=loss)
    state = trainer.init(jax.tree.map(lambda leaf: leaf + 0, model), key=jax.random.key(0))
    for _ in range(200):
        now = policy(state.model)
        gain = REWARDS - (KL * np.log(now / reference) if where == "reward" else 0)
        signals = Signals(
            policy=at_sampled_tokens(now),
            advantages=at_sampled_tokens(gain - now @ gain),
            completion_ids=DRAWN.astype(np.int32),
        )
        if where == "loss":
            more = dict(divergence=at_sampled_tokens(KL * now), reference=at_sampled_tokens(np.log(reference)))
            signals = dataclasses.replace(signals, **more)
        state, _ = trainer.step(state, Batch(tokens=TOKENS, loss_mask=DRAWN, signals=signals))
    assert_allclose(policy(state.model), best, rtol=0.02, atol=2e-3)


@pytest.mark.slow
def test_policy_with_a_critic_converges_to_the_optimum(model):
    """The KL penalty is part of the reward. The critic converges to the value of the optimal policy,
    `kl * log E exp(reward / kl)`, with the expectation under the reference."""
    reference = policy(model)
    best = reference * np.exp(REWARDS / KL)
    gain = KL * np.log(best.sum())
    loss = PolicyObjective(policy=PolicyLoss(low=0.2, high=0.2), temperature=TEMPERATURE)
    values = add_score_head(model, key=jax.random.key(1))
    target = jax.tree.map(lambda leaf: leaf + 0, values)
    beside = Trainer.create(OPTIMIZER, target, steps=400, loss=ValueObjective(clip=0.2))
    more: Any = dict(make_trainer=lambda settings: beside, new_model=lambda: target, updates=2)
    critic = Critic(trainer=beside, target=target, **more)
    trainer = Trainer.create(OPTIMIZER, model, steps=220, loss=loss, idle_steps=20)
    state = trainer.init(jax.tree.map(lambda leaf: leaf + 0, model), key=jax.random.key(0))
    state = dataclasses.replace(state, critic=critic.first_state(jax.random.key(0)))
    expected = 0.0
    for step in range(220):
        now = policy(state.model)
        assert (step > 20) or np.array_equal(now, reference)
        assert state.critic is not None
        expected = float(token_values(state.critic.model, Batch(tokens=TOKENS[:1]))[0, 1])
        rewards = REWARDS - KL * np.log(now / reference)
        numbers = dict(policy=now, advantages=rewards - expected, values=np.full(VOCAB, expected), returns=rewards)
        signals: Any = {name: at_sampled_tokens(each) for name, each in numbers.items()}
        signals = Signals(completion_ids=DRAWN.astype(np.int32), **signals)
        state, _ = critic.step(trainer, state, Batch(tokens=TOKENS, loss_mask=DRAWN, signals=signals))
    assert_allclose(policy(state.model), best / best.sum(), rtol=0.02, atol=2e-3)
    assert expected == pytest.approx(gain, abs=0.02)
    assert int(state.skipped) == 20 and int(state.step) == 220
