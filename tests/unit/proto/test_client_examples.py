"""Examples in the client library's docstrings have the outputs that they show."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import everlift
from everlift import AsyncClient, Client, ManyStream, Stream, testing
from everlift.client import blocking, client
from everlift.testing import FakeRouter, FakeTransport
from everlift.v1 import chaos_pb2
from everlift.v1.inference_pb2 import RequestState
from tests.support.examples import check, public, run

ROOT = Path(__file__).parents[3]
METHODS = [
    pytest.param(member, id=f"{kind.__name__}.{name}")
    for kind in (AsyncClient, Stream, ManyStream)
    for name, member in public(kind)
]
BLOCKS = [
    pytest.param(block, id=f"{path}:{number}")
    for path in ("README.md", "proto/README.md")
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    )
    # Some examples are for other clients.
    if path != "README.md" or "from everlift " in block
]


@pytest.fixture
async def names() -> AsyncIterator[dict[str, Any]]:
    """Names for an example: a client of a fake router, and those that a program would import."""
    public = {name: getattr(everlift, name) for name in everlift.__all__}
    fakes = {name: getattr(testing, name) for name in testing.__all__}
    async with AsyncClient("fake", transport=FakeTransport()) as fake:
        yield {
            **public,
            **fakes,
            "client": fake,
            "RequestState": RequestState,
            "chaos_pb2": chaos_pb2,
            "schema": {"type": "object"},
        }


@pytest.mark.parametrize("member", METHODS)
async def test_method_docstring_examples_run(member: Any, names: dict[str, Any]) -> None:
    assert await check(member.__doc__, names)


@pytest.mark.parametrize("kind", [AsyncClient, Stream, ManyStream, FakeTransport])
async def test_class_docstring_examples_run(kind: type, names: dict[str, Any]) -> None:
    assert kind.__doc__ is not None
    assert await check(kind.__doc__, names)


@pytest.mark.parametrize("module", [client, blocking, testing])
async def test_module_docstring_examples_run(module: Any, names: dict[str, Any]) -> None:
    def somewhere(kind: type) -> Any:
        """Return a client class with which a fake router answers at every address."""
        return lambda address, transport=None: kind(address, transport=transport or FakeTransport())

    if module is not testing:
        names |= {"AsyncClient": somewhere(AsyncClient), "Client": somewhere(Client)}
    assert await check(module.__doc__, names)


@pytest.mark.parametrize("block", BLOCKS)
async def test_readme_programs_run(block: str, names: dict[str, Any]) -> None:
    async with FakeRouter() as router:
        await run(block.replace("127.0.0.1:50051", router.address), names)
