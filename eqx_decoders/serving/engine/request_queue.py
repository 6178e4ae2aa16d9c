"""`RequestQueue`: requests that wait for a slot, by priority, then fair between clients, then by arrival."""

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
        """Id that increases in the order of arrival."""
        ...

    @property
    def request(self) -> Request: ...


T = TypeVar("T", bound=Queued)

MAX_CLIENTS = 4096  # counters of idle clients are deleted beyond this number


@dataclasses.dataclass
class RequestQueue(Generic[T]):
    """Bounded queue of waiting requests.

    Among requests of the same priority, the client with the fewest charged tokens comes first (virtual token counter,
    Sheng et al. 2024, "Fairness in serving large language models"). A new or returning client starts with the smallest
    count of the active clients, so that a client cannot save up tokens while it is idle.

    **Arguments:**

    - `max_requests`, `max_tokens`: maximum number of waiting requests and of their prompt tokens.
    """

    max_requests: int
    max_tokens: int

    def __post_init__(self):
        self._entries: dict[int, T] = {}
        self._charged_tokens: collections.Counter[str] = collections.Counter()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries.values())

    def is_full_for(self, request: Request) -> bool:
        """Return whether the queue cannot take a request. An empty queue takes a prompt of any length."""
        exceeds_tokens = self._tokens > 0 and self._tokens + len(request.prompt) > self.max_tokens
        return exceeds_tokens or len(self) >= self.max_requests

    def check_room(self, request: Request) -> None:
        """Raise QueueFull if the queue cannot take a request."""
        if self.is_full_for(request):
            raise QueueFull(
                f"the queue is full: {len(self)} requests with {self._tokens} tokens are waiting, and the "
                f"limits are max_waiting={self.max_requests} and max_waiting_tokens={self.max_tokens}. Retry later."
            )

    def add(self, entry: T, active: set[str]) -> None:
        """Add an entry, even if the queue is full. `active`: clients with running requests."""
        client, active_clients = entry.request.client, active | {other.request.client for other in self}
        if client not in active_clients and active_clients:
            smallest = min(self._charged_tokens[other] for other in active_clients)
            self._charged_tokens[client] = max(self._charged_tokens[client], smallest)
        self._entries[entry.request_id] = entry
        self._tokens += len(entry.request.prompt)

    def first(self, is_ready: Callable[[T], bool] = lambda _: True) -> T | None:
        """Return the first entry for which `is_ready` holds, or None."""
        return min(filter(is_ready, self), key=self._rank, default=None)

    def ordered(self, condition: Callable[[T], bool]) -> list[T]:
        """Return the entries for which `condition` holds, in scheduling order."""
        return sorted(filter(condition, self), key=self._rank)

    def remove(self, request_id: int) -> T | None:
        """Remove and return an entry. Returns None for an unknown id."""
        entry = self._entries.pop(request_id, None)
        self._tokens -= 0 if entry is None else len(entry.request.prompt)
        return entry

    def charge(self, client: str, tokens: int) -> None:
        """Charge a client for computed tokens."""
        self._charged_tokens[client] += tokens
        if len(self._charged_tokens) > MAX_CLIENTS:
            active = {entry.request.client for entry in self} | {client}
            charged = {name: count for name, count in self._charged_tokens.items() if name in active}
            self._charged_tokens = collections.Counter(charged)

    def _rank(self, entry: T) -> tuple[int, int, int]:
        request = entry.request
        return -request.priority, self._charged_tokens[request.client], entry.request_id
