"""The README's examples run."""

import os
import pathlib
import re
import subprocess
import sys

import pytest


README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("block", [b for b in BLOCKS if "runs/tiny" not in b], ids=lambda block: block.split("\n")[0])
def test_examples_run(block):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", block], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_kind_of_user_has_an_example():
    assert len(BLOCKS) == 4  # a loop of one's own, many devices, a checkpoint of others, a run of one's own


def test_commands_exist():
    makefile = (pathlib.Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
