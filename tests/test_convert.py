"""scripts/convert.py and scripts/generate.py on Hugging Face directories, as a user calls them."""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from eqx_decoders.axes import named_leaves, replaced
from eqx_decoders.errors import ConversionError
from eqx_decoders.inference.text import TextModel
from eqx_decoders.io import verify
from eqx_decoders.io.checkpoint import Checkpoints


ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
CHAT = FIXTURES / "chat_llama"
PROMPT = ("--prompt", "What is the answer?", "--max-new-tokens", "8", "--temperature", "0")


def script(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPTS = {name: script(name) for name in ("convert", "generate")}


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a script's `main` with these arguments: its exit code and what it has printed."""

    def run(name: str, *arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"scripts/{name}.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code = SCRIPTS[name].main()
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(verify, "has_transformers", lambda: False)


def copied(folder: Path, source: Path = CHAT, **config) -> Path:
    """A copy of a directory with other keys in its config.json."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


# --- there and back ---------------------------------------------------------------------------------------------------


def test_import_then_generate_then_export_is_the_directory_again(call, tmp_path, without_transformers):
    run, out = tmp_path / "run", tmp_path / "out"
    code, told, _ = call("convert", "import", CHAT, run)
    assert code == 0 and f"12,360 weights of {CHAT} are step 0 of {run}" in told
    assert Checkpoints(run / "checkpoints").steps == (0,)
    kept = {path.name for path in (run / "source").iterdir()}
    assert kept >= {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert not any(name.endswith(".safetensors") for name in kept)

    one, other = (call("generate", *of, *PROMPT) for of in (("--run-dir", run), ("--model", CHAT)))
    assert one == other and one[0] == 0 and len(one[1]) > 3

    assert call("convert", "export", run, out)[0] == 0
    files = {path.name for path in out.iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    code, told, _ = call("convert", "verify", CHAT, "--against", out)
    assert code == 0 and "values: 0 tensors differ\n" in told and "the same: 0 " in told
    assert (out / "tokenizer_config.json").read_bytes() == (CHAT / "tokenizer_config.json").read_bytes()

    code, _, err = call("convert", "import", CHAT, run)
    assert code == 4 and "is a run directory already" in err
    code, _, err = call("convert", "export", run, out)
    assert code == 1 and "is not empty" in err
    code, _, err = call("convert", "export", run, tmp_path / "more", "--step", "7")
    assert code == 4 and "step=7 is not in" in err

    narrow = tmp_path / "narrow"
    assert call("convert", "export", run, narrow, "--dtype", "bfloat16", "--shard-gb", "1e-5")[0] == 0
    assert len(list(narrow.glob("*.safetensors"))) > 1
    assert call("convert", "verify", narrow)[0] == 0
    code, told, _ = call("convert", "verify", CHAT, "--against", narrow, "--tolerance", "0")
    assert code == 1 and "different: 0." in told and "11 tensors differ: model.embed_tokens.weight: by up to" in told


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, count", [("chat_llama", 11), ("gpt2", 28), ("qwen3_f16", None), ("llama_bf16", None)])
def test_tensors_come_back_bit_by_bit(call, without_transformers, name, count):
    code, told, _ = call("convert", "verify", FIXTURES / name)
    assert code == 0 and "transformers is not installed" in told and "have the bits of the files" in told
    assert count is None or f"all {count} tensors" in told


def test_a_tensor_that_changes_is_named(call, without_transformers, monkeypatch):
    load = verify.load_hf

    def broken(directory, **options):
        model = load(directory, **options)
        name = "segments.0.unit.0.mixer.key"
        return replaced(model, {name: -named_leaves(model)[name]})

    monkeypatch.setattr(verify, "load_hf", broken)
    code, told, _ = call("convert", "verify", CHAT)
    assert code == 1
    assert "different: 1 of 11 tensors change when loaded and exported: model.layers.0.self_attn.k_proj.weight" in told


@pytest.mark.parametrize("shift, code", [(0.0, 0), (0.01, 1), (np.nan, 1)])
def test_logits_beside_those_of_transformers(call, monkeypatch, shift, code):
    expected = np.load(CHAT / "expected.npz")
    monkeypatch.setattr(verify, "has_transformers", lambda: True)
    monkeypatch.setattr(verify, "random_ids", lambda *_: expected["input_ids"])
    monkeypatch.setattr(verify, "transformers_logits", lambda *_: expected["logits"] + np.float32(shift))
    left, told, _ = call("convert", "verify", CHAT)
    assert left == code, told
    assert "here and in transformers" in told and "logits: largest |difference|" in told
    assert ("the same: " if code == 0 else "different: ") in told


def test_what_is_told_of_two_arrays_of_logits():
    one = np.asarray([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]], np.float32)
    other = one + np.asarray([[0.0, 0.0, 2.5], [0.5, 0.0, 0.0]], np.float32)
    found = verify.compare_logits(one, other)
    assert (found.maximum, found.mean, found.agreement) == (2.5, 0.5, 0.5)
    assert verify.compare_logits(one, one + np.inf).maximum == np.inf


class FakeModel:
    """What `AutoModelForCausalLM` is asked for."""

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
        "torch": types.SimpleNamespace(float32="float32", from_numpy=lambda ids: ids, no_grad=contextlib.nullcontext),
    }
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_transformers_sees_data_only(fake_transformers, tmp_path):
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


def test_transformers_never_sees_what_our_reader_refuses(fake_transformers, tmp_path):
    folder = copied(tmp_path / "model", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with pytest.raises(ConversionError, match="auto_map"):
        verify.transformers_logits(folder, np.zeros((1, 3), np.int32))
    assert not FakeModel.asked


def test_random_ids_stay_within_vocabulary_and_positions():
    gpt2, chat = (verify.read_config(FIXTURES / name)[0] for name in ("gpt2", "chat_llama"))
    ids = verify.random_ids(gpt2, rows=3, length=100)
    assert ids.shape == (3, 32) and ids.dtype == np.int32 and set(np.unique(ids)) <= set(range(64))
    assert verify.random_ids(chat, length=100).shape == (2, 100)


@pytest.mark.parametrize(
    "config, says",
    [
        ({"rms_norm_eps": 0.5}, "pre_mixer_norm.eps: 1e-06 and 0.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "rope is: 'Rope' and"),
    ],
)
def test_another_meaning_of_the_settings_is_told(call, tmp_path, config, says):
    code, told, _ = call("convert", "verify", CHAT, "--against", copied(tmp_path / "other", **config))
    assert code == 1 and "different: " in told and says in told


def test_other_tensors_are_told(tmp_path):
    """Two directories of the same settings but for the number of layers and a width."""
    wrong, values = verify.compare_directories(FIXTURES / "llama_bf16", FIXTURES / "llama_rope")
    assert any("model.layers.0.self_attn.q_proj.weight" in line for line in [*wrong, *values])
    assert verify.compare_directories(CHAT, copied(tmp_path / "same", rope_theta=10000.0)) == ([], [])


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wrote(monkeypatch):
    """The prompts and samplers that models were given; each answer is `answer 1`, `answer 2`, …"""
    prompts = []

    def write(self, prompt, **options):
        prompts.append((prompt if isinstance(prompt, str) else list(prompt), options))
        return iter([f"answer {len(prompts)}"])

    monkeypatch.setattr(TextModel, "write", write)
    return prompts


def test_a_conversation_remembers_what_was_said(call, wrote):
    code, told, _ = call("generate", "--model", CHAT, "--system", "Be brief.", stdin="one\n\ntwo\n")
    assert code == 0 and told == "answer 1\nanswer 2\n"
    system, one = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}
    answer, two = {"role": "assistant", "content": "answer 1"}, {"role": "user", "content": "two"}
    assert [prompt for prompt, _ in wrote] == [[system, one], [system, one, answer, two]]
    assert str(wrote[0][1]["sampler"]) == "Sample(temperature=0.6, top_k=None, top_p=0.9, min_p=None)"


def test_no_chat_continues_texts(call, wrote):
    code, told, _ = call("generate", "--model", CHAT, "--no-chat", "--top-k", "3", stdin="one\ntwo\n")
    assert code == 0 and told == "oneanswer 1\ntwoanswer 2\n"
    assert [prompt for prompt, _ in wrote] == ["one", "two"] and wrote[0][1]["sampler"].top_k == 3


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (("--model", CHAT, "--run-dir", "runs/x"), 2, "exclude each other"),
        (("--model", CHAT, "--step", "3"), 2, "step=3 is of a run"),
        (("--model", CHAT, "--no-chat", "--system", "x"), 2, "needs a chat"),
        (("--model", CHAT, "--temperature", "-1"), 2, "temperature=-1.0"),
        (("--model", CHAT, "--top-p", "2"), 2, "top_p=2.0"),
        (("--model", FIXTURES / "gpt2"), 3, "holds no tokenizer.json"),
        (("--model", FIXTURES / "nothing"), 1, "does not exist"),
        (("--run-dir", FIXTURES), 2, "is no run directory"),
    ],
)
def test_mistakes_of_generate(call, arguments, code, says):
    left, _, err = call("generate", *arguments, "--prompt", "x")
    assert left == code and says in " ".join(err.replace("│", "").split())


def test_a_message_of_the_system_needs_a_template(call, tmp_path):
    folder = copied(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    left, _, err = call("generate", "--model", folder, "--system", "x")
    assert left == 2 and "system='x' needs a chat template" in err


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (("verify", FIXTURES / "nothing"), 1, "does not exist"),
        (("verify", CHAT, "--tolerance", "-1"), 2, "tolerance=-1.0 must be"),
        (("verify",), 2, "required"),
        (("verfy",), 2, "verfy"),
        (("import", FIXTURES / "nothing", "x"), 1, "does not exist"),
        (("export", FIXTURES, "x"), 2, "is no run directory"),
        (("export", FIXTURES, "x", "--shard-gb", "0"), 2, "shard_gb=0.0"),
    ],
)
def test_mistakes_of_convert(call, arguments, code, says):
    left, _, err = call("convert", *arguments)
    assert left == code and says in " ".join(err.replace("│", "").split())


def test_the_script_answers_in_a_process_of_its_own():
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--model", str(CHAT), *PROMPT]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() and "Traceback" not in done.stderr, done.stderr
