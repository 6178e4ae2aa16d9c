"""The context of all calls of Orbax, and the causes of its errors."""

import logging
import traceback

import jax
from orbax.checkpoint import v1 as ocp


def orbax_context(*, in_place: bool, alone: bool = False) -> ocp.Context:
    """Return the context of calls of Orbax.

    **Arguments:**

    - `in_place`: write a step to its final path, where a file marks it as complete, instead of renaming it.
    - `alone`: do not synchronize with the other processes.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_orbax)  # adding a filter twice has no effect
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="manifest")
    context = ocp.Context()
    context.checkpointables.registry = registry
    modes = ocp.options.AtomicityMode
    context.atomicity.mode = modes.COMMIT_FILE if in_place else modes.ATOMIC_RENAME
    if alone:
        context.multiprocessing.primary_host = None
        context.multiprocessing.active_processes = {jax.process_index()}
        context.multiprocessing.barrier_sync_key_prefix = str(jax.process_index())
    context.pytree.loading.partial_load = True  # for `load_weights`; `reading.py` compares the trees before
    return context


def causes(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, the innermost last. Orbax wraps every error in an error about handlers."""
    return [error, *(causes(error.__cause__) if error.__cause__ is not None else ())]


def summary(error: Exception) -> str:
    """Return the first line of the innermost cause. Messages of Orbax may have hundreds of lines."""
    cause = causes(error)[-1]
    line = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {line[:300].rstrip('.')}"


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """Return False for log records of Orbax: long tracebacks of errors that it also raises."""
    frames = traceback.extract_tb(record.exc_info[2] if record.exc_info else None)
    return not any("orbax" in name for name in (record.pathname, *(frame.filename for frame in frames)))
