"""Orders to the engine, passed from the event loop's thread to the engine's thread.

An order is a sequence to start, an abort, an adapter to load, a fault to inject, a new batching
policy, a drain or the stop. Most come from routers, through their sessions.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from everlift.engine_policy import EnginePolicy
from everlift.v1 import chaos_pb2
from worker.engine.adapter_slots import AdapterLoad
from worker.engine.outcome import Abort
from worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Successor:
    """Model that the ranks of a worker serve next, and the address of their next rendezvous.

    ``rendezvous`` is empty for a worker with a single rank.
    """

    model: str
    rendezvous: str = ""


@dataclass(slots=True)
class Orders:
    """Orders that arrived since the engine's last step; the object is falsy if there are none.

    The engine applies ``policy`` first (None: unchanged), then ``starts``, ``aborts`` and
    ``adapters``. An order to ``drain`` returns all remaining sequences to their routers. An order
    to ``stop`` ends the engine instead of running a step; the other ranks then learn from
    ``successor`` which model they serve next (None: no model).
    """

    starts: list[Sequence] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    adapters: list[AdapterLoad] = field(default_factory=list)
    faults: list[chaos_pb2.Fault] = field(default_factory=list)
    policy: EnginePolicy | None = None
    drain: bool = False
    stop: bool = False
    successor: Successor | None = None

    def __bool__(self) -> bool:
        has_orders = self.starts or self.aborts or self.adapters or self.faults or self.policy
        return bool(has_orders or self.drain or self.stop)


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

    def load_adapter(self, load: AdapterLoad) -> None:
        with self._changed:
            self._orders.adapters.append(load)
            self._changed.notify()

    def inject(self, fault: chaos_pb2.Fault) -> None:
        with self._changed:
            self._orders.faults.append(fault)
            self._changed.notify()

    def set_policy(self, policy: EnginePolicy) -> None:
        """Order a change of the batching policy.

        If it is called several times before the next step, only the last call has an effect.
        """
        with self._changed:
            self._orders.policy = policy
            self._changed.notify()

    def drain(self) -> None:
        with self._changed:
            self._orders.drain = True
            self._changed.notify()

    def stop(self, successor: Successor | None = None) -> None:
        """Order the end of the engine; ``successor`` is the model that the worker serves next."""
        with self._changed:
            self._orders.stop = True
            self._orders.successor = successor or self._orders.successor
            self._changed.notify()

    def wait(self, timeout_s: float | None) -> Orders:
        """Wait until there is an order; return all collected orders and remove them.

        After ``timeout_s`` seconds (None: no limit) without an order, return Orders that are false.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._orders), timeout_s)
            orders, self._orders = self._orders, Orders()
            return orders
