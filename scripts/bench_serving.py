"""A server under load: clients that each ask again as soon as they are answered; beside it llama.cpp and transformers.

Prompts and answers have the lengths of people's chats, as far as these are log-normal: medians of 96 and 64 tokens.
Each client reads its answer as a stream; what it waits for is measured where it reads.
"""

import abc
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
    """The same ones for every side, others for each seed: what a side remembers of prompts is of no use."""
    pick = random.Random(seed)

    def length(median: int, most: int) -> int:
        return max(1, min(most, round(median * pick.lognormvariate(0, 0.8))))

    return [Asked([pick.randrange(3, 32_000) for _ in range(length(96, 300))], length(64, 200)) for _ in range(count)]


def save_model(folder: Path) -> None:
    """A Llama of 134 M drawn weights, as transformers reads it."""
    import jax

    import eqx_decoders as ed
    from eqx_decoders.families.common import DecoderSizes
    from eqx_decoders.families.llama import llama

    heads = SIZES["num_heads"]
    numbers: dict[str, Any] = dict(SIZES, num_kv_heads=heads, head_dim=SIZES["embed_dim"] // heads)
    ed.save_hf(ed.init(llama(DecoderSizes(**numbers)), key=jax.random.key(0)), folder)
    for file in (ROOT / "tests" / "fixtures" / "chat_llama").glob("tokenizer*"):
        shutil.copy(file, folder)


def save_gguf(folder: Path, file: Path) -> None:
    """That model as llama.cpp reads it; its tokens are called by their ids, since all prompts are ids."""
    try:
        import gguf
    except ImportError as error:
        raise SystemExit("llama.cpp reads GGUF: pip install gguf.") from error
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    out = gguf.GGUFWriter(file, "llama")
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_context_length(LENGTH)
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_block_count(layers)
    out.add_head_count(heads["q_proj"])
    out.add_head_count_kv(heads["k_proj"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_tokenizer_model("llama")
    out.add_token_list([f"<{token}>" for token in range(vocab)])
    out.add_token_scores([0.0] * vocab)
    out.add_token_types([gguf.TokenType.NORMAL] * vocab)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, weight in load_file(folder / "model.safetensors").items():
        for part in heads:  # of which llama.cpp turns neighbours, and the published weights halves
            if part in name:
                halves = weight.reshape(heads[part], 2, -1, *weight.shape[1:])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, name
        out.add_tensor(known, weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Server(abc.ABC):
    """A server on a free port, for a `with` block. Its kinds say how it is started and asked."""

    path: str

    def __init__(self, *command: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [*command, "--port", str(self.port)]

    @abc.abstractmethod
    def asks(self, asked: Asked) -> dict[str, Any]:
        """The body of a request."""

    @abc.abstractmethod
    def tokens(self, event: dict[str, Any]) -> int:
        """How many tokens an event of the stream brings."""

    def __enter__(self) -> "Server":
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        while self.process.poll() is None:
            try:
                link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                link.request("GET", "/health")
                if link.getresponse().status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.3)
        raise SystemExit(f"{' '.join(self.command)} ended with exit code {self.process.returncode}.")

    def __exit__(self, *_: Any) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def answer(self, asked: Asked) -> Waited:
        """Ask, and read the stream."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        link.request("POST", self.path, json.dumps(self.asks(asked)), {"Content-Type": "application/json"})
        answer, times, tokens = link.getresponse(), [], 0
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                found = self.tokens(json.loads(line[6:]))
                tokens += found
                times += [time.perf_counter()] * bool(found)
        link.close()
        return Waited(times[0] - begin, [b - a for a, b in itertools.pairwise(times)], tokens)


class OurServer(Server):
    """`scripts/serve.py`."""

    path = "/v1/completions"

    def __init__(self, folder: Path, *flags: str):
        sizes = ["--max-batch-size", str(SLOTS), "--max-length", str(LENGTH)]
        super().__init__(sys.executable, str(ROOT / "scripts" / "serve.py"), "--model", str(folder), *sizes, *flags)

    def asks(self, asked: Asked) -> dict[str, Any]:
        told = dict(prompt=asked.prompt, max_tokens=asked.new, temperature=0)
        return told | dict(stream=True, ignore_eos=True, return_token_ids=True)

    def tokens(self, event: dict[str, Any]) -> int:
        return len(event["choices"][0].get("token_ids") or [])


class LlamaCpp(Server):
    """llama.cpp's `llama-server`, with as many slots of that length, weights and cache in float32."""

    path = "/completion"

    def __init__(self, program: str, file: Path):
        threads = ["--threads", str(os.cpu_count())]
        sizes = ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * LENGTH)]
        cache = ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        super().__init__(program, "--model", str(file), *threads, *sizes, *cache, "--log-disable")

    def asks(self, asked: Asked) -> dict[str, Any]:
        return dict(prompt=asked.prompt, n_predict=asked.new, temperature=0, stream=True, ignore_eos=True)

    def tokens(self, event: dict[str, Any]) -> int:
        return 0 if event["stop"] else len(event["tokens"])


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
    """Print tables; `options.image` names a file for a plot of their rates."""
    peer = options.peer
    if peer is None and all(map(importlib.util.find_spec, ("torch", "transformers"))):
        peer = sys.executable
    program = options.llama_server or shutil.which("llama-server")
    print(f"\nservers: Llama of 134 M weights, float32, {SLOTS} slots of {LENGTH} tokens; closed loop")
    rates: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        rates["eqx_decoders"] = measure("eqx_decoders, scripts/serve.py", OurServer(folder))
        if program is not None:
            save_gguf(folder, folder / "model.gguf")
            rates["llama.cpp"] = measure("llama.cpp, llama-server", LlamaCpp(program, folder / "model.gguf"))
        if peer is not None:
            rates["transformers"] = batched(peer, folder)
            print("transformers, generate_batch\nclients  tokens/s")
            for clients, rate in rates["transformers"].items():
                print(f"{clients:7} {rate:9.1f}")
    if options.image:
        draw(options.image, rates)


def measure(title: str, server: Server) -> dict[int, float]:
    """Print a table of one server; tokens a second by the number of clients."""
    print(title)
    print("clients  tokens/s   first token s p50    p99   between tokens ms p50    p99", flush=True)
    rates = {}
    with server:
        server.answer(requests(1)[0])
        for clients in CLIENTS:
            seconds, seen = load(server, clients, requests(asked_by(clients), seed=clients))
            rates[clients] = sum(waited.tokens for waited in seen) / seconds
            print(row(clients, rates[clients], seen), flush=True)
    return rates


def asked_by(clients: int) -> int:
    """How many requests so many clients send together."""
    return max(6, 3 * clients)


def draw(file: str, rates: dict[str, dict[int, float]]) -> None:
    """Tokens a second over clients, as an image."""
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
        work, tokens, seconds = requests(asked_by(clients), seed=clients), 0, 0.0
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
