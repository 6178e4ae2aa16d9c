"""Prometheus metrics of a server, under the names of vLLM's dashboards."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from eqx_decoders.errors import missing_package
from eqx_decoders.serving.engine.request import EngineStats


SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)

# By field of EngineStats: name of the metric, whether it is a counter, and its description.
COUNTS = {
    "running": ("vllm:num_requests_running", False, "Requests that have a slot."),
    "waiting": ("vllm:num_requests_waiting", False, "Requests that wait for one."),
    "cache_usage": ("vllm:kv_cache_usage_perc", False, "Share of the cache that is in use, from 0 to 1."),
    "prefix_queries": (
        "vllm:prefix_cache_queries",
        True,
        "Tokens of prompts that the prefix cache was asked for.",
    ),
    "prefix_hits": ("vllm:prefix_cache_hits", True, "Tokens of prompts that were found there."),
    "preemptions": ("vllm:num_preemptions", True, "How often a request had to give its place to another."),
    "prompt_tokens": ("vllm:prompt_tokens", True, "Tokens of prompts."),
    "generated_tokens": ("vllm:generation_tokens", True, "Tokens of answers."),
    "steps": ("vllm:engine_steps", True, "Steps of the engine."),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", True, "Tokens that speculative decoding has drafted."),
    "accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens", True, "Drafted tokens that were accepted."),
}


class Metrics:
    """Counters and histograms of one server (prometheus-client, extra "serve"). `counts` reads the engine's."""

    def __init__(self, model: str, counts: Callable[[], EngineStats]):
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise missing_package("prometheus-client", "serve") from error
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(_EngineCollector(model, counts))

        def histogram(name: str, text: str, buckets: tuple[int | float, ...]) -> Any:
            options: Any = dict(labelnames=("model_name",), registry=self._registry, buckets=buckets)
            return prometheus.Histogram(f"vllm:{name}", text, **options).labels(model)

        self.first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS)
        self.queue = histogram("request_queue_time_seconds", "From a request's arrival to its slot.", SECONDS)
        self.gap = histogram("inter_token_latency_seconds", "Between the tokens of an answer.", GAPS)
        self.whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", SECONDS)
        labels, registry = ("model_name", "finished_reason"), self._registry
        self._success = prometheus.Counter(
            "vllm:request_success", "Answers by why they ended.", labels, registry=registry
        )
        labels = ("method", "path", "status")
        self._responses = prometheus.Counter("http_requests", "Requests by their status.", labels, registry=registry)
        self._model, self._generate = model, prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST

    def ended(self, reason: str) -> None:
        """Count an answer that has ended by "stop", "length", "abort" or "error"."""
        self._success.labels(self._model, reason).inc()

    def count_response(self, method: str, path: str, status: int) -> None:
        """Count a response."""
        self._responses.labels(method, path, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self._generate(self._registry)


class RequestTimer:
    """Timer of the tokens of one answer."""

    def __init__(self, metrics: Metrics, arrived: float):
        self._metrics, self._arrived, self._last = metrics, arrived, 0.0

    def tokens(self, count: int, queued: float = 0.0) -> None:
        """Record tokens that have arrived now; the first ones with the seconds that the request was queued."""
        now = time.monotonic()
        if count and not self._last:
            self._metrics.queue.observe(queued)
            self._metrics.first.observe(now - self._arrived)
        elif count:
            for _ in range(count):
                self._metrics.gap.observe((now - self._last) / count)
        self._last = now if count else self._last

    def ended(self, reason: str) -> None:
        """Record the end of the answer."""
        self._metrics.whole.observe(time.monotonic() - self._arrived)
        self._metrics.ended(reason)


class _EngineCollector:
    """Collector that reads the statistics of an engine."""

    def __init__(self, model: str, counts: Callable[[], EngineStats]):
        self._model, self._counts = model, counts

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._counts()
        for field, (name, grows, text) in COUNTS.items():
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(name, text, labels=("model_name",))
            family.add_metric([self._model], getattr(counts, field))
            yield family
