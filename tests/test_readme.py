"""The README's examples run as users run them, and print what is true."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.commands import AS_USERS_RUN, ROOT, call, write_corpus


README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def printed(text: str, folder: pathlib.Path = ROOT) -> str:
    """What the example with this text prints, compiled and computed as JAX does it for users."""
    (example,) = [example for example in EXAMPLES if text in example]
    environment = AS_USERS_RUN | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", example], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_loop_of_ones_own_learns_to_count():
    out = printed("count by fives")
    assert out.startswith("[(4, 2), (1, 1)]\n")
    loss, tokens = re.search(r"loss ([\d.]+) \[\[([\d ]+)\]\]", out).groups()
    assert float(loss) < 0.5
    assert [int(token) for token in tokens.split()] == [20, 25, 30, 35, 40, 45, 50, 55]


def test_many_devices_train_save_and_restore():
    out = printed("Layout.create(fsdp=4, tensor=2)")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+), gradient norm [\d.]+", out)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert re.search(r"^step 3, .*'fsdp'.*$", out, re.M)


def test_a_checkpoint_is_tuned_exported_and_read_again():
    out = printed("load_hf(source")
    assert float(re.search(r"loss ([\d.]+)", out)[1]) < 3
    trained, arrays = map(int, re.search(r"(\d+) of (\d+) arrays trained", out).groups())
    assert 0 < trained < arrays
    assert out.rstrip().endswith("\nTrue")


def test_a_run_of_ones_own_is_read_and_writes(tmp_path):
    small = ("--model", "gpt3-52k", "--tokenizer", "bytes", "--steps", 1, "--batch-size", 4, "--seq-len", 32)
    quick = ("--sample-tokens", 0, "--held-out-fraction", 0)
    call("train", "--run-dir", tmp_path / "runs/tiny", "--data", write_corpus(tmp_path / "text"), *small, *quick)
    out = printed("runs/tiny", tmp_path)
    assert len(re.findall(r"^\d+\.\d\d nats per character: for ", out, re.M)) == 2
    assert len(out.split("\n", 2)[2]) > 10


def test_every_kind_of_user_has_an_example():
    assert len(EXAMPLES) == 4  # a loop of one's own, many devices, a checkpoint of others, a run of one's own


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)`", README))))
def test_commands_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
