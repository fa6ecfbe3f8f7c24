"""Everlift's errors on a gRPC call: put on it by a server, read off it by a client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

import grpc

from everlift.errors import (
    RETRY_AFTER_METADATA_KEY,
    SLUG_METADATA_KEY,
    DeadlineExceeded,
    EverliftError,
    Unreachable,
    from_slug,
)
from everlift.handshake import refusal

T = TypeVar("T")

#: Characters of a cause: gRPC refuses answers with more than 8 KiB of metadata, as it writes them.
_MAX_CAUSE = 512
#: Statuses that gRPC itself gives when a connection or a server goes away.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}
)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: EverliftError) -> NoReturn:
    """Ends a server's call with the error's status, cause and slug."""
    metadata = [(SLUG_METADATA_KEY, error.slug)]
    if error.retry_after_s is not None:
        metadata.append((RETRY_AFTER_METADATA_KEY, f"{error.retry_after_s:g}"))
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.grpc_status)
    await context.abort(code, bounded(str(error)), tuple(metadata))


def bounded(cause: str) -> str:
    """A cause, which may quote what a client sent, at a length that gRPC takes."""
    return cause if len(cause) <= _MAX_CAUSE else f"{cause[: _MAX_CAUSE - 1]}…"


async def answer(call: grpc.aio.Call, waiting: Awaitable[T]) -> T:
    """The result of ``waiting``, which belongs to ``call``. Raises EverliftError."""
    try:
        return await waiting
    except grpc.aio.AioRpcError:
        raise await _error(call) from None
    except asyncio.CancelledError:
        # So says grpc.aio too when it was the server that cancelled the call.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise await _error(call) from None


async def read(call: grpc.aio.UnaryStreamCall[Any, T]) -> T | None:
    """The next message of a stream; None after the last one. Raises EverliftError."""
    message: Any = await answer(call, call.read())
    return None if message is grpc.aio.EOF else message


async def _error(call: grpc.aio.Call) -> EverliftError:
    code, details = await call.code(), await call.details() or ""
    metadata = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
    if slug := metadata.get(SLUG_METADATA_KEY):
        error = from_slug(slug, details)
        retry_after = metadata.get(RETRY_AFTER_METADATA_KEY)
        error.retry_after_s = float(retry_after) if retry_after else None
        return error
    if code in _BROKEN:
        reason = refusal(details)
        return Unreachable(
            f"the connection broke: {f'{reason} ({details})' if reason else details}"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(details)
    return EverliftError(f"{code.name}: {details}")
