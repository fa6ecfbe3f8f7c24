"""A simulated worker in a few numbers: its batch flows, and only its beginnings and ends are
computed. Pure.

It has the product's slots, budget, order of admission and step time, but no scheduler and no block
pool: so that a thousand of them can be forecast, and held against the exact ones where these are
few. What is not as there:

- steps that only decode take as long as the one in their middle, each;
- what is in use of the blocks follows from the known tokens and half a block for each sequence;
- nothing is found in a cache of prefixes;
- of steps that only decode only the last one has a frame, and whoever comes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil

from cluster.simulator.any_worker import AnyWorker
from cluster.simulator.frame import Frame
from cluster.simulator.scenario import WorkerSpec
from cluster.simulator.sequence import TOKEN, NamedSequence
from cluster.simulator.timeline import Timeline
from everlift.blockhash import BLOCK_SIZE
from everlift.step_time import StepSize
from router.admission.throughput import Work
from router.admission.workers import Load
from worker.engine.limits import blocks_for
from worker.engine.outcome import NO_NEWS, News, Outcome, Residence, Stop


@dataclass(slots=True, eq=False)
class Flow:
    """One sequence. While it decodes it knows one token more with each step after ``since``."""

    sequence: NamedSequence
    order: int
    known: int
    #: of the known ones, to be computed before the next token is drawn
    left: int
    #: of the known ones, computed at some time
    computed: int
    #: known tokens when it has drawn its last one
    last: int
    since: int = 0
    decodes: bool = False
    has_slot: bool = False
    is_preempted: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Who comes in first has the smallest."""
        return (-self.sequence.priority, self.order)


@dataclass(slots=True)
class Steps:
    """So many steps under way, which all take as long."""

    number: int
    began: float
    step_s: float
    size: StepSize
    #: prompt tokens that each of these computes
    shares: list[tuple[Flow, int]]

    def over(self, now: float) -> int:
        """As many have come to their end."""
        if self.shares:
            return 0
        return min(self.number, int((now - self.began) / self.step_s + 1e-9))


def blocks_of(tokens: int, sequences: int) -> float:
    """Of the last one of each sequence half is in use, about."""
    return tokens / BLOCK_SIZE + sequences / 2


class FluidWorker(AnyWorker):
    def __init__(
        self, worker_id: str, spec: WorkerSpec, timeline: Timeline, tell: Callable[[Frame], None]
    ) -> None:
        super().__init__(worker_id, spec, timeline, tell)
        self._flows: dict[int, Flow] = {}
        self._orders = 0
        self._starts: list[Flow] = []
        #: who has no slot, and who has one and prefills; those that are gone are left in the first
        self._waiting: list[tuple[tuple[int, int], Flow]] = []
        self._num_waiting = 0
        self._prefilling: list[Flow] = []
        #: of those that decode: their ends, by step, and their known tokens
        self._ends: list[tuple[int, int, Flow]] = []
        self._num_decoding = 0
        self._decoding_tokens = 0
        #: known tokens of all others, and what is left of them
        self._other_tokens = 0
        self._pending_tokens = 0
        self._steps: Steps | None = None
        self._turns = 0
        # since it started
        self._step = self._computed = self._drawn = self._released = 0
        self._rows = self._read = self._pairs = 0.0
        self._begin_to_beat()

    def occupants(self) -> set[str]:
        return {it.sequence.request_id for it in self._flows.values() if it.has_slot}

    # the router speaks

    def start(self, sequence: NamedSequence) -> None:
        if self.is_gone:
            return
        self._accepted.append(sequence.key.epoch)
        end = sequence.end_at_start(self.limits, self.is_draining)
        if end is None:
            known = sequence.num_known
            self._orders += 1
            before = sequence.num_computed_before
            last = min(sequence.num_prompt + sequence.length, self.limits.max_model_len)
            self._starts.append(Flow(sequence, self._orders, known, known, before, last))
            self._other_tokens += known
            self._pending_tokens += known
        self._tell([end] if end else [])
        self._wake()

    # its loop

    @property
    def _is_stepping(self) -> bool:
        return self._steps is not None

    def _wake(self) -> None:
        """What came is taken in after the step in progress."""
        steps = self._steps
        if steps is None:
            self._turn([])
        elif (number := steps.over(self._timeline.now) + 1) < steps.number:
            steps.number = number
            self._expect(steps)

    def _expect(self, steps: Steps) -> None:
        self._turns += 1
        moment = max(self._timeline.now, steps.began + steps.number * steps.step_s)
        self._timeline.at(moment, self._are_over, self._turns)

    def _are_over(self, turn: int) -> None:
        if self.is_gone or turn != self._turns or (steps := self._steps) is None:
            return
        self._steps = None
        self._step += steps.number
        self._busy_s += steps.number * steps.step_s
        self.num_steps += steps.number
        self.num_jumped += steps.number - 1
        self._decoding_tokens += self._num_decoding * steps.number
        self._computed += self._num_decoding * steps.number + sum(it for _, it in steps.shares)
        self._drawn += self._num_decoding * steps.number
        self._rows += steps.size.num_rows * steps.number
        self._read += steps.size.kv_tokens * steps.number
        self._pairs += steps.size.num_pairs * steps.number
        outcomes = [*self._prefilled(steps.shares), *self._ended()]
        self._turn(outcomes)

    def _turn(self, outcomes: list[Outcome]) -> None:
        """Takes what has come, and begins what is next. ``outcomes`` are of the steps before."""
        outcomes += self._take_orders()
        outcomes += self._make_room()
        self._admit()
        # Before the next steps begin: what is told of them by then is nothing.
        self._tell(outcomes)
        self._begin()

    def _begin(self) -> None:
        shares = self._shares()
        if not self._num_decoding and not shares:
            return
        number = 1 if shares else self._number_alike()
        size = self._size(shares, number)
        seconds = self._spec.step_time.seconds(size) * self._spec.slowness
        self._steps = Steps(number, self._timeline.now, seconds, size, shares)
        self._expect(self._steps)

    def _take_orders(self) -> list[Outcome]:
        for flow in self._starts:
            self._flows[flow.sequence.key.epoch] = flow
            self._wait(flow)
        returned = []
        if self.is_draining:
            returned = [self._outcome(flow, (), Stop.RETURNED) for flow in self._flows.values()]
        for epoch in (*self._aborts, *(outcome.key.epoch for outcome in returned)):
            if (leaving := self._flows.get(epoch)) is not None:
                self._leave(leaving)
        self._starts, self._aborts = [], []
        return returned

    def _wait(self, flow: Flow) -> None:
        heappush(self._waiting, (flow.place, flow))
        self._num_waiting += 1

    # slots and blocks

    def _leave(self, flow: Flow) -> None:
        """It is here no more."""
        del self._flows[flow.sequence.key.epoch]
        if flow.has_slot:
            self._give_up(flow)
        else:
            self._num_waiting -= 1
        self._other_tokens -= flow.known
        self._pending_tokens -= flow.left

    def _give_up(self, flow: Flow) -> None:
        """Its slot and its blocks. What is known of it has all to be computed again."""
        if flow.decodes:
            known = flow.known + self._step - flow.since
            self._num_decoding -= 1
            self._decoding_tokens -= known
            self._other_tokens += known
            flow.known, flow.decodes = known, False
            flow.computed = max(flow.computed, known - 1)
        else:
            self._prefilling.remove(flow)
            flow.computed = max(flow.computed, flow.known - flow.left)
        self._released += blocks_for(flow.known)
        self._pending_tokens += flow.known - flow.left
        flow.left, flow.has_slot = flow.known, False

    @property
    def _num_running(self) -> int:
        return self._num_decoding + len(self._prefilling)

    @property
    def _blocks_used(self) -> float:
        tokens = self._decoding_tokens + sum(it.known for it in self._prefilling)
        return blocks_of(tokens, self._num_running)

    def _make_room(self) -> list[Outcome]:
        """For the next token of all that decode: of the lowest class, who knows least gives up its
        blocks."""
        told = []
        while self._num_running > 1 and self._blocks_used >= self.limits.num_blocks:
            running = (it for it in self._flows.values() if it.has_slot)
            victim = min(running, key=lambda it: (it.sequence.priority, self._known(it), it.order))
            self._give_up(victim)
            victim.is_preempted = True
            self._wait(victim)
            told.append(self._outcome(victim, (), news=News(Residence.PREEMPTED, 1)))
        return told

    def _known(self, flow: Flow) -> int:
        return flow.known + (self._step - flow.since if flow.decodes else 0)

    def _admit(self) -> None:
        limits = self.limits
        used = self._blocks_used
        budget = limits.max_num_batched_tokens - self._num_decoding
        budget -= sum(it.left for it in self._prefilling)
        while budget > 0 and self._waiting and self._num_running < limits.max_num_seqs:
            _, head = self._waiting[0]
            if not self._is_here(head):
                heappop(self._waiting)
                continue
            # On the average it needs half a block more than it can have, who takes them all.
            needed = min(blocks_of(head.known, 1), limits.num_blocks)
            watermark = limits.watermark_blocks if self._num_running else 0
            if used + needed + watermark > limits.num_blocks:
                break
            heappop(self._waiting)
            self._num_waiting -= 1
            head.has_slot = True
            self._prefilling.append(head)
            used += needed
            budget -= head.left

    def _is_here(self, flow: Flow) -> bool:
        return self._flows.get(flow.sequence.key.epoch) is flow and not flow.has_slot

    # steps

    def _shares(self) -> list[tuple[Flow, int]]:
        budget = self.limits.max_num_batched_tokens - self._num_decoding
        shares = []
        for flow in self._prefilling:
            if budget <= 0:
                break
            share = min(flow.left, budget)
            shares.append((flow, share))
            budget -= share
        return shares

    def _number_alike(self) -> int:
        """Until the next one ends, or blocks may be short."""
        while (
            not (top := self._ends[0][2]).decodes
            or self._flows.get(top.sequence.key.epoch) is not top
        ):
            heappop(self._ends)
        room = (self.limits.num_blocks - self._blocks_used) * BLOCK_SIZE / self._num_decoding
        return max(1, min(self._ends[0][0] - self._step, ceil(room)))

    def _size(self, shares: Sequence[tuple[Flow, int]], number: int) -> StepSize:
        """Of the step in the middle."""
        decoding = self._num_decoding
        kv_tokens = self._decoding_tokens + decoding * (number - 1) / 2
        pairs, tokens = kv_tokens, decoding
        for flow, share in shares:
            end = flow.known - flow.left + share
            kv_tokens += end
            tokens += share
            pairs += share * (2 * end - share + 1) / 2
        return StepSize(decoding + len(shares), tokens, kv_tokens, pairs)

    def _prefilled(self, shares: Sequence[tuple[Flow, int]]) -> Iterator[Outcome]:
        for flow, share in shares:
            flow.left -= share
            self._pending_tokens -= share
            if not flow.left:
                yield self._begin_to_decode(flow)

    def _begin_to_decode(self, flow: Flow) -> Outcome:
        """It draws its next token."""
        news = NO_NEWS
        if flow.computed or flow.is_preempted:
            residence = Residence.RESUMED if flow.is_preempted else None
            news = News(residence, recomputed_tokens=min(flow.computed, flow.known))
        offset = flow.known - flow.sequence.num_prompt
        self._prefilling.remove(flow)
        self._other_tokens -= flow.known
        flow.computed = max(flow.computed, flow.known)
        flow.known, flow.since = flow.known + 1, self._step
        flow.decodes, flow.is_preempted = True, False
        self._num_decoding += 1
        self._decoding_tokens += flow.known
        self._drawn += 1
        stop = Stop.LENGTH if flow.known >= flow.last else None
        if stop is None:
            heappush(self._ends, (self._step + flow.last - flow.known, flow.order, flow))
        else:
            self._leave(flow)
        return Outcome(
            flow.sequence.key, offset, (TOKEN,), stop, num_computed=flow.computed, news=news
        )

    def _ended(self) -> Iterator[Outcome]:
        """Those that have drawn their last token."""
        while self._ends and self._ends[0][0] <= self._step:
            end, _, flow = heappop(self._ends)
            if flow.decodes and end == flow.since + flow.last - flow.known:
                self._leave(flow)
                yield self._outcome(flow, (TOKEN,), Stop.LENGTH)

    def _outcome(
        self,
        flow: Flow,
        tokens: tuple[int, ...],
        stop: Stop | None = None,
        news: News = NO_NEWS,
    ) -> Outcome:
        """``tokens`` are the last ones that it has drawn."""
        known = self._known(flow)
        offset = known - flow.sequence.num_prompt - len(tokens)
        computed = max(flow.computed, known - 1 if flow.decodes else 0)
        return Outcome(flow.sequence.key, offset, tokens, stop, num_computed=computed, news=news)

    # what it says

    def _state(self) -> Load:
        steps = self._steps
        more = steps.over(self._timeline.now) if steps else 0
        drawn = more * self._num_decoding
        busy_s = self._busy_s + (more * steps.step_s if steps else 0.0)
        rows, _, read, pairs = steps.size if steps else StepSize(0, 0, 0, 0)
        work = Work(
            self._step + more,
            self._computed + drawn,
            self._drawn + drawn,
            self._released,
            busy_s,
            round(self._rows + more * rows),
            round(self._read + more * read),
            round(self._pairs + more * pairs),
        )
        return Load(
            self._frames,
            self._num_running,
            self._num_waiting + len(self._starts),
            min(self.limits.num_blocks, ceil(self._blocks_used)),
            self._pending_tokens,
            self._decoding_tokens + drawn + self._other_tokens,
            self.is_draining,
            work,
        )
