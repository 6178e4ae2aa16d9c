"""The scripts in processes of their own: what only a shell sees, signals and kills."""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from eqx_decoders.training.run.log import read_metrics
from tests.commands import ROOT, flags, run, start, steps_of, write_corpus
from tests.errors import assert_names


CHAT = ROOT / "tests" / "fixtures" / "chat_llama"
OPTIONS = {
    "--model": "gpt3-52k",
    "--tokenizer": "bytes",
    "--steps": 4,
    "--batch-size": 4,
    "--seq-len": 32,
    "--sample-tokens": 5,
    "--eval-every": 2,
    "--checkpoint-every": 2,
    "--held-out-fraction": 0.2,
    "--prompt": "the",
}
SMALL = flags(OPTIONS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> tuple[Path, str, str]:
    """The directory and the output of a run from its first to its last step."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    return folder, *run("train.py", "--run-dir", folder, "--data", corpus, "--profile", "2", "2", *SMALL)


def test_train_trains(trained):
    folder, out, err = trained
    assert [row["step"] for row in steps_of(folder)] == [1, 2, 3, 4]
    last = [row["eval_loss"] for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" in row][-1]
    assert_names(out, folder, f"{last:.4f}")
    assert_names(err, "52,464")
    assert list((folder / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_a_run_killed_and_started_again_has_the_losses_of_one_that_was_not(trained, corpus, tmp_path):
    """SIGTERM behind the first checkpoint: it saves and exits with 143, and goes on from there, bit for bit."""
    folder = tmp_path / "b"
    options = ("--run-dir", folder, "--data", corpus, *flags(OPTIONS | {"--sample-tokens": 0, "--eval-every": 0}))
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
    assert_names(err, f"step {done}")
    whole, again = steps_of(trained[0]), steps_of(folder)
    assert [row["step"] for row in again] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "epochs"):
        assert [row[name] for row in again] == [row[name] for row in whole], name


@pytest.mark.slow
def test_ctrl_c_while_a_tokenizer_is_trained_ends_it_at_once(tmp_path):
    """In a call that does not return to Python: what is kept is said, and the same command starts again."""
    lines = (json.dumps({"text": " ".join(map(str, range(n, n + 200)))}) for n in range(0, 2_000_000, 200))
    (tmp_path / "large.jsonl").write_text("\n".join(lines))
    process = start("train.py", "--run-dir", tmp_path / "run", "--data", tmp_path / "large.jsonl", "--steps", 2)
    while not (tmp_path / "run" / "settings.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < 3 and process.returncode == 130 and "Traceback" not in err
    assert re.search(r"tokenizer\D*1", err)  # its progress
    assert_names(err.splitlines()[-1], "tokenizer")


@pytest.mark.slow
def test_generate_continues_each_line_of_its_input(trained):
    options = ("--max-new-tokens", 30, "--temperature", 1)  # of 1024 ids 256 are bytes, the others are not shown
    out, _ = run("generate.py", "--run-dir", trained[0], *options, stdin="the quick\n\na lazy dog\n")
    first, second = out.split("\na lazy dog")
    assert first.startswith("the quick") and len(first) > len("the quick") and len(second) > 1


@pytest.mark.slow
def test_convert_converts_and_mistakes_have_a_code(tmp_path):
    out, _ = run("convert.py", "import", CHAT, tmp_path / "run")
    assert_names(out, "12,360")
    _, err = run("convert.py", "import", CHAT, tmp_path / "run", code=4)
    assert err.startswith("error: ")
    assert_names(err, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_time_lose_no_step_twice(trained, corpus, tmp_path, seed):
    """SIGKILL and SIGTERM at random times, again and again, until the run ends: the losses are those of one run."""
    generator, folder = random.Random(seed), tmp_path / "run"
    options = ("--run-dir", folder, "--data", corpus, *SMALL)
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
