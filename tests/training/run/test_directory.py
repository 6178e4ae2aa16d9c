"""Test the model and state of a run: new, from a checkpoint, or resumed."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.config import DataConfig
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.optimizer.resume import trained_weights
from eqx_decoders.training.run import directory, load_export
from eqx_decoders.training.run.directory import RunDirectory, write_config, write_source
from eqx_decoders.training.run.model import abstract_run, new_model
from eqx_decoders.training.run.start import restore_state
from eqx_decoders.training.settings.files import load_settings, save_settings, settings_json
from eqx_decoders.training.settings.lora import LoRASettings
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.step import MeshConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.errors import assert_names, refused
from tests.training.run.starts import resumed, run_at


BASE = Path(__file__).parents[2] / "fixtures" / "chat_llama"


@pytest.mark.slow
def test_init_weights_loads_weights_by_pattern(tmp_path):
    settings = TrainConfig(init_from=str(BASE), init_weights=("embedding.*", "*.mlp.*"))
    model, base = named_leaves(new_model(run_at(settings, tmp_path))), named_leaves(ed.load_hf(BASE))
    same = {name for name in base if np.array_equal(model[name], base[name])}
    assert {name for name in base if name.startswith("embedding") or ".mlp." in name} <= same
    assert not any("mixer" in name and "norm" not in name for name in same)
    with refused(ed.ConfigError, "init_weights", "'*.experts'"):
        new_model(run_at(TrainConfig(init_from=str(BASE), init_weights=("*.experts",)), tmp_path))


def test_configuration_of_init_from_is_saved(tmp_path):
    model = ed.abstract_hf(BASE)
    write_source(model, tmp_path / "source")
    kept = json.loads((tmp_path / "source" / "config.json").read_text())
    original = json.loads((BASE / "config.json").read_text())
    for key in original.keys() - {"dtype", "torch_dtype"}:
        assert kept[key] == original[key]
    settings = TrainConfig(init_from="gone/away")
    assert abstract_run(run_at(settings, tmp_path)).config == model.config


@pytest.mark.slow
def test_resumed_run_uses_its_saved_model_and_tokenizer(tmp_path):
    begun = TrainConfig(data=DataConfig(seed=3))
    assert resumed(begun, tmp_path) == (begun, {})  # the directory is empty
    save_settings(begun, tmp_path / "settings.json")
    other = dataclasses.replace(begun, model="llama3-8b")
    assert resumed(other, tmp_path) == (other, {})  # no model was saved
    (tmp_path / "tokenizer").mkdir()
    longer = dataclasses.replace(begun, steps=900, optimizer=OptimizerConfig(eps=1e-6))
    assert resumed(longer, tmp_path) == (longer, {"steps": (400, 900), "optimizer.eps": (1e-8, 1e-6)})
    changes = (
        dict(model="llama3-8b"),
        dict(tokenizer="bytes"),
        dict(data=DataConfig(seed=4)),
        dict(lora=LoRASettings(rank=2)),
        dict(params_dtype="bfloat16"),
        dict(init_from="a/b"),
    )
    for change in changes:
        name = next(iter(change)).replace("data", "seed")
        with refused(ed.ConfigError, f"{name}=", tmp_path):
            resumed(dataclasses.replace(begun, **change, allow_changes=True), tmp_path)


@pytest.mark.slow
def test_weight_averages_can_be_added_or_removed_on_resume(tmp_path):
    """If a checkpoint has no averages, the averages start at its weights."""
    model = ed.init(ed.get_config("gpt3-52k"), key=jax.random.key(0))
    plain, kept = (Trainer.create(OptimizerConfig(ema_decay=decay), model, steps=10) for decay in (None, 0.5))
    key = jax.random.key(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plain.init(model, key=key), data_state={"row": 2}, config="", wait=True)
        state, data_state, step = restore_state(checkpoints, kept, model, key)
        assert (data_state, step) == ({"row": 2}, 1) and state.ema.keys() == kept.trainable
        assert all(np.array_equal(state.ema[name], leaf) for name, leaf in named_leaves(state.model).items())
        state = dataclasses.replace(state, ema={name: 2 * mean for name, mean in state.ema.items()})
        checkpoints.save(2, state, data_state={}, config="", wait=True)
        again = restore_state(checkpoints, kept, model, key)[0]
        assert all(np.array_equal(again.ema[name], mean) for name, mean in state.ema.items())
        assert restore_state(checkpoints, plain, model, key)[0].ema is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a checkpoint after three AdamW steps (one skipped) with weight averages, its model and its state."""
    model = ed.init(ed.get_config("gpt3-52k"), key=jax.random.key(0))
    optimizer = OptimizerConfig(ema_decay=0.5)
    trainer = Trainer.create(optimizer, model, steps=10)
    state = trainer.init(model, key=jax.random.key(1))
    moved = jax.tree.map(lambda x: x + 2 if x.dtype == jnp.int32 else x + jnp.ones_like(x), state.optimizer)
    means = {name: mean + 1 for name, mean in (state.ema or {}).items()}
    state = dataclasses.replace(state, optimizer=moved, step=state.step + 3, skipped=state.skipped + 1, ema=means)
    folder = tmp_path_factory.mktemp("trained")
    with Checkpoints(folder) as checkpoints:
        config = settings_json(TrainConfig(optimizer=optimizer, steps=10))
        checkpoints.save(3, state, data_state={"row": 2}, config=config, wait=True)
    return folder, model, named_leaves(state)


def adopted(trained, **optimizer):
    """Restore the checkpoint with another optimizer. Returns trainer, state, arrays by path, and logged lines."""
    folder, model, _ = trained
    trainer, lines = Trainer.create(OptimizerConfig(**optimizer), model, steps=10), []
    state, data_state, step = restore_state(Checkpoints(folder), trainer, model, jax.random.key(1), lines.append)
    assert (data_state, step, int(state.step)) == ({"row": 2}, 3, 3)
    return trainer, state, named_leaves(state), lines


def assert_kept(found, before, names):
    assert names and all(np.array_equal(found[name], before[name]) for name in names if name != "key")


@pytest.mark.slow
def test_new_optimizer_continues_at_the_current_schedule_step(trained):
    """Weights and averages do not change. Arrays must not share a buffer, because the step donates its state."""
    before = trained[2]
    for name in ("lion", "muon", "adafactor"):
        trainer, state, found, lines = adopted(trained, name=name, ema_decay=0.5)
        assert_kept(found, before, [path for path in before if not path.startswith("optimizer")])
        fresh = named_leaves(trainer.init(trained[1], key=jax.random.key(1)).optimizer)
        own = {path.removeprefix("optimizer."): leaf for path, leaf in found.items() if path.startswith("optimizer.")}
        assert own.keys() == fresh.keys()
        different = {path for path, leaf in own.items() if not np.array_equal(leaf, fresh[path])}
        assert different and all(path.endswith("count") and int(own[path]) == 2 for path in different)
        alone = {path for path in own if path.endswith("count")} - different
        assert all(int(own[path]) == 0 for path in alone) and alone  # step counters of the moments
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.optimizer)]
        assert len(set(places)) == len(places)
        (line,) = lines
        assert_names(line, "new", name, "adamw", len(trainer.trainable))


@pytest.mark.slow
def test_trainable_weights_may_change_on_resume(trained):
    """With fewer trainable weights the optimizer state is kept; with more trainable weights it is new."""
    before = trained[2]
    trainer, state, found, lines = adopted(trained, trainable=("*.mlp.*",), ema_decay=0.5)
    assert set(state.ema) == trainer.trainable and "kept" in lines[0]
    assert_kept(found, before, [path for path in found if path.startswith(("optimizer", "ema", "model"))])
    assert sum(path.startswith("optimizer") for path in found) < sum(path.startswith("optimizer") for path in before)
    folder = trained[0] / "fewer"
    with Checkpoints(folder) as checkpoints:
        config = settings_json(TrainConfig(optimizer=OptimizerConfig(trainable=("*.mlp.*",), ema_decay=0.5)))
        checkpoints.save(3, state, data_state={"row": 2}, config=config, wait=True)
    more, again, own, lines = adopted((folder, *trained[1:]), ema_decay=0.5)
    assert set(again.ema) == more.trainable > trainer.trainable and "new" in lines[0]
    assert_kept(own, found, [f"ema.{name}" for name in trainer.trainable])
    assert all(np.array_equal(own[f"ema.{n}"], own[f"model.{n}"]) for n in more.trainable - trainer.trainable)
    assert [int(leaf) for path, leaf in own.items() if path.endswith("count")] == [0, 2]


@pytest.mark.slow
def test_trainable_weights_are_read_from_the_checkpoint(tmp_path):
    """The checkpoint may contain moments of buffers. All other weights keep their moments."""
    model = ed.init(read_config(BASE.parent / "gemma4_dense")[0], key=jax.random.key(0))
    optimizer, named = OptimizerConfig(name="muon", ema_decay=0.5), ("*", "*.residual.scale")
    trainer, earlier = (
        Trainer.create(dataclasses.replace(optimizer, trainable=patterns), model, steps=10)
        for patterns in (("*",), named)
    )
    state = earlier.init(model, key=jax.random.key(1))
    moved = jax.tree.map(lambda x: x + jnp.ones_like(x), state.optimizer)
    state, lines = dataclasses.replace(state, optimizer=moved), []
    with Checkpoints(tmp_path) as checkpoints:
        config = settings_json(TrainConfig(optimizer=optimizer, steps=10))
        checkpoints.save(3, state, data_state={}, config=config, wait=True)
        found = named_leaves(restore_state(checkpoints, trainer, model, jax.random.key(1), lines.append)[0])
    assert_names(lines[0], "kept", trainer.name, len(trainer.trainable))
    assert trainer.trainable < earlier.trainable and found.keys() < named_leaves(state).keys()
    assert_kept(found, named_leaves(state), list(found))
    for options in ({"moments_dtype": "int8"}, {"name": "adafactor"}, {"name": "lion"}):
        other = Trainer.create(OptimizerConfig(trainable=named, **options), model, steps=10)
        arrays = named_leaves(other.abstract(model, key=jax.random.key(0)))
        assert trained_weights(arrays, model) == other.trainable, options


@pytest.mark.slow
def test_unchanged_optimizer_keeps_its_state(trained):
    _, _, found, lines = adopted(trained, ema_decay=0.5, learning_rate=1e-2)
    assert lines == []
    assert_kept(found, trained[2], list(trained[2]))


def test_changed_learning_settings_need_allow_changes(tmp_path):
    """The numbers of steps and devices may change. The error lists all refused changes."""
    save_settings(TrainConfig(), tmp_path / "settings.json")
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(4, {"x": jnp.zeros(2)}, data_state={"row": 3}, config="")
    free = TrainConfig(steps=900, remat="full", mesh=MeshConfig(fsdp=8), step=StepConfig(gradient_accumulation_steps=2))
    assert resumed(free, tmp_path)[1].keys() == {
        "steps", "remat", "mesh.fsdp", "step.gradient_accumulation_steps"
    }  # fmt: skip
    other = TrainConfig(data=DataConfig(batch_size=16), optimizer=OptimizerConfig(learning_rate=1e-2))
    with refused(ed.ConfigError, "batch_size=16", "8", "optimizer.learning_rate=0.01", "allow_changes"):
        resumed(other, tmp_path)
    half = TrainConfig(optimizer=OptimizerConfig(moments_dtype="bfloat16"), allow_changes=True)
    with refused(ed.ConfigError, "moments_dtype='bfloat16'", "'float32'"):
        resumed(half, tmp_path)
    _, changes = resumed(dataclasses.replace(other, allow_changes=True), tmp_path)
    assert changes == {"data.batch_size": (8, 16), "optimizer.learning_rate": (3e-4, 1e-2)}


@pytest.mark.slow
def test_weights_and_averages_are_loaded_from_the_same_step(tmp_path, monkeypatch):
    """This holds even if a checkpoint is saved while the weights are read."""
    settings = TrainConfig(model="gpt3-52k", optimizer=OptimizerConfig(ema_decay=0.5, trainable=("*.mlp.*",)))
    write_config(run_at(settings, tmp_path))
    save_settings(settings, tmp_path / "settings.json")
    model = new_model(run_at(settings, tmp_path))
    trainer = Trainer.create(settings.optimizer, model, steps=10)
    state = trainer.init(model, key=jax.random.key(0))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, data_state={}, config="", wait=True)
        other = jax.tree.map(lambda x: x + jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
        read = load_export.load_weights

        def saved_meanwhile(*given, **options):
            found = read(*given, **options)
            checkpoints.save(2, other, data_state={}, config="", wait=True)
            return found

        monkeypatch.setattr(load_export, "load_weights", saved_meanwhile)
        found = named_leaves(load_export.load_run(tmp_path))
        assert checkpoints.latest == 2
        want = named_leaves(state.model) | state.ema
        assert all(np.array_equal(found[name], want[name]) for name in want)


def test_init_from_may_change_before_the_first_checkpoint(tmp_path):
    """If the flag is missing, the previous init_from is used."""
    first = TrainConfig(init_from="a/b", run_dir=str(tmp_path))
    save_settings(first, tmp_path / "settings.json")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "of_a").touch()
    other = dataclasses.replace(first, init_from=str(BASE))
    assert resumed(other, tmp_path) == (other, {})
    assert resumed(dataclasses.replace(first, init_from=None), tmp_path) == (first, {})
    write_source(ed.abstract_hf(BASE), tmp_path / "source")
    assert not (tmp_path / "source" / "of_a").exists() and (tmp_path / "source" / "config.json").exists()
    (tmp_path / "metrics.jsonl").touch()
    assert resumed(other, tmp_path) == (other, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with refused(ed.ConfigError, "init_from="):
        resumed(other, tmp_path)


def test_settings_are_saved_before_the_configuration(tmp_path, monkeypatch):
    """If the program is killed between the writes, the configuration never belongs to other settings."""
    write_config(RunDirectory(TrainConfig(model="gpt3-52k", run_dir=str(tmp_path))), save=True)
    settings = TrainConfig(model="tiny", run_dir=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_atomically", lambda file, content: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_config(run_at(settings, tmp_path), save=True)
    assert load_settings(tmp_path / "settings.json").model == "tiny"
    assert directory.run_config(run_at(settings, tmp_path)) == ed.get_config("tiny")
