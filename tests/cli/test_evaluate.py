"""Test the evaluate program with a small chat model: tables, files, two models, and errors."""

import json
import re
from pathlib import Path

import pytest

from eqx_decoders.cli.evaluate import EvaluateConfig, limits, parse
from eqx_decoders.errors import ConfigError
from eqx_decoders.inference.text_model import load_text_model
from tests.commands import ROOT, call
from tests.errors import assert_names, refused


CHAT = ROOT / "tests" / "fixtures" / "chat_llama"
TASKS = """
from eqx_decoders.evaluation import Task

ROWS = [{"prompt": f"the {word} fox", "answer": word} for word in ("quick", "lazy", "small", "old")]
letters = Task(examples=ROWS, grade=lambda example, answer: "e" in answer, max_new_tokens=6, stop=("\\n",))
"""
SMALL = ("--max-batch-size", 2, "--max-length", 64, "--prefill-chunk", 16, "--token-budget", 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "tasks.py").write_text(TASKS)
    (folder / "words.txt").write_text("the quick brown fox jumps over a lazy dog " * 4)
    rows = ({"body": "many smäll birds"}, {"body": "sing in old green trees"}, {"body": ""})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def cells(out: str, name: str) -> list[str]:
    """Return the cells of the first table row with the given name."""
    (line, *_) = [line for line in out.splitlines() if re.match(rf"\| {re.escape(name)} ", line)]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_tasks_texts_and_two_models(folder):
    """Both models are the same, so that all prompts are ties."""
    options = ("--tasks", f"{folder}/tasks.py:letters", "--samples", 4, "--limit", 3, "--pass-at", 1, 3)
    texts = ("--text", f"words={folder}/words.txt", f"rows={folder}/rows.jsonl", "--text-field", "body")
    output = ("--output", folder / "out", "--against", CHAT, "--text-context", 8, "--no-special-tokens-in-content")
    out, err = call("evaluate", "--model", CHAT, *options, *texts, *output, *SMALL)
    assert_names(out, "4 completions", "temperature 1", "seed 0")
    assert_names(err, folder / "out")
    name, prompts, score, one, three, *_ = cells(out, "letters")
    assert (name, prompts) == ("letters", "3") and score == one and re.fullmatch(r"[01]\.\d{4} ± \d\.\d{4}", three)
    assert cells(out, "words")[1:3] == ["1", "168"] and cells(out, "rows")[1:3] == ["2", str(17 + 23)]
    compared = [cells(out[out.index("difference") :], name) for name in ("letters", "words (bits)")]
    assert all(
        row[3].startswith("+0.0000") and row[4:] == ["0", count, "0", "1.000"]
        for row, count in zip(compared, "31", strict=True)
    )
    results = json.loads((folder / "out" / "results.json").read_text())
    found = results["models"][str(CHAT)]
    assert found["words"]["bits_per_byte_error"] is None and found["rows"]["bits_per_byte_error"] > 0
    assert found["letters"]["pass@3"] >= found["letters"]["pass@1"] and results["settings"]["samples"] == 4
    first = (folder / "out" / "letters.jsonl").read_text()
    assert len(first.splitlines()) == 12 and first == (folder / "out" / "letters.against.jsonl").read_text()


@pytest.mark.slow
def test_lm_eval_combined_with_other_tasks(folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    task = {"task": "birds", **data, "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{body}}"}
    task |= {"doc_to_choice": ["fox", "dog"], "doc_to_target": 0, "metric_list": [{"metric": "acc"}]}
    (folder / "birds.yaml").write_text(json.dumps(task))
    options = ("--include-path", folder, "--fewshot", 0, "--lm-eval-chat", "--output", tmp_path / "out")
    out, _ = call("evaluate", "--model", CHAT, "--tasks", "lm-eval:birds", *options, *SMALL, "--limit", 2)
    assert cells(out, "birds")[1] == "acc" and json.loads((tmp_path / "out" / "results.json").read_text())


@pytest.mark.parametrize(
    "words, code, named",
    [
        pytest.param("", 2, ["--tasks=()", "--text=()"], id="nothing"),
        pytest.param("--tasks tasks.py", 2, ["tasks='tasks.py'", "file.py:name"], id="no task"),
        pytest.param("--tasks {folder}/tasks.py:numbers", 2, ["'numbers'", "letters"], id="unknown task"),
        pytest.param("{task} --pass-at 4", 2, ["--pass-at=4", "--samples=4"], id="pass-at"),
        pytest.param("{task} --fewshot 2", 2, ["--fewshot=2", "--tasks=lm-eval:"], id="fewshot"),
        pytest.param("{task} --text-context 2", 2, ["--text-context=2"], id="text-context"),
        pytest.param("{task} --distributed --mesh.fsdp=-1", 2, ["--distributed=True"], id="distributed"),
        pytest.param("--text words.txt", 2, ["text='words.txt'", "name=path"], id="no name"),
        pytest.param("--text a={folder}/none.txt", 3, ["none.txt'"], id="missing text"),
        pytest.param("--text a={folder}/rows.jsonl", 3, ["rows.jsonl", "'text'", "--text-field"], id="no field"),
        pytest.param("{text} b={folder}/words.txt a={folder}/words.txt", 2, ["text", "a, b, a"], id="equal names"),
        pytest.param("{text} --step 3", 2, ["--step=3"], id="step"),
        pytest.param("{text} --against {folder}/nothing", 4, ["{folder}/nothing"], id="against"),
        pytest.param("{text} --max-length 1", 2, ["--max-length=1"], id="length"),
    ],
)
def test_invalid_arguments_are_refused(folder, words, code, named):
    words = words.replace("{task}", "--tasks {folder}/tasks.py:letters")
    words = words.replace("{text}", "--text a={folder}/words.txt").format(folder=folder)
    _, err = call("evaluate", "--model", CHAT, *words.split(), code=code)
    assert_names(err, *(name.format(folder=folder) for name in named))


def test_default_engine_sizes_depend_on_the_model():
    """The fixture was trained with 128 positions. On a CPU, prefill chunks are small."""
    text = load_text_model(CHAT, "float32")
    sizes = limits(parse(["--text", "a=b"]), text)
    assert (sizes.max_length, sizes.prefill_chunk, sizes.max_batch_size) == (128, 32, 8)
    sizes = limits(parse(["--text", "a=b", "--max-length", "200", "--prefill-chunk", "16"]), text)
    assert (sizes.max_length, sizes.prefill_chunk) == (200, 16)


def test_lm_eval_task_requires_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    _, err = call("evaluate", "--model", CHAT, "--tasks", "lm-eval:arc_easy", code=1)
    assert_names(err, "[lm-eval]'")


def test_models_are_runs_checkpoints_and_names(tmp_path):
    """A directory that contains a settings.json is a run directory."""
    (tmp_path / "settings.json").write_text("{}")
    one, other = parse(["--model", str(tmp_path), "--against", "org/name", "--text", "a=b"]).sources()
    assert (one.run_dir, one.model, other.run_dir, other.model) == (str(tmp_path), None, None, "org/name")
    (alone,) = parse(["--text", "a=b", "--run-dir", "runs/x", "--step", "3"]).sources()
    assert (alone.run_dir, alone.model, alone.step) == ("runs/x", None, 3)
    config = parse(["--text", "a=b", "--dtype", "bfloat16", "--tasks", "lm-eval:a", "--seed", "5", "--no-chat"])
    assert config.lm_eval_settings().seed == 5 and not config.chat and config.names == ["runs/tiny"]
    assert config.sources()[0].dtype == "bfloat16"
    assert config.table_ks == () and parse(["--text", "a=b", "--samples", "4"]).table_ks == (1, 2)
    with refused(ConfigError, "step", "against"):
        EvaluateConfig(run_dir="runs/x", step=3, against="org/name", text=("a=b",))
