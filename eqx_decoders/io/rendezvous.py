"""Rendezvous of the processes of one run at the coordinator's address, before JAX's own start.

JAX ends a process where another one is missing, without a word about which. So they meet before: process 0 listens,
the others send their numbers and receive which are missing.
"""

import contextlib
import json
import os
import socket
import time

from eqx_decoders.errors import ConfigError, EqxDecodersError, check
from eqx_decoders.io.coordination import process_names
from eqx_decoders.io.status import duration


VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def find_cluster(seconds: int | float) -> tuple[str, int, int]:
    """Return the coordinator's address, the number of processes and the number of this one.

    They come from the environment, or from the cluster that JAX detects within so many seconds.
    """
    values = {name: os.environ.get(name) for name in VARIABLES}
    listed = ", ".join(VARIABLES)
    if values["JAX_NUM_PROCESSES"] is None and values["JAX_PROCESS_ID"] is None:
        try:
            from jax._src.clusters import (
                ClusterEnv,
            )  # only `jax.distributed.initialize` is public, and it also connects

            detected = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, round(seconds))
        except Exception as error:
            raise ConfigError(f"distributed=True, but the cluster is not told: {error}. Set {listed}.") from error
        address, count, index, _ = detected
        check(
            None not in (address, count, index),
            f"distributed=True, but JAX finds no cluster here: set {listed} in the environment of each process.",
        )
        return values["JAX_COORDINATOR_ADDRESS"] or str(address), int(str(count)), int(str(index))
    missing = [name for name, value in values.items() if not value]
    check(not missing, f"{' and '.join(missing)} must be set, too: {listed} belong together.")
    address, count, index = (str(value) for value in values.values())
    numbers = (count, index, address.rpartition(":")[2])
    valid = all(number.isdecimal() for number in numbers) and int(index) < int(count)
    rule = "must be host:port of process 0, how many there are, and which of them this is, counted from 0"
    check(valid, f"{', '.join(f'{name}={value}' for name, value in values.items())}: they {rule}.")
    return address, int(count), int(index)


def meet(address: str, count: int, index: int, seconds: int | float) -> None:
    """Return when all processes are there. Raises EqxDecodersError that names the missing ones."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    missing = _listen(int(port), count, end) if index == 0 else _report(host.strip("[]"), int(port), index, end)
    limit = duration(seconds)
    message = f"{process_names(missing)} of {count} did not start, or does not reach {address}, within {limit}"
    check(not missing, f"{message}: look at its log, then start all of them again.", EqxDecodersError)


def _listen(port: int, count: int, end: int | float) -> set[int]:
    """Receive the numbers of the other processes until `end`, and send them which are missing."""
    missing, connections = set(range(1, count)), []
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
                connections.append(other)
        for other in connections:
            with contextlib.suppress(OSError):
                other.sendall(json.dumps(sorted(missing)).encode() + b"\n")
                other.recv(1)  # nothing: the other side closes first, and the port is free at once
    return missing


def _report(host: str, port: int, index: int, end: int | float) -> set[int]:
    """Send this process's number to process 0, and return which processes it misses."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as server:
            server.sendall(str(index).encode())
            server.settimeout(max(1.0, end - time.monotonic()) + 10)
            if answer := server.makefile().readline():
                return set(json.loads(answer))
        time.sleep(0.2)
    return {0}
