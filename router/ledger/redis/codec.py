"""Encoding of the arguments of the ledger's Lua scripts, and decoding of their answers. Pure."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import astuple, replace
from functools import cache
from itertools import chain, repeat
from typing import Any

import msgpack

from everlift.hashes import CHUNK_SIZE, little_endian
from everlift.messages import FinishReason, Request
from everlift.request_id import tenant_of
from everlift.sampling import TokenLogprobs
from router.ledger.base import ClusterPolicy, Membership, Position
from router.ledger.entry import (
    Append,
    Appended,
    Entry,
    Event,
    State,
    Stored,
    StoredChoice,
    Tally,
    Turn,
)
from router.ledger.listing import Part, Row
from router.ledger.prompts import chunk_names, image_names, num_chunked, session_name

_UINT32 = "I"
#: Letter of each finish reason in ``finishes``; "-" for an unfinished choice.
_LETTERS = {None: "-", FinishReason.STOP: "s", FinishReason.LENGTH: "l"}
_REASONS = {letter: reason for reason, letter in _LETTERS.items()}
_APPENDED = {word.value.encode(): word for word in Appended}
#: Number of fields of ENTRY in common.lua.
_NUM_TEXTS = 12


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return the tokens as little-endian uint32. Raises OverflowError if one does not fit."""
    return little_endian(tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    tokens = array(_UINT32, data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def has_logprobs(request: Request) -> bool:
    """Return whether the request asks for log probabilities, of its prompt or its output.

    If so, the ledger creates keys for them.
    """
    return (request.sampling.logprobs, request.sampling.prompt_logprobs) != (None, None)


@cache
def _record(num_top: int) -> struct.Struct:
    """Return the layout of one token's log probabilities, little endian.

    logprob float32 | rank uint32 | ids of alternatives uint32 ... | their logprobs float32 ...
    """
    return struct.Struct(f"<fI{num_top}I{num_top}f")


def pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> bytes:
    """Return the log probabilities as bytes: one binary record per token, in order.

    Raises struct.error if a token has another number of alternatives than the first one.
    """
    if not logprobs:
        return b""
    pack = _record(len(logprobs[0].top)).pack
    return b"".join(pack(it.logprob, it.rank, *_columns(it.top)) for it in logprobs)


def _columns(top: Sequence[tuple[int, float]]) -> chain[float]:
    return chain((token for token, _ in top), (logprob for _, logprob in top))


def unpack_logprobs(data: bytes, num_top: int) -> tuple[TokenLogprobs, ...]:
    def parse(logprob: float, rank: int, *top: float) -> TokenLogprobs:
        pairs = zip(map(int, top[:num_top]), top[num_top:], strict=True)
        return TokenLogprobs(logprob, rank, tuple(pairs))

    return tuple(parse(*fields) for fields in _record(num_top).iter_unpack(data))


def pack_chunks(request: Request, first: int = 0) -> tuple[str, bytes]:
    """Return the names of the prompt's chunks from number ``first`` on, and their tokens.

    The names are of 32 hexadecimal digits each, without separators.
    """
    names = chunk_names(request)[first:]
    tokens = request.prompt_ids[first * CHUNK_SIZE : num_chunked(request)]
    return "".join(names), pack_tokens(tokens)


def pack_images(request: Request, known: Collection[str] = ()) -> bytes:
    """Return the names and files of a request's images, as ``unpacked_images`` reads them.

    The files of images whose names are in ``known`` are left out.
    """
    if not request.images:
        return b""
    pairs = zip(image_names(request), request.images, strict=True)
    fields = [(name, b"" if name in known else image.data) for name, image in pairs]
    return bytes(msgpack.packb([*chain.from_iterable(fields)], use_bin_type=False))


def pack_rest(request: Request) -> bytes:
    """Return the request as a serialised StoredRequest (protobuf).

    The deadline, the tokens of the prompt's full chunks and the image files are omitted.
    """
    return replace(request, deadline=None).to_bytes(num_chunked(request))


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def optional(number: int | None) -> int | str:
    """Return the number as a script's argument: itself, or an empty string for None."""
    return "" if number is None else number


def seconds(microseconds: bytes) -> float:
    return int(microseconds) / 1e6


def tally_text(tally: Tally) -> str:
    return " ".join(map(str, astuple(tally)))


def _tally(text: bytes) -> Tally:
    return Tally(*map(int, text.split()))


def appends(items: Sequence[Append]) -> bytes:
    """Return the items encoded in msgpack, as append.lua reads them from a single argument."""
    fields: list[str | int | bytes] = []
    for item in items:
        fields += _append_fields(item)
    return bytes(msgpack.packb(fields, use_bin_type=False))


def _append_fields(item: Append) -> Sequence[str | int | bytes]:
    tokens = pack_tokens(item.tokens)
    scores = item.logprobs or item.prompt_logprobs
    if not (item.choice or item.finish_reason or scores or item.tally or item.request):
        return (item.request_id, str(item.epoch), item.offset, tokens, "")
    letter = _LETTERS[item.finish_reason] if item.finish_reason else ""
    return (
        item.request_id,
        str(item.epoch),
        item.offset,
        tokens,
        "more",
        str(item.choice),
        letter,
        pack_logprobs(item.logprobs),
        pack_logprobs(item.prompt_logprobs),
        tally_text(item.tally) if item.tally else "",
        item.explanation if letter else "",
        pack_rest(item.request) if item.request else "",
    )


def appended(answer: Sequence[Any], count: int) -> list[Appended]:
    """Return the results of the ``count`` items of one call of append.lua, in their order.

    ``answer`` is the script's answer, which contains only the results that are not OK.
    """
    words = [Appended.OK] * count
    for number, word in zip(answer[::2], answer[1::2], strict=True):
        words[number - 1] = _APPENDED[word]
    return words


def reassert_arguments(
    stored: Stored, retention_ms: int, unfinished_ms: int
) -> list[str | int | bytes]:
    """Return the arguments with which reassert.lua restores ``stored``.

    The request id, which is the script's first argument, is not included. ``retention_ms`` is the
    time to live of a final request, ``unfinished_ms`` that of an unfinished one.
    """
    request, deadline = stored.request, stored.request.deadline
    return [
        *_entry_fields(stored.entry),
        "" if deadline is None else microseconds(deadline),
        request.body_hash,
        pack_rest(request),
        request.max_tokens,
        int(has_logprobs(request)),
        retention_ms,
        unfinished_ms,
        pack_logprobs(stored.prompt_logprobs),
        stored.explanation,
        request.turn,
        session_name(tenant_of(request.request_id), request.session_id),
        *pack_chunks(request),
        pack_images(request),
        *chain.from_iterable(
            (pack_tokens(choice.tokens), pack_logprobs(choice.logprobs))
            for choice in stored.choices
        ),
    ]


def _entry_fields(entry: Entry) -> list[str | int]:
    return [
        "".join(_LETTERS[reason] for reason in entry.finish_reasons),
        entry.state.value,
        entry.gateway,
        microseconds(entry.arrived),
        entry.worker,
        entry.epoch,
        entry.attempts,
        entry.losses,
        entry.error_slug,
        entry.error_message,
        entry.moves,
        tally_text(entry.tally),
    ]


def entry(request_id: str, fields: Sequence[Any]) -> Entry:
    """Return the entry of a request from ``fields``, the result of ``entry`` in common.lua."""
    texts, num_tokens = fields[:_NUM_TEXTS], fields[_NUM_TEXTS:]
    finishes, state, gateway, arrived, worker, epoch, attempts, losses, *others = texts
    slug, message, moves, tally = others
    return Entry(
        request_id=request_id,
        state=State(state.decode()),
        gateway=gateway.decode(),
        arrived=seconds(arrived),
        num_tokens=tuple(num_tokens),
        worker=worker.decode(),
        epoch=int(epoch),
        attempts=int(attempts),
        losses=int(losses),
        finish_reasons=tuple(_REASONS[letter] for letter in finishes.decode()),
        error_slug=slug.decode(),
        error_message=message.decode(),
        moves=int(moves),
        tally=_tally(tally),
    )


def stored(request_id: str, offsets: Sequence[int], answer: Sequence[Any]) -> Stored:
    """Return a request from the result of the function ``continuation`` in common.lua.

    ``answer`` is this result without its first element, the status "ok". ``offsets`` has the
    requested token offset of each choice; choices without an element have offset 0.
    """
    fields, data, deadline, choices, prompt_logprobs, now, explanation, chunks, images = answer
    request = Request.from_bytes(data, unpack_tokens(b"".join(reversed(chunks))), images)
    sampling = request.sampling
    return Stored(
        entry=entry(request_id, fields),
        request=replace(request, deadline=seconds(deadline) if deadline else None),
        choices=tuple(
            StoredChoice(
                unpack_tokens(tokens), unpack_logprobs(logprobs, sampling.logprobs or 0), offset
            )
            for (tokens, logprobs), offset in zip(choices, chain(offsets, repeat(0)), strict=False)
        ),
        now=seconds(now),
        prompt_logprobs=unpack_logprobs(prompt_logprobs, sampling.prompt_logprobs or 0),
        explanation=explanation,
    )


def event(text: bytes) -> Event:
    """Return an event of a request from its text in the Redis list ``e:<request id>``."""
    time, move, detail = text.decode().split(" ", 2)
    return Event(int(time) / 1e6, move, detail)


def membership(answer: Sequence[bytes]) -> Membership:
    """Return the state of the cluster from the answer of beat.lua.

    The fields about the servers (``generation``, ``memory_used``, ``unfit``) have their defaults.
    """
    now, leader, address, term, workers_version, policy_version = answer
    return Membership(
        now=seconds(now),
        leader=leader.decode(),
        leader_address=address.decode(),
        term=int(term),
        workers_version=int(workers_version),
        policy_version=int(policy_version),
    )


def part(answer: Sequence[Any]) -> Part:
    """Return one shard's part of a listing of requests from the answer of list.lua."""
    is_end, *rows = answer
    return Part([_row(*row) for row in rows], is_end=is_end == 1)


def _row(request_id: bytes, arrived: bytes, fields: Sequence[Any]) -> Row:
    name = request_id.decode()
    return Row(Position(seconds(arrived), name), entry(name, fields) if fields else None)


def turns(answer: Sequence[Any]) -> list[tuple[int, Turn]]:
    """Return the turns of a session (finished requests) on one shard from the answer of turns.lua.

    Each turn is preceded by the arrival time of its request in µs.
    """
    return [(int(arrived), Turn(name.decode(), turn)) for arrived, name, turn in answer]


def policy(answer: Sequence[bytes]) -> ClusterPolicy:
    """Return the run-time policy in effect from the answer of set_policy.lua."""
    texts = [text.decode() for text in answer]
    values = dict(zip(texts[::2], texts[1::2], strict=True))
    version = int(values.pop("version", "0"))
    return ClusterPolicy(values, version)
