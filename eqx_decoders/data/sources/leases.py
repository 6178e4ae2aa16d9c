"""Who does what of a list of work, among all processes that share a directory: each piece once, also after a kill.

A claim is a file that its maker creates exclusively and touches every few seconds as long as it is at work. One whose
process has ended on this machine may be taken over, and so may one of another machine (or one of which that can't be
told) that has not been touched for `LEASE` seconds. Times are those of the file system, which all machines share: a
file of one's own, touched, tells what time it is there.
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
    """The claims of one process in `folder`. Close it (or use `with`) to give up those that are left.

    with Claims(folder) as claims:
        if claims.take("part 7"):
            ...
            claims.release("part 7")

    `partial("part 7")` is a file of this claim alone, to be written to and moved away when it is whole: whoever takes
    the claim over deletes it, and what is `beside` it. A holder that wakes up after that no longer finds it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._word = secrets.token_hex(6)
        self._claim = json.dumps({"word": self._word, **_own_process()}).encode()
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
        """Whether the claim is now this process's; False if another one, or another part of this one, is at work."""
        path = self._path(name)
        if not self._create(path) and not (self._is_dead(path) and self._take_over(path)):
            return False
        with self._lock:
            self._held.add(name)
        return True

    def release(self, name: str) -> None:
        """Give a claim up, and delete what is unfinished."""
        with self._lock:
            self._held.discard(name)
        _delete(self.partial(name))
        if _read(self._path(name)).get("word") == self._word:
            self._path(name).unlink(missing_ok=True)

    def partial(self, name: str) -> Path:
        """Where the holder of the claim writes."""
        return self.folder / f"{name}.{self._word}.partial"

    def sweep(self) -> None:
        """Delete the claims of the dead, and what they left unfinished."""
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
            stream.write(self._claim)
        return True

    def _take_over(self, path: Path) -> bool:
        """Two that find the same dead claim must not both take it: they look again one after the other."""
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
            return False  # released at this moment: whoever wants it tries again

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


def beside(partial: Path) -> Path:
    """A second file of the same claim, for what is not to be moved away."""
    return partial.with_suffix(".beside")


def _delete(partial: Path) -> None:
    for path in (partial, beside(partial)):
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, object]:
    """What a claim says; nothing if it is gone, or being written."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _own_process() -> dict[str, object]:
    return {"machine": _machine(), "pid": os.getpid(), "started": _started(os.getpid())}


@functools.cache
def _machine() -> str:
    """Equal for processes that see each other's ids: those of one start of one machine, and of one container on it."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _is_alive(pid: object, started: object) -> bool | None:
    """Whether a process of this machine lives; None if that cannot be told."""
    if not isinstance(pid, int) or sys.platform == "win32":  # where a signal 0 would end it
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    now = _started(pid)
    return None if now is None or started is None else now == started  # else another one has got its number


def _started(pid: int) -> str | None:
    """When the process began, in Linux's own count."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else rest[18]
