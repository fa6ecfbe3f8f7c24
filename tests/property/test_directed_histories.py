"""Directed histories of a simulated cluster: faults at moments that random ones rarely hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import pytest

from everlift.errors import AttemptsExhausted, DeadlineExceeded, EverliftError
from everlift.messages import OnDisconnect
from everlift.v1 import session_pb2
from router.admission.prefix_index import PrefixIndex
from router.ledger.entry import Append, Appended, Entry, State
from router.ledger.memory.memory import MemoryLedger
from router.requests import messages
from router.requests.attempt_runner import AttemptRunner
from router.requests.recovery import Resync
from tests.simulated_cluster.asked import ASKED, ROUTERS, WORKERS, Asked, Wrong, undisturbed
from tests.simulated_cluster.client import Manners
from tests.simulated_cluster.clock import VirtualLoop
from tests.simulated_cluster.cluster import SimCluster
from tests.simulated_cluster.judgement import finish, listening
from tests.simulated_cluster.ledger import Trouble
from worker.serving.sessions import Sessions

LONG = Asked.of(range(1, 12), temperature=1, seed=5, max_tokens=60)
#: Request that runs longer than any part may be silent.
LONGER = Asked.of(range(1, 12), temperature=1, seed=5, min_tokens=200, max_tokens=200)
SHORT = Asked.of(range(1, 9), temperature=0, max_tokens=8)
#: Prompt with two chunks.
TWO_CHUNKS = Asked.of([1] * 530, temperature=0, max_tokens=8)
#: Longer than a gateway, a leader or a worker may be silent, in seconds.
TOO_LONG_S = 3.0
READS = Manners()


class Played(SimCluster):
    """Simulated cluster that records the requests of its clients, so that they can be judged."""

    def __init__(self, routers: int, workers: int, **changes: object) -> None:
        super().__init__(replace(ROUTERS, **changes), WORKERS)  # type: ignore[arg-type]
        self.asked: dict[str, tuple[Asked, Manners]] = {}
        self.may_fail: set[str] = set()
        self.may_lose = False
        for index in range(routers):
            self.start_router(index)
        for index in range(workers):
            self.start_worker(index)
        self.run_for(1.0)

    def ask(self, asked: Asked = LONG, router: int = 0, manners: Manners = READS) -> str:
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = asked, manners
        self.submit(request_id, asked.prompt, asked.arguments(), manners, router)
        return request_id

    def entry(self, request_id: str) -> Entry:
        entry = self.ledger.peek(request_id)
        assert entry is not None
        return entry

    def home(self, request_id: str) -> int:
        """Return the worker that runs the request according to the ledger."""
        self.run_until(lambda: self.ledger.peek(request_id) is not None)
        self.run_until(lambda: self.entry(request_id).state is State.RUNNING)
        worker = self.entry(request_id).worker
        return next(i for i, it in self.workers.items() if it.worker_id == worker)

    def until_has(self, request_id: str, tokens: int) -> None:
        self.run_until(lambda: self.transcripts[request_id].num_tokens >= tokens)

    def error(self, request_id: str) -> EverliftError | None:
        return self.transcripts[request_id].error

    def false_alarms(self) -> int:
        return sum(router._sessions.false_alarms for _, router in self.ready_routers())


@contextmanager
def cluster(routers: int = 2, workers: int = 2, **changes: object) -> Iterator[Played]:
    """Run a simulated cluster, and judge it at its end."""
    with Played(routers, workers, **changes) as played, listening() as complaints:
        yield played
        finish(
            played,
            played.asked,
            complaints,
            may_lose=played.may_lose,
            may_fail=[*played.may_fail],
        )


# workers


def test_frozen_worker_changes_nothing_when_it_resumes() -> None:
    with cluster() as it:
        request_id = it.ask()
        it.until_has(request_id, 20)
        it.freeze_worker(it.home(request_id), TOO_LONG_S)
        it.settle(60)
        assert it.transcripts[request_id].migrations == 1
        it.run_for(TOO_LONG_S)
        assert it.false_alarms() > 0


def test_frozen_worker_resumes_after_ledger_rollback() -> None:
    with cluster() as it:
        request_id = it.ask()
        it.until_has(request_id, 10)
        before = it.ledger.snapshot()
        it.freeze_worker(it.home(request_id), TOO_LONG_S)
        it.until_has(request_id, 15)
        it.ledger.restart(before)
        it.run_for(2 * TOO_LONG_S)


@pytest.mark.parametrize("tokens", [1, 30, 58, 59, 60])
def test_worker_killed_as_tokens_arrive_loses_none(tokens: int) -> None:
    with cluster() as it:
        request_id = it.ask()
        home = it.home(request_id)
        it.run_until(lambda: sum(it.entry(request_id).num_tokens) >= tokens)
        it.kill_worker(home)


def test_worker_killed_during_drain_loses_nothing() -> None:
    for delay in (0.0, 0.0003, 0.0007, 0.005, 0.1):
        with cluster() as it:
            ids = [it.ask(asked) for asked in ASKED[:4]]
            it.until_has(ids[1], 5)
            home = it.home(ids[1])
            it.drain_worker(home)
            it.run_for(delay)
            it.kill_worker(home)


def test_drained_worker_handback_counts_no_loss() -> None:
    with cluster() as it:
        request_id = it.ask()
        it.until_has(request_id, 20)
        it.drain_worker(it.home(request_id))
        it.settle(60)
        assert it.entry(request_id).attempts == 2
        assert it.entry(request_id).losses == 0


def test_poison_request_fails_and_neighbours_survive() -> None:
    with cluster(max_losses=3) as it:
        others = [it.ask(asked) for asked in ASKED[:5]]
        poison = it.ask()
        it.poison.add(poison)
        it.may_fail.add(poison)
        it.settle(60)
        assert isinstance(it.error(poison), AttemptsExhausted)
        assert [it.error(other) for other in others] == [None] * 5


@pytest.mark.parametrize("max_losses", [1, 2, 4])
def test_poison_in_first_step_fails_at_max_losses(max_losses: int) -> None:
    """Every worker is killed in the request's first step, before the step has any result."""
    with cluster(max_losses=max_losses, max_losses_total=50) as it:
        poison = it.ask()
        it.poison.add(poison)
        it.may_fail.add(poison)
        it.settle(60)
        assert isinstance(it.error(poison), AttemptsExhausted)
        assert it.entry(poison).losses == max_losses


def test_request_waiting_at_worker_outlives_max_losses() -> None:
    """Another request occupies the only slot whenever the worker is killed."""
    with cluster(workers=0, max_losses=2) as it:
        it.start_worker(0, max_num_seqs=1)
        it.run_for(1.0)
        first = it.ask(LONGER)
        it.until_has(first, 5)
        waiting = it.ask(SHORT)
        it.home(waiting)
        for losses in range(6):
            it.run_until(lambda: it.entry(waiting).worker == it.workers[0].worker_id)
            it.until_has(first, 20 * (losses + 1))
            it.kill_worker(0)
            it.start_worker(0, max_num_seqs=1)
        it.settle(60)
        assert it.entry(waiting).losses == 6
        assert it.error(waiting) is None


def test_poison_requests_harm_no_neighbours() -> None:
    with cluster(max_losses=3) as it:
        others = [it.ask(asked, router=1) for asked in ASKED[:4]]
        for _ in range(2):
            poison = it.ask(SHORT)
            it.poison.add(poison)
            it.may_fail.add(poison)
        later = [it.ask(asked) for asked in ASKED[4:8]]
        it.settle(120)
        assert [it.error(other) for other in others + later] == [None] * 8


def test_request_with_progress_outlives_max_losses() -> None:
    with cluster(max_losses=2) as it:
        request_id = it.ask()
        for tokens in (5, 15, 25, 35, 45):
            it.until_has(request_id, tokens)
            home = it.home(request_id)
            it.kill_worker(home)
            it.start_worker(home)


def test_starved_worker_requests_migrate_to_free_worker() -> None:
    long = [Asked.of(range(n + 1, n + 30), temperature=0, max_tokens=200) for n in range(6)]
    with cluster(workers=1) as it:
        ids = [it.ask(asked) for asked in long]
        it.run_until(lambda: it.workers[0].engine.load().preemptions > 0)
        it.start_worker(1)
        it.settle(120)
        moved = [it.transcripts[request_id] for request_id in ids]
        assert sum(transcript.migrations for transcript in moved) > 0
        assert sum(it.entry(request_id).losses for request_id in ids) == 0


# lost calls of the ledger


@pytest.mark.parametrize("trouble", [*Trouble])
@pytest.mark.parametrize("name", ["open", "dispatch", "append", "release", "heartbeat", "lead"])
def test_ledger_call_failure_is_survived(name: str, trouble: Trouble) -> None:
    with cluster() as it:
        left = chain([trouble], repeat(None))
        it.ledger.trouble = lambda called: next(left) if called == name else None
        request_id = it.ask()
        it.until_has(request_id, 20)
        home = it.home(request_id)
        it.kill_worker(home)
        it.start_worker(home)
        it.settle(60)
        assert next(left) is None


@pytest.mark.parametrize("trouble", [*Trouble])
@pytest.mark.parametrize("name", ["take_over", "read", "get", "gateways", "orphans"])
def test_ledger_call_failure_during_take_over_is_survived(name: str, trouble: Trouble) -> None:
    with cluster(lease=0.8) as it:
        left = chain([trouble], repeat(None))
        it.ledger.trouble = lambda called: next(left) if called == name else None
        request_id = it.ask(router=1)
        it.until_has(request_id, 20)
        it.kill_router(1)


def test_last_append_with_lost_answer_finishes_request() -> None:
    with cluster() as it:
        request_id = it.ask(SHORT)
        it.until_has(request_id, 7)
        left = chain([Trouble.ANSWER_LOST], repeat(None))
        it.ledger.trouble = lambda called: next(left) if called == "append" else None
        it.settle(60)
        assert it.entry(request_id).state is State.FINISHED


# rollbacks


@pytest.mark.parametrize("lag", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("tokens", [0, 1, 10, 50])
def test_ledger_rollback_is_reasserted(lag: float, tokens: int) -> None:
    with cluster() as it:
        early = it.ask()
        it.until_has(early, tokens)
        before = it.ledger.snapshot()
        late = it.ask(SHORT, router=1)
        it.run_for(lag)
        it.ledger.end_lease(0.1)
        it.ledger.restart(before)
        it.settle(60)
        it.run_for(1.0)
        assert it.entry(early).num_tokens == (60,)
        assert it.entry(late).state is State.FINISHED


def test_emptied_ledger_fails_no_request() -> None:
    with cluster() as it:
        empty = it.ledger.snapshot()
        ids = [it.ask(asked, router=n) for n, asked in enumerate(ASKED[:6])]
        it.run_for(0.3)
        it.ledger.restart(empty)
        it.settle(60)
        assert all(it.error(request_id) is None for request_id in ids)


def test_ledger_rollback_of_redispatch_is_repaired() -> None:
    """The rolled-back ledger again names the worker that was killed."""
    with cluster() as it:
        request_id = it.ask()
        it.until_has(request_id, 10)
        before, first = it.ledger.snapshot(), it.home(request_id)
        it.kill_worker(first)
        it.run_until(lambda: it.entry(request_id).attempts == 2)
        it.ledger.restart(before)
        it.settle(60)
        assert it.entry(request_id).num_tokens == (60,)


# gateways and leaders


def test_request_of_gateway_killed_before_start_is_redispatched() -> None:
    with cluster() as it:
        request_id = it.ask(router=1)
        it.home(request_id)
        it.kill_router(1)
        it.settle(60)
        assert it.entry(request_id).attempts == 2


def test_gateway_killed_with_undelivered_tokens_loses_none() -> None:
    with cluster() as it:
        request_id = it.ask(router=1)
        it.home(request_id)
        it.run_until(lambda: sum(it.entry(request_id).num_tokens) > 20)
        it.kill_router(1)


def test_resumed_gateway_finds_requests_taken_over() -> None:
    with cluster() as it:
        request_id = it.ask(router=1)
        it.until_has(request_id, 5)
        it.freeze_router(1, 2 * TOO_LONG_S)
        it.run_for(3 * TOO_LONG_S)


def test_resumed_leader_steps_down() -> None:
    with cluster(routers=3) as it:
        ids = [it.ask(asked, router=n) for n, asked in enumerate(ASKED[:6])]
        it.run_for(0.05)
        [old] = it.leaders()
        it.freeze_router(old, TOO_LONG_S)
        it.run_until(lambda: len(it.leaders()) == 2)
        more = [it.ask(asked, router=n) for n, asked in enumerate(ASKED[:6])]
        it.settle(60)
        it.run_for(TOO_LONG_S)
        assert len(it.leaders()) == 1
        assert old not in it.leaders()
        assert all(it.entry(request_id).losses == 0 for request_id in ids + more)


def until_asks(it: Played, name: str, router: int) -> None:
    """Run until a call of this router is on its way to the ledger."""
    asking = it.ledger.call
    asked = []

    async def call(process: VirtualLoop, called: str, *args: Any, **options: Any) -> Any:
        if (process, called) == (it.routers[router].process, name):
            asked.append(called)
        return await asking(process, called, *args, **options)

    it.ledger.call = call  # type: ignore[method-assign]
    it.run_until(lambda: bool(asked))
    it.ledger.call = asking  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["append", "release"])
def test_resumed_gateway_messages_are_fenced(name: str) -> None:
    """Meanwhile, another gateway runs the request on another worker."""
    with cluster(lease=0.8) as it:
        request_id = it.ask(LONGER, router=1)
        it.until_has(request_id, 5)
        before = it.entry(request_id)
        if name == "release":
            it.kill_worker(it.home(request_id))
        until_asks(it, name, router=1)
        it.freeze_router(1, TOO_LONG_S)
        it.run_for(TOO_LONG_S - 0.01)
        entry = it.entry(request_id)
        assert entry.state is State.RUNNING
        assert entry.gateway != before.gateway and entry.epoch != before.epoch


def test_resumed_leader_dispatches_are_fenced() -> None:
    with cluster() as it:
        [leader] = it.leaders()
        request_id = it.ask(router=1 - leader)
        until_asks(it, "dispatch", leader)
        it.freeze_router(leader, TOO_LONG_S)
        for index in (0, 1):
            it.kill_worker(index)
        it.run_until(lambda: len(it.leaders()) == 2)
        assert it.entry(request_id).state is State.QUEUED
        it.run_for(TOO_LONG_S)
        for index in (0, 1):
            it.start_worker(index)


def test_killed_leader_loses_no_queued_request() -> None:
    with cluster(routers=3, workers=1) as it:
        for n in range(24):
            it.ask(ASKED[n % 6], router=n)
        it.run_for(0.02)
        it.kill_router(it.leaders()[0])


def test_dispatch_unanswered_by_killed_leader_is_retried() -> None:
    with cluster(routers=3) as it:
        [leader] = it.leaders()
        left = chain([Trouble.ANSWER_LOST], repeat(None))
        it.ledger.trouble = lambda called: next(left) if called == "dispatch" else None
        request_id = it.ask(router=leader + 1)
        it.home(request_id)
        it.kill_router(leader)
        it.settle(60)
        assert it.entry(request_id).attempts == 2


def test_killed_gateway_requests_are_found_and_finished() -> None:
    with cluster(lease=0.8) as it:
        asked = Asked(LONG.prompt, (*LONG.options, ("on_disconnect", OnDisconnect.CONTINUE)))
        request_id = it.ask(asked, router=1, manners=Manners(leaves_after=5, away=20.0))
        it.until_has(request_id, 5)
        it.kill_router(1)
        it.run_until(lambda: it.entry(request_id).state is State.FINISHED, limit=10.0)


def test_frozen_gateway_requests_continue_elsewhere() -> None:
    with cluster(routers=3, workers=1) as it:
        [leader] = it.leaders()
        asked = Asked(SHORT.prompt, (*SHORT.options, ("on_disconnect", OnDisconnect.CONTINUE)))
        its_own = [it.ask(asked, router=leader + 1) for _ in range(60)]
        it.run_for(0.05)
        it.freeze_router((leader + 1) % 3, 20.0)
        others = [it.ask(SHORT, router=leader + 2) for _ in range(5)]
        it.run_until(
            lambda: all(it.entry(each).state is State.FINISHED for each in its_own + others),
            limit=8.0,
        )


@pytest.mark.long
def test_routers_killed_together_lose_nothing() -> None:
    with cluster() as it:
        for n in range(6):
            it.ask(ASKED[n], router=n)
        it.run_for(0.2)
        for index in (0, 1):
            it.kill_router(index)
            it.start_router(index)


# clients


@pytest.mark.parametrize("tokens", [1, 7, 8])
def test_cancel_racing_finish_is_consistent(tokens: int) -> None:
    with cluster() as it:
        request_id = it.ask(SHORT, manners=Manners(cancels_after=tokens))
        it.settle(60)
        is_whole = it.error(request_id) is None
        assert it.entry(request_id).state is (State.FINISHED if is_whole else State.CANCELLED)


def test_deadline_in_queue_computes_no_token() -> None:
    with cluster(workers=0) as it:
        request_id = it.ask(Asked(LONG.prompt, (*LONG.options, ("timeout_s", 0.5))))
        it.may_fail.add(request_id)
        it.settle(60)
        assert isinstance(it.error(request_id), DeadlineExceeded)
        it.start_worker(0)
        it.run_for(2.0)
        assert it.workers[0].engine.load().counters.prompt_tokens == 0


def test_deadline_during_dispatch_ends_request() -> None:
    """The request has left the leader's queue, and is not at a worker yet."""
    with cluster(routers=1, workers=0) as it:
        request_id = it.ask(Asked(LONG.prompt, (*LONG.options, ("timeout_s", 0.5))))
        it.may_fail.add(request_id)
        it.run_for(0.3)
        it.ledger.delay = 0.08
        it.start_worker(0)
        until_asks(it, "dispatch", router=0)
        assert it.error(request_id) is None
        it.settle(60)
        assert isinstance(it.error(request_id), DeadlineExceeded)
        it.run_for(1.0)


def test_deadline_ends_running_request() -> None:
    with cluster() as it:
        request_id = it.ask(Asked(LONG.prompt, (*LONG.options, ("timeout_s", 0.3))))
        it.may_fail.add(request_id)
        it.settle(60)
        assert isinstance(it.error(request_id), DeadlineExceeded)
        assert 5 < it.transcripts[request_id].num_tokens < 60
        assert it.entry(request_id).state is State.EXPIRED


def test_slow_reader_receives_all_tokens() -> None:
    with cluster() as it:
        it.ask(manners=Manners(pause=0.3))


@pytest.mark.parametrize("tokens", [1, 30, 59, 60])
def test_reconnecting_client_receives_all_tokens(tokens: int) -> None:
    with cluster() as it:
        it.ask(manners=Manners(leaves_after=tokens, away=0.2))


# mutants that the judgement must detect


def worker_loss_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttemptRunner, "worker_lost", lambda self, worker_id: None)


def a_worker_keeps_what_a_dead_gateway_started(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "end_session", lambda self, session: None)


def a_continuation_forgets_a_token(patch: pytest.MonkeyPatch) -> None:
    whole = messages.start

    def start(*arguments: Any, **options: Any) -> session_pb2.Start:
        message = whole(*arguments, **options)
        if message.output_ids:
            message.output_ids[-1] += 1
        return message

    patch.setattr(messages, "start", start)


def rollback_is_not_resynced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Resync, "_work", lambda self: iter(()))


def the_index_ignores_evictions(patch: pytest.MonkeyPatch) -> None:
    update = PrefixIndex.update
    patch.setattr(
        PrefixIndex,
        "update",
        lambda self, worker_id, stored, evicted: update(self, worker_id, stored, ()),
    )


def the_index_ignores_computed_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "settle", lambda self, worker_id, epoch: None)


def the_index_ignores_host_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "update_host", lambda self, worker_id, stored, evicted: None)


@pytest.mark.parametrize(
    "mutate",
    [
        worker_loss_is_not_reported,
        a_worker_keeps_what_a_dead_gateway_started,
        a_continuation_forgets_a_token,
        rollback_is_not_resynced,
        the_index_ignores_evictions,
        the_index_ignores_computed_prompts,
        the_index_ignores_host_memory,
    ],
)
def test_history_judgement_catches_mutant(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = Asked.of([2] * 530, temperature=0, max_tokens=8, timeout_s=0.1)
    for asked in (LONG, SHORT, TWO_CHUNKS, expired):
        undisturbed(asked)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)), cluster() as it:
        ended = it.ask(SHORT)
        before = it.ledger.snapshot()
        it.settle(60)
        it.ledger.restart(before)
        it.run_for(0.5)
        request_id = it.ask(router=1)
        it.until_has(request_id, 20)
        it.kill_worker(it.home(request_id))
        it.until_has(request_id, 30)
        it.kill_router(1)
        it.run_for(0.1)
        assert all(worker.sessions.is_idle for worker in it.workers.values())
        it.settle(60)
        assert it.entry(ended).state is State.FINISHED
        it.may_fail.add(it.ask(expired))
        it.settle(60)
        request_id = it.ask(TWO_CHUNKS)
        it.until_has(request_id, 1)
        [worker] = it.workers.values()
        worker.fill(WORKERS.num_blocks or 0)


def a_stale_epoch_stores_tokens(patch: pytest.MonkeyPatch) -> None:
    fenced = MemoryLedger._append

    def append(self: MemoryLedger, item: Append) -> Appended:
        record = self._find(item.request_id)
        epoch = record.entry.epoch if record else 0
        return fenced(self, replace(item, epoch=epoch or item.epoch))

    patch.setattr(MemoryLedger, "_append", append)


def a_stale_epoch_releases(patch: pytest.MonkeyPatch) -> None:
    fenced = MemoryLedger.release

    async def release(self: MemoryLedger, request_id: str, epoch: int, **options: Any) -> Entry:
        epoch = (await self.get(request_id)).epoch or epoch
        return await fenced(self, request_id, epoch, **options)

    patch.setattr(MemoryLedger, "release", release)


def a_stale_term_dispatches(patch: pytest.MonkeyPatch) -> None:
    fenced = MemoryLedger.dispatch

    async def dispatch(
        self: MemoryLedger, request_id: str, worker: str, epoch: int, term: int
    ) -> Entry:
        return await fenced(self, request_id, worker, epoch, self._term)

    patch.setattr(MemoryLedger, "dispatch", dispatch)


_THAWED_GATEWAY = test_resumed_gateway_messages_are_fenced
_THAWED_LEADER = test_resumed_leader_dispatches_are_fenced


@pytest.mark.parametrize(
    ("mutate", "history"),
    [
        (a_stale_epoch_stores_tokens, partial(_THAWED_GATEWAY, "append")),
        (a_stale_epoch_releases, partial(_THAWED_GATEWAY, "release")),
        (a_stale_term_dispatches, _THAWED_LEADER),
    ],
)
def test_history_judgement_detects_missing_fence(
    mutate: Callable[[pytest.MonkeyPatch], None],
    history: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fenced-off router generates its successor's tokens, so only the ledger detects it."""
    mutate(monkeypatch)
    with pytest.raises(Wrong, match="no fence"):
        history()


def test_history_judgement_passes_without_mutant() -> None:
    with pytest.raises(pytest.fail.Exception):
        test_history_judgement_catches_mutant(lambda patch: None, pytest.MonkeyPatch())


def test_router_stops_while_ledger_is_unavailable() -> None:
    with cluster() as it:
        it.until_has(it.ask(), 20)
        it.ledger.end_lease(20.0)
        it.stop_router(0)
        it.start_router(0)
        it.settle(60)
