"""Outstanding work of the grammar processes, in estimated CPU time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial


class Backlog:
    """Total of the predicted CPU time of all unanswered requests to grammar processes.

    A request is included from the time of its announcement (``Channel.expect``), even if it is sent
    later. All methods but ``close`` and ``drop`` must be called by a single thread.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        #: cancellations by other threads, which are made when ``seconds`` is read
        self._cancellations: deque[Callable[[], None]] = deque()

    @property
    def seconds(self) -> float:
        while self._cancellations:
            self._cancellations.popleft()()
        return self._seconds

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def close(self, account: Account) -> None:
        """Remove the requests of ``account``, whose process no longer answers. Thread-safe."""
        self._cancellations.append(account.cancel_all)

    def drop(self, account: Account, matcher: int) -> None:
        """Remove the requests of ``matcher``, whose answers are no longer needed. Thread-safe."""
        self._cancellations.append(partial(account.cancel, matcher))


class Account:
    """Unanswered requests to one grammar process, whose predicted CPU time is part of a Backlog.

    Each request is about a matcher, which is the state of one sequence in the grammar and is
    identified by a number. Until the first answer about a matcher, each of its answers is predicted
    to take ``budget_s`` seconds of CPU time. After the first answer, the prediction is the time of
    that answer. After each later answer, it is the time of that answer, but at least half of the
    previous prediction.
    """

    def __init__(self, backlog: Backlog, budget_s: float) -> None:
        self._backlog = backlog
        self._budget_s = budget_s
        self._cost_s: dict[int, float] = {}
        self._pending_s: dict[int, deque[float]] = {}

    def record_request(self, matcher: int) -> None:
        cost_s = self._cost_s.get(matcher, self._budget_s)
        self._pending_s.setdefault(matcher, deque()).append(cost_s)
        self._backlog.add(cost_s)

    def record_reply(self, matcher: int, cpu_s: float) -> None:
        """Remove an answered request; an answer about a cancelled matcher is ignored."""
        if matcher not in self._pending_s:
            return
        self._backlog.add(-self._pending_s[matcher].popleft())
        self._cost_s[matcher] = max(cpu_s, self._cost_s.get(matcher, 0.0) / 2)

    def cancel(self, matcher: int) -> None:
        """Remove the unanswered requests of ``matcher``, whose answers are no longer needed."""
        self._backlog.add(-sum(self._pending_s.pop(matcher, ())))
        self._cost_s.pop(matcher, None)

    def cancel_all(self) -> None:
        for matcher in list(self._pending_s):
            self.cancel(matcher)
