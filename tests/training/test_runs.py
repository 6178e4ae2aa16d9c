"""The model of a run: new, from a checkpoint, or resumed."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.axes import named_leaves
from eqx_decoders.training.data import DataConfig
from eqx_decoders.training.runs import SOURCE, abstract_run, keep_source, new_model, resume_settings
from eqx_decoders.training.settings import TrainConfig, save_settings


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
    assert resume_settings(begun, tmp_path) == begun  # nothing there yet
    save_settings(begun, tmp_path / "settings.json")
    assert resume_settings(dataclasses.replace(begun, steps=900), tmp_path).steps == 900
    changes = (
        dict(model="llama3-8b"),
        dict(tokenizer="bytes"),
        dict(dataset=DataConfig(seed=4)),
        dict(lora_rank=2),
        dict(init_from="a/b"),
    )
    for change in changes:
        name = next(iter(change)).replace("dataset", "seed")
        with pytest.raises(ed.ConfigError, match=f"{name}=.*was begun with"):
            resume_settings(dataclasses.replace(begun, **change), tmp_path)
