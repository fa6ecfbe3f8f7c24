"""Simulated worker, as its routers see it during a step."""

from __future__ import annotations

import pytest

from cluster.simulator.frame import Frame
from cluster.simulator.sequence import BlockNames, NamedSequence
from cluster.simulator.timeline import Timeline
from cluster.simulator.worker import SimulatedWorker
from cluster.simulator.workloads.arrivals import Arrival
from tests.support.small_clusters import spec
from worker.engine.outcome import Stop

#: Step time of the simulated worker.
STEP_S = 0.01


@pytest.mark.parametrize("one_by_one", [False, True])
def test_last_token_keeps_its_slot_until_the_step_ends(one_by_one: bool) -> None:
    timeline, frames = Timeline(), list[Frame]()
    worker = SimulatedWorker("w", spec(), timeline, frames.append, one_by_one)
    seen: list[set[str]] = []
    for steps in (0.5, 1.5, 2.5, 3.5):
        timeline.at(steps * STEP_S, lambda: seen.append(worker.occupants()))
    arrival = Arrival(0.0, prompt_tokens=1, output_tokens=3, max_tokens=3)
    worker.start(NamedSequence.create(1, "r", arrival, BlockNames(0, arrival), 3))
    while timeline.now < 4 * STEP_S:
        timeline.step()

    assert seen == [{"r"}, {"r"}, {"r"}, set()]
    assert [outcome.stop for frame in frames for outcome in frame.outcomes][-1] is Stop.LENGTH
