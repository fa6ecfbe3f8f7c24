"""Every metric that a router exports, once: name, kind, unit, labels, buckets. Pure.

Of a cluster's state the router that leads speaks alone, so that sums over routers are right; the
other metrics are each router's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everlift.errors import BY_SLUG
from everlift.messages import FinishReason

Kind = Literal["counter", "gauge", "histogram"]

#: Outcome of a request that ended with its last token; the others are the slugs of errors.
OK = "ok"
OUTCOMES = (OK, *sorted(BY_SLUG))
FINISH_REASONS = tuple(reason.name.lower() for reason in FinishReason)
#: Parts of an engine step.
STEP_PARTS = ("schedule", "model", "sample", "commit")
#: Calls to the ledger that are timed, by the names of its methods.
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
_ERROR_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0)
_LEDGER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 3.0)
_TOKENS = (
    *(1.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0),
    *(16000.0, 32000.0, 64000.0, 128000.0),
)
#: Requests beside one.
_OTHERS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 10_000.0, 100_000.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` is that of its samples, but for the suffixes of a histogram. ``buckets`` are upper
    bounds in its unit, without the infinite one."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _of_class(name: str, help: str, buckets: tuple[float, ...] = _LATENCY_S) -> Metric:
    unit = "tokens" if name.endswith("_tokens") else "seconds"
    return Metric(name, "histogram", unit, help, ("priority",), buckets)


def _of_worker(name: str, kind: Kind, unit: str, help: str, *labels: str) -> Metric:
    return Metric(f"everlift_worker_{name}", kind, unit, help, ("worker_id", *labels))


#: Of the requests of a router.
_REQUESTS = (
    Metric(
        "everlift_requests_accepted_total",
        "counter",
        "requests",
        "New requests that this router has filed in the ledger.",
    ),
    Metric(
        "everlift_requests_total",
        "counter",
        "requests",
        "Requests that ended at this router or were refused, by outcome: ok or the error's slug. "
        "Those that moved or router_stopping ended go on at another router.",
        ("outcome",),
    ),
    Metric(
        "everlift_choices_finished_total",
        "counter",
        "choices",
        "Choices of requests with outcome ok, by how they ended.",
        ("reason",),
    ),
    Metric(
        "everlift_requests_in_flight",
        "gauge",
        "requests",
        "Requests that this router has and that have not ended, queued or running.",
    ),
    _of_class(
        "everlift_time_to_first_token_seconds",
        "Time from a request's call until its first token could be read.",
    ),
    Metric(
        "everlift_ttft_prediction_error_ratio",
        "histogram",
        "ratio",
        "Error of the predicted time from a request's acceptance to its first token, relative to "
        "the measured time. Only requests with a prediction.",
        ("priority",),
        _ERROR_RATIO,
    ),
    Metric(
        "everlift_tpot_prediction_error_ratio",
        "histogram",
        "ratio",
        "Error of the predicted time per output token, relative to the measured time. Only "
        "finished requests of 16 tokens or more.",
        ("priority",),
        _ERROR_RATIO,
    ),
    _of_class(
        "everlift_inter_token_latency_seconds",
        "Time between two moments at which more of a choice could be read.",
        _INTER_TOKEN_S,
    ),
    _of_class(
        "everlift_request_latency_seconds",
        "Time from a request's call to its end. Only requests with outcome ok.",
    ),
    _of_class(
        "everlift_queue_wait_seconds",
        "Time from a request's acceptance until its first dispatch to a worker.",
    ),
    _of_class(
        "everlift_prefill_seconds",
        "Time from a request's first dispatch to a worker until its first token could be read.",
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
        ("priority",),
        _OTHERS,
    ),
    Metric(
        "everlift_prompt_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens of the requests that were accepted.",
    ),
    Metric(
        "everlift_output_tokens_total",
        "counter",
        "tokens",
        "Output tokens that the ledger has stored.",
    ),
    Metric(
        "everlift_migrations_total",
        "counter",
        "requests",
        "Times that a worker went on with what another attempt had begun.",
    ),
    Metric(
        "everlift_moves_total",
        "counter",
        "requests",
        "Times that a preempted request was sent to another worker.",
    ),
    Metric(
        "everlift_preemptions_total",
        "counter",
        "sequences",
        "Times that a sequence gave up its KV blocks before its end.",
    ),
    Metric(
        "everlift_recomputed_tokens_total",
        "counter",
        "tokens",
        "Tokens that were computed again after a preemption, a loss or a move.",
    ),
)

#: Of what a router predicts.
_PREDICTIONS = (
    Metric(
        "everlift_predictor_trusted",
        "gauge",
        "",
        "1 while outputs' lengths are predicted by a model whose tau is high enough. 0 without a "
        "model; and with one, while shortest, ranked and hrrn are fifo for what comes.",
    ),
    Metric(
        "everlift_predictor_tau",
        "gauge",
        "",
        "Kendall's tau between the predicted and the actual lengths of the last 500 outputs that "
        "ended at this router, as training found it until 100 did; absent without a model.",
    ),
    Metric(
        "everlift_predictor_coverage_ratio",
        "gauge",
        "ratio",
        "Part of these outputs that stayed within a predicted quantile; absent until one ended.",
        ("quantile",),
    ),
)

#: Of the ledger, as a router sees it.
_LEDGER = (
    Metric(
        "everlift_ledger_call_seconds",
        "histogram",
        "seconds",
        "Time until the ledger answered a call or the call failed, by the call's name.",
        ("operation",),
        _LEDGER_S,
    ),
    Metric(
        "everlift_ledger_failures_total",
        "counter",
        "calls",
        "Calls that the ledger did not answer.",
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
        "Times that the ledger came back without what it had acknowledged.",
    ),
    Metric(
        "everlift_ledger_memory_used_ratio",
        "gauge",
        "ratio",
        "Part of the memory that the ledger may use; 0 where it has no bound.",
    ),
)

#: Of a router itself.
_ROUTER = (
    Metric(
        "everlift_router_ready",
        "gauge",
        "",
        "1 while this router takes new requests: what grpc.health.v1 says of it.",
    ),
    Metric(
        "everlift_router_workers",
        "gauge",
        "workers",
        "Workers that this router is connected with.",
    ),
    Metric(
        "everlift_false_alarms_total",
        "counter",
        "times",
        "Times that this router took a worker for lost that spoke again.",
    ),
    Metric(
        "everlift_leading",
        "gauge",
        "",
        "1 while this router leads the admission queue. The metrics below that are said to be the "
        "leader's are there only then.",
    ),
    Metric(
        "everlift_leader_changes_total",
        "counter",
        "times",
        "Times that this router took the lead.",
    ),
    Metric(
        "everlift_worker_losses_total",
        "counter",
        "workers",
        "Workers lost without a drain while this router led.",
    ),
)

#: Of the cluster, by the router that leads.
_CLUSTER = (
    Metric(
        "everlift_workers",
        "gauge",
        "workers",
        "Leader: workers that are up and not about to leave.",
    ),
    Metric(
        "everlift_wanted_workers",
        "gauge",
        "workers",
        "Leader: workers that the clusters on its ledger are to have, by setting or autoscaler.",
    ),
    Metric(
        "everlift_starting_workers", "gauge", "workers", "Leader: workers that load their model."
    ),
    Metric("everlift_queue_requests", "gauge", "requests", "Leader: requests that wait."),
    Metric(
        "everlift_queue_tokens",
        "gauge",
        "tokens",
        "Leader: tokens to be computed for all that wait, outputs as predicted.",
    ),
    Metric(
        "everlift_queue_head_wait_seconds",
        "gauge",
        "seconds",
        "Leader: how long the request that leaves the queue next has waited.",
    ),
    Metric(
        "everlift_service_gap_tokens",
        "gauge",
        "tokens",
        "Leader: by how much one tenant that waits was served more than another one of its class, "
        "in tokens as fair_share counts them; 0 where tenants are not told apart.",
    ),
    Metric(
        "everlift_offered_tokens_total",
        "counter",
        "tokens",
        "Leader: tokens to be computed for all requests that came since it leads, as predicted.",
    ),
    Metric(
        "everlift_sequences",
        "gauge",
        "sequences",
        "Leader: sequences at workers, those that wait there counted in.",
    ),
    Metric("everlift_slots", "gauge", "slots", "Leader: sequences that may run at once."),
    Metric(
        "everlift_queue_predicted_wait_seconds",
        "gauge",
        "seconds",
        "Leader: until all that wait now have left the queue, as predicted; 0 while that is not "
        "known.",
    ),
    Metric(
        "everlift_full_worker_tokens_per_second",
        "gauge",
        "tokens/s",
        "Leader: by how much requests get on, found prefixes counted in, at a worker that has all "
        "it can take; 0 while that is not known.",
    ),
)

#: Of each worker, by the router that leads. Counters count from the worker's start.
_WORKERS = (
    _of_worker("running_sequences", "gauge", "sequences", "Sequences in the batch."),
    _of_worker("waiting_sequences", "gauge", "sequences", "Sequences that wait for a place in it."),
    _of_worker("slots", "gauge", "slots", "Sequences that the batch may hold."),
    _of_worker("draining", "gauge", "", "1 while it hands everything back."),
    _of_worker(
        "slow", "gauge", "", "1 while it gets nothing, being so much slower than the others."
    ),
    _of_worker(
        "kv_blocks",
        "gauge",
        "blocks",
        "Blocks of the KV cache: used, cached (nobody uses them, and a prefix may be found there) "
        "or free.",
        "state",
    ),
    _of_worker(
        "kv_unfilled_tokens", "gauge", "tokens", "Places in used KV blocks that hold no token."
    ),
    _of_worker(
        "pending_prefill_tokens", "gauge", "tokens", "Tokens that are known and not computed."
    ),
    _of_worker("steps_total", "counter", "steps", "Engine steps."),
    _of_worker("busy_seconds_total", "counter", "seconds", "Time spent in engine steps."),
    _of_worker(
        "step_seconds_total",
        "counter",
        "seconds",
        "Time spent in a part of the steps, by rank 0's clock: schedule, model, sample or commit.",
        "part",
    ),
    _of_worker(
        "recent_step_seconds", "gauge", "seconds", "What a step took in its last second of work."
    ),
    _of_worker(
        "predicted_step_seconds",
        "gauge",
        "seconds",
        "What a step of what it runs takes, by those of its kind; absent while that is not known.",
    ),
    _of_worker(
        "step_prediction_error_ratio",
        "gauge",
        "ratio",
        "Mean absolute error of the last predictions of its kind's steps, as a part of what they "
        "took; absent while there was none.",
    ),
    _of_worker(
        "allowed_sequences",
        "gauge",
        "sequences",
        "Sequences that may run there at once: its slots, or fewer for router.tpot_target.",
    ),
    _of_worker("computed_tokens_total", "counter", "tokens", "Tokens computed, drafts counted in."),
    _of_worker("output_tokens_total", "counter", "tokens", "Tokens drawn and kept."),
    _of_worker(
        "slot_steps_total",
        "counter",
        "slots",
        "Batch slots that computed something, over all steps.",
    ),
    _of_worker(
        "prompt_tokens_total",
        "counter",
        "tokens",
        "Known tokens of sequences when they came into the batch.",
    ),
    _of_worker(
        "prefix_hit_tokens_total",
        "counter",
        "tokens",
        "Of everlift_worker_prompt_tokens_total, those found in the KV cache.",
    ),
    _of_worker(
        "preemptions_total",
        "counter",
        "sequences",
        "Times that a sequence gave up its blocks before its end.",
    ),
    _of_worker(
        "recomputed_tokens_total",
        "counter",
        "tokens",
        "Tokens computed again after a preemption, a loss or a move.",
    ),
    _of_worker("draft_tokens_total", "counter", "tokens", "Tokens proposed by speculation."),
    _of_worker(
        "accepted_draft_tokens_total",
        "counter",
        "tokens",
        "Of everlift_worker_draft_tokens_total, what the model itself drew.",
    ),
    _of_worker(
        "swapped_blocks_total",
        "counter",
        "blocks",
        "Blocks copied to the host's memory (out) and back (in).",
        "direction",
    ),
    _of_worker(
        "gpu_utilization_ratio",
        "gauge",
        "ratio",
        "Part of the last while in which rank 0's GPU ran anything, by NVML; absent without one.",
    ),
)

CATALOGUE: dict[str, Metric] = {
    metric.name: metric
    for metric in (*_REQUESTS, *_PREDICTIONS, *_LEDGER, *_ROUTER, *_CLUSTER, *_WORKERS)
}
