"""The scripts as a user runs them: in processes of their own, on a small corpus."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eqx_decoders.training.console import read_metrics

from eqx_decoders.io.rundir import RunLock


ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA", "EQX"))},
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "120",
}
TEXT = "the quick brown fox jumps over a lazy dog while many small birds sing in old green trees"
OPTIONS = {
    "--tokenizer": "bytes",
    "--model": "tiny",
    "--steps": "4",
    "--batch-size": "4",
    "--seq-len": "32",
    "--sample-tokens": "5",
    "--eval-every": "2",
    "--checkpoint-every": "2",
    "--held-out-fraction": "0.2",
    "--prompt": "the",
}
SMALL = [word for option in OPTIONS.items() for word in option]


def start(script: str, *options: str, **streams) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / script), *options]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, text=True, **(pipes | streams))


def run(script: str, *options: str, stdin: str = "", code: int = 0) -> tuple[str, str]:
    """Standard output and error of a script that must end with `code`."""
    process = start(script, *options)
    out, err = process.communicate(stdin, timeout=300)
    assert process.returncode == code, f"{process.returncode}: {err[-3000:]}"
    assert "Traceback" not in err
    return out, err


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder, generator, words = tmp_path_factory.mktemp("corpus"), random.Random(0), TEXT.split()
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(generator.choices(words, k=300)) + "\n")
    return folder


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> tuple[Path, str, str]:
    """The directory and the output of a run from its first to its last step."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    return folder, *run("train.py", "--run-dir", str(folder), "--data", str(corpus), *SMALL)


def steps_of(folder: Path) -> list[dict]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_a_run_trains_to_its_end_and_tells_how_good_it_is(trained):
    folder, out, err = trained
    rows = steps_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["loss"] > 0 and 0 < row["tokens"] <= 4 * 31 and row["step_seconds"] > 0
        assert row["skipped"] is False
    assert rows[-1]["loss"] < rows[0]["loss"]
    held_out = [row for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in held_out] == [2, 4]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {"checkpoints", "settings.json", "tokenizer"} <= {path.name for path in folder.iterdir()}
    per_byte = float(re.search(r"held-out loss: ([\d.]+) nats per byte", out)[1])
    gzip = float(re.search(r"gzip\D+-9\D+([\d.]+)", out)[1])
    per_token = float(re.search(r"held-out loss: ([\d.]+) nats per token", out)[1])
    assert per_token == pytest.approx(held_out[-1]["eval_loss"], abs=1e-3)
    assert per_byte == pytest.approx(per_token, rel=0.01)  # of bytes, each a token; and an end for each document
    assert 0.5 < gzip < 3
    assert str(folder) in out and "4,737,792 weights" in err


def test_a_run_with_experts_and_guesses_ahead_reports_both(corpus, tmp_path):
    """Each row has a figure for each layer with experts; the picture and the last loads come at the end."""
    options = dict(OPTIONS) | {"--model": "tiny-moe", "--steps": "2", "--sample-tokens": "0", "--eval-every": "0"}
    options |= {"--mtp-depths": "1"}
    words = [word for option in options.items() for word in option]
    folder = tmp_path / "m"
    out, err = run("train.py", "--run-dir", str(folder), "--data", str(corpus), *words)
    rows = steps_of(folder)
    assert len(rows) == 2
    for row in rows:
        for name in ("load", "dropped", "balance_loss", "router_z_loss", "router_entropy"):
            assert len(row[name]) == 6, name  # the depth has experts, too
        assert all(1 <= load <= 2 for load in row["load"]) and row["dropped"] == [0.0] * 6
        assert all(0 < entropy < 1.39 for entropy in row["router_entropy"])
        assert len(row["mtp_nll"]) == 1 and row["loss"] > row["nll"] + 0.09 * row["mtp_nll"][0]
    assert (folder / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    assert "expert_load.png" in out and re.search(r"last 2 steps: (\d\.\d\d(, )?){6}", out)
    assert "load" in err
    (told,) = [row["mtp_acceptance"] for row in read_metrics(folder / "metrics.jsonl") if "mtp_acceptance" in row]
    assert len(told) == 1 and 0 <= told[0] <= 1 and "guesses ahead accepted" in err
    text = ("--run-dir", str(folder), "--prompt", "def", "--temperature", "0", "--max-new-tokens", "6")
    assert run("generate.py", *text, "--num-draft-tokens", "1")[0] == run("generate.py", *text)[0]


def test_a_run_killed_and_started_again_has_the_losses_of_one_that_was_not(trained, corpus, tmp_path):
    """SIGTERM behind the first checkpoint: it saves and exits with 143, and goes on from there, bit for bit."""
    folder = tmp_path / "b"
    options = ("--run-dir", str(folder), "--data", str(corpus), *SMALL)
    process = start("train.py", *options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (folder / "metrics.jsonl").exists() or not steps_of(folder):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 143
    done = len(steps_of(folder))
    assert 1 <= done < 4

    _, err = run("train.py", *options)
    assert f"resumed at step {done}" in err
    whole, again = steps_of(trained[0]), steps_of(folder)
    assert [row["step"] for row in again] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "epochs"):
        assert [row[name] for row in again] == [row[name] for row in whole], name


GREEDY = ("--max-new-tokens", "8", "--temperature", "0")


def test_generation_continues_each_line_of_its_input(trained):
    out, _ = run("generate.py", "--run-dir", str(trained[0]), *GREEDY, stdin="the quick\n\na lazy dog\n")
    first, second = out.split("\na lazy dog")
    assert first.startswith("the quick") and len(first) > len("the quick") and len(second) > 1


@pytest.mark.slow
def test_generation_continues_the_prompt_as_it_does_a_line(trained):
    options = ("--run-dir", str(trained[0]), *GREEDY)
    one, _ = run("generate.py", *options, "--prompt", "the quick")
    line, _ = run("generate.py", *options, stdin="the quick\n")
    assert one == line and one.startswith("the quick")


def test_help_and_typos():
    out, _ = run("train.py", "--help")
    assert re.search(r"--seq-len.*?tokens per sequence", out, re.DOTALL | re.IGNORECASE)
    assert "--optimizer.learning-rate" in out and "--mesh.fsdp" in out
    out, err = run("train.py", "--seq-lenn", "32", code=2)
    assert "--seq-len" in (out + err).replace("--seq-lenn", "")


def test_describe_prints_the_weights():
    out, _ = run("train.py", "--describe", "--batch-size", "4")
    assert "embedding.table" in out and "4096 x 256" in out and "vocab embed" in out
    assert "4,737,792 weights" in out


def test_a_run_directory_in_use_is_left_alone(tmp_path, corpus):
    with RunLock(tmp_path):
        _, err = run("train.py", "--run-dir", str(tmp_path), "--data", str(corpus), *SMALL, code=4)
    assert f"in use by pid {os.getpid()}" in err
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.slow
def test_mistakes_have_codes_and_no_traceback(tmp_path):
    _, err = run("train.py", "--run-dir", str(tmp_path / "run"), "--model", "tinny", code=2)
    assert "tinny" in err and "Did you mean 'tiny'" in err
    _, err = run("generate.py", "--run-dir", str(tmp_path), code=2)
    assert "no run directory" in err


@pytest.mark.slow
def test_data_that_is_not_there_exits_with_3(tmp_path):
    _, err = run("train.py", "--run-dir", str(tmp_path / "run"), *SMALL, "--data", str(tmp_path / "none"), code=3)
    assert "none" in err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_time_lose_no_step_twice(trained, corpus, tmp_path, seed):
    """SIGKILL and SIGTERM at random times, again and again, until the run ends: the losses are those of one run."""
    generator, folder = random.Random(seed), tmp_path / "run"
    options = ("--run-dir", str(folder), "--data", str(corpus), *SMALL)
    for kill in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = start("train.py", *options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=generator.uniform(4, 20))
        except subprocess.TimeoutExpired:
            process.send_signal(kill)
        assert process.wait(timeout=240) in (0, -kill, 143)
    run("train.py", *options)
    whole, again = steps_of(trained[0]), steps_of(folder)
    assert [(row["step"], row["loss"]) for row in again] == [(row["step"], row["loss"]) for row in whole]


@pytest.mark.slow
def test_more_steps_on_a_finished_run_go_on(trained, corpus, tmp_path):
    """With a constant rate a run of two steps, made longer, is the run of four."""
    constant = ("--data", str(corpus), *SMALL, "--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0")
    run("train.py", "--run-dir", str(tmp_path / "long"), *constant)
    for steps in ("2", "4"):
        run("train.py", "--run-dir", str(tmp_path / "short"), *constant, "--steps", steps)
    long, short = steps_of(tmp_path / "long"), steps_of(tmp_path / "short")
    assert [row["loss"] for row in short] == [row["loss"] for row in long]
    assert json.loads((tmp_path / "short" / "settings.json").read_text())["steps"] == 4
