"""A request that finished, as a ledger knows it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from cluster.simulator.record import Record
from cluster.simulator.workloads.arrival import Arrival
from everlift.blockhash import BLOCK_SIZE, block_hashes
from everlift.request_id import tenant_of
from everlift.v1 import inference_pb2 as pb
from router.ledger.entry import Event, Stored
from router.requests.explanation import ACCEPTING, kept


def records(stored: Stored, events: Sequence[Event]) -> Iterator[Record]:
    """Yield a record of each choice, in ledger time, without the prompt.

    The first token is that of all choices, infinite where it is not known.
    """
    explanation = kept(stored, events)
    entry, moments = stored.entry, _moments(events)
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
    accepting_s = sum(span.seconds for span in explanation.spans if span.kind in ACCEPTING)
    return arrived + explanation.ttft_s - accepting_s


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
