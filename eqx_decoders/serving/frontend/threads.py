"""What takes milliseconds is done in threads beside the event loop, on which all clients wait."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar


LITTLE = 1000  # numbers that are read or written on the event loop, in a millisecond
SLOW = 20  # numbers that take as long as the text of one token, or a look at one message

Result = TypeVar("Result")

_threads = concurrent.futures.ThreadPoolExecutor(2, "beside")


async def beside(call: Callable[[], Result]) -> Result:
    """Call something in a thread. If this is cancelled before it begins, it is dropped."""
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


async def unless_small(size: int, call: Callable[[], Result]) -> Result:
    """What a call gives that takes a microsecond or so for each of so many things: few are done here and now."""
    return call() if size <= LITTLE else await beside(call)
