"""Worker process that makes shards: `python -m eqx_decoders.data.store.tokenization_worker`.

`tokenization` starts it. It reads a recipe and then one task after another from its standard input, a line of JSON
each, and reports its progress, finished shards and errors on its standard output. It exits when its input ends, and so
with the process that started it.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.store.shard_lock import copy_path
from eqx_decoders.data.store.shard_tasks import Recipe, make_shard, task_from_json
from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import load_tokenizer


INTERVAL = 0.25  # seconds between two reports of the progress


def main() -> None:
    """Make shards until the input ends."""
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # text that a library prints is no answer
    os.dup2(2, 1)
    lines: queue.Queue[dict[str, Any]] = queue.Queue()
    partials: list[Path] = []
    threading.Thread(target=_listen, args=(lines, partials), daemon=True).start()
    setup = lines.get()
    recipe = None
    while True:
        message = lines.get()
        partials[:] = [Path(message["partial"])]
        task = task_from_json(message)
        try:
            recipe = recipe or _read_recipe(setup)
            progress = _Progress(answers)
            make_shard(Path(setup["folder"]), task, recipe, partials[0], progress.add)
            progress.report()
            _answer(answers, {"made": True})
        except EqxDecodersError as error:
            _answer(answers, {"error": [type(error).__name__, str(error)]})
        except Exception as error:
            traceback.print_exc()
            sentence = f"{task.source.file} cannot be tokenized: {type(error).__name__}: {error}."
            _answer(answers, {"error": ["DataError", sentence]})


def _read_recipe(setup: dict[str, Any]) -> Recipe:
    """Read the recipe that the starting process has written."""
    template = None if setup["template"] is None else ChatTemplate(**setup["template"])
    tokenizer, media = load_tokenizer(setup["tokenizer"]), _read_media(setup["media"])
    return Recipe(tokenizer, setup["text_field"], template, media, setup["special_tokens_in_text"])


def _read_media(content: dict[str, Any] | None) -> MediaReader | None:
    if content is None:
        return None
    # imported here: text alone needs neither JAX nor encoders, whose import takes longer than a small shard
    from eqx_decoders.data.media_documents import reader_from_json

    return reader_from_json(content)


def _listen(lines: "queue.Queue[dict[str, Any]]", partials: list[Path]) -> None:
    """Read the input in a thread of its own, so that its end is noticed in the middle of work."""
    for line in sys.stdin:
        lines.put(json.loads(line))
    for partial in partials:
        for file in (partial, copy_path(partial)):
            file.unlink(missing_ok=True)
    os._exit(0)


class _Progress:
    """Progress report, a few times a second: the number of characters that have been tokenized."""

    def __init__(self, answers: TextIO):
        self._answers, self._count, self._reported = answers, 0, time.monotonic()

    def add(self, characters: int) -> None:
        self._count += characters
        if time.monotonic() - self._reported > INTERVAL:
            self.report()

    def report(self) -> None:
        _answer(self._answers, {"characters": self._count})
        self._count, self._reported = 0, time.monotonic()


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
