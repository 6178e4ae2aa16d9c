"""Leases: division of work among the processes that share a directory, each piece once, also after a kill.

A lease is a file that its holder creates exclusively and touches every few seconds while it works. A lease whose
process has ended on this machine may be taken over, and so may one of another machine (or of a process whose state is
unknown) that has not been touched for `LEASE` seconds. Times are those of the file system, which all machines share:
each process touches a clock file of its own to read them.
"""

import contextlib
import functools
import json
import os
import platform
import secrets
import sys
import threading
from pathlib import Path

from eqx_decoders.io.file_lock import locked


LEASE, RENEWED = 90.0, 15.0  # seconds


class Leases:
    """Leases of one process in `folder`. Close it (or use `with`) to release the remaining ones.

    with Leases(folder) as leases:
        if leases.take("part 7"):
            ...
            leases.release("part 7")

    `partial("part 7")` is a file of this lease alone, to be written and moved away when it is complete. A process that
    takes the lease over deletes it and its `copy_path`: a holder that wakes up after that no longer finds it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._word = secrets.token_hex(6)
        self._content = json.dumps({"word": self._word, **_own_process()}).encode()
        self._held: set[str] = set()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Leases":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for name in list(self._held):
            self.release(name)
        self._clock().unlink(missing_ok=True)

    def take(self, name: str) -> bool:
        """Take a lease; return False if another process, or another part of this one, holds it."""
        path = self._path(name)
        if not self._create(path) and not (self._is_dead(path) and self._take_over(path)):
            return False
        with self._lock:
            self._held.add(name)
        return True

    def release(self, name: str) -> None:
        """Release a lease, and delete its unfinished files."""
        with self._lock:
            self._held.discard(name)
        _delete(self.partial(name))
        if _read(self._path(name)).get("word") == self._word:
            self._path(name).unlink(missing_ok=True)

    def partial(self, name: str) -> Path:
        """Return the file that the holder of the lease writes."""
        return self.folder / f"{name}.{self._word}.partial"

    def sweep(self) -> None:
        """Delete the leases of processes that have ended, and their unfinished files."""
        for path in self.folder.glob("*.claim"):
            if self._is_dead(path) and self._take_over(path):
                self.release(path.name.removesuffix(".claim"))
        for clock in self.folder.glob("*.clock"):
            with contextlib.suppress(FileNotFoundError):
                if self._now() - clock.stat().st_mtime > LEASE:
                    clock.unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.claim"

    def _create(self, path: Path) -> bool:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(file, "wb") as stream:
            stream.write(self._content)
        return True

    def _take_over(self, path: Path) -> bool:
        """Take over a dead lease, under a lock: of two processes that find the same one only one must take it."""
        with locked(self.folder / "claims.lock"):
            if path.exists():
                if not self._is_dead(path):
                    return False
                if word := _read(path).get("word"):
                    _delete(path.with_name(f"{path.name.removesuffix('.claim')}.{word}.partial"))
                path.unlink(missing_ok=True)
            return self._create(path)

    def _is_dead(self, path: Path) -> bool:
        who = _read(path)
        alive = _is_alive(who.get("pid"), who.get("started")) if who.get("machine") == _machine() else None
        if alive is not None:
            return not alive  # however long it has been asleep
        try:
            return self._now() - path.stat().st_mtime > LEASE
        except FileNotFoundError:
            return False  # released at this moment: a process that wants it tries again

    def _clock(self) -> Path:
        return self.folder / f"{self._word}.clock"

    def _now(self) -> float:
        self._clock().touch()
        return self._clock().stat().st_mtime

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED):
            with self._lock:
                for name in self._held:
                    with contextlib.suppress(OSError):
                        os.utime(self._path(name))


def copy_path(partial: Path) -> Path:
    """Return a second file of the same lease, for the copy of a remote source."""
    return partial.with_suffix(".beside")


def _delete(partial: Path) -> None:
    for path in (partial, copy_path(partial)):
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, object]:
    """Read the content of a lease; empty if it is gone, or being written."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _own_process() -> dict[str, object]:
    return {"machine": _machine(), "pid": os.getpid(), "started": _started(os.getpid())}


@functools.cache
def _machine() -> str:
    """Return a name that processes share which see each other's ids: in one boot of a machine, and one container."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _is_alive(pid: object, started: object) -> bool | None:
    """Return whether a process of this machine is alive; None if that is unknown."""
    if not isinstance(pid, int) or sys.platform == "win32":  # where a signal 0 would end it
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    now = _started(pid)
    return None if now is None or started is None else now == started  # otherwise another process has got its number


def _started(pid: int) -> str | None:
    """Return when the process was started, in Linux's own unit; None if that is unknown."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else rest[18]
