"""Requests with one prompt that start together, on backends where each program call has a host cost."""

import dataclasses

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.sampler import SamplingParams
from tests.serving.engines import FIXTURES, SMALL


PROMPT = tuple(range(20, 41))  # two blocks of the prefix cache and five tokens


def requests():
    """Return six requests with one prompt, some of them sampled, and a request whose prompt has the same start."""
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=4),
        SamplingParams(temperature=0.7, top_k=5, seed=5),
    ]
    kinds = [*kinds, SamplingParams(repetition_penalty=1.3), SamplingParams(), SamplingParams(temperature=1.0, seed=7)]
    counts = 6, 9, 1, 5, 7, 8
    alike = [
        Request(prompt=PROMPT, max_new_tokens=count, sampling=kind, logprobs=2 if count > 7 else None)
        for count, kind in zip(counts, kinds, strict=True)
    ]
    return [*alike, Request(prompt=(*PROMPT[:18], 50, 51), max_new_tokens=4)]


def answers(engine, wanted):
    """Return the tokens and log-probabilities of each request."""
    got = {engine.submit(request): ([], []) for request in wanted}
    while engine.has_work:
        for update in engine.step():
            got[update.request_id][0].extend(update.tokens)
            got[update.request_id][1].extend(update.scores)
    return list(got.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "options", "mesh"),
    [
        ("llama_rope", {}, {}),
        ("llama_rope", dict(pages=PageConfig(page_size=4)), {}),
        ("llama_rope", dict(cache_dtype="int8"), dict(tensor=2, data=2, fsdp=2)),
        ("gemma3_pattern", dict(pages=PageConfig(page_size=4)), {}),
        ("falcon_mamba", {}, {}),
        ("falcon_mamba", {}, dict(data=4, tensor=2)),
        ("qwen3_next", dict(expert_choices=True), {}),
    ],
)
def test_requests_started_together_equal_separate_requests(fixture, options, mesh, monkeypatch):
    layout = ed.Layout.create(**mesh) if mesh else ed.Layout()
    with monkeypatch.context() as patch:
        patch.setattr(ed.Layout, "backend", dataclasses.replace(layout.backend, slots_per_call=4))
        model = ed.load_hf(FIXTURES / fixture, dtype="float32").place(layout)
        engine = Engine(model, EngineConfig(**SMALL | dict(max_batch_size=8, token_budget=40), **options))
        engine.warm_up()
    wanted, known = requests(), []
    for request in wanted:
        engine.clear_prefix_cache()
        known += answers(engine, [request])
    engine.clear_prefix_cache()
    calls, run = [], engine._runner._run
    monkeypatch.setattr(engine._runner, "_run", lambda name, *a: (calls.append(name), run(name, *a))[1])
    for _ in range(2):  # the second time with cached blocks, in slots that were used before
        assert answers(engine, wanted) == known
        first = next(index for index, name in enumerate(calls) if name[0] == "sample")
        assert calls[:first].count("empty") == 2  # all seven slots
        # the first request, the request with the other prompt, and five requests in two groups
        assert [name[1] for name in calls if name[0] == "sample" and name[2] == 1] == [4] * 4
        assert len([name for name in calls if name[0] == "restore" and name[2] == 4]) >= 2
        calls.clear()
    for (tokens, scores), request in zip(known, wanted, strict=True):
        assert len(scores) == (0 if request.logprobs is None else len(tokens))

    engine.clear_prefix_cache()
    monkeypatch.setattr(engine, "_can_dispatch_ahead", lambda: False)
    alike, outputs = [engine.submit(wanted[0]) for _ in range(4)], []
    shared = engine._reader.unfinished[alike[-1]].shared
    while shared.prompt_end is None:
        outputs += engine.step()
    engine.clear_prefix_cache()  # of three chunks, which the others need, the last one is there
    calls.clear()
    while engine.has_work:
        outputs += engine.step()
    for number in alike:
        assert [token for each in outputs if each.request_id == number for token in each.tokens] == known[0][0]
    # one computes them again, and two wait; and the last block of a finished text
    assert len([name for name in calls if name[0] == "prefill"]) == 3 + 1
