"""A served reward model: scores of ids, texts and conversations equal the scores of separate forward passes."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.model.decoder_config import with_scores
from eqx_decoders.model.init import add_score_head
from eqx_decoders.serving.engine.config import EngineLimits
from eqx_decoders.serving.engine.request import QueueFull, Request
from eqx_decoders.serving.http.config import ApiConfig
from eqx_decoders.serving.http.server import bind, run_in_thread
from eqx_decoders.serving.scoring_engine import ScoringEngine
from tests.compare import assert_allclose
from tests.errors import refused
from tests.models import VOCAB, filled, rich_decoder
from tests.serving.fake_engine import FakeEngine
from tests.serving.servers import CHAT, Running, chat_frontend


LIMITS = EngineLimits(max_batch_size=3, max_length=24, max_waiting=4)


@pytest.fixture(scope="module")
def model():
    return filled(dataclasses.replace(with_scores(rich_decoder(1), 2)))


def test_scores_equal_separate_forward_passes(model):
    """More requests than fit into a step, with different lengths. A cancelled request gets no score."""
    draws, engine = np.random.default_rng(0), ScoringEngine(model, LIMITS)
    prompts = [tuple(draws.integers(0, VOCAB, size).tolist()) for size in (3, 9, 1, 5)]
    ids = [engine.submit(Request(prompt=prompt, max_new_tokens=1)) for prompt in prompts]
    engine.cancel(ids[1])
    found = {}
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step()}
    assert found.keys() == {ids[0], ids[2], ids[3]}
    for number in (0, 2, 3):
        want = np.asarray(model(np.asarray([prompts[number]])).logits)[0, -1]
        assert_allclose(found[ids[number]].text_scores, want, rtol=1e-5, atol=1e-6)
    assert engine.counts().prompt_tokens == 9 and engine.counts().waiting == 0


def test_refuses_invalid_requests_and_models(model):
    engine = ScoringEngine(model, LIMITS)
    with refused(ConfigError, "max_length=24"):
        engine.submit(Request(prompt=(1,) * 25, max_new_tokens=1))
    with refused(ConfigError, "max_waiting=4"):
        engine.check_together([Request(prompt=(1,), max_new_tokens=1)] * 5)
    for _ in range(4):
        engine.submit(Request(prompt=(1,), max_new_tokens=1))
    with pytest.raises(QueueFull):
        engine.submit(Request(prompt=(1,), max_new_tokens=1))
    with refused(ConfigError, "DecoderConfig.scores=None"):
        ScoringEngine(filled(rich_decoder(1)), LIMITS)


@pytest.mark.slow
def test_classify_endpoint_is_compatible_with_vllm():
    """Raw scores and probabilities. A conversation is scored at the end of its last message, as in training."""
    model, sock = add_score_head(ed.load_hf(CHAT), key=jax.random.key(0)), bind("127.0.0.1", 0)
    engine = ScoringEngine(model, EngineLimits(max_batch_size=2, max_length=128))
    config = ApiConfig(name="judge", max_length=128, vocab_size=model.config.vocab_size, scores=1)
    stop = run_in_thread(frontend=chat_frontend(), engine=engine, config=config, sock=sock)
    server = Running(sock.getsockname()[1], FakeEngine(), stop)
    score = lambda ids: float(model(np.asarray([ids])).logits[0, -1, 0])  # noqa: E731
    try:
        body = {"model": "judge", "input": [[7, 8, 9], [10, 11]], "use_activation": False}
        answer = server.json("/classify", body)
        assert [each["index"] for each in answer["data"]] == [0, 1] and answer["usage"]["prompt_tokens"] == 5
        assert [each["probs"][0] for each in answer["data"]] == pytest.approx([score([7, 8, 9]), score([10, 11])])
        (probable,) = server.json("/classify", {"input": [7, 8, 9]})["data"]
        assert probable["probs"] == [pytest.approx(1 / (1 + math.exp(-score([7, 8, 9]))))]
        messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        ids = server.json("/tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]
        while ids[-1] not in chat_frontend().stop_ids:
            ids.pop()
        (judged,) = server.json("/classify", {"messages": messages, "use_activation": False})["data"]
        assert judged["probs"] == [pytest.approx(score(ids))]
        server.error("/v1/completions", {"prompt": "a"}, "/classify")
        for wrong in ({}, {"input": "a", "messages": messages}, {"input": []}, {"input": [[1] * 200]}):
            assert server.error("/classify", wrong)["message"]
    finally:
        stop()
