"""How long a request would have taken under other policies, by simulation, and how far the
simulation is from what was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from statistics import median

from cluster.forecast.record import Record
from cluster.forecast.surroundings import Surroundings
from router.gateway.what_if import Estimates

#: The same requests under a policy, at workers whose steps take so many times what is known of
#: them: a record of each choice, in the order of their arrival.
Replay = Callable[[str, float], Sequence[Record]]

#: Slower workers have fuller batches, whose steps are slower: it is looked again.
_FITS = 3


def what_if(around: Surroundings, policies: Sequence[str], replay: Replay) -> Estimates:
    """Under each of ``policies``, of which the first is the one that it ran under."""
    ran = policies[0]
    slowness = _slowness(around, lambda slowness: replay(ran, slowness))
    totals = {policy: _totals(around, replay(policy, slowness)) for policy in policies}
    pairs = zip(around.requests, totals[ran], strict=True)
    errors = [abs(total_s - past.total_s) / past.total_s for past, total_s in pairs if past.total_s]
    seconds = {policy: those[around.own] for policy, those in totals.items()}
    return Estimates(seconds, len(around.requests), median(errors) if errors else inf)


def _totals(around: Surroundings, records: Sequence[Record]) -> list[float]:
    """Of each request. What is not simulated is as it was: the ledger's time above all."""
    pairs = zip(around.requests, around.choices, strict=True)
    return [past.other_s + max(it.latency_s for it in records[place]) for past, place in pairs]


def _slowness(around: Surroundings, replay: Callable[[float], Sequence[Record]]) -> float:
    """At which workers have all requests together for as long as they had: a machine is not always
    as quick as when its steps were learned."""
    slowness = 1.0
    for _ in range(_FITS):
        pairs = [*_at_workers(around, replay(slowness))]
        if pairs:
            slowness *= sum(was_s for was_s, _ in pairs) / sum(there_s for _, there_s in pairs)
    return slowness


def _at_workers(around: Surroundings, records: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Of each request the seconds that a worker had it, and those of the simulation."""
    for past, place in zip(around.requests, around.choices, strict=True):
        there_s = max(record.finished - record.dispatched for record in records[place])
        simulated_s = there_s - 2 * around.link_s
        if past.worker_s > 0.0 and 0.0 < simulated_s < inf:
            yield past.worker_s, simulated_s
