"""Settings: what is refused and in which words, the way to JSON and back, and that each one explains itself."""

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
from eqx_decoders.training.config import METHOD_GROUPS, TrainConfig
from eqx_decoders.training.config_file import field_types, with_settings
from eqx_decoders.training.lora_config import LoRAConfig
from eqx_decoders.training.mesh_config import MeshConfig
from eqx_decoders.training.methods.method_kinds import KINDS
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.run.setup import METHODS
from eqx_decoders.training.settings_file import (
    changed_settings,
    is_of_a_run,
    load_settings,
    save_settings,
    settings_json,
    with_file,
)
from eqx_decoders.training.step.step_config import StepConfig
from tests.commands import call


def unchecked(field: str, value: object):
    """Settings with a value past the type checks of the tests, which users don't have."""
    cls = DataConfig if field in {each.name for each in dataclasses.fields(DataConfig)} else TrainConfig
    config = object.__new__(cls)
    for each in dataclasses.fields(cls):
        object.__setattr__(config, each.name, value if each.name == field else each.default)
    return config


SIXTEEN = DataConfig(batch_size=16)
BAD = [
    ("mtp_depths", -1, "at least 0"),
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
    ("final_eval_batches", 0, "at least 1"),
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
        unchecked(field, value).__post_init__()
    sentence = str(caught.value)
    assert re.match(rf"(DataConfig\.)?{field}=", sentence) and rule in sentence
    assert repr(value) in sentence


def test_settings_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match=r"trackers\[1\]='tensorbord'.*'tensorboard'"):
        unchecked("trackers", ("wandb", "tensorbord")).__post_init__()
    with pytest.raises(ConfigError, match=r"batch_size=16.*step\.gradient_accumulation_steps=3"):
        TrainConfig(dataset=SIXTEEN, step=StepConfig(gradient_accumulation_steps=3))
    with pytest.raises(ConfigError, match=r"OptimizerConfig\.warmup_steps=600"):
        TrainConfig(steps=600, optimizer=OptimizerConfig(warmup_steps=600))
    with pytest.raises(ConfigError, match=r"remat='full'.*remat='custom'"):
        TrainConfig(remat="full", remat_save=("out_proj",))
    with pytest.raises(ConfigError, match=r"Remat\.save\[0\]='out_proj_'.*'out_proj'"):
        TrainConfig(remat="custom", remat_save=("out_proj_",))
    with pytest.raises(ConfigError, match=r"out_proj can't be both saved and offloaded"):
        TrainConfig(remat="custom", remat_save=("out_proj",), remat_offload=("out_proj",))


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    """Eight devices: the batch of each microbatch is cut along data, fsdp, fsdp_transpose and expert."""
    with pytest.raises(ConfigError, match=r"batch_size=12.*8.*mesh.data"):
        TrainConfig(dataset=DataConfig(batch_size=12)).execution()
    with pytest.raises(
        ConfigError,
        match=r"batch_size=16.*gradient_accumulation_steps=4.*mesh\.data x mesh\.fsdp",
    ):
        TrainConfig(
            dataset=SIXTEEN, step=StepConfig(gradient_accumulation_steps=4), mesh=MeshConfig(fsdp=4)
        ).execution()
    TrainConfig(dataset=DataConfig(batch_size=4), mesh=MeshConfig(fsdp=4, tensor=2)).execution()
    with pytest.raises(ConfigError, match=r"Layout\.tensor=3.*Layout\.data=-1.*8"):
        TrainConfig(dataset=SIXTEEN, mesh=MeshConfig(tensor=3)).execution()
    with pytest.raises(ConfigError, match=r"only one mesh axis can be -1"):
        TrainConfig(mesh=MeshConfig(fsdp=-1)).execution()


def test_execution_carries_every_choice():
    config = TrainConfig(
        dataset=SIXTEEN,
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
    plain = TrainConfig(dataset=SIXTEEN).execution()
    assert plain.precision.compute == jnp.float32 and plain.remat is None  # auto, on CPU
    custom = TrainConfig(dataset=SIXTEEN, remat="custom", remat_save=("out_proj",), remat_offload=("context",))
    assert custom.execution().remat == Remat(save=("out_proj",), offload=("context",))


FULL = TrainConfig(
    run_dir="runs/ä b",
    model="llama3-8b",
    steps=77,
    dataset=DataConfig(batch_size=12, path="texts/*.txt", held_out_fraction=0.25, pack=False),
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


def test_one_path_is_a_text_and_several_are_a_tuple(tmp_path):
    """As earlier versions wrote one, and as JSON gives several back."""
    assert DataConfig(path=["a"]) == DataConfig(path=("a",)) == DataConfig(path="a")
    several = TrainConfig(dataset=DataConfig(path=["a", "b"], held_out_path=("c", "d")))
    assert several.dataset.path == ("a", "b") and hash(several.dataset)
    save_settings(several, tmp_path / "settings.json")
    assert load_settings(tmp_path / "settings.json") == several
    assert json.loads((tmp_path / "settings.json").read_text())["dataset"]["path"] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"DataConfig\.path=\(\)"):
        DataConfig(path=())


def test_the_settings_of_another_run_are_a_file_of_settings(tmp_path):
    """But not its directories, history, what was asked of its start, and an export that was written."""
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
    assert found.checkpoint_dir == "a"  # of a file that is not a run's
    assert found.export == "no/where" and found.optimizer.max_grad_norm is None and found.max_checkpoints == 9
    (tmp_path / "run.yaml").write_text("config: other.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml.*config='other\.yaml'"):
        with_file(start, tmp_path / "run.yaml")


def test_json_and_yaml_files_give_the_same_settings(tmp_path):
    """Settings of a single start are read, too. They are left out only from the `settings.json` of a run."""
    values = {"run_dir": "there", "distributed": True, "distributed_timeout": 7, "describe": True, "steps": 3}
    values |= {"export": str(tmp_path), "dataset": {"seq_len": 16}, "checkpoint_dir": "c"}
    for name in ("run.json", "run.yaml"):
        (tmp_path / name).write_text(json.dumps(values))  # YAML reads JSON
        assert not is_of_a_run(tmp_path / name)
    found = [with_file(TrainConfig(), tmp_path / name) for name in ("run.json", "run.yaml")]
    assert found[0].run_dir == "there" and found[0].distributed and found[0].export == str(tmp_path)
    assert found[0] == dataclasses.replace(found[1], config=found[0].config)
    save_settings(TrainConfig(), tmp_path / "settings.json")
    assert is_of_a_run(tmp_path / "settings.json")


def test_changes_are_kept_with_the_step_and_the_time(tmp_path):
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


def test_what_is_of_one_start_is_no_change():
    other = TrainConfig(run_dir="x", config="y", allow_changes=True, describe=True, list_models=True)
    assert changed_settings(TrainConfig(), other) == {}


def test_every_method_has_its_rows():
    """The names of the flag are those of both tables, and the groups that are read are groups."""
    names = get_args(field_types(TrainConfig)["method"])
    assert tuple(KINDS) == names == tuple(METHODS)
    assert {group for kind in KINDS.values() for group in kind.groups} == set(METHOD_GROUPS)


def test_every_flag_is_named():
    """As the parser of the command line names it."""
    out, _ = call("train", "--help")
    named, flags = set(re.findall(r"--[a-z][\w.-]*", out)), flag_names(TrainConfig)
    assert flags["dataset.path"] == "--data" and flags["optimizer.eps"] == "--optimizer.eps"
    assert flags["Layout.fsdp"] == "--mesh.fsdp" and flags["LoRAConfig.rank"] == "--lora-rank"
    assert set(flags.values()) - named == set() and named - set(flags.values()) - {"--help", "--family"} == {
        name for name in named if re.search(r"--(\w+\.)*no-", name)
    } - {"--optimizer.no-decay"}


def test_what_is_no_run_directory_is_refused(tmp_path):
    path = tmp_path / "settings.json"
    with pytest.raises(ConfigError, match=r"settings\.json"):
        load_settings(path)
    for text in ('{"steps": 3', "", "[1, 2]", "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"settings\.json"):
            load_settings(path)
    for change, name in (
        ({"stepps": 3}, "'steps'"),
        ({"mesh": {"fsdpp": 2}}, r"'mesh\.fsdp'"),
        ({"steps": -3}, "steps=-3"),
        ({"optimizer": {"eps": "small"}}, r"settings.json: 'optimizer\.eps'='small' must be a number"),
    ):
        path.write_text(json.dumps(change))
        with pytest.raises(ConfigError, match=name):
            load_settings(path)


def test_files_may_have_the_names_of_flags(tmp_path):
    """Flat fields of the data, and `data` and `held_out` for its paths."""
    flat = settings_json(FULL)
    data = flat.pop("dataset")
    flat |= {"data": data.pop("path"), "held_out": data.pop("held_out_path"), **data}
    assert {"seq_len", "seed", "pack", "text_field", "held_out_fraction", "batch_size"} < set(flat)
    (tmp_path / "settings.json").write_text(json.dumps(flat))
    assert load_settings(tmp_path / "settings.json") == FULL
    (tmp_path / "settings.json").write_text('{"mesh": 3, "step": [1], "accumulate": 2}')
    with pytest.raises(ConfigError, match=r"settings\.json.*'mesh'"):
        load_settings(tmp_path / "settings.json")


def test_a_tilde_is_the_user_s_directory_in_every_path(monkeypatch):
    """Of one path and of several, and behind the name of a held-out set; whatever else has one is left alone."""
    monkeypatch.setenv("HOME", "/home/me")
    paths = dict.fromkeys(("run_dir", "checkpoint_dir", "config", "init_from", "tokenizer", "export"), "~/x")
    data = DataConfig(
        path=("~/a.txt", "b~/c.txt", "gs://x/~/y"), held_out_path="val=~/v.txt", chat_template="~/t", cache_dir="~"
    )
    found = TrainConfig(**paths, dataset=data)
    assert {getattr(found, name) for name in paths} == {"/home/me/x"}
    assert data.path == ("/home/me/a.txt", "b~/c.txt", "gs://x/~/y")
    assert (data.held_out_path, data.chat_template, data.cache_dir) == (
        "val=/home/me/v.txt",
        "/home/me/t",
        "/home/me",
    )
    lora = TrainConfig(lora_rank=1, export_adapter="~/x", model_config="~/m.json")
    assert (lora.export_adapter, lora.model_config) == ("/home/me/x", "/home/me/m.json")
    with pytest.raises(ConfigError, match=r"/home/me/x/settings\.json"):
        RunDirectory.open("~/x")


def test_a_tilde_in_the_directory_of_a_checkpoint(monkeypatch, tmp_path):
    """To be read, and to be written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model").path == Directory("~/model").path == tmp_path / "model"
    with exported_directory("~/out") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out" / "a").exists()


@pytest.mark.parametrize("kind", [TrainConfig, PlanConfig, GenerateConfig, ServeConfig])
def test_every_setting_explains_itself(kind):
    """The text below a field, or its line in the list of the class, is the text of `--help`."""
    texts = help_texts(kind)
    for name in field_types(kind):
        assert len(texts[name]) > 8 and texts[name].endswith("."), name


def test_options_of_an_execution_are_settings():
    """Each reaches the execution under its own name, without a word about it in any other file."""
    changes: dict = dict(attention="dot", experts="dense", expert_exchange="gather", scan=False, layer_stats=True)
    changes |= dict(lookup="one_hot", head_bytes=5, exchange_bytes=6, context_order="zigzag", context_form="ring")
    changes |= dict(batch_split=2)
    assert changes.keys() == {field.name for field in dataclasses.fields(ExecutionConfig)}
    for config in (TrainConfig(**changes), PlanConfig(**changes)):
        execution = config.step_execution(None)
        assert {name: getattr(execution, name) for name in changes} == changes
    assert all(getattr(Execution(), name) != value for name, value in changes.items())


def test_options_of_pairs_are_settings():
    changes = dict(
        lora_rank=4, lora_alpha=2.0, lora_targets=("*.mlp.*",), lora_rank_pattern=(("*.up", 2),),
        lora_alpha_pattern=(("*.up", 3.0),), lora_rank_stabilized=True, lora_dora=True, lora_init="pissa",
    )  # fmt: skip
    lora = TrainConfig(**changes).lora()
    assert lora is not None and lora.dtype == "float32"
    own = {field.name for field in dataclasses.fields(LoRAConfig)} - {"dtype"}
    assert {f"lora_{name}": getattr(lora, name) for name in own} == changes
    assert all(getattr(TrainConfig(), name) != value for name, value in changes.items())
    for name, value in changes.items():
        if name not in ("lora_rank", "lora_alpha", "lora_targets"):
            with pytest.raises(ConfigError, match=f"{name}=.* needs lora_rank"):
                TrainConfig(**{name: value})


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (dict(model="llama3-8b", init_from="x"), "model='llama3-8b' and init_from='x' exclude each other"),
        (dict(model="llama3-8b", model_config="x"), "model='llama3-8b' and model_config='x' exclude each other"),
        (dict(model_config="y", init_from="x"), "model_config='y' and init_from='x' exclude each other"),
        (dict(set=("a=1",), init_from="x"), "init_from='x' exclude each other: its weights have their sizes"),
        (dict(init_weights=("*.mlp.*",)), "needs init_from"),
        (dict(export_adapter="x"), "export_adapter='x' needs lora_rank"),
        (dict(export="x", export_adapter="x", lora_rank=2), "export='x' and export_adapter='x' must not be in one"),
        (dict(export="x", export_adapter="x/y", lora_rank=2), "export_adapter='x/y' must not be in one another"),
        (dict(export="x/y", export_adapter="x", lora_rank=2), "export='x/y' and export_adapter='x' must not be in one"),
        (dict(lora_rank=0), "LoRAConfig.rank=0 must be an integer of at least 1"),
        (dict(lora_rank=4, lora_targets=()), r"LoRAConfig.targets=\(\) must have at least one pattern"),
    ],
    ids=str,
)
def test_settings_that_exclude_each_other(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TrainConfig(**fields)


def test_patterns_of_earlier_runs_name_weights_as_they_are_called_now(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"optimizer": {"trainable": ["*.wiring.scale", "*.mlp.*"]}}))
    assert load_settings(tmp_path / "settings.json").optimizer.trainable == ("*.residual.scale", "*.mlp.*")
