"""`convert draft`, and `--family` with what it has written."""

import json
import shutil
from pathlib import Path

import pytest

from eqx_decoders import families
from eqx_decoders.cli import family_draft
from eqx_decoders.io.huggingface import verify
from tests.commands import ROOT, outcome


FIXTURES = ROOT / "tests" / "fixtures"


@pytest.fixture(autouse=True)
def without_seed_oss(monkeypatch):
    """The library as it was before Seed-OSS, and Llama alone to compare with; what is registered is undone."""
    for name in ("FAMILIES", "_NAMES", "_MODELS", "_OWN_TYPES", "_OWN_MODELS"):
        monkeypatch.setattr(families, name, type(getattr(families, name))(getattr(families, name)))
    del families.FAMILIES["seed_oss"], families._NAMES["seed_oss"]
    few = {name: families.library_families()[name] for name in ("llama",)}
    monkeypatch.setattr(family_draft, "library_families", lambda: few)
    monkeypatch.setattr(verify, "has_transformers", lambda: False)


def test_a_draft_is_written_and_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = FIXTURES / "seed_oss"
    code, out, err = outcome("convert", "draft", directory)
    assert code == 0, err
    assert out.startswith(f"{directory}: seed_oss is no family here yet\n19 kinds of tensors in 2 layers, 27 keys\n")
    assert "\n  llama                      100 %    88 %\n" in out and "what is open" not in out
    assert f"1. python scripts/convert.py verify {directory} --family seed_oss.py" in out

    code, out, err = outcome("convert", "verify", directory, "--family=seed_oss.py")
    assert code == 0 and "have the bits of the files" in out, err
    code, _, err = outcome("convert", "draft", directory, "--output", "seed_oss.py")
    assert code == 0, "its family is known now, and nothing is written"
    families._NAMES.pop("seed_oss")
    code, _, err = outcome("convert", "draft", directory)
    assert code == 2 and err == "error: --output='seed_oss.py' exists: name a new file with --output.\n"
    code, _, err = outcome("convert", "draft", directory, "--output", "seed_oss.txt")
    assert code == 2 and "--output='seed_oss.txt' must end with .py" in err


def test_what_a_family_reads_needs_no_draft(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = FIXTURES / "mistral_window"
    code, out, _ = outcome("convert", "draft", directory)
    assert code == 0 and f"{directory} is read by the family mistral already" in out and not list(tmp_path.iterdir())


def edited(folder: Path, **config) -> Path:
    shutil.copytree(FIXTURES / "seed_oss", folder)
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def test_bad_directories_are_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty, bare, linked = tmp_path / "empty", edited(tmp_path / "bare"), edited(tmp_path / "linked")
    empty.mkdir()
    (bare / "model.safetensors").unlink()
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to("/etc/hostname")
    for directory, says in (
        (tmp_path / "nowhere", "does not exist"),
        (empty, "config.json does not exist"),
        (linked, "leads out of its directory"),
        (bare, "has no model.safetensors: download the weights, too"),
        (edited(tmp_path / "nameless", model_type=...), "model_type=null must name the family"),
        (edited(tmp_path / "number", model_type=3), "model_type=3 must name the family"),
        (edited(tmp_path / "seeing", vision_config={}), "has vision_config: a model with encoders"),
        (edited(tmp_path / "taken", model_type="qwen3"), "qwen3 is a family here, which refuses this directory"),
    ):
        code, out, err = outcome("convert", "draft", directory)
        assert code == 4 and err.startswith("error: ") and says in err and not out, err
    assert not list(tmp_path.glob("*.py"))


def test_family_files_that_are_none(tmp_path):
    for text, says in (
        ("FAMILY = (", "can't be run: SyntaxError"),
        ("import nothing_of_this_name", "can't be run: ModuleNotFoundError"),
        ("MODELS = {}", "has no FAMILY"),
        ("FAMILY = 3", "has no FAMILY"),
        ("from eqx_decoders.families.llama import FAMILY", "'llama' is that of a family of the library"),
    ):
        (tmp_path / "own.py").write_text(text)
        code, _, err = outcome("convert", "verify", FIXTURES / "seed_oss", "--family", tmp_path / "own.py")
        assert code == 2 and err.startswith("error: ") and says in err, err
    for words in (("--family",), ("--family", tmp_path / "none.py"), (f"--family={tmp_path}",)):
        code, _, err = outcome("convert", "verify", FIXTURES / "seed_oss", *words)
        assert code == 2 and "--family" in err
