"""The engine: batching, caches, preemption, stopping and log-probabilities of single requests."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.core.sampling import choose_tokens
from eqx_decoders.inference.draft_model import DraftModel
from eqx_decoders.inference.drafters import PromptLookup
from eqx_decoders.inference.mtp_draft import MTPDrafter
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.engine.request import QueueFull, Request
from eqx_decoders.serving.engine.sampler import BatchSamplingParams, SamplingParams, TokenHistory, adjust_logits
from tests.compare import assert_allclose, assert_array_equal
from tests.encoders.samples import media_decoder, patches, text
from tests.errors import refused
from tests.models import filled
from tests.programs import compilations
from tests.serving.engines import SMALL, alone, engine_for, generated, request_pool


@pytest.fixture(scope="module")
def engine():
    found = engine_for("llama_rope", max_waiting=3)
    found.warm_up()
    return found


@pytest.fixture(scope="module")
def pool(engine):
    return request_pool(engine.model.config.vocab_size, 12, seed=1)


def finish(engine):
    """Run the engine until it has no work. Returns all updates."""
    updates = []
    while engine.has_work:
        updates += engine.step()
    return updates


def test_greedy_answers_match_generate(engine, pool):
    for request in [request for request in pool if request.sampling.temperature == 0][:2]:
        assert alone(engine, request) == generated(engine.model, request)


def test_no_compilation_after_startup(engine, pool):
    mixed = [
        Request(prompt=(5,) * length, max_new_tokens=3, sampling=sampling, logprobs=logprobs, prompt_logprobs=prompt)
        for length, sampling, logprobs, prompt in (
            (1, SamplingParams(), None, None),
            (9, SamplingParams(temperature=1.0, top_k=100, top_p=0.99, min_p=0.01, frequency_penalty=1.0), 2, None),
            (33, SamplingParams(logit_bias=((3, 1.0),)), None, 4),
        )
    ]
    with compilations() as compiled:
        for request in [*mixed, *pool]:
            engine.run([request])
        for number in range(3):
            engine.submit(dataclasses.replace(mixed[number], priority=number))
        finish(engine)
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["llama_rope", "mistral_window", "qwen3_next", "deepseek2_groups"])
def test_partial_batches_and_short_cache_reads_do_not_change_answers(fixture, monkeypatch):
    """Steps with 1, 2, 4 or 6 of 6 slots read only the used part of the cache; greedy and sampled requests."""
    monkeypatch.setattr("eqx_decoders.layers.cache.kv_cache.MIN_READ_LENGTH", 16)
    all_slots, parts = engine_for(fixture), engine_for(fixture, max_batch_size=6, batch_invariant=False)
    pool = request_pool(parts.model.config.vocab_size, 9, seed=2, new=(4, 12, 20))
    for number, request in enumerate(pool):
        sampling = dataclasses.replace(request.sampling, presence_penalty=0.9 * (number % 3))
        pool[number] = dataclasses.replace(request, sampling=sampling, logprobs=number % 3)
    short = [Request(prompt=(5 + number,), max_new_tokens=6) for number in range(5)]
    wanted = {request: alone(all_slots, request) for request in (*pool, *short)}
    calls = count_calls(parts, monkeypatch)
    for requests in (pool, short, pool[:2], pool[2:6], pool[4:7]):
        assert parts.run(requests) == [wanted[request] for request in requests]
    assert {name[1] for name in calls if name[0] == "forward"} == {1, 2, 4, 6}


def count_calls(engine, monkeypatch):
    """Count the calls of each program of an engine from now on."""
    calls, run = collections.Counter(), engine._runner._run

    def counts(name, *inputs):
        calls[name] += 1
        return run(name, *inputs)

    monkeypatch.setattr(engine._runner, "_run", counts)
    return calls


def prefills(calls):
    return sum(count for name, count in calls.items() if name[0] == "prefill")


def test_token_budget_limits_prefill_tokens_per_step(engine, monkeypatch):
    engine.clear_prefix_cache()
    for token in (3, 4, 5):
        engine.submit(Request(prompt=(token,) * 24, max_new_tokens=1))
    calls = count_calls(engine, monkeypatch)
    engine.step()
    assert prefills(calls) == 2  # 8 tokens each: a step takes one of 12 tokens, and not a part of another
    finish(engine)
    assert prefills(calls) == 9


def test_requests_with_the_same_prompt_prefill_it_once(engine, monkeypatch):
    """Complete blocks and the incomplete end of the prompt are shared, also with requests that arrive later."""
    prompt = tuple(range(20, 41))
    requests = [
        Request(prompt=prompt, max_new_tokens=6, sampling=SamplingParams(temperature=1.0, seed=n)) for n in range(5)
    ]
    known = [alone(engine, request) for request in requests]
    engine.clear_prefix_cache()
    calls, order = count_calls(engine, monkeypatch), [engine.submit(request) for request in requests[:3]]
    updates = engine.step()
    order += [engine.submit(request) for request in requests[3:]]
    while engine.counts().running or engine.counts().waiting:
        updates += engine.step()
    assert prefills(calls) == 3  # 8, 8 and 5 tokens
    got = dict.fromkeys(order, ())
    for update in updates:
        got[update.request_id] += update.tokens
    assert list(got.values()) == known and len(set(known)) > 1
    finish(engine)


def test_number_of_stored_prompt_ends_is_limited(engine, monkeypatch):
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, preempted_bytes=0))
    monkeypatch.setattr(engine._scheduler, "config", engine.config)
    monkeypatch.setattr(engine._scheduler.queue, "max_requests", 6)
    longer = [Request(prompt=(3,), max_new_tokens=60, client="longer", priority=1) for _ in range(2)]
    requests = [Request(prompt=tuple(range(20 + n, 33 + n)), max_new_tokens=4, client=str(n)) for n in range(3)]
    known = [alone(engine, request) for request in requests]
    engine.clear_prefix_cache()
    for request in longer:  # leaves one slot, which the clients use one after the other
        engine.submit(request)
    engine.step()
    order, most = [engine.submit(request) for request in requests for _ in range(2)], 0
    got = dict.fromkeys(order, ())
    while engine.has_work:
        for update in engine.step():
            if update.request_id in got:
                got[update.request_id] += update.tokens
        most = max(
            most,
            len({sequence.shared for sequence in engine._scheduler.queue if sequence.shared.prompt_end is not None}),
        )
    assert list(got.values()) == [answer for answer in known for _ in range(2)] and most == 1


def test_prompt_logprobs_are_computed_once_and_shared(engine, monkeypatch):
    request = Request(prompt=tuple(range(20, 41)), max_new_tokens=1, prompt_logprobs=2)
    for _ in range(3):
        engine.submit(request)
    calls = count_calls(engine, monkeypatch)
    scores = [update.prompt_scores for update in finish(engine)]
    assert len(scores) == 3 and len(scores[0]) == 20 and all(each is scores[0] for each in scores)
    assert prefills(calls) == 3
    engine.clear_prefix_cache()


@pytest.mark.parametrize("first", [2, 8, 9, 16, 17, 20])
def test_prompt_logprobs_from_a_token_use_the_prefix_cache(engine, first):
    """With several continuations of one context, the context is computed once and the log-probs do not change."""
    context, ends = tuple(range(20, 20 + first)), ((5, 6, 7), (8, 9), (7, 30, 31, 32))
    whole = []
    for end in ends:
        engine.clear_prefix_cache()
        engine.submit(Request(prompt=context + end, max_new_tokens=1, prompt_logprobs=2))
        whole += [update.prompt_scores[first - 1 :] for update in finish(engine)]
    engine.clear_prefix_cache()
    for end in ends:
        options = dict(max_new_tokens=1, prompt_logprobs=2, prompt_logprobs_from=first)
        engine.submit(Request(prompt=context + end, **options))
    updates = sorted(finish(engine), key=lambda update: update.request_id)
    assert [update.prompt_scores for update in updates] == whole
    assert [tuple(score.token for score in update.prompt_scores) for update in updates] == list(ends)
    assert sorted(update.cached_tokens for update in updates) == [0, *[(first - 1) // 8 * 8] * 2]
    engine.clear_prefix_cache()


def test_next_turn_finds_last_answer_in_prefix_cache(engine):
    prompt = tuple(range(20, 33))
    answer = alone(engine, Request(prompt=prompt, max_new_tokens=12))
    turn = Request(prompt=(*prompt, *answer, 5, 6), max_new_tokens=5)
    engine.submit(turn)
    updates = finish(engine)
    assert updates[0].cached_tokens == 24
    assert tuple(token for update in updates for token in update.tokens) == alone(engine, turn)


def test_answers_enter_the_prefix_cache_when_idle(engine, monkeypatch):
    engine.clear_prefix_cache()
    number = engine.submit(Request(prompt=tuple(range(20, 33)), max_new_tokens=12))
    other = engine.submit(Request(prompt=(5, 6), max_new_tokens=40))
    calls = count_calls(engine, monkeypatch)
    while number not in {update.request_id for update in engine.step() if update.finish_reason}:
        pass
    before = prefills(calls)
    assert {update.request_id for _ in range(3) for update in engine.step()} == {other} and prefills(calls) == before
    engine.cancel(other)
    engine._scheduler.prefix_warmup._waiting.pop()  # evicts the blocks of the previous prompt
    finish(engine)
    assert prefills(calls) == before + 2  # its second and third block


def test_next_turn_finds_cancelled_answer_in_prefix_cache(engine):
    engine.clear_prefix_cache()
    number, prompt, answer = engine.submit(Request(prompt=tuple(range(20, 33)), max_new_tokens=30)), range(20, 33), ()
    while len(answer) < 12:
        answer += tuple(token for update in engine.step() for token in update.tokens)
    engine.cancel(number)  # as the server does after a stop string
    finish(engine)
    turn = Request(prompt=(*prompt, *answer, 5, 6), max_new_tokens=5)
    engine.submit(turn)
    updates = finish(engine)
    assert updates[0].cached_tokens == 24
    assert tuple(token for update in updates for token in update.tokens) == alone(engine, turn)


def test_awaited_prefix_warmup_is_scheduled_like_a_request(engine, monkeypatch):
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, token_budget=8))  # one chunk per step
    monkeypatch.setattr(engine._scheduler, "config", engine.config)
    prompt = tuple(range(20, 33))
    answer = alone(engine, Request(prompt=prompt, max_new_tokens=12))
    engine.clear_prefix_cache()
    number = engine.submit(Request(prompt=prompt, max_new_tokens=12))
    while number not in {update.request_id for update in engine.step() if update.finish_reason}:
        pass
    engine.step()
    text = engine._scheduler.prefix_warmup.current
    assert text is not None and text.num_computed == 16 < len(text.request.prompt)
    engine.submit(Request(prompt=(7,) * 30, max_new_tokens=1))
    turn = engine.submit(Request(prompt=(*prompt, *answer, 5, 6), max_new_tokens=1))
    engine.step()
    assert text.is_leader and engine._slot_manager.prefix_cache.count_cached(text.block_hashes) == 3
    cached = {update.request_id: update.cached_tokens for update in finish(engine) if update.finish_reason}
    assert cached[turn] == 24


def test_saved_bytes_of_preempted_requests_are_limited(engine, monkeypatch):
    most = engine._runner.saved_bytes(16)
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, preempted_bytes=most))
    monkeypatch.setattr(engine._scheduler, "config", engine.config)
    requests = [Request(prompt=(3 + n,) * (9 if n else 1), max_new_tokens=20, priority=n) for n in range(6)]
    known = [alone(engine, request) for request in requests]
    got, kept = {}, []
    for request in requests:
        got[engine.submit(request)] = ()
        for update in [update for _ in range(2) for update in engine.step()]:
            got[update.request_id] += update.tokens
        kept.append([sequence.saved for sequence in engine._scheduler.queue if sequence.saved is not None])
    for update in finish(engine):
        got[update.request_id] += update.tokens
    assert list(got.values()) == known
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(saved)) for saved in kept]
    assert 0 < max(sizes) <= most and engine.counts().preemptions >= 3
    # fewer than the preempted requests
    assert any(len(saved) < len(requests[:at]) - 2 for at, saved in enumerate(kept))


def test_logprobs_match_one_forward_pass(engine):
    prompt = tuple(int(token) for token in np.random.default_rng(0).integers(3, 60, 21))
    number = engine.submit(Request(prompt=prompt, max_new_tokens=5, logprobs=3, prompt_logprobs=2))
    updates = [update for update in finish(engine) if update.request_id == number]
    tokens = [token for update in updates for token in update.tokens]
    text = np.asarray([[*prompt, *tokens]])
    known = np.asarray(jax.nn.log_softmax(engine.model(text).logits[0], axis=-1))
    prompt_scores = [score for update in updates for score in update.prompt_scores]
    scores = [score for update in updates for score in update.scores]
    assert [score.token for score in prompt_scores] == list(prompt[1:])
    assert [score.token for score in scores] == tokens
    for place, score in enumerate([*prompt_scores, *scores]):
        assert score.logprob == pytest.approx(known[place, score.token], abs=1e-4)
        best = np.argsort(-known[place], kind="stable")[: len(score.top)]
        assert [token for token, _ in score.top] == best.tolist()
        assert_allclose([value for _, value in score.top], known[place, best], atol=1e-4)
    assert {len(score.top) for score in prompt_scores} == {2} and {len(score.top) for score in scores} == {3}


@pytest.mark.slow
def test_sampled_answers_match_sampling_step_by_step(engine):
    sampling = SamplingParams(temperature=0.9, top_k=12, seed=11, repetition_penalty=1.5, logit_bias=((6, 2.0),))
    rows = BatchSamplingParams.empty(1, 4)
    rows.set(0, sampling)
    text, free = [7, 8, 9, 10, 11], (np.full((1, 99), -1, np.int32), np.zeros(1, bool))
    for number in range(6):
        logits = engine.model(np.asarray([text])).logits[:, -1]
        tokens = jax.numpy.asarray([text + [0] * 20], "int32")
        written = TokenHistory(tokens, np.asarray([5]), np.asarray([len(text)]))
        adjusted = adjust_logits(logits, rows, written, *free)
        text.append(int(choose_tokens(adjusted, rows.draws, rows.keys, np.asarray([number]))[0]))
    request = Request(prompt=tuple(text[:5]), max_new_tokens=6, sampling=sampling)
    assert alone(engine, request) == tuple(text[5:])
    assert alone(engine, dataclasses.replace(request, sampling=dataclasses.replace(sampling, seed=12))) != tuple(
        text[5:]
    )
    assert alone(engine, dataclasses.replace(request, sampling=SamplingParams())) != tuple(text[5:])


def test_stop_token_ends_the_answer_and_is_included(engine):
    prompt = (7, 8, 9)
    whole = alone(engine, Request(prompt=prompt, max_new_tokens=12))
    stop = next(token for place, token in enumerate(whole) if place > 2 and token not in whole[:place])
    number = engine.submit(Request(prompt=prompt, max_new_tokens=12, stop_ids=(stop,)))
    updates = [update for update in finish(engine) if update.request_id == number]
    assert tuple(token for update in updates for token in update.tokens) == whole[: whole.index(stop) + 1]
    assert updates[-1].finish_reason == "stop"


def test_stop_tokens_are_ignored_before_min_new_tokens(engine):
    prompt = (7, 8, 9)
    first = alone(engine, Request(prompt=prompt, max_new_tokens=1))[0]
    answer = alone(engine, Request(prompt=prompt, max_new_tokens=9, stop_ids=(first, 10**6), min_new_tokens=4))
    assert first not in answer[:4] and len(answer) >= 5


def test_repeated_prompt_uses_the_prefix_cache(engine):
    engine.clear_prefix_cache()
    prompt = tuple(range(10, 30))
    first = engine.submit(Request(prompt=prompt, max_new_tokens=2))
    one = finish(engine)
    second = engine.submit(Request(prompt=prompt, max_new_tokens=2))
    other = engine.submit(Request(prompt=prompt, max_new_tokens=2, cache_salt="other"))
    both = finish(engine)
    cached = {update.request_id: update.cached_tokens for update in [*one, *both] if update.cached_tokens}
    assert cached == {second: 16} and first != other


def test_restored_slot_can_be_saved_again(engine):
    """A request may be preempted directly after its prefix is restored, before another token is computed."""
    engine.run([Request(prompt=(3, 1, 4, 1, 5, 9), max_new_tokens=1)])
    runner = engine._runner
    saved = runner.save(0, 0)
    runner.empty(1)
    runner.restore([1], 0, 6, saved)
    again = runner.save(1, 0)
    assert saved.tokens[0, :6].tolist() == [3, 1, 4, 1, 5, 9] and runner._state.cache.length[1] == 6
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(saved)))
    runner.empty(1)


@pytest.mark.slow
def test_higher_priority_preempts_and_the_preempted_request_resumes(engine):
    requests = [Request(prompt=(3 + number, 4, 5), max_new_tokens=20) for number in range(4)]
    known = [alone(engine, request) for request in requests]
    order = [engine.submit(request) for request in requests[:3]]
    updates = engine.step() + engine.step() + engine.step()
    before = engine.counts().preemptions
    order.append(engine.submit(dataclasses.replace(requests[3], priority=5)))
    updates += finish(engine)
    assert engine.counts().preemptions == before + 1
    got = {number: [] for number in order}
    for update in updates:
        got[update.request_id] += update.tokens
    assert [tuple(got[number]) for number in order] == known
    ends = [update.request_id for update in updates if update.finish_reason is not None]
    assert ends.index(order[3]) < ends.index(order[2])


def test_cancelled_request_frees_its_slot_at_once(engine):
    numbers = [engine.submit(Request(prompt=(4,) * 30, max_new_tokens=20)) for _ in range(3)]
    engine.step()
    for number in numbers:  # one of them during its prefill
        engine.cancel(number)
    engine.cancel(10**9)
    last = engine.submit(Request(prompt=(5,), max_new_tokens=1))
    updates = engine.step()
    assert [update.finish_reason for update in updates] == ["cancelled"] * 3 + ["length"]
    assert updates[-1].request_id == last and not engine.has_work


def test_long_prompt_does_not_delay_a_short_prompt(engine):
    engine.clear_prefix_cache()
    engine.submit(Request(prompt=tuple(range(3, 60)), max_new_tokens=1))
    short = engine.submit(Request(prompt=(9, 9), max_new_tokens=1))
    ends = [update.request_id for update in finish(engine) if update.finish_reason is not None]
    assert ends[0] == short


def test_full_queue_refuses_requests(engine):
    numbers = [engine.submit(Request(prompt=(4, 5), max_new_tokens=2)) for _ in range(3)]
    with refused(QueueFull, "3 requests", "6 tokens"):
        engine.submit(Request(prompt=(4, 5), max_new_tokens=2))
    assert {update.request_id for update in finish(engine)} == set(numbers)


UNANSWERABLE = {
    "length": (dict(max_new_tokens=60), ("5 tokens", "max_new_tokens=60", "max_length=64")),
    "large id": (dict(prompt=(4, 10**6)), ("prompt", "1000000", "63")),
    "negative id": (dict(prompt=(-1,)), ("prompt", "-1", "63")),
    "logprobs": (dict(logprobs=5), ("logprobs=5", "4")),
    "prompt_logprobs": (dict(prompt_logprobs=9), ("prompt_logprobs=9", "4")),
    "biased id": (dict(sampling=SamplingParams(logit_bias=((10**6, 1.0),))), ("logit_bias", "1000000", "63")),
    "biases": (
        dict(sampling=SamplingParams(logit_bias=tuple((token, 1.0) for token in range(5)))),
        ("logit_bias", "5 tokens", "4"),
    ),
}


@pytest.mark.parametrize("case", UNANSWERABLE)
def test_refuses_requests_beyond_the_limits_of_the_engine(engine, case):
    wrong, names = UNANSWERABLE[case]
    with refused(ed.ConfigError, *names):
        engine.submit(Request(**dict(prompt=(1, 2, 3, 4, 5), max_new_tokens=5) | wrong))
    assert not engine.has_work


@pytest.mark.slow
def test_engine_with_a_4_bit_cache_answers():
    small = engine_for("llama_rope", cache_dtype="int4")
    found = small.run([Request(prompt=(1, 2, 3, 4, 5), max_new_tokens=4)])
    assert len(found[0]) == 4


@pytest.mark.slow
def test_custom_drafter_works(engine, pool):
    class LastAgain(PromptLookup):
        def find(self, text):
            return [int(text[-1])] * self.num_tokens

    own = engine_for("llama_rope", drafts=LastAgain())
    assert [alone(own, each) for each in pool[:4]] == [alone(engine, each) for each in pool[:4]]


def test_refuses_drafts_that_are_not_a_drafter(without_type_checks):
    with refused(ed.ConfigError, "EngineConfig.drafts='mtp'"):
        EngineConfig(drafts="mtp")


class EvenThenStuck:
    """Constraint that allows only even tokens and raises an error after the third token."""

    def __init__(self):
        self.count = 0

    def fill(self, words):
        words[:] = 0x55555555

    def accept(self, token):
        self.count += 1
        if token % 2 or self.count > 3:
            raise ValueError("no way on")


def test_constraint_limits_tokens_and_its_failure_ends_one_request(engine):
    bound = Request(prompt=(5, 6), max_new_tokens=8, constraint=EvenThenStuck())
    free = Request(prompt=(5, 6), max_new_tokens=8)
    known = alone(engine, free)
    numbers = engine.submit(bound), engine.submit(free)
    updates = finish(engine)
    got = {number: [u for u in updates if u.request_id == number] for number in numbers}
    tokens = [token for update in got[numbers[0]] for token in update.tokens]
    assert all(token % 2 == 0 for token in tokens) and len(tokens) == 4
    assert got[numbers[0]][-1].finish_reason == "error" and "no way on" in got[numbers[0]][-1].error
    assert tuple(token for update in got[numbers[1]] for token in update.tokens) == known


@pytest.mark.parametrize("begun", [False, True])
def test_error_of_a_constraint_ends_only_its_request(engine, begun):
    class Broken(EvenThenStuck):
        def fill(self, words):
            if self.count == begun:
                raise OverflowError("no mask")
            super().fill(words)

    free = Request(prompt=(5, 6), max_new_tokens=8)
    known = alone(engine, free)
    broken = engine.submit(Request(prompt=(5, 6, 7), max_new_tokens=8, constraint=Broken()))
    engine.submit(free)
    updates = finish(engine)
    (end,) = [update for update in updates if update.request_id == broken and update.finish_reason]
    assert end.finish_reason == "error" and "OverflowError: no mask" in end.error
    assert tuple(token for update in updates if update.request_id != broken for token in update.tokens) == known


def test_prompt_lookup_finds_the_latest_continuation():
    lookup = PromptLookup(num_tokens=3, longest=3, shortest=2)
    assert lookup.find([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert lookup.find([1, 2, 9, 1, 2, 8, 1, 2]) == [8, 1, 2]  # the most recent occurrence
    assert lookup.find([1, 2, 3]) == [] and lookup.find([7]) == []
    with refused(ed.ConfigError, "PromptLookup.shortest=4", "longest=3"):
        PromptLookup(shortest=4)


def with_drafts(model, drafts, pool):
    """Return the answers of an engine with drafts to consecutive requests."""
    engine = Engine(model, EngineConfig(**SMALL, drafts=drafts))
    waiting, order, got = list(pool), [], {}
    while waiting or engine.has_work:
        if waiting:
            order.append(engine.submit(waiting.pop(0)))
            got[order[-1]] = []
        for update in engine.step():
            got[update.request_id] += update.tokens
    return [tuple(got[number]) for number in order], engine.counts()


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["llama_rope", "mistral_window", "qwen3_next", "deepseek2_groups"])
@pytest.mark.parametrize("kind", ["lookup", "same model", "one depth", "two depths"])
def test_drafts_do_not_change_answers(fixture, kind):
    plain = engine_for(fixture)
    model = plain.model
    if kind.endswith(("depth", "depths")):
        model = ed.add_mtp(model, 2, key=jax.random.key(0))
    drafts = {
        "lookup": PromptLookup(num_tokens=3, shortest=1),
        "same model": DraftModel(model=plain.model, num_tokens=3),
        "one depth": MTPDrafter(num_tokens=1),
        "two depths": MTPDrafter(num_tokens=2),
    }[kind]
    pool = request_pool(model.config.vocab_size, 14, seed=2)
    pool += [dataclasses.replace(request, prompt=request.prompt[:8] * 3) for request in pool[:6]]
    known = plain.run(pool)
    got, counts = with_drafts(model, drafts, pool)
    assert got == known
    assert counts.draft_tokens > 0
    if kind == "same model":  # greedy drafts of the model itself are accepted whenever the request is greedy
        assert counts.accepted_draft_tokens > counts.draft_tokens / 3


@pytest.mark.slow
def test_drafts_from_all_residual_streams_do_not_change_answers():
    plain = engine_for("qwen4_exp")
    pool = request_pool(plain.model.config.vocab_size, 6, seed=2)
    known = plain.run(pool)
    got, counts = with_drafts(ed.add_mtp(plain.model, 1, key=jax.random.key(0)), MTPDrafter(num_tokens=1), pool)
    assert got == known
    assert counts.draft_tokens > 0


def test_mtp_drafts_need_mtp_depths(engine):
    with refused(ed.ConfigError, "MTPDrafter.num_tokens=1"):
        Engine(engine.model, EngineConfig(drafts=MTPDrafter()))


@pytest.mark.slow
def test_image_and_text_requests_do_not_affect_each_other():
    model = filled(media_decoder(), 1, attention="dot")
    ids, grids = text("iiiixxiixx"), [(1, 4, 4), (1, 4, 2)]
    media = ed.Media.create(model.config, ids[None], pixel_values=patches(grids), image_grid_thw=np.asarray(grids))
    known = np.asarray(ed.generate(model, ids[None], media=media, max_new_tokens=6, sampler=ed.Greedy()))[0]
    engine = Engine(model, EngineConfig(**SMALL))
    seen = Request(prompt=tuple(ids.tolist()), max_new_tokens=6, media=media)
    read = Request(prompt=(1, 2, 3), max_new_tokens=6)
    assert engine.run([read, seen, seen, read]) == [
        alone(engine, read),
        tuple(known),
        tuple(known),
        alone(engine, read),
    ]
    with refused(ed.ConfigError, "adapter='a'"):
        engine.submit(dataclasses.replace(seen, adapter="a"))
    with refused(ed.ConfigError, "prompt_logprobs"):
        engine.submit(dataclasses.replace(seen, prompt_logprobs=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [dict(tensor=2, data=2, fsdp=2), dict(data=4, tensor=2, explicit=True)], ids=["automatic", "explicit"]
)
def test_mesh_does_not_change_answers(engine, pool, mesh):
    model = engine.model.place(ed.Layout.create(**mesh))
    assert Engine(model, EngineConfig(**SMALL | dict(max_batch_size=4))).run(pool) == engine.run(pool)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_batch_size", 0),
        ("max_length", 1),
        ("prefill_chunk", 0),
        ("token_budget", 0),
        ("max_waiting", 0),
        ("max_waiting_tokens", 0),
        ("prefix_cache_bytes", -1),
        ("preempted_bytes", -1),
        ("max_logprobs", -1),
        ("max_logit_bias", -1),
    ],
)
def test_refuses_invalid_sizes(field, value):
    with refused(ed.ConfigError, f"EngineConfig.{field}={value}"):
        EngineConfig(**{field: value})


def test_refuses_invalid_cache_formats():
    with refused(ed.ConfigError, "dtype='int7'", "'int8'"):
        EngineConfig(cache_dtype="int7")
    with refused(ed.ConfigError, "prefill_chunk=128", "page_size=48"):
        EngineConfig(pages=PageConfig(page_size=48), prefill_chunk=128)


def test_client_with_fewer_served_tokens_takes_precedence(engine):
    prompt = tuple(range(3, 11))
    first = [Request(prompt=prompt, max_new_tokens=9, client=name) for name in ("many", "many", "many")]
    late = [Request(prompt=prompt, max_new_tokens=1, client=name) for name in ("many", "few")]
    order = [engine.submit(request) for request in first]
    engine.step()
    order += [engine.submit(request) for request in late]
    ends = [update.request_id for update in finish(engine) if update.finish_reason is not None]
    assert ends.index(order[4]) < ends.index(order[3])  # the client that came last was served least


def test_learned_positions_limit_the_length():
    with refused(ed.ConfigError, "EngineConfig.max_length=1000000", "32"):
        engine_for("gpt2", max_length=10**6)


def test_step_arguments_are_copies(engine):
    """On CPU, JAX may use the memory of a NumPy argument after the call has returned."""
    table = engine._slot_manager.sampling
    for slots in ([1], range(2)):
        given = table.batch_of(slots, False)
        for own, taken in zip(jax.tree.leaves(table.rows), jax.tree.leaves(given), strict=True):
            assert not np.shares_memory(own, taken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.5, "logit_bias": ((4, 2.0),)}],
    ids=["plain", "temperature", "top_k", "top_p"],
)
def test_processed_logprobs_match_the_sampling_distribution(engine, options):
    sampling = SamplingParams(**{"temperature": 1.0} | options)
    prompt = tuple(range(3, 20))
    asked = Request(prompt=prompt, max_new_tokens=6, sampling=sampling, logprobs=0, logprobs_mode="processed")
    engine.submit(asked)
    tokens, found = [], []
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            found += [score.logprob for score in output.scores]
    logits = np.array(engine.model(np.asarray([prompt + tuple(tokens[:-1])])).logits[0, len(prompt) - 1 :], np.float64)
    for token, value in sampling.logit_bias:
        logits[:, token] += value
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = np.where(logits >= np.sort(logits)[:, -sampling.top_k, None], logits, -np.inf)
    if sampling.top_p:
        order = np.argsort(-logits)
        shares = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        before = np.cumsum(np.take_along_axis(shares, order, -1), -1) - np.take_along_axis(shares, order, -1)
        kept = np.take_along_axis(before < sampling.top_p, np.argsort(order), -1)
        logits = np.where(kept, logits, -np.inf)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert_allclose(found, log_probs[np.arange(6), tokens], atol=1e-5)


def test_processed_logprobs_need_a_temperature():
    with refused(ed.ConfigError, "Request.logprobs_mode='processed'", "temperature"):
        Request(prompt=(1,), max_new_tokens=1, logprobs=0, logprobs_mode="processed")


def test_adapters_exclude_batch_split():
    config = EngineConfig(max_adapters=1, max_adapter_rank=2, adapter_targets=("*.query",))
    halves = ed.abstract(ed.get_config("tiny"), batch_split=2)
    with refused(ed.ConfigError, "EngineConfig.max_adapters=1", "Execution.batch_split"):
        config.check_model(halves)
    EngineConfig().check_model(halves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "changes"),
    [
        ("qwen3_moe_mixed", {}),
        ("mixtral_window", dict(pages=PageConfig(page_size=4))),
        ("olmoe_clip", dict(drafts=PromptLookup(num_tokens=2))),
        ("deepseek3_groups", dict(prefix_cache_bytes=0, preempted_bytes=0)),
    ],
    ids=["default", "pages", "drafts", "no caches"],
)
def test_reported_experts_match_one_forward_pass(fixture, changes):
    """Requests share prefixes and prompts, use drafts, and are preempted and restarted."""
    engine = engine_for(fixture, expert_choices=True, **changes)
    pool = request_pool(engine.model.config.vocab_size, 10, seed=5)
    pool += [dataclasses.replace(pool[1], sampling=SamplingParams(temperature=1.0, seed=seed)) for seed in range(3)]
    requests, answers, experts = {}, collections.defaultdict(tuple), {}
    waiting = collections.deque(sorted(pool, key=lambda each: each.priority))
    while waiting or engine.has_work:
        if waiting:
            request = waiting.popleft()
            requests[engine.submit(request)] = request
        for output in engine.step():
            answers[output.request_id] += output.tokens
            assert (output.experts is None) == (output.finish_reason is None)
            experts[output.request_id] = output.experts
    stats = engine.counts()
    assert stats.preemptions > 0 or "drafts" in changes
    assert stats.prefix_hits > 0 or "prefix_cache_bytes" in changes
    model = engine.model.replace(expert_choices=True)
    for number, request in requests.items():
        tokens = (*request.prompt, *answers[number])
        (wanted,) = np.moveaxis(np.asarray(model(np.asarray([tokens], np.int32)).stats.choices), 0, 2)
        assert experts[number].dtype == np.int16 and experts[number].shape == wanted.shape
        assert_array_equal(experts[number][:-1], wanted[:-1])
        assert (experts[number][-1] == -1).all()


def test_refuses_expert_choices_of_a_dense_model():
    with refused(ed.ConfigError, "EngineConfig.expert_choices=True"):
        engine_for("llama_rope", expert_choices=True)
