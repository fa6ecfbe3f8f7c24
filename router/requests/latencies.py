"""When things happened to a live request, and who hears how long they took: whoever observes its
class, and its client by the timing of its end. Pure. Moments are the router's clock in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from everlift.messages import FinishReason
from everlift.v1 import session_pb2
from router.admission.throughput import seen_ratio
from router.requests.observer import NOBODY, ClassObserver
from router.requests.timing import Journal


class Moments:
    """``journal`` knows when its call came; this gateway took it ``now``. ``has_begun_elsewhere``:
    whoever read its first token read it at another one."""

    def __init__(self, journal: Journal, now: float, *, has_begun_elsewhere: bool) -> None:
        self.observer: ClassObserver = NOBODY
        #: seconds that it waited until it was dispatched, all times together
        self.queued_s = 0.0
        self._journal = journal
        self._has_begun_elsewhere = has_begun_elsewhere
        self._taken = self._waiting_since = now
        self._dispatched: float | None = None
        self._predicted_ttft_s: float | None = None
        self._predicted_tpot_s: float | None = None
        self._first_token: float | None = None
        #: by choice, when more could be read last
        self._readable_since: dict[int, float] = {}

    def age_s(self, now: float) -> float:
        """Since its call."""
        return now - self._journal.came

    # what happens to it

    def queued_again(self, now: float) -> None:
        self._waiting_since = now

    def dispatched(self, message: session_pb2.Dispatched, now: float) -> None:
        """To a worker. For whoever observes it the first time counts."""
        if message.HasField("predicted_ttft_s"):
            self._predicted_ttft_s = message.predicted_ttft_s
        if message.HasField("predicted_tpot_s"):
            self._predicted_tpot_s = message.predicted_tpot_s
        self.queued_s += now - self._waiting_since
        if self._dispatched is None:
            self._dispatched = now
            self.observer.dispatched(self.queued_s)

    def more_to_read(self, choice: int, now: float) -> None:
        """Clients may read more of a choice than before."""
        if self._first_token is None:
            self._first_token = now
            if not self._has_begun_elsewhere:
                self._first_to_read(now)
        if (before := self._readable_since.get(choice)) is not None:
            self.observer.next_tokens(now - before)
        self._readable_since[choice] = now

    def _first_to_read(self, now: float) -> None:
        self._journal.readable(now)
        if self._dispatched is not None:
            self.observer.first_token(self.age_s(now), now - self._dispatched)
            if self._predicted_ttft_s is not None:
                self.observer.ttft_predicted(self._predicted_ttft_s, now - self._taken)

    def judge_tpot(self, longest: int, now: float) -> float | None:
        """Its last token came; ``longest`` tokens has its longest choice. How many times as long
        each after the first one took as was predicted; None where nobody can say."""
        if self._first_token is None or self._has_begun_elsewhere:
            return None
        ratio = seen_ratio(self._predicted_tpot_s, now - self._first_token, longest)
        if ratio is not None:
            self.observer.tpot_predicted(ratio)
        return ratio

    def finished(
        self, prompt_tokens: int, output_tokens: int, reasons: Sequence[FinishReason], now: float
    ) -> None:
        """By its last token."""
        self.observer.finished(
            self.age_s(now),
            now - self._began_to_tell(now),
            prompt_tokens,
            output_tokens,
            self._journal.overtaken,
            reasons,
        )

    # what came of it

    def readable_since(self, choice: int, otherwise: float) -> float:
        """When more of a choice could be read last; ``otherwise`` where none can."""
        return self._readable_since.get(choice, otherwise)

    def ttft_s(self, ended: float) -> float:
        """From its call to its first token; to its end where there is none."""
        told_s = self._journal.ttft_s
        return self.age_s(self._began_to_tell(ended)) if told_s is None else told_s

    @property
    def foreseen_ttft_s(self) -> float | None:
        """From its call, as it was predicted when it came here."""
        if self._predicted_ttft_s is None:
            return None
        return self.age_s(self._taken) + self._predicted_ttft_s

    def _began_to_tell(self, ended: float) -> float:
        return ended if self._first_token is None else self._first_token
