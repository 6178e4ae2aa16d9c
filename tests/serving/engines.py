"""Engines on small checkpoints, and reference answers of separate requests."""

import dataclasses
import random
from pathlib import Path

import numpy as np

import eqx_decoders as ed
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.sampler import SamplingParams


FIXTURES = Path(__file__).parents[1] / "fixtures"


SMALL = dict(max_batch_size=3, max_length=64, prefill_chunk=8, token_budget=12, max_logit_bias=4, max_logprobs=4)


def engine_for(fixture, dtype="float32", **changes):
    """Return an engine with a few small slots."""
    model = ed.load_hf(FIXTURES / fixture, dtype=dtype)
    return Engine(model, EngineConfig(**SMALL | changes))


def request_pool(vocab, count, seed=0, longest=30, new=(1, 4, 12)):
    """Return requests of many kinds; half of them share a prefix."""
    pick = random.Random(seed)
    shared, pool = [pick.randrange(3, vocab) for _ in range(24)], []
    for number in range(count):
        prompt = [pick.randrange(3, vocab) for _ in range(pick.choice([1, 2, 7, 8, 9, 16, 17, longest]))]
        prompt = shared[: pick.choice([8, 11, 16, 24])] + prompt if pick.random() < 0.5 else prompt
        sampling = SamplingParams()
        if number % 2:
            penalty = 1.3 if number % 4 == 1 else 1.0
            sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=number, repetition_penalty=penalty)
        stops = tuple(pick.randrange(3, vocab) for _ in range(vocab // 12)) if number % 3 == 0 else ()
        options = dict(priority=pick.choice([0, 0, 0, 1, 2]), client=pick.choice("ab"), stop_ids=stops)
        options["min_new_tokens"] = number % 2 * 3
        pool.append(Request(prompt=tuple(prompt), max_new_tokens=pick.choice(new), sampling=sampling, **options))
    return pool


def alone(engine, request):
    """Return the tokens of a request that runs without other requests and with an empty prefix cache."""
    assert not engine.has_work
    engine.clear_prefix_cache()
    return engine.run([dataclasses.replace(request, priority=0)])[0]


def generated(model, request):
    """Return the greedy tokens of `generate`."""
    prompt = np.asarray([request.prompt], np.int32)
    options = dict(max_new_tokens=request.max_new_tokens, sampler=ed.Greedy(), stop_ids=request.stop_ids, pad_id=-1)
    found = np.asarray(ed.generate(model, prompt, **options))[0].tolist()
    return tuple(token for token in found if token >= 0)
