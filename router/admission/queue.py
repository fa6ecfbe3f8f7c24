"""Admission queue: the cluster's queued requests, by priority class and queue policy. Pure.

Every operation is O(log n) amortised, except the removal of a disconnected router's requests and a
change of the policy, which are O(n). A gateway is the router that has a request and reports it to
the leader. Work is a predicted number of tokens to compute.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, takewhile
from math import inf

from everlift.messages import BATCH_PRIORITY
from everlift.v1 import session_pb2
from router.admission.fair_share import FairShare
from router.admission.lanes import FairLane, Lane, Queued, RequestHeap
from router.admission.parking import Wait
from router.admission.policy import Policy
from router.admission.request import Waiting
from router.admission.wait_stats import WaitStatistics


class Backlog:
    """Sums of the work of queued requests, and indexes of them by age and by time of expiry.

    Work is the predicted number of tokens to compute. The index by age has only requests that have
    never been dispatched. Times are ledger time in seconds.
    """

    def __init__(self) -> None:
        #: predicted tokens to compute for all queued requests, and for those of each class
        self.work_tokens = 0
        self._work: dict[int, int] = {}
        #: by class: requests that have not run, by ticket, the newest last
        self._never_run: dict[int, dict[int, Queued]] = {}
        self._expiring = RequestHeap()

    def add(self, queued: Queued) -> None:
        waiting = queued.waiting
        priority, work = waiting.priority, waiting.work_tokens
        self.work_tokens += work
        self._work[priority] = self._work.get(priority, 0) + work
        if not waiting.has_run:
            if priority not in self._never_run:
                self._never_run[priority] = {}
            self._never_run[priority][queued.ticket] = queued
        if waiting.expires < inf:
            self._expiring.push(queued, (waiting.expires,))

    def remove(self, queued: Queued) -> None:
        """Remove a request that has left the queue."""
        waiting = queued.waiting
        priority, work = waiting.priority, waiting.work_tokens
        self.work_tokens -= work
        remaining = self._work[priority] = self._work.get(priority, 0) - work
        if not remaining:
            del self._work[priority]
        if not waiting.has_run:
            never_run = self._never_run[priority]
            del never_run[queued.ticket]
            if not never_run:
                del self._never_run[priority]
        if waiting.expires < inf:
            self._expiring.note_removed(queued)

    def replace(self, before: Queued, queued: Queued) -> None:
        """Replace a queued request by another object of the same request."""
        waiting = queued.waiting
        if not waiting.has_run:
            self._never_run[waiting.priority][queued.ticket] = queued
        if waiting.expires < inf:
            self._expiring.note_removed(before)
            self._expiring.push(queued, (waiting.expires,))

    @property
    def work(self) -> dict[int, int]:
        """Map each class to the queued work of that class and all higher ones, in tokens.

        This is the work ahead of a new request of the class. Only classes with queued requests are
        listed, the highest first.
        """
        before, total = {}, 0
        for priority in sorted(self._work, reverse=True):
            total += self._work[priority]
            before[priority] = total
        return before

    def work_of(self, priority: int) -> int:
        """Return the work of class ``priority``, in tokens."""
        return self._work.get(priority, 0)

    def work_from(self, priority: int) -> int:
        """Return the work of class ``priority`` and all higher ones, in tokens."""
        return sum(tokens for each, tokens in self._work.items() if each >= priority)

    @property
    def lowest(self) -> int | None:
        """Lowest class with a queued request that has not run; None if there is no such request."""
        return min(self._never_run, default=None)

    def newest_of(self, priority: int) -> Queued:
        """Return the newest request of a class among those that have not run; there must be one."""
        never_run = self._never_run[priority]
        # popitem drops the empty slots of removed entries at the dict's end. A reversed iterator
        # would skip them again at every call.
        ticket, newest = never_run.popitem()
        never_run[ticket] = newest
        return newest

    def overdue(self, ledger_now: float) -> Queued | None:
        """Return the queued request that expires first; None if that is after ``ledger_now``."""
        first = self._expiring.first()
        if first is None or first[0] > ledger_now:
            return None
        overdue: Queued = first[-1]
        return overdue


_NONE_QUEUED = (0, None)


class Classes:
    """Queued requests by priority class.

    ``numbers`` maps each class to its number of queued requests; the caller keeps it up to date.

    For every token of work that leaves while a lower class has queued requests that are not parked,
    the lower class earns ``floor`` tokens of credit. Its next request leaves once its credit covers
    the request's work. A class thus receives at least the share ``floor`` of the work of higher
    classes, less at most one request. A class loses its credit when it has no queued request, and
    all do when ``floor`` becomes 0. BATCH_PRIORITY earns no credit.

    With ``fair_share``, tenants of a class are served by their token counters; None disables that.
    """

    def __init__(
        self,
        policy: Policy,
        numbers: Mapping[int, int],
        floor: float,
        fair_share: FairShare | None,
    ) -> None:
        self._policy = policy
        self._numbers = numbers
        self._floor = floor
        self._fair_share = fair_share
        self._lanes: dict[int, Lane] = {}
        #: classes that have a lane, the lowest first
        self._ascending: list[int] = []
        #: credit by class, in tokens of work
        self._credit: dict[int, float] = {}

    @property
    def floor(self) -> float:
        return self._floor

    @floor.setter
    def floor(self, floor: float) -> None:
        self._floor = floor
        if not floor:
            self._credit.clear()

    @property
    def is_fair(self) -> bool:
        """Return whether the tenants of a class are served by their token counters."""
        return self._fair_share is not None

    def push(self, queued: Queued) -> None:
        waiting = queued.waiting
        lane = self._lanes.get(waiting.priority)
        if lane is None:
            lane = self._lanes[waiting.priority] = self._lane(waiting.priority)
            insort(self._ascending, waiting.priority)
        lane.push(queued, self._policy.place(waiting))

    def _lane(self, priority: int) -> Lane:
        if self._fair_share is None:
            return self._plain_lane()
        counters = self._fair_share.counters(priority)
        return FairLane(self._plain_lane, counters)

    def _plain_lane(self) -> Lane:
        return self._policy.lane()

    def note_removed(self, queued: Queued) -> None:
        """Record that a request has left the queue."""
        priority = queued.waiting.priority
        if priority in self._numbers:
            if not queued.is_parked:
                self._lanes[priority].note_removed(queued)
        else:
            self._remove(priority)

    def note_parked(self, queued: Queued) -> None:
        """Record that a parked request has left the order of its class, but not the queue."""
        self._lanes[queued.waiting.priority].note_removed(queued)

    def clear(self) -> None:
        """Remove the priority queues and credits of classes that have no queued request."""
        for priority in self._lanes.keys() - self._numbers.keys():
            self._remove(priority)

    def _remove(self, priority: int) -> None:
        del self._lanes[priority]
        self._ascending.remove(priority)
        self._credit.pop(priority, None)

    def head(self, ledger_now: float | None) -> Queued | None:
        """Return the request that leaves next at the ledger time ``ledger_now``, in seconds.

        Fair shares and the credit of lower classes are ignored if ``ledger_now`` is None: the
        request with the smallest sort key in the highest class is then returned. The result is
        None if no request is queued or all queued ones are parked.
        """
        heads = self._heads(ledger_now)
        _, highest = next(heads, _NONE_QUEUED)
        if ledger_now is None or not self._credit:
            return highest
        for priority, queued in heads:
            if self._credit.get(priority, 0.0) >= queued.waiting.work_tokens:
                return queued
        return highest

    def highest(self, ledger_now: float | None) -> Queued | None:
        """Return the next request of the highest class that has a request which is not parked.

        The result is None if no request is queued or all queued ones are parked. The credit with
        which a lower class may go before a higher one (see Classes) is ignored.
        """
        return next(self._heads(ledger_now), _NONE_QUEUED)[1]

    def serve(self, waiting: Waiting) -> None:
        """Update the credits of the classes when a request leaves for a worker."""
        if not self._floor or len(self._ascending) < 2:
            return
        work = waiting.work_tokens
        if self._ascending[-1] > waiting.priority and waiting.priority in self._credit:
            self._credit[waiting.priority] = max(0.0, self._credit[waiting.priority] - work)
        for priority in self._ascending:
            if priority >= waiting.priority:
                break
            # Parked requests cannot spend credit, which would grow without limit.
            if priority == BATCH_PRIORITY or self._lanes[priority].head(None) is None:
                continue
            self._credit[priority] = self._credit.get(priority, 0.0) + self._floor * work

    def _heads(self, ledger_now: float | None) -> Iterator[tuple[int, Queued]]:
        for priority in reversed(self._ascending):
            queued = self._lanes[priority].head(ledger_now)
            if queued is not None:
                yield priority, queued


#: Number of requests that ``reorder`` moves between two yields, which takes some milliseconds.
_REORDER_BATCH = 1024

#: The wait statistics are pruned after about this many dispatches.
_PRUNE_EVERY = 1 << 15


class AdmissionQueue:
    """Admission queue of the cluster.

    A class with queued requests receives a minimum share: at least ``class_floor`` tokens of its
    work leave for each token of work that leaves from higher classes. The class may fall short of
    this share by the work of one request. BATCH_PRIORITY has no minimum share.

    ``fair_share`` counts the tokens that each tenant was served. The tenant with the smallest count
    in a class is served first if ``is_fair`` is set.

    Arguments of the methods: ``ledger_now`` is ledger time and ``now`` the leader's clock, both in
    seconds; ``gateway`` is the id of the router that has a request.
    """

    def __init__(
        self,
        policy: Policy,
        class_floor: float = 0.0,
        fair_share: FairShare | None = None,
        *,
        is_fair: bool = False,
    ) -> None:
        self._tickets = count()
        #: by request id, in the order in which they were queued
        self._queued: dict[str, Queued] = {}
        #: number of queued requests of each class that has any
        self._numbers: dict[int, int] = {}
        self._fair_share = fair_share
        self._classes = self._make_classes(policy, class_floor, is_fair)
        self.backlog = Backlog()
        self.wait_stats = WaitStatistics()
        self.num_parked = 0

    def _make_classes(self, policy: Policy, floor: float, is_fair: bool) -> Classes:
        fair_share = self._fair_share if is_fair else None
        return Classes(policy, self._numbers, floor, fair_share)

    @property
    def class_floor(self) -> float:
        return self._classes.floor

    @class_floor.setter
    def class_floor(self, floor: float) -> None:
        self._classes.floor = floor

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queued

    @property
    def numbers(self) -> dict[int, int]:
        """Number of queued requests of each class that has any, the highest class first."""
        return dict(sorted(self._numbers.items(), reverse=True))

    @property
    def work_tokens(self) -> int:
        """Predicted work of all queued requests, in tokens."""
        return self.backlog.work_tokens

    def work_before(self, waiting: Waiting) -> int:
        """Return the predicted tokens of queued work that leave before a new request.

        This is the work of its class and higher ones. With fair shares, only a part of the work
        that other tenants have queued in its class is included.
        """
        ahead = self.backlog.work_from(waiting.priority)
        if not self._classes.is_fair:
            return ahead
        assert self._fair_share is not None
        higher = self.backlog.work_from(waiting.priority + 1)
        return min(ahead, higher + self._fair_share.work_before(waiting))

    def push(self, waiting: Waiting, now: float = 0.0) -> Waiting | None:
        """Add a request, and return the queued one with the same id that it replaces, or None."""
        # Counted before the replaced request is removed, so that the tenant stays backlogged.
        if self._fair_share is not None:
            self._fair_share.note_queued(waiting)
        before = self._queued.get(waiting.request_id)
        replaced = None if before is None else self._remove(before)
        arrival = self.wait_stats.note_arrival(waiting, len(self._queued), now)
        queued = Queued(waiting, next(self._tickets), arrival)
        self._queued[waiting.request_id] = queued
        self._numbers[waiting.priority] = self._numbers.get(waiting.priority, 0) + 1
        self._classes.push(queued)
        self.backlog.add(queued)
        return replaced

    def get(self, request_id: str, gateway: str) -> Waiting | None:
        """Return the queued request with this id from this router; None if there is none."""
        waiting = _waiting(self._queued.get(request_id))
        return waiting if waiting is not None and waiting.gateway == gateway else None

    def withdraw(self, request_id: str, gateway: str) -> bool:
        """Remove a request; return False if no request of this id and router is queued."""
        if self.get(request_id, gateway) is None:
            return False
        self._remove(self._queued[request_id])
        return True

    def withdraw_gateway(self, gateway: str) -> None:
        """Remove all requests of a router that has disconnected.

        This is O(n), because an index would slow down every request and routers rarely disconnect.
        """
        for queued in [it for it in self._queued.values() if it.waiting.gateway == gateway]:
            self._remove(queued)

    def shed(self, priority: int) -> Waiting | None:
        """Remove and return the newest request of the lowest class, to make room for another one.

        Requests that have been dispatched before are left out. Return None if no request remains,
        or if the lowest class of the remaining ones is not below ``priority``.
        """
        lowest = self.backlog.lowest
        if lowest is None or lowest >= priority:
            return None
        return self._remove(self.backlog.newest_of(lowest))

    def expire(self, ledger_now: float) -> Waiting | None:
        """Remove and return a request that has expired at ``ledger_now``; None if there is none."""
        overdue = self.backlog.overdue(ledger_now)
        return None if overdue is None else self._remove(overdue)

    def _remove(self, queued: Queued) -> Waiting:
        waiting = queued.waiting
        del self._queued[waiting.request_id]
        queued.is_queued = False
        self._numbers[waiting.priority] -= 1
        if not self._numbers[waiting.priority]:
            del self._numbers[waiting.priority]
        if self._fair_share is not None:
            # A parked request was not counted any more.
            if queued.is_parked_without_worker:
                self._fair_share.note_unparked(waiting)
            self._fair_share.note_removed(waiting)
        self._classes.note_removed(queued)
        self.backlog.remove(queued)
        self.num_parked -= queued.is_parked
        return waiting

    # parked requests

    def park(self, request_id: str, wait: Wait) -> None:
        """Take a request out of the order, without removing it from the queue.

        ``wait`` states for which worker the request waits, and until when. The request must be
        queued and not parked yet.
        """
        before = self._queued[request_id]
        before.is_queued = False
        self._classes.note_parked(before)
        # Lanes drop a request lazily, by the object's ``is_queued``, so it needs another object.
        queued = Queued(before.waiting, before.ticket, before.arrival)
        queued.is_parked, queued.parked_s, queued.wait = True, before.parked_s, wait
        self._queued[request_id] = queued
        self.backlog.replace(before, queued)
        self.num_parked += 1
        if self._fair_share is not None and queued.is_parked_without_worker:
            self._fair_share.note_parked(queued.waiting)

    def unpark(self, request_id: str, parked_s: float) -> None:
        """Return a parked request to its place in the order.

        ``parked_s`` is the time in seconds for which the request was parked. The time is added to
        the request's total (method ``parked_s``).
        """
        queued = self._queued[request_id]
        if self._fair_share is not None and queued.is_parked_without_worker:
            self._fair_share.note_unparked(queued.waiting)
        queued.is_parked = False
        queued.parked_s += parked_s
        self.num_parked -= 1
        self._classes.push(queued)

    def is_parked(self, request_id: str) -> bool:
        queued = self._queued.get(request_id)
        return queued is not None and queued.is_parked

    def parked_s(self, request_id: str) -> float:
        """Return the total duration of a queued request's past parkings, in seconds."""
        return self._queued[request_id].parked_s

    def last_wait(self, request_id: str) -> Wait | None:
        """Return the ``wait`` with which ``park`` was last called for a queued request, or None."""
        return self._queued[request_id].wait

    def peek(self, ledger_now: float | None = None) -> Waiting | None:
        """Return the request that leaves next at ``ledger_now``.

        The result is None if no request is queued or all queued ones are parked. Fair shares and
        the credit of lower classes are ignored if ``ledger_now`` is None: the request with the
        smallest sort key in the highest class is then returned.
        """
        return _waiting(self._classes.head(ledger_now))

    def peek_highest(self, ledger_now: float) -> Waiting | None:
        """Return the next request of the highest class that has a request which is not parked.

        The result is None if no request is queued or all queued ones are parked. The credit with
        which a lower class may go before a higher one (see Classes) is ignored.
        """
        return _waiting(self._classes.highest(ledger_now))

    def pop(self, ledger_now: float | None = None) -> Waiting:
        """Remove and return the request that ``peek`` returns, and record its dispatch.

        Raises IndexError if all queued requests are parked, or none is queued.
        """
        head = self.peek(ledger_now)
        if head is None:
            raise IndexError("no request is queued")
        self.dispatch(head, head.cached_tokens)
        return head

    def dispatch(self, waiting: Waiting, cached_tokens: int) -> None:
        """Remove a queued request that leaves for a worker, and record its dispatch.

        The worker has the first ``cached_tokens`` tokens of the request in its prefix cache.
        The dispatch changes the credit of the priority classes, the token counter of the request's
        tenant, and the wait statistics.
        """
        queued = self._queued[waiting.request_id]
        self._classes.serve(waiting)
        # Charged last, because the removal of a parked request may raise the tenant's counter.
        self._remove(queued)
        if self._fair_share is not None:
            self._fair_share.charge_prompt(waiting, cached_tokens)
        self.wait_stats.note_departure(queued.arrival, waiting)
        if not queued.ticket % _PRUNE_EVERY:
            oldest = next(iter(self._queued.values()), None)
            self.wait_stats.prune(None if oldest is None else oldest.arrival)

    def waited_s(self, waiting: Waiting, now: float) -> float:
        """Return the seconds since a queued request was last added to the queue."""
        queued_at: float = self._queued[waiting.request_id].arrival[0]
        return now - queued_at

    def queue_wait(
        self, waiting: Waiting, order: str, now: float, *, is_fair: bool
    ) -> session_pb2.QueueWait:
        """Return the wait of a request that leaves now, and how many requests left before it.

        See ``WaitStatistics.wait_of``. The request must be queued.
        """
        arrival = self._queued[waiting.request_id].arrival
        return self.wait_stats.wait_of(arrival, waiting, order, now, is_fair=is_fair)

    def note_direct_dispatch(self, waiting: Waiting, cached_tokens: int) -> None:
        """Charge the prompt of a request that was dispatched without being queued.

        The cost of all but the first ``cached_tokens`` tokens, which the worker has in its prefix
        cache, is added to the token counter of the request's tenant.
        """
        if self._fair_share is not None:
            self._fair_share.note_queued(waiting)
            self._fair_share.charge_prompt(waiting, cached_tokens)
            self._fair_share.note_removed(waiting)

    def reorder(self, policy: Policy, *, is_fair: bool = False) -> Iterator[None]:
        """Change the queue policy; each iteration of the result is one step of the change. O(n).

        With ``is_fair``, tenants are served by their token counters. The old order stays in effect
        until the iterator is exhausted. No request may be parked during the change.
        """
        classes = self._make_classes(policy, self._classes.floor, is_fair)
        requests, after = tuple(self._queued.values()), next(self._tickets)
        for start in range(0, len(requests), _REORDER_BATCH):
            self._fill(classes, requests[start : start + _REORDER_BATCH])
            yield
        newest_first = reversed(self._queued.values())
        self._fill(classes, takewhile(lambda it: it.ticket > after, newest_first))
        classes.clear()
        self._classes = classes

    def _fill(self, classes: Classes, requests: Iterable[Queued]) -> None:
        for queued in requests:
            if queued.is_queued and not queued.is_parked:
                classes.push(queued)


def _waiting(queued: Queued | None) -> Waiting | None:
    return None if queued is None else queued.waiting
