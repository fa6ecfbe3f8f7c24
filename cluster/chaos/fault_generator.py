"""Random choice of the next fault that leaves at least one worker healthy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from everlift.v1 import chaos_pb2 as pb
from router.faults.faults import ANY_ROUTER, LEADER, LEDGER

#: Seconds that a worker needs to recover after the end of its fault.
_RECOVERY_S = 3.0
_FOR_EVER = float("inf")


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """Event to inject into ``target``: the fault, or a drain of a worker if ``fault`` is None.

    ``name`` is one of NAMES. ``target`` is the id of a worker, or another target that the API
    knows, such as the leader or the ledger.
    """

    name: str
    target: str
    fault: pb.Fault | None


FieldFactory = Callable[[Random], dict[str, float]]

#: Faults of a worker by name: the kind, and a function that returns further fields of the fault.
#: The worker is unhealthy for ``seconds``, or for ever if this field is missing.
_WORKER_FAULTS: dict[str, tuple[int, FieldFactory]] = {
    "kill worker": (pb.FAULT_KIND_KILL, lambda rng: {}),
    "pause worker": (pb.FAULT_KIND_PAUSE, lambda rng: {"seconds": rng.uniform(2, 3)}),
    "partition worker": (pb.FAULT_KIND_PARTITION, lambda rng: {"seconds": 5.0}),
    "slow worker": (pb.FAULT_KIND_SLOW, lambda rng: {"seconds": 5.0, "factor": 10.0}),
}
DRAIN = "drain worker"
_OTHER_FAULTS: dict[str, tuple[str, int, FieldFactory]] = {
    "kill router": (ANY_ROUTER, pb.FAULT_KIND_KILL, lambda rng: {}),
    "pause leader": (LEADER, pb.FAULT_KIND_PAUSE, lambda rng: {"seconds": rng.uniform(2, 3)}),
    "kill ledger": (LEDGER, pb.FAULT_KIND_KILL, lambda rng: {}),
    "slow ledger": (LEDGER, pb.FAULT_KIND_SLOW, lambda rng: {"seconds": 3.0, "delay_s": 0.2}),
    "partition ledger": (LEDGER, pb.FAULT_KIND_PARTITION, lambda rng: {"seconds": 2.0}),
}
NAMES = (*_WORKER_FAULTS, DRAIN, *_OTHER_FAULTS)


class FaultGenerator:
    """Generator of random faults; the seed and the arguments of the calls determine them.

    Each of ``names`` is chosen once, in random order, before any is chosen again. Faults that are
    not possible at the time are deferred. If none of the remaining ones is possible, all names
    become available again.
    """

    def __init__(self, seed: int, names: Sequence[str] = NAMES) -> None:
        self._rng = Random(seed)
        self._names = names
        self._remaining: list[str] = []
        self._unhealthy_until: dict[str, float] = {}

    def next_event(self, now: float, workers: Sequence[str]) -> ChaosEvent | None:
        """Return a random fault to inject at ``now``; None if none is possible at present.

        ``now`` is in seconds of a monotonic clock. ``workers`` are the ids of the live workers that
        are not draining. Faults of a worker are possible only if at least two workers are healthy.
        """
        if not (possible := self._possible(now, workers)):
            return None
        name = self._next_name(possible)
        if name in _OTHER_FAULTS:
            target, kind, more = _OTHER_FAULTS[name]
            return ChaosEvent(name, target, _fault(kind, target, more(self._rng)))
        worker = self._rng.choice(self._healthy(now, workers))
        return self._worker_event(name, worker, now)

    def _next_name(self, possible: Sequence[str]) -> str:
        if not set(self._remaining) & set(possible):
            self._remaining = self._rng.sample(self._names, len(self._names))
        name = next(name for name in self._remaining if name in possible)
        self._remaining.remove(name)
        return name

    def _possible(self, now: float, workers: Sequence[str]) -> list[str]:
        is_risky = len(self._healthy(now, workers)) < 2
        return [name for name in self._names if name in _OTHER_FAULTS or not is_risky]

    def _healthy(self, now: float, workers: Sequence[str]) -> list[str]:
        return sorted(each for each in workers if self._unhealthy_until.get(each, now) <= now)

    def _worker_event(self, name: str, worker: str, now: float) -> ChaosEvent:
        if name == DRAIN:
            self._unhealthy_until[worker] = _FOR_EVER
            return ChaosEvent(name, worker, None)
        kind, make_fields = _WORKER_FAULTS[name]
        more = make_fields(self._rng)
        self._unhealthy_until[worker] = now + more.get("seconds", _FOR_EVER) + _RECOVERY_S
        return ChaosEvent(name, worker, _fault(kind, worker, more))


def _fault(kind: int, target: str, more: dict[str, float]) -> pb.Fault:
    return pb.Fault(kind=pb.FaultKind.ValueType(kind), target=target, **more)  # type: ignore[arg-type]
