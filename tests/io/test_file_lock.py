"""Exclusive locks: by the system's own call, on Windows by a stand-in for its module."""

import os
import sys
import threading
import time
import types

import pytest

from eqx_decoders.io.file_lock import lock_file


class FakeMsvcrt(types.ModuleType):
    """Locks of bytes as `msvcrt.locking` gives them: per file, never waiting."""

    LK_NBLCK = 2

    def __init__(self):
        super().__init__("msvcrt")
        self.owners = {}
        self.bytes = set()

    def locking(self, descriptor, mode, count):
        assert mode == self.LK_NBLCK and count == 1
        self.bytes.add(os.lseek(descriptor, 0, os.SEEK_CUR))
        file = os.fstat(descriptor).st_ino
        if self.owners.setdefault(file, descriptor) != descriptor:
            raise PermissionError(13, "Permission denied")


@pytest.fixture(params=["here", "windows"])
def release(request, monkeypatch):
    """Closes a descriptor, and with it its lock."""
    if request.param == "here":
        return os.close
    fake = FakeMsvcrt()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", fake)

    def close(descriptor):
        file = os.fstat(descriptor).st_ino
        if fake.owners.get(file) == descriptor:
            del fake.owners[file]
        os.close(descriptor)
        assert min(fake.bytes) > 1 << 20, "the content can be read by others"

    return close


def test_one_descriptor_at_a_time_has_the_lock(tmp_path, release):
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    lock_file(first, wait=False)
    with pytest.raises(BlockingIOError):
        lock_file(second, wait=False)
    order = []
    thread = threading.Thread(target=lambda: (lock_file(second, wait=True), order.append("locked")), daemon=True)
    thread.start()
    time.sleep(0.05)
    order.append("released")
    release(first)
    thread.join(timeout=10)
    assert order == ["released", "locked"]
    release(second)
