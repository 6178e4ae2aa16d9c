"""What the processes of one run tell each other: through JAX's coordinator, never through their devices.

Waiting for another process's devices has no end and names nobody. Here each wait is of the hosts alone, and ends with
the names of those that did not come. Beside it a thread hears when another process has failed, hangs, or is heard of no
more, and ends this one with the same sentence and exit code: nothing that waits for a lost process would end by itself.

The coordinator is the service that `jax.distributed.initialize` starts in process 0: a small store of keys and values.
"""

import collections
import contextlib
import faulthandler
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import jax

from eqx_decoders.errors import ConfigError, EqxDecodersError, check
from eqx_decoders.io.status import StatusLine, delete_partial, duration, takes_time


VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
AHEAD = 2  # steps, or batches of an evaluation, that are computed before the results of the first of them are read
WAIT = 1800.0  # seconds for the others to come where all have the same to do
LONG = 1e6  # seconds for those of which one may need hours, in a `StatusLine`: as long as it lives
BEAT, SILENT, SUSPECT = 2.0, 30.0, 10.0  # seconds: between two signs of life; without one; without one, after an error
GRACE, LAST = 10.0, 20.0  # seconds: to come to the same error; that the first process waits for the others to leave

T = TypeVar("T")

ON_FAILURE: list[Callable[[], None]] = []  # called before this process ends because another one has failed

_calls: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
_points = itertools.count(1)  # of the program at which this process has been: agreements, steps
_point = 0
_leaving, _lost = threading.Event(), threading.Event()


# --- agreement --------------------------------------------------------------------------------------------------------


def gather(name: str, value: Any = None, *, seconds: int | float = WAIT) -> list[Any]:
    """What each process says (plain JSON), in their order. All of them must ask under the same names, in one order.

    Raises EqxDecodersError with those that did not come within so many seconds.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return [value]
    _pass_point()
    client, number = _client(), next(_calls[name])
    key = f"{name}.{number}"
    client.key_value_set(f"{key}/{index}", json.dumps(value))
    try:
        client.wait_at_barrier(key, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        there = {int(where.rpartition("/")[2]) for where, _ in client.key_value_dir_get(f"{key}/")}
        told = f"{_names(set(range(count)) - there) or 'a process'} did not come to {name!r} within {duration(seconds)}"
        raise EqxDecodersError(f"{told}: look at its log, then start all of them again.") from error
    found = {where.rpartition("/")[2]: json.loads(text) for where, text in client.key_value_dir_get(f"{key}/")}
    if number > 0:  # which all have read, or they would not have come to this one
        client.key_value_delete(f"{name}.{number - 1}/{index}")
    return [found[str(each)] for each in range(count)]


def from_first(name: str, value: Any, *, seconds: int | float = WAIT) -> Any:
    """What the first process says; the others' `value` is not used."""
    return gather(name, value if jax.process_index() == 0 else None, seconds=seconds)[0]


def first_then_all(name: str, make: Callable[[], T], path: Path) -> T:
    """`make()`, by the first process alone and, as soon as there is what it writes to `path`, by the others.

    The first may need hours: they wait for as long as it lives.
    """
    made = make() if jax.process_index() == 0 else None
    with StatusLine(f"waiting for the first process ({name})") if jax.process_index() else contextlib.nullcontext():
        gather(name, seconds=LONG)
    if made is not None:
        return made
    wait_for(path.exists, f"{path} is not seen by process {jax.process_index()}")
    return make()


def wait_for(there: Callable[[], bool], otherwise: str, seconds: int | float = 60.0) -> None:
    """Return when `there()`: on a network's file system what one process has written is seen by another a bit later."""
    end = time.monotonic() + seconds
    while not there():
        rule = "the processes of a run must have its directory in common, on a file system that they share"
        check(time.monotonic() < end, f"{otherwise}: {rule}.")
        time.sleep(0.1)


def processes_here() -> int:
    """How many processes of the run are on this machine, as far as they have given a sign of life; without waiting."""
    if _state().client is None:
        return 1
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        beats = (json.loads(beat)[2] for _, beat in _client().key_value_dir_get("beat/"))
        return max(1, sum(beat.rpartition(", pid ")[0] == socket.gethostname() for beat in beats))
    return 1


class Stop:
    """Whether all processes stop now, because one of them was asked to.

    All must call it at the same points, compute something together between two of them (but for the end of an
    evaluation, behind which there may be another point at once), and read its results before `AHEAD` more such things
    are begun. Who is asked to stop says that it will `AHEAD + 2` points later. The others read that there, at the
    latest: they can't come to it without this one, which had said so before it went on.
    """

    _numbers = itertools.count()

    def __init__(self, requested: Callable[[], bool]):
        self.agreed = False
        self._requested, self._point, self._key = requested, 0, f"stop.{next(self._numbers)}"

    def __call__(self) -> bool:
        if jax.process_count() == 1:
            self.agreed = self.agreed or self._requested()
            return self.agreed
        _pass_point()
        self._point += 1
        told = _read(self._key)
        if told is None and self._requested():
            told = _write_first(self._key, self._point + 2 + AHEAD)
        self.agreed = told is not None and self._point >= told
        return self.agreed


def _pass_point() -> None:
    global _point
    _point = next(_points)


# --- begin and end ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(seconds: int | float = 300) -> Iterator[None]:
    """Around the program of one of several processes: meet the others, and watch over them until all are done.

    They find each other by the three environment variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or as JAX finds them on Cloud TPUs, GKE, SLURM and Open MPI. Raises
    EqxDecodersError with those that are not there within so many seconds. An error that ends one of them ends all.
    """
    if _state().client is None:
        address, count, index = _places(seconds)
        with StatusLine("waiting for the other processes"):
            _meet(address, count, index, seconds)
            # Its handler would take SIGTERM away from the run, which saves and stops by itself.
            jax.config.update("jax_enable_preemption_service", False)
            # JAX aborts after half of its timeout, without a name: later than `_watch` does
            jax.distributed.initialize(
                address, count, index, initialization_timeout=round(seconds) + 30, heartbeat_timeout_seconds=120
            )
    done, hook = threading.Event(), sys.excepthook
    thread = threading.Thread(target=_watch, args=(done,), daemon=True)
    thread.start()
    sys.excepthook = _excepthook
    yield  # no `finally`: an error is the program's or the hook's to `leave` by, with the thread still at work
    gather("end")
    done.set()
    thread.join()
    sys.excepthook = hook


def leave(text: str, code: int) -> None:
    """End this process of several by an error or a signal, after the others were told; nothing for one alone.

    It would otherwise wait for them at its end, and they for it. If another one failed before, its sentence is printed
    and its exit code taken. The first process leaves last: the others talk through it.
    """
    client, index = _state().client, _state().process_id
    if client is None:
        return
    _leaving.set()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        failure = _write_first("failed", {"process": index, "host": socket.gethostname(), "text": text, "code": code})
        code = failure["code"]
        if failure["process"] != index and failure["text"] != text:
            print(f"error: process {failure['process']} ({failure['host']}): {failure['text']}", file=sys.stderr)
        if index > 0:
            client.key_value_set(f"left/{index}", "")
        others, end = _state().num_processes - 1 - failure.get("silent", 0), time.monotonic() + LAST
        while index == 0 and len(client.key_value_dir_get("left/")) < others and time.monotonic() < end:
            time.sleep(0.1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for_verdict() -> None:
    """After an error of the devices, which the loss of another process may have caused: the time to hear of it.

    If there is such a process, this one ends here.
    """
    if _state().client is not None and jax.process_count() > 1:
        _lost.set()
        time.sleep(SUSPECT + 5 * BEAT)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(f"{kind.__name__}: {error}", 1)


def _watch(done: threading.Event) -> None:
    """Give signs of life and look for those of others, until `done`."""
    client, state = _client(), _state()
    own = f"{socket.gethostname()}, pid {os.getpid()}"
    seen: dict[int, _Beat] = {}
    busy = 0
    for number in itertools.count():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            busy += takes_time()  # it may need hours for what it does, while the others wait
            beat = json.dumps([number, [_point, busy], own])
            client.key_value_set(f"beat/{state.process_id}", beat, allow_overwrite=True)
            failure = _read("failed")
            if failure is None and state.process_id == 0:
                beats = client.key_value_dir_get("beat/")
                text = _missed({int(key.rpartition("/")[2]): json.loads(beat) for key, beat in beats}, seen)
                failure = None if text is None else _write_first("failed", text)
            if failure is not None:
                return _hear(failure)
        if done.wait(BEAT):
            return None


class _Beat(NamedTuple):
    """The last sign of life of a process, its place in the program, and since when both are what they are.

    The place is the number of points that it has passed, and of signs of life within things that take time.
    """

    number: int
    alive: float
    place: list[int]
    there: float


def _missed(beats: dict[int, list[Any]], seen: dict[int, _Beat]) -> dict[str, Any] | None:
    """What is told of processes that have given no sign of life for too long, or for which all others wait."""
    now, limit = time.monotonic(), SUSPECT if _lost.is_set() else SILENT
    for who, (number, place, _) in beats.items():
        was = seen.get(who, _Beat(-1, now, [], now))
        alive, there = was.alive if was.number == number else now, was.there if was.place == place else now
        seen[who] = _Beat(number, alive, place, there)
    silent = [who for who, beat in seen.items() if now - beat.alive > limit]
    first, last = (pick(beat.place[0] for beat in seen.values()) for pick in (min, max))
    moved = max(beat.there for beat in seen.values())
    stuck = [who for who, beat in seen.items() if beat.place[0] == first < last and now - moved > WAIT]
    if not silent and not stuck:
        return None
    names = " and ".join(f"process {who} ({beats[who][2]})" for who in sorted(silent or stuck))
    what = f"died, or is heard of no more since {duration(limit)}"
    if not silent:
        what = f"hangs: the others have waited for it for {duration(WAIT)}. Where it is stands in its log"
    remedy = "start all processes again with the same command, and the run goes on from its last checkpoint"
    text = f"{names} {what}: {remedy}."
    told = {"process": 0, "host": socket.gethostname(), "text": text, "code": 1}
    return told | ({"silent": len(silent)} if silent else {"stuck": stuck})


def _hear(failure: dict[str, Any]) -> None:
    """End this process, unless it comes to an end of its own first."""
    end = time.monotonic() + GRACE
    lost = "silent" in failure or "stuck" in failure
    while time.monotonic() < end and not _lost.is_set() and not lost:
        if _leaving.wait(0.1):
            return
    delete_partial()
    if _state().process_id in failure.get("stuck", ()):
        faulthandler.dump_traceback()
    for call in () if lost else ON_FAILURE:
        call()
    by = "" if lost else f"process {failure['process']} ({failure['host']}): "
    print(f"error: {by}{failure['text']}", file=sys.stderr, flush=True)
    leave(failure["text"], failure["code"])


# --- where the others are ---------------------------------------------------------------------------------------------


def _places(seconds: int | float) -> tuple[str, int, int]:
    """The coordinator's address, the number of processes and the number of this one."""
    given = {name: os.environ.get(name) for name in VARIABLES}
    listed = ", ".join(VARIABLES)
    if given["JAX_NUM_PROCESSES"] is None and given["JAX_PROCESS_ID"] is None:
        from jax._src.clusters import ClusterEnv

        try:
            found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, round(seconds))
        except Exception as error:
            raise ConfigError(f"distributed=True, but the cluster is not told: {error}. Set {listed}.") from error
        address, count, index, _ = found
        check(
            None not in (address, count, index),
            f"distributed=True, but JAX finds no cluster here: set {listed} in the environment of each process.",
        )
        return given["JAX_COORDINATOR_ADDRESS"] or str(address), int(str(count)), int(str(index))
    missing = [name for name, value in given.items() if not value]
    check(not missing, f"{' and '.join(missing)} must be set, too: {listed} belong together.")
    address, count, index = (str(value) for value in given.values())
    numbers = (count, index, address.rpartition(":")[2])
    good = all(number.isdecimal() for number in numbers) and int(index) < int(count)
    rule = "must be host:port of process 0, how many there are, and which of them this is, counted from 0"
    check(good, f"{', '.join(f'{name}={value}' for name, value in given.items())}: they {rule}.")
    return address, int(count), int(index)


def _meet(address: str, count: int, index: int, seconds: int | float) -> None:
    """Return when all processes are there. Raises EqxDecodersError with those that are missing.

    JAX's own start ends the process where one is missing, without a word about who it is. So they meet before it, at
    the same address: process 0 listens, the others tell their numbers and hear which are missing.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    missing = _listen(int(port), count, end) if index == 0 else _report(host.strip("[]"), int(port), index, end)
    told = f"{_names(missing)} of {count} did not start, or does not reach {address}, within {duration(seconds)}"
    check(not missing, f"{told}: look at its log, then start all of them again.", EqxDecodersError)


def _listen(port: int, count: int, end: int | float) -> set[int]:
    missing, came = set(range(1, count)), []
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with (
        socket.create_server(("", port), family=family, dualstack_ipv6=both) as server,
        contextlib.ExitStack() as stack,
    ):
        while missing and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):
                other = stack.enter_context(server.accept()[0])
                other.settimeout(5)
                number = int(other.recv(20))
                rule = f"two processes say that they are process {number}: give each another JAX_PROCESS_ID"
                check(number in missing, f"{rule}, from 0 to {count - 1}.", EqxDecodersError)
                missing.remove(number)
                came.append(other)
        for other in came:
            with contextlib.suppress(OSError):
                other.sendall(json.dumps(sorted(missing)).encode() + b"\n")
                other.recv(1)  # nothing: the other side closes first, and the port is free at once
    return missing


def _report(host: str, port: int, index: int, end: int | float) -> set[int]:
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as server:
            server.sendall(str(index).encode())
            server.settimeout(max(1.0, end - time.monotonic()) + 10)
            if answer := server.makefile().readline():
                return set(json.loads(answer))
        time.sleep(0.2)
    return {0}


def _names(processes: set[int]) -> str:
    return "" if not processes else f"process{'es' * (len(processes) > 1)} {', '.join(map(str, sorted(processes)))}"


# --- keys and values --------------------------------------------------------------------------------------------------


def _read(key: str) -> Any:
    """The value of a key; None if there is none."""
    try:
        return json.loads(_client().key_value_try_get(key))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _write_first(key: str, value: Any) -> Any:
    """The value of a key: this one, unless another process has written one before."""
    try:
        _client().key_value_set(key, json.dumps(value))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return _read(key)
    return value


def _state() -> Any:
    """JAX's own: there is no public way to its coordinator's keys."""
    from jax._src.distributed import global_state

    return global_state


def _client() -> Any:
    client = _state().client
    rule = "there are several processes, but jax.distributed.initialize was not called"
    check(client is not None, f"{rule}: use eqx_decoders.training.connected().")
    return client
