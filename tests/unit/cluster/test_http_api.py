"""Client of a router's HTTP server, against a server that accepts connections and never answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from cluster import http_api
from cluster.http_api import HttpApi, connected_to_http
from everlift.errors import Unreachable
from everlift.v1 import inference_pb2 as pb


class Models:
    """Client whose router reports ``address`` as its HTTP address."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def models(self) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(http_address=self._address)


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpApi]:
    monkeypatch.setattr(http_api, "_SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        async with connected_to_http(cast("Any", Models(address)), address) as connected:
            yield connected


async def test_http_api_gives_up_on_a_mute_router(api: HttpApi) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(Unreachable, match="Timeout"):
            await api.get("v1/models")
        with pytest.raises(Unreachable, match="Timeout"):
            await api.upload("batch.jsonl", b"{}", {})


async def test_http_api_waits_for_a_silent_event_stream(api: HttpApi) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(api.stream("v1/chat/completions", {})), 0.2)
