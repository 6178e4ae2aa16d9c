"""Exclusive file locks have one holder at a time, also if files are deleted or replaced meanwhile."""

import errno
import os
import threading
import time

import filelock
import pytest

from eqx_decoders.io import file_lock
from eqx_decoders.io.file_lock import FileLock, own_process, owner_text, read_owner
from tests.errors import assert_names, refused


def open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def test_the_lock_has_one_holder_and_others_wait(tmp_path):
    first, second, order = FileLock(tmp_path / "a" / "lock"), FileLock(tmp_path / "a" / "lock"), []
    assert first.take() and not second.take()
    first.sign()
    assert_names(second.holder(), os.getpid(), own_process()["host"], " 20")

    def wait():
        with second:
            order.append("taken")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    order.append("released")
    first.release()
    thread.join(timeout=10)
    assert order == ["released", "taken"] and (tmp_path / "a" / "lock").exists()


@pytest.mark.parametrize("begin", ["", "\n"], ids=["text", "line break"])
@pytest.mark.parametrize("host", ["h", 300 * "h"], ids=["short", "long"])
def test_owners_of_all_versions_are_read(tmp_path, begin, host):
    content = f'{begin}{{"pid": 3, "host": "{host}", "since": "t"}}\n'
    (tmp_path / "lock").write_text(content)
    lock = FileLock(tmp_path / "lock")
    assert lock.take() and lock.previous == content.encode()
    assert lock.holder() == f"pid 3 on {host} since t"
    lock.sign()
    assert_names(lock.holder(), os.getpid())
    assert owner_text(read_owner(tmp_path / "none")) == "another process"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE], ids=["deleted", "stale"])
def test_opening_is_retried_if_the_file_disappears(tmp_path, monkeypatch, code):
    real, calls, before = os.open, [], open_files()

    def gone(path, *rest):
        calls.append(path)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *rest)

    monkeypatch.setattr(file_lock, "PAUSES", (0, 0))
    monkeypatch.setattr(os, "open", gone)
    times = 2
    lock = FileLock(tmp_path / "lock")
    assert lock.take()
    lock.release()
    times = 99
    calls.clear()
    if code == errno.ENOENT:
        assert not lock.take()
    else:  # a file system that does not come back
        with refused(OSError, lock.path):
            lock.take()
    assert len(calls) == 3 and open_files() == before


def test_a_lock_of_a_deleted_or_replaced_file_is_taken_again(tmp_path, monkeypatch):
    path, real = tmp_path / "lock", filelock.lock_descriptor
    actions = [path.unlink, lambda: (path.unlink(), path.write_text("another's"))]

    def locked(descriptor, **options):
        done = real(descriptor, **options)
        if actions:
            actions.pop()()
        return done

    monkeypatch.setattr(filelock, "lock_descriptor", locked)
    lock, before = FileLock(path), open_files()
    assert lock.take() and not actions and path.exists() and open_files() == before + 1
    path.unlink()
    other = FileLock(path)
    assert other.take()
    lock.release(delete=True)
    assert path.exists(), "it is the other's"
    other.release(delete=True)
    assert not path.exists() and open_files() == before


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOLCK, "no locks"), KeyboardInterrupt()], ids=["no locks", "KeyboardInterrupt"]
)
def test_nothing_stays_open_after_an_error(tmp_path, monkeypatch, error):
    def failing(descriptor, **_):
        raise error

    monkeypatch.setattr(filelock, "lock_descriptor", failing)
    before = open_files()
    with pytest.raises(type(error)):
        FileLock(tmp_path / "lock").take()
    assert open_files() == before


def test_a_readable_file_of_another_user_is_locked(tmp_path, monkeypatch):
    real, path = os.open, tmp_path / "lock"

    def denied(name, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "denied", str(name))
        return real(name, flags, *mode)

    monkeypatch.setattr(file_lock, "PAUSES", ())
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError):  # of the directory: there is no file
        FileLock(path).take()
    path.write_text("")
    lock, before = FileLock(path), open_files()
    assert lock.take() and not FileLock(path).take()
    with pytest.raises(PermissionError):
        lock.sign()
    lock.release()

    def not_for_readers(descriptor, **_):
        raise OSError(errno.EBADF, "bad file descriptor")

    monkeypatch.setattr(filelock, "lock_descriptor", not_for_readers)
    with pytest.raises(PermissionError):
        lock.take()
    assert open_files() == before


def test_a_lock_that_stays_unavailable_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "lock")
    monkeypatch.setattr(file_lock, "PAUSES", (0.0,))
    with refused(FileNotFoundError, tmp_path / "link"):
        FileLock(tmp_path / "link").take()

    def stale(*args):
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(OSError, match="stale"):
        FileLock(tmp_path / "lock").take()


def test_signatures_of_all_hosts_have_one_size(tmp_path, monkeypatch):
    """So that a process that is killed while it signs leaves no rest of another signature."""
    sizes = set()
    for host in ("h", "a-host-of-a-longer-name." * 8):
        monkeypatch.setattr(file_lock.socket, "gethostname", lambda host=host: host)
        lock = FileLock(tmp_path / "lock")
        assert lock.take()
        lock.sign()
        lock.release()
        assert_names(owner_text(read_owner(lock.path)), host)
        sizes.add(lock.path.stat().st_size)
    assert sizes == {file_lock.SIGNED}
