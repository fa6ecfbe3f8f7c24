"""Client, stubs and fake router on protobuf 6 and 7, with no packages but grpcio and protobuf.

Other packages of users may pin protobuf 6. `make` creates the second environment in .venv-proto;
EVERLIFT_PROTO_VENV is the path of another one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OTHER = Path(os.environ.get("EVERLIFT_PROTO_VENV") or ROOT / ".venv-proto")

#: Warnings are errors: generated code that does not fit the runtime only warns at first.
PROGRAM = """
import asyncio
import google.protobuf
from everlift import AsyncClient, Client, FinishReason
from everlift.testing import Break, FakeRouter, FakeTransport
from everlift.v1 import inference_pb2, ledger_pb2, session_pb2

async def main():
    async with FakeRouter(faults=[Break(1), Break(3)]) as router:
        async with AsyncClient(router.address) as client:
            stream = client.generate("zero one two three", temperature=0.0, stop=["x"])
            assert await stream.text() == "zero one two three"
            assert stream.finish_reason is FinishReason.STOP
            assert (await client.status()).completed == 1
            texts = await client.generate_many(["a b", "c"]).texts()
            assert texts == ["a b", "c"]
    transport = FakeTransport(faults=[Break(1, index=1)])
    async with AsyncClient("fake", transport=transport, api_key="k") as client:
        assert await client.generate_many(["a b", "c d"]).texts() == ["a b", "c d"]
        assert (await client.capacity()).workers == 1
    start = session_pb2.Start(epoch=2**64 - 1, output_ids=[1, 2], salt=b"s")
    assert session_pb2.Start.FromString(start.SerializeToString()) == start
    stored = ledger_pb2.StoredRequest(request_id="r", sampling=inference_pb2.Sampling(top_p=0.5))
    assert ledger_pb2.StoredRequest.FromString(stored.SerializeToString()) == stored
    print(google.protobuf.__version__.partition(".")[0])

asyncio.run(main())
with Client("fake", transport=FakeTransport()) as client:
    assert client.generate("a b").text() == "a b"
    assert list(client.tokenize("a").token_ids) == [97]
"""


def protobuf_under(python: Path | str) -> str:
    """Return the major version of protobuf under which the program ran."""
    done = subprocess.run(
        [python, "-W", "error", "-c", PROGRAM],
        env={"PYTHONPATH": str(ROOT / "proto"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_client_runs_on_protobuf_7() -> None:
    assert protobuf_under(sys.executable) == "7"


def test_client_runs_on_protobuf_6() -> None:
    python = OTHER / "bin" / "python"
    if not python.exists():
        reason = f"no environment with protobuf 6 at {OTHER}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    assert protobuf_under(python) == "6"
