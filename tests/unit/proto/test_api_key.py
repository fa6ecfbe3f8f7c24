"""A client's API key is sent with every call and appears nowhere else."""

from __future__ import annotations

import logging

import pytest

from everlift import AsyncClient, Client, EverliftError, Unauthenticated
from everlift.errors import RouterStopping, SettingsError
from everlift.testing import Break, FakeTransport, Refuse
from everlift.v1 import chaos_pb2
from tests.support.router.wires import WIRES, Wire

KEY = "ev_1_s3cret"


@pytest.fixture(params=WIRES, ids=["grpc", "memory"])
def wire(request: pytest.FixtureRequest) -> Wire:
    made: Wire = request.param()
    return made


async def test_api_key_is_sent_with_every_call(wire: Wire) -> None:
    """The router rejects calls without the key; the fault is rejected for another reason."""
    async with wire.router(faults=[Break(1), Break(0)], api_key=KEY) as router:
        async with wire.client(router, api_key=KEY) as client:
            assert await client.generate("a b", request_id="r").text() == "a b"
            assert await client.generate_many(["a b", "c"]).texts() == ["a b", "c"]
            async with client.generate("a b", request_id="s") as stream:
                await anext(stream)
            assert await client.attach("r").text() == "a b"
            await client.get_request("r")
            await client.cancel("r")
            await client.list_requests()
            await client.detokenize((await client.tokenize("a")).token_ids)
            await client.models()
            await client.status()
            await client.drain("worker")
            await client.set_policy()
            await client.capacity()
            await client.load_adapter("sql", "org/sql")
            await client.unload_adapter("sql")
            await client.adapters()
            with pytest.raises(EverliftError, match="without chaos"):
                await client.inject(chaos_pb2.Fault())
            await client.forget("r")
    assert {call.partition(" ")[0] for call in router.calls} == {
        *("Generate", "GenerateMany", "Attach", "Cancel", "GetRequest", "ListRequests", "Forget"),
        *("Tokenize", "Detokenize", "ListModels", "GetStatus"),
        *("Drain", "SetPolicy", "Capacity", "Inject"),
        *("LoadAdapter", "UnloadAdapter", "ListAdapters"),
    }


@pytest.mark.parametrize("key", [None, "ev_1_other"])
async def test_api_key_missing_or_wrong_is_rejected(wire: Wire, key: str | None) -> None:
    async with wire.router(api_key=KEY) as router, wire.client(router, api_key=key) as client:
        with pytest.raises(Unauthenticated):
            await client.status()
        with pytest.raises(Unauthenticated):
            await client.generate("a").text()
        [error] = await client.generate_many(["a"]).texts()
        assert isinstance(error, Unauthenticated)


async def test_api_key_is_absent_from_logs_errors_and_repr(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    transport = FakeTransport(faults=[Break(1), Refuse(RouterStopping())], api_key="another")
    async with AsyncClient("fake", api_key=KEY, transport=transport) as client:
        stream = client.generate("a b")
        with pytest.raises(Unauthenticated) as caught:
            await stream.text()
    said = [caplog.text, repr(client), repr(stream), repr(vars(client)), repr(caught.value)]
    assert not [each for each in said if "s3cret" in each]


@pytest.mark.parametrize("bad", ["", "s3cret\n", "s3 cret", "s3crét", "s3cret\x00"])
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_api_key_invalid_in_header_is_rejected_without_echo(
    bad: str, kind: type[AsyncClient] | type[Client]
) -> None:
    with pytest.raises(SettingsError, match="api_key must be") as caught:
        kind("127.0.0.1:1", api_key=bad)
    assert "s3c" not in str(caught.value)
