"""Frames for a page, by the permissions of its viewer."""

from __future__ import annotations

import json
from typing import Any

from everlift.v1 import session_pb2
from router.api.http.writer import encode
from router.auth.caller import ANYONE, Caller, Scope
from router.console.prompts import Prompts
from router.console.slot_grid import Lanes
from router.console.snapshot import Snapshot
from router.console.viewer import Viewer
from router.observability.metrics.catalogue import OTHER_TENANTS
from tests.support.router.console_support import FakeCluster, link, report

ADMIN = Caller("ops", frozenset({Scope.ADMIN}))
WATCHER = Caller("acme", frozenset({Scope.METRICS}))
TENANT = Caller("acme", frozenset({Scope.INFER, Scope.METRICS}))


class Page:
    def __init__(self, snapshot: Snapshot, caller: Caller = ANYONE) -> None:
        self._snapshot = snapshot
        self._viewer = Viewer(snapshot, caller, Lanes(None))

    def becomes(self, caller: Caller) -> None:
        self._viewer.caller = caller

    def frame(self, now: float) -> Any:
        sections = self._snapshot.update(now)
        text = self._viewer.frame({name: encode(it) for name, it in sections.items()}, now)
        return json.loads(text)


def test_frame_is_complete_first_and_then_incremental() -> None:
    cluster = FakeCluster([link("a"), link("b")])
    page = Page(cluster.snapshot())
    first = page.frame(1.0)
    assert first["workers"]["ids"] == first["lanes"] == ["a", "b"]
    assert set(first) > {"router", "totals", "cells", "queue", "latencies", "ledger", "errors"}
    assert page.frame(2.0) == {"at": 2.0}
    cluster.queued = 3
    assert set(page.frame(3.0)) == {"at", "totals", "queue"}


def test_frame_shows_the_transfer_after_a_worker_loss() -> None:
    cluster = FakeCluster([link("a"), link("b")])
    cluster.links[0].seat("r")
    page = Page(cluster.snapshot())
    first = page.frame(1.0)
    assert (first["seats"], first["names"]) == ([[0, 0, 1, 2]], {"1": "r"})
    cluster.links[0].is_up = False
    cluster.links[1].seat("", "r", prefilling=True)
    second = page.frame(2.0)
    assert second["seats"] == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert second["transfers"] == [
        {"key": 1, "cause": "worker_lost", "from": [0, 0], "to": [1, 1], "left_at": 2.0}
    ]
    assert second["happened"] == [{"at": 2.0, "kind": "worker_lost", "workers": ["a"], "count": 1}]


def test_reassigned_lane_has_no_old_arrows() -> None:
    cluster = FakeCluster([link(name) for name in "abcdef"])
    cluster.links[0].seat("r")
    page = Page(cluster.snapshot())
    page.frame(0.0)
    cluster.links[0] = link("g")
    page.frame(1.0)
    cluster.links[1].seat("r")
    later = page.frame(70.0)
    assert later["lanes"][0] == "g"
    assert later["seats"] == [[1, 0, 1, 2]] and "transfers" not in later


def test_request_tenants_are_shown_to_tenant_and_admins() -> None:
    cluster = FakeCluster([link("a")])
    cluster.links[0].seat("acme/r", "other/s")
    names = [
        Page(cluster.snapshot(), caller).frame(1.0).get("names")
        for caller in (ANYONE, ADMIN, TENANT, WATCHER)
    ]
    everybodys = {"1": "acme/r", "2": "other/s"}
    assert names == [everybodys, everybodys, {"1": "r"}, None]


def test_revoked_rights_end_with_the_next_frame() -> None:
    cluster = FakeCluster([link("a")])
    cluster.links[0].seat("acme/r")
    page = Page(cluster.snapshot(), ADMIN)
    assert page.frame(1.0)["names"] == {"1": "acme/r"}
    page.becomes(WATCHER)
    cluster.links[0].seat("acme/r", "acme/s")
    later = page.frame(2.0)
    assert later["you"]["scopes"] == ["metrics"]
    assert later["seats"] and "names" not in later


def test_queue_is_shown_by_class_and_by_visible_tenant() -> None:
    cluster = FakeCluster(queued=5)
    for model, wait_s in (("a", 0.5), ("b", 0.4)):
        estimate = cluster.queue_estimates[model] = session_pb2.QueueEstimate()
        estimate.waits.add(priority=1, wait_s=wait_s)
        estimate.waits.add(priority=0, wait_s=0.0)
    snapshot = cluster.snapshot()
    snapshot.load = report(
        queued=5,
        queued_tokens=70,
        waited_s=1.5,
        wait_s=2.5,
        class_queues=[
            session_pb2.ClassQueue(priority=1, queued=2),
            session_pb2.ClassQueue(priority=0, queued=3),
        ],
        tenant_queues=[
            session_pb2.TenantQueue(tenant="other", priority=0, queued=3),
            session_pb2.TenantQueue(tenant="acme", priority=1, queued=2),
        ],
    )
    queue = Page(snapshot).frame(1.0)["queue"]
    assert (queue["tokens"], queue["waited_s"], queue["wait_s"]) == (70, 1.5, 2.5)
    assert queue["classes"] == [
        {"priority": 1, "queued": 2, "wait_s": 0.5},
        {"priority": 0, "queued": 3, "wait_s": None},
    ]
    assert Page(snapshot).frame(1.0)["tenants"] == [
        {"tenant": "other", "priority": 0, "queued": 3, "wait_s": None},
        {"tenant": "acme", "priority": 1, "queued": 2, "wait_s": 0.5},
    ]
    seen = [
        [it["tenant"] for it in Page(snapshot, c).frame(1.0)["tenants"]] for c in (ADMIN, TENANT)
    ]
    assert seen == [["other", "acme"], ["acme"]]


def test_prompts_are_shown_by_worker_and_by_visible_tenant() -> None:
    cluster = FakeCluster([link("a"), link("b")])
    snapshot = cluster.snapshot()
    pages = {name: Page(snapshot, caller) for name, caller in (("ops", ADMIN), ("acme", TENANT))}
    assert pages["ops"].frame(0.0)["totals"]["prompt_tokens"] == 0
    counters = cluster.links[0].state.counters
    counters.prompt_tokens, counters.prefix_hit_tokens = 200, 150
    cluster.prompts = {"other": Prompts(120, 90), "acme": Prompts(80, 60), "idle": Prompts()}
    frame = pages["ops"].frame(1.0)
    assert [cell[-1] for cell in frame["cells"]] == [75, None]
    assert (frame["totals"]["prompt_tokens"], frame["totals"]["cached_tokens"]) == (200, 150)
    assert frame["prompts"] == {
        "workers": [
            {"name": "a", "tokens": 200, "cached": 150},
            {"name": "b", "tokens": 0, "cached": 0},
        ],
        "tenants": [
            {"name": "other", "tokens": 120, "cached": 90},
            {"name": "acme", "tokens": 80, "cached": 60},
        ],
    }
    own = pages["acme"].frame(1.0)["prompts"]["tenants"]
    assert own == [{"name": "acme", "tokens": 80, "cached": 60}]
    # A lost worker has no prompts, and what it counted meanwhile is not recent.
    cluster.links[0].is_up = False
    frame = pages["ops"].frame(2.0)
    assert (frame["totals"]["prompt_tokens"], frame["cells"][0][-1]) == (0, None)
    counters.prompt_tokens = 900
    cluster.links[0].is_up = True
    assert pages["ops"].frame(3.0).get("totals", {"prompt_tokens": 0})["prompt_tokens"] == 0


def test_prompts_of_most_tenants_are_summed() -> None:
    cluster = FakeCluster()
    cluster.prompts = {f"t{number}": Prompts(1000 + number, number) for number in range(100)}
    cluster.prompts[OTHER_TENANTS] = Prompts(5000, 7)
    shown = Page(cluster.snapshot(), ADMIN).frame(0.0)["prompts"]["tenants"]
    assert [it["name"] for it in shown] == [
        *(f"t{number}" for number in range(99, 35, -1)),
        OTHER_TENANTS,
    ]
    assert shown[-1]["tokens"] == 5000 + sum(1000 + number for number in range(36))
    assert shown[-1]["cached"] == 7 + sum(range(36))


def test_stale_leader_report_is_ignored() -> None:
    cluster = FakeCluster(queued=5)
    snapshot = cluster.snapshot()
    snapshot.load = report(age_s=6.0, queued=9)
    queue = Page(snapshot).frame(1.0)["queue"]
    assert (queue["is_known"], queue["queued"]) == (False, 5)


def test_latencies_and_errors_are_recent_ones() -> None:
    cluster = FakeCluster(failed={"queue_full": 2})
    page = Page(cluster.snapshot())
    page.frame(1.0)
    cluster.observe("ttft", 10, 10, 10)
    cluster.failed["queue_full"] = 5
    frame = page.frame(2.0)
    assert frame["latencies"]["ttft"] == {"count": 10, "p50": 0.05, "p90": 0.09, "p99": 0.099}
    assert frame["errors"] == [["queue_full", 5, 0]]


def test_later_viewer_is_sent_the_history_once() -> None:
    cluster = FakeCluster()
    snapshot = cluster.snapshot()
    first = Page(snapshot)
    nothing = [None, None, None]
    assert first.frame(1.0)["history"] == [
        {"at": 1.0, "queued": 0, "ttft": nothing, "inter_token": nothing}
    ]
    cluster.queued = 3
    assert "history" not in first.frame(1.5)
    assert "history" not in first.frame(2.0)
    later = Page(snapshot).frame(3.0)["history"]
    assert [(point["at"], point["queued"]) for point in later] == [(1.0, 0), (2.0, 3), (3.0, 3)]


def test_events_are_ordered_and_kept_for_later_viewers() -> None:
    cluster = FakeCluster([link("a")])
    snapshot = cluster.snapshot()
    page = Page(snapshot)
    assert "happened" not in page.frame(0.0)
    cluster.links[0].state.draining = True
    cluster.leader_id = "other"
    cluster.ledger.away = True
    cluster.effective_settings.values["order"] = "hrrn"
    events = page.frame(1.0)["happened"]
    assert [it["kind"] for it in events] == ["worker_draining", "leader", "ledger_away", "policy"]
    assert events[-1]["changed"] == {"order": "hrrn"}
    cluster.links.clear()
    cluster.ledger.away = False
    assert [it["kind"] for it in page.frame(2.0)["happened"]] == ["worker_left", "ledger_back"]
    assert len(Page(snapshot).frame(3.0)["happened"]) == 6


def test_preemptions_are_summed_every_five_seconds() -> None:
    cluster = FakeCluster([link("a")])
    page = Page(cluster.snapshot())
    events = []
    for second in range(8):
        cluster.links[0].state.preemptions = second * 10
        events += [(it["at"], it["count"]) for it in page.frame(second).get("happened", ())]
    assert events == [(1.0, 10), (6.0, 50)]


def test_frame_size_is_bounded_for_a_large_cluster() -> None:
    """The first frame has all slots of 8 lanes of 256 slots; later frames have changed ones."""
    cluster = FakeCluster([link(f"{number:016x}", 256) for number in range(1000)], queued=10_000)
    for each in cluster.links:
        each.seat(*(f"{each.info.worker_id}-{slot}" for slot in range(256)))
    snapshot = cluster.snapshot()
    page = Viewer(snapshot, ANYONE, Lanes([each.info.worker_id for each in cluster.links]))
    sizes = []
    for second in range(3):
        for each in cluster.links:
            each.state.output_tokens += 300
            each.state.blocks_used = second
        sections = {name: encode(it) for name, it in snapshot.update(second).items()}
        sizes.append(len(page.frame(sections, second)))
    assert sizes[0] < 250_000
    assert max(sizes[1:]) < 40_000
