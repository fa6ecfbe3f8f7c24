"""Collector of the current state of a router and, if it leads, of its cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from everlift.v1 import session_pb2
from router.admission.workers import WorkerView
from router.leader.leader import Leader
from router.observability.metrics.catalogue import CATALOGUE
from router.prediction.model import QUANTILES
from router.requests.manager import Requests
from router.worker_sessions import Sessions, WorkerLink


class StateCollector:
    """Prometheus collector of the state of a router and, if it leads, of its cluster.

    The collector is called in the event loop, so that all values are from the same time.
    """

    def __init__(self, requests: Requests, sessions: Sessions, leader: Leader) -> None:
        self._requests = requests
        self._sessions = sessions
        self._leader = leader

    def collect(self) -> Iterator[Family]:
        for values in (self._of_requests(), self._of_ledger(), self._of_router()):
            yield from map(_single, values, values.values())
        yield self._outputs()
        yield from self._of_predictors()
        load = self._leader.load()
        yield from _of_models({} if load is None else load.models)
        yield from self._of_workers(is_leading=load is not None)

    def _of_requests(self) -> Mapping[str, float]:
        counters = self._requests.counters
        return {
            "everlift_requests_in_flight": len(self._requests),
            "everlift_migrations_total": counters.migrated,
            "everlift_moves_total": counters.moved,
            "everlift_preemptions_total": counters.preempted,
            "everlift_recomputed_tokens_total": counters.recomputed_tokens,
        }

    def _outputs(self) -> Family:
        outputs = family("everlift_output_tokens_total")
        for model, tokens in self._requests.counters.output_by_model.items():
            add(outputs, (model,), tokens)
        return outputs

    def _of_predictors(self) -> Iterable[Family]:
        trusted, tau, coverage = map(
            family,
            (
                "everlift_predictor_trusted",
                "everlift_predictor_tau",
                "everlift_predictor_coverage_ratio",
            ),
        )
        for model, predictor in self._requests.predictors.items():
            trust = predictor.trust
            add(trusted, (model,), trust is not None and trust.is_trusted)
            if trust is not None:
                add(tau, (model,), trust.tau)
                for quantile, part in zip(QUANTILES, trust.coverage, strict=False):
                    add(coverage, (model, f"{quantile:g}"), part)
        return trusted, tau, coverage

    def _of_ledger(self) -> Mapping[str, float]:
        status = self._requests.ledger_status()
        return {
            "everlift_ledger_away": status.away,
            "everlift_ledger_rollbacks_total": status.rollbacks,
            "everlift_ledger_memory_used_ratio": status.memory_used,
        }

    def _of_router(self) -> Mapping[str, float]:
        return {
            "everlift_router_ready": self._requests.accepts_requests,
            "everlift_router_workers": sum(link.is_up for link in self._sessions.links),
            "everlift_false_alarms_total": self._sessions.false_alarms,
            "everlift_leading": self._leader.is_leading,
            "everlift_leader_changes_total": self._leader.num_terms,
            "everlift_worker_losses_total": self._leader.num_losses,
        }

    def _of_workers(self, *, is_leading: bool) -> Iterable[Family]:
        families = {n: family(n) for n in CATALOGUE if "worker_id" in CATALOGUE[n].labels}
        for link in self._sessions.links if is_leading else ():
            if link.is_up:
                view = self._leader.view(link.info.worker_id)
                for (name, *labels), value in _of_worker(link, view).items():
                    metric = families[f"everlift_worker_{name}"]
                    add(metric, [link.info.worker_id, *labels], value)
        return families.values()


def family(name: str) -> Family:
    """Return a new metric family, without samples, for the counter or gauge of this name."""
    metric = CATALOGUE[name]
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)


def add(metric: Family, labels: Iterable[str], value: float) -> None:
    """Add a sample with these label values to a metric family."""
    assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
    metric.add_metric(list(labels), float(value))


def _single(name: str, value: float) -> Family:
    metric = family(name)
    add(metric, (), value)
    return metric


def _of_models(loads: Mapping[str, session_pb2.ClusterLoad]) -> Iterable[Family]:
    families = {name: family(name) for name in _of_model(session_pb2.ClusterLoad())}
    for model, load in loads.items():
        for name, value in _of_model(load).items():
            add(families[name], (model,), value)
    return families.values()


def _of_model(load: session_pb2.ClusterLoad) -> Mapping[str, float]:
    return {
        "everlift_workers": load.workers,
        "everlift_starting_workers": load.starting_workers,
        "everlift_wanted_workers": _wanted_workers(load),
        "everlift_queue_requests": load.queued,
        "everlift_queue_tokens": load.queued_tokens,
        "everlift_queue_head_wait_seconds": load.waited_s,
        "everlift_service_gap_tokens": load.service_gap,
        "everlift_offered_tokens_total": load.offered_tokens,
        "everlift_sequences": load.running,
        "everlift_slots": load.slots,
        "everlift_queue_predicted_wait_seconds": load.wait_s,
        "everlift_full_worker_tokens_per_second": load.worker_rate,
    }


def _wanted_workers(load: session_pb2.ClusterLoad) -> int:
    return load.wanted_workers if load.HasField("wanted_workers") else load.workers


def _of_worker(link: WorkerLink, view: WorkerView | None) -> Mapping[tuple[str, ...], float]:
    info, state, counters = link.info, link.state, link.state.counters
    free = max(0, info.num_blocks - state.blocks_used - state.blocks_cached)
    values: dict[tuple[str, ...], float] = {
        ("running_sequences",): state.num_running,
        ("waiting_sequences",): state.num_waiting,
        ("slots",): info.max_num_seqs,
        ("draining",): state.draining,
        ("slow",): view is not None and view.is_slow,
        ("kv_blocks", "used"): state.blocks_used,
        ("kv_blocks", "cached"): state.blocks_cached,
        ("kv_blocks", "free"): free,
        ("kv_unfilled_tokens",): counters.unfilled_tokens,
        ("pending_prefill_tokens",): state.pending_prefill_tokens,
        ("steps_total",): state.step,
        ("busy_seconds_total",): state.busy_s,
        ("step_seconds_total", "schedule"): state.step_times.schedule_s,
        ("step_seconds_total", "model"): state.step_times.model_s,
        ("step_seconds_total", "sample"): state.step_times.sample_s,
        ("step_seconds_total", "commit"): state.step_times.commit_s,
        ("recent_step_seconds",): view.throughput.step_s if view is not None else 0.0,
        ("computed_tokens_total",): state.computed_tokens,
        ("output_tokens_total",): state.output_tokens,
        ("slot_steps_total",): counters.slot_steps,
        ("prompt_tokens_total",): counters.prompt_tokens,
        ("prefix_hit_tokens_total",): counters.prefix_hit_tokens,
        ("preemptions_total",): state.preemptions,
        ("recomputed_tokens_total",): counters.recomputed_tokens,
        ("draft_tokens_total",): counters.draft_tokens,
        ("accepted_draft_tokens_total",): counters.accepted_tokens,
        ("swapped_blocks_total", "out"): counters.blocks_swapped_out,
        ("swapped_blocks_total", "in"): counters.blocks_swapped_in,
        ("loaded_adapters",): sum(not it.loading for it in link.adapters.adapters),
        ("adapter_loads_total",): link.adapters.loads,
        ("adapter_unloads_total",): link.adapters.unloads,
    }
    if state.HasField("gpu_utilization"):
        values["gpu_utilization_ratio",] = state.gpu_utilization
    return values | (_of_view(view) if view is not None else {})


def _of_view(view: WorkerView) -> dict[tuple[str, ...], float]:
    values: dict[tuple[str, ...], float] = {("allowed_sequences",): view.slots}
    if (tpot_s := view.tpot_s) is not None:
        values["predicted_step_seconds",] = tpot_s
    if (error := view.step_time.error) is not None:
        values["step_prediction_error_ratio",] = error
    return values
