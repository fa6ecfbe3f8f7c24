"""The requests that one body asks for, opened together and read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self, cast

from everlift.trace_context import TraceContext
from everlift.v1 import inference_pb2 as pb
from router.gateway.caller import Caller
from router.gateway.inference import Inference, Opened

#: A piece, and which of the requests it is of.
Numbered = tuple[int, pb.GenerateResponse]
_Pieces = AsyncGenerator[pb.GenerateResponse, None]


_Opening = Coroutine[Any, Any, Opened]


@dataclass(frozen=True, slots=True)
class Generation:
    """Who leaves before the end closes it."""

    trace: TraceContext | None
    _pieces: Sequence[_Pieces]

    @classmethod
    async def submit(
        cls,
        inference: Inference,
        caller: Caller,
        messages: Sequence[pb.GenerateRequest],
        headers: Mapping[str, str],
    ) -> Self:
        """Each of ``messages`` has its id. Raises what Inference.generate raises: then none of them
        goes on for this one's sake."""
        return await cls._open([inference.generate(caller, each, headers) for each in messages])

    @classmethod
    async def attach(cls, inference: Inference, caller: Caller, names: Sequence[str]) -> Self:
        """To known requests, from their first tokens on. Raises what Inference.attach raises."""
        return await cls._open(
            [inference.attach(caller, pb.AttachRequest(request_id=name)) for name in names]
        )

    @classmethod
    async def _open(cls, openings: Sequence[_Opening]) -> Self:
        opened: list[Opened] = []
        waiting = list(openings)
        try:
            while waiting:
                opened.append(await waiting.pop(0))
                # Only who has begun to read is missed when it goes.
                await anext(opened[-1].pieces)
        except BaseException:
            for opening in waiting:
                opening.close()
            await _close([_pieces(each) for each in opened])
            raise
        return cls(opened[0].trace, [_pieces(each) for each in opened])

    async def aclose(self) -> None:
        await _close(self._pieces)

    async def pieces(self) -> AsyncIterator[Numbered]:
        """All that comes of each, to the end of the last one. Raises what one of them fails
        with."""
        if len(self._pieces) == 1:
            async for piece in self._pieces[0]:
                yield 0, piece
            return
        async with aclosing(_merged(self._pieces)) as merged:
            async for numbered in merged:
                yield numbered


async def _merged(streams: Sequence[_Pieces]) -> AsyncGenerator[Numbered, None]:
    """No stream is ahead of the reader by more than a piece."""
    arriving: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(maxsize=1)

    async def carry(index: int, stream: _Pieces) -> None:
        try:
            async for piece in stream:
                await arriving.put((index, piece))
            await arriving.put(None)
        except Exception as error:
            await arriving.put(error)

    tasks = [asyncio.create_task(carry(index, stream)) for index, stream in enumerate(streams)]
    try:
        for _ in streams:
            while (arrived := await arriving.get()) is not None:
                if isinstance(arrived, Exception):
                    raise arrived
                yield arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pieces(opened: Opened) -> _Pieces:
    return cast(_Pieces, opened.pieces)


async def _close(streams: Sequence[_Pieces]) -> None:
    for stream in streams:
        await stream.aclose()
