"""The requests that one body asks for, opened together and read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from everlift.errors import DeadlineUnmeetable, EverliftError, QueueFull, QueueTimeout
from everlift.messages import hash_body
from everlift.request_id import is_named
from everlift.v1 import inference_pb2 as pb
from router.api.opened import Opened
from router.api.service import Inference
from router.auth.caller import Caller
from router.requests.timing import Journal

#: A piece, and which of the requests it is of.
Numbered = tuple[int, pb.GenerateResponse]
_Opening = Coroutine[Any, Any, Opened]
_Forget = Callable[[Sequence[Opened]], Awaitable[None]]
#: By the leader, of who was let in here.
_REFUSALS = (QueueFull, QueueTimeout, DeadlineUnmeetable)


class Generation:
    """The streams of one call's requests, read together.

    ``take`` returns the next piece that can be read, of each request in turn; ``on_more`` is called
    when there may be more. A caller that leaves before the end must close it.
    """

    def __init__(self, opened: Sequence[Opened], prompt_tokens: int, forget: _Forget) -> None:
        self.trace = opened[0].trace
        #: of all requests
        self.prompt_tokens = prompt_tokens
        self._opened = opened
        self._forget = forget
        self._is_refused = False
        #: called in the event loop's thread, and must not block
        self.on_more: Callable[[], None] = _nobody
        self._sources = [each.pieces for each in opened]
        #: those of which there may be more, in their order
        self._ready = dict.fromkeys(range(len(opened)))
        self._num_left = len(opened)
        for index, source in enumerate(self._sources):
            source.on_more = partial(self._more, index)

    @classmethod
    async def submit(
        cls,
        inference: Inference,
        caller: Caller,
        messages: Sequence[pb.GenerateRequest],
        headers: Mapping[str, str],
        journals: Sequence[Journal],
    ) -> Self:
        """Submit ``messages``, each with its id and the journal of its earlier part.

        Raises what Inference.generate raises: then none of them goes on for this one's sake, and
        those that came with this call are forgotten, so that all can come again under their ids.
        """
        openings = [
            inference.generate(caller, message, headers, journal)
            for message, journal in zip(messages, journals, strict=True)
        ]
        return await cls._open(openings, partial(_forget, inference, caller))

    @classmethod
    async def attach(
        cls,
        inference: Inference,
        caller: Caller,
        messages: Sequence[pb.GenerateRequest],
        *,
        had_output: bool,
    ) -> Self:
        """Read the requests that ``messages`` have submitted from their first tokens on.

        ``had_output``: the client has output of an earlier stream. Raises what Inference.attach
        raises.
        """
        openings = [
            inference.attach(
                caller,
                pb.AttachRequest(request_id=message.request_id),
                body_hash=hash_body(message),
                had_output=had_output,
            )
            for message in messages
        ]
        return await cls._open(openings, partial(_forget, inference, caller))

    @classmethod
    async def _open(cls, openings: Sequence[_Opening], forget: _Forget) -> Self:
        opened: list[Opened] = []
        prompt_tokens = 0
        waiting = list(openings)
        try:
            while waiting:
                opened.append(await waiting.pop(0))
                # Only who has begun to read is missed when it goes.
                head = await anext(opened[-1].pieces)
                prompt_tokens += head.prompt_tokens
        except BaseException as error:
            for opening in waiting:
                opening.close()
            for each in opened:
                await each.pieces.aclose()
            if isinstance(error, EverliftError):
                await forget(opened)
            raise
        return cls(opened, prompt_tokens, forget)

    async def aclose(self) -> None:
        for source in self._sources:
            source.on_more = _nobody
            await source.aclose()
        if self._is_refused:
            await self._forget(self._opened)

    @property
    def is_over(self) -> bool:
        """Return whether the last pieces of all requests were taken."""
        return not self._num_left

    def poll(self) -> Numbered | None:
        """Return what can be read now, or nothing.

        Raises the error of a request; a rejection means that none was accepted.
        """
        while self._ready:
            index = next(iter(self._ready))
            del self._ready[index]
            source = self._sources[index]
            try:
                piece = source.poll()
            except _REFUSALS:
                self._is_refused = True
                raise
            if source.is_over:
                self._num_left -= 1
            elif piece is not None:
                self._ready[index] = None
            if piece is not None:
                return index, piece
        return None

    async def pieces(self) -> AsyncIterator[Numbered]:
        """Yield all pieces of each request up to the last end. Raises as ``take`` does."""
        came = asyncio.Event()
        self.on_more = came.set
        while True:
            came.clear()
            while (numbered := self.poll()) is not None:
                yield numbered
            if self.is_over:
                return
            await came.wait()

    def _more(self, index: int) -> None:
        if not self._sources[index].is_over:
            self._ready[index] = None
            self.on_more()


async def _forget(inference: Inference, caller: Caller, opened: Sequence[Opened]) -> None:
    for each in opened:
        if each.is_new and is_named(each.request_id):
            # What cannot be forgotten now goes when its retention is over.
            with suppress(EverliftError):
                await inference.forget(caller, pb.ForgetRequest(request_id=each.request_id))


def _nobody() -> None:
    pass
