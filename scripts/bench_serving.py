"""A server under load: clients that each ask again as soon as they are answered, and beside it transformers' batching.

Prompts and answers have the lengths of people's chats, as far as these are log-normal: medians of 96 and 64 tokens.
Each client reads its answer as a stream; what it waits for is measured where it reads.
"""

import http.client
import importlib.util
import itertools
import json
import os
import queue
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple


CLIENTS = (1, 2, 4, 8, 16, 32)
SIZES = dict(vocab_size=32_000, embed_dim=768, num_layers=12, num_heads=12, mlp_dim=2048)  # 134 M weights
LENGTH, SLOTS = 512, 16
ROOT = Path(__file__).parents[1]


class Asked(NamedTuple):
    """One request: ids of a prompt, and how many tokens are to follow."""

    prompt: list[int]
    new: int


class Waited(NamedTuple):
    """What a client saw of one: seconds to the first token, and between the others."""

    first: float
    between: list[float]
    tokens: int


def requests(count: int, seed: int = 0) -> list[Asked]:
    """The same ones for every side."""
    pick = random.Random(seed)

    def length(median: int, most: int) -> int:
        return max(1, min(most, round(median * pick.lognormvariate(0, 0.8))))

    return [Asked([pick.randrange(3, 32_000) for _ in range(length(96, 300))], length(64, 200)) for _ in range(count)]


def save_model(folder: Path) -> None:
    """A Llama of 134 M drawn weights, as transformers reads it."""
    import jax

    import eqx_decoders as ed
    from eqx_decoders.families.llama import llama
    from eqx_decoders.families.shape import Shape

    heads = SIZES["num_heads"]
    numbers: dict[str, Any] = dict(SIZES, num_kv_heads=heads, head_dim=SIZES["embed_dim"] // heads)
    ed.save_hf(ed.init(llama(Shape(**numbers)), key=jax.random.key(0)), folder)
    for file in (ROOT / "tests" / "fixtures" / "chat_llama").glob("tokenizer*"):
        shutil.copy(file, folder)


class Server:
    """`scripts/serve.py` on a free port, for a `with` block."""

    def __init__(self, folder: Path, *flags: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--model", str(folder), "--port", str(self.port)]
        command += ["--max-batch-size", str(SLOTS), "--max-length", str(LENGTH), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def __enter__(self) -> "Server":
        while self.process.poll() is None:
            try:
                link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                link.request("GET", "/health")
                if link.getresponse().status == 200:
                    return self
            except OSError:
                time.sleep(0.3)
        raise SystemExit(f"scripts/serve.py ended with exit code {self.process.returncode}.")

    def __exit__(self, *_: Any) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def answer(self, asked: Asked) -> Waited:
        """Ask, and read the stream."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body: dict[str, Any] = dict(prompt=asked.prompt, max_tokens=asked.new, temperature=0, stream=True)
        begin = time.perf_counter()
        told = json.dumps(body | dict(ignore_eos=True, return_token_ids=True))
        link.request("POST", "/v1/completions", told, {"Content-Type": "application/json"})
        answer, times, tokens = link.getresponse(), [], 0
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                found = len(json.loads(line[6:])["choices"][0].get("token_ids") or [])
                tokens += found
                times += [time.perf_counter()] * bool(found)
        link.close()
        return Waited(times[0] - begin, [b - a for a, b in itertools.pairwise(times)], tokens)


def load(server: Server, clients: int, work: list[Asked]) -> tuple[float, list[Waited]]:
    """Seconds in which so many clients have all answers, and what each waited."""
    left: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    for asked in work:
        left.put(asked)
    seen: list[Waited] = []

    def client() -> None:
        while True:
            try:
                asked = left.get_nowait()
            except queue.Empty:
                return
            seen.append(server.answer(asked))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin, seen


def percentile(numbers: list[float], share: float) -> float:
    """The number below which so much of them lies."""
    ordered = sorted(numbers) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bench_serving(options: Any) -> None:
    """Print a table; `options.picture` names a file for a plot of it."""
    peer = options.peer
    if peer is None and all(map(importlib.util.find_spec, ("torch", "transformers"))):
        peer = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        theirs = {} if peer is None else batched(peer, folder)
        print(f"\nserver: Llama of 134 M weights, float32, {SLOTS} slots of {LENGTH} tokens; closed loop")
        print("clients  tokens/s   first token s p50  p99   between tokens ms p50   p99   transformers tokens/s")
        rates = {}
        with Server(folder) as server:
            server.answer(requests(1)[0])
            for clients in CLIENTS:
                seconds, seen = load(server, clients, requests(asked_by(clients)))
                rates[clients] = sum(waited.tokens for waited in seen) / seconds
                beside = "" if peer is None else f"{theirs[clients]:18.1f}"
                print(row(clients, rates[clients], seen) + beside, flush=True)
    if options.picture:
        draw(
            options.picture,
            {"eqx_decoders, server": rates} | ({"transformers, generate_batch": theirs} if theirs else {}),
        )


def asked_by(clients: int) -> int:
    """How many requests so many clients send together."""
    return max(6, 3 * clients)


def draw(file: str, rates: dict[str, dict[int, float]]) -> None:
    """Tokens a second over clients, as a picture."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, each in rates.items():
        axes.plot(list(each), list(each.values()), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(CLIENTS, [str(clients) for clients in CLIENTS])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="clients at once", ylabel="tokens per second")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


def row(clients: int, rate: float, seen: list[Waited]) -> str:
    """A line of the table."""
    first = [waited.first for waited in seen]
    between = [1000 * gap for waited in seen for gap in waited.between]
    waits = f"{percentile(first, 0.5):20.2f} {percentile(first, 0.99):6.2f}"
    return f"{clients:7} {rate:9.1f} {waits} {percentile(between, 0.5):21.0f} {percentile(between, 0.99):6.0f}"


def batched(peer: str, folder: Path) -> dict[int, float]:
    """Tokens a second of transformers' continuous batching, with as many requests at a time as there are clients."""
    told = subprocess.run([peer, __file__, str(folder)], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(CLIENTS, map(float, told[-len(CLIENTS) :]), strict=True))


def batched_there(folder: str) -> None:
    """The same requests with `generate_batch`, as many at a time as there are clients."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    answer_together(model, requests(1))
    for clients in CLIENTS:
        work, tokens, seconds = requests(asked_by(clients)), 0, 0.0
        for begin in range(0, len(work), clients):
            found = answer_together(model, work[begin : begin + clients])
            tokens, seconds = tokens + found[0], seconds + found[1]
        print(tokens / seconds, flush=True)


def answer_together(model: Any, work: list[Asked]) -> tuple[int, float]:
    """Answer some requests at once; tokens and seconds. Its requests share one length: the mean of theirs."""
    from transformers import GenerationConfig

    new = round(statistics.mean(asked.new for asked in work))
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    begin = time.perf_counter()
    found = model.generate_batch(inputs=[asked.prompt for asked in work], generation_config=config)
    return sum(len(each.generated_tokens) for each in found.values()), time.perf_counter() - begin


if __name__ == "__main__":
    batched_there(*sys.argv[1:])
