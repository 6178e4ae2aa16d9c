"""Verification of conversions: tensors, logits, and the files that transformers reads."""

import contextlib
import json
import os
import shutil
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.huggingface import verify
from tests.compare import assert_allclose
from tests.errors import assert_names, refused


FIXTURES = Path(__file__).parents[2] / "fixtures"
CHAT = FIXTURES / "chat_llama"
MISTRAL = FIXTURES / "mistral_window"
TABLE, NORM = "model.embed_tokens.weight", "model.norm.weight"


def copied(folder: Path, source: Path = CHAT, **config) -> Path:
    """Copy a directory with changed keys in its config.json."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def test_differences_of_two_arrays_of_logits():
    one = np.asarray([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]], np.float32)
    other = one + np.asarray([[0.0, 0.0, 2.5], [0.5, 0.0, 0.0]], np.float32)
    found = verify.compare_logits(one, other)
    assert (found.maximum, found.mean, found.agreement) == (2.5, 0.5, 0.5)
    assert verify.compare_logits(one, one + np.inf).maximum == np.inf


class FakeModel:
    """The interface of `AutoModelForCausalLM` that is used."""

    asked: dict = {}  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, folder, **options):
        cls.asked = {"files": sorted(os.listdir(folder)), **options}
        return cls()

    def float(self):
        return self

    eval = float

    def __call__(self, ids, use_cache):
        values = types.SimpleNamespace(numpy=lambda: np.zeros((*ids.shape, 320), np.float32))
        return types.SimpleNamespace(logits=values)


@pytest.fixture
def fake_transformers(monkeypatch):
    FakeModel.asked = {}
    logging = types.SimpleNamespace(disable_progress_bar=lambda: None)
    fakes = {
        "transformers": types.SimpleNamespace(AutoModelForCausalLM=FakeModel),
        "transformers.utils": types.SimpleNamespace(logging=logging),
        "torch": types.SimpleNamespace(
            float32="float32",
            from_numpy=lambda ids: ids,
            no_grad=contextlib.nullcontext,
            Tensor=type("Tensor", (), {}),  # einops accesses it
        ),
    }
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_transformers_gets_only_data_files(fake_transformers, tmp_path):
    folder = copied(tmp_path / "model")
    for name in ("modeling_evil.py", "pytorch_model.bin", "adapter_config.json"):
        (folder / name).write_text("{}")
    ids = np.zeros((1, 3), np.int32)
    assert verify.transformers_logits(folder, ids).shape == (1, 3, 320)
    asked = FakeModel.asked
    assert asked["files"] == ["config.json", "model.safetensors"]
    assert (
        asked["trust_remote_code"] is False and asked["local_files_only"] is True and asked["use_safetensors"] is True
    )


def test_transformers_gets_a_dequantized_copy_of_a_gguf_file(fake_transformers, tmp_path):
    ed.save_gguf(ed.load_hf(CHAT), tmp_path / "model.gguf", dtype="f16")
    assert verify.transformers_logits(tmp_path / "model.gguf", np.zeros((1, 3), np.int32)).shape == (1, 3, 320)
    assert {"config.json", "model.safetensors"} < set(FakeModel.asked["files"])


class FakeScorer(FakeModel):
    """The interface of `AutoModelForSequenceClassification` that is used; every token of a row may be the last one."""

    config = types.SimpleNamespace(pad_token_id=3)

    def __call__(self, ids, use_cache):
        assert ids.shape == (1, 3) and self.config.pad_token_id is None
        return types.SimpleNamespace(logits=types.SimpleNamespace(numpy=lambda: np.zeros((1, 1), np.float32)))


@pytest.mark.slow
def test_scores_are_computed_at_the_last_tokens(fake_transformers, tmp_path, monkeypatch):
    transformers = types.SimpleNamespace(AutoModelForSequenceClassification=FakeScorer)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    model, ids = ed.add_score_head(ed.load_hf(CHAT), key=jax.random.key(0)), np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    ed.save_hf(model, tmp_path / "scorer")
    assert verify.transformers_logits(tmp_path / "scorer", ids).shape == (2, 1, 1)
    assert_allclose(verify.model_logits(model, ids)[:, 0], model(ids).logits[:, -1], rtol=1e-5)


def test_transformers_does_not_load_refused_directories(fake_transformers, tmp_path):
    folder = copied(tmp_path / "model", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with refused(ConversionError, "auto_map"):
        verify.transformers_logits(folder, np.zeros((1, 3), np.int32))
    assert not FakeModel.asked


def test_random_ids_stay_within_vocabulary_and_positions():
    gpt2, chat = (verify.read_config(FIXTURES / name)[0] for name in ("gpt2", "chat_llama"))
    ids = verify.random_ids(gpt2, rows=3, length=100)
    assert ids.shape == (3, 32) and ids.dtype == np.int32 and set(np.unique(ids)) <= set(range(64))
    assert verify.random_ids(chat, length=100).shape == (2, 100)


def test_tensors_that_differ_are_named(tmp_path):
    wrong, values = verify.compare_directories(FIXTURES / "llama_bf16", FIXTURES / "llama_rope")
    assert any("model.layers.0.self_attn.q_proj.weight" in line for line in [*wrong, *values])
    assert verify.compare_directories(CHAT, copied(tmp_path / "same", rope_theta=10000.0)) == ([], [])


@pytest.mark.slow(fast=("0.5",))
@pytest.mark.parametrize("value, gap", [(0.5, "0.5"), (np.nan, "nan"), (np.inf, "inf")], ids=["0.5", "NaN", "inf"])
def test_single_different_value_is_found(tmp_path, value, gap):
    directory = Path(shutil.copytree(MISTRAL, tmp_path / "other"))
    tensors = load_file(directory / "model.safetensors")
    tensors[TABLE][3, 2] = np.nan  # in both checkpoints
    save_file(tensors, directory / "model.safetensors")
    again = Path(shutil.copytree(directory, tmp_path / "again"))
    assert verify.compare_directories(directory, again) == ([], [])
    tensors[NORM][1] = tensors[NORM][1] + value
    save_file(tensors, again / "model.safetensors")
    for pair in ((directory, again), (again, directory)):
        wrong, (line,) = verify.compare_directories(*pair)
        assert wrong == []
        assert_names(line, NORM, gap)
