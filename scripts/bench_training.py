"""Measurements of training steps, runs, compilation, decoding and checkpoints for `bench.py`."""

import dataclasses
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from bench_data import memory

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.config import DataConfig
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.llama import llama
from eqx_decoders.numerics.low_precision import LowPrecisionConfig
from eqx_decoders.training.flops import flops_per_token, measured_flops
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer


BATCH, LENGTH = 2, 512


def bench_config(layers: int = 8) -> ed.DecoderConfig:
    """Configure a Llama of 58 M weights."""
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
    """Make a trainer, its state and a batch."""
    precision = ed.Precision(compute=jnp.dtype(dtype))
    model = ed.init(bench_config(), key=jax.random.key(0), precision=precision, remat=remat)
    trainer = Trainer.create(OptimizerConfig(), model, steps=1000)
    tokens = np.random.default_rng(0).integers(0, 32_000, (BATCH, LENGTH)).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    batch = Batch(tokens=tokens, segment_ids=np.ones_like(tokens), positions=positions, contiguous=True)
    return trainer, trainer.init(model, key=jax.random.key(1)), batch


def step(dtype: str, remat: str, repeats: int) -> dict[str, float]:
    """Measure the training step: best and median seconds, CPU seconds of the best, peak memory of the process, MFU."""
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
    """Measure a step in a run, and the same compiled step alone, a batch after the other, in turn."""
    from eqx_decoders.training import train
    from eqx_decoders.training.run import loop as module
    from eqx_decoders.training.settings.run import TrainConfig

    runs: dict[str, list[float]] = {"run": [], "alone": []}
    steps = 20

    class Timed(module.TrainingLoop):
        def take_steps(self, state, step):
            for _ in range(7):
                settings = dataclasses.replace(self.run.config, steps=step + steps)
                directory = dataclasses.replace(self.run.directory, settings=settings)
                self.run = self.saver.run = dataclasses.replace(self.run, directory=directory)
                begin = time.perf_counter()
                state, step, _ = super().take_steps(state, step)
                runs["run"].append((time.perf_counter() - begin) / steps)
                batch = self.next_batch(state)
                begin = time.perf_counter()
                for _ in range(steps):
                    state, _ = self.run.trainer.step(state, batch)
                jax.block_until_ready(state)
                runs["alone"].append((time.perf_counter() - begin) / steps)
            return state, step, False

    data = DataConfig(batch_size=batch_size, seq_len=seq_len)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(run_dir=folder, model=model, data=data, eval_every=0, sample_tokens=0, steps=steps)
        config = dataclasses.replace(
            config, checkpoint_every=10**9, data=dataclasses.replace(data, held_out_fraction=0)
        )
        saves = mock.patch.object(module.CheckpointSaver, "save")
        with saves, mock.patch.object(module, "TrainingLoop", Timed):
            train(config)
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
    """Train tiny; return means of the last 20 losses before every `every` steps, and held-out losses at the end."""
    from eqx_decoders.training import train
    from eqx_decoders.training.settings.run import TrainConfig

    run, tokenizer = Path(folder) / name.replace(" ", "_"), Path(folder) / "bfloat16/tokenizer"
    config = TrainConfig(
        run_dir=str(run),
        tokenizer=str(tokenizer) if tokenizer.exists() else None,
        data=DataConfig(batch_size=8, seq_len=128),
        dtype="bfloat16",
        low_precision=ROUNDINGS[name],
        steps=steps,
        checkpoint_every=10**9,
        eval_every=0,
        final_eval_batches=32,
        sample_tokens=0,
        trackers=(),
    )
    train(config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [row["loss"] for row in rows if "step_seconds" in row]
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return {
        "losses": [statistics.mean(taken[e - 20 : e]) for e in range(every, steps + 1, every)],
        "held_out": held_out,
    }


def compile_seconds(layers: int) -> dict[str, float]:
    """Measure tracing and compilation of the training step by its layers, from shapes, after a first program."""
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
    """Measure tokens per second of `generate`, prefill of 64 tokens included, compilation not."""
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

    Counts the collectives that the code of experts has, by kind: runs in a step, recomputed ones included, and bytes
    of a device. Needs libtpu, and no TPU.
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
    counts = {kind: [0.0, 0.0] for kind in COLLECTIVES}
    count_collectives(traced.jaxpr.jaxpr, 1, counts)
    begin = time.perf_counter()
    sizes = traced.lower().compile().memory_analysis()
    assert sizes is not None
    row = {"state": sizes.argument_size_in_bytes, "temporaries": sizes.temp_size_in_bytes}
    row |= {f"{kind}: times": times for kind, (times, _) in counts.items()}
    row |= {f"{kind}: bytes": size for kind, (_, size) in counts.items()}
    return row | {"seconds": time.perf_counter() - begin}


COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "all_to_all", "ragged_all_to_all")


def count_collectives(jaxpr: Any, times: int, counts: dict[str, list[float]]) -> None:
    """Add up the collectives that a program names, those in loops as often as they run, and their larger sides' bytes.

    For ragged ones it is the smaller side: the other has room for the worst case.
    """
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind in counts:
            ragged = kind.startswith("ragged")
            sides = equation.invars[:2] if ragged else (*equation.invars, *equation.outvars)
            counts[kind][0] += times
            counts[kind][1] += times * (min if ragged else max)(v.aval.size * v.aval.dtype.itemsize for v in sides)
        inner = times * equation.params.get("length", 1) if kind == "scan" else times
        for part in jax.tree.leaves(equation.params):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                count_collectives(part, inner, counts)


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
    """Measure seconds and memory of loading a checkpoint with fsdp over all devices.

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
