"""Requests that end in the leader's queue: it is asked how long they were there, and for what."""

from __future__ import annotations

import asyncio

from everlift.v1 import session_pb2
from router.event_loop import now
from router.requests.request import LiveRequest

#: An end waits no longer for it. A leader that is there answers within a few milliseconds.
_LONGEST_S = 0.1


class Leaving:
    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[session_pb2.Stay]] = {}

    async def wait(self, live: LiveRequest) -> None:
        """For the leader's answer to its withdrawal. There is none to that of a request which it
        has dispatched, or was not told of."""
        answer = asyncio.get_running_loop().create_future()
        self._asked[live.request_id] = answer
        try:
            async with asyncio.timeout(_LONGEST_S):
                live.journal.withdrawn(await answer, now())
        except TimeoutError:
            pass
        finally:
            self._asked.pop(live.request_id, None)

    def told(self, message: session_pb2.Withdrawn) -> None:
        answer = self._asked.get(message.request_id)
        if answer is not None and not answer.done():
            answer.set_result(message.stay)
