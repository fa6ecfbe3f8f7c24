"""Requests of one body, opened together and read as one stream."""

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

#: Index of a request, and a piece of its output.
Numbered = tuple[int, pb.GenerateResponse]
_Opening = Coroutine[Any, Any, Opened]
_Forget = Callable[[Sequence[Opened]], Awaitable[None]]
#: Errors with which the leader rejects requests that a router has accepted.
_REFUSALS = (QueueFull, QueueTimeout, DeadlineUnmeetable)


class Generation:
    """Merged output of the requests of one call.

    A piece is one message of a request's stream. ``poll`` returns the next available piece; the
    requests take turns. ``on_more`` is called when there may be another piece. The owner must close
    the object, even after the last piece.
    """

    def __init__(self, opened: Sequence[Opened], prompt_tokens: int, forget: _Forget) -> None:
        self.trace = opened[0].trace
        #: prompt tokens of all requests
        self.prompt_tokens = prompt_tokens
        self._opened = opened
        self._forget = forget
        self._is_refused = False
        #: called when there may be another piece, in the event loop's thread; must not block
        self.on_more: Callable[[], None] = _ignore
        self._sources = [each.pieces for each in opened]
        #: indices of the requests that may have a piece to read, in the order in which they became
        #: ready
        self._ready = dict.fromkeys(range(len(opened)))
        self._num_unfinished = len(opened)
        for index, source in enumerate(self._sources):
            source.on_more = partial(self._mark_ready, index)

    @classmethod
    async def submit(
        cls,
        inference: Inference,
        caller: Caller,
        messages: Sequence[pb.GenerateRequest],
        headers: Mapping[str, str],
        journals: Sequence[Journal],
    ) -> Self:
        """Submit ``messages``, each of which has an id, and open their output.

        ``journals`` record the times of the requests, in the same order. If one request cannot be
        submitted, its error (see Inference.generate) is raised and all streams of the call are
        closed. Requests that the call created are then erased if the client chose their ids, so
        that the client can send all requests again with the same ids.
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
        """Attach to requests that were submitted earlier with ``messages``.

        Their output is read from the beginning. ``had_output``: the client has output of an earlier
        stream. If one request cannot be opened, its error (see Inference.attach) is raised and all
        streams of the call are closed.
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
    async def read(cls, inference: Inference, caller: Caller, request_id: str) -> Self:
        """Open the output of one existing request, from its first token.

        Raises the errors of Inference.attach.
        """
        opening = inference.attach(caller, pb.AttachRequest(request_id=request_id))
        return await cls._open([opening], partial(_forget, inference, caller))

    @classmethod
    async def _open(cls, openings: Sequence[_Opening], forget: _Forget) -> Self:
        opened: list[Opened] = []
        prompt_tokens = 0
        waiting = list(openings)
        try:
            while waiting:
                opened.append(await waiting.pop(0))
                # The first message is read at once. A relayed stream connects to the request's
                # owner only when it is first read, and without a connection the owner would not
                # notice that this client disconnects.
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
            source.on_more = _ignore
            await source.aclose()
        if self._is_refused:
            await self._forget(self._opened)

    @property
    def is_over(self) -> bool:
        """Return whether all output of all requests was read."""
        return not self._num_unfinished

    def poll(self) -> Numbered | None:
        """Return the index of a request and its next message; None if none is available yet.

        Raises the error of a failed request. If this error is a refusal by the leader, ``aclose``
        erases all requests that the call created and whose ids the client chose.
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
                self._num_unfinished -= 1
            elif piece is not None:
                self._ready[index] = None
            if piece is not None:
                return index, piece
        return None

    async def pieces(self) -> AsyncIterator[Numbered]:
        """Yield request indices and messages until all requests have ended.

        Raises the error of a failed request.
        """
        wakeup = asyncio.Event()
        self.on_more = wakeup.set
        while True:
            wakeup.clear()
            while (numbered := self.poll()) is not None:
                yield numbered
            if self.is_over:
                return
            await wakeup.wait()

    def _mark_ready(self, index: int) -> None:
        if not self._sources[index].is_over:
            self._ready[index] = None
            self.on_more()


async def _forget(inference: Inference, caller: Caller, opened: Sequence[Opened]) -> None:
    for each in opened:
        if each.is_new and is_named(each.request_id):
            # A request that cannot be erased now is removed at the end of its retention.
            with suppress(EverliftError):
                await inference.forget(caller, pb.ForgetRequest(request_id=each.request_id))


def _ignore() -> None:
    pass
