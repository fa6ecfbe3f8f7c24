"""How long a request that comes will wait, by what waits then, as its gateway knows it. Pure.

The leader says five times a second how much work waits. In between a gateway counts what it sends
there itself: of a thousand requests that come at once each has those before it to wait for.
"""

from __future__ import annotations

from everlift.v1 import session_pb2

#: Tokens a second that a cluster is taken to compute until it has shown what it can: few, so that
#: orders that need a wait to go by have one from the first request on.
_UNKNOWN_RATE = 1000.0


class ForeseenWait:
    def __init__(self) -> None:
        self._outlook = session_pb2.Outlook()
        #: tokens a second. The last one that was known holds while there is no worker
        self._rate = _UNKNOWN_RATE
        #: by class, tokens that came since the leader's last word
        self._came: dict[int, int] = {}

    def hear(self, outlook: session_pb2.Outlook) -> None:
        """The leader's word."""
        self._outlook = outlook
        self._rate = outlook.tokens_per_s or self._rate
        self._came.clear()

    def come(self, priority: int, work_tokens: int) -> float:
        """Seconds until what goes before a request of this class has left the queue. From now on it
        is one of those that came."""
        waits = [it.work_tokens for it in self._outlook.waits if it.priority >= priority]
        came = sum(tokens for its, tokens in self._came.items() if its >= priority)
        self._came[priority] = self._came.get(priority, 0) + work_tokens
        return (came + max(waits, default=0)) / self._rate
