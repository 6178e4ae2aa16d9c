"""Measure training steps (seconds, CPU seconds, memory, MFU), losses, compiling, decoding, experts, loading, …

    make bench                        # the 58 M Llama on this machine
    python scripts/bench.py --only step

Each training step is measured in a process of its own, so that its peak memory is its own.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_accelerator import accelerator
from bench_data import encode, make_text, memory, plan, restart, tokenise
from bench_images import bench_images
from bench_inference import show_inference
from bench_layers import delta_rule, experts
from bench_serving import bench_serving
from bench_sizes import plan_sizes

import eqx_decoders as ed
from eqx_decoders.core.malloc import keep_memory
from eqx_decoders.data.batches import Batch
from eqx_decoders.data.dataset import DataConfig
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.llama import llama
from eqx_decoders.training.flops import flops_per_token, measured_flops
from eqx_decoders.training.mesh_config import LowPrecisionConfig
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer


BATCH, LENGTH = 2, 512


def bench_config(layers: int = 8) -> ed.DecoderConfig:
    """A Llama of 58 M weights."""
    shape = DecoderSizes(
        vocab_size=32_000,
        embed_dim=512,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        mlp_dim=1536,
        eps=1e-5,
    )
    return llama(shape)


def trained(dtype: str, remat: Any):
    """A trainer, its state and a batch."""
    precision = ed.Precision(compute=jnp.dtype(dtype))
    model = ed.init(bench_config(), key=jax.random.key(0), precision=precision, remat=remat)
    trainer = Trainer.create(OptimizerConfig(), model, steps=1000)
    tokens = np.random.default_rng(0).integers(0, 32_000, (BATCH, LENGTH)).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    batch = Batch(tokens=tokens, segment_ids=np.ones_like(tokens), positions=positions, contiguous=True)
    return trainer, trainer.init(model, key=jax.random.key(1)), batch


def step(dtype: str, remat: str, repeats: int) -> dict[str, float]:
    """The training step: best and median seconds, CPU seconds of the best, peak memory of the process, MFU."""
    trainer, state, batch = trained(dtype, remat)
    state, metrics = trainer.step(state, batch)
    jax.block_until_ready(state)
    roof, runs = measured_flops(dtype), []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        state, metrics = trainer.step(state, batch)
        jax.block_until_ready((state, metrics))
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
        roof = max(roof, measured_flops(dtype, repeats=2))
    best = min(runs)
    flops = BATCH * LENGTH * flops_per_token(bench_config(), LENGTH)
    return {
        "seconds": best[0],
        "median": statistics.median(wall for wall, _ in runs),
        "cpu_seconds": best[1],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "gflops": roof / 1e9,
        "mfu": flops / best[0] / roof,
    }


def loop(model: str, batch_size: int, seq_len: int) -> dict[str, float]:
    """Seconds of a step in a run, and of the same compiled step alone, a batch after the other; they take turns."""
    from eqx_decoders.training.config import TrainConfig
    from eqx_decoders.training.run.loop import TrainingLoop

    runs: dict[str, list[float]] = {"run": [], "alone": []}
    steps = 20

    class Timed(TrainingLoop):
        def _steps(self, state, step):
            for _ in range(7):
                self.config = dataclasses.replace(self.config, steps=step + steps)
                begin = time.perf_counter()
                state, step, _ = super()._steps(state, step)
                runs["run"].append((time.perf_counter() - begin) / steps)
                batch = self._next_batch()
                begin = time.perf_counter()
                for _ in range(steps):
                    state, _ = self.trainer.step(state, batch)
                jax.block_until_ready(state)
                runs["alone"].append((time.perf_counter() - begin) / steps)
            return state, step, False

        def _save(self, step, state):
            pass

    data = DataConfig(batch_size=batch_size, seq_len=seq_len)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(run_dir=folder, model=model, dataset=data, eval_every=0, sample_tokens=0, steps=steps)
        config = dataclasses.replace(
            config, checkpoint_every=10**9, dataset=dataclasses.replace(data, held_out_fraction=0)
        )
        Timed(config).train()
    best = {name: min(seconds[1:]) for name, seconds in runs.items()}  # the first turn compiles
    ratios = [run / alone for run, alone in zip(runs["run"][1:], runs["alone"][1:], strict=True)]
    return {**best, "ratio": statistics.median(ratios)}


ROUNDINGS = {
    "bfloat16": LowPrecisionConfig(),
    "int8": LowPrecisionConfig(mode="int8"),
    "int8, float gradients of weights": LowPrecisionConfig(mode="int8", weight_gradient="float"),
    "fp8": LowPrecisionConfig(mode="fp8"),
    "int8, stochastic": LowPrecisionConfig(mode="int8", gradient_rounding="stochastic"),
    "w4a8": LowPrecisionConfig(mode="w4a8"),
}


def losses(name: str, folder: str, steps: int, every: int) -> dict[str, list[float]]:
    """Losses of a run of tiny: the mean of the last 20 steps before every so many, and held-out in the end."""
    from eqx_decoders.training.config import TrainConfig
    from eqx_decoders.training.run.loop import TrainingLoop

    run, tokenizer = Path(folder) / name.replace(" ", "_"), Path(folder) / "bfloat16/tokenizer"
    config = TrainConfig(
        run_dir=str(run),
        tokenizer=str(tokenizer) if tokenizer.exists() else None,
        dataset=DataConfig(batch_size=8, seq_len=128),
        dtype="bfloat16",
        low_precision=ROUNDINGS[name],
        steps=steps,
        checkpoint_every=10**9,
        eval_every=0,
        final_eval_batches=32,
        sample_tokens=0,
        trackers=(),
    )
    TrainingLoop(config).train()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [row["loss"] for row in rows if "step_seconds" in row]
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return {
        "losses": [statistics.mean(taken[e - 20 : e]) for e in range(every, steps + 1, every)],
        "held_out": held_out,
    }


def compile_seconds(layers: int) -> dict[str, float]:
    """Seconds to trace and to compile the training step of so many layers, from shapes alone, after a first program."""
    for depth in (3, layers):  # the first one pays for what is loaded once
        model = ed.abstract(bench_config(depth), remat="full")
        trainer = Trainer.create(OptimizerConfig(), model, steps=1000)
        state = trainer.abstract(model, key=jax.random.key(1))
        tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
        batch = Batch(tokens=tokens, segment_ids=tokens, positions=tokens, contiguous=True)
        begin = time.perf_counter()
        lowered = jax.jit(trainer.advance).lower(state, batch)
        middle = time.perf_counter()
        lowered.compile()
    return {"layers": layers, "trace": middle - begin, "compile": time.perf_counter() - middle}


def decode(batch_size: int, new: int = 128) -> dict[str, float]:
    """Tokens per second of `generate`, prefill of 64 tokens included, compilation not."""
    model = ed.init(bench_config(), key=jax.random.key(0))
    prompt = jnp.ones((batch_size, 64), jnp.int32)
    ed.generate(model, prompt, max_new_tokens=new).block_until_ready()
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        ed.generate(model, prompt, max_new_tokens=new).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return {"batch": batch_size, "tokens_per_second": batch_size * new / min(seconds)}


def aot_experts(name: str, topology: str, mesh: str, exchange: Any) -> dict[str, float]:
    """Compile a training step for a TPU topology, one sequence of 4096 tokens a device: bytes of a device, seconds.

    Collectives are those that experts ask for themselves, by kind: how many there are in a step, those computed again
    included, and the bytes that a device handles in them. Needs libtpu, and no TPU.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    layout = ed.Layout.create(**json.loads(mesh), devices=devices)
    model = ed.abstract(ed.get_config(name), layout=layout, precision=ed.Precision(compute=jnp.bfloat16), remat="full")
    model = model.replace(expert_exchange=exchange)
    trainer = Trainer.create(OptimizerConfig(), model, steps=1000)
    state, shape = trainer.abstract(model, key=jax.random.key(1)), (len(devices), 4096)
    split = layout.activation_sharding("batch length", shape)
    batch = Batch(tokens=jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split))
    traced = jax.jit(trainer.advance, donate_argnums=0).trace(state, batch)
    found = {kind: [0.0, 0.0] for kind in COLLECTIVES}
    count_collectives(traced.jaxpr.jaxpr, 1, found)
    begin = time.perf_counter()
    sizes = traced.lower().compile().memory_analysis()
    assert sizes is not None
    row = {"state": sizes.argument_size_in_bytes, "temporaries": sizes.temp_size_in_bytes}
    row |= {f"{kind}: times": times for kind, (times, _) in found.items()}
    row |= {f"{kind}: bytes": size for kind, (_, size) in found.items()}
    return row | {"seconds": time.perf_counter() - begin}


COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "all_to_all", "ragged_all_to_all")


def count_collectives(jaxpr: Any, times: int, found: dict[str, list[float]]) -> None:
    """Add up the collectives that a program names, those in loops as often as they run, and their larger sides' bytes.

    Of ragged ones the smaller side's: the other has room for the worst case.
    """
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind in found:
            ragged = kind.startswith("ragged")
            sides = equation.invars[:2] if ragged else (*equation.invars, *equation.outvars)
            found[kind][0] += times
            found[kind][1] += times * (min if ragged else max)(v.aval.size * v.aval.dtype.itemsize for v in sides)
        inner = times * equation.params.get("length", 1) if kind == "scan" else times
        for part in jax.tree.leaves(equation.params):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                count_collectives(part, inner, found)


def print_aot(name: str, exchange: str, row: dict[str, float]) -> None:
    sizes = f"state {row['state'] / 1e9:.1f} GB, temporaries {row['temporaries'] / 1e9:.1f} GB a device"
    print(f"{name}, {exchange}: {sizes}; compiled in {row['seconds']:.0f} s")
    for kind in COLLECTIVES:
        times, size = (row[f"{kind}: {what}"] for what in ("times", "bytes"))
        if times:
            print(f"    {kind:18} {times:6.0f} times, {size / 1e9:9.2f} GB", flush=True)


def make_checkpoint(directory: str) -> dict[str, float]:
    """Write a Llama of 396 M weights, 1.6 GB in float32, in several files."""
    shape = DecoderSizes(
        vocab_size=32_000,
        embed_dim=1280,
        num_layers=12,
        num_heads=20,
        num_kv_heads=20,
        head_dim=64,
        mlp_dim=5120,
    )
    model = ed.init(llama(shape), key=jax.random.key(0))
    begin = time.perf_counter()
    ed.save_hf(model, directory, shard_bytes=500_000_000)
    return {"seconds": time.perf_counter() - begin}


def load_checkpoint(directory: str) -> dict[str, float]:
    """Seconds and memory of loading it with fsdp over all devices.

    The peak is the kernel's own high-water mark, mapped files included, above what was used before.
    """
    layout = ed.Layout.create(fsdp=-1)
    target = ed.abstract_hf(directory, layout=layout)
    jax.block_until_ready(jnp.ones(8) + 1)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    begin = time.perf_counter()
    model = jax.block_until_ready(ed.load_hf(directory, layout=layout))
    seconds, peak = time.perf_counter() - begin, memory("VmHWM") - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    tensor = target.embedding.table.size * 4
    return {"seconds": seconds, "size_mb": size / 1e6, "peak_mb": peak / 1e6, "tensor_mb": tensor / 1e6}


def alone(*words: str, **environment: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
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
        run, cache = Path(folder) / "run", {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"}
        restart(run, 1)
        plain = min(restart(run, steps) for steps in (2, 3, 4))
        restart(run, 5, **cache)
        kept = min(restart(run, steps, **cache) for steps in (6, 7, 8))
    print("\nfrom the start of the program to the first step of a resumed run of tiny, best of three")
    print(f"{plain:.1f} s; {kept:.1f} s with JAX_COMPILATION_CACHE_DIR", flush=True)


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
    alone_, here = processor / 1e6, row["processor_rate"] / 1e6
    print(f"`encode_batch_fast` alone, a process for each core: {best / 1e6:.2f} MB/s, {alone_:.2f} {of_processor}")
    print(f"a token store: {row['rate'] / 1e6:.2f} MB/s ({row['rate'] / best:.0%}), {here:.2f} ({here / alone_:.0%})")
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
    print("\ntraining steps of all sizes, compiled for TPUs: estimates, nothing was run on a TPU")
    plan_sizes(options.rows, options.models)


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
    "images": bench_images,
    "experts": show_experts,
    "delta-rule": show_delta_rule,
    "load": show_load,
    "restart": show_restart,
    "tokenise": show_tokenise,
    "plan": show_plan,
    "aot-experts": show_aot_experts,
}
ASKED_FOR = {"sizes": show_sizes, "accelerator": show_accelerator}  # hours; what is not everywhere


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[*SHOWN, *ASKED_FOR], help="measure one thing, not all; sizes takes hours")
    parser.add_argument("--repeats", type=int, default=7, help="steps that are timed")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="text for tokenise")
    parser.add_argument("--topology", default="v5p:8x8x8", help="what aot-experts compiles for")
    parser.add_argument("--mesh", default='{"fsdp": 64, "expert": 8}', help="its mesh, as JSON")
    parser.add_argument("--models", nargs="+", help="models of aot-experts and sizes")
    parser.add_argument("--rows", type=Path, default=Path("sizes.jsonl"), help="where sizes keeps its rows")
    parser.add_argument("--peer", help="an interpreter with torch and transformers, for transformers and serving")
    parser.add_argument("--llama-server", help="llama.cpp's program for serving, if it is not on the PATH")
    parser.add_argument("--image", help="a file for a plot of what --only serving finds, such as serving.png")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        keep_memory()
        print(json.dumps(ONE[options.one[0]](*options.one[1:])))
        return 0
    print(f"jax {jax.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, {jax.default_backend()}")
    for name in [options.only] if options.only else SHOWN:
        (SHOWN | ASKED_FOR)[name](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
