"""Search for broken requests in the ledger of a cluster that may be running.

A request that looks broken is examined again after some seconds, and only findings that persist are
reported. Requests change their state during the search, and the cluster takes a moment to notice
that a router or worker has died.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.chaos.checker import Finding, Living, examine
from router.ledger.base import Ledger
from router.ledger.entry import State
from router.ledger.listing import Audit, Audited, Item

#: Default number of seconds before the second examination. A cluster needs less time to notice that
#: a gateway or worker has died, and to hand its requests over to another one.
TIMEOUT_S = 5.0


class AuditedLedger(Ledger, Protocol):
    def audit(self) -> Audit: ...


@dataclass(frozen=True, slots=True)
class Result:
    """Number of requests by state, number of their output tokens, and the violations found.

    ``tokens`` includes all choices of all requests.
    """

    states: Counter[State]
    tokens: int
    findings: tuple[Finding, ...]


async def check(
    ledger: AuditedLedger,
    timeout_s: float = TIMEOUT_S,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Result:
    """Examine every request in ``ledger`` without changing it; return the result.

    Requests that look broken are examined again after ``timeout_s`` seconds. Findings that do not
    recur in the second examination are left out. Raises LedgerUnavailable.
    """
    audit, living = ledger.audit(), await _living(ledger)
    states: Counter[State] = Counter()
    tokens, suspects = 0, []
    async for item in audit.items():
        if isinstance(item, Audited):
            states[item.entry.state] += 1
            tokens += sum(item.entry.num_tokens)
        if examine(item, living):
            suspects.append(item)
    if not suspects:
        return Result(states, tokens, ())
    await sleep(timeout_s)
    return Result(states, tokens, await _recheck(ledger, audit, living, suspects))


async def _recheck(
    ledger: Ledger, audit: Audit, before: Living, suspects: Sequence[Item]
) -> tuple[Finding, ...]:
    known = {finding for item in suspects for finding in examine(item, before)}
    items, living = await audit.reread(suspects), await _living(ledger)
    rechecked = (finding for item in items for finding in examine(item, living))
    return tuple(finding for finding in rechecked if finding in known)


async def _living(ledger: Ledger) -> Living:
    workers = await ledger.workers()
    return Living(
        gateways=(await ledger.gateways()).keys(), workers={each.worker_id for each in workers}
    )
