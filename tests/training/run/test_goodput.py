"""Test goodput: the share of the run time that is spent in steps."""

import time

import pytest

from eqx_decoders.training.run import log
from eqx_decoders.training.run.log import Goodput, WallTime, process_start


IMPORTED = time.time()


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that tests set by hand. The process starts at time 1000."""
    now = [1000.0]
    monkeypatch.setattr(log.time, "time", lambda: now[0])
    return now


def row(step, seconds, **more):
    return {"step": step, "step_seconds": seconds, **more}


def test_goodput_is_the_share_of_time_in_steps(clock):
    found = Goodput(started=1000.0)
    clock[0] = 1010
    assert found.add(row(1, 4.0)) == {"run_seconds": 10, "goodput": 0.4}
    clock[0] = 1020
    assert found.add(row(2, 8.0, data_wait=0.25)) == {
        "run_seconds": 20,
        "goodput": 0.5,
    }  # the wait for data is subtracted


def test_earlier_starts_are_counted_without_lost_steps(clock):
    """An earlier start took steps 1 to 4 in 30 s; the run resumes after step 2."""
    before = [row(n, 5.0, run_seconds=10.0 + 5 * n) for n in range(1, 5)] + [{"step": 4, "eval_loss": 2.0}]
    found = Goodput(before, start=3, started=1000.0)
    clock[0] = 1010
    assert found.add(row(3, 5.0)) == {"run_seconds": 40, "goodput": 15 / 40}
    old = Goodput([row(1, 5.0), row(2, 5.0)], start=3, started=1000.0)  # metrics without the time of the start
    assert old.add(row(3, 5.0)) == {"run_seconds": 20, "goodput": 15 / 20}


def test_nested_activities_are_counted_separately(clock):
    time = WallTime("starting", 1000.0)
    clock[0] += 10
    with time.measure("steps"):
        clock[0] += 60
        with time.measure("saving"):
            clock[0] += 20
        clock[0] += 9.7
    clock[0] += 0.3
    assert time.text() == "steps 70%, saving 20%, starting 10%"
    assert time.seconds == pytest.approx({"starting": 10.3, "steps": 69.7, "saving": 20})


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="a system that does not tell")
def test_process_start_time_is_plausible():
    """The start lies between the boot of the machine and the import of this module."""
    assert IMPORTED - 600 < process_start() < IMPORTED
    assert 0 < time.time() - process_start() < time.clock_gettime(time.CLOCK_BOOTTIME)
