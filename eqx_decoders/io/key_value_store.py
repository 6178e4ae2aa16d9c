"""Key-value store of JAX's coordinator: small JSON values that the processes of one run read and write.

`jax.distributed.initialize` starts the coordinator in process 0.
"""

import json
from typing import Any

import jax

from eqx_decoders.errors import check


def read_value(key: str) -> Any:
    """Return the value of a key, or None where no process has written one."""
    try:
        return json.loads(store_client().key_value_try_get(key))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def write_if_absent(key: str, value: Any) -> Any:
    """Write the value of a key unless another process has written one before, and return the value that counts."""
    try:
        store_client().key_value_set(key, json.dumps(value))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return read_value(key)
    return value


def distributed_state() -> Any:
    """Return JAX's own state of the run's processes: there is no public way to the coordinator's keys."""
    from jax._src.distributed import global_state

    return global_state


def store_client() -> Any:
    """Return the client of the store. Raises ConfigError where the process has not joined the others."""
    client = distributed_state().client
    rule = "there are several processes, but jax.distributed.initialize was not called"
    check(client is not None, f"{rule}: use eqx_decoders.training.connected().")
    return client
