"""Measure training steps (seconds, CPU seconds, memory, MFU), losses, compiling, decoding, experts, loading, …

    make bench                        # the 58 M Llama on this machine
    python scripts/bench.py --only step

Each training step is measured in a process of its own, so that its peak memory is its own.
"""

import argparse
import concurrent.futures
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from bench_accelerator import accelerator
from bench_data import encode, make_text, plan, restart, tokenise
from bench_images import bench_images
from bench_inference import show_inference
from bench_layers import delta_rule, experts, log_probs
from bench_rl import show_rl
from bench_serving import bench_serving
from bench_sizes import SLICES, plan_sizes
from bench_training import (
    BATCH,
    LENGTH,
    ROUNDINGS,
    aot_experts,
    bench_config,
    compile_seconds,
    decode,
    load_checkpoint,
    loop,
    losses,
    make_checkpoint,
    print_aot,
    step,
)

import eqx_decoders as ed
from eqx_decoders.core.malloc import keep_memory


def alone(*words: str, **environment: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--one", *words]
    output = subprocess.check_output(command, text=True, env=os.environ | environment)
    return json.loads(output.splitlines()[-1])


ONE = {
    "step": lambda dtype, remat, repeats: step(dtype, remat, int(repeats)),
    "losses": lambda name, folder, steps, every: losses(name, folder, int(steps), int(every)),
    "loop": lambda model, rows, length: loop(model, int(rows), int(length)),
    "compile": lambda layers: compile_seconds(int(layers)),
    "decode": lambda batch: decode(int(batch)),
    "experts": lambda repeats: experts(int(repeats)),
    "delta-rule": lambda length, repeats: delta_rule(int(length), int(repeats)),
    "log-probs": lambda vocab, repeats: log_probs(int(vocab), int(repeats)),
    "aot-experts": aot_experts,
    "load": load_checkpoint,
    "make": make_checkpoint,
    "encode": lambda folder, begin, end: encode(folder, int(begin), int(end)),
    "tokenise": tokenise,
    "plan": lambda documents: plan(int(documents)),
}


def show_step(options: argparse.Namespace) -> None:
    count = ed.count_parameters(bench_config())
    print(f"\ntraining step, Llama of {count / 1e6:.1f} M weights, batch {BATCH} x {LENGTH}, AdamW")
    print(f"{'dtype':10} {'remat':6} {'s':>7} {'median':>7} {'CPU s':>7} {'GB':>6} {'roof GFLOP/s':>13} {'MFU':>6}")
    for dtype in options.dtypes:
        for remat in ("none", "full"):
            row = alone("step", dtype, remat, str(options.repeats))
            print(
                f"{dtype:10} {remat:6} {row['seconds']:7.3f} {row['median']:7.3f} {row['cpu_seconds']:7.3f} "
                f"{row['peak_gb']:6.2f} {row['gflops']:13.0f} {row['mfu']:6.3f}",
                flush=True,
            )


def show_loop(options: argparse.Namespace) -> None:
    print("\nwhat a run adds to its compiled step")
    for model, rows, length in (("gpt3-52k", "8", "256"), ("tiny", "1", "64"), ("tiny", "8", "256")):
        row = alone("loop", model, rows, length)
        print(
            f"{model}, {rows} x {length}: the step alone {1000 * row['alone']:.1f} ms, in a run "
            f"{1000 * row['run']:.1f} ms; median of the ratios {row['ratio']:.3f}",
            flush=True,
        )


def show_losses(options: argparse.Namespace) -> None:
    steps, every = 150, 50
    print(f"\nlosses of tiny, 8 x 128 tokens, {steps} steps: means of 20 steps up to every {every}, and held-out")
    with tempfile.TemporaryDirectory() as folder:
        for name in ROUNDINGS:
            row = alone("losses", name, folder, str(steps), str(every))
            print(f"{name:33} {'  '.join(f'{loss:.3f}' for loss in row['losses'] + row['held_out'])}", flush=True)


def show_compile(options: argparse.Namespace) -> None:
    # the best of three, in turn: a compiler's seconds vary more than the layers make them
    runs = [[alone("compile", layers) for layers in ("2", "32")] for _ in range(3)]
    rows = [min(column, key=lambda row: row["trace"] + row["compile"]) for column in zip(*runs, strict=True)]
    print("\ntrace and compile, training step")
    for row in rows:
        print(f"{row['layers']:3} layers: trace {row['trace']:.2f} s, compile {row['compile']:.2f} s", flush=True)
    sums = [row["trace"] + row["compile"] for row in rows]
    print(f"ratio {sums[1] / sums[0]:.2f}")


def show_decode(options: argparse.Namespace) -> None:
    print("\ndecoding, 64 + 128 tokens, float32")
    for batch in ("1", "8"):
        row = alone("decode", batch)
        print(f"batch {row['batch']}: {row['tokens_per_second']:.1f} tokens/s", flush=True)


def show_experts(options: argparse.Namespace) -> None:
    rows = alone("experts", str(3 * options.repeats))
    print("\n64 experts of 512 x 256, 4 of them for each of 2048 tokens, forward and backward, float32")
    print(f"{'':27} {'s':>7} {'median':>7} {'ratio':>6}")
    yardstick = statistics.median(rows["dense products"])
    for name, seconds in rows.items():
        median = statistics.median(seconds)
        print(f"{name:27} {min(seconds):7.3f} {median:7.3f} {median / yardstick:6.2f}", flush=True)


def show_delta_rule(options: argparse.Namespace) -> None:
    print("\nrecurrences beside attention, two rows, four heads of 64, forward and backward, float32: milliseconds")
    for length in (512, 1024, 2048, 4096, 8192):
        rows = alone("delta-rule", str(length), str(options.repeats))
        text = ", ".join(f"{name} {1000 * min(seconds):.1f}" for name, seconds in rows.items())
        print(f"{length:5} tokens: {text}", flush=True)


def show_log_probs(options: argparse.Namespace) -> None:
    print("\nlog-probs beside the loss of next tokens, 2048 tokens, 1024 features, forward and backward, float32: ms")
    for vocab in (32_000, 128_000):
        rows = alone("log-probs", str(vocab), str(options.repeats))
        loss, found = rows.values()
        ratio = statistics.median(b / a for a, b in zip(loss, found, strict=True))
        text = ", ".join(f"{name} {1000 * min(seconds):.0f}" for name, seconds in rows.items())
        print(f"{vocab:7,} ids: {text}; {ratio:.2f} times", flush=True)


def show_load(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = alone("make", f"{folder}/checkpoint")
        row = alone("load", f"{folder}/checkpoint", JAX_NUM_CPU_DEVICES="8")
    print(f"\na Hugging Face checkpoint of {row['size_mb']:,.0f} MB: saved in {saved['seconds']:.1f} s")
    more = row["peak_mb"] - row["size_mb"]
    print(
        f"loaded with fsdp=8 in {row['seconds']:.1f} s; peak {row['peak_mb']:,.0f} MB of the host: {more:.0f} MB "
        f"more than the model (its largest tensor has {row['tensor_mb']:.0f} MB)"
    )


def show_restart(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, cache = Path(folder) / "run", {"EQX_DECODERS_CACHE": folder}
        restart(run, **cache)
        turns = [(restart(run, **cache), restart(run, JAX_ENABLE_COMPILATION_CACHE="0", **cache)) for _ in range(5)]
    kept, compiled = map(min, zip(*turns, strict=True))
    print("\nfrom the start of the program to the first step of a resumed run of tiny, best of five in turns")
    print(f"{kept:.1f} s; {compiled:.1f} s with JAX_ENABLE_COMPILATION_CACHE=0", flush=True)


def show_tokenise(options: argparse.Namespace) -> None:
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        make_text(Path(folder), round(1e9 * options.gigabytes))
        size = Path(folder, "text.jsonl").stat().st_size
        cuts = [size * core // cores for core in range(cores + 1)]
        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            parts = [
                pool.submit(alone, "encode", folder, str(begin), str(end), RAYON_NUM_THREADS="1")
                for begin, end in itertools.pairwise(cuts)
            ]
            best = sum(part.result()["rate"] for part in parts)
            processor = statistics.mean(part.result()["processor_rate"] for part in parts)
        row = alone("tokenise", folder)
    print(f"\ntokenising {size / 1e9:.2f} GB of JSON lines, {row['tokens'] / 1e6:,.0f} M tokens, by {cores} processes")
    of_processor = "MB in a second of processor time"  # which does not depend on what else the machine does
    alone_rate, store_rate = processor / 1e6, row["processor_rate"] / 1e6
    print(f"`encode_batch_fast` alone, a process for each core: {best / 1e6:.2f} MB/s, {alone_rate:.2f} {of_processor}")
    print(
        f"a token store: {row['rate'] / 1e6:.2f} MB/s ({row['rate'] / best:.0%}), {store_rate:.2f} "
        f"({store_rate / alone_rate:.0%})"
    )
    print(f"in {row['seconds']:.0f} s; peak of all processes together {row['peak_mb']:,.0f} MB", flush=True)


def show_plan(options: argparse.Namespace) -> None:
    print("\nplans of batches of 256 x 2048 (sizes of documents computed, tokens not read)")
    for documents in ("16000", "500000000"):
        row = alone("plan", documents)
        print(
            f"{row['documents']:,} documents: rows counted in {row['count']:.2f} s; opened in {row['open']:.2f} s, "
            f"first batch after {row['first batch']:.2f} s, {row['rate']:,.0f} rows/s; around the end of an epoch the "
            f"slowest row takes {row['epoch']:.3f} s; peak of the process {row['peak_gb']:.2f} GB",
            flush=True,
        )


def show_aot_experts(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("libtpu") is None:
        print("\ncompilation for TPUs needs libtpu (extra `aot`), which is not installed: left out")
        return
    print(f"\ntraining step for {options.topology}, {options.mesh}, 4096 tokens a device, bfloat16, remat full")
    for name in options.models or ("deepseek3-671b", "llama4-17b-128e"):
        for exchange in ("gather", "all_to_all"):
            words = (name, options.topology, options.mesh, exchange)
            print_aot(name, exchange, alone("aot-experts", *words, JAX_PLATFORMS="cpu"))


def show_sizes(options: argparse.Namespace) -> None:
    print(f"\ntraining steps of all sizes, compiled for {options.chips} chips: estimates, nothing was run on any")
    plan_sizes(options.rows, options.models, options.chips)


def show_transformers(options: argparse.Namespace) -> None:
    show_inference(options.peer, options.repeats)


def show_accelerator(options: argparse.Namespace) -> None:
    accelerator(options.repeats)


SHOWN = {
    "step": show_step,
    "losses": show_losses,
    "loop": show_loop,
    "compile": show_compile,
    "decode": show_decode,
    "transformers": show_transformers,
    "serving": bench_serving,
    "pictures": bench_images,
    "experts": show_experts,
    "delta-rule": show_delta_rule,
    "log-probs": show_log_probs,
    "rl": show_rl,
    "load": show_load,
    "restart": show_restart,
    "tokenise": show_tokenise,
    "plan": show_plan,
    "aot-experts": show_aot_experts,
}
ON_REQUEST = {"sizes": show_sizes, "accelerator": show_accelerator}  # hours; what is not everywhere


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[*SHOWN, *ON_REQUEST], help="measure one thing, not all; sizes takes hours")
    parser.add_argument("--repeats", type=int, default=7, help="steps that are timed")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="text for tokenise")
    parser.add_argument("--topology", default="v5p:8x8x8", help="what aot-experts compiles for")
    parser.add_argument("--mesh", default='{"fsdp": 64, "expert": 8}', help="its mesh, as JSON")
    parser.add_argument("--models", nargs="+", help="models of aot-experts and sizes")
    parser.add_argument("--chips", default="tpu", choices=SLICES, help="what sizes compiles for")
    parser.add_argument("--rows", type=Path, default=Path("sizes.jsonl"), help="where sizes keeps its rows")
    parser.add_argument("--peer", help="an interpreter with torch and transformers, for transformers and serving")
    parser.add_argument("--llama-server", help="llama.cpp's program for serving, if it is not on the PATH")
    parser.add_argument("--picture", help="a file for a plot of what --only serving finds, such as serving.png")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        keep_memory()
        print(json.dumps(ONE[options.one[0]](*options.one[1:])))
        return 0
    print(f"jax {jax.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, {jax.default_backend()}")
    for name in [options.only] if options.only else SHOWN:
        (SHOWN | ON_REQUEST)[name](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
