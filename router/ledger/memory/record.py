"""Record of a request in a MemoryLedger: its entry, choices and events. Pure.

A record checks the offset and the number of appended tokens. All other changes are applied without
checks; memory.py checks first whether they are permitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from everlift.errors import OffsetOutOfRange
from everlift.messages import FinishReason, Request
from everlift.sampling import TokenLogprobs
from router.ledger.entry import (
    MAX_EVENTS,
    Append,
    Appended,
    Entry,
    Event,
    Explained,
    Reasserted,
    State,
    Stored,
    StoredChoice,
)
from router.ledger.memory.prompt_store import PromptStore


@dataclass(slots=True)
class Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def store(self, item: Append, max_tokens: int) -> Appended:
        """Store the tokens of ``item`` that are new, and the end of the choice; return OK.

        Nothing is stored if tokens before the item's offset are missing (GAP is returned), or if
        the choice would have more than ``max_tokens`` tokens (LIMIT).
        """
        known = len(self.tokens) - item.offset
        if known < 0:
            return Appended.GAP
        if len(self.tokens) + len(item.tokens[known:]) > max_tokens:
            return Appended.LIMIT
        self._extend(item.tokens[known:], item.logprobs[known:], item.finish_reason)
        return Appended.OK

    def merge(self, copy: StoredChoice, finish_reason: FinishReason | None) -> None:
        known = len(self.tokens)
        self._extend(copy.tokens[known:], copy.logprobs[known:], finish_reason)

    def _extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish_reason: FinishReason | None,
    ) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.finish_reason = self.finish_reason or finish_reason

    def is_repeated(self, item: Append) -> bool:
        """Return whether ``item`` repeats the append that ended this choice.

        A repetition has the same finish reason, and no tokens after the stored ones.
        """
        last = item.offset + len(item.tokens)
        return item.finish_reason is self.finish_reason and last <= len(self.tokens)

    def agrees(self, copy: StoredChoice, finish_reason: FinishReason | None) -> bool:
        """Return whether a router's copy of the choice is consistent with this one.

        ``copy`` has the copy's tokens from offset 0, ``finish_reason`` its end (None: not ended).
        Tokens and ends that both have must be equal, and neither may have tokens after the other's
        end.
        """
        known, other = len(self.tokens), len(copy.tokens)
        if tuple(self.tokens[:other]) != copy.tokens[:known]:
            return False
        if finish_reason and self.finish_reason and finish_reason is not self.finish_reason:
            return False
        return (not finish_reason or known <= other) and (not self.finish_reason or other <= known)

    def stored(self, offset: int) -> StoredChoice:
        """Return the tokens from ``offset`` on, with their log probabilities.

        Raises OffsetOutOfRange if ``offset`` is negative or beyond the tokens.
        """
        if not 0 <= offset <= len(self.tokens):
            raise OffsetOutOfRange(f"offset {offset} is not from 0 to {len(self.tokens)}")
        return StoredChoice(tuple(self.tokens[offset:]), tuple(self.logprobs[offset:]), offset)


@dataclass(slots=True)
class Record:
    """Record of a request.

    ``request`` lacks the prompt's chunks, which are in ``prompts``. ``last_chunk`` is the name of
    the last of these chunks; empty if there is none.
    """

    request: Request
    prompts: PromptStore
    last_chunk: str
    entry: Entry
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    explanation: bytes = b""
    #: epoch of the append that finished the request; 0: none
    finished_by: int = 0
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    @classmethod
    def blank(cls, request: Request, prompts: PromptStore, gateway: str, arrived: float) -> Self:
        """Return the record of a queued request without output, events or counted state changes.

        The prompt is added to ``prompts``. The caller then records the request's creation with
        ``move``, or its restoration with ``merge``.
        """
        entry = Entry(
            request.request_id,
            State.QUEUED,
            gateway,
            arrived,
            num_tokens=(0,) * request.n,
            finish_reasons=(None,) * request.n,
        )
        choices = tuple(Choice() for _ in range(request.n))
        rest, last_chunk = prompts.add(request)
        return cls(rest, prompts, last_chunk, entry, choices)

    @property
    def is_complete(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def update(self, **changes: Any) -> None:
        """Set the entry's fields in ``changes``, and update its token counts and finish reasons."""
        self.entry = replace(
            self.entry,
            num_tokens=tuple(len(choice.tokens) for choice in self.choices),
            finish_reasons=tuple(choice.finish_reason for choice in self.choices),
            **changes,
        )

    def move(self, now: float, name: str, detail: str, **changes: Any) -> None:
        """Record a state change: set the entry's fields in ``changes``, count it, and add an event.

        ``now`` is ledger time in seconds; ``name`` and ``detail`` are the fields ``move`` and
        ``detail`` of the event.
        """
        self.update(moves=self.entry.moves + 1, **changes)
        self.events.append(Event(now, name, detail))

    def store(self, item: Append) -> Appended:
        answer = self.choices[item.choice].store(item, self.request.max_tokens)
        if answer is Appended.OK:
            self.prompt_logprobs = self.prompt_logprobs or item.prompt_logprobs
            self.update(tally=item.tally or self.entry.tally)
            self._replace_request(item.request or self.request)
            self.explain(item.explanation if item.finish_reason else b"")
        return answer

    def _replace_request(self, request: Request) -> None:
        """Replace the request by one with other versions of model and adapter."""
        # The prompt is stored under names that depend on the salt with which it was opened.
        its = self.request
        self.request = replace(
            request, prompt_ids=its.prompt_ids, images=its.images, deadline=its.deadline
        )

    def is_of(self, explained: Explained) -> bool:
        """Return whether ``explained`` refers to this request, and the request is final."""
        its = self.entry
        is_same = (its.gateway, its.arrived) == (explained.gateway, explained.arrived)
        return its.state.is_final and is_same

    def explain(self, explanation: bytes) -> None:
        """Replace the explanation (report on where the time went), unless the new one is empty."""
        self.explanation = explanation or self.explanation

    def compare(self, copy: Stored) -> Reasserted:
        """Compare this record with the copy that a router sent.

        Returns DIVERGED if the two contradict each other. If this record is final, there is nothing
        to merge: returns OK if the copy is final or all its choices have ended, else ENDED. If this
        record is not final, returns TAKEN if another router owns the request and the copy does not
        count more state changes than this record. Otherwise returns OK: ``merge`` may merge the
        copy.
        """
        if copy.request.body_hash != self.request.body_hash or not self._agrees(copy):
            return Reasserted.DIVERGED
        if self.entry.state.is_final:
            return Reasserted.OK if _is_ended(copy) else Reasserted.ENDED
        knows_less = copy.entry.moves <= self.entry.moves
        if knows_less and copy.entry.gateway != self.entry.gateway:
            return Reasserted.TAKEN
        return Reasserted.OK

    def _agrees(self, copy: Stored) -> bool:
        reasons = copy.entry.finish_reasons
        triples = zip(self.choices, copy.choices, reasons, strict=True)
        return all(choice.agrees(its, reason) for choice, its, reason in triples)

    def merge(self, copy: Stored, now: float) -> None:
        """Merge the copy that a router sent into an unfinished record.

        ``compare`` must have returned OK for the copy. ``now`` is ledger time in seconds. Missing
        tokens and ends are added. State, owner and the other fields of the entry are replaced if
        the copy counts more state changes (``moves``). If all choices have then ended, the request
        becomes FINISHED.
        """
        before = self.entry.moves
        # Another arrival is that of another request, whose prompt may have other tokens.
        if copy.entry.arrived == self.entry.arrived:
            self._replace_request(copy.request)
        if copy.entry.moves > before:
            self.entry = copy.entry
            self.request = replace(self.request, deadline=copy.request.deadline)
        self._add(copy)
        if self.is_complete and not self.entry.state.is_final:
            self.finished_by = copy.entry.epoch
            moves = self.entry.moves + 1
            self.update(state=State.FINISHED, worker="", epoch=0, moves=moves)
        if self.entry.moves > before:
            self.events.append(Event(now, "reassert", copy.entry.gateway))
        self.explain(copy.explanation)

    def _add(self, copy: Stored) -> None:
        reasons = copy.entry.finish_reasons
        for choice, its, reason in zip(self.choices, copy.choices, reasons, strict=True):
            choice.merge(its, reason)
        self.prompt_logprobs = self.prompt_logprobs or copy.prompt_logprobs
        self.update()

    def stored(self, offsets: Sequence[int], now: float) -> Stored:
        """Return the request with the tokens of each choice from its offset on.

        ``offsets`` has one offset per choice; missing ones at its end are 0. Raises
        OffsetOutOfRange for an offset that is negative or beyond a choice's tokens, and for more
        offsets than choices.
        """
        if len(offsets) > len(self.choices):
            raise OffsetOutOfRange(
                f"{len(offsets)} offsets are too many for {len(self.choices)} choices"
            )
        padded = [*offsets, *[0] * (len(self.choices) - len(offsets))]
        choices = [choice.stored(at) for choice, at in zip(self.choices, padded, strict=True)]
        return Stored(
            self.entry,
            self.prompts.whole(self.request, self.last_chunk),
            tuple(choices),
            now,
            self.prompt_logprobs,
            self.explanation,
        )


def _is_ended(copy: Stored) -> bool:
    return copy.entry.state.is_final or all(copy.entry.finish_reasons)
