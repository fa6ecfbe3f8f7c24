"""What the cluster can hold and do."""

from __future__ import annotations

from everlift.v1.admin_pb2 import CapacityResponse
from everlift.v1.session_pb2 import ClusterLoad, WorkerInfo, WorkerState
from router.admission.capacity import capacity

INFO = WorkerInfo(max_num_seqs=8, num_blocks=100)


def test_without_workers_and_a_leader_nothing_is_known() -> None:
    assert capacity(None, []) == CapacityResponse()


def test_workers_are_summed_but_for_those_that_drain() -> None:
    states = [
        WorkerState(num_running=3, num_waiting=2, blocks_used=40),
        WorkerState(num_running=8, blocks_used=60),
        WorkerState(num_running=5, blocks_used=99, draining=True),
    ]
    load = ClusterLoad(workers=3, worker_rate=250.0, wait_s=0.0)
    assert capacity(load, [(INFO, state) for state in states]) == CapacityResponse(
        workers=2,
        slots=16,
        slots_used=11,
        blocks=200,
        blocks_used=100,
        tokens_per_s=500.0,
        wait_s=0.0,
    )


def test_how_long_the_queue_takes_is_the_leader_s_word() -> None:
    load = ClusterLoad(queued=4, queued_tokens=3000, worker_rate=250.0, wait_s=6.5)
    answer = capacity(load, [(INFO, WorkerState())] * 2)
    assert (answer.queued, answer.queued_tokens, answer.wait_s) == (4, 3000, 6.5)
    load.ClearField("wait_s")
    assert not capacity(load, [(INFO, WorkerState())]).HasField("wait_s")
