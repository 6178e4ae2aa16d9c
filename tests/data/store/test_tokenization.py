"""Tokenization by several processes: complete shards, each made once, also after kills."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eqx_decoders.data.sources import readers
from eqx_decoders.data.sources.sources import Source
from eqx_decoders.data.store import shard_tasks, tokenization
from eqx_decoders.data.store.open_store import open_store
from eqx_decoders.data.store.shard_lock import ShardLock
from eqx_decoders.data.store.shard_tasks import ShardTask, task_from_json, task_to_json
from eqx_decoders.errors import DataError, EqxDecodersError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.commands import ENVIRONMENT, ROOT, write_corpus
from tests.errors import refused
from tests.stores import all_tokens


FIXTURE = ROOT / "tests" / "fixtures" / "chat_llama"
COUNT = 16

# Opens a store with the signal handlers of the programs; prints the shards that this process made.
CHILD = """
import json, pathlib, sys
from eqx_decoders.io.interrupt import Interrupt, Watchdog
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.data.store import tokenization
from eqx_decoders.data.store.open_store import open_store
from eqx_decoders.data.store.shard_lock import ShardLock
folder, run, small, fixture = pathlib.Path(sys.argv[1]), *sys.argv[2:]
made, real = [], tokenization.make_shard
def noted(folder, job, *rest):
    real(folder, job, *rest)
    made.append(job.source.name)
tokenization.SMALL, tokenization.make_shard = int(small), noted
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


def children(process):
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


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
    """Files of texts and conversations; the first is large enough for several parts."""
    rows = [{"text": f"naïve 🙂 text {number} " * 9} for number in range(count)]
    rows[3] = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    rows[-2] = {"prompt": "p", "completion": "c"}
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "b.txt").write_text("a text")
    return [str(folder / name) for name in ("a.jsonl", "b.txt")]


@pytest.mark.slow
def test_several_processes_make_the_shards_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "SMALLEST_PART", 2000)
    template = ChatTemplate(source="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    options = dict(path=records(tmp_path), held_out_fraction=0.2, template=template)
    tokenizer = load_tokenizer(FIXTURE)
    alone = open_store(tmp_path / "alone", tokenizer, cache_dir=tmp_path / "one", **options)
    monkeypatch.setattr(tokenization, "SMALL", 0)
    monkeypatch.setattr(tokenization, "make_shard", None)  # in this process
    several = open_store(tmp_path / "several", tokenizer, cache_dir=tmp_path / "two", **options)
    assert several.shard_count > 4 and all_tokens(several) == all_tokens(alone) and several.has_targets
    assert [several.targets(i).tolist() for i in range(41)] == [alone.targets(i).tolist() for i in range(41)]
    assert several.manifest == alone.manifest
    assert {file.suffix for file in (tmp_path / "two" / "tokens").glob("*/*")} == {".tokens"}


def test_errors_of_processes_are_raised(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": 3}')
    monkeypatch.setattr(tokenization, "SMALL", 0)
    started, real = [], subprocess.Popen

    def noted(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(tokenization.subprocess, "Popen", noted)
    with refused(DataError, "a.jsonl:1", "'text'"):
        open_store(tmp_path / "run", ByteTokenizer(), path=str(tmp_path / "a.jsonl"), cache_dir=tmp_path / "cache")
    assert len(started) == 1 and started[0].poll() is not None
    assert list((tmp_path / "cache" / "tokens").glob("*/*")) == []

    def killed(*args, **kwargs):
        process = noted(*args, **kwargs)
        process.kill()
        return process

    monkeypatch.setattr(tokenization.subprocess, "Popen", killed)
    with refused(EqxDecodersError, "-9", "a.jsonl"):
        open_store(tmp_path / "run", ByteTokenizer(), path=str(tmp_path / "a.jsonl"), cache_dir=tmp_path / "cache")


def test_a_tokenizer_that_cannot_be_sent_works_in_this_process(tmp_path, monkeypatch):
    class Own(ByteTokenizer):
        content_hash = "own"

    write_corpus(tmp_path / "corpus", 3, 20)
    monkeypatch.setattr(tokenization, "SMALL", 0)
    monkeypatch.setattr(tokenization, "_in_processes", None)
    assert len(open_store(tmp_path / "run", Own(), path=str(tmp_path / "corpus"), cache_dir=tmp_path / "cache")) == 3


def test_tasks_in_json():
    for file in (Path("/a/b.txt"), Path("/a/b"), "memory://a.jsonl", "hf://datasets/o/n@c/d:train"):
        place = file if isinstance(file, Path) else shard_tasks.parse_location(file)
        for part in (None, (3, 5)):
            job = ShardTask(Source("name", place, part is None), part, "hash", 7, part and (9, 8))
            again = task_from_json(json.loads(json.dumps(task_to_json(job))))
            assert again == job and again.key == job.key


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_what_is_finished_and_nothing_else(corpus, number, monkeypatch):
    with child(corpus) as process:
        wait_until(lambda: len(shards(corpus)) >= 2)
        workers = children(process)
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
            os.utime(file, (1, 1))  # as some minutes later
    made, real = [], tokenization.make_shard
    monkeypatch.setattr(tokenization, "make_shard", lambda *rest: (real(*rest), made.append(rest[1])))
    options = dict(tokenizer=load_tokenizer(FIXTURE), path=str(corpus / "corpus"))
    again = open_store(corpus / "run", cache_dir=corpus / "cache", **options)
    assert len(made) == COUNT - len(finished)
    assert finished.items() <= shards(corpus).items()
    assert {file.suffix for file in (corpus / "cache" / "tokens").glob("*/*")} == {".tokens"}
    other = open_store(corpus / "other", cache_dir=corpus / "new", **options)
    assert again.content_hash == other.content_hash and all_tokens(again) == all_tokens(other)


def test_a_shard_that_another_process_just_finished_is_not_made_again(tmp_path, monkeypatch):
    write_corpus(tmp_path / "corpus", 3, 20)
    made, real, take = [], tokenization.make_shard, ShardLock.take
    monkeypatch.setattr(tokenization, "make_shard", lambda *rest: (real(*rest), made.append(rest[1].source.name)))
    options = dict(path=str(tmp_path / "corpus"), cache_dir=tmp_path / "cache")

    def late(self):
        monkeypatch.setattr(ShardLock, "take", take)
        open_store(tmp_path / "other", ByteTokenizer(), **options)
        return take(self)

    monkeypatch.setattr(ShardLock, "take", late)
    open_store(tmp_path / "run", ByteTokenizer(), **options)
    assert sorted(made) == ["0.txt", "1.txt", "2.txt"]


def test_a_process_ends_with_its_input():
    command = [sys.executable, "-m", "eqx_decoders.data.store.tokenization_worker"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    words = b'{"tokenizer": "x", "text_field": "x", "template": null, "folder": "x"}\n'
    with subprocess.Popen(command, **pipes) as process:
        out, _ = process.communicate(words, timeout=60)
    assert process.returncode == 0 and out == b""


@pytest.mark.slow
def test_two_runs_at_the_same_time_share_the_work(corpus):
    processes = [child(corpus, run, small=10**9) for run in ("one", "two")]
    one, two = map(result, processes)
    assert sorted(one["made"] + two["made"]) == [f"{number:02}.txt" for number in range(COUNT)]
    assert one["made"] and two["made"] and one["hash"] == two["hash"] and one["tokens"] == two["tokens"]


def test_a_file_that_changes_while_it_is_read_makes_no_shard(corpus, monkeypatch):
    real = shard_tasks.write_shard

    def late(*rest):
        found = real(*rest)
        (corpus / "corpus" / "03.txt").write_text("changed")
        return found

    monkeypatch.setattr(shard_tasks, "write_shard", late)
    options = dict(path=str(corpus / "corpus" / "03.txt"), cache_dir=corpus / "cache")
    with refused(DataError, "03.txt"):
        open_store(corpus / "run", ByteTokenizer(), **options)
    assert not shards(corpus)
    monkeypatch.setattr(shard_tasks, "write_shard", real)
    store = open_store(corpus / "run", ByteTokenizer(), **options)
    assert ByteTokenizer().decode(store[0]) == "changed"


@pytest.mark.parametrize("made", [False, True])
def test_a_partial_file_that_another_host_deleted_is_written_again(corpus, monkeypatch, made):
    real, calls = shard_tasks.write_shard, []

    def stale(partial, *rest):
        calls.append(partial)
        real(partial, *rest)
        if len(calls) < 3:
            if made:
                partial.rename(partial.with_name(partial.name.split(".")[0] + ".tokens"))
            raise OSError(errno.ESTALE, "Stale file handle", str(partial))

    monkeypatch.setattr(shard_tasks, "write_shard", stale)
    options = dict(path=str(corpus / "corpus" / "03.txt"), cache_dir=corpus / "cache")
    assert len(open_store(corpus / "run", ByteTokenizer(), **options)) == 1
    assert len(calls) == (1 if made else 3) and len(shards(corpus)) == 1


def test_a_second_interruption_ends_the_processes_too(corpus, monkeypatch):
    """The second comes while the first process is being ended."""
    started, real, end = [], subprocess.Popen, tokenization._Worker.end

    def noted(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    def interrupted(self):
        monkeypatch.setattr(tokenization._Worker, "end", end)
        self._process.kill()
        raise KeyboardInterrupt("second")

    def first(seconds):
        assert len(started) == 2
        raise KeyboardInterrupt("first")

    monkeypatch.setattr(tokenization, "SMALL", 0)
    monkeypatch.setattr(tokenization, "_cores", lambda: 2)
    monkeypatch.setattr(tokenization.subprocess, "Popen", noted)
    monkeypatch.setattr(tokenization._Worker, "end", interrupted)
    monkeypatch.setattr(tokenization.time, "sleep", first)
    with refused(KeyboardInterrupt, "second"):
        open_store(corpus / "run", ByteTokenizer(), path=str(corpus / "corpus"), cache_dir=corpus / "cache")
    monkeypatch.undo()
    assert len(started) == 2 and all(process.wait(5) for process in started)
    assert {file.suffix for file in (corpus / "cache" / "tokens").glob("*/*")} <= {".tokens"}


@pytest.mark.parametrize("made", [False, True])
def test_a_partial_file_that_another_host_moved_or_deleted(corpus, monkeypatch, made):
    """On a file system whose locks do not work between hosts."""
    real, calls = shard_tasks.write_shard, []

    def taken(partial, *rest):
        real(partial, *rest)
        calls.append(partial)
        if len(calls) <= (1 if made else 2):
            if made:
                partial.rename(partial.with_name(partial.name.split(".")[0] + ".tokens"))
            else:
                partial.unlink()

    monkeypatch.setattr(shard_tasks, "write_shard", taken)
    path = str(corpus / "corpus" / "03.txt")
    store = open_store(corpus / "run", ByteTokenizer(), path=path, cache_dir=corpus / "cache")
    assert len(store) == 1 and len(calls) == (1 if made else 3) and len(shards(corpus)) == 1


def test_processes_are_ended_if_one_cannot_be_started(corpus, monkeypatch):
    started, real = [], subprocess.Popen

    def second(*args, **kwargs):
        if started:
            raise OSError("no more processes")
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(tokenization, "SMALL", 0)
    monkeypatch.setattr(tokenization, "_cores", lambda: 2)
    monkeypatch.setattr(tokenization.subprocess, "Popen", second)
    with refused(OSError, "no more processes"):
        open_store(corpus / "run", ByteTokenizer(), path=str(corpus / "corpus"), cache_dir=corpus / "cache")
    assert len(started) == 1 and started[0].poll() is not None
