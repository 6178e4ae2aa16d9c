"""End of one process of a run by an error or a signal, which ends the others, too."""

import contextlib
import os
import socket
import sys
import threading
import time

import jax

from eqx_decoders.io.key_value_store import distributed_state, write_if_absent


LAST = 20.0  # seconds that the first process waits for the others to leave

leaving = threading.Event()  # set when this process has begun to end


def leave(text: str, code: int) -> None:
    """End this process of several by an error or a signal, after telling the others; return if it runs alone.

    It would otherwise wait for them at its end, and they for it. If another one failed before, print its message and
    exit with its code. The first process leaves last: the others communicate through it.
    """
    client, index = distributed_state().client, distributed_state().process_id
    if client is None:
        return
    leaving.set()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        own_failure = {"process": index, "host": socket.gethostname(), "text": text, "code": code}
        failure = write_if_absent("failed", own_failure)
        code = failure["code"]
        if failure["process"] != index and failure["text"] != text:
            print(f"error: process {failure['process']} ({failure['host']}): {failure['text']}", file=sys.stderr)
        if index > 0:
            client.key_value_set(f"left/{index}", "")
        others, end = distributed_state().num_processes - 1 - failure.get("silent", 0), time.monotonic() + LAST
        while index == 0 and len(client.key_value_dir_get("left/")) < others and time.monotonic() < end:
            time.sleep(0.1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
