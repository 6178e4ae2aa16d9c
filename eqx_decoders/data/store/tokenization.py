"""Makes the shards of a corpus that are not in the cache yet: by one process for each core, and by all that share it.

A shard is made by whoever claims it first (`data.sources.leases`). Small corpora are tokenised in this process. For
larger ones processes are started that end with this one, however it ends: each hears what to do on its standard input,
and leaves when that is closed.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eqx_decoders.data.media_documents import MediaReader, loaded_reader
from eqx_decoders.data.sources.hub_datasets import HubDataset
from eqx_decoders.data.sources.leases import Leases, beside
from eqx_decoders.data.sources.readers import LONG, PIECE, Part, ReadOptions, kind_of, read_source
from eqx_decoders.data.sources.sources import Entry, Source, as_place, folder_of, is_as_described
from eqx_decoders.data.store.shards import FORMAT, read_info, separators, write_shard
from eqx_decoders.errors import ConfigError, ConversionError, DataError, EqxDecodersError, MissingPackage, check
from eqx_decoders.io.atomic_files import writing_to
from eqx_decoders.io.coordination import processes_here
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer, load_tokenizer


SMALL = 16_000_000  # bytes of sources up to which processes of their own would take longer to start than to work
POLL = 0.05, 1.0  # seconds between two looks at what others are making, at first and at most
ERRORS = {kind.__name__: kind for kind in (ConfigError, ConversionError, DataError, MissingPackage)}  # of processes
KEPT = "the tokens of finished parts are kept"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What tokens depend on beside their source."""

    tokenizer: Tokenizer
    text_field: str
    template: ChatTemplate | None
    media: MediaReader | None = None

    @property
    def digest(self) -> str:
        """Equal for equal recipes."""
        one = self.tokenizer
        template = None if self.template is None else self.template.content_hash
        form = [FORMAT, LONG, PIECE] + ([] if self.media is None else [self.media.digest()])
        return _digest([form, one.content_hash, one.vocab_size, separators(one), one.bos_id, self.text_field, template])

    @property
    def reading(self) -> ReadOptions:
        """What the readers of sources need of it."""
        return ReadOptions(self.text_field, self.tokenizer)


class ShardTask(NamedTuple):
    """A source, or a part of it, whose tokens become one shard.

    size: bytes of the source or part; None: unknown. seen: bytes and time of the last change of the whole source when
    its content was hashed, where they are known. folder: where the source is, if its tokens depend on that.
    """

    source: Source
    part: Part | None
    content_hash: str
    size: int | None
    seen: tuple[int, int] | None = None
    folder: str | None = None

    @property
    def key(self) -> str:
        """The name of the shard, equal for equal content."""
        name = self.source.name if self.source.by_name else None
        place = [] if self.folder is None else [self.folder]
        return _digest([self.content_hash, kind_of(self.source.file), self.part, name, *place])


def job_of(source: Source, entry: Entry, part: Part | None, parts: int, media: MediaReader | None = None) -> ShardTask:
    """The job for a part of a source that `entry` describes, one of so many."""
    folder = folder_of(source.file) if media is not None and media.reads_files else None
    if isinstance(source.file, HubDataset):
        source = source._replace(file=source.file._replace(revision=entry["revision"]))
    size, changed = entry["size"], entry["mtime_ns"]
    seen = None if changed is None else (size, changed)
    place = None if folder is None else str(folder)
    return ShardTask(source, part, entry["hash"], size if size is None else -(-size // parts), seen, place)


def shard_path(folder: Path, job: ShardTask) -> Path:
    """Where the shard of a job stands in the folder of its recipe."""
    return folder / f"{job.key}.tokens"


def make_shards(folder: Path, jobs: Sequence[ShardTask], recipe: Recipe) -> None:
    """Return when the shards of all jobs are in `folder`, which is that of the recipe.

    Raises DataError for sources that cannot be read, and what else their tokens cannot be made by.
    """
    missing = {job.key: job for job in jobs if read_info(shard_path(folder, job)) is None}
    if not missing:
        return
    sizes = [job.size for job in missing.values()]
    small = None not in sizes and sum(size or 0 for size in sizes) <= SMALL
    with StatusLine("tokenising", kept=KEPT) as waiting, Leases(folder) as claims:
        claims.sweep()
        queue = _Queue(folder, list(missing.values()), claims, waiting)
        with contextlib.ExitStack() as stack:
            words = None if small else stack.enter_context(_setup(recipe))
            if words is None:
                for job in queue.jobs():
                    make_shard(folder, job, recipe, claims.partial(job.key), waiting.add)
                    queue.done(job)
            else:
                _in_processes(folder, queue, words, len(missing))


def make_shard(folder: Path, job: ShardTask, recipe: Recipe, partial: Path, done: Callable[[int], None]) -> None:
    """Write one shard to `partial` and move it to its place.

    Raises DataError if the source cannot be read or is another one meanwhile, or if the cache cannot be written.
    """
    target, reading = shard_path(folder, job), recipe.reading._replace(copy=beside(partial))
    with writing_to(folder):
        for again in (True, False):
            try:
                documents = read_source(job.source, reading, job.part)
                write_shard(partial, documents, recipe.tokenizer, recipe.template, done, recipe.media)
                same = is_as_described(job.source.file, job.content_hash, job.seen)
                rule = f"{job.source.file} was changed while it was read"
                check(same, f"{rule}: start again when it stays as it is.", DataError)
                return os.replace(partial, target)
            except FileNotFoundError:  # another machine took the claim, as this one had been asleep for too long
                if read_info(target) is not None:
                    return
                if not again:
                    raise


class _Queue:
    """The shards that are left to be made, in their order; `jobs` gives each to one that asks."""

    def __init__(self, folder: Path, jobs: list[ShardTask], claims: Leases, waiting: StatusLine):
        self._folder, self.claims, self.waiting = folder, claims, waiting
        self._left = collections.deque(jobs)
        self._count, self._done = len(jobs), 0
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def jobs(self) -> Iterator[ShardTask]:
        """One job after another until none is left; those that others have claimed are waited for."""
        while (job := self._next()) is not None:
            try:
                yield job
            finally:
                self.claims.release(job.key)

    def done(self, job: ShardTask) -> None:
        """The shard of the job is there."""
        self._done += 1
        if self._count > 1:
            self.waiting.what = f"tokenising, {self._done} of {self._count} parts done"

    def _next(self) -> ShardTask | None:
        with self._lock:  # who waits for others does so for all
            pause, refused = POLL[0], 0
            while self._left and not self.ended.is_set():
                job = self._left.popleft()
                if self._is_made(job):
                    self.done(job)
                    refused = 0
                elif self.claims.take(job.key):
                    if not self._is_made(job):  # by one who has just released it
                        return job
                    self.claims.release(job.key)
                    self.done(job)
                else:
                    self._left.append(job)
                    refused += 1
                    if refused >= len(self._left):
                        self.ended.wait(pause)
                        pause, refused = min(2 * pause, POLL[1]), 0
            return None

    def _is_made(self, job: ShardTask) -> bool:
        return read_info(shard_path(self._folder, job)) is not None


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _setup(recipe: Recipe) -> Iterator[dict[str, Any] | None]:
    """What a process needs to know of the recipe; None if its tokenizer can't be told: it is none of this library's."""
    with tempfile.TemporaryDirectory() as folder:
        recipe.tokenizer.save(folder)
        template = None if recipe.template is None else dataclasses.asdict(recipe.template)
        try:
            same = dataclasses.replace(recipe, tokenizer=load_tokenizer(folder)).digest == recipe.digest
        except EqxDecodersError:
            same = False
        words = {"tokenizer": folder, "text_field": recipe.text_field, "template": template}
        words["media"] = None if recipe.media is None else recipe.media.words()
        yield words if same else None


def loaded_recipe(words: dict[str, Any]) -> Recipe:
    """The recipe that a process was told."""
    template = None if words["template"] is None else ChatTemplate(**words["template"])
    media = None if words["media"] is None else loaded_reader(words["media"])
    return Recipe(load_tokenizer(words["tokenizer"]), words["text_field"], template, media)


def job_words(job: ShardTask) -> dict[str, Any]:
    """A job in JSON."""
    name, file, by_name = job.source
    return {**job._asdict(), "source": [name, str(file), by_name]}


def loaded_job(words: dict[str, Any]) -> ShardTask:
    """The job of `job_words`."""
    name, file, by_name = words["source"]
    part = None if words["part"] is None else tuple(words["part"])
    seen = None if words["seen"] is None else tuple(words["seen"])
    rest = words["content_hash"], words["size"], seen, words["folder"]
    return ShardTask(Source(name, as_place(file), by_name), part, *rest)


def _in_processes(folder: Path, queue: _Queue, words: dict[str, Any], jobs: int) -> None:
    """Make what is in the queue by one process for each core that this one may use."""
    cores = max(1, _cores() // processes_here())
    count = min(cores, jobs)
    found: list[BaseException] = []
    workers: list[_Worker] = []
    threads: list[threading.Thread] = []

    def work(worker: _Worker) -> None:
        try:
            for job in queue.jobs():
                worker.make(job, queue.claims.partial(job.key), queue.waiting.add)
                queue.done(job)
        except Exception as error:
            found.append(error)
            queue.ended.set()

    try:
        for _ in range(count):
            workers.append(_Worker({**words, "folder": str(folder)}, max(1, cores // count)))
            threads.append(threading.Thread(target=work, args=(workers[-1],), daemon=True))
            threads[-1].start()
        while not found and any(thread.is_alive() for thread in threads):
            time.sleep(POLL[0])  # here signals are heard
    finally:
        queue.ended.set()
        for worker in workers:
            worker.end()
        for thread in threads:
            thread.join()
    if found:
        raise found[0]


class _Worker:
    """A process that makes shards (`tokenization_worker`), with so many threads for its tokenizer."""

    def __init__(self, words: dict[str, Any], threads: int):
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
        self._ended = False
        self._say(words)

    def make(self, job: ShardTask, partial: Path, done: Callable[[int], None]) -> None:
        """Have a shard made."""
        self._say({**job_words(job), "partial": str(partial)})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match json.loads(line):
                case {"characters": int(count)}:
                    done(count)
                case {"made": True}:
                    return
                case {"error": [str(kind), str(text)]}:
                    raise ERRORS.get(kind, EqxDecodersError)(text)
        if not self._ended:
            code, where = self._process.wait(), f"tokenising {job.source.file}"
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

    def _say(self, words: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is seen where it is to answer
            print(json.dumps(words), file=self._process.stdin, flush=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
