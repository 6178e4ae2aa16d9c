"""Work of which only so much is done at once: those that wait take turns by their clients."""

import asyncio
import collections
import contextlib
import sys
from collections.abc import AsyncIterator, Callable

from eqx_decoders.serving.http.json_fields import ApiError


class FairTurns:
    """So many at once. The next one is of the client who has the fewest at work; of these, who had no turn for longest.

    All of it belongs to one event loop.

    **Arguments:**

    - `name`: of what is waited for, as the refusal calls it.
    - `places`: how many work at once.
    - `most`: how many may wait. For a further one the last of the client with most of them is told to come again
        (ApiError 429): that may be the further one itself.
    - `ready`: whether a further one of this client may begin now; whoever changes that calls `wake`.
    """

    def __init__(self, name: str, places: int, most: int = sys.maxsize, ready: Callable[[str], bool] = lambda _: True):
        self._name, self._free, self._most, self._ready = name, places, most, ready
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}
        self._active: collections.Counter[str] = collections.Counter()
        self._turn, self._last = 0, dict[str, int]()  # the number of each client's last turn, of those that are here

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """A place as long as the block lasts."""
        if len(self) >= self._most:
            self._make_room(client)
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, collections.deque()).append(mine)
        self.wake()
        try:
            await mine
            yield
        finally:
            if mine.done() and not mine.cancelled() and mine.exception() is None:
                self._free += 1
                self._active[client] -= 1
                self._active += collections.Counter()  # without those that have none
                self.wake()
                if client not in self._active and client not in self._waiting:
                    self._last.pop(client, None)
            else:
                self._leave(client, mine)

    def wake(self) -> None:
        """Give free places to those whose turn it is."""
        while self._free > 0:
            able = [client for client in self._waiting if self._ready(client)]
            if not able:
                return
            client = min(able, key=lambda one: (self._active[one], self._last.get(one, -1)))
            first = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            if not first.done():
                first.set_result(None)
                self._free -= 1
                self._active[client] += 1
                self._turn, self._last[client] = self._turn + 1, self._turn

    def _make_room(self, client: str) -> None:
        """For one more of this client; ApiError where no other has more that wait."""
        told = f"{len(self)} requests wait for {self._name}: come again later."
        refusal = ApiError(429, told, code="busy", retry_after=1)
        most = max(self._waiting, key=lambda one: len(self._waiting[one]), default=client)
        mine = len(self._waiting.get(client, ()))
        if len(self._waiting.get(most, ())) <= mine + 1:
            raise refusal
        last = self._waiting[most].pop()  # others of it are left
        if not last.done():
            last.set_exception(refusal)

    def _leave(self, client: str, mine: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(client)
        if waiting is not None and mine in waiting:
            waiting.remove(mine)
            if not waiting:
                del self._waiting[client]
