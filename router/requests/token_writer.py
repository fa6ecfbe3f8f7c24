"""What came of requests on its way into the ledger, what the ledger answers, and how far clients
may read meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from everlift import logs
from everlift.errors import DataLoss, EverliftError
from router.config import RouterConfig
from router.event_loop import now
from router.ledger.entry import Append, Appended, Entry, State
from router.requests.appender import Answered, Appender
from router.requests.choice import Choice
from router.requests.registry import Custody
from router.requests.request import LiveRequest

log = logs.get(__name__)

#: So long tokens gather for one append where their delivery does not wait for it.
_GATHER_S = 0.02


class Keeping:
    """``on_difference`` hears of a request of which the ledger has another state than we do,
    ``on_failure`` of one that cannot go on."""

    def __init__(
        self,
        config: RouterConfig,
        custody: Custody,
        on_difference: Callable[[LiveRequest], None],
        on_failure: Callable[[LiveRequest, EverliftError], None],
    ) -> None:
        self._custody = custody
        self._on_difference = on_difference
        self._on_failure = on_failure
        self._is_behind = config.durability == "behind"
        self._may_go_on_s = config.unledgered if config.on_ledger_loss == "available" else 0.0
        self._away_since: float | None = None
        self._appender = Appender(
            custody.ledger, self._answered, self._away, _GATHER_S if self._is_behind else 0.0
        )

    async def run(self) -> None:
        """Carries tokens into the ledger until cancelled."""
        await self._appender.run()

    @property
    def is_away(self) -> bool:
        """The ledger does not answer what it is told."""
        return self._away_since is not None

    def put(self, live: LiveRequest, choice: Choice, offset: int) -> None:
        """What the choice has from ``offset`` on."""
        self._appender.put(live, live.append(choice, offset))
        if self._is_behind and self._may_run_ahead():
            live.run_ahead(choice, now())

    def put_rest(self, live: LiveRequest) -> None:
        """What the ledger does not have yet."""
        for choice in live.choices:
            if not choice.is_stored:
                self._appender.put(live, live.append(choice, choice.stored))

    async def put_all(self, live: LiveRequest) -> None:
        """Waits until the ledger has all that came, or the request is over."""
        self.put_rest(live)
        await live.all_stored()

    def mark_as(self, live: LiveRequest, entry: Entry) -> None:
        """The ledger says what it has."""
        heard = now()
        for choice, count in zip(live.choices, entry.num_tokens, strict=True):
            self._mark(live, choice, count, heard)

    def _mark(self, live: LiveRequest, choice: Choice, count: int, heard: float) -> None:
        self._custody.counters.output_tokens += max(0, count - choice.stored)
        live.mark_stored(choice, count, heard)

    # the ledger answers, or does not

    def _answered(self, answered: Sequence[Answered]) -> None:
        self._away_since, heard = None, now()
        for live, append, answer in answered:
            if self._custody.has(live):
                self._take(live, append, answer, heard)

    def _take(self, live: LiveRequest, append: Append, answer: Appended, heard: float) -> None:
        if answer is Appended.FINISHED:
            self._finished(live, heard)
        elif answer is Appended.OK:
            self._stored(live, append, heard)
        elif answer is Appended.LIMIT:
            self._on_failure(live, DataLoss(f"more than max_tokens at offset {append.offset}"))
        elif append.epoch == live.epoch:
            self._on_difference(live)

    def _stored(self, live: LiveRequest, append: Append, heard: float) -> None:
        choice = live.choices[append.choice]
        self._mark(live, choice, append.offset + len(append.tokens), heard)
        if not append.finish_reason:
            return
        if all(other.is_complete for other in live.choices if other is not choice):
            # Every end was stored, and yet the request is not finished: one of them was forgotten.
            self._on_difference(live)
        else:
            choice.complete()
            live.wake()

    def _finished(self, live: LiveRequest, heard: float) -> None:
        for choice in live.choices:
            self._mark(live, choice, len(choice.output), heard)
        self._custody.settle_as(live, _finished_entry(live))
        log.info("finished", **live.names, tokens=live.num_tokens)

    def _away(self, live: LiveRequest, append: Append) -> None:
        if self._away_since is None:
            self._away_since = now()
        if self._custody.has(live) and self._may_run_ahead():
            live.run_ahead(live.choices[append.choice], now())

    def _may_run_ahead(self) -> bool:
        """While the ledger is away only for so long."""
        return self._away_since is None or now() - self._away_since < self._may_go_on_s


def _finished_entry(live: LiveRequest) -> Entry:
    """What the ledger has of a request whose last end it has just stored."""
    entry = live.as_entry()
    return replace(entry, state=State.FINISHED, worker="", epoch=0, moves=entry.moves + 1)
