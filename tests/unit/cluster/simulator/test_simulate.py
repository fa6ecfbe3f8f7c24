"""Simulation of a cluster: invariants of every request, and modelled effects."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import pytest

from benchmarks.early_binding import Choice, EarlyBinding
from cluster.autoscale.config import AutoscaleConfig
from cluster.simulator import fleet
from cluster.simulator.forecast import Forecast
from cluster.simulator.scenario import Event, WorkerDrain, WorkerLoss, WorkerStart
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Quantiles, Record, Slo
from cluster.simulator.worker import SimulatedWorker
from cluster.simulator.workloads.arrivals import Arrival
from everlift.engine_policy import EnginePolicy
from router.config import Order, RouterConfig
from tests.support.example_counts import long
from tests.support.small_clusters import ENGINE, STEP_TIME, arrivals, scenario, spec
from worker.config import Scheduling

LINK_S = 0.001


def test_simulated_lone_request_takes_link_and_step_times() -> None:
    (record,) = simulate([Arrival(1.0, 100, 5, 200)], scenario()).records
    assert record.dispatched == 1.0
    assert record.ttft_s == pytest.approx(2 * LINK_S + 0.01, abs=1e-4)
    assert record.tpot_s == pytest.approx(0.01, abs=1e-4)
    assert (record.output_tokens, record.worker, record.attempts) == (5, "worker-0", 1)


def test_simulated_prompt_is_computed_in_chunks() -> None:
    (record,) = simulate([Arrival(0.0, 300, 1, 200)], scenario()).records
    # The request arrives before the worker has announced itself; chunks of 128, 128 and 44 tokens.
    assert record.dispatched == LINK_S
    assert record.ttft_s == pytest.approx(3 * LINK_S + 2 * 0.0128 + 0.01, abs=2e-4)


def test_simulated_output_ends_at_max_tokens_or_context() -> None:
    forecast = simulate([Arrival(0, 10, 50, 20), Arrival(0, 1000, 50, 200)], scenario())
    assert [record.output_tokens for record in forecast.records] == [20, 24]


@pytest.mark.parametrize(("seconds", "hits"), [(0.0, 0), (5.0, 0), (60.0, 288)])
def test_simulated_session_is_retained_between_turns(seconds: float, hits: int) -> None:
    turns = [Arrival(at, 290, 10, 200, session=1) for at in (0.0, 10.0)]
    others = [Arrival(1.0 + number, 300, 10, 200) for number in range(8)]
    worker = spec(num_blocks=40, session_retention_s=seconds, session_share=0.5)
    records = simulate([turns[0], *others, turns[1]], scenario(worker)).records
    assert records[-1].cached_tokens == hits


def test_simulation_is_reproducible_by_seed() -> None:
    shortest = RouterConfig(order="shortest")
    load, cluster = arrivals(60, 90.0), scenario(spec(), router=shortest, foresight_sigma=0.5)
    assert simulate(load, cluster) == simulate(load, cluster)
    assert simulate(load, cluster) != simulate(load, replace(cluster, seed=1))


EVENTS: dict[str, tuple[Event, ...]] = {
    "none": (),
    "loss": (WorkerLoss(0.5, 0), WorkerStart(1.0, spec(), 0.3)),
    "late detection": (WorkerLoss(0.5, 1, detection_s=3.0),),
    "detected before its last frames come": (WorkerLoss(0.5, 1, detection_s=0.0),),
    "drain": (WorkerDrain(0.5, 0), WorkerDrain(0.9, 7)),
    "all lost": (WorkerLoss(0.4, 0), WorkerLoss(0.5, 1), WorkerStart(2.0, spec())),
}


def check_conserved(forecast: Forecast) -> None:
    """Check that every request has ended once, with all its tokens or with a cause."""
    for index, record in enumerate(forecast.records):
        arrival = record.arrival
        assert record.index == index
        assert record.is_finished is not bool(record.refused)
        if record.is_finished:
            assert record.output_tokens == min(arrival.output_tokens, arrival.max_tokens)
            assert arrival.at <= record.dispatched < record.first_token <= record.finished


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_simulation_loses_and_repeats_no_token(events: tuple[Event, ...]) -> None:
    load = arrivals(60, 60.0)
    forecast = simulate(load, scenario(spec(), spec(), events=events))
    assert [record.arrival for record in forecast.records] == load
    check_conserved(forecast)
    assert not any(record.refused for record in forecast.records)


@pytest.mark.parametrize("policy", ["slai", "magnus", "static"])
def test_simulation_counts_tokens_of_deferred_decodes(policy: EnginePolicy) -> None:
    load = [Arrival(0.02 * number, 400, 30, 200) for number in range(40)]
    worker = spec(scheduling=Scheduling(policy, tbt_target=30.0))
    check_conserved(simulate(load, scenario(worker)))


def test_simulated_worker_loss_migrates_requests_with_tokens() -> None:
    lost = scenario(spec(), spec(), events=(WorkerLoss(0.5, 0, detection_s=0.2),))
    load = [Arrival(0.01, 64, 90, 200), Arrival(0.01, 64, 90, 200)]
    first, second = simulate(load, lost).records
    undisturbed = second.latency_s
    assert (first.worker, first.attempts, first.migrations) == ("worker-1", 2, 1)
    assert first.recomputed_tokens > 64
    # The detection takes 0.2 s, and computing the tokens again less than 0.1 s.
    assert undisturbed + 0.2 < first.latency_s < undisturbed + 0.3


def test_simulated_request_fails_after_too_many_losses() -> None:
    events = tuple(WorkerLoss(0.001, worker, 0.001) for worker in range(3))
    cluster = scenario(*[spec(slowness=100)] * 3, events=events, router=RouterConfig(max_losses=1))
    (record,) = simulate([Arrival(0.0, 100, 5, 200)], cluster).records
    assert record.refused in ("attempts_exhausted", "no_worker")


def test_simulated_request_without_a_worker_times_out() -> None:
    cluster = scenario(events=(WorkerLoss(0.0, 0, 0.0),), router=RouterConfig(worker_wait=3.0))
    forecast = simulate([Arrival(0.1, 100, 5, 200)], cluster)
    assert forecast.summary().refused == {"no_worker": 1}


def test_simulated_worker_wait_starts_at_each_arrival() -> None:
    """The wait of requests that arrive without a worker counts from their own arrival."""
    events = (WorkerLoss(1.0, 0, 0.0), WorkerStart(12.0, spec()), WorkerLoss(13.0, 1, 0.0))
    cluster = scenario(events=events, router=RouterConfig(worker_wait=3.0))
    load = [Arrival(at, 100, 5, 200) for at in (0.9995, 8.9, 9.1, 20.0)]
    records = simulate(load, cluster).records
    assert [it.refused for it in records] == ["no_worker", "no_worker", "", "no_worker"]
    assert 12.0 <= records[2].dispatched < 12.1


def test_simulated_empty_cluster_starts_a_worker_on_arrival() -> None:
    """The second request arrives long after the last worker was removed."""
    autoscale = AutoscaleConfig(min_workers=0, max_workers=1, idle_delay=5.0)
    router = RouterConfig(worker_wait=20.0)
    cluster = replace(scenario(router=router), autoscale=autoscale, start_s=2.0)
    records = simulate([Arrival(at, 100, 5, 200) for at in (0.0, 100.0)], cluster).records
    assert all(it.is_finished for it in records)
    assert 2.0 < records[1].dispatched - 100.0 < 20.0


def test_simulation_refuses_by_full_queue_and_deadline() -> None:
    load = arrivals(40, 1000.0)
    router = RouterConfig(max_queued=5, local_depth=0)
    full = simulate(load, scenario(spec(max_num_seqs=2), router=router))
    assert full.summary().refused.keys() == {"queue_full"}
    late = simulate([replace(it, deadline_s=0.4) for it in load], scenario(spec(max_num_seqs=2)))
    assert late.summary().refused.keys() == {"deadline_exceeded"}
    for forecast in (full, late):
        check_conserved(forecast)
    assert all(record.latency_s <= 0.4 for record in late.records if record.is_finished)


def test_simulation_refuses_a_prompt_too_long() -> None:
    forecast = simulate([Arrival(0.0, 2000, 5, 200)], scenario())
    assert forecast.summary().refused == {"prompt_too_long": 1}


@pytest.mark.parametrize("first", [0, 1])
def test_simulated_requests_are_bounded_by_the_smallest_worker(first: int) -> None:
    """The bound holds while that worker exists, whichever worker is listed first."""
    sizes = [spec(), spec(max_model_len=256)]
    cluster = scenario(sizes[first], sizes[1 - first], events=(WorkerLoss(5.0, 1 - first),))
    load = [Arrival(0.1, 300, 5, 200), Arrival(0.2, 200, 100, 200), Arrival(9.0, 300, 5, 200)]
    records = simulate(load, cluster).records
    assert [record.refused for record in records] == ["prompt_too_long", "", ""]
    assert [record.output_tokens for record in records] == [0, 56, 5]


def test_simulated_prefix_cache_shares_blocks_within_a_tenant() -> None:
    one, other = Arrival(0.0, 200, 5, 200, prefix=(7, 8), prefix_part_tokens=64), (7, 9)
    load = [replace(one, at=at) for at in (0.0, 1.0)]
    load += [replace(one, at=2.0, prefix=other), replace(one, at=3.0, tenant="another")]
    cached = [record.cached_tokens for record in simulate(load, scenario()).records]
    assert cached == [0, 128, 64, 0]


def test_simulated_slow_worker_gets_fewer_requests() -> None:
    load = arrivals(120, 40.0)
    forecast = simulate(load, scenario(spec(), spec(slowness=4)))
    workers = [record.worker for record in forecast.records]
    assert workers.count("worker-1") < 0.5 * workers.count("worker-0")


def test_simulated_higher_class_is_dispatched_first() -> None:
    load = [replace(it, priority=i % 2) for i, it in enumerate(arrivals(100, 200.0))]
    by_class = simulate(load, scenario(spec(max_num_seqs=4))).by_class()
    assert by_class[1].ttft_s.mean < 0.5 * by_class[0].ttft_s.mean


def test_simulation_applies_the_routers_order() -> None:
    load = arrivals(100, 200.0)
    means = {
        order: simulate(
            load, scenario(spec(max_num_seqs=4), router=RouterConfig(order=order))
        ).summary()
        for order in ("fifo", "shortest")
    }
    assert means["fifo"].bypassed.mean == 0 < means["shortest"].bypassed.mean


def test_simulation_refuses_unmeetable_deadlines() -> None:
    """A worker computes 100 tokens per second, and half of the requests have 100 output tokens."""
    load = [
        replace(it, deadline_s=0.6, output_tokens=(10, 100)[index % 2])
        for index, it in enumerate(arrivals(200, 10.0))
    ]
    router = RouterConfig(refuse_late=True)
    blind, seeing = (
        simulate(load, scenario(router=router, foresight_sigma=sigma)).summary()
        for sigma in (None, 0.0)
    )
    assert blind.refused.keys() == {"deadline_exceeded"}
    assert seeing.refused["deadline_unmeetable"] > 80
    assert seeing.refused.get("deadline_exceeded", 0) < 0.2 * blind.refused["deadline_exceeded"]
    assert seeing.finished >= blind.finished


@pytest.mark.parametrize("order", ["shortest", long("ranked"), long("hrrn")])
def test_simulated_distrusted_predictions_leave_in_fifo_order(order: Order) -> None:
    load = [replace(it, predicted_tokens=it.output_tokens) for it in arrivals(60, 90.0)]
    distrusted = [replace(it, is_distrusted=True) for it in load]
    workers = scenario(spec(max_num_seqs=4))

    def dispatched(load: list[Arrival], order: Order) -> list[float]:
        records = simulate(load, replace(workers, router=RouterConfig(order=order))).records
        return [record.dispatched for record in records]

    fifo = dispatched(load, "fifo")
    assert dispatched(distrusted, order) == fifo != dispatched(load, order)


@pytest.mark.long
def test_simulated_sessions_attain_service() -> None:
    """Two sessions compete for a slot; the one with the shorter turns is ahead."""
    turns = [
        Arrival(0.05 * at, 20, output, 400, session=session)
        for at in range(150)
        for session, output in ((1, 60), (2, 3))
    ]
    workers = scenario(spec(max_num_seqs=1))

    def waited(order: Order) -> list[float]:
        router = RouterConfig(order=order, local_depth=0, prompt_token_weight=0.01)
        records = simulate(turns, replace(workers, router=router)).records
        return [sum(it.queued_s for it in records[first::2]) for first in (0, 1)]

    fifo, attained = waited("fifo"), waited("attained")
    assert fifo[1] == pytest.approx(fifo[0], rel=0.05)
    assert attained[1] < 0.5 * attained[0]


@pytest.mark.parametrize(("sigma", "together"), [(None, [1, 2, 3, 4]), (0.0, [2, 4, 6, 8])])
def test_simulated_worker_batches_by_predicted_outputs(
    sigma: float | None, together: list[int]
) -> None:
    """The worker's policy closes batches of similar outputs, here after the first request's."""
    load = [Arrival(0.0, 10, 30, 200), *(Arrival(0.0, 10, length, 200) for length in [90, 5] * 4)]
    worker = spec(max_num_seqs=4, scheduling=Scheduling("magnus"))
    cluster = scenario(worker, router=RouterConfig(local_depth=8), foresight_sigma=sigma)
    _, *others = simulate(load, cluster).records
    first = min(record.first_token for record in others)
    assert [record.index for record in others if record.first_token == first] == together


@pytest.mark.parametrize("choice", ["random", "round_robin", "jsq", "p2c"])
def test_early_binding_finishes_every_request(choice: Choice) -> None:
    cluster = scenario(spec(), spec(), events=EVENTS["loss"])
    queue = EarlyBinding(choice).queue(cluster.router)
    check_conserved(simulate(arrivals(60, 60.0), cluster, dispatcher=queue))


def test_simulated_late_binding_beats_early_binding() -> None:
    load = arrivals(200, 45.0)
    cluster = scenario(spec(), spec(), spec(slowness=3))
    late = simulate(load, cluster).summary().ttft_s.p99
    for binding in (EarlyBinding("p2c"), EarlyBinding("jsq", age_s=1.0)):
        queue = binding.queue(cluster.router)
        assert late < simulate(load, cluster, dispatcher=queue).summary().ttft_s.p99


def test_simulated_autoscaler_adds_and_removes_workers() -> None:
    scaling = AutoscaleConfig(max_workers=4, ttft_target=0.5, drain_target=2.0, down_delay=5.0)
    cluster = scenario(autoscale=scaling, start_s=1.0)
    load = [*arrivals(200, 60.0), Arrival(40.0, 100, 5, 200)]
    forecast = simulate(load, cluster)
    workers = [sample.workers for sample in forecast.samples]
    assert workers[0] == 1 < max(workers) and workers[-1] < max(workers)
    assert forecast.worker_s < max(workers) * forecast.samples[-1].at
    check_conserved(forecast)


def test_simulated_added_workers_have_normal_speed() -> None:
    scaling = AutoscaleConfig(min_workers=2, max_workers=2)
    cluster = scenario(spec(slowness=4), autoscale=scaling, start_s=0.0)
    records = simulate([Arrival(0.5, 10, 50, 200)] * 2, cluster).records
    decode_s = {record.worker: record.tpot_s for record in records}
    assert decode_s["worker-0"] == pytest.approx(4 * decode_s["worker-1"], rel=0.01)


@pytest.mark.long
def test_simulation_frees_removed_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has a pool of blocks, and an autoscaler starts and ends workers all the time."""
    there: WeakSet[SimulatedWorker] = WeakSet()
    most = 0

    class Counted(SimulatedWorker):
        def __init__(self, *parts: Any) -> None:
            nonlocal most
            super().__init__(*parts)
            gc.collect()
            there.add(self)
            most = max(most, len(there))

    monkeypatch.setattr(fleet, "SimulatedWorker", Counted)
    events = [(WorkerStart(i, spec()), WorkerDrain(i + 0.5, i)) for i in range(10)]
    cluster = scenario(events=tuple(it for pair in events for it in pair))
    answer = simulate(arrivals(60, 6.0), cluster)
    check_conserved(answer)
    assert answer.num_steps > 100
    assert most <= 3


def test_simulated_follow_up_arrives_after_the_end() -> None:
    def follow_up(record: Record) -> Arrival | None:
        is_last = record.index == 2
        return None if is_last else replace(record.arrival, at=record.finished + 5.0)

    records = simulate([Arrival(0.0, 100, 5, 200)], scenario(), follow_up=follow_up).records
    assert len(records) == 3 and all(it.is_finished for it in records)
    for before, after in pairwise(records):
        assert after.arrival.at == before.finished + 5.0


def test_simulation_rejects_arrivals_out_of_order() -> None:
    with pytest.raises(ValueError, match="arrivals must be sorted by time"):
        simulate([Arrival(1.0, 1, 1, 1), Arrival(0.5, 1, 1, 1)], scenario())


def test_simulation_rejects_unmodelled_settings() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        spec(num_blocks=None)
    with pytest.raises(ValueError, match="preemption"):
        spec(preemption="swap")
    with pytest.raises(ValueError, match="autoscale"):
        scaled = scenario(autoscale=AutoscaleConfig(max_workers=2))
        simulate([], scaled, dispatcher=EarlyBinding("jsq").queue(scaled.router))


def test_summary_counts_requests_within_the_slo() -> None:
    forecast = simulate(arrivals(40, 60.0), scenario())
    all_good, none = forecast.summary(), forecast.summary(Slo(ttft_s=0.0))
    assert (all_good.good_share, none.good_share) == (1.0, 0.0)
    assert all_good.goodput_per_s == all_good.requests_per_s > 0
    tokens = sum(record.output_tokens for record in forecast.records)
    assert all_good.output_tokens_per_s == pytest.approx(tokens / all_good.duration_s)
    assert Quantiles.of(range(1, 101)) == Quantiles(50.5, 50, 90, 99)
    assert Quantiles.of([]) == Quantiles(0.0, 0.0, 0.0, 0.0)


def test_simulation_samples_show_occupancy_over_time() -> None:
    forecast = simulate(arrivals(60, 60.0), scenario(spec(), spec(), sample_s=0.1))
    busy = max(forecast.samples, key=lambda sample: sample.running)
    assert busy.slots == 2 * ENGINE.max_num_seqs and 0 < busy.slot_occupancy <= 1
    assert 0 < busy.block_occupancy <= 1
    assert [sample.at for sample in forecast.samples[:3]] == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize("end", [WorkerLoss(1.0, 0), WorkerDrain(1.0, 0)])
def test_simulation_samples_never_exceed_capacity(end: Event) -> None:
    load = [Arrival(0.0, 100, 150, 200)] * 16
    cluster = scenario(spec(), spec(), events=(end,), sample_s=0.01)
    samples = simulate(load, cluster).samples
    assert max(sample.running for sample in samples) == 2 * ENGINE.max_num_seqs
    assert all(sample.running <= sample.slots for sample in samples)
    assert all(sample.blocks_used <= sample.blocks for sample in samples)


def test_simulated_step_time_depends_on_computed_tokens() -> None:
    (record,) = simulate([Arrival(0.0, 100, 2, 200)], scenario(spec(slowness=2))).records
    known = 101
    expected = 2 * (STEP_TIME.weights_s + known * STEP_TIME.kv_token_s)
    assert record.finished - record.first_token == pytest.approx(expected)


@pytest.mark.long
def test_simulated_fair_share_isolates_a_flooding_tenant() -> None:
    flood = arrivals(300, 100.0, seed=1, tenant="flood")
    calm = arrivals(30, 2.0, seed=2, tenant="calm")
    load = sorted([*flood, *calm], key=lambda arrival: arrival.at)

    def waited(**changes: object) -> float:
        cluster = replace(scenario(), **changes)  # type: ignore[arg-type]
        return simulate(load, cluster).by_tenant()["calm"].ttft_s.p90

    alone = simulate(calm, scenario()).summary().ttft_s.p90
    assert waited(weights=None) > 10 * waited()
    assert waited() < alone + 1.5
    weighty = simulate(load, scenario(weights={"flood": 50.0})).by_tenant()["calm"]
    assert weighty.ttft_s.p90 > waited()
