"""Writer of output to the ledger, which by default stores output before clients may read it.

Clients may read output earlier with durability "behind", and for a limited time while the ledger
does not answer if ``on_ledger_loss`` is "available" (the default).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from everlift import logs
from everlift.errors import DataLoss, EverliftError, LedgerUnavailable
from router import event_loop
from router.config import RouterConfig
from router.event_loop import now
from router.ledger.base import Ledger
from router.ledger.entry import Append, Appended, Entry, State
from router.requests.registry import RequestRegistry
from router.requests.request import Choice, LiveRequest

log = logs.get_logger(__name__)

#: A request, an append and the ledger's answer to it. When the answer arrives, the request's id may
#: belong to another request.
Answered = tuple[LiveRequest, Append, Appended]

#: A request, the index of one of its choices, and an epoch.
_Key = tuple[LiveRequest, int, int]
#: Seconds between two attempts while the ledger is unavailable.
_RETRY_S = 0.1
#: Number of answers that are handled without yielding to the event loop.
_ANSWERS_PER_TURN = 64
#: Seconds after which an answer is late. Most of the time for which the event loop was stalled is
#: not counted.
_LATE_S = 0.3


class _Batches:
    """Appends to the ledger that are sent in batches, one batch at a time.

    ``on_answers`` and ``on_away`` are those of LedgerAppender.
    """

    def __init__(
        self,
        ledger: Ledger,
        on_answers: Callable[[Sequence[Answered]], None],
        on_away: Callable[[LiveRequest, Append], None],
    ) -> None:
        self._ledger = ledger
        self._on_answers = on_answers
        self._on_away = on_away
        self._pending: dict[_Key, Append] = {}
        self._more = asyncio.Event()

    def add(self, live: LiveRequest, append: Append) -> None:
        """Queue an append for the next batch, as ``LedgerAppender.add`` does."""
        key = (live, append.choice, append.epoch)
        earlier = self._pending.get(key)
        self._pending[key] = append if earlier is None else _joined(earlier, append)
        self._more.set()

    def take_ends(self) -> list[tuple[LiveRequest, Append]]:
        """Remove the pending appends that end their choices, and return them in order."""
        ends = {key: append for key, append in self._pending.items() if append.finish_reason}
        for key in ends:
            del self._pending[key]
        return [(live, append) for (live, *_), append in ends.items()]

    async def wait(self) -> None:
        """Wait until an append is pending."""
        await self._more.wait()

    async def send(self) -> None:
        """Send all pending appends to the ledger, and report its answers.

        If the ledger is unavailable, the appends are pending again after a pause.
        """
        batch, self._pending = self._pending, {}
        self._more.clear()
        if not batch:
            return
        try:
            answers = await self._append(batch)
        except LedgerUnavailable as error:
            log.warning("ledger unavailable", cause=str(error), appends=len(batch))
            self._requeue(batch)
            await asyncio.sleep(_RETRY_S)
            return
        pairs = zip(batch.items(), answers, strict=True)
        answered = [(live, append, answer) for ((live, *_), append), answer in pairs]
        for first in range(0, len(answered), _ANSWERS_PER_TURN):
            if first:
                await asyncio.sleep(0)
            self._on_answers(answered[first : first + _ANSWERS_PER_TURN])

    async def _append(self, batch: dict[_Key, Append]) -> list[Appended]:
        """Send a batch to the ledger and return its answers; call ``on_away`` while they are late.

        Answers are late after ``_LATE_S`` seconds. Most of the time in which this process stalled
        does not count (``event_loop.wait``). Raises LedgerUnavailable.
        """
        call = asyncio.ensure_future(self._ledger.append(list(batch.values())))
        try:
            while not await event_loop.wait(call, _LATE_S):
                for (live, *_), append in (*batch.items(), *self._pending.items()):
                    self._on_away(live, append)
            return call.result()
        finally:
            call.cancel()

    def _requeue(self, batch: dict[_Key, Append]) -> None:
        later, self._pending = self._pending, batch
        for (live, *_), append in later.items():
            self.add(live, append)
        for (live, *_), append in self._pending.items():
            self._on_away(live, append)
        self._more.set()


class LedgerAppender:
    """Sends appends (writes of output tokens) to the ledger in batches.

    ``on_answers`` is called with the ledger's answers to the appends. While the ledger does not
    answer, ``on_away`` is called repeatedly for every pending append. A batch gathers appends for
    ``gather_s`` seconds, or until one of them ends its choice. Appends that end their choices are
    sent in batches of their own, because they may wait for a replica; the other appends do not wait
    for them.
    """

    def __init__(
        self,
        ledger: Ledger,
        on_answers: Callable[[Sequence[Answered]], None],
        on_away: Callable[[LiveRequest, Append], None],
        gather_s: float = 0.0,
    ) -> None:
        self._tokens = _Batches(ledger, on_answers, on_away)
        self._ends = _Batches(ledger, on_answers, on_away)
        self._gather_s = gather_s
        self._has_end = asyncio.Event()

    def add(self, live: LiveRequest, append: Append) -> None:
        """Queue an append for the next batch.

        The append may overlap a pending append of the same choice and epoch, but must not leave a
        gap after it.
        """
        self._tokens.add(live, append)
        if append.finish_reason:
            self._has_end.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_tokens())
            tasks.create_task(self._send_ends())

    async def _send_tokens(self) -> None:
        while True:
            await self._tokens.wait()
            await self._gather()
            # No batch of tokens is on its way now. The ledger therefore has all tokens before an
            # end, except those that are joined with the end.
            for live, append in self._tokens.take_ends():
                self._ends.add(live, append)
            await self._tokens.send()

    async def _send_ends(self) -> None:
        while True:
            await self._ends.wait()
            await self._ends.send()

    async def _gather(self) -> None:
        if self._gather_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._gather_s):
                    await self._has_end.wait()
        self._has_end.clear()


def _joined(earlier: Append, later: Append) -> Append:
    """Return the union of two appends, which may overlap but must leave no gap."""
    first, second = sorted((earlier, later), key=lambda append: append.offset)
    overlap = first.offset + len(first.tokens) - second.offset
    assert overlap >= 0
    return replace(
        first,
        tokens=first.tokens + second.tokens[overlap:],
        logprobs=first.logprobs + second.logprobs[overlap:],
        finish_reason=later.finish_reason or earlier.finish_reason,
        tally=later.tally or earlier.tally,
        explanation=later.explanation or earlier.explanation,
        request=later.request or earlier.request,
    )


#: Seconds for which appends are batched if clients may read tokens before the ledger has them.
_GATHER_S = 0.02


class TokenWriter:
    """Writes output of owned requests to the ledger, and marks stored output as readable.

    ``on_difference`` is called with a request whose ledger entry differs from this router's state.
    ``on_failure`` is called with a request that cannot continue, and the error.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: RequestRegistry,
        ledger: Ledger,
        on_difference: Callable[[LiveRequest], None],
        on_failure: Callable[[LiveRequest, EverliftError], None],
    ) -> None:
        self._registry = registry
        self._on_difference = on_difference
        self._on_failure = on_failure
        self._is_write_behind = config.durability == "behind"
        self._max_unledgered_s = config.unledgered if config.on_ledger_loss == "available" else 0.0
        #: time since which the ledger does not answer appends, by whether they end a choice
        self._away_since: dict[bool, float] = {}
        self._appender = LedgerAppender(
            ledger, self._on_answers, self._on_away, _GATHER_S if self._is_write_behind else 0.0
        )

    async def run(self) -> None:
        """Write to the ledger until cancelled."""
        await self._appender.run()

    @property
    def is_away(self) -> bool:
        """Return whether the ledger does not answer appends."""
        return bool(self._away_since)

    def write(self, live: LiveRequest, choice: Choice, offset: int) -> None:
        """Queue the output of a choice from token ``offset`` on for the next write to the ledger.

        Clients can read the tokens once the ledger has stored them, and earlier in two cases.
        Durability "behind" makes them readable at once. The value "available" of
        ``on_ledger_loss`` makes them readable when the ledger's answer is late or a write fails.

        The ledger counts as away from the first late answer or failed write until its next answer.
        For appends that end a choice, only answers to such appends count. Neither case applies once
        the ledger has been away for ``RouterConfig.unledgered`` seconds, or as soon as it is away
        if ``on_ledger_loss`` is "strict".
        """
        append = live.append(choice, offset)
        self._appender.add(live, append)
        if self._is_write_behind and self._may_deliver_unledgered(append):
            live.make_all_readable(choice, now())

    def write_unstored(self, live: LiveRequest) -> None:
        """Queue all output that the ledger lacks, as part of the next write to the ledger."""
        for choice in live.choices:
            if not choice.is_stored:
                self._appender.add(live, live.append(choice, choice.stored))

    async def write_all(self, live: LiveRequest) -> None:
        """Write all output that the ledger lacks, and wait until the ledger has it.

        Return earlier if the request has ended.
        """
        self.write_unstored(live)
        await live.all_stored()

    def mark_stored(self, live: LiveRequest, entry: Entry) -> None:
        """Mark as stored the tokens that the ledger has according to ``entry``."""
        answered_at = now()
        for choice, count in zip(live.choices, entry.num_tokens, strict=True):
            self._mark(live, choice, count, answered_at)

    def _mark(self, live: LiveRequest, choice: Choice, count: int, answered_at: float) -> None:
        outputs = self._registry.counters.output_by_model
        outputs[live.request.model] += max(0, count - choice.stored)
        live.mark_stored(choice, count, answered_at)

    # the ledger's answers, or their absence

    def _on_answers(self, answered: Sequence[Answered]) -> None:
        answered_at = now()
        for live, append, answer in answered:
            self._note_answer(append)
            if self._registry.has(live):
                self._on_answer(live, append, answer, answered_at)

    def _note_answer(self, append: Append) -> None:
        # A ledger that stores ends stores all appends. The opposite is not true, because only ends
        # may wait for a replica.
        if _ends_choice(append):
            self._away_since.clear()
        else:
            self._away_since.pop(False, None)

    def _on_answer(
        self, live: LiveRequest, append: Append, answer: Appended, answered_at: float
    ) -> None:
        if answer is Appended.FINISHED:
            self._on_finished(live, answered_at)
        elif answer is Appended.OK:
            self._on_stored(live, append, answered_at)
        elif answer is Appended.LIMIT:
            error = DataLoss(f"the output exceeds max_tokens after offset {append.offset}")
            self._on_failure(live, error)
        elif append.epoch == live.epoch:
            self._on_difference(live)

    def _on_stored(self, live: LiveRequest, append: Append, answered_at: float) -> None:
        if append.request is not None:
            live.mark_request_stored(append.request)
        choice = live.choices[append.choice]
        self._mark(live, choice, append.offset + len(append.tokens), answered_at)
        if not append.finish_reason:
            return
        if all(other.is_complete for other in live.choices if other is not choice):
            # The ledger stored the ends of all choices but did not finish the request, so it lost
            # one of them.
            self._on_difference(live)
        else:
            choice.complete()
            live.wake()

    def _on_finished(self, live: LiveRequest, answered_at: float) -> None:
        for choice in live.choices:
            self._mark(live, choice, len(choice.output), answered_at)
        self._registry.finalize(live, _finished_entry(live))
        log.info("finished", **live.log_fields, tokens=live.num_tokens)

    def _on_away(self, live: LiveRequest, append: Append) -> None:
        self._away_since.setdefault(_ends_choice(append), now())
        if self._registry.has(live) and self._may_deliver_unledgered(append):
            live.make_all_readable(live.choices[append.choice], now())

    def _may_deliver_unledgered(self, append: Append) -> bool:
        """Return whether clients may read the append's tokens before the ledger has them."""
        ends = _ends_choice(append)
        # An end is stored no earlier than the tokens before it.
        times = (at for is_of_ends, at in self._away_since.items() if ends or not is_of_ends)
        since = min(times, default=None)
        return since is None or now() - since < self._max_unledgered_s


def _ends_choice(append: Append) -> bool:
    return append.finish_reason is not None


def _finished_entry(live: LiveRequest) -> Entry:
    """Return the request's ledger entry after the append that finished the request.

    The entry is derived from ``live``, without a call to the ledger.
    """
    entry = live.as_entry()
    return replace(entry, state=State.FINISHED, worker="", epoch=0, moves=entry.moves + 1)
