"""Settings: what is refused and in which words, the way to JSON and back, and that each one explains itself."""

import ast
import dataclasses
import inspect
import json
import re

import jax.numpy as jnp
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.remat import Remat
from eqx_decoders.training import data, optimizer, settings, step
from eqx_decoders.training.data import DataConfig
from eqx_decoders.training.optimizer import OptimizerConfig
from eqx_decoders.training.settings import MeshConfig, TrainConfig, load_settings, save_settings, settings_json
from eqx_decoders.training.step import StepConfig


def unchecked(**changes) -> TrainConfig:
    """Settings past the type checks of the tests, which users don't have."""
    config = object.__new__(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        object.__setattr__(config, field.name, changes.get(field.name, field.default))
    return config


BAD = [
    ("model", "tinny", "Did you mean 'tiny'"),
    ("model", "llama3-7b", "Did you mean 'llama3-"),
    ("steps", 0, "at least 1"),
    ("steps", -5, "at least 1"),
    ("steps", 1.5, "integer"),
    ("steps", True, "integer"),
    ("batch_size", 0, "at least 1"),
    ("batch_size", -8, "at least 1"),
    ("seq_len", 1, "at least 2"),
    ("seq_len", 0, "at least 2"),
    ("seed", -1, "at least 0"),
    ("checkpoint_every", 0, "at least 1"),
    ("max_checkpoints", 0, "at least 1"),
    ("max_skipped", 0, "at least 1"),
    ("eval_every", -1, "at least 0"),
    ("sample_tokens", -1, "at least 0"),
    ("bpe_vocab_size", 0, "at least 1"),
    ("bpe_vocab_size", -3, "at least 1"),
    ("held_out_fraction", 1.0, "below 1"),
    ("held_out_fraction", -0.1, "at least 0"),
    ("dtype", "float23", "Did you mean 'float32'"),
    ("remat", "ful", "Did you mean 'full'"),
    ("attention", "chunkd", "Did you mean 'chunked'"),
    ("profile", (5, 4), "first and a last"),
    ("profile", (0, 4), "counted from 1"),
    ("profile", (-1, -1), "counted from 1"),
]


@pytest.mark.parametrize(("field", "value", "rule"), BAD, ids=str)
def test_bad_values_are_refused_by_name(field, value, rule):
    with pytest.raises(ConfigError) as caught:
        unchecked(**{field: value}).__post_init__()
    sentence = str(caught.value)
    assert re.match(rf"(DataConfig\.)?{field}=", sentence) and rule in sentence
    assert repr(value) in sentence


def test_settings_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match=r"batch_size=16 must be a multiple of step\.gradient_accumulation_steps=3"):
        TrainConfig(batch_size=16, step=StepConfig(gradient_accumulation_steps=3))
    with pytest.raises(ConfigError, match=r"OptimizerConfig\.warmup_steps=600 must be below the run's 600 steps"):
        TrainConfig(steps=600, optimizer=OptimizerConfig(warmup_steps=600))
    with pytest.raises(ConfigError, match=r"remat='full' has its own lists: .*remat='custom'"):
        TrainConfig(remat="full", remat_save=("out_proj",))
    with pytest.raises(ConfigError, match=r"Remat\.save='out_proj_'.*Did you mean 'out_proj'"):
        TrainConfig(remat="custom", remat_save=("out_proj_",))
    with pytest.raises(ConfigError, match=r"out_proj can't be both saved and offloaded"):
        TrainConfig(remat="custom", remat_save=("out_proj",), remat_offload=("out_proj",))


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    """Eight devices: the batch of each microbatch is cut along data, fsdp, fsdp_transpose and expert."""
    with pytest.raises(ConfigError, match=r"batch_size=12 must be a multiple of 8, the devices along data"):
        TrainConfig(batch_size=12).execution()
    with pytest.raises(
        ConfigError, match=r"batch_size=16 / gradient_accumulation_steps=4 must be a multiple of 8.*data x fsdp"
    ):
        TrainConfig(batch_size=16, step=StepConfig(gradient_accumulation_steps=4), mesh=MeshConfig(fsdp=4)).execution()
    TrainConfig(batch_size=4, mesh=MeshConfig(fsdp=4, tensor=2)).execution()
    with pytest.raises(ConfigError, match=r"Layout\.data=-1: 8 devices can't be divided by 3"):
        TrainConfig(batch_size=16, mesh=MeshConfig(tensor=3)).execution()
    with pytest.raises(ConfigError, match=r"only one mesh axis can be -1"):
        TrainConfig(mesh=MeshConfig(fsdp=-1)).execution()


def test_execution_carries_every_choice():
    config = TrainConfig(
        batch_size=16,
        mesh=MeshConfig(data=2, fsdp=4),
        dtype="bfloat16",
        attention="dot",
        layer_stats=True,
        remat="save_out_proj",
    )
    run = config.execution()
    assert run.layout.mesh is not None and run.layout.mesh.shape["data"] == 2 and run.layout.mesh.shape["fsdp"] == 4
    assert run.precision.compute == jnp.bfloat16 and run.precision.params == jnp.float32
    assert (run.attention, run.layer_stats, run.remat) == ("dot", True, Remat(save=("out_proj",)))
    plain = TrainConfig(batch_size=16).execution()
    assert plain.precision.compute == jnp.float32 and plain.remat is None  # auto, on CPU
    custom = TrainConfig(batch_size=16, remat="custom", remat_save=("out_proj",), remat_offload=("context",))
    assert custom.execution().remat == Remat(save=("out_proj",), offload=("context",))


FULL = TrainConfig(
    run_dir="runs/ä b",
    model="llama3-8b",
    steps=77,
    batch_size=12,
    data="texts/*.txt",
    held_out_fraction=0.25,
    pack=False,
    bpe_vocab_size=300,
    remat="custom",
    remat_save=("out_proj", "context"),
    profile=(3, 9),
    mesh=MeshConfig(data=2, fsdp=-1),
    optimizer=OptimizerConfig(name="muon", warmup_steps=5, max_grad_norm=None, trainable=("head.*",), beta2=0.99),
    step=StepConfig(gradient_accumulation_steps=2, z_loss=1e-4, fused_loss=False),
)


@pytest.mark.parametrize("config", [FULL, TrainConfig()], ids=["full", "defaults"])
def test_settings_come_back_from_json_as_they_were(config, tmp_path):
    save_settings(config, tmp_path / "settings.json")
    assert load_settings(tmp_path / "settings.json") == config
    assert json.loads((tmp_path / "settings.json").read_text()) == settings_json(config)


def test_what_is_no_run_directory_is_refused(tmp_path):
    path = tmp_path / "settings.json"
    with pytest.raises(ConfigError, match=r"settings\.json is not there: .* is no run directory"):
        load_settings(path)
    for text in ('{"steps": 3', "", "[1, 2]", "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"settings\.json"):
            load_settings(path)
    for change, name in (({"stepps": 3}, "'steps'"), ({"mesh": {"fsdpp": 2}}, "'fsdp'"), ({"steps": -3}, "steps=-3")):
        path.write_text(json.dumps(change))
        with pytest.raises(ConfigError, match=name):
            load_settings(path)


def test_data_settings_reach_the_data():
    config = TrainConfig(data="a", held_out="b", batch_size=4, seq_len=32, seed=3, pack=False, text_field="t")
    want = DataConfig(path="a", held_out_path="b", batch_size=4, seq_len=32, seed=3, pack=False, text_field="t")
    assert config.data_config() == dataclasses.replace(want, held_out_fraction=config.held_out_fraction)


CLASSES = [
    (settings, TrainConfig),
    (settings, MeshConfig),
    (optimizer, OptimizerConfig),
    (step, StepConfig),
    (data, DataConfig),
]


@pytest.mark.parametrize(("module", "cls"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_explains_itself(module, cls):
    """The string below a field is the text of `--help`. A group of fields has its class's docstring instead."""
    found = {}
    tree = next(
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = following.value if isinstance(following, ast.Expr) else None
            found[node.target.id] = text.value if isinstance(text, ast.Constant) else ""
    assert found.keys() == {field.name for field in dataclasses.fields(cls)}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            assert field.type.__doc__
        else:
            assert len(found[field.name]) > 8 and found[field.name].strip().endswith("."), field.name
