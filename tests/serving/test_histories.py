"""Random histories: whatever comes, goes and is interrupted, each request gets the tokens that it gets alone."""

import random

import pytest

from eqx_decoders.layers.pages import PageConfig
from tests.serving.engines import alone, engine_for, request_pool


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


def known(model):
    """An engine, requests, and what each gets alone: made once for all histories."""
    if model not in _KNOWN:
        name = model.removeprefix("paged ")
        options = dict(prefix_cache_bytes=40_000) if name == model else PAGED
        engine = engine_for(MODELS[name], "bfloat16" if name == "bfloat16" else "float32", **options)
        pool = request_pool(engine.model.config.vocab_size, 24)
        _KNOWN[model] = engine, pool, [alone(engine, request) for request in pool]
        assert any(0 < len(got) < request.max_new_tokens for request, got in zip(pool, _KNOWN[model][2], strict=True))
    return _KNOWN[model]


def play(model, seed):
    """One history: arrivals, cancels and steps by chance, until nothing is left."""
    engine, pool, answers = known(model)
    pick = random.Random(seed)
    if pick.random() < 0.2:
        engine.forget_prefixes()
    left, sent, got, ends = pick.randrange(1, 9), {}, {}, {}
    while left or engine.has_work:
        if left and pick.random() < 0.4:
            which = pick.randrange(len(pool))
            sent[number := engine.submit(pool[which])] = which
            got[number], left = [], left - 1
        if sent and pick.random() < 0.06:
            engine.cancel(pick.choice(list(sent)))
        for update in engine.step():
            assert update.request_id not in ends and update.error is None
            got[update.request_id] += update.tokens
            if update.finish_reason is not None:
                ends[update.request_id] = update.finish_reason
    assert set(ends) == set(sent)
    for number, which in sent.items():
        whole = list(answers[which])
        assert got[number] == (whole if ends[number] != "cancelled" else whole[: len(got[number])])
    nothing_left(engine)
    return engine.counts()


def nothing_left(engine):
    """All that was taken was given back."""
    counts = engine.counts()
    prefixes, paging = engine._seats.prefixes, engine._seats.paging
    assert (counts.running, counts.waiting) == (0, 0)
    assert paging is not None or counts.cache_usage == 0
    for window, tables in paging.tables.items() if paging is not None else ():
        pages = [page for block in prefixes._blocks.values() for page in block.pages[window] if page >= 0]
        assert tables.pool.num_used == len(set(pages)) and (tables.table < 0).all()
    assert prefixes.nbytes == sum(block.nbytes for block in prefixes._blocks.values()) <= prefixes.capacity
    assert not engine._turn and not engine._asked.masked.any()


@pytest.mark.parametrize("model", ["llama"])
def test_some_histories(model):
    for seed in range(25):
        counts = play(model, seed)
    assert counts.preemptions > 0 and counts.prefix_hits > 0


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
