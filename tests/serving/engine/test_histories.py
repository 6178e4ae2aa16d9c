"""Random request histories: arrivals, cancellations and preemptions do not change the tokens of any request."""

import dataclasses
import random

import pytest

from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.serving.engine.sequence import SequenceState
from tests.serving.engines import engine_for, request_pool


PAGED = dict(pages=PageConfig(page_size=4, num_pages=26, window_pages=22), prefix_cache_bytes=1 << 20)
MODELS = {
    "llama": "llama_rope",
    "windowed": "mistral_window",
    "latent": "deepseek2_groups",
    "hybrid": "qwen3_next",
    "experts": "qwen3_moe_mixed",
    "bfloat16": "llama_bf16",
}
_KNOWN = {}


class Result:
    """Results of a request: tokens, their log-probabilities, and prompt log-probabilities, all compared bit by bit."""

    def __init__(self):
        self.tokens, self.scores, self.prompt_scores, self.end = [], [], [], None

    def take(self, update):
        assert self.end is None and update.error is None
        self.tokens += update.tokens
        self.scores += update.scores
        self.prompt_scores += update.prompt_scores
        self.end = update.finish_reason

    def begins(self, other):
        """Return whether this result equals `other`, or, if it was cancelled, is a prefix of `other`."""
        if self.end != "cancelled":
            return vars(self) == vars(other)
        count = len(self.tokens)
        same = self.tokens == other.tokens[:count] and self.scores == other.scores[:count]
        return same and self.prompt_scores == other.prompt_scores[: len(self.prompt_scores)]


def alone(engine, request):
    """Return the result of a request that runs without other requests and with an empty prefix cache."""
    engine.clear_prefix_cache()
    engine.submit(dataclasses.replace(request, priority=0))
    got = Result()
    while engine.has_work:
        for update in engine.step():
            got.take(update)
    return got


def with_follow_ups(engine, pool):
    """Add log-probabilities to most requests, and requests that continue answers. Returns all requests and results."""
    for number, request in enumerate(pool):
        scored = dict(prompt_logprobs=1, prompt_logprobs_from=1 + number // 5 * 6) if number % 5 == 0 else {}
        pool[number] = dataclasses.replace(request, logprobs=number % 2, **scored)
    answers = [alone(engine, request) for request in pool]
    turns = []
    for number, (request, got) in enumerate(zip(pool, answers, strict=True)):
        prompt = (*request.prompt, *got.tokens, *range(5, 8 + number % 3))
        if len(prompt) + 12 <= engine.config.max_length:
            turns.append(dataclasses.replace(request, prompt=prompt, max_new_tokens=12))
    return pool + turns, answers + [alone(engine, request) for request in turns]


def reference_of(model):
    """Return an engine, requests and the results of separate requests, cached for all histories."""
    if model not in _KNOWN:
        name = model.removeprefix("paged ")
        options = dict(prefix_cache_bytes=40_000) if name == model else PAGED
        engine = engine_for(MODELS[name], "bfloat16" if name == "bfloat16" else "float32", **options)
        engine.config = dataclasses.replace(engine.config, preempted_bytes=engine._runner.saved_bytes(40))
        engine._scheduler.config = engine.config
        pool, answers = with_follow_ups(engine, request_pool(engine.model.config.vocab_size, 24))
        _KNOWN[model] = engine, pool, answers
        assert any(0 < len(got.tokens) < request.max_new_tokens for request, got in zip(pool, answers, strict=True))
    return _KNOWN[model]


def run_history(model, seed):
    """Run one random history of arrivals (some with several samples), cancellations and steps.

    Ends when the engine is idle.
    """
    engine, pool, answers = reference_of(model)
    pick = random.Random(seed)
    if pick.random() < 0.2:
        engine.clear_prefix_cache()
    left, sent, got = pick.randrange(1, 9), {}, {}
    while left or engine.has_work:
        if left and pick.random() < 0.4:
            which = pick.randrange(len(pool))
            for _ in range(pick.choice([1, 1, 1, 2, 4])):
                sent[number := engine.submit(pool[which])] = which
                got[number] = Result()
            left -= 1
        if sent and pick.random() < 0.06:
            engine.cancel(pick.choice(list(sent)))
        for update in engine.step():
            got[update.request_id].take(update)
    for number, which in sent.items():
        assert got[number].end is not None and got[number].begins(answers[which])
    check_idle(engine)
    return engine.counts()


def check_idle(engine):
    """Check that all slots, pages and cache entries were released."""
    counts = engine.counts()
    prefixes, paging = engine._slot_manager.prefix_cache, engine._slot_manager.block_manager
    assert (counts.running, counts.waiting) == (0, 0)
    assert paging is not None or counts.cache_usage == 0
    for window, tables in paging.tables.items() if paging is not None else ():
        pages = [page for block in prefixes._blocks.values() for page in block.pages[window] if page >= 0]
        assert tables.pool.num_used == len(set(pages)) and (tables.table < 0).all()
    assert prefixes.nbytes == sum(block.nbytes for block in prefixes._blocks.values()) <= prefixes.capacity
    assert (
        not engine._scheduler.prefilling
        and not engine._slot_manager.sampling.rows.masked.any()
        and not engine._scheduler.prefix_warmup
        and not engine._slot_manager.sequences
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama"])
def test_results_do_not_depend_on_history(model, monkeypatch):
    again = []
    monkeypatch.setattr(
        SequenceState,
        "restart",
        lambda sequence, restart=SequenceState.restart: (again.append(len(sequence.output_tokens)), restart(sequence)),
    )
    for seed in range(25):
        counts = run_history(model, seed)
    assert counts.preemptions > len(again) > 0 and max(again) > 0 and counts.prefix_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["paged llama", "paged windowed", "paged latent", "paged hybrid"])
def test_results_do_not_depend_on_history_with_few_pages(model):
    for seed in range(200):
        counts = run_history(model, seed)
    assert counts.preemptions > 10 and counts.prefix_hits > 1000


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_results_do_not_depend_on_many_histories(model):
    for seed in range(400):
        counts = run_history(model, seed)
    assert counts.preemptions > 10 and counts.prefix_hits > 1000
