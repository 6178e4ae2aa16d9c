"""Requests that wait for a slot: the highest priority first, clients in turn, each client's in order."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar, runtime_checkable

from eqx_decoders.serving.engine.request import QueueFull, Request


@runtime_checkable
class Queued(Protocol):
    """What can wait."""

    @property
    def request_id(self) -> int:
        """Increasing in the order of arrival."""
        ...

    @property
    def request(self) -> Request: ...


T = TypeVar("T", bound=Queued)


@dataclasses.dataclass
class RequestQueue(Generic[T]):
    """A bounded queue.

    Among those of the highest priority the client comes first that has been served the fewest tokens (Sheng et al.
    2024, "Fairness in serving large language models"); one who comes new, or again, begins with as many as the least
    served of those who are there, so that being away earns nothing.

    **Arguments:**

    - `max_requests`, `max_tokens`: how many requests, and tokens of prompts, may wait.
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
        """Whether one more is too many. A prompt of any length may wait alone."""
        tokens = self._tokens > 0 and self._tokens + len(request.prompt) > self.max_tokens
        return tokens or len(self) >= self.max_requests

    def check_room(self, request: Request) -> None:
        """Raise QueueFull where one more is too many."""
        if self.is_full_for(request):
            rule = f"of at most {self.max_requests} and {self.max_tokens}"
            raise QueueFull(f"{len(self)} requests with {self._tokens} tokens wait, {rule}: come again later.")

    def add(self, entry: T, active: set[str]) -> None:
        """Let one wait; `active` are the clients that are served now. One that was interrupted is taken at any time."""
        client, here = entry.request.client, active | {other.request.client for other in self}
        if client not in here and here:
            self._served[client] = max(self._served[client], min(self._served[other] for other in here))
        self._entries[entry.request_id] = entry
        self._tokens += len(entry.request.prompt)

    def first(self, ready: Callable[[T], bool] = lambda _: True) -> T | None:
        """Whose turn it is, of those that are ready."""
        return min(filter(ready, self), key=self._rank, default=None)

    def in_turn(self, which: Callable[[T], bool]) -> list[T]:
        """Those of some kind, whose turn comes first first."""
        return sorted(filter(which, self), key=self._rank)

    def remove(self, request_id: int) -> T | None:
        """Take one out."""
        entry = self._entries.pop(request_id, None)
        self._tokens -= 0 if entry is None else len(entry.request.prompt)
        return entry

    def serve(self, client: str, tokens: int) -> None:
        """Count tokens that were computed for a client."""
        self._served[client] += tokens
        if len(self._served) > 4096:  # clients come and go
            waiting = {entry.request.client for entry in self} | {client}
            self._served = collections.Counter({name: n for name, n in self._served.items() if name in waiting})

    def _rank(self, entry: T) -> tuple[int, int, int]:
        request = entry.request
        return -request.priority, self._served[request.client], entry.request_id
