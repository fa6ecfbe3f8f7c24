"""Handover of the queue from the routers to a new leader. Pure.

A gateway is a router in its role towards the leader: it reports its requests and dispatches them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeAlias

from everlift.v1 import session_pb2 as pb
from router.admission.policy import Policy, key_of
from router.admission.request import Key, Running, Waiting

#: Seconds between two ticks of the leader. At each one it expires what is outdated, and sends
#: estimates to the gateways and the load to the autoscaler.
TICK_S = 0.2
#: Minimum number of seconds between two searches for requests to move, because workers report far
#: more often.
MOVES_S = 0.05
#: Maximum number of dispatches in flight at the same time, apart from those that are being retried.
DISPATCHES_AT_ONCE = 64


@dataclass(slots=True)
class _GatewayProgress:
    mark: Key | None
    last_report_at: float


class QueueHandover:
    """Progress of the handover at a new leader, to which the gateways (routers) report requests.

    The leader waits up to ``timeout_s`` seconds for live gateways to connect, and as long for the
    next message of a connected one. ``gateway`` is a router's id; ``now`` is in seconds.
    """

    def __init__(self, now: float, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started_at = now
        self._reporting: dict[str, _GatewayProgress] = {}
        self._connected: set[str] = set()
        #: live gateways according to the ledger; None until it has answered
        self._live: frozenset[str] | None = None

    def set_live_gateways(self, gateways: Iterable[str]) -> None:
        """Set the ids of the live gateways; the leader does not wait for any other to connect."""
        self._live = frozenset(gateways)

    def is_awaiting_gateways(self, now: float) -> bool:
        """Return whether the leader still waits for live gateways to connect."""
        if now - self._started_at >= self._timeout_s:
            return False
        return self._live is None or not self._live <= self._connected

    def connect(self, gateway: str, now: float) -> None:
        """Record that a gateway has connected and begins to report its requests."""
        self._connected.add(gateway)
        self._reporting[gateway] = _GatewayProgress(None, now)

    def disconnect(self, gateway: str) -> None:
        self._reporting.pop(gateway, None)

    def on_waiting(self, gateway: str, key: Key, now: float) -> None:
        """Record that a gateway has reported a queued request with this sort key.

        A gateway reports its requests in ascending order of their keys. The largest reported key is
        its marker: all of its requests with smaller keys are known. A later report with a smaller
        key is a new request and does not change the marker. The report restarts the gateway's
        timeout at ``now``. It has no effect on a gateway that has completed its reports or is
        disconnected.
        """
        progress = self._reporting.get(gateway)
        if progress is not None:
            progress.last_report_at = now
            progress.mark = key if progress.mark is None else max(progress.mark, key)

    def complete(self, gateway: str) -> None:
        """Record that a gateway has reported all of its queued requests."""
        self._reporting.pop(gateway, None)

    def complete_all(self) -> None:
        """Treat every connected gateway as if it had reported all of its queued requests.

        A change of the queue policy calls for this, because the keys reported so far no longer show
        which requests are known. Gateways that have not connected yet are still awaited.
        """
        self._reporting.clear()

    def is_complete(self, now: float) -> bool:
        """Return whether the handover has ended: no gateway is missing or still reporting.

        A gateway that does not connect in time is no longer missing.
        """
        return not self._reporting and not self.is_awaiting_gateways(now)

    def allows(self, key: Key, now: float) -> bool:
        """Return whether the request with this key may leave: no unreported one can precede it.

        Gateways that have connected but then sent nothing for ``timeout_s`` are ignored.
        """
        if self.is_awaiting_gateways(now):
            return False
        return all(
            progress.mark is not None and key <= progress.mark
            for progress in self._reporting.values()
            if now - progress.last_report_at < self._timeout_s
        )


@dataclass(slots=True)
class _Resync:
    generation: str
    since: float


class Generations:
    """Record of which gateways (routers) have re-sent their state to the present ledger.

    A generation is a text that names one run of the ledger's servers. It changes with each restart
    or failover, which may lose data. A gateway that has not re-sent its state since then delays all
    dispatches, for at most ``timeout_s`` seconds. ``now`` is in seconds.
    """

    def __init__(self, generation: str, now: float, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._current = generation
        self._since = now
        self._resyncs: dict[str, _Resync] = {}

    def change(self, generation: str, now: float) -> None:
        self._current, self._since = generation, now

    def connect(self, gateway: str, now: float) -> None:
        self._resyncs[gateway] = _Resync("", now)

    def disconnect(self, gateway: str) -> None:
        self._resyncs.pop(gateway, None)

    def note_resync(self, gateway: str, generation: str, now: float) -> None:
        """Record that a gateway has re-sent its state to the ledger with this generation."""
        if gateway in self._resyncs:
            self._resyncs[gateway] = _Resync(generation, now)

    def agree(self, now: float) -> bool:
        """Return whether all gateways have re-sent their state for the current generation.

        Gateways that have timed out are ignored. Return True if the ledger's generation is empty,
        that is, if it does not report one.
        """
        return not self._current or all(
            resync.generation == self._current or now >= self._until(resync)
            for resync in self._resyncs.values()
        )

    def _until(self, resync: _Resync) -> float:
        return max(resync.since, self._since) + self._timeout_s


#: Maximum number of snapshot entries in the first message, and in each later one. A message also
#: has up to _MAX_SIZE updates. The first message is small, so that its entries arrive soon; the
#: others are limited, so that no message occupies either end for long.
_FIRST_SIZE, _MAX_SIZE = 32, 256

_Item: TypeAlias = tuple[Key, int, Waiting]


class HandoverSender:
    """Router's side of the handover: messages to a new leader with all of the router's requests.

    The messages also carry updates of requests, during the handover and after it. ``waiting``
    yields the router's queued requests, sorted by ``policy``, and ``running`` its dispatched ones.
    Each message takes the next part of ``waiting``, or of ``running`` if ``waiting`` is used up.

    ``generation`` is an id that changes when the ledger's servers restart or fail over and may have
    lost data. The router has re-sent all state that the ledger may have lost up to this generation.
    """

    def __init__(
        self,
        router_id: str,
        waiting: Iterable[Waiting],
        running: Iterable[Running],
        generation: str,
        policy: Policy,
    ) -> None:
        self._policy = policy
        self._hello = pb.GatewayMessage(
            router_id=router_id, generation=generation, order=policy.place_name
        )
        self._tickets = count()
        self._snapshot = ((self._key(it), next(self._tickets), it) for it in waiting)
        self._running = iter(running)
        self._size = _FIRST_SIZE
        #: next entry of the snapshot, if it has been read already
        self._next: _Item | None = None
        #: requests that were queued since the snapshot was made, as a heap, and the ticket of the
        #: valid entry of each request
        self._new_items: list[_Item] = []
        self._valid_tickets: dict[str, int] = {}
        #: sort key of the last queued request that was sent from the snapshot or the heap
        self._mark: Key | None = None
        self._all_waiting_sent = self._all_running_sent = False
        #: requests with updates since the handover began; their entries in the snapshot are
        #: outdated
        self._superseded: set[str] = set()
        #: by request id: the last update that was not sent yet; None: neither queued nor running
        self._updates: dict[str, Waiting | Running | None] = {}

    def __bool__(self) -> bool:
        """Return whether a message is left to send."""
        return not self._all_running_sent or bool(self._updates) or self._hello.ByteSize() > 0

    def _key(self, waiting: Waiting) -> Key:
        return key_of(self._policy, waiting)

    # updates during the handover and after it

    def enqueue(self, waiting: Waiting) -> None:
        self._supersede(waiting.request_id)
        key = self._key(waiting)
        if self._all_waiting_sent or (self._mark is not None and key <= self._mark):
            self._updates[waiting.request_id] = waiting
        else:
            ticket = self._valid_tickets[waiting.request_id] = next(self._tickets)
            heapq.heappush(self._new_items, (key, ticket, waiting))

    def withdraw(self, request_id: str) -> None:
        self._supersede(request_id)
        self._updates[request_id] = None

    def report_running(self, running: Running) -> None:
        self._supersede(running.request_id)
        self._updates[running.request_id] = running

    def dispatched(self, request_id: str) -> None:
        """Drop the unsent reports of a request, because the leader has dispatched it.

        An unsent report that the request was withdrawn is kept.
        """
        if self._updates.get(request_id) is not None:
            del self._updates[request_id]
        self._drop_from_snapshot(request_id)

    def _supersede(self, request_id: str) -> None:
        self._updates.pop(request_id, None)
        self._drop_from_snapshot(request_id)

    def _drop_from_snapshot(self, request_id: str) -> None:
        self._valid_tickets.pop(request_id, None)
        if not self._all_running_sent:
            self._superseded.add(request_id)

    def report_generation(self, generation: str) -> None:
        self._hello.generation = generation

    # messages

    def next_message(self) -> pb.GatewayMessage:
        """Return the next message, with updates and a part of the queued or running requests."""
        message, self._hello = self._hello, pb.GatewayMessage()
        self._add_updates(message)
        if not self._all_waiting_sent:
            self._add_waiting(message)
        elif not self._all_running_sent:
            self._add_running(message)
        self._size = min(2 * self._size, _MAX_SIZE)
        return message

    def _add_updates(self, message: pb.GatewayMessage) -> None:
        for request_id in tuple(islice(self._updates, _MAX_SIZE)):
            match self._updates.pop(request_id):
                case Waiting() as waiting:
                    message.enqueue.append(waiting.to_proto())
                case Running() as running:
                    message.running.append(running.to_proto())
                case None:
                    message.withdraw.append(request_id)

    def _add_waiting(self, message: pb.GatewayMessage) -> None:
        for _ in range(self._size):
            item = self._pop_item()
            if item is None:
                message.is_complete = self._all_waiting_sent = True
                break
            self._mark = item[0]
            message.enqueue.append(item[2].to_proto())

    def _pop_item(self) -> _Item | None:
        while True:
            self._next = self._next or next(self._snapshot, None)
            if self._new_items and (self._next is None or self._new_items[0] < self._next):
                item = heapq.heappop(self._new_items)
                if self._valid_tickets.get(item[2].request_id) == item[1]:
                    del self._valid_tickets[item[2].request_id]
                    return item
            elif self._next is not None:
                item, self._next = self._next, None
                if item[2].request_id not in self._superseded:
                    return item
            else:
                return None

    def _add_running(self, message: pb.GatewayMessage) -> None:
        part = list(islice(self._running, self._size))
        message.running.extend(
            it.to_proto() for it in part if it.request_id not in self._superseded
        )
        if not part:
            self._all_running_sent = True
            self._superseded.clear()
