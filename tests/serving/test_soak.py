"""The memory of a server under mixed load does not grow after a warm-up.

`SOAK_SECONDS=3600 SOAK_RATE=2 make test-slow ARGS='-n 0 -s tests/serving/test_soak.py'` runs for an hour with two
requests per second. The default is two minutes with half as many requests in total. Memory is compared with its value
after the warm-up.
"""

import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.serving.processes import arrays_of, memory_of, seconds_of, served, until_idle
from tests.serving.servers import CHAT, Running


SECONDS = float(os.environ.get("SOAK_SECONDS", "120"))
RATE = float(os.environ.get("SOAK_RATE", "30"))  # requests per second
ROWS = 12  # number of memory measurements
WARM = 600  # warm-up requests, which fill caches: prefixes, grammars, JAX's call caches
MOST = 5.0  # allowed growth after the warm-up in MB
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# Prefixes of the prompts.
SHARED = [[(number * 37 + at * 11) % 247 + 3 for at in range(48)] for number in range(6)]
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


class Row(NamedTuple):
    """Measurement of a server: seconds, requests, memory in MB, JAX's arrays and their bytes, processor time."""

    seconds: float
    requests: int
    memory: float
    arrays: int
    nbytes: int
    busy: float


# --- requests: each function returns the name under which it is counted ---


def ids(pick: random.Random) -> list[int]:
    """Return a prompt; most prompts share a prefix with others."""
    own = [pick.randrange(3, 250) for _ in range(pick.randrange(1, 40))]
    return pick.choice(SHARED)[: pick.choice([16, 32, 48])] + own if pick.random() < 0.7 else own


def completion(server: Running, pick: random.Random) -> str:
    """Send a completion request with random options."""
    kind = pick.choice(["plain", "several", "stopped", "scored", "formed", "drawn"])
    more = {
        "plain": {"temperature": 0},
        "several": {"n": 3, "user": f"user {pick.random()}"},
        "stopped": {"stop": ["a", "e"], "presence_penalty": 0.5},
        "scored": {"echo": True, "logprobs": 3},
        "formed": {"guided_regex": f"[a-d]{{{pick.randrange(1, 60)}}}x"},
        "drawn": {"seed": pick.randrange(1 << 40), "top_p": 0.9, "logit_bias": {"70": 3}},
    }[kind]
    found = server.json(COMPLETIONS, dict(prompt=ids(pick), max_tokens=pick.randrange(1, 24)) | more)
    assert len(found["choices"]) == more.get("n", 1) and found["usage"]["completion_tokens"] > 0
    return kind


def conversation(server: Running, pick: random.Random) -> str:
    """Send a streaming chat request."""
    said = [" ".join(pick.choices(WORDS, k=pick.randrange(1, 6))) for _ in range(pick.choice([1, 3]))]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    body = dict(messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True})
    events = server.call(CHATS, body)[2].decode().split("\n\n")
    assert events[-2] == "data: [DONE]" and '"usage":{"prompt_tokens"' in events[-3], events
    return "chat"


def disconnect(server: Running, pick: random.Random) -> str:
    """Send a request and disconnect before or during the answer."""
    body = dict(prompt=ids(pick), max_tokens=90, ignore_eos=True, stream=pick.random() < 0.7)
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(link):
        link.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        if not body["stream"]:
            time.sleep(pick.expovariate(100))
            return "left early"
        answer = link.getresponse()
        assert answer.status == 200 and answer.readline().startswith(b"data: ")
        return "left late"


def invalid_request(server: Running, pick: random.Random) -> str:
    """Send a request that must be refused."""
    path, raw, code = pick.choice(
        [
            (COMPLETIONS, b'{"prompt": ', 400),
            (COMPLETIONS, json.dumps({"prompt": ids(pick), "top_p": -pick.random()}).encode(), 400),
            (COMPLETIONS, json.dumps({"prompt": ids(pick), "max_tokens": 10**6}).encode(), 400),
            (COMPLETIONS, json.dumps({"prompt": "a", "guided_regex": "(" * pick.randrange(1, 50)}).encode(), 400),
            (COMPLETIONS, json.dumps({"prompt": [999]}).encode(), 400),
            (
                CHATS,
                json.dumps({"messages": [{"role": "user", "content": "a"}], "model": str(pick.random())}).encode(),
                404,
            ),
            (CHATS, json.dumps({"messages": [{"role": 5, "content": "a"}]}).encode(), 400),
            (f"/{pick.random()}", b"{}", 404),
        ]
    )
    assert server.call(path, raw=raw)[0] == code
    return "refused"


def metadata_request(server: Running, pick: random.Random) -> str:
    """Send a request that does not run the model."""
    text = " ".join(pick.choices(WORDS, k=5))
    tokens = server.json("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert server.json("/detokenize", {"tokens": tokens})["prompt"] == text
    return "asked"


KINDS: tuple[tuple[Callable[[Running, random.Random], str], int], ...] = (
    (completion, 10), (conversation, 5), (disconnect, 4), (invalid_request, 4), (metadata_request, 1),
)  # fmt: skip


class Load:
    """Clients that send requests at random times with a given rate, and the counts of responses."""

    def __init__(self, server: Running, pool: concurrent.futures.Executor):
        self.asked, self.found = 0, collections.Counter[str]()
        self._server, self._pool, self._pick = server, pool, random.Random(0)

    def run(self, seconds: float, rate: float) -> None:
        """Ask for so long, and wait until all is answered. Raises what any of the clients has raised."""
        kinds, weights = zip(*KINDS, strict=True)
        begun, due, waiting = time.monotonic(), 0.0, []
        while (due := due + self._pick.expovariate(rate)) < seconds:
            time.sleep(max(0.0, begun + due - time.monotonic()))
            ask, own = self._pick.choices(kinds, weights)[0], random.Random(self._pick.random())
            waiting.append(self._pool.submit(ask, self._server, own))
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        self.asked += len(waiting)
        self.found.update(each.result() for each in waiting)
        until_idle(self._server)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_under_mixed_load(tmp_path):
    watched, rows = tmp_path / "arrays", list[Row]()
    flags = ("--prefill-chunk", 16, "--prefix-cache-bytes", 400_000)  # full after a few hundred prompts
    with served(CHAT, *flags, watched=watched) as (process, server), concurrent.futures.ThreadPoolExecutor(16) as pool:
        load, begun = Load(server, pool), time.monotonic()
        for row in range(ROWS + 1):
            fast = max(RATE, 10.0)
            load.run(*((SECONDS / ROWS, RATE) if row else (WARM / fast, fast)))
            held = memory_of(process), *arrays_of(process, watched), seconds_of(process)
            rows.append(Row(time.monotonic() - begun, load.asked, *held))
            print("  ".join(f"{name}={value:.1f}" for name, value in rows[-1]._asdict().items()), flush=True)
        print(dict(load.found), f"clients: {time.process_time():.0f} s of processor time", flush=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    warm, last = rows[0], rows[-1]
    assert min(load.found[kind] for kind in ("chat", "left early", "left late", "refused", "formed")) > 0
    assert last.memory < warm.memory + MOST
    assert last.arrays <= warm.arrays
    assert last.nbytes <= warm.nbytes + 20_000  # entries of the full prefix cache differ in size
