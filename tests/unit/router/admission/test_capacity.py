"""Capacity of the cluster."""

from __future__ import annotations

from functools import partial

import pytest

from everlift.step_fit import FittedStepTime
from everlift.step_time import Roofline, StepSize
from everlift.v1.admin_pb2 import CapacityResponse
from everlift.v1.session_pb2 import ClusterLoad, WorkerInfo, WorkerState
from router.admission.workers import Connected, capacity

INFO = WorkerInfo(max_num_seqs=8, num_blocks=100)


def test_capacity_is_empty_without_workers_and_leader() -> None:
    assert capacity(None, []) == CapacityResponse()


def test_capacity_sums_workers_except_draining() -> None:
    states = [
        WorkerState(num_running=3, num_waiting=2, blocks_used=40),
        WorkerState(num_running=8, blocks_used=60),
        WorkerState(num_running=5, blocks_used=99, draining=True),
    ]
    load = ClusterLoad(workers=3, worker_rate=250.0, wait_s=0.0)
    answer = capacity(load, [Connected(INFO, state) for state in states])
    del answer.kinds[:]
    assert answer == CapacityResponse(
        workers=2,
        slots=16,
        slots_used=11,
        blocks=200,
        blocks_used=100,
        tokens_per_s=500.0,
        wait_s=0.0,
    )


def test_capacity_takes_queue_wait_from_the_leader() -> None:
    load = ClusterLoad(queued=4, queued_tokens=3000, worker_rate=250.0, wait_s=6.5)
    answer = capacity(load, [Connected(INFO, WorkerState())] * 2)
    assert (answer.queued, answer.queued_tokens, answer.wait_s) == (4, 3000, 6.5)
    load.ClearField("wait_s")
    assert not capacity(load, [Connected(INFO, WorkerState())]).HasField("wait_s")


def test_capacity_reports_kinds_with_size_and_step_times() -> None:
    known, unknown = FittedStepTime(), FittedStepTime()
    hardware = Roofline(0.01, 0.0, 1e-4, 1e-7)
    for n in range(1, 40):
        size = StepSize(n, 10 * n % 37 + n, 50 * n, 60 * n)
        known.observe(size, hardware.seconds(size))
    known.refit()
    state = partial(WorkerState, engine_policy="slai")
    large, small = WorkerInfo(device="L", num_blocks=9), WorkerInfo(device="S", num_blocks=5)
    there = [
        Connected(small, WorkerState(), unknown),
        Connected(small, WorkerState(draining=True), unknown),
        *[Connected(large, state(num_running=n), known) for n in range(3)],
    ]
    most, few = capacity(None, there).kinds
    assert (most.device, most.workers, most.num_blocks) == ("L", 3, 9)
    assert (few.device, few.workers, few.HasField("step_time")) == ("S", 1, False)
    assert (most.engine_policy, few.engine_policy) == ("slai", "")
    parts = most.step_time
    reported = Roofline(
        parts.overhead_s, 0.0, parts.token_s, parts.kv_token_s, parts.pair_s, parts.row_s
    )
    for size in (StepSize(1, 1, 10, 10), StepSize(16, 30, 900, 950)):
        assert reported.seconds(size) == pytest.approx(known.seconds(size))
        assert reported.seconds(size) == pytest.approx(hardware.seconds(size), rel=0.01)
    assert parts.error < 0.05
