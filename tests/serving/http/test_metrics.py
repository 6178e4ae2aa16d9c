"""Metrics: time between tokens."""

import pytest

from eqx_decoders.serving.engine.request import EngineStats
from eqx_decoders.serving.http.metrics import Metrics, RequestTimer


pytest.importorskip("prometheus_client")


def test_time_between_tokens_is_divided_among_tokens_of_one_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("eqx_decoders.serving.http.metrics.time.monotonic", lambda: now[0])
    metrics = Metrics("m", EngineStats)
    clock = RequestTimer(metrics, arrived=99.0)
    clock.tokens(1, queued=0.25)
    now[0] += 0.3
    clock.tokens(3)
    now[0] += 0.2
    clock.ended("stop")
    found = {}
    for row in metrics.text().decode().splitlines():
        if not row.startswith("#") and "_bucket" not in row:
            found[row.split("{")[0].removeprefix("vllm:")] = float(row.split()[-1])
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.3)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert found["request_queue_time_seconds_sum"] == 0.25
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(1.5)
