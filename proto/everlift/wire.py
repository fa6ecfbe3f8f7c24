"""Transfer of Everlift's errors over gRPC: servers send them, and clients raise them.

The slug, the retry delay and the field of an error are sent in google.rpc's details
(error_details.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

import grpc

from everlift import error_details
from everlift.channels import refusal
from everlift.errors import DeadlineExceeded, EverliftError, MessageTooLarge, Unreachable

T = TypeVar("T")

#: Key of the details in the trailing metadata, by gRPC's convention.
DETAILS = "grpc-status-details-bin"
#: Statuses that gRPC itself reports when a connection or a server is lost.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}
)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: EverliftError) -> NoReturn:
    """End a call on the server with the status, the message and the details of ``error``.

    The message is cut to the size that a gRPC status can hold. Never returns.
    """
    await context.abort(status(error), error_details.cause(error), trailing_metadata(error))


def status(error: EverliftError) -> grpc.StatusCode:
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.grpc_status)
    return code


def trailing_metadata(error: EverliftError) -> tuple[tuple[str, bytes]]:
    """Return the trailing metadata of a call that ends with ``error``."""
    return ((DETAILS, error_details.encode(error, status(error).value[0])),)


async def answer(call: grpc.aio.Call, waiting: Awaitable[T]) -> T:
    """Await ``waiting``, an operation of ``call``, and return its result.

    A failed call raises the EverliftError that the server sent. The status of gRPC determines the
    error if the server sent none. Unreachable stands for a broken connection, DeadlineExceeded for
    a missed deadline, MessageTooLarge for a message above a limit, and EverliftError for the rest.
    Raises CancelledError only if the calling task is cancelled.
    """
    try:
        return await waiting
    except grpc.aio.AioRpcError:
        raise await _error(call) from None
    except asyncio.CancelledError:
        # grpc.aio also raises CancelledError if the server cancelled the call.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise await _error(call) from None


async def read(call: grpc.aio.UnaryStreamCall[Any, T]) -> T | None:
    """Return the next message of a stream, or None after the last one.

    Raises the errors of ``answer`` if the call has failed.
    """
    message: Any = await answer(call, call.read())
    return None if message is grpc.aio.EOF else message


async def _error(call: grpc.aio.Call) -> EverliftError:
    code, details = await call.code(), await call.details() or ""
    if (error := _server_error(await call.trailing_metadata())) is not None:
        return error
    if code in _BROKEN:
        reason = refusal(details)
        return Unreachable(
            f"the connection broke: {f'{reason} ({details})' if reason else details}"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # With this status, gRPC rejects messages above the channel's limit on the client.
        return MessageTooLarge(details)
    return EverliftError(f"{code.name}: {details}")


def _server_error(metadata: grpc.aio.Metadata | None) -> EverliftError | None:
    for key, value in metadata or ():
        if key == DETAILS and isinstance(value, bytes):
            return error_details.decode(value)
    return None
