"""Metrics that vLLM also has, under vLLM's names, for dashboards that use these names.

The label ``engine`` is a worker's id for the metrics of workers, and 0 for those of the router. All
values are read from other objects: nothing is counted in this module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric as Family
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from router.leader.leader import Leader
from router.observability.metrics.catalogue import CATALOGUE
from router.observability.metrics.instruments import Instruments
from router.requests.manager import Requests
from router.requests.served_models import ServedModels
from router.worker_sessions import Sessions, WorkerLink

_ROUTER = "0"
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "everlift_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "everlift_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "everlift_request_latency_seconds",
    "vllm:request_queue_time_seconds": "everlift_queue_wait_seconds",
    "vllm:request_prefill_time_seconds": "everlift_prefill_seconds",
    "vllm:request_decode_time_seconds": "everlift_decode_seconds",
    "vllm:request_prompt_tokens": "everlift_request_prompt_tokens",
    "vllm:request_generation_tokens": "everlift_request_output_tokens",
}
#: vLLM's finish reasons by outcome, for requests that did not finish with a token.
_FINISHED_REASONS = {
    "cancelled": "abort",
    "deadline_exceeded": "abort",
    "attempts_exhausted": "error",
    "data_loss": "error",
    "engine_failed": "error",
    "internal": "error",
    "no_worker": "error",
}


def _kv_usage(link: WorkerLink) -> float:
    return link.state.blocks_used / max(1, link.info.num_blocks)


_WORKER_GAUGES: Mapping[str, tuple[str, Callable[[WorkerLink], float]]] = {
    "vllm:num_requests_running": ("Sequences in the batch.", lambda link: link.state.num_running),
    "vllm:num_requests_waiting": (
        "Sequences waiting at a worker; engine 0: requests in the admission queue.",
        lambda link: link.state.num_waiting,
    ),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", _kv_usage),
}
_WORKER_COUNTERS: Mapping[str, tuple[str, Callable[[WorkerLink], float]]] = {
    "vllm:prefix_cache_queries": (
        "Prompt and earlier output tokens of sequences at their admission into the batch.",
        lambda link: link.state.counters.prompt_tokens,
    ),
    "vllm:prefix_cache_hits": (
        "Prefix-cache hits among vllm:prefix_cache_queries.",
        lambda link: link.state.counters.prefix_hit_tokens,
    ),
    "vllm:num_preemptions": (
        "Preemptions of sequences.",
        lambda link: link.state.preemptions,
    ),
    "vllm:spec_decode_num_draft_tokens": (
        "Draft tokens.",
        lambda link: link.state.counters.draft_tokens,
    ),
    "vllm:spec_decode_num_accepted_tokens": (
        "Accepted tokens among vllm:spec_decode_num_draft_tokens.",
        lambda link: link.state.counters.accepted_tokens,
    ),
}


class VllmCollector:
    """Prometheus collector of metrics under vLLM's names.

    The label model_name is the ``name`` of one of ``models``, never an alias or adapter. The first
    request that names no known model adds samples with an empty model_name to vllm:prompt_tokens
    and vllm:request_success. The value of these samples is always 0.
    """

    def __init__(
        self,
        models: ServedModels,
        instruments: Instruments,
        requests: Requests,
        sessions: Sessions,
        leader: Leader,
    ) -> None:
        self._models = [model.name for model in models]
        self._instruments = instruments
        self._requests = requests
        self._sessions = sessions
        self._leader = leader

    def collect(self) -> Iterator[Family]:
        for name, ours in _HISTOGRAMS.items():
            yield self._histogram(name, ours)
        yield from self._of_workers()
        yield self._tokens("vllm:prompt_tokens", "everlift_prompt_tokens_total")
        generated = self._counter("vllm:generation_tokens", "Output tokens.")
        outputs = self._requests.counters.output_by_model
        for model in self._models:
            generated.add_metric([model, _ROUTER], outputs[model])
        yield generated
        yield self._successes()

    def _histogram(self, name: str, ours: str) -> HistogramMetricFamily:
        buckets: dict[str, Counter[str]] = defaultdict(Counter)
        totals: dict[str, float] = defaultdict(float)
        for sample in self._instruments.samples(ours):
            model = sample.labels["model"]
            if sample.name.endswith("_bucket"):
                buckets[model][sample.labels["le"]] += int(sample.value)
            elif sample.name.endswith("_sum"):
                totals[model] += sample.value
        family = HistogramMetricFamily(name, CATALOGUE[ours].help, labels=["model_name", "engine"])
        for model in self._models:
            family.add_metric([model, _ROUTER], list(buckets[model].items()), totals[model])
        return family

    def _of_workers(self) -> Iterator[Family]:
        load = self._leader.load()
        links = [link for link in self._sessions.links if load is not None and link.is_up]
        for name, (text, gauge) in _WORKER_GAUGES.items():
            gauges = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
            for link in links:
                gauges.add_metric([link.info.model, link.info.worker_id], gauge(link))
            if load is not None and name == "vllm:num_requests_waiting":
                for model in self._models:
                    gauges.add_metric([model, _ROUTER], load.models[model].queued)
            yield gauges
        for name, (text, count) in _WORKER_COUNTERS.items():
            counters = self._counter(name, text)
            for link in links:
                counters.add_metric([link.info.model, link.info.worker_id], count(link))
            yield counters

    def _tokens(self, name: str, ours: str) -> CounterMetricFamily:
        family = self._counter(name, CATALOGUE[ours].help)
        for sample in self._instruments.samples(ours):
            if sample.name == ours:
                family.add_metric([sample.labels["model"], _ROUTER], sample.value)
        return family

    def _successes(self) -> CounterMetricFamily:
        reasons = {
            (model, reason): 0.0 for model in self._models for reason in _FINISHED_REASONS.values()
        }
        for sample in self._instruments.samples("everlift_requests_total"):
            reason = _FINISHED_REASONS.get(sample.labels["outcome"])
            key = sample.labels["model"], reason or ""
            if key in reasons and sample.name.endswith("_total"):
                reasons[key] += sample.value
        for sample in self._instruments.samples("everlift_choices_finished_total"):
            if sample.name.endswith("_total"):
                reasons[sample.labels["model"], sample.labels["reason"]] = sample.value
        family = self._counter("vllm:request_success", "Choices that ended.", "finished_reason")
        for (model, reason), count in reasons.items():
            family.add_metric([model, _ROUTER, reason], count)
        return family

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=["model_name", "engine", *labels])
