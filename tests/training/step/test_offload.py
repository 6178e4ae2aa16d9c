"""Test weights and optimizer states in host memory: equal results and less device memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.planning.traced_memory import abstract_batch, state_memory
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.offload import HOST, Offload, can_offload
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.models import filled, rich_decoder, some_tokens
from tests.programs import compilations, tpu_devices
from tests.training.step.test_step import ANY, CONFIG, advanced, batch_of, first_state, same_bits, trainer_of


DEEP = dataclasses.replace(CONFIG, blocks=CONFIG.blocks * 3)
ALL = Offload(weights=("*.mlp.*",), optimizer=("*",))


def kinds(tree) -> dict[str, str | None]:
    return {name: leaf.sharding.memory_kind for name, leaf in named_leaves(tree).items()}


def run(layout, optimizer, config=DEEP, remat="full", poison=False, **step):
    model = filled(config, remat=remat).place(layout)
    trainer = trainer_of(model, dataclasses.replace(optimizer, max_grad_norm=None), **step)
    state = first_state(trainer, model)
    before = kinds(state)
    state, rows = advanced(trainer, state, [batch_of(), batch_of(poison), batch_of()])
    assert kinds(state) == before == kinds(trainer.abstract(model, key=jax.random.key(0)))
    return state, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "offload", "optimizer", "remat"),
    [
        (dict(data=2, fsdp=4), ALL, dict(ema_decay=0.5, shard_over_data=True), "full"),
        (None, ALL, dict(ema_decay=0.5), "full"),
        (None, Offload(weights=("*",)), {}, "none"),
        (None, Offload(optimizer=("*",)), dict(name="lion"), "minimal"),
        (dict(fsdp=4, tensor=2), ALL, dict(moments_dtype="bfloat16"), "full"),
    ],
)
def test_offloaded_steps_are_exact(sizes, offload, optimizer, remat):
    """Arrays have the memory kind of the layout, before and after the step."""
    layout = ed.Layout() if sizes is None else ed.Layout.create(**sizes)
    optimizer = dataclasses.replace(ANY, **optimizer)
    plain, rows = run(layout, optimizer, remat=remat)
    host, others = run(dataclasses.replace(layout, offload=offload), optimizer, remat=remat)
    for (name, one), other in zip(named_leaves(host).items(), jax.tree.leaves(plain), strict=True):
        assert same_bits(one, other), name
    assert_allclose([row.grad_norm for row in others], [row.grad_norm for row in rows], rtol=1e-6)
    places, words = kinds(host), axes(host.model)
    for name, here in words.items():
        moves = can_offload(name, here)
        assert (places[f"model.{name}"] == HOST) == (moves and offload.holds("weights", name, here))
        states = [kind for path, kind in places.items() if path.startswith(("opt", "ema")) and path.endswith(name)]
        assert states and all((kind == HOST) == (moves and bool(offload.optimizer)) for kind in states), name


@pytest.mark.slow
def test_non_finite_offloaded_step_changes_nothing():
    layout = dataclasses.replace(ed.Layout(), offload=ALL)
    model = filled(DEEP, remat="full").place(layout)
    table = model.embedding.table.at[31].set(jnp.nan)
    model = dataclasses.replace(model, embedding=dataclasses.replace(model.embedding, table=table))
    trainer = trainer_of(model)
    state, _ = advanced(trainer, first_state(trainer, model), [batch_of()])
    before = jax.tree.map(np.array, (state.model, state.optimizer))
    with compilations() as programs:
        state, (row,) = advanced(trainer, state, [batch_of(poison=True)])
    assert row.skipped and same_bits((state.model, state.optimizer), before) and "_step" not in programs


@pytest.mark.slow
def test_offloaded_states_are_saved_and_restored(tmp_path):
    """Checkpoints can also be restored without offloading."""
    host = dataclasses.replace(ed.Layout.create(fsdp=4, data=2), offload=ALL)
    model = filled(DEEP).place(host)
    trainer = trainer_of(model)
    state = first_state(trainer, model)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, data_state={}, config="", wait=True)
        for layout in (host, host.on_device):
            target = trainer.abstract(ed.abstract(DEEP, layout=layout), key=jax.random.key(0))
            back, _, _ = checkpoints.restore(target)
            assert same_bits(back, state) and kinds(back) == kinds(target)
            assert (HOST in kinds(back).values()) == (layout is host)


@pytest.mark.slow
def test_generation_with_offloaded_weights():
    model = filled(rich_decoder(2))
    moved = model.place(dataclasses.replace(ed.Layout(), offload=Offload(weights=("*",))))
    assert same_bits(moved, model) and HOST in kinds(moved).values() and kinds(moved)["embedding.table"] != HOST
    prompt = some_tokens(2, 5)
    want = ed.generate(model, prompt, max_new_tokens=4)
    assert_array_equal(ed.generate(moved, prompt, max_new_tokens=4), want)


@pytest.mark.slow
def test_models_are_initialized_on_the_host():
    layout = dataclasses.replace(ed.Layout(), offload=Offload(weights=("*.mlp.*",)))
    born = ed.init(DEEP, key=jax.random.key(0), layout=layout)
    assert {name for name, kind in kinds(born).items() if kind == HOST} == {
        "scanned_layers.0.unit.0.mlp.up",
        "scanned_layers.0.unit.0.mlp.down",
    }
    assert same_bits(born, ed.init(DEEP, key=jax.random.key(0)))


def test_host_memory_is_planned_separately():
    plain, host = (ed.Layout.create(fsdp=4, data=2, offload=offload) for offload in (Offload(), ALL))
    found = []
    for layout in (plain, host):
        model = ed.abstract(DEEP, layout=layout)
        trainer = trainer_of(model)
        found.append(state_memory(trainer, trainer.abstract(model, key=jax.random.key(0)), 1))
    assert found[0].host == 0 < found[1].host
    assert found[1].state + found[1].host == found[0].state and found[1].gradients < found[0].gradients


@pytest.mark.parametrize(
    ("offload", "optimizer", "step", "names"),
    [
        pytest.param(
            dict(weights=("*.mpl.*",)), {}, {}, ["Offload.weights", "'*.mpl.*'", "scanned_layers.0."], id="weights"
        ),
        pytest.param(dict(optimizer=("embedding.*",)), {}, {}, ["Offload.optimizer", "'embedding.*'"], id="optimizer"),
        pytest.param(
            dict(optimizer=("*",)), dict(name="muon"), {}, ["OptimizerConfig.name='muon'", "adamw", "lion"], id="muon"
        ),
        pytest.param(
            dict(weights=("*",)),
            {},
            dict(gradient_accumulation_steps=2),
            ["gradient_accumulation_steps=1"],
            id="microbatches",
        ),
    ],
)
def test_unsupported_offloading_is_refused(offload, optimizer, step, names):
    model = ed.abstract(DEEP, layout=dataclasses.replace(ed.Layout(), offload=Offload(**offload)))
    with refused(ed.ConfigError, *names):
        trainer_of(model, dataclasses.replace(ANY, **optimizer), **step)


def test_offloading_of_pipelines_is_refused():
    layout = ed.Layout.create(stage=2, data=4, offload=Offload(weights=("*",)))
    with refused(ed.ConfigError, "Offload.weights=", "Execution.pipeline"):
        ed.Execution(layout=layout, pipeline=ed.Pipeline(microbatches=2))


def test_offload_settings_are_passed_to_the_layout():
    config = TrainConfig(offload=ALL)
    assert config.execution().layout.offload == ALL and "offload=Offload(" in repr(config.execution().layout)


@pytest.mark.slow
def test_offloading_saves_tpu_memory():
    """Layers of Llama 3.2 1B on four devices: the optimizer state is no device argument, and neither it nor the weights
    are copied to the devices all at once."""
    config = ed.get_config("llama3.2-1b")
    config = dataclasses.replace(config, blocks=config.blocks[:8], vocab_size=8192)
    devices, found = tpu_devices("v5p:2x2x1"), []
    for offload in (Offload(), Offload(weights=("*",), optimizer=("*",))):
        layout = ed.Layout.create(fsdp=4, devices=devices, offload=offload)
        precision = ed.Precision(compute=jnp.bfloat16)
        model = ed.abstract(config, layout=layout, precision=precision, remat="full")
        trainer = Trainer.create(OptimizerConfig(), model, steps=100)
        state = trainer.abstract(model, key=jax.random.key(0))
        compiled = trainer.trace(state, abstract_batch(layout, 8, 512)).lower().compile()
        found.append((state_memory(trainer, state, 1), compiled.memory_analysis()))
    (_, plain), (known, host) = found
    assert host.host_argument_size_in_bytes == pytest.approx(known.host, rel=0.01)
    assert host.host_alias_size_in_bytes == pytest.approx(known.host, rel=0.01)  # the state is updated in place
    assert host.host_temp_size_in_bytes < 0.5 * known.host  # there are gradients, but no second copy of the state
    before, after = (each.argument_size_in_bytes + each.temp_size_in_bytes for each in (plain, host))
    assert plain.argument_size_in_bytes - host.argument_size_in_bytes > 0.95 * known.host
    assert after < before - 0.9 * known.host
