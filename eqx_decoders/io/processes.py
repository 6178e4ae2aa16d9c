"""Support for runs of several processes: join, agree, watch each other's heartbeats, and leave together.

    with connected():                                     # join; an error of one process ends all of them
        sizes = all_gather_json("sizes", own_size)        # agree
        stop = Stop(lambda: interrupt.requested)          # agree on the step after which all processes stop

Processes communicate through the key-value store of JAX's coordinator, which process 0 runs, and never through their
devices. A collective operation of devices waits without a limit and does not name the process that is missing. Here
every wait has a limit, and its error names the missing processes.

The file is in the order of a run: join (`connected`), agree (`all_gather_json` and what is built on it), watch (the
heartbeat thread), leave (`leave`), and the key-value store that all of them use.
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

from eqx_decoders.errors import ConfigError, DataError, EqxDecodersError, check
from eqx_decoders.io.status import StatusLine, delete_partial, duration, takes_time


VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

MAX_IN_FLIGHT_STEPS = 2  # training steps or evaluation batches that are dispatched before the oldest results are read
BARRIER_TIMEOUT = 1800.0  # seconds; for barriers that all processes reach at about the same time
LONG_TIMEOUT = 1e6  # seconds; for barriers that one process may reach hours after the others, inside a `StatusLine`

HEARTBEAT_INTERVAL = 2.0  # seconds
HEARTBEAT_TIMEOUT = 30.0  # seconds without a heartbeat after which a process counts as dead
SUSPECT_TIMEOUT = 10.0  # the same after an error of the devices, which suggests that a process is dead
GRACE = 10.0  # seconds that a process has to reach an error by itself after another process has failed
LEAVE_TIMEOUT = 20.0  # seconds that process 0 waits for the others to leave

ON_FAILURE: list[Callable[[], None]] = []  # functions to call before this process ends because another one failed

T = TypeVar("T")


# --- join -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(seconds: int | float = 300) -> Iterator[None]:
    """Connect the processes of a run, and watch their heartbeats until all of them have left the block.

    The processes find each other by the environment variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or as JAX detects them on Cloud TPUs, GKE, SLURM and Open MPI. An error in one
    process ends all of them.

    Raises EqxDecodersError with the numbers of the missing processes if not all of them join within `seconds`.
    """
    if _distributed_state().client is None:
        address, count, index = find_cluster(seconds)
        with StatusLine("waiting for the other processes"):
            rendezvous(address, count, index, seconds)
            # JAX's preemption service would take SIGTERM from the run, which saves a checkpoint and stops by itself
            jax.config.update("jax_enable_preemption_service", False)
            # JAX aborts without naming a process after half of its heartbeat timeout: later than `_watch` does
            jax.distributed.initialize(
                address, count, index, initialization_timeout=round(seconds) + 30, heartbeat_timeout_seconds=120
            )
    done, hook = threading.Event(), sys.excepthook
    thread = threading.Thread(target=_watch, args=(done,), daemon=True)
    thread.start()
    sys.excepthook = _excepthook
    yield  # no `finally`: after an error, the program or the hook calls `leave` while the thread is still running
    all_gather_json("end")
    done.set()
    thread.join()
    sys.excepthook = hook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(f"{kind.__name__}: {error}", 1)


def find_cluster(seconds: int | float) -> tuple[str, int, int]:
    """Return the coordinator's address, the number of processes and the index of this process.

    They come from the environment variables, or from the cluster that JAX detects within `seconds`.
    """
    values = {name: os.environ.get(name) for name in VARIABLES}
    listed = ", ".join(VARIABLES)
    if values["JAX_NUM_PROCESSES"] is None and values["JAX_PROCESS_ID"] is None:
        try:
            # private: the public `jax.distributed.initialize` detects the cluster and connects in one call
            from jax._src.clusters import ClusterEnv

            detected = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, round(seconds))
        except Exception as error:
            raise ConfigError(
                f"--distributed (distributed=True): JAX could not detect the cluster: {error}. Set the environment "
                f"variables {listed}."
            ) from error
        address, count, index, _ = detected
        if address is None or count is None or index is None:
            raise ConfigError(
                "--distributed (distributed=True): JAX detects no cluster here. Set the environment variables "
                f"{listed} of each process."
            )
        return values["JAX_COORDINATOR_ADDRESS"] or str(address), int(str(count)), int(str(index))
    missing = [name for name, value in values.items() if not value]
    check(not missing, f"{' and '.join(missing)} must be set as well: {listed} belong together.")
    address, count, index = (str(value) for value in values.values())
    numbers = (count, index, address.rpartition(":")[2])
    valid = all(number.isdecimal() for number in numbers) and int(index) < int(count)
    check(
        valid,
        f"{', '.join(f'{name}={value}' for name, value in values.items())} must be host:port of process 0, the number "
        "of processes, and the index of this process, counted from 0.",
    )
    return address, int(count), int(index)


def rendezvous(address: str, count: int, index: int, seconds: int | float) -> None:
    """Wait until all processes have reached process 0, which listens at the coordinator's address.

    `jax.distributed.initialize` aborts if a process is missing, without naming it. So the processes meet before.

    Raises EqxDecodersError with the numbers of the processes that are missing after `seconds`.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    missing = _listen(int(port), count, end) if index == 0 else _report(host.strip("[]"), int(port), index, end)
    check(
        not missing,
        f"{_process_names(missing)} of {count} did not start, or cannot reach {address}, within {duration(seconds)}. "
        "Read the logs of these processes, then start all processes again.",
        EqxDecodersError,
    )


def _listen(port: int, count: int, end: int | float) -> set[int]:
    """Receive the indices of the other processes until `end`, and send them the set of missing processes."""
    missing, connections = set(range(1, count)), []
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    with (
        socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack) as server,
        contextlib.ExitStack() as stack,
    ):
        while missing and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(5)
                index = int(connection.recv(20))
                check(
                    index in missing,
                    f"JAX_PROCESS_ID={index} is set for two processes, or is not below {count}: give every process "
                    f"its own index from 0 to {count - 1}.",
                    EqxDecodersError,
                )
                missing.remove(index)
                connections.append(connection)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(sorted(missing)).encode() + b"\n")
                connection.recv(1)  # returns when the other side has closed first, which frees the port at once
    return missing


def _report(host: str, port: int, index: int, end: int | float) -> set[int]:
    """Send the index of this process to process 0, and return the set of missing processes."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as server:
            server.sendall(str(index).encode())
            server.settimeout(max(1.0, end - time.monotonic()) + 10)
            if answer := server.makefile().readline():
                return set(json.loads(answer))
        time.sleep(0.2)
    return {0}


# --- agree ------------------------------------------------------------------------------------------------------------


_calls: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)  # calls of `all_gather_json` by name
_numbers = itertools.count(1)  # of the barriers and steps that this process reaches, in any of its threads
_progress = 0  # number of the last one


def all_gather_json(name: str, value: Any = None, *, seconds: int | float = BARRIER_TIMEOUT) -> list[Any]:
    """Return the JSON values of all processes, in the order of their indices. It is a barrier.

    All processes must make the same calls, with the same names, in the same order.

    Raises EqxDecodersError with the numbers of the processes that do not make the call within `seconds`.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return [value]
    _count_progress()
    client, number = _store(), next(_calls[name])
    key = f"{name}.{number}"
    client.key_value_set(f"{key}/{index}", json.dumps(value))
    try:
        client.wait_at_barrier(key, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        present = {int(path.rpartition("/")[2]) for path, _ in client.key_value_dir_get(f"{key}/")}
        missing = _process_names(set(range(count)) - present) or "a process"
        raise EqxDecodersError(
            f"{missing} did not reach the barrier {name!r} within {duration(seconds)}. Read the logs of these "
            "processes, then start all processes again."
        ) from error
    values = {path.rpartition("/")[2]: json.loads(text) for path, text in client.key_value_dir_get(f"{key}/")}
    if number > 0:  # all processes have read the previous values, since they have reached this barrier
        client.key_value_delete(f"{name}.{number - 1}/{index}")
    return [values[str(process)] for process in range(count)]


def broadcast_json(name: str, value: Any, *, seconds: int | float = BARRIER_TIMEOUT) -> Any:
    """Return the JSON `value` of process 0 in all processes. See `all_gather_json`."""
    return all_gather_json(name, value if jax.process_index() == 0 else None, seconds=seconds)[0]


def check_same(what: str, hashes: Any, remedy: str) -> None:
    """Raise DataError unless the hashes of `what` equal those of process 0. All processes must call it."""
    check(
        hashes == broadcast_json("made", hashes),
        f"{what} of process {jax.process_index()} are not equal to {what} of process 0: {remedy}.",
        DataError,
    )


def run_in_process_0(name: str, make: Callable[[], T], *, seconds: int | float = BARRIER_TIMEOUT) -> T | None:
    """Call `make()` in process 0, and return its result there; return None in the other processes, which wait.

    If `make` raises an error, the other processes raise an EqxDecodersError with the same text.
    """
    result, failure = None, None
    if jax.process_index() == 0:
        try:
            result = make()
        except Exception as error:  # any error: otherwise the other processes would wait for nothing
            failure = error
    message = broadcast_json(name, None if failure is None else f"{type(failure).__name__}: {failure}", seconds=seconds)
    if failure is not None:
        raise failure
    check(message is None, f"process 0 failed ({name}): {message}", EqxDecodersError)
    return result


def first_then_all(name: str, make: Callable[[], T], path: Path) -> T:
    """Call `make()` in process 0, which writes the file `path`, then in the other processes, which read that file.

    Process 0 may work for hours. The other processes wait as long as it sends heartbeats.
    """
    result = make() if jax.process_index() == 0 else None
    waiting = StatusLine(f"waiting for process 0 ({name})") if jax.process_index() else contextlib.nullcontext()
    with waiting:
        all_gather_json(name, seconds=LONG_TIMEOUT)
    if result is not None:
        return result
    wait_for(path.exists, f"process {jax.process_index()} does not see {path}")
    return make()


def wait_for(condition: Callable[[], bool], failure: str, seconds: int | float = 60.0) -> None:
    """Wait until `condition()` is true: on network file systems a process sees new files of other hosts with a delay.

    Raises ConfigError, whose message starts with `failure`, after `seconds`.
    """
    end = time.monotonic() + seconds
    while not condition():
        check(
            time.monotonic() < end,
            f"{failure}: all processes of a run need the same run directory, on a file system that they share.",
        )
        time.sleep(0.1)


def local_process_count() -> int:
    """Return the number of the run's processes on this machine that have sent a heartbeat. Does not wait."""
    if _distributed_state().client is None:
        return 1
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        names = [json.loads(heartbeat)[2] for _, heartbeat in _store().key_value_dir_get("heartbeat/")]
        return max(1, sum(name.rpartition(", pid ")[0] == socket.gethostname() for name in names))
    return 1


class Stop:
    """Agreement to stop: true in all processes at the same point, after one of them has received a request to stop.

    All processes must call it at the same points. Between two points they must run a collective computation (except
    after an evaluation, which another point may follow at once), and they must read its results before they start
    `MAX_IN_FLIGHT_STEPS` more computations. A process with a request announces a stop `MAX_IN_FLIGHT_STEPS + 2` points
    later. No other process can reach that point before the announcement, because the computations before it need this
    process.
    """

    _numbers = itertools.count()

    def __init__(self, requested: Callable[[], bool]):
        self.agreed = False
        self._requested, self._point, self._key = requested, 0, f"stop.{next(self._numbers)}"

    def __call__(self) -> bool:
        if jax.process_count() == 1:
            self.agreed = self.agreed or self._requested()
            return self.agreed
        _count_progress()
        self._point += 1
        stop_at = _read_value(self._key)
        if stop_at is None and self._requested():
            stop_at = _write_if_absent(self._key, self._point + 2 + MAX_IN_FLIGHT_STEPS)
        self.agreed = stop_at is not None and self._point >= stop_at
        return self.agreed


def _count_progress() -> None:
    global _progress
    _progress = next(_numbers)


def _process_names(processes: set[int]) -> str:
    """Return `"process 1"` or `"processes 1, 3"`, or an empty string without processes."""
    if not processes:
        return ""
    return f"{'process' if len(processes) == 1 else 'processes'} {', '.join(map(str, sorted(processes)))}"


# --- watch ------------------------------------------------------------------------------------------------------------


_suspect = threading.Event()  # set when an error of the devices suggests that another process is dead


class Heartbeat(NamedTuple):
    """Last heartbeat of a process.

    **Attributes:**

    - `number`: number of the heartbeat.
    - `received_at`: time at which its number changed.
    - `progress`: barriers and steps that the process has reached, and its heartbeats inside of long operations.
    - `progress_at`: time at which its progress changed.
    """

    number: int
    received_at: float
    progress: list[int]
    progress_at: float


def _watch(done: threading.Event) -> None:
    """Send heartbeats and watch those of the other processes until `done`; end this process if another one failed.

    Runs in a thread, because the main thread may wait for a dead process without a limit.
    """
    client, state = _store(), _distributed_state()
    name = f"{socket.gethostname()}, pid {os.getpid()}"
    last: dict[int, Heartbeat] = {}
    busy = 0
    for number in itertools.count():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            busy += takes_time()  # a long operation may take hours while the other processes wait
            heartbeat = json.dumps([number, [_progress, busy], name])
            client.key_value_set(f"heartbeat/{state.process_id}", heartbeat, allow_overwrite=True)
            failure = _read_value("failed")
            if failure is None and state.process_id == 0:
                received = client.key_value_dir_get("heartbeat/")
                failure = find_failure({int(key.rpartition("/")[2]): json.loads(text) for key, text in received}, last)
                failure = None if failure is None else _write_if_absent("failed", failure)
            if failure is not None:
                return _end_with(failure)
        if done.wait(HEARTBEAT_INTERVAL):
            return None


def find_failure(received: dict[int, list[Any]], last: dict[int, Heartbeat]) -> dict[str, Any] | None:
    """Return a description of the failure if a process is dead or hangs, otherwise None.

    A process is dead if it has not sent a heartbeat for `HEARTBEAT_TIMEOUT`. It hangs if all others have waited for it
    for `BARRIER_TIMEOUT` seconds.

    received: number, progress and name of each process. last: last heartbeat of each process, which is updated.
    """
    now, timeout = time.monotonic(), SUSPECT_TIMEOUT if _suspect.is_set() else HEARTBEAT_TIMEOUT
    for process, (number, progress, _) in received.items():
        previous = last.get(process, Heartbeat(-1, now, [], now))
        received_at = previous.received_at if previous.number == number else now
        progress_at = previous.progress_at if previous.progress == progress else now
        last[process] = Heartbeat(number, received_at, progress, progress_at)
    dead = [process for process, heartbeat in last.items() if now - heartbeat.received_at > timeout]
    slowest = min(heartbeat.progress[0] for heartbeat in last.values())
    fastest = max(heartbeat.progress[0] for heartbeat in last.values())
    progress_at = max(heartbeat.progress_at for heartbeat in last.values())
    hanging = []
    if slowest < fastest and now - progress_at > BARRIER_TIMEOUT:
        hanging = [process for process, heartbeat in last.items() if heartbeat.progress[0] == slowest]
    if not dead and not hanging:
        return None
    names = " and ".join(f"process {process} ({received[process][2]})" for process in sorted(dead or hanging))
    what = f"has not responded for {duration(timeout)}"
    if not dead:
        waited = duration(BARRIER_TIMEOUT)
        what = f"hangs: the other processes have waited for it for {waited}. Its log shows where it hangs"
    text = f"{names} {what}. Start all processes again with the same command to resume from the last checkpoint."
    failure = {"process": 0, "host": socket.gethostname(), "text": text, "code": 1}
    return failure | ({"dead": len(dead)} if dead else {"hanging": hanging})


def _end_with(failure: dict[str, Any]) -> None:
    """End this process because another one failed, unless this process ends by itself within `GRACE` seconds."""
    end = time.monotonic() + GRACE
    unresponsive = "dead" in failure or "hanging" in failure
    while time.monotonic() < end and not _suspect.is_set() and not unresponsive:
        if _leaving.wait(0.1):
            return
    delete_partial()
    if _distributed_state().process_id in failure.get("hanging", ()):
        faulthandler.dump_traceback()
    if not unresponsive:
        for function in ON_FAILURE:
            function()
    source = "" if unresponsive else f"process {failure['process']} ({failure['host']}): "
    print(f"error: {source}{failure['text']}", file=sys.stderr, flush=True)
    leave(failure["text"], failure["code"])


def wait_for_failure() -> None:
    """Wait, after an error of the devices, until the heartbeats tell whether a dead process caused it.

    If a process is dead, this process ends here with the message that names it.
    """
    if _distributed_state().client is not None and jax.process_count() > 1:
        _suspect.set()
        time.sleep(SUSPECT_TIMEOUT + 5 * HEARTBEAT_INTERVAL)


# --- leave ------------------------------------------------------------------------------------------------------------


_leaving = threading.Event()  # set when this process has started to end


def leave(text: str, code: int) -> None:
    """End this process of several because of an error or a signal, and tell the others; return if it runs alone.

    Without it, the process would wait for the others at its exit, and they for it. If another process failed earlier,
    print that process's message and exit with its code. Process 0 leaves last, because it runs the coordinator.
    """
    client, index = _distributed_state().client, _distributed_state().process_id
    if client is None:
        return
    _leaving.set()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        own_failure = {"process": index, "host": socket.gethostname(), "text": text, "code": code}
        failure = _write_if_absent("failed", own_failure)
        code = failure["code"]
        if failure["process"] != index and failure["text"] != text:
            print(f"error: process {failure['process']} ({failure['host']}): {failure['text']}", file=sys.stderr)
        if index > 0:
            client.key_value_set(f"left/{index}", "")
        others = _distributed_state().num_processes - 1 - failure.get("dead", 0)
        end = time.monotonic() + LEAVE_TIMEOUT
        while index == 0 and len(client.key_value_dir_get("left/")) < others and time.monotonic() < end:
            time.sleep(0.1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- key-value store --------------------------------------------------------------------------------------------------


def _read_value(key: str) -> Any:
    """Return the value of a key, or None if no process has written it."""
    try:
        return json.loads(_store().key_value_try_get(key))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _write_if_absent(key: str, value: Any) -> Any:
    """Write the value of a key unless a process has written it before, and return the value in the store."""
    try:
        _store().key_value_set(key, json.dumps(value))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return _read_value(key)
    return value


def _distributed_state() -> Any:
    """Return JAX's state of the run's processes."""
    # private: JAX has no public access to the coordinator's key-value store
    from jax._src.distributed import global_state

    return global_state


def _store() -> Any:
    """Return the client of the key-value store. Raises ConfigError if this process is not connected."""
    client = _distributed_state().client
    check(
        client is not None,
        "there are several processes, but jax.distributed.initialize was not called: use "
        "eqx_decoders.training.connected().",
    )
    return client
