"""Ledgers against a model in plain Python, over random lives of a few requests.

What must hold after every step, whatever the model says:

    I1   what was read stays a prefix of what is read later
    I2   tokens come under the current epoch alone
    I3   each choice has as many tokens as the entry says, never more than max_tokens, and as many
         log probabilities where they are kept
    I4   an unfinished request belongs to one gateway, and is an orphan when that one is dead
    I5   nothing leaves a final state, and a choice that ended stays as it is
    I8   no more losses than attempts, and fewer than the limit unless it failed
    I11  an arrival keeps its time
    I12  no key is left over, and what belongs to a request has an end
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from everlift.errors import AttemptsExhausted, RequestConflict, UnknownRequest
from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs
from router.ledger.base import Ledger, NotQueued, StaleTerm
from router.ledger.config import LedgerConfig
from router.ledger.entry import (
    Append,
    Appended,
    Entry,
    State,
    Stored,
    StoredChoice,
    lost_too_often,
)
from router.ledger.memory import MemoryLedger
from router.ledger.redis_ledger import connect
from router.ledger.server import SCHEMA
from tests.ledgers import Clock, make_request, scored, valkey_server

T = TypeVar("T")
Run = Callable[[Awaitable[Any]], Any]

IDS = ("a", "b:0", "c", "d")
#: Those which random moves may end; the others live on until a worker finishes them.
MORTALS = IDS[:2]
#: Choices of each request, and alternatives of its tokens where log probabilities are kept.
NS = {"a": 1, "b:0": 3, "c": 1, "d": 2}
TOPS = {"a": None, "b:0": 2, "c": 0, "d": None}
PROMPT_LOGPROBS = scored(-0.25, -0.5)
GATEWAYS = ("g1", "g2")
AGES_S = 3600.0
MAX_LOSSES = 2
MAX_TOKENS = 4
#: Nonces whose doubles are all the same.
NONCES = range(2**64 - 64, 2**64)

requests = st.sampled_from(IDS)
mortals = st.sampled_from(MORTALS)
gateways = st.sampled_from(GATEWAYS)
nonces = st.sampled_from(NONCES)
finishes = st.sampled_from([None] * 8 + [FinishReason.STOP, FinishReason.LENGTH])
ends = st.sampled_from([State.FAILED, State.CANCELLED, State.EXPIRED])
tokens = st.lists(st.sampled_from([0, 255, 2**31, 2**32 - 1]), max_size=4).map(tuple)
#: Mostly of the first choice, sometimes of none that there is.
choices = st.sampled_from([0, 0, 0, 1, 1, 2, 3])


@dataclass
class LifeChoice:
    """One choice as it should be: a token and its log probabilities at each place."""

    places: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)
    reason: FinishReason | None = None

    def repeats(self, item: Append) -> bool:
        is_within = item.offset + len(item.tokens) <= len(self.places)
        return bool(self.reason) and item.finish_reason is self.reason and is_within

    def append(self, item: Append) -> Appended:
        if item.offset > len(self.places):
            return Appended.GAP
        if item.offset + len(item.tokens) > MAX_TOKENS:
            return Appended.LIMIT
        logprobs = item.logprobs or (None,) * len(item.tokens)
        places = list(zip(item.tokens, logprobs, strict=True))
        self.places += places[len(self.places) - item.offset :]
        self.reason = item.finish_reason
        return Appended.OK

    @property
    def stored(self) -> StoredChoice:
        logprobs = tuple(it for _, it in self.places if it is not None)
        return StoredChoice(tuple(token for token, _ in self.places), logprobs)


@dataclass
class Life:
    """One request as it should be."""

    body: bytes
    entry: Entry
    choices: tuple[LifeChoice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finished_by: int = 0
    #: every epoch that it ever had
    epochs: list[int] = field(default_factory=list)

    def put(self, **changes: Any) -> Entry:
        counts = tuple(len(choice.places) for choice in self.choices)
        reasons = tuple(choice.reason for choice in self.choices)
        self.entry = replace(self.entry, num_tokens=counts, finish_reasons=reasons, **changes)
        return self.entry

    def append(self, item: Append) -> Appended:
        if item.choice >= len(self.choices):
            return Appended.UNKNOWN
        choice = self.choices[item.choice]
        if self.entry.state.is_final:
            is_ours = item.epoch == self.finished_by and choice.repeats(item)
            return Appended.FINISHED if is_ours else Appended.ENDED
        if self.entry.state is State.QUEUED or item.epoch != self.entry.epoch:
            return Appended.FENCED
        if choice.reason:
            return Appended.OK if choice.repeats(item) else Appended.ENDED
        return self._store(choice, item)

    def _store(self, choice: LifeChoice, item: Append) -> Appended:
        answer = choice.append(item)
        if answer is Appended.OK:
            self.prompt_logprobs = self.prompt_logprobs or item.prompt_logprobs
            self.put()
        if answer is not Appended.OK or not all(self.entry.finish_reasons):
            return answer
        self.finished_by = item.epoch
        self.put(state=State.FINISHED, worker="", epoch=0)
        return Appended.FINISHED

    @property
    def stored(self) -> tuple[Entry, tuple[StoredChoice, ...], tuple[TokenLogprobs, ...]]:
        return self.entry, tuple(choice.stored for choice in self.choices), self.prompt_logprobs


class InMemory:
    """Where the machine's ledgers come from, and what is to be said of the keys that they leave."""

    async def open(self) -> Ledger:
        return MemoryLedger(Clock())

    async def check_keys(self, lives: Mapping[str, Life]) -> None:
        """There are none."""


class OnServer:
    def __init__(self, url: str) -> None:
        self._config = LedgerConfig(url=url)

    async def open(self) -> Ledger:
        """Each ledger has its own keys."""
        self._config = replace(self._config, key_prefix=secrets.token_hex(8))
        return await connect(self._config)

    async def check_keys(self, lives: Mapping[str, Life]) -> None:
        async with Redis.from_url(self._config.url, decode_responses=True) as client:
            await check_keys(client, f"{self._config.key_prefix}:{SCHEMA}:{{0}}:", lives)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self, run: Run, backend: InMemory | OnServer) -> None:
        super().__init__()
        self.run = run
        self.backend = backend
        self.ledger: Ledger = run(backend.open())
        self.lives: dict[str, Life] = {}
        self.leases = dict.fromkeys(GATEWAYS, False)
        self.leader = 0
        self.term = 0
        #: what was read before
        self.seen: dict[str, Stored] = {}
        self.again: Callable[[], Awaitable[object]] | None = None
        self.answer: object = None

    def teardown(self) -> None:
        self.run(self.ledger.close())
        self.run(self.backend.check_keys(self.lives))

    def ask(self, move: Callable[[], Awaitable[T]]) -> T | Exception:
        """The ledger's answer, or the error that it raised."""
        self.again = partial(self._outcome, move)
        self.answer = self.run(self._outcome(move))
        return self.answer  # type: ignore[return-value]

    async def _outcome(self, move: Callable[[], Awaitable[T]]) -> T | Exception:
        try:
            return await move()
        except (RequestConflict, UnknownRequest, NotQueued, StaleTerm) as error:
            return error

    # moves

    @initialize(term=nonces, epochs=st.permutations(NONCES[:8]))
    def begin(self, term: int, epochs: list[int]) -> None:
        """One request is unknown, one waits, the others run."""
        self.lead(term)
        for request_id, epoch in zip(IDS[1:], epochs, strict=False):
            self.open(request_id, GATEWAYS[0], b"1")
            if request_id is not IDS[1]:
                self.dispatch(request_id, epoch, term, is_stale=False)

    @rule(request_id=requests, gateway=gateways, body=st.sampled_from([b"1", b"1", b"1", b"2"]))
    def open(self, request_id: str, gateway: str, body: bytes) -> None:
        n, num_top = NS[request_id], TOPS[request_id]
        request = make_request(
            request_id,
            body=body,
            max_tokens=MAX_TOKENS,
            n=n,
            logprobs=num_top,
            prompt_logprobs=None if num_top is None else 0,
        )
        answer = self.ask(lambda: self.ledger.open(request, gateway))
        # Only within one call is the second try of an open known as such.
        self.again = None
        known = self.lives.get(request_id)
        if known and known.body != body:
            assert isinstance(answer, RequestConflict)
            return
        assert not isinstance(answer, Exception)
        if not known:
            self.seen.pop(request_id, None)
            entry = Entry(request_id, State.QUEUED, gateway, answer.entry.arrived)
            known = Life(body, entry, tuple(LifeChoice() for _ in range(n)))
            known.put()
            self.lives[request_id] = known
            assert answer.created
        assert answer.entry == known.entry

    @rule(
        request_id=requests,
        epoch=nonces,
        term=nonces,
        is_stale=st.sampled_from([False] * 4 + [True]),
    )
    def dispatch(self, request_id: str, epoch: int, term: int, is_stale: bool) -> None:
        term = term if is_stale else self.term
        life = self.lives.get(request_id)
        answer = self.ask(lambda: self.ledger.dispatch(request_id, "worker", epoch, term))
        if life and life.entry.epoch == epoch:
            assert answer == life.entry
        elif term != self.term:
            assert isinstance(answer, StaleTerm)
        elif life is None or life.entry.state is not State.QUEUED:
            assert isinstance(answer, NotQueued)
            assert answer.entry == (life and life.entry)
        else:
            life.epochs.append(epoch)
            attempts = life.entry.attempts + 1
            assert answer == life.put(
                state=State.RUNNING, worker="worker", epoch=epoch, attempts=attempts
            )

    @rule(
        items=st.lists(
            st.tuples(requests, choices, st.integers(0, 1), st.integers(-1, 1), tokens, finishes),
            max_size=4,
        )
    )
    def append_all(
        self, items: list[tuple[str, int, int, int, tuple[int, ...], FinishReason | None]]
    ) -> None:
        appends = [self._item(*item) for item in items]
        answers = self.ask(lambda: self.ledger.append(appends))
        expected = [
            self.lives[item.request_id].append(item)
            if item.request_id in self.lives
            else Appended.UNKNOWN
            for item in appends
        ]
        assert answers == expected
        # Of two items for one request the first one, repeated, may find what the second one did.
        if len({item.request_id for item in appends}) < len(appends):
            self.again = None

    def _item(
        self,
        request_id: str,
        choice: int,
        back: int,
        skew: int,
        new: tuple[int, ...],
        finish: FinishReason | None,
    ) -> Append:
        epoch, num_top = self._epoch(request_id, back), TOPS[request_id]
        offset = max(0, self._length(request_id, choice) + skew)
        if num_top is None:
            return Append(request_id, epoch, offset, new, choice, finish)
        # Another attempt may find the same token a little more or less probable.
        logprobs = scored(*(-1.0 - at - back for at in range(len(new))), num_top=num_top)
        prompt_logprobs = PROMPT_LOGPROBS if choice == offset == 0 else ()
        return Append(request_id, epoch, offset, new, choice, finish, logprobs, prompt_logprobs)

    def _length(self, request_id: str, choice: int) -> int:
        counts = self.lives[request_id].entry.num_tokens if request_id in self.lives else ()
        return counts[choice] if choice < len(counts) else 0

    def _epoch(self, request_id: str, back: int) -> int:
        """The epoch that a request had ``back`` dispatches ago, if it had so many."""
        epochs = self.lives[request_id].epochs if request_id in self.lives else []
        return ([1, 1, 1, *epochs])[-1 - back]

    @rule(
        request_id=requests,
        back=st.sampled_from([0, 0, 0, 1]),
        lost=st.sampled_from([True, True, False]),
    )
    def release(self, request_id: str, back: int, lost: bool) -> None:
        epoch = self._epoch(request_id, back)
        answer = self.ask(
            lambda: self.ledger.release(
                request_id, epoch, loss="why" if lost else None, max_losses=MAX_LOSSES
            )
        )
        life = self.lives.get(request_id)
        if life is None:
            assert isinstance(answer, UnknownRequest)
            return
        if life.entry.state is State.RUNNING and life.entry.epoch == epoch:
            life.put(state=State.QUEUED, worker="", epoch=0, losses=life.entry.losses + lost)
            if lost and life.entry.losses >= MAX_LOSSES:
                life.put(
                    state=State.FAILED,
                    error_slug=AttemptsExhausted.slug,
                    error_message=lost_too_often(MAX_LOSSES, "why"),
                )
        assert answer == life.entry

    @rule(request_id=requests, gateway=gateways, owner=gateways)
    def take_over(self, request_id: str, gateway: str, owner: str) -> None:
        answer = self.ask(lambda: self._taken_over(request_id, gateway, owner))
        life = self.lives.get(request_id)
        if life is None:
            assert isinstance(answer, UnknownRequest)
            return
        if not life.entry.state.is_final and life.entry.gateway == owner:
            life.put(state=State.QUEUED, gateway=gateway, worker="", epoch=0)
        assert not isinstance(answer, Exception)
        assert (answer.entry, answer.choices, answer.prompt_logprobs) == life.stored

    async def _taken_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        return replace(await self.ledger.take_over(request_id, gateway, owner), now=0.0)

    @rule(request_id=mortals)
    def discard(self, request_id: str) -> None:
        assert self.ask(lambda: self.ledger.discard(request_id)) is None
        if request_id in self.lives and self.lives[request_id].entry.state is State.QUEUED:
            del self.lives[request_id]
            del self.seen[request_id]

    @rule(request_id=mortals, state=ends, owner=st.none() | gateways)
    def end(self, request_id: str, state: State, owner: str | None) -> None:
        answer = self.ask(lambda: self.ledger.end(request_id, state, "slug", "message", owner))
        life = self.lives.get(request_id)
        if life is None:
            assert isinstance(answer, UnknownRequest)
            return
        if not life.entry.state.is_final and owner in (None, life.entry.gateway):
            life.put(state=state, worker="", epoch=0, error_slug="slug", error_message="message")
        assert answer == life.entry

    @rule()
    @precondition(lambda self: self.again is not None)
    def repeat(self) -> None:
        """The answer of the last move was lost, and it is made again."""
        assert self.again is not None
        answer = self.run(self.again())
        if isinstance(answer, Exception):
            assert type(answer) is type(self.answer)
        else:
            assert answer == self.answer

    # what random moves meet too seldom

    @rule(request_id=requests, choice=choices, skew=st.integers(-2, 1), new=tokens, finish=finishes)
    @precondition(lambda self: self._running())
    def go_on(
        self,
        request_id: str,
        choice: int,
        skew: int,
        new: tuple[int, ...],
        finish: FinishReason | None,
    ) -> None:
        """A worker brings more tokens, some that it brought before, or too few."""
        request_id = self._runs(request_id)
        self.append_all([(request_id, choice % NS[request_id], 0, skew, new, finish)])

    @rule(request_id=requests, new=tokens, finish=finishes.filter(bool))
    @precondition(lambda self: self._running())
    def end_all_choices(
        self, request_id: str, new: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        """A frame brings the end of every choice."""
        request_id = self._runs(request_id)
        self.append_all([(request_id, c, 0, 0, new[c:], finish) for c in range(NS[request_id])])

    @rule(request_id=requests, epoch=nonces, new=tokens, finish=finishes)
    @precondition(lambda self: self._running())
    def zombie(
        self, request_id: str, epoch: int, new: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        """A worker that was given up goes on while a second one has its request."""
        request_id = self._runs(request_id)
        life = self.lives[request_id]
        old = life.entry.epoch
        if epoch == old:
            return
        self.release(request_id, back=0, lost=False)
        self.dispatch(request_id, epoch, self.term, is_stale=False)
        item = Append(request_id, old, life.entry.num_tokens[0], (*new, 1), finish_reason=finish)
        assert self.ask(lambda: self.ledger.append([item])) == [Appended.FENCED]

    def _running(self) -> list[str]:
        return [i for i, life in self.lives.items() if life.entry.state is State.RUNNING]

    def _runs(self, request_id: str) -> str:
        """That one if it runs, else one that does."""
        running = self._running()
        return request_id if request_id in running else running[0]

    @rule(epoch=nonces, term=nonces)
    @precondition(lambda self: self._queued())
    def deposed(self, epoch: int, term: int) -> None:
        """A leader dispatches after another one took its place."""
        old = self.term
        self.run(self.ledger.resign(self.leader))
        self.leader = 0
        self.lead(term)
        if old != term:
            answer = self.ask(lambda: self.ledger.dispatch(self._queued()[0], "w", epoch, old))
            assert isinstance(answer, StaleTerm)

    def _queued(self) -> list[str]:
        return [i for i, life in self.lives.items() if life.entry.state is State.QUEUED]

    # who is there

    @rule(term=nonces)
    def lead(self, term: int) -> None:
        leads = self.run(self.ledger.lead("router", "address", term, AGES_S))
        assert leads == (self.leader in (0, term))
        if leads:
            self.leader = self.term = term
        # What was refused under one term may be refused for another reason under the next.
        self.again = None

    @rule()
    def resign(self) -> None:
        self.run(self.ledger.resign(self.leader))
        self.leader = 0

    @rule(gateway=gateways)
    def beat(self, gateway: str) -> None:
        assert self.run(self.ledger.beat(gateway, "address", AGES_S)).term == self.leader
        self.leases[gateway] = True

    @rule(gateway=gateways)
    def leave(self, gateway: str) -> None:
        self.run(self.ledger.leave(gateway))
        self.leases[gateway] = False

    # invariants

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        for request_id, stored in zip(IDS, self.run(self._read_all()), strict=True):
            if request_id not in self.lives:
                assert isinstance(stored, UnknownRequest)
                continue
            life = self.lives[request_id]
            assert (stored.entry, stored.choices, stored.prompt_logprobs) == life.stored
            self._check_history(stored)
            self.seen[request_id] = stored

    async def _read_all(self) -> list[Any]:
        return [await self._outcome(partial(self.ledger.read, i)) for i in IDS]

    def _check_history(self, stored: Stored) -> None:
        entry = stored.entry
        for count, choice in zip(entry.num_tokens, stored.choices, strict=True):  # I3
            assert count == len(choice.tokens) <= MAX_TOKENS
            kept = TOPS[entry.request_id] is not None
            assert len(choice.logprobs) == (count if kept else 0)
        assert (entry.epoch != 0) == (entry.worker != "") == (entry.state is State.RUNNING)
        assert entry.losses <= entry.attempts  # I8
        assert entry.losses < MAX_LOSSES or entry.state is State.FAILED
        before = self.seen.get(entry.request_id)
        if before is None:
            return
        for was, now, reason in zip(
            before.choices, stored.choices, before.entry.finish_reasons, strict=True
        ):
            assert now.tokens[: len(was.tokens)] == was.tokens  # I1
            assert now.logprobs[: len(was.logprobs)] == was.logprobs
            assert now == was or not reason  # I5
        assert entry.arrived == before.entry.arrived  # I11
        if before.entry.state.is_final:  # I5
            assert replace(stored, now=before.now) == before
        if stored.choices != before.choices:  # I2
            assert before.entry.state is State.RUNNING
            assert entry.epoch in (before.entry.epoch, 0)

    @invariant()
    def orphans_are_the_unfinished_of_dead_gateways(self) -> None:  # I4
        orphans = self.run(self.ledger.orphans(100))
        assert sorted(orphans) == sorted(
            request_id
            for request_id, life in self.lives.items()
            if not life.entry.state.is_final and not self.leases[life.entry.gateway]
        )


async def check_keys(client: Redis, root: str, lives: Mapping[str, Life]) -> None:
    """I12: no key is left over, and every request's key has an end."""
    keys = [key.removeprefix(root) async for key in client.scan_iter(f"{root}*")]
    of_requests = {key for key in keys if key.startswith(("r:", "t:", "l:", "p:"))}
    assert of_requests == {key for request_id in lives for key in keys_of(request_id)}
    for key in of_requests:
        assert await client.pttl(root + key) > 0
    unfinished = [life.entry for life in lives.values() if not life.entry.state.is_final]
    owners = {entry.gateway for entry in unfinished}
    assert {key for key in keys if key.startswith("owned:")} == {f"owned:{g}" for g in owners}
    assert await client.smembers(f"{root}owners") == owners
    for gateway in owners:
        owned = await client.smembers(f"{root}owned:{gateway}")
        assert owned == {entry.request_id for entry in unfinished if entry.gateway == gateway}


def keys_of(request_id: str) -> set[str]:
    of_choices = {f"t:{request_id}:{choice}" for choice in range(NS[request_id])}
    if TOPS[request_id] is None:
        return {f"r:{request_id}"} | of_choices
    logprobs = {f"l:{request_id}:{choice}" for choice in range(NS[request_id])}
    return {f"r:{request_id}", f"p:{request_id}"} | of_choices | logprobs


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.get_loop().run_until_complete


EXAMPLES = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    database=None,
    # Explaining a failure would take longer than finding it.
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


def check(run: Run, backend: InMemory | OnServer) -> None:
    # Its annotation asks for a class; its documentation takes what makes one.
    run_state_machine_as_test(lambda: LedgerMachine(run, backend), settings=EXAMPLES)  # type: ignore[arg-type]


def test_the_memory_ledger_behaves_as_the_model(run: Run) -> None:
    check(run, InMemory())


def test_the_ledger_on_valkey_behaves_as_the_model(run: Run) -> None:
    with valkey_server() as url:
        check(run, OnServer(url))
