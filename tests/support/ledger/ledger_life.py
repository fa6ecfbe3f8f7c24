"""Model of a request, with which ledgers are compared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from everlift.errors import AttemptsExhausted
from everlift.messages import FinishReason, Request
from everlift.sampling import TokenLogprobs
from router.ledger.entry import (
    Append,
    Appended,
    Entry,
    Reasserted,
    State,
    Stored,
    StoredChoice,
    Tally,
    attempts_exhausted_message,
)

MAX_LOSSES = 2
MAX_TOKENS = 4


@dataclass
class LifeChoice:
    """Expected choice: a token and its log probabilities at each place."""

    places: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for token, _ in self.places]

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

    def contradicts(self, other: LifeChoice) -> bool:
        """Return whether the two cannot be states of one choice at different times."""
        if any(ours != its for ours, its in zip(self.tokens, other.tokens, strict=False)):
            return True
        if self.reason and other.reason:
            return (self.reason, len(self.places)) != (other.reason, len(other.places))
        ended, open_ = (self, other) if self.reason else (other, self)
        return bool(ended.reason) and len(open_.places) > len(ended.places)

    def learn(self, other: LifeChoice) -> None:
        self.places += other.places[len(self.places) :]
        self.reason = self.reason or other.reason

    @property
    def stored(self) -> StoredChoice:
        logprobs = tuple(it for _, it in self.places if it is not None)
        return StoredChoice(tuple(self.tokens), logprobs)


@dataclass
class Life:
    """Expected state of a request."""

    request: Request
    entry: Entry
    choices: tuple[LifeChoice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finished_by: int = 0
    #: all epochs so far
    epochs: list[int] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def opened(cls, request: Request, gateway: str, arrived: float) -> Life:
        entry = Entry(request.request_id, State.QUEUED, gateway, arrived)
        life = cls(request, entry, tuple(LifeChoice() for _ in range(request.n)))
        life.move("open", gateway)
        return life

    def copy(self) -> Life:
        choices = tuple(LifeChoice(list(it.places), it.reason) for it in self.choices)
        return replace(self, choices=choices, epochs=list(self.epochs), events=list(self.events))

    def put(self, **changes: Any) -> Entry:
        counts = tuple(len(choice.places) for choice in self.choices)
        reasons = tuple(choice.reason for choice in self.choices)
        self.entry = replace(self.entry, num_tokens=counts, finish_reasons=reasons, **changes)
        return self.entry

    def move(self, name: str, detail: str, **changes: Any) -> Entry:
        self.events.append((name, detail))
        return self.put(moves=self.entry.moves + 1, **changes)

    def dispatch(self, epoch: int) -> Entry:
        self.epochs.append(epoch)
        attempts = self.entry.attempts + 1
        running = {"state": State.RUNNING, "worker": "worker", "epoch": epoch}
        return self.move("dispatch", "worker", attempts=attempts, **running)

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
        if answer is not Appended.OK:
            return answer
        self.prompt_logprobs = self.prompt_logprobs or item.prompt_logprobs
        self.put(tally=item.tally or self.entry.tally)
        if not all(self.entry.finish_reasons):
            return answer
        self.finished_by = item.epoch
        self.move("finish", "", state=State.FINISHED, worker="", epoch=0)
        return Appended.FINISHED

    def release(self, epoch: int, loss: str | None, tally: Tally) -> Entry:
        if self.entry.state is not State.RUNNING or self.entry.epoch != epoch:
            return self.entry
        losses = self.entry.losses + bool(loss)
        self.move("release", loss or "", losses=losses, tally=tally)
        self.put(state=State.QUEUED, worker="", epoch=0)
        if loss and losses >= MAX_LOSSES:
            slug, message = AttemptsExhausted.slug, attempts_exhausted_message(MAX_LOSSES, loss)
            self.put(state=State.FAILED, error_slug=slug, error_message=message)
        return self.entry

    def take_over(self, gateway: str, owner: str) -> Stored:
        if not self.entry.state.is_final and self.entry.gateway == owner:
            queued = {"state": State.QUEUED, "worker": "", "epoch": 0}
            self.move("take_over", gateway, gateway=gateway, **queued)
        return self.stored

    def end(self, state: State, owner: str | None) -> Entry:
        if self.entry.state.is_final or owner not in (None, self.entry.gateway):
            return self.entry
        error = {"error_slug": "slug", "error_message": "message"}
        return self.move("end", "slug", state=state, worker="", epoch=0, **error)

    def reassert(self, reported: Life) -> tuple[Reasserted, Entry]:
        known = self.entry
        if self.contradicts(reported):
            return Reasserted.DIVERGED, known
        if not known.state.is_final:
            knows_more = reported.entry.moves > known.moves
            if not knows_more and reported.entry.gateway != known.gateway:
                return Reasserted.TAKEN, known
            self._learn(reported, knows_more)
            self.put()
            if self.entry.moves > known.moves:
                self.events.append(("reassert", reported.entry.gateway))
        is_over = reported.entry.state.is_final or all(reported.entry.finish_reasons)
        left = self.entry.state.is_final and not is_over
        return Reasserted.ENDED if left else Reasserted.OK, self.entry

    def contradicts(self, reported: Life) -> bool:
        if reported.request.body_hash != self.request.body_hash:
            return True
        pairs = zip(self.choices, reported.choices, strict=True)
        return any(choice.contradicts(its) for choice, its in pairs)

    def _learn(self, reported: Life, knows_more: bool) -> None:
        for choice, its in zip(self.choices, reported.choices, strict=True):
            choice.learn(its)
        self.prompt_logprobs = self.prompt_logprobs or reported.prompt_logprobs
        if knows_more:
            self.entry, self.epochs = reported.entry, list(reported.epochs)
        if all(choice.reason for choice in self.choices) and not self.entry.state.is_final:
            self.finished_by = reported.entry.epoch
            moves = self.entry.moves + 1
            self.put(state=State.FINISHED, worker="", epoch=0, moves=moves)

    @property
    def stored(self) -> Stored:
        choices = tuple(choice.stored for choice in self.choices)
        return Stored(self.entry, self.request, choices, 0.0, self.prompt_logprobs)
