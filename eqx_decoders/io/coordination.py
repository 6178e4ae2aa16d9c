"""Agreement between the processes of one run, through the store of JAX's coordinator and never through their devices.

A wait for another process's devices has no end and names nobody. Here only hosts wait, each wait has a limit, and its
error names the processes that did not come.
"""

import collections
import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from eqx_decoders.errors import DataError, EqxDecodersError, check
from eqx_decoders.io.key_value_store import distributed_state, read_value, store_client, write_if_absent
from eqx_decoders.io.status import StatusLine, duration


AHEAD = 2  # steps, or batches of an evaluation, that are computed before the results of the first of them are read
WAIT = 1800.0  # seconds for the others to come where all have the same to do
LONG = 1e6  # seconds where one process may need hours, in a `StatusLine`: as long as it lives

T = TypeVar("T")

_calls: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
_numbers = itertools.count(1)  # of agreements and steps
_point = 0


def all_gather_json(name: str, value: Any = None, *, seconds: int | float = WAIT) -> list[Any]:
    """Return the values (plain JSON) of all processes in order. All must call it, with the same names in one order.

    Raises EqxDecodersError that names the processes which did not come within so many seconds.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return [value]
    _pass_point()
    client, number = store_client(), next(_calls[name])
    key = f"{name}.{number}"
    client.key_value_set(f"{key}/{index}", json.dumps(value))
    try:
        client.wait_at_barrier(key, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        present = {int(path.rpartition("/")[2]) for path, _ in client.key_value_dir_get(f"{key}/")}
        absent = process_names(set(range(count)) - present) or "a process"
        message = f"{absent} did not come to {name!r} within {duration(seconds)}"
        raise EqxDecodersError(f"{message}: look at its log, then start all of them again.") from error
    values = {path.rpartition("/")[2]: json.loads(text) for path, text in client.key_value_dir_get(f"{key}/")}
    if number > 0:  # which all have read, or they would not have come to this one
        client.key_value_delete(f"{name}.{number - 1}/{index}")
    return [values[str(each)] for each in range(count)]


def from_first(name: str, value: Any, *, seconds: int | float = WAIT) -> Any:
    """Return the first process's `value` in all processes."""
    return all_gather_json(name, value if jax.process_index() == 0 else None, seconds=seconds)[0]


def check_same(what: str, hashes: Any, remedy: str) -> None:
    """Raise DataError unless what a process has made of its data is what the first has made. All must call it."""
    rule = f"{what} of process {jax.process_index()} are others than those of the first"
    check(hashes == from_first("made", hashes), f"{rule}: {remedy}.", DataError)


def in_first(name: str, make: Callable[[], T], *, seconds: int | float = WAIT) -> T | None:
    """Call `make()` in the first process alone, and return its result there; None in the others, which wait for it.

    They wait so many seconds. Its error is raised in all: in the others as an EqxDecodersError of the same text.
    """
    result, failure = None, None
    if jax.process_index() == 0:
        try:
            result = make()
        except Exception as error:  # whatever it is: the others would wait in vain
            failure = error
    said = from_first(name, None if failure is None else f"{type(failure).__name__}: {failure}", seconds=seconds)
    if failure is not None:
        raise failure
    check(said is None, f"the first process ({name}): {said}", EqxDecodersError)
    return result


def first_then_all(name: str, make: Callable[[], T], path: Path) -> T:
    """Call `make()` in the first process alone and, as soon as the file `path` that it writes exists, in the others.

    The first may need hours: they wait for as long as it lives.
    """
    result = make() if jax.process_index() == 0 else None
    with StatusLine(f"waiting for the first process ({name})") if jax.process_index() else contextlib.nullcontext():
        all_gather_json(name, seconds=LONG)
    if result is not None:
        return result
    wait_for(path.exists, f"{path} is not seen by process {jax.process_index()}")
    return make()


def wait_for(condition: Callable[[], bool], failure: str, seconds: int | float = 60.0) -> None:
    """Wait until `condition()`: on a network's file system a process sees another's files a bit later.

    Raises ConfigError that begins with `failure` after so many seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        rule = "the processes of a run must have its directory in common, on a file system that they share"
        check(time.monotonic() < end, f"{failure}: {rule}.")
        time.sleep(0.1)


def processes_here() -> int:
    """Count the run's processes on this machine that have given a sign of life, without waiting."""
    if distributed_state().client is None:
        return 1
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        beats = (json.loads(beat)[2] for _, beat in store_client().key_value_dir_get("beat/"))
        return max(1, sum(beat.rpartition(", pid ")[0] == socket.gethostname() for beat in beats))
    return 1


class Stop:
    """Agreement to stop: true in all processes at the same point, after one of them received a request to stop.

    All must call it at the same points, compute something together between two points (except behind an evaluation,
    which another point may follow at once), and read its results before they begin `AHEAD` more such computations. A
    process that is requested to stop announces that it will, `AHEAD + 2` points later. The others read that there, at
    the latest: they can't reach that point without this process, which made the announcement before it went on.
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
        end = read_value(self._key)
        if end is None and self._requested():
            end = write_if_absent(self._key, self._point + 2 + AHEAD)
        self.agreed = end is not None and self._point >= end
        return self.agreed


def current_point() -> int:
    """Return the number of agreements and steps at which this process has been."""
    return _point


def process_names(processes: set[int]) -> str:
    """Return `"process 1"` or `"processes 1, 3"` for messages; an empty text for none."""
    return "" if not processes else f"process{'es' * (len(processes) > 1)} {', '.join(map(str, sorted(processes)))}"


def _pass_point() -> None:
    global _point
    _point = next(_numbers)
