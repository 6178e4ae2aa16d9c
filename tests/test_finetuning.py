"""From a Hugging Face directory through training and back, with the programs."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.io.checkpoint.checkpoints import load_weights
from eqx_decoders.io.huggingface.peft import load_peft
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.lora import merge_lora
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.load_export import load_run
from eqx_decoders.training.run.model import abstract_run
from tests.commands import call, steps_of
from tests.compare import assert_allclose
from tests.errors import assert_names


BASE = pathlib.Path(__file__).parent / "fixtures" / "chat_llama"
IDS = np.arange(2 * 16).reshape(2, 16) * 7 % 300
WORDS = ["the cat sat on the mat", "a dog ran in the park", "many birds sing at noon"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base checkpoint that is deleted after the first run, and texts to train on."""
    folder = tmp_path_factory.mktemp("finetuning")
    shutil.copytree(BASE, folder / "base")
    lines = [json.dumps({"text": " ".join(WORDS[(i + j) % 3] for j in range(6))}) for i in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


def options(folder, name, **changes) -> list[str]:
    wanted = {
        "run-dir": folder / name,
        "init-from": folder / "base",
        "data": folder / "texts.jsonl",
        "steps": 4,
        "batch-size": 4,
        "seq-len": 32,
        "sample-tokens": 4,
        "eval-every": 0,
        "optimizer.learning-rate": "1e-2",
        "export": folder / f"{name}-export",
    }
    return [word for key, value in (wanted | changes).items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def full(folder):
    _, err = call("train", *options(folder, "full"))
    assert_names(err, "12,360")
    return folder


def adapter_weights(directory: pathlib.Path) -> str:
    """The number of weights of a run's adapters, as messages write it."""
    leaves = named_leaves(abstract_run(RunDirectory.open(directory)))
    return f"{sum(leaf.size for name, leaf in leaves.items() if '.lora_' in name):,}"


@pytest.fixture(scope="module")
def lora(full):
    folder = full
    adapted = {"lora.rank": 4, "lora.alpha": 8, "export-adapter": folder / "adapter"}
    _, err = call("train", *options(folder, "lora", **adapted))
    assert_names(err, adapter_weights(folder / "lora"))
    return folder


def logits(model) -> np.ndarray:
    return np.asarray(model(IDS).logits)


@pytest.mark.slow
def test_a_full_run_is_exported_as_it_was_trained(full):
    exported, trained = ed.load_hf(full / "full-export"), load_run(full / "full")
    here, there = named_leaves(exported), named_leaves(trained)
    assert all(np.array_equal(here[name], there[name]) for name in there)
    before = named_leaves(ed.load_hf(BASE))
    assert not any(np.array_equal(here[name], before[name]) for name in here)
    assert np.array_equal(logits(exported), logits(trained))
    assert json.loads((full / "full-export" / "config.json").read_text())["eos_token_id"] == 257


@pytest.mark.slow
def test_conversations_are_learned_with_the_template_of_the_checkpoint(folder):
    """Only the answers are targets; what is exported can be talked to as the checkpoint could."""
    asked, told = [words[:7] for words in WORDS], "birds sing"
    chats = [[{"role": "user", "content": asked[i % 3]}, {"role": "assistant", "content": told}] for i in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    shutil.copytree(BASE, folder / "talker")
    changes = {"data": folder / "chats.jsonl", "init-from": folder / "talker", "export": folder / "chat-export"}
    call("train", *options(folder, "chats", **changes))
    rows = steps_of(folder / "chats")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    answer = len(load_tokenizer(BASE).encode(told)) + 3  # <|end|> and two line breaks
    assert all(row["tokens"] > 0 and row["tokens"] % answer == 0 for row in rows)
    want, found = load_chat_template(BASE), load_chat_template(folder / "chat-export")
    assert found is not None and want is not None and found.render(chats[0]) == want.render(chats[0])
    shutil.rmtree(folder / "talker")
    _, err = call("train", *options(folder, "chats", **changes | {"steps": 6, "export": folder / "chat-later"}))
    assert_names(err, "step 4")


@pytest.mark.slow
def test_it_learns_with_the_tokenizer_of_the_checkpoint(full):
    rows = [json.loads(line) for line in (full / "full" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.1
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert (full / "full-export" / name).read_bytes() == (BASE / name).read_bytes(), name


@pytest.mark.slow
def test_a_lora_run_is_exported_merged_and_as_an_adapter(lora):
    base, merged = ed.load_hf(BASE), ed.load_hf(lora / "lora-export")
    adapted = merge_lora(load_peft(base, lora / "adapter"))
    assert np.max(np.abs(logits(merged) - logits(base))) > 1e-2
    assert np.array_equal(logits(merged), logits(adapted))
    assert np.array_equal(logits(merged), logits(load_run(lora / "lora")))
    assert json.loads((lora / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 8
    here, there = named_leaves(merged), named_leaves(base)
    moved = {name.rsplit(".", 1)[-1] for name in there if not np.array_equal(here[name], there[name])}
    assert moved == {"query", "value"}


@pytest.mark.slow
def test_a_run_needs_its_checkpoint_only_once(lora):
    """Resumed when the directory is gone; the frozen weights are those of the beginning, to the bit."""
    folder = lora
    before = named_leaves(ed.load_hf(BASE))
    (folder / "base").rename(folder / "gone")
    try:
        adapted = {"lora.rank": 4, "lora.alpha": 8, "steps": 6, "export": folder / "later"}
        _, err = call("train", *options(folder, "lora", **adapted))
    finally:
        (folder / "gone").rename(folder / "base")
    assert_names(err, "step 4")
    run = RunDirectory.open(folder / "lora")
    model = load_weights(run.checkpoint_directory, abstract_run(run)).tree
    frozen = {name: leaf for name, leaf in named_leaves(model).items() if ".lora_" not in name}
    assert all(np.array_equal(leaf, before[name.removesuffix(".base")]) for name, leaf in frozen.items())
    assert ed.abstract_hf(folder / "later").config == ed.abstract_hf(BASE).config


@pytest.mark.slow
def test_a_run_of_lengths_and_singular_values_is_exported_as_an_adapter_of_the_base(full):
    """DoRA and PiSSA together, resumed: PEFT's adapter of the double rank beside the base is the merged model."""
    folder, kinds = full, ["--lora.dora", "--lora.init", "pissa", "--lora.rank-pattern", "*.value=2"]
    changes = {"lora.rank": 4, "export": folder / "kinds-export", "export-adapter": folder / "kinds-adapter"}
    call("train", *options(folder, "kinds", **{"lora.rank": 4, "steps": 2, "export": folder / "early"}), *kinds)
    _, err = call("train", *options(folder, "kinds", **changes), *kinds)
    assert_names(err, "step 2")
    base, merged = ed.load_hf(BASE), ed.load_hf(folder / "kinds-export")
    adapted = load_peft(base, folder / "kinds-adapter")
    assert np.max(np.abs(logits(merged) - logits(base))) > 1e-3
    assert_allclose(logits(adapted), logits(merged), atol=2e-5)
    content = json.loads((folder / "kinds-adapter" / "adapter_config.json").read_text())
    assert content["use_dora"] and sorted([content["r"], *content["rank_pattern"].values()]) == [4, 8]


@pytest.mark.slow
def test_generate_reads_a_run_with_adapters(lora):
    words = ("--run-dir", lora / "lora", "--prompt", "the cat", "--max-new-tokens", 4, "--no-chat")
    out, _ = call("generate", *words)
    assert out.startswith("the cat")


@pytest.mark.slow
def test_an_export_is_refused_before_the_training(full):
    _, err = call("train", *options(full, "other", export=full / "full-export"), code=2)
    assert_names(err, "export=", full / "full-export")
    assert not (full / "other" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_an_imported_directory_can_be_trained(full):
    """A run directory of the convert program: weights without a training state."""
    call("convert", "import", full / "base", full / "imported")
    words = [*options(full, "imported", **{"lora.rank": 2, "steps": 2}), "--lora.targets", "*.mlp.up"]
    place = words.index("--init-from")
    _, err = call("train", *words[:place], *words[place + 2 :])
    assert_names(err, adapter_weights(full / "imported"))
    assert [row["step"] for row in steps_of(full / "imported")] == [1, 2]
    assert json.loads((full / "imported" / "settings.json").read_text())["init_from"] == str(full / "base")
    here, there = (named_leaves(ed.load_hf(path)) for path in (full / "imported-export", BASE))
    moved = {name.rsplit(".", 1)[-1] for name in there if not np.array_equal(here[name], there[name])}
    assert moved == {"up"}


@pytest.mark.slow
def test_sequences_beyond_the_trained_positions_are_warned_of(folder):
    changes = {"init-from": BASE, "data": folder / "nowhere.jsonl"}
    for length, warned in ((128, False), (129, True)):
        _, err = call("train", *options(folder, "long", **changes, **{"seq-len": length}), code=3)
        assert bool(re.search(r"warning: .*seq_len=129.*128", err)) == warned
    assert not (folder / "long").exists()
