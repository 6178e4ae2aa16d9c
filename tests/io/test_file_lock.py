"""Exclusive locks of files: one holder at a time, whatever happens to the files meanwhile."""

import errno
import os
import threading
import time

import filelock
import pytest

from eqx_decoders.io import file_lock
from eqx_decoders.io.file_lock import FileLock, own_process, owner_text, read_owner


def open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def test_one_at_a_time_has_the_lock_and_others_wait(tmp_path):
    first, second, order = FileLock(tmp_path / "a" / "lock"), FileLock(tmp_path / "a" / "lock"), []
    assert first.take() and not second.take()
    first.sign()
    assert second.holder().startswith(f"pid {os.getpid()} on {own_process()['host']} since 20")

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


@pytest.mark.parametrize("begin", ["", "\n"])
@pytest.mark.parametrize("host", ["h", 300 * "h"])
def test_owners_of_all_versions_are_read(tmp_path, begin, host):
    content = f'{begin}{{"pid": 3, "host": "{host}", "since": "t"}}\n'
    (tmp_path / "lock").write_text(content)
    lock = FileLock(tmp_path / "lock")
    assert lock.take() and lock.previous == content.encode() and lock.holder() == f"pid 3 on {host} since t"
    lock.sign()
    assert f"pid {os.getpid()} " in lock.holder() and owner_text(read_owner(tmp_path / "none")) == "another process"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_file_that_goes_while_it_is_looked_at_is_opened_once_more(tmp_path, monkeypatch, code):
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
    times, calls[:] = 99, []
    if code == errno.ENOENT:
        assert not lock.take()
    else:  # a file system that does not come back
        with pytest.raises(OSError, match="lock"):
            lock.take()
    assert len(calls) == 3 and open_files() == before


def test_a_lock_on_a_file_that_was_deleted_or_replaced_is_none(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), KeyboardInterrupt()])
def test_nothing_stays_open_after_an_error(tmp_path, monkeypatch, error):
    def failing(descriptor, **_):
        raise error

    monkeypatch.setattr(filelock, "lock_descriptor", failing)
    before = open_files()
    with pytest.raises(type(error)):
        FileLock(tmp_path / "lock").take()
    assert open_files() == before


def test_another_user_s_file_is_locked_where_it_may_be_read(tmp_path, monkeypatch):
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


def test_a_lock_that_is_gone_for_good_is_an_error_and_no_wait(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "lock")
    monkeypatch.setattr(file_lock, "PAUSES", (0.0,))
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "link").take()

    def stale(*args):
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(OSError, match="stale"):
        FileLock(tmp_path / "lock").take()


def test_signatures_of_all_hosts_have_one_size(tmp_path, monkeypatch):
    """So that a process which is killed while it signs leaves no end of another's."""
    sizes = set()
    for host in ("h", "a-host-of-a-longer-name." * 8):
        monkeypatch.setattr(file_lock.socket, "gethostname", lambda host=host: host)
        lock = FileLock(tmp_path / "lock")
        assert lock.take()
        lock.sign()
        lock.release()
        assert f" on {host} since" in owner_text(read_owner(lock.path))
        sizes.add(lock.path.stat().st_size)
    assert sizes == {file_lock.SIGNED}
