"""Snapshot of the cluster as a router knows it, for the console. Pure.

A snapshot consists of sections, which are JSON values of bounded size. A section is the same for
all viewers who may see it. Values that only the leader knows are taken from its last report in the
ledger, so that any router can show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from everlift.explanation import LABELS, kind_name
from everlift.v1 import inference_pb2, session_pb2
from router.console import workers
from router.console.counting import LATENCIES, Aggregates, Counting
from router.console.events import EventLog, View
from router.console.failures import History
from router.console.parts import (
    EffectiveSettings,
    Heartbeat,
    Identity,
    Leader,
    LeaderClient,
    Measured,
    Requests,
    RuntimePolicy,
    Sessions,
)
from router.console.prompts import Prompts, RecentPrompts
from router.console.rates import Percentiles, Rates
from router.console.workers import Link, Row
from router.ledger.base import LoadReport
from router.ledger.config import PROMISES
from router.missing_workers import missing_workers
from router.observability.metrics.catalogue import OTHER_TENANTS

Json = dict[str, Any]

#: Age in seconds from which the leader's load report is ignored. The leader renews it five times a
#: second.
_STALE_S = 5.0
#: Latencies that the page shows as charts.
_CHARTED = ("ttft", "inter_token")
_PARTS = ("p50", "p90", "p99")
#: Maximum number of tenants whose prompts are shown separately.
_MAX_TENANTS = 64
#: Labels of the kinds of spans in a time breakdown.
_SPAN_LABELS = {kind_name(kind): label for kind, label in LABELS.items()}


class Snapshot:
    """Snapshot of the cluster, which ``update`` renews.

    The caller sets ``load`` and ``scaling``, which are read from the ledger, before ``update``.
    """

    def __init__(
        self,
        identity: Identity,
        sessions: Sessions,
        requests: Requests,
        leader: Leader,
        leader_client: LeaderClient,
        heartbeat: Heartbeat,
        runtime_policy: RuntimePolicy,
        measured: Measured,
    ) -> None:
        self._identity = identity
        self._sessions = sessions
        self._requests = requests
        self._leader = leader
        self._leader_client = leader_client
        self._heartbeat = heartbeat
        self._runtime_policy = runtime_policy
        self.load: LoadReport | None = None
        #: reports of the models' autoscalers, as scaling.described returns them
        self.scaling: list[Json] = []
        self.events = EventLog()
        self.history = History()
        self._rates = Rates()
        #: prompts of workers that are not lost
        self._prompts = RecentPrompts()
        self._counting = Counting(identity.router_id, sessions, requests, measured)
        bounds = {name: measured.bounds(metric) for name, metric in LATENCIES.items()}
        self._aggregates = Aggregates(identity.router_id, bounds)
        self._rows: list[Row] = []

    @property
    def links(self) -> dict[str, Link]:
        """Connections to workers by worker id."""
        return {link.info.worker_id: link for link in self._sessions.links}

    def update(self, now: float) -> Mapping[str, Any]:
        """Take a new snapshot, and return its sections as JSON values by name. O(workers)."""
        self._rows = self._worker_rows(now)
        self._aggregates.note(self._counting.counts(), now)
        self._aggregates.drop_routers(now)
        ledger, effective_settings = (
            self._requests.ledger_status(),
            self._runtime_policy.effective_settings,
        )
        self.events.update(
            View(
                self._rows,
                self._heartbeat.leader_id,
                ledger.away,
                ledger.rollbacks,
                {
                    name: effective_settings.values[name]
                    for name in sorted(effective_settings.values)
                },
            ),
            now,
        )
        latencies = {
            name: _rounded(percentiles)
            for name, percentiles in self._aggregates.latencies().items()
        }
        self.history.note(
            {"queued": self._leader_client.queued}
            | {name: [latencies[name][part] for part in _PARTS] for name in _CHARTED},
            now,
        )
        return {
            "router": self._router(),
            "routers": {
                "heard": self._aggregates.num_answering,
                "silent": self._aggregates.num_silent,
            },
            "totals": self._totals(),
            "workers": workers.names(self._rows),
            "cells": workers.cells(self._rows),
            "queue": self._queue(effective_settings),
            "scaling": self.scaling,
            "missing_workers": missing_workers(self.load),
            "span_labels": _SPAN_LABELS,
            "latencies": latencies,
            "ledger": _ledger(ledger),
            "errors": [
                [each.slug, each.recent, round(each.last_s)]
                for each in self._aggregates.failures(now)
            ],
        }

    def _worker_rows(self, now: float) -> list[Row]:
        links = self._sessions.links
        self._prompts.note(
            ((link.info.worker_id, _prompts(link)) for link in links if link.is_up), now
        )
        rows = [
            workers.row(
                link,
                self._leader.view(link.info.worker_id),
                self._rates.of(link.info.worker_id, link.state.output_tokens, now),
                self._prompts.of(link.info.worker_id),
            )
            for link in links
        ]
        self._rates.retain(link.info.worker_id for link in links)
        return sorted(rows, key=lambda each: each.worker_id)

    def add_counts(self, counts: Sequence[session_pb2.Counts], num_silent: int, now: float) -> None:
        """Store other routers' counters; ``num_silent`` is the number without an answer."""
        for each in counts:
            self._aggregates.note(each, now)
        self._aggregates.num_answering, self._aggregates.num_silent = 1 + len(counts), num_silent

    def _router(self) -> Json:
        return asdict(self._identity) | {
            "leader": self._heartbeat.leader_id,
            "is_leading": self._leader.is_leading,
            "leader_is_quiet": self._leader_client.is_quiet,
        }

    def _totals(self) -> Json:
        return (
            workers.summary(self._rows)
            | {"queued": self._leader_client.queued}
            | self._aggregates.totals()
        )

    def _queue(self, effective_settings: EffectiveSettings) -> Json:
        load = self._fresh_load
        queue: Json = {
            "is_known": load is not None,
            "queued": self._leader_client.queued,
            "policy": dict(effective_settings.values),
            "overridden": list(effective_settings.overridden),
        }
        if load is None:
            return queue
        return queue | {
            "tokens": load.queued_tokens,
            "waited_s": round(load.waited_s, 2),
            "wait_s": round(load.wait_s, 2) if load.HasField("wait_s") else None,
            "worker_rate": round(load.worker_rate),
            "classes": self._classes(load),
            "models": [_model(name, load.models[name]) for name in sorted(load.models)],
        }

    def _classes(self, load: session_pb2.ClusterLoad) -> list[Json]:
        waits = self._waits()
        return [
            {
                "priority": each.priority,
                "queued": each.queued,
                "wait_s": waits.get(each.priority),
            }
            for each in load.class_queues
        ]

    def _waits(self) -> dict[int, float]:
        """Return the estimated wait of each class in seconds, the longest of all models."""
        longest: dict[int, float] = {}
        for estimate in self._requests.queue_estimates.values():
            for each in estimate.waits:
                if each.wait_s:
                    wait_s = round(each.wait_s, 2)
                    longest[each.priority] = max(wait_s, longest.get(each.priority, 0.0))
        return longest

    def tenants(self, tenant: str | None) -> list[Json]:
        """Return the number of queued requests for each tenant and priority class, as JSON.

        ``tenant`` selects one tenant; None means all. ``wait_s`` in the result is the estimated
        wait of the class in seconds. The list is empty without a recent report of the leader.
        """
        load = self._fresh_load
        queues: Iterable[session_pb2.TenantQueue] = load.tenant_queues if load is not None else ()
        waits = self._waits()
        return [
            {
                "tenant": each.tenant,
                "priority": each.priority,
                "queued": each.queued,
                "wait_s": waits.get(each.priority),
            }
            for each in queues
            if tenant is None or each.tenant == tenant
        ]

    def worker_prompts(self, worker_ids: Iterable[str]) -> list[Json]:
        """Return each worker's prompt tokens and cache hits of the last five minutes, as JSON."""
        return [_named(name, self._prompts.of(name)) for name in worker_ids]

    def tenant_prompts(self, tenant: str | None) -> list[Json]:
        """Return each tenant's prompt tokens and cache hits of the last five minutes, as JSON.

        ``tenant`` selects one tenant. With None, the list has the 64 tenants with the most tokens,
        in descending order, and the sum of all others.
        """
        found = {
            name: prompts
            for name, prompts in self._aggregates.tenant_prompts().items()
            if prompts.tokens
        }
        if tenant is not None:
            return [_named(tenant, found[tenant])] if tenant in found else []
        others = found.pop(OTHER_TENANTS, Prompts())
        names = sorted(found, key=lambda name: (-found[name].tokens, name))
        for name in names[_MAX_TENANTS:]:
            others = others.plus(found[name])
        listed = [_named(name, found[name]) for name in names[:_MAX_TENANTS]]
        return [*listed, _named(OTHER_TENANTS, others)] if others.tokens else listed

    @property
    def _fresh_load(self) -> session_pb2.ClusterLoad | None:
        report = self.load
        return report.load if report is not None and report.age_s < _STALE_S else None


def _prompts(link: Link) -> Prompts:
    counters = link.state.counters
    return Prompts(counters.prompt_tokens, counters.prefix_hit_tokens)


def _named(name: str, prompts: Prompts) -> Json:
    return {"name": name, "tokens": prompts.tokens, "cached": prompts.cached}


def _rounded(percentiles: Percentiles) -> Json:
    fields = asdict(percentiles)
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in fields.items()
    }


def _ledger(status: inference_pb2.LedgerStatus) -> Json:
    return {
        "server": status.server,
        "durability_class": status.durability_class,
        "durability": status.durability,
        "promise": PROMISES.get(status.durability_class, ""),
        "memory_used": round(status.memory_used, 3) if status.HasField("memory_used") else None,
        "away": status.away,
        "rollbacks": status.rollbacks,
    }


def _model(name: str, load: session_pb2.ClusterLoad) -> Json:
    return {
        "model": name,
        "workers": load.workers,
        "queued": load.queued,
        "running": load.running,
        "wait_s": round(load.wait_s, 2) if load.HasField("wait_s") else None,
    }
