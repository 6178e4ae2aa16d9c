"""Worker threads for calls that take milliseconds or more: on the event loop, all clients would wait for them."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar


MAX_INLINE_ITEMS = 1000  # numbers that are read or written on the event loop, in a millisecond
ITEMS_PER_STEP = 20  # numbers that take as much time as detokenizing one token

Result = TypeVar("Result")

_threads = concurrent.futures.ThreadPoolExecutor(4, "worker")


async def run_in_worker(call: Callable[[], Result]) -> Result:
    """Call a function in a worker thread. If this is cancelled before a thread starts, the function is not called."""
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


async def run_in_worker_if_large(num_items: int, call: Callable[[], Result]) -> Result:
    """Call a function that takes about a microsecond per item: in a worker thread if there are many items."""
    return call() if num_items <= MAX_INLINE_ITEMS else await run_in_worker(call)
