"""The request queue: order by priority, fairness between clients, and limits."""

import dataclasses

from eqx_decoders.serving.engine.request import QueueFull, Request
from eqx_decoders.serving.engine.request_queue import RequestQueue
from tests.errors import refused


@dataclasses.dataclass
class Entry:
    request_id: int
    request: Request


def entry(number, client="", priority=0, length=1):
    return Entry(number, Request(prompt=(1,) * length, max_new_tokens=1, client=client, priority=priority))


def pop_all(waiting):
    found = []
    while (first := waiting.first()) is not None:
        found.append(waiting.remove(first.request_id).request_id)
    return found


def waiting_list(*entries, requests=10, tokens=100):
    waiting = RequestQueue(requests, tokens)
    for one in entries:
        waiting.add(one, set())
    return waiting


def test_orders_requests_by_priority_and_then_by_arrival():
    assert pop_all(waiting_list(entry(0), entry(1), entry(2, priority=2), entry(3, priority=-1))) == [2, 0, 1, 3]


def test_client_with_fewer_served_tokens_comes_first():
    waiting = waiting_list(entry(0, "a"), entry(1, "a"), entry(2, "b"))
    waiting.charge("a", 10)
    assert pop_all(waiting) == [2, 0, 1]


def test_new_client_starts_at_the_lowest_count_of_waiting_clients():
    waiting = waiting_list(entry(0, "a"), entry(1, "b"))
    waiting.charge("a", 100)
    waiting.charge("b", 90)
    waiting.add(entry(2, "new"), set())
    waiting.charge("new", 1)
    assert waiting.first().request_id == 1  # the new client started at 90
    waiting.add(entry(3, "other"), {"a"})
    assert waiting.first().request_id == 1


def test_full_queue_refuses_requests():
    waiting = waiting_list(entry(0, length=60), requests=2)
    with refused(QueueFull, "60 tokens"):
        waiting.check_room(entry(1, length=41).request)
    waiting.check_room(entry(1, length=40).request)
    waiting.add(entry(1, length=1), set())
    with refused(QueueFull, "2 requests", "61 tokens"):
        waiting.check_room(entry(2).request)
    waiting.remove(0)
    waiting.remove(0)  # a second removal has no effect
    waiting.check_room(entry(2, length=99).request)


def test_empty_queue_accepts_a_prompt_above_the_token_limit():
    waiting_list(tokens=10).check_room(entry(0, length=50).request)


def test_number_of_stored_clients_is_limited():
    waiting = waiting_list()
    for number in range(10_000):
        waiting.charge(str(number), 1)
    assert len(waiting._charged_tokens) <= 4097
