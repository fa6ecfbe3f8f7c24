"""Leader of several models: each has a queue and workers of its own."""

from __future__ import annotations

from itertools import count

import pytest

from everlift.v1 import session_pb2 as pb
from router.admission.fair_share import FairShare
from router.admission.leader_state import LeaderState, total_load
from router.admission.placements import Placements
from router.admission.policy import Rules
from router.admission.request import Waiting
from router.admission.workers import Capacity, Load
from tests.support.router.admission_support import CONFIG, paced


class Leader:
    def __init__(self, *models: str, has_tenants: bool = False) -> None:
        self.placements = Placements(CONFIG)
        self.state = LeaderState(
            CONFIG,
            Rules.of(CONFIG),
            self.placements,
            lambda worker: [],
            "",
            0.0,
            (lambda: FairShare(1.0, 2.0, lambda tenant: 1.0)) if has_tenants else None,
        )
        self.state.handover.set_live_gateways(())
        self.state.connect("g", 0.0)
        self.receive(is_complete=True)
        self._epochs = count(1)
        for model in models:
            self.add_worker(model)

    def add_worker(self, model: str, slots: int = 4) -> None:
        self.placements.join(f"of-{model}", model, Capacity(slots, 1000))
        placement = self.placements[model]
        placement.report(f"of-{model}", Load(0), 0.0)
        placement.workers[f"of-{model}"].throughput = paced()

    def receive(self, **fields: object) -> list[str]:
        message = pb.GatewayMessage(**fields)  # type: ignore[arg-type]
        return [it.waiting.request_id for it in self.state.on_message("g", message, 0.0).refused]

    def enqueue(self, model: str, *names: str) -> list[str]:
        return self.receive(
            enqueue=[
                pb.Waiting(request_id=it, model=model, prompt_tokens=32, choices=1) for it in names
            ]
        )

    def place(self, limit: int = 64) -> dict[str, str]:
        """Dispatch requests, and return their workers."""
        placed = self.state.place(0.0, 0.0, limit, lambda: next(self._epochs))
        for each in placed:
            self.state.on_dispatched(each, "g")
        return {each.waiting.request_id: each.worker_id for each in placed}


def test_leader_places_requests_on_workers_of_their_model() -> None:
    leader = Leader("a", "b")
    leader.enqueue("a", "r0", "r2")
    leader.enqueue("b", "r1")
    assert leader.place() == {"r0": "of-a", "r2": "of-a", "r1": "of-b"}
    assert (leader.state.queued, leader.state.running) == (0, 3)
    leader.receive(withdraw=["r0", "r1"])
    assert leader.state.running == 1


def test_full_model_does_not_hold_back_another() -> None:
    leader = Leader("b")
    leader.enqueue("a", *(f"a{number}" for number in range(CONFIG.max_queued)))
    leader.enqueue("b", "r")
    assert leader.place() == {"r": "of-b"}
    assert leader.state.queued == CONFIG.max_queued
    # The bound of queued requests holds for each model.
    assert leader.enqueue("a", "more") == ["more"]
    assert leader.enqueue("b", "later") == []


def test_models_are_served_in_turn_under_a_limit() -> None:
    leader = Leader("a", "b")
    for model in "ab":
        leader.enqueue(model, f"{model}0", f"{model}1")
    first, second = leader.place(1), leader.place(1)
    assert {*first.values(), *second.values()} == {"of-a", "of-b"}


def test_reservation_is_made_although_another_model_queues() -> None:
    leader = Leader("b")
    leader.enqueue("a", "waiting")
    message = pb.Waiting(request_id="r", model="b", prompt_tokens=32, choices=1)
    placed = leader.state.reserve(Waiting.from_proto("g", message), 0.0, lambda: 7)
    assert placed is not None and placed.worker_id == "of-b"
    leader.state.confirm_reservation(placed, "g", 0.0)
    assert leader.state.running == 1


def test_lost_worker_affects_only_its_model() -> None:
    leader = Leader("a", "b")
    leader.placements.remove_worker("of-a")
    leader.enqueue("a", "r0")
    leader.enqueue("b", "r1")
    assert leader.place() == {"r1": "of-b"}
    assert [*leader.placements.workers] == ["of-b"]
    assert leader.placements.view("of-a") is None


def test_load_reports_total_and_each_model() -> None:
    leader = Leader("a", "b")
    leader.enqueue("a", "r0", "r1")
    leader.receive(
        demands=[pb.WorkerDemand(model="a", workers=3), pb.WorkerDemand(model="b", workers=1)],
        starts=[pb.WorkerStart(name="s", model="a", seconds=9.0)],
    )
    load = leader.state.load(7, 0.0, 0.0)
    assert (load.term, load.workers, load.queued, load.slots) == (7, 2, 2, 8)
    assert (load.wanted_workers, load.starting_workers) == (4, 1)
    assert {name: it.queued for name, it in load.models.items()} == {"a": 2, "b": 0}
    assert {name: it.wanted_workers for name, it in load.models.items()} == {"a": 3, "b": 1}
    assert load.worker_rate == pytest.approx(load.models["a"].worker_rate)
    estimates = {it.model: it.queued for it in leader.state.queue_estimates()}
    assert estimates == {"a": 2, "b": 0}


def test_changed_worker_is_wanted_at_its_new_model() -> None:
    leader = Leader("a", "b")
    leader.placements.join("moved", "b", Capacity(4, 1000, first_model="a"))
    leader.placements["b"].report("moved", Load(0), 0.0)
    unknown = leader.state.load(7, 0.0, 0.0)
    assert not any(it.HasField("wanted_workers") for it in unknown.models.values())
    leader.receive(demands=[pb.WorkerDemand(model=model, workers=2) for model in "ab"])
    load = leader.state.load(7, 0.0, 0.0)
    assert {name: it.wanted_workers for name, it in load.models.items()} == {"a": 1, "b": 3}


def test_total_load_sums_classes_and_tenants_over_models() -> None:
    def of(queued: int, wait_s: float | None) -> pb.ClusterLoad:
        load = pb.ClusterLoad(queued=queued, workers=1, ray_clusters={"ray": 1}, wait_s=wait_s)
        load.class_queues.add(priority=1, queued=queued)
        load.tenant_queues.add(tenant="t", priority=1, queued=queued)
        return load

    total = total_load(1, {"a": of(2, 1.0), "b": of(3, 4.0)})
    assert [(it.priority, it.queued) for it in total.class_queues] == [(1, 5)]
    assert [(it.tenant, it.queued) for it in total.tenant_queues] == [("t", 5)]
    assert (total.wait_s, total.ray_clusters) == (4.0, {"ray": 2})
    assert not total_load(1, {"a": of(2, 1.0), "b": of(3, None)}).HasField("wait_s")


def test_tenant_counters_are_restored_by_model() -> None:
    leader = Leader("a", "b", has_tenants=True)
    services = [pb.TenantService(tenant="t", counter=500.0)]
    leader.state.restore_counters(pb.ClusterLoad(models={"a": pb.ClusterLoad(services=services)}))
    assert leader.state.has_restored_counters
    for model, names in (("a", ("t/0", "u/0")), ("b", ("t/1", "u/1"))):
        leader.receive(
            enqueue=[
                pb.Waiting(
                    request_id=it,
                    model=model,
                    prompt_tokens=32,
                    choices=1,
                    accepted=True,
                    arrived=n,
                )
                for n, it in enumerate(names)
            ]
        )
    placed = leader.place()
    assert [it for it, worker in placed.items() if worker == "of-a"] == ["u/0", "t/0"]
    assert [it for it, worker in placed.items() if worker == "of-b"] == ["t/1", "u/1"]
