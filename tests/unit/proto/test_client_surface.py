"""The asynchronous and the blocking client offer the same."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest

from everlift import (
    AsyncClient,
    BlockingManyStream,
    BlockingStream,
    Client,
    ManyStream,
    Stream,
)
from everlift.v1 import admin_pb2, inference_pb2

PAIRS = [(AsyncClient, Client), (Stream, BlockingStream), (ManyStream, BlockingManyStream)]
#: Names of the blocking client for those of the asynchronous one.
NAMES = {
    "aclose": "close",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
}
TYPES = {Stream: BlockingStream, ManyStream: BlockingManyStream}


def surface(kind: type) -> dict[str, Any]:
    """Return the public members of a class, and some special ones."""
    special = {*NAMES, *NAMES.values()}
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_") or name in special
    }


def blocking(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], Any]:
    """Return parameters and result of the blocking counterpart of an asynchronous method."""
    hints = typing.get_type_hints(function)
    result = hints.pop("return", None)
    return list(inspect.signature(function).parameters.values()), TYPES.get(result, result)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_blocking_client_has_names_of_async_client(one: type, other: type) -> None:
    assert {NAMES.get(name, name) for name in surface(one)} == surface(other).keys()


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_blocking_client_has_signatures_of_async_client(one: type, other: type) -> None:
    for name, member in surface(one).items():
        there = getattr(other, NAMES.get(name, name))
        if not isinstance(member, property):
            assert blocking(member) == blocking(there), name


def test_blocking_client_has_constructor_of_async_client() -> None:
    assert inspect.signature(AsyncClient.__init__) == inspect.signature(Client.__init__)


def test_client_offers_every_service_method() -> None:
    named = {
        "GetStatus": "status",
        "ListModels": "models",
        "Capacity": "capacity",
        "ListAdapters": "adapters",
    }
    services = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"],
        admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    ]
    for service in services:
        for call in service.methods_by_name:
            words = "".join(f"_{c.lower()}" if c.isupper() else c for c in call).strip("_")
            assert hasattr(AsyncClient, named.get(call, words)), call
