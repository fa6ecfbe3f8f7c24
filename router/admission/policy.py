"""Policies that order the queued requests of a priority class. Pure.

A policy gives each request a place, its sort key. The place does not change while the request is
queued and is the same on every router, because routers report their queued requests to a new leader
in this order. The queue takes the next request from lanes (priority queues), whose choice may also
depend on the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log1p
from typing import Protocol, Self, get_args

from router.admission.lanes import KeyLane, Lane, LeaderKeyLane, RatioLane, StarvationLane
from router.admission.request import Key, Ordered, Place
from router.config import Order, RouterConfig


class Policy(Protocol):
    @property
    def name(self) -> Order:
        """Name of the policy in the setting ``router.order``."""
        ...

    @property
    def place_name(self) -> str:
        """Name of the sort key; policies with the same name give equal keys to a request."""
        ...

    def place(self, waiting: Ordered) -> Place:
        """Return the sort key of a request within its priority class; smaller is earlier."""
        ...

    def lane(self) -> Lane:
        """Return an empty priority queue for a class, or for one tenant's requests of a class."""
        ...


def key_of(policy: Policy, waiting: Ordered) -> Key:
    """Return the sort key over all classes: higher classes first, then the policy's order."""
    return (-waiting.priority, *policy.place(waiting))


@dataclass(frozen=True, slots=True)
class Fifo:
    """Order by arrival; a request that is queued again keeps its first arrival time."""

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
    """Order by the earlier of a request's deadline and the due time of its first token.

    For a request that has output, the due time of the first token does not count. A request without
    either is due ``undated_s`` seconds after its arrival. A request that is already late still
    leaves first.
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

    A request yields to shorter ones that arrive within its yield time:

        yield time = ageing_factor * estimated wait at arrival * -log(1 - rank)

    Requests that arrive after that time do not bypass it. ``rank`` is the share of recent
    requests with less predicted work. The last factor is 0.7 for the median request, 4.6 for the
    longest of a hundred and 1 on average. It treats work as exponentially distributed, so that the
    unit and the tail of the work do not matter.

    The yield time is relative to the estimated wait, because a fixed time, or a time per token,
    fails in two cases. If requests wait much longer, the order becomes fifo. If they wait less, the
    longest ones starve. Without predictions the rank is 0 and the order is fifo.
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

    The yield time is computed as in ShortestWork, but ``rank`` is the share of recent requests with
    a shorter predicted output. Without a prediction the rank is 0 and the order is by arrival.
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
    """Return the sort key of a request, which begins with its arrival plus its yield time.

    ``rank``, from 0 to below 1, is the share of recent requests that are predicted to be smaller.
    """
    until = waiting.arrived - ageing_factor * waiting.queue_key.estimated_wait_s * log1p(-rank)
    return (until, waiting.arrived, waiting.request_id)


class _OrderedByLeader:
    """Base class of orders whose keys only the leader knows: routers report by arrival."""

    __slots__ = ()

    @property
    def place_name(self) -> str:
        return "fifo"

    def place(self, waiting: Ordered) -> Place:
        return _FIFO.place(waiting)


@dataclass(frozen=True, slots=True)
class HighestResponseRatio(_OrderedByLeader):
    """Order by response ratio (highest response ratio next, arXiv 2406.04785).

    If an earlier request of w tokens has waited t seconds, a later one of v tokens bypasses it only
    once the later one has waited t * v / w seconds, and never if v > w. Without predicted lengths
    the order is fifo.
    """

    @property
    def name(self) -> Order:
        return "hrrn"

    def lane(self) -> Lane:
        return RatioLane()


@dataclass(frozen=True, slots=True)
class LeastAttained(_OrderedByLeader):
    """Order by the service that a request's session has attained (PLAS, arXiv 2502.13965).

    The yield time is computed as in ShortestWork, but ``rank`` is the share of recent requests
    whose sessions had attained less when this request entered the queue. The rank does not change
    later: if a session sends each request after the end of the previous one, all earlier service is
    already counted. The rank is 0 without attained service, so that requests without sessions are
    ordered by arrival. Only the leader knows the rank, so routers report by arrival.
    """

    ageing_factor: float

    @property
    def name(self) -> Order:
        return "attained"

    def lane(self) -> Lane:
        return LeaderKeyLane(
            lambda waiting: _yielding(waiting, self.ageing_factor, waiting.attained_rank)
        )


@dataclass(frozen=True, slots=True)
class StarvationLimit:
    """Order of another policy, with a limit of the wait against starvation.

    Requests that have waited ``limit_s`` seconds leave before the others of their class, by
    arrival. With fair shares, they only leave before the others of their tenant in the class. If
    all requests wait that long, the order is by arrival.
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


#: Names of the available orders.
ORDERS: tuple[Order, ...] = get_args(Order)


def policy_of(order: Order, config: RouterConfig) -> Policy:
    """Return the policy named ``order``, with the parameters and starvation limit in ``config``."""
    policies: dict[Order, Policy] = {
        "fifo": _FIFO,
        "deadline": EarliestDeadline(config.undated_due),
        "shortest": ShortestWork(config.ageing_factor),
        "ranked": PredictedRank(config.ageing_factor),
        "hrrn": HighestResponseRatio(),
        "attained": LeastAttained(config.ageing_factor),
    }
    policy = policies[order]
    return StarvationLimit(policy, config.starvation) if config.starvation else policy


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the admission queue that are in effect; they can change at run time."""

    order: Policy
    #: largest number of queued requests; a further new one is refused, or replaces one of a lower
    #: class
    max_queued: int
    #: seconds after which a request that has not been dispatched yet is refused; 0 disables
    queue_ttl: float
    #: refuse requests that cannot meet their TTFT target or deadline, by the estimated wait
    refuse_late: bool
    #: share of the work of higher classes that a class with queued requests receives
    class_floor: float
    #: share each class fairly between tenants; the order applies within a tenant
    fair_share: bool
    #: target seconds per output token, which limit the batch of a worker; 0 disables
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
