"""Fake router for ``everlift explain``, which serves the class ``Knowing`` of a test module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from everlift.v1 import inference_pb2_grpc
from tests.support.router.restored_logging import restored_logging


@pytest.fixture(autouse=True)
async def router(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[None]:
    """Serve the class ``Knowing`` of the test's module."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(request.module.Knowing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("EVERLIFT_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    yield
    await server.stop(None)


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    with restored_logging():
        yield
