"""Test optimizer moments in int8: rounding, convergence, sharding and checkpoints."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.training.optimizer.int8_moments import from_eight_bits, is_eight_bits, to_eight_bits
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, make_optimizer
from tests.compare import assert_close
from tests.errors import refused
from tests.models import filled
from tests.training.step.test_step import ANY, BARE, CONFIG, advanced, batch_of, first_state, same_bits, trainer_of


SMALL = dataclasses.replace(ANY, moments_dtype="int8")


def weights_of_mixed_scales(shape, seed=0):
    """Return numbers of very different magnitudes."""
    drawn = np.random.default_rng(seed).normal(size=(2, *shape))
    return jnp.asarray(drawn[0] * 10.0 ** (2 * drawn[1]), jnp.float32)


@pytest.mark.slow(fast=("False",))
@pytest.mark.parametrize("positive", [False, True])
def test_stochastic_rounding_is_unbiased(positive):
    """Each of 2000 samples is one of the two nearest codes, also for numbers far below the maximum."""
    x = jnp.square(weights_of_mixed_scales((3, 40))) if positive else weights_of_mixed_scales((3, 40))
    x = x.at[0, :3].set(0.0)

    def rounded(key):
        found = from_eight_bits(to_eight_bits(x, key, positive=positive))
        return jnp.sqrt(found) if positive else found

    found = np.asarray(jax.jit(jax.vmap(rounded))(jax.random.split(jax.random.key(0), 2000)))
    plain = np.asarray(x)
    size = np.sqrt(plain) if positive else np.abs(plain)
    largest = size.max(axis=-1, keepdims=True)
    levels = 255 if positive else 127
    gap = (2 * np.sqrt(size * largest) / levels) + largest / levels**2  # maximum distance between adjacent codes
    wanted = np.maximum(size, largest / levels**2 * (size > 0)) if positive else plain  # avoid a division by 0
    assert np.all(np.abs(found - wanted[None]) <= 1.01 * gap[None])
    assert np.all(np.abs(np.mean(found, axis=0) - wanted) <= 6 * gap / 2000**0.5)
    assert np.all(found[:, 0, :3] == 0) and (not positive or found[:, size > 0].min() > 0)


def test_int8_second_moments_follow_decreasing_gradients():
    """Half of the gradients become ten times smaller. With beta2 = 0.999, the change of a moment per step is much
    smaller than the distance between codes."""
    words, shape = {"up": ("embed", "mlp")}, (4, 64)
    found: list[Any] = []
    slopes = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    for dtype in ("float32", "int8"):
        config = OptimizerConfig(beta2=0.999, warmup_steps=0, schedule="constant", moments_dtype=dtype)
        optimizer, weights = make_optimizer(config, words, 10), {"up": jnp.zeros(shape)}

        def step(state, index, optimizer=optimizer, weights=weights):
            gradient = {"up": slopes * jnp.where((index < 1000) | (jnp.arange(64) >= 32), 1.0, 0.1)[None]}
            updates: Any
            updates, state = optimizer.update(gradient, state, weights)
            return state, jnp.mean(jnp.abs(updates["up"][:, :32]))

        _, sizes = jax.jit(lambda s, step=step: jax.lax.scan(step, s, jnp.arange(3000)))(optimizer.init(weights))
        found.append(np.asarray(sizes))
    plain, small = found
    for begin in (0, 900, 1100, 2900):
        here = slice(begin + 10, begin + 100)
        assert small[here].mean() == pytest.approx(plain[here].mean(), rel=0.1), begin
    assert plain[2900:].mean() > 2 * plain[1050:1150].mean()  # the float32 moments have changed


@pytest.mark.slow
def test_int8_moments_converge_like_float32_on_least_squares():
    """Gradients of different columns differ by a factor of up to 1000."""
    words, generator = {"up": ("embed", "mlp")}, np.random.default_rng(0)
    inputs, scale = jnp.asarray(generator.normal(size=(256, 16)), jnp.float32), jnp.logspace(-1.5, 0, 32)[None]
    truth = jnp.asarray(generator.normal(size=(16, 32)), jnp.float32)
    losses: dict[str, float] = {}

    def loss(weights: Any, rows: Any) -> jax.Array:
        return jnp.mean(jnp.square(scale * (inputs[rows] @ (weights["up"] - truth))))

    for dtype in ("float32", "int8"):
        config = OptimizerConfig(learning_rate=0.02, beta2=0.999, weight_decay=0.0, moments_dtype=dtype)
        optimizer, weights = make_optimizer(config, words, 600), {"up": jnp.zeros((16, 32))}

        def step(carry, key, optimizer=optimizer):
            weights, state = carry
            gradient = jax.grad(loss)(weights, jax.random.randint(key, (32,), 0, 256))
            updates: Any
            updates, state = optimizer.update(gradient, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        keys = jax.random.split(jax.random.key(1), 600)
        (weights, _), _ = jax.jit(lambda c, k, step=step: jax.lax.scan(step, c, k))(
            (weights, optimizer.init(weights)), keys
        )
        losses[dtype] = float(jnp.mean(jnp.square(weights["up"] - truth)))
    assert losses["float32"] < 1e-3 and losses["int8"] < 1e-3, losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_sharded_steps_equal_single_device(name):
    """Codes may differ by one, because sums in a different order are rounded differently."""
    config = dataclasses.replace(SMALL, name=name, max_grad_norm=None)
    model, found = filled(CONFIG), []
    for layout, over_data in ((ed.Layout(), False), (ed.Layout.create(data=2, fsdp=2, tensor=2), True)):
        placed = model.place(layout)
        trainer = trainer_of(placed, dataclasses.replace(config, shard_over_data=over_data))
        state, _ = advanced(trainer, first_state(trainer, placed), [batch_of()] * 2)
        places = jax.tree.leaves(trainer.abstract(placed, key=jax.random.key(0)))
        for leaf, place in zip(jax.tree.leaves(state), places, strict=True):
            assert leaf.sharding.is_equivalent_to(place.sharding, leaf.ndim)
        found.append(state)
    moments = [
        [node for node in jax.tree.leaves(state.optimizer, is_leaf=is_eight_bits) if is_eight_bits(node)]
        for state in found
    ]
    assert len(moments[0]) == len(jax.tree.leaves(model)) * (2 if name == "adamw" else 1) or name == "muon"
    for one, other in zip(*moments, strict=True):
        assert_close(other.largest, one.largest, units=256)
        apart = np.abs(np.asarray(one.codes, np.int32) - np.asarray(other.codes, np.int32))
        assert apart.max() <= 1 and apart.mean() < 0.02
    split = moments[1]
    assert sum(device_bytes(node.codes) for node in split) < 0.2 * sum(node.codes.nbytes for node in split)


@pytest.mark.slow
def test_int8_moments_are_restored_from_checkpoints(tmp_path):
    """Codes and scales are restored exactly."""
    models = [filled(BARE).place(layout) for layout in (ed.Layout.create(data=4, fsdp=2), ed.Layout())]
    saving, loading = (trainer_of(model, dataclasses.replace(SMALL, shard_over_data=True)) for model in models)
    state, _ = advanced(saving, first_state(saving, models[0]), [batch_of()])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, data_state={}, config="", wait=True)
        back, _, _ = checkpoints.restore(loading.abstract(models[1], key=jax.random.key(0)))
    assert same_bits(back, state)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))
    rows = sum(2 * leaf.size // leaf.shape[-1] for leaf in jax.tree.leaves(models[0]))
    assert held == sum(2 * leaf.size for leaf in jax.tree.leaves(models[0])) + 4 * rows + 3 * 4  # and three counters


def test_int8_moments_are_refused_on_the_host_and_for_adafactor():
    layout = ed.Layout(offload=ed.Offload(optimizer=("scanned_layers.*",)))
    model = ed.abstract(CONFIG, layout=layout)
    with refused(ConfigError, "moments_dtype='int8'", "bfloat16"):
        trainer_of(model, SMALL)
    with refused(ConfigError, "moments_dtype=int8"):
        OptimizerConfig(name="adafactor", moments_dtype="int8")
