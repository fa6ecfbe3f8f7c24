"""A request that finished, as a ledger knows it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from cluster.forecast.record import Record
from cluster.workloads.arrival import Arrival
from everlift.blockhash import BLOCK_SIZE, block_hashes
from everlift.request_id import tenant_of
from everlift.v1 import inference_pb2 as pb
from router.gateway.explanation import ACCEPTING, kept
from router.ledger.entry import Event, Stored

_QUEUED = frozenset(
    (
        pb.SPAN_KIND_BEHIND_EARLIER,
        pb.SPAN_KIND_BEHIND_CLASS,
        pb.SPAN_KIND_BEHIND_TURN,
        pb.SPAN_KIND_BEHIND_ORDER,
        pb.SPAN_KIND_BEHIND_FLOOR,
        pb.SPAN_KIND_NO_CREDIT,
    )
)
_AT_WORKER = frozenset(
    (
        pb.SPAN_KIND_WORKER_WAIT,
        pb.SPAN_KIND_PREFILL,
        pb.SPAN_KIND_STALLED,
        pb.SPAN_KIND_DECODE,
        pb.SPAN_KIND_CO_TENANCY,
        pb.SPAN_KIND_PREEMPTED,
        pb.SPAN_KIND_RECOMPUTE,
        pb.SPAN_KIND_PASSED_OVER,
        pb.SPAN_KIND_BETWEEN_STEPS,
    )
)


@dataclass(frozen=True, slots=True)
class Past:
    """``records`` are of its choices, in ledger time; the first token is that of all choices,
    infinite where nobody told of it. Of its ``total_s``, by its explanation, it was behind others
    for ``queued_s``, on its way to and from workers for ``way_s`` and in their hands for
    ``worker_s``; what else there was no forecast knows."""

    request_id: str
    records: tuple[Record, ...]
    total_s: float
    queued_s: float
    way_s: float
    worker_s: float

    @classmethod
    def of(cls, stored: Stored, events: Sequence[Event]) -> Past:
        """Of its prompt nothing is kept."""
        explanation = kept(stored, events)
        return cls(
            stored.entry.request_id,
            tuple(_records(stored, _moments(events), explanation)),
            explanation.total_s,
            _seconds(explanation, _QUEUED),
            _seconds(explanation, (pb.SPAN_KIND_ON_THE_WAY,)),
            _seconds(explanation, _AT_WORKER),
        )

    @property
    def other_s(self) -> float:
        return max(0.0, self.total_s - self.queued_s - self.way_s - self.worker_s)


def _seconds(explanation: pb.Explanation, kinds: Collection[int]) -> float:
    return sum(span.seconds for span in explanation.spans if span.kind in kinds)


def _records(
    stored: Stored, moments: dict[str, float], explanation: pb.Explanation
) -> Iterator[Record]:
    entry = stored.entry
    for num_tokens in entry.num_tokens:
        yield Record(
            0,
            _arrival(stored, num_tokens, explanation),
            dispatched=moments.get("dispatch", inf),
            first_token=_first_token(entry.arrived, explanation),
            finished=moments.get("finish", inf),
            worker=entry.worker,
            output_tokens=num_tokens,
            attempts=entry.attempts,
            preemptions=entry.tally.preemptions,
            migrations=entry.tally.migrations,
            recomputed_tokens=entry.tally.recomputed_tokens,
            overtaken=explanation.overtaken,
        )


def _first_token(arrived: float, explanation: pb.Explanation) -> float:
    if not explanation.HasField("ttft_s"):
        return inf
    return arrived + explanation.ttft_s - _seconds(explanation, ACCEPTING)


def _arrival(stored: Stored, num_tokens: int, explanation: pb.Explanation) -> Arrival:
    request, arrived = stored.request, stored.entry.arrived
    return Arrival(
        arrived,
        len(request.prompt_ids),
        max(1, num_tokens),
        request.max_tokens,
        priority=request.priority,
        tenant=tenant_of(request.request_id),
        application=request.application,
        ttft_target_s=inf if request.ttft_target_s is None else request.ttft_target_s,
        deadline_s=inf if request.deadline is None else request.deadline - arrived,
        prefix=tuple(
            int.from_bytes(name[:8], "big")
            for name in block_hashes(request.prompt_ids, request.salt)
        ),
        prefix_part_tokens=BLOCK_SIZE,
        foreseen_tokens=explanation.predicted_output_tokens / request.n or None,
        is_distrusted=explanation.prediction_distrusted,
    )


def _moments(events: Iterable[Event]) -> dict[str, float]:
    """Of the first event of each kind."""
    moments: dict[str, float] = {}
    for event in events:
        moments.setdefault(event.move, event.time)
    return moments
