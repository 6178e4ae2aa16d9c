"""Tokenization of a corpus into the shards that its cache lacks, by one process for each core, in all runs at once.

A shard is made by the first process that takes its lock (`data.store.shard_lock`). Small corpora are tokenized in this
process. For larger ones worker processes are started that end with this one, however it ends: each reads its tasks
from its standard input, and exits when that is closed.
"""

import collections
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from eqx_decoders.data.store.shard_lock import ShardLock, delete_unfinished
from eqx_decoders.data.store.shard_tasks import Recipe, ShardTask, make_shard, shard_path, task_to_json
from eqx_decoders.data.store.shards import read_info
from eqx_decoders.errors import ConfigError, ConversionError, DataError, EqxDecodersError, MissingPackage
from eqx_decoders.io.processes import local_process_count
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import load_tokenizer


SMALL = 16_000_000  # bytes of sources up to which processes of their own would take longer to start than to work
POLL = 0.05, 1.0  # seconds between two looks at what others are making, at first and at most
ERRORS = {kind.__name__: kind for kind in (ConfigError, ConversionError, DataError, MissingPackage)}  # of processes
KEPT = "the tokens of finished parts are kept"


def make_shards(folder: Path, tasks: Sequence[ShardTask], recipe: Recipe) -> None:
    """Make the shards of all tasks in `folder`, the recipe's, and wait for shards that other processes make.

    Raises DataError for sources that cannot be read, and the errors of their tokenization.
    """
    missing = {task.key: task for task in tasks if read_info(shard_path(folder, task)) is None}
    if not missing:
        return
    sizes = [task.size for task in missing.values()]
    small = None not in sizes and sum(size or 0 for size in sizes) <= SMALL
    folder.mkdir(parents=True, exist_ok=True)
    delete_unfinished(folder)
    with StatusLine("tokenizing", remains=KEPT) as status, contextlib.ExitStack() as stack:
        queue = _Queue(folder, list(missing.values()), status)
        setup = None if small else stack.enter_context(_setup(recipe))
        if setup is None:
            queue.work(lambda task, partial: make_shard(folder, task, recipe, partial, status.add))
        else:
            _in_processes(folder, queue, setup, len(missing))


class _Queue:
    """Queue of the shards to be made, in order: each task goes to one of the threads that call `work`."""

    def __init__(self, folder: Path, tasks: list[ShardTask], status: StatusLine):
        self._folder, self.status = folder, status
        self._remaining = collections.deque(tasks)
        self._count, self._done = len(tasks), 0
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def work(self, make: Callable[[ShardTask, Path], None]) -> None:
        """Call `make` with one task after another and the file for its shard, until no task remains.

        Waits for the shards whose locks other processes hold.
        """
        while (taken := self._next()) is not None:
            task, lock = taken
            try:
                make(task, lock.partial)
            finally:
                lock.release()
            self._count_done()

    def _count_done(self) -> None:
        self._done += 1
        self._show()

    def _show(self, *rest: str) -> None:
        done = [f"{self._done} of {self._count} parts done"] if self._count > 1 else []
        self.status.what = ", ".join(["tokenizing", *done, *rest])

    def _next(self) -> tuple[ShardTask, ShardLock] | None:
        pause, longest = POLL
        with self._lock:  # the thread that waits for other processes does so for all
            while self._remaining and not self.ended.is_set():
                refused: ShardLock | None = None
                for _ in range(len(self._remaining)):
                    task = self._remaining.popleft()
                    lock = ShardLock(shard_path(self._folder, task))
                    with contextlib.ExitStack() as stack:
                        stack.callback(lock.release)
                        is_taken = not self._is_made(task) and lock.take()
                        if is_taken and not self._is_made(task):  # by a process that has just released it
                            stack.pop_all()
                            self._show()
                            return task, lock
                    if self._is_made(task):
                        self._count_done()
                    else:
                        self._remaining.append(task)
                        refused = lock
                if refused is not None:
                    self._show(f"waiting for {refused.holder()}")
                    self.ended.wait(pause)
                    pause = min(2 * pause, longest)
            return None

    def _is_made(self, task: ShardTask) -> bool:
        return read_info(shard_path(self._folder, task)) is not None


@contextlib.contextmanager
def _setup(recipe: Recipe) -> Iterator[dict[str, Any] | None]:
    """Write a recipe for worker processes, as JSON and files; None for a tokenizer that is not this library's."""
    with tempfile.TemporaryDirectory() as folder:
        recipe.tokenizer.save(folder)
        template = None if recipe.template is None else dataclasses.asdict(recipe.template)
        try:
            same = dataclasses.replace(recipe, tokenizer=load_tokenizer(folder)).digest == recipe.digest
        except EqxDecodersError:
            same = False
        setup = {"tokenizer": folder, "text_field": recipe.text_field, "template": template}
        setup["special_tokens_in_text"] = recipe.special_tokens_in_text
        setup["media"] = None if recipe.media is None else recipe.media.to_json()
        yield setup if same else None


def _in_processes(folder: Path, queue: _Queue, setup: dict[str, Any], tasks: int) -> None:
    """Make the queue's shards by one process for each core that this one may use."""
    cores = max(1, _cores() // local_process_count())
    count = min(cores, tasks)
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
    threads: list[threading.Thread] = []

    def work(worker: _Worker) -> None:
        try:
            queue.work(worker.make)
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(error)

    with contextlib.ExitStack() as stack:  # which goes on if it is interrupted once more
        stack.callback(lambda: [thread.join() for thread in threads])
        for _ in range(count):
            worker = _Worker({**setup, "folder": str(folder)}, max(1, cores // count), queue.status.add)
            stack.callback(worker.end)
            stack.callback(queue.ended.set)  # first, wherever this ends
            threads.append(threading.Thread(target=work, args=(worker,), daemon=True))
            threads[-1].start()
        for _ in range(count):
            while outcomes.empty():
                time.sleep(POLL[0])  # signals are handled between two pauses
            if (error := outcomes.get()) is not None:
                raise error


class _Worker:
    """Worker process that makes shards (`tokenization_worker`), with so many threads for its tokenizer.

    `done` is called with the number of characters of each batch that is tokenized.
    """

    def __init__(self, setup: dict[str, Any], threads: int, done: Callable[[int], None]):
        settings = {"RAYON_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        settings |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eqx_decoders.data.store.tokenization_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | settings,
            text=True,
            start_new_session=True,  # Ctrl-C on a terminal is for the process that started it
        )
        self._ended, self._done = False, done
        self._send(setup)

    def make(self, task: ShardTask, partial: Path) -> None:
        """Let the process make a shard, and wait for it."""
        self._send({**task_to_json(task), "partial": str(partial)})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match json.loads(line):
                case {"characters": int(count)}:
                    self._done(count)
                case {"made": True}:
                    return
                case {"error": [str(kind), str(text)]}:
                    raise ERRORS.get(kind, EqxDecodersError)(text)
        if not self._ended:
            code, where = self._process.wait(), f"tokenizing {task.source.file}"
            hint = ": was there enough memory?" if code == -9 else ""
            raise EqxDecodersError(f"a process ended with {code} while {where}{hint}. Start again: {KEPT}.")

    def end(self) -> None:
        """End the process at once."""
        self._ended = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):  # what was not sent, or is being read
                if pipe is not None:
                    pipe.close()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `make` notices that the process has ended
            print(json.dumps(message), file=self._process.stdin, flush=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
