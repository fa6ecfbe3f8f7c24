"""What a request would have taken under another policy, of a past that is itself simulated: so that
it is known what would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import Random

import pytest

from cluster.explain.tables import counterfactuals
from cluster.explain.what_if import what_if
from cluster.forecast.past import Past
from cluster.forecast.record import Record
from cluster.forecast.scenario import Scenario
from cluster.forecast.simulate import simulate
from cluster.forecast.surroundings import Surroundings
from cluster.workloads.arrival import Arrival
from everlift.v1 import inference_pb2 as pb
from router.config import Order, RouterConfig
from router.gateway.what_if import Estimates
from tests.small_clusters import spec

LINK_S = 0.01
#: Of each request, in the ledger.
OTHER_S = 0.125
#: The ledger's clock, when the first one comes.
BEGIN = 5000.0


def arrivals() -> list[Arrival]:
    """Sixty at once, some of which have much shorter outputs, as is known."""
    dice = Random(1)
    lengths = [dice.choice((4, 60)) for _ in range(60)]
    return [
        Arrival(0.001 * i, 20, tokens, tokens, foreseen_tokens=tokens)
        for i, tokens in enumerate(lengths)
    ]


def replayed(order: Order, slowness: float) -> Sequence[Record]:
    worker = spec(slowness=slowness, max_num_seqs=4)
    scenario = Scenario((worker,), router=RouterConfig(order=order), link_s=LINK_S)
    return simulate(arrivals(), scenario).records


def past(number: int, record: Record) -> Past:
    arrival = record.arrival
    there_s = record.finished - record.dispatched
    return Past(
        f"r{number}",
        (
            replace(
                record,
                arrival=replace(arrival, at=BEGIN + arrival.at),
                finished=BEGIN + record.finished,
            ),
        ),
        total_s=record.latency_s + OTHER_S,
        queued_s=record.queued_s,
        way_s=2 * LINK_S,
        worker_s=there_s - 2 * LINK_S,
    )


def around(own: int, slowness: float) -> Surroundings:
    was = replayed("fifo", slowness)
    return Surroundings(tuple(past(number, record) for number, record in enumerate(was)), own)


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_what_would_have_been_is_found_whatever_the_machines_pace_was(slowness: float) -> None:
    own = next(i for i, arrival in enumerate(arrivals()) if i > 40 and arrival.output_tokens == 4)
    answer = what_if(around(own, slowness), ["fifo", "shortest"], replayed)
    was, would_be = (replayed(order, slowness)[own].latency_s for order in ("fifo", "shortest"))
    assert would_be < was / 2
    assert answer.seconds["fifo"] == pytest.approx(was + OTHER_S, rel=0.05)
    assert answer.seconds["shortest"] == pytest.approx(would_be + OTHER_S, rel=0.05)
    assert ([*answer.seconds], answer.num_requests) == (["fifo", "shortest"], 60)
    assert answer.error < 0.05


def test_its_error_is_how_far_it_is_from_what_was() -> None:
    there = around(0, 1.0)
    # For half of them something took as long again that no forecast knows.
    requests = [
        replace(past, total_s=2 * past.total_s, worker_s=past.worker_s + past.total_s)
        if number % 2
        else past
        for number, past in enumerate(there.requests)
    ]
    answer = what_if(replace(there, requests=tuple(requests)), ["fifo"], replayed)
    assert answer.error > 0.2


def test_of_several_choices_the_last_one_counts() -> None:
    first, second, third, *_ = around(0, 1.0).requests
    both = replace(second, records=(*second.records, *third.records))
    there = Surroundings((first, both), own=1)
    assert [arrival.at for arrival in there.arrivals] == pytest.approx([0.0, 0.001, 0.002])
    records = [Record(i, arrival, 1.0, 2.0, 3.0 + i) for i, arrival in enumerate(there.arrivals)]
    answer = what_if(there, ["fifo"], lambda policy, slowness: records)
    assert answer.seconds["fifo"] == pytest.approx(5.0 - 0.002 + both.other_s, abs=0.01)


def test_who_would_not_have_come_to_its_end_is_told_so() -> None:
    told = Estimates({"fifo": 3.5, "deadline": inf}, 120, 0.183).told()
    assert [*counterfactuals(pb.Explanation(total_s=3.25, counterfactuals=told))] == [
        "with policy fifo: 3.500 s by estimate; in truth 3.250 s",
        "with policy deadline: by estimate it would not have come to its end",
        "estimates are simulations of what came at that time, 120 requests: under fifo, which they "
        "ran under, off by 18% at the median",
    ]
