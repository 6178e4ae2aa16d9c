"""LoRA adapters in the programs: generate and evaluate with an adapter, merging, and a directory without base model."""

import json
import os

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.cli import generate
from eqx_decoders.cli.model_source import AdaptedModelSource
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.adapters import trained
from tests.commands import ROOT, call, outcome
from tests.compare import assert_close
from tests.errors import assert_names, refused


BASE = ROOT / "tests" / "fixtures" / "chat_llama"
TOKENS = np.arange(12)[None] + 3


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The directory of an adapter, and the logits of the model with the adapter."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    adapted = trained(ed.load_hf(BASE), LoRAConfig(rank=4, targets=("*.mixer.*", "*.mlp.*")))
    ed.save_peft(adapted, folder, base_model=str(BASE))
    return folder, adapted(TOKENS).logits


def test_adapter_is_merged_into_the_loaded_model(adapter):
    folder, logits = adapter
    text = AdaptedModelSource(model=str(BASE), adapter=str(folder)).load()
    assert_close(text.model(TOKENS).logits, logits, units=512)
    assert generate.parse(["--model", str(BASE), "--adapter", str(folder)]).adapter == str(folder)
    with refused(ed.ConfigError, "adapter='nowhere'", "adapter_config.json"):
        AdaptedModelSource(model=str(BASE), adapter="nowhere").load()


def test_convert_merges_an_adapter(adapter, tmp_path):
    folder, logits = adapter
    call("convert", "merge", folder, tmp_path / "merged")
    assert_close(ed.load_hf(tmp_path / "merged")(TOKENS).logits, logits, units=512)
    umask = os.umask(0)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "merged").iterdir()} == {0o666 & ~umask}
    settings = json.loads((folder / "adapter_config.json").read_text())
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    for file in folder.iterdir():
        (nameless / file.name).write_bytes(file.read_bytes())
    (nameless / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    code, _, err = outcome("convert", "merge", nameless, tmp_path / "other")
    assert code == 2 and not (tmp_path / "other").exists()
    assert_names(err, "--base", "adapter_config.json")


def test_directory_with_only_an_adapter_is_refused_with_the_remedy(adapter):
    folder, _ = adapter
    with refused(ed.ConversionError, "LoRA adapter", str(BASE), "--adapter", "merge"):
        ed.load_hf(folder)


def test_chat_commands(tmp_path):
    text = ed.load_text_model(BASE)
    session = generate.ChatSession(text, generate.GenerateConfig(model=str(BASE), system="be kind"))
    first = [{"role": "system", "content": "be kind"}]
    assert session.messages == first
    session.messages.append({"role": "user", "content": "hello"})
    assert "2 messages" in session.run_command("/save", str(tmp_path / "chat.json"))
    assert json.loads((tmp_path / "chat.json").read_text()) == [*first, {"role": "user", "content": "hello"}]
    assert "cannot be written" in session.run_command("/save", str(tmp_path / "chat.json" / "x"))
    session.run_command("/reset", "")
    assert session.messages == first
    session.run_command("/system", "be brief")
    assert session.messages == [{"role": "system", "content": "be brief"}]
    session.run_command("/system", "")
    assert session.messages == []


def test_terminal_commands_are_not_prompts(monkeypatch, capsys):
    lines = iter(["/help\n", "\n", "hello\n", "/exit\n", "never read\n"])
    monkeypatch.setattr(generate, "read_line", lambda: next(lines))
    prompts = []
    generate.read_prompts(prompts.append)
    assert prompts == ["hello"] and "/reset" in capsys.readouterr().out
