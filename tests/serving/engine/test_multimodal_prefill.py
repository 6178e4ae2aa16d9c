"""Prompts with images: few compiled programs, compilation in other threads, and errors that end only one request."""

import dataclasses
import random
import threading

import jax
import jax.monitoring
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.serving.engine import multimodal_prefill
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.engine.request import Request
from tests.compare import assert_allclose
from tests.encoders.samples import audio, media_decoder, patches, text
from tests.errors import refused
from tests.models import filled
from tests.serving.engines import SMALL, alone


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    found = Engine(filled(media_decoder(layers=2), 1, attention="dot"), EngineConfig(**SMALL))
    yield found
    found.close()


READ = Request(prompt=(1, 2, 3), max_new_tokens=6)


def image_request(engine, columns, seed=0, new=3):
    """Return a request with one image of two rows of features."""
    grids = [(1, 4, 2 * columns)]
    ids = text("xx" + "i" * 2 * columns + "x", seed)
    pixels = patches(grids, seed)
    media = ed.Media.create(engine.model.config, ids[None], pixel_values=pixels, image_grid_thw=np.asarray(grids))
    return Request(prompt=tuple(ids.tolist()), max_new_tokens=new, media=media)


def answers(engine, *requests):
    order = [engine.submit(request) for request in requests]
    got = {number: [] for number in order}
    while engine.has_work:
        for update in engine.step():
            got[update.request_id].append(update)
    return [got[number] for number in order]


def tokens(updates):
    return tuple(token for update in updates for token in update.tokens)


def test_features_of_padded_rows_equal_features_without_padding():
    config = media_decoder(layers=2)
    model, grids = filled(config, 1, attention="dot"), [(1, 6, 6), (1, 2, 4), (1, 6, 6), (1, 6, 4)]
    ids = text("iiiiiiiiixaaiixaaaa" + "i" * 15)
    heard = audio([7, 11])
    pixels = dict(pixel_values=patches(grids), image_grid_thw=np.asarray(grids))
    media = ed.Media.create(config, ids[None], **pixels, **heard)
    padded = multimodal_prefill.with_rounded_rows(media)
    assert padded.images.positions.shape[1] > media.images.positions.shape[1]
    wanted, found = model.encode(media), model.encode(padded)
    count = int((media.index >= 0).sum())
    for one, other in zip((wanted.by_group, *wanted.deepstack), (found.by_group, *found.deepstack), strict=True):
        assert_allclose(one[:, :count], other[:, :count], rtol=1e-5, atol=1e-6)
    assert len(np.unique(np.asarray(wanted.by_group[0, :count, 0]))) == count  # all features differ


def test_image_sizes_share_programs_and_requests_share_prefills(engine, monkeypatch):
    calls = []
    read = engine._multimodal.prefill
    monkeypatch.setattr(engine._multimodal, "prefill", lambda seen: (calls.append(1), read(seen))[1])
    first = image_request(engine, 9)
    known = alone(engine, first)
    programs = len(engine._multimodal._programs)
    assert programs == 2 and len(calls) == 1
    other = image_request(engine, 10, seed=1)  # padded to the same sizes: 20 and 18 features, 23 and 21 tokens
    found = answers(engine, other, first, first, READ, first, first)
    assert [tokens(updates) for updates in found[1:3]] == [known] * 2 == [tokens(updates) for updates in found[4:]]
    assert tokens(found[0]) != known and tokens(found[3]) == alone(engine, READ)
    assert len(engine._multimodal._programs) == programs and len(calls) == 4  # one per new prompt


def test_engine_thread_does_not_compile_for_images(engine):
    compiled, own = [], threading.current_thread()

    def listener(event, _, **__):
        if "backend_compile" in event and threading.current_thread() is own:
            compiled.append(event)

    fresh = Engine(engine.model, dataclasses.replace(engine.config, max_length=48))
    fresh.warm_up()
    jax.monitoring.register_event_duration_secs_listener(listener)
    assert len(fresh.run([image_request(engine, 4), READ])[0]) == 3
    fresh.close()
    assert not compiled


def prompts_in_encoding(engine):
    """Return the prompts that are being encoded or wait for encoding."""
    return list(
        dict.fromkeys(sequence.shared for sequence in engine._scheduler.queue if sequence.shared.encoding is not None)
    )


def test_features_on_the_host_are_limited(engine, monkeypatch):
    requests = [image_request(engine, 9, seed) for seed in range(6)]
    known = [alone(engine, request) for request in requests]
    size = multimodal_prefill.features_bytes(engine._multimodal, requests[0])
    monkeypatch.setattr(multimodal_prefill, "MAX_FEATURE_BYTES", 2 * size)
    order, most, got = [engine.submit(request) for request in requests], 0, {}
    while engine.has_work:
        for update in engine.step():
            got[update.request_id] = got.get(update.request_id, ()) + update.tokens
        most = max(most, len(prompts_in_encoding(engine)))
        for features in (shared.encoding.result(60).features for shared in prompts_in_encoding(engine)):
            assert all(isinstance(each, np.ndarray) for each in features)
            assert sum(each.nbytes for each in features) == size
    assert [got[number] for number in order] == known and most == 2


def test_first_prompt_in_the_queue_is_encoded_although_memory_is_full(engine, monkeypatch):
    low, high = image_request(engine, 9, 1), dataclasses.replace(image_request(engine, 9, 2), priority=1)
    known = [alone(engine, request) for request in (low, high)]
    monkeypatch.setattr(
        multimodal_prefill, "MAX_FEATURE_BYTES", multimodal_prefill.features_bytes(engine._multimodal, low)
    )
    texts = [engine.submit(dataclasses.replace(READ, priority=2)) for _ in range(3)]
    order, got = [engine.submit(low)], {}
    engine.step()
    (first,) = prompts_in_encoding(engine)
    first.encoding.result(60)
    order.append(engine.submit(high))
    updates = engine.step()
    (second,) = prompts_in_encoding(engine)
    assert second is not first and first.encoding is None
    while engine.has_work:
        updates += engine.step()
    for update in updates:
        got[update.request_id] = got.get(update.request_id, ()) + update.tokens
    assert [got[number] for number in order] == known and len(got) == len(texts) + 2


def test_encodings_per_client_are_limited(engine, monkeypatch):
    wait = threading.Event()
    work = engine._multimodal._encode_prompt
    monkeypatch.setattr(
        engine._multimodal, "_encode_prompt", lambda *given, **options: wait.wait(60) and work(*given, **options)
    )
    monkeypatch.setattr(multimodal_prefill, "MAX_ENCODINGS_PER_CLIENT", 2)
    for seed in range(4):
        engine.submit(dataclasses.replace(image_request(engine, 9, seed), client="many"))
    engine.submit(dataclasses.replace(image_request(engine, 9, 5), client="few"))
    engine.step()
    busy = [sequence.request.client for sequence in engine._scheduler.queue if sequence.shared.encoding is not None]
    wait.set()
    while engine.has_work:
        engine.step()
    assert busy == ["many", "many", "few"]


def test_number_of_stored_prefilled_prompts_is_limited(engine, monkeypatch):
    requests = [dataclasses.replace(image_request(engine, 9, seed, new=9), client=str(seed)) for seed in range(3)]
    known = [alone(engine, request) for request in requests]
    order = [engine.submit(request) for request in requests for _ in range(2)]
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, preempted_bytes=0))
    monkeypatch.setattr(engine._scheduler, "config", engine.config)
    most, got = 0, {}
    while engine.has_work:
        for update in engine.step():
            got[update.request_id] = got.get(update.request_id, ()) + update.tokens
        most = max(
            most,
            len({sequence.shared for sequence in engine._scheduler.queue if sequence.shared.prefilled is not None}),
        )
    assert [got[number] for number in order] == [tokens for tokens in known for _ in range(2)] and most == 1


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_with_little_memory_do_not_change_answers(engine, monkeypatch, seed):
    pick, pool = random.Random(seed), [image_request(engine, 9, number, new=6) for number in range(4)] + [READ]
    known = [alone(engine, request) for request in pool]
    monkeypatch.setattr(
        multimodal_prefill,
        "MAX_FEATURE_BYTES",
        pick.choice([1, 2]) * multimodal_prefill.features_bytes(engine._multimodal, pool[0]),
    )
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, preempted_bytes=0))
    monkeypatch.setattr(engine._scheduler, "config", engine.config)
    sent, got, left = {}, {}, 12
    while left or engine.has_work:
        if left and pick.random() < 0.5:
            which = pick.randrange(len(pool))
            changes = dict(priority=pick.choice([0, 0, 1, 2]), client=pick.choice("ab"))
            for _ in range(pick.choice([1, 2, 3])):
                sent[number := engine.submit(dataclasses.replace(pool[which], **changes))], got[number] = which, []
            left -= 1
        if sent and pick.random() < 0.05:
            engine.cancel(pick.choice(list(sent)))
        for update in engine.step():
            got[update.request_id].append(update)
    for number, which in sent.items():
        end, answer = got[number][-1].finish_reason, tokens(got[number])
        assert end in ("length", "cancelled") and known[which][: len(answer)] == answer
        assert end == "cancelled" or answer == known[which]


def test_text_requests_continue_while_an_image_program_compiles(engine, monkeypatch):
    wait, threads = threading.Event(), []
    work = engine._multimodal._encode_prompt

    def waits(*given, **options):
        threads.append(threading.current_thread())
        assert wait.wait(60)
        return work(*given, **options)

    monkeypatch.setattr(engine._multimodal, "_encode_prompt", waits)
    image, written = engine.submit(image_request(engine, 9)), engine.submit(READ)
    updates = []
    while written not in {update.request_id for update in updates if update.finish_reason}:
        updates += engine.step()
    assert image not in {update.request_id for update in updates} and engine.counts().waiting == 1
    assert engine.step() == []  # waits briefly for the encoder
    gone = engine.submit(image_request(engine, 10))
    engine.cancel(gone)
    wait.set()
    while engine.has_work:
        updates += engine.step()
    ends = {update.request_id: update.finish_reason for update in updates if update.finish_reason}
    assert ends == {image: "length", written: "length", gone: "cancelled"}
    assert threads and threading.current_thread() not in threads


@pytest.mark.parametrize("where", ["_encode_prompt", "prefill"])
def test_error_of_an_image_ends_only_its_request(engine, monkeypatch, where):
    def broken(*_, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    known, seen = alone(engine, READ), image_request(engine, 9)
    with monkeypatch.context() as patch:
        patch.setattr(engine._multimodal, where, broken)
        failed, again, read = answers(engine, seen, seen, READ)
    for (update,) in (failed, again):
        assert update.finish_reason == "error" and "could not be computed (RuntimeError)" in update.error
    assert tokens(read) == known and len(alone(engine, seen)) == 3


def test_least_recently_used_programs_are_evicted(engine, monkeypatch):
    monkeypatch.setattr(multimodal_prefill, "MAX_PROGRAMS", 2)
    found = multimodal_prefill.MultimodalPrefill(engine.model, 64, engine._runner.config.cache_format)

    def first(weights, x):
        return x[:1]

    for size in (1, 2, 1, 3):
        found._program(first, np.zeros(size), compiles=True)
    with pytest.raises(multimodal_prefill._NotCompiled):
        found._program(first, np.zeros(2), compiles=False)
    assert found._program(first, np.zeros(1), compiles=False) and len(found._programs) == 2
    found.close()


def test_refuses_media_of_another_prompt(engine):
    with refused(ed.ConfigError, "(1, 21)", "(1, 2)", "Media.create"):
        engine.submit(dataclasses.replace(image_request(engine, 9), prompt=(1, 2)))
    assert not engine.has_work


@pytest.mark.slow
def test_4_bit_cache_accepts_multimodal_prefill(engine):
    four = Engine(engine.model, EngineConfig(**SMALL | {"cache_dtype": "int4"}))
    assert len(tokens(answers(four, image_request(four, 4))[0])) == 3
