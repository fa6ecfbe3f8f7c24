"""Steps that are simulated at once do not change a forecast, whatever events occur."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.simulator.forecast import Forecast
from cluster.simulator.scenario import Event, Scenario, WorkerDrain, WorkerLoss, WorkerStart
from cluster.simulator.simulate import simulate
from cluster.simulator.workloads.arrivals import Arrival
from router.admission.policy import ORDERS
from router.config import RouterConfig
from tests.support.example_counts import examples
from tests.support.small_clusters import spec

times = st.floats(0, 2, allow_nan=False).map(lambda at: round(at, 3))
requests = st.lists(
    st.builds(
        Arrival,
        at=times,
        prompt_tokens=st.integers(1, 300),
        output_tokens=st.integers(1, 200),
        max_tokens=st.just(150),
        priority=st.integers(0, 1),
        ttft_target_s=st.sampled_from([float("inf"), 0.7]),
        deadline_s=st.sampled_from([float("inf"), 2.0]),
        prefix=st.sampled_from([(), (1,), (1, 2)]),
        prefix_part_tokens=st.just(48),
        session=st.integers(0, 3),
    ),
    min_size=1,
    max_size=30,
).map(lambda found: sorted(found, key=lambda arrival: arrival.at))
specs = st.builds(
    spec,
    slowness=st.sampled_from([1.0, 2.5]),
    num_blocks=st.sampled_from([24, 60]),
    max_model_len=st.just(600),
    max_num_seqs=st.sampled_from([2, 5]),
    session_retention_s=st.sampled_from([0.2, 60.0]),
)
numbers = st.integers(0, 2)
events = st.lists(
    st.builds(WorkerLoss, times, numbers, st.sampled_from([0.0, 0.0005, 0.5]))
    | st.builds(WorkerDrain, times, numbers),
    max_size=2,
)
orders = st.sampled_from(ORDERS)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    workers = draw(st.lists(specs, min_size=1, max_size=3))
    happening: list[Event] = [*draw(events), WorkerStart(3.0, spec())]
    return Scenario(
        tuple(workers),
        RouterConfig(order=draw(orders)),
        events=tuple(happening),
        link_s=draw(st.sampled_from([0.0, 0.001, 0.05])),
    )


@settings(max_examples=examples(40))
@given(requests, scenarios())
def test_simulate_steps_at_once_match_single_steps(load: list[Arrival], cluster: Scenario) -> None:
    at_once, one_by_one = simulate(load, cluster), simulate(load, cluster, one_by_one=True)
    assert at_once.records == one_by_one.records
    assert at_once.samples == one_by_one.samples
    assert at_once.num_steps == one_by_one.num_steps
    check_ends(at_once)


def check_ends(forecast: Forecast) -> None:
    """Check that each request has one end, and all of its tokens unless it failed."""
    for record in forecast.records:
        assert record.is_finished is not bool(record.refused)
        if record.is_finished:
            most = min(record.arrival.output_tokens, record.arrival.max_tokens)
            assert record.output_tokens == min(most, 600 - record.arrival.prompt_tokens)
