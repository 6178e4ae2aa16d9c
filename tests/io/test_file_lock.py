"""File locks have one holder, whose name is in the file, also if the file is deleted or replaced."""

import errno
import os
import sys
import threading
import time

import pytest

from eqx_decoders.errors import MissingPackage
from eqx_decoders.io import file_lock as file_lock_module
from eqx_decoders.io.file_lock import (
    HOLDER_SIZE,
    file_lock,
    holder_text,
    own_process,
    read_holder,
    try_acquire,
    write_holder,
)
from tests.errors import assert_names, refused


def open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def test_the_lock_has_one_holder_and_others_wait(tmp_path):
    path, order = tmp_path / "a" / "lock", []
    first, second = file_lock(path, write_holder), file_lock(path)
    assert try_acquire(first) and not try_acquire(second)
    assert_names(holder_text(read_holder(path)), os.getpid(), own_process()["host"], " 20")

    def wait():
        with second:
            order.append("taken")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    order.append("released")
    first.release()
    thread.join(timeout=10)
    assert order == ["released", "taken"] and path.exists()


def test_a_lock_of_a_deleted_or_replaced_file_is_not_held(tmp_path):
    path, before = tmp_path / "lock", open_files()
    first, other = file_lock(path), file_lock(path)
    for replace in (path.unlink, lambda: (path.unlink(), path.write_text("another's"))):
        assert try_acquire(first)
        replace()
        assert try_acquire(other)
        first.release()
        assert path.exists() and not try_acquire(file_lock(path))
        other.release()
    assert open_files() == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "no locks"), KeyboardInterrupt()], ids=["no locks", "signal"])
def test_files_are_closed_after_an_error(tmp_path, monkeypatch, error):
    """In particular, no lock of another type is used, which would outlive its process."""

    def failing(*_):
        raise error

    monkeypatch.setattr("fcntl.flock", failing)
    before, lock = open_files(), file_lock(tmp_path / "lock")
    with pytest.raises(type(error)):
        try_acquire(lock)
    assert open_files() == before and not lock.is_locked


def test_an_error_of_the_callback_releases_the_lock(tmp_path):
    def failing(descriptor):
        raise ValueError("foreign")

    before = open_files()
    with refused(ValueError, "foreign"):
        try_acquire(file_lock(tmp_path / "lock", failing))
    other = file_lock(tmp_path / "lock")
    assert try_acquire(other)
    other.release()
    assert open_files() == before


def test_a_file_of_another_user_is_an_error(tmp_path, monkeypatch):
    real, path = os.open, tmp_path / "lock"

    def denied(name, flags, *mode, **options):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "denied", str(name))
        return real(name, flags, *mode, **options)

    monkeypatch.setattr(os, "open", denied)
    for content in (None, ""):  # a directory without write permission, then a file
        if content is not None:
            path.write_text(content)
        with refused(PermissionError, path):
            try_acquire(file_lock(path))


def test_owner_records_have_a_fixed_size(tmp_path, monkeypatch):
    """If a process is killed while it writes its name, the file never contains a mixture of two names."""
    sizes, path = set(), tmp_path / "lock"
    assert holder_text(read_holder(path)) == "another process"
    for host in ("h", "a-host-of-a-longer-name." * 8):
        monkeypatch.setattr(file_lock_module.socket, "gethostname", lambda host=host: host)
        with file_lock(path, write_holder):
            assert_names(holder_text(read_holder(path)), host)
        sizes.add(path.stat().st_size)
    assert sizes == {HOLDER_SIZE}


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with refused(MissingPackage, "filelock", "train"):
        file_lock(tmp_path / "lock")
