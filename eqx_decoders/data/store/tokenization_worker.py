"""A process that makes shards: `python -m eqx_decoders.data.store.tokenization_worker`, started by `tokenise`.

It reads a recipe and then one job after another from its standard input, a line of JSON each, and says on its standard
output how far it is, what it has made and why it can't go on. It ends when its input does: when the process that
started it has ended, too.
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

from eqx_decoders.data.sources.leases import beside
from eqx_decoders.data.store.tokenization import loaded_job, loaded_recipe, make_shard
from eqx_decoders.errors import EqxDecodersError


TOLD = 0.25  # seconds between two words of how far it is


def main() -> None:
    """Make shards until the input ends."""
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # what a library prints is no answer
    os.dup2(2, 1)
    lines: queue.Queue[dict[str, Any]] = queue.Queue()
    partials: list[Path] = []
    threading.Thread(target=_listen, args=(lines, partials), daemon=True).start()
    words = lines.get()
    recipe = None
    while True:
        told = lines.get()
        partials[:] = [Path(told["partial"])]
        job = loaded_job(told)
        try:
            recipe = recipe or loaded_recipe(words)
            progress = _Progress(answers)
            make_shard(Path(words["folder"]), job, recipe, partials[0], progress.add)
            progress.tell()
            _answer(answers, {"made": True})
        except EqxDecodersError as error:
            _answer(answers, {"error": [type(error).__name__, str(error)]})
        except Exception as error:
            traceback.print_exc()
            sentence = f"{job.source.file} cannot be tokenised: {type(error).__name__}: {error}."
            _answer(answers, {"error": ["DataError", sentence]})


def _listen(lines: "queue.Queue[dict[str, Any]]", partials: list[Path]) -> None:
    """In a thread of its own, so that the end of the input is heard in the middle of work."""
    for line in sys.stdin:
        lines.put(json.loads(line))
    for partial in partials:
        for file in (partial, beside(partial)):
            file.unlink(missing_ok=True)
    os._exit(0)


class _Progress:
    """Says a few times a second how many characters have been done."""

    def __init__(self, answers: TextIO):
        self._answers, self._count, self._told = answers, 0, time.monotonic()

    def add(self, characters: int) -> None:
        self._count += characters
        if time.monotonic() - self._told > TOLD:
            self.tell()

    def tell(self) -> None:
        _answer(self._answers, {"characters": self._count})
        self._count, self._told = 0, time.monotonic()


def _answer(answers: TextIO, words: dict[str, Any]) -> None:
    print(json.dumps(words), file=answers, flush=True)


if __name__ == "__main__":
    main()
