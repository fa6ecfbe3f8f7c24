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
from router.admission.request import Key, Waiting

#: Seconds between two ticks of the leader. At each one it expires what is outdated, and sends
#: estimates to the gateways and the load to the autoscaler.
TICK_S = 0.2
#: Least seconds between two searches for requests to move, because workers report far more often.
MOVES_S = 0.05
#: Dispatches that may be in flight at the same time.
DISPATCHES_AT_ONCE = 64


@dataclass(slots=True)
class _Handover:
    mark: Key | None
    heard: float


class QueueHandover:
    """Progress of the handover at a new leader, to which the gateways (routers) report requests.

    The leader waits up to ``timeout_s`` seconds for live gateways to connect, and as long for the
    next message of a connected one. ``gateway`` is a router's id; ``now`` is in seconds.
    """

    def __init__(self, now: float, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began = now
        self._telling: dict[str, _Handover] = {}
        self._came: set[str] = set()
        #: live gateways according to the ledger; None until it has answered
        self._living: frozenset[str] | None = None

    def living(self, gateways: Iterable[str]) -> None:
        """Set the ids of the live gateways; the leader does not wait for any other to connect."""
        self._living = frozenset(gateways)

    def is_gathering(self, now: float) -> bool:
        """Return whether the leader still waits for live gateways to connect."""
        if now - self._began >= self._timeout_s:
            return False
        return self._living is None or not self._living <= self._came

    def connect(self, gateway: str, now: float) -> None:
        """Record that a gateway has connected and begins to report its requests."""
        self._came.add(gateway)
        self._telling[gateway] = _Handover(None, now)

    def disconnect(self, gateway: str) -> None:
        self._telling.pop(gateway, None)

    def on_waiting(self, gateway: str, key: Key, now: float) -> None:
        """Record that a gateway has reported a queued request with this sort key.

        A gateway reports its requests in ascending order of their keys. The largest reported key is
        its marker: all of its requests with smaller keys are known. A later report with a smaller
        key is a new request and does not change the marker.
        """
        telling = self._telling.get(gateway)
        if telling is not None:
            telling.heard = now
            telling.mark = key if telling.mark is None else max(telling.mark, key)

    def complete(self, gateway: str) -> None:
        """Record that a gateway has reported all of its queued requests."""
        self._telling.pop(gateway, None)

    def dismiss(self) -> None:
        """Stop waiting for reports, because a change of the order makes the markers meaningless."""
        self._telling.clear()

    def is_over(self, now: float) -> bool:
        """Return whether the handover has ended: no gateway is missing or still reporting.

        A gateway that does not connect in time is no longer missing.
        """
        return not self._telling and not self.is_gathering(now)

    def allows(self, key: Key, now: float) -> bool:
        """Return whether the request with this key may leave: no unreported one can precede it.

        Gateways that have connected but then sent nothing for ``timeout_s`` are ignored.
        """
        if self.is_gathering(now):
            return False
        return all(
            telling.mark is not None and key <= telling.mark
            for telling in self._telling.values()
            if now - telling.heard < self._timeout_s
        )


@dataclass(slots=True)
class _Said:
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
        self._said: dict[str, _Said] = {}

    def change(self, generation: str, now: float) -> None:
        self._current, self._since = generation, now

    def connect(self, gateway: str, now: float) -> None:
        self._said[gateway] = _Said("", now)

    def disconnect(self, gateway: str) -> None:
        self._said.pop(gateway, None)

    def said(self, gateway: str, generation: str, now: float) -> None:
        """Record that a gateway has re-sent its state to the ledger with this generation."""
        if gateway in self._said:
            self._said[gateway] = _Said(generation, now)

    def agree(self, now: float) -> bool:
        """Return whether all gateways have re-sent their state for the current generation.

        Gateways that have timed out are ignored. Return True if the ledger's generation is empty,
        that is, if it does not report one.
        """
        return not self._current or all(
            said.generation == self._current or now >= self._until(said)
            for said in self._said.values()
        )

    def _until(self, said: _Said) -> float:
        return max(said.since, self._since) + self._timeout_s


#: Entries of the first message, and of any message at most. The first ones arrive soon, and no
#: message occupies either end for long.
_FIRST, _MOST = 32, 256

_Turn: TypeAlias = tuple[Key, int, pb.Waiting]


class HandoverSender:
    """Router's side of the handover: messages to a new leader with all of the router's requests.

    Later updates are added to these messages. ``waiting`` yields the router's queued requests,
    sorted by ``policy``, and ``running`` its dispatched ones; both are read in parts, one for each
    message. ``generation`` names the run of the ledger to which it has re-sent its state.
    """

    def __init__(
        self,
        router_id: str,
        waiting: Iterable[pb.Waiting],
        running: Iterable[pb.Running],
        generation: str,
        policy: Policy,
    ) -> None:
        self._router_id = router_id
        self._policy = policy
        self._hello = pb.GatewayMessage(
            router_id=router_id, generation=generation, order=policy.place_name
        )
        self._tickets = count()
        self._roll = ((self._key(it), next(self._tickets), it) for it in waiting)
        self._running = iter(running)
        self._size = _FIRST
        #: next entry of the roll, if it has been read already
        self._next: _Turn | None = None
        #: requests that were queued since the roll was made, as a heap, and the ticket of the valid
        #: entry of each request
        self._late: list[_Turn] = []
        self._turns: dict[str, int] = {}
        #: sort key of the last queued request that was sent from the roll or the heap
        self._mark: Key | None = None
        self._all_waiting_told = self._all_running_told = False
        #: requests with updates since the handover began, whose entries in the roll are outdated
        self._spoken_of: set[str] = set()
        #: by request id: the last update that was not sent yet; None: neither queued nor running
        self._news: dict[str, pb.Waiting | pb.Running | None] = {}

    def __bool__(self) -> bool:
        """Return whether a message is left to send."""
        return not self._all_running_told or bool(self._news) or self._hello.ByteSize() > 0

    def _key(self, waiting: pb.Waiting) -> Key:
        return key_of(self._policy, Waiting.from_proto(self._router_id, waiting))

    # updates during the handover and after it

    def enqueue(self, waiting: pb.Waiting) -> None:
        self._speak_of(waiting.request_id)
        key = self._key(waiting)
        if self._all_waiting_told or (self._mark is not None and key <= self._mark):
            self._news[waiting.request_id] = waiting
        else:
            turn = self._turns[waiting.request_id] = next(self._tickets)
            heapq.heappush(self._late, (key, turn, waiting))

    def withdraw(self, request_id: str) -> None:
        self._speak_of(request_id)
        self._news[request_id] = None

    def run(self, running: pb.Running) -> None:
        self._speak_of(running.request_id)
        self._news[running.request_id] = running

    def dispatched(self, request_id: str) -> None:
        """Drop the unsent reports of a request, because the leader has dispatched it.

        An unsent report that the request was withdrawn is kept.
        """
        if self._news.get(request_id) is not None:
            del self._news[request_id]
        self._leave_the_roll(request_id)

    def _speak_of(self, request_id: str) -> None:
        self._news.pop(request_id, None)
        self._leave_the_roll(request_id)

    def _leave_the_roll(self, request_id: str) -> None:
        self._turns.pop(request_id, None)
        if not self._all_running_told:
            self._spoken_of.add(request_id)

    def assert_generation(self, generation: str) -> None:
        self._hello.generation = generation

    # messages

    def part(self) -> pb.GatewayMessage:
        """Return the next message, with updates and a part of the queued or running requests."""
        message, self._hello = self._hello, pb.GatewayMessage()
        self._tell_news(message)
        if not self._all_waiting_told:
            self._tell_waiting(message)
        elif not self._all_running_told:
            self._tell_running(message)
        self._size = min(2 * self._size, _MOST)
        return message

    def _tell_news(self, message: pb.GatewayMessage) -> None:
        for request_id in tuple(islice(self._news, _MOST)):
            match self._news.pop(request_id):
                case pb.Waiting() as waiting:
                    message.enqueue.append(waiting)
                case pb.Running() as running:
                    message.running.append(running)
                case None:
                    message.withdraw.append(request_id)

    def _tell_waiting(self, message: pb.GatewayMessage) -> None:
        for _ in range(self._size):
            turn = self._take_turn()
            if turn is None:
                message.is_complete = self._all_waiting_told = True
                break
            self._mark = turn[0]
            message.enqueue.append(turn[2])

    def _take_turn(self) -> _Turn | None:
        while True:
            self._next = self._next or next(self._roll, None)
            if self._late and (self._next is None or self._late[0] < self._next):
                turn = heapq.heappop(self._late)
                if self._turns.get(turn[2].request_id) == turn[1]:
                    del self._turns[turn[2].request_id]
                    return turn
            elif self._next is not None:
                turn, self._next = self._next, None
                if turn[2].request_id not in self._spoken_of:
                    return turn
            else:
                return None

    def _tell_running(self, message: pb.GatewayMessage) -> None:
        part = list(islice(self._running, self._size))
        message.running.extend(it for it in part if it.request_id not in self._spoken_of)
        if not part:
            self._all_running_told = True
            self._spoken_of.clear()
