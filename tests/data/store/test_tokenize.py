"""Test tokenization by several processes: complete shards, each written once, also after kills."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from eqx_decoders.data.sources import readers
from eqx_decoders.data.store import tokenize
from eqx_decoders.data.store.store import open_store
from eqx_decoders.data.store.tokenize import ShardLock
from eqx_decoders.errors import DataError, EqxDecodersError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.commands import ENVIRONMENT, ROOT, write_corpus
from tests.errors import refused
from tests.stores import all_tokens


FIXTURE = ROOT / "tests" / "fixtures" / "chat_llama"
COUNT = 16

# Opens a store with the signal handlers of the programs, and prints the shards written by this process.
CHILD = """
import json, pathlib, sys
from eqx_decoders.io.interrupt import Interrupt, Watchdog
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.data.store import tokenize
from eqx_decoders.data.store.store import open_store
folder, run, small, fixture = pathlib.Path(sys.argv[1]), *sys.argv[2:]
made, real = [], tokenize.make_shard
def noted(folder, job, *rest):
    real(folder, job, *rest)
    made.append(job.source.name)
tokenize.MAX_BYTES_WITHOUT_WORKERS, tokenize.make_shard = int(small), noted
with Interrupt(at_once=True), Watchdog():
    print("ready", flush=True)
    store = open_store(folder / run, load_tokenizer(fixture), path=str(folder / "corpus"), cache_dir=folder / "cache")
print(json.dumps({"hash": store.content_hash, "tokens": store.counts("train").tokens, "made": made}), flush=True)
"""


def child(folder, run="run", small=0):
    command = [sys.executable, "-c", CHILD, str(folder), run, str(small), str(FIXTURE)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    return subprocess.Popen(command, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, **pipes)


def result(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


def shards(folder):
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cache" / "tokens").glob("*/*.tokens")}


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def wait_until(there, seconds=60):
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.02)
    assert there()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def corpus(tmp_path):
    for number in range(COUNT):
        texts = [f"{number} {line} the quick brown fox jumps over the lazy dog" for line in range(1500)]
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / f"{number:02}.txt").write_text("\n".join(texts))
    return tmp_path


def records(folder, count=40):
    """Return a folder with texts and conversations. The first file is large enough for several parts."""
    rows = [{"text": f"naïve 🙂 text {number} " * 9} for number in range(count)]
    rows[3] = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    rows[-2] = {"prompt": "p", "completion": "c"}
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "b.txt").write_text("a text")
    return [str(folder / name) for name in ("a.jsonl", "b.txt")]


@pytest.mark.slow
def test_several_processes_write_the_same_shards_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MIN_PART_BYTES", 2000)
    template = ChatTemplate(source="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    options = dict(path=records(tmp_path), held_out_fraction=0.2, template=template)
    tokenizer = load_tokenizer(FIXTURE)
    alone = open_store(tmp_path / "alone", tokenizer, cache_dir=tmp_path / "one", **options)
    monkeypatch.setattr(tokenize, "MAX_BYTES_WITHOUT_WORKERS", 0)
    monkeypatch.setattr(tokenize, "make_shard", None)  # in this process
    several = open_store(tmp_path / "several", tokenizer, cache_dir=tmp_path / "two", **options)
    assert several.shard_count > 4 and all_tokens(several) == all_tokens(alone) and several.has_targets
    assert [several.targets(i).tolist() for i in range(41)] == [alone.targets(i).tolist() for i in range(41)]
    assert several.manifest == alone.manifest
    assert {file.suffix for file in (tmp_path / "two" / "tokens").glob("*/*")} == {".tokens"}


@pytest.fixture
def started(monkeypatch):
    """Return the list of started worker processes."""
    processes, real = [], SpawnProcess.start

    def start(self):
        real(self)
        processes.append(self)

    monkeypatch.setattr(tokenize, "MAX_BYTES_WITHOUT_WORKERS", 0)
    monkeypatch.setattr(SpawnProcess, "start", start)
    return processes


def test_errors_of_workers_are_raised(tmp_path, monkeypatch, started):
    (tmp_path / "a.jsonl").write_text('{"text": 3}')
    options = dict(path=str(tmp_path / "a.jsonl"), cache_dir=tmp_path / "cache")
    with refused(DataError, "a.jsonl:1", "'text'"):
        open_store(tmp_path / "run", ByteTokenizer(), **options)
    assert len(started) == 1 and not is_running(started[0].pid)
    assert list((tmp_path / "cache" / "tokens").glob("*/*")) == []
    real = tokenize._Workers.wait
    monkeypatch.setattr(tokenize._Workers, "wait", lambda *rest: (started[-1].kill(), real(*rest))[1])
    with refused(EqxDecodersError, "-9", "a.jsonl", "memory"):
        open_store(tmp_path / "run", ByteTokenizer(), **options)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_killed_worker_stops_the_other_workers(corpus, monkeypatch, started):
    monkeypatch.setattr(tokenize, "cpu_cores", lambda: 2)
    real = tokenize._Workers.wait

    def kill_one(self, running):
        done = real(self, running)
        if done:
            os.kill(started[0].pid, signal.SIGKILL)
        return done

    monkeypatch.setattr(tokenize._Workers, "wait", kill_one)
    with refused(EqxDecodersError, "-9", ".txt"):
        open_store(corpus / "run", ByteTokenizer(), path=str(corpus / "corpus"), cache_dir=corpus / "cache")
    assert len(started) == 2 and not any(is_running(process.pid) for process in started)


def test_unpicklable_tokenizer_is_used_in_the_main_process(tmp_path, monkeypatch):
    class Own(ByteTokenizer):
        content_hash = "own"

    write_corpus(tmp_path / "corpus", 3, 20)
    monkeypatch.setattr(tokenize, "MAX_BYTES_WITHOUT_WORKERS", 0)
    monkeypatch.setattr(tokenize, "_Workers", None)
    assert len(open_store(tmp_path / "run", Own(), path=str(tmp_path / "corpus"), cache_dir=tmp_path / "cache")) == 3


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process_leaves_only_finished_shards(corpus, number, monkeypatch):
    with child(corpus) as process:
        wait_until(lambda: len(shards(corpus)) >= 2)
        workers = workers_of(process)
        assert len(workers) == min(COUNT, len(os.sched_getaffinity(0))) and process.poll() is None
        begun = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        wait_until(lambda: not any(map(is_running, workers)), 2)
        assert time.monotonic() - begun < 4
        assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    if number == signal.SIGTERM:
        assert "Traceback" not in err and "tokens" in err
    finished = shards(corpus)
    assert 2 <= len(finished) < COUNT and not (corpus / "run" / "manifest.json").exists()
    left = {file.suffix for file in (corpus / "cache" / "tokens").glob("*/*")}
    assert number == signal.SIGKILL or left == {".tokens"}
    for file in (corpus / "cache" / "tokens").glob("*/*"):
        if file.suffix != ".tokens":
            os.utime(file, (1, 1))  # make the file appear older
    made, real = [], tokenize.make_shard
    monkeypatch.setattr(tokenize, "make_shard", lambda *rest: (real(*rest), made.append(rest[1])))
    options = dict(tokenizer=load_tokenizer(FIXTURE), path=str(corpus / "corpus"))
    again = open_store(corpus / "run", cache_dir=corpus / "cache", **options)
    assert len(made) == COUNT - len(finished)
    assert finished.items() <= shards(corpus).items()
    assert {file.suffix for file in (corpus / "cache" / "tokens").glob("*/*")} == {".tokens"}
    other = open_store(corpus / "other", cache_dir=corpus / "new", **options)
    assert again.content_hash == other.content_hash and all_tokens(again) == all_tokens(other)


def test_shard_finished_by_another_process_is_not_rewritten(tmp_path, monkeypatch):
    write_corpus(tmp_path / "corpus", 3, 20)
    made, real, take = [], tokenize.make_shard, ShardLock.take
    monkeypatch.setattr(tokenize, "make_shard", lambda *rest: (real(*rest), made.append(rest[1].source.name)))
    options = dict(path=str(tmp_path / "corpus"), cache_dir=tmp_path / "cache")

    def late(self):
        monkeypatch.setattr(ShardLock, "take", take)
        open_store(tmp_path / "other", ByteTokenizer(), **options)
        return take(self)

    monkeypatch.setattr(ShardLock, "take", late)
    open_store(tmp_path / "run", ByteTokenizer(), **options)
    assert sorted(made) == ["0.txt", "1.txt", "2.txt"]


@pytest.mark.slow
def test_two_runs_at_the_same_time_share_the_work(corpus):
    processes = [child(corpus, run, small=10**9) for run in ("one", "two")]
    one, two = map(result, processes)
    assert sorted(one["made"] + two["made"]) == [f"{number:02}.txt" for number in range(COUNT)]
    assert one["made"] and two["made"] and one["hash"] == two["hash"] and one["tokens"] == two["tokens"]


def test_file_that_changes_while_it_is_read_writes_no_shard(corpus, monkeypatch):
    real = tokenize.write_shard

    def late(*rest, **options):
        found = real(*rest, **options)
        (corpus / "corpus" / "03.txt").write_text("changed")
        return found

    monkeypatch.setattr(tokenize, "write_shard", late)
    options = dict(path=str(corpus / "corpus" / "03.txt"), cache_dir=corpus / "cache")
    with refused(DataError, "03.txt"):
        open_store(corpus / "run", ByteTokenizer(), **options)
    assert not shards(corpus)
    monkeypatch.setattr(tokenize, "write_shard", real)
    store = open_store(corpus / "run", ByteTokenizer(), **options)
    assert ByteTokenizer().decode(store[0]) == "changed"


@pytest.mark.parametrize("made", [False, True])
def test_partial_file_deleted_by_another_host_is_rewritten(corpus, monkeypatch, made):
    real, calls = tokenize.write_shard, []

    def stale(partial, *rest, **options):
        calls.append(partial)
        real(partial, *rest, **options)
        if len(calls) < 3:
            if made:
                partial.rename(partial.with_name(partial.name.split(".")[0] + ".tokens"))
            raise OSError(errno.ESTALE, "Stale file handle", str(partial))

    monkeypatch.setattr(tokenize, "write_shard", stale)
    options = dict(path=str(corpus / "corpus" / "03.txt"), cache_dir=corpus / "cache")
    assert len(open_store(corpus / "run", ByteTokenizer(), **options)) == 1
    assert len(calls) == (1 if made else 3) and len(shards(corpus)) == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_interrupt_stops_the_workers_immediately(corpus, monkeypatch, started):
    """This also holds if a second interrupt arrives while the pool is being shut down."""
    monkeypatch.setattr(tokenize, "cpu_cores", lambda: 2)

    def interrupted(text):
        def interrupt(*_, **options):
            raise KeyboardInterrupt(text)

        return interrupt

    monkeypatch.setattr(tokenize, "wait", interrupted("first"))
    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", interrupted("second"))
    begun = time.monotonic()
    with refused(KeyboardInterrupt, "second"):
        open_store(corpus / "run", ByteTokenizer(), path=str(corpus / "corpus"), cache_dir=corpus / "cache")
    for process in started:
        process.join(5)
    assert len(started) == 2 and not any(is_running(process.pid) for process in started)
    assert time.monotonic() - begun < 5
    assert {file.suffix for file in (corpus / "cache" / "tokens").glob("*/*")} <= {".tokens"}


SCRIPT = """
import sys, jax
from eqx_decoders.data.store import tokenize
from eqx_decoders.data.store.store import open_store
from eqx_decoders.io.text.tokenizer import load_tokenizer

def submit(self, task, real=tokenize._Workers.submit):
    future = real(self, task)
    print(self._pool.submit(eval, "'jax' in __import__('sys').modules").result())
    return future

print("script")
tokenize.MAX_BYTES_WITHOUT_WORKERS, tokenize._Workers.submit = 0, submit
folder, tokenizer = sys.argv[1:]
open_store(folder + "/run", load_tokenizer(tokenizer), path=folder + "/corpus/00.txt", cache_dir=folder + "/cache")
"""


def test_workers_import_neither_jax_nor_the_main_module(corpus):
    """Otherwise, a script without `if __name__ == "__main__"` would run again in each worker."""
    script = corpus / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(corpus), str(FIXTURE)]
    out = subprocess.check_output(command, text=True, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert out.split() == ["script", "False"]


@pytest.mark.parametrize("made", [False, True])
def test_partial_file_moved_or_deleted_by_another_host(corpus, monkeypatch, made):
    """Some file systems have no locks between hosts."""
    real, calls = tokenize.write_shard, []

    def taken(partial, *rest, **options):
        real(partial, *rest, **options)
        calls.append(partial)
        if len(calls) <= (1 if made else 2):
            if made:
                partial.rename(partial.with_name(partial.name.split(".")[0] + ".tokens"))
            else:
                partial.unlink()

    monkeypatch.setattr(tokenize, "write_shard", taken)
    path = str(corpus / "corpus" / "03.txt")
    store = open_store(corpus / "run", ByteTokenizer(), path=path, cache_dir=corpus / "cache")
    assert len(store) == 1 and len(calls) == (1 if made else 3) and len(shards(corpus)) == 1


def test_workers_are_stopped_if_a_worker_cannot_start(corpus, monkeypatch, started):
    start = SpawnProcess.start

    def second(self):
        if started:
            raise OSError("no more processes")
        start(self)

    monkeypatch.setattr(tokenize, "cpu_cores", lambda: 2)
    monkeypatch.setattr(SpawnProcess, "start", second)
    with refused(OSError, "no more processes"):
        open_store(corpus / "run", ByteTokenizer(), path=str(corpus / "corpus"), cache_dir=corpus / "cache")
    assert len(started) == 1 and not is_running(started[0].pid)
