"""Structured output that is requested with LangChain, instructor, Pydantic AI and OpenAI's client."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.processes import served
from tests.serving.servers import CHAT


PROGRAM = Path(__file__).with_name("structured_clients.py")
TEMPLATES = Path(__file__).parents[1] / "fixtures" / "chats"
# The clients need other package versions than this library, and are installed in a separate environment (see Makefile).
PYTHON = Path(os.environ.get("STRUCTURED_CLIENTS_PYTHON", Path(sys.prefix) / "structured" / "bin" / "python"))


@pytest.mark.slow
@pytest.mark.parametrize("reasons", [False, True])
def test_structured_answers_of_clients_are_valid(tmp_path, reasons):
    if not PYTHON.is_file():
        pytest.skip(
            f"LangChain, instructor and Pydantic AI are not installed: {PYTHON} does not exist (make test-slow)"
        )
    source = (TEMPLATES / "qwen3.jinja").read_text()
    if reasons:  # the prompt starts the reasoning, as in Qwen3-Thinking-2507
        begin = "{{- '<|im_start|>assistant\\n"
        assert begin in source
        source = source.replace(f"{begin}' }}}}\n    {{%- if enable", f"{begin}<think>\\n' }}}}\n    {{%- if enable")
        assert "assistant\\n<think>\\n" in source
    folder = tmp_path / "model"
    shutil.copytree(CHAT, folder)
    (folder / "chat_template.jinja").write_text(source)
    with served(folder, length=2048) as (_, running):
        done = subprocess.run([PYTHON, "-I", PROGRAM, running.url], capture_output=True, text=True, timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) == 14, done.stderr[-2000:]
    assert not [row for row in rows if "error" in row]
