"""Test progress output in a terminal: a progress bar, or aligned lines."""

import io
import sys

import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.training.run import log
from eqx_decoders.training.run.log import Progress
from tests.errors import assert_names, refused


def row(step, loss: object = 2.5):
    return {"step": step, "loss": loss, "tokens": 1024, "step_seconds": 0.5}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(log.time, "monotonic", lambda: self.now)


def test_plain_lines_are_periodic_and_aligned(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress(1000, start=500, every=10, stream=stream) as progress:
        assert progress.seconds_left() is None
        for step in range(501, 531):
            clock.now += 2
            clock.now += 98 if step == 501 else 0  # compilation
            progress.update(step, {**row(step), "mfu": 0.456} if step > 510 else {"loss": 123.456})
        progress.message("saved")
        progress.update(1000, {})
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["step", "loss", "tokens/s", "MFU", "left"]
    assert [line.split()[0] for line in lines[1:-2]] == [f"{step}/1000" for step in range(501, 531, 5)]
    assert lines[-3].split() == ["526/1000", "2.5000", "2,048", "45.6%", "15m48s"]
    assert lines[1].split() == ["501/1000", "123.4560", "-", "-", "-"]
    assert lines[-2] == "saved" and lines[-1].split() == ["1000/1000", "-", "-", "-", "0s"]
    assert len({len(line) for line in lines if line != "saved"}) == 1  # columns are aligned


def test_lines_and_bar_show_the_worst_expert_load(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress(100, stream=stream) as progress:
        clock.now += 2
        progress.update(1, {**row(1), "load": [1.2, np.float32(3.456), 1.0]})
        clock.now += 20
        progress.update(2, row(2))
    head, first, second = (line.split() for line in stream.getvalue().splitlines())
    assert head == ["step", "loss", "tokens/s", "MFU", "load", "left"]
    assert first == ["1/100", "2.5000", "2,048", "-", "3.46", "-"] and second[4:] == ["-", "32m40s"]
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    pytest.importorskip("rich")
    terminal = Terminal()
    with Progress(20, stream=terminal) as progress:
        progress.update(7, {**row(7), "load": np.array([1.5, 1.25])})
    assert_names(terminal.getvalue(), "2,048 tokens/s", "load 1.50")


def test_bar_shows_step_loss_speed_and_messages(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(20, start=4, stream=terminal) as progress:
        progress.message("[not markup] resumed")
        progress.status("compiling: 3s")
        progress.update(7, {**row(7), "mfu": 0.5})
    names = ("[not markup] resumed", "7/20", "compiling: 3s", "loss 2.5000", "2,048 tokens/s", "MFU 50.0%")
    assert_names(terminal.getvalue(), *names)


def test_invalid_total_is_refused():
    with refused(ConfigError, "total=0"):
        Progress(0)


def test_plain_lines_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    with Progress(2, stream=terminal) as progress:
        progress.status("compiling: 3s")
        progress.update(1, row(1))
    assert_names(terminal.getvalue(), "compiling: 3s\n", "1/2")
    assert "\x1b" not in terminal.getvalue()
