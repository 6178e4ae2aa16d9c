"""The examples of all READMEs run as users run them, and print what is true."""

import ast
import contextlib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eqx_decoders
from tests.commands import ROOT, call, write_corpus


READMES = [ROOT / "README.md", *sorted((ROOT / "eqx_decoders").rglob("README.md")), ROOT / "scripts" / "README.md"]
EXAMPLES = [example for file in READMES for example in re.findall(r"```python\n(.*?)```", file.read_text(), re.S)]
TARGETS = {target for file in READMES for target in re.findall(r"`make ([a-z-]+)", file.read_text())}


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def run_example(text: str, folder: Path = ROOT, devices: int = 1) -> tuple[list[str], list[str]]:
    """Run the example that contains `text`.

    Return the lines that it prints, and those that it should print, which stand behind `# > `.
    """
    (example,) = [example for example in EXAMPLES if text in example]
    expected = [line[4:] for line in example.splitlines() if line.startswith("# > ")]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", example], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.rstrip() for line in done.stdout.splitlines()], [line.rstrip() for line in expected]


def assert_printed(out: list[str], expected: list[str]) -> None:
    """Compare words and whole numbers exactly; fractions may differ by a hundredth, or by 3 in their last digit."""
    assert [NUMBER.sub("0", line) for line in out] == [NUMBER.sub("0", line) for line in expected]
    for got, want in zip(NUMBER.findall(" ".join(out)), NUMBER.findall(" ".join(expected)), strict=True):
        digits = len(want.partition(".")[2])
        assert abs(float(got) - float(want)) <= (max(0.01 * float(want), 3.1 * 10**-digits) if digits else 0), (
            got,
            want,
        )


@pytest.mark.slow
def test_a_loop_of_ones_own_learns_to_count():
    out, expected = run_example("count by fives")
    assert_printed(out, expected)
    assert out[-1] == "[[20 25 30 35 40 45 50 55]]"


@pytest.mark.slow
def test_many_devices_train_save_and_restore():
    out, expected = run_example("visualize_array_sharding", devices=8)
    assert_printed(out, expected)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", " ".join(out))]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_a_checkpoint_is_tuned_exported_and_answers():
    out, expected = run_example("save_peft")
    assert_printed(out, expected)
    assert out[-1] == "hello, friend" != out[0]


@pytest.mark.slow
def test_a_run_of_ones_own_is_read_and_writes(tmp_path):
    """A smaller model than the README's: only the words are the same, not the numbers."""
    small = ("--model", "gpt3-52k", "--tokenizer", "bytes", "--steps", 1, "--batch-size", 4, "--seq-len", 32)
    quick = ("--sample-tokens", 0, "--held-out-fraction", 0)
    call("train", "--run-dir", tmp_path / "runs/tiny", "--data", write_corpus(tmp_path / "text"), *small, *quick)
    out, expected = run_example("runs/tiny", tmp_path)
    assert [NUMBER.sub("0", line) for line in out[: len(expected)]] == [NUMBER.sub("0", line) for line in expected]
    assert len(expected) == 2 and len("".join(out[2:])) > 3  # most of its ids have no text: it has hardly learned


@pytest.mark.slow
def test_pairs_are_told_apart_by_a_loop_of_ones_own():
    out, expected = run_example("reward_margin")
    assert_printed(out, expected)
    assert float(out[0]) == 0 < float(out[-1])


@pytest.mark.slow
def test_a_task_of_ones_own_is_plain_python():
    out, expected = run_example("def last_number")
    assert out == expected


@pytest.mark.slow
def test_images_stand_in_the_place_of_placeholders():
    out, expected = run_example("synthetic_images")
    assert_printed(out, expected)


@pytest.mark.slow
def test_an_image_is_decoded_to_rgb():
    out, expected = run_example("open_image")
    assert out == expected


@pytest.mark.slow
@pytest.mark.parametrize("text", ["ed.Engine(model", "Engine(model, EngineConfig", "drop_adapter"])
def test_many_people_are_answered_at_once(text):
    out, expected = run_example(text)
    assert out == expected


@pytest.mark.slow
def test_a_layer_of_ones_own_stands_in_a_model():
    out, expected = run_example("class TiedMLP(")
    assert out == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["GatedDeltaNetConfig(num", "def run_experts(", "SlidingWindow(4)", "reject the last two"]
)
def test_single_layers_and_caches_run(text):
    out, expected = run_example(text)
    assert out == expected


@pytest.mark.slow
def test_layers_of_ones_own_remember_what_they_say():
    out, expected = run_example("class ShortConvolution(")
    assert_printed(out, expected)
    assert out[-1] == "with a cache as without: True"


def test_every_example_is_run():
    """Each example of each README contains the words of exactly one test above."""
    words = re.findall(r'"([^"]+)"', "".join(re.findall(r'(?:run_example\(|"text", )(.*)', Path(__file__).read_text())))
    for example in EXAMPLES:
        assert len([each for each in words if each in example]) == 1, f"no test runs this example:\n{example}"


def defined(path: str) -> bool:
    """Return whether a dotted name below `eqx_decoders` is a module, or an attribute of one."""
    value, rest = eqx_decoders, path.split(".")
    while rest:
        name = f"{getattr(value, '__name__', '')}.{rest[0]}"
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if not hasattr(value, rest[0]):
            return False
        value, rest = getattr(value, rest[0]), rest[1:]
    return True


def test_examples_import_names_that_are_there():
    for example in EXAMPLES:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("eqx_decoders."):
                module = node.module.removeprefix("eqx_decoders.")
                missing = [alias.name for alias in node.names if not defined(f"{module}.{alias.name}")]
                assert not missing, f"an example imports {', '.join(missing)} of {node.module}"


def test_names_in_texts_are_there():
    """Names of `ed.`, and dotted names in backticks that begin with a package; `model.` is a variable everywhere."""
    packages = {file.parent.name for file in ROOT.glob("eqx_decoders/*/__init__.py")} - {"model"}
    for file in READMES:
        dotted = re.findall(r"`(?:eqx_decoders\.)?(\w+\.[\w.]*\w)[`(:]", file.read_text())
        names = {name for name in dotted if name.split(".")[0] in packages and not name.endswith((".py", ".md"))}
        names |= set(re.findall(r"\bed\.([A-Za-z]\w+)", file.read_text()))
        missing = sorted(name for name in names if not defined(name))
        assert not missing, f"{file.relative_to(ROOT)} names {', '.join(missing)}"


def test_words_of_code_in_texts_are_in_the_code():
    """Words in backticks with capitals inside, or with an underscore, stand in a module, a test or an example."""
    files = [file for folder in ("eqx_decoders", "scripts", "tests") for file in (ROOT / folder).rglob("*.py")]
    code = "\n".join([*map(str, files), *(file.read_text() for file in files), *EXAMPLES])
    for file in READMES:
        text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.M | re.S)
        before, heading, table = text.partition("## Coming from another library")  # names of others on the left
        text = before + heading + re.sub(r"^\|[^|]*\|", "|", table, flags=re.M)
        quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
        names = set(re.findall(r"(?<![\w./-])(?:[A-Z]\w*[a-z]\w*|\w+_\w+)", quoted))
        missing = sorted(name for name in names if name not in code)
        assert not missing, f"{file.relative_to(ROOT)} names {', '.join(missing)}"


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_commands_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
