"""Loop of the engine in its own thread: rank 0 executes orders, other ranks follow its log.

An iteration of the loop is

    rank 0         take orders, write them to the step log, apply them, run a step, report
    other ranks    read the entry of the step log, compare its digest of rank 0's previous plan with
                   their own, apply the orders in it, run a step

If steps are launched ahead, all ranks launch and commit them in the same order, because that
follows from the log and the plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from everlift.engine_policy import EnginePolicy, policy_named
from everlift.v1 import chaos_pb2, session_pb2
from worker.engine.adapter import EngineAdapter
from worker.engine.adapter_slots import AdapterLoad, AdapterLoaded
from worker.engine.blocks import NO_CHANGES, ChunkChanges
from worker.engine.load import Load, Occupant
from worker.engine.outcome import Abort, Outcome, SequenceKey, Stop
from worker.engine.sequence import Sequence
from worker.engine.step_times import NO_TIME, StepTimes
from worker.engine.time_breakdown import NO_BREAKDOWN, TimeBreakdown
from worker.engine.time_breakdowns import SequenceBreakdown, TimeBreakdowns
from worker.serving.fault import Slowness, kill_or_pause
from worker.serving.inbox import Inbox, Orders, Successor

#: Seconds without work after which the engine's integrity is checked, with ``checks_integrity``.
_IDLE_S = 0.5
#: Minimum time in seconds between two reports of the sequences in the batch slots.
_OCCUPANTS_S = 0.2
#: Seconds between two attempts to fill the slot of an adapter that not all ranks have read.
_FILL_S = 0.01
#: Maximum seconds that a step waits for routers to confirm the first step of its sequences.
CONFIRM_S = 0.2
#: Minimum time in seconds between two reports of the prefill progress of the batch.
_PREFILL_S = 0.1


class RanksDisagree(Exception):
    """Raised on a rank above 0 if its plan differs from rank 0's: results would be wrong."""


class StepLog(Protocol):
    """Log of the orders to the engine, which rank 0 writes and the other ranks read."""

    def write(self, entry: session_pb2.StepLog) -> None: ...


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one iteration of the loop.

    ``started`` are the keys of sequences that the engine received in this iteration; ``load``
    includes them. ``outcomes`` are new tokens and ends of sequences. ``occupants`` are the
    sequences in the batch slots, or None if they were reported recently. ``busy_s`` is the time in
    seconds spent in steps since the engine started, and ``step_times`` the time spent in each part
    of them.

    ``breakdowns`` are the time breakdowns of some sequences, including all that ended or were
    returned to their routers. ``decoding`` is the time breakdown of an average sequence that
    decoded all the time. ``prefilling`` has the progress of prefills, and is empty if that was
    reported recently. ``chunks`` are the changes of the prefix cache since the last report.
    ``adapters`` are the results of orders to load adapters.
    """

    started: tuple[SequenceKey, ...]
    outcomes: tuple[Outcome, ...]
    load: Load
    occupants: tuple[Occupant, ...] | None
    busy_s: float = 0.0
    step_times: StepTimes = NO_TIME
    breakdowns: tuple[SequenceBreakdown, ...] = ()
    decoding: TimeBreakdown = NO_BREAKDOWN
    prefilling: tuple[Outcome, ...] = ()
    chunks: ChunkChanges = NO_CHANGES
    adapters: tuple[AdapterLoaded, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """Sequences whose first step at this worker is about to run.

    ``outcomes`` has one outcome for each sequence, which reports its admission and contains no
    tokens. ``to_confirm`` are the keys of the sequences whose routers must confirm the first step
    before it runs.
    """

    outcomes: tuple[Outcome, ...]
    to_confirm: frozenset[SequenceKey]


class LeadingLoop:
    """Loop of rank 0, which runs in the thread that calls ``run``.

    ``report`` and ``announce`` are called in that thread. ``report`` is called after each
    iteration, and must not block. ``announce`` is called before a step that admits sequences for
    the first time, and delays the step until it returns. ``log`` is None for a worker of a single
    rank. ``clock`` returns seconds, and ``sleep`` is called with seconds.

    ``checks_integrity`` means that an idle engine checks its invariants. A violated one raises
    AssertionError. The next order waits for the end of the check, which takes seconds if the KV
    cache is large.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        inbox: Inbox,
        report: Callable[[Report], None],
        log: StepLog | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        announce: Callable[[FirstSteps], None] | None = None,
        checks_integrity: bool = False,
    ) -> None:
        self._engine = engine
        self._checks_integrity = checks_integrity
        self._announce = announce
        if announce is not None:
            engine.before_admission = self._before_admission
        self._inbox = inbox
        self._report = report
        self._log = log
        self._clock = clock
        self._sleep = sleep
        self._breakdowns = engine.breakdowns = TimeBreakdowns(engine.limits.max_num_seqs, clock)
        self._slowness = Slowness()
        self._busy_s = 0.0
        self._occupants_reported_at = 0.0
        self._prefills_reported_at = 0.0
        self._filled_at = 0.0

    def run(self) -> None:
        """Run iterations until the stop order.

        Raises EngineBroken if a step failed and no other can run, and ChannelBroken if a rank is
        lost.
        """
        while self.run_iteration(self._next_orders()):
            pass

    def run_iteration(self, orders: Orders) -> bool:
        """Run one iteration; return whether to continue.

        Return False, without a step, if ``orders`` has the stop order.

        Raises EngineBroken if a step failed and no other can run, and ChannelBroken if a rank is
        lost.
        """
        digest = self._engine.digest() if self._log is not None else b""
        settled, leaving = self._return_sequences(orders) if orders.drain else ([], [])
        held_slots, now = self._engine.unready_slots(), self._clock()
        returned = [sequence.outcome(Stop.RETURNED) for sequence in leaving]
        breakdowns = [self._breakdowns.breakdown_of(sequence, now) for sequence in leaving]
        fills = self._slots_to_fill(now)
        self._write(orders, digest, held_slots, self._fault(orders), now, fills)
        if orders.stop:
            return False
        _apply(self._engine, orders.policy, orders.starts, orders.aborts)
        loaded = _load_adapters(self._engine, orders.adapters, fills)
        outcomes, reported = self._step(held_slots, now)
        outcomes = [*settled, *returned, *outcomes]
        self._send_report(orders, outcomes, [*breakdowns, *reported], loaded)
        return True

    def _slots_to_fill(self, now: float) -> list[int]:
        """Return the adapter slots to fill: this rank has read, or could not read, their adapters.

        The slots are looked up at most every ``_FILL_S`` seconds; otherwise the list is empty.
        ``now`` is in seconds.
        """
        slots = self._engine.adapter_slots
        if slots is None or not slots.is_reading or now < self._filled_at + _FILL_S:
            return []
        self._filled_at = now
        return slots.read_slots()

    def _step(
        self, held_slots: Collection[int], started_at: float
    ) -> tuple[list[Outcome], list[SequenceBreakdown]]:
        outcomes = self._engine.step(held_slots, started_at)
        now = self._clock()
        if extra_s := self._slowness.extra_s(now - started_at, now):
            self._sleep(extra_s)
            now = self._clock()
        self._busy_s += now - started_at
        if not self._engine.is_in_flight:
            self._breakdowns.end_step()
        return outcomes, self._breakdowns.report()

    def _before_admission(self, admitted: list[Sequence]) -> None:
        assert self._announce is not None
        new = [sequence for sequence in admitted if sequence.pending_update.waited_s is not None]
        if new:
            to_confirm = frozenset(sequence.key for sequence in new if sequence.confirms_first_step)
            outcomes = tuple(sequence.outcome() for sequence in new)
            self._announce(FirstSteps(outcomes, to_confirm))

    def _fault(self, orders: Orders) -> chaos_pb2.Fault | None:
        for_others = []
        for fault in orders.faults:
            if fault.kind == chaos_pb2.FAULT_KIND_SLOW:
                self._slowness.start(fault, self._clock())
            else:
                for_others.append(fault)
        for fault in for_others[1:]:
            self._inbox.inject(fault)
        return for_others[0] if for_others else None

    def _next_orders(self) -> Orders:
        if self._engine.has_work:
            return self._inbox.wait(timeout_s=0)
        slots = self._engine.adapter_slots
        if slots is not None and slots.is_reading:
            return self._inbox.wait(timeout_s=_FILL_S)
        if self._checks_integrity:
            if orders := self._inbox.wait(timeout_s=_IDLE_S):
                return orders
            self._engine.check_integrity()
        return self._inbox.wait(timeout_s=None)

    def _return_sequences(self, orders: Orders) -> tuple[list[Outcome], list[Sequence]]:
        """Prepare a drain: commit the step in flight, and order the abort of every sequence.

        The aborts are added to ``orders``. Return the outcomes of that step, and the sequences to
        return to their routers.
        """
        settled = self._engine.commit_in_flight()
        leaving = [
            sequence
            for sequence in [*self._engine.sequences(), *orders.starts]
            if not any(sequence.key in abort for abort in orders.aborts)
        ]
        epochs = dict.fromkeys(sequence.key.epoch for sequence in leaving)
        orders.aborts.extend(Abort(epoch) for epoch in epochs)
        return settled, leaving

    def _write(
        self,
        orders: Orders,
        digest: bytes,
        held_slots: Iterable[int],
        fault: chaos_pb2.Fault | None,
        now: float,
        fills: Iterable[int],
    ) -> None:
        if self._log is not None:
            successor = orders.successor or Successor("")
            self._log.write(
                session_pb2.StepLog(
                    starts=[sequence.to_start() for sequence in orders.starts],
                    aborts=[abort.to_proto() for abort in orders.aborts],
                    previous_digest=digest,
                    stop=orders.stop,
                    held_slots=held_slots,
                    fault=fault,
                    now=now,
                    settle=orders.drain,
                    engine_policy=orders.policy or "",
                    adapter_loads=[load.to_proto() for load in orders.adapters],
                    adapter_fills=fills,
                    next_model=successor.model,
                    rendezvous=successor.rendezvous,
                )
            )

    def _send_report(
        self,
        orders: Orders,
        outcomes: Iterable[Outcome],
        breakdowns: Iterable[SequenceBreakdown],
        loaded: tuple[AdapterLoaded, ...],
    ) -> None:
        now, occupants = self._clock(), None
        if now - self._occupants_reported_at >= _OCCUPANTS_S:
            self._occupants_reported_at, occupants = now, self._engine.occupants()
        started = tuple(sequence.key for sequence in orders.starts)
        load, times = self._engine.load(), self._engine.step_times()
        fields = tuple(outcomes), load, occupants, self._busy_s, times, tuple(breakdowns)
        prefilling, chunks = self._prefilling(now), self._engine.take_chunk_changes()
        decoding = self._breakdowns.decoding
        self._report(Report(started, *fields, decoding, prefilling, chunks, loaded))

    def _prefilling(self, now: float) -> tuple[Outcome, ...]:
        if now - self._prefills_reported_at < _PREFILL_S:
            return ()
        self._prefills_reported_at = now
        return tuple(sequence.prefill_progress() for sequence in self._engine.prefilling())


def follow(
    engine: EngineAdapter,
    log: Iterable[session_pb2.StepLog],
    rank: int = 1,
    on_fault: Callable[[chaos_pb2.Fault], None] = kill_or_pause,
) -> Successor | None:
    """Run the loop of ``rank``, which is above 0, until an entry of the log has the stop order.

    Return the model that the worker serves next; None if the worker ends. ``on_fault`` is called
    with each fault to inject into this rank. Raises RanksDisagree if a plan differs from rank 0's,
    EngineBroken if a step failed and no other can run, and ChannelBroken if rank 0 is lost.
    """
    for entry in log:
        if entry.stop:
            return Successor(entry.next_model, entry.rendezvous) if entry.next_model else None
        if entry.HasField("fault") and entry.fault.rank == rank:
            on_fault(entry.fault)
        if entry.previous_digest != engine.digest():
            raise RanksDisagree(f"the plan of step {engine.load().step} differs from rank 0's")
        if entry.settle:
            engine.commit_in_flight()
        starts = [Sequence.from_start(start, engine.limits) for start in entry.starts]
        policy = policy_named(entry.engine_policy)
        _apply(engine, policy, starts, map(Abort.from_proto, entry.aborts))
        _load_adapters(
            engine, map(AdapterLoad.from_proto, entry.adapter_loads), entry.adapter_fills
        )
        engine.step(frozenset(entry.held_slots), entry.now)
        # Only rank 0 reports the changes of the prefix cache; on this rank they would accumulate.
        engine.take_chunk_changes()
    return None


def _apply(
    engine: EngineAdapter,
    policy: EnginePolicy | None,
    starts: Iterable[Sequence],
    aborts: Iterable[Abort],
) -> None:
    if policy is not None:
        engine.set_policy(policy)
    for sequence in starts:
        engine.add(sequence)
    for abort in aborts:
        engine.abort(abort)


def _load_adapters(
    engine: EngineAdapter, loads: Iterable[AdapterLoad], fills: Iterable[int]
) -> tuple[AdapterLoaded, ...]:
    """Fill the adapter slots ``fills``, then begin to read the adapters of ``loads``.

    Return the results of ``fills``, except of slots whose adapter a rank is still reading.
    """
    slots, loaded = engine.adapter_slots, []
    for slot in fills:
        assert slots is not None
        if (result := slots.fill(slot)) is not None:
            loaded.append(result)
    for load in loads:
        assert slots is not None, "the engine has no slots for adapters"
        slots.read(load)
    return tuple(loaded)
