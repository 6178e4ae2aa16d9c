"""Test settings: refused values, JSON round trips, and help texts."""

import dataclasses
import json
import re
from typing import get_args

import jax.numpy as jnp
import pytest

from eqx_decoders.cli.generate import GenerateConfig
from eqx_decoders.cli.plan import PlanConfig
from eqx_decoders.cli.serve import ServeConfig
from eqx_decoders.cli.setting_flags import flag_names, help_texts
from eqx_decoders.context import Execution, ExecutionConfig
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.huggingface.export_directory import exported_directory
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.remat import Remat
from eqx_decoders.rl.methods import METHODS
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.settings.files import (
    changed_settings,
    is_settings_of_run,
    load_settings,
    save_settings,
    settings_json,
    with_file,
)
from eqx_decoders.training.settings.flags import SHORT_FLAGS, long_flag
from eqx_decoders.training.settings.lora import LoRAConfig, LoRASettings
from eqx_decoders.training.settings.methods import METHOD_RULES
from eqx_decoders.training.settings.run import METHOD_GROUPS, TrainConfig
from eqx_decoders.training.settings.step import MeshConfig
from eqx_decoders.training.settings.values import field_types, with_settings
from eqx_decoders.training.step.step_config import StepConfig
from tests.commands import call
from tests.errors import assert_names, refused


def unchecked(field: str, value: object):
    """Return settings with a value that bypasses the type checks, which are active only in tests."""
    cls = DataConfig if field in {each.name for each in dataclasses.fields(DataConfig)} else TrainConfig
    config = object.__new__(cls)
    for each in dataclasses.fields(cls):
        object.__setattr__(config, each.name, value if each.name == field else each.default)
    return config


SIXTEEN = DataConfig(batch_size=16)
BAD = [  # field, value, and the bound or name in the message
    ("mtp_depths", -1, 0),
    ("model", "tinny", "'tiny'"),
    ("model", "llama3-7b", "'llama3-"),
    ("steps", 0, 1),
    ("steps", -5, 1),
    ("steps", 1.5, 1),
    ("steps", True, 1),
    ("batch_size", 0, 1),
    ("batch_size", -8, 1),
    ("seq_len", 1, 2),
    ("seq_len", 0, 2),
    ("seed", -1, 0),
    ("checkpoint_every", 0, 1),
    ("max_checkpoints", 0, 1),
    ("max_skipped", 0, 1),
    ("eval_every", -1, 0),
    ("sample_tokens", -1, 0),
    ("bpe_vocab_size", 0, 1),
    ("bpe_vocab_size", -3, 1),
    ("final_eval_batches", 0, 1),
    ("held_out_fraction", 1.0, 1),
    ("held_out_fraction", -0.1, 0),
    ("dtype", "float23", "'float32'"),
    ("remat", "ful", "'full'"),
    ("attention", "chunkd", "'chunked'"),
    ("profile", (5, 4), "steps="),
    ("profile", (0, 4), "steps="),
    ("profile", (-1, -1), "steps="),
]


@pytest.mark.parametrize(("field", "value", "rule"), BAD, ids=[f"{field}={value}" for field, value, _ in BAD])
def test_invalid_values_are_refused_by_name(field, value, rule):
    with pytest.raises(ConfigError) as caught:
        unchecked(field, value).__post_init__()
    _, name, rest = str(caught.value).partition(f"{field}={value!r}")
    assert name
    assert_names(rest, rule)


def test_incompatible_settings_are_refused():
    with refused(ConfigError, "trackers[1]='tensorbord'", "'tensorboard'"):
        unchecked("trackers", ("wandb", "tensorbord")).__post_init__()
    with refused(ConfigError, "batch_size=16", "step.gradient_accumulation_steps=3"):
        TrainConfig(data=SIXTEEN, step=StepConfig(gradient_accumulation_steps=3))
    with refused(ConfigError, "OptimizerConfig.warmup_steps=600"):
        TrainConfig(steps=600, optimizer=OptimizerConfig(warmup_steps=600))
    with refused(ConfigError, "remat='full'", "remat='custom'"):
        TrainConfig(remat="full", remat_save=("out_proj",))
    with refused(ConfigError, "Remat.save[0]='out_proj_'", "'out_proj'"):
        TrainConfig(remat="custom", remat_save=("out_proj_",))
    with refused(ConfigError, "out_proj"):
        TrainConfig(remat="custom", remat_save=("out_proj",), remat_offload=("out_proj",))


def test_batch_size_must_be_divisible_by_the_mesh():
    """With eight devices, microbatches are sharded along data, fsdp, fsdp_transpose and expert."""
    with refused(ConfigError, "batch_size=12", "8", "mesh.data"):
        TrainConfig(data=DataConfig(batch_size=12)).execution()
    with refused(ConfigError, "batch_size=16", "gradient_accumulation_steps=4", "mesh.data", "mesh.fsdp"):
        TrainConfig(data=SIXTEEN, step=StepConfig(gradient_accumulation_steps=4), mesh=MeshConfig(fsdp=4)).execution()
    TrainConfig(data=DataConfig(batch_size=4), mesh=MeshConfig(fsdp=4, tensor=2)).execution()
    with refused(ConfigError, "Layout.tensor=3", "Layout.data=-1", "8"):
        TrainConfig(data=SIXTEEN, mesh=MeshConfig(tensor=3)).execution()
    with refused(ConfigError, "-1"):
        TrainConfig(mesh=MeshConfig(fsdp=-1)).execution()


def test_settings_are_passed_to_the_execution():
    config = TrainConfig(
        data=SIXTEEN,
        mesh=MeshConfig(data=2, fsdp=4),
        dtype="bfloat16",
        attention="dot",
        context_order="zigzag",
        context_form="all_to_all",
        layer_stats=True,
        remat="save_out_proj",
    )
    run = config.execution()
    assert run.layout.mesh is not None and run.layout.mesh.shape["data"] == 2 and run.layout.mesh.shape["fsdp"] == 4
    assert run.precision.compute == jnp.bfloat16 and run.precision.params == jnp.float32
    assert (run.attention, run.layer_stats, run.remat) == ("dot", True, Remat(save=("out_proj",)))
    assert (run.context_order, run.context_form) == ("zigzag", "all_to_all")
    plain = TrainConfig(data=SIXTEEN).execution()
    assert plain.precision.compute == jnp.float32 and plain.remat is None  # the value of auto on CPU
    custom = TrainConfig(data=SIXTEEN, remat="custom", remat_save=("out_proj",), remat_offload=("context",))
    assert custom.execution().remat == Remat(save=("out_proj",), offload=("context",))


FULL = TrainConfig(
    run_dir="runs/ä b",
    model="llama3-8b",
    steps=77,
    data=DataConfig(batch_size=12, path="texts/*.txt", held_out_fraction=0.25, pack=False),
    bpe_vocab_size=300,
    remat="custom",
    remat_save=("out_proj", "context"),
    profile=(3, 9),
    mesh=MeshConfig(data=2, fsdp=-1),
    optimizer=OptimizerConfig(name="muon", warmup_steps=5, max_grad_norm=None, trainable=("head.*",), beta2=0.99),
    step=StepConfig(gradient_accumulation_steps=2, z_loss=1e-4, fused_loss=False),
)


@pytest.mark.parametrize("config", [FULL, TrainConfig()], ids=["full", "defaults"])
def test_settings_survive_a_json_round_trip(config, tmp_path):
    save_settings(config, tmp_path / "settings.json")
    assert load_settings(tmp_path / "settings.json") == config
    assert json.loads((tmp_path / "settings.json").read_text()) == settings_json(config)


def test_single_path_is_a_string_and_several_paths_are_a_tuple(tmp_path):
    assert DataConfig(path=["a"]) == DataConfig(path=("a",)) == DataConfig(path="a")
    several = TrainConfig(data=DataConfig(path=["a", "b"], held_out_path=("c", "d")))
    assert several.data.path == ("a", "b") and hash(several.data)
    save_settings(several, tmp_path / "settings.json")
    assert load_settings(tmp_path / "settings.json") == several
    assert json.loads((tmp_path / "settings.json").read_text())["data"]["path"] == ["a", "b"]
    with refused(ConfigError, "DataConfig.path=()"):
        DataConfig(path=())


def test_settings_of_another_run_can_be_used_as_a_settings_file(tmp_path):
    """Directories, history, options of a single start, and an export that was written are not read."""
    (tmp_path / "written").mkdir()
    (tmp_path / "written" / "x").write_text("")
    other = dataclasses.replace(FULL, config="a.yaml", export=str(tmp_path / "written"), allow_changes=True)
    other = dataclasses.replace(other, checkpoint_dir="gs://bucket/other")
    path = tmp_path / "settings.json"
    save_settings(other, path, changes={"steps": (1, 77)}, step=1)
    start = TrainConfig(run_dir="mine", max_checkpoints=9)
    want = dataclasses.replace(FULL, run_dir="mine", config=str(path))
    assert with_settings(with_file(start, path), {}) == want
    (tmp_path / "new.json").write_text(
        '{"export": "no/where", "checkpoint_dir": "a", "optimizer": {"max_grad_norm": null}}'
    )
    found = with_file(start, tmp_path / "new.json")
    assert found.checkpoint_dir == "a"  # the file does not belong to a run
    assert found.export == "no/where" and found.optimizer.max_grad_norm is None and found.max_checkpoints == 9
    (tmp_path / "run.yaml").write_text("config: other.yaml")
    with refused(ConfigError, "run.yaml", "config='other.yaml'"):
        with_file(start, tmp_path / "run.yaml")


def test_json_and_yaml_files_give_the_same_settings(tmp_path):
    """Options of a single start are read, except from the `settings.json` of a run."""
    values = {"run_dir": "there", "distributed": True, "distributed_timeout": 7, "describe": True, "steps": 3}
    values |= {"export": str(tmp_path), "data": {"seq_len": 16}, "checkpoint_dir": "c"}
    for name in ("run.json", "run.yaml"):
        (tmp_path / name).write_text(json.dumps(values))  # JSON is valid YAML
        assert not is_settings_of_run(tmp_path / name)
    found = [with_file(TrainConfig(), tmp_path / name) for name in ("run.json", "run.yaml")]
    assert found[0].run_dir == "there" and found[0].distributed and found[0].export == str(tmp_path)
    assert found[0] == dataclasses.replace(found[1], config=found[0].config)
    save_settings(TrainConfig(), tmp_path / "settings.json")
    assert is_settings_of_run(tmp_path / "settings.json")


def test_history_of_changes_has_step_and_time(tmp_path):
    path = tmp_path / "settings.json"
    save_settings(TrainConfig(), path)
    longer = TrainConfig(steps=900, profile=(1, 2))
    save_settings(longer, path, changes=changed_settings(TrainConfig(), longer), step=400)
    save_settings(TrainConfig(), path, changes=changed_settings(longer, TrainConfig()), step=500)
    save_settings(TrainConfig(), path)
    assert load_settings(path) == TrainConfig()
    first, second = json.loads(path.read_text())["history"]
    assert first["changes"] == {"steps": [400, 900], "profile": [None, [1, 2]]} and first["step"] == 400
    assert second["changes"]["steps"] == [900, 400] and second["time"] >= first["time"] > "2026"


def test_per_start_options_are_not_recorded_as_changes():
    other = TrainConfig(run_dir="x", config="y", allow_changes=True, describe=True, list_models=True)
    assert changed_settings(TrainConfig(), other) == {}


def test_method_tables_have_every_method():
    names = get_args(field_types(TrainConfig)["method"])
    assert tuple(METHOD_RULES) == names == tuple(METHODS)
    assert {group for kind in METHOD_RULES.values() for group in kind.groups} == set(METHOD_GROUPS)


def test_flag_names_equal_the_command_line_flags():
    out, _ = call("train", "--help-all")
    named, flags = set(re.findall(r"--[a-z][\w.-]*", out)), flag_names(TrainConfig)
    assert flags["data.path"] == "--data" and flags["optimizer.eps"] == "--optimizer.eps"
    assert flags["Layout.fsdp"] == "--mesh.fsdp" and flags["LoRAConfig.rank"] == "--lora.rank"
    assert set(flags.values()) - named == set() and named - set(flags.values()) - set(map(long_flag, SHORT_FLAGS)) == {
        name for name in named if re.search(r"--(\w+\.)*no-", name)
    } - {"--optimizer.no-decay"} | {"--help", "--help-all", "--method", "--plugin"} - set(flags.values())


def test_invalid_settings_files_are_refused(tmp_path):
    path = tmp_path / "settings.json"
    for text in (None, '{"steps": 3', "", "[1, 2]", "\x00"):
        if text is not None:
            path.write_text(text)
        with refused(ConfigError, "settings.json"):
            load_settings(path)
    for change, name in (
        ({"stepps": 3}, "'steps'"),
        ({"mesh": {"fsdpp": 2}}, "'mesh.fsdp'"),
        ({"steps": -3}, "steps=-3"),
        ({"optimizer": {"eps": "small"}}, "settings.json: 'optimizer.eps'='small'"),
    ):
        path.write_text(json.dumps(change))
        with refused(ConfigError, name):
            load_settings(path)


def test_settings_files_may_use_short_flag_names(tmp_path):
    flat = settings_json(FULL)
    data = flat.pop("data")
    flat |= {short.removeprefix("--"): data.pop(name.removeprefix("data.")) for name, short in SHORT_FLAGS.items()}
    flat |= {f"data.{name}": value for name, value in data.items()}
    (tmp_path / "settings.json").write_text(json.dumps(flat))
    assert load_settings(tmp_path / "settings.json") == FULL


def test_tilde_is_expanded_in_all_paths(monkeypatch):
    """The tilde is expanded only at the start of a path, which may follow the name of a held-out set."""
    monkeypatch.setenv("HOME", "/home/me")
    paths = dict.fromkeys(("run_dir", "checkpoint_dir", "config", "init_from", "tokenizer", "export"), "~/x")
    data = DataConfig(
        path=("~/a.txt", "b~/c.txt", "gs://x/~/y"), held_out_path="val=~/v.txt", chat_template="~/t", cache_dir="~"
    )
    found = TrainConfig(**paths, data=data)
    assert {getattr(found, name) for name in paths} == {"/home/me/x"}
    assert data.path == ("/home/me/a.txt", "b~/c.txt", "gs://x/~/y")
    assert (data.held_out_path, data.chat_template, data.cache_dir) == (
        "val=/home/me/v.txt",
        "/home/me/t",
        "/home/me",
    )
    lora = TrainConfig(lora=LoRASettings(rank=1), export_adapter="~/x", model_config="~/m.json")
    assert (lora.export_adapter, lora.model_config) == ("/home/me/x", "/home/me/m.json")
    with refused(ConfigError, "/home/me/x/settings.json"):
        RunDirectory.open("~/x")


def test_tilde_is_expanded_in_checkpoint_directories(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model").path == Directory("~/model").path == tmp_path / "model"
    with exported_directory("~/out") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out" / "a").exists()


@pytest.mark.parametrize("kind", [TrainConfig, PlanConfig, GenerateConfig, ServeConfig])
def test_every_setting_has_a_help_text(kind):
    texts = help_texts(kind)
    for name in field_types(kind):
        assert len(texts[name]) > 8 and texts[name].endswith("."), name


def test_every_execution_option_is_a_setting():
    changes: dict = dict(attention="dot", experts="dense", expert_exchange="gather", scan=False, layer_stats=True)
    changes |= dict(lookup="one_hot", head_bytes=5, exchange_bytes=6, context_order="zigzag", context_form="ring")
    changes |= dict(batch_split=2)
    assert changes.keys() == {field.name for field in dataclasses.fields(ExecutionConfig)}
    for config in (TrainConfig(**changes), PlanConfig(**changes)):
        execution = config.step_execution(None)
        assert {name: getattr(execution, name) for name in changes} == changes
    assert all(getattr(Execution(), name) != value for name, value in changes.items())


def test_every_lora_option_is_a_setting():
    changes: dict = dict(
        rank=4, alpha=2.0, targets=("*.mlp.*",), rank_pattern=(("*.up", 2),), alpha_pattern=(("*.up", 3.0),),
        rank_stabilized=True, dora=True, init="pissa",
    )  # fmt: skip
    lora = LoRASettings(**changes).config()
    assert lora == LoRAConfig(**changes, dtype="float32")
    assert changes.keys() == {field.name for field in dataclasses.fields(LoRAConfig)} - {"dtype"}
    assert all(getattr(LoRASettings(), name) != value for name, value in changes.items())
    for name, value in changes.items():
        if name not in ("rank", "alpha", "targets"):
            with refused(ConfigError, f"lora.{name}={value!r}", "lora.rank"):
                LoRASettings(**{name: value})
    for name, value in (("rank", 0), ("targets", ())):
        with refused(ConfigError, f"LoRAConfig.{name}={value!r}"):
            LoRASettings(**{"rank": 4, name: value})


@pytest.mark.parametrize(
    "fields, names",
    [
        pytest.param(dict(model="llama3-8b", init_from="x"), ["model='llama3-8b'", "init_from='x'"], id="model-init"),
        pytest.param(
            dict(model="llama3-8b", model_config="x"), ["model='llama3-8b'", "model_config='x'"], id="model-config"
        ),
        pytest.param(dict(model_config="y", init_from="x"), ["model_config='y'", "init_from='x'"], id="config-init"),
        pytest.param(dict(set=("a=1",), init_from="x"), ["set=('a=1',)", "init_from='x'"], id="set-init"),
        pytest.param(dict(init_weights=("*.mlp.*",)), ["init_weights=('*.mlp.*',)", "init_from"], id="init_weights"),
        pytest.param(dict(export_adapter="x"), ["export_adapter='x'", "lora.rank"], id="export_adapter"),
        *(
            pytest.param(
                dict(export=model, export_adapter=adapter, lora=LoRASettings(rank=2)),
                [f"export={model!r}", f"export_adapter={adapter!r}"],
                id=f"{model}-{adapter}",
            )
            for model, adapter in (("x", "x"), ("x", "x/y"), ("x/y", "x"))
        ),
    ],
)
def test_mutually_exclusive_settings_are_refused(fields, names):
    with refused(ConfigError, *names):
        TrainConfig(**fields)
