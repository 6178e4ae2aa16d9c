"""Test locks of shards: a single holder, and removal of files that killed processes left."""

import os
import subprocess
import sys
import threading
import time

import pytest

from eqx_decoders.data.store.tokenize import STALE_AFTER, ShardLock, copy_path, delete_stale_files
from tests.commands import ROOT


def age(*files):
    for file in files:
        os.utime(file, (time.time() - STALE_AFTER - 5,) * 2)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_shard_is_written_by_one_process(tmp_path):
    one, other, of_another = (ShardLock(tmp_path / f"{name}.tokens") for name in "aab")
    assert one.take() and not other.take() and of_another.take()
    one.release()
    assert other.take() and not ShardLock(tmp_path / "a.tokens").take()
    other.release()
    assert names(tmp_path) == ["b.lock"]
    of_another.release()
    assert names(tmp_path) == []


def test_partial_files_are_deleted_with_the_lock(tmp_path):
    (tmp_path / "b.1.partial").write_bytes(b"of another shard")
    lock = ShardLock(tmp_path / "a.tokens")
    assert lock.take()
    lock.partial.write_bytes(b"half")
    copy_path(lock.partial).write_bytes(b"a copy")
    assert len(names(tmp_path)) == 4
    lock.release()
    assert names(tmp_path) == ["b.1.partial"]


HOLDER = """
import pathlib, sys
from eqx_decoders.data.store.tokenize import ShardLock, copy_path
lock = ShardLock(pathlib.Path(sys.argv[1], "a.tokens"))
assert lock.take()
lock.partial.write_bytes(b"half")
copy_path(lock.partial).write_bytes(b"a copy")
print("taken", flush=True)
sys.stdin.read()
"""


def test_lock_of_a_killed_process_is_free_immediately(tmp_path):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], **pipes) as process:
        assert process.stdout.readline() == b"taken\n"
        lock = ShardLock(tmp_path / "a.tokens")
        assert not lock.take()
        assert lock.holder().startswith(f"pid {process.pid} on ")
        age(*tmp_path.iterdir())
        delete_stale_files(tmp_path)
        assert len(names(tmp_path)) == 3, "its files are its own as long as it lives, however long it sleeps"
        process.kill()
        process.wait()
        assert lock.take()
        lock.release()
        delete_stale_files(tmp_path)
        assert names(tmp_path) == []


def test_old_files_of_killed_processes_are_deleted(tmp_path):
    """New files are kept: they may belong to another host, and its lock may not be visible."""
    old = ["a.lock", "a.1.partial", "a.1.copy", "b.lock", "b.tokens", "c.2.partial"]
    fresh = ["d.lock", "d.3.partial", "d.3.copy", "e.4.partial", "e.4.copy", "f.5.partial"]
    for name in (*old, *fresh):
        (tmp_path / name).write_bytes(b"")
    age(*(tmp_path / name for name in old), tmp_path / "e.4.copy", tmp_path / "d.lock")
    delete_stale_files(tmp_path)
    assert names(tmp_path) == sorted([*fresh, "b.tokens"])


def test_lock_file_of_another_user(tmp_path, monkeypatch):
    """The lock cannot be acquired. It counts as held if the files of the shard are recent."""
    path, real = tmp_path / "a.lock", os.open
    path.write_text("another user's")

    def denied(name, flags, *mode, **options):
        if str(name).endswith("a.lock"):
            raise PermissionError(13, "Permission denied", str(name))
        return real(name, flags, *mode, **options)

    monkeypatch.setattr(os, "open", denied)
    lock = ShardLock(tmp_path / "a.tokens")
    assert not lock.take() and lock.holder() == "another process"
    age(path)
    (tmp_path / "a.1.partial").write_bytes(b"being written")
    assert not lock.take()
    age(tmp_path / "a.1.partial")
    assert lock.take()
    delete_stale_files(tmp_path)
    lock.release()
    assert names(tmp_path) == ["a.1.partial", "a.lock"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError):
        lock.take()


def test_lock_has_at_most_one_holder(tmp_path):
    """This also holds if a thread opens the lock file just before another thread deletes it."""
    holders, most, taken = [], [], []

    def work():
        while len(taken) < 300:
            lock = ShardLock(tmp_path / "a.tokens")
            if lock.take():
                holders.append(1)
                most.append(len(holders))
                lock.partial.write_bytes(b"half")
                holders.pop()
                lock.release()
                taken.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1} and names(tmp_path) == []


def test_lock_of_an_unreachable_host_expires(tmp_path):
    """Some file servers never release the locks of a disconnected client."""
    shard = tmp_path / "a.tokens"
    gone, lock = ShardLock(shard), ShardLock(shard)
    assert gone.take()
    gone.partial.write_bytes(b"half")
    assert not lock.take()
    age(*tmp_path.iterdir())
    assert lock.take()
    lock.release()
    gone.release()
    assert names(tmp_path) == []
