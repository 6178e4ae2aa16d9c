"""Queue of the requests that wait for a slot: highest priority first, clients in turn, first come first served."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar, runtime_checkable

from eqx_decoders.serving.engine.request import QueueFull, Request


@runtime_checkable
class Queued(Protocol):
    """Entry of a `RequestQueue`."""

    @property
    def request_id(self) -> int:
        """Number that increases in the order of arrival."""
        ...

    @property
    def request(self) -> Request: ...


T = TypeVar("T", bound=Queued)


@dataclasses.dataclass
class RequestQueue(Generic[T]):
    """Bounded queue of waiting requests.

    Among requests of the highest priority, the client comes first whose requests were charged the fewest tokens (Sheng
    et al. 2024, "Fairness in serving large language models"). A client who is new, or returns, starts with the count of
    the least charged active client, so that absence earns nothing.

    **Arguments:**

    - `max_requests`, `max_tokens`: maximum of waiting requests, and of the tokens of their prompts.
    """

    max_requests: int
    max_tokens: int

    def __post_init__(self):
        self._entries: dict[int, T] = {}
        self._served: collections.Counter[str] = collections.Counter()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries.values())

    def is_full_for(self, request: Request) -> bool:
        """Return whether there is no room for a request. A prompt of any length may wait alone."""
        tokens = self._tokens > 0 and self._tokens + len(request.prompt) > self.max_tokens
        return tokens or len(self) >= self.max_requests

    def check_room(self, request: Request) -> None:
        """Raise QueueFull where there is no room for a request."""
        if self.is_full_for(request):
            rule = f"of at most {self.max_requests} and {self.max_tokens}"
            raise QueueFull(f"{len(self)} requests with {self._tokens} tokens wait, {rule}: come again later.")

    def add(self, entry: T, active: set[str]) -> None:
        """Add an entry, even to a full queue; `active` are the clients being served."""
        client, active_clients = entry.request.client, active | {other.request.client for other in self}
        if client not in active_clients and active_clients:
            self._served[client] = max(self._served[client], min(self._served[other] for other in active_clients))
        self._entries[entry.request_id] = entry
        self._tokens += len(entry.request.prompt)

    def first(self, ready: Callable[[T], bool] = lambda _: True) -> T | None:
        """Return the first of the entries that are ready."""
        return min(filter(ready, self), key=self._rank, default=None)

    def ordered(self, condition: Callable[[T], bool]) -> list[T]:
        """Return the entries that meet a condition, in their order."""
        return sorted(filter(condition, self), key=self._rank)

    def remove(self, request_id: int) -> T | None:
        """Remove an entry, and return it."""
        entry = self._entries.pop(request_id, None)
        self._tokens -= 0 if entry is None else len(entry.request.prompt)
        return entry

    def charge(self, client: str, tokens: int) -> None:
        """Count tokens that were computed for a client."""
        self._served[client] += tokens
        if len(self._served) > 4096:  # clients come and go
            waiting = {entry.request.client for entry in self} | {client}
            self._served = collections.Counter({name: n for name, n in self._served.items() if name in waiting})

    def _rank(self, entry: T) -> tuple[int, int, int]:
        request = entry.request
        return -request.priority, self._served[request.client], entry.request_id
