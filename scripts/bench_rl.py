"""Time rollouts compared with served requests, loading of new weights into an engine, and GRPO steps."""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
from bench_grpo import show_grpo
from bench_inference import SIZES, Work, our_model

from eqx_decoders.serving import Engine, EngineConfig, Request, SamplingParams, rollout
from eqx_decoders.sharding.axes import named_leaves


PROMPTS, SAMPLES, PROMPT, NEW = 8, 4, 64, 64


def make_engine(model: Any) -> Engine:
    sizes: dict[str, Any] = dict(max_batch_size=PROMPTS * SAMPLES, max_length=PROMPT + NEW, prefill_chunk=64)
    engine = Engine(model, EngineConfig(**sizes, token_budget=512, max_logprobs=0, max_logit_bias=0))
    engine.warm_up()
    return engine


def rollouts(engine: Engine, prompts: np.ndarray, seed: int) -> float:
    """Return tokens a second of `rollout`, with its log-probs."""
    started, tokens = time.perf_counter(), 0
    for group in rollout(engine, prompts.tolist(), samples=SAMPLES, max_new_tokens=NEW, seed=seed):
        tokens += sum(len(each.tokens) for each in group.rollouts)
    return tokens / (time.perf_counter() - started)


def served(engine: Engine, prompts: np.ndarray, seed: int) -> float:
    """Return tokens a second of the same requests as a server has them, without log-probs."""
    requests = [
        Request(prompt=tuple(prompt), max_new_tokens=NEW, sampling=SamplingParams(temperature=1.0, seed=seed + number))
        for prompt in prompts.tolist()
        for number in range(SAMPLES)
    ]
    started = time.perf_counter()
    tokens = sum(map(len, engine.run(requests)))
    return tokens / (time.perf_counter() - started)


def load_seconds(engine: Engine, model: Any) -> tuple[float, int]:
    """Return the seconds of `Engine.load`, and the bytes of arrays that are not the model's own."""
    started = time.perf_counter()
    engine.load(model)
    seconds = time.perf_counter() - started
    spans = [(x.unsafe_buffer_pointer(), x.nbytes) for x in jax.tree.leaves(model) if isinstance(x, jax.Array)]
    inside = lambda x: any(start <= x.unsafe_buffer_pointer() < start + size for start, size in spans)  # noqa: E731
    held = named_leaves(engine._runner.weights.loaded.model).values()
    return seconds, sum(each.nbytes for each in held if isinstance(each, jax.Array) and not inside(each))


def measure(repeats: int, sizes: dict[str, int] = SIZES) -> dict[str, list[float]]:
    """Measure each in turn."""
    model, prompts = our_model(Work("float32", PROMPTS, PROMPT, NEW), sizes)
    other = dataclasses.replace(model, final_norm=jax.tree.map(lambda x: x * 1.0, model.final_norm))
    engine = make_engine(model)
    rates: dict[str, list[float]] = {"served": [], "rollouts": [], "load": [], "copied": []}
    for number in range(repeats + 1):
        results = served(engine, prompts, 1000 * number), rollouts(engine, prompts, number)
        loads = [load_seconds(engine, each) for each in (other, model)]
        if number:  # the first ones compile what is left
            rates["served"].append(results[0])
            rates["rollouts"].append(results[1])
            rates["load"] += [seconds for seconds, _ in loads]
            rates["copied"] += [size for _, size in loads]
    return rates


def show_rl(options: argparse.Namespace) -> None:
    rates = measure(min(options.repeats, 3))
    ratio = statistics.median(b / a for a, b in zip(rates["served"], rates["rollouts"], strict=True))
    print(f"\nrollouts, Llama of 134 M weights in float32, {PROMPTS} prompts of {PROMPT} tokens")
    print(f"{SAMPLES} completions of {NEW} tokens for each: {max(rates['rollouts']):.0f} tokens/s with log-probs")
    print(f"{max(rates['served']):.0f} tokens/s of the same requests served without; median ratio {ratio:.2f}")
    print(f"new weights: {1000 * statistics.median(rates['load']):.1f} ms, {max(rates['copied']):.0f} bytes copied")
    show_grpo(options)
