"""The model of a run: new, from a checkpoint, or resumed."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.axes import named_leaves
from eqx_decoders.io.checkpoint import Checkpoints
from eqx_decoders.training.data import DataConfig
from eqx_decoders.training.optimizer import OptimizerConfig
from eqx_decoders.training.runs import SOURCE, abstract_run, keep_source, new_model, restore_state, resume_settings
from eqx_decoders.training.settings import MeshConfig, TrainConfig, save_settings
from eqx_decoders.training.step import StepConfig, Trainer


BASE = Path(__file__).parents[1] / "fixtures" / "chat_llama"


def test_only_some_weights_are_taken(tmp_path):
    settings = TrainConfig(init_from=str(BASE), init_weights=("embedding.*", "*.mlp.*"))
    model, base = named_leaves(new_model(settings, tmp_path)), named_leaves(ed.load_hf(BASE))
    same = {name for name in base if np.array_equal(model[name], base[name])}
    assert {name for name in base if name.startswith("embedding") or ".mlp." in name} <= same
    assert not any("mixer" in name and "norm" not in name for name in same)
    with pytest.raises(ed.ConfigError, match="init_weights: no weight matches"):
        new_model(TrainConfig(init_from=str(BASE), init_weights=("*.experts",)), tmp_path)


def test_the_source_of_a_run_is_kept_as_it_was_read(tmp_path):
    model = ed.abstract_hf(BASE)
    keep_source(model, tmp_path)
    kept = json.loads((tmp_path / SOURCE / "config.json").read_text())
    original = json.loads((BASE / "config.json").read_text())
    assert {key: kept.get(key) for key in original if key not in ("dtype", "torch_dtype")} == {
        key: value for key, value in original.items() if key not in ("dtype", "torch_dtype")
    }
    settings = TrainConfig(init_from="gone/away")
    assert abstract_run(settings, tmp_path).config == model.config


def test_a_run_directory_is_resumed_with_its_own_model_and_tokenizer(tmp_path):
    begun = TrainConfig(dataset=DataConfig(seed=3))
    assert resume_settings(begun, tmp_path) == (begun, {})  # nothing there yet
    save_settings(begun, tmp_path / "settings.json")
    other = dataclasses.replace(begun, model="llama3-8b")
    assert resume_settings(other, tmp_path) == (other, {})  # nothing was made yet
    (tmp_path / "tokenizer").mkdir()
    longer = dataclasses.replace(begun, steps=900, optimizer=OptimizerConfig(eps=1e-6))
    assert resume_settings(longer, tmp_path) == (longer, {"steps": (400, 900), "optimizer.eps": (1e-8, 1e-6)})
    changes = (
        dict(model="llama3-8b"),
        dict(tokenizer="bytes"),
        dict(dataset=DataConfig(seed=4)),
        dict(lora_rank=2),
        dict(params_dtype="bfloat16"),
        dict(init_from="a/b"),
    )
    for change in changes:
        name = next(iter(change)).replace("dataset", "seed")
        with pytest.raises(ed.ConfigError, match=f"{name}=.*was begun with"):
            resume_settings(dataclasses.replace(begun, **change, allow_changes=True), tmp_path)


def test_running_means_begin_and_end_with_a_change(tmp_path):
    """A checkpoint without them begins them at its weights, and one that has them loses them."""
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


def test_what_a_trained_run_learns_by_is_changed_on_request_only(tmp_path):
    """More steps, other devices and the like are free; all that is refused is listed at once."""
    save_settings(TrainConfig(), tmp_path / "settings.json")
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(4, {"x": jnp.zeros(2)}, data_state={"row": 3}, config="")
    free = TrainConfig(steps=900, remat="full", mesh=MeshConfig(fsdp=8), step=StepConfig(gradient_accumulation_steps=2))
    assert resume_settings(free, tmp_path)[1].keys() == {
        "steps", "remat", "mesh.fsdp", "step.gradient_accumulation_steps"
    }  # fmt: skip
    other = TrainConfig(dataset=DataConfig(batch_size=16), optimizer=OptimizerConfig(learning_rate=1e-2))
    with pytest.raises(ed.ConfigError) as caught:
        resume_settings(other, tmp_path)
    for part in ("batch_size=16, but", "was trained with 8; optimizer.learning_rate=0.01", "give allow_changes"):
        assert part in str(caught.value)
    half = TrainConfig(optimizer=OptimizerConfig(moments_dtype="bfloat16"), allow_changes=True)
    with pytest.raises(ed.ConfigError, match=r"moments_dtype='bfloat16', but .*was begun with 'float32'"):
        resume_settings(half, tmp_path)
    _, changes = resume_settings(dataclasses.replace(other, allow_changes=True), tmp_path)
    assert changes == {"dataset.batch_size": (8, 16), "optimizer.learning_rate": (3e-4, 1e-2)}
