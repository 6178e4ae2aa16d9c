"""Test the generate program with Hugging Face directories and fake completions."""

import contextlib
import json
import shutil
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from eqx_decoders.cli import devices, model_source
from eqx_decoders.inference.text_model import Files, TextModel, load_text_model
from eqx_decoders.io.text.tokenizer import load_tokenizer
from tests.commands import ROOT, call
from tests.errors import assert_names


FIXTURES = ROOT / "tests" / "fixtures"
CHAT = FIXTURES / "chat_llama"


def copied(folder: Path, source: Path = CHAT, **config) -> Path:
    """Return a copy of a directory with changed keys in its config.json."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


@pytest.fixture
def recorded_generations(monkeypatch):
    """Record the prompts and samplers passed to models. Completions are `answer 1`, `answer 2`, …"""
    prompts = []

    def stream(self, prompt, **options):
        prompts.append((prompt if isinstance(prompt, str) else list(prompt), options))
        return iter([f"answer {len(prompts)}"])

    monkeypatch.setattr(TextModel, "stream", stream)
    return prompts


def test_conversation_keeps_earlier_messages(recorded_generations):
    out, _ = call("generate", "--model", CHAT, "--system", "Be brief.", stdin="one\n\ntwo\n")
    assert out == "answer 1\nanswer 2\n"
    system, one = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}
    answer, two = {"role": "assistant", "content": "answer 1"}, {"role": "user", "content": "two"}
    assert [prompt for prompt, _ in recorded_generations] == [[system, one], [system, one, answer, two]]
    assert str(recorded_generations[0][1]["sampler"]) == "Sample(temperature=0.6, top_k=None, top_p=0.9, min_p=None)"


def test_no_chat_continues_texts(recorded_generations):
    out, _ = call("generate", "--model", CHAT, "--no-chat", "--top-k", "3", stdin="one\ntwo\n")
    assert out == "oneanswer 1\ntwoanswer 2\n"
    assert [prompt for prompt, _ in recorded_generations] == ["one", "two"] and recorded_generations[0][1][
        "sampler"
    ].top_k == 3


@pytest.mark.parametrize(
    "arguments, code, named",
    [
        pytest.param(("--model", CHAT, "--run-dir", "runs/x"), 2, ["--model=", "--run-dir="], id="run and model"),
        pytest.param(("--model", CHAT, "--step", "3"), 2, ["--step=3", f"--model='{CHAT}'"], id="step"),
        pytest.param(("--model", CHAT, "--no-chat", "--system", "x"), 2, ["--system='x'"], id="system"),
        pytest.param(("--model", CHAT, "--temperature", "-1"), 2, ["--temperature=-1.0"], id="temperature"),
        pytest.param(("--model", CHAT, "--top-p", "2"), 2, ["top_p=2.0"], id="top-p"),
        pytest.param(("--model", CHAT, "--mesh.fsdp", "2"), 2, ["--mesh.fsdp=2", "2", "1"], id="mesh"),
        pytest.param(("--model", CHAT, "--distributed"), 2, ["--distributed=True", "mesh"], id="distributed"),
        pytest.param(("--model", CHAT, "--distributed-timeout", "0"), 2, ["--distributed-timeout=0"], id="timeout"),
        pytest.param(("--model", FIXTURES / "gpt2"), 3, [FIXTURES / "gpt2", "tokenizer.json"], id="no tokenizer"),
        pytest.param(("--model", FIXTURES / "nothing"), 4, [FIXTURES / "nothing"], id="no model"),
        pytest.param(("--run-dir", FIXTURES), 2, [FIXTURES / "settings.json"], id="no run"),
    ],
)
def test_invalid_arguments_are_refused(arguments, code, named):
    _, err = call("generate", *arguments, "--prompt", "x", code=code)
    assert_names(err, *named)


def test_system_message_requires_a_template(tmp_path):
    folder = copied(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    _, err = call("generate", "--model", folder, "--system", "x", code=2)
    assert_names(err, "system='x'", "chat template")


# --- every setting ----------------------------------------------------------------------------------------------------


def parts(prompt) -> list[str]:
    """Return the images of a message."""
    content = prompt[-1]["content"]
    return [part["image"] for part in content if "image" in part] if isinstance(content, list) else []


def files(options) -> Files:
    return options.get("files", Files())


EFFECTS = {  # flags, and their effect on the options and the prompt
    "prompt": (["--prompt", "x"], lambda options, prompt: prompt[-1]["content"] == "x"),
    "chat": (["--no-chat"], lambda options, prompt: prompt == "hello"),
    "system": (["--system", "Be brief."], lambda options, prompt: prompt[0]["content"] == "Be brief."),
    "max_new_tokens": (["--max-new-tokens", "7"], lambda options, prompt: options["max_new_tokens"] == 7),
    "temperature": (["--temperature", "0.3"], lambda options, prompt: options["sampler"].temperature == 0.3),
    "top_k": (["--top-k", "3"], lambda options, prompt: options["sampler"].top_k == 3),
    "top_p": (["--top-p", "0.5"], lambda options, prompt: options["sampler"].top_p == 0.5),
    "min_p": (["--min-p", "0.1"], lambda options, prompt: options["sampler"].min_p == 0.1),
    "seed": (["--seed", "5"], lambda options, prompt: options["key"] == jax.random.key(5)),
    "image": (["--image", "a.png", "--image", "b.png"], lambda options, prompt: parts(prompt) == ["a.png", "b.png"]),
    "video": (["--no-chat", "--video", "a.mp4"], lambda options, prompt: files(options).videos == ("a.mp4",)),
    "audio": (["--no-chat", "--audio", "a.wav"], lambda options, prompt: files(options).audio == ("a.wav",)),
    "num_draft_tokens": (["--num-draft-tokens", "1"], lambda options, prompt: options["num_draft_tokens"] == 1),
}


@pytest.mark.slow
def test_every_setting_has_an_effect(recorded_generations):
    for name, (words, has_effect) in EFFECTS.items():
        for given, expected in (([], False), (words, True)):
            recorded_generations.clear()
            call("generate", "--model", CHAT, *given, stdin="" if "--prompt" in given else "hello\n")
            ((prompt, options),) = recorded_generations
            assert has_effect(options, prompt) == expected, (name, given)


@pytest.mark.slow
def test_names_of_special_tokens_in_prompts_may_be_text(monkeypatch):
    found = []
    monkeypatch.setattr(TextModel, "stream", lambda self, prompt, **_: found.append(self.encode(prompt)) or iter([""]))
    for flags in ([], ["--no-special-tokens-in-content"]):
        call("generate", "--model", CHAT, "--prompt", "a<|end|>b", *flags)
    end = load_tokenizer(CHAT).encode("<|end|>", special=True).tolist()
    assert [ids.tolist().count(end[0]) for ids in found] == [2, 1] and len(found[0]) < len(found[1])


def test_run_is_loaded_at_the_given_step(recorded_generations, monkeypatch):
    loaded = []

    def load_text_run(run_dir, step, *, precision, layout):
        loaded.append((run_dir, step, precision.compute))
        return load_text_model(CHAT)

    monkeypatch.setattr(model_source, "load_text_run", load_text_run)
    call("generate", "--run-dir", "runs/a", "--step", "3", "--dtype", "bfloat16", "--prompt", "x")
    call("generate", "--prompt", "x")
    assert loaded == [("runs/a", 3, jnp.bfloat16), ("runs/tiny", None, jnp.float32)]


def test_weights_on_a_mesh_are_sharded(recorded_generations):
    """Completions are compared in tests/inference/test_generation.py."""
    models = []
    with mock.patch.object(
        TextModel, "stream", lambda self, *args, **options: models.append(self.model) or iter(["x"])
    ):
        for words in ((), ("--mesh.fsdp", 4, "--mesh.data", -1)):
            call("generate", "--model", CHAT, "--prompt", "x", *words, devices=8)
    one, split = (model.embedding.table for model in models)
    assert len(one.devices()) == 1 and len(split.devices()) == 8 and {"fsdp"} <= set(split.sharding.spec)
    assert one.tolist() == split.tolist()


def test_processes_connect_and_must_have_equal_flags(recorded_generations, monkeypatch):
    met = []
    monkeypatch.setattr(devices, "connected", lambda seconds: met.append(seconds) or contextlib.nullcontext())
    monkeypatch.setattr(devices, "broadcast_json", lambda name, own: json.loads(json.dumps(own | {"seed": 7})))
    words = ("--model", CHAT, "--prompt", "x", "--distributed", "--distributed-timeout", 9, "--mesh.fsdp", 4)
    _, err = call("generate", *words, "--seed", 5, devices=4, code=2)
    assert_names(err, "--seed=5", "7")
    call("generate", *words, "--seed", 7, devices=4)
    assert met == [9, 9] and len(recorded_generations) == 1
