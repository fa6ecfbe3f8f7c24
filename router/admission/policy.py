"""In which order those of a class leave the admission queue, and how many may wait. Pure.

A policy's place of a request is the same whenever it is asked, in every replica: a new leader is
told what waits in the order of the places. What leaves next is up to the policy's lanes, which may
look at the time as well.
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
        """Two policies of the same one have the same places."""
        ...

    def place(self, waiting: Ordered) -> Place:
        """Among those of its class."""
        ...

    def lane(self) -> Lane:
        """Return an empty lane for a class."""
        ...


def key_of(policy: Policy, waiting: Ordered) -> Key:
    """Return a higher class goes first, and in a class it is as the policy says."""
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
    """By what is due first: a request's deadline, or that of its first token. One without any is
    due ``undated_s`` after it came: nobody who comes later than that goes before it.

    One that is late still goes first, as its time does not change its place.
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
    """By predicted work, prompt and output, and by arrival: a request gives way to shorter ones for
    ``ageing_factor`` times the wait that was foreseen when it came, on the average of all requests,
    and
    for longer the more of those that came lately take less than it does:

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
    """By where a request's outputs stand among those predicted lately (learning to rank, arXiv
    2408.15792), and by arrival, as ShortestWork with that rank. Where nothing is predicted it is 0,
    and this is fifo.
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
    """By when those have to come that go before it. ``rank`` is below 1."""
    until = waiting.arrived - ageing_factor * waiting.queue_key.estimated_wait_s * log1p(-rank)
    return (until, waiting.arrived, waiting.request_id)


@dataclass(frozen=True, slots=True)
class HighestResponseRatio:
    """By how long it has waited for what it takes: the highest ratio of the two leaves first
    (highest response ratio next; for serving models in Magnus, arXiv 2406.04785).

    A request of w tokens that has waited t gives way to a later one of v tokens only once that has
    waited t * v / w itself, and to none that takes longer. Where nothing tells requests apart this
    is fifo.
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
    """As ``policy``, but who has waited for ``limit_s`` leaves before all others of its class.
    Under an overload that lets everybody wait so long, this is fifo."""

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
