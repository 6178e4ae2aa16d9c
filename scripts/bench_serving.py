"""Measure a server under load, with clients that send again as soon as they have an answer; also llama.cpp and others.

Prompts and answers have the lengths of people's chats, as far as these are log-normal: medians of 96 and 64 tokens.
Each client reads its answer as a stream; waits are measured where it reads.
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


class CompletionWork(NamedTuple):
    """One request: ids of a prompt, and the number of tokens that follow."""

    prompt: list[int]
    new: int


class Waits(NamedTuple):
    """Waits of a client for one answer: seconds to the first token, and between the others."""

    first: float
    between: list[float]
    tokens: int


def requests(count: int, seed: int = 0) -> list[CompletionWork]:
    """Make the same requests for every side, others for each seed: a cache of prompts is of no use to any side."""
    pick = random.Random(seed)

    def length(median: int, most: int) -> int:
        return max(1, min(most, round(median * pick.lognormvariate(0, 0.8))))

    return [
        CompletionWork([pick.randrange(3, 32_000) for _ in range(length(96, 300))], length(64, 200))
        for _ in range(count)
    ]


def save_model(folder: Path) -> None:
    """Save a Llama of 134 M drawn weights as transformers reads it."""
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
    """Save that model as llama.cpp reads it; names of its tokens are their ids, since all prompts are ids."""
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
    """A server on a free port, for a `with` block. Its kinds define the command and the requests."""

    path: str

    def __init__(self, *command: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [*command, "--port", str(self.port)]

    @abc.abstractmethod
    def body(self, work: CompletionWork) -> dict[str, Any]:
        """Return the body of a request."""

    @abc.abstractmethod
    def tokens(self, event: dict[str, Any]) -> int:
        """Return the number of tokens in an event of the stream."""

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

    def answer(self, work: CompletionWork) -> Waits:
        """Send a request, and read the stream."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        link.request("POST", self.path, json.dumps(self.body(work)), {"Content-Type": "application/json"})
        answer, times, tokens = link.getresponse(), [], 0
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                new = self.tokens(json.loads(line[6:]))
                tokens += new
                times += [time.perf_counter()] * bool(new)
        link.close()
        return Waits(times[0] - begin, [b - a for a, b in itertools.pairwise(times)], tokens)


class OurServer(Server):
    """`scripts/serve.py`."""

    path = "/v1/completions"

    def __init__(self, folder: Path, *flags: str):
        sizes = ["--max-batch-size", str(SLOTS), "--max-length", str(LENGTH)]
        super().__init__(sys.executable, str(ROOT / "scripts" / "serve.py"), "--model", str(folder), *sizes, *flags)

    def body(self, work: CompletionWork) -> dict[str, Any]:
        options = dict(prompt=work.prompt, max_tokens=work.new, temperature=0)
        return options | dict(stream=True, ignore_eos=True, return_token_ids=True)

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

    def body(self, work: CompletionWork) -> dict[str, Any]:
        return dict(prompt=work.prompt, n_predict=work.new, temperature=0, stream=True, ignore_eos=True)

    def tokens(self, event: dict[str, Any]) -> int:
        return 0 if event["stop"] else len(event["tokens"])


def load(server: Server, clients: int, work: list[CompletionWork]) -> tuple[float, list[Waits]]:
    """Measure the seconds in which a number of clients have all answers, and their waits."""
    left: queue.SimpleQueue[CompletionWork] = queue.SimpleQueue()
    for one in work:
        left.put(one)
    answers: list[Waits] = []

    def client() -> None:
        while True:
            try:
                one = left.get_nowait()
            except queue.Empty:
                return
            answers.append(server.answer(one))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin, answers


def percentile(numbers: list[float], share: float) -> float:
    """Return the number below which a share of them lies."""
    ordered = sorted(numbers) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bench_serving(options: Any) -> None:
    """Print tables; `options.picture` names a file for a plot of their rates."""
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
    if options.picture:
        draw(options.picture, rates)


def measure(title: str, server: Server) -> dict[int, float]:
    """Print a table of one server; return tokens a second by the number of clients."""
    print(title)
    print("clients  tokens/s   first token s p50    p99   between tokens ms p50    p99", flush=True)
    rates = {}
    with server:
        server.answer(requests(1)[0])
        for clients in CLIENTS:
            seconds, answers = load(server, clients, requests(request_count(clients), seed=clients))
            rates[clients] = sum(waits.tokens for waits in answers) / seconds
            print(row(clients, rates[clients], answers), flush=True)
    return rates


def request_count(clients: int) -> int:
    """Return the number of requests of a number of clients together."""
    return max(6, 3 * clients)


def draw(file: str, rates: dict[str, dict[int, float]]) -> None:
    """Draw tokens a second over clients, as an image."""
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


def row(clients: int, rate: float, answers: list[Waits]) -> str:
    """Format a line of the table."""
    first = [waits.first for waits in answers]
    between = [1000 * gap for waits in answers for gap in waits.between]
    waits = f"{percentile(first, 0.5):20.2f} {percentile(first, 0.99):6.2f}"
    return f"{clients:7} {rate:9.1f} {waits} {percentile(between, 0.5):21.0f} {percentile(between, 0.99):6.0f}"


def batched(peer: str, folder: Path) -> dict[int, float]:
    """Measure transformers' continuous batching, with as many requests at a time as there are clients."""
    output = subprocess.run([peer, __file__, str(folder)], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(CLIENTS, map(float, output[-len(CLIENTS) :]), strict=True))


def batched_there(folder: str) -> None:
    """Answer the same requests with `generate_batch`, as many at a time as there are clients."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    answer_together(model, requests(1))
    for clients in CLIENTS:
        work, tokens, seconds = requests(request_count(clients), seed=clients), 0, 0.0
        for begin in range(0, len(work), clients):
            new, taken = answer_together(model, work[begin : begin + clients])
            tokens, seconds = tokens + new, seconds + taken
        print(tokens / seconds, flush=True)


def answer_together(model: Any, work: list[CompletionWork]) -> tuple[int, float]:
    """Answer requests at once, all of the mean of their lengths; return tokens and seconds."""
    from transformers import GenerationConfig

    new = round(statistics.mean(one.new for one in work))
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    begin = time.perf_counter()
    results = model.generate_batch(inputs=[one.prompt for one in work], generation_config=config)
    return sum(len(each.generated_tokens) for each in results.values()), time.perf_counter() - begin


if __name__ == "__main__":
    batched_there(*sys.argv[1:])
