"""Client of a cluster's OpenAI API, for chats and batches, which gRPC does not serve."""

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

#: Seconds to wait for a connection.
_CONNECT_TIMEOUT_S = 10.0
#: Seconds without data from the router, from the end of the request on, after which a call fails.
_SILENCE_S = 60.0
#: Timeouts of an event stream. It is silent while its request is queued, because a router sends no
#: keep-alive comments if the setting router.keep_alive is 0.
_STREAM_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)

Body = Mapping[str, object]
Headers = Mapping[str, str]


class HttpApi:
    """Client of one router's HTTP server.

    Every method raises the EverliftError with which the router answers, or Unreachable if the
    connection fails or the answer is not from Everlift. Unreachable also means that the router sent
    nothing for 60 s; only ``stream`` has no such limit.
    """

    def __init__(self, session: aiohttp.ClientSession, tls_name: str = "") -> None:
        """Create a client; ``tls_name`` is the expected certificate name, if not the host."""
        self._session = session
        self._tls_name = tls_name or None

    async def get(self, path: str) -> Any:
        """Return the parsed JSON of the answer to a GET of ``path``."""
        async with self._answer("GET", path) as answer:
            return await answer.json()

    async def post(self, path: str, body: Body, headers: Headers | None = None) -> Any:
        """Send ``body`` as JSON to ``path``, and return the parsed JSON of the answer."""
        async with self._answer("POST", path, json=body, headers=headers) as answer:
            return await answer.json()

    async def upload(self, name: str, content: bytes, headers: Headers) -> Any:
        """Upload a file of requests, and return the parsed JSON of the answer."""
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", content, filename=name)
        async with self._answer("POST", "v1/files", data=form, headers=headers) as answer:
            return await answer.json()

    async def read_lines(self, path: str) -> AsyncGenerator[bytes]:
        """Yield the lines of the answer to a GET of ``path``, without line terminators."""
        rest = b""
        async with self._answer("GET", path) as answer:
            async for data in answer.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield line
        if rest:
            yield rest

    async def delete(self, path: str) -> None:
        """Send a DELETE of ``path``."""
        async with self._answer("DELETE", path):
            pass

    async def stream(self, path: str, body: Body) -> AsyncGenerator[Any]:
        """Send ``body`` as JSON to ``path``, and yield the parsed JSON of each event of the answer.

        The events are server-sent events, and [DONE] after the last one is not yielded. Closing
        the iterator early cancels the request.
        """
        events = Events()
        async with self._answer("POST", path, json=body, timeout=_STREAM_TIMEOUT) as answer:
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
        self, method: str, path: str, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(
                method, path, server_hostname=self._tls_name, **more
            ) as answer:
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
    Raises ClusterFailed if that router serves no HTTP, EverliftError if it does not list its
    models, and SettingsError for invalid settings in the environment.
    """
    served = (await client.models()).http_address
    if not served:
        raise ClusterFailed(
            "this cluster serves no HTTP, which this command needs: set router.http_host"
        )
    credentials, key = tls(), api_key()
    host, port = addresses(address)[0].rpartition(":")[0], served.rpartition(":")[2]
    context = client_context(credentials).current() if credentials is not None else None
    scheme = "http" if context is None else "https"
    async with aiohttp.ClientSession(
        f"{scheme}://{join_host_port(host.strip('[]'), int(port))}/",
        headers={"authorization": f"Bearer {key}"} if key else {},
        connector=aiohttp.TCPConnector(limit=0, ssl=context if context is not None else True),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_SILENCE_S
        ),
    ) as session:
        yield HttpApi(session, credentials.name if credentials is not None else "")


def _error(body: Mapping[str, Any]) -> EverliftError:
    """Return the error that the parsed JSON of an answer describes.

    Raises ValueError if it does not describe an error of Everlift.
    """
    try:
        return from_slug(body["error"]["code"], body["error"]["message"])
    except (TypeError, LookupError):
        raise ValueError("the answer is not an error of Everlift") from None
