"""Test `convert compare`, and `--plugin` with a family file that is written as the report suggests."""

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

from eqx_decoders.cli import family_comparison
from eqx_decoders.families import llama, registry
from eqx_decoders.io.huggingface import verify
from tests.commands import ROOT, call
from tests.errors import assert_names


FIXTURES = ROOT / "tests" / "fixtures"


@pytest.fixture(autouse=True)
def compare_with_llama(monkeypatch):
    """Restrict the comparison to Llama."""
    for name in ("_families", "_registered"):  # registrations are undone
        monkeypatch.setattr(registry.FAMILIES, name, dict(getattr(registry.FAMILIES, name)))
    monkeypatch.setattr(registry, "_REGISTERED_MODELS", {})
    few = {"llama": (registry.find_family("llama"), llama.__name__)}
    monkeypatch.setattr(family_comparison, "library_families", lambda: few)
    monkeypatch.setattr(verify, "has_transformers", lambda: False)


def edited(folder: Path, **config) -> Path:
    """Copy the fixture of Seed-OSS with other keys; `...` removes a key."""
    shutil.copytree(FIXTURES / "seed_oss", folder)
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def seed_family() -> str:
    """Return the family file of Llama, edited as the report suggests for a copy of Seed-OSS."""
    changes = {
        'model_type="llama"': 'model_type="seed_2"',
        'architecture="LlamaForCausalLM"': 'architecture="Seed2ForCausalLM"',
        "rope_settings(),": 'rope_settings(),\n        Flag("attention_out_bias", "attention.out_bias", False),',
        "rope: Rope = Rope(), ": "rope: Rope = Rope(), out_bias: bool = False, ",
        "shape.attention(rope=rope)": "shape.attention(rope=rope, out_bias=out_bias)",
        "ignored_keys={": 'ignored_keys={"residual_dropout": "dropout", ',
    }
    text = inspect.getsource(llama).partition("\n_TINY")[0] + "\nMODELS = {}\n"
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_checkpoint_is_compared_and_then_loaded_with_a_family_file(tmp_path, monkeypatch):
    directory = edited(tmp_path / "model", model_type="seed_2", architectures=["Seed2ForCausalLM"])
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    out, _ = call("convert", "compare", directory)
    assert_names(out, directory, "model_type=seed_2", "19 kinds of tensors in 2 layers", "27 keys")
    assert re.search(r"^ *llama +100% of tensors, +88% of keys$", out, re.MULTILINE)
    assert_names(out, "attention_out_bias=true is not read", "residual_dropout=0.1 is not read")
    assert_names(
        out, "eqx_decoders/families/llama.py", f"python scripts/convert.py verify {directory} --plugin FILE.py"
    )
    assert not list(Path.cwd().iterdir()), "no file is written"

    Path("seed_2.py").write_text(seed_family())
    out, _ = call("convert", "verify", directory, "--plugin=seed_2.py")
    assert_names(out, directory, "the same")
    out, _ = call("convert", "compare", directory, "--plugin=seed_2.py")
    assert_names(out, "the library knows model_type=seed_2")


def test_known_model_type_is_not_compared():
    directory = FIXTURES / "mistral_window"
    out, _ = call("convert", "compare", directory)
    assert_names(out, "the library knows model_type=mistral", f"python scripts/convert.py verify {directory}")


def test_malformed_directories_are_refused(tmp_path):
    empty, bare, linked = tmp_path / "empty", edited(tmp_path / "bare"), edited(tmp_path / "linked")
    empty.mkdir()
    (bare / "model.safetensors").unlink()
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to("/etc/hostname")
    for directory, named in (
        (tmp_path / "nowhere", tmp_path / "nowhere"),
        (empty, empty / "config.json"),
        (linked, linked / "config.json"),
        (bare, bare),
        (edited(tmp_path / "nameless", model_type=...), "model_type=null"),
        (edited(tmp_path / "number", model_type=3), "model_type=3"),
        (edited(tmp_path / "seeing", vision_config={}), "vision_config"),
    ):
        out, err = call("convert", "compare", directory, code=4)
        assert_names(err, named)
        assert not out


def test_malformed_family_files_are_refused(tmp_path):
    file = tmp_path / "own.py"
    for text, named in (
        ("FAMILY = (", [file, "SyntaxError"]),
        ("import nothing_of_this_name", [file, "ModuleNotFoundError"]),
        ("MODELS = {}", [file, "FAMILY"]),
        ("FAMILY = 3", [file, "FAMILY"]),
        ("from eqx_decoders.families.llama import FAMILY", ["model_type='llama'"]),
    ):
        file.write_text(text)
        _, err = call("convert", "verify", FIXTURES / "seed_oss", "--plugin", file, code=2)
        assert_names(err, *named)
    for words in (("--plugin",), ("--plugin", tmp_path / "none.py"), (f"--plugin={tmp_path}",)):
        _, err = call("convert", "verify", FIXTURES / "seed_oss", *words, code=2)
        assert_names(err, "--plugin")
