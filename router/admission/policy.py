"""Orders of the queue within a class. Pure.

A policy's place of a request never changes and is the same in every replica: a new leader receives
the queue in this order. A policy's lanes choose the next request and may use the time as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log1p
from typing import Protocol, Self, get_args

from router.admission.lanes import KeyLane, Lane, RatioLane, StarvationLane
from router.admission.request import Key, Ordered, Place
from router.config import Order, RouterConfig


class Policy(Protocol):
    @property
    def name(self) -> Order:
        """Name of the policy in settings."""
        ...

    @property
    def place_name(self) -> str:
        """Name of the order: policies with the same name sort alike."""
        ...

    def place(self, waiting: Ordered) -> Place:
        """Return the order of a request within its class."""
        ...

    def lane(self) -> Lane:
        """Return an empty lane for a class."""
        ...


def key_of(policy: Policy, waiting: Ordered) -> Key:
    """Return the sort key: higher classes first, then the policy's order."""
    return (-waiting.priority, *policy.place(waiting))


@dataclass(frozen=True, slots=True)
class Fifo:
    """Order by arrival. A request that comes back from a worker keeps its place."""

    @property
    def name(self) -> Order:
        return "fifo"

    @property
    def place_name(self) -> str:
        return "fifo"

    def place(self, waiting: Ordered) -> Place:
        return (waiting.arrived, waiting.request_id)

    def lane(self) -> Lane:
        return KeyLane()


_FIFO = Fifo()


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """Order by deadline, or by the due time of the first token.

    A request without either is due ``undated_s`` after its arrival. A late request still goes
    first.
    """

    undated_s: float

    @property
    def name(self) -> Order:
        return "deadline"

    @property
    def place_name(self) -> str:
        return f"deadline {self.undated_s:g}"

    def place(self, waiting: Ordered) -> Place:
        due = waiting.due if waiting.due < inf else waiting.arrived + self.undated_s
        return (due, waiting.arrived, waiting.request_id)

    def lane(self) -> Lane:
        return KeyLane()


@dataclass(frozen=True, slots=True)
class ShortestWork:
    """Order by predicted work, with ageing relative to the estimated wait.

    a request gives way to shorter ones for ``ageing_factor`` times the wait that was foreseen when
    it came, on the average of all requests, and for longer the more of those that came lately take
    less than it does:

        ageing_factor * its foreseen wait * -log(1 - its rank)

    (0.7 times in the middle, 4.6 for the longest of a hundred: as if work were exponentially
    distributed, whatever its unit and its tail). Nobody goes before it who came later than that
    after it. This ageing is relative to how long requests wait: a fixed time, or one for each
    token, turns the order into fifo where everybody waits much longer than that, and lets the
    longest starve where nobody waits so long. Where nothing tells requests apart it is 0, and
    this is fifo.
    """

    ageing_factor: float

    @property
    def name(self) -> Order:
        return "shortest"

    @property
    def place_name(self) -> str:
        return f"shortest {self.ageing_factor:g}"

    def place(self, waiting: Ordered) -> Place:
        return _yielding(waiting, self.ageing_factor, waiting.queue_key.predicted_work_rank)

    def lane(self) -> Lane:
        return KeyLane()


@dataclass(frozen=True, slots=True)
class PredictedRank:
    """Order by the rank of the predicted output length (learning to rank, arXiv 2408.15792).

    Ageing as in ShortestWork, with that rank. Without a prediction the rank is 0 and the order is
    fifo.
    """

    ageing_factor: float

    @property
    def name(self) -> Order:
        return "ranked"

    @property
    def place_name(self) -> str:
        return f"ranked {self.ageing_factor:g}"

    def place(self, waiting: Ordered) -> Place:
        return _yielding(waiting, self.ageing_factor, waiting.queue_key.predicted_rank)

    def lane(self) -> Lane:
        return KeyLane()


def _yielding(waiting: Ordered, ageing_factor: float, rank: float) -> Place:
    """Return the place of a request that yields by ``rank`` (below 1)."""
    until = waiting.arrived - ageing_factor * waiting.queue_key.estimated_wait_s * log1p(-rank)
    return (until, waiting.arrived, waiting.request_id)


@dataclass(frozen=True, slots=True)
class HighestResponseRatio:
    """Order by response ratio (highest response ratio next, arXiv 2406.04785).

    A request of w tokens that has waited t is bypassed by a later one of v tokens only once that
    has waited t * v / w, and by none that is longer. Without predictions it is fifo.
    """

    @property
    def name(self) -> Order:
        return "hrrn"

    @property
    def place_name(self) -> str:
        return "fifo"

    def place(self, waiting: Ordered) -> Place:
        return _FIFO.place(waiting)

    def lane(self) -> Lane:
        return RatioLane()


@dataclass(frozen=True, slots=True)
class NeverLonger:
    """Order of ``policy``; requests that waited for ``limit_s`` leave their class first.

    If all requests wait that long, it is fifo.
    """

    policy: Policy
    limit_s: float

    @property
    def name(self) -> Order:
        return self.policy.name

    @property
    def place_name(self) -> str:
        return self.policy.place_name

    def place(self, waiting: Ordered) -> Place:
        return self.policy.place(waiting)

    def lane(self) -> Lane:
        return StarvationLane(self.policy.lane(), self.limit_s)


#: What an order may be called.
ORDERS: tuple[Order, ...] = get_args(Order)


def policy_of(order: Order, config: RouterConfig) -> Policy:
    """Return the policy of this name, with the numbers that are configured."""
    policies: dict[Order, Policy] = {
        "fifo": _FIFO,
        "deadline": EarliestDeadline(config.undated_due),
        "shortest": ShortestWork(config.ageing_factor),
        "ranked": PredictedRank(config.ageing_factor),
        "hrrn": HighestResponseRatio(),
    }
    policy = policies[order]
    return NeverLonger(policy, config.starvation) if config.starvation else policy


@dataclass(frozen=True, slots=True)
class Rules:
    """The current rules of the admission queue."""

    order: Policy
    #: requests that may wait; one more is refused
    max_queued: int
    #: a request that no worker had after so many seconds is refused; 0: it waits on
    queue_ttl: float
    #: whose first token would come too late is refused
    refuse_late: bool
    #: of the work that higher classes get while a class waits, the part that it gets as well
    class_floor: float
    #: tenants of a class take turns, and the order is that of a tenant's own requests
    fair_share: bool
    #: time per output token that is wanted, in seconds; 0: a worker runs as many as it can
    tpot_target: float

    @classmethod
    def of(cls, config: RouterConfig) -> Self:
        return cls(
            order=policy_of(config.order, config),
            max_queued=config.max_queued,
            queue_ttl=config.queue_ttl,
            refuse_late=config.refuse_late,
            class_floor=config.class_floor,
            fair_share=config.fair_share,
            tpot_target=config.tpot_target,
        )
