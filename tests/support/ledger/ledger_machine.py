"""Random histories of a few requests, on a ledger and on a model in plain Python.

Invariants that are checked after every step, whatever the model says:

    I1   tokens that were read stay a prefix of what is read later
    I2   only the current epoch appends tokens
    I3   each choice has as many tokens as its entry says, at most max_tokens, and as many
         log probabilities if they are kept
    I4   an unfinished request belongs to one gateway, and is an orphan if that one is dead
    I5   only an erasure ends a final state, and a choice that ended does not change
    I6   each move counts once and leaves one event, and the number of moves never decreases
    I8   losses never exceed attempts, and reach the limit only if the request failed
    I11  an arrival keeps its time
    I12  no key is left over, and every key of a request has a time to live; each chunk of a
         prompt is kept exactly as long as a prompt has it
    I13  after a rollback and a resync, no client reads another token at an offset that was read
         before, and no abandoned epoch is accepted
    I14  every request is listed once, by its arrival, and no request that is gone
    I15  the newest runtime policy is in effect, whatever a server lost since
    I16  an object has the value and version of its last put, is listed once in its collection,
         and no version of its name is used twice, whatever a server lost since

Between any two steps a ledger may lose its last moves (``lose_what_came_since``), and moves may be
concurrent (``race``).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, TypeVar

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

from everlift.errors import RequestConflict, UnknownRequest
from everlift.hashes import CHUNK_SIZE
from everlift.images import Image
from everlift.messages import FinishReason
from everlift.request_id import tenant_of
from router.ledger.base import NOTHING, ClusterPolicy, Ledger, NotQueued, Position, StaleTerm
from router.ledger.entry import (
    MAX_EVENTS,
    Append,
    Appended,
    Dispatch,
    Entry,
    Reasserted,
    State,
    Stored,
    Tally,
)
from router.ledger.objects import ObjectConflict, StoredObject, object_name
from tests.support.ledger.ledger_backends import InMemory, OnServer
from tests.support.ledger.ledger_life import MAX_LOSSES, MAX_TOKENS, Life
from tests.support.ledger.ledgers import make_request, scored

T = TypeVar("T")
Run = Callable[[Awaitable[Any]], Any]

IDS = ("a", "b:0", "t/c", "t/d")
#: Requests that random moves may end; only a worker finishes the others.
MORTALS = IDS[:2]
#: Number of choices of each request, and of alternatives if it has log probabilities.
NS = {"a": 1, "b:0": 3, "t/c": 1, "t/d": 2}
TOPS = {"a": None, "b:0": 2, "t/c": 0, "t/d": None}
#: Lengths of the prompts, which all begin alike and share chunks.
PROMPT_TOKENS = {"a": 3 * CHUNK_SIZE + 1, "b:0": CHUNK_SIZE, "t/c": 2 * CHUNK_SIZE, "t/d": 3}
SESSIONS = {"a": "s", "b:0": "s", "t/c": "s", "t/d": ""}
_CAT, _DOG = (Image(bytes([number]) * 32, bytes([number]) * 99) for number in (1, 2))
IMAGES = {"a": (_CAT,), "b:0": (_DOG, _CAT), "t/c": (), "t/d": (_CAT, _CAT)}
PROMPT_LOGPROBS = scored(-0.25, -0.5)
GATEWAYS = ("g1", "g2")
#: Tenant, kind and id of each object.
OBJECTS = {
    object_name(*parts): parts
    for parts in (("", "things", "a"), ("t", "things", "a"), ("t", "things", "b"))
}
AGES_S = 3600.0
#: Nonces that all round to the same double.
NONCES = range(2**64 - 64, 2**64)


requests = st.sampled_from(IDS)
mortals = st.sampled_from(MORTALS)
gateways = st.sampled_from(GATEWAYS)
nonces = st.sampled_from(NONCES)
finishes = st.sampled_from([None] * 8 + [FinishReason.STOP, FinishReason.LENGTH])
ends = st.sampled_from([State.FAILED, State.CANCELLED, State.EXPIRED])
tokens = st.lists(st.sampled_from([0, 255, 2**31, 2**32 - 1]), max_size=4).map(tuple)
tallies = st.builds(
    Tally, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2**40), st.integers(0, 2**20)
)
#: Mostly the first choice, sometimes one that does not exist.
choices = st.sampled_from([0, 0, 0, 1, 1, 2, 3])

Item = tuple[str, int, int, int, tuple[int, ...], FinishReason | None]


@dataclass(frozen=True)
class Deed:
    """Move that is made concurrently with others: on the ledger, and in the model."""

    by_ledger: Callable[[], Awaitable[object]]
    in_model: Callable[[Life], object]


@dataclass(frozen=True)
class Kept:
    """State of the machine at one moment."""

    lives: dict[str, Life]
    seen: dict[str, Stored]
    forgotten: frozenset[tuple[str, float]]
    leases: dict[str, bool]
    leader: int
    term: int
    policy: ClusterPolicy
    objects: dict[str, StoredObject]


def copied(lives: dict[str, Life]) -> dict[str, Life]:
    return {request_id: life.copy() for request_id, life in lives.items()}


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self, run: Run, backend: InMemory | OnServer, tries: int = 1) -> None:
        super().__init__()
        self.run = run
        self.backend = backend
        #: number of times that every move is made
        self.tries = tries
        self.ledger: Ledger = run(backend.open())
        self.lives: dict[str, Life] = {}
        self.leases = dict.fromkeys(GATEWAYS, False)
        self.leader = 0
        self.term = 0
        self.policy = ClusterPolicy()
        #: all policies so far, the newest last
        self.policies = [ClusterPolicy()]
        self.objects: dict[str, StoredObject] = {}
        #: all versions of each object so far, the newest last
        self.versions: dict[str, list[int]] = {name: [] for name in OBJECTS}
        #: last state read, by request
        self.seen: dict[str, Stored] = {}
        #: ids and arrival times of erased requests
        self.forgotten: frozenset[tuple[str, float]] = frozenset()
        self.kept: Kept | None = None
        #: requests that the ledger lost, as their gateways know them
        self.held: dict[str, Life] = {}
        self.again: Callable[[], Awaitable[object]] | None = None
        self.answer: object = None

    def teardown(self) -> None:
        self.run(self.ledger.close())
        # After a failure, the keys are not checked as well.
        self.run(self.backend.finish(None if sys.exc_info()[0] else self.lives, self.objects))

    def ask(self, move: Callable[[], Awaitable[T]]) -> T | Exception:
        """Make a move; return the ledger's answer, or the error that it raised."""
        self.again = partial(self._outcome, move)
        self.answer = self.run(self._outcome(move))
        return self.answer  # type: ignore[return-value]

    async def _outcome(self, move: Callable[[], Awaitable[T]]) -> T | Exception:
        try:
            return await move()
        except (RequestConflict, UnknownRequest, NotQueued, StaleTerm) as error:
            return error

    def expect(self, request_id: str, answer: object, do: Callable[[Life], object]) -> None:
        """Apply ``do`` to the model, and check that it returns the ledger's ``answer``."""
        life = self.lives.get(request_id)
        if life is None:
            assert isinstance(answer, UnknownRequest)
        else:
            assert answer == do(life)

    # moves

    @initialize(term=nonces, epochs=st.permutations(NONCES[:8]))
    def begin(self, term: int, epochs: list[int]) -> None:
        """Start with one unknown request and one queued request; the others run."""
        self.lead(term)
        for request_id, epoch in zip(IDS[1:], epochs, strict=False):
            self.open(request_id, GATEWAYS[0], b"1")
            if request_id is not IDS[1]:
                self.dispatch(request_id, epoch, term, is_stale=False)

    @rule(
        request_id=requests,
        gateway=gateways,
        body=st.sampled_from([b"1", b"1", b"1", b"2"]),
        dispatch=st.none() | st.tuples(nonces, st.sampled_from([False] * 4 + [True])),
    )
    def open(
        self, request_id: str, gateway: str, body: bytes, dispatch: tuple[int, bool] | None = None
    ) -> None:
        n, num_top = NS[request_id], TOPS[request_id]
        request = make_request(
            request_id,
            body=body,
            max_tokens=MAX_TOKENS,
            n=n,
            logprobs=num_top,
            prompt_logprobs=None if num_top is None else 0,
            # Another body has another prompt.
            prompt_ids=(body[0], *range(1, PROMPT_TOKENS[request_id])),
            session_id=SESSIONS[request_id],
            images=IMAGES[request_id],
        )
        at_once = None
        if dispatch is not None:
            epoch, is_stale = dispatch
            at_once = Dispatch("worker", epoch, self.term ^ 1 if is_stale else self.term)
        answer = self.ask(lambda: self.ledger.open(request, gateway, None, at_once))
        # A retry of ``open`` is recognised only within one call.
        self.again = None
        known = self.lives.get(request_id)
        if known and known.request.body_hash != body:
            assert isinstance(answer, RequestConflict)
            return
        assert not isinstance(answer, Exception)
        if not known:
            self.seen.pop(request_id, None)
            life = self.lives[request_id] = Life.opened(request, gateway, answer.entry.arrived)
            if at_once is not None and at_once.term == self.term:
                life.dispatch(at_once.epoch)
        assert (answer.created, answer.entry) == (not known, self.lives[request_id].entry)

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
            assert answer == life.dispatch(epoch)

    @rule(
        items=st.lists(
            st.tuples(requests, choices, st.integers(0, 1), st.integers(-1, 1), tokens, finishes),
            max_size=4,
        ),
        tally=st.none() | tallies,
    )
    def append_all(self, items: list[Item], tally: Tally | None = None) -> None:
        appends = [replace(self._item(*item), tally=tally) for item in items]
        answers = self.ask(lambda: self.ledger.append(appends))
        for _ in range(self.tries):
            expected = [self._appended(item) for item in appends]
        assert answers == expected
        # With two items of one request, a repeat of the first may meet the effect of the second.
        if len({item.request_id for item in appends}) < len(appends):
            self.again = None

    def _appended(self, item: Append) -> Appended:
        life = self.lives.get(item.request_id)
        return life.append(item) if life else Appended.UNKNOWN

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
        # Another attempt may compute slightly different log probabilities.
        logprobs = scored(*(-1.0 - at - back for at in range(len(new))), num_top=num_top)
        prompt_logprobs = PROMPT_LOGPROBS if choice == offset == 0 else ()
        return Append(request_id, epoch, offset, new, choice, finish, logprobs, prompt_logprobs)

    def _length(self, request_id: str, choice: int) -> int:
        counts = self.lives[request_id].entry.num_tokens if request_id in self.lives else ()
        return counts[choice] if choice < len(counts) else 0

    def _epoch(self, request_id: str, back: int) -> int:
        """Return the epoch that a request had ``back`` dispatches ago, or 1 if it had none."""
        epochs = self.lives[request_id].epochs if request_id in self.lives else []
        return ([1, 1, 1, *epochs])[-1 - back]

    @rule(
        request_id=requests,
        back=st.sampled_from([0, 0, 0, 1]),
        loss=st.sampled_from(["why", "why", None]),
        tally=tallies,
    )
    def release(self, request_id: str, back: int, loss: str | None, tally: Tally = NOTHING) -> None:
        epoch = self._epoch(request_id, back)
        answer = self.ask(partial(self._release, request_id, epoch, loss, tally))
        self.expect(request_id, answer, lambda life: life.release(epoch, loss, tally))

    async def _release(self, request_id: str, epoch: int, loss: str | None, tally: Tally) -> Entry:
        return await self.ledger.release(
            request_id, epoch, loss=loss, max_losses=MAX_LOSSES, tally=tally
        )

    @rule(request_id=requests, gateway=gateways, owner=gateways)
    def take_over(self, request_id: str, gateway: str, owner: str) -> None:
        answer = self.ask(partial(self._take_over, request_id, gateway, owner))
        self.expect(request_id, answer, lambda life: life.take_over(gateway, owner))
        # A gateway that takes over from itself moves again in a second call.
        if gateway == owner:
            self.again = None

    async def _take_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        return replace(await self.ledger.take_over(request_id, gateway, owner), now=0.0)

    @rule(request_id=mortals, owner=gateways)
    def discard(self, request_id: str, owner: str) -> None:
        answer = self.ask(lambda: self.ledger.discard(request_id, owner))
        life = self.lives.get(request_id)
        if life and (life.entry.state, life.entry.gateway) != (State.QUEUED, owner):
            assert answer == life.entry
            return
        assert answer is None
        if life:
            self._lose(request_id)

    def _lose(self, request_id: str) -> None:
        del self.lives[request_id]
        self.seen.pop(request_id, None)

    @rule(request_id=mortals, state=ends, owner=st.none() | gateways)
    def end_request(self, request_id: str, state: State, owner: str | None) -> None:
        answer = self.ask(
            lambda: self.ledger.end_request(request_id, state, "slug", "message", owner)
        )
        self.expect(request_id, answer, lambda life: life.end(state, owner))

    @rule(request_id=requests)
    def erase(self, request_id: str) -> None:
        answer = self.ask(lambda: self.ledger.erase(request_id))
        life = self.lives.get(request_id)
        if life is None or not life.entry.state.is_final:
            self.expect(request_id, answer, lambda life: life.entry)
            return
        assert answer is None
        self.forgotten |= {(request_id, life.entry.arrived)}
        self._lose(request_id)
        # A retry of ``erase`` is recognised only within one call.
        self.again = None

    @rule()
    @precondition(lambda self: self.again is not None)
    def repeat(self) -> None:
        """Repeat the last move, as if its answer had been lost."""
        assert self.again is not None
        answer = self.run(self.again())
        if isinstance(answer, Exception):
            assert type(answer) is type(self.answer)
        else:
            assert answer == self.answer

    # rollbacks of the server

    @rule()
    def keep(self) -> None:
        """Save the ledger's present contents, for a later rollback."""
        self.run(self.backend.keep())
        self.kept = Kept(
            copied(self.lives),
            dict(self.seen),
            self.forgotten,
            dict(self.leases),
            self.leader,
            self.term,
            self.policy,
            dict(self.objects),
        )

    @rule()
    @precondition(lambda self: self.kept is not None)
    def lose_what_came_since(self) -> None:
        assert self.kept is not None
        self.run(self.backend.come_back())
        self.held |= self.lives
        kept = self.kept
        self.lives, self.seen, self.leases = copied(kept.lives), dict(kept.seen), dict(kept.leases)
        self.forgotten = kept.forgotten
        self.leader, self.term, self.policy = kept.leader, kept.term, kept.policy
        self.objects = dict(kept.objects)
        self.again = None

    @rule(request_id=requests)
    @precondition(lambda self: self.held)
    def reassert(self, request_id: str) -> None:
        """Resync a request that the ledger lost, whatever has happened since."""
        reported = self.held[request_id if request_id in self.held else next(iter(self.held))]
        request_id = reported.entry.request_id
        answer = self.ask(lambda: self.ledger.reassert(reported.stored))
        if (request_id, reported.entry.arrived) in self.forgotten:
            assert answer == (Reasserted.FORGOTTEN, reported.entry)
            return
        before = self.lives.get(request_id)
        life = self.lives[request_id] = before.copy() if before else self._unknown(reported)
        for _ in range(self.tries):
            expected = life.reassert(reported)
        assert answer == expected
        assert not isinstance(answer, Exception)
        self._check_resync(reported, before, life, answer[0])
        # The checks of a worker's progress do not apply to a resync.
        self.seen.pop(request_id, None)

    def _unknown(self, reported: Life) -> Life:
        life = Life.opened(reported.request, reported.entry.gateway, reported.entry.arrived)
        life.events.clear()
        life.put(moves=0)
        return life

    def _check_resync(
        self, reported: Life, before: Life | None, life: Life, answer: Reasserted
    ) -> None:
        for was, now, its in zip(
            (before or life).choices, life.choices, reported.choices, strict=True
        ):
            assert now.tokens[: len(was.tokens)] == was.tokens  # I1
            if answer is Reasserted.OK:  # I13
                shared = min(len(now.tokens), len(its.tokens))
                assert now.tokens[:shared] == its.tokens[:shared]
                assert shared == len(its.tokens) or (before and before.entry.state.is_final)
        if answer is Reasserted.OK and reported.entry.moves > (before.entry.moves if before else 0):
            assert life.entry.state.is_final or life.entry.epoch == reported.entry.epoch

    # situations that random moves reach too rarely

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
        """Append a worker's tokens: new ones, repeated ones, or some after a gap."""
        request_id = self._runs(request_id)
        self.append_all([(request_id, choice % NS[request_id], 0, skew, new, finish)])

    @rule(request_id=requests, new=tokens, finish=finishes.filter(bool), tally=tallies)
    @precondition(lambda self: self._running())
    def end_all_choices(
        self, request_id: str, new: tuple[int, ...], finish: FinishReason | None, tally: Tally
    ) -> None:
        """End every choice with one append."""
        request_id = self._runs(request_id)
        items = [(request_id, c, 0, 0, new[c:], finish) for c in range(NS[request_id])]
        self.append_all(items, tally)

    @rule(request_id=requests, epoch=nonces, new=tokens, finish=finishes)
    @precondition(lambda self: self._running())
    def zombie(
        self, request_id: str, epoch: int, new: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        """Let a worker append after its request was dispatched to another worker."""
        request_id = self._runs(request_id)
        old = self.lives[request_id].entry.epoch
        if epoch != old:
            self.release(request_id, back=0, loss=None)
            self.dispatch(request_id, epoch, self.term, is_stale=False)
            self._is_fenced(request_id, old, new, finish)

    def _is_fenced(
        self, request_id: str, epoch: int, new: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        offset = self.lives[request_id].entry.num_tokens[0]
        item = Append(request_id, epoch, offset, (*new, 1), finish_reason=finish)
        assert self.ask(lambda: self.ledger.append([item])) == [Appended.FENCED]

    @rule(request_id=requests, epoch=nonces, new=tokens, finish=finishes)
    @precondition(lambda self: self._running())
    def zombie_gateway(
        self, request_id: str, epoch: int, new: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        """Let a gateway without a lease write after another one has taken over its request."""
        request_id = self._runs(request_id)
        entry = self.lives[request_id].entry
        successor = GATEWAYS[entry.gateway == GATEWAYS[0]]
        if epoch == entry.epoch:
            return
        self.end_lease(entry.gateway)
        assert request_id in self.run(self.ledger.orphans(100))
        self.take_over(request_id, successor, entry.gateway)
        self.dispatch(request_id, epoch, self.term, is_stale=False)
        self._is_fenced(request_id, entry.epoch, new, finish)
        self.release(request_id, back=1, loss="why")
        self.end_request(request_id, State.FAILED, entry.gateway)

    @rule(
        request_id=requests,
        epochs=st.permutations(NONCES[:8]),
        new=st.lists(tokens, min_size=3, max_size=3),
        finish=finishes,
        is_lost_early=st.booleans(),
    )
    @precondition(lambda self: self._running())
    def rollback(
        self,
        request_id: str,
        epochs: list[int],
        new: list[tuple[int, ...]],
        finish: FinishReason | None,
        is_lost_early: bool,
    ) -> None:
        """Roll the server back by a redispatch and its tokens, and resync all requests."""
        request_id = self._runs(request_id)
        given_up = self.lives[request_id].entry.epoch
        epoch = next(it for it in epochs if it not in self.lives[request_id].epochs[-4:])
        if is_lost_early:
            self.keep()
        self.append_all([(request_id, 0, 0, 0, new[0], None)])
        self.release(request_id, back=0, loss=None)
        if not is_lost_early:
            self.keep()
        self.dispatch(request_id, epoch, self.term, is_stale=False)
        self.append_all([(request_id, c, 0, 0, new[1], finish) for c in range(NS[request_id])])
        before = {it: life.stored for it, life in self.lives.items()}
        self.held.clear()
        self.lose_what_came_since()
        for lost in list(self.held):
            self.reassert(lost)
        assert {it: self.lives[it].stored for it in before} == before  # I13
        if not before[request_id].entry.state.is_final:
            self._is_fenced(request_id, given_up, new[2], finish)

    @rule(
        request_id=requests,
        epochs=st.permutations(NONCES[8:16]),
        new=st.lists(tokens, min_size=2, max_size=2),
        ends=st.lists(finishes | st.just(FinishReason.STOP), min_size=2, max_size=2),
        detours=st.lists(st.integers(0, 2), min_size=2, max_size=2),
        has_successor=st.booleans(),
        shared=st.none() | st.integers(0, 4),
        is_ended=st.booleans(),
    )
    @precondition(lambda self: self._running())
    def estrange(
        self,
        request_id: str,
        epochs: list[int],
        new: list[tuple[int, ...]],
        ends: list[FinishReason | None],
        detours: list[int],
        has_successor: bool,
        shared: int | None,
        is_ended: bool,
    ) -> None:
        """Roll the server back, and resync a request after it has progressed differently.

        Both histories of the request share the first ``shared`` new tokens; None draws other ones.
        With ``has_successor``, the other gateway takes the request over.
        """
        request_id = self._runs(request_id)
        theirs = new[1] if shared is None else new[0][:shared]
        self.keep()
        self._wander(request_id, epochs[:2], detours[0], new[0], ends[0])
        self.held.clear()
        self.lose_what_came_since()
        owner = self.lives[request_id].entry.gateway
        if has_successor:
            self.take_over(request_id, GATEWAYS[owner == GATEWAYS[0]], owner)
            self.dispatch(request_id, epochs[4], self.term, is_stale=False)
        self._wander(request_id, epochs[2:4], detours[1], theirs, ends[1])
        if is_ended and request_id in MORTALS:
            self.end_request(request_id, State.FAILED, None)
        self.reassert(request_id)

    def _wander(
        self,
        request_id: str,
        epochs: list[int],
        detours: int,
        new: tuple[int, ...],
        finish: FinishReason | None,
    ) -> None:
        """Redispatch the request ``detours`` times, then append to its first and last choice."""
        for epoch in epochs[:detours]:
            self.release(request_id, back=0, loss=None)
            self.dispatch(request_id, epoch, self.term, is_stale=False)
        for choice in sorted({0, NS[request_id] - 1}):
            self.append_all([(request_id, choice, 0, 0, new, finish)])

    @rule(
        request_id=requests,
        choice=choices,
        new=tokens,
        finish=finishes.filter(bool),
        others=st.lists(
            st.tuples(st.integers(0, 1), st.integers(-2, 1), tokens, finishes), max_size=3
        ),
    )
    @precondition(lambda self: self._running())
    def go_on_after_the_end(
        self,
        request_id: str,
        choice: int,
        new: tuple[int, ...],
        finish: FinishReason | None,
        others: list[tuple[int, int, tuple[int, ...], FinishReason | None]],
    ) -> None:
        """End a choice, repeat that append, and append more to the ended choice."""
        request_id = self._runs(request_id)
        choice %= NS[request_id]
        self.append_all([(request_id, choice, 0, 0, new[:1], finish)])
        self.repeat()
        for back, skew, more, end in others:
            self.append_all([(request_id, choice, back, skew, more, end)])

    def _running(self) -> list[str]:
        return [i for i, life in self.lives.items() if life.entry.state is State.RUNNING]

    def _runs(self, request_id: str) -> str:
        """Return the given request if it runs, else another running one."""
        running = self._running()
        return request_id if request_id in running else running[0]

    @rule(epoch=nonces, term=nonces)
    @precondition(lambda self: self._queued())
    def deposed(self, epoch: int, term: int) -> None:
        """Let a leader dispatch after another one has replaced it."""
        old = self.term
        self.run(self.ledger.resign(self.leader))
        self.leader = 0
        self.lead(term)
        if old != term:
            answer = self.ask(lambda: self.ledger.dispatch(self._queued()[0], "w", epoch, old))
            assert isinstance(answer, StaleTerm)

    def _queued(self) -> list[str]:
        return [i for i, life in self.lives.items() if life.entry.state is State.QUEUED]

    @rule(
        request_id=requests,
        names=st.lists(
            st.sampled_from(["finish", "finish", "release", "successor", "other successor", "end"]),
            min_size=2,
            max_size=3,
        ),
        new=tokens,
    )
    # A repeated move may be made after the other moves.
    @precondition(lambda self: self.tries == 1 and self._running())
    def race(self, request_id: str, names: list[str], new: tuple[int, ...]) -> None:
        """Check that concurrent moves have the same result as in some sequential order."""
        request_id = self._runs(request_id)
        deeds = [self._deed(request_id, name, new) for name in names]
        answers = self.run(self._all_at_once(deeds))
        stored = self.run(self._stored(request_id))
        outcomes = [
            self._in_turn(self.lives[request_id], deeds, order)
            for order in permutations(range(len(deeds)))
        ]
        matching = [life for life, its in outcomes if its == answers and life.stored == stored]
        assert matching
        self.lives[request_id] = matching[0]
        self.again = None

    def _deed(self, request_id: str, name: str, new: tuple[int, ...]) -> Deed:
        entry = self.lives[request_id].entry
        finish = self._item(request_id, 0, 0, 0, new, FinishReason.STOP)
        successor = GATEWAYS[name == "successor"]
        match name:
            case "finish":
                return Deed(
                    lambda: self.ledger.append([finish]), lambda life: [self._tried(life, finish)]
                )
            case "release":
                return Deed(
                    lambda: self._release(request_id, entry.epoch, "why", Tally()),
                    lambda life: life.release(entry.epoch, "why", Tally()),
                )
            case "end":
                return Deed(
                    lambda: self.ledger.end_request(request_id, State.FAILED, "slug", "message"),
                    lambda life: life.end(State.FAILED, None),
                )
            case _:
                return Deed(
                    lambda: self._take_over(request_id, successor, entry.gateway),
                    lambda life: life.take_over(successor, entry.gateway),
                )

    def _tried(self, life: Life, item: Append) -> Appended:
        for _ in range(self.tries):
            answer = life.append(item)
        return answer

    async def _all_at_once(self, deeds: Sequence[Deed]) -> list[object]:
        return await asyncio.gather(*(deed.by_ledger() for deed in deeds))

    def _in_turn(
        self, life: Life, deeds: Sequence[Deed], order: Sequence[int]
    ) -> tuple[Life, list[object]]:
        life, answers = life.copy(), dict[int, object]()
        for index in order:
            answers[index] = deeds[index].in_model(life)
        return life, [answers[index] for index in range(len(deeds))]

    async def _stored(self, request_id: str) -> Stored:
        return replace(await self.ledger.read(request_id), now=0.0)

    # listings

    @rule(
        tenant=st.sampled_from(["", "t", "nobody"]),
        states=st.sets(st.sampled_from(State), max_size=3),
        limit=st.integers(1, len(IDS)),
    )
    def list_requests(self, tenant: str, states: set[State], limit: int) -> None:  # I14
        entries = [life.entry for life in self.lives.values()]
        expected = [
            entry
            for entry in sorted(entries, reverse=True, key=lambda it: (it.arrived, it.request_id))
            if (not tenant or tenant_of(entry.request_id) == tenant)
            and (not states or entry.state in states)
        ]
        assert self.run(self._listed(tenant, states, limit)) == expected

    async def _listed(self, tenant: str, states: set[State], limit: int) -> list[Entry]:
        found: list[Entry] = []
        last: Position | None = None
        while True:
            page = await self.ledger.list_requests(tenant, states=states, limit=limit, before=last)
            found += page.entries
            if (last := page.last) is None:
                return found

    # runtime policy

    @rule(
        changes=st.dictionaries(
            st.sampled_from(["order", "max_queued", "ageing_factor"]),
            st.sampled_from(["", "1", "2"]),
        )
    )
    def set_policy(self, changes: dict[str, str]) -> None:
        before = self.policy
        self.policy = self.run(self.ledger.set_policy(changes))
        values = {name: text for name, text in {**before.values, **changes}.items() if text}
        assert self.policy.values == values
        assert (values == before.values) == (self.policy.version == before.version)
        assert self.policy.version >= before.version
        self.policies.append(self.policy)

    @rule(back=st.integers(0, 3))
    def restore_policy(self, back: int) -> None:  # I15
        """Restore a policy that a router knows: the last one or an earlier one."""
        known = self.policies[max(0, len(self.policies) - 1 - back)]
        expected = max(self.policy, known, key=lambda it: it.version)
        self.policy = self.run(self.ledger.restore_policy(known))
        assert self.policy == expected

    # objects

    @rule(
        name=st.sampled_from([*OBJECTS]),
        expected=st.sampled_from(["present", "present", "present", "old", "none"]),
        data=st.binary(max_size=2),
    )
    def put_object(self, name: str, expected: str, data: bytes) -> None:  # I16
        known = self.objects[name].version if name in self.objects else 0
        version = {
            "present": known,
            "old": next(iter(self.versions[name]), 1),
            "none": 0,
        }[expected]
        try:
            new = self.run(self.ledger.put_object(name, data, version))
        except ObjectConflict as conflict:
            assert conflict.version == known != version
            return
        assert version == known
        assert new > max([0, *self.versions[name]])
        self.versions[name].append(new)
        self.objects[name] = StoredObject(data, new)

    @rule(name=st.sampled_from([*OBJECTS]))
    def delete_object(self, name: str) -> None:
        deleted = self.run(self.ledger.delete_object(name))
        assert deleted == (self.objects.pop(name, None) is not None)

    @rule(
        tenant=st.sampled_from(["", "t"]),
        after=st.sampled_from(["", *OBJECTS]),
        limit=st.integers(1, len(OBJECTS)),
    )
    def list_objects(self, tenant: str, after: str, limit: int) -> None:  # I16
        names = [name for name in self.objects if OBJECTS[name][0] == tenant]
        expected = [name for name in sorted(names, reverse=True) if not after or name < after]
        listed = self.run(self.ledger.list_objects("things", tenant, after, limit))
        assert [*listed] == expected[:limit]

    # leader and gateways

    @rule(term=nonces)
    def lead(self, term: int) -> None:
        leads = self.run(self.ledger.lead("router", "address", term, AGES_S))
        assert leads == (self.leader in (0, term))
        if leads:
            self.leader = self.term = term
        # A move refused under one term may be refused for another reason under the next.
        self.again = None

    @rule(term=nonces, is_last=st.booleans())
    def renew(self, term: int, is_last: bool) -> None:
        """Renew the lease under the last term or an earlier one."""
        term = self.term if is_last else term
        renewed = self.run(self.ledger.lead("router", "address", term, AGES_S, is_new=False))
        assert renewed == (term == self.term)
        if renewed:
            self.leader = term
        self.again = None

    @rule()
    def resign(self) -> None:
        self.run(self.ledger.resign(self.leader))
        self.leader = 0

    @rule(gateway=gateways)
    def heartbeat(self, gateway: str) -> None:
        membership = self.run(self.ledger.heartbeat(gateway, "address", AGES_S))
        assert membership.term == self.leader
        assert membership.policy_version == self.policy.version
        self.leases[gateway] = True

    @rule(gateway=gateways)
    def end_lease(self, gateway: str) -> None:
        self.run(self.ledger.end_lease(gateway))
        self.leases[gateway] = False

    # invariants

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        for request_id, stored in zip(IDS, self.run(self.backend.read(IDS)), strict=True):
            life = self.lives.get(request_id)
            assert stored == (life and life.stored)
            if stored is not None:
                self._check_history(stored)
                self.seen[request_id] = stored

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
        if before is None or before.entry.moves != entry.moves:
            self._check_events(entry)
        if before is not None:
            self._check_change(before, stored)

    def _check_change(self, before: Stored, stored: Stored) -> None:
        entry = stored.entry
        for was, now, reason in zip(
            before.choices, stored.choices, before.entry.finish_reasons, strict=True
        ):
            assert now.tokens[: len(was.tokens)] == was.tokens  # I1
            assert now.logprobs[: len(was.logprobs)] == was.logprobs
            assert now == was or not reason  # I5
        assert entry.arrived == before.entry.arrived  # I11
        assert entry.moves >= before.entry.moves  # I6
        if before.entry.state.is_final:  # I5
            assert stored == before
        if stored.choices != before.choices:  # I2
            assert before.entry.state is State.RUNNING
            assert entry.epoch in (before.entry.epoch, 0)

    def _check_events(self, entry: Entry) -> None:  # I6
        events = self.run(self.ledger.events(entry.request_id))
        expected = self.lives[entry.request_id].events[-MAX_EVENTS:]
        assert [(event.move, event.detail) for event in events] == expected
        times = [event.time for event in events]
        assert times == sorted(times)

    @invariant()
    def what_was_set_is_set(self) -> None:
        assert self.run(self.ledger.policy()) == self.policy

    @invariant()
    def objects_are_as_they_were_put(self) -> None:  # I16
        assert self.run(self._objects()) == [self.objects.get(name) for name in OBJECTS]

    async def _objects(self) -> list[StoredObject | None]:
        return await asyncio.gather(*map(self.ledger.get_object, OBJECTS))

    @invariant()
    def orphans_are_the_unfinished_of_dead_gateways(self) -> None:  # I4
        orphans = self.run(self.ledger.orphans(100))
        assert sorted(orphans) == sorted(
            request_id
            for request_id, life in self.lives.items()
            if not life.entry.state.is_final and not self.leases.get(life.entry.gateway)
        )


#: Settings of the search; ``check`` omits the explain phase, which takes longer than the search.
_SEARCH = settings(
    stateful_step_count=40,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def check(
    run: Run,
    backend: InMemory | OnServer,
    histories: int,
    *,
    tries: int = 1,
    shrinks: bool = True,
) -> None:
    """Run ``histories`` random histories; raise the error of the first one that fails.

    The ledger makes every move ``tries`` times. With ``shrinks``, a failing history is shrunk
    first.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrinks else [])]
    # The annotation requires a class, but the documentation permits a factory.
    run_state_machine_as_test(
        lambda: LedgerMachine(run, backend, tries),  # type: ignore[arg-type]
        settings=settings(_SEARCH, max_examples=histories, phases=phases),
    )
