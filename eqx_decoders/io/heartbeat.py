"""Heartbeats between the processes of one run: none waits forever for another one that has failed, hangs or is lost.

A thread of each process gives signs of life, watches those of the others, and ends its process with their message and
exit code: nothing that waits for a lost process would end by itself.
"""

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
from types import TracebackType
from typing import Any, NamedTuple

import jax

from eqx_decoders.io.coordination import WAIT, all_gather_json, current_point
from eqx_decoders.io.key_value_store import distributed_state, read_value, store_client, write_if_absent
from eqx_decoders.io.rendezvous import find_cluster, meet
from eqx_decoders.io.shutdown import leave, leaving
from eqx_decoders.io.status import StatusLine, delete_partial, duration, takes_time


BEAT, SILENT, SUSPECT = 2.0, 30.0, 10.0  # seconds: between two signs of life; without one; without one, after an error
GRACE = 10.0  # seconds to come to the same error as another process

ON_FAILURE: list[Callable[[], None]] = []  # called before this process ends because another one has failed

_lost = threading.Event()  # set when an error suggests that another process is lost


@contextlib.contextmanager
def connected(seconds: int | float = 300) -> Iterator[None]:
    """Join the other processes of a run, and watch over them until all have left the block.

    They find each other by the three environment variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or as JAX finds them on Cloud TPUs, GKE, SLURM and Open MPI. Raises
    EqxDecodersError that names the missing ones after so many seconds. An error that ends one of them ends all.
    """
    if distributed_state().client is None:
        address, count, index = find_cluster(seconds)
        with StatusLine("waiting for the other processes"):
            meet(address, count, index, seconds)
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
    all_gather_json("end")
    done.set()
    thread.join()
    sys.excepthook = hook


def wait_for_verdict() -> None:
    """Wait, after an error of the devices, for the news that another process was lost and caused it.

    If there is such a process, this one ends here.
    """
    if distributed_state().client is not None and jax.process_count() > 1:
        _lost.set()
        time.sleep(SUSPECT + 5 * BEAT)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(f"{kind.__name__}: {error}", 1)


def _watch(done: threading.Event) -> None:
    """Give signs of life and watch the other processes' ones, until `done`."""
    client, state = store_client(), distributed_state()
    name = f"{socket.gethostname()}, pid {os.getpid()}"
    seen: dict[int, _Beat] = {}
    busy = 0
    for number in itertools.count():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            busy += takes_time()  # it may need hours for what it does, while the others wait
            beat = json.dumps([number, [current_point(), busy], name])
            client.key_value_set(f"beat/{state.process_id}", beat, allow_overwrite=True)
            failure = read_value("failed")
            if failure is None and state.process_id == 0:
                beats = client.key_value_dir_get("beat/")
                lost = find_lost({int(key.rpartition("/")[2]): json.loads(beat) for key, beat in beats}, seen)
                failure = None if lost is None else write_if_absent("failed", lost)
            if failure is not None:
                return _end_with(failure)
        if done.wait(BEAT):
            return None


class _Beat(NamedTuple):
    """Last sign of life of a process, with its progress and the times at which both changed.

    The progress is the number of points that it has passed, and of signs of life within things that take time.
    """

    number: int
    alive_at: float
    progress: list[int]
    moved_at: float


def find_lost(beats: dict[int, list[Any]], seen: dict[int, _Beat]) -> dict[str, Any] | None:
    """Return the failure of processes that were silent for too long, or for which all others wait; None for none.

    beats: number, progress and name of each process. seen: its last sign of life, which is updated.
    """
    now, limit = time.monotonic(), SUSPECT if _lost.is_set() else SILENT
    for process, (number, progress, _) in beats.items():
        last = seen.get(process, _Beat(-1, now, [], now))
        alive_at = last.alive_at if last.number == number else now
        moved_at = last.moved_at if last.progress == progress else now
        seen[process] = _Beat(number, alive_at, progress, moved_at)
    silent = [process for process, beat in seen.items() if now - beat.alive_at > limit]
    slowest, fastest = (pick(beat.progress[0] for beat in seen.values()) for pick in (min, max))
    moved_at = max(beat.moved_at for beat in seen.values())
    stuck = [
        process for process, beat in seen.items() if beat.progress[0] == slowest < fastest and now - moved_at > WAIT
    ]
    if not silent and not stuck:
        return None
    names = " and ".join(f"process {process} ({beats[process][2]})" for process in sorted(silent or stuck))
    what = f"died, or is heard of no more since {duration(limit)}"
    if not silent:
        what = f"hangs: the others have waited for it for {duration(WAIT)}. Where it is stands in its log"
    remedy = "start all processes again with the same command, and the run goes on from its last checkpoint"
    failure = {"process": 0, "host": socket.gethostname(), "text": f"{names} {what}: {remedy}.", "code": 1}
    return failure | ({"silent": len(silent)} if silent else {"stuck": stuck})


def _end_with(failure: dict[str, Any]) -> None:
    """End this process by another one's failure, unless it comes to an end of its own first."""
    end = time.monotonic() + GRACE
    lost = "silent" in failure or "stuck" in failure
    while time.monotonic() < end and not _lost.is_set() and not lost:
        if leaving.wait(0.1):
            return
    delete_partial()
    if distributed_state().process_id in failure.get("stuck", ()):
        faulthandler.dump_traceback()
    for call in () if lost else ON_FAILURE:
        call()
    source = "" if lost else f"process {failure['process']} ({failure['host']}): "
    print(f"error: {source}{failure['text']}", file=sys.stderr, flush=True)
    leave(failure["text"], failure["code"])
