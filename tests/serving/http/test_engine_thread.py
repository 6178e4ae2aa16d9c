"""The thread that owns an engine: order of outputs, cancellation, errors and shutdown."""

import asyncio
import time

import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.serving.engine.request import QueueFull, Request
from eqx_decoders.serving.http.engine_thread import EngineThread, NotServing, RequestOutputs
from tests.errors import refused
from tests.serving.fake_engine import FakeEngine


def request(first: int = 1, new: int = 4, **options) -> Request:
    return Request(prompt=(first,), max_new_tokens=new, **options)


async def collected(answers: RequestOutputs) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    async for number, update in answers:
        found.setdefault(number, []).extend(update.tokens)
    answers.close()
    return found


def with_worker(test, engine: FakeEngine | None = None, **options):
    """Run `test(worker, engine)` and stop the worker. Returns the result of `test`."""
    engine = engine or FakeEngine(**options)

    async def run():
        worker = EngineThread(engine)
        worker.start()
        try:
            return await asyncio.wait_for(test(worker, engine), 30)
        finally:
            engine.gate.set()
            assert await worker.stop(0.0)

    return asyncio.run(run())


async def until(rule) -> None:
    while not rule():
        await asyncio.sleep(0.002)


def test_outputs_keep_their_order_with_concurrent_requests():
    async def test(worker, engine):
        many = [await worker.submit([request(at), request(at + 100)]) for at in range(6)]
        return await asyncio.gather(*map(collected, many))

    for at, found in enumerate(with_worker(test)):
        assert found == {0: list(range(at + 1, at + 5)), 1: list(range(at + 101, at + 105))}


def test_batch_of_requests_is_accepted_or_refused_as_a_unit():
    async def test(worker, engine):
        with refused(ConfigError, "max_waiting=2"):  # more than the queue can ever hold
            await worker.submit([request()] * 7)
        engine.gate.clear()
        first = await worker.submit([request()])
        full = asyncio.ensure_future(worker.submit([request()] * 6))
        engine.gate.set()
        with pytest.raises(QueueFull):
            await full
        first.close()
        with refused(ConfigError, "max_new_tokens=1000"):
            await worker.submit([request(), request(new=1000)])
        await until(lambda: not engine.order)
        return await collected(await worker.submit([request()]))

    assert with_worker(test, slots=4, max_waiting=2, seconds=0.01) == {0: [2, 3, 4, 5]}


def test_closing_a_stream_removes_its_requests():
    async def test(worker, engine):
        answers = await worker.submit([request(new=400), request(new=400)])
        async for number, _ in answers:
            answers.cancel(number)
            break
        await until(lambda: len(engine.order) == 1)
        answers.close()
        await until(lambda: not engine.order)
        return await collected(answers), len(worker._owners), len(worker._open)

    assert with_worker(test, seconds=0.001) == ({}, 0, 0)


def test_cancellation_during_submit_removes_the_request():
    async def test(worker, engine):
        engine.gate.clear()
        first = await worker.submit([request(new=400)])
        await until(engine.begun.is_set)  # the thread is inside a step
        task = asyncio.ensure_future(worker.submit([request()]))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.gate.set()
        first.close()
        await until(lambda: not engine.order and not worker._open)
        return len(worker._owners), set(engine.cancelled) == set(range(len(engine.seen)))

    assert with_worker(test) == (0, True)


def test_thread_sleeps_while_idle():
    async def test(worker, engine):
        await collected(await worker.submit([request()]))
        steps, spent = engine.done.steps, time.process_time()
        await asyncio.sleep(0.3)
        return engine.done.steps - steps, time.process_time() - spent

    steps, spent = with_worker(test)
    assert steps == 0 and spent < 0.1


def test_engine_failure_ends_all_requests_with_the_error():
    async def test(worker, engine):
        engine.gate.clear()
        answers = await worker.submit([request(), request(2)])
        engine.fails = True
        engine.gate.set()
        found = [(number, update.finish_reason, update.error) async for number, update in answers]
        answers.close()
        with refused(NotServing, "RuntimeError"):
            await worker.submit([request()])
        return found, worker.state

    found, state = with_worker(test)
    assert state == "failed" and [one[:2] for one in found] == [(0, "error"), (1, "error")]
    assert "RuntimeError" in found[0][2]


def test_exception_in_submit_affects_only_its_request():
    async def test(worker, engine):
        engine.submit, kept = lambda request: 1 / 0, engine.submit
        with pytest.raises(ZeroDivisionError):
            await worker.submit([request()])
        engine.submit = kept
        return await collected(await worker.submit([request()]))

    assert with_worker(test) == {0: [2, 3, 4, 5]}


def test_stopping_waits_for_open_requests():
    async def test(worker, engine):
        answers = await worker.submit([request(new=20)])
        reading = asyncio.ensure_future(collected(answers))
        stopping = asyncio.ensure_future(worker.stop(20.0))
        await asyncio.sleep(0.01)
        with pytest.raises(NotServing):
            await worker.submit([request()])
        assert await stopping and worker.state == "stopped"
        return await reading

    assert len(with_worker(test, seconds=0.005)[0]) == 20


def test_stopping_cancels_slow_requests():
    async def test(worker, engine):
        answers = await worker.submit([request(new=400)])
        begun = time.monotonic()
        assert await worker.stop(0.1)
        assert time.monotonic() - begun < 2
        return [update.finish_reason async for _, update in answers][-1]

    assert with_worker(test, seconds=0.01) == "cancelled"


def test_stop_does_not_wait_for_a_hanging_step():
    async def test(worker, engine):
        engine.gate.clear()
        answers = await worker.submit([request()])
        await until(engine.begun.is_set)
        assert not await worker.stop(0.0, 0.1)
        answers.close()

    with_worker(test)


def test_no_request_is_accepted_while_a_step_hangs():
    async def test(worker, engine):
        worker._step_timeout = 0.01
        engine.gate.clear()
        assert not worker.hangs
        answers = await worker.submit([request()])
        await until(lambda: worker.hangs)
        with refused(NotServing, "0.01 s"):
            await worker.submit([request()])
        engine.gate.set()
        found = await collected(answers)
        await until(lambda: not worker.hangs)
        return found

    assert with_worker(test) == {0: [2, 3, 4, 5]}


def test_counts_match_the_last_step():
    async def test(worker, engine):
        await collected(await worker.submit([request(new=3)]))
        await until(lambda: worker.counts.generated_tokens == 3)
        return worker.counts.prompt_tokens

    assert with_worker(test) == 1
