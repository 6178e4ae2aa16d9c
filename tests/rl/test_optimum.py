"""The best policy of one draw is known: `p* = reference * exp(reward / kl)`, normalized."""

import dataclasses

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.training.objectives.objectives import PolicyObjective
from eqx_decoders.training.objectives.policy_loss import PolicyLoss
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer


VOCAB, KL, TEMPERATURE = 6, 0.5, 0.8
REWARDS = np.asarray([0.0, 1.0, 0.3, -0.5, 0.8, 0.1])


@pytest.fixture(scope="module")
def model():
    sizes = dict(vocab_size=VOCAB, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)
    fields = [f"{name}={size}" for name, size in sizes.items()]
    return ed.init(with_fields(ed.get_config("tiny"), fields), key=jax.random.key(3))


def policy(model):
    """The distribution of the token behind the prompt."""
    logits = model(np.asarray([[1, 2]])).logits[0, -1] / TEMPERATURE
    return np.asarray(jax.nn.softmax(logits), np.float64)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_optimum_is_reached(model, where):
    """Every answer is in the batch, with its probability as its weight: steps have the expected gradient."""
    reference = policy(model)
    best = reference * np.exp(REWARDS / KL)
    best /= best.sum()
    assert np.abs(best - reference).max() > 0.1
    optimizer = OptimizerConfig(learning_rate=2e-2, schedule="constant", warmup_steps=0, weight_decay=0.0)
    loss = PolicyObjective(policy=PolicyLoss(kind="reinforce"), temperature=TEMPERATURE)
    trainer = Trainer.create(optimizer, model, steps=200, loss=loss)
    state = trainer.init(jax.tree.map(lambda leaf: leaf + 0, model), key=jax.random.key(0))
    tokens = np.stack([[1, 2, answer] for answer in range(VOCAB)])
    drawn = np.tile([False, False, True], (VOCAB, 1))

    def spread(values):
        return np.where(drawn, np.asarray(values, np.float32)[:, None], 0).astype(np.float32)

    for _ in range(200):
        now = policy(state.model)
        gain = REWARDS - (KL * np.log(now / reference) if where == "reward" else 0)
        signals = Signals(policy=spread(now), advantages=spread(gain - now @ gain), answers=drawn.astype(np.int32))
        if where == "loss":
            more = dict(divergence=spread(KL * now), reference=spread(np.log(reference)))
            signals = dataclasses.replace(signals, **more)
        state, _ = trainer.step(state, Batch(tokens=tokens, loss_mask=drawn, signals=signals))
    np.testing.assert_allclose(policy(state.model), best, rtol=0.02, atol=2e-3)
