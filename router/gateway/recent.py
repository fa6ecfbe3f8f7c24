"""What ended in a gateway's hands, or was forgotten through it, a moment ago: a ledger whose server
came back without its last second has to be told of it again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from router.gateway.live import LiveRequest

#: Ended requests that are kept at most, with all their tokens.
_MAX_ENDED = 10_000


class Recent:
    """Each for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended: dict[str, LiveRequest] = {}
        self._forgotten: dict[str, object] = {}

    @property
    def ended(self) -> Iterable[LiveRequest]:
        """Oldest first."""
        return list(self._ended.values())

    @property
    def forgotten(self) -> Iterable[str]:
        return list(self._forgotten)

    def get(self, request_id: str) -> LiveRequest | None:
        """One that ended."""
        return self._ended.get(request_id)

    def is_forgotten(self, request_id: str) -> bool:
        return request_id in self._forgotten

    def has(self, live: LiveRequest) -> bool:
        """It ended, and was not forgotten."""
        return self._ended.get(live.request_id) is live

    def end(self, live: LiveRequest) -> None:
        if len(self._ended) == _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[live.request_id] = live
        self._later(self._ended, live.request_id, live)

    def forget(self, request_id: str) -> None:
        self._ended.pop(request_id, None)
        self._forgotten[request_id] = mark = object()
        self._later(self._forgotten, request_id, mark)

    def begin(self, request_id: str) -> None:
        """The id is another request's from now on."""
        self._ended.pop(request_id, None)
        self._forgotten.pop(request_id, None)

    def _later(self, kept: dict[str, Any], request_id: str, value: object) -> None:
        def let_go() -> None:
            if kept.get(request_id) is value:
                del kept[request_id]

        asyncio.get_running_loop().call_later(self._seconds, let_go)
