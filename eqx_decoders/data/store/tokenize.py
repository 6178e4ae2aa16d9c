"""Tokenization: write the shards of a corpus that are missing in the cache, in parallel and together with other runs.

Each source, or part of a large source, is a task that writes one shard (`shards.py`). A process acquires the lock of a
shard, writes a temporary file, and renames the file when it is complete. So all processes of all runs and hosts that
share a cache can write shards at the same time, and a process that is killed never leaves an incomplete shard.

Small corpora are tokenized in this process, larger corpora in a pool of worker processes. To start quickly, workers
that tokenize only text import neither JAX nor the layers of models.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_sentinels
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import ReadReport
from eqx_decoders.data.sources.hub_datasets import HubDataset
from eqx_decoders.data.sources.readers import Part, read_source, reader_name
from eqx_decoders.data.sources.sources import Entry, Source, folder_of, hash_json, is_as_described
from eqx_decoders.data.store.shards import TokenizationConfig, read_info, write_shard
from eqx_decoders.errors import DataError, EqxDecodersError, check
from eqx_decoders.io.atomic_files import writing_to
from eqx_decoders.io.file_lock import file_lock, holder_text, read_holder, try_acquire, write_holder
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import load_tokenizer


MAX_BYTES_WITHOUT_WORKERS = 16_000_000  # starting workers takes longer than tokenizing a smaller corpus
MIN_POLL_INTERVAL = 0.05  # seconds between attempts to acquire locks that other processes hold, at first
MAX_POLL_INTERVAL = 1.0  # the same after many attempts
STALE_AFTER = 600.0  # seconds without a change after which unlocked temporary files are deleted
FILE_DELETED_ERRORS = (errno.ENOENT, errno.ESTALE)  # another process or host has deleted the file
TEMPORARY_SUFFIXES = (".lock", ".partial", ".copy")  # files that exist only while a shard is written
KEPT = "the tokens of finished parts are kept"
WORKER_EXIT_TIMEOUT = 0.3  # seconds in which worker processes delete their temporary files before they are killed
WORKER_EXIT_CODE = 1  # exit code of a worker that ends because this process ends or fails


# --- tasks ------------------------------------------------------------------------------------------------------------


class ShardTask(NamedTuple):
    """The task of writing one shard from a source, or from a part of a source.

    **Fields:**

    - `part`: range of the source (see `readers`); None: the complete source.
    - `content_hash`: hash of the content of the complete source.
    - `size`: number of bytes of the source or part; None: unknown.
    - `seen`: size and modification time of the complete source when its content was hashed; None: unknown.
    - `folder`: directory of the source if the tokens depend on the directory; otherwise None.
    """

    source: Source
    part: Part | None
    content_hash: str
    size: int | None
    seen: tuple[int, int] | None = None
    folder: str | None = None

    @property
    def key(self) -> str:
        """Name of the shard: a hash of everything in the source that determines the tokens."""
        name = self.source.name if self.source.by_name else None
        folder = [] if self.folder is None else [self.folder]
        return hash_json([self.content_hash, reader_name(self.source.file), self.part, name, *folder])


def make_task(
    source: Source, entry: Entry, part: Part | None, parts: int, media: MediaReader | None = None
) -> ShardTask:
    """Return the task for a part of a source.

    **Arguments:**

    - `entry`: entry of the source in the manifest (see `describe_sources`).
    - `parts`: number of parts of the source.
    - `media`: reader of the media files in documents.
    """
    folder = folder_of(source.file) if media is not None and media.reads_files else None
    if isinstance(source.file, HubDataset):
        source = source._replace(file=source.file._replace(revision=entry["revision"]))
    size, changed = entry["size"], entry["mtime_ns"]
    seen = None if changed is None else (size, changed)
    size = size if size is None else -(-size // parts)
    return ShardTask(source, part, entry["hash"], size, seen, None if folder is None else str(folder))


def shard_path(folder: Path, task: ShardTask) -> Path:
    """Return the path of a task's shard in the folder of its tokenization config."""
    return folder / f"{task.key}.tokens"


def tokenize(
    folder: Path, tasks: Sequence[ShardTask], config: TokenizationConfig, *, max_workers: int | None = None
) -> None:
    """Write the missing shards of all tasks to `folder`, and wait for shards that other processes are writing.

    `max_workers`: maximum number of worker processes; None: one per CPU core.

    Raises DataError if a source cannot be read. Errors of the tokenizer and the chat template are not caught.
    """
    missing = {task.key: task for task in tasks if read_info(shard_path(folder, task)) is None}
    if not missing:
        return
    sizes = [task.size for task in missing.values()]
    is_small = None not in sizes and sum(size or 0 for size in sizes) <= MAX_BYTES_WITHOUT_WORKERS
    folder.mkdir(parents=True, exist_ok=True)
    delete_stale_files(folder)
    workers = min(max_workers or cpu_cores(), len(missing))
    with StatusLine("tokenizing", remains=KEPT) as status, contextlib.ExitStack() as stack:
        settings = None if is_small else stack.enter_context(_worker_settings(folder, config))
        if settings is None:
            _run(list(missing.values()), _InThisProcess(folder, config, status), status)
        else:
            _run(list(missing.values()), stack.enter_context(_Workers(settings, workers, status)), status)


def _run(tasks: Sequence[ShardTask], executor: "_InThisProcess | _Workers", status: StatusLine) -> None:
    """Run all tasks. If another process holds the lock of a shard, the task is tried again later."""
    waiting, locked = collections.deque(tasks), list[ShardTask]()
    running: dict[Future[str | None], ShardTask] = {}
    finished, holder = 0, ""
    pause = MIN_POLL_INTERVAL
    while waiting or running or locked:
        done = f", {finished} of {len(tasks)} parts done" if len(tasks) > 1 else ""
        status.what = f"tokenizing{done}"
        if not waiting and not running:
            status.what += f", waiting for {holder}"
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_INTERVAL)
            waiting, locked = collections.deque(locked), []
        while waiting and len(running) < executor.workers:
            task = waiting.popleft()
            running[executor.submit(task)] = task
        for future in executor.wait(running):
            task, held_by = running[future], future.result()
            del running[future]
            if held_by is None:
                finished, pause = finished + 1, MIN_POLL_INTERVAL
            else:
                locked.append(task)
                holder = held_by


class _InThisProcess:
    """Executor that runs each task when it is submitted."""

    workers = 1

    def __init__(self, folder: Path, config: TokenizationConfig, status: StatusLine):
        self._folder, self._config, self._status = folder, config, status

    def submit(self, task: ShardTask) -> Future[str | None]:
        future: Future[str | None] = Future()
        future.set_result(tokenize_shard(self._folder, task, self._config, self._status.add))
        return future

    def wait(self, running: dict[Future[str | None], ShardTask]) -> list[Future[str | None]]:
        return list(running)


# --- one shard --------------------------------------------------------------------------------------------------------


def tokenize_shard(
    folder: Path, task: ShardTask, config: TokenizationConfig, progress: Callable[[int], None]
) -> str | None:
    """Write the shard of a task if it is missing.

    Returns None if the shard is complete, or the name of another process that is writing the shard.
    """
    path = shard_path(folder, task)
    lock = ShardLock(path)
    try:
        if read_info(path) is None:
            if not lock.take():
                return lock.holder()
            if read_info(path) is None:  # otherwise another process has just finished it
                make_shard(folder, task, config, lock.partial, progress)
    finally:
        lock.release()
    return None


def make_shard(
    folder: Path, task: ShardTask, config: TokenizationConfig, partial: Path, progress: Callable[[int], None]
) -> None:
    """Write a shard to the temporary file `partial`, and rename the file when it is complete.

    Raises DataError if the source cannot be read or has changed, or if the cache cannot be written.
    """
    path = shard_path(folder, task)
    with writing_to(folder):
        for retries in (2, 1, 0):
            try:
                report = ReadReport()
                options = config.read_options(report, copy_path(partial))
                documents = read_source(task.source, options, task.part)
                write_shard(partial, documents, config, report=report, progress=progress)
                check(
                    is_as_described(task.source.file, task.content_hash, task.seen),
                    f"{task.source.file} was changed while it was read. Start again when the file is complete.",
                    DataError,
                )
                if read_info(path) is None:  # otherwise another host has written it, and processes may have mapped it
                    os.replace(partial, path)
                return
            except OSError as error:
                if read_info(path) is not None:  # written by another host, where this lock has no effect
                    return
                if error.errno not in FILE_DELETED_ERRORS or not retries:
                    raise


class ShardLock:
    """Inter-process lock for writing one shard. The lock file exists only while the lock is held.

    The lock only avoids duplicate work. If locks have no effect on other hosts, a shard is written twice. This is safe.

    **Attributes:**

    - `partial`: path of the temporary file to which the holder of the lock writes the shard. `copy_path(partial)` is
      the path for the copy of a remote source.
    - `held`: all locks of this process that are held or being acquired.
    """

    held: set["ShardLock"] = set()  # noqa: RUF012

    def __init__(self, shard: Path):
        self._path = shard.with_suffix(".lock")
        self._lock = file_lock(self._path, on_acquired=write_holder)
        self.partial = shard.with_name(f"{shard.stem}.{secrets.token_hex(6)}.partial")

    def take(self) -> bool:
        """Try to acquire the lock without waiting; return whether the shard may be written.

        Some locks can never be acquired (the lock of another user, or of a host that has crashed). So the result is
        also True if the temporary files of the shard have not changed for `STALE_AFTER` seconds. Writing a shard twice
        is safe.
        """
        folder = self._path.parent
        self.held.add(self)
        try:
            if try_acquire(self._lock):
                return True
        except OSError as error:
            is_of_other_user = isinstance(error, PermissionError) and os.access(folder, os.W_OK)
            if error.errno not in FILE_DELETED_ERRORS and not is_of_other_user:
                raise
        return _are_old(_temporary_files(folder, self._path.stem))

    def holder(self) -> str:
        """Return the name of the process that holds the lock."""
        return holder_text(read_holder(self._path))

    def release(self) -> None:
        """Release the lock, and delete the lock file and the temporary files."""
        _delete(self.partial, copy_path(self.partial))
        if self._lock.is_locked:
            _delete(self._path)  # before the release, so that a process that has opened the file can detect this
        self._lock.release()
        self.held.discard(self)


def copy_path(partial: Path) -> Path:
    """Return the path for the copy of a remote source, from which the shard `partial` is written."""
    return partial.with_suffix(".copy")


def delete_stale_files(folder: Path) -> None:
    """Delete temporary files of processes that were killed: old files of shards that are not locked."""
    shards: dict[str, list[Path]] = {}
    for file in _temporary_files(folder):
        shards.setdefault(file.name.partition(".")[0], []).append(file)
    for name, files in shards.items():
        path = folder / f"{name}.lock"
        lock = file_lock(path)
        with contextlib.suppress(OSError):  # files of another user
            if _are_old(files) and try_acquire(lock):
                _delete(*files, path)
                lock.release()


def _temporary_files(folder: Path, shard: str = "") -> list[Path]:
    """Return the temporary files in a folder, of all shards or of the shard with this name."""
    names = [name for name in os.listdir(folder) if name.endswith(TEMPORARY_SUFFIXES) and ".documents." not in name]
    return [folder / name for name in names if not shard or name.partition(".")[0] == shard]


def _are_old(files: list[Path]) -> bool:
    """Return whether at least one file exists, and no file has changed in the last `STALE_AFTER` seconds."""
    newest = None
    for file in files:
        with contextlib.suppress(OSError):  # the file has just been deleted
            newest = max(newest or 0.0, file.stat().st_mtime)
    return newest is not None and time.time() - newest > STALE_AFTER


def _delete(*files: Path) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # the file of another user, or already deleted by another host
            file.unlink(missing_ok=True)


# --- worker processes -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _worker_settings(folder: Path, config: TokenizationConfig) -> Iterator[dict[str, Any] | None]:
    """Yield the settings of worker processes, or None if workers cannot load the tokenizer.

    Workers can load all tokenizers of this library, but not a custom class.
    """
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        config.tokenizer.save(tokenizer_folder)
        try:
            loaded = dataclasses.replace(config, tokenizer=load_tokenizer(tokenizer_folder))
        except EqxDecodersError:
            loaded = None
        settings = {
            "folder": folder,
            "tokenizer_folder": tokenizer_folder,
            "text_field": config.text_field,
            "template": None if config.template is None else dataclasses.asdict(config.template),
            "media": None if config.media is None else config.media.to_json(),
            "special_tokens_in_text": config.special_tokens_in_text,
        }
        yield settings if loaded is not None and loaded.digest == config.digest else None


class _Workers:
    """Pool of worker processes, which end when this process ends for any reason.

    Each worker waits on a pipe. The other end is open only in this process and is closed when this process ends.
    """

    def __init__(self, settings: dict[str, Any], workers: int, status: StatusLine):
        context = multiprocessing.get_context("spawn")
        self.workers, self._status = workers, status
        self._characters, self._shown = context.Value("q"), 0  # characters that all workers have tokenized
        parent_alive, self._alive = context.Pipe(duplex=False)
        threads = max(1, cpu_cores() // workers)
        arguments = (settings, self._characters, parent_alive, threads)
        self._pool = ProcessPoolExecutor(workers, context, _start_worker, arguments)
        self._others = set(multiprocessing.active_children())
        self._processes: set[Any] = set()

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._end_workers()
        self._pool.shutdown(cancel_futures=True)
        self._alive.close()
        del self._pool, self._characters  # frees their semaphores, also if an error refers to this object

    def _end_workers(self) -> None:
        """Let the workers delete their temporary files and end. Kill workers that do not end in time."""
        self._alive.close()
        running = {process.sentinel: process for process in self._processes}
        end = time.monotonic() + WORKER_EXIT_TIMEOUT
        while running and (remaining := end - time.monotonic()) > 0:
            for sentinel in wait_for_sentinels(list(running), remaining):
                del running[sentinel]
        for process in running.values():
            self._processes.discard(process)
            process.kill()

    def submit(self, task: ShardTask) -> Future[str | None]:
        """Start a task, in a new worker process if all workers are busy."""
        with _ready_to_spawn():
            future = self._pool.submit(_tokenize_in_worker, task)
        self._processes |= set(multiprocessing.active_children()) - self._others
        return future

    def wait(self, running: dict[Future[str | None], ShardTask]) -> set[Future[str | None]]:
        """Return the tasks that finish within 0.1 s. Raises EqxDecodersError if a worker was killed."""
        done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
        characters = self._characters.get_obj().value  # without its lock, which a killed worker may hold
        self._status.add(characters - self._shown)
        self._shown = characters
        if any(isinstance(future.exception(), BrokenProcessPool) for future in done):
            self._end_workers()
            self._pool.shutdown()  # reads the exit codes
            codes = [process.exitcode for process in self._processes]
            code = next((code for code in codes if code not in (None, 0, WORKER_EXIT_CODE)), None)
            files = ", ".join(dict.fromkeys(str(task.source.file) for task in running.values()))
            hint = " Was there enough memory?" if code == -signal.SIGKILL else ""
            raise EqxDecodersError(
                f"a worker process ended with exit code {code} while tokenizing {files}.{hint} Start again; {KEPT}."
            )
        return done


@contextlib.contextmanager
def _ready_to_spawn() -> Iterator[None]:
    """Hide the main module, and block SIGINT and SIGTERM, while worker processes are started.

    multiprocessing would import the main module in each worker: a script without `if __name__ == "__main__"` would run
    again, and the programs of this library would import JAX. Workers inherit the blocked signals: Ctrl-C on a terminal
    and many cluster managers send a signal to all processes, but only this process must handle it. A signal that
    arrives during this block is delivered after the block.
    """
    main, mask = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_settings: dict[str, Any] = {}  # in a worker process: the arguments of `_worker_config`
_characters: Any = None  # in a worker process: the shared counter


def _start_worker(settings: dict[str, Any], characters: Any, parent_alive: Any, threads: int) -> None:
    """Initialize a worker process."""
    global _characters
    _settings.update(settings)
    _characters = characters
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
    os.environ["JAX_PLATFORMS"] = "cpu"  # for readers of media, which use JAX
    threading.Thread(target=_end_with_parent, args=(parent_alive,), daemon=True).start()


@functools.cache
def _worker_config() -> TokenizationConfig:
    """Load the tokenization config in a worker process."""
    media = None
    if _settings["media"] is not None:
        from eqx_decoders.data.media_documents import reader_from_json  # imports JAX, which texts do not need

        media = reader_from_json(_settings["media"])
    return TokenizationConfig(
        load_tokenizer(_settings["tokenizer_folder"]),
        _settings["text_field"],
        None if _settings["template"] is None else ChatTemplate(**_settings["template"]),
        media,
        _settings["special_tokens_in_text"],
    )


def _tokenize_in_worker(task: ShardTask) -> str | None:
    try:
        return tokenize_shard(_settings["folder"], task, _worker_config(), _add_progress)
    except EqxDecodersError:
        raise
    except Exception as error:
        raise DataError(f"{task.source.file} cannot be tokenized: {type(error).__name__}: {error}.") from error


def _add_progress(characters: int) -> None:
    with _characters.get_lock():
        _characters.value += characters


def _end_with_parent(parent_alive: Any) -> None:
    """Wait until the parent process closes its pipe or ends; then delete temporary files and end this process."""
    with contextlib.suppress(EOFError, OSError):
        parent_alive.recv_bytes()
    for lock in list(ShardLock.held):
        lock.release()
    os._exit(WORKER_EXIT_CODE)


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
