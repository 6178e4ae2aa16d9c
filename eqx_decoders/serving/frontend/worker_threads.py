"""Worker threads for calls that take milliseconds: on the event loop all clients would wait for them."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar


INLINE_SIZE = 1000  # numbers that are read or written on the event loop, in a millisecond
SLOW = 20  # numbers that take as long as the text of one token, or the check of one message

Result = TypeVar("Result")

_threads = concurrent.futures.ThreadPoolExecutor(2, "worker")


async def run_in_worker(call: Callable[[], Result]) -> Result:
    """Call a function in a worker thread. If this is cancelled before it starts, it is dropped."""
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


async def run_in_worker_if_large(size: int, call: Callable[[], Result]) -> Result:
    """Call a function that takes about a microsecond for each of `size` items; a few items stay on the event loop."""
    return call() if size <= INLINE_SIZE else await run_in_worker(call)
