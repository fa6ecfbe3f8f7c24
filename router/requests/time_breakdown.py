"""What the leader tells of a stay in its queue, and a worker of a sequence, as shares of its time.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2

#: Of some interval, in seconds.
Share: TypeAlias = tuple[pb.SpanKind.ValueType, float]


def in_queue(stay: session_pb2.Stay) -> list[Share]:
    """While others leave before a request, each of them keeps it waiting for as long as any other:
    what they took together is shared out by how many of them there were for each reason."""
    without_worker_s = stay.no_worker_s + stay.unplaced_s + stay.starting_s
    held_s = stay.leader_s + without_worker_s + stay.first_s
    behind_s = max(0.0, stay.seconds - held_s)
    behind = list(_behind(stay.queue, behind_s))
    # Nobody left, so those ahead of it wait themselves.
    waited_s = stay.first_s if behind else stay.first_s + behind_s
    return [
        (pb.SPAN_KIND_LEADER, stay.leader_s),
        (pb.SPAN_KIND_NO_WORKER, stay.no_worker_s),
        (pb.SPAN_KIND_WORKER_UNPLACED, stay.unplaced_s),
        (pb.SPAN_KIND_WORKER_STARTS, stay.starting_s),
        *behind,
        (pb.SPAN_KIND_NO_CREDIT, waited_s),
        (pb.SPAN_KIND_DISPATCH, stay.dispatch_s),
    ]


def _behind(queue: pb.QueueStay, seconds: float) -> Iterator[Share]:
    counts = {
        pb.SPAN_KIND_BEHIND_EARLIER: queue.earlier,
        pb.SPAN_KIND_BEHIND_CLASS: queue.higher,
        pb.SPAN_KIND_BEHIND_TURN: queue.turns,
        pb.SPAN_KIND_BEHIND_ORDER: queue.ordered,
        pb.SPAN_KIND_BEHIND_FLOOR: queue.lower,
    }
    if num_left := sum(counts.values()):
        for kind, count in counts.items():
            yield kind, seconds * count / num_left


def at_worker(account: session_pb2.Account) -> list[Share]:
    return [
        (pb.SPAN_KIND_WORKER_WAIT, account.waiting_s),
        (pb.SPAN_KIND_PREFILL, account.prefill_s),
        (pb.SPAN_KIND_STALLED, account.stalled_s),
        (pb.SPAN_KIND_DECODE, account.decode_s),
        (pb.SPAN_KIND_CO_TENANCY, account.co_tenancy_s),
        (pb.SPAN_KIND_PREEMPTED, account.preempted_s),
        (pb.SPAN_KIND_RECOMPUTE, account.recompute_s),
        (pb.SPAN_KIND_PASSED_OVER, account.passed_over_s),
        (pb.SPAN_KIND_BETWEEN_STEPS, account.between_steps_s),
    ]
