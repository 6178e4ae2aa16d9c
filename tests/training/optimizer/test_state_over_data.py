"""Test optimizer states that are sharded over the data axis (`shard_over_data`, as in ZeRO-1)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.planning.collectives import collectives
from eqx_decoders.planning.hlo import parse
from eqx_decoders.planning.traced_memory import abstract_batch, state_memory
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.layout import WEIGHTS, device_bytes
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.files import changed_settings, check_changes
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_close
from tests.models import filled, rich_decoder
from tests.programs import tpu_devices
from tests.training.step.test_step import (
    ANY,
    BARE,
    CONFIG,
    OPTIMIZERS,
    advanced,
    batch_of,
    first_state,
    same_bits,
    trainer_of,
)


def test_optimizer_state_shardings_over_data():
    layout = ed.Layout.create(data=2, fsdp=2, tensor=2)
    assert layout.state_spec("layers embed mlp", (4, 8, 16)) == P(None, ("fsdp", "data"), "tensor")
    assert layout.state_spec("layers embed mlp", (4, 6, 16)) == P(None, "fsdp", ("tensor", "data"))
    assert layout.state_spec("layers mlp embed", (4, 16, 8)) == P(None, "tensor", ("fsdp", "data"))
    assert ed.Layout.create(data=8).state_spec("mlp embed", (16, 8)) == P("data", None)
    assert layout.state_spec("layers norm", (4, 5)) == P("data", None)  # the axis of stacked layers is used last
    assert layout.state_spec("norm", (5,)) == layout.weight_spec("norm") == P(None)
    own = dataclasses.replace(layout, weights=WEIGHTS | {"embed": ("data",)})
    assert own.state_spec("embed mlp", (8, 16)) == own.weight_spec("embed mlp") == P("data", "tensor")
    assert ed.Layout().state_spec("embed mlp", (8, 16)) == P(None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (dict(data=2, fsdp=4), 1),
        (dict(data=8), 1),
        (dict(data=4, tensor=2), 1),
        (dict(data=4, tensor=2), 2),
    ],
)
def test_shard_over_data_keeps_results_and_saves_memory(sizes, parts):
    """Results are equal to the bit, except with clipping (the norm is summed in a different order) and with
    microbatches (each gradient is reduce-scattered)."""
    model, found = filled(CONFIG if parts == 1 else rich_decoder(4)).place(ed.Layout.create(**sizes)), []
    for over_data in (False, True):
        optimizer = dataclasses.replace(ANY, shard_over_data=over_data, ema_decay=0.5, max_grad_norm=None)
        trainer = trainer_of(model, optimizer, gradient_accumulation_steps=parts)
        state, rows = advanced(trainer, first_state(trainer, model), [batch_of()] * 3)
        places = jax.tree.leaves(trainer.abstract(model, key=jax.random.key(0)))
        for (name, leaf), place in zip(named_leaves(state).items(), places, strict=True):
            assert leaf.sharding.is_equivalent_to(place.sharding, leaf.ndim), name
        found.append((state, rows))
    (whole, rows), (split, others) = found
    assert_close((split.model, split.optimizer, split.ema), (whole.model, whole.optimizer, whole.ema), units=128)
    assert same_bits(whole, split) or parts > 1
    assert_close([row.grad_norm for row in others], [row.grad_norm for row in rows], units=4)
    of_state = [sum(device_bytes(leaf) for leaf in jax.tree.leaves((s.optimizer, s.ema))) for s in (whole, split)]
    assert of_state[1] == pytest.approx(of_state[0] / sizes["data"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_sharded_over_data(name):
    model, found = filled(rich_decoder(2)).place(ed.Layout.create(data=4, fsdp=2)), []
    for over_data in (False, True):
        trainer = trainer_of(model, dataclasses.replace(ANY, name=name, shard_over_data=over_data))
        found.append(advanced(trainer, first_state(trainer, model), [batch_of()] * 2)[0])
    assert_close(found[1].model, found[0].model, units=256)


@pytest.mark.slow
@pytest.mark.parametrize("saved_split", [False, True])
def test_checkpoints_are_restored_with_and_without_sharding_over_data(tmp_path, saved_split):
    model = filled(BARE).place(ed.Layout.create(data=4, fsdp=2))
    splitting, whole = (
        trainer_of(model, dataclasses.replace(ANY, shard_over_data=over_data, ema_decay=0.5))
        for over_data in (True, False)
    )
    saving, loading = (splitting, whole) if saved_split else (whole, splitting)
    state = first_state(saving, model)
    state = dataclasses.replace(state, optimizer=jax.tree.map(lambda x: x + 3, state.optimizer))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, data_state={}, config="", wait=True)
        target = loading.abstract(model, key=jax.random.key(0))
        back, _, _ = checkpoints.restore(target)
    assert same_bits(back, state)
    for leaf, place in zip(jax.tree.leaves(back.optimizer), jax.tree.leaves(target.optimizer), strict=True):
        assert leaf.sharding.is_equivalent_to(place.sharding, leaf.ndim)


def test_a_resumed_run_may_change_shard_over_data(tmp_path):
    old, new = (TrainConfig(optimizer=OptimizerConfig(shard_over_data=over_data)) for over_data in (False, True))
    changes = changed_settings(old, new)
    assert set(changes) == {"optimizer.shard_over_data"}
    check_changes(changes, tmp_path, allowed=False, trained=True)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib 0.10 can't print programs of today's libtpu")
def test_tpu_step_reduce_scatters_gradients_and_gathers_weights():
    """Two layers of Llama 3.2 1B in bfloat16: no gradient is all-reduced, and weights are gathered once."""
    layout = ed.Layout.create(data=4, devices=tpu_devices("v5p:2x2x1"))
    config = ed.get_config("llama3.2-1b")
    config = dataclasses.replace(config, blocks=config.blocks[:2], vocab_size=8192)
    precision = ed.Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
    model = ed.abstract(config, layout=layout, precision=precision, remat="full")
    weights = sum(leaf.nbytes for leaf in map(_zero_size, jax.tree.leaves(model)))
    found = {}
    for over_data in (False, True):
        trainer = Trainer.create(OptimizerConfig(shard_over_data=over_data), model, steps=100)
        state = trainer.abstract(model, key=jax.random.key(0))
        step = jax.jit(trainer.advance, donate_argnums=0).trace(state, abstract_batch(layout, 8, 512))
        compiled, known = step.lower().compile(), state_memory(trainer, state, 1)
        sent: dict[str, int] = {}
        for each in collectives(parse(compiled.as_text() or ""), layout.sizes):
            sent[each.kind] = sent.get(each.kind, 0) + each.total
        found[over_data] = sent, known, getattr(compiled.memory_analysis(), "peak_memory_in_bytes", 0)
    (whole, before, peak), (split, after, less) = found[False], found[True]
    assert after.optimizer == pytest.approx(before.optimizer / 4, rel=0.01)
    assert after.gradients == pytest.approx(before.gradients / 4, rel=0.01)
    assert whole.get("all-reduce", 0) > 0.9 * weights and "all-gather" not in whole
    assert split.get("all-reduce", 0) < 0.01 * weights
    assert weights <= split["all-gather"] < 1.1 * weights  # the weights, and the gathers of the embedding lookup
    assert peak - less > 0.7 * (before.optimizer - after.optimizer)


def _zero_size(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return an array with the shape and `nbytes` of `leaf` that occupies almost no memory."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
