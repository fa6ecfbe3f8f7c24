"""What is read piece by piece, and closed by whoever reads it, also before its end. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Closable(Protocol[T_co]):
    """As every asynchronous generator is."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Awaitable[object]: ...
