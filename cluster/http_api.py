"""Client of a cluster's OpenAI API, for commands that need chats, which gRPC does not serve."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from cluster.connection import addresses, api_key, tls
from cluster.errors import ClusterFailed
from cluster.sse import DONE, Events
from everlift.address import join_host_port
from everlift.certificates import client_context
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError, Unreachable, from_slug

Body = Mapping[str, object]


class HttpApi:
    """Client of one router's HTTP server.

    Every method raises the EverliftError with which the router answers, or Unreachable if the
    connection fails or the answer is not from Everlift.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, path: str, body: Body, headers: Mapping[str, str] | None = None) -> Any:
        """Send ``body`` as JSON to ``path``, and return the parsed JSON of the answer."""
        async with self._answer(path, body, headers or {}) as answer:
            return await answer.json()

    async def stream(self, path: str, body: Body) -> AsyncGenerator[Any]:
        """Send ``body`` as JSON to ``path``, and yield the parsed JSON of each event of the answer.

        The events are server-sent events, and [DONE] after the last one is not yielded. Closing
        the iterator early cancels the request.
        """
        events = Events()
        async with self._answer(path, body, {}) as answer:
            async for data in answer.content.iter_any():
                for event in events.of(data):
                    if event == DONE:
                        return
                    chunk = json.loads(event)
                    if "error" in chunk:
                        raise _error(chunk)
                    yield chunk
        raise Unreachable("the connection was lost")

    @asynccontextmanager
    async def _answer(
        self, path: str, body: Body, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.post(path, json=body, headers=headers) as answer:
                if answer.status != 200:
                    raise _error(await answer.json())
                yield answer
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise Unreachable(f"{self._session._base_url}: {error}") from None


@asynccontextmanager
async def connected_to_http(client: AsyncClient, address: str | None) -> AsyncIterator[HttpApi]:
    """Context manager: open a session with a router's HTTP server, and yield its HttpApi.

    The host is that of the first router in ``address``, a list separated by commas; None is the
    cluster on this machine. The port is the HTTP port that ``client``'s current router reports.
    Raises ClusterFailed if that router serves no HTTP, EverliftError if it does not report its
    status, and SettingsError for invalid settings in the environment.
    """
    served = (await client.status()).http_address
    if not served:
        raise ClusterFailed("this cluster serves no HTTP, which chats need: set router.http_host")
    credentials, key = tls(), api_key()
    host, port = addresses(address)[0].rpartition(":")[0], served.rpartition(":")[2]
    context = client_context(credentials).current() if credentials is not None else None
    scheme = "http" if context is None else "https"
    async with aiohttp.ClientSession(
        f"{scheme}://{join_host_port(host.strip('[]'), int(port))}/",
        headers={"authorization": f"Bearer {key}"} if key else {},
        connector=aiohttp.TCPConnector(limit=0, ssl=context if context is not None else True),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        yield HttpApi(session)


def _error(body: Mapping[str, Any]) -> EverliftError:
    """Return the error that the parsed JSON of an answer describes.

    Raises ValueError if it does not describe an error of Everlift.
    """
    try:
        return from_slug(body["error"]["code"], body["error"]["message"])
    except (TypeError, LookupError):
        raise ValueError("the answer is not an error of Everlift") from None
