"""What the scripts take and answer, as bytes, from and to the ledger's own values. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from everlift.messages import FinishReason, Request
from router.ledger.base import Membership
from router.ledger.entry import Append, Entry, State, Stored

_UINT32 = "I"


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Four bytes each, little endian. Raises OverflowError for what is no uint32."""
    return _little_endian(array(_UINT32, tokens)).tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    return tuple(_little_endian(array(_UINT32, data)))


def _little_endian(tokens: array[int]) -> array[int]:
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def seconds(microseconds: bytes) -> float:
    return int(microseconds) / 1e6


def append_fields(item: Append) -> list[str | int | bytes]:
    """One item of append.lua."""
    finish = item.finish_reason.name.lower() if item.finish_reason else ""
    return [item.request_id, item.epoch, item.offset, pack_tokens(item.tokens), finish]


def entry(request_id: str, fields: Sequence[Any]) -> Entry:
    """The answer of common.lua's ``entry``."""
    *texts, num_tokens = fields
    state, gateway, arrived, worker, epoch, attempts, losses, finish, slug, message = texts
    return Entry(
        request_id=request_id,
        state=State(state.decode()),
        gateway=gateway.decode(),
        arrived=seconds(arrived),
        num_tokens=num_tokens,
        worker=worker.decode(),
        epoch=int(epoch),
        attempts=int(attempts),
        losses=int(losses),
        finish_reason=FinishReason[finish.decode().upper()] if finish else None,
        error_slug=slug.decode(),
        error_message=message.decode(),
    )


def stored(request_id: str, offset: int, answer: Sequence[Any]) -> Stored:
    """The answer of common.lua's ``continuation``, less its first word."""
    fields, request, deadline, tokens, now = answer
    return Stored(
        entry=entry(request_id, fields),
        request=replace(
            Request.from_bytes(request), deadline=seconds(deadline) if deadline else None
        ),
        offset=offset,
        tokens=unpack_tokens(tokens),
        now=seconds(now),
    )


def membership(answer: Sequence[bytes]) -> Membership:
    """The answer of beat.lua."""
    now, leader, address, term, workers_version = answer
    return Membership(
        now=seconds(now),
        leader=leader.decode(),
        leader_address=address.decode(),
        term=int(term),
        workers_version=int(workers_version),
    )
