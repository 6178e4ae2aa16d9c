"""Signals set a flag that the training loop reads, or end the program soon."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eqx_decoders.io import interrupt as interrupt_module
from eqx_decoders.io.exit_codes import EXIT_SIGTERM
from eqx_decoders.io.interrupt import Interrupt, Stopped
from eqx_decoders.io.status import StatusLine
from tests.errors import assert_names, refused
from tests.io.test_run_lock import PACKAGE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_sets_the_flag_and_handlers_are_restored(number):
    before = [signal.getsignal(s) for s in Interrupt.SIGNALS]
    with Interrupt() as interrupt:
        assert not interrupt.requested and interrupt.exit_code == 0
        signal.raise_signal(number)
        assert interrupt.requested and interrupt.signal == number and interrupt.exit_code == 128 + number
    assert [signal.getsignal(s) for s in Interrupt.SIGNALS] == before
    assert EXIT_SIGTERM == 128 + signal.SIGTERM


def test_a_second_sigint_acts_at_once():
    before = signal.getsignal(signal.SIGINT)  # a shell starts background processes with SIGINT ignored
    with pytest.raises(KeyboardInterrupt), Interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", Interrupt.SIGNALS)
def test_a_signal_stops_at_once_without_anything_to_save(number):
    with Interrupt(at_once=True), StatusLine("tokenizing", remains="nothing is kept"):
        with refused(Stopped, "tokenizing", "nothing is kept") as caught:
            signal.raise_signal(number)
        assert caught.value.exit_code == 128 + number and isinstance(caught.value, KeyboardInterrupt)
        with Interrupt() as inner:
            signal.raise_signal(number)
            assert inner.requested


# The main thread is in a long call outside of Python, after an event loop that did not restore the signal handlers, or
# it runs Python code inside a with block.
BUSY = f"""{PACKAGE}
import hashlib, pathlib, signal, threading, time
from eqx_decoders.io.interrupt import Interrupt, Watchdog
from eqx_decoders.io.status import StatusLine
part = pathlib.Path(sys.argv[2])
part.mkdir()
with Interrupt(at_once=sys.argv[3] != "later"), Watchdog(0.2):
    signal.set_wakeup_fd(-1)
    with StatusLine("training", remains="nothing is kept", partial=part):
        threading.Timer(0.5, print, ("busy",), dict(flush=True)).start()  # when the main thread is there
        try:
            if sys.argv[3] == "python":
                time.sleep(60)
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 5_000_000 if sys.argv[3] == "later" else 500_000_000)
        finally:
            print("left", flush=True)
"""


@pytest.mark.slow(fast=("call-SIGINT--130",))
@pytest.mark.parametrize(
    "where, number, left, code",
    [
        ("call", "SIGINT", "", 130),
        ("call", "SIGTERM", "", 143),
        ("python", "SIGINT", "left\n", 130),
        ("later", "SIGTERM", "left\n", 0),
    ],
)
def test_a_program_ends_soon_inside_and_outside_of_python(tmp_path, where, number, left, code):
    package = Path(interrupt_module.__file__).parents[1]
    command = [sys.executable, "-c", BUSY, str(package), str(tmp_path / "part"), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "busy\n"
        begun = time.monotonic()
        process.send_signal(getattr(signal, number))
        out, err = process.communicate(timeout=30)
    assert process.returncode == code and out == left, err
    if code:
        assert_names(err, "training", "nothing is kept")
        assert err.count("\n") == 1
        assert time.monotonic() - begun < 2
        assert (tmp_path / "part").exists() == (where == "python"), "which leaves it to the block"


def test_sigint_after_sigterm_waits_and_other_threads_are_spared():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested

    seen = []

    def work():
        with Interrupt() as interrupt:
            seen.append(interrupt.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
