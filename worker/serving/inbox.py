"""Orders of the sessions to the engine, passed from the event loop's thread to the engine's.

An order is a sequence to start, an abort, a fault, a new policy, a drain or the stop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from everlift.engine_policy import EnginePolicy
from everlift.v1 import chaos_pb2
from worker.engine.outcome import Abort
from worker.engine.sequence import Sequence


@dataclass(slots=True)
class Orders:
    """Orders that arrived since the engine's last step.

    The engine applies a changed ``policy`` first, then ``starts``, then ``aborts``. With ``drain``,
    all remaining sequences are returned to their routers. With ``stop``, the engine ends instead of
    running a step.
    """

    starts: list[Sequence] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    faults: list[chaos_pb2.Fault] = field(default_factory=list)
    policy: EnginePolicy | None = None
    drain: bool = False
    stop: bool = False

    def __bool__(self) -> bool:
        came = self.starts or self.aborts or self.faults or self.policy
        return bool(came or self.drain or self.stop)


class Inbox:
    """Collector of orders for the engine. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._orders = Orders()
        self._changed = threading.Condition()

    def start(self, sequence: Sequence) -> None:
        with self._changed:
            self._orders.starts.append(sequence)
            self._changed.notify()

    def abort(self, abort: Abort) -> None:
        with self._changed:
            self._orders.aborts.append(abort)
            self._changed.notify()

    def inject(self, fault: chaos_pb2.Fault) -> None:
        with self._changed:
            self._orders.faults.append(fault)
            self._changed.notify()

    def set_policy(self, policy: EnginePolicy) -> None:
        """Set the policy; of several calls before a step, the last one counts."""
        with self._changed:
            self._orders.policy = policy
            self._changed.notify()

    def drain(self) -> None:
        with self._changed:
            self._orders.drain = True
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._orders.stop = True
            self._changed.notify()

    def wait(self, timeout_s: float | None) -> Orders:
        """Return the collected orders and remove them; they are false if there are none.

        Wait up to ``timeout_s`` seconds for the first order, without a limit if it is None.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._orders), timeout_s)
            orders, self._orders = self._orders, Orders()
            return orders
