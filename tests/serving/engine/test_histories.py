"""Random histories: whatever comes, goes and is interrupted, each request gets the tokens that it gets alone."""

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


class Got:
    """What came of a request: its tokens, and the log-probabilities of these and of its prompt, bit for bit."""

    def __init__(self):
        self.tokens, self.scores, self.prompt_scores, self.end = [], [], [], None

    def take(self, update):
        assert self.end is None and update.error is None
        self.tokens += update.tokens
        self.scores += update.scores
        self.prompt_scores += update.prompt_scores
        self.end = update.finish_reason

    def begins(self, other):
        """Whether it is the beginning of another one, or all of it where it was not cancelled."""
        if self.end != "cancelled":
            return vars(self) == vars(other)
        count = len(self.tokens)
        same = self.tokens == other.tokens[:count] and self.scores == other.scores[:count]
        return same and self.prompt_scores == other.prompt_scores[: len(self.prompt_scores)]


def alone(engine, request):
    """What a request gets with nothing else in the engine, and nothing known of its prompt."""
    engine.clear_prefix_cache()
    engine.submit(dataclasses.replace(request, priority=0))
    got = Got()
    while engine.has_work:
        for update in engine.step():
            got.take(update)
    return got


def with_turns(engine, pool):
    """Requests, most of them with log-probabilities; then those that go on from an answer; and what all get alone."""
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


def known(model):
    """An engine, requests, and what each gets alone: made once for all histories."""
    if model not in _KNOWN:
        name = model.removeprefix("paged ")
        options = dict(prefix_cache_bytes=40_000) if name == model else PAGED
        engine = engine_for(MODELS[name], "bfloat16" if name == "bfloat16" else "float32", **options)
        engine.config = dataclasses.replace(engine.config, preempted_bytes=engine._runner.saved_bytes(40))
        engine._scheduler.config = engine.config
        pool, answers = with_turns(engine, request_pool(engine.model.config.vocab_size, 24))
        _KNOWN[model] = engine, pool, answers
        assert any(0 < len(got.tokens) < request.max_new_tokens for request, got in zip(pool, answers, strict=True))
    return _KNOWN[model]


def play(model, seed):
    """One history: arrivals, some of several answers at once, cancels and steps by chance, until nothing is left."""
    engine, pool, answers = known(model)
    pick = random.Random(seed)
    if pick.random() < 0.2:
        engine.clear_prefix_cache()
    left, sent, got = pick.randrange(1, 9), {}, {}
    while left or engine.has_work:
        if left and pick.random() < 0.4:
            which = pick.randrange(len(pool))
            for _ in range(pick.choice([1, 1, 1, 2, 4])):
                sent[number := engine.submit(pool[which])] = which
                got[number] = Got()
            left -= 1
        if sent and pick.random() < 0.06:
            engine.cancel(pick.choice(list(sent)))
        for update in engine.step():
            got[update.request_id].take(update)
    for number, which in sent.items():
        assert got[number].end is not None and got[number].begins(answers[which])
    nothing_left(engine)
    return engine.counts()


def nothing_left(engine):
    """All that was taken was given back."""
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
def test_some_histories(model, monkeypatch):
    again = []
    monkeypatch.setattr(
        SequenceState,
        "restart",
        lambda sequence, restart=SequenceState.restart: (again.append(len(sequence.output_tokens)), restart(sequence)),
    )
    for seed in range(25):
        counts = play(model, seed)
    assert counts.preemptions > len(again) > 0 and max(again) > 0 and counts.prefix_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["paged llama", "paged windowed", "paged latent", "paged hybrid"])
def test_many_histories_in_few_pages(model):
    for seed in range(200):
        counts = play(model, seed)
    assert counts.preemptions > 10 and counts.prefix_hits > 1000


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_many_histories(model):
    for seed in range(400):
        counts = play(model, seed)
    assert counts.preemptions > 10 and counts.prefix_hits > 1000
