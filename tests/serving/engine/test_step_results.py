"""Steps that are dispatched before the results of the previous step are read: answers do not change."""

import collections
import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.inference.drafters import PromptLookup
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.serving.engines import FIXTURES, SMALL, engine_for, request_pool


class NoTokenTwice:
    """Constraint that allows every token at most once, so that each mask depends on the previous token."""

    def __init__(self):
        self.words = np.full(4, -1, np.int32)

    def fill(self, words):
        words[:] = self.words[: len(words)]

    def accept(self, token):
        self.words[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))


@pytest.fixture(scope="module")
def engine():
    return engine_for("llama_rope")


def record_events(engine, monkeypatch):
    """Record the order in which an engine samples first tokens, decodes, and reads results."""
    events, runner, read = [], engine._runner, engine._reader.read
    for name in ("first_tokens", "decode"):
        call = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *a, name=name, call=call: (events.append(name), call(*a))[1])
    monkeypatch.setattr(engine._reader, "read", lambda *a: (events.append("read"), read(*a))[1])
    return events


@pytest.mark.slow
def test_the_next_step_is_dispatched_before_results_are_read(engine, monkeypatch):
    events, request = record_events(engine, monkeypatch), Request(prompt=(3, 4, 5), max_new_tokens=4)
    ((*answer,),) = engine.run([request])
    assert events == ["first_tokens", *["decode", "read"] * 3, "read"]
    events.clear()
    assert engine.run([dataclasses.replace(request, stop_ids=(answer[1],))]) == [tuple(answer[:2])]
    assert events == ["first_tokens", *["decode", "read"] * 2]  # the second step is discarded
    assert not engine.has_work and engine.step() == [] and len(events) == 5  # a discarded step is not read
    events.clear()
    numbers = [engine.submit(each) for each in (request, Request(prompt=(6, 7), max_new_tokens=2))]
    outputs = engine.step()
    assert {output.request_id for output in outputs} == {*numbers} and engine.counts().running == 2
    # both next tokens are in flight, and one slot is already free
    assert len(engine._slot_manager.sequences) == 1 and outputs[1].finish_reason is None
    outputs += engine.step()
    assert [output.finish_reason for output in outputs[2:]] == [None, "length"] and engine.counts().running == 1
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs if output.request_id == numbers[0] for token in output.tokens] == answer


@pytest.mark.slow
def test_constrained_requests_wait_for_the_last_token(engine, monkeypatch):
    events = record_events(engine, monkeypatch)
    (answer,) = engine.run([Request(prompt=(3, 4, 5), max_new_tokens=4, constraint=NoTokenTwice())])
    assert len({*answer}) == 4 and events == ["first_tokens", *["read", "decode"] * 3, "read"]


def test_cancelled_request_gets_no_more_tokens(engine):
    """The next token is in flight; in one case it is the last token, and the slot is already free."""
    for count in (2, 9):
        other = Request(prompt=(7, 8), max_new_tokens=6)
        (known,) = engine.run([other])
        number = engine.submit(Request(prompt=(3, 4, 5), max_new_tokens=count))
        (first,) = engine.step()
        assert len(first.tokens) == 1 and first.finish_reason is None
        engine.cancel(number)
        engine.cancel(number)
        next_one = engine.submit(other)  # uses the freed slot
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [output.finish_reason for output in outputs if output.request_id == number] == ["cancelled"]
        assert tuple(token for output in outputs if output.request_id == next_one for token in output.tokens) == known


def test_request_cancelled_before_its_first_token_gets_no_token(engine):
    other = engine.submit(Request(prompt=(7, 8), max_new_tokens=6))
    engine.step()
    number = engine.submit(Request(prompt=(3, 4, 5), max_new_tokens=1))
    (output,) = engine.step()
    assert output.request_id == other and engine._in_flight[0].first_tokens
    engine.cancel(number)
    outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    assert [(o.finish_reason, o.tokens) for o in outputs if o.request_id == number] == [("cancelled", ())]


def mixed_requests(engine, adapters=()):
    """Return requests of all kinds, some with constraints."""
    pool = request_pool(engine.model.config.vocab_size, 20, seed=3, new=(1, 2, 5, 12))
    pick = random.Random(3)
    for number, request in enumerate(pool):
        sampling = dataclasses.replace(request.sampling, frequency_penalty=0.7 * (number % 3 == 0))
        scored = dict(prompt_logprobs=1) if number % 7 == 0 else {}
        if number % 5 == 1:
            scored = dict(constraint=NoTokenTwice(), stop_ids=())
        if adapters and number % 3:
            scored["adapter"] = adapters[number % len(adapters)]
        logprobs = pick.choice([None, 0, 2])
        pool[number] = dataclasses.replace(request, sampling=sampling, logprobs=logprobs, **scored)
    same = dict(max_new_tokens=5, logprobs=0, constraint=None, prompt_logprobs=1)
    return pool + [dataclasses.replace(pool[2], sampling=SamplingParams(seed=n), **same) for n in range(4)]


def answers(engine, requests, cancel):
    """Return all results of each request. Requests arrive one by one, and some are cancelled after a few tokens."""
    engine.clear_prefix_cache()
    got, waiting, order = collections.defaultdict(list), collections.deque(enumerate(requests)), {}
    while waiting or engine.has_work:
        for _ in range(min(2, len(waiting))):
            number, request = waiting.popleft()
            order[engine.submit(request)] = number
        for output in engine.step():
            number = order[output.request_id]
            got[number] += zip(output.tokens, output.scores or [None] * len(output.tokens), strict=True)
            got[number] += output.prompt_scores
            if output.experts is not None:
                got[number].append(output.experts.tolist())
            if number in cancel and len(got[number]) >= 3 and output.finish_reason is None:
                engine.cancel(output.request_id)
            elif number not in cancel and output.finish_reason is not None:
                got[number].append(output.finish_reason)
    return [got[number][: 3 if number in cancel else None] for number in range(len(requests))]


def decoded_ahead(engine, patch):
    """Return, for each decoding step after the first, whether its input tokens were not yet read by the host."""
    calls, decode = [], engine._runner.decode
    patch.setattr(engine._runner, "decode", lambda *given: (calls.append(given[1].min() < 0), decode(*given))[1])
    return calls


def assert_answers_equal_synchronous_steps(engine, monkeypatch, adapters=()):
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_can_dispatch_ahead", lambda: False)
        behind = decoded_ahead(engine, patch)
        known = answers(engine, mixed_requests(engine, adapters), cancel={4, 10, 16})
    with monkeypatch.context() as patch:
        ahead = decoded_ahead(engine, patch)
        assert answers(engine, mixed_requests(engine, adapters), cancel={4, 10, 16}) == known
        assert sum(ahead) > len(ahead) // 4 > sum(behind)


def test_answers_equal_those_of_synchronous_steps(engine, monkeypatch):
    before = engine.counts().preemptions
    assert_answers_equal_synchronous_steps(engine, monkeypatch)
    assert engine.counts().preemptions > before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "changes"),
    [
        ("llama_rope", dict(pages=PageConfig(page_size=4, num_pages=24), preempted_bytes=20_000)),
        ("llama_rope", dict(preempted_bytes=0)),
        ("mistral_window", {}),
        ("mistral_window", dict(pages=PageConfig(page_size=4, num_pages=26, window_pages=22))),
        ("qwen3_next", {}),
        ("mamba2", {}),
        ("deepseek2_groups", dict(cache_dtype="int8")),
        ("qwen3_moe_mixed", dict(expert_choices=True)),
    ],
)
def test_answers_of_all_architectures_equal_those_of_synchronous_steps(fixture, changes, monkeypatch):
    engine = engine_for(fixture, **changes)
    engine.clear_prefix_cache()
    assert_answers_equal_synchronous_steps(engine, monkeypatch)
    assert engine.counts().preemptions > 0


@pytest.mark.slow
def test_answers_of_adapters_equal_those_of_synchronous_steps(monkeypatch):
    base = load_hf(FIXTURES / "peft_llama" / "base")
    engine = Engine(base, EngineConfig(**SMALL, max_adapters=2, max_adapter_rank=4))
    for seed, name in enumerate("ab"):
        tuned = add_lora(base, LoRAConfig(rank=2, targets=("*.query", "*.up")), key=jax.random.key(seed))
        engine.load_adapter(name, jax.tree.map(lambda leaf: leaf + 0.1 if hasattr(leaf, "dtype") else leaf, tuned))
    assert_answers_equal_synchronous_steps(engine, monkeypatch, adapters=(*"ab", None))


@pytest.mark.slow
def test_steps_with_drafts_are_synchronous(monkeypatch):
    engine = engine_for("llama_rope", drafts=PromptLookup(num_tokens=2))
    events = record_events(engine, monkeypatch)
    engine.run([Request(prompt=(3, 4, 5), max_new_tokens=4)])
    assert "decode" in events and all(pair != ("decode", "decode") for pair in itertools.pairwise(events))
    assert events[-1] == "read" and events[1] == "read"


@pytest.mark.slow
def test_answers_are_equal_if_branches_block_the_host(engine, monkeypatch):
    """Common batches use programs without branches; penalties and constraints use the program with branches."""
    backend = dataclasses.replace(engine.model.execution.layout.backend, branches_block_host=True)
    with monkeypatch.context() as patch:
        patch.setattr(ed.Layout, "backend", backend)
        other = engine_for("llama_rope")
        other.warm_up()
    pool, sampled, run = request_pool(engine.model.config.vocab_size, 8, seed=3), [], other._runner._sample
    plain = [
        dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, repetition_penalty=1.0)) for each in pool
    ]
    monkeypatch.setattr(other._runner, "_sample", lambda *given: (sampled.append(given[-1]), run(*given))[1])
    for requests in (pool, plain, plain[:1]):
        assert other.run(requests) == engine.run(requests)
    assert {None, (True, False), (False, False)} <= {*sampled}
