"""Status lines of long operations, and the message of an interrupted one."""

import io
import sys
import threading
import time

import pytest

from eqx_decoders.io import status as module
from eqx_decoders.io.status import StatusLine, delete_partial, duration, quantity, showing, stopped_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def wait_for(stream: io.StringIO, text: str) -> None:
    for _ in range(500):
        if text in stream.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(stream.getvalue())


@pytest.fixture
def quick(monkeypatch):
    for name in ("FIRST", "LINES", "TERMINAL"):
        monkeypatch.setattr(module, name, 0.02)


def test_amount_and_rate_are_shown(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with (
        StatusLine("tokenizing") as bytes_,
        StatusLine("loading weights", total=16_000_000_000) as of,
        StatusLine("x") as x,
    ):
        clock[0] += 8
        assert list(bytes_.counted(["a" * 20_000_000, "b" * 16_000_000]))[1][0] == "b"
        of.add(1_600_000_000)
        assert bytes_.text() == "tokenizing: 36.0 MB, 4.5 MB/s, 8s"
        assert of.text() == "loading weights: 1.6 of 16.0 GB, 0.2 GB/s, 8s"
        assert x.text() == "x: 8s"


def test_plain_lines_are_written_only_on_request(quick, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with StatusLine("idle"):
        time.sleep(0.1)
    assert stream.getvalue() == "" and threading.active_count() < 50
    with showing(), StatusLine("outside"), StatusLine("compiling"):
        wait_for(stream, "compiling: 0s\ncompiling: 0s\n")
        shown = stream.getvalue()
    assert "\x1b" not in shown and "\r" not in shown and "outside" not in shown


def test_a_terminal_shows_one_line_that_is_erased(quick, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with showing(), StatusLine("compiling"):
        wait_for(stream, "compiling")
    assert "\n" not in stream.getvalue() and stream.getvalue().endswith("\r\x1b[2K")


def test_interruption_message_names_operation_and_remaining_amount(tmp_path):
    assert stopped_text() == "stopped"
    with StatusLine("loading weights"):
        assert stopped_text() == "stopped while loading weights"
    (tmp_path / "part").mkdir()
    with StatusLine("making the model", remains="the tokens are kept"):
        with StatusLine("loading weights", partial=tmp_path / "part"):
            want = "stopped while loading weights: the tokens are kept, start again with the same command"
            assert stopped_text() == want
            delete_partial()
        assert "making the model" in stopped_text()
    assert list(tmp_path.iterdir()) == [] and stopped_text() == "stopped"


def test_quantity_adds_an_s_unless_the_count_is_1():
    texts = [quantity(count, "document") for count in (0, 1, 2, 1234)]
    assert texts == ["0 documents", "1 document", "2 documents", "1,234 documents"]


def test_durations():
    seconds = {0: "0s", 59.4: "59s", 59.6: "1m00s", 200: "3m20s", 7500: "2h05m", 180000: "2d02h"}
    assert {each: duration(each) for each in seconds} == seconds
