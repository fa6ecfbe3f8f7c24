"""Reclaim notice at an address.

As after a signal (everlift.notice), the worker drains: routers get their sequences back and send
nothing more, and the process stays until it is told to stop.
"""

from __future__ import annotations

import asyncio
import urllib.request
from http import HTTPStatus
from http.client import HTTPException

from everlift import logs

log = logs.get_logger(__name__)

#: Between two looks for the notice, and until one is given up.
_POLL_S, _ANSWER_S = 2.0, 1.0


async def notice_at(url: str) -> None:
    """Return when ``url`` answers 200; whatever else it does is no notice."""
    while not await asyncio.to_thread(_is_there, url):
        await asyncio.sleep(_POLL_S)
    log.warning("reclaim notice", url=url)


def _is_there(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=_ANSWER_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except (OSError, HTTPException):
        return False


def _direct() -> urllib.request.OpenerDirector:
    """Ask the address itself, without proxies and redirects.

    A proxy's or another host's 200 is no notice.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


_DIRECT = _direct()
