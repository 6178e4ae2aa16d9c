"""The README's examples run as users run them, and print what is true."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.commands import AS_USERS_RUN, ROOT, call, write_corpus


README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


COUNTER = """
import sys
import jax.monitoring
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
"""
# Programs of each example: a new model, a step, what generates, and small ones such as zeros for an optimizer.
MOST_PROGRAMS = {
    "count by fives": 30,
    "Layout.create(fsdp=4, tensor=2)": 55,
    "save_peft": 35,
    "runs/tiny": 20,
    "drawn_images": 40,
    "class ShortConvolution(": 15,
    "Engine(model": 45,
}
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def run_example(text: str, folder: pathlib.Path = ROOT, devices: int = 1) -> tuple[list[str], list[str]]:
    """The lines that the example with this text prints, compiled and computed as JAX does it for users; those it tells.

    What it should print stands behind `# > `.
    """
    (example,) = [example for example in EXAMPLES if text in example]
    told = [line[4:] for line in example.splitlines() if line.startswith("# > ")]
    environment = AS_USERS_RUN | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    count = "events.count('/jax/core/compile/backend_compile_duration')"
    program = f"{COUNTER}{example}\nprint('programs', {count}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = int(re.search(r"^programs (\d+)$", done.stderr, re.M)[1])
    assert compiled <= MOST_PROGRAMS[text], done.stderr[-2000:]
    return [line.rstrip() for line in done.stdout.splitlines()], [line.rstrip() for line in told]


def assert_told(out: list[str], told: list[str]) -> None:
    """Equal words and whole numbers; decimal fractions may differ by a hundredth, or by 3 in their last place."""
    assert [NUMBER.sub("0", line) for line in out] == [NUMBER.sub("0", line) for line in told]
    for got, want in zip(NUMBER.findall(" ".join(out)), NUMBER.findall(" ".join(told)), strict=True):
        places = len(want.partition(".")[2])
        assert abs(float(got) - float(want)) <= (max(0.01 * float(want), 3.1 * 10**-places) if places else 0), (
            got,
            want,
        )


@pytest.mark.slow
def test_a_loop_of_ones_own_learns_to_count():
    out, told = run_example("count by fives")
    assert_told(out, told)
    assert out[-1] == "[[20 25 30 35 40 45 50 55]]"


@pytest.mark.slow
def test_many_devices_train_save_and_restore():
    out, told = run_example("Layout.create(fsdp=4, tensor=2)", devices=8)
    assert_told(out, told)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", " ".join(out))]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)


def test_a_checkpoint_is_tuned_exported_and_answers():
    out, told = run_example("save_peft")
    assert_told(out, told)
    assert out[-1] == "hello, friend" != out[0]


@pytest.mark.slow
def test_a_run_of_ones_own_is_read_and_writes(tmp_path):
    """A smaller model than the README's: only the words are the same, not the numbers."""
    small = ("--model", "gpt3-52k", "--tokenizer", "bytes", "--steps", 1, "--batch-size", 4, "--seq-len", 32)
    quick = ("--sample-tokens", 0, "--held-out-fraction", 0)
    call("train", "--run-dir", tmp_path / "runs/tiny", "--data", write_corpus(tmp_path / "text"), *small, *quick)
    out, told = run_example("runs/tiny", tmp_path)
    assert [NUMBER.sub("0", line) for line in out[: len(told)]] == [NUMBER.sub("0", line) for line in told]
    assert len(told) == 2 and len("".join(out[2:])) > 10


@pytest.mark.slow
def test_images_stand_in_the_place_of_placeholders():
    out, told = run_example("drawn_images")
    assert_told(out, told)


@pytest.mark.slow
def test_many_people_are_answered_at_once():
    out, told = run_example("Engine(model")
    assert out == told


@pytest.mark.slow
def test_layers_of_ones_own_remember_what_they_say():
    out, told = run_example("class ShortConvolution(")
    assert_told(out, told)
    assert out[-1] == "with a cache as without: True"


def test_every_kind_of_user_has_an_example():
    # a loop of one's own, many devices, a checkpoint of others, many people, images, a run and layers of one's own
    assert len(EXAMPLES) == 7


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)`", README))))
def test_commands_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
