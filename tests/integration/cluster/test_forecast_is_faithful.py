"""Replay of a live engine's step log by the simulator's scheduler: the batches are equal.

The live engine has tokens, block hashes and a thread, and takes requests as they arrive. The
replay uses the product's scheduler for sequences with unknown tokens. Their blocks have names, and
they end after as many tokens as the live ones. The other inputs of a step are in its log entry:
the time, and the slots whose grammars were not ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any, TypeAlias

import pytest

from cluster.simulator.multi_step import MultiStepScheduler
from cluster.simulator.sequence import TOKEN, BlockNames, NamedSequence
from cluster.simulator.workloads.arrivals import Arrival
from everlift.engine_policy import EnginePolicy, policy_named
from everlift.hashes import BLOCK_SIZE
from everlift.v1 import session_pb2
from tests.support.worker.worker_support import Collected, limits, prompt, start
from worker.config import FakeModel, Scheduling
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, SequenceKey
from worker.engine.plan import Plan
from worker.engine.sequence import Sequence as EngineSequence
from worker.runner.fake_runner import FakeRunner
from worker.serving.inbox import Inbox
from worker.serving.loop import LeadingLoop, Report

#: With SLAI, a token is due two or three steps after the one before it.
POLICIES = {
    "continuous": Scheduling(),
    "static": Scheduling("static"),
    "slai": Scheduling("slai", tbt_target=0.004, ageing_tokens=8),
    "magnus": Scheduling("magnus"),
}

#: Slot, start, number of tokens, whether a token is sampled, and KV blocks of each row.
Batch: TypeAlias = list[tuple[Any, ...]]

#: Sequences may end early, at random positions, by the EOS token.
MODEL = FakeModel(eos_one_in=40, step_time=0.0005)
#: The KV blocks do not suffice for all sequences, so some are preempted.
LIMITS = limits(
    num_blocks=14, max_num_seqs=6, max_num_batched_tokens=48, max_model_len=400, model=MODEL
)
REQUESTS = 60
#: Length in tokens of the prefix that prompts of a group share.
STEM = 2 * BLOCK_SIZE + 5


class Waiting(FakeRunner):
    """Fake runner that reports random slots as waiting for their grammars."""

    def __init__(self, bounds: Limits, seed: int) -> None:
        super().__init__(bounds.num_blocks, MODEL)
        self._num_slots = bounds.max_num_seqs
        self._dice = Random(seed)

    def unready_slots(self) -> frozenset[int]:
        return frozenset(slot for slot in range(self._num_slots) if self._dice.random() < 0.01)


@dataclass
class Live:
    """Record of an engine's run: the log entry and the batch of each step."""

    bounds: Limits
    entries: list[session_pb2.StepLog] = field(default_factory=list)
    batches: dict[int, Batch] = field(default_factory=dict)
    collected: Collected = field(default_factory=Collected)

    def write(self, entry: session_pb2.StepLog) -> None:
        self.entries.append(session_pb2.StepLog.FromString(entry.SerializeToString()))

    def executed(self, plan: Plan) -> Any:
        self.batches[len(self.entries) - 1] = batch(plan)
        return nullcontext()

    def report(self, report: Report) -> None:
        self.collected.take(report.outcomes)

    def run(self, seed: int, policies: Sequence[EnginePolicy] = ()) -> None:
        """Run requests that arrive and are aborted at random times.

        Meanwhile the engine is switched to each of the ``policies`` in turn.
        """
        engine = Engine(Waiting(self.bounds, seed), self.bounds, within=self.executed)
        inbox = Inbox()
        loop = LeadingLoop(engine, inbox, self.report, self)
        thread = threading.Thread(target=loop.run)
        thread.start()
        dice = Random(seed)
        changes = dict(zip(count(REQUESTS // 10, REQUESTS // 10), policies, strict=False))
        for epoch in range(1, REQUESTS + 1):
            if epoch in changes:
                inbox.set_policy(changes[epoch])
                while inbox._orders.policy:
                    time.sleep(0.001)
            inbox.start(EngineSequence.from_start(request(epoch, dice), self.bounds))
            # Most arrive faster than they are served, so that KV blocks run out.
            time.sleep(0.005 if epoch % 8 == 0 else 0.0)
            if dice.random() < 0.1:
                inbox.abort(Abort(epoch))
        while engine.has_work:
            time.sleep(0.01)
        inbox.stop()
        thread.join(10.0)
        assert not thread.is_alive()


def request(epoch: int, dice: Random) -> session_pb2.Start:
    group, own = dice.choice([0, 0, 1, 2]), dice.randint(1, 100)
    stem = prompt(STEM, group * 100) if group else []
    return start(
        epoch,
        [*stem, *prompt(own, 7 * epoch)],
        max_tokens=dice.randint(1, 120),
        priority=dice.choice([0, 0, 1]),
        predicted_tokens=dice.choice([0, dice.randint(1, 150)]),
        stop_token_ids=[MODEL.eos_token_id],
    )


def named(message: session_pb2.Start, num_outputs: int) -> NamedSequence:
    """Return the simulator's sequence for a request, which has only lengths and shared prefix."""
    group = message.prompt_ids[0] // 100 if len(message.prompt_ids) > STEM else 0
    shares = group and list(message.prompt_ids[:STEM]) == prompt(STEM, group * 100)
    arrival = Arrival(
        0.0,
        len(message.prompt_ids),
        num_outputs,
        message.max_tokens,
        message.priority,
        prefix=(group,) if shares else (),
        prefix_part_tokens=STEM,
    )
    names = BlockNames(message.epoch, arrival)
    return NamedSequence.create(
        message.epoch, message.request_id, arrival, names, message.predicted_tokens
    )


def batch(plan: Plan) -> Batch:
    return [
        (row.slot, row.start, len(row.tokens), row.samples, tuple(row.block_table))
        for row in plan.rows
    ]


def played_again(live: Live, num_at_once: int) -> Iterator[tuple[int, Batch | None]]:
    """Yield each step's number and batch; None for a step computed together with others."""
    scheduler = MultiStepScheduler(live.bounds)
    skipped = 0
    for turn, entry in enumerate(live.entries[:-1]):
        if (policy := policy_named(entry.engine_policy)) is not None:
            scheduler.set_policy(policy)
        for message in entry.starts:
            collected = live.collected.tokens.get(SequenceKey(message.epoch, 0), [])
            has_ended = SequenceKey(message.epoch, 0) in live.collected.stops
            scheduler.add(named(message, len(collected) if has_ended else message.max_tokens))
        for abort in entry.aborts:
            for sequence in scheduler.of_epoch(abort.epoch):
                scheduler.remove(sequence)
        if not skipped:
            skipped = quiet(scheduler, live.entries[turn:-1], num_at_once)
            if skipped:
                skipped_entries = live.entries[turn : turn + skipped]
                scheduler.decode(TOKEN, [each.now for each in skipped_entries])
        if skipped:
            skipped -= 1
            yield turn, None
            continue
        plan = scheduler.schedule(entry.held_slots, entry.now)
        if plan.rows:
            yield turn, batch(plan)
            scheduler.commit_sampled(plan, TOKEN)
    assert not len(scheduler)


def quiet(scheduler: MultiStepScheduler, entries: list[session_pb2.StepLog], most: int) -> int:
    """Return the number of steps, at most ``most``, that can be computed at once.

    They precede the next step with a start, an abort, a held slot or a change of policy. The
    changes of the first step are already applied.
    """
    first, *after = entries
    if not most or first.held_slots:
        return 0
    changes = (i for i, it in enumerate(after) if changes_anything(it))
    return scheduler.num_uniform_steps(min(most, next(changes, len(after)) + 1))


def changes_anything(entry: session_pb2.StepLog) -> bool:
    return bool(entry.starts or entry.aborts or entry.held_slots or entry.engine_policy)


@pytest.mark.parametrize(
    ("policy", "num_at_once"),
    [
        *(("continuous", 0), ("continuous", 16), ("static", 0), ("static", 16)),
        # These policies depend on the time, so steps cannot be computed together.
        *(("slai", 0), ("magnus", 0)),
    ],
)
def test_forecast_batches_equal_those_of_the_live_engine(policy: str, num_at_once: int) -> None:
    live = Live(replace(LIMITS, scheduling=POLICIES[policy]))
    live.run(seed=num_at_once)
    batches = dict(played_again(live, num_at_once))
    assert batches.keys() == live.batches.keys()
    for turn, each in batches.items():
        assert each is None or each == live.batches[turn], f"step {turn}"
    assert any(entry.held_slots for entry in live.entries)
    # A fixed batch may have enough blocks.
    assert policy in ("static", "magnus") or sum(live.collected.preemptions.values()) > 0
    at_once = sum(each is None for each in batches.values())
    assert (at_once > len(batches) / 20) == bool(num_at_once)


@pytest.mark.parametrize("num_at_once", [0, 16])
def test_forecast_batches_follow_policy_changes(num_at_once: int) -> None:
    live = Live(replace(LIMITS, scheduling=POLICIES["slai"]))
    policies: list[EnginePolicy] = ["static", "continuous", "magnus", "slai", "continuous"]
    live.run(7, policies)
    batches = dict(played_again(live, num_at_once))
    assert batches.keys() == live.batches.keys()
    for turn, each in batches.items():
        assert each is None or each == live.batches[turn], f"step {turn}"
    logged = [entry.engine_policy for entry in live.entries if entry.engine_policy]
    assert logged == policies
    assert any(each is None for each in batches.values()) == bool(num_at_once)
