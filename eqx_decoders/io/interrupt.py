"""Signals that end a program: between two steps, at once, or after a second if Python code does not run."""

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, ClassVar

from eqx_decoders.io.processes import leave
from eqx_decoders.io.status import ON_ENTER, delete_partial, stopped_text


class Stopped(KeyboardInterrupt):
    """Interruption by a signal when there is nothing to save. The text names the operation and what remains of it."""

    def __init__(self, number: int):
        super().__init__(stopped_text())
        self.exit_code = 128 + number  # as in shells


class Interrupt:
    """Signal handler: while open, SIGTERM, SIGUSR1 and the first SIGINT set `requested`, a second SIGINT interrupts.

    with Interrupt() as interrupt:
        for batch in batches:
            ...
            if interrupt.requested:
                save, then exit with interrupt.exit_code

    While `at_once` is set, each of these signals raises `Stopped`. The innermost open handler is used.

    Python handles signals in the main thread only: a handler that is opened in another thread has no effect.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
    opened: ClassVar[list["Interrupt"]] = []

    def __init__(self, *, at_once: bool = False):
        self.at_once = at_once
        self.signal: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True after a signal was received."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Exit code after the signal: 128 + its number, as in shells (143 for SIGTERM); 0 without a signal."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
            self.opened.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._old = {}
        if self in self.opened:
            self.opened.remove(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.at_once or (number == signal.SIGINT and self.signal == signal.SIGINT):
            raise Stopped(number)
        self.signal = signal.Signals(number)


class Watchdog:
    """Thread that ends the program at most `patience` seconds after a signal that must stop it at once.

    `Stopped` unwinds the program if Python code runs. Calls that do not return to Python (compilation, the training of
    a tokenizer) would delay it. So the thread receives the signal too, deletes unfinished files, prints a message and
    ends the process. In both cases the process ends without Python's finalization, in which an interrupted compiler
    crashes.
    """

    def __init__(self, patience: float = 1.0):
        self._patience, self._left, self._number = patience, threading.Event(), 0
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> "Watchdog":
        if threading.current_thread() is threading.main_thread():
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._old = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
            ON_ENTER.append(self._set_wakeup)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Stopped) or (error is not None and self._number):
            code = error.exit_code if isinstance(error, Stopped) else 128 + self._number
            _end(str(error) if isinstance(error, Stopped) else stopped_text(), code)
        if self._thread.ident is not None:
            ON_ENTER.remove(self._set_wakeup)
            sys.unraisablehook = self._hook
            signal.set_wakeup_fd(self._old)
            self._left.set()
            self._sender.close()  # ends the thread
            self._thread.join()
            self._receiver.close()

    def _set_wakeup(self) -> None:
        """Set the wakeup descriptor again: event loops replace it, and uvloop does not restore it."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def _unraisable(self, lost: Any) -> None:
        """Ignore a `Stopped` that was raised during garbage collection: the thread ends the process."""
        if not isinstance(lost.exc_value, Stopped):
            self._hook(lost)

    def _listen(self) -> None:
        while number := self._receiver.recv(1):
            at_once = bool(Interrupt.opened) and Interrupt.opened[-1].at_once
            if number[0] in Interrupt.SIGNALS and at_once:
                text, self._number = stopped_text(), number[0]
                if not self._left.wait(self._patience):
                    delete_partial()
                    _end(text, 128 + number[0])


def _end(text: str, code: int) -> None:
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    leave(text, code)
    os._exit(code)
