"""Workers in a few numbers, held against those with the product's scheduler and block pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cluster.simulator.scenario import Scenario, WorkerLoss
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Summary
from cluster.simulator.workloads.arrival import Arrival
from tests.support.small_clusters import arrivals, scenario, spec


def both(load: Sequence[Arrival], cluster: Scenario) -> tuple[Summary, Summary]:
    """Fluid, exact."""
    fluid, exact = (simulate(load, replace(cluster, fluid=it)) for it in (True, False))
    return fluid.summary(), exact.summary()


def test_a_lone_request_is_served_as_by_an_exact_one() -> None:
    load = [Arrival(1.0, 300, 50, 200)]
    fluid, exact = (
        simulate(load, replace(scenario(), fluid=it)).records[0] for it in (True, False)
    )
    assert fluid.first_token == pytest.approx(exact.first_token, abs=1e-6)
    assert fluid.finished == pytest.approx(exact.finished, rel=1e-4)


@pytest.mark.parametrize("prompt", [990, 1008, 1010, 1016, 1023])
def test_who_takes_all_blocks_alone_is_served(prompt: int) -> None:
    load = [Arrival(0.1 * at, prompt, 50, 200) for at in range(3)]
    fluid, exact = (
        simulate(load, replace(scenario(spec(num_blocks=32)), fluid=it)).records
        for it in (True, False)
    )
    for one, other in zip(fluid, exact, strict=True):
        assert one.output_tokens == other.output_tokens
        assert one.finished == pytest.approx(other.finished, rel=0.1)


def test_a_chunked_prompt_takes_its_steps() -> None:
    (record,) = simulate([Arrival(1.0, 300, 1, 200)], replace(scenario(), fluid=True)).records
    # 128, 128 and 44 tokens, of which a hundred cost nothing beside the weights; and the links.
    assert record.finished == pytest.approx(1.0 + 2 * 0.0128 + 0.01 + 0.002, abs=1e-3)


@pytest.mark.parametrize("rate", [6.0, 12.0, 20.0])
def test_latencies_are_those_of_exact_workers(rate: float) -> None:
    """Below saturation, at it and above: within a twentieth."""
    fluid, exact = both(arrivals(300, rate), scenario(spec(), spec()))
    for value in (
        lambda it: it.ttft_s.p50,
        lambda it: it.ttft_s.p90,
        lambda it: it.latency_s.p50,
        lambda it: it.latency_s.p90,
        lambda it: it.tpot_s.mean,
        lambda it: it.output_tokens_per_s,
    ):
        figure: Callable[[Summary], float] = value
        assert figure(fluid) == pytest.approx(figure(exact), rel=0.05)


def test_short_of_blocks_it_preempts_about_as_often() -> None:
    fluid, exact = both(arrivals(200, 20.0), scenario(spec(num_blocks=40)))
    assert fluid.finished == exact.finished == 200
    assert exact.preemptions > 20
    assert fluid.preemptions == pytest.approx(exact.preemptions, rel=0.4)
    assert fluid.latency_s.p50 == pytest.approx(exact.latency_s.p50, rel=0.1)


def test_what_a_lost_worker_had_goes_on_elsewhere() -> None:
    lost = WorkerLoss(3.0, 0, detection_s=0.5)
    fluid, exact = both(arrivals(100, 12.0), scenario(spec(), spec(), events=(lost,)))
    assert fluid.finished == exact.finished == 100
    assert fluid.migrations == pytest.approx(exact.migrations, abs=2)
    assert fluid.migrations > 0
