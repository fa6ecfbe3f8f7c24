"""Polling of a URL for the notice that this machine will be reclaimed, as by a cloud provider.

After the notice the worker drains, as after a signal (everlift.notice): its sequences are returned
to their routers, routers send no more, and the process runs until it is stopped.
"""

from __future__ import annotations

import asyncio
import urllib.request
from http import HTTPStatus
from http.client import HTTPException

from everlift import logs

log = logs.get_logger(__name__)

#: Seconds between two polls for the notice, and the timeout of one poll.
_POLL_S, _ANSWER_S = 2.0, 1.0


async def wait_for_notice(url: str) -> None:
    """Wait until ``url`` answers with status 200; other answers and errors are ignored."""
    while not await asyncio.to_thread(_has_notice, url):
        await asyncio.sleep(_POLL_S)
    log.warning("reclaim notice", url=url)


def _has_notice(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=_ANSWER_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except (OSError, HTTPException):
        return False


def _direct() -> urllib.request.OpenerDirector:
    """Return an opener without proxies and redirects.

    A status 200 from a proxy or another host would not be a notice.
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
