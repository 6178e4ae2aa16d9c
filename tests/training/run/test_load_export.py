"""Test that run directories and exports have the chat template and end-of-turn tokens of the training data."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import jax
import pytest

import eqx_decoders as ed
from eqx_decoders.data.config import DataConfig
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.gguf.gguf_export import save_gguf
from eqx_decoders.io.gguf.gguf_header import read_gguf
from eqx_decoders.io.gguf.gguf_tokenizer import KEYS, TEMPLATE, stop_ids
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, load_tokenizer
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.run.directory import RunDirectory, write_source
from eqx_decoders.training.run.load_export import export_adapter, export_run, text_model_of
from eqx_decoders.training.settings.lora import LoRAConfig
from eqx_decoders.training.settings.run import TrainConfig


BASE = Path(__file__).parents[2] / "fixtures" / "chat_llama"
BEGIN, END, USER = 256, 257, 258
NEW = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
OLD = "{{ 'the old template' }}"
PLACES = ("none", "config", "jinja", "json", "list", "folder", "all")


def base_model(folder: Path, place: str, eos: int = USER) -> Path:
    """Copy a model whose eos separates documents, with an old chat template in the given place."""
    shutil.copytree(BASE, folder)
    (folder / "special_tokens_map.json").unlink()
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": eos}))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|user|>"}
    settings.pop("chat_template", None)
    if place in ("config", "all"):
        settings["chat_template"] = OLD
    if place == "list":
        settings["chat_template"] = [{"name": "default", "template": OLD}, {"name": "tool_use", "template": OLD + "t"}]
    if place in ("jinja", "all"):
        (folder / "chat_template.jinja").write_text(OLD + "j")
    if place in ("json", "all"):
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": OLD + "n"}))
    if place in ("folder", "all"):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(OLD)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chat_files(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.md5(file.read_bytes()).hexdigest() for file in files}


def start(folder: Path, base: Path, *, template: str | None = NEW, tokenizer: str | None = None) -> RunDirectory:
    """Create a run directory as the start of a run does. The data are conversations."""
    file = folder / "new.jinja"
    if template is not None:
        file.write_text(template)
    data = DataConfig(chat_template=None if template is None else str(file))
    settings = TrainConfig(run_dir=str(folder / "run"), init_from=str(base), data=data, tokenizer=tokenizer)
    run = RunDirectory(settings)
    write_source(ed.abstract_hf(base), run.source_dir)
    load_tokenizer(tokenizer or base).save(run.path / "tokenizer")
    run.write_template()
    run.write_stop_ids(load_tokenizer(run.path / "tokenizer"))
    run.data_dir.mkdir()
    (run.data_dir / "manifest.json").write_text('{"chat_template": "hash"}')
    return run


def templates_in(folder: Path) -> list[str]:
    """Return all chat templates in a directory."""
    found = [file.read_text() for file in folder.rglob("*.jinja")]
    for name in ("tokenizer_config.json", "chat_template.json"):
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        found += [content["chat_template"]] if "chat_template" in content else []
    return found


def eos_ids(folder: Path, name: str) -> set[int]:
    value = json.loads((folder / name).read_text())["eos_token_id"]
    return set(value if isinstance(value, list) else [value])


@pytest.mark.slow(fast=("none", "all"))
@pytest.mark.parametrize("place", PLACES)
def test_exports_have_end_of_turn_tokens_and_one_template(place, tmp_path):
    base = base_model(tmp_path / "base", place)
    before = chat_files(base)
    run = start(tmp_path, base)
    model = ed.load_hf(base)
    export_run(dataclasses.replace(model, origin=ed.abstract_hf(base).origin), run, tmp_path / "out")
    adapted = add_lora(model, LoRAConfig(rank=2), key=jax.random.key(0))
    export_adapter(adapted, run, tmp_path / "adapter")
    for folder in (tmp_path / "out", tmp_path / "adapter", run.source_dir):
        assert templates_in(folder) == [NEW]
        assert eos_ids(folder, "generation_config.json") == {USER, END}
    assert eos_ids(tmp_path / "out", "config.json") == eos_ids(run.source_dir, "config.json") == {USER, END}
    assert load_tokenizer(tmp_path / "out").eos_id == load_tokenizer(tmp_path / "adapter").eos_id == END
    text = load_text_model(tmp_path / "out")
    assert text.stop_ids == (END, USER) and text.chat is not None and text.chat.source == NEW
    own = text_model_of(run, model, load_tokenizer(run.tokenizer_dir))
    assert own.stop_ids == (END, USER) and own.chat is not None and own.chat.source == NEW
    save_gguf(text.model, tmp_path / "out.gguf", tokenizer=tmp_path / "out")
    metadata = read_gguf(tmp_path / "out.gguf").metadata
    assert metadata[TEMPLATE] == NEW and set(stop_ids(metadata)) == {USER, END}
    assert END in (metadata[KEYS + "eos_token_id"], metadata[KEYS + "eot_token_id"])
    assert chat_files(base) == before  # the user's directory is unchanged


def test_resumed_run_does_not_need_the_template_file(tmp_path):
    run = start(tmp_path, base_model(tmp_path / "base", "all"))
    (tmp_path / "new.jinja").unlink()
    files = chat_files(run.source_dir)
    run.write_template()
    assert run.write_stop_ids(load_tokenizer(run.path / "tokenizer")) == ()
    template = run.template()
    assert template is not None and template.source == NEW and chat_files(run.source_dir) == files


def test_run_with_another_tokenizer_uses_its_template_and_stop_ids(tmp_path):
    base, other = base_model(tmp_path / "base", "config"), base_model(tmp_path / "other", "none")
    (other / "chat_template.jinja").write_text(NEW)
    run = start(tmp_path, base, template=None, tokenizer=str(other))
    model = ed.load_hf(base)
    assert run.tokenizer_dir == run.path / "tokenizer" and templates_in(run.tokenizer_dir) == [NEW]
    export_run(model, run, tmp_path / "out")
    assert templates_in(tmp_path / "out") == [NEW] and eos_ids(tmp_path / "out", "generation_config.json") == {
        USER,
        END,
    }
    assert text_model_of(run, model, load_tokenizer(run.tokenizer_dir)).stop_ids == (END, USER)


@pytest.mark.slow(fast=("plain text",))
@pytest.mark.parametrize("change", ["plain text", "template writes eos", "prompts have eos"])
def test_tokenizer_keeps_its_eos_if_eos_has_another_use(change, tmp_path):
    template = NEW + "{{ eos_token }}" if change == "template writes eos" else NEW
    base = base_model(tmp_path / "base", "none")
    if change == "prompts have eos":
        settings = json.loads((base / "tokenizer_config.json").read_text())
        (base / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|begin|>"}))
    run = start(tmp_path, base, template=template)
    if change == "plain text":
        (run.data_dir / "manifest.json").write_text("{}")
    export_run(ed.load_hf(base), run, tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").eos_id == (BEGIN if change == "prompts have eos" else USER)
    assert END in load_text_model(tmp_path / "out").stop_ids


def test_only_the_loaded_template_of_the_model_is_saved(tmp_path):
    base = base_model(tmp_path / "base", "all")
    run = start(tmp_path, base, template=None)
    used = load_chat_template(base)
    assert used is not None and load_chat_template(run.source_dir) == dataclasses.replace(
        used, where=str(run.source_dir / "chat_template.jinja")
    )
    assert sorted(templates_in(run.source_dir)) == sorted(
        [OLD + "j", OLD]
    )  # the default template and the template for tools
    assert isinstance(load_tokenizer(run.source_dir), JsonTokenizer)
