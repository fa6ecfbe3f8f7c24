"""How long a request that comes will wait, by what waits then, as its gateway knows it. Pure.

The leader says five times a second how long what waits will take. In between a gateway counts what
it sends there itself: of a thousand requests that come at once each has those before it to wait
for.
"""

from __future__ import annotations

from everlift.v1 import session_pb2


class ForeseenWait:
    def __init__(self) -> None:
        self._outlook = session_pb2.Outlook()
        #: by class, tokens that came since the leader's last word
        self._came: dict[int, int] = {}

    def hear(self, outlook: session_pb2.Outlook) -> None:
        """The leader's word."""
        self._outlook = outlook
        self._came.clear()

    def come(self, priority: int, work_tokens: int) -> float:
        """Seconds until what goes before a request of this class has left the queue; 0 where nobody
        knows. From now on it is one of those that came."""
        before = [it.work_s for it in self._outlook.waits if it.priority >= priority]
        wait_s = before[-1] if before else 0.0
        if rate := self._outlook.tokens_per_s:
            wait_s += sum(work for its, work in self._came.items() if its >= priority) / rate
        self._came[priority] = self._came.get(priority, 0) + work_tokens
        return wait_s
