"""Catalogue of the router's metrics: name, kind, unit, labels, buckets. Pure.

Only the leader exports metrics of the cluster and of the workers, so that sums over routers are
right. Each router exports the other metrics for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everlift.errors import BY_SLUG
from everlift.messages import FinishReason

Kind = Literal["counter", "gauge", "histogram"]

#: Outcome of a request that ended with its last token. The other outcomes are the slugs of errors.
OK = "ok"
OUTCOMES = (OK, *sorted(BY_SLUG))
FINISH_REASONS = tuple(reason.name.lower() for reason in FinishReason)
#: Number of tenants with time series of their own at a router: the first tenants that it observes.
MAX_TENANTS = 100
#: Label of all other tenants together. No tenant can have this name.
OTHER_TENANTS = "(other)"
#: Parts of an engine step.
STEP_PARTS = ("schedule", "model", "sample", "commit")
#: Names of the ledger's methods whose calls are timed.
LEDGER_OPERATIONS = (
    *("open", "dispatch", "append", "release", "take_over", "discard", "end_request", "erase"),
    *("reassert", "get", "read", "events", "heartbeat", "lead", "gateways", "orphans", "put_load"),
    *("charge", "settle_charges"),
)

_LATENCY_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_INTER_TOKEN_S = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
_ERROR_RATIO = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)
_LEDGER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 3.0)
_TOKENS = (
    *(1.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0),
    *(16000.0, 32000.0, 64000.0, 128000.0),
)
#: Buckets for the number of requests that bypassed a request.
_OTHERS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 10_000.0, 100_000.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of a metric; ``name`` is the name of its samples.

    A histogram's samples have suffixes, which the name does not include.
    ``buckets`` are upper bounds in the metric's unit, without the infinite one.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


#: Labels of the metrics of requests of a model and a class.
_OF_CLASS = ("model", "priority")


def _of_class(name: str, help: str, buckets: tuple[float, ...] = _LATENCY_S) -> Metric:
    unit = "tokens" if name.endswith("_tokens") else "seconds"
    return Metric(name, "histogram", unit, help, _OF_CLASS, buckets)


def _of_worker(name: str, kind: Kind, unit: str, help: str, *labels: str) -> Metric:
    return Metric(f"everlift_worker_{name}", kind, unit, help, ("worker_id", *labels))


#: Metrics of a router's requests.
_REQUESTS = (
    Metric(
        "everlift_requests_accepted_total",
        "counter",
        "requests",
        "New requests that this router has stored in the ledger.",
        ("model",),
    ),
    Metric(
        "everlift_requests_total",
        "counter",
        "requests",
        "Requests that ended at this router or were rejected, by outcome: ok or the error's "
        "slug. Requests with outcome moved or router_stopping continue on another router.",
        ("model", "outcome"),
    ),
    Metric(
        "everlift_choices_finished_total",
        "counter",
        "choices",
        "Choices of requests with outcome ok, by finish reason.",
        ("model", "reason"),
    ),
    Metric(
        "everlift_requests_in_flight",
        "gauge",
        "requests",
        "Unfinished requests of this router, queued or running.",
    ),
    _of_class(
        "everlift_time_to_first_token_seconds",
        "Time from a request's call to the delivery of its first token.",
    ),
    Metric(
        "everlift_ttft_prediction_error_ratio",
        "histogram",
        "ratio",
        "Error of the predicted time from a request's acceptance to its first token, relative to "
        "the measured time. Only requests with a prediction.",
        _OF_CLASS,
        _ERROR_RATIO,
    ),
    Metric(
        "everlift_tpot_prediction_error_ratio",
        "histogram",
        "ratio",
        "Error of the predicted time per output token, relative to the measured time. Only "
        "finished requests of 16 tokens or more.",
        _OF_CLASS,
        _ERROR_RATIO,
    ),
    _of_class(
        "everlift_inter_token_latency_seconds",
        "Time between consecutive deliveries of output tokens of a choice.",
        _INTER_TOKEN_S,
    ),
    _of_class(
        "everlift_request_latency_seconds",
        "Time from a request's call to its end. Only requests with outcome ok.",
    ),
    _of_class(
        "everlift_queue_wait_seconds",
        "Time from a request's acceptance to its first dispatch to a worker.",
    ),
    _of_class(
        "everlift_prefill_seconds",
        "Time from a request's first dispatch to a worker to the delivery of its first token.",
    ),
    _of_class(
        "everlift_decode_seconds",
        "Time from a request's first token to its end. Only requests with outcome ok.",
    ),
    _of_class(
        "everlift_request_prompt_tokens",
        "Prompt tokens of requests with outcome ok.",
        _TOKENS,
    ),
    _of_class(
        "everlift_request_output_tokens",
        "Output tokens, over all choices, of requests with outcome ok.",
        _TOKENS,
    ),
    Metric(
        "everlift_bypassed",
        "histogram",
        "requests",
        "Later requests that left the queue before a request, over all its attempts. Only requests "
        "with outcome ok.",
        _OF_CLASS,
        _OTHERS,
    ),
    Metric(
        "everlift_prompt_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens of accepted requests.",
        ("model",),
    ),
    Metric(
        "everlift_tenant_prompt_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens of requests at their first admission into a batch.",
        ("tenant",),
    ),
    Metric(
        "everlift_tenant_prefix_hit_tokens_total",
        "counter",
        "tokens",
        "Prefix-cache hits among everlift_tenant_prompt_tokens_total.",
        ("tenant",),
    ),
    Metric(
        "everlift_output_tokens_total",
        "counter",
        "tokens",
        "Output tokens stored in the ledger.",
        ("model",),
    ),
    Metric(
        "everlift_migrations_total",
        "counter",
        "requests",
        "Attempts that resumed a request with tokens of an earlier attempt.",
    ),
    Metric(
        "everlift_moves_total",
        "counter",
        "requests",
        "Preempted requests that were moved to another worker.",
    ),
    Metric(
        "everlift_preemptions_total",
        "counter",
        "sequences",
        "Preemptions of sequences.",
    ),
    Metric(
        "everlift_recomputed_tokens_total",
        "counter",
        "tokens",
        "Tokens recomputed after a preemption, a lost worker or a move.",
    ),
)

#: Metrics of a router's predictions.
_PREDICTIONS = (
    Metric(
        "everlift_predictor_trusted",
        "gauge",
        "",
        "1 while predicted output lengths are trusted. 0 without a predictor or while its "
        "Kendall's tau is too low; in the second case, the orders shortest, ranked and hrrn treat "
        "new requests as fifo does.",
        ("model",),
    ),
    Metric(
        "everlift_predictor_tau",
        "gauge",
        "",
        "Kendall's tau between predicted and actual lengths of the last 500 outputs of "
        "this router; the training's value until 100 outputs ended. Absent without a predictor.",
        ("model",),
    ),
    Metric(
        "everlift_predictor_coverage_ratio",
        "gauge",
        "ratio",
        "Share of the outputs of everlift_predictor_tau that were not longer than a predicted "
        "quantile. Absent until an output ended.",
        ("model", "quantile"),
    ),
)

#: Metrics of the ledger, as a router sees it.
_LEDGER = (
    Metric(
        "everlift_ledger_call_seconds",
        "histogram",
        "seconds",
        "Duration of ledger calls, including failed ones, by operation.",
        ("operation",),
        _LEDGER_S,
    ),
    Metric(
        "everlift_ledger_failures_total",
        "counter",
        "calls",
        "Ledger calls without an answer.",
        ("operation",),
    ),
    Metric(
        "everlift_ledger_away",
        "gauge",
        "",
        "1 while the ledger does not answer this router.",
    ),
    Metric(
        "everlift_ledger_rollbacks_total",
        "counter",
        "times",
        "Times that the ledger came back without acknowledged writes.",
    ),
    Metric(
        "everlift_ledger_memory_used_ratio",
        "gauge",
        "ratio",
        "Used share of the ledger's memory limit. 0 without a limit.",
    ),
)

#: Metrics of a router itself.
_ROUTER = (
    Metric(
        "everlift_router_ready",
        "gauge",
        "",
        "1 while this router accepts new requests, as in grpc.health.v1.",
    ),
    Metric(
        "everlift_router_workers",
        "gauge",
        "workers",
        "Workers that this router is connected to.",
    ),
    Metric(
        "everlift_false_alarms_total",
        "counter",
        "times",
        "Workers declared lost that answered again.",
    ),
    Metric(
        "everlift_leading",
        "gauge",
        "",
        "1 while this router leads the admission queue. Only the leader exports metrics "
        "marked Leader.",
    ),
    Metric(
        "everlift_leader_changes_total",
        "counter",
        "times",
        "Times that this router became the leader.",
    ),
    Metric(
        "everlift_worker_losses_total",
        "counter",
        "workers",
        "Workers lost without a drain while this router was the leader.",
    ),
)

#: Metrics of the queue and the workers of each model, which only the leader exports.
_CLUSTER = (
    Metric(
        "everlift_workers",
        "gauge",
        "workers",
        "Leader: workers that are ready and not draining.",
        ("model",),
    ),
    Metric(
        "everlift_wanted_workers",
        "gauge",
        "workers",
        "Leader: wanted workers of all clusters that share the ledger, as configured or as decided "
        "by the autoscaler.",
        ("model",),
    ),
    Metric(
        "everlift_starting_workers",
        "gauge",
        "workers",
        "Leader: workers that are loading their model.",
        ("model",),
    ),
    Metric("everlift_queue_requests", "gauge", "requests", "Leader: queued requests.", ("model",)),
    Metric(
        "everlift_queue_tokens",
        "gauge",
        "tokens",
        "Leader: tokens to compute for all queued requests, with predicted outputs.",
        ("model",),
    ),
    Metric(
        "everlift_queue_head_wait_seconds",
        "gauge",
        "seconds",
        "Leader: time that the head of the queue has waited; 0 if its priority is -10.",
        ("model",),
    ),
    Metric(
        "everlift_service_gap_tokens",
        "gauge",
        "tokens",
        "Leader: largest difference of service between backlogged tenants of a class, in "
        "weighted tokens. 0 without tenants.",
        ("model",),
    ),
    Metric(
        "everlift_offered_tokens_total",
        "counter",
        "tokens",
        "Leader: predicted tokens of all requests that arrived since it became the leader.",
        ("model",),
    ),
    Metric(
        "everlift_sequences",
        "gauge",
        "sequences",
        "Leader: sequences at workers, including waiting ones.",
        ("model",),
    ),
    Metric("everlift_slots", "gauge", "slots", "Leader: batch slots of all workers.", ("model",)),
    Metric(
        "everlift_queue_predicted_wait_seconds",
        "gauge",
        "seconds",
        "Leader: estimated time until all queued requests have left the queue. 0 if unknown.",
        ("model",),
    ),
    Metric(
        "everlift_full_worker_tokens_per_second",
        "gauge",
        "tokens/s",
        "Leader: estimated token throughput of one saturated worker, in tokens per second, "
        "including prefix-cache hits. 0 if unknown.",
        ("model",),
    ),
)

#: Metrics of each worker, which only the leader exports. Counters count from the worker's start.
_WORKERS = (
    _of_worker("running_sequences", "gauge", "sequences", "Sequences in the batch."),
    _of_worker("waiting_sequences", "gauge", "sequences", "Sequences waiting for a batch slot."),
    _of_worker("slots", "gauge", "slots", "Batch slots."),
    _of_worker("draining", "gauge", "", "1 while the worker is draining."),
    _of_worker(
        "slow",
        "gauge",
        "",
        "1 while the worker is much slower than others: it gets requests only if no other has "
        "capacity.",
    ),
    _of_worker(
        "kv_blocks",
        "gauge",
        "blocks",
        "KV blocks by state: used, cached (unused, available for prefix-cache hits) or free.",
        "state",
    ),
    _of_worker("kv_unfilled_tokens", "gauge", "tokens", "Empty token positions in used KV blocks."),
    _of_worker(
        "pending_prefill_tokens",
        "gauge",
        "tokens",
        "Tokens of prompts and earlier outputs that are not computed yet.",
    ),
    _of_worker("steps_total", "counter", "steps", "Engine steps."),
    _of_worker("busy_seconds_total", "counter", "seconds", "Time spent in engine steps."),
    _of_worker(
        "step_seconds_total",
        "counter",
        "seconds",
        "Time spent in a part of the steps, on rank 0: schedule, model, sample or commit.",
        "part",
    ),
    _of_worker(
        "recent_step_seconds", "gauge", "seconds", "Mean step time of the last second of work."
    ),
    _of_worker(
        "predicted_step_seconds",
        "gauge",
        "seconds",
        "Predicted step time of the present batch. Absent if unknown.",
    ),
    _of_worker(
        "step_prediction_error_ratio",
        "gauge",
        "ratio",
        "Mean relative error of recent predictions of step times. Absent before the first one.",
    ),
    _of_worker(
        "allowed_sequences",
        "gauge",
        "sequences",
        "Maximum sequences in the batch: the batch slots, or fewer because of router.tpot_target.",
    ),
    _of_worker(
        "computed_tokens_total", "counter", "tokens", "Computed tokens, including draft tokens."
    ),
    _of_worker("output_tokens_total", "counter", "tokens", "Output tokens."),
    _of_worker(
        "slot_steps_total",
        "counter",
        "slots",
        "Batch slots that computed tokens, summed over all steps.",
    ),
    _of_worker(
        "prompt_tokens_total",
        "counter",
        "tokens",
        "Prompt and earlier output tokens of sequences at their admission into the batch.",
    ),
    _of_worker(
        "prefix_hit_tokens_total",
        "counter",
        "tokens",
        "Prefix-cache hits among everlift_worker_prompt_tokens_total.",
    ),
    _of_worker(
        "preemptions_total",
        "counter",
        "sequences",
        "Preemptions of sequences.",
    ),
    _of_worker(
        "recomputed_tokens_total",
        "counter",
        "tokens",
        "Tokens recomputed after a preemption, a lost worker or a move.",
    ),
    _of_worker("draft_tokens_total", "counter", "tokens", "Draft tokens."),
    _of_worker(
        "accepted_draft_tokens_total",
        "counter",
        "tokens",
        "Accepted tokens among everlift_worker_draft_tokens_total.",
    ),
    _of_worker(
        "swapped_blocks_total",
        "counter",
        "blocks",
        "KV blocks copied to host memory (out) and back (in).",
        "direction",
    ),
    _of_worker("loaded_adapters", "gauge", "adapters", "LoRA adapters in the worker's memory."),
    _of_worker(
        "adapter_loads_total", "counter", "adapters", "LoRA adapters that were loaded at run time."
    ),
    _of_worker(
        "adapter_unloads_total",
        "counter",
        "adapters",
        "LoRA adapters that were removed from the worker's memory.",
    ),
    _of_worker(
        "gpu_utilization_ratio",
        "gauge",
        "ratio",
        "Share of time in which rank 0's GPU ran any kernel, by NVML. Absent without a GPU.",
    ),
)

CATALOGUE: dict[str, Metric] = {
    metric.name: metric
    for metric in (*_REQUESTS, *_PREDICTIONS, *_LEDGER, *_ROUTER, *_CLUSTER, *_WORKERS)
}
