"""Whose turn it is."""

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


def order(waiting):
    found = []
    while (first := waiting.first()) is not None:
        found.append(waiting.remove(first.request_id).request_id)
    return found


def waiting_list(*entries, requests=10, tokens=100):
    waiting = RequestQueue(requests, tokens)
    for one in entries:
        waiting.add(one, set())
    return waiting


def test_one_client_is_served_in_the_order_of_arrival_and_priorities_first():
    assert order(waiting_list(entry(0), entry(1), entry(2, priority=2), entry(3, priority=-1))) == [2, 0, 1, 3]


def test_who_was_served_less_comes_first():
    waiting = waiting_list(entry(0, "a"), entry(1, "a"), entry(2, "b"))
    waiting.charge("a", 10)
    assert order(waiting) == [2, 0, 1]


def test_being_away_earns_nothing():
    waiting = waiting_list(entry(0, "a"), entry(1, "b"))
    waiting.charge("a", 100)
    waiting.charge("b", 90)
    waiting.add(entry(2, "new"), set())
    waiting.charge("new", 1)
    assert waiting.first().request_id == 1  # the new one began at 90
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
    waiting.remove(0)  # again: nothing happens
    waiting.check_room(entry(2, length=99).request)


def test_a_prompt_longer_than_the_bound_waits_if_it_is_alone():
    waiting_list(tokens=10).check_room(entry(0, length=50).request)


def test_clients_that_are_gone_are_forgotten():
    waiting = waiting_list()
    for number in range(10_000):
        waiting.charge(str(number), 1)
    assert len(waiting._charged_tokens) <= 4097
