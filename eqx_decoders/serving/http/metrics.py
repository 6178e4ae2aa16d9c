"""Prometheus metrics of a server, with the names of vLLM's metrics."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from eqx_decoders.errors import missing_package
from eqx_decoders.serving.engine.request import EngineStats


SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)

# By field of EngineStats: name of the metric, whether it is a counter (or a gauge), and its description.
COUNTS = {
    "running": ("vllm:num_requests_running", False, "Number of running requests."),
    "waiting": ("vllm:num_requests_waiting", False, "Number of waiting requests."),
    "cache_usage": ("vllm:kv_cache_usage_perc", False, "Fraction of the KV cache in use."),
    "prefix_queries": (
        "vllm:prefix_cache_queries",
        True,
        "Number of prompt tokens looked up in the prefix cache.",
    ),
    "prefix_hits": ("vllm:prefix_cache_hits", True, "Number of prompt tokens found in the prefix cache."),
    "preemptions": ("vllm:num_preemptions", True, "Number of preemptions."),
    "prompt_tokens": ("vllm:prompt_tokens", True, "Number of prompt tokens."),
    "generated_tokens": ("vllm:generation_tokens", True, "Number of generated tokens."),
    "steps": ("vllm:engine_steps", True, "Number of engine steps."),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", True, "Number of drafted tokens."),
    "accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens", True, "Number of accepted drafted tokens."),
}


class Metrics:
    """Counters and histograms of a server (prometheus-client, extra "serve").

    **Arguments:**

    - `model`: value of the label `model_name`.
    - `counts`: function that returns the statistics of the engine.
    """

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

        self.first = histogram("time_to_first_token_seconds", "Seconds from arrival to first token.", SECONDS)
        self.queue = histogram("request_queue_time_seconds", "Seconds from arrival to admission.", SECONDS)
        self.gap = histogram("inter_token_latency_seconds", "Seconds between tokens.", GAPS)
        self.total = histogram("e2e_request_latency_seconds", "Seconds from arrival to end.", SECONDS)
        labels, registry = ("model_name", "finished_reason"), self._registry
        self._success = prometheus.Counter(
            "vllm:request_success", "Number of completions by finish reason.", labels, registry=registry
        )
        labels = ("method", "path", "status")
        self._responses = prometheus.Counter("http_requests", "HTTP requests by status.", labels, registry=registry)
        self._model, self._generate = model, prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST

    def ended(self, reason: str) -> None:
        """Count a completion. `reason`: "stop", "length", "abort" or "error"."""
        self._success.labels(self._model, reason).inc()

    def count_response(self, method: str, path: str, status: int) -> None:
        """Count a response."""
        self._responses.labels(method, path, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self._generate(self._registry)


class RequestTimer:
    """Timer of the tokens of one completion."""

    def __init__(self, metrics: Metrics, arrived: float):
        self._metrics, self._arrived, self._last = metrics, arrived, 0.0

    def tokens(self, count: int, queued: float = 0.0) -> None:
        """Record tokens that arrive now. `queued`: seconds that the request waited for admission."""
        now = time.monotonic()
        if count and not self._last:
            self._metrics.queue.observe(queued)
            self._metrics.first.observe(now - self._arrived)
        elif count:
            for _ in range(count):
                self._metrics.gap.observe((now - self._last) / count)
        self._last = now if count else self._last

    def ended(self, reason: str) -> None:
        """Record the end of the completion."""
        self._metrics.total.observe(time.monotonic() - self._arrived)
        self._metrics.ended(reason)


class _EngineCollector:
    """Collector that reads the statistics of an engine."""

    def __init__(self, model: str, counts: Callable[[], EngineStats]):
        self._model, self._counts = model, counts

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._counts()
        for field, (name, is_counter, text) in COUNTS.items():
            family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(name, text, labels=("model_name",))
            family.add_metric([self._model], getattr(counts, field))
            yield family
