"""Samplers with another layout, or other devices, than those that train: the same answers, and runs that go on."""

import dataclasses
import weakref
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.rl.sampler_engine import SamplerEngine
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.methods.distill_config import DistillConfig
from eqx_decoders.training.sampler_config import SamplerConfig
from tests.commands import steps_of
from tests.programs import compilations
from tests.rl.test_rl_run import BASE, answers_of, folder, train  # noqa: F401


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint whose heads can be split."""
    config, _ = read_config(BASE)
    model = ed.init(with_fields(config, ["num_kv_heads=2", "num_layers=2"]), key=jax.random.key(1))
    ed.save_hf(model, tmp_path_factory.mktemp("base") / "model", family="llama", tokenizer=BASE)
    return tmp_path_factory.getbasetemp() / "base0" / "model"


class Recorder:
    """Engine that holds a model, as `Engine` does."""

    def __init__(self, model, config):
        self.model, self.version = model, 0

    def warm_up(self): ...

    def load(self, model, *, version):
        self.model, self.version = model, version

    def release(self):
        self.model = None


def test_weights_are_placed_anew_at_each_load(base, monkeypatch):
    """By one plan, without compiling again, and never twice at once."""
    devices = jax.devices()[:4]
    base = ed.load_hf(base, layout=ed.Layout.create(fsdp=4, devices=devices))
    layout = SamplerConfig(tensor=2).layout(devices, base)
    engine = SamplerEngine(Recorder, EngineConfig(), layout)
    engine.load(base, version=3)
    held = engine._engine
    assert isinstance(held, Recorder) and held.version == 3 and held.model is not None
    first, words = named_leaves(held.model), axes(held.model)
    assert all(leaf.sharding == layout.weight_sharding(words[name], leaf.shape) for name, leaf in first.items())
    assert all(np.array_equal(leaf, named_leaves(base)[name]) for name, leaf in first.items())
    name = next(name for name, leaf in first.items() if leaf.sharding.spec != named_leaves(base)[name].sharding.spec)
    old, alive = weakref.ref(first.pop(name)), []
    first.clear()
    other = jax.tree.map(lambda leaf: leaf + 1 if isinstance(leaf, jax.Array) else leaf, base)
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: alive.append(old() is not None) or put(*args))
    with compilations() as compiled:
        engine.load(other, version=4)
    assert alive == [False] and not compiled and held.version == 4
    assert np.array_equal(named_leaves(held.model)[name], named_leaves(other)[name])
    assert held.model.execution.layout == layout


@pytest.mark.slow
def test_answers_of_another_layout_are_the_same(folder, base):  # noqa: F811
    """fsdp trains, tensor draws: the same tokens, log-probabilities within rounding; and a run that goes on."""
    both: Any = dict(devices=4, batch_size=8, init_from=base)
    train(folder, "fsdp", "--mesh.fsdp", 4, steps=3, **both)
    more = ("--mesh.fsdp", 4, "--sampler.tensor", 2, "--sampler.data", 2)
    _, err = train(folder, "tensor", *more, steps=3, **both)
    assert "answers are drawn on 4 devices: cpu, data=2 x tensor=2" in err
    for step in (1, 2, 3):
        one, other = (answers_of(folder, name, step).answers for name in ("fsdp", "tensor"))
        for mine, theirs in zip(one, other, strict=True):
            assert np.array_equal(mine.rollout.tokens, theirs.rollout.tokens)
            np.testing.assert_allclose(mine.rollout.log_probs, theirs.rollout.log_probs, atol=2e-5)
    rows = steps_of(folder / "tensor")
    assert all(row["log_prob_gap"] <= 1e-5 for row in rows)
    train(folder, "again", *more, "--optimizer.schedule", "constant", steps=2, **both)
    train(folder, "again", *more, "--optimizer.schedule", "constant", steps=3, **both)
    train(folder, "through", *more, "--optimizer.schedule", "constant", steps=3, **both)
    losses = [[row["loss"] for row in steps_of(folder / name)] for name in ("again", "through")]
    assert losses[0] == losses[1]


def test_bad_devices_are_refused(folder):  # noqa: F811
    with pytest.raises(ConfigError, match=r"kv_heads=1 must be a multiple of sampler\.tensor=2"):
        SamplerConfig(tensor=2).layout(jax.devices()[:2], ed.load_hf(BASE))
    with pytest.raises(ConfigError, match=r"sampler\.tensor=3 needs 3 devices"):
        SamplerConfig(tensor=3).layout(jax.devices()[:4], None)
    with pytest.raises(ConfigError, match=r"sampler\.devices=-1 must be an integer of at least 0"):
        SamplerConfig(devices=-1)
    _, err = train(folder, "refused", "--sampler.devices", 99, code=2)
    assert "--sampler.devices=99 of 8 devices leave none to train: give fewer." in err
    with pytest.raises(ConfigError, match=r"sampler\.fsdp=2 is not read with method='sft'"):
        TrainConfig(sampler=SamplerConfig(fsdp=2))
    with pytest.raises(ConfigError, match=r"sampler\.devices and other settings of draws are read with distill.on_pol"):
        TrainConfig(
            method="distill", init_from="a", distill=DistillConfig(teacher="b"), sampler=SamplerConfig(devices=2)
        )


def test_the_settings_that_place_a_sampler():
    """devices, data, fsdp, tensor, expert: each makes another layout."""
    devices, shown = jax.devices()[:4], set()
    for changes in ({}, {"data": 4}, {"fsdp": 4}, {"tensor": 4}, {"expert": 4}):
        layout = dataclasses.replace(SamplerConfig(), **changes).layout(devices, None)
        shown.add(tuple(name for name, size in layout.sizes.items() if size == 4))
    assert shown == {("data",), ("fsdp",), ("tensor",), ("expert",)}
    assert (
        not SamplerConfig().is_separate and SamplerConfig(data=1).is_separate and SamplerConfig(devices=1).is_separate
    )
