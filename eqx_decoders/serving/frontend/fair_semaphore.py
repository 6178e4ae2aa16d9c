"""`FairSemaphore`: limits concurrent work, and lets clients take turns."""

import asyncio
import collections
import contextlib
import sys
from collections.abc import AsyncIterator, Callable

from eqx_decoders.serving.frontend.api_errors import ApiError


class FairSemaphore:
    """Semaphore whose next permit goes to the client with the fewest running entries, and of these to the one that has
    had no turn for longest.

    It belongs to one event loop.

    **Arguments:**

    - `name`: name of the work, for the error message.
    - `permits`: entries that may run at once.
    - `max_waiting`: entries that may wait. When one more comes, the last entry of the client with most of them gets
        ApiError 429; this may be the new entry.
    - `ready`: called with a client; returns whether another of its entries may start. When the result changes, `wake`
        must be called.
    """

    def __init__(
        self, name: str, permits: int, max_waiting: int = sys.maxsize, ready: Callable[[str], bool] = lambda _: True
    ):
        self._name, self._free, self._max_waiting, self._ready = name, permits, max_waiting, ready
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}
        self._active: collections.Counter[str] = collections.Counter()
        self._turn, self._last = 0, dict[str, int]()  # number of each active client's last turn

    def __len__(self) -> int:
        """Return the number of waiting entries."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def acquire(self, client: str) -> AsyncIterator[None]:
        """Hold a permit as long as the block runs."""
        if len(self) >= self._max_waiting:
            self._make_room(client)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, collections.deque()).append(future)
        self.wake()
        try:
            await future
            yield
        finally:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._free += 1
                self._active[client] -= 1
                self._active += collections.Counter()  # drops clients without entries
                self.wake()
                if client not in self._active and client not in self._waiting:
                    self._last.pop(client, None)
            else:
                self._remove(client, future)

    def wake(self) -> None:
        """Give free permits to waiting entries."""
        while self._free > 0:
            ready = [client for client in self._waiting if self._ready(client)]
            if not ready:
                return
            client = min(ready, key=lambda one: (self._active[one], self._last.get(one, -1)))
            first = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            if not first.done():
                first.set_result(None)
                self._free -= 1
                self._active[client] += 1
                self._turn, self._last[client] = self._turn + 1, self._turn

    def _make_room(self, client: str) -> None:
        """Make room for one more entry of a client; ApiError where no other client has more of them waiting."""
        message = f"{len(self)} requests wait for {self._name}: come again later."
        refusal = ApiError(429, message, code="busy", retry_after=1)
        busiest = max(self._waiting, key=lambda one: len(self._waiting[one]), default=client)
        num_mine = len(self._waiting.get(client, ()))
        if len(self._waiting.get(busiest, ())) <= num_mine + 1:
            raise refusal
        last = self._waiting[busiest].pop()  # others of it are left
        if not last.done():
            last.set_exception(refusal)

    def _remove(self, client: str, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(client)
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[client]
