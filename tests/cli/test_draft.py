"""`convert draft`, and `--family` with the file that it writes."""

import json
import re
import shutil
from pathlib import Path

import pytest

from eqx_decoders import families
from eqx_decoders.cli import family_draft
from eqx_decoders.io.huggingface import verify
from tests.commands import ROOT, call
from tests.errors import assert_names


FIXTURES = ROOT / "tests" / "fixtures"


@pytest.fixture(autouse=True)
def without_seed_oss(monkeypatch):
    """The library without Seed-OSS, and only Llama to compare with; registrations are undone."""
    for name in ("FAMILIES", "_NAMES", "_MODELS", "_OWN_TYPES", "_OWN_MODELS"):
        monkeypatch.setattr(families, name, type(getattr(families, name))(getattr(families, name)))
    del families.FAMILIES["seed_oss"], families._NAMES["seed_oss"]
    few = {name: families.library_families()[name] for name in ("llama",)}
    monkeypatch.setattr(family_draft, "library_families", lambda: few)
    monkeypatch.setattr(verify, "has_transformers", lambda: False)


def test_a_draft_is_written_and_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = FIXTURES / "seed_oss"
    out, _ = call("convert", "draft", directory)
    assert_names(out, directory, "seed_oss", "19", "2 layers", "27 keys")
    assert re.search(r"^ *llama +100 % +88 %$", out, re.MULTILINE)
    assert_names(out, f"python scripts/convert.py verify {directory} --family seed_oss.py")

    out, _ = call("convert", "verify", directory, "--family=seed_oss.py")
    assert_names(out, directory)
    before = Path("seed_oss.py").read_text()
    call("convert", "draft", directory, "--output", "seed_oss.py")
    assert Path("seed_oss.py").read_text() == before, "its family is known now"
    families._NAMES.pop("seed_oss")
    _, err = call("convert", "draft", directory, code=2)
    assert_names(err, "--output='seed_oss.py'")
    _, err = call("convert", "draft", directory, "--output", "seed_oss.txt", code=2)
    assert_names(err, "--output='seed_oss.txt'", ".py")


def test_a_checkpoint_of_a_known_family_needs_no_draft(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = FIXTURES / "mistral_window"
    out, _ = call("convert", "draft", directory)
    assert_names(out, directory, "mistral")
    assert not list(tmp_path.iterdir())


def edited(folder: Path, **config) -> Path:
    shutil.copytree(FIXTURES / "seed_oss", folder)
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def test_malformed_directories_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
        (edited(tmp_path / "taken", model_type="qwen3"), "qwen3"),
    ):
        out, err = call("convert", "draft", directory, code=4)
        assert_names(err, named)
        assert not out
    assert not list(tmp_path.glob("*.py"))


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
        _, err = call("convert", "verify", FIXTURES / "seed_oss", "--family", file, code=2)
        assert_names(err, *named)
    for words in (("--family",), ("--family", tmp_path / "none.py"), (f"--family={tmp_path}",)):
        _, err = call("convert", "verify", FIXTURES / "seed_oss", *words, code=2)
        assert_names(err, "--family")
