"""Read a prompt and continue it, here and with transformers, in turn: other load of the machine hits both.

Each side is a process of its own, and may be another interpreter; this file is all that the other one needs of this
project, so JAX and this package are imported where they are used.
"""

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """A prompt of `prompt` tokens in each of `batch` rows, and `new` greedy tokens behind it."""

    dtype: str
    batch: int
    prompt: int = 512
    new: int = 64


SIZES = dict(vocab_size=32_000, embed_dim=768, num_layers=12, num_heads=12, mlp_dim=2048)  # 134 M weights
WORKS = tuple(Work(dtype, batch) for dtype in ("float32", "bfloat16") for batch in (1, 8))
Seconds = tuple[float, float]  # of the prompt, and of the tokens behind it


def our_model(work: Work, sizes: dict[str, int]) -> tuple[Any, Any]:
    """Make a model of drawn weights, and prompts for it."""
    import jax
    import numpy as np

    import eqx_decoders as ed
    from eqx_decoders.core.malloc import keep_memory
    from eqx_decoders.families.common import DecoderSizes
    from eqx_decoders.families.llama import llama

    keep_memory()
    heads = sizes["num_heads"]
    numbers: dict[str, Any] = dict(sizes, num_kv_heads=heads, head_dim=sizes["embed_dim"] // heads)
    precision = ed.Precision(params=work.dtype, compute=work.dtype)
    model = ed.init(llama(DecoderSizes(**numbers)), key=jax.random.key(0), precision=precision)
    ids = np.random.default_rng(0).integers(0, sizes["vocab_size"], (work.batch, work.prompt)).astype(np.int32)
    return model, ids


def our_generate(work: Work, sizes: dict[str, int] = SIZES) -> Callable[[], Seconds]:
    """Measure `generate`: seconds of one token, and the further seconds of all tokens."""
    import jax

    import eqx_decoders as ed

    model, ids = our_model(work, sizes)
    return _first_and_others(work, lambda new: jax.block_until_ready(ed.generate(model, ids, max_new_tokens=new)))


def our_engine(work: Work, sizes: dict[str, int] = SIZES) -> Callable[[], Seconds]:
    """Measure an engine of eight slots, as a server has it, of which a single request uses one."""
    from eqx_decoders.serving import Engine, EngineConfig, Request

    model, ids = our_model(work, sizes)
    length = work.prompt + work.new + 1
    options: dict[str, Any] = dict(max_length=length, prefix_cache_bytes=0, batch_invariant=False)
    engine = Engine(model, EngineConfig(max_batch_size=max(8, work.batch), **options))

    def run(new: int) -> Any:
        return engine.run([Request(prompt=tuple(row), max_new_tokens=new) for row in ids.tolist()])

    return _first_and_others(work, run)


def _first_and_others(work: Work, answer: Callable[[int], Any]) -> Callable[[], Seconds]:
    """Measure the seconds of the prompt's token, and the further seconds of all tokens."""

    def seconds(new: int) -> float:
        begin = time.perf_counter()
        answer(new)
        return time.perf_counter() - begin

    def run() -> Seconds:
        prompt = seconds(1)
        return prompt, seconds(work.new + 1) - prompt

    run()  # compiles
    return run


def their_generate(work: Work, sizes: dict[str, int] = SIZES) -> Callable[[], Seconds]:
    """Measure the forward of transformers' Llama with its cache, without the overhead of its `generate`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["embed_dim"],
        intermediate_size=sizes["mlp_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_heads"],
        max_position_embeddings=2 * (work.prompt + work.new),
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, work.dtype)).eval()
    ids = torch.randint(0, sizes["vocab_size"], (work.batch, work.prompt))

    @torch.inference_mode()
    def run() -> Seconds:
        begin = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        token, middle = out.logits[:, -1].argmax(-1, keepdim=True), time.perf_counter()
        for _ in range(work.new):
            out = model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        return middle - begin, time.perf_counter() - middle

    run()
    return run


def our_roofs(work: Work) -> Callable[[], Seconds]:
    """Measure the best of XLA on this machine: a product of 2048-cubed, and reading 400 MB."""
    import jax
    import jax.numpy as jnp

    square, long = jnp.ones((2048, 2048), work.dtype), jnp.ones((100_000_000,), jnp.float32)
    product, total = jax.jit(jnp.matmul), jax.jit(jnp.sum)
    return lambda: (
        best(lambda: product(square, square).block_until_ready()),
        best(lambda: total(long).block_until_ready()),
    )


def their_roofs(work: Work) -> Callable[[], Seconds]:
    """Measure the same with torch."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    square, long = torch.ones(2048, 2048, dtype=getattr(torch, work.dtype)), torch.ones(100_000_000)
    return lambda: (best(lambda: square @ square), best(lambda: long.sum()))


def best(run: Callable[[], Any]) -> float:
    """Return the least seconds of a few runs after a first one."""
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


# what is measured: here, and with transformers; servers, which take requests as they come, are in bench_serving.py
KINDS: dict[str, dict[str, Callable[[Work], Callable[[], Seconds]]]] = {
    "generate": {"here": our_generate, "transformers": their_generate},
    "engine": {"here": our_engine, "transformers": their_generate},
    "roofs": {"here": our_roofs, "transformers": their_roofs},
}


def in_turn(kind: str, work: Work, peer: str, repeats: int) -> dict[str, list[Seconds]]:
    """Measure the seconds of both sides in turn."""
    interpreters = {"here": sys.executable, "transformers": peer}
    pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    sides: dict[str, Any] = {
        name: subprocess.Popen([python, __file__, kind, name, json.dumps(work)], **pipes)
        for name, python in interpreters.items()
    }
    rows: dict[str, list[Seconds]] = {name: [] for name in sides}
    try:
        for process in sides.values():
            _answer(process)  # both are ready
        for _ in range(repeats):
            for name, process in sides.items():
                process.stdin.write("go\n")
                rows[name].append(tuple(_answer(process)))
    finally:
        for process in sides.values():
            process.stdin.close()
            process.wait()
    return rows


def _answer(process: Any) -> Any:
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{' '.join(process.args[:1])} ended with exit code {process.wait()}.")
    return json.loads(line)


def median(rows: list[Seconds], place: int) -> float:
    """Return the median of one of the two figures."""
    return statistics.median(row[place] for row in rows)


def show_inference(peer: str | None, repeats: int, works: tuple[Work, ...] = WORKS, say: Any = print) -> bool:
    """Print a table; return whether there was a side to compare with."""
    if peer is None and all(map(importlib.util.find_spec, ("torch", "transformers"))):
        peer = sys.executable
    if peer is None:
        say("\ninference beside transformers: not installed here; --peer PYTHON names an interpreter that has it")
        return False
    say(f"\nLlama of 134 M weights, prompts of {works[0].prompt} tokens + {works[0].new}; medians of {repeats} in turn")
    for dtype in dict.fromkeys(work.dtype for work in works):
        for name, rows in in_turn("roofs", Work(dtype, 1), peer, 3).items():
            product, read = (min(row[place] for row in rows) for place in (0, 1))
            say(f"{dtype:9} {name:12}: {2 * 2.048**3 / product:5.0f} GFLOP/s, reads {0.4 / read:5.1f} GB/s at best")
    for kind, work in itertools.product(("generate", "engine"), works):
        sides = in_turn(kind, work, peer, repeats)
        for place, (what, count) in enumerate((("prefill", work.prompt), ("decode", work.new))):
            ours, theirs = (work.batch * count / median(rows, place) for rows in sides.values())
            text = f"{ours:8.1f} tokens/s, transformers {theirs:8.1f}: {ours / theirs:.2f}"
            say(f"{kind:8} {work.dtype:9} batch {work.batch} {what:8} {text}", flush=True)
    return True


def serve_measurements(kind: str, side: str, work: str) -> None:
    """Prepare, then measure once for each line of the input."""
    run = KINDS[kind][side](Work(*json.loads(work)))
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


if __name__ == "__main__":
    serve_measurements(*sys.argv[1:])
