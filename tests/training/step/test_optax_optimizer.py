"""Optimizers of optax in the trainer."""

import jax
import numpy as np
import optax
import pytest

import eqx_decoders as ed
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_close


CONFIG = ed.get_config("gpt3-52k")
BATCH = ed.Batch(tokens=np.arange(64).reshape(2, 32) % 50)


def trained(optimizer, model, steps=3):
    trainer = Trainer.create(optimizer, model, steps=steps)
    state = trainer.init(jax.tree.map(jax.numpy.copy, model), key=0)
    for _ in range(steps):
        state, metrics = trainer.step(state, BATCH)
    return state, metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_of_optax_equals_the_same_settings(dtype):
    model = ed.init(CONFIG, key=0, dtype=dtype)
    config = ed.OptimizerConfig(
        learning_rate=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=None
    )
    ours, _ = trained(config, model)
    state, metrics = trained(optax.adamw(1e-2, 0.9, 0.95, weight_decay=0.0), model)
    assert_close(state.model, ours.model, units=64)
    assert np.isnan(metrics.learning_rate)


def test_optax_freezes_weights_by_path():
    model = ed.init(CONFIG, key=0)

    def labels(weights):
        return {path: "frozen" if path.startswith("embedding.") else "trained" for path in weights}

    transforms = {"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}
    state, _ = trained(optax.multi_transform(transforms, labels), model)
    before, after = named_leaves(model), named_leaves(state.model)
    same = {path for path in before if np.array_equal(before[path], after[path])}
    assert {path for path in before if path.startswith("embedding.")} <= same and len(same) < len(before)
