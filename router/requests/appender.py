"""Tokens on their way into the ledger: one append in flight, whatever comes meanwhile joins the
next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from everlift import logs
from everlift.errors import LedgerUnavailable
from router import stalls
from router.ledger.base import Ledger
from router.ledger.entry import Append, Appended
from router.requests.request import LiveRequest

log = logs.get(__name__)

#: Of which request, what the ledger was told, and what it says to it. By then another request may
#: have the same id.
Answered = tuple[LiveRequest, Append, Appended]

#: A request, one of its choices, and an epoch.
_Key = tuple[LiveRequest, int, int]
#: Until a ledger that is away is asked again.
_RETRY_S = 0.1
#: Answers before others have their turn of the event loop.
_AT_ONCE = 64
#: An answer is late that takes longer than this while the event loop keeps up.
_LATE_S = 0.3


class Appender:
    """``on_answers`` hears the ledger's answer to every append; ``on_away``, while the ledger does
    not answer, hears of every append that waits for it. Appends gather for ``gather_s`` seconds, or
    until one that ends its choice comes."""

    def __init__(
        self,
        ledger: Ledger,
        on_answers: Callable[[Sequence[Answered]], None],
        on_away: Callable[[LiveRequest, Append], None],
        gather_s: float = 0.0,
    ) -> None:
        self._ledger = ledger
        self._on_answers = on_answers
        self._on_away = on_away
        self._gather_s = gather_s
        self._pending: dict[_Key, Append] = {}
        self._more = asyncio.Event()
        self._has_end = asyncio.Event()

    def put(self, live: LiveRequest, append: Append) -> None:
        """Appends of one epoch may overlap what still waits here, but leave no gap behind it."""
        key = (live, append.choice, append.epoch)
        earlier = self._pending.get(key)
        self._pending[key] = append if earlier is None else _joined(earlier, append)
        if append.finish_reason:
            self._has_end.set()
        self._more.set()

    async def run(self) -> None:
        while True:
            await self._more.wait()
            await self._gather()
            batch, self._pending = self._pending, {}
            try:
                answers = await self._append(batch)
            except LedgerUnavailable as error:
                log.warning("ledger away", cause=str(error), appends=len(batch))
                self._put_back(batch)
                await asyncio.sleep(_RETRY_S)
                continue
            told = zip(batch.items(), answers, strict=True)
            answered = [(live, append, answer) for ((live, *_), append), answer in told]
            for first in range(0, len(answered), _AT_ONCE):
                if first:
                    await asyncio.sleep(0)
                self._on_answers(answered[first : first + _AT_ONCE])

    async def _gather(self) -> None:
        if self._gather_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._gather_s):
                    await self._has_end.wait()
        self._more.clear()
        self._has_end.clear()

    async def _append(self, batch: dict[_Key, Append]) -> list[Appended]:
        """Return the ledger's answers. While they are late, report what waits to ``on_away`` again
        and again, so that it can be delivered without them. An answer that is late because this
        process stalled is not: the ledger may have answered in time."""
        call = asyncio.ensure_future(self._ledger.append(list(batch.values())))
        try:
            while not await stalls.wait(call, _LATE_S):
                for (live, *_), append in (*batch.items(), *self._pending.items()):
                    self._on_away(live, append)
            return call.result()
        finally:
            call.cancel()

    def _put_back(self, batch: dict[_Key, Append]) -> None:
        later, self._pending = self._pending, batch
        for (live, *_), append in later.items():
            self.put(live, append)
        for (live, *_), append in self._pending.items():
            self._on_away(live, append)
        self._more.set()


def _joined(earlier: Append, later: Append) -> Append:
    """Both as one. They may overlap, where tokens are asserted anew, but not leave a gap."""
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
    )
