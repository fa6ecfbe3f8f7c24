"""Fault injection in a cluster that was started with ``--chaos``: routing and effects of faults.

    a client -> inject, at any router -> the worker, over its session
                                      -> apply, at each router that the fault concerns

``inject`` handles the call of a client. ``apply`` applies a fault in its own router: it kills or
pauses the router or the ledger's server, delays or fails the router's calls to the ledger, and
delays its messages to and from workers.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from everlift import logs, wire
from everlift.errors import (
    ChaosForbidden,
    InvalidRequest,
    LedgerUnavailable,
    UnknownWorker,
)
from everlift.transport import GRPC, Transport
from everlift.v1 import chaos_pb2 as pb
from everlift.v1 import session_pb2_grpc
from router.config import RouterConfig
from router.faults.faults import ANY_ROUTER, ANY_WORKER, LEADER, LEDGER, Part, check_fault
from router.heartbeat import Heartbeat
from router.id_prefix import find_id
from router.ledger.base import Ledger
from router.processes import Processes, RealProcesses
from router.worker_sessions import Sessions, WorkerLink

log = logs.get_logger(__name__)

#: Seconds until a process is killed or paused, so that the client first receives the answer.
_ANSWER_S = 0.1
_SEND_TIMEOUT_S = 5.0


@runtime_checkable
class Disturbable(Protocol):
    """Ledger with a server of its own, which faults can disturb."""

    def disturb(self, seconds: float, delay_s: float) -> None:
        """Delay this process's calls to the ledger by ``delay_s`` seconds for the next ``seconds``.

        Every delay ends at the latest when ``seconds`` have passed, also if ``delay_s`` is
        infinite. A call that is delayed beyond the ledger's timeout fails.
        """
        ...

    async def process_id(self) -> int:
        """Return the process id of the ledger's server.

        Raises InvalidRequest if the server is not known to run on this machine, and
        LedgerUnavailable if the server cannot be queried.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Named:
    """Target of a fault, or the peer that the target is partitioned from.

    ``name`` is the full id of a worker or router, or "ledger". ``address`` is the internal address
    of a router; it is empty for this router, for a worker and for the ledger. ``num_ranks`` is the
    number of ranks of a worker, else 1.
    """

    part: Part
    name: str
    address: str = ""
    num_ranks: int = 1

    @classmethod
    def of(cls, link: WorkerLink) -> Self:
        info = link.info
        return cls(Part.WORKER, info.worker_id, num_ranks=info.tensor_parallel)


class Chaos:
    """Fault injection at one router."""

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        ledger: Ledger,
        sessions: Sessions,
        heartbeat: Heartbeat,
        transport: Transport = GRPC,
        processes: Processes | None = None,
    ) -> None:
        self._config = config
        self._router_id = router_id
        self._ledger = ledger
        self._sessions = sessions
        self._heartbeat = heartbeat
        self._transport = transport
        self._processes = processes or RealProcesses()
        self._under_way: set[asyncio.Task[None]] = set()

    async def inject(self, fault: pb.Fault) -> str:
        """Inject the fault, and return the full name of its target.

        The target and the peer in ``fault`` are replaced by their full names.

        Raises ChaosForbidden if the cluster was started without chaos, and UnknownWorker if the
        target or peer is not connected, or if several ids begin with the given text. Raises
        OutOfRange for a number that is too small or too large, and InvalidRequest for a fault that
        the target cannot have. Raises Unreachable if none of the routers that must apply
        the fault can be reached, and LedgerUnavailable if the process id of the ledger's server
        cannot be queried.
        """
        self._check_allowed()
        target = await self._find(fault.target)
        peer = await self._find(fault.peer) if fault.peer else None
        check_fault(fault, target.part, peer.part if peer else None, target.num_ranks)
        fault.target, fault.peer = target.name, peer.name if peer else ""
        log.warning("fault injected", kind=pb.FaultKind.Name(fault.kind), target=target.name)
        if target.part is Part.WORKER:
            self._sessions.inject(target.name, fault)
        else:
            await self._send(await self._concerned(fault, target, peer), fault)
        return target.name

    async def apply(self, fault: pb.Fault) -> None:
        """Apply this router's part of a fault, whose target and peer are full names.

        Raises ChaosForbidden if the cluster was started without chaos, and InvalidRequest if the
        fault is for a ledger that has no server, or none on this machine. Raises LedgerUnavailable
        if the ledger cannot be queried for its process.
        """
        self._check_allowed()
        match fault.kind:
            case pb.FAULT_KIND_KILL:
                pid = await self._process(fault.target)
                self._schedule(lambda: self._processes.kill(pid))
            case pb.FAULT_KIND_PAUSE:
                pid = await self._process(fault.target)
                self._schedule(lambda: self._run(self._processes.pause(pid, fault.seconds)))
            case pb.FAULT_KIND_PARTITION:
                self._partition(fault)
            case pb.FAULT_KIND_SLOW:
                self._disturbable().disturb(fault.seconds, fault.delay_s)

    def _check_allowed(self) -> None:
        if not self._config.chaos:
            raise ChaosForbidden("fault injection is disabled: start with everlift up --chaos")

    # targets

    async def _find(self, name: str) -> _Named:
        if name == LEDGER:
            return _Named(Part.LEDGER, LEDGER)
        workers = {link.info.worker_id: link for link in self._sessions.links if link.is_up}
        if name == ANY_WORKER and workers:
            name = random.choice(sorted(workers))
        if name in workers:
            return _Named.of(workers[name])
        return self._named(name, workers, await self._routers())

    def _named(
        self, name: str, workers: Mapping[str, WorkerLink], routers: Mapping[str, str]
    ) -> _Named:
        if name == ANY_ROUTER:
            name = random.choice(sorted(routers))
        if name == LEADER and not (name := self._heartbeat.leader_id):
            raise UnknownWorker("no router is the leader now: retry later")
        found = find_id(name, [*workers, *routers])
        if found is None:
            raise UnknownWorker(f"no worker or router {name!r} is connected")
        if found in workers:
            return _Named.of(workers[found])
        return _Named(Part.ROUTER, found, address=routers[found])

    async def _routers(self) -> dict[str, str]:
        """Return the internal addresses of all routers by id; this router's address is empty.

        While the ledger is unavailable, no other router is known.
        """
        try:
            return await self._ledger.gateways() | {self._router_id: ""}
        except LedgerUnavailable:
            return {self._router_id: ""}

    # routers that apply a fault

    async def _concerned(
        self, fault: pb.Fault, target: _Named, peer: _Named | None
    ) -> Collection[str]:
        """Return the internal addresses of the routers that must apply the fault."""
        if target.part is Part.ROUTER:
            return [target.address]
        if peer is not None:
            return [peer.address]
        if fault.kind in (pb.FAULT_KIND_KILL, pb.FAULT_KIND_PAUSE):
            return [""]
        return (await self._routers()).values()

    async def _send(self, addresses: Collection[str], fault: pb.Fault) -> None:
        """Send a fault to the routers at ``addresses``; the empty address is this router's.

        If no router applies it, raises the error of the first one. Otherwise errors are only
        logged.
        """
        calls = (self._send_to(address, fault) for address in addresses)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(errors) == len(answers):
            raise errors[0]
        for error in errors:
            log.warning("fault not sent to a router", cause=str(error))

    async def _send_to(self, address: str, fault: pb.Fault) -> None:
        if not address:
            await self.apply(fault)
            return
        async with self._transport.channel(address) as channel:
            stub: session_pb2_grpc.RouterInternalAsyncStub
            stub = session_pb2_grpc.RouterInternalStub(channel)
            call = stub.Inject(fault, timeout=_SEND_TIMEOUT_S)
            await wire.answer(call, call)

    # effects

    async def _process(self, target: str) -> int:
        if target == LEDGER:
            return await self._disturbable().process_id()
        return os.getpid()

    def _partition(self, fault: pb.Fault) -> None:
        # What this router is partitioned from: the ledger, a worker, or both kinds if it is empty.
        other_end = LEDGER if fault.target == LEDGER else fault.peer
        if other_end in ("", LEDGER):
            self._disturbable().disturb(fault.seconds, math.inf)
        for link in self._sessions.links:
            if other_end in ("", link.info.worker_id):
                link.delay_messages(fault.seconds)

    def _disturbable(self) -> Disturbable:
        if not isinstance(self._ledger, Disturbable):
            raise InvalidRequest("the ledger of this cluster has no server")
        return self._ledger

    def _schedule(self, do: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(_ANSWER_S, do)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
