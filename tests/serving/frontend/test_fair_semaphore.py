"""Clients take turns."""

import asyncio

from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.fair_semaphore import FairSemaphore
from tests.errors import refused


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Work:
    """Takes turns, and notes in which order they came; each ends when it is told to."""

    def __init__(self, turns: FairSemaphore):
        self.turns, self.begun = turns, []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, client: str, name: str) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self._work(client, name))

    async def _work(self, client: str, name: str) -> None:
        async with self.turns.acquire(client):
            self.begun.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()


def test_busy_client_does_not_delay_others():
    async def run():
        work = Work(FairSemaphore("x", 2, 100))
        for number in range(5):
            work.ask("a", f"a{number}")
        work.ask("b", "b0")
        work.ask("c", "c0")
        await settle()
        assert work.begun == ["a0", "a1"]
        for name in ("a0", "a1", "b0", "c0", "a2", "a3", "a4"):
            await work.end(name)
        assert work.begun == ["a0", "a1", "b0", "c0", "a2", "a3", "a4"] and len(work.turns) == 0
        assert work.turns._last == {}
        await asyncio.gather(*work.tasks.values())

    asyncio.run(run())


def test_who_leaves_takes_no_turn_and_gives_back_a_place():
    async def run():
        work = Work(FairSemaphore("x", 1, 100))
        for name in ("first", "gone", "last"):
            work.ask("a", name)
        await settle()
        work.tasks["gone"].cancel()
        await settle()
        assert len(work.turns) == 1
        work.tasks["first"].cancel()
        await settle()
        assert work.begun == ["first", "last"]
        work.ask("b", "next")
        await work.end("last")
        assert work.begun[-1] == "next"
        # a place that is given in the moment in which its client leaves is given to the next one
        work.ask("b", "late")
        await settle()
        work.ends["next"].set()
        await asyncio.sleep(0)
        work.tasks["late"].cancel()
        await settle()
        work.ask("b", "very last")
        await settle()
        assert work.begun[-1] == "very last"
        await work.end("very last")

    asyncio.run(run())


def test_refuses_requests_beyond_max_waiting():
    async def run():
        ready = [False]
        work = Work(FairSemaphore("images", 1, 2, lambda _: ready[0]))
        work.ask("a", "0")
        work.ask("a", "1")
        await settle()
        assert work.begun == []
        with refused(ApiError, "2 requests", "images") as error:
            async with work.turns.acquire("a"):
                pass
        assert error.value.status == 429 and error.value.retry_after
        ready[0] = True
        work.turns.wake()
        await settle()
        assert work.begun == ["0"]
        await work.end("0")
        await work.end("1")
        assert work.begun == ["0", "1"]

    asyncio.run(run())


def test_full_queue_refuses_client_with_most_requests():
    async def run():
        work = Work(FairSemaphore("x", 1, 4))
        for number in range(5):
            work.ask("a", f"a{number}")
        work.ask("b", "b0")
        work.ask("c", "c0")
        await settle()
        for name in ("a3", "a4"):  # its last ones
            with refused(ApiError, "4 requests", "x") as error:
                await work.tasks[name]
            assert error.value.status == 429
        work.ask("b", "b1")  # nobody has so many more that this would be fair
        work.ask("d", "d0")
        await settle()
        assert isinstance(work.tasks["b1"].exception(), ApiError) and len(work.turns) == 4
        assert isinstance(work.tasks["a2"].exception(), ApiError)
        for name in ("a0", "b0", "c0", "d0", "a1"):
            await work.end(name)
        assert work.begun == ["a0", "b0", "c0", "d0", "a1"] and not len(work.turns)
        assert work.turns._free == 1 and work.turns._last == {}

    asyncio.run(run())


def test_blocked_client_does_not_delay_others():
    async def run():
        held = {"a"}
        work = Work(FairSemaphore("x", 2, 4, lambda client: client not in held))
        for name in ("a", "b"):
            work.ask(name, name)
        await settle()
        assert work.begun == ["b"]
        held.clear()
        work.turns.wake()
        await settle()
        assert work.begun == ["b", "a"]
        for name in ("a", "b"):
            await work.end(name)

    asyncio.run(run())
